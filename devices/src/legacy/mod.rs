//! The few devices of a PC that a kernel expects at fixed I/O ports.
//!
//! Each is one register file of one-byte ports behind [`crate::bus::BusDevice`]; the builder says
//! at which port it stands. What a device wants of the VMM (reset, power off, a boot stamp) is a
//! closure that runs on the vCPU thread and must not wait for it.

pub mod debug;
pub mod i8042;
pub mod pvpanic;
pub mod rtc;
pub mod serial;
pub mod sleep;

use crate::bus::AccessError;

/// The byte of a one-byte read.
fn byte_mut(offset: u64, data: &mut [u8]) -> Result<&mut u8, AccessError> {
    match data {
        [byte] => Ok(byte),
        _ => Err(AccessError::BadSize { offset, len: data.len() }),
    }
}

/// The byte of a one-byte write.
fn byte(offset: u64, data: &[u8]) -> Result<u8, AccessError> {
    match data {
        [byte] => Ok(*byte),
        _ => Err(AccessError::BadSize { offset, len: data.len() }),
    }
}
