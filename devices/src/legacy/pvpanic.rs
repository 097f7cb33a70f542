//! The pvpanic port: the guest kernel says that it has panicked.
//!
//! A read gives the events that the VMM understands, a write of one or several of their bits
//! reports them; Linux drives it with `CONFIG_PVPANIC` through ACPI device `QEMU0001`. Without
//! state, hence not saved.

use super::{byte, byte_mut};
use crate::bus::{AccessError, BusDevice};

/// Where the port stands.
pub const PORT: u16 = 0x505;
/// Ports taken.
pub const LEN: u64 = 1;

const PANICKED: u8 = 1 << 0;
const CRASH_LOADED: u8 = 1 << 1;

/// What the guest reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PanicEvent {
    /// The kernel has panicked and is about to stop.
    Panicked,
    /// The kernel has panicked and goes on into its crash kernel.
    CrashLoaded,
}

/// The port.
pub struct Pvpanic {
    report: Box<dyn FnMut(PanicEvent) + Send>,
}

impl Pvpanic {
    /// `report` runs on the vCPU thread, once per event of each write; the guest can repeat it
    /// without end.
    pub fn new(report: Box<dyn FnMut(PanicEvent) + Send>) -> Self {
        Self { report }
    }
}

impl BusDevice for Pvpanic {
    fn read(&mut self, offset: u64, data: &mut [u8]) -> Result<(), AccessError> {
        let value = byte_mut(offset, data)?;
        if offset != 0 {
            return Err(AccessError::NoRegister(offset));
        }
        *value = PANICKED | CRASH_LOADED;
        Ok(())
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), AccessError> {
        let value = byte(offset, data)?;
        if offset != 0 {
            return Err(AccessError::NoRegister(offset));
        }
        let events = [(PANICKED, PanicEvent::Panicked), (CRASH_LOADED, PanicEvent::CrashLoaded)];
        for (bit, event) in events {
            if value & bit != 0 {
                (self.report)(event);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, channel};

    use super::*;

    fn port() -> (Pvpanic, Receiver<PanicEvent>) {
        let (events, seen) = channel();
        (Pvpanic::new(Box::new(move |event| events.send(event).unwrap())), seen)
    }

    #[test]
    fn a_read_gives_the_supported_events() {
        let (mut port, _) = port();
        let mut data = [0];
        port.read(0, &mut data).unwrap();
        assert_eq!(data, [3]);
    }

    #[test]
    fn each_known_bit_is_one_event() {
        let (mut port, seen) = port();
        for value in [1, 2, 3, 0xfc, 0] {
            port.write(0, &[value]).unwrap();
        }
        use PanicEvent::{CrashLoaded, Panicked};
        let seen: Vec<_> = seen.try_iter().collect();
        assert_eq!(seen, [Panicked, CrashLoaded, Panicked, CrashLoaded]);
    }

    #[test]
    fn other_sizes_and_offsets_are_refused() {
        let (mut port, seen) = port();
        assert_eq!(port.write(0, &[1, 1]), Err(AccessError::BadSize { offset: 0, len: 2 }));
        assert_eq!(port.write(1, &[1]), Err(AccessError::NoRegister(1)));
        assert_eq!(port.read(1, &mut [0]), Err(AccessError::NoRegister(1)));
        assert_eq!(seen.try_iter().count(), 0);
    }
}
