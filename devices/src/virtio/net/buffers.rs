//! The receive buffers that were taken off the ring and are not used yet.
//!
//! They stay in the order in which they were taken, so that those left over can be put back when
//! the device stops.

use std::collections::VecDeque;

use crate::memory::{Bytes, GuestAddress, Memory};
use crate::virtio::queue::{ActiveQueue, QueueFault};
use crate::virtio::{Chain, Segment};

use super::tap::HEADER_LEN;

/// Buffers of a queue, first in, first used.
#[derive(Default)]
pub struct Buffers {
    chains: VecDeque<Chain>,
    /// Bytes of all of them.
    room: usize,
}

/// What a look at the ring gave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filled {
    /// As much room as was wanted.
    Enough,
    /// Less: the ring has no more, or all of it was taken.
    Short,
    /// Less: the next buffer has no room for a header, and waits for its turn to be given back.
    Blocked,
    /// A buffer without room for a header was given back unused.
    Refused,
}

fn room(chain: &Chain) -> usize {
    usize::try_from(chain.writable_len()).unwrap_or(usize::MAX)
}

impl Buffers {
    /// Bytes of room.
    pub fn room(&self) -> usize {
        self.room
    }

    /// Bytes of room in the first buffer; 0 without one.
    pub fn first_room(&self) -> usize {
        self.chains.front().map_or(0, room)
    }

    /// True without a buffer.
    pub fn is_empty(&self) -> bool {
        self.chains.is_empty()
    }

    /// True with all buffers that `queue` can have.
    pub fn is_full(&self, queue: &ActiveQueue) -> bool {
        self.chains.len() >= usize::from(queue.size())
    }

    /// Takes buffers off `queue` until there is room for `wanted` bytes.
    ///
    /// A buffer must have room for the header (virtio 1.3, section 5.1.6.3.1). One that has not is
    /// given back with nothing in it, but only when it is its turn: what lies behind it waits. No
    /// more are taken than the queue has entries, whatever the guest claims.
    pub fn fill(&mut self, queue: &mut ActiveQueue, wanted: usize) -> Result<Filled, QueueFault> {
        while self.room < wanted.max(1) {
            if self.is_full(queue) {
                return Ok(Filled::Short);
            }
            let Some(chain) = queue.pop()? else {
                return Ok(Filled::Short);
            };
            let room = room(&chain);
            if room >= HEADER_LEN {
                self.room = self.room.saturating_add(room);
                self.chains.push_back(chain);
            } else if self.chains.is_empty() {
                queue.complete(&chain, 0)?;
                return Ok(Filled::Refused);
            } else {
                queue.undo_pop();
                return Ok(Filled::Blocked);
            }
        }
        Ok(Filled::Enough)
    }

    /// The pieces of the first `buffers` buffers from byte `skip` on.
    pub fn segments(&self, skip: usize, buffers: usize) -> impl Iterator<Item = Segment> + '_ {
        let mut skip = skip as u64;
        let all = self.chains.iter().take(buffers).flat_map(Chain::writable);
        all.filter_map(move |segment| {
            let cut = skip.min(u64::from(segment.len));
            skip -= cut;
            // Cannot wrap: the segment was checked to lie in guest RAM.
            let address = GuestAddress(segment.address.0.wrapping_add(cut));
            let len = segment.len - cut as u32;
            (len > 0).then_some(Segment { address, len })
        })
    }

    /// Writes `bytes` from byte `skip` on; as many as there is room for.
    pub fn write(&self, memory: &Memory, skip: usize, bytes: &[u8]) {
        let mut left = bytes;
        for segment in self.segments(skip, usize::MAX) {
            let (piece, rest) = left.split_at_checked(segment.len as usize).unwrap_or((left, &[]));
            // Cannot fail: the chain was checked to lie in guest RAM.
            let _ = memory.write_slice(piece, segment.address);
            left = rest;
            if left.is_empty() {
                return;
            }
        }
    }

    /// How many buffers the first `len` bytes take.
    pub fn count(&self, len: usize) -> u16 {
        let mut covered: usize = 0;
        let mut count: u16 = 0;
        for chain in &self.chains {
            if covered >= len {
                break;
            }
            covered = covered.saturating_add(room(chain));
            count = count.saturating_add(1);
        }
        count
    }

    /// Gives the first buffers back with `len` bytes in them, all at once.
    pub fn complete(&mut self, queue: &mut ActiveQueue, len: usize) -> Result<(), QueueFault> {
        let mut left = len;
        let mut used = Vec::with_capacity(1);
        while left > 0
            && let Some(chain) = self.chains.pop_front()
        {
            let room = room(&chain);
            self.room = self.room.saturating_sub(room);
            let filled = left.min(room);
            left -= filled;
            used.push((chain.head(), u32::try_from(filled).unwrap_or(u32::MAX)));
        }
        queue.complete_all(&used)
    }

    /// Puts all back on the ring they came from.
    pub fn undo(&mut self, queue: &mut ActiveQueue) {
        for _ in self.chains.drain(..) {
            queue.undo_pop();
        }
        self.room = 0;
    }
}
