//! Puts virtio devices into PCI slots, at boot and while the guest runs.
//!
//! Plugging: the function appears in its slot, the slot's bit is set, the event device's interrupt
//! is raised, and the guest's ACPI code finds it. Unplugging: the bit and the interrupt ask the
//! guest to let go; when it has, it writes to the eject register, and the control thread takes the
//! function out. A guest that does not let go keeps the device.

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
use devices::virtio::VirtioDevice;
use devices::virtio::pci::{PciTransport, VirtioFunction};

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
        pio.insert("pci-config", u64::from(root::CONFIG_PORT), root::CONFIG_PORTS, ports)?;
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
        Ok(Self { root, memory: memory.clone(), sink, doorbells, changed, event, ejected })
    }

    fn root(&self) -> MutexGuard<'_, PciRoot> {
        self.root.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts a device into the first free slot. Before the guest runs, that is all.
    pub fn attach(
        &self,
        id: &DeviceId,
        device: Box<dyn VirtioDevice>,
    ) -> Result<(u8, SharedTransport), BuildError> {
        let mut root = self.root();
        let slot = root.free_slot()?;
        let transport =
            PciTransport::new(id.clone(), device, self.memory.clone(), self.sink.clone())
                .map_err(|source| BuildError::Device { id: id.clone(), source })?;
        self.doorbells.add_device(id.clone(), transport.doorbells().to_vec());
        let transport = Arc::new(Mutex::new(transport));
        let base = layout::pci_window(usize::from(slot));
        let function = VirtioFunction::new(transport.clone(), base);
        root.insert(id.clone(), Box::new(function))?;
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
