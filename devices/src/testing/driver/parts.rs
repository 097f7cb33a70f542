//! What a driver puts into registers and rings.

use crate::memory::GuestAddress;

/// Offsets of MMIO registers (virtio 1.3, section 4.2.2).
pub mod register {
    #![allow(missing_docs)]
    pub const MAGIC: u64 = 0x00;
    pub const VERSION: u64 = 0x04;
    pub const DEVICE_ID: u64 = 0x08;
    pub const VENDOR_ID: u64 = 0x0c;
    pub const DEVICE_FEATURES: u64 = 0x10;
    pub const DEVICE_FEATURES_SELECT: u64 = 0x14;
    pub const DRIVER_FEATURES: u64 = 0x20;
    pub const DRIVER_FEATURES_SELECT: u64 = 0x24;
    pub const QUEUE_SELECT: u64 = 0x30;
    pub const QUEUE_SIZE_MAX: u64 = 0x34;
    pub const QUEUE_SIZE: u64 = 0x38;
    pub const QUEUE_READY: u64 = 0x44;
    pub const INTERRUPT_STATUS: u64 = 0x60;
    pub const INTERRUPT_ACK: u64 = 0x64;
    pub const STATUS: u64 = 0x70;
    pub const QUEUE_DESC: u64 = 0x80;
    pub const QUEUE_AVAIL: u64 = 0x90;
    pub const QUEUE_USED: u64 = 0xa0;
    pub const CONFIG_GENERATION: u64 = 0xfc;
    pub const CONFIG: u64 = 0x100;
}

/// Descriptor flags (virtio 1.3, section 2.7.5).
pub mod flags {
    /// Another descriptor follows.
    pub const NEXT: u16 = 1;
    /// The device writes.
    pub const WRITE: u16 = 2;
    /// A table of descriptors.
    pub const INDIRECT: u16 = 4;
}

/// A buffer to put into a chain.
#[derive(Clone, Copy, Debug)]
pub struct Buffer {
    pub(super) address: GuestAddress,
    pub(super) len: u32,
    pub(super) writable: bool,
}

impl Buffer {
    /// One that the device reads.
    pub fn readable(address: GuestAddress, len: u32) -> Self {
        Self { address, len, writable: false }
    }

    /// One that the device writes.
    pub fn writable(address: GuestAddress, len: u32) -> Self {
        Self { address, len, writable: true }
    }
}

/// A descriptor as it stands in a table, well-formed or not.
#[derive(Clone, Copy, Debug, Default)]
pub struct Descriptor {
    /// Guest address.
    pub address: u64,
    /// Bytes.
    pub len: u32,
    /// Of [`flags`].
    pub flags: u16,
    /// The next descriptor.
    pub next: u16,
}

impl Descriptor {
    pub(crate) fn bytes(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.address.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.len.to_le_bytes());
        bytes[12..14].copy_from_slice(&self.flags.to_le_bytes());
        bytes[14..].copy_from_slice(&self.next.to_le_bytes());
        bytes
    }
}

/// An entry of the used ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// Head of the chain.
    pub head: u16,
    /// Bytes that the device says it has written.
    pub len: u32,
}

pub(super) fn descriptor(buffer: &Buffer, next: Option<u16>) -> Descriptor {
    let write = if buffer.writable { flags::WRITE } else { 0 };
    let more = if next.is_some() { flags::NEXT } else { 0 };
    Descriptor {
        address: buffer.address.0,
        len: buffer.len,
        flags: write | more,
        next: next.unwrap_or(0),
    }
}
