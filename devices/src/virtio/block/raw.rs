//! A raw file or a host block device as a disk, with synchronous I/O.
//!
//! The bytes of the file are the bytes of the disk. What the guest writes into it is never looked
//! at: a header that looks like some image format stays data. Reads and writes go straight between
//! guest memory and the page cache, in steps, so that a guest with huge requests gets its turn and
//! no more; flush and discard take as long as the host's storage takes, so put a disk on slow
//! storage on an executor of its own.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use vm_memory::bitmap::Bitmap;
use vmm_sys_util::fallocate::{FallocateMode, fallocate};

use super::disk::{Buffers, Completion, Disk, DiskOp, Extent, Geometry, SECTOR_SIZE, Tag};
use crate::event::Event;
use crate::memory::MemorySlice;

// --- opening -----------------------------------------------------------------------------------

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
    /// The file system has no locks.
    #[error("disk image {path} cannot be locked; move it to a file system with file locks")]
    Lock {
        /// The file.
        path: PathBuf,
        /// The reason.
        #[source]
        source: io::Error,
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

fn open(path: &Path, read_only: bool) -> Result<File, DiskError> {
    let mut options = OpenOptions::new();
    // Non-blocking has no effect on storage and keeps a named pipe from holding us up.
    options.read(true).write(!read_only).custom_flags(libc::O_NONBLOCK);
    options.open(path).map_err(|source| open_error(path, read_only, source))
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
    let kind = if shared { libc::F_RDLCK } else { libc::F_WRLCK };
    let whole = libc::flock {
        l_type: kind as libc::c_short,
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
        Some(libc::EAGAIN | libc::EACCES) => Err(DiskError::InUse(path)),
        _ => Err(DiskError::Lock { path, source }),
    }
}

/// Bytes of a block device's logical block.
fn logical_block(device: &File) -> u32 {
    let mut size: libc::c_int = 0;
    // SAFETY: the descriptor is open, and BLKSSZGET writes one int through the pointer.
    let result = unsafe { libc::ioctl(device.as_raw_fd(), libc::BLKSSZGET, &mut size) };
    match u32::try_from(size) {
        Ok(size) if result == 0 && size.is_power_of_two() && size >= 512 => size,
        _ => 512,
    }
}

/// Bytes of a page: what file systems and most storage work in.
const PAGE: u32 = 4096;

fn geometry(file: &mut File, path: &Path, read_only: bool) -> Result<Geometry, DiskError> {
    let failed = |source| DiskError::Open { path: path.to_owned(), source };
    let metadata = file.metadata().map_err(failed)?;
    let kind = metadata.file_type();
    if kind.is_dir() {
        return Err(DiskError::Directory(path.to_owned()));
    }
    if !kind.is_file() && !kind.is_block_device() {
        return Err(DiskError::NotStorage(path.to_owned()));
    }
    // The end is also that of a block device, whose metadata has no size.
    let size = file.seek(SeekFrom::End(0)).map_err(failed)?;
    if size < SECTOR_SIZE {
        return Err(DiskError::TooSmall { path: path.to_owned(), size });
    }
    if !size.is_multiple_of(SECTOR_SIZE) {
        return Err(DiskError::Uneven { path: path.to_owned(), size });
    }
    let logical_block = if kind.is_block_device() { logical_block(file) } else { 512 };
    let physical_block = match u32::try_from(metadata.blksize()) {
        Ok(size) if size.is_power_of_two() => size.clamp(PAGE, 1 << 20).max(logical_block),
        _ => PAGE.max(logical_block),
    };
    Ok(Geometry { sectors: size / SECTOR_SIZE, logical_block, physical_block, read_only })
}

// --- disk --------------------------------------------------------------------------------------

/// Bytes moved by one system call.
const STEP: usize = 1 << 20;

/// Bytes moved before the caller gets back to its loop.
const TURN: usize = 4 << 20;

/// Slices of one system call (`IOV_MAX` of Linux).
const MAX_SLICES: usize = 1024;

static ZEROES: [u8; 64 << 10] = [0; 64 << 10];

struct Job {
    tag: Tag,
    op: DiskOp,
    moved: u64,
    /// Extent that is being worked on.
    extent: usize,
    /// The file system cannot zero a range; we write the zeroes.
    by_hand: bool,
}

/// A raw image file or a block device.
pub struct RawFile {
    file: File,
    geometry: Geometry,
    jobs: VecDeque<Job>,
    /// Bytes moved in this turn.
    spent: usize,
    more: Event,
    waiting: bool,
}

impl RawFile {
    /// Opens `path`. A writable disk is locked against every other user, a read-only one against
    /// writers; the lock ends with the disk or the process.
    pub fn open(path: &Path, read_only: bool) -> Result<Self, DiskError> {
        let mut file = open(path, read_only)?;
        let geometry = geometry(&mut file, path, read_only)?;
        lock(&file, path, read_only)?;
        let more =
            Event::new().map_err(|source| DiskError::Event { path: path.to_owned(), source })?;
        Ok(Self { file, geometry, jobs: VecDeque::new(), spent: 0, more, waiting: false })
    }

    /// Works on `job`; true when it is done.
    fn step(&mut self, job: &mut Job) -> io::Result<bool> {
        let read_only = self.geometry.read_only;
        match &job.op {
            DiskOp::Read { offset, buffers } => {
                let moved = transfer(&self.file, buffers, *offset, job.moved, Direction::Read)?;
                self.advance(job, moved)
            }
            DiskOp::Flush => {
                // Nothing of ours can be dirty on a disk that we do not write.
                if !read_only {
                    self.file.sync_data()?;
                }
                Ok(true)
            }
            _ if read_only => Err(io::ErrorKind::ReadOnlyFilesystem.into()),
            DiskOp::Write { offset, buffers, durable } => {
                let durable = *durable;
                let moved = transfer(&self.file, buffers, *offset, job.moved, Direction::Write)?;
                let done = self.advance(job, moved)?;
                self.settle(done, durable)
            }
            DiskOp::Discard { extents, durable } => {
                if let Some(extent) = extents.get(job.extent) {
                    self.allocate(FallocateMode::PunchHole, extent)?;
                }
                self.spent += STEP;
                job.extent += 1;
                let done = job.extent >= extents.len();
                self.settle(done, *durable)
            }
            DiskOp::WriteZeroes { extents, unmap, durable } => {
                let (extent, unmap, durable) = (extents.get(job.extent).copied(), *unmap, *durable);
                let last = job.extent + 1 >= extents.len();
                let zeroed = match extent {
                    Some(extent) => self.zero(&extent, unmap, job)?,
                    None => true,
                };
                if zeroed {
                    job.extent += 1;
                    job.moved = 0;
                }
                self.settle(zeroed && last, durable)
            }
        }
    }

    fn advance(&mut self, job: &mut Job, moved: usize) -> io::Result<bool> {
        job.moved += moved as u64;
        self.spent += moved;
        let (DiskOp::Read { buffers, .. } | DiskOp::Write { buffers, .. }) = &job.op else {
            return Ok(true);
        };
        if job.moved >= buffers.len() {
            return Ok(true);
        }
        // The file has been cut since it was opened.
        if moved == 0 { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(false) }
    }

    fn settle(&self, done: bool, durable: bool) -> io::Result<bool> {
        if done && durable {
            self.file.sync_data()?;
        }
        Ok(done)
    }

    fn allocate(&self, mode: FallocateMode, extent: &Extent) -> io::Result<()> {
        fallocate(&self.file, mode, true, extent.offset, extent.len)
            .map_err(|errno| io::Error::from_raw_os_error(errno.errno()))
    }

    /// Zeroes `extent`, or a part of it; true when all is zero. The bytes done so far are in
    /// `job.moved`.
    fn zero(&mut self, extent: &Extent, unmap: bool, job: &mut Job) -> io::Result<bool> {
        if !job.by_hand {
            let mode = if unmap { FallocateMode::PunchHole } else { FallocateMode::ZeroRange };
            match self.allocate(mode, extent) {
                Ok(()) => return Ok(true),
                Err(error) if unsupported(&error) => job.by_hand = true,
                Err(error) => return Err(error),
            }
        }
        let left = extent.len.saturating_sub(job.moved);
        let len = usize::try_from(left).unwrap_or(usize::MAX).min(ZEROES.len());
        let zeroes = ZEROES.get(..len).unwrap_or_default();
        let offset = extent.offset.saturating_add(job.moved);
        let written = std::os::unix::fs::FileExt::write_at(&self.file, zeroes, offset)?;
        job.moved += written as u64;
        self.spent += written;
        match job.moved >= extent.len {
            true => Ok(true),
            false if written == 0 => Err(io::ErrorKind::WriteZero.into()),
            false => Ok(false),
        }
    }
}

impl Disk for RawFile {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn submit(&mut self, tag: Tag, op: DiskOp) {
        self.jobs.push_back(Job { tag, op, moved: 0, extent: 0, by_hand: false });
    }

    fn completed(&mut self) -> Option<Completion> {
        if self.waiting {
            self.waiting = false;
            self.more.clear();
        }
        let Some(mut job) = self.jobs.pop_front() else {
            self.spent = 0;
            return None;
        };
        loop {
            if self.spent >= TURN {
                self.spent = 0;
                self.jobs.push_front(job);
                self.waiting = true;
                self.more.signal();
                return None;
            }
            let result = match self.step(&mut job) {
                Ok(false) => continue,
                Ok(true) => Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) if unsupported(&error) => Err(io::ErrorKind::Unsupported.into()),
                Err(error) => Err(error),
            };
            return Some(Completion { tag: job.tag, result, moved: job.moved });
        }
    }

    fn completion_fd(&self) -> BorrowedFd<'_> {
        self.more.as_fd()
    }
}

fn unsupported(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOSYS))
}

// --- transfer ----------------------------------------------------------------------------------

#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    Read,
    Write,
}

/// Moves up to [`STEP`] bytes, from byte `skip` of `buffers` on; how many. The data goes directly
/// between guest memory and the page cache.
fn transfer(
    file: &File,
    buffers: &Buffers,
    offset: u64,
    skip: u64,
    direction: Direction,
) -> io::Result<usize> {
    let slices = buffers.slices(skip, STEP, MAX_SLICES)?;
    if slices.is_empty() {
        return Ok(0);
    }
    let vectors: Vec<libc::iovec> = slices.iter().map(vector).collect();
    let position = offset.checked_add(skip).and_then(|at| libc::off_t::try_from(at).ok());
    let position = position.ok_or(io::ErrorKind::InvalidInput)?;
    // At most MAX_SLICES.
    let count = vectors.len() as libc::c_int;
    let (fd, first) = (file.as_raw_fd(), vectors.as_ptr());
    // SAFETY: the descriptor is open. Each vector is a slice of guest RAM, mapped readable and
    // writable for as long as `slices` borrows the memory that `buffers` owns. Nothing in this
    // process holds a reference to those bytes; that the guest changes them meanwhile is allowed,
    // as only the kernel reads and writes them.
    let moved = unsafe {
        match direction {
            Direction::Read => libc::preadv(fd, first, count, position),
            Direction::Write => libc::pwritev(fd, first, count, position),
        }
    };
    let result = usize::try_from(moved).map_err(|_| io::Error::last_os_error());
    if direction == Direction::Read {
        // After an error nobody knows how much was written.
        mark_dirty(&slices, *result.as_ref().unwrap_or(&usize::MAX));
    }
    result
}

fn vector(slice: &MemorySlice<'_>) -> libc::iovec {
    libc::iovec { iov_base: slice.ptr_guard_mut().as_ptr().cast(), iov_len: slice.len() }
}

fn mark_dirty(slices: &[MemorySlice<'_>], bytes: usize) {
    let mut left = bytes;
    for slice in slices {
        let len = slice.len().min(left);
        slice.bitmap().mark_dirty(0, len);
        left -= len;
    }
}

#[cfg(test)]
mod tests;
