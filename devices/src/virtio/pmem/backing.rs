//! The file behind persistent memory, mapped.
//!
//! Linux takes persistent memory in sections of 2 MiB only, so the mapping is rounded up to that,
//! and what is beyond the end of the file reads as zeroes. It also starts at a multiple of 2 MiB of
//! this process, so that host and guest can use huge pages.
//!
//! No code of this process touches the mapping. That matters when somebody cuts the file
//! off while it is mapped: an access beyond its new end would be a SIGBUS here, but the guest's own
//! makes KVM_RUN fail in a way that the VMM reports. A shared lock keeps away those who ask for
//! one before they write, such as writable disks of this VMM.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::Arc;

/// Bytes that start and length of persistent memory are multiples of.
pub const ALIGNMENT: u64 = 2 << 20;

/// Why there is no persistent memory.
#[derive(Debug, thiserror::Error)]
pub enum PmemError {
    /// There is no such file.
    #[error("persistent memory file {0} does not exist; create it, or correct the path")]
    NotFound(PathBuf),
    /// Permission denied.
    #[error("persistent memory file {0} may not be read; change its mode or its owner")]
    Denied(PathBuf),
    /// Not a file with content of its own.
    #[error("{0} is neither a regular file nor a block device; give one of these")]
    NotStorage(PathBuf),
    /// It cannot be opened for another reason.
    #[error("persistent memory file {path} cannot be opened; check that the host can read it")]
    Open {
        /// The file.
        path: PathBuf,
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// There is nothing in it.
    #[error(
        "persistent memory file {0} is empty; write an image to it, or enlarge it with truncate(1)"
    )]
    Empty(PathBuf),
    /// More than fits into an address space.
    #[error(
        "persistent memory file {path} has {size} bytes, more than can be mapped; use a disk instead"
    )]
    TooBig {
        /// The file.
        path: PathBuf,
        /// Its size in bytes.
        size: u64,
    },
    /// Somebody writes to it.
    #[error(
        "persistent memory file {0} is in use by another virtual machine that writes to it; stop \
         that one, or give it its own copy"
    )]
    InUse(PathBuf),
    /// The file system has no locks.
    #[error(
        "persistent memory file {path} cannot be locked; move it to a file system with file locks"
    )]
    Lock {
        /// The file.
        path: PathBuf,
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// The host does not map it.
    #[error(
        "persistent memory file {path}, {len} bytes, cannot be mapped; raise the limit of address space, or use a disk instead"
    )]
    Map {
        /// The file.
        path: PathBuf,
        /// Bytes.
        len: u64,
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// A place in the guest where it cannot be.
    #[error(
        "persistent memory of {len} bytes cannot start at {start:#x}; use a multiple of 2 MiB with room above it"
    )]
    Address {
        /// Guest physical address.
        start: u64,
        /// Bytes.
        len: u64,
    },
}

/// A mapped file. Clones share the mapping, which ends with the last of them.
#[derive(Clone, Debug)]
pub struct PmemBacking(Arc<Mapped>);

#[derive(Debug)]
struct Mapped {
    mapping: Mapping,
    file_len: u64,
    read_only: bool,
    /// Holds the lock.
    _file: File,
}

impl PmemBacking {
    /// Maps `path`: `read_only` as the host's page cache, shared with all who map it; otherwise as
    /// a copy whose changes are this mapping's own and never reach the file. Either way the file is
    /// only read, and locked against writers that respect locks.
    pub fn open(path: &Path, read_only: bool) -> Result<Self, PmemError> {
        let mut file = open(path)?;
        let file_len = size(&mut file, path)?;
        lock(&file, path)?;
        let len = file_len.checked_next_multiple_of(ALIGNMENT);
        let sizes =
            len.and_then(|len| Some((usize::try_from(len).ok()?, usize::try_from(file_len).ok()?)));
        let too_big = || PmemError::TooBig { path: path.to_owned(), size: file_len };
        let (len, in_file) = sizes.ok_or_else(too_big)?;
        let mapping = Mapping::new(&file, in_file, len, read_only)
            .map_err(|source| PmemError::Map { path: path.to_owned(), len: len as u64, source })?;
        Ok(Self(Arc::new(Mapped { mapping, file_len, read_only, _file: file })))
    }

    /// Bytes of the mapping: a multiple of [`ALIGNMENT`], not 0. For the memory slot.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> u64 {
        self.0.mapping.len as u64
    }

    /// Address of the mapping in this process, a multiple of [`ALIGNMENT`]. For the memory slot.
    /// It may only be written to if it is not read-only, and reading it is a SIGBUS if the file was
    /// cut off.
    pub fn host_address(&self) -> NonNull<u8> {
        self.0.mapping.start
    }

    /// The mapping is write-protected: the memory slot has to be, too (`KVM_MEM_READONLY`).
    pub fn read_only(&self) -> bool {
        self.0.read_only
    }

    pub(super) fn mapping(&self) -> &Mapping {
        &self.0.mapping
    }

    /// Bytes of the file. Those of the mapping that are beyond read as zeroes.
    pub fn file_len(&self) -> u64 {
        self.0.file_len
    }
}

// --- file --------------------------------------------------------------------------------------

fn open(path: &Path) -> Result<File, PmemError> {
    // Non-blocking has no effect on storage and keeps a named pipe from holding us up.
    let opened = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path);
    opened.map_err(|source| {
        let path = path.to_owned();
        match source.raw_os_error() {
            Some(libc::ENOENT | libc::ENOTDIR) => PmemError::NotFound(path),
            Some(libc::EACCES | libc::EPERM) => PmemError::Denied(path),
            Some(libc::ENXIO) => PmemError::NotStorage(path),
            _ => PmemError::Open { path, source },
        }
    })
}

fn size(file: &mut File, path: &Path) -> Result<u64, PmemError> {
    let failed = |source| PmemError::Open { path: path.to_owned(), source };
    let kind = file.metadata().map_err(failed)?.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        return Err(PmemError::NotStorage(path.to_owned()));
    }
    // The end is also that of a block device, whose metadata has no size.
    match file.seek(SeekFrom::End(0)).map_err(failed)? {
        0 => Err(PmemError::Empty(path.to_owned())),
        size => Ok(size),
    }
}

/// Takes the file together with other readers. The lock belongs to the open file and ends with it
/// (fcntl(2), open file description locks).
fn lock(file: &File, path: &Path) -> Result<(), PmemError> {
    let whole = libc::flock {
        l_type: libc::F_RDLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    // SAFETY: the descriptor is open, and the kernel only reads the flock, which outlives the call.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &whole) };
    if result == 0 {
        return Ok(());
    }
    let source = io::Error::last_os_error();
    let path = path.to_owned();
    match source.raw_os_error() {
        Some(libc::EAGAIN | libc::EACCES) => Err(PmemError::InUse(path)),
        _ => Err(PmemError::Lock { path, source }),
    }
}

// --- mapping -----------------------------------------------------------------------------------

/// Address space with the file at its start. Unmapped when dropped.
pub(super) struct Mapping {
    pub(super) start: NonNull<u8>,
    pub(super) len: usize,
}

// SAFETY: the mapping is owned, and no method accesses what is mapped.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl fmt::Debug for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mapping({} bytes)", self.len)
    }
}

impl Mapping {
    /// `len` bytes, a multiple of [`ALIGNMENT`], of which the first `in_file` are those of `file`.
    fn new(file: &File, in_file: usize, len: usize, read_only: bool) -> io::Result<Self> {
        let protection = match read_only {
            true => libc::PROT_READ,
            false => libc::PROT_READ | libc::PROT_WRITE,
        };
        let sharing = if read_only { libc::MAP_SHARED } else { libc::MAP_PRIVATE };
        let space = Self::reserve(len, protection)?;
        let flags = sharing | libc::MAP_FIXED | libc::MAP_NORESERVE;
        // SAFETY: in_file is at most len, so all that is replaced, up to the end of the page, is
        // address space that was just reserved and belongs to nobody else.
        let mapped = unsafe {
            libc::mmap(space.start.as_ptr().cast(), in_file, protection, flags, file.as_raw_fd(), 0)
        };
        // On failure the reservation is dropped, and whatever is mapped in it.
        if mapped == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(space) }
    }

    /// Zeroes at a multiple of [`ALIGNMENT`].
    fn reserve(len: usize, protection: i32) -> io::Result<Self> {
        let alignment = ALIGNMENT as usize;
        let room = len.checked_add(alignment).ok_or(io::ErrorKind::OutOfMemory)?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: the kernel chooses an address where nothing is.
        let mapped = unsafe { libc::mmap(std::ptr::null_mut(), room, protection, flags, -1, 0) };
        if mapped == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let first: *mut u8 = mapped.cast();
        let before = first.align_offset(alignment).min(alignment);
        // SAFETY: before is at most the alignment, and room is len more than that.
        let start = unsafe { first.add(before) };
        for (from, surplus) in [(first, before), (start.wrapping_add(len), alignment - before)] {
            if surplus > 0 {
                // SAFETY: these bytes are of the new mapping and outside what is kept of it. Both
                // ends are whole pages, as the alignment and len are.
                unsafe { libc::munmap(from.cast(), surplus) };
            }
        }
        let start = NonNull::new(start).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, len })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own, and whoever had its address was told that it
        // ends here.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
pub(super) mod tests;
