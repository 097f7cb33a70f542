//! Requests to the kernel's network stack (rtnetlink(7)), one at a time, each with its answer.
//!
//! The bodies of messages come from `netlink_packet_route`. Their headers are written here, and
//! answers are not read beyond them: a parser of all that the stack can say is larger than the agent.

use netlink_packet_core::Emitable;
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, setsockopt, socket,
    sockopt::ReceiveTimeout,
};
use nix::sys::time::TimeVal;
use std::os::fd::{AsRawFd, OwnedFd};

/// Seconds; the kernel answers at once.
const PATIENCE: i64 = 10;
/// Larger than the pieces in which the kernel sends a list.
const BUFFER: usize = 64 << 10;
/// Pieces of a list: more than a guest has addresses.
const PIECES: usize = 256;
/// Bytes of a header: length, kind, flags, number, sender (struct nlmsghdr).
const HEADER: usize = 16;

/// What a request does beside asking.
pub const CREATE: i32 = libc::NLM_F_CREATE | libc::NLM_F_EXCL;
/// The same, in the place of what is there.
pub const REPLACE: i32 = libc::NLM_F_CREATE | libc::NLM_F_REPLACE;

/// A socket to the network stack.
pub struct Netlink {
    socket: OwnedFd,
    number: u32,
}

/// A message: its kind and its body.
pub struct Message {
    kind: u16,
    body: Vec<u8>,
}

impl Message {
    /// A message of this kind, which is one of `libc::RTM_…`.
    pub fn new(kind: u16, body: &impl Emitable) -> Self {
        let mut bytes = vec![0; body.buffer_len()];
        body.emit(&mut bytes);
        Self { kind, body: bytes }
    }

    /// The same body in a message of another kind.
    pub fn into_kind(self, kind: u16) -> Self {
        Self { kind, ..self }
    }

    /// The word at `offset` of its body.
    pub fn word(&self, offset: usize) -> Option<u32> {
        let bytes = self.body.get(offset..offset + 4)?;
        Some(u32::from_ne_bytes(bytes.try_into().ok()?))
    }
}

impl Netlink {
    /// A new one.
    pub fn open() -> Result<Self, Errno> {
        let (kind, flags) = (SockType::Raw, SockFlag::SOCK_CLOEXEC);
        let socket = socket(AddressFamily::Netlink, kind, flags, SockProtocol::NetlinkRoute)?;
        setsockopt(&socket, ReceiveTimeout, &TimeVal::new(PATIENCE, 0))?;
        Ok(Self { socket, number: 0 })
    }

    /// Changes something; `flags` are 0, [`CREATE`] or [`REPLACE`].
    pub fn change(&mut self, message: &Message, flags: i32) -> Result<(), Errno> {
        self.send(message, flags | libc::NLM_F_ACK)?;
        self.receive().map(drop)
    }

    /// Lists all that is like `message`.
    pub fn list(&mut self, message: &Message) -> Result<Vec<Message>, Errno> {
        self.send(message, libc::NLM_F_DUMP)?;
        self.receive()
    }

    fn send(&mut self, message: &Message, flags: i32) -> Result<(), Errno> {
        self.number += 1;
        let len = HEADER + message.body.len();
        let flags = u16::try_from(flags | libc::NLM_F_REQUEST).map_err(|_| Errno::EINVAL)?;
        let mut bytes = Vec::with_capacity(len);
        bytes.extend(u32::try_from(len).map_err(|_| Errno::EMSGSIZE)?.to_ne_bytes());
        bytes.extend(message.kind.to_ne_bytes());
        bytes.extend(flags.to_ne_bytes());
        bytes.extend(self.number.to_ne_bytes());
        bytes.extend(0_u32.to_ne_bytes());
        bytes.extend(&message.body);
        send(self.socket.as_raw_fd(), &bytes, MsgFlags::empty()).map(drop)
    }

    /// All answers to the last request.
    fn receive(&self) -> Result<Vec<Message>, Errno> {
        let mut answers = Vec::new();
        let mut buffer = vec![0; BUFFER];
        for _ in 0..PIECES {
            let len = recv(self.socket.as_raw_fd(), &mut buffer, MsgFlags::empty())?;
            let mut rest = buffer.get(..len).unwrap_or_default();
            while let Some((message, next)) = split(rest) {
                rest = next;
                match i32::from(message.kind) {
                    libc::NLMSG_DONE => return Ok(answers),
                    // Without a code it says that all is well.
                    libc::NLMSG_ERROR => match message.word(0) {
                        Some(0) => return Ok(answers),
                        code => {
                            return Err(Errno::from_raw(code.map_or(0, u32::cast_signed).abs()));
                        }
                    },
                    _ => answers.push(message),
                }
            }
        }
        Err(Errno::EMSGSIZE)
    }
}

/// The first message of `bytes`, and what follows it.
fn split(bytes: &[u8]) -> Option<(Message, &[u8])> {
    let len = usize::try_from(u32::from_ne_bytes(bytes.get(..4)?.try_into().ok()?)).ok()?;
    let kind = u16::from_ne_bytes(bytes.get(4..6)?.try_into().ok()?);
    let body = bytes.get(HEADER..len)?.to_vec();
    // The next one begins at a whole word.
    let rest = bytes.get(len.next_multiple_of(4)..).unwrap_or_default();
    Some((Message { kind, body }, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(kind: u16, body: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::from(u32::try_from(HEADER + body.len()).unwrap().to_ne_bytes());
        bytes.extend(kind.to_ne_bytes());
        bytes.resize(HEADER, 0);
        bytes.extend(body);
        bytes
    }

    #[test]
    fn messages_are_split_at_whole_words() {
        let mut bytes = message(20, &[1, 2, 3, 4, 5]);
        bytes.extend([0; 3]);
        bytes.extend(message(3, &[]));
        let (first, rest) = split(&bytes).unwrap();
        assert_eq!((first.kind, first.word(0)), (20, Some(u32::from_ne_bytes([1, 2, 3, 4]))));
        let (second, rest) = split(rest).unwrap();
        assert_eq!((second.kind, second.word(0), rest.len()), (3, None, 0));
        assert!(split(rest).is_none());
    }

    #[test]
    fn lengths_that_cannot_be_end_the_list() {
        for len in [0_u32, 15, 17, u32::MAX] {
            let mut bytes = message(20, &[]);
            bytes[..4].copy_from_slice(&len.to_ne_bytes());
            assert!(split(&bytes).is_none(), "{len}");
        }
    }
}
