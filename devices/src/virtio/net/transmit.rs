//! Frames on their way from the guest to the host.

use std::io::Read;

use super::handle::{Shared, add, count};
use super::header::{self, FrameFault};
use super::tap::{HEADER_LEN, Moved, Tap};
use crate::memory::Memory;
use crate::virtio::Chain;
use crate::virtio::queue::{ActiveQueue, QueueFault};
use crate::virtio::vectors::Gather;

/// What became of an attempt to send a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sent {
    /// One frame was taken from the guest, and sent or dropped.
    One,
    /// The guest has none; it notifies of new ones.
    Empty,
    /// The interface is full; the frame stays on the ring.
    Full,
    /// The interface is down; the frame was dropped.
    Down,
    /// The interface is gone; the frame was dropped.
    Gone,
}

/// The transmit queue of one pair.
pub struct Transmit {
    queue: ActiveQueue,
    memory: Memory,
    features: u64,
    /// The guest was asked to notify.
    asked: bool,
}

impl Transmit {
    /// Sends what is in `queue`, with the offloads of `features`.
    pub fn new(queue: ActiveQueue, features: u64) -> Self {
        Self { memory: queue.memory().clone(), queue, features, asked: true }
    }

    /// The queue, for its events.
    pub fn queue(&mut self) -> &mut ActiveQueue {
        &mut self.queue
    }

    /// Gives the queue back; nothing is in flight between two calls.
    pub fn into_queue(self) -> ActiveQueue {
        self.queue
    }

    /// Sends one frame; drops it without a `tap`.
    pub fn send(&mut self, tap: Option<&Tap>, shared: &Shared) -> Result<Sent, QueueFault> {
        let Some(chain) = self.queue.pop()? else {
            self.asked = true;
            return Ok(match self.queue.enable_notification()? {
                true => Sent::One,
                false => Sent::Empty,
            });
        };
        if std::mem::take(&mut self.asked) {
            self.queue.disable_notification()?;
        }
        let sent = match self.write(&chain, tap, shared) {
            Ok(Moved::Frame(len)) => {
                count(&shared.counters.tx_frames);
                add(&shared.counters.tx_bytes, len.saturating_sub(HEADER_LEN));
                shared.charge_tx(len.saturating_sub(HEADER_LEN));
                Sent::One
            }
            Ok(Moved::NotNow) => {
                self.queue.undo_pop();
                count(&shared.counters.tx_blocked);
                return Ok(Sent::Full);
            }
            Ok(Moved::Lost) => dropped(Sent::One, shared),
            Ok(Moved::Down) => dropped(Sent::Down, shared),
            Ok(Moved::Gone) => dropped(Sent::Gone, shared),
            Err(fault) => {
                shared.guest_fault(&fault);
                // A guest that sends nothing but nonsense is limited like any other.
                shared.charge_tx(0);
                dropped(Sent::One, shared)
            }
        };
        self.queue.complete(&chain, 0)?;
        Ok(sent)
    }

    fn write(
        &self,
        chain: &Chain,
        tap: Option<&Tap>,
        shared: &Shared,
    ) -> Result<Moved, FrameFault> {
        let mut reader = chain.reader(&self.memory);
        let mut header = [0; HEADER_LEN];
        // Copied once: what is checked is what the host gets.
        reader.read_exact(&mut header).map_err(|_| FrameFault::NoHeader(chain.readable_len()))?;
        let header = header::outgoing(&header, reader.remaining(), self.features)?;
        let Some(tap) = tap.filter(|_| shared.link_wanted()) else {
            return Ok(Moved::Lost);
        };
        let mut gather = Gather::with_capacity(chain.readable().len() + 1);
        gather.push_host(&header);
        while let Some(segment) = reader.take_segment(usize::MAX) {
            if !gather.push_guest(&self.memory, segment) {
                return Ok(Moved::Lost);
            }
        }
        Ok(tap.send(&gather))
    }
}

fn dropped(sent: Sent, shared: &Shared) -> Sent {
    count(&shared.counters.tx_dropped);
    sent
}
