//! The device's three queues, and how packets get from and onto them.

use std::time::{Duration, Instant};

use super::muxer::Muxer;
use crate::memory::Bytes;
use crate::virtio::Chain;
use crate::virtio::queue::{ActiveQueue, QueueFault};

/// Packets handled each way per wake-up before other devices get their turn: at the largest packet
/// size a megabyte, a fraction of a millisecond of copying.
const BUDGET: usize = 16;

/// How long receive buffers wait for the guest to take note that its connections are gone.
const NOTE_TIMEOUT: Duration = Duration::from_secs(10);

/// VIRTIO_VSOCK_EVENT_TRANSPORT_RESET (virtio 1.3, section 5.10.6.7), all of `struct
/// virtio_vsock_event`.
const TRANSPORT_RESET: [u8; 4] = 0_u32.to_le_bytes();

/// The queues while the device is started.
pub struct Rings {
    /// From host to guest.
    pub rx: ActiveQueue,
    /// From guest to host.
    pub tx: ActiveQueue,
    /// Events to the guest.
    pub event: ActiveQueue,
    /// The guest's packets wait for receive buffers that take our answers.
    pub tx_waits: bool,
}

/// Whether the guest may get packets.
///
/// After a restore it must first hear that its old connections are gone. Its driver ends all that
/// it has when it handles that event, whatever came in on the other queue before, so a packet of a
/// new connection that overtakes the event is lost with the old ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    /// The event is to be sent.
    Announce,
    /// It is sent; the driver takes note by giving the buffer back, which makes more than
    /// `pending` of them.
    Announced {
        /// Event buffers that were there.
        pending: u16,
        /// When to believe that the driver never gives buffers back.
        until: Instant,
    },
    /// It may.
    Open,
}

impl Rings {
    /// Handles the guest's packets; true if there are more.
    pub fn take(&mut self, muxer: &mut Muxer) -> Result<bool, QueueFault> {
        self.tx_waits = false;
        for _ in 0..BUDGET {
            if !muxer.can_receive() {
                self.tx_waits = true;
                self.tx.notify()?;
                return Ok(false);
            }
            let Some(chain) = self.tx.pop()? else {
                self.tx.notify()?;
                return self.tx.enable_notification();
            };
            muxer.receive(&chain, self.tx.memory());
            self.tx.complete(&chain, 0)?;
        }
        self.tx.notify()?;
        Ok(true)
    }

    /// Fills receive buffers; true if there is more to send and there may be buffers for it.
    pub fn give(&mut self, muxer: &mut Muxer) -> Result<bool, QueueFault> {
        let mut used = false;
        let mut budget = BUDGET;
        while budget > 0 && muxer.has_packets() {
            let Some(chain) = next_buffer(&mut self.rx)? else {
                break;
            };
            budget -= 1;
            let written = if chain.readable().is_empty() {
                muxer.produce(&chain, self.rx.memory())
            } else {
                // Not a receive buffer. It goes back empty, as one that is too small does.
                Some(0)
            };
            match written {
                Some(len) => {
                    self.rx.complete(&chain, len)?;
                    used = true;
                }
                None => self.rx.undo_pop(),
            }
        }
        if used {
            self.rx.notify()?;
        }
        Ok(budget == 0)
    }

    /// Does what `gate` waits for; the new one.
    pub fn pass(&mut self, gate: Gate, now: Instant) -> Result<Gate, QueueFault> {
        match gate {
            Gate::Open => Ok(Gate::Open),
            Gate::Announce => match next_buffer(&mut self.event)? {
                Some(chain) => {
                    let written = self.announce(&chain);
                    self.event.complete(&chain, written)?;
                    self.event.notify()?;
                    let pending = watch_for_more(&mut self.event)?;
                    Ok(Gate::Announced { pending, until: now + NOTE_TIMEOUT })
                }
                None => Ok(Gate::Announce),
            },
            Gate::Announced { pending, until } => {
                let noted = self.event.pending()? > pending || now >= until;
                Ok(if noted { Gate::Open } else { gate })
            }
        }
    }

    fn announce(&self, chain: &Chain) -> u32 {
        let room =
            chain.writable().first().filter(|room| room.len as usize >= TRANSPORT_RESET.len());
        let memory = self.event.memory();
        match room {
            Some(room) if memory.write_slice(&TRANSPORT_RESET, room.address).is_ok() => {
                TRANSPORT_RESET.len() as u32
            }
            _ => 0,
        }
    }
}

/// Asks the driver to say when it adds to the chains that are there; how many these are.
///
/// The driver is asked from the chain on that would be popped next, so all are popped and put back.
fn watch_for_more(queue: &mut ActiveQueue) -> Result<u16, QueueFault> {
    let mut pending = 0;
    let popped = loop {
        match queue.pop() {
            Ok(Some(_)) => pending += 1,
            Ok(None) if queue.enable_notification()? => {}
            other => break other,
        }
        if pending > queue.size() {
            break Ok(None);
        }
    };
    (0..pending).for_each(|_| queue.undo_pop());
    popped.map(|_| pending)
}

/// The next chain; if there is none, asks the driver to say when there is.
fn next_buffer(queue: &mut ActiveQueue) -> Result<Option<Chain>, QueueFault> {
    match queue.pop()? {
        Some(chain) => Ok(Some(chain)),
        None if queue.enable_notification()? => queue.pop(),
        None => Ok(None),
    }
}
