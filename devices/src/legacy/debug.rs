//! A write-only port whose bytes go to the VMM: the rungs of the boot ladder.
//!
//! Firmware, kernel and init write one byte each when they get somewhere; the VMM stamps them with
//! its clock. The port has no state and is not saved.

use super::byte;
use crate::bus::{AccessError, BusDevice};

/// Where the port stands.
pub const PORT: u16 = 0xd4;
/// Ports taken.
pub const LEN: u64 = 1;

/// The port.
pub struct DebugPort {
    stamp: Box<dyn FnMut(u8) + Send>,
}

impl DebugPort {
    /// `stamp` gets each byte, on the vCPU thread. It must bound what it keeps: the guest can write
    /// without end.
    pub fn new(stamp: Box<dyn FnMut(u8) + Send>) -> Self {
        Self { stamp }
    }
}

impl BusDevice for DebugPort {
    fn read(&mut self, offset: u64, _data: &mut [u8]) -> Result<(), AccessError> {
        Err(AccessError::NotNow(offset))
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), AccessError> {
        let value = byte(offset, data)?;
        if offset != 0 {
            return Err(AccessError::NoRegister(offset));
        }
        (self.stamp)(value);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn each_byte_is_stamped_and_nothing_can_be_read() {
        let (stamps, stamped) = channel();
        let mut port = DebugPort::new(Box::new(move |byte| stamps.send(byte).unwrap()));
        port.write(0, &[1]).unwrap();
        port.write(0, &[2]).unwrap();
        assert_eq!(port.read(0, &mut [0]), Err(AccessError::NotNow(0)));
        assert_eq!(port.write(0, &[3, 4]), Err(AccessError::BadSize { offset: 0, len: 2 }));
        assert_eq!(port.write(1, &[5]), Err(AccessError::NoRegister(1)));
        assert_eq!(stamped.try_iter().collect::<Vec<_>>(), [1, 2]);
    }
}
