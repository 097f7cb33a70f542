//! The MMIO transport (virtio 1.3, section 4.2): one 4 KiB page of registers per device, one
//! interrupt, doorbells at offset 0x50 that KVM turns into eventfds.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use serde::{Deserialize, Serialize};

use super::lifecycle::{Lifecycle, LifecycleState, Ring};
use super::queue::QueueLines;
use super::transport::{Doorbell, Transport};
use super::{Notifier, StartError, VirtioDevice};
use crate::bus::{AccessError, BusDevice};
use crate::event::Event;
use crate::ids::{DeviceId, QueueIndex};
use crate::irq::Interrupt;
use crate::memory::Memory;
use crate::snapshot::{RestoreError, SaveError, Schema, Snapshot};

/// Bytes of address space that one device takes.
pub const REGION_SIZE: u64 = 0x1000;

/// Offset of the QueueNotify register.
pub const QUEUE_NOTIFY: u64 = 0x50;

const MAGIC: u32 = u32::from_le_bytes(*b"virt");
const VERSION: u32 = 2;
const VENDOR: u32 = u32::from_le_bytes(*b"CUBE");
const CONFIG: u64 = 0x100;
const USED_BUFFER: u32 = 1;
const CONFIG_CHANGE: u32 = 2;

/// A device behind MMIO registers.
pub struct MmioTransport {
    lifecycle: Lifecycle,
    doorbells: Vec<Doorbell>,
    interrupt_status: Arc<AtomicU32>,
    device_features_select: u32,
    driver_features_select: u32,
    queue_select: u32,
    shm_select: u32,
}

impl MmioTransport {
    /// Puts `device` behind registers. `interrupt` is its line, edge-triggered.
    pub fn new(
        id: DeviceId,
        device: Box<dyn VirtioDevice>,
        memory: Memory,
        interrupt: &Interrupt,
    ) -> Result<Self, StartError> {
        let interrupt_status = Arc::new(AtomicU32::new(0));
        let line = |bit: u32| {
            let (status, interrupt) = (interrupt_status.clone(), interrupt.clone());
            Interrupt::from_fn(move || {
                status.fetch_or(bit, Ordering::AcqRel);
                interrupt.raise();
            })
        };
        let used = line(USED_BUFFER);
        let mut doorbells = Vec::new();
        let mut lines = Vec::new();
        for index in 0..device.identity().queue_sizes.len() {
            let event = Event::new()
                .map_err(|source| StartError::Host { what: "queue eventfd", source })?;
            doorbells.push(Doorbell {
                queue: QueueIndex(index as u16),
                offset: QUEUE_NOTIFY,
                value: Some(index as u32),
                event: event.clone(),
            });
            lines.push(QueueLines { kick: event, interrupt: used.clone() });
        }
        let notifier = Notifier::new(line(CONFIG_CHANGE));
        let lifecycle = Lifecycle::new(id, device, memory, notifier, lines)?;
        Ok(Self {
            lifecycle,
            doorbells,
            interrupt_status,
            device_features_select: 0,
            driver_features_select: 0,
            queue_select: 0,
            shm_select: 0,
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

    fn queue(&self) -> u16 {
        u16::try_from(self.queue_select).unwrap_or(u16::MAX)
    }

    fn ring(&self, ring: Ring, high: bool) -> u32 {
        let address = self.lifecycle.ring_address(self.queue(), ring);
        if high { (address >> 32) as u32 } else { address as u32 }
    }

    fn read_register(&self, offset: u64) -> Result<u32, AccessError> {
        Ok(match offset {
            0x00 => MAGIC,
            0x04 => VERSION,
            0x08 => self.lifecycle.identity().device_type as u32,
            0x0c => VENDOR,
            0x10 => self.lifecycle.offered_features(self.device_features_select),
            0x34 => u32::from(self.lifecycle.queue_max(self.queue())),
            0x44 => u32::from(self.lifecycle.queue_ready(self.queue())),
            0x60 => self.interrupt_status.load(Ordering::Acquire),
            0x70 => u32::from(self.lifecycle.status()),
            0x80 => self.ring(Ring::Descriptors, false),
            0x84 => self.ring(Ring::Descriptors, true),
            0x90 => self.ring(Ring::Available, false),
            0x94 => self.ring(Ring::Available, true),
            0xa0 => self.ring(Ring::Used, false),
            0xa4 => self.ring(Ring::Used, true),
            // No shared memory regions: length and base read as all-ones (section 4.2.2.1).
            0xb0 | 0xb4 | 0xb8 | 0xbc => u32::MAX,
            0xfc => self.lifecycle.notifier().generation(),
            _ => return Err(AccessError::NoRegister(offset)),
        })
    }

    fn write_register(&mut self, offset: u64, value: u32) -> Result<(), AccessError> {
        let queue = self.queue();
        let lifecycle = &mut self.lifecycle;
        match offset {
            0x14 => self.device_features_select = value,
            0x20 => lifecycle.accept_features(self.driver_features_select, value)?,
            0x24 => self.driver_features_select = value,
            0x30 => self.queue_select = value,
            0x38 => lifecycle.set_queue_size(queue, value)?,
            0x44 => lifecycle.set_queue_ready(queue, value & 1 != 0)?,
            QUEUE_NOTIFY => lifecycle.notify_queue(value),
            0x64 => {
                self.interrupt_status.fetch_and(!value, Ordering::AcqRel);
            }
            0x70 => self.set_status(value)?,
            0x80 => lifecycle.set_ring_address(queue, Ring::Descriptors, false, value)?,
            0x84 => lifecycle.set_ring_address(queue, Ring::Descriptors, true, value)?,
            0x90 => lifecycle.set_ring_address(queue, Ring::Available, false, value)?,
            0x94 => lifecycle.set_ring_address(queue, Ring::Available, true, value)?,
            0xa0 => lifecycle.set_ring_address(queue, Ring::Used, false, value)?,
            0xa4 => lifecycle.set_ring_address(queue, Ring::Used, true, value)?,
            0xac => self.shm_select = value,
            _ => return Err(AccessError::NoRegister(offset)),
        }
        Ok(())
    }

    fn set_status(&mut self, value: u32) -> Result<(), AccessError> {
        // Bits above the eighth are reserved.
        let value = u8::try_from(value).map_err(|_| AccessError::NotNow(0x70))?;
        self.lifecycle.set_status(value)?;
        if value == 0 {
            self.interrupt_status.store(0, Ordering::Release);
            self.queue_select = 0;
            self.device_features_select = 0;
            self.driver_features_select = 0;
        }
        Ok(())
    }
}

impl Transport for MmioTransport {
    fn lifecycle(&mut self) -> &mut Lifecycle {
        self.lifecycle()
    }

    fn doorbells(&self) -> &[Doorbell] {
        self.doorbells()
    }
}

impl BusDevice for MmioTransport {
    fn read(&mut self, offset: u64, data: &mut [u8]) -> Result<(), AccessError> {
        if let Some(offset) = offset.checked_sub(CONFIG) {
            return self.lifecycle.read_config(offset, data);
        }
        // Registers are 32 bits wide and accessed as such (section 4.2.2.2).
        if data.len() != 4 || !offset.is_multiple_of(4) {
            return Err(AccessError::BadSize { offset, len: data.len() });
        }
        data.copy_from_slice(&self.read_register(offset)?.to_le_bytes());
        Ok(())
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), AccessError> {
        if let Some(offset) = offset.checked_sub(CONFIG) {
            return self.lifecycle.write_config(offset, data);
        }
        let refused = AccessError::BadSize { offset, len: data.len() };
        if !offset.is_multiple_of(4) {
            return Err(refused);
        }
        let value = <[u8; 4]>::try_from(data).map_err(|_| refused)?;
        self.write_register(offset, u32::from_le_bytes(value))
    }
}

/// The saved form of the transport.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MmioState {
    interrupt_status: u32,
    device_features_select: u32,
    driver_features_select: u32,
    queue_select: u32,
    shm_select: u32,
    lifecycle: LifecycleState,
}

impl Schema for MmioState {
    const KIND: &'static str = "virtio-mmio";
    const VERSION: u32 = 1;
}

impl Snapshot for MmioTransport {
    type State = MmioState;

    fn save(&self) -> Result<MmioState, SaveError> {
        Ok(MmioState {
            interrupt_status: self.interrupt_status.load(Ordering::Acquire),
            device_features_select: self.device_features_select,
            driver_features_select: self.driver_features_select,
            queue_select: self.queue_select,
            shm_select: self.shm_select,
            lifecycle: self.lifecycle.save()?,
        })
    }

    fn restore(&mut self, state: MmioState) -> Result<(), RestoreError> {
        if state.interrupt_status & !(USED_BUFFER | CONFIG_CHANGE) != 0 {
            let value = format!("{:#x}", state.interrupt_status);
            return Err(RestoreError::Invalid {
                kind: MmioState::KIND,
                field: "interrupt_status",
                value,
            });
        }
        self.lifecycle.restore(state.lifecycle)?;
        self.interrupt_status.store(state.interrupt_status, Ordering::Release);
        self.device_features_select = state.device_features_select;
        self.driver_features_select = state.driver_features_select;
        self.queue_select = state.queue_select;
        self.shm_select = state.shm_select;
        Ok(())
    }
}

#[cfg(test)]
mod tests;
