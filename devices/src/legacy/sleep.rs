//! The two registers with which a guest powers itself off under hardware-reduced ACPI (ACPI 6.5,
//! section 4.8.3.7): SLEEP_CONTROL_REG and SLEEP_STATUS_REG of the FADT.
//!
//! Only S5 does something. No other sleep state is described to the guest, so a write of another
//! type is ignored and the machine goes on. There is nothing to wake from: WAK_STS reads 0.

use super::{byte, byte_mut};
use crate::bus::{AccessError, BusDevice};

/// Offset of SLEEP_CONTROL_REG.
pub const CONTROL: u64 = 0;
/// Offset of SLEEP_STATUS_REG.
pub const STATUS: u64 = 1;
/// Ports taken.
pub const LEN: u64 = 2;

/// The sleep type of S5, which the `_S5` package of the DSDT must name.
pub const SLEEP_TYPE_S5: u8 = 5;

const SLP_EN: u8 = 1 << 5;
const SLP_TYP_SHIFT: u8 = 2;
const SLP_TYP_MASK: u8 = 0b111;

/// The registers.
pub struct SleepRegisters {
    power_off: Box<dyn Fn() + Send>,
}

impl SleepRegisters {
    /// `power_off` runs on the vCPU thread when the guest enters S5; it must not wait for that
    /// vCPU. The guest may write again until it is stopped.
    pub fn new(power_off: Box<dyn Fn() + Send>) -> Self {
        Self { power_off }
    }

    fn control(&mut self, value: u8) {
        let sleep_type = (value >> SLP_TYP_SHIFT) & SLP_TYP_MASK;
        if value & SLP_EN != 0 && sleep_type == SLEEP_TYPE_S5 {
            (self.power_off)();
        }
    }
}

impl BusDevice for SleepRegisters {
    fn read(&mut self, offset: u64, data: &mut [u8]) -> Result<(), AccessError> {
        let value = byte_mut(offset, data)?;
        match offset {
            // SLP_EN is write-only, and the type is only looked at together with it.
            CONTROL | STATUS => *value = 0,
            _ => return Err(AccessError::NoRegister(offset)),
        }
        Ok(())
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), AccessError> {
        let value = byte(offset, data)?;
        match offset {
            CONTROL => self.control(value),
            // Clears WAK_STS, which is never set.
            STATUS => {}
            _ => return Err(AccessError::NoRegister(offset)),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    fn registers() -> (SleepRegisters, Arc<AtomicU32>) {
        let count = Arc::new(AtomicU32::new(0));
        let counted = count.clone();
        let power_off = move || {
            counted.fetch_add(1, Ordering::Relaxed);
        };
        (SleepRegisters::new(Box::new(power_off)), count)
    }

    #[test]
    fn s5_with_the_enable_bit_powers_off() {
        let (mut registers, count) = registers();
        registers.write(CONTROL, &[SLP_EN | SLEEP_TYPE_S5 << SLP_TYP_SHIFT]).unwrap();
        assert_eq!(count.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn other_types_and_s5_without_enable_are_ignored() {
        let (mut registers, count) = registers();
        registers.write(CONTROL, &[SLEEP_TYPE_S5 << SLP_TYP_SHIFT]).unwrap();
        for sleep_type in [0, 1, 2, 3, 4, 6, 7] {
            registers.write(CONTROL, &[SLP_EN | sleep_type << SLP_TYP_SHIFT]).unwrap();
        }
        registers.write(STATUS, &[0xff]).unwrap();
        assert_eq!(count.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn both_read_zero_and_there_is_no_third() {
        let (mut registers, _) = registers();
        for offset in [CONTROL, STATUS] {
            let mut data = [0xff];
            registers.read(offset, &mut data).unwrap();
            assert_eq!(data, [0]);
        }
        assert_eq!(registers.read(2, &mut [0]), Err(AccessError::NoRegister(2)));
        assert_eq!(registers.write(2, &[0]), Err(AccessError::NoRegister(2)));
    }
}
