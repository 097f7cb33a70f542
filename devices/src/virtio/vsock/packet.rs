//! Packet headers on the rings (virtio 1.3, section 5.10.6).
//!
//! The crate `virtio-vsock` parses packets off its own descriptor chains, which it reads from guest
//! memory again, and only if header and payload are one slice each. Ours come as [`Chain`]s that
//! are checked already and may be cut anywhere, so the 44 bytes are coded here.

use std::io::{Read, Write};

use crate::memory::Memory;
use crate::virtio::{Chain, Segment};

/// Bytes of a header.
pub const HEADER_LEN: usize = 44;

/// Largest payload that either side sends in one packet, as the Linux driver has it.
pub const MAX_PAYLOAD: u32 = 64 * 1024;

/// The host's address (section 5.10.4).
pub const HOST_CID: u64 = 2;

/// VIRTIO_VSOCK_TYPE_STREAM, the only socket type that is offered.
pub const STREAM: u16 = 1;

/// The sender of a SHUTDOWN will receive no more.
pub const NO_RECEIVE: u32 = 1;
/// The sender of a SHUTDOWN will send no more.
pub const NO_SEND: u32 = 2;
/// Both.
pub const NO_MORE: u32 = NO_RECEIVE | NO_SEND;

/// What a packet is for (section 5.10.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum Op {
    /// Asks for a connection.
    Request = 1,
    /// Accepts it.
    Response = 2,
    /// Refuses it, or ends it at once.
    Reset = 3,
    /// Announces the end of one or both directions.
    Shutdown = 4,
    /// Carries data.
    Data = 5,
    /// Tells the sender's credit.
    CreditUpdate = 6,
    /// Asks for the receiver's credit.
    CreditRequest = 7,
}

impl Op {
    /// The operation with number `op`, if there is one.
    pub fn from_number(op: u16) -> Option<Self> {
        Some(match op {
            1 => Op::Request,
            2 => Op::Response,
            3 => Op::Reset,
            4 => Op::Shutdown,
            5 => Op::Data,
            6 => Op::CreditUpdate,
            7 => Op::CreditRequest,
            _ => return None,
        })
    }
}

/// `struct virtio_vsock_hdr`, as numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// Address of the sender.
    pub src_cid: u64,
    /// Address of the receiver.
    pub dst_cid: u64,
    /// Port of the sender.
    pub src_port: u32,
    /// Port of the receiver.
    pub dst_port: u32,
    /// Bytes of payload.
    pub len: u32,
    /// Type of the socket.
    pub socket_type: u16,
    /// [`Op`], not checked.
    pub op: u16,
    /// For [`Op::Shutdown`].
    pub flags: u32,
    /// Size of the sender's receive buffer.
    pub buf_alloc: u32,
    /// Bytes that have left that buffer, modulo 2^32.
    pub fwd_cnt: u32,
}

impl Header {
    /// From its form in guest memory.
    pub fn decode(bytes: &[u8; HEADER_LEN]) -> Self {
        let mut fields = Fields(bytes);
        Header {
            src_cid: u64::from_le_bytes(fields.take()),
            dst_cid: u64::from_le_bytes(fields.take()),
            src_port: u32::from_le_bytes(fields.take()),
            dst_port: u32::from_le_bytes(fields.take()),
            len: u32::from_le_bytes(fields.take()),
            socket_type: u16::from_le_bytes(fields.take()),
            op: u16::from_le_bytes(fields.take()),
            flags: u32::from_le_bytes(fields.take()),
            buf_alloc: u32::from_le_bytes(fields.take()),
            fwd_cnt: u32::from_le_bytes(fields.take()),
        }
    }

    /// To its form in guest memory.
    pub fn encode(&self) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        let fields: [&[u8]; 10] = [
            &self.src_cid.to_le_bytes(),
            &self.dst_cid.to_le_bytes(),
            &self.src_port.to_le_bytes(),
            &self.dst_port.to_le_bytes(),
            &self.len.to_le_bytes(),
            &self.socket_type.to_le_bytes(),
            &self.op.to_le_bytes(),
            &self.flags.to_le_bytes(),
            &self.buf_alloc.to_le_bytes(),
            &self.fwd_cnt.to_le_bytes(),
        ];
        for (byte, value) in bytes.iter_mut().zip(fields.into_iter().flatten()) {
            *byte = *value;
        }
        bytes
    }

    /// Reads the header at the start of what the driver sent, once. `None` if it is cut short.
    pub fn read(chain: &Chain, memory: &Memory) -> Option<Self> {
        let mut bytes = [0; HEADER_LEN];
        chain.reader(memory).read_exact(&mut bytes).ok()?;
        Some(Self::decode(&bytes))
    }

    /// Writes the header to the start of a receive buffer. False if it does not fit.
    pub fn write(&self, chain: &Chain, memory: &Memory) -> bool {
        chain.writer(memory).write_all(&self.encode()).is_ok()
    }
}

struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    /// The next `N` bytes. The fields add up to [`HEADER_LEN`], so that they are always there.
    fn take<const N: usize>(&mut self) -> [u8; N] {
        match self.0.split_first_chunk() {
            Some((field, rest)) => {
                self.0 = rest;
                *field
            }
            None => [0; N],
        }
    }
}

/// The payload of a packet that the driver sent: what follows the header in its chain.
pub struct Payload<'a> {
    /// The chain with header and payload.
    pub chain: &'a Chain,
    /// Guest RAM.
    pub memory: &'a Memory,
}

impl Payload<'_> {
    /// Bytes of payload.
    pub fn len(&self) -> u64 {
        self.chain.readable_len().saturating_sub(HEADER_LEN as u64)
    }

    /// The pieces of the payload from byte `skip` on.
    pub fn segments(&self, skip: usize) -> Vec<Segment> {
        let mut reader = self.chain.reader(self.memory);
        let mut before = HEADER_LEN.saturating_add(skip);
        while let Some(segment) = reader.take_segment(before) {
            before = before.saturating_sub(segment.len as usize);
            if before == 0 {
                break;
            }
        }
        std::iter::from_fn(|| reader.take_segment(usize::MAX)).collect()
    }
}

/// The pieces of a receive buffer after the header, `max` bytes at most.
pub fn room(chain: &Chain, memory: &Memory, max: u32) -> Vec<Segment> {
    let mut writer = chain.writer(memory);
    let mut before = HEADER_LEN;
    while before > 0 {
        let Some(segment) = writer.take_segment(before) else {
            return Vec::new();
        };
        before = before.saturating_sub(segment.len as usize);
    }
    let mut left = max as usize;
    let pieces = std::iter::from_fn(|| {
        let segment = if left > 0 { writer.take_segment(left) } else { None }?;
        left = left.saturating_sub(segment.len as usize);
        Some(segment)
    });
    pieces.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_has_the_layout_of_the_specification() {
        let header = Header {
            src_cid: 0x0807_0605_0403_0201,
            dst_cid: 2,
            src_port: 0x1413_1211,
            dst_port: 0x1817_1615,
            len: 0x1c1b_1a19,
            socket_type: 0x1e1d,
            op: 0x201f,
            flags: 0x2423_2221,
            buf_alloc: 0x2827_2625,
            fwd_cnt: 0x2c2b_2a29,
        };
        let bytes = header.encode();
        let expected: Vec<u8> =
            (1..=8).chain([2, 0, 0, 0, 0, 0, 0, 0]).chain(0x11..=0x2c).collect();
        assert_eq!(bytes.as_slice(), expected);
        assert_eq!(Header::decode(&bytes), header);
    }

    #[test]
    fn operations_keep_their_numbers() {
        for number in 0..=u16::MAX {
            assert_eq!(Op::from_number(number).is_some(), (1..=7).contains(&number));
            assert!(Op::from_number(number).is_none_or(|op| op as u16 == number));
        }
    }
}
