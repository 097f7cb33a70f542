//! What the two transports have in common for whoever builds and pauses a VM.

use super::lifecycle::Lifecycle;
use crate::bus::BusDevice;
use crate::event::Event;
use crate::ids::QueueIndex;
use crate::snapshot::Stateful;

/// A write of the guest that means "look at this queue", which the builder lets KVM turn into a
/// signal of `event` (`KVM_IOEVENTFD`). Until it is connected, the write reaches the transport's
/// registers and has the same effect.
#[derive(Clone, Debug)]
pub struct Doorbell {
    /// Whose queue.
    pub queue: QueueIndex,
    /// Where, from the start of the transport's window.
    pub offset: u64,
    /// The 32-bit value that is written; `None`: any.
    pub value: Option<u32>,
    /// The event to signal.
    pub event: Event,
}

/// A virtio device behind its registers.
pub trait Transport: BusDevice + Stateful {
    /// The device's life, for pause and resume.
    fn lifecycle(&mut self) -> &mut Lifecycle;

    /// The doorbells to connect.
    fn doorbells(&self) -> &[Doorbell];
}
