//! Guest RAM: where its pages come from.

use std::fs::File;
use std::io;
use std::sync::Arc;

use devices::memory::{GuestAddress, Memory, shareable_file};
use vm_memory::bitmap::AtomicBitmap;
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{FileOffset, GuestMemoryBackend, GuestMemoryRegion, GuestRegionMmap};

use crate::layout;

/// Why there is no guest RAM.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The host does not give it.
    #[error("the host does not map {bytes} bytes of guest memory; use a smaller --memory")]
    Map {
        /// Bytes of the region.
        bytes: u64,
        /// The reason.
        #[source]
        source: vm_memory::mmap::MmapRegionError,
    },
    /// The host does not give it as a file.
    #[error("the host makes no file in memory of {bytes} bytes: {source}; use a smaller --memory")]
    File {
        /// Bytes of the region.
        bytes: u64,
        /// The reason.
        source: io::Error,
    },
    /// The regions do not fit together: a mistake in the layout.
    #[error("guest memory regions overlap")]
    Regions(#[source] vm_memory::GuestRegionCollectionError),
}

/// Whether another process can map guest RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// Anonymous memory, which is nobody else's.
    Private,
    /// A file in memory, for backends that work on it themselves.
    Shared,
}

/// Maps fresh RAM that is nobody else's.
pub fn fresh(bytes: u64) -> Result<Memory, MemoryError> {
    mapped(bytes, Sharing::Private)
}

/// Maps fresh RAM, without reserving swap, so that a page costs nothing until the guest touches it.
pub fn mapped(bytes: u64, sharing: Sharing) -> Result<Memory, MemoryError> {
    map(bytes, &Source::Fresh(sharing))
}

/// Maps RAM that has the content of `image`, whose length is `bytes`. A private mapping: nothing is
/// copied before it is written to, and the file stays as it is. Nobody may change the file as long
/// as the mapping lives, and no other process can map this RAM.
pub fn from_image(bytes: u64, image: File) -> Result<Memory, MemoryError> {
    map(bytes, &Source::Image(Arc::new(image)))
}

enum Source {
    Fresh(Sharing),
    Image(Arc<File>),
}

fn map(bytes: u64, source: &Source) -> Result<Memory, MemoryError> {
    let mut regions = Vec::new();
    let mut offset = 0;
    for (start, len) in layout::ram_regions(bytes) {
        let failed = |source| MemoryError::Map { bytes: len, source };
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        let page = std::num::NonZeroUsize::new(4096).unwrap_or(std::num::NonZeroUsize::MIN);
        let mapping = MmapRegionBuilder::new_with_bitmap(len, AtomicBitmap::new(len, page))
            .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE);
        let mapping = match source {
            Source::Fresh(Sharing::Private) => mapping
                .with_mmap_flags(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE),
            Source::Fresh(Sharing::Shared) => {
                let file = shareable_file(len as u64)
                    .map_err(|source| MemoryError::File { bytes: len as u64, source })?;
                mapping
                    .with_file_offset(FileOffset::new(file, 0))
                    .with_mmap_flags(libc::MAP_SHARED | libc::MAP_NORESERVE)
            }
            Source::Image(image) => mapping
                .with_file_offset(FileOffset::from_arc(image.clone(), offset))
                .with_mmap_flags(libc::MAP_PRIVATE | libc::MAP_NORESERVE),
        };
        offset += len as u64;
        let mapping = mapping.build().map_err(failed)?;
        let region = GuestRegionMmap::new(mapping, GuestAddress(start)).ok_or_else(|| {
            failed(vm_memory::mmap::MmapRegionError::Mmap(io::ErrorKind::InvalidInput.into()))
        })?;
        regions.push(region);
    }
    Memory::from_regions(regions).map_err(MemoryError::Regions)
}

/// Total RAM in bytes.
pub fn size(memory: &Memory) -> u64 {
    memory.iter().map(GuestMemoryRegion::len).sum()
}

#[cfg(test)]
mod tests {
    use devices::memory::{Bytes, is_shared};

    use super::*;

    #[test]
    fn ram_beyond_the_hole_is_mapped_above_four_gigabytes() {
        let memory = fresh(4 << 30).unwrap();
        assert!(!is_shared(&memory));
        assert_eq!(size(&memory), 4 << 30);
        assert!(memory.address_in_range(GuestAddress(0xbfff_ffff)));
        assert!(!memory.address_in_range(GuestAddress(0xc000_0000)));
        assert!(memory.address_in_range(GuestAddress(0x1_3fff_ffff)));
    }

    #[test]
    fn shared_ram_is_the_same_but_for_the_file_behind_it() {
        let memory = mapped(4 << 30, Sharing::Shared).unwrap();
        assert_eq!(size(&memory), 4 << 30);
        assert!(is_shared(&memory));
        memory.write_slice(b"seen by all", GuestAddress(0x1_0000_0000)).unwrap();
        let region = memory.find_region(GuestAddress(0x1_0000_0000)).unwrap();
        let (mut seen, file) = ([0; 11], region.file_offset().unwrap());
        std::os::unix::fs::FileExt::read_exact_at(file.file(), &mut seen, file.start()).unwrap();
        assert_eq!(&seen, b"seen by all");
    }
}
