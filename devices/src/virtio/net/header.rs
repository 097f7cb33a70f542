//! The header before each frame (virtio 1.3, section 5.1.6), checked.
//!
//! Pure: bytes in, verdict out. What the guest says about a frame that it sends is checked against
//! the frame and against what was negotiated, and only what was understood is passed on.

use super::feature;
use super::tap::HEADER_LEN;

/// Bytes of a frame at most: the largest IP packet behind an Ethernet header (section 5.1.6.3.1).
pub const MAX_FRAME: usize = 65_550;

/// Bytes of an Ethernet header: what a frame has at least.
pub const ETHERNET_LEN: usize = 14;

/// Flags of the header.
mod flag {
    /// The checksum is yet to be filled in.
    pub const NEEDS_CSUM: u8 = 1;
    /// The checksum was checked.
    pub const DATA_VALID: u8 = 2;
}

/// Kinds of frames that are to be cut into packets.
mod gso {
    pub const NONE: u8 = 0;
    pub const TCPV4: u8 = 1;
    pub const UDP: u8 = 3;
    pub const TCPV6: u8 = 4;
    /// May be added to those of TCP.
    pub const ECN: u8 = 0x80;
}

/// What is wrong with a frame that the guest wants to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameFault {
    /// No whole header.
    #[error("{0} bytes are less than a header of 12")]
    NoHeader(u64),
    /// Not even an Ethernet header.
    #[error("a frame of {0} bytes is less than an Ethernet header of 14")]
    Short(u64),
    /// More than any packet has.
    #[error("a frame of {0} bytes is more than 65550")]
    Long(u64),
    /// A checksum, without the feature.
    #[error("a checksum is to be filled in, which was not negotiated")]
    ChecksumNotNegotiated,
    /// A checksum outside of the frame.
    #[error("a checksum at {start} + {offset} is not within the {len} bytes of the frame")]
    Checksum {
        /// Where summing starts.
        start: u16,
        /// Where the sum goes, from there.
        offset: u16,
        /// Bytes of the frame.
        len: usize,
    },
    /// Segmentation of a kind that does not exist or was not negotiated.
    #[error("segmentation of kind {0:#x} was not negotiated")]
    Segmentation(u8),
    /// Segments of no bytes, or without checksums.
    #[error("segmentation without a segment size or a checksum")]
    Incomplete,
    /// Headers that are longer than the frame.
    #[error("packet headers of {header} bytes are longer than the {len} bytes of the frame")]
    Headers {
        /// Their length.
        header: u16,
        /// Bytes of the frame.
        len: usize,
    },
}

/// A header as it goes to or comes from the TAP.
pub type Header = [u8; HEADER_LEN];

#[derive(Clone, Copy)]
struct Fields {
    flags: u8,
    kind: u8,
    header_len: u16,
    segment_size: u16,
    start: u16,
    offset: u16,
}

impl Fields {
    fn read(header: &Header) -> Self {
        let [flags, kind, h0, h1, s0, s1, c0, c1, o0, o1, _, _] = *header;
        let word = |low, high| u16::from_le_bytes([low, high]);
        Self {
            flags,
            kind,
            header_len: word(h0, h1),
            segment_size: word(s0, s1),
            start: word(c0, c1),
            offset: word(o0, o1),
        }
    }

    /// `buffers` is the last field: over how many chains the frame is spread.
    fn write(self, buffers: u16) -> Header {
        let [h0, h1] = self.header_len.to_le_bytes();
        let [s0, s1] = self.segment_size.to_le_bytes();
        let [c0, c1] = self.start.to_le_bytes();
        let [o0, o1] = self.offset.to_le_bytes();
        let [b0, b1] = buffers.to_le_bytes();
        [self.flags, self.kind, h0, h1, s0, s1, c0, c1, o0, o1, b0, b1]
    }
}

/// Checks a frame of `len` bytes that the guest sends, and makes the header for the TAP.
/// `features` is what was negotiated.
///
/// Flags without a meaning and the number of buffers, which the guest must leave at zero, are not
/// passed on; so are the fields of what is not asked for.
pub fn outgoing(header: &Header, len: u64, features: u64) -> Result<Header, FrameFault> {
    let len = match usize::try_from(len) {
        Ok(short) if short < ETHERNET_LEN => return Err(FrameFault::Short(len)),
        Ok(len) if len <= MAX_FRAME => len,
        _ => return Err(FrameFault::Long(len)),
    };
    let mut fields = Fields::read(header);
    fields.flags &= flag::NEEDS_CSUM;
    if fields.flags == 0 {
        (fields.start, fields.offset) = (0, 0);
    } else {
        if features & feature::CSUM == 0 {
            return Err(FrameFault::ChecksumNotNegotiated);
        }
        let (start, offset) = (fields.start, fields.offset);
        // Two bytes, behind the Ethernet header. None of these sums can wrap.
        let end = usize::from(start) + usize::from(offset) + 2;
        if end > len || usize::from(start) < ETHERNET_LEN {
            return Err(FrameFault::Checksum { start, offset, len });
        }
    }
    if fields.kind == gso::NONE {
        (fields.header_len, fields.segment_size) = (0, 0);
        return Ok(fields.write(0));
    }
    check_segmentation(&fields, features)?;
    if fields.segment_size == 0 || fields.flags == 0 {
        return Err(FrameFault::Incomplete);
    }
    // Only a hint (section 5.1.6.2), but one that cannot be followed is none.
    if usize::from(fields.header_len) > len {
        return Err(FrameFault::Headers { header: fields.header_len, len });
    }
    Ok(fields.write(0))
}

fn check_segmentation(fields: &Fields, features: u64) -> Result<(), FrameFault> {
    let needed = match fields.kind & !gso::ECN {
        gso::TCPV4 => feature::HOST_TSO4,
        gso::TCPV6 => feature::HOST_TSO6,
        gso::UDP if fields.kind == gso::UDP => feature::HOST_UFO,
        _ => return Err(FrameFault::Segmentation(fields.kind)),
    };
    let ecn = if fields.kind & gso::ECN != 0 { feature::HOST_ECN } else { 0 };
    match features & (needed | ecn) == needed | ecn {
        true => Ok(()),
        false => Err(FrameFault::Segmentation(fields.kind)),
    }
}

/// Makes the header with which the guest gets a frame, spread over `buffers` chains. `offloads` are
/// the bits of `GUEST_…` features that are in force; `None` if the frame needs others, as one may
/// that the host made before the last change.
pub fn incoming(header: &Header, buffers: u16, offloads: u64) -> Option<Header> {
    let mut fields = Fields::read(header);
    if offloads & feature::GUEST_CSUM != 0 {
        fields.flags &= flag::NEEDS_CSUM | flag::DATA_VALID;
    } else if fields.flags & flag::NEEDS_CSUM != 0 {
        return None;
    } else {
        fields.flags = 0;
    }
    let needed = match fields.kind & !gso::ECN {
        gso::NONE => 0,
        gso::TCPV4 => feature::GUEST_TSO4,
        gso::TCPV6 => feature::GUEST_TSO6,
        gso::UDP => feature::GUEST_UFO,
        _ => return None,
    };
    let ecn = if fields.kind & gso::ECN != 0 { feature::GUEST_ECN } else { 0 };
    (offloads & (needed | ecn) == needed | ecn).then(|| fields.write(buffers))
}

#[cfg(test)]
#[path = "tests/header.rs"]
mod tests;
