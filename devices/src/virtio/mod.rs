//! virtio devices (virtio 1.3) and their transports.
//!
//! A device implements [`VirtioDevice`]; a transport ([`mmio`]) turns register accesses into its
//! calls. Both transports share one lifecycle:
//!
//! ```text
//!             DRIVER_OK: start(queues)            pause: stop()
//!    Idle ───────────────────────────► Live ◄─────────────────────► Parked(queues)
//!     ▲                                 │      resume: start(queues),       ▲
//!     │   status = 0: stop(), reset()   │      kick every queue once, raise │ restore: queues
//!     └─────────────────────────────────┘      every used interrupt once    │ built from records
//!     Idle and Parked can be saved; Live cannot.
//!     start() failing ⇒ DEVICE_NEEDS_RESET and a configuration interrupt. Never a panic.
//! ```
//!
//! `start` moves the queues into the device, `stop` moves them out with nothing in flight and is
//! idempotent; pause, reset, snapshot and unplug are all made of these two.

pub mod balloon;
pub mod block;
pub mod chain;
pub mod console;
pub mod fs;
pub mod lifecycle;
pub mod mmio;
pub mod net;
pub mod pci;
pub mod pmem;
pub mod queue;
pub mod rng;
mod throttle;
pub mod transport;
mod vectors;
pub mod vhost;
pub mod vsock;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::irq::Interrupt;
use crate::memory::Memory;
use crate::metrics::Meter;
use crate::snapshot::Stateful;
pub use chain::{Chain, Segment};
pub use queue::{ActiveQueue, QueueFault, QueueRecord};

/// Feature bits that belong to the rings and the transport (virtio 1.3, section 6).
pub mod feature {
    /// Descriptors may point to tables of descriptors.
    pub const RING_INDIRECT_DESC: u64 = 1 << 28;
    /// Both sides say with which index they want to be notified.
    pub const RING_EVENT_IDX: u64 = 1 << 29;
    /// Modern device. Always offered, and required of the driver.
    pub const VERSION_1: u64 = 1 << 32;
    /// What every device of ours offers, beside its own bits.
    pub const COMMON: u64 = RING_INDIRECT_DESC | RING_EVENT_IDX | VERSION_1;
}

/// Device types (virtio 1.3, section 5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum DeviceType {
    /// Network card.
    Net = 1,
    /// Block device.
    Block = 2,
    /// Console.
    Console = 3,
    /// Entropy source.
    Rng = 4,
    /// Memory balloon.
    Balloon = 5,
    /// Socket device.
    Vsock = 19,
    /// File system.
    Fs = 26,
    /// Persistent memory.
    Pmem = 27,
}

/// What a device is; constant for its lifetime.
#[derive(Clone, Debug)]
pub struct Identity {
    /// Its type.
    pub device_type: DeviceType,
    /// Its own feature bits; the transport adds [`feature::COMMON`].
    pub features: u64,
    /// The largest size of each queue: powers of two, 32768 at most.
    pub queue_sizes: &'static [u16],
    /// Bytes of its configuration space.
    pub config_len: u64,
}

/// How a device speaks to the driver outside its queues. Clones share the state.
#[derive(Clone, Debug)]
pub struct Notifier {
    needs_reset: Arc<AtomicBool>,
    generation: Arc<AtomicU32>,
    complaints: Arc<AtomicU32>,
    interrupt: Interrupt,
}

/// Faults of its guest that are logged in the life of a device; the later ones are not.
const LOGGED_FAULTS: u32 = 8;

impl Notifier {
    /// `interrupt` is the transport's configuration interrupt.
    pub fn new(interrupt: Interrupt) -> Self {
        Self {
            needs_reset: Arc::default(),
            generation: Arc::default(),
            complaints: Arc::default(),
            interrupt,
        }
    }

    /// The device cannot go on, because of what its guest did: [`Notifier::needs_reset`], with a line
    /// in the log. A guest that does it again and again gets only so many lines, resets or not. Any
    /// thread.
    pub fn gives_up(&self, device: &'static str, fault: impl std::fmt::Display) {
        if self.may_complain() {
            tracing::warn!(%fault, "{device} stopped");
        }
        self.needs_reset();
    }

    /// True the first few times in the life of the device: there may be a line in the log.
    pub fn may_complain(&self) -> bool {
        let seen = &self.complaints;
        let count = |seen: u32| (seen < LOGGED_FAULTS).then_some(seen + 1);
        seen.fetch_update(Ordering::Relaxed, Ordering::Relaxed, count).is_ok()
    }

    /// The device cannot go on until the driver resets it (virtio 1.3, section 2.1.2). Any thread.
    pub fn needs_reset(&self) {
        if !self.needs_reset.swap(true, Ordering::AcqRel) {
            self.interrupt.raise();
        }
    }

    /// The configuration space has changed. Any thread.
    pub fn config_changed(&self) {
        self.generation.fetch_add(1, Ordering::AcqRel);
        self.interrupt.raise();
    }

    /// True after [`Notifier::needs_reset`].
    pub fn wants_reset(&self) -> bool {
        self.needs_reset.load(Ordering::Acquire)
    }

    /// Changes with each [`Notifier::config_changed`].
    pub fn generation(&self) -> u32 {
        self.generation.load(Ordering::Acquire)
    }

    /// The driver has reset the device. For transports.
    pub fn clear(&self) {
        self.restore(false);
    }

    /// Takes over from a record whether the device wants a reset. Raises no interrupt. For
    /// transports.
    pub fn restore(&self, needs_reset: bool) {
        self.needs_reset.store(needs_reset, Ordering::Release);
    }
}

/// All that a device gets when the driver says DRIVER_OK.
#[derive(Debug)]
pub struct Activation {
    /// Guest RAM.
    pub memory: Memory,
    /// One per entry of [`Identity::queue_sizes`] that the driver made ready. Its index tells
    /// which; a device that needs one that is missing answers [`StartError::MissingQueue`].
    pub queues: Vec<ActiveQueue>,
    /// What driver and device agreed on.
    pub features: u64,
    /// For config changes and faults.
    pub notifier: Notifier,
}

impl Activation {
    /// True if all bits of `feature` were negotiated.
    pub fn has(&self, feature: u64) -> bool {
        self.features & feature == feature
    }

    /// Takes queue `index` out.
    pub fn take_queue(&mut self, index: u16) -> Result<ActiveQueue, StartError> {
        match self.queues.iter().position(|queue| queue.index().0 == index) {
            Some(position) => Ok(self.queues.swap_remove(position)),
            None => Err(StartError::MissingQueue(index)),
        }
    }
}

/// Why a device could not start. The driver sees DEVICE_NEEDS_RESET, the log the reason.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The driver left out a queue that the device cannot do without.
    #[error("queue {0} is needed and was not set up by the driver")]
    MissingQueue(u16),
    /// The handler could not be run.
    #[error("the device's handler cannot be run")]
    Executor(#[source] crate::executor::ExecutorError),
    /// A host resource failed.
    #[error("{what} failed")]
    Host {
        /// What was tried.
        what: &'static str,
        /// The reason.
        #[source]
        source: std::io::Error,
    },
}

/// A virtio device, apart from its transport. All calls come from the transport, under its lock.
pub trait VirtioDevice: Stateful + Send {
    /// What the device is.
    fn identity(&self) -> Identity;

    /// What it offers of [`feature::COMMON`]: all, unless the work is done by somebody else, who can
    /// do less. Constant like its identity.
    fn ring_features(&self) -> u64 {
        feature::COMMON
    }

    /// Whether guest memory that the device writes is marked in the dirty bitmap of
    /// [`Memory`]. False where somebody else does the work, in whose writes neither we nor KVM have a
    /// part: what has changed since some moment is not known then. Constant like its identity.
    fn writes_are_logged(&self) -> bool {
        true
    }

    /// Where to read what the device has counted, if it counts. All clones see the same counts,
    /// which go on through reset, pause and restore.
    fn meter(&self) -> Option<Meter> {
        None
    }

    /// Fills `data` from the configuration space. The transport has checked the bounds.
    fn read_config(&self, offset: u64, data: &mut [u8]);

    /// Writes to the configuration space; most devices have nothing there that is writable.
    fn write_config(&mut self, offset: u64, data: &[u8]) {
        let _ = (offset, data);
    }

    /// True if a write at `offset` of the configuration space means something even before a driver
    /// has announced itself, as the console's emergency write does.
    fn takes_undriven_write(&self, offset: u64) -> bool {
        let _ = offset;
        false
    }

    /// Starts work with the queues. On failure the device stays stopped.
    fn start(&mut self, activation: Activation) -> Result<(), StartError>;

    /// Stops work and gives the queues back, in order, with nothing in flight. Idempotent: a
    /// device that is not started gives none.
    fn stop(&mut self) -> Vec<ActiveQueue>;

    /// Forgets what the driver set up. Only called on a stopped device.
    fn reset(&mut self);
}

#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod hostile;
