//! A virtqueue in use: pop, complete, notify.
//!
//! Wraps virtio-queue's ring indices with checked chains ([`Chain`]), errors in place of silently
//! dropped entries, and interrupts sent only when the driver wants them. A [`QueueFault`] is the
//! driver's fault; the device answers it with [`super::Notifier::needs_reset`].

use std::num::Wrapping;
use std::sync::atomic::{Ordering, fence};

use serde::{Deserialize, Serialize};
use virtio_queue::{Queue, QueueState, QueueT};
use vm_memory::GuestMemoryBackend;

use super::chain::{Chain, ChainFault};
use super::feature;
use crate::event::Event;
use crate::ids::QueueIndex;
use crate::irq::Interrupt;
use crate::memory::{Bytes, GuestAddress, Memory};
use crate::snapshot::RestoreError;

/// What a driver did wrong with a queue.
#[derive(Debug, thiserror::Error)]
pub enum QueueFault {
    /// The rings are not where the driver said.
    #[error("{queue}: rings are not accessible")]
    Rings {
        /// The queue.
        queue: QueueIndex,
        /// The reason.
        #[source]
        source: virtio_queue::Error,
    },
    /// The available index is further ahead than the queue is long.
    #[error("{queue}: available index is {ahead} ahead of the device, queue has {size} entries")]
    AvailIndex {
        /// The queue.
        queue: QueueIndex,
        /// Entries that the driver claims to have added.
        ahead: u16,
        /// Entries of the queue.
        size: u16,
    },
    /// A chain that cannot be used.
    #[error("{queue}: {source}")]
    Chain {
        /// The queue.
        queue: QueueIndex,
        /// What is wrong with it.
        source: ChainFault,
    },
    /// The driver made the queue ready with addresses or a size that cannot be.
    #[error("{queue}: set up with rings outside guest memory or misaligned")]
    Setup {
        /// The queue.
        queue: QueueIndex,
    },
}

/// Flag of the available ring: the driver is polling.
const AVAIL_NO_INTERRUPT: u16 = 1;

/// Where a queue's doorbell and interrupt go; owned by the transport, shared with the device.
#[derive(Clone, Debug)]
pub struct QueueLines {
    /// Signalled by the driver's notification.
    pub kick: Event,
    /// Raised when a chain was completed.
    pub interrupt: Interrupt,
}

/// A queue that the driver has made ready, in the hands of its device.
#[derive(Debug)]
pub struct ActiveQueue {
    index: QueueIndex,
    queue: Queue,
    memory: Memory,
    lines: QueueLines,
    indirect: bool,
    event_idx: bool,
    /// Chains were completed since the driver was last notified.
    unreported: bool,
    /// Index of the used ring when that was last decided.
    reported: Wrapping<u16>,
}

impl ActiveQueue {
    /// Takes over `queue` as the driver configured it, and checks that its rings are in RAM.
    pub fn new(
        index: QueueIndex,
        mut queue: Queue,
        memory: Memory,
        lines: QueueLines,
        features: u64,
    ) -> Result<Self, QueueFault> {
        let event_idx = features & feature::RING_EVENT_IDX != 0;
        queue.set_event_idx(event_idx);
        let indirect = features & feature::RING_INDIRECT_DESC != 0;
        let reported = Wrapping(queue.next_used());
        let unreported = false;
        let this = Self { index, queue, memory, lines, indirect, event_idx, unreported, reported };
        if this.rings_are_valid() { Ok(this) } else { Err(QueueFault::Setup { queue: index }) }
    }

    fn rings_are_valid(&self) -> bool {
        let size = u64::from(self.queue.size());
        // Rings with the event index fields, virtio 1.3 sections 2.7.6 and 2.7.8.
        let rings = [
            (self.queue.desc_table(), 16 * size),
            (self.queue.avail_ring(), 6 + 2 * size),
            (self.queue.used_ring(), 6 + 8 * size),
        ];
        self.queue.ready()
            && rings.iter().all(|&(start, len)| {
                GuestMemoryBackend::check_range(&self.memory, GuestAddress(start), len as usize)
            })
    }

    /// Which queue of its device this is.
    pub fn index(&self) -> QueueIndex {
        self.index
    }

    /// The event to watch for notifications.
    pub fn kick(&self) -> &Event {
        &self.lines.kick
    }

    /// The line to raise when chains were completed by somebody else than this queue.
    pub fn interrupt(&self) -> &Interrupt {
        &self.lines.interrupt
    }

    /// Guest RAM.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Entries of the queue.
    pub fn size(&self) -> u16 {
        self.queue.size()
    }

    /// The next chain that the driver made available, checked.
    ///
    /// A chain that is refused has been taken off the ring; after a fault the device should ask
    /// for a reset, since the driver does not follow the specification.
    pub fn pop(&mut self) -> Result<Option<Chain>, QueueFault> {
        let ahead = self.pending()?;
        if ahead == 0 {
            return Ok(None);
        }
        let head = self.head_at(self.queue.next_avail())?;
        self.queue.set_next_avail(self.queue.next_avail().wrapping_add(1));
        let table = GuestAddress(self.queue.desc_table());
        Chain::parse(&self.memory, table, self.queue.size(), head, self.indirect)
            .map(Some)
            .map_err(|source| QueueFault::Chain { queue: self.index, source })
    }

    /// Puts the chain of the last [`ActiveQueue::pop`] back, to be popped again.
    pub fn undo_pop(&mut self) {
        self.queue.set_next_avail(self.queue.next_avail().wrapping_sub(1));
    }

    /// Chains that the driver has made available and the device has not popped.
    pub fn pending(&self) -> Result<u16, QueueFault> {
        let avail = self.queue.avail_idx(&self.memory, Ordering::Acquire).map_err(self.rings())?;
        let ahead = (avail - Wrapping(self.queue.next_avail())).0;
        if ahead > self.queue.size() {
            let size = self.queue.size();
            return Err(QueueFault::AvailIndex { queue: self.index, ahead, size });
        }
        Ok(ahead)
    }

    fn head_at(&self, position: u16) -> Result<u16, QueueFault> {
        // The size is a power of two and at least 1, so the mask is the remainder.
        let slot = u64::from(position & self.queue.size().wrapping_sub(1));
        let address = self.queue.avail_ring().wrapping_add(4 + 2 * slot);
        let head: u16 = self
            .memory
            .load(GuestAddress(address), Ordering::Relaxed)
            .map_err(virtio_queue::Error::GuestMemory)
            .map_err(self.rings())?;
        Ok(u16::from_le(head))
    }

    /// Gives a chain back; `len` is the number of bytes written to its writable part.
    pub fn complete(&mut self, chain: &Chain, len: u32) -> Result<(), QueueFault> {
        self.complete_head(chain.head(), len)
    }

    /// Like [`ActiveQueue::complete`], for a device that has kept only the head.
    pub fn complete_head(&mut self, head: u16, len: u32) -> Result<(), QueueFault> {
        let rings = self.rings();
        self.queue.add_used(&self.memory, head, len).map_err(rings)?;
        self.unreported = true;
        Ok(())
    }

    /// Gives several chains back, each with its number of bytes written, so that the driver sees
    /// either all or none of them. For what is spread over several chains: a driver that polls
    /// would take the first for all there is.
    pub fn complete_all(&mut self, chains: &[(u16, u32)]) -> Result<(), QueueFault> {
        let (size, start) = (self.queue.size(), self.queue.next_used());
        let mut next = start;
        for &(head, len) in chains {
            // The size is a power of two and at least 1, so the mask is the remainder.
            let slot = u64::from(next & size.wrapping_sub(1));
            let entry = [u32::from(head).to_le(), len.to_le()];
            self.memory
                .write_obj(entry, GuestAddress(self.queue.used_ring().wrapping_add(4 + 8 * slot)))
                .map_err(virtio_queue::Error::GuestMemory)
                .map_err(self.rings())?;
            next = next.wrapping_add(1);
        }
        if next == start {
            return Ok(());
        }
        self.memory
            .store(
                next.to_le(),
                GuestAddress(self.queue.used_ring().wrapping_add(2)),
                Ordering::Release,
            )
            .map_err(virtio_queue::Error::GuestMemory)
            .map_err(self.rings())?;
        self.queue.set_next_used(next);
        self.unreported = true;
        Ok(())
    }

    /// Interrupts the driver if it asked to hear of the chains completed since the last call;
    /// never without any.
    pub fn notify(&mut self) -> Result<(), QueueFault> {
        if std::mem::take(&mut self.unreported) && self.driver_listens()? {
            self.lines.interrupt.raise();
        }
        Ok(())
    }

    fn driver_listens(&mut self) -> Result<bool, QueueFault> {
        // The used ring is written before what the driver wants is read, as it does the opposite.
        fence(Ordering::SeqCst);
        let wish = |offset| {
            self.memory
                .load(GuestAddress(self.queue.avail_ring().wrapping_add(offset)), Ordering::Relaxed)
                .map(u16::from_le)
                .map_err(virtio_queue::Error::GuestMemory)
                .map_err(self.rings())
        };
        if !self.event_idx {
            // Without indices the driver has a flag (virtio 1.3, section 2.7.7).
            return Ok(wish(0)? & AVAIL_NO_INTERRUPT == 0);
        }
        // The index whose completion it waits for, if that is among the new ones (section 2.7.10).
        let event = Wrapping(wish(4 + 2 * u64::from(self.queue.size()))?);
        let used = Wrapping(self.queue.next_used());
        let new = used - std::mem::replace(&mut self.reported, used);
        Ok(used - event - Wrapping(1) < new)
    }

    /// Asks the driver to notify of new chains; true if some came meanwhile, so pop again.
    pub fn enable_notification(&mut self) -> Result<bool, QueueFault> {
        let rings = self.rings();
        self.queue.enable_notification(&self.memory).map_err(rings)
    }

    /// Asks the driver not to notify: the device is polling.
    pub fn disable_notification(&mut self) -> Result<(), QueueFault> {
        let rings = self.rings();
        self.queue.disable_notification(&self.memory).map_err(rings)
    }

    /// Once after each resume: makes the device look at the ring and the driver at its results, so
    /// that a signal lost in the gap cannot stall either.
    pub fn nudge(&self) {
        self.lines.kick.signal();
        self.lines.interrupt.raise();
    }

    /// The ring positions, for a snapshot. Only meaningful on a queue that was stopped.
    pub fn record(&self) -> QueueRecord {
        QueueRecord {
            index: self.index.0,
            size: self.queue.size(),
            desc_table: self.queue.desc_table(),
            avail_ring: self.queue.avail_ring(),
            used_ring: self.queue.used_ring(),
            next_avail: self.queue.next_avail(),
            next_used: self.queue.next_used(),
        }
    }

    /// The index of the used ring as it stands in guest memory, for a queue that somebody else works
    /// on.
    pub fn used_index(&self) -> Result<u16, QueueFault> {
        let index = self.queue.used_idx(&self.memory, Ordering::Acquire).map_err(self.rings())?;
        Ok(index.0)
    }

    /// The index of the available ring, for the same purpose: how far the driver is.
    pub fn avail_index(&self) -> Result<u16, QueueFault> {
        let index = self.queue.avail_idx(&self.memory, Ordering::Acquire).map_err(self.rings())?;
        Ok(index.0)
    }

    /// Takes the queue over from somebody else who worked on it: what was completed stands in guest
    /// memory, `next_avail` is the next chain to take. `None`, if that is not known: the first that
    /// was not completed, provided that it was done in order.
    pub fn take_over(&mut self, next_avail: Option<u16>) -> Result<(), QueueFault> {
        let used = self.used_index()?;
        self.queue.set_next_used(used);
        self.queue.set_next_avail(next_avail.unwrap_or(used));
        self.reported = Wrapping(used);
        self.unreported = false;
        Ok(())
    }

    fn rings(&self) -> impl Fn(virtio_queue::Error) -> QueueFault + use<> {
        let queue = self.index;
        move |source| QueueFault::Rings { queue, source }
    }
}

/// A queue's saved form.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueRecord {
    /// Its number.
    pub index: u16,
    /// Entries.
    pub size: u16,
    /// Guest address of the descriptor table.
    pub desc_table: u64,
    /// Guest address of the available ring.
    pub avail_ring: u64,
    /// Guest address of the used ring.
    pub used_ring: u64,
    /// Next entry of the available ring to take.
    pub next_avail: u16,
    /// Next entry of the used ring to fill.
    pub next_used: u16,
}

impl QueueRecord {
    /// Makes the queue again, with the largest size `max_size` that its device offers.
    pub fn to_queue(&self, max_size: u16) -> Result<Queue, RestoreError> {
        Queue::try_from(QueueState {
            max_size,
            next_avail: self.next_avail,
            next_used: self.next_used,
            event_idx_enabled: false,
            size: self.size,
            ready: true,
            desc_table: self.desc_table,
            avail_ring: self.avail_ring,
            used_ring: self.used_ring,
        })
        .map_err(|_| RestoreError::Invalid {
            kind: "virtqueue",
            field: "size and addresses",
            value: format!("{self:?}"),
        })
    }
}

#[cfg(test)]
mod tests;
