//! What stands behind a block device: operations go in, completions come out.
//!
//! The block device validates every request before it becomes a [`DiskOp`], and answers the guest
//! when the [`Completion`] comes. A backend may work in `submit`, in `completed`, or elsewhere
//! (another thread, io_uring): the device cannot tell the difference.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use vm_memory::bitmap::Bitmap;

use crate::memory::{GuestMemoryBackend, Memory, MemorySlice};
use crate::virtio::Segment;

/// Bytes of a sector: the unit of all virtio-blk addresses, whatever the block size (virtio 1.3,
/// section 5.2.4).
pub const SECTOR_SIZE: u64 = 512;

/// Which operation a completion is of. Chosen by the submitter, unique among those in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tag(pub u32);

/// The guest memory that an operation reads or writes. It keeps guest RAM mapped for as long as the
/// operation lives.
#[derive(Clone, Debug)]
pub struct Buffers {
    memory: Arc<Memory>,
    segments: Vec<Segment>,
    len: u64,
}

impl Buffers {
    /// `segments` of `memory`, in order.
    pub fn new(memory: Arc<Memory>, segments: Vec<Segment>) -> Self {
        let len = segments.iter().map(|segment| u64::from(segment.len)).sum();
        Self { memory, segments, len }
    }

    /// Bytes of all segments.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// True without a single byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Slices of guest memory from byte `skip` on: at most `max_bytes`, in at most `max_slices`.
    pub fn slices(
        &self,
        skip: u64,
        max_bytes: usize,
        max_slices: usize,
    ) -> io::Result<Vec<MemorySlice<'_>>> {
        let mut skip = skip;
        let mut left = max_bytes;
        let mut slices = Vec::with_capacity(self.segments.len().min(max_slices));
        for segment in &self.segments {
            let len = u64::from(segment.len);
            if skip >= len {
                skip -= len;
                continue;
            }
            let count = usize::try_from(len - skip).unwrap_or(usize::MAX).min(left);
            // Cannot wrap: the segment was checked to lie in guest RAM.
            let start = vm_memory::GuestAddress(segment.address.0.wrapping_add(skip));
            skip = 0;
            for slice in self.memory.get_slices(start, count) {
                let slice = slice.map_err(io::Error::other)?;
                if slices.len() == max_slices {
                    return Ok(slices);
                }
                left = left.saturating_sub(slice.len());
                slices.push(slice);
            }
            if left == 0 {
                break;
            }
        }
        Ok(slices)
    }

    /// The same slices as the kernel takes them. They are mapped for as long as `self` lives.
    pub(super) fn vectors(
        &self,
        skip: u64,
        max_bytes: usize,
        max_slices: usize,
    ) -> io::Result<Vec<libc::iovec>> {
        let slices = self.slices(skip, max_bytes, max_slices)?;
        Ok(slices.iter().map(vector).collect())
    }

    /// Says that something outside this process's view has written `bytes` bytes, from byte `skip`
    /// on, for those who track what has changed.
    pub(super) fn mark_dirty(&self, skip: u64, bytes: usize) {
        // Cannot fail: what was written had been found in the same way.
        let slices = self.slices(skip, bytes, usize::MAX).unwrap_or_default();
        for slice in slices {
            slice.bitmap().mark_dirty(0, slice.len());
        }
    }
}

fn vector(slice: &MemorySlice<'_>) -> libc::iovec {
    libc::iovec { iov_base: slice.ptr_guard_mut().as_ptr().cast(), iov_len: slice.len() }
}

/// A run of bytes on the disk; checked to be within its capacity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// One operation. Offsets are in bytes, multiples of [`SECTOR_SIZE`], checked against the capacity.
#[derive(Clone, Debug)]
pub enum DiskOp {
    /// Fill the buffers from `offset` on.
    Read {
        /// First byte on the disk.
        offset: u64,
        /// Where to.
        buffers: Buffers,
    },
    /// Write the buffers at `offset`.
    Write {
        /// First byte on the disk.
        offset: u64,
        /// Where from.
        buffers: Buffers,
        /// Complete when the data is on stable storage, not before.
        durable: bool,
    },
    /// Bring everything whose completion was reported to stable storage.
    Flush,
    /// The guest no longer needs these bytes; what a later read gives is undefined.
    Discard {
        /// Which bytes.
        extents: Vec<Extent>,
        /// As for a write.
        durable: bool,
    },
    /// Make these bytes read as zeroes.
    WriteZeroes {
        /// Which bytes.
        extents: Vec<Extent>,
        /// Space may be given back to the host.
        unmap: bool,
        /// As for a write.
        durable: bool,
    },
}

impl DiskOp {
    /// Bytes of guest memory that are read or written.
    pub fn data_len(&self) -> u64 {
        match self {
            DiskOp::Read { buffers, .. } | DiskOp::Write { buffers, .. } => buffers.len(),
            DiskOp::Flush | DiskOp::Discard { .. } | DiskOp::WriteZeroes { .. } => 0,
        }
    }
}

/// The end of an operation.
#[derive(Debug)]
pub struct Completion {
    /// Which one.
    pub tag: Tag,
    /// Success, or why not. [`io::ErrorKind::Unsupported`] says that this backend never does it.
    pub result: io::Result<()>,
    /// Bytes moved, counted from the first, without a gap; all of them on success.
    pub moved: u64,
}

/// What a disk looks like; constant while it is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Size in sectors of [`SECTOR_SIZE`] bytes.
    pub sectors: u64,
    /// Bytes of the smallest access that is not a read-modify-write in the host's driver: a power
    /// of two from 512 on.
    pub logical_block: u32,
    /// Bytes of the smallest access that is not one in the storage: a multiple of the former.
    pub physical_block: u32,
    /// Writes, discards and zeroes will fail.
    pub read_only: bool,
}

/// Storage with operations in flight.
///
/// Accepts as many operations as the device has queue entries. Operations in flight may complete
/// in any order. Dropping a disk ends them: afterwards no guest memory is touched.
pub trait Disk: Send {
    /// What it looks like.
    fn geometry(&self) -> Geometry;

    /// Starts an operation. Never waits for storage longer than one bounded step.
    fn submit(&mut self, tag: Tag, op: DiskOp);

    /// The next operation that has ended; `None` if the caller should wait for
    /// [`Disk::completion_fd`] or if nothing is in flight. A call also takes the descriptor's
    /// readiness, does a bounded amount of work and returns `None` after a bounded number of calls.
    fn completed(&mut self) -> Option<Completion>;

    /// Readable when [`Disk::completed`] should be called again, after it has returned `None` with
    /// operations in flight. The same descriptor for the disk's lifetime.
    fn completion_fd(&self) -> BorrowedFd<'_>;
}
