//! The heads of FUSE messages, which is all that the VMM reads of them.

use std::io::Read;

use crate::memory::Memory;
use crate::virtio::Chain;

/// Bytes of the head of a message.
const IN_HEADER: usize = 40;
/// Bytes of the head of an answer.
pub(super) const OUT_HEADER: u64 = 16;

const FORGET: u32 = 2;
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
