//! The keyboard controller, of which only the CPU reset line is left.
//!
//! Linux pulls it on `reboot=k` and as the last resort on x86. There is no keyboard: status and
//! data read 0, every other command vanishes. Without state, hence not saved.

use std::convert::Infallible;

use vm_superio::{I8042Device, Trigger};

use super::{byte, byte_mut};
use crate::bus::{AccessError, BusDevice};

/// First port: data. The command and status port is the fifth, 0x64.
pub const PORT: u16 = 0x60;
/// Ports taken.
pub const LEN: u64 = 5;

struct ResetLine(Box<dyn Fn() + Send>);

impl Trigger for ResetLine {
    type E = Infallible;

    fn trigger(&self) -> Result<(), Infallible> {
        (self.0)();
        Ok(())
    }
}

/// The controller.
pub struct I8042(I8042Device<ResetLine>);

impl I8042 {
    /// `reset` runs on the vCPU thread when the guest writes command 0xFE. It must not wait for
    /// that vCPU.
    pub fn new(reset: Box<dyn Fn() + Send>) -> Self {
        Self(I8042Device::new(ResetLine(reset)))
    }
}

fn register(offset: u64) -> Result<u8, AccessError> {
    match u8::try_from(offset) {
        Ok(register) if offset < LEN => Ok(register),
        _ => Err(AccessError::NoRegister(offset)),
    }
}

impl BusDevice for I8042 {
    fn read(&mut self, offset: u64, data: &mut [u8]) -> Result<(), AccessError> {
        *byte_mut(offset, data)? = self.0.read(register(offset)?);
        Ok(())
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), AccessError> {
        let Ok(()) = self.0.write(register(offset)?, byte(offset, data)?);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    fn controller() -> (I8042, Arc<AtomicU32>) {
        let resets = Arc::new(AtomicU32::new(0));
        let counted = resets.clone();
        let reset = move || {
            counted.fetch_add(1, Ordering::Relaxed);
        };
        (I8042::new(Box::new(reset)), resets)
    }

    #[test]
    fn the_reset_command_runs_the_closure() {
        let (mut controller, resets) = controller();
        controller.write(4, &[0xfe]).unwrap();
        assert_eq!(resets.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn other_commands_and_ports_do_not_reset() {
        let (mut controller, resets) = controller();
        controller.write(4, &[0xff]).unwrap();
        controller.write(0, &[0xfe]).unwrap();
        assert_eq!(controller.write(4, &[0xfe, 0]), Err(BAD_SIZE));
        assert_eq!(controller.write(5, &[0xfe]), Err(AccessError::NoRegister(5)));
        assert_eq!(resets.load(Ordering::Relaxed), 0);
    }

    const BAD_SIZE: AccessError = AccessError::BadSize { offset: 4, len: 2 };

    #[test]
    fn status_reads_as_an_empty_keyboard() {
        let (mut controller, _) = controller();
        let mut data = [0xff];
        controller.read(4, &mut data).unwrap();
        assert_eq!(data, [0]);
    }
}
