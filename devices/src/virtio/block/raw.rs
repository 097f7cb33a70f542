//! The synchronous engine: each step is a system call of the worker's thread.
//!
//! Reads and writes go straight between guest memory and the page cache, in steps, so that a guest
//! with huge requests gets its turn and no more; flush and discard take as long as the host's
//! storage takes, so a disk has an executor of its own.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;

use vmm_sys_util::fallocate::fallocate;

use super::disk::{Buffers, Completion, Disk, DiskOp, Geometry, Tag};
use super::file::{DiskError, DiskFile};
use super::job::{Job, MAX_SLICES, STEP, Step, TURN, ZEROES, cost};
use crate::event::Event;

/// A raw image file or a block device, with synchronous I/O.
pub struct RawFile {
    file: DiskFile,
    jobs: VecDeque<Job>,
    /// Bytes moved in this turn.
    spent: usize,
    more: Event,
    waiting: bool,
}

impl RawFile {
    /// Opens `path`, as [`DiskFile::open`] does.
    pub fn open(path: &Path, read_only: bool) -> Result<Self, DiskError> {
        let file = DiskFile::open(path, read_only)?;
        Self::new(file).map_err(|source| DiskError::Event { path: path.to_owned(), source })
    }

    /// A disk on `file`. Fails when the process is out of descriptors.
    pub fn new(file: DiskFile) -> io::Result<Self> {
        Ok(Self { file, jobs: VecDeque::new(), spent: 0, more: Event::new()?, waiting: false })
    }
}

impl Disk for RawFile {
    fn geometry(&self) -> Geometry {
        self.file.geometry()
    }

    fn submit(&mut self, tag: Tag, op: DiskOp) {
        self.jobs.push_back(Job::new(tag, op));
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
            let step = match job.next(&self.file) {
                Ok(Some(step)) => step,
                Ok(None) => return Some(job.complete(Ok(()))),
                Err(error) => return Some(job.complete(Err(error))),
            };
            let result = perform(&self.file, &job, step);
            self.spent += cost(step, *result.as_ref().unwrap_or(&0));
            if let Err(error) = job.advance(step, result) {
                return Some(job.complete(Err(error)));
            }
        }
    }

    fn completion_fd(&self) -> BorrowedFd<'_> {
        self.more.as_fd()
    }
}

// --- steps -------------------------------------------------------------------------------------

/// Carries out `step` of `job` and waits for its end; the bytes that it moved.
pub(super) fn perform(disk: &DiskFile, job: &Job, step: Step) -> io::Result<usize> {
    match step {
        Step::Read { offset, skip } | Step::Write { offset, skip } => {
            let Some(buffers) = job.buffers() else { return Ok(0) };
            let read = matches!(step, Step::Read { .. });
            let direction = if read { Direction::Read } else { Direction::Write };
            transfer(disk, buffers, (offset, skip), direction)
        }
        Step::Zeroes { offset, len } => {
            disk.file().write_at(ZEROES.get(..len).unwrap_or_default(), offset)
        }
        Step::Allocate { mode, extent } => {
            fallocate(disk.file(), mode.fallocate(), true, extent.offset, extent.len)
                .map(|()| 0)
                .map_err(|errno| io::Error::from_raw_os_error(errno.errno()))
        }
        Step::Discard { extent } => disk.discard(&extent).map(|()| 0),
        Step::Sync => disk.file().sync_data().map(|()| 0),
    }
}

/// Does of a read what can be done without waiting for the storage. An error says that it cannot,
/// whatever the reason, and that nothing was moved.
pub(super) fn read_now(disk: &DiskFile, job: &Job, step: Step) -> io::Result<usize> {
    match (step, job.buffers()) {
        (Step::Read { offset, skip }, Some(buffers)) => {
            transfer(disk, buffers, (offset, skip), Direction::ReadNow)
        }
        _ => Err(io::ErrorKind::InvalidInput.into()),
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    Read,
    /// The same, if it does not have to wait.
    ReadNow,
    Write,
}

/// Moves up to [`STEP`] bytes between the disk and `buffers`, beginning `skip` bytes after the
/// start of both; how many. The data goes directly between guest memory and the page cache.
fn transfer(
    disk: &DiskFile,
    buffers: &Buffers,
    (offset, skip): (u64, u64),
    direction: Direction,
) -> io::Result<usize> {
    let vectors = buffers.vectors(skip, STEP, MAX_SLICES)?;
    if vectors.is_empty() {
        return Ok(0);
    }
    let position = offset.checked_add(skip).and_then(|at| libc::off_t::try_from(at).ok());
    let position = position.ok_or(io::ErrorKind::InvalidInput)?;
    // At most MAX_SLICES.
    let count = vectors.len() as libc::c_int;
    let (fd, first) = (disk.file().as_raw_fd(), vectors.as_ptr());
    // SAFETY: the descriptor is open. Each vector is a slice of guest RAM, mapped readable and
    // writable for as long as `buffers` lives, which is longer than the call. Nothing in this
    // process holds a reference to those bytes; that the guest changes them meanwhile is allowed,
    // as only the kernel reads and writes them.
    let moved = unsafe {
        match direction {
            Direction::Read => libc::preadv(fd, first, count, position),
            Direction::ReadNow => libc::preadv2(fd, first, count, position, libc::RWF_NOWAIT),
            Direction::Write => libc::pwritev(fd, first, count, position),
        }
    };
    let result = usize::try_from(moved).map_err(|_| io::Error::last_os_error());
    match (direction, &result) {
        (Direction::Read | Direction::ReadNow, Ok(moved)) => buffers.mark_dirty(skip, *moved),
        // Nobody knows how much was written.
        (Direction::Read, Err(_)) => buffers.mark_dirty(skip, STEP),
        (Direction::ReadNow, Err(_)) | (Direction::Write, _) => {}
    }
    result
}
