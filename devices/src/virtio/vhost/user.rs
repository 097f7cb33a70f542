//! Devices served by another process over a Unix socket: the frontend of the vhost-user protocol
//! (<https://qemu-project.gitlab.io/qemu/interop/vhost-user.html>).
//!
//! [`VhostUser`] is a block device; network cards are in [`crate::virtio::net`]. Both hold a `Backend`.
//! A backend's configuration space is asked for once per connection: a guest that reads it must not
//! wait for anybody.

mod backend;
mod connection;
mod counts;
pub(in crate::virtio) mod deadline;
mod state;
#[cfg(test)]
mod tests;

use std::io;
use std::path::PathBuf;
use std::time::Duration;

pub(in crate::virtio) use self::backend::{Backend, Switch};
pub(in crate::virtio) use self::connection::Needs;
pub use self::counts::VhostUserCounts;
pub use self::state::VhostUserState;
use crate::executor::ExecutorHandle;
use crate::metrics::Meter;
use crate::virtio::block::{self, feature as blk};
use crate::virtio::queue::ActiveQueue;
use crate::virtio::{Activation, DeviceType, Identity, StartError, VirtioDevice, feature};

/// How long a backend may take: to say what it is, to start, and to stop.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// Entries of each queue: what the backends of block devices have been made for.
const QUEUE_SIZES: &[u16] = &[128; block::MAX_QUEUES as usize];

/// Bytes of a block device's configuration space, up to the fields of write-zeroes.
const BLOCK_CONFIG_LEN: usize = 60;
/// Where the number of queues is in it.
const BLOCK_NUM_QUEUES: usize = 34;

/// What of a block device's features means the same whoever serves it.
const BLOCK_FEATURES: u64 = blk::SIZE_MAX
    | blk::SEG_MAX
    | blk::GEOMETRY
    | blk::RO
    | blk::BLK_SIZE
    | blk::FLUSH
    | blk::TOPOLOGY
    | blk::DISCARD
    | blk::WRITE_ZEROES;

// --- configuration -----------------------------------------------------------------------------

/// Which backend, and how long to wait for it.
#[derive(Clone, Debug)]
pub struct VhostUserConfig {
    /// Its socket.
    pub socket: PathBuf,
    /// Queues of the device, 1 to [`block::MAX_QUEUES`]; pairs of them, if it is a network card.
    pub queues: u16,
    /// See [`PATIENCE`].
    pub patience: Duration,
}

/// Why a backend cannot be used. Does not name its socket, apart from the first.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "each says what it is")]
pub enum VhostUserError {
    #[error("socket {path:?} cannot be connected to: {source}; start the backend first")]
    Connect { path: PathBuf, source: io::Error },
    #[error("it failed at {what}: {source}")]
    Answer { what: &'static str, source: vhost::Error },
    #[error("it did not answer to {what} within {patience:?}")]
    Silent { what: &'static str, patience: Duration },
    #[error("it does not offer the features {0:#x}, which are needed; use another backend")]
    Features(u64),
    #[error("it does not tell a configuration space; use a backend with that (CONFIG)")]
    NoConfig,
    #[error("it has {has} queues and {asked} are asked for; use a smaller queues=")]
    Queues { asked: u16, has: u64 },
    #[error("it has another configuration than before; only a new VM can use it")]
    Changed,
    #[error("guest memory is not shared; start the VM with the device, it cannot come later")]
    PrivateMemory,
    #[error("the rings are outside of guest memory")]
    Rings,
    #[error("it says that a ring is at {0}")]
    Base(u32),
    #[error("it did not finish its requests within {0:?}")]
    Busy(Duration),
    #[error("{what} cannot be made: {source}")]
    Host { what: &'static str, source: io::Error },
}

// --- device ------------------------------------------------------------------------------------

/// A block device that a backend serves, as the transport holds it.
pub struct VhostUser {
    executor: ExecutorHandle,
    queues: u16,
    backend: Backend,
}

impl VhostUser {
    /// A block device of the backend at a socket, whose signals are passed on by `executor`. Waits
    /// for the backend's answers.
    pub fn block(
        executor: ExecutorHandle,
        options: VhostUserConfig,
    ) -> Result<Self, VhostUserError> {
        let queues = options.queues;
        let needs = Needs {
            features: if queues > 1 { blk::MQ } else { 0 },
            config_len: BLOCK_CONFIG_LEN,
            queues_at: Some(BLOCK_NUM_QUEUES),
            queues,
            drains: true,
        };
        let backend = Backend::connect("vhost-user disk", options, needs, queues)?;
        Ok(Self { executor, queues, backend })
    }
}

impl VirtioDevice for VhostUser {
    fn identity(&self) -> Identity {
        let several = if self.queues > 1 { blk::MQ } else { 0 };
        Identity {
            device_type: DeviceType::Block,
            features: self.backend.offered() & (BLOCK_FEATURES | several),
            queue_sizes: QUEUE_SIZES.get(..usize::from(self.queues)).unwrap_or(QUEUE_SIZES),
            config_len: self.backend.config().len() as u64,
        }
    }

    fn ring_features(&self) -> u64 {
        self.backend.offered() & feature::COMMON
    }

    fn writes_are_logged(&self) -> bool {
        false
    }

    fn meter(&self) -> Option<Meter> {
        Some(self.backend.counts().clone())
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        for (to, from) in data.iter_mut().zip(self.backend.config().iter().skip(offset)) {
            *to = *from;
        }
    }

    fn start(&mut self, activation: Activation) -> Result<(), StartError> {
        // The first queue is needed; of the others the driver has as many as it wants.
        if activation.queues.iter().all(|queue| queue.index().0 != 0) {
            return Err(StartError::MissingQueue(0));
        }
        self.backend.start(&self.executor, activation, u16::MAX)
    }

    /// See `Backend::stop`.
    fn stop(&mut self) -> Vec<ActiveQueue> {
        self.backend.stop()
    }

    fn reset(&mut self) {}
}
