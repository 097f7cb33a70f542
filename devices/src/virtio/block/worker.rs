//! The block device at work: chains become operations of the disk, completions become answers.

use std::collections::VecDeque;
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Instant;

use super::HostSide;
use super::counts::{BlockCounts, Kind};
use super::disk::{Buffers, Completion, Disk, DiskOp, Extent, Tag};
use super::request::{self, Command, HEADER_SIZE, Limits, SERIAL_LEN, Status};
use crate::executor::{Flow, Handler, Interest, Sources};
use crate::ids::Token;
use crate::memory::{Bytes, GuestAddress, Memory};
use crate::virtio::queue::{ActiveQueue, QueueFault};
use crate::virtio::throttle::{Admission, Throttle};
use crate::virtio::{Chain, Notifier, Segment};

/// Chains begun per queue and wake-up, before other devices get their turn.
const BUDGET: usize = 64;

/// Failures of the host's storage that are logged; the later ones are only counted.
const LOGGED_FAILURES: u64 = 8;

/// Readiness of the disk; a queue's token is its place in [`Worker::queues`].
const COMPLETION: Token = Token(u32::MAX);

/// The rate limit lets requests through again.
const TIMER: Token = Token(u32::MAX - 1);

/// A chain whose operation is in flight.
struct Pending {
    queue: usize,
    head: u16,
    status: GuestAddress,
    /// Writable bytes before the status byte.
    in_len: u64,
    kind: Kind,
}

/// Why no more requests of a queue are begun.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pause {
    /// There are none.
    Empty,
    /// Others shall get their turn.
    Turn,
    /// All places are taken.
    Full,
    /// The rate limit.
    Throttled,
}

/// The chains in flight, by tag.
pub(super) struct InFlight {
    places: Vec<Option<Pending>>,
    free: VecDeque<u32>,
}

impl InFlight {
    pub(super) fn new(places: usize) -> Self {
        let places = u32::try_from(places).unwrap_or(u32::MAX);
        Self { places: (0..places).map(|_| None).collect(), free: (0..places).collect() }
    }

    fn is_empty(&self) -> bool {
        self.free.len() == self.places.len()
    }

    fn is_full(&self) -> bool {
        self.free.is_empty()
    }

    fn insert(&mut self, pending: Pending) -> Option<Tag> {
        let place = self.free.pop_front()?;
        *self.places.get_mut(place as usize)? = Some(pending);
        Some(Tag(place))
    }

    fn remove(&mut self, tag: Tag) -> Option<Pending> {
        let pending = self.places.get_mut(tag.0 as usize)?.take()?;
        self.free.push_back(tag.0);
        Some(pending)
    }
}

pub(super) struct Worker {
    pub(super) disk: Box<dyn Disk>,
    pub(super) queues: Vec<ActiveQueue>,
    pub(super) memory: Arc<Memory>,
    pub(super) in_flight: InFlight,
    pub(super) limits: Limits,
    pub(super) serial: [u8; SERIAL_LEN],
    /// Every completed write must be on stable storage.
    pub(super) durable: bool,
    pub(super) throttle: Option<Throttle>,
    pub(super) counts: Arc<BlockCounts>,
    pub(super) notifier: Notifier,
}

impl Worker {
    /// Begins new requests, answers finished ones.
    fn serve(&mut self) -> Result<(), QueueFault> {
        let mut pauses = Vec::with_capacity(self.queues.len());
        for queue in 0..self.queues.len() {
            pauses.push(self.begin_all(queue)?);
        }
        self.reap()?;
        let full = self.in_flight.is_full();
        for (queue, pause) in self.queues.iter_mut().zip(pauses) {
            queue.notify()?;
            let more = match pause {
                Pause::Empty => queue.enable_notification()?,
                Pause::Turn => true,
                // With all places taken there is nothing to do before the disk is ready.
                Pause::Full => !full,
                Pause::Throttled => false,
            };
            if more {
                queue.kick().signal();
            }
        }
        Ok(())
    }

    /// Begins up to [`BUDGET`] requests of a queue; why no more.
    fn begin_all(&mut self, queue: usize) -> Result<Pause, QueueFault> {
        for _ in 0..BUDGET {
            if self.in_flight.is_full() {
                return Ok(Pause::Full);
            }
            if self.is_throttled(queue)? {
                return Ok(Pause::Throttled);
            }
            let Some(chain) = self.queues.get_mut(queue).map_or(Ok(None), ActiveQueue::pop)? else {
                return Ok(Pause::Empty);
            };
            self.begin(queue, &chain)?;
        }
        Ok(Pause::Turn)
    }

    /// True if there is a request in the queue that has to wait.
    fn is_throttled(&mut self, queue: usize) -> Result<bool, QueueFault> {
        let (Some(throttle), Some(queue)) = (&mut self.throttle, self.queues.get(queue)) else {
            return Ok(false);
        };
        if queue.pending()? == 0 {
            return Ok(false);
        }
        let admission = throttle.admit(Instant::now());
        if admission == Admission::Closed {
            self.counts.throttled.one();
        }
        Ok(admission != Admission::Now)
    }

    fn charge(&mut self, bytes: u64) {
        if let Some(throttle) = &mut self.throttle {
            throttle.charge(bytes);
        }
    }

    fn begin(&mut self, queue: usize, chain: &Chain) -> Result<(), QueueFault> {
        let Some(status) = last_byte(chain) else {
            // There is no place for an answer. Giving the chain back with nothing written keeps
            // one odd request from costing the guest its disk.
            self.charge(0);
            self.counts.refused.one();
            return self.complete(queue, chain.head(), 0);
        };
        let in_len = chain.writable_len().saturating_sub(1);
        let mut pending = Pending { queue, head: chain.head(), status, in_len, kind: Kind::Flush };
        match plan(chain, &self.memory, self.limits, self.durable) {
            Ok(Plan::Disk(op)) => {
                self.charge(op.data_len());
                pending.kind = Kind::of(&op);
                // Never without a place: the caller has looked.
                if let Some(tag) = self.in_flight.insert(pending) {
                    self.disk.submit(tag, op);
                }
                Ok(())
            }
            Ok(Plan::Identity) => {
                self.charge(0);
                let written = write_identity(chain, &self.memory, &self.serial);
                self.answer(&pending, Status::Ok, written)
            }
            Err(refused) => {
                self.charge(0);
                self.counts.refused.one();
                self.answer(&pending, refused, 0)
            }
        }
    }

    /// Answers a chain whose first `written` bytes were filled. The length that is reported must
    /// be free of gaps (virtio 1.3, section 2.7.8.2), so the status byte only counts after all of
    /// the data.
    fn answer(
        &mut self,
        pending: &Pending,
        status: Status,
        written: u64,
    ) -> Result<(), QueueFault> {
        // Cannot fail: the chain was checked to lie in guest RAM.
        let _ = self.memory.write_obj(status as u8, pending.status);
        let len = match written < pending.in_len {
            true => written,
            false => pending.in_len.saturating_add(1),
        };
        self.complete(pending.queue, pending.head, u32::try_from(len).unwrap_or(u32::MAX))
    }

    fn complete(&mut self, queue: usize, head: u16, len: u32) -> Result<(), QueueFault> {
        match self.queues.get_mut(queue) {
            Some(queue) => queue.complete_head(head, len),
            None => Ok(()),
        }
    }

    fn reap(&mut self) -> Result<(), QueueFault> {
        while let Some(completion) = self.disk.completed() {
            self.finish(completion)?;
        }
        Ok(())
    }

    fn finish(&mut self, completion: Completion) -> Result<(), QueueFault> {
        let Some(pending) = self.in_flight.remove(completion.tag) else {
            tracing::error!(tag = completion.tag.0, "disk completed an operation it was not given");
            return Ok(());
        };
        let status = match &completion.result {
            Ok(()) => {
                self.counts.done(pending.kind, completion.moved);
                Status::Ok
            }
            Err(error) => self.failed(error),
        };
        let written = if pending.kind == Kind::Read { completion.moved } else { 0 };
        self.answer(&pending, status, written)
    }

    fn failed(&mut self, error: &io::Error) -> Status {
        if error.kind() == io::ErrorKind::Unsupported {
            self.counts.unsupported.one();
            return Status::Unsupported;
        }
        let before = self.counts.errors.one();
        if before < LOGGED_FAILURES {
            tracing::warn!(%error, failures = before + 1, "disk operation failed");
        }
        Status::IoError
    }

    /// What goes back to the device, which has to be drained before.
    pub(super) fn into_parts(self) -> (HostSide, Vec<ActiveQueue>) {
        (HostSide { disk: self.disk, throttle: self.throttle }, self.queues)
    }

    /// Waits for all that is in flight and answers it.
    pub(super) fn drain(&mut self) {
        while !self.in_flight.is_empty() {
            match self.disk.completed() {
                // A fault of the rings has been or will be reported; the disk counts here.
                Some(completion) => drop(self.finish(completion)),
                None => wait_readable(self.disk.as_ref()),
            }
        }
        for queue in &mut self.queues {
            let _ = queue.notify();
        }
    }
}

impl Handler for Worker {
    fn attach(&mut self, sources: &mut Sources<'_, '_>) -> io::Result<()> {
        for (place, queue) in self.queues.iter().enumerate() {
            sources.add(Token(place as u32), queue.kick(), Interest::Read)?;
        }
        if let Some(throttle) = &self.throttle {
            sources.add(TIMER, throttle, Interest::Read)?;
        }
        sources.add(COMPLETION, &self.disk.completion_fd(), Interest::Read)
    }

    fn handle(&mut self, token: Token, _sources: &mut Sources<'_, '_>) -> Flow {
        // The disk takes its own readiness.
        if let Some(queue) = self.queues.get(token.0 as usize) {
            queue.kick().clear();
        }
        if let (TIMER, Some(throttle)) = (token, &mut self.throttle) {
            throttle.time_has_come();
        }
        match self.serve() {
            Ok(()) => Flow::Continue,
            Err(fault) => {
                self.counts.guest_faults.one();
                self.notifier.gives_up("block device", fault);
                Flow::Finished
            }
        }
    }
}

/// Waits until `disk` should be asked again.
pub(super) fn wait_readable(disk: &dyn Disk) {
    let fd = disk.completion_fd().as_raw_fd();
    let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: one pollfd that outlives the call; its descriptor is borrowed from the disk. A signal
    // or an error only makes the caller look again.
    unsafe { libc::poll(&mut poll, 1, -1) };
}

// --- requests ----------------------------------------------------------------------------------

enum Plan {
    Disk(DiskOp),
    Identity,
}

/// Where the status byte of `chain` is: its last writable byte.
fn last_byte(chain: &Chain) -> Option<GuestAddress> {
    let last = chain.writable().iter().rev().find(|segment| segment.len > 0)?;
    last.address.0.checked_add(u64::from(last.len) - 1).map(GuestAddress)
}

/// Makes of a chain with a status byte what has to be done.
fn plan(
    chain: &Chain,
    memory: &Arc<Memory>,
    limits: Limits,
    durable: bool,
) -> Result<Plan, Status> {
    let mut header = [0; HEADER_SIZE];
    let mut out = chain.reader(memory);
    out.read_exact(&mut header).map_err(|_| Status::IoError)?;
    let in_len = chain.writable_len().saturating_sub(1);
    let command = request::parse(header, out.remaining(), in_len, limits)?;
    let op = match command {
        Command::Read(Extent { offset, len }) => {
            let buffers = Buffers::new(memory.clone(), writable(chain, memory, len));
            DiskOp::Read { offset, buffers }
        }
        Command::Write(Extent { offset, .. }) => {
            let segments = std::iter::from_fn(|| out.take_segment(usize::MAX)).collect();
            DiskOp::Write { offset, buffers: Buffers::new(memory.clone(), segments), durable }
        }
        Command::Flush => DiskOp::Flush,
        Command::GetId => return Ok(Plan::Identity),
        Command::Discard | Command::WriteZeroes => {
            // Bounded by the parser: a few ranges of 16 bytes.
            let mut data = Vec::new();
            out.read_to_end(&mut data).map_err(|_| Status::IoError)?;
            let request::Ranges { extents, unmap } = request::ranges(&data, command, limits)?;
            match command {
                Command::Discard => DiskOp::Discard { extents, durable },
                _ => DiskOp::WriteZeroes { extents, unmap, durable },
            }
        }
    };
    Ok(Plan::Disk(op))
}

/// The first `len` bytes of the writable part.
fn writable(chain: &Chain, memory: &Memory, len: u64) -> Vec<Segment> {
    let mut writer = chain.writer(memory);
    let mut left = usize::try_from(len).unwrap_or(usize::MAX);
    let mut segments = Vec::with_capacity(chain.writable().len());
    while left > 0
        && let Some(segment) = writer.take_segment(left)
    {
        left = left.saturating_sub(segment.len as usize);
        segments.push(segment);
    }
    segments
}

/// Writes the identity into the data part, as much as there is room for; how many bytes.
fn write_identity(chain: &Chain, memory: &Memory, serial: &[u8]) -> u64 {
    let room = chain.writable_len().saturating_sub(1);
    let mut left = serial;
    for segment in writable(chain, memory, room.min(serial.len() as u64)) {
        let (piece, rest) = left.split_at_checked(segment.len as usize).unwrap_or((left, &[]));
        // Cannot fail: the chain was checked to lie in guest RAM.
        let _ = memory.write_slice(piece, segment.address);
        left = rest;
    }
    (serial.len() - left.len()) as u64
}
