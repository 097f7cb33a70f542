//! The life of a virtio device, the same on every transport: status register, feature
//! negotiation, queue set-up, start, stop, reset, pause, resume (virtio 1.3, sections 2.1, 2.2, 3.1).
//!
//! A transport translates its registers into these calls. What the driver set up is frozen from
//! DRIVER_OK until reset; writes that come in a state where they are not allowed are refused with
//! [`AccessError::NotNow`] and change nothing.

mod state;

use std::error::Error;

use virtio_queue::{Queue, QueueT};

pub use self::state::{LifecycleState, SavedQueue};
use super::queue::{ActiveQueue, QueueFault, QueueLines};
use super::{Activation, Identity, Notifier, StartError, VirtioDevice, feature};
use crate::bus::AccessError;
use crate::ids::{DeviceId, QueueIndex};
use crate::memory::{GuestAddress, Memory};
use crate::metrics::Meter;

/// Status bits (virtio 1.3, section 2.1).
pub mod status {
    /// The guest has noticed the device.
    pub const ACKNOWLEDGE: u8 = 1;
    /// The guest knows how to drive it.
    pub const DRIVER: u8 = 2;
    /// The driver is ready.
    pub const DRIVER_OK: u8 = 4;
    /// Features are agreed on.
    pub const FEATURES_OK: u8 = 8;
    /// The device wants a reset.
    pub const NEEDS_RESET: u8 = 64;
    /// The driver has given up.
    pub const FAILED: u8 = 128;
}

/// Which of a queue's three rings an address is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ring {
    /// Descriptor table.
    Descriptors,
    /// Available ring, "driver area".
    Available,
    /// Used ring, "device area".
    Used,
}

enum Phase {
    Idle,
    Live,
    Parked(Vec<ActiveQueue>),
}

/// A device with its place in the lifecycle.
pub struct Lifecycle {
    id: DeviceId,
    device: Box<dyn VirtioDevice>,
    identity: Identity,
    memory: Memory,
    notifier: Notifier,
    lines: Vec<QueueLines>,
    queues: Vec<Queue>,
    status: u8,
    driver_features: u64,
    phase: Phase,
}

impl Lifecycle {
    /// Wraps a fresh device. `lines` has one entry per queue of the device, in order.
    pub fn new(
        id: DeviceId,
        device: Box<dyn VirtioDevice>,
        memory: Memory,
        notifier: Notifier,
        lines: Vec<QueueLines>,
    ) -> Result<Self, StartError> {
        let identity = device.identity();
        let queues: Result<Vec<_>, _> =
            identity.queue_sizes.iter().map(|&size| Queue::new(size)).collect();
        let queues = queues.map_err(|error| StartError::Host {
            what: "queue set-up",
            source: std::io::Error::other(error),
        })?;
        Ok(Self {
            id,
            device,
            identity,
            memory,
            notifier,
            lines,
            queues,
            status: 0,
            driver_features: 0,
            phase: Phase::Idle,
        })
    }

    /// The device's name.
    pub fn id(&self) -> &DeviceId {
        &self.id
    }

    /// What the device is.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// See [`VirtioDevice::writes_are_logged`].
    pub fn writes_are_logged(&self) -> bool {
        self.device.writes_are_logged()
    }

    /// Where to read what the device counts, if it counts.
    pub fn meter(&self) -> Option<Meter> {
        self.device.meter()
    }

    /// The device's configuration changes and its wish to be reset.
    pub fn notifier(&self) -> &Notifier {
        &self.notifier
    }

    /// Word `select` of the offered features; 0 beyond the second.
    pub fn offered_features(&self, select: u32) -> u32 {
        word(self.offered(), select)
    }

    /// Word `select` of what the driver accepted.
    pub fn accepted_features(&self, select: u32) -> u32 {
        word(self.driver_features, select)
    }

    fn offered(&self) -> u64 {
        self.identity.features | self.device.ring_features() | feature::VERSION_1
    }

    /// The driver accepts word `select` of the features. Only before FEATURES_OK.
    pub fn accept_features(&mut self, select: u32, value: u32) -> Result<(), AccessError> {
        let settled = status::FEATURES_OK | status::DRIVER_OK;
        if self.status & status::DRIVER == 0 || self.status & settled != 0 {
            return Err(AccessError::NotNow(u64::from(select)));
        }
        let (mask, shift) = match select {
            0 => (0xffff_ffff_u64, 0),
            1 => (0xffff_ffff_0000_0000, 32),
            // Bits that nobody offers must be 0 (they are refused at FEATURES_OK otherwise).
            _ if value == 0 => return Ok(()),
            _ => return Err(AccessError::NotNow(u64::from(select))),
        };
        self.driver_features = (self.driver_features & !mask) | (u64::from(value) << shift);
        Ok(())
    }

    /// The status register.
    pub fn status(&self) -> u8 {
        let reset = if self.notifier.wants_reset() { status::NEEDS_RESET } else { 0 };
        self.status | reset
    }

    /// A write to the status register.
    pub fn set_status(&mut self, value: u8) -> Result<(), AccessError> {
        if value == 0 {
            self.reset();
            return Ok(());
        }
        // NEEDS_RESET is the device's; a driver that wrote back what it read may set it.
        let value = value & !status::NEEDS_RESET;
        let added = value & !self.status;
        let refused = Err(AccessError::NotNow(u64::from(value)));
        // Bits are only cleared by a reset, after giving up nothing else is left, and there is no
        // DRIVER_OK without the features that an earlier write settled.
        if self.status & !value != 0 || self.status & status::FAILED != 0 {
            return refused;
        }
        if added & status::DRIVER_OK != 0 && self.status & status::FEATURES_OK == 0 {
            return refused;
        }
        if added & status::FAILED != 0 {
            self.fail();
            return Ok(());
        }
        self.status |= added & (status::ACKNOWLEDGE | status::DRIVER);
        if added & status::FEATURES_OK != 0 && self.features_are_acceptable() {
            self.status |= status::FEATURES_OK;
        }
        if added & status::DRIVER_OK != 0 {
            self.driver_ok();
        }
        Ok(())
    }

    fn features_are_acceptable(&self) -> bool {
        let known = self.driver_features & !self.offered() == 0;
        known && self.driver_features & feature::VERSION_1 != 0 && self.status & status::DRIVER != 0
    }

    fn driver_ok(&mut self) {
        self.status |= status::DRIVER_OK;
        match self.active_queues(&self.queues, self.driver_features) {
            Ok(queues) => self.start(queues),
            Err(fault) => {
                if self.notifier.may_complain() {
                    tracing::warn!(device = %self.id, %fault, "device not started");
                }
                self.notifier.needs_reset();
            }
        }
    }

    fn active_queues(
        &self,
        queues: &[Queue],
        features: u64,
    ) -> Result<Vec<ActiveQueue>, QueueFault> {
        let ready = queues.iter().zip(&self.lines).enumerate();
        ready
            .filter(|(_, (queue, _))| queue.ready())
            .map(|(index, (queue, lines))| {
                let state = queue.state();
                let index = QueueIndex(index as u16);
                let queue =
                    Queue::try_from(state).map_err(|_| QueueFault::Setup { queue: index })?;
                ActiveQueue::new(index, queue, self.memory.clone(), lines.clone(), features)
            })
            .collect()
    }

    fn start(&mut self, queues: Vec<ActiveQueue>) {
        let activation = Activation {
            memory: self.memory.clone(),
            queues,
            features: self.driver_features,
            notifier: self.notifier.clone(),
        };
        match self.device.start(activation) {
            Ok(()) => self.phase = Phase::Live,
            Err(error) => {
                let cause = error.source().map(ToString::to_string).unwrap_or_default();
                if self.notifier.may_complain() {
                    tracing::error!(device = %self.id, %error, cause, "device not started");
                }
                self.phase = Phase::Idle;
                self.notifier.needs_reset();
            }
        }
    }

    fn reset(&mut self) {
        // In-flight work ends here; its results are dropped with the queues.
        drop(self.device.stop());
        self.device.reset();
        self.phase = Phase::Idle;
        self.status = 0;
        self.driver_features = 0;
        self.queues.iter_mut().for_each(QueueT::reset);
        for line in &self.lines {
            line.kick.clear();
        }
        self.notifier.clear();
    }

    fn fail(&mut self) {
        drop(self.device.stop());
        self.phase = Phase::Idle;
        self.status |= status::FAILED;
    }

    /// Largest size of queue `index`; 0 if there is none.
    pub fn queue_max(&self, index: u16) -> u16 {
        self.queues.get(usize::from(index)).map_or(0, |queue| queue.max_size())
    }

    /// Size of queue `index` as the driver set it; 0 if there is none.
    pub fn queue_size(&self, index: u16) -> u16 {
        self.queues.get(usize::from(index)).map_or(0, |queue| queue.size())
    }

    /// True if queue `index` was made ready.
    pub fn queue_ready(&self, index: u16) -> bool {
        self.queues.get(usize::from(index)).is_some_and(|queue| queue.ready())
    }

    /// Address of a ring of queue `index`.
    pub fn ring_address(&self, index: u16, ring: Ring) -> u64 {
        self.queues.get(usize::from(index)).map_or(0, |queue| match ring {
            Ring::Descriptors => queue.desc_table(),
            Ring::Available => queue.avail_ring(),
            Ring::Used => queue.used_ring(),
        })
    }

    fn configurable(&mut self, index: u16) -> Result<&mut Queue, AccessError> {
        let refused = AccessError::NotNow(u64::from(index));
        if self.status & (status::FEATURES_OK | status::DRIVER_OK) != status::FEATURES_OK {
            return Err(refused);
        }
        self.queues.get_mut(usize::from(index)).ok_or(refused)
    }

    /// Sets the size of a queue that is not ready. Only between FEATURES_OK and DRIVER_OK.
    pub fn set_queue_size(&mut self, index: u16, size: u32) -> Result<(), AccessError> {
        let refused = AccessError::NotNow(u64::from(index));
        let queue = self.configurable(index)?;
        let size = u16::try_from(size).map_err(|_| refused)?;
        if queue.ready() {
            return Err(refused);
        }
        queue.try_set_size(size).map_err(|_| refused)
    }

    /// Sets half of a ring's address. Only on a queue that is not ready, as for the size; an
    /// address that is not aligned as virtio 1.3, section 2.7, demands is refused.
    pub fn set_ring_address(
        &mut self,
        index: u16,
        ring: Ring,
        high: bool,
        value: u32,
    ) -> Result<(), AccessError> {
        let refused = AccessError::NotNow(u64::from(index));
        let before = self.ring_address(index, ring);
        let queue = self.configurable(index)?;
        if queue.ready() {
            return Err(refused);
        }
        let value = u64::from(value);
        let address = GuestAddress(match high {
            true => before & 0xffff_ffff | value << 32,
            false => before & !0xffff_ffff | value,
        });
        match ring {
            Ring::Descriptors => queue.try_set_desc_table_address(address),
            Ring::Available => queue.try_set_avail_ring_address(address),
            Ring::Used => queue.try_set_used_ring_address(address),
        }
        .map_err(|_| refused)
    }

    /// Makes a queue ready or not. Only between FEATURES_OK and DRIVER_OK.
    pub fn set_queue_ready(&mut self, index: u16, ready: bool) -> Result<(), AccessError> {
        self.configurable(index)?.set_ready(ready);
        Ok(())
    }

    /// A notification that reached the transport rather than the doorbell.
    pub fn notify_queue(&self, index: u32) {
        let line = usize::try_from(index).ok().and_then(|index| self.lines.get(index));
        if let (Phase::Live, Some(line)) = (&self.phase, line) {
            line.kick.signal();
        }
    }

    /// Reads the configuration space; all-ones beyond its end.
    pub fn read_config(&self, offset: u64, data: &mut [u8]) -> Result<(), AccessError> {
        self.config_bounds(offset, data.len())?;
        self.device.read_config(offset, data);
        Ok(())
    }

    /// Writes the configuration space. Only once the guest drives the device, but for a field that
    /// the device says is open to everybody.
    pub fn write_config(&mut self, offset: u64, data: &[u8]) -> Result<(), AccessError> {
        self.config_bounds(offset, data.len())?;
        if self.status & status::DRIVER == 0 && !self.device.takes_undriven_write(offset) {
            return Err(AccessError::NotNow(offset));
        }
        self.device.write_config(offset, data);
        Ok(())
    }

    fn config_bounds(&self, offset: u64, len: usize) -> Result<(), AccessError> {
        match offset.checked_add(len as u64) {
            Some(end) if end <= self.identity.config_len => Ok(()),
            _ => Err(AccessError::NoRegister(offset)),
        }
    }

    /// Stops the device for a pause or a snapshot; its queues are kept here. Idempotent. Only
    /// called while no vCPU runs.
    pub fn pause(&mut self) {
        if let Phase::Live = self.phase {
            self.phase = Phase::Parked(self.device.stop());
        }
    }

    /// Goes on after a pause or a restore, and nudges every queue once.
    pub fn resume(&mut self) {
        if let Phase::Parked(queues) = std::mem::replace(&mut self.phase, Phase::Idle) {
            for queue in &queues {
                queue.nudge();
            }
            self.start(queues);
        }
    }
}

fn word(features: u64, select: u32) -> u32 {
    match select {
        0 => features as u32,
        1 => (features >> 32) as u32,
        _ => 0,
    }
}

#[cfg(test)]
mod tests;
