//! The registers of a device on either transport, called by the names that they have on MMIO.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::parts::register;
use crate::bus::{AccessError, BusDevice};
use crate::event::Event;
use crate::ids::DeviceId;
use crate::memory::Memory;
use crate::pci::PciFunction;
use crate::pci::msix;
use crate::snapshot::{Record, RestoreError, SaveError, Stateful};
use crate::testing::IrqLog;
use crate::virtio::VirtioDevice;
use crate::virtio::lifecycle::Lifecycle;
use crate::virtio::mmio::{self, MmioTransport, QUEUE_NOTIFY};
use crate::virtio::pci::{self, PciTransport, VirtioFunction};

/// Which registers are in front of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A page of registers.
    Mmio,
    /// A PCI function with a window.
    Pci,
}

/// Where the PCI window is said to be.
const WINDOW: u64 = 0xc000_0000;

/// The registers.
pub(crate) enum Face {
    Mmio(Box<MmioTransport>),
    Pci(Box<Pci>),
}

/// A function and what is behind its window.
pub(crate) struct Pci {
    transport: Arc<Mutex<PciTransport>>,
    function: VirtioFunction,
    /// The interrupt status as MMIO has it: it stays until it is acknowledged.
    isr: u32,
}

impl Pci {
    fn lock(&self) -> MutexGuard<'_, PciTransport> {
        self.transport.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn new(transport: PciTransport) -> Self {
        let transport = Arc::new(Mutex::new(transport));
        let mut function = VirtioFunction::new(transport.clone(), WINDOW);
        // Memory on, bus mastering on, MSI-X on.
        function.write_config(4, &[6, 0]);
        let msix = capability(&mut function, msix::CAPABILITY);
        function.write_config(msix + 2, &[0, 0x80]);
        let mut this = Self { transport, function, isr: 0 };
        this.unmask();
        this
    }

    /// Makes every vector a message.
    fn unmask(&mut self) {
        let mut transport = self.lock();
        let vectors = transport.lifecycle().identity().queue_sizes.len() as u64 + 1;
        for vector in 0..vectors {
            for (place, value) in [(0, 0xfee0_0000), (4, 0), (8, 0x20), (12, 0_u32)] {
                let offset = 0x8000 + vector * msix::ENTRY_SIZE + place;
                transport.write(offset, &value.to_le_bytes()).unwrap();
            }
        }
    }

    fn read(&mut self, offset: u64) -> Result<u32, AccessError> {
        let (at, len) = match offset {
            register::DEVICE_ID => {
                let mut number = [0; 2];
                self.function.read_config(2, &mut number);
                return Ok(u32::from(u16::from_le_bytes(number)) - 0x1040);
            }
            register::INTERRUPT_STATUS => {
                let mut byte = [0];
                self.lock().read(0x2000, &mut byte)?;
                self.isr |= u32::from(byte[0]);
                return Ok(self.isr);
            }
            register::QUEUE_SIZE_MAX => {
                // What the register says before the driver changes it.
                let mut select = [0; 2];
                let mut transport = self.lock();
                transport.read(0x16, &mut select)?;
                return Ok(transport.lifecycle().queue_max(u16::from_le_bytes(select)).into());
            }
            _ => common(offset).ok_or(AccessError::NoRegister(offset))?,
        };
        let mut data = [0; 4];
        self.lock().read(at, &mut data[..len])?;
        Ok(u32::from_le_bytes(data))
    }

    fn write(&mut self, offset: u64, value: u32) -> Result<(), AccessError> {
        match offset {
            register::INTERRUPT_ACK => {
                let pending = self.read(register::INTERRUPT_STATUS)?;
                self.isr = pending & !value;
                Ok(())
            }
            QUEUE_NOTIFY => {
                let at = 0x6000 + 4 * u64::from(value);
                // Larger ones cannot be said.
                if at < 0x8000 { self.lock().write(at, &[0; 4]) } else { Ok(()) }
            }
            _ => {
                let (at, len) = common(offset).ok_or(AccessError::NoRegister(offset))?;
                let bytes = value.to_le_bytes();
                if bytes[len..].iter().any(|&byte| byte != 0) {
                    return Err(AccessError::BadSize { offset, len: 4 });
                }
                self.lock().write(at, &bytes[..len])?;
                self.choose_vectors(offset, value)
            }
        }
    }

    /// Linux gives each queue its vector when it sets the queue up; here that is with its number.
    fn choose_vectors(&mut self, offset: u64, value: u32) -> Result<(), AccessError> {
        let mut transport = self.lock();
        match offset {
            register::STATUS if value != 0 => transport.write(0x10, &[0; 2]),
            register::QUEUE_SELECT => {
                transport.write(0x1a, &(value as u16).wrapping_add(1).to_le_bytes())
            }
            _ => Ok(()),
        }
    }
}

/// Offset and width in the common configuration structure.
fn common(offset: u64) -> Option<(u64, usize)> {
    Some(match offset {
        register::DEVICE_FEATURES_SELECT => (0x00, 4),
        register::DEVICE_FEATURES => (0x04, 4),
        register::DRIVER_FEATURES_SELECT => (0x08, 4),
        register::DRIVER_FEATURES => (0x0c, 4),
        register::STATUS => (0x14, 1),
        register::CONFIG_GENERATION => (0x15, 1),
        register::QUEUE_SELECT => (0x16, 2),
        register::QUEUE_SIZE => (0x18, 2),
        register::QUEUE_READY => (0x1c, 2),
        0x80..0x88 => (0x20 + offset - 0x80, 4),
        0x90..0x98 => (0x28 + offset - 0x90, 4),
        0xa0..0xa8 => (0x30 + offset - 0xa0, 4),
        _ => return None,
    })
}

/// Where a function has a capability.
fn capability(function: &mut VirtioFunction, id: u8) -> u16 {
    let mut at = [0];
    function.read_config(0x34, &mut at);
    loop {
        assert_ne!(at[0], 0, "no capability {id:#x}");
        let mut header = [0; 2];
        function.read_config(at[0].into(), &mut header);
        if header[0] == id {
            return at[0].into();
        }
        at[0] = header[1];
    }
}

impl Face {
    pub fn new(kind: Kind, device: Box<dyn VirtioDevice>, memory: &Memory, irq: &IrqLog) -> Self {
        match kind {
            Kind::Mmio => Face::Mmio(Box::new(mmio(device, memory, irq))),
            Kind::Pci => Face::Pci(Box::new(Pci::new(pci(device, memory, irq)))),
        }
    }

    pub fn kind(&self) -> Kind {
        match self {
            Face::Mmio(_) => Kind::Mmio,
            Face::Pci(_) => Kind::Pci,
        }
    }

    pub fn read(&mut self, offset: u64) -> Result<u32, AccessError> {
        match self {
            Face::Mmio(transport) => {
                let mut data = [0; 4];
                transport.read(offset, &mut data)?;
                Ok(u32::from_le_bytes(data))
            }
            Face::Pci(pci) => pci.read(offset),
        }
    }

    pub fn write(&mut self, offset: u64, value: u32) -> Result<(), AccessError> {
        match self {
            Face::Mmio(transport) => transport.write(offset, &value.to_le_bytes()),
            Face::Pci(pci) => pci.write(offset, value),
        }
    }

    /// Bytes of the window.
    pub fn window(&self) -> u64 {
        match self {
            Face::Mmio(_) => mmio::REGION_SIZE,
            Face::Pci(_) => pci::WINDOW_SIZE,
        }
    }

    /// Where the device's configuration space is in the window.
    pub fn config(&self) -> u64 {
        match self {
            Face::Mmio(_) => register::CONFIG,
            Face::Pci(_) => 0x4000,
        }
    }

    /// Any access to the window.
    pub fn window_read(&mut self, offset: u64, data: &mut [u8]) -> Result<(), AccessError> {
        match self {
            Face::Mmio(transport) => transport.read(offset, data),
            Face::Pci(pci) => pci.lock().read(offset, data),
        }
    }

    /// Any access to the window.
    pub fn window_write(&mut self, offset: u64, data: &[u8]) -> Result<(), AccessError> {
        match self {
            Face::Mmio(transport) => transport.write(offset, data),
            Face::Pci(pci) => pci.lock().write(offset, data),
        }
    }

    /// The function's configuration registers.
    pub fn function(&mut self) -> Option<&mut VirtioFunction> {
        match self {
            Face::Mmio(_) => None,
            Face::Pci(pci) => Some(&mut pci.function),
        }
    }

    pub fn with<R>(&mut self, act: impl FnOnce(&mut Lifecycle) -> R) -> R {
        match self {
            Face::Mmio(transport) => act(transport.lifecycle()),
            Face::Pci(pci) => act(pci.lock().lifecycle()),
        }
    }

    pub fn doorbell(&self, index: u16) -> Event {
        let find =
            |bells: &[crate::virtio::transport::Doorbell]| bells[usize::from(index)].event.clone();
        match self {
            Face::Mmio(transport) => find(transport.doorbells()),
            Face::Pci(pci) => find(pci.lock().doorbells()),
        }
    }

    pub fn save(&self) -> Result<Record, SaveError> {
        match self {
            Face::Mmio(transport) => transport.save_record(),
            Face::Pci(pci) => pci.lock().save_record(),
        }
    }

    /// The same registers as `self`, as they are in `record`, in front of `device`.
    pub fn restored(
        &self,
        device: Box<dyn VirtioDevice>,
        record: Record,
        memory: &Memory,
        irq: &IrqLog,
    ) -> Result<Self, RestoreError> {
        match self {
            Face::Mmio(_) => {
                let mut transport = Box::new(mmio(device, memory, irq));
                transport.restore_record(record)?;
                Ok(Face::Mmio(transport))
            }
            Face::Pci(old) => {
                let mut transport = pci(device, memory, irq);
                transport.restore_record(record)?;
                let transport = Arc::new(Mutex::new(transport));
                let mut function = VirtioFunction::new(transport.clone(), WINDOW);
                let saved = old.function.save_record().unwrap();
                function.restore_record(saved)?;
                Ok(Face::Pci(Box::new(Pci { transport, function, isr: old.isr })))
            }
        }
    }
}

pub(crate) fn mmio(device: Box<dyn VirtioDevice>, memory: &Memory, irq: &IrqLog) -> MmioTransport {
    MmioTransport::new(DeviceId::new("test"), device, memory.clone(), &irq.interrupt()).unwrap()
}

pub(crate) fn pci(device: Box<dyn VirtioDevice>, memory: &Memory, irq: &IrqLog) -> PciTransport {
    let line = irq.interrupt();
    let sink = Arc::new(move |_| line.raise());
    PciTransport::new(DeviceId::new("test"), device, memory.clone(), sink).unwrap()
}
