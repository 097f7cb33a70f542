//! Puts virtio devices into PCI slots, at boot and while the guest runs.
//!
//! Plugging: the function appears in its slot, the slot's bit is set, the event device's interrupt
//! is raised, and the guest's ACPI code finds it. Unplugging: the bit and the interrupt ask the
//! guest to let go; when it has, it writes to the eject register, and the control thread takes the
//! function out. A guest that does not let go keeps the device.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use devices::bus::Bus;
use devices::ids::DeviceId;
use devices::irq::Interrupt;
use devices::memory::Memory;
use devices::pci::SLOTS;
use devices::pci::hotplug::{self, HotplugRegisters, Slots};
use devices::pci::msix::MessageSink;
use devices::pci::root::{self, EcamAccess, PciRoot, PortAccess, SlotError};
use devices::snapshot::{Record, RestoreError, SaveError};
use devices::virtio::VirtioDevice;
use devices::virtio::pci::{PciTransport, VirtioFunction};
use serde::{Deserialize, Serialize};

use crate::builder::BuildError;
use crate::doorbells::Doorbells;
use crate::event::Events;
use crate::layout;
use crate::vm::SharedTransport;
use crate::wiring::LateHandle;

/// What a VM's PCI bus needs to take a device.
#[derive(Clone)]
pub struct PciSlots {
    root: Arc<Mutex<PciRoot>>,
    memory: Memory,
    sink: MessageSink,
    doorbells: Doorbells,
    changed: Slots,
    event: Interrupt,
    /// Slots that the guest has let go and nobody has emptied.
    ejected: Arc<AtomicU32>,
    ports: Arc<Mutex<PortAccess>>,
    /// The slots that devices of a restored VM had.
    places: Arc<BTreeMap<String, u8>>,
}

/// The bus in a snapshot.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PciState {
    /// The address register of the configuration ports.
    address: u32,
    /// Slots filled of which the guest has not heard.
    filled: u32,
    /// Slots to be emptied of which the guest has not heard.
    leaving: u32,
    functions: Vec<FunctionState>,
}

/// A function on the bus.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FunctionState {
    slot: u8,
    device: String,
    record: Record,
}

impl PciState {
    /// The slots with something in them.
    pub fn slots(&self) -> Vec<u8> {
        self.functions.iter().map(|it| it.slot).collect()
    }

    /// Which device is in which slot.
    pub fn places(&self) -> BTreeMap<String, u8> {
        self.functions.iter().map(|it| (it.device.clone(), it.slot)).collect()
    }
}

impl PciSlots {
    /// An empty bus in front of `pio` and `mmio`. `event` is the line that tells the guest of
    /// changes.
    pub fn new(
        buses: (&Bus, &Arc<Bus>),
        memory: &Memory,
        handle: LateHandle,
        doorbells: Doorbells,
        event: Interrupt,
        events: Events,
    ) -> Result<Self, BuildError> {
        let (pio, mmio) = buses;
        let placed = doorbells.clone();
        let observer =
            Box::new(move |change: root::WindowChange| placed.place(&change.device, change.to));
        let root = Arc::new(Mutex::new(PciRoot::new(mmio, observer)));
        let ports = Arc::new(Mutex::new(PortAccess::new(root.clone())));
        let (at, len) = (u64::from(root::CONFIG_PORT), root::CONFIG_PORTS);
        pio.insert("pci-config", at, len, ports.clone())?;
        let ecam = Arc::new(Mutex::new(EcamAccess::new(root.clone())));
        mmio.insert("pci-ecam", layout::PCI_ECAM, root::ECAM_SIZE, ecam)?;
        let (changed, ejected) = (Slots::default(), Arc::new(AtomicU32::new(0)));
        let told = ejected.clone();
        let on_eject = Box::new(move |slot: u8| {
            // One event for all slots that wait: a guest cannot fill the queue.
            if told.fetch_or(1 << (slot & 31), Ordering::AcqRel) == 0 {
                events.ejected();
            }
        });
        let registers = HotplugRegisters::new(changed.clone(), on_eject);
        let registers = Arc::new(Mutex::new(registers));
        pio.insert("pci-hotplug", u64::from(layout::HOTPLUG_PORT), hotplug::LEN, registers)?;
        let sink = message_sink(handle);
        let (memory, places) = (memory.clone(), Arc::default());
        Ok(Self { root, memory, sink, doorbells, changed, event, ejected, ports, places })
    }

    /// From now on devices go where they were in the VM that is restored.
    pub fn set_places(&mut self, places: BTreeMap<String, u8>) {
        self.places = Arc::new(places);
    }

    fn ports(&self) -> MutexGuard<'_, PortAccess> {
        self.ports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The bus, less what is in its functions' windows. While all vCPUs are parked.
    pub fn save(&self) -> Result<PciState, SaveError> {
        let (filled, leaving) = self.changed.untaken();
        let functions = self.root().save()?.into_iter();
        let functions = functions.map(|(slot, device, record)| FunctionState {
            slot,
            device: device.to_string(),
            record,
        });
        let (address, functions) = (self.ports().address(), functions.collect());
        Ok(PciState { address, filled, leaving, functions })
    }

    /// Restores the bus, after the transports behind it. Places the windows.
    pub fn restore(&self, state: PciState) -> Result<(), RestoreError> {
        for function in state.functions {
            self.root().restore(function.slot, function.record)?;
        }
        self.changed.set_untaken((state.filled, state.leaving));
        self.ports().set_address(state.address);
        Ok(())
    }

    fn root(&self) -> MutexGuard<'_, PciRoot> {
        self.root.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts a device into the first free slot, or where it was. Before the guest runs, that is all.
    pub fn attach(
        &self,
        id: &DeviceId,
        device: Box<dyn VirtioDevice>,
    ) -> Result<(u8, SharedTransport), BuildError> {
        let mut root = self.root();
        let slot = match self.places.get(id.as_str()) {
            Some(&slot) if root.occupant(slot).is_none() => slot,
            _ => root.free_slot()?,
        };
        let transport =
            PciTransport::new(id.clone(), device, self.memory.clone(), self.sink.clone())
                .map_err(|source| BuildError::Device { id: id.clone(), source })?;
        self.doorbells.add_device(id.clone(), transport.doorbells().to_vec());
        let transport = Arc::new(Mutex::new(transport));
        let base = layout::pci_window(usize::from(slot));
        let function = VirtioFunction::new(transport.clone(), base);
        root.insert_at(slot, id.clone(), Box::new(function))?;
        Ok((slot, transport))
    }

    /// Tells the guest that a slot was filled.
    pub fn announce(&self, slot: u8) {
        self.changed.plugged(slot);
        self.event.raise();
    }

    /// Asks the guest to let go of a device.
    pub fn ask_to_eject(&self, id: &DeviceId) -> Result<(), SlotError> {
        let slot = self.root().slot_of(id).ok_or_else(|| SlotError::NoSuchDevice(id.clone()))?;
        self.changed.unplug(slot);
        self.event.raise();
        Ok(())
    }

    /// The devices that the guest has let go since the last call.
    pub fn take_ejected(&self) -> Vec<DeviceId> {
        let slots = self.ejected.swap(0, Ordering::AcqRel);
        let root = self.root();
        (1..SLOTS)
            .filter(|slot| slots & (1 << slot) != 0)
            .filter_map(|slot| root.occupant(slot).cloned())
            .collect()
    }

    /// Takes a device out of its slot.
    pub fn remove(&self, id: &DeviceId) -> Result<(), SlotError> {
        let function = self.root().remove(id)?;
        drop(function);
        self.doorbells.remove_device(id);
        Ok(())
    }
}

/// Messages go straight to KVM: the devices raise them from threads of this process, for which an
/// eventfd with a route in the kernel would be one more step, and a slow one to set up.
fn message_sink(handle: LateHandle) -> MessageSink {
    Arc::new(move |message| {
        if let Some(handle) = handle.get()
            && let Err(error) = handle.signal_msi(message)
        {
            // The guest chose an address that means no interrupt controller.
            tracing::debug!(%error, ?message, "interrupt not delivered");
        }
    })
}
