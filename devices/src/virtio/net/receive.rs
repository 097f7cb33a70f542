//! Frames on their way from the host to the guest.
//!
//! A frame is read straight into the guest's buffers, with a spill of our own behind them: nobody
//! can tell how long the next frame is, and what does not fit would be cut off. What has spilled is
//! copied into further buffers; if the guest has none at the moment, the frame is held for a while,
//! and nothing else is read.

use std::time::{Duration, Instant};

use super::buffers::{Buffers, Filled};
use super::handle::{Shared, add, count};
use super::header::{self, ETHERNET_LEN, Header, MAX_FRAME};
use super::tap::{HEADER_LEN, Moved, Tap};
use crate::memory::Memory;
use crate::virtio::queue::{ActiveQueue, QueueFault};
use crate::virtio::vectors::{MAX_VECTORS, Scatter};

/// Room for the largest frame there is.
const LARGE: usize = HEADER_LEN + MAX_FRAME;

/// Room that is offered after frames that were small: more buffers cost time for each of them.
const SMALL: usize = 2048;

/// Bytes of the spill: a frame that fills it may have been cut.
const SPILL: usize = LARGE + 1;

/// How long a frame is held. Linux, when it was short of memory, tries half a second later to make
/// buffers again; a guest that has no more to give must not be left without a network.
const PATIENCE: Duration = Duration::from_secs(1);

/// What became of an attempt to receive a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// One frame was taken from the host, and given to the guest or dropped.
    One,
    /// There is none.
    Empty,
    /// The guest has no buffers: wait for its notification.
    NoBuffers,
    /// The guest has too few buffers for the frame that is held until then: wait for its
    /// notification or for that time.
    Held(Instant),
    /// The interface is gone.
    Gone,
}

/// A frame that is partly in the buffers and partly in the spill.
#[derive(Clone, Copy)]
struct Held {
    /// Bytes, header included.
    len: usize,
    /// Of these in the buffers.
    placed: usize,
    until: Instant,
}

/// The receive queue of one pair.
pub struct Receive {
    queue: ActiveQueue,
    memory: Memory,
    buffers: Buffers,
    /// A frame may be spread over several buffers.
    mergeable: bool,
    header: Header,
    spill: Box<[u8]>,
    held: Option<Held>,
    /// Room to offer for the next frame.
    wanted: usize,
    /// The guest was asked to notify.
    asked: bool,
}

impl Receive {
    /// Receives into `queue`.
    pub fn new(queue: ActiveQueue, mergeable: bool) -> Self {
        Self {
            memory: queue.memory().clone(),
            queue,
            buffers: Buffers::default(),
            mergeable,
            header: [0; HEADER_LEN],
            spill: vec![0; SPILL].into_boxed_slice(),
            held: None,
            wanted: LARGE,
            asked: true,
        }
    }

    /// The queue, for its events.
    pub fn queue(&mut self) -> &mut ActiveQueue {
        &mut self.queue
    }

    /// Gives the queue back, with nothing taken off it that was not used.
    pub fn into_queue(mut self, shared: &Shared) -> ActiveQueue {
        if self.held.is_some() {
            count(&shared.counters.rx_dropped);
        }
        self.buffers.undo(&mut self.queue);
        self.queue
    }

    /// Receives one frame.
    pub fn receive(&mut self, tap: &Tap, shared: &Shared) -> Result<Received, QueueFault> {
        if let Some(held) = self.held.take() {
            return self.place(held, shared);
        }
        if !shared.link_wanted() {
            return Ok(self.discard(tap, shared));
        }
        if !self.make_room(self.wanted, shared)? {
            return Ok(Received::NoBuffers);
        }
        let (moved, placed) = self.read(tap);
        let len = match moved {
            Moved::Frame(len) => len,
            Moved::NotNow => return Ok(Received::Empty),
            Moved::Gone => return Ok(Received::Gone),
            Moved::Lost | Moved::Down => return Ok(dropped(shared)),
        };
        shared.charge_rx(len.saturating_sub(HEADER_LEN));
        self.wanted = if len > SMALL { LARGE } else { SMALL };
        if len < HEADER_LEN + ETHERNET_LEN || len - placed.min(len) >= SPILL {
            return Ok(dropped(shared));
        }
        let received =
            self.place(Held { len, placed, until: Instant::now() + PATIENCE }, shared)?;
        if matches!(received, Received::Held(_)) {
            count(&shared.counters.rx_stalled);
        }
        Ok(received)
    }

    /// Takes buffers until there is room for `wanted` bytes, or all that there are; false if there
    /// are none. Once there are too few, the guest notifies of new ones.
    fn make_room(&mut self, wanted: usize, shared: &Shared) -> Result<bool, QueueFault> {
        let wanted = if self.mergeable { wanted } else { 1 };
        for _ in 0..self.queue.size() {
            match self.buffers.fill(&mut self.queue, wanted)? {
                Filled::Refused => shared.guest_fault(&"receive buffer without room for a header"),
                Filled::Short if self.buffers.is_empty() => {
                    if !self.ask()? {
                        return Ok(false);
                    }
                }
                Filled::Short | Filled::Blocked | Filled::Enough => {
                    self.stop_asking()?;
                    return Ok(true);
                }
            }
        }
        // Nothing but buffers of no use: others get their turn, then it goes on here.
        self.queue.kick().signal();
        Ok(false)
    }

    /// Asks the guest to notify of new buffers; true if there are some already.
    fn ask(&mut self) -> Result<bool, QueueFault> {
        self.asked = true;
        self.queue.enable_notification()
    }

    fn stop_asking(&mut self) -> Result<(), QueueFault> {
        match std::mem::take(&mut self.asked) {
            true => self.queue.disable_notification(),
            false => Ok(()),
        }
    }

    /// Reads a frame into the buffers and the spill; also how many bytes found room in buffers.
    fn read(&mut self, tap: &Tap) -> (Moved, usize) {
        let buffers = if self.mergeable { usize::MAX } else { 1 };
        let mut scatter = Scatter::with_capacity(8);
        scatter.push_host(&mut self.header);
        let mut placed = HEADER_LEN;
        for segment in self.buffers.segments(HEADER_LEN, buffers) {
            // One place is for the spill.
            let added = scatter.push_guest(&self.memory, segment, MAX_VECTORS - 1);
            placed = placed.saturating_add(added);
            if added < segment.len as usize {
                break;
            }
        }
        scatter.push_host(&mut self.spill);
        (tap.receive(&mut scatter), placed)
    }

    /// Brings what has spilled into buffers, and gives the frame to the guest.
    fn place(&mut self, held: Held, shared: &Shared) -> Result<Received, QueueFault> {
        let Held { len, placed, .. } = held;
        if !self.mergeable && len > self.buffers.first_room() {
            return Ok(dropped(shared));
        }
        while len > self.buffers.room() {
            match self.buffers.fill(&mut self.queue, len)? {
                Filled::Enough | Filled::Refused => {}
                // Some came meanwhile.
                Filled::Short if !self.buffers.is_full(&self.queue) && self.ask()? => {}
                Filled::Short | Filled::Blocked => return Ok(self.hold(held, shared)),
            }
        }
        let buffers = self.buffers.count(len);
        let Some(header) = header::incoming(&self.header, buffers, shared.offloads()) else {
            return Ok(dropped(shared));
        };
        if let Some(spilled) = len.checked_sub(placed) {
            let spilled = self.spill.get(..spilled).unwrap_or_default();
            self.buffers.write(&self.memory, placed, spilled);
        }
        self.buffers.write(&self.memory, 0, &header);
        self.buffers.complete(&mut self.queue, len)?;
        count(&shared.counters.rx_frames);
        add(&shared.counters.rx_bytes, len - HEADER_LEN);
        Ok(Received::One)
    }

    /// Keeps a frame for which there are too few buffers, unless there never will be enough.
    fn hold(&mut self, held: Held, shared: &Shared) -> Received {
        if self.buffers.is_full(&self.queue) || Instant::now() >= held.until {
            return dropped(shared);
        }
        self.held = Some(held);
        Received::Held(held.until)
    }

    /// Takes a frame from the host that nobody gets.
    fn discard(&mut self, tap: &Tap, shared: &Shared) -> Received {
        let mut scatter = Scatter::with_capacity(1);
        scatter.push_host(&mut self.spill);
        match tap.receive(&mut scatter) {
            Moved::NotNow => Received::Empty,
            Moved::Gone => Received::Gone,
            Moved::Frame(_) | Moved::Lost | Moved::Down => dropped(shared),
        }
    }
}

fn dropped(shared: &Shared) -> Received {
    count(&shared.counters.rx_dropped);
    Received::One
}
