//! A descriptor chain, copied from guest memory once and checked as a whole.
//!
//! The driver can rewrite descriptors at any time, so each is read exactly once, and every segment
//! is checked against guest RAM before the device sees the first one: a device can then read and
//! write without a thought for loops, wraps or holes (virtio 1.3, sections 2.7.5 and 2.7.13).

use std::io;

use virtio_queue::desc::split::Descriptor;
use vm_memory::GuestMemoryBackend;

use crate::memory::{Bytes, GuestAddress, Memory};

/// Why a chain was refused. All of these are faults of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChainFault {
    /// A descriptor index beyond the table.
    #[error("descriptor {index} is beyond the table of {size}")]
    Index {
        /// The index.
        index: u16,
        /// Entries of the table.
        size: u16,
    },
    /// A chain with more descriptors than the queue has: a loop, or against the specification.
    #[error("chain has more than {0} descriptors")]
    TooLong(u16),
    /// A descriptor that is not in guest RAM.
    #[error("descriptor table at {0:#x} is not in guest memory")]
    Table(u64),
    /// A buffer that is not wholly in guest RAM.
    #[error("buffer at {address:#x}, {len} bytes, is not in guest memory")]
    Buffer {
        /// Guest address.
        address: u64,
        /// Length in bytes.
        len: u32,
    },
    /// More than 4 GiB in one chain.
    #[error("chain is longer than 4 GiB")]
    TooBig,
    /// A device-readable segment after a device-writable one.
    #[error("readable descriptor after a writable one")]
    Order,
    /// An indirect table that is empty, cut, nested, continued or not negotiated.
    #[error("indirect table of {0} bytes is not valid here")]
    Indirect(u32),
}

/// A piece of guest RAM, checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Guest address.
    pub address: GuestAddress,
    /// Length in bytes; may be 0.
    pub len: u32,
}

/// A checked chain: first what the device reads, then what it writes.
#[derive(Debug, PartialEq, Eq)]
pub struct Chain {
    head: u16,
    segments: Vec<Segment>,
    readable: usize,
}

const DESCRIPTOR_SIZE: u64 = 16;

impl Chain {
    /// Copies and checks the chain that starts at `head` of the table at `table`.
    pub fn parse(
        memory: &Memory,
        table: GuestAddress,
        size: u16,
        head: u16,
        indirect: bool,
    ) -> Result<Self, ChainFault> {
        let mut walk = Walk { memory, table, size, limit: size, indirect };
        let mut chain = Chain { head, segments: Vec::with_capacity(4), readable: 0 };
        let mut total: u32 = 0;
        let mut next = Some(head);
        while let Some(index) = next {
            let descriptor = walk.load(index)?;
            if descriptor.refers_to_indirect_table() {
                walk.enter(&descriptor)?;
                next = Some(0);
                continue;
            }
            if chain.segments.len() >= usize::from(walk.limit) {
                return Err(ChainFault::TooLong(walk.limit));
            }
            total = total.checked_add(descriptor.len()).ok_or(ChainFault::TooBig)?;
            chain.push(memory, &descriptor)?;
            next = descriptor.has_next().then(|| descriptor.next());
        }
        Ok(chain)
    }

    fn push(&mut self, memory: &Memory, descriptor: &Descriptor) -> Result<(), ChainFault> {
        let (address, len) = (descriptor.addr(), descriptor.len());
        if len > 0 && !GuestMemoryBackend::check_range(memory, address, len as usize) {
            return Err(ChainFault::Buffer { address: address.0, len });
        }
        if !descriptor.is_write_only() {
            if self.readable < self.segments.len() {
                return Err(ChainFault::Order);
            }
            self.readable += 1;
        }
        self.segments.push(Segment { address, len });
        Ok(())
    }

    /// The index with which the chain is given back.
    pub fn head(&self) -> u16 {
        self.head
    }

    /// What the driver wrote for the device.
    pub fn readable(&self) -> &[Segment] {
        self.segments.get(..self.readable).unwrap_or_default()
    }

    /// Where the device may write.
    pub fn writable(&self) -> &[Segment] {
        self.segments.get(self.readable..).unwrap_or_default()
    }

    /// Bytes that the driver wrote.
    pub fn readable_len(&self) -> u64 {
        self.readable().iter().map(|segment| u64::from(segment.len)).sum()
    }

    /// Bytes of room for the device.
    pub fn writable_len(&self) -> u64 {
        self.writable().iter().map(|segment| u64::from(segment.len)).sum()
    }

    /// Reads the readable part from its start.
    pub fn reader<'a>(&'a self, memory: &'a Memory) -> ChainReader<'a> {
        ChainReader { memory, cursor: Cursor::new(self.readable()) }
    }

    /// Writes the writable part from its start.
    pub fn writer<'a>(&'a self, memory: &'a Memory) -> ChainWriter<'a> {
        ChainWriter { memory, cursor: Cursor::new(self.writable()), written: 0 }
    }
}

struct Walk<'a> {
    memory: &'a Memory,
    table: GuestAddress,
    size: u16,
    limit: u16,
    indirect: bool,
}

impl Walk<'_> {
    fn load(&self, index: u16) -> Result<Descriptor, ChainFault> {
        if index >= self.size {
            return Err(ChainFault::Index { index, size: self.size });
        }
        let offset = u64::from(index) * DESCRIPTOR_SIZE;
        let address = self.table.0.checked_add(offset).ok_or(ChainFault::Table(self.table.0))?;
        self.memory.read_obj(GuestAddress(address)).map_err(|_| ChainFault::Table(address))
    }

    fn enter(&mut self, descriptor: &Descriptor) -> Result<(), ChainFault> {
        let len = descriptor.len();
        let entries = u64::from(len) / DESCRIPTOR_SIZE;
        let whole = u64::from(len) % DESCRIPTOR_SIZE == 0;
        if !self.indirect || !whole || entries == 0 || descriptor.has_next() {
            return Err(ChainFault::Indirect(len));
        }
        self.size = u16::try_from(entries).map_err(|_| ChainFault::Indirect(len))?;
        self.table = descriptor.addr();
        // A table within a table is not allowed.
        self.indirect = false;
        Ok(())
    }
}

#[derive(Clone, Copy)]
struct Cursor<'a> {
    segments: &'a [Segment],
    offset: u32,
}

impl<'a> Cursor<'a> {
    fn new(segments: &'a [Segment]) -> Self {
        Self { segments, offset: 0 }
    }

    /// The next piece of at most `max` bytes, never empty; `None` at the end or if `max` is 0.
    fn next(&mut self, max: usize) -> Option<Segment> {
        let max = u32::try_from(max).unwrap_or(u32::MAX);
        if max == 0 {
            return None;
        }
        while let Some((first, rest)) = self.segments.split_first() {
            let left = first.len.saturating_sub(self.offset);
            if left == 0 {
                self.segments = rest;
                self.offset = 0;
                continue;
            }
            let len = left.min(max);
            // Cannot wrap: the whole segment was checked to lie in guest RAM.
            let address = GuestAddress(first.address.0.wrapping_add(u64::from(self.offset)));
            self.offset += len;
            return Some(Segment { address, len });
        }
        None
    }

    fn remaining(&self) -> u64 {
        let all: u64 = self.segments.iter().map(|segment| u64::from(segment.len)).sum();
        all.saturating_sub(u64::from(self.offset))
    }
}

fn fault(error: vm_memory::GuestMemoryError) -> io::Error {
    io::Error::other(error)
}

/// [`io::Read`] over the readable part of a chain.
pub struct ChainReader<'a> {
    memory: &'a Memory,
    cursor: Cursor<'a>,
}

impl<'a> ChainReader<'a> {
    /// Bytes that are left.
    pub fn remaining(&self) -> u64 {
        self.cursor.remaining()
    }

    /// Takes the next piece of at most `max` bytes without copying it.
    pub fn take_segment(&mut self, max: usize) -> Option<Segment> {
        self.cursor.next(max)
    }
}

impl io::Read for ChainReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if buffer.is_empty() {
            return Ok(0);
        }
        let Some(segment) = self.cursor.next(buffer.len()) else {
            return Ok(0);
        };
        let len = segment.len as usize;
        let buffer = buffer.get_mut(..len).unwrap_or_default();
        self.memory.read_slice(buffer, segment.address).map_err(fault)?;
        Ok(len)
    }
}

/// [`io::Write`] over the writable part of a chain.
pub struct ChainWriter<'a> {
    memory: &'a Memory,
    cursor: Cursor<'a>,
    written: u32,
}

impl<'a> ChainWriter<'a> {
    /// Bytes of room that are left.
    pub fn remaining(&self) -> u64 {
        self.cursor.remaining()
    }

    /// Bytes written so far: the length to complete the chain with.
    pub fn written(&self) -> u32 {
        self.written
    }

    /// Takes the next piece of at most `max` bytes for the caller to fill. It counts as written.
    pub fn take_segment(&mut self, max: usize) -> Option<Segment> {
        let segment = self.cursor.next(max)?;
        self.written += segment.len;
        Some(segment)
    }
}

impl io::Write for ChainWriter<'_> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        if data.is_empty() {
            return Ok(0);
        }
        let Some(segment) = self.take_segment(data.len()) else {
            return Ok(0);
        };
        let len = segment.len as usize;
        let data = data.get(..len).unwrap_or_default();
        self.memory.write_slice(data, segment.address).map_err(fault)?;
        Ok(len)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests;
