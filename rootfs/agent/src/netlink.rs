//! Requests to the kernel's network stack (rtnetlink(7)), one at a time, each with its answer.

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload,
};
use netlink_packet_route::RouteNetlinkMessage;
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, setsockopt, socket,
    sockopt::ReceiveTimeout,
};
use nix::sys::time::TimeVal;
use std::os::fd::{AsRawFd, OwnedFd};

/// The kernel answers at once.
const PATIENCE: i64 = 10;
/// Larger than the pieces in which the kernel sends a list.
const BUFFER: usize = 64 << 10;
/// Pieces of a list: more interfaces and addresses than a guest has.
const PIECES: usize = 256;

/// A socket to the network stack.
pub struct Netlink {
    socket: OwnedFd,
    sequence: u32,
}

impl Netlink {
    /// A new one.
    pub fn open() -> Result<Self, Errno> {
        let (kind, flags) = (SockType::Raw, SockFlag::SOCK_CLOEXEC);
        let socket = socket(AddressFamily::Netlink, kind, flags, SockProtocol::NetlinkRoute)?;
        setsockopt(&socket, ReceiveTimeout, &TimeVal::new(PATIENCE, 0))?;
        Ok(Self { socket, sequence: 0 })
    }

    /// Changes something. `flags` beside those of every request.
    pub fn change(&mut self, message: RouteNetlinkMessage, flags: u16) -> Result<(), Errno> {
        self.send(message, flags | NLM_F_ACK)?;
        self.receive().map(drop)
    }

    /// Lists all that is like `message`.
    pub fn list(
        &mut self,
        message: RouteNetlinkMessage,
    ) -> Result<Vec<RouteNetlinkMessage>, Errno> {
        self.send(message, NLM_F_DUMP)?;
        self.receive()
    }

    fn send(&mut self, message: RouteNetlinkMessage, flags: u16) -> Result<(), Errno> {
        self.sequence += 1;
        let mut header = NetlinkHeader::default();
        header.flags = flags | NLM_F_REQUEST;
        header.sequence_number = self.sequence;
        let mut message = NetlinkMessage::new(header, NetlinkPayload::from(message));
        message.finalize();
        let mut bytes = vec![0; message.buffer_len()];
        message.serialize(&mut bytes);
        send(self.socket.as_raw_fd(), &bytes, MsgFlags::empty()).map(drop)
    }

    /// All answers to the last request.
    fn receive(&self) -> Result<Vec<RouteNetlinkMessage>, Errno> {
        let mut answers = Vec::new();
        let mut buffer = vec![0; BUFFER];
        for _ in 0..PIECES {
            let len = recv(self.socket.as_raw_fd(), &mut buffer, MsgFlags::empty())?;
            let mut rest = &buffer[..len];
            while !rest.is_empty() {
                let message = NetlinkMessage::<RouteNetlinkMessage>::deserialize(rest)
                    .map_err(|_| Errno::EBADMSG)?;
                let length = usize::try_from(message.header.length).unwrap_or(usize::MAX);
                let next = length.next_multiple_of(4).max(16).min(rest.len());
                rest = &rest[next..];
                match message.payload {
                    NetlinkPayload::Done(_) => return Ok(answers),
                    // Without a code it says that all is well.
                    NetlinkPayload::Error(error) => {
                        return match error.code {
                            None => Ok(answers),
                            Some(code) => Err(Errno::from_raw(-code.get())),
                        };
                    }
                    NetlinkPayload::InnerMessage(answer) => answers.push(answer),
                    _ => {}
                }
            }
        }
        Err(Errno::EMSGSIZE)
    }
}
