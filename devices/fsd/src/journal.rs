//! What the guest knows, where it outlives this process.
//!
//! The VMM gives the server a file in memory. The server keeps its table there: a checkpoint, and what
//! has changed since, noted before the guest gets the answer that tells it. When the server dies, the
//! next one reads it, and goes on as from a snapshot.
//!
//! ```text
//!   0        4 KiB                                   middle
//!   │ which  │ checkpoint │ change │ change │ 0 …    │ the same, the next time │
//!
//!   checkpoint, change:   length u32 │ bytes │ 0xa5
//! ```
//!
//! `which` says where the half begins that counts: a checkpoint is written into the other one, whole,
//! before that is said. A process that dies in a write leaves less of it, and then its end is missing:
//! what has no end was not answered.
//!
//! The next server does not believe it: it goes through the gate of [`crate::state`].

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use crate::save::mount_of;
use crate::state::{MAX_BYTES, Mount, State, StateError};
use crate::table::{Change, Handle, Identity, Init, Place, ROOT, Table};

const FIRST: u64 = 4096;
const END: u8 = 0xa5;
/// Bytes around what is written at once.
const AROUND: u64 = 5;
/// So many bytes of changes are no reason for a checkpoint.
const FEW: u64 = 4 << 20;

/// Why nothing can be read out of a journal.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "each says what it is")]
pub enum JournalError {
    #[error("what was known cannot be read: {0}")]
    Read(#[from] io::Error),
    #[error("what was known cannot be used: {0}")]
    State(#[from] StateError),
    #[error("what has changed since cannot be read: {0}")]
    Form(#[from] postcard::Error),
    #[error("what has changed since does not fit what was known before")]
    Change,
}

/// The file.
#[derive(Debug)]
pub struct Journal {
    file: File,
    /// Where the second half begins.
    middle: u64,
    /// Where the half that counts begins; 0: none does.
    start: u64,
    /// Where its checkpoint ends.
    checkpoint: u64,
    /// Where the next change goes.
    at: u64,
}

impl Journal {
    /// Takes up a file, whose length says how much there is room for.
    pub fn open(file: File) -> io::Result<Self> {
        let middle = FIRST + file.metadata()?.len().saturating_sub(FIRST) / 2;
        let mut which = [0; 8];
        file.read_exact_at(&mut which, 0)?;
        let start = u64::from_le_bytes(which);
        let start = if [FIRST, middle].contains(&start) { start } else { 0 };
        // Nothing is written behind what another server has left.
        Ok(Self { file, middle, start, checkpoint: u64::MAX, at: u64::MAX })
    }

    /// What another server has left in it; `None` if there is nothing.
    pub fn read(&self) -> Result<Option<State>, JournalError> {
        if self.start == 0 {
            return Ok(None);
        }
        let Some((checkpoint, mut at)) = self.piece(self.start)? else { return Ok(None) };
        let mut state = State::parse(&checkpoint)?;
        let Some(mount) = state.mount.take() else { return Ok(None) };
        let mut table = table_of(mount);
        while let Some((changes, next)) = self.piece(at)? {
            let mut left = changes.as_slice();
            while !left.is_empty() {
                let (change, rest): (Change<'_>, _) = postcard::take_from_bytes(left)?;
                table.again(change).ok_or(JournalError::Change)?;
                left = rest;
            }
            at = next;
        }
        state.mount = mount_of(&table, Vec::new());
        Ok(Some(state.checked()?))
    }

    /// What was written at a place, and where the next begins. `None`: nothing, or not to its end.
    fn piece(&self, at: u64) -> io::Result<Option<(Vec<u8>, u64)>> {
        let end = if at < self.middle { self.middle } else { 2 * self.middle - FIRST };
        if at + AROUND > end {
            return Ok(None);
        }
        let mut len = [0; 4];
        self.file.read_exact_at(&mut len, at)?;
        let len = u64::from(u32::from_le_bytes(len));
        if len == 0 || len > MAX_BYTES as u64 || at + AROUND + len > end {
            return Ok(None);
        }
        // No more than MAX_BYTES.
        let mut bytes = vec![0; len as usize + 1];
        self.file.read_exact_at(&mut bytes, at + 4)?;
        match bytes.pop() {
            Some(END) => Ok(Some((bytes, at + AROUND + len))),
            _ => Ok(None),
        }
    }

    /// False once there is so much of changes that a checkpoint is shorter.
    pub fn has_room(&self) -> bool {
        let (known, changed) = (self.checkpoint - self.start, self.at - self.checkpoint);
        self.start != 0 && self.at != u64::MAX && changed < FEW.max(2 * known)
    }

    /// Begins anew with a state in its saved form.
    pub fn begin(&mut self, state: &[u8]) -> io::Result<()> {
        let start = if self.start == FIRST { self.middle } else { FIRST };
        // Somebody may have died while writing there.
        self.clear(start)?;
        let end = self.write(start, state)?;
        self.file.write_all_at(&start.to_le_bytes(), 0)?;
        let old = std::mem::replace(&mut self.start, start);
        (self.checkpoint, self.at) = (end, end);
        match old {
            0 => Ok(()),
            old => self.clear(old),
        }
    }

    /// Notes what has changed.
    pub fn append(&mut self, changes: &[u8]) -> io::Result<()> {
        self.at = self.write(self.at, changes)?;
        Ok(())
    }

    /// Nothing in it counts any more.
    pub fn give_up(&mut self) {
        // What cannot be written was given up, or is refused when it is read.
        let _ = self.file.write_all_at(&[0; 8], 0);
        self.start = 0;
    }

    fn write(&self, at: u64, bytes: &[u8]) -> io::Result<u64> {
        let end = if at < self.middle { self.middle } else { 2 * self.middle - FIRST };
        let len = bytes.len() as u64;
        // What comes behind it has to be zero, so that it ends there.
        if len > MAX_BYTES as u64 || at + len + 2 * AROUND > end {
            return Err(io::ErrorKind::StorageFull.into());
        }
        let mut piece = Vec::with_capacity(bytes.len() + AROUND as usize);
        piece.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
        piece.extend_from_slice(bytes);
        piece.push(END);
        self.file.write_all_at(&piece, at)?;
        Ok(at + piece.len() as u64)
    }

    /// Gives the memory of a half back, which reads as zero from then on.
    fn clear(&self, start: u64) -> io::Result<()> {
        let offset = libc::off_t::try_from(start).map_err(|_| io::ErrorKind::InvalidInput)?;
        let len =
            libc::off_t::try_from(self.middle - FIRST).map_err(|_| io::ErrorKind::InvalidInput)?;
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: an open descriptor and numbers.
        match unsafe { libc::fallocate(self.file.as_raw_fd(), mode, offset, len) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// The table that was saved, with nothing of it looked up.
pub(crate) fn table_of(mount: Mount) -> Table {
    let mut table = Table::default();
    table.take_in(mount.nodes, |saved| {
        let place = if saved.tombstone { Place::Tombstone } else { Place::Cold };
        (place, Identity { ino: saved.ino, btime: saved.btime })
    });
    for saved in &mount.handles {
        let &crate::state::SavedHandle { node, directory, flags, .. } = saved;
        table.insert_handle(saved.id, Handle { node, inner: None, directory, flags });
    }
    table.set_next(mount.next_node.max(ROOT + 1), mount.next_handle);
    table.init = Some(Init { request: mount.request, reply: mount.reply });
    table
}
