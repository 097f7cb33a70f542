//! Address → device, for port I/O and for MMIO.
//!
//! The vCPU threads call [`Bus::read`] and [`Bus::write`] on each exit. This is the only place that
//! decides what a bad access returns: reads give all-ones, writes vanish, and one line is logged
//! per kind of fault until a device has used up its budget, so that a guest cannot flood the log.
//! Devices know offsets, never addresses.
//!
//! Devices come and go while the guest runs (PCI BARs move, devices are plugged): an access holds
//! the bus only while it looks the device up, so a device may change the bus from within a call.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use crate::metrics::{Count, Metered, Metric};

/// Why a device refused an access. The guest sees all-ones or nothing; the log sees this.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AccessError {
    /// The register takes accesses of other sizes only.
    #[error("access of {len} bytes at offset {offset:#x} is not supported")]
    BadSize {
        /// Offset within the device.
        offset: u64,
        /// Bytes of the access.
        len: usize,
    },
    /// There is no register there.
    #[error("no register at offset {0:#x}")]
    NoRegister(u64),
    /// The register exists, and cannot be read or written, or not now.
    #[error("access at offset {0:#x} is not allowed in this state")]
    NotNow(u64),
}

/// A device that answers to bus accesses.
///
/// Called by vCPU threads under the device's own lock; must not wait for another thread.
pub trait BusDevice: Send {
    /// Fills `data` (1, 2, 4 or 8 bytes) from the registers at `offset`.
    fn read(&mut self, offset: u64, data: &mut [u8]) -> Result<(), AccessError>;
    /// Writes `data` (1, 2, 4 or 8 bytes) to the registers at `offset`.
    fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), AccessError>;
}

/// Why a device could not be put on the bus.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum BusError {
    /// The range is empty or wraps around the address space.
    #[error("range of {name} at {base:#x}, {len:#x} bytes, is empty or wraps around")]
    BadRange {
        /// The device.
        name: String,
        /// First address.
        base: u64,
        /// Length in bytes.
        len: u64,
    },
    /// Another device is there.
    #[error("range of {name} at {base:#x} overlaps that of {other}")]
    Overlap {
        /// The device that came second.
        name: String,
        /// Its first address.
        base: u64,
        /// The device that is there.
        other: String,
    },
}

/// Faulty accesses that are logged per device; the later ones are only counted.
const LOGGED_FAULTS: u64 = 8;

struct Slot {
    len: u64,
    name: String,
    device: Arc<Mutex<dyn BusDevice>>,
    faults: Count,
}

impl Slot {
    fn fault(&self, verb: &str, error: AccessError) {
        if self.faults.one() < LOGGED_FAULTS {
            tracing::warn!(device = %self.name, "guest {verb}: {error}");
        }
    }
}

/// An address space with devices in it, shared by the vCPUs.
#[derive(Default)]
pub struct Bus {
    refused: Count,
    unclaimed: Count,
    slots: RwLock<BTreeMap<u64, Arc<Slot>>>,
}

impl Bus {
    /// An empty bus.
    pub fn new() -> Self {
        Self::default()
    }

    /// Puts `device` at `base..base+len`.
    pub fn insert(
        &self,
        name: impl Into<String>,
        base: u64,
        len: u64,
        device: Arc<Mutex<dyn BusDevice>>,
    ) -> Result<(), BusError> {
        let name = name.into();
        let Some(end) = base.checked_add(len).filter(|_| len > 0) else {
            return Err(BusError::BadRange { name, base, len });
        };
        let mut slots = self.slots.write().unwrap_or_else(PoisonError::into_inner);
        let before = slots.range(..end).next_back();
        if let Some((start, slot)) = before
            && start.saturating_add(slot.len) > base
        {
            return Err(BusError::Overlap { name, base, other: slot.name.clone() });
        }
        slots.insert(base, Arc::new(Slot { len, name, device, faults: Count::new() }));
        Ok(())
    }

    /// Takes the device away whose range starts at `base`; false if there is none. A call into it
    /// that is under way ends as it would have.
    pub fn remove(&self, base: u64) -> bool {
        let mut slots = self.slots.write().unwrap_or_else(PoisonError::into_inner);
        slots.remove(&base).is_some()
    }

    /// A guest read. Fills `data` with all-ones where there is no device or it refuses.
    pub fn read(&self, address: u64, data: &mut [u8]) {
        data.fill(0xff);
        let Some((offset, slot)) = self.find(address, data.len()) else {
            self.unclaimed.one();
            return;
        };
        let result = {
            let mut device = slot.device.lock().unwrap_or_else(PoisonError::into_inner);
            device.read(offset, data)
        };
        if let Err(error) = result {
            data.fill(0xff);
            self.refused.one();
            slot.fault("read", error);
        }
    }

    /// A guest write. Ignored where there is no device or it refuses.
    pub fn write(&self, address: u64, data: &[u8]) {
        let Some((offset, slot)) = self.find(address, data.len()) else {
            self.unclaimed.one();
            return;
        };
        let result = {
            let mut device = slot.device.lock().unwrap_or_else(PoisonError::into_inner);
            device.write(offset, data)
        };
        if let Err(error) = result {
            self.refused.one();
            slot.fault("write", error);
        }
    }

    fn find(&self, address: u64, len: usize) -> Option<(u64, Arc<Slot>)> {
        let slots = self.slots.read().unwrap_or_else(PoisonError::into_inner);
        let (start, slot) = slots.range(..=address).next_back()?;
        let offset = address - start;
        let end = offset.checked_add(len as u64)?;
        (end <= slot.len).then(|| (offset, slot.clone()))
    }
}

impl Metered for Bus {
    fn metrics(&self) -> Vec<Metric> {
        vec![
            Metric::counter(
                "bus_refused_accesses_total",
                "Accesses of the guest that a device refused",
                self.refused.get(),
            ),
            Metric::counter(
                "bus_unclaimed_accesses_total",
                "Accesses of the guest to where no device is",
                self.unclaimed.get(),
            ),
        ]
    }
}

impl fmt::Debug for Bus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let slots = self.slots.read().unwrap_or_else(PoisonError::into_inner);
        f.debug_map()
            .entries(slots.iter().map(|(base, slot)| (format!("{base:#x}"), &slot.name)))
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Register(u8);

    impl BusDevice for Register {
        fn read(&mut self, offset: u64, data: &mut [u8]) -> Result<(), AccessError> {
            match (offset, data.len()) {
                (0, 1) => data[0] = self.0,
                (0, len) => {
                    data.fill(0);
                    return Err(AccessError::BadSize { offset, len });
                }
                _ => return Err(AccessError::NoRegister(offset)),
            }
            Ok(())
        }
        fn write(&mut self, _offset: u64, data: &[u8]) -> Result<(), AccessError> {
            self.0 = data[0];
            Ok(())
        }
    }

    fn bus_with_register() -> Bus {
        let bus = Bus::new();
        bus.insert("register", 0x1000, 4, Arc::new(Mutex::new(Register(7)))).unwrap();
        bus
    }

    fn read(bus: &Bus, address: u64, len: usize) -> Vec<u8> {
        let mut data = vec![0; len];
        bus.read(address, &mut data);
        data
    }

    #[test]
    fn accesses_reach_the_device_by_offset() {
        let bus = bus_with_register();
        bus.write(0x1000, &[9]);
        assert_eq!(read(&bus, 0x1000, 1), [9]);
    }

    #[test]
    fn refused_and_unclaimed_reads_are_all_ones() {
        let bus = bus_with_register();
        assert_eq!(read(&bus, 0x1000, 2), [0xff, 0xff]);
        assert_eq!(read(&bus, 0x1001, 1), [0xff]);
        assert_eq!(read(&bus, 0xfff, 1), [0xff]);
        assert_eq!(read(&bus, 0x1004, 1), [0xff]);
        assert_eq!(read(&bus, u64::MAX, 8), [0xff; 8]);
    }

    #[test]
    fn refused_and_unclaimed_accesses_are_counted() {
        let bus = bus_with_register();
        let counts = || bus.metrics().iter().map(|metric| metric.value).collect::<Vec<_>>();
        read(&bus, 0x1000, 1);
        bus.write(0x1000, &[1]);
        assert_eq!(counts(), [0, 0]);
        read(&bus, 0x1001, 1);
        bus.write(0x1004, &[1]);
        read(&bus, 0xfff, 1);
        assert_eq!(counts(), [1, 2]);
    }

    #[test]
    fn an_access_across_the_end_is_unclaimed() {
        let bus = bus_with_register();
        assert_eq!(read(&bus, 0x1003, 2), [0xff, 0xff]);
    }

    #[test]
    fn a_device_that_was_removed_answers_no_more() {
        let bus = bus_with_register();
        assert!(bus.remove(0x1000));
        assert_eq!(read(&bus, 0x1000, 1), [0xff]);
        assert!(!bus.remove(0x1000));
    }

    #[test]
    fn overlaps_and_bad_ranges_are_refused() {
        let bus = bus_with_register();
        let device = || Arc::new(Mutex::new(Register(0)));
        assert!(matches!(bus.insert("b", 0x1003, 1, device()), Err(BusError::Overlap { .. })));
        assert!(matches!(bus.insert("b", 0xfff, 2, device()), Err(BusError::Overlap { .. })));
        assert!(matches!(bus.insert("b", 0x1000, 0, device()), Err(BusError::BadRange { .. })));
        assert!(matches!(bus.insert("b", u64::MAX, 2, device()), Err(BusError::BadRange { .. })));
        assert_eq!(bus.insert("b", 0x1004, 4, device()), Ok(()));
    }
}
