//! Brings the hot pages of a snapshot in while the guest runs already, so that it need not wait for
//! each when it touches it.
//!
//! A thread does it, from when the vCPUs may run until it is done, or nobody wants it any more. It asks
//! the host to read some MiB ahead, so that a disk has many reads at a time, not one for each run of
//! pages. What has been read is mapped, or, where a thread of ours answers page faults, handed to that:
//! it alone knows which pages the guest has given back, and faults come first there.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use devices::event::Event as Waker;
use devices::memory::Memory;
use devices::metrics::{Count, Meter, Metered, Metric};
use serde::{Deserialize, Serialize};
use vm_memory::bitmap::Bitmap;
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};

use super::hot::HotSet;
use super::paging::{Region, next_data};
use crate::uffd::PAGE;

/// Bytes that are brought in at a time, at most: as many as the kernel reads ahead when it is asked
/// once, by default. After a cancel no more than that follows.
const PIECE: u64 = 128 << 10;
/// Bytes that the host reads ahead of what is brought in.
const AHEAD: u64 = 8 << 20;
/// Pieces that have been read and wait to be filled in.
const WAITING: usize = 8;

/// What shall be brought in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Pages, in order.
    pub set: HotSet,
    /// Most bytes of them.
    pub limit: u64,
}

/// How far it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PrefetchState {
    /// The guest has not run yet.
    Waiting,
    /// At work.
    Running,
    /// All that was planned is done.
    Over,
    /// Not wanted any more: the VM has ended, a snapshot was taken, or the host wants memory back.
    Cancelled,
    /// It cannot go on. The guest is none the worse.
    Failed,
}

/// What is told of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PrefetchInfo {
    /// How far it is.
    pub state: PrefetchState,
    /// Pages that were brought in: not those that were given back, nor, where a thread answers page
    /// faults, those that the guest has had first.
    pub pages: u64,
    /// Pages that are planned; nothing before it runs. In a private mapping pages of zeros are not,
    /// for which there is nothing to be read.
    pub planned_pages: u64,
    /// Pages beyond the limit, be they zeros or not.
    pub left_out_pages: u64,
    /// Why it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

enum Stage {
    Waiting,
    Running,
    Over,
    Cancelled,
    Failed(String),
}

struct Shared {
    stage: Mutex<Stage>,
    done: Count,
    planned: Count,
    left_out: Count,
}

/// How far a prefetch is, for whoever asks, and the way to cancel it. Clones are of the same.
#[derive(Clone)]
pub struct Progress(Arc<Shared>);

impl Progress {
    fn new() -> Self {
        let (done, planned, left_out) = (Count::new(), Count::new(), Count::new());
        Self(Arc::new(Shared { stage: Mutex::new(Stage::Waiting), done, planned, left_out }))
    }

    fn stage(&self) -> MutexGuard<'_, Stage> {
        self.0.stage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether it is at work.
    fn is_running(&self) -> bool {
        matches!(*self.stage(), Stage::Running)
    }

    /// Whether nothing more will come of it.
    pub(super) fn has_ended(&self) -> bool {
        !matches!(*self.stage(), Stage::Waiting | Stage::Running)
    }

    /// Pages were brought in.
    pub(super) fn add(&self, bytes: u64) {
        self.0.done.add(bytes / PAGE);
    }

    /// From one stage to the next; false if it is not in the first.
    fn advance(&self, next: Stage) -> bool {
        let mut stage = self.stage();
        let follows = matches!(
            (&*stage, &next),
            (Stage::Waiting, Stage::Running | Stage::Cancelled) | (Stage::Running, _)
        );
        if follows {
            *stage = next;
        }
        follows
    }

    /// All of it is done, if it has not ended otherwise.
    pub(super) fn finish(&self) {
        self.advance(Stage::Over);
    }

    /// It cannot go on, if it has not ended otherwise.
    pub(super) fn fail(&self, error: &io::Error) {
        if self.advance(Stage::Failed(error.to_string())) {
            tracing::warn!(%error, "hot pages are not prefetched any more");
        }
    }

    /// Nobody wants it any more. Any thread; waits for nobody.
    pub fn cancel(&self) {
        self.advance(Stage::Cancelled);
    }

    /// What is told of it.
    pub fn info(&self) -> PrefetchInfo {
        let (state, error) = match &*self.stage() {
            Stage::Waiting => (PrefetchState::Waiting, None),
            Stage::Running => (PrefetchState::Running, None),
            Stage::Over => (PrefetchState::Over, None),
            Stage::Cancelled => (PrefetchState::Cancelled, None),
            Stage::Failed(why) => (PrefetchState::Failed, Some(why.clone())),
        };
        PrefetchInfo {
            state,
            pages: self.0.done.get(),
            planned_pages: self.0.planned.get(),
            left_out_pages: self.0.left_out.get(),
            error,
        }
    }
}

impl Metered for Progress {
    fn metrics(&self) -> Vec<Metric> {
        let info = self.info();
        let is = |state| u64::from(info.state == state);
        let gauge = Metric::gauge;
        vec![
            Metric::counter("prefetch_pages_total", "Hot pages that were prefetched", info.pages),
            gauge("prefetch_planned_pages", "Hot pages to prefetch", info.planned_pages),
            gauge("prefetch_left_out_pages", "Hot pages beyond the limit", info.left_out_pages),
            gauge("prefetch_over", "All hot pages are there", is(PrefetchState::Over)),
            gauge("prefetch_cancelled", "It was cancelled", is(PrefetchState::Cancelled)),
            gauge("prefetch_failed", "It cannot go on", is(PrefetchState::Failed)),
        ]
    }
}

/// A prefetch that waits for its time, or its thread, which ends when this is dropped.
pub struct Prefetch {
    progress: Progress,
    work: Option<Work>,
    thread: Option<JoinHandle<()>>,
}

impl Prefetch {
    /// Into memory that is a private mapping of `image`.
    pub(super) fn by_mapping(
        plan: Plan,
        regions: Vec<Region>,
        image: File,
        memory: Memory,
    ) -> Self {
        let progress = Progress::new();
        let work = Work { plan, regions, image, to: To::Mapping(memory) };
        Self { progress, work: Some(work), thread: None }
    }

    /// Into memory whose page faults a thread of ours answers, and what that takes the pages from.
    pub(super) fn by_handler(
        plan: Plan,
        regions: Vec<Region>,
        image: File,
    ) -> io::Result<(Self, Feed)> {
        let progress = Progress::new();
        let (sender, pieces) = sync_channel(WAITING);
        let ready = Waker::new()?;
        let supply = Supply { sender: Some(sender), ready: ready.clone() };
        let work = Work { plan, regions, image, to: To::Handler(supply) };
        let feed = Feed { pieces, ready, progress: progress.clone(), held: None };
        Ok((Self { progress, work: Some(work), thread: None }, feed))
    }

    /// How far it is.
    pub fn progress(&self) -> &Progress {
        &self.progress
    }

    /// What it counts, as part of a VM.
    pub(crate) fn meter(&self) -> (&'static str, &'static str, Meter) {
        ("memory", "prefetch", Arc::new(self.progress.clone()))
    }

    /// Begins, the first time, unless it was cancelled. When the guest runs.
    pub fn start(&mut self) {
        let Some(work) = self.work.take() else { return };
        if !self.progress.advance(Stage::Running) {
            return;
        }
        let progress = self.progress.clone();
        let run = move || {
            if let Err(error) = work.run(&progress) {
                progress.fail(&error);
            }
        };
        let thread = std::thread::Builder::new().name("prefetch".to_owned());
        match thread.stack_size(128 * 1024).spawn(run) {
            Ok(thread) => self.thread = Some(thread),
            Err(error) => self.progress.fail(&error),
        }
    }
}

impl Drop for Prefetch {
    fn drop(&mut self) {
        self.progress.cancel();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Pages of one region that are brought in together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece {
    host_address: u64,
    file_offset: u64,
    bytes: u64,
    /// It need not be read to be zeros.
    is_hole: bool,
}

/// What the thread has to do, and with what.
struct Work {
    plan: Plan,
    regions: Vec<Region>,
    image: File,
    to: To,
}

/// Where pages go.
enum To {
    /// They are mapped.
    Mapping(Memory),
    /// To whoever answers page faults.
    Handler(Supply),
}

impl Work {
    fn run(&self, progress: &Progress) -> io::Result<()> {
        let pieces = self.pieces(progress)?;
        let mut ahead = pieces.iter().peekable();
        let (mut asked, mut brought) = (0, 0);
        for piece in &pieces {
            while let Some(next) = ahead.next_if(|_| asked < brought + AHEAD) {
                if !next.is_hole {
                    read_ahead(&self.image, next);
                }
                asked += next.bytes;
            }
            if !progress.is_running() || !self.bring(piece, progress)? {
                return Ok(());
            }
            brought += piece.bytes;
        }
        match &self.to {
            To::Mapping(_) => progress.finish(),
            // Not all of it is filled in by now.
            To::Handler(supply) => drop(supply.give(None)),
        }
        Ok(())
    }

    /// What is planned, piece by piece.
    fn pieces(&self, progress: &Progress) -> io::Result<Vec<Piece>> {
        let (mut pieces, mut left_out) = (Vec::new(), 0);
        let mut room = self.plan.limit / PAGE * PAGE;
        for run in &self.plan.set.runs {
            if room == 0 || progress.has_ended() {
                left_out += (run.end - run.start) * PAGE;
                continue;
            }
            for (part, is_hole) in self.parts(run.start * PAGE..run.end * PAGE)? {
                let taken = (part.end - part.start).min(room);
                left_out += part.end - part.start - taken;
                room -= taken;
                cut(&self.regions, part.start..part.start + taken, is_hole, &mut pieces);
            }
        }
        // Beyond its end a file looks like a hole, and would be taken for zeros.
        if self.image.metadata()?.len() < self.plan.set.memory_bytes {
            return Err(io::Error::other("the memory file has become shorter"));
        }
        let bytes: u64 = pieces.iter().map(|piece| piece.bytes).sum();
        progress.0.planned.set(bytes / PAGE);
        progress.0.left_out.set(left_out / PAGE);
        Ok(pieces)
    }

    /// The parts of the file that are brought in, and whether each is a hole. A mapping needs none of
    /// those: there is nothing to read, and they would only fill the page cache. To a fault handler they
    /// are worth a fault each, and take no memory.
    fn parts(&self, range: Range<u64>) -> io::Result<Vec<(Range<u64>, bool)>> {
        let (mut parts, mut at) = (Vec::new(), range.start);
        let wants_holes = matches!(self.to, To::Handler(_));
        let hole = |hole: Range<u64>, parts: &mut Vec<_>| {
            if wants_holes && !hole.is_empty() {
                parts.push((hole, true));
            }
        };
        while let Some((start, stop)) = next_data(&self.image, at, range.end)? {
            hole(at..start, &mut parts);
            parts.push((start..stop, false));
            at = stop;
        }
        hole(at..range.end, &mut parts);
        Ok(parts)
    }

    /// False: nobody takes it any more.
    fn bring(&self, piece: &Piece, progress: &Progress) -> io::Result<bool> {
        match &self.to {
            To::Mapping(memory) => {
                for part in untouched(memory, piece) {
                    populate(part.host_address, part.bytes)?;
                    progress.add(part.bytes);
                }
                Ok(true)
            }
            To::Handler(supply) => {
                let mut content = vec![0; usize::try_from(piece.bytes).unwrap_or(0)];
                if !piece.is_hole {
                    self.image.read_exact_at(&mut content, piece.file_offset)?;
                }
                Ok(supply.give(Some(Pages { host_address: piece.host_address, content })))
            }
        }
    }
}

/// Adds the bytes of a file of all RAM to `pieces`, each of which is within one region.
fn cut(regions: &[Region], range: Range<u64>, is_hole: bool, pieces: &mut Vec<Piece>) {
    for region in regions {
        let end = range.end.min(region.file_offset.saturating_add(region.bytes));
        let mut at = range.start.max(region.file_offset);
        while at < end {
            let bytes = (end - at).min(PIECE);
            let host_address = region.host_address + (at - region.file_offset);
            pieces.push(Piece { host_address, file_offset: at, bytes, is_hole });
            at += bytes;
        }
    }
}

/// Asks for a piece to be read. Only advice: where it is not taken, the page is read when it is mapped.
fn read_ahead(image: &File, piece: &Piece) {
    let [Ok(at), Ok(len)] = [piece.file_offset, piece.bytes].map(libc::off_t::try_from) else {
        return;
    };
    // SAFETY: the descriptor is open; the call takes numbers.
    unsafe { libc::posix_fadvise(image.as_raw_fd(), at, len, libc::POSIX_FADV_WILLNEED) };
}

/// The parts of a piece to which this process has neither written, nor given them back to the host. Who
/// does so at this moment is none the worse: what is given back would be mapped as zeros that take no
/// memory, and what is written to is there.
fn untouched(memory: &Memory, piece: &Piece) -> Vec<Piece> {
    let mut parts: Vec<Piece> = Vec::new();
    let is = |region: &&<Memory as GuestMemoryBackend>::R| {
        let start = region.as_ptr() as u64;
        (start..start + region.len()).contains(&piece.host_address)
    };
    let Some(region) = memory.iter().find(is) else { return parts };
    let first = piece.host_address - region.as_ptr() as u64;
    for at in (0..piece.bytes).step_by(PAGE as usize) {
        let place = usize::try_from(first + at).unwrap_or(usize::MAX);
        if GuestMemoryRegion::bitmap(region).dirty_at(place) {
            continue;
        }
        match parts.last_mut() {
            Some(last) if last.file_offset + last.bytes == piece.file_offset + at => {
                last.bytes += PAGE;
            }
            _ => parts.push(Piece {
                host_address: piece.host_address + at,
                file_offset: piece.file_offset + at,
                bytes: PAGE,
                is_hole: piece.is_hole,
            }),
        }
    }
    parts
}

/// Maps pages of a private mapping as they are. None of them becomes this process's own.
pub(super) fn populate(host_address: u64, bytes: u64) -> io::Result<()> {
    let len = usize::try_from(bytes).unwrap_or(usize::MAX);
    loop {
        // SAFETY: whole pages inside a live mapping, which this call does not change.
        let done = unsafe { libc::madvise(host_address as *mut _, len, libc::MADV_POPULATE_READ) };
        match done {
            0 => return Ok(()),
            _ => match io::Error::last_os_error() {
                // The mapping has changed meanwhile, or a signal has come.
                error if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EINTR)) => {}
                error => return Err(error),
            },
        }
    }
}

/// Pages one after the other, and where they belong.
pub(super) struct Pages {
    pub(super) host_address: u64,
    pub(super) content: Vec<u8>,
}

/// The thread's end of the way to who answers page faults.
struct Supply {
    sender: Option<SyncSender<Option<Pages>>>,
    ready: Waker,
}

impl Supply {
    /// Waits until there is room; false if nobody takes it any more. Nothing: that was all.
    fn give(&self, pages: Option<Pages>) -> bool {
        let given = self.sender.as_ref().is_some_and(|sender| sender.send(pages).is_ok());
        self.ready.signal();
        given
    }
}

impl Drop for Supply {
    fn drop(&mut self) {
        self.sender = None;
        self.ready.signal();
    }
}

/// The other end.
pub(super) struct Feed {
    pub(super) pieces: Receiver<Option<Pages>>,
    /// Signalled when there is a piece, or will be none any more.
    pub(super) ready: Waker,
    pub(super) progress: Progress,
    /// A piece that had to wait, and how many of its bytes are filled in.
    pub(super) held: Option<(Pages, usize)>,
}

#[cfg(test)]
mod tests;
