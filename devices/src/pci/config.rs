//! The configuration registers of a function (type 0 header): values, what of them the guest can
//! write, capabilities, and one 64-bit memory BAR.

use serde::{Deserialize, Serialize};

/// Bytes of the space that is implemented; beyond it, ECAM reads zero.
pub const SIZE: usize = 256;

/// Offset of the command register.
pub const COMMAND: usize = 0x04;
/// Command: the BARs answer.
pub const COMMAND_MEMORY: u16 = 1 << 1;
/// Command: the function may write to memory.
const COMMAND_MASTER: u16 = 1 << 2;
/// Command: no INTx.
const COMMAND_INTX_DISABLE: u16 = 1 << 10;
const STATUS: usize = 0x06;
const STATUS_CAPABILITIES: u16 = 1 << 4;
const BAR0: usize = 0x10;
const CAPABILITIES: usize = 0x34;
const FIRST_CAPABILITY: usize = 0x40;
/// BAR: 64 bits wide, not prefetchable.
const BAR_MEMORY_64: u64 = 0b100;

/// What a function says it is.
#[derive(Clone, Copy, Debug)]
pub struct FunctionId {
    /// Vendor.
    pub vendor: u16,
    /// Device, by vendor.
    pub device: u16,
    /// Subsystem vendor and device.
    pub subsystem: (u16, u16),
    /// Base class, subclass, programming interface.
    pub class: [u8; 3],
    /// Revision.
    pub revision: u8,
}

/// The registers.
#[derive(Clone)]
pub struct ConfigSpace {
    bytes: [u8; SIZE],
    writable: [u8; SIZE],
    next_capability: usize,
    last_link: usize,
    bar_len: Option<u64>,
}

impl ConfigSpace {
    /// Registers without a BAR or capabilities.
    pub fn new(id: FunctionId) -> Self {
        let mut this = Self {
            bytes: [0; SIZE],
            writable: [0; SIZE],
            next_capability: FIRST_CAPABILITY,
            last_link: CAPABILITIES,
            bar_len: None,
        };
        this.set(0x00, &id.vendor.to_le_bytes());
        this.set(0x02, &id.device.to_le_bytes());
        let [base, sub, interface] = id.class;
        this.set(0x08, &[id.revision, interface, sub, base]);
        this.set(0x2c, &id.subsystem.0.to_le_bytes());
        this.set(0x2e, &id.subsystem.1.to_le_bytes());
        let command = COMMAND_MEMORY | COMMAND_MASTER | COMMAND_INTX_DISABLE;
        this.allow(COMMAND, &command.to_le_bytes());
        // Scratch registers that firmware uses: cache line size, interrupt line.
        this.allow(0x0c, &[0xff]);
        this.allow(0x3c, &[0xff]);
        this
    }

    /// Gives the function a 64-bit memory BAR (number 0) of `len` bytes, a power of two of at
    /// least 16, placed at `base`.
    pub fn add_bar(&mut self, base: u64, len: u64) {
        self.bar_len = Some(len);
        self.set(BAR0, &(base | BAR_MEMORY_64).to_le_bytes());
        self.allow(BAR0, &(!(len - 1)).to_le_bytes());
    }

    /// Appends a capability; gives its offset. `body` follows the two bytes of the header.
    pub fn add_capability(&mut self, id: u8, body: &[u8]) -> usize {
        let at = self.next_capability;
        self.set(self.last_link, &[at as u8]);
        self.set(at, &[id, 0]);
        self.set(at + 2, body);
        self.last_link = at + 1;
        self.next_capability = (at + 2 + body.len()).next_multiple_of(4);
        self.set(STATUS, &STATUS_CAPABILITIES.to_le_bytes());
        at
    }

    /// Lets the guest write the bits of `mask` at `offset`.
    pub fn allow(&mut self, offset: usize, mask: &[u8]) {
        for (to, from) in self.writable.iter_mut().skip(offset).zip(mask) {
            *to |= from;
        }
    }

    /// Sets registers on behalf of the device.
    pub fn set(&mut self, offset: usize, data: &[u8]) {
        for (to, from) in self.bytes.iter_mut().skip(offset).zip(data) {
            *to = *from;
        }
    }

    /// A register as it is.
    pub fn get<const N: usize>(&self, offset: usize) -> [u8; N] {
        let mut value = [0; N];
        self.read(offset, &mut value);
        value
    }

    /// A guest read; zero beyond the end.
    pub fn read(&self, offset: usize, data: &mut [u8]) {
        for (index, to) in data.iter_mut().enumerate() {
            *to = self.bytes.get(offset + index).copied().unwrap_or(0);
        }
    }

    /// A guest write: changes the writable bits only.
    pub fn write(&mut self, offset: usize, data: &[u8]) {
        let places = self.bytes.iter_mut().zip(&self.writable).skip(offset);
        for ((to, mask), from) in places.zip(data) {
            *to = (*to & !mask) | (from & mask);
        }
    }

    /// Where the BAR is, if the function decodes memory: base and length. A BAR whose end is
    /// beyond the address space, as during sizing, is nowhere.
    pub fn window(&self) -> Option<(u64, u64)> {
        let len = self.bar_len?;
        let command = u16::from_le_bytes(self.get(COMMAND));
        let base = u64::from_le_bytes(self.get(BAR0)) & !0xf;
        let placed = command & COMMAND_MEMORY != 0 && base != 0 && base.checked_add(len).is_some();
        placed.then_some((base, len))
    }

    /// What the guest can have changed, for a snapshot.
    pub fn record(&self) -> ConfigRecord {
        ConfigRecord { bytes: self.bytes.to_vec() }
    }

    /// Applies a record: its writable bits only, so that a snapshot cannot change what the
    /// function is.
    pub fn restore(&mut self, record: &ConfigRecord) {
        self.write(0, &record.bytes);
    }
}

/// Saved configuration registers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConfigRecord {
    bytes: Vec<u8>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn function() -> ConfigSpace {
        let mut config = ConfigSpace::new(FunctionId {
            vendor: 0x1af4,
            device: 0x1042,
            subsystem: (0x1af4, 0x40),
            class: [1, 0x80, 0],
            revision: 1,
        });
        config.add_bar(0x8000_0000, 0x10000);
        config
    }

    #[test]
    fn identity_is_read_only() {
        let mut config = function();
        config.write(0, &[0xff; 4]);
        assert_eq!(config.get(0), [0xf4, 0x1a, 0x42, 0x10]);
        assert_eq!(config.get(0x08), [1, 0, 0x80, 1]);
    }

    #[test]
    fn a_bar_is_sized_and_placed() {
        let mut config = function();
        config.write(BAR0, &[0xff; 8]);
        assert_eq!(u64::from_le_bytes(config.get(BAR0)), 0xffff_ffff_ffff_0004);
        config.write(BAR0, &0x9000_0000_u64.to_le_bytes());
        assert_eq!(config.window(), None);
        config.write(COMMAND, &COMMAND_MEMORY.to_le_bytes());
        assert_eq!(config.window(), Some((0x9000_0000, 0x10000)));
    }

    #[test]
    fn a_bar_that_would_wrap_is_nowhere() {
        let mut config = function();
        config.write(COMMAND, &COMMAND_MEMORY.to_le_bytes());
        config.write(BAR0, &[0xff; 8]);
        assert_eq!(config.window(), None);
    }

    #[test]
    fn capabilities_are_a_list() {
        let mut config = function();
        let first = config.add_capability(9, &[16, 1, 0, 0, 0]);
        let second = config.add_capability(0x11, &[0; 10]);
        assert_eq!((config.get::<1>(CAPABILITIES), first), ([0x40], 0x40));
        assert_eq!(config.get(0x40), [9, second as u8]);
        assert_eq!(config.get(second), [0x11, 0]);
        assert_eq!(second % 4, 0);
    }

    #[test]
    fn a_record_cannot_change_what_a_function_is() {
        let mut config = function();
        config.restore(&ConfigRecord { bytes: vec![0xff; 1000] });
        assert_eq!(config.get(0), [0xf4, 0x1a, 0x42, 0x10]);
        assert_eq!(u16::from_le_bytes(config.get(COMMAND)) & !0x406, 0);
    }
}
