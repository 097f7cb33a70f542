//! The heads of FUSE messages, which is all that the VMM reads of them.

use std::io::Read;

use crate::memory::Memory;
use crate::virtio::Chain;

/// Bytes of the head of a message.
const IN_HEADER: usize = 40;
/// Bytes of the head of an answer.
pub(super) const OUT_HEADER: u64 = 16;
/// Bytes of the answer to a write.
pub(super) const WRITE_REPLY: u64 = OUT_HEADER + 8;

const FORGET: u32 = 2;
const READ: u32 = 15;
const WRITE: u32 = 16;
const RELEASE: u32 = 18;
const INIT: u32 = 26;
const INTERRUPT: u32 = 36;
const DESTROY: u32 = 38;
const BATCH_FORGET: u32 = 42;

/// What a message is, as far as it matters to who passes it on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Head {
    /// What is asked for.
    pub opcode: u32,
    /// Tells messages apart, and their answers.
    pub unique: u64,
    /// Of which node.
    pub node: u64,
}

impl Head {
    /// Reads that of the message in `chain`; `None`: it is too short to be one.
    pub fn read(memory: &Memory, chain: &Chain) -> Option<Self> {
        let mut bytes = [0; IN_HEADER];
        chain.reader(memory).read_exact(&mut bytes).ok()?;
        Self::parse(&bytes)
    }

    fn parse(bytes: &[u8; IN_HEADER]) -> Option<Self> {
        let opcode = u32::from_le_bytes(*bytes.get(4..)?.first_chunk()?);
        let unique = u64::from_le_bytes(*bytes.get(8..)?.first_chunk()?);
        let node = u64::from_le_bytes(*bytes.get(16..)?.first_chunk()?);
        Some(Self { opcode, unique, node })
    }

    /// True for what gets no answer.
    pub fn is_silent(self) -> bool {
        matches!(self.opcode, FORGET | BATCH_FORGET | INTERRUPT | DESTROY)
    }

    /// True for reads and writes of files.
    pub fn is_data(self) -> bool {
        matches!(self.opcode, READ | WRITE)
    }

    /// True for what ends all that the guest has open.
    pub fn ends_all(self) -> bool {
        matches!(self.opcode, INIT | DESTROY)
    }

    /// The handle that the message in `chain` closes, if it is one that does.
    pub fn closes(self, memory: &Memory, chain: &Chain) -> Option<u64> {
        if self.opcode != RELEASE {
            return None;
        }
        let mut bytes = [0; IN_HEADER + 8];
        chain.reader(memory).read_exact(&mut bytes).ok()?;
        Some(u64::from_le_bytes(*bytes.last_chunk()?))
    }

    /// Its name, for people.
    pub fn name(self) -> String {
        let names = [
            (1, "LOOKUP"),
            (2, "FORGET"),
            (3, "GETATTR"),
            (4, "SETATTR"),
            (9, "MKDIR"),
            (10, "UNLINK"),
            (11, "RMDIR"),
            (12, "RENAME"),
            (14, "OPEN"),
            (15, "READ"),
            (16, "WRITE"),
            (17, "STATFS"),
            (18, "RELEASE"),
            (20, "FSYNC"),
            (25, "FLUSH"),
            (26, "INIT"),
            (27, "OPENDIR"),
            (28, "READDIR"),
            (35, "CREATE"),
            (44, "READDIRPLUS"),
            (45, "RENAME2"),
            (50, "SYNCFS"),
        ];
        let known = names.iter().find(|(opcode, _)| *opcode == self.opcode);
        known.map_or_else(|| format!("opcode {}", self.opcode), |(_, name)| (*name).to_owned())
    }
}

/// Which way data goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    /// To the guest.
    Read,
    /// From it.
    Write,
}

/// A read or a write that has nothing special about it (struct fuse_read_in, struct fuse_write_in of
/// Linux's `include/uapi/linux/fuse.h`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Data {
    pub direction: Direction,
    pub unique: u64,
    pub node: u64,
    pub handle: u64,
    /// First byte in the file.
    pub offset: u64,
    /// Bytes.
    pub size: u32,
}

/// Of a write: rights have to be taken from the file.
const KILL_SUIDGID: u32 = 1 << 2;

impl Data {
    /// Bytes of the message before the data.
    pub const LEN: usize = IN_HEADER + 40;

    /// Reads the one in `chain`; `None`: it is something else, special, or not as long as it says.
    pub fn read(memory: &Memory, chain: &Chain) -> Option<Self> {
        let mut bytes = [0; Self::LEN];
        chain.reader(memory).read_exact(&mut bytes).ok()?;
        let this = Self::parse(&bytes)?;
        let data = match this.direction {
            Direction::Read => 0,
            Direction::Write => u64::from(this.size),
        };
        let len = Self::LEN as u64 + data;
        let says = u32::from_le_bytes(*bytes.first_chunk()?);
        (u64::from(says) == len && chain.readable_len() >= len).then_some(this)
    }

    fn parse(bytes: &[u8; Self::LEN]) -> Option<Self> {
        let head = Head::parse(bytes.first_chunk()?)?;
        let wide = |at| Some(u64::from_le_bytes(*bytes.get(at..)?.first_chunk()?));
        let narrow = |at| Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?));
        let (handle, offset, size) = (wide(40)?, wide(48)?, narrow(56)?);
        let (how, flags) = (narrow(60)?, narrow(72)?);
        let direction = match head.opcode {
            READ => Direction::Read,
            WRITE if how & KILL_SUIDGID == 0 && flags & libc::O_APPEND as u32 == 0 => {
                Direction::Write
            }
            _ => return None,
        };
        let Head { unique, node, .. } = head;
        Some(Self { direction, unique, node, handle, offset, size })
    }
}

/// The beginning of an answer that is no error, and is followed by `more` bytes beside `body`.
pub(super) fn success(unique: u64, more: u32, body: &[u8]) -> Vec<u8> {
    let len = OUT_HEADER as u32 + body.len() as u32 + more;
    let head = len.to_le_bytes().into_iter().chain([0; 4]).chain(unique.to_le_bytes());
    head.chain(body.iter().copied()).collect()
}

/// The answer that is nothing but an error.
pub(super) fn error(unique: u64, errno: i32) -> [u8; OUT_HEADER as usize] {
    let mut bytes = [0; OUT_HEADER as usize];
    let (len, error) = ((OUT_HEADER as u32).to_le_bytes(), (-errno).to_le_bytes());
    let all = len.into_iter().chain(error).chain(unique.to_le_bytes());
    for (to, from) in bytes.iter_mut().zip(all) {
        *to = from;
    }
    bytes
}

/// The message that ends a mount.
pub(super) fn destroy() -> [u8; IN_HEADER] {
    let mut bytes = [0; IN_HEADER];
    let (len, opcode) = ((IN_HEADER as u32).to_le_bytes(), DESTROY.to_le_bytes());
    for (to, from) in bytes.iter_mut().zip(len.into_iter().chain(opcode)) {
        *to = from;
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_made_is_what_is_read() {
        let head = Head::parse(&destroy()).unwrap();
        assert_eq!(head, Head { opcode: DESTROY, unique: 0, node: 0 });
        assert!(head.is_silent());
        let bytes = error(0x0102, libc::EIO);
        assert_eq!(bytes, [16, 0, 0, 0, 0xfb, 0xff, 0xff, 0xff, 2, 1, 0, 0, 0, 0, 0, 0]);
    }
}
