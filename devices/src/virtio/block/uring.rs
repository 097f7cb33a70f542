//! The io_uring engine: steps are given to the kernel in batches, and end when the storage is done
//! with them.
//!
//! ```text
//!   submit ─► backlog ─► a slot and an entry of the ring ─► the kernel ─► completion ─► answer
//!                ▲                                                            │
//!                └──────────── the next step of the operation ◄───────────────┘
//! ```
//!
//! At most [`SLOTS`] steps are in the kernel; what is beyond that waits in the backlog, which is as
//! long as the device's queues. A step keeps its operation, and with it guest memory, until the
//! kernel has let go of it. The descriptor that says when to look again is the ring itself: it is
//! readable while there are completions, so that nothing has to be counted or taken back.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use io_uring::types::{CancelBuilder, Fd, FsyncFlags, Timespec};
use io_uring::{IoUring, Probe, opcode, squeue};

use super::disk::{Buffers, Completion, Disk, DiskOp, Geometry, Tag};
use super::file::DiskFile;
use super::job::{Job, MAX_SLICES, STEP, Step, TURN, ZEROES, cost};
use super::raw::{perform, read_now};

/// Steps in the kernel at most. One less than the ring has entries: the last is for [`AGAIN`].
const SLOTS: u32 = ENTRIES - 1;

const ENTRIES: u32 = 256;

/// In place of a slot: the completion of nothing, which makes the ring readable once.
const AGAIN: u32 = u32::MAX;

/// Threads of the kernel per disk and kind, for what cannot be done without waiting.
const WORKERS: u32 = 16;

/// Bytes of a page of the page cache.
const PAGE: u64 = 4096;

/// How often a kernel that is short of memory is asked again before this thread does the work.
const PATIENCE: usize = 100;

/// A step that the kernel has, or is about to get.
struct Flight {
    job: Job,
    step: Step,
    vectors: Vectors,
}

/// What the kernel reads while it begins a step.
struct Vectors(Vec<libc::iovec>);

// SAFETY: the pointers are into guest RAM, which no thread owns and which the job beside them keeps
// mapped. Only the kernel follows them.
unsafe impl Send for Vectors {}

/// A raw image file or a block device, with I/O through io_uring.
pub struct UringFile {
    file: DiskFile,
    ring: IoUring,
    slots: Vec<Option<Flight>>,
    free: Vec<u32>,
    backlog: VecDeque<Job>,
    done: VecDeque<Completion>,
    /// Slots whose entries the kernel has not taken yet, in order.
    staged: VecDeque<u32>,
    /// Entries that it has taken and not completed.
    in_kernel: usize,
    /// Reads and writes go through the page cache.
    cached: bool,
    /// Bytes begun in this turn.
    spent: usize,
    /// The kernel takes no more entries; this thread carries steps out itself.
    broken: bool,
}

/// A ring with all that is needed here, if this host has it and lets us.
pub(super) fn ring() -> io::Result<IoUring> {
    let ring = IoUring::builder().build(ENTRIES)?;
    let mut probe = Probe::new();
    ring.submitter().register_probe(&mut probe)?;
    let needed = [
        opcode::Nop::CODE,
        opcode::Readv::CODE,
        opcode::Writev::CODE,
        opcode::Write::CODE,
        opcode::Fsync::CODE,
        opcode::Fallocate::CODE,
    ];
    if !needed.into_iter().all(|code| probe.is_supported(code)) {
        return Err(io::Error::from_raw_os_error(libc::ENOSYS));
    }
    // Linux 5.15 and newer; older ones have four per processor.
    let _ = ring.submitter().register_iowq_max_workers(&mut [WORKERS, WORKERS]);
    Ok(ring)
}

impl UringFile {
    /// A disk on `file` with a ring of its own. Fails where the host has no io_uring, or does not
    /// let us; [`super::OpenDisk::open`] then knows what to do.
    pub fn with_ring(file: DiskFile) -> io::Result<Self> {
        Ok(Self::new(file, ring()?))
    }

    /// A disk on `file`, which works through `ring`.
    pub(super) fn new(file: DiskFile, ring: IoUring) -> Self {
        Self {
            cached: !file.is_direct(),
            file,
            ring,
            slots: (0..SLOTS).map(|_| None).collect(),
            free: (0..SLOTS).collect(),
            backlog: VecDeque::new(),
            done: VecDeque::new(),
            staged: VecDeque::new(),
            in_kernel: 0,
            spent: 0,
            broken: false,
        }
    }

    // --- towards the kernel --------------------------------------------------------------------

    /// Makes entries of the backlog, as far as there is room and this turn allows.
    fn stage(&mut self) {
        while self.spent < TURN && !self.broken {
            let Some(slot) = self.free.pop() else { return };
            match self.backlog.pop_front() {
                Some(job) => self.launch(slot, job),
                None => {
                    self.free.push(slot);
                    return;
                }
            }
        }
    }

    /// Stages the next step of `job`, or ends it.
    fn launch(&mut self, slot: u32, mut job: Job) {
        let result = loop {
            let step = match job.next(&self.file) {
                Ok(Some(step)) => step,
                Ok(None) => break Ok(()),
                Err(error) => break Err(error),
            };
            if let Some(result) = self.without_ring(&job, step) {
                self.spent += cost(step, *result.as_ref().unwrap_or(&0));
                match job.advance(step, result) {
                    Ok(()) if self.spent < TURN => continue,
                    Ok(()) => {
                        self.free.push(slot);
                        self.backlog.push_front(job);
                        return;
                    }
                    Err(error) => break Err(error),
                }
            }
            match self.push(slot, &job, step) {
                Ok(vectors) => {
                    if let Some(place) = self.slots.get_mut(slot as usize) {
                        *place = Some(Flight { job, step, vectors });
                    }
                    self.staged.push_back(slot);
                    return;
                }
                Err(error) => break Err(error),
            }
        };
        self.free.push(slot);
        self.done.push_back(job.complete(result));
    }

    /// Does here what is faster, or only possible, without the ring; the result, if it was done.
    fn without_ring(&mut self, job: &Job, step: Step) -> Option<io::Result<usize>> {
        match step {
            // Before Linux 6.12 there is no entry for it.
            Step::Discard { .. } => Some(perform(&self.file, job, step)),
            // What the page cache has is copied sooner than an entry is made.
            Step::Read { .. } if self.cached => match read_now(&self.file, job, step) {
                Ok(moved) if moved > 0 => Some(Ok(moved)),
                // Also at the end of the file, or where the file system cannot tell.
                Ok(_) | Err(_) => None,
            },
            // Whole pages only have to be copied. Most file systems cannot tell the kernel that
            // this will not wait, so that it would wake a thread for each write.
            Step::Write { offset, skip } if self.cached => {
                let len = job.buffers().map_or(0, Buffers::len);
                let whole = |bytes: u64| bytes.is_multiple_of(PAGE);
                let pages = whole(offset.saturating_add(skip)) && whole(len.saturating_sub(skip));
                pages.then(|| perform(&self.file, job, step))
            }
            _ => None,
        }
    }

    /// Puts an entry for `step` into the ring. What it points to is returned, and must be kept
    /// until its completion, together with `job`.
    fn push(&mut self, slot: u32, job: &Job, step: Step) -> io::Result<Vectors> {
        let fd = Fd(self.file.file().as_raw_fd());
        let mut vectors = Vectors(Vec::new());
        let mut bytes = 0;
        if let (Step::Read { skip, .. } | Step::Write { skip, .. }, Some(buffers)) =
            (step, job.buffers())
        {
            vectors.0 = buffers.vectors(skip, STEP, MAX_SLICES)?;
            bytes = vectors.0.iter().map(|vector| vector.iov_len).sum();
        }
        let (first, count) = (vectors.0.as_ptr(), vectors.0.len() as u32);
        let entry = match step {
            Step::Read { offset, skip } => {
                opcode::Readv::new(fd, first, count).offset(offset.saturating_add(skip)).build()
            }
            Step::Write { offset, skip } => {
                opcode::Writev::new(fd, first, count).offset(offset.saturating_add(skip)).build()
            }
            Step::Zeroes { offset, len } => {
                bytes = len.min(ZEROES.len());
                opcode::Write::new(fd, ZEROES.as_ptr(), bytes as u32).offset(offset).build()
            }
            Step::Allocate { mode, extent } => opcode::Fallocate::new(fd, extent.len)
                .offset(extent.offset)
                .mode(mode.flags())
                .build(),
            Step::Sync => opcode::Fsync::new(fd).flags(FsyncFlags::DATASYNC).build(),
            Step::Discard { .. } => return Err(io::ErrorKind::InvalidInput.into()),
        };
        self.spent += cost(step, bytes);
        self.push_entry(&entry.user_data(u64::from(slot)))?;
        Ok(vectors)
    }

    fn push_entry(&mut self, entry: &squeue::Entry) -> io::Result<()> {
        // SAFETY: the entry points to guest RAM, to an array of vectors and to ZEROES. All are
        // valid until its completion: the vectors and the job, which keeps guest RAM mapped, are in
        // the slot until then, also when this disk is dropped (see `drop`). An entry that is
        // refused here is not read by anybody.
        let pushed = unsafe { self.ring.submission().push(entry) };
        // There are fewer slots than entries.
        pushed.map_err(|_| io::ErrorKind::ResourceBusy.into())
    }

    /// Makes the ring readable.
    fn come_back(&mut self) {
        let nothing = opcode::Nop::new().build().user_data(u64::from(AGAIN));
        // Without room for it there are completions to come, which do the same.
        if self.push_entry(&nothing).is_ok() {
            self.staged.push_back(AGAIN);
        }
        self.enter();
    }

    /// Lets the kernel take what is staged.
    fn enter(&mut self) {
        let mut patience = PATIENCE;
        while !self.staged.is_empty() && !self.broken {
            let error = match self.ring.submit() {
                Ok(taken) if taken > 0 => {
                    let taken = taken.min(self.staged.len());
                    self.staged.drain(..taken);
                    self.in_kernel += taken;
                    continue;
                }
                Ok(_) => io::Error::from_raw_os_error(libc::EAGAIN),
                Err(error) => error,
            };
            match error.raw_os_error() {
                Some(libc::EINTR) => {}
                // Short of memory, or of room for completions: some will come.
                Some(libc::EAGAIN | libc::EBUSY | libc::ENOMEM) if self.in_kernel > 0 => return,
                Some(libc::EAGAIN | libc::EBUSY | libc::ENOMEM) if patience > 0 => {
                    patience -= 1;
                    std::thread::yield_now();
                }
                _ => self.give_up(&error),
            }
        }
    }

    /// From here on this thread does the work: slower, and without the kernel's goodwill.
    fn give_up(&mut self, error: &io::Error) {
        tracing::error!(%error, "io_uring takes no more requests; going on without it");
        self.broken = true;
        for slot in std::mem::take(&mut self.staged) {
            if let Some(flight) = self.slots.get_mut(slot as usize).and_then(Option::take) {
                // Its entry stays in the ring, which is never submitted again.
                self.free.push(slot);
                self.backlog.push_back(flight.job);
            }
        }
    }

    /// Carries out the backlog here.
    fn work(&mut self) {
        while let Some(mut job) = self.backlog.pop_front() {
            let result = loop {
                match job.next(&self.file) {
                    Ok(Some(step)) => {
                        let result = perform(&self.file, &job, step);
                        if let Err(error) = job.advance(step, result) {
                            break Err(error);
                        }
                    }
                    Ok(None) => break Ok(()),
                    Err(error) => break Err(error),
                }
            };
            self.done.push_back(job.complete(result));
        }
    }

    // --- back from the kernel ------------------------------------------------------------------

    /// Takes the completions that are there; false without any. Operations that are not at their
    /// end go to the backlog.
    fn reap(&mut self) -> bool {
        let mut some = false;
        // Not more than the ring holds, also if more come meanwhile.
        for _ in 0..2 * ENTRIES {
            let Some(entry) = self.ring.completion().next() else { break };
            some = true;
            self.in_kernel = self.in_kernel.saturating_sub(1);
            if let Some((job, result)) = self.landed(entry.user_data(), entry.result()) {
                match result {
                    Ok(()) => self.backlog.push_front(job),
                    Err(error) => self.done.push_back(job.complete(Err(error))),
                }
            }
        }
        some
    }

    /// Accounts for a completion; the operation, and whether it may go on.
    fn landed(&mut self, user_data: u64, result: i32) -> Option<(Job, io::Result<()>)> {
        let slot = u32::try_from(user_data).ok()?;
        let Flight { mut job, step, vectors } = self.slots.get_mut(slot as usize)?.take()?;
        drop(vectors);
        self.free.push(slot);
        let result = match usize::try_from(result) {
            Ok(moved) => Ok(moved),
            Err(_) => Err(io::Error::from_raw_os_error(result.saturating_neg())),
        };
        if let (Step::Read { skip, .. }, Some(buffers)) = (step, job.buffers()) {
            // After an error nobody knows how much was written.
            buffers.mark_dirty(skip, *result.as_ref().unwrap_or(&STEP));
        }
        let result = job.advance(step, result);
        Some((job, result))
    }
}

impl Disk for UringFile {
    fn geometry(&self) -> Geometry {
        self.file.geometry()
    }

    fn submit(&mut self, tag: Tag, op: DiskOp) {
        self.backlog.push_back(Job::new(tag, op));
    }

    fn completed(&mut self) -> Option<Completion> {
        loop {
            if let Some(done) = self.done.pop_front() {
                return Some(done);
            }
            if self.broken {
                self.work();
            }
            if self.spent >= TURN && !self.backlog.is_empty() && !self.broken {
                self.spent = 0;
                self.come_back();
                if !self.broken {
                    return None;
                }
            }
            self.stage();
            self.enter();
            let some = self.reap() || !self.done.is_empty();
            // What is left waits for a slot, or for the next turn.
            if !some && (self.backlog.is_empty() || self.free.is_empty()) {
                self.spent = 0;
                return None;
            }
        }
    }

    fn completion_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is owned by the ring, which outlives the borrow of self.
        unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) }
    }
}

impl Drop for UringFile {
    /// Ends what is in flight: cancelled if that is possible, waited for otherwise. What was staged
    /// is never given to the kernel.
    fn drop(&mut self) {
        if self.in_kernel > 0 {
            // Linux 6.0 and newer. What cannot be cancelled is waited for below.
            let now = Some(Timespec::new());
            let _ = self.ring.submitter().register_sync_cancel(now, CancelBuilder::any());
        }
        while self.in_kernel > 0 {
            if !self.reap() {
                super::worker::wait_readable(self);
            }
        }
    }
}

#[cfg(test)]
mod tests;
