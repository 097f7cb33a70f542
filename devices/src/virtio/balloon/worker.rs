//! The balloon's queues at work.

use std::io::{self, Read};
use std::sync::Arc;

use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};

use super::feature;
use super::handle::{Shared, count};
use super::reclaim::Reclaimer;
use super::request::{MAX_STATS_LEN, PAGE_SIZE, PFN_LEN, Stats, runs};
use crate::executor::{Flow, Handler, Interest, Sources};
use crate::ids::{QueueIndex, Token};
use crate::memory::Memory;
use crate::metrics::LOGGED_FAULTS;
use crate::virtio::chain::ChainReader;
use crate::virtio::queue::{ActiveQueue, QueueFault};
use crate::virtio::{Chain, Notifier};

/// Page numbers looked at in one step, each of which may cost a system call.
const STEP_PAGES: usize = 256;

/// Bytes of a report that are given back in one step.
const STEP_BYTES: usize = 8 << 20;

/// Steps per queue and wake-up before other devices get their turn: 1024 scattered pages, or 32 MiB
/// of free memory.
const BUDGET: usize = 4;

/// Bytes of guest RAM.
pub(super) fn ram_size(memory: &Memory) -> u64 {
    memory.iter().map(GuestMemoryRegion::len).sum()
}

/// What a queue is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Inflate,
    Deflate,
    Statistics,
    Report,
    /// Set up by the driver, without a feature that it would be for.
    Idle,
}

/// The roles of the five queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Roles([Role; 5]);

impl Role {
    /// Gives queues their roles by what was negotiated and which of them the driver set up.
    pub(super) fn all(features: u64, has: impl Fn(u16) -> bool) -> Roles {
        let statistics = features & feature::STATS_VQ != 0;
        let third = if statistics { Role::Statistics } else { Role::Idle };
        let mut roles = [Role::Inflate, Role::Deflate, third, Role::Idle, Role::Idle];
        if features & feature::PAGE_REPORTING != 0 {
            // By the specification it is the fifth; Linux does not count queues without feature.
            let candidates: &[u16] = if statistics { &[4, 3] } else { &[4, 3, 2] };
            let report = candidates.iter().copied().find(|&index| has(index));
            if let Some(role) = report.and_then(|index| roles.get_mut(usize::from(index))) {
                *role = Role::Report;
            }
        }
        Roles(roles)
    }
}

impl Roles {
    pub(super) fn of(self, queue: QueueIndex) -> Role {
        self.0.get(usize::from(queue.0)).copied().unwrap_or(Role::Idle)
    }
}

/// A queue and the chain that it is at.
struct Lane {
    role: Role,
    queue: ActiveQueue,
    /// The chain that was popped last and is not complete: half done, or the statistics buffer that
    /// waits for someone to ask. Stopping puts it back on the ring.
    open: Option<Chain>,
    /// Bytes of it that are done.
    done: u64,
    /// The request for statistics that the next chain answers.
    asked: Option<u64>,
}

pub(super) struct Worker {
    lanes: Vec<Lane>,
    pub(super) reclaimer: Reclaimer,
    shared: Arc<Shared>,
    notifier: Notifier,
    /// The driver says what free pages hold.
    poisoned: bool,
    /// Bytes of page numbers of which one request can make sense: one for each page that there is.
    most_numbers: u64,
}

impl Worker {
    pub(super) fn new(
        queues: Vec<ActiveQueue>,
        roles: Roles,
        shared: Arc<Shared>,
        notifier: Notifier,
    ) -> Self {
        let lane = |queue: ActiveQueue| {
            let role = roles.of(queue.index());
            Lane { role, queue, open: None, done: 0, asked: None }
        };
        let lanes = queues.into_iter().map(lane).collect();
        let reclaimer = Reclaimer::default();
        Self { lanes, reclaimer, shared, notifier, poisoned: false, most_numbers: 0 }
    }

    /// For `ram` bytes of memory, with the `reclaimer` of an earlier life; `poisoned` if the driver
    /// says what free pages hold.
    pub(super) fn with_memory(self, ram: u64, reclaimer: Reclaimer, poisoned: bool) -> Self {
        let most_numbers = ram / PAGE_SIZE * PFN_LEN as u64;
        Self { reclaimer, poisoned, most_numbers, ..self }
    }

    /// Gives everything back, with nothing in flight. What was half done is done again later, which
    /// harms nothing: the driver does not use a page before its chain comes back.
    pub(super) fn into_parts(self) -> (Vec<ActiveQueue>, Reclaimer) {
        let queues = self.lanes.into_iter().map(|mut lane| {
            if lane.open.is_some() {
                lane.queue.undo_pop();
            }
            lane.queue
        });
        (queues.collect(), self.reclaimer)
    }

    /// Works on lane `place`; true if there may be more to do.
    fn serve(&mut self, place: usize) -> Result<bool, QueueFault> {
        let (shared, reclaimer) = (&*self.shared, &mut self.reclaimer);
        let most = self.most_numbers;
        let Some(lane) = self.lanes.get_mut(place) else {
            return Ok(false);
        };
        match lane.role {
            Role::Inflate => lane.step_by_step(|work| inflate(&work, reclaimer, shared, most)),
            Role::Deflate => lane.step_by_step(|work| deflate(&work, shared)),
            Role::Report => {
                // Pages come back zeroed; with any other poison they must stay as they are
                // (virtio 1.3, section 5.5.6.7).
                let keep = self.poisoned && shared.poison() != 0;
                lane.step_by_step(|work| report(&work, reclaimer, shared, keep))
            }
            Role::Statistics => lane.statistics(shared),
            Role::Idle => Ok(false),
        }
    }
}

impl Handler for Worker {
    fn attach(&mut self, sources: &mut Sources<'_, '_>) -> io::Result<()> {
        for (place, lane) in self.lanes.iter().enumerate() {
            sources.add(Token(place as u32), lane.queue.kick(), Interest::Read)?;
        }
        Ok(())
    }

    fn handle(&mut self, token: Token, _sources: &mut Sources<'_, '_>) -> Flow {
        let place = token.0 as usize;
        let Some(kick) = self.lanes.get(place).map(|lane| lane.queue.kick().clone()) else {
            return Flow::Continue;
        };
        kick.clear();
        match self.serve(place) {
            Ok(more) => {
                if more {
                    kick.signal();
                }
                Flow::Continue
            }
            Err(fault) => {
                if count(&self.shared.counters.guest_faults, 1) < LOGGED_FAULTS {
                    tracing::warn!(%fault, "balloon stopped");
                }
                self.shared.disconnect();
                self.notifier.needs_reset();
                Flow::Finished
            }
        }
    }
}

// --- lanes -------------------------------------------------------------------------------------

/// A chain, and how many of its bytes are done.
struct Work<'a> {
    chain: &'a Chain,
    memory: &'a Memory,
    done: u64,
}

/// What comes after a step.
enum Next {
    /// The next one, with so many bytes done.
    Step(u64),
    /// The answer.
    Answer,
}

impl Lane {
    /// Works on chains by `step`, up to [`BUDGET`] of them; true if there may be more.
    fn step_by_step(&mut self, mut step: impl FnMut(Work<'_>) -> Next) -> Result<bool, QueueFault> {
        for _ in 0..BUDGET {
            let chain = match self.open.take() {
                Some(chain) => chain,
                None => {
                    self.done = 0;
                    let Some(chain) = self.queue.pop()? else {
                        self.queue.notify()?;
                        return self.queue.enable_notification();
                    };
                    chain
                }
            };
            let work = Work { chain: &chain, memory: self.queue.memory(), done: self.done };
            match step(work) {
                Next::Answer => self.queue.complete(&chain, 0)?,
                Next::Step(done) => {
                    self.done = done;
                    self.open = Some(chain);
                }
            }
        }
        self.queue.notify()?;
        Ok(true)
    }

    /// The driver always has one buffer here. Giving it back asks for fresh statistics, which come
    /// as the next buffer (virtio 1.3, section 5.5.6.3).
    fn statistics(&mut self, shared: &Shared) -> Result<bool, QueueFault> {
        for _ in 0..BUDGET {
            if let Some(chain) = self.open.take() {
                let Some(number) = shared.wanted() else {
                    self.open = Some(chain);
                    self.queue.notify()?;
                    return Ok(false);
                };
                self.asked = Some(number);
                self.queue.complete(&chain, 0)?;
            }
            let Some(chain) = self.queue.pop()? else {
                self.queue.notify()?;
                return self.queue.enable_notification();
            };
            if let Some(number) = self.asked.take() {
                shared.publish(number, read_stats(&chain, self.queue.memory(), shared));
            }
            self.open = Some(chain);
        }
        self.queue.notify()?;
        Ok(true)
    }
}

// --- requests ----------------------------------------------------------------------------------

/// Gives the pages of up to [`STEP_PAGES`] page numbers back. An array of more than `most` bytes
/// repeats itself, and only its start is looked at.
fn inflate(work: &Work<'_>, reclaimer: &mut Reclaimer, shared: &Shared, most: u64) -> Next {
    let counters = &shared.counters;
    if work.done >= most {
        count(&counters.malformed_requests, 1);
        return Next::Answer;
    }
    let mut reader = work.chain.reader(work.memory);
    skip(&mut reader, work.done);
    let mut array = [0; STEP_PAGES * PFN_LEN];
    let len = read_some(&mut reader, &mut array);
    if !len.is_multiple_of(PFN_LEN) {
        count(&counters.malformed_requests, 1);
    }
    for run in runs(array.get(..len).unwrap_or_default()) {
        let outcome = reclaimer.release(work.memory, run.start(), run.len());
        let refused = outcome.refused / PAGE_SIZE;
        count(&counters.inflated_pages, u64::from(run.pages).saturating_sub(refused));
        count(&counters.released_bytes, outcome.released);
        count(&counters.kept_bytes, outcome.kept);
        count(&counters.refused_pages, refused);
    }
    match len < array.len() {
        true => Next::Answer,
        false => Next::Step(work.done.saturating_add(len as u64)),
    }
}

/// There is nothing to do: the guest gets a page by touching it.
fn deflate(work: &Work<'_>, shared: &Shared) -> Next {
    let (pages, rest) =
        (work.chain.readable_len() / PFN_LEN as u64, work.chain.readable_len() % PFN_LEN as u64);
    count(&shared.counters.deflated_pages, pages);
    count(&shared.counters.malformed_requests, u64::from(rest != 0));
    Next::Answer
}

/// Gives up to [`STEP_BYTES`] of a report back, unless the guest wants to `keep` their content. The
/// buffers of a report are the free memory itself.
fn report(work: &Work<'_>, reclaimer: &mut Reclaimer, shared: &Shared, keep: bool) -> Next {
    let counters = &shared.counters;
    if keep {
        let len = work.chain.writable_len();
        count(&counters.reported_bytes, len);
        count(&counters.kept_bytes, len);
        return Next::Answer;
    }
    let mut writer = work.chain.writer(work.memory);
    let mut left = work.done;
    while let Some(skipped) = writer.take_segment(usize::try_from(left).unwrap_or(usize::MAX)) {
        left = left.saturating_sub(u64::from(skipped.len));
    }
    let Some(piece) = writer.take_segment(STEP_BYTES) else {
        return Next::Answer;
    };
    let len = u64::from(piece.len);
    let outcome = reclaimer.release(work.memory, piece.address.0, len);
    count(&counters.reported_bytes, len);
    count(&counters.released_bytes, outcome.released);
    count(&counters.kept_bytes, outcome.kept);
    Next::Step(work.done.saturating_add(len))
}

fn read_stats(chain: &Chain, memory: &Memory, shared: &Shared) -> Stats {
    let mut array = [0; MAX_STATS_LEN];
    let mut reader = chain.reader(memory);
    let len = read_some(&mut reader, &mut array);
    let stats = Stats::parse(array.get(..len).unwrap_or_default());
    if reader.remaining() > 0 || stats == Stats::default() {
        count(&shared.counters.malformed_requests, 1);
    }
    stats
}

fn skip(reader: &mut ChainReader<'_>, bytes: u64) {
    let mut left = bytes;
    while let Some(skipped) = reader.take_segment(usize::try_from(left).unwrap_or(usize::MAX)) {
        left = left.saturating_sub(u64::from(skipped.len));
    }
}

/// Fills `array` as far as there is something; how many bytes.
fn read_some(reader: &mut ChainReader<'_>, array: &mut [u8]) -> usize {
    let mut len = 0;
    while let Some(rest) = array.get_mut(len..).filter(|rest| !rest.is_empty()) {
        match reader.read(rest) {
            // Cannot fail: the chain was checked to lie in guest RAM.
            Ok(0) | Err(_) => break,
            Ok(read) => len += read,
        }
    }
    len
}
