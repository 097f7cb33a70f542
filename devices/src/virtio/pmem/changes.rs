//! What the guest has written to a private copy, for a snapshot.
//!
//! Only the pages that differ from the file are kept. Which these are is known to the kernel
//! (`/proc/self/pagemap`): a page of a private mapping that was written to no longer is a page of
//! the file. The kernel also moves the bytes, so that a file that was cut off is an error here and
//! not a SIGBUS.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use serde::{Deserialize, Serialize};

use super::backing::{Mapping, PmemBacking};

/// Bytes of persistent memory that are not those of its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PmemChange {
    /// First byte, from the start of the memory.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// Why changes could not be saved or loaded.
#[derive(Debug, thiserror::Error)]
pub enum PmemChangeError {
    /// The kernel does not say.
    #[error(
        "which pages of persistent memory have changed cannot be read from /proc/self/pagemap; mount /proc, or attach the memory read-only"
    )]
    Pagemap(#[source] io::Error),
    /// The bytes could not be moved.
    #[error("{} bytes of persistent memory at {:#x} cannot be {what}; check the room on the host, and that its file was not cut off", .change.len, .change.offset)]
    Copy {
        /// "saved" or "loaded".
        what: &'static str,
        /// Which bytes.
        change: PmemChange,
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// A change that this memory cannot have.
    #[error("a change of {} bytes at {:#x} does not fit persistent memory of {len} bytes that is {access}; attach what the snapshot was taken with", .change.len, .change.offset)]
    Invalid {
        /// Which bytes.
        change: PmemChange,
        /// Bytes of the memory.
        len: u64,
        /// Whether it can be changed at all.
        access: &'static str,
    },
}

/// Bytes of an entry of the page map.
const ENTRY_LEN: usize = 8;

/// Bits of an entry (Documentation/admin-guide/mm/pagemap.rst): in RAM, in swap, of a file.
const PRESENT: u64 = 1 << 63;
const SWAPPED: u64 = 1 << 62;
const OF_FILE: u64 = 1 << 61;

/// Entries read at a time.
const CHUNK: usize = 8192;

impl PmemBacking {
    /// Writes what differs from the file into `to`, at the same offsets, so that `to` has holes
    /// where nothing has changed; which bytes these are. None for read-only memory. Only while the
    /// guest stands still.
    pub fn save_changes(&self, to: &File) -> Result<Vec<PmemChange>, PmemChangeError> {
        if self.read_only() {
            return Ok(Vec::new());
        }
        let changes = changes(self.mapping()).map_err(PmemChangeError::Pagemap)?;
        for &change in &changes {
            self.copy(to, change, Direction::Save)?;
        }
        Ok(changes)
    }

    /// Brings the changes of a snapshot, which are not trusted, into memory that was freshly
    /// opened. Nothing is changed if one of them does not fit.
    pub fn load_changes(&self, from: &File, changes: &[PmemChange]) -> Result<(), PmemChangeError> {
        for &change in changes {
            let end = change.offset.checked_add(change.len);
            if self.read_only() || end.is_none_or(|end| end > self.len()) {
                let access = if self.read_only() { "read-only" } else { "writable" };
                return Err(PmemChangeError::Invalid { change, len: self.len(), access });
            }
        }
        changes.iter().try_for_each(|&change| self.copy(from, change, Direction::Load))
    }

    /// Moves the bytes of `change`, which were checked to be in the mapping.
    fn copy(
        &self,
        file: &File,
        change: PmemChange,
        direction: Direction,
    ) -> Result<(), PmemChangeError> {
        let what = if direction == Direction::Save { "saved" } else { "loaded" };
        let failed = |source| PmemChangeError::Copy { what, change, source };
        let mut done = 0;
        while done < change.len {
            let at = change.offset.saturating_add(done);
            let moved = self.mapping().transfer(file, at, change.len - done, direction);
            match moved {
                Ok(0) => return Err(failed(io::ErrorKind::UnexpectedEof.into())),
                Ok(count) => done = done.saturating_add(count),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(failed(error)),
            }
        }
        Ok(())
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    Save,
    Load,
}

impl Mapping {
    /// Moves up to `len` bytes at `offset` of both the mapping and the file; how many. They must
    /// be in the mapping, and a mapping that is loaded into must be writable.
    fn transfer(
        &self,
        file: &File,
        offset: u64,
        len: u64,
        direction: Direction,
    ) -> io::Result<u64> {
        let range = |value: u64| usize::try_from(value).map_err(|_| io::ErrorKind::InvalidInput);
        let (start, len) = (range(offset)?, range(len)?);
        let position = libc::off_t::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?;
        if start.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // SAFETY: the range was just checked to be in the mapping. Only the kernel touches it, and
        // no reference to it exists.
        let moved = unsafe {
            let bytes = self.start.as_ptr().add(start);
            match direction {
                Direction::Save => libc::pwrite(file.as_raw_fd(), bytes.cast(), len, position),
                Direction::Load => libc::pread(file.as_raw_fd(), bytes.cast(), len, position),
            }
        };
        u64::try_from(moved).map_err(|_| io::Error::last_os_error())
    }
}

/// The pages of a private mapping that are no longer those of its file.
fn changes(mapping: &Mapping) -> io::Result<Vec<PmemChange>> {
    // SAFETY: sysconf has no preconditions.
    let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096).max(1);
    let map = File::open("/proc/self/pagemap")?;
    let first = mapping.start.addr().get() / page;
    let count = mapping.len / page;
    let mut changes: Vec<PmemChange> = Vec::new();
    let mut entries = vec![0; CHUNK * ENTRY_LEN];
    let mut number = 0;
    while number < count {
        let wanted = CHUNK.min(count - number);
        let bytes = entries.get_mut(..wanted * ENTRY_LEN).unwrap_or_default();
        map.read_exact_at(bytes, ((first + number) * ENTRY_LEN) as u64)?;
        for (place, entry) in bytes.as_chunks::<ENTRY_LEN>().0.iter().enumerate() {
            if is_changed(u64::from_ne_bytes(*entry)) {
                add(&mut changes, ((number + place) * page) as u64, page as u64);
            }
        }
        number += wanted;
    }
    Ok(changes)
}

fn is_changed(entry: u64) -> bool {
    entry & (PRESENT | SWAPPED) != 0 && entry & OF_FILE == 0
}

/// Appends a page, to the last change if it goes on there.
fn add(changes: &mut Vec<PmemChange>, offset: u64, len: u64) {
    match changes.last_mut() {
        Some(last) if last.offset + last.len == offset => last.len += len,
        _ => changes.push(PmemChange { offset, len }),
    }
}

#[cfg(test)]
mod tests;
