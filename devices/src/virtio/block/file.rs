//! The file or block device behind a disk: opened, checked and locked, whatever engine then works
//! on it.

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::disk::{Extent, Geometry, SECTOR_SIZE};

// --- errors ------------------------------------------------------------------------------------

/// Why a file cannot be a disk. Each says what to do about it.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// There is no such file.
    #[error("disk image {0} does not exist; correct the path or create it with truncate(1)")]
    NotFound(PathBuf),
    /// A directory.
    #[error("disk image {0} is a directory; name a raw image file or a block device")]
    Directory(PathBuf),
    /// A pipe, socket or character device.
    #[error("disk image {0} is neither a file nor a block device; name one of these")]
    NotStorage(PathBuf),
    /// Permission denied.
    #[error("disk image {path} may not be opened for {access}; change its mode or its owner")]
    Denied {
        /// The file.
        path: PathBuf,
        /// What was tried.
        access: &'static str,
    },
    /// A writable disk was asked for, on something that can only be read.
    #[error("disk image {0} can only be read; attach it read-only or copy it elsewhere")]
    ReadOnly(PathBuf),
    /// It cannot be opened for another reason.
    #[error("disk image {path} cannot be opened; check that the host can read it")]
    Open {
        /// The file.
        path: PathBuf,
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// Not even one sector.
    #[error(
        "disk image {path} has {size} bytes, less than one sector of 512; enlarge it with \
         truncate(1)"
    )]
    TooSmall {
        /// The file.
        path: PathBuf,
        /// Its size in bytes.
        size: u64,
    },
    /// The last sector is cut. Not rounded down: the guest would silently lose the rest.
    #[error(
        "disk image {path} has {size} bytes, not a multiple of 512; pad it with \
         `truncate --size=%512`"
    )]
    Uneven {
        /// The file.
        path: PathBuf,
        /// Its size in bytes.
        size: u64,
    },
    /// Somebody else has it open in a way that excludes us.
    #[error(
        "disk image {0} is in use by another virtual machine; stop that one, give each its own \
         copy, or attach it read-only everywhere"
    )]
    InUse(PathBuf),
    /// The host itself uses the block device.
    #[error(
        "block device {0} is in use on this host: it is mounted, part of another device, or a \
         disk of another virtual machine; end that use or attach it read-only"
    )]
    Busy(PathBuf),
    /// The file system has no locks.
    #[error("disk image {path} cannot be locked; move it to a file system with file locks")]
    Lock {
        /// The file.
        path: PathBuf,
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// io_uring was asked for by name.
    #[error(
        "disk image {path} cannot use io_uring: {reason}; allow it on this host (sysctl \
         kernel.io_uring_disabled=0, seccomp profile) or take engine=auto or engine=sync"
    )]
    NoRing {
        /// The file.
        path: PathBuf,
        /// Why the host does not give us a ring.
        reason: String,
    },
    /// The process is out of descriptors.
    #[error("no event for disk image {path}; raise the limit of open files")]
    Event {
        /// The file.
        path: PathBuf,
        /// The reason.
        #[source]
        source: io::Error,
    },
}

// --- opening -----------------------------------------------------------------------------------

/// A raw image file or a block device, open and locked.
#[derive(Debug)]
pub struct DiskFile {
    file: File,
    geometry: Geometry,
    block_device: bool,
}

impl DiskFile {
    /// Opens `path`. A writable disk is locked against every other user, a read-only one against
    /// writers; the lock ends with the disk or the process. A writable block device is also
    /// claimed from the host, so that it cannot be mounted meanwhile.
    pub fn open(path: &Path, read_only: bool) -> Result<Self, DiskError> {
        let mut file = open(path, read_only)?;
        let block_device = check_kind(&file, path)?;
        if block_device && !read_only {
            // Some devices can be opened for writing all the same.
            if ask(&file, BLKROGET).unwrap_or(0) != 0 {
                return Err(DiskError::ReadOnly(path.to_owned()));
            }
            file = claim(&file, path)?;
        }
        let geometry = geometry(&mut file, path, block_device, read_only)?;
        lock(&file, path, read_only)?;
        block(&file).map_err(|source| DiskError::Open { path: path.to_owned(), source })?;
        Ok(Self { file, geometry, block_device })
    }

    /// What it looks like.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// True for a block device of the host, false for a file.
    pub(super) fn is_block_device(&self) -> bool {
        self.block_device
    }

    /// True if its I/O goes past the page cache.
    pub(super) fn is_direct(&self) -> bool {
        // SAFETY: the descriptor is open; the call takes no pointer.
        let flags = unsafe { libc::fcntl(self.file.as_raw_fd(), libc::F_GETFL) };
        flags >= 0 && flags & libc::O_DIRECT != 0
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Tells a block device that `extent` is no longer needed.
    pub(super) fn discard(&self, extent: &Extent) -> io::Result<()> {
        let range = [extent.offset, extent.len];
        // SAFETY: the descriptor is open, and BLKDISCARD reads two words, start and length in
        // bytes, through the pointer.
        let result = unsafe { libc::ioctl(self.file.as_raw_fd(), BLKDISCARD, range.as_ptr()) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

impl Drop for DiskFile {
    /// Unlocks it: the kernel may keep a file open for a moment after the last request of a ring,
    /// and the next one to open it shall not find it in use.
    fn drop(&mut self) {
        // Fails only for descriptors that are not open.
        let _ = set_lock(&self.file, libc::F_UNLCK);
    }
}

impl AsFd for DiskFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

// Requests of block devices that the libc crate lacks (linux/fs.h).
const BLKROGET: libc::Ioctl = 0x125e;
const BLKDISCARD: libc::Ioctl = 0x1277;
const BLKPBSZGET: libc::Ioctl = 0x127b;

fn open(path: &Path, read_only: bool) -> Result<File, DiskError> {
    let mut options = OpenOptions::new();
    // Non-blocking keeps a named pipe from holding us up. It is taken back before the first I/O.
    options.read(true).write(!read_only).custom_flags(libc::O_NONBLOCK);
    options.open(path).map_err(|source| match source.raw_os_error() {
        Some(libc::EACCES | libc::EPERM) if !read_only && is_read_only_device(path) => {
            DiskError::ReadOnly(path.to_owned())
        }
        _ => open_error(path, read_only, source),
    })
}

/// True for a block device that can be read, and that nobody can write.
fn is_read_only_device(path: &Path) -> bool {
    let Ok(file) = open(path, true) else { return false };
    check_kind(&file, path).is_ok_and(|device| device) && ask(&file, BLKROGET).unwrap_or(0) != 0
}

/// How often a block device that is in use is tried, a millisecond apart: the kernel may keep it
/// for a moment after the last request of a ring.
const CLAIMS: u32 = 20;

/// Opens a block device again, so that the host's file systems cannot have it at the same time.
fn claim(file: &File, path: &Path) -> Result<File, DiskError> {
    let same = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(libc::O_EXCL | libc::O_NONBLOCK);
    for _ in 0..CLAIMS {
        match options.open(&same) {
            Ok(file) => return Ok(file),
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(error) => return Err(open_error(path, false, error)),
        }
    }
    Err(DiskError::Busy(path.to_owned()))
}

/// Lets calls wait for the storage: io_uring would otherwise fail what it cannot do at once.
fn block(file: &File) -> io::Result<()> {
    // SAFETY: the descriptor is open, and F_SETFL takes flags. Those that F_SETFL can change are
    // not set on a file that was just opened, except for the one that is taken away.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFL, 0) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn open_error(path: &Path, read_only: bool, source: io::Error) -> DiskError {
    let path = path.to_owned();
    match source.raw_os_error() {
        Some(libc::ENOENT | libc::ENOTDIR) => DiskError::NotFound(path),
        Some(libc::EISDIR) => DiskError::Directory(path),
        Some(libc::EACCES | libc::EPERM) if read_only => {
            DiskError::Denied { path, access: "reading" }
        }
        Some(libc::EACCES | libc::EPERM) => DiskError::Denied { path, access: "writing" },
        Some(libc::EROFS) => DiskError::ReadOnly(path),
        Some(libc::ENXIO) => DiskError::NotStorage(path),
        _ => DiskError::Open { path, source },
    }
}

/// Takes the file for ourselves, or with other readers if `shared`. The lock belongs to the open
/// file and ends with it (fcntl(2), open file description locks).
fn lock(file: &File, path: &Path, shared: bool) -> Result<(), DiskError> {
    let path = path.to_owned();
    match set_lock(file, if shared { libc::F_RDLCK } else { libc::F_WRLCK }) {
        Ok(()) => Ok(()),
        Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => {
            Err(DiskError::InUse(path))
        }
        Err(source) => Err(DiskError::Lock { path, source }),
    }
}

fn set_lock(file: &File, kind: libc::c_int) -> io::Result<()> {
    let whole = libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    // SAFETY: the descriptor is open, and the kernel only reads the flock, which outlives the call.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &whole) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Asks a block device for a number.
fn ask(device: &File, request: libc::Ioctl) -> Option<u32> {
    let mut answer: libc::c_int = 0;
    // SAFETY: the descriptor is open, and each of the requests above that is asked writes one int
    // through the pointer.
    let result = unsafe { libc::ioctl(device.as_raw_fd(), request, &mut answer) };
    u32::try_from(answer).ok().filter(|_| result == 0)
}

/// A size that a block device tells.
fn block_size(device: &File, request: libc::Ioctl) -> Option<u32> {
    ask(device, request).filter(|size| size.is_power_of_two() && *size >= 512)
}

/// Bytes of a page: what file systems and most storage work in.
const PAGE: u32 = 4096;

/// True for a block device, false for a file.
fn check_kind(file: &File, path: &Path) -> Result<bool, DiskError> {
    let failed = |source| DiskError::Open { path: path.to_owned(), source };
    let kind = file.metadata().map_err(failed)?.file_type();
    if kind.is_dir() {
        return Err(DiskError::Directory(path.to_owned()));
    }
    if !kind.is_file() && !kind.is_block_device() {
        return Err(DiskError::NotStorage(path.to_owned()));
    }
    Ok(kind.is_block_device())
}

fn geometry(
    file: &mut File,
    path: &Path,
    block_device: bool,
    read_only: bool,
) -> Result<Geometry, DiskError> {
    let failed = |source| DiskError::Open { path: path.to_owned(), source };
    // The end is also that of a block device, whose metadata has no size.
    let size = file.seek(SeekFrom::End(0)).map_err(failed)?;
    if size < SECTOR_SIZE {
        return Err(DiskError::TooSmall { path: path.to_owned(), size });
    }
    if !size.is_multiple_of(SECTOR_SIZE) {
        return Err(DiskError::Uneven { path: path.to_owned(), size });
    }
    let (logical_block, best) = match block_device {
        true => (block_size(file, libc::BLKSSZGET), block_size(file, BLKPBSZGET)),
        false => (None, u32::try_from(file.metadata().map_err(failed)?.blksize()).ok()),
    };
    let logical_block = logical_block.unwrap_or(512);
    let physical_block = match best {
        Some(size) if size.is_power_of_two() => size.clamp(PAGE, 1 << 20).max(logical_block),
        _ => PAGE.max(logical_block),
    };
    Ok(Geometry { sectors: size / SECTOR_SIZE, logical_block, physical_block, read_only })
}

#[cfg(test)]
mod tests;
