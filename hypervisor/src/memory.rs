//! Guest RAM: where its pages come from.

use std::io;

use devices::memory::{GuestAddress, Memory};
use vm_memory::bitmap::AtomicBitmap;
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion, GuestRegionMmap};

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
    /// The regions do not fit together: a mistake in the layout.
    #[error("guest memory regions overlap")]
    Regions(#[source] vm_memory::GuestRegionCollectionError),
}

/// Maps fresh RAM: private, anonymous, without reserving swap, so that a page costs nothing until
/// the guest touches it.
pub fn fresh(bytes: u64) -> Result<Memory, MemoryError> {
    let mut regions = Vec::new();
    for (start, len) in layout::ram_regions(bytes) {
        let failed = |source| MemoryError::Map { bytes: len, source };
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        let page = std::num::NonZeroUsize::new(4096).unwrap_or(std::num::NonZeroUsize::MIN);
        let mapping = MmapRegionBuilder::new_with_bitmap(len, AtomicBitmap::new(len, page))
            .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
            .with_mmap_flags(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE)
            .build()
            .map_err(failed)?;
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
    use super::*;

    #[test]
    fn ram_beyond_the_hole_is_mapped_above_four_gigabytes() {
        let memory = fresh(4 << 30).unwrap();
        assert_eq!(size(&memory), 4 << 30);
        assert!(memory.address_in_range(GuestAddress(0xbfff_ffff)));
        assert!(!memory.address_in_range(GuestAddress(0xc000_0000)));
        assert!(memory.address_in_range(GuestAddress(0x1_3fff_ffff)));
    }
}
