//! The root bus: which function stands in which slot, configuration accesses to them, and their
//! windows on the memory bus.
//!
//! Two ways to the registers: [`PortAccess`], the address and data ports 0xcf8 and 0xcfc, and
//! [`EcamAccess`], a memory window (PCI Express 5.0, section 7.2.2). Both end in [`PciRoot`], under
//! its lock. After each write the root compares where the function's window was and is, and moves
//! it on the bus.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::config::{ConfigSpace, FunctionId};
use super::{PciFunction, SLOTS, Window};
use crate::bus::{AccessError, Bus, BusDevice};
use crate::ids::DeviceId;
use crate::snapshot::{Record, RestoreError, SaveError};

/// First port of the legacy configuration access.
pub const CONFIG_PORT: u16 = 0xcf8;
/// Its ports: address at 0, data at 4.
pub const CONFIG_PORTS: u64 = 8;
/// Bytes of ECAM for one bus.
pub const ECAM_SIZE: u64 = 1 << 20;

const ADDRESS_ENABLE: u32 = 1 << 31;

/// A function whose window has come, gone or moved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WindowChange {
    /// Whose.
    pub device: DeviceId,
    /// Where it was.
    pub from: Option<u64>,
    /// Where it is.
    pub to: Option<u64>,
}

/// Hears of window changes, to connect doorbells. Called under the root's lock; must not wait.
pub type WindowObserver = Box<dyn Fn(WindowChange) + Send>;

/// Why a function could not be put into a slot.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum SlotError {
    /// All slots are taken.
    #[error("no PCI slot is free; a VM has {}", SLOTS - 1)]
    Full,
    /// The slot is taken, or there is no such slot.
    #[error("PCI slot {0} is not free")]
    Taken(u8),
    /// The slot is empty.
    #[error("no device {0} on the PCI bus")]
    NoSuchDevice(DeviceId),
}

struct Slot {
    id: DeviceId,
    function: Box<dyn PciFunction>,
    window: Option<Window>,
    /// Times that the guest put the window where it cannot be.
    misplaced: u32,
}

/// Misplaced windows that are logged per function.
const LOGGED_MISPLACEMENTS: u32 = 8;

/// The bus with its functions.
pub struct PciRoot {
    bridge: ConfigSpace,
    slots: Vec<Option<Slot>>,
    memory_bus: Weak<Bus>,
    observer: WindowObserver,
}

impl PciRoot {
    /// A bus with a host bridge in slot 0. Windows appear on `memory_bus`.
    pub fn new(memory_bus: &Arc<Bus>, observer: WindowObserver) -> Self {
        // Red Hat's generic PCI Express host bridge: Linux needs no driver for it.
        let bridge = ConfigSpace::new(FunctionId {
            vendor: 0x1b36,
            device: 0x0008,
            subsystem: (0, 0),
            class: [6, 0, 0],
            revision: 0,
        });
        let slots = (0..SLOTS).map(|_| None).collect();
        Self { bridge, slots, memory_bus: Arc::downgrade(memory_bus), observer }
    }

    /// The first free slot.
    pub fn free_slot(&self) -> Result<u8, SlotError> {
        let is_free = |&slot: &u8| self.slots.get(usize::from(slot)).is_some_and(Option::is_none);
        (1..SLOTS).find(is_free).ok_or(SlotError::Full)
    }

    /// Puts a function into the first free slot; gives its number.
    pub fn insert(
        &mut self,
        id: DeviceId,
        function: Box<dyn PciFunction>,
    ) -> Result<u8, SlotError> {
        let number = self.free_slot()?;
        self.insert_at(number, id, function)?;
        Ok(number)
    }

    /// Puts a function into the slot of that number, where a guest that goes on expects it.
    pub fn insert_at(
        &mut self,
        number: u8,
        id: DeviceId,
        function: Box<dyn PciFunction>,
    ) -> Result<(), SlotError> {
        match self.slots.get_mut(usize::from(number)) {
            Some(slot @ None) if number > 0 => {
                *slot = Some(Slot { id, function, window: None, misplaced: 0 });
                Ok(())
            }
            _ => Err(SlotError::Taken(number)),
        }
    }

    /// The configuration registers of all functions, with their slots.
    pub fn save(&self) -> Result<Vec<(u8, DeviceId, Record)>, SaveError> {
        let slots = self.slots.iter().zip(0_u8..);
        let filled = slots.filter_map(|(slot, number)| Some((slot.as_ref()?, number)));
        filled
            .map(|(slot, number)| Ok((number, slot.id.clone(), slot.function.save_record()?)))
            .collect()
    }

    /// Restores the configuration registers of the function in a slot, and places its window. An
    /// empty slot takes nothing.
    pub fn restore(&mut self, number: u8, record: Record) -> Result<(), RestoreError> {
        let place = usize::from(number);
        let Some(mut slot) = self.slots.get_mut(place).and_then(Option::take) else {
            return Ok(());
        };
        let restored = slot.function.restore_record(record);
        if restored.is_ok() {
            let window = slot.function.window();
            self.move_window(&mut slot, window);
        }
        if let Some(place) = self.slots.get_mut(place) {
            *place = Some(slot);
        }
        restored
    }

    /// Takes the function of that name out, with its window.
    pub fn remove(&mut self, id: &DeviceId) -> Result<Box<dyn PciFunction>, SlotError> {
        let found =
            self.slots.iter_mut().find(|slot| slot.as_ref().is_some_and(|slot| &slot.id == id));
        let mut slot =
            found.and_then(Option::take).ok_or_else(|| SlotError::NoSuchDevice(id.clone()))?;
        self.move_window(&mut slot, None);
        Ok(slot.function)
    }

    /// The slot of the function of that name.
    pub fn slot_of(&self, id: &DeviceId) -> Option<u8> {
        (1..SLOTS).find(|&slot| self.occupant(slot) == Some(id))
    }

    /// The name of the function in a slot.
    pub fn occupant(&self, slot: u8) -> Option<&DeviceId> {
        self.slots.get(usize::from(slot))?.as_ref().map(|slot| &slot.id)
    }

    fn read(&mut self, slot: u8, offset: u16, data: &mut [u8]) {
        if slot == 0 {
            return self.bridge.read(usize::from(offset), data);
        }
        match self.slots.get_mut(usize::from(slot)) {
            Some(Some(slot)) => slot.function.read_config(offset, data),
            // Nobody there: the kernel finds no vendor.
            _ => data.fill(0xff),
        }
    }

    fn write(&mut self, slot: u8, offset: u16, data: &[u8]) {
        if slot == 0 {
            return self.bridge.write(usize::from(offset), data);
        }
        let place = usize::from(slot);
        let Some(mut slot) = self.slots.get_mut(place).and_then(Option::take) else { return };
        slot.function.write_config(offset, data);
        let window = slot.function.window();
        self.move_window(&mut slot, window);
        if let Some(place) = self.slots.get_mut(place) {
            *place = Some(slot);
        }
    }

    fn move_window(&self, slot: &mut Slot, to: Option<Window>) {
        let from = slot.window.as_ref().map(|window| window.base);
        let wanted = to.as_ref().map(|window| window.base);
        if from == wanted {
            return;
        }
        let Some(bus) = self.memory_bus.upgrade() else { return };
        if let Some(base) = from {
            bus.remove(base);
        }
        slot.window = to.filter(|window| {
            let placed =
                bus.insert(slot.id.as_str(), window.base, window.len, window.device.clone());
            if let Err(error) = &placed {
                // The guest's own doing; the window answers nowhere until it is moved again.
                slot.misplaced = slot.misplaced.saturating_add(1);
                if slot.misplaced <= LOGGED_MISPLACEMENTS {
                    tracing::warn!(device = %slot.id, %error, "PCI window not placed");
                }
            }
            placed.is_ok()
        });
        let to = slot.window.as_ref().map(|window| window.base);
        (self.observer)(WindowChange { device: slot.id.clone(), from, to });
    }
}

/// Registers are up to 4 bytes wide and accesses do not cross one (section 2.2.2 of the port
/// mechanism; ECAM likewise).
fn register(offset: u64, len: usize) -> Result<u16, AccessError> {
    let aligned = matches!(len, 1 | 2 | 4) && offset.is_multiple_of(len as u64);
    match u16::try_from(offset) {
        Ok(register) if aligned => Ok(register),
        _ => Err(AccessError::BadSize { offset, len }),
    }
}

/// The ports 0xcf8 to 0xcff.
pub struct PortAccess {
    root: Arc<Mutex<PciRoot>>,
    address: u32,
}

impl PortAccess {
    /// Ports in front of `root`.
    pub fn new(root: Arc<Mutex<PciRoot>>) -> Self {
        Self { root, address: 0 }
    }

    /// The address register, for a snapshot between the two accesses.
    pub fn address(&self) -> u32 {
        self.address
    }

    /// Sets the address register as it was saved: any value may stand there.
    pub fn set_address(&mut self, address: u32) {
        self.address = address;
    }

    /// Slot and register that a data access at `port` means; `None` for what is not there.
    fn target(&self, port: u64, len: usize) -> Result<Option<(u8, u16)>, AccessError> {
        let register = register(port - 4, len)? + (self.address & 0xfc) as u16;
        let bus = (self.address >> 16) & 0xff;
        let (slot, function) = (((self.address >> 11) & 0x1f) as u8, (self.address >> 8) & 7);
        let there = self.address & ADDRESS_ENABLE != 0 && bus == 0 && function == 0;
        Ok(there.then_some((slot, register)))
    }
}

impl BusDevice for PortAccess {
    fn read(&mut self, offset: u64, data: &mut [u8]) -> Result<(), AccessError> {
        match (offset, data.len()) {
            (0, 4) => data.copy_from_slice(&self.address.to_le_bytes()),
            // Narrower accesses to the address port are of other mechanisms.
            (0..4, _) => data.fill(0xff),
            (_, len) => match self.target(offset, len)? {
                Some((slot, register)) => lock(&self.root).read(slot, register, data),
                None => data.fill(0xff),
            },
        }
        Ok(())
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), AccessError> {
        match offset {
            0..4 => {
                if let (0, Ok(address)) = (offset, <[u8; 4]>::try_from(data)) {
                    self.address = u32::from_le_bytes(address);
                }
            }
            _ => {
                if let Some((slot, register)) = self.target(offset, data.len())? {
                    lock(&self.root).write(slot, register, data);
                }
            }
        }
        Ok(())
    }
}

/// The ECAM window of bus 0: 4 KiB for each function.
pub struct EcamAccess {
    root: Arc<Mutex<PciRoot>>,
}

impl EcamAccess {
    /// A window in front of `root`.
    pub fn new(root: Arc<Mutex<PciRoot>>) -> Self {
        Self { root }
    }

    fn target(offset: u64, len: usize) -> Result<Option<(u8, u16)>, AccessError> {
        let register = register(offset & 0xfff, len)?;
        let (slot, function) = (((offset >> 15) & 0x1f) as u8, (offset >> 12) & 7);
        Ok((function == 0).then_some((slot, register)))
    }
}

impl BusDevice for EcamAccess {
    fn read(&mut self, offset: u64, data: &mut [u8]) -> Result<(), AccessError> {
        match Self::target(offset, data.len())? {
            Some((slot, register)) => lock(&self.root).read(slot, register, data),
            None => data.fill(0xff),
        }
        Ok(())
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), AccessError> {
        if let Some((slot, register)) = Self::target(offset, data.len())? {
            lock(&self.root).write(slot, register, data);
        }
        Ok(())
    }
}

fn lock(root: &Mutex<PciRoot>) -> std::sync::MutexGuard<'_, PciRoot> {
    root.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
