//! The PCI transport (virtio 1.3, section 4.1): a modern function with one 64 KiB window and one
//! MSI-X vector for each queue and for configuration changes.
//!
//! ```text
//! window  0x0000 common configuration     0x6000 notifications, 4 bytes a queue
//!         0x2000 interrupt status         0x8000 MSI-X table
//!         0x4000 device configuration     0xc000 MSI-X pending bits
//! ```

mod registers;

use std::sync::atomic::{AtomicU8, AtomicU16, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use serde::{Deserialize, Serialize};

use super::lifecycle::{Lifecycle, LifecycleState};
use super::queue::QueueLines;
use super::transport::{Doorbell, Transport};
use super::{DeviceType, Notifier, StartError, VirtioDevice};
use crate::bus::{AccessError, BusDevice};
use crate::event::Event;
use crate::ids::{DeviceId, QueueIndex};
use crate::irq::Interrupt;
use crate::memory::Memory;
use crate::pci::config::{ConfigRecord, ConfigSpace, FunctionId};
use crate::pci::msix::{self, MessageSink, Msix, MsixRecord};
use crate::pci::{PciFunction, Window};
use crate::snapshot::{RestoreError, SaveError, Schema, Snapshot};

/// Bytes of the window in memory space.
pub const WINDOW_SIZE: u64 = 0x1_0000;

const COMMON: u64 = 0x0000;
const ISR: u64 = 0x2000;
const DEVICE: u64 = 0x4000;
const NOTIFY: u64 = 0x6000;
const NOTIFY_END: u64 = 0x8000;
const TABLE: u64 = 0x8000;
const PENDING: u64 = 0xc000;
const NOTIFY_MULTIPLIER: u32 = 4;

/// VIRTIO_MSI_NO_VECTOR: this source raises nothing.
const NO_VECTOR: u16 = 0xffff;
const QUEUE_INTERRUPT: u8 = 1;
const CONFIG_INTERRUPT: u8 = 2;

/// Vendor of all virtio functions.
const VENDOR: u16 = 0x1af4;
/// Device number of a modern function, less its type.
const DEVICE_BASE: u16 = 0x1040;

/// Capability id of vendor-specific structures.
const VENDOR_CAPABILITY: u8 = 0x09;

/// Which vector a source of interrupts uses; written by the guest, read by the device's threads.
type VectorChoice = Arc<AtomicU16>;

/// A device behind a PCI function.
pub struct PciTransport {
    lifecycle: Lifecycle,
    doorbells: Vec<Doorbell>,
    msix: Msix,
    isr: Arc<AtomicU8>,
    config_vector: VectorChoice,
    queue_vectors: Vec<VectorChoice>,
    device_features_select: u32,
    driver_features_select: u32,
    queue_select: u16,
}

/// The interrupt lines of one function, made before the device is.
struct Lines<'a> {
    msix: &'a Msix,
    isr: &'a Arc<AtomicU8>,
}

impl Lines<'_> {
    fn line(&self, bit: u8) -> (VectorChoice, Interrupt) {
        let choice = Arc::new(AtomicU16::new(NO_VECTOR));
        let (vector, isr, msix) = (choice.clone(), self.isr.clone(), self.msix.clone());
        let interrupt = Interrupt::from_fn(move || {
            isr.fetch_or(bit, Ordering::AcqRel);
            msix.raise(vector.load(Ordering::Acquire));
        });
        (choice, interrupt)
    }
}

impl PciTransport {
    /// Puts `device` behind a function whose messages go to `sink`.
    pub fn new(
        id: DeviceId,
        device: Box<dyn VirtioDevice>,
        memory: Memory,
        sink: MessageSink,
    ) -> Result<Self, StartError> {
        let count = device.identity().queue_sizes.len();
        let msix = Msix::new(count as u16 + 1, sink);
        let isr = Arc::new(AtomicU8::new(0));
        let lines = Lines { msix: &msix, isr: &isr };
        let (config_vector, config_interrupt) = lines.line(CONFIG_INTERRUPT);
        let (mut queue_vectors, mut doorbells, mut queue_lines) = (vec![], vec![], vec![]);
        for index in 0..count {
            let event = Event::new()
                .map_err(|source| StartError::Host { what: "queue eventfd", source })?;
            let (vector, interrupt) = lines.line(QUEUE_INTERRUPT);
            queue_vectors.push(vector);
            doorbells.push(Doorbell {
                queue: QueueIndex(index as u16),
                offset: NOTIFY + index as u64 * u64::from(NOTIFY_MULTIPLIER),
                value: None,
                event: event.clone(),
            });
            queue_lines.push(QueueLines { kick: event, interrupt });
        }
        let notifier = Notifier::new(config_interrupt);
        let lifecycle = Lifecycle::new(id, device, memory, notifier, queue_lines)?;
        Ok(Self {
            lifecycle,
            doorbells,
            msix,
            isr,
            config_vector,
            queue_vectors,
            device_features_select: 0,
            driver_features_select: 0,
            queue_select: 0,
        })
    }

    /// The doorbells to connect.
    pub fn doorbells(&self) -> &[Doorbell] {
        &self.doorbells
    }

    /// The device's life, for pause and resume.
    pub fn lifecycle(&mut self) -> &mut Lifecycle {
        &mut self.lifecycle
    }

    /// A vector that the guest chose, or none if there is no such vector.
    fn checked_vector(&self, vector: u16) -> u16 {
        if vector < self.msix.count() { vector } else { NO_VECTOR }
    }

    fn device_config_offset(offset: u64) -> u64 {
        offset - DEVICE
    }

    fn after_reset(&mut self) {
        self.isr.store(0, Ordering::Release);
        for choice in self.queue_vectors.iter().chain([&self.config_vector]) {
            choice.store(NO_VECTOR, Ordering::Release);
        }
        self.device_features_select = 0;
        self.driver_features_select = 0;
        self.queue_select = 0;
    }
}

impl Transport for PciTransport {
    fn lifecycle(&mut self) -> &mut Lifecycle {
        self.lifecycle()
    }

    fn doorbells(&self) -> &[Doorbell] {
        self.doorbells()
    }
}

impl BusDevice for PciTransport {
    fn read(&mut self, offset: u64, data: &mut [u8]) -> Result<(), AccessError> {
        match offset {
            COMMON..ISR => self.read_common(offset, data),
            ISR..DEVICE => match data {
                // Reading takes the bits (section 4.1.4.5).
                [byte] if offset == ISR => {
                    *byte = self.isr.swap(0, Ordering::AcqRel);
                    Ok(())
                }
                _ => Err(AccessError::NoRegister(offset)),
            },
            DEVICE..NOTIFY => self.lifecycle.read_config(Self::device_config_offset(offset), data),
            NOTIFY..NOTIFY_END => {
                data.fill(0);
                Ok(())
            }
            TABLE..PENDING => self.msix.read_table(offset - TABLE, data),
            _ => self.msix.read_pending(offset - PENDING, data),
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), AccessError> {
        match offset {
            COMMON..ISR => self.write_common(offset, data),
            ISR..DEVICE => Err(AccessError::NotNow(offset)),
            DEVICE..NOTIFY => self.lifecycle.write_config(Self::device_config_offset(offset), data),
            NOTIFY..NOTIFY_END => {
                let queue = (offset - NOTIFY) / u64::from(NOTIFY_MULTIPLIER);
                self.lifecycle.notify_queue(queue as u32);
                Ok(())
            }
            TABLE..PENDING => self.msix.write_table(offset - TABLE, data),
            _ => Err(AccessError::NotNow(offset)),
        }
    }
}

/// The function in front of a [`PciTransport`]: its configuration registers.
pub struct VirtioFunction {
    config: ConfigSpace,
    transport: Arc<Mutex<PciTransport>>,
    msix: Msix,
    msix_at: usize,
    access_at: usize,
}

fn class(device_type: DeviceType) -> [u8; 3] {
    match device_type {
        DeviceType::Block => [0x01, 0x80, 0],
        DeviceType::Net => [0x02, 0x00, 0],
        DeviceType::Console => [0x07, 0x80, 0],
        DeviceType::Balloon => [0x05, 0x80, 0],
        _ => [0xff, 0x00, 0],
    }
}

/// Body of a capability that points to a structure in the window (section 4.1.4).
fn structure(kind: u8, offset: u64, len: u64, more: &[u8]) -> Vec<u8> {
    let mut body = vec![16 + more.len() as u8, kind, 0, 0, 0, 0];
    body.extend((offset as u32).to_le_bytes());
    body.extend((len as u32).to_le_bytes());
    body.extend(more);
    body
}

impl VirtioFunction {
    /// A function in front of `transport` whose window is placed at `base`.
    pub fn new(transport: Arc<Mutex<PciTransport>>, base: u64) -> Self {
        let (device_type, msix) = {
            let inside = transport.lock().unwrap_or_else(PoisonError::into_inner);
            (inside.lifecycle.identity().device_type, inside.msix.clone())
        };
        let number = device_type as u16;
        let mut config = ConfigSpace::new(FunctionId {
            vendor: VENDOR,
            device: DEVICE_BASE + number,
            subsystem: (VENDOR, DEVICE_BASE + number),
            class: class(device_type),
            revision: 1,
        });
        config.add_bar(base, WINDOW_SIZE);
        let multiplier = NOTIFY_MULTIPLIER.to_le_bytes();
        for (kind, start, end, more) in [
            (1, COMMON, COMMON + registers::COMMON_LEN, &[][..]),
            (2, NOTIFY, NOTIFY_END, &multiplier[..]),
            (3, ISR, ISR + 1, &[][..]),
            (4, DEVICE, NOTIFY, &[][..]),
        ] {
            config.add_capability(VENDOR_CAPABILITY, &structure(kind, start, end - start, more));
        }
        let access_at = config.add_capability(VENDOR_CAPABILITY, &structure(5, 0, 0, &[0; 4]));
        config.allow(access_at + 4, &[0xff]);
        config.allow(access_at + 8, &[0xff; 12]);
        let mut body = (msix.count() - 1).to_le_bytes().to_vec();
        body.extend((TABLE as u32).to_le_bytes());
        body.extend((PENDING as u32).to_le_bytes());
        let msix_at = config.add_capability(msix::CAPABILITY, &body);
        config.allow(msix_at + 2, &[0x00, 0xc0]);
        Self { config, transport, msix, msix_at, access_at }
    }

    /// Bar, offset and length of the access that the guest has set up in the capability for
    /// accesses without the window (section 4.1.4.9).
    fn indirect_target(&self) -> Option<(u64, usize)> {
        let bar: [u8; 1] = self.config.get(self.access_at + 4);
        let offset = u32::from_le_bytes(self.config.get(self.access_at + 8));
        let len = u32::from_le_bytes(self.config.get(self.access_at + 12));
        let fits = bar == [0]
            && matches!(len, 1 | 2 | 4)
            && offset.is_multiple_of(len)
            && u64::from(offset) + u64::from(len) <= WINDOW_SIZE;
        fits.then_some((u64::from(offset), len as usize))
    }

    fn is_indirect_data(&self, offset: u16) -> bool {
        let data = self.access_at + 16;
        (data..data + 4).contains(&usize::from(offset))
    }
}

impl PciFunction for VirtioFunction {
    fn read_config(&mut self, offset: u16, data: &mut [u8]) {
        if self.is_indirect_data(offset)
            && let Some((at, len)) = self.indirect_target()
        {
            let mut value = [0xff; 4];
            let mut transport = self.transport.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(value) = value.get_mut(..len)
                && transport.read(at, value).is_err()
            {
                value.fill(0xff);
            }
            drop(transport);
            self.config.set(self.access_at + 16, &value);
        }
        self.config.read(usize::from(offset), data);
    }

    fn write_config(&mut self, offset: u16, data: &[u8]) {
        self.config.write(usize::from(offset), data);
        if self.is_indirect_data(offset)
            && let Some((at, len)) = self.indirect_target()
        {
            let value: [u8; 4] = self.config.get(self.access_at + 16);
            let mut transport = self.transport.lock().unwrap_or_else(PoisonError::into_inner);
            // A refused access changes nothing, here as in the window.
            let _ = transport.write(at, value.get(..len).unwrap_or_default());
        }
        let control = u16::from_le_bytes(self.config.get(self.msix_at + 2));
        self.msix.set_control(control);
    }

    fn window(&self) -> Option<Window> {
        let (base, len) = self.config.window()?;
        Some(Window { base, len, device: self.transport.clone() })
    }
}

/// The saved form of the transport.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PciState {
    isr: u8,
    config_vector: u16,
    queue_vectors: Vec<u16>,
    device_features_select: u32,
    driver_features_select: u32,
    queue_select: u16,
    msix: MsixRecord,
    lifecycle: LifecycleState,
}

impl Schema for PciState {
    const KIND: &'static str = "virtio-pci";
    const VERSION: u32 = 1;
}

impl Snapshot for PciTransport {
    type State = PciState;

    fn save(&self) -> Result<PciState, SaveError> {
        let chosen = |choice: &VectorChoice| choice.load(Ordering::Acquire);
        Ok(PciState {
            isr: self.isr.load(Ordering::Acquire),
            config_vector: chosen(&self.config_vector),
            queue_vectors: self.queue_vectors.iter().map(chosen).collect(),
            device_features_select: self.device_features_select,
            driver_features_select: self.driver_features_select,
            queue_select: self.queue_select,
            msix: self.msix.record(),
            lifecycle: self.lifecycle.save()?,
        })
    }

    fn restore(&mut self, state: PciState) -> Result<(), RestoreError> {
        let invalid = |field, value| RestoreError::Invalid { kind: PciState::KIND, field, value };
        if state.queue_vectors.len() != self.queue_vectors.len() {
            return Err(invalid("queue_vectors", state.queue_vectors.len().to_string()));
        }
        if !self.msix.fits(&state.msix) {
            return Err(invalid("msix", "a table of another size".to_owned()));
        }
        self.lifecycle.restore(state.lifecycle)?;
        self.msix.restore(&state.msix);
        self.isr.store(state.isr, Ordering::Release);
        let config = self.checked_vector(state.config_vector);
        self.config_vector.store(config, Ordering::Release);
        for (choice, &vector) in self.queue_vectors.iter().zip(&state.queue_vectors) {
            choice.store(self.checked_vector(vector), Ordering::Release);
        }
        self.device_features_select = state.device_features_select;
        self.driver_features_select = state.driver_features_select;
        self.queue_select = state.queue_select;
        Ok(())
    }
}

/// The saved form of the configuration registers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FunctionState {
    config: ConfigRecord,
}

impl Schema for FunctionState {
    const KIND: &'static str = "virtio-pci-function";
    const VERSION: u32 = 1;
}

impl Snapshot for VirtioFunction {
    type State = FunctionState;

    fn save(&self) -> Result<FunctionState, SaveError> {
        Ok(FunctionState { config: self.config.record() })
    }

    fn restore(&mut self, state: FunctionState) -> Result<(), RestoreError> {
        self.config.restore(&state.config);
        Ok(())
    }
}
