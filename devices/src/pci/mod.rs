//! PCI: one root bus with functions that stand in 32 slots (PCI Local Bus 3.0, PCI Express 5.0 as
//! far as the enhanced configuration access goes).
//!
//! A function is a [`PciFunction`]: configuration registers ([`config::ConfigSpace`]) and what is
//! behind its BARs. The [`root::PciRoot`] answers configuration accesses, by ports 0xcf8/0xcfc and
//! by ECAM, and moves BARs on the memory bus as the guest enables and places them. There are no
//! bridges and no INTx: functions raise message-signalled interrupts ([`msix`]).

pub mod config;
pub mod hotplug;
pub mod msix;
pub mod root;

use std::sync::{Arc, Mutex};

use crate::bus::BusDevice;
use crate::snapshot::Stateful;

/// Slots of the bus. Slot 0 is the host bridge.
pub const SLOTS: u8 = 32;

/// A window of a function in memory space.
#[derive(Clone)]
pub struct Window {
    /// Its address now.
    pub base: u64,
    /// Its size in bytes, a power of two.
    pub len: u64,
    /// What answers there.
    pub device: Arc<Mutex<dyn BusDevice>>,
}

/// One function of the bus; its record holds the configuration registers. Called with the root's lock held, from vCPU threads; must not wait.
pub trait PciFunction: Send + Stateful {
    /// Reads configuration registers; 1, 2 or 4 bytes that do not cross a register.
    fn read_config(&mut self, offset: u16, data: &mut [u8]);

    /// Writes configuration registers.
    fn write_config(&mut self, offset: u16, data: &[u8]);

    /// The window in memory space as the configuration places it; `None` while memory decoding is
    /// off, or the function has none.
    fn window(&self) -> Option<Window>;
}
