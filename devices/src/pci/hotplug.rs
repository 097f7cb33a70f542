//! The registers through which the ACPI code of the DSDT learns what was plugged, and says what it
//! has let go of.
//!
//! Four 32-bit ports, a bit for each slot: `UP` and `DOWN` are taken by reading, `EJECT` is written
//! with the bit of a slot that the guest no longer uses. The VMM sets bits and raises the event
//! device's interrupt; the guest's ACPI code reads and notifies the slots' devices.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::bus::{AccessError, BusDevice};

/// Offset of the slots that have been filled.
pub const UP: u64 = 0;
/// Offset of the slots that shall be emptied.
pub const DOWN: u64 = 4;
/// Offset of the slots that the guest has let go.
pub const EJECT: u64 = 8;
/// Ports taken.
pub const LEN: u64 = 12;

#[derive(Debug, Default)]
struct Pending {
    up: u32,
    down: u32,
}

/// The VMM's side. Clones share the registers.
#[derive(Clone, Debug, Default)]
pub struct Slots(Arc<Mutex<Pending>>);

impl Slots {
    fn pending(&self) -> MutexGuard<'_, Pending> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A slot was filled. Raise the event interrupt afterwards.
    pub fn plugged(&self, slot: u8) {
        self.pending().up |= bit(slot);
    }

    /// A slot shall be emptied. Raise the event interrupt afterwards.
    pub fn unplug(&self, slot: u8) {
        self.pending().down |= bit(slot);
    }

    /// What the guest has not taken: the slots filled, and those to be emptied. For a snapshot.
    pub fn untaken(&self) -> (u32, u32) {
        let pending = self.pending();
        (pending.up, pending.down)
    }

    /// Sets what the guest has not taken. The guest has its interrupt already.
    pub fn set_untaken(&self, (up, down): (u32, u32)) {
        *self.pending() = Pending { up, down };
    }
}

fn bit(slot: u8) -> u32 {
    1_u32.checked_shl(u32::from(slot)).unwrap_or(0)
}

/// The guest's side.
pub struct HotplugRegisters {
    slots: Slots,
    ejected: Box<dyn FnMut(u8) + Send>,
}

impl HotplugRegisters {
    /// `ejected` hears of each slot that the guest lets go, on the vCPU thread; must not wait.
    pub fn new(slots: Slots, ejected: Box<dyn FnMut(u8) + Send>) -> Self {
        Self { slots, ejected }
    }
}

impl BusDevice for HotplugRegisters {
    fn read(&mut self, offset: u64, data: &mut [u8]) -> Result<(), AccessError> {
        let len = data.len();
        if len != 4 {
            return Err(AccessError::BadSize { offset, len });
        }
        let mut pending = self.slots.pending();
        let value = match offset {
            UP => std::mem::take(&mut pending.up),
            DOWN => std::mem::take(&mut pending.down),
            EJECT => 0,
            _ => return Err(AccessError::NoRegister(offset)),
        };
        data.copy_from_slice(&value.to_le_bytes());
        Ok(())
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), AccessError> {
        let refused = AccessError::BadSize { offset, len: data.len() };
        let value = u32::from_le_bytes(<[u8; 4]>::try_from(data).map_err(|_| refused)?);
        if offset != EJECT {
            return Err(AccessError::NotNow(offset));
        }
        for slot in (0..32).filter(|&slot| value & bit(slot) != 0) {
            (self.ejected)(slot);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_taken_once() {
        let slots = Slots::default();
        let mut registers = HotplugRegisters::new(slots.clone(), Box::new(|_| {}));
        slots.plugged(3);
        slots.unplug(31);
        let mut read = |offset| {
            let mut data = [0; 4];
            registers.read(offset, &mut data).unwrap();
            u32::from_le_bytes(data)
        };
        assert_eq!([read(UP), read(UP), read(DOWN), read(DOWN)], [8, 0, 1 << 31, 0]);
    }

    #[test]
    fn every_slot_let_go_is_told() {
        let told = Arc::new(Mutex::new(Vec::new()));
        let log = told.clone();
        let ejected = Box::new(move |slot| log.lock().unwrap().push(slot));
        let mut registers = HotplugRegisters::new(Slots::default(), ejected);
        registers.write(EJECT, &0b1010_u32.to_le_bytes()).unwrap();
        assert!(registers.write(UP, &[1, 0, 0, 0]).is_err());
        assert!(registers.write(EJECT, &[1]).is_err());
        assert_eq!(*told.lock().unwrap(), [1, 3]);
    }
}
