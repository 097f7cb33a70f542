//! The common configuration structure (virtio 1.3, section 4.1.4.3). Fields are accessed in their
//! own width; the 64-bit addresses in halves.

use std::sync::atomic::Ordering;

use super::super::lifecycle::Ring;
use super::PciTransport;
use crate::bus::AccessError;

/// Bytes of the structure, with the fields that this device does not use.
pub const COMMON_LEN: u64 = 0x3c;

const DEVICE_FEATURE_SELECT: u64 = 0x00;
const DEVICE_FEATURE: u64 = 0x04;
const DRIVER_FEATURE_SELECT: u64 = 0x08;
const DRIVER_FEATURE: u64 = 0x0c;
const CONFIG_VECTOR: u64 = 0x10;
const NUM_QUEUES: u64 = 0x12;
const STATUS: u64 = 0x14;
const GENERATION: u64 = 0x15;
const QUEUE_SELECT: u64 = 0x16;
const QUEUE_SIZE: u64 = 0x18;
const QUEUE_VECTOR: u64 = 0x1a;
const QUEUE_ENABLE: u64 = 0x1c;
const QUEUE_NOTIFY_OFFSET: u64 = 0x1e;
const QUEUE_ADDRESSES: u64 = 0x20;
const QUEUE_ADDRESSES_END: u64 = 0x38;
const QUEUE_NOTIFY_DATA: u64 = 0x38;
const QUEUE_RESET: u64 = 0x3a;

/// The ring and half that an address register is of.
fn address_register(offset: u64) -> (Ring, bool) {
    let ring = match (offset - QUEUE_ADDRESSES) / 8 {
        0 => Ring::Descriptors,
        1 => Ring::Available,
        _ => Ring::Used,
    };
    (ring, offset % 8 == 4)
}

fn width(offset: u64) -> usize {
    match offset {
        STATUS | GENERATION => 1,
        DEVICE_FEATURE_SELECT..CONFIG_VECTOR | QUEUE_ADDRESSES..QUEUE_ADDRESSES_END => 4,
        _ => 2,
    }
}

impl PciTransport {
    pub(super) fn read_common(&mut self, offset: u64, data: &mut [u8]) -> Result<(), AccessError> {
        if data.len() != width(offset) {
            return Err(AccessError::BadSize { offset, len: data.len() });
        }
        let value = self.common_register(offset)?;
        data.copy_from_slice(value.to_le_bytes().get(..data.len()).unwrap_or_default());
        Ok(())
    }

    fn common_register(&self, offset: u64) -> Result<u32, AccessError> {
        let queue = self.queue_select;
        let chosen = self.queue_vectors.get(usize::from(queue));
        let number = |value: u16| u32::from(value);
        Ok(match offset {
            DEVICE_FEATURE_SELECT => self.device_features_select,
            DEVICE_FEATURE => self.lifecycle.offered_features(self.device_features_select),
            DRIVER_FEATURE_SELECT => self.driver_features_select,
            DRIVER_FEATURE => self.lifecycle.accepted_features(self.driver_features_select),
            CONFIG_VECTOR => number(self.config_vector.load(Ordering::Acquire)),
            NUM_QUEUES => self.queue_vectors.len() as u32,
            STATUS => u32::from(self.lifecycle.status()),
            GENERATION => self.lifecycle.notifier().generation() & 0xff,
            QUEUE_SELECT => number(queue),
            QUEUE_SIZE => number(self.lifecycle.queue_size(queue)),
            QUEUE_VECTOR => {
                chosen.map_or(number(super::NO_VECTOR), |c| number(c.load(Ordering::Acquire)))
            }
            QUEUE_ENABLE => u32::from(self.lifecycle.queue_ready(queue)),
            QUEUE_NOTIFY_OFFSET => chosen.map_or(0, |_| number(queue)),
            QUEUE_ADDRESSES..QUEUE_ADDRESSES_END if offset.is_multiple_of(4) => {
                let (ring, high) = address_register(offset);
                let address = self.lifecycle.ring_address(queue, ring);
                if high { (address >> 32) as u32 } else { address as u32 }
            }
            // Features that are not offered: their fields read 0.
            QUEUE_NOTIFY_DATA | QUEUE_RESET => 0,
            _ => return Err(AccessError::NoRegister(offset)),
        })
    }

    pub(super) fn write_common(&mut self, offset: u64, data: &[u8]) -> Result<(), AccessError> {
        if data.len() != width(offset) {
            return Err(AccessError::BadSize { offset, len: data.len() });
        }
        let mut bytes = [0; 4];
        for (to, from) in bytes.iter_mut().zip(data) {
            *to = *from;
        }
        let value = u32::from_le_bytes(bytes);
        let queue = self.queue_select;
        match offset {
            DEVICE_FEATURE_SELECT => self.device_features_select = value,
            DRIVER_FEATURE_SELECT => self.driver_features_select = value,
            DRIVER_FEATURE => {
                self.lifecycle.accept_features(self.driver_features_select, value)?;
            }
            CONFIG_VECTOR => {
                let vector = self.checked_vector(value as u16);
                self.config_vector.store(vector, Ordering::Release);
            }
            STATUS => self.set_status(value as u8)?,
            QUEUE_SELECT => self.queue_select = value as u16,
            QUEUE_SIZE => self.lifecycle.set_queue_size(queue, value)?,
            QUEUE_VECTOR => {
                let vector = self.checked_vector(value as u16);
                if let Some(choice) = self.queue_vectors.get(usize::from(queue)) {
                    choice.store(vector, Ordering::Release);
                }
            }
            // The driver must not write 0 (section 4.1.4.3.2).
            QUEUE_ENABLE if value == 1 => self.lifecycle.set_queue_ready(queue, true)?,
            QUEUE_ADDRESSES..QUEUE_ADDRESSES_END if offset.is_multiple_of(4) => {
                let (ring, high) = address_register(offset);
                self.lifecycle.set_ring_address(queue, ring, high, value)?;
            }
            _ => return Err(AccessError::NotNow(offset)),
        }
        Ok(())
    }

    fn set_status(&mut self, value: u8) -> Result<(), AccessError> {
        self.lifecycle.set_status(value)?;
        if value == 0 {
            self.after_reset();
        }
        Ok(())
    }
}
