//! Pieces of guest memory, and of our own, for the kernel to read from or to write to.

use std::marker::PhantomData;

use vm_memory::bitmap::Bitmap;

use super::Segment;
use crate::memory::{GuestMemoryBackend, Memory, MemorySlice};

/// Pieces of one call at most (`IOV_MAX` of Linux).
pub const MAX_VECTORS: usize = 1024;

/// Where a frame goes: every vector stands for memory that is borrowed for `'a`, may be written,
/// and has no other reference in this process.
pub struct Scatter<'a> {
    vectors: Vec<libc::iovec>,
    pieces: Vec<Piece<'a>>,
}

enum Piece<'a> {
    /// Of the guest: what is written has to be marked.
    Guest(MemorySlice<'a>),
    /// Ours.
    Host(usize),
}

impl<'a> Scatter<'a> {
    /// No pieces yet.
    pub fn with_capacity(pieces: usize) -> Self {
        Self { vectors: Vec::with_capacity(pieces), pieces: Vec::with_capacity(pieces) }
    }

    /// Adds memory of ours.
    pub fn push_host(&mut self, bytes: &'a mut [u8]) {
        let iov_len = bytes.len();
        self.vectors.push(libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len });
        self.pieces.push(Piece::Host(iov_len));
    }

    /// Adds guest memory, as long as there are fewer than `limit` pieces; how many bytes.
    pub fn push_guest(&mut self, memory: &'a Memory, segment: Segment, limit: usize) -> usize {
        let mut added = 0;
        // A segment was checked to be RAM when its chain was taken.
        for slice in memory.get_slices(segment.address, segment.len as usize).map_while(Result::ok)
        {
            if self.vectors.len() >= limit {
                break;
            }
            added += slice.len();
            self.vectors.push(vector(&slice));
            self.pieces.push(Piece::Guest(slice));
        }
        added
    }

    /// For `readv`.
    pub(super) fn vectors(&self) -> &[libc::iovec] {
        &self.vectors
    }

    /// The first `bytes` bytes have been written.
    pub(super) fn written(&mut self, bytes: usize) {
        let mut left = bytes;
        for piece in &self.pieces {
            let len = match piece {
                Piece::Host(len) => *len,
                Piece::Guest(slice) => {
                    slice.bitmap().mark_dirty(0, slice.len().min(left));
                    slice.len()
                }
            };
            left = left.saturating_sub(len);
            if left == 0 {
                return;
            }
        }
    }
}

/// Where a frame comes from: every vector stands for memory that is borrowed for `'a` and may be
/// read.
pub struct Gather<'a> {
    vectors: Vec<libc::iovec>,
    memory: PhantomData<&'a [u8]>,
}

impl<'a> Gather<'a> {
    /// No pieces yet.
    pub fn with_capacity(pieces: usize) -> Self {
        Self { vectors: Vec::with_capacity(pieces), memory: PhantomData }
    }

    /// Adds memory of ours.
    pub fn push_host(&mut self, bytes: &'a [u8]) {
        let iov_base = bytes.as_ptr().cast_mut().cast();
        self.vectors.push(libc::iovec { iov_base, iov_len: bytes.len() });
    }

    /// Adds guest memory; false if that would be too many pieces.
    pub fn push_guest(&mut self, memory: &'a Memory, segment: Segment) -> bool {
        for slice in memory.get_slices(segment.address, segment.len as usize) {
            match slice {
                Ok(slice) if self.vectors.len() < MAX_VECTORS => self.vectors.push(vector(&slice)),
                _ => return false,
            }
        }
        true
    }

    /// For `writev`.
    pub(super) fn vectors(&self) -> &[libc::iovec] {
        &self.vectors
    }
}

fn vector(slice: &MemorySlice<'_>) -> libc::iovec {
    libc::iovec { iov_base: slice.ptr_guard_mut().as_ptr().cast(), iov_len: slice.len() }
}
