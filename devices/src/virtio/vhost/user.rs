//! Devices served by another process over a Unix socket: the frontend of the vhost-user protocol
//! (<https://qemu-project.gitlab.io/qemu/interop/vhost-user.html>).
//!
//! A [`VhostUser`] is connected when it is made, so that a backend that is not there is a mistake
//! that is told at once, and the device can offer what the backend can. It connects again when the
//! driver starts it after the backend had gone. The backend's configuration space is asked for once
//! per connection: a guest that reads it must not wait for anybody.

mod connection;
mod counts;
pub(in crate::virtio) mod deadline;
mod state;
#[cfg(test)]
mod tests;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use self::connection::{Connection, Needs, Wires};
pub use self::counts::VhostUserCounts;
pub use self::state::VhostUserState;
use super::pump::{Call, Pump};
use crate::event::Event;
use crate::executor::{ExecutorHandle, Running};
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
    /// Queues of the device, 1 to [`block::MAX_QUEUES`].
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

/// A device that a backend serves, as the transport holds it.
pub struct VhostUser {
    executor: ExecutorHandle,
    options: VhostUserConfig,
    needs: Needs,
    /// What the first backend offered; another one must have the same.
    offered: u64,
    config: Vec<u8>,
    counts: Arc<VhostUserCounts>,
    /// Per queue, signalled by the backend.
    calls: Vec<Event>,
    fault: Event,
    /// `None` after a failure, until the driver tries again.
    connection: Option<Connection>,
    live: Option<Live>,
}

/// What there is while it is live.
struct Live {
    queues: Vec<ActiveQueue>,
    pump: Running<Pump>,
    broken: Arc<AtomicBool>,
}

impl VhostUser {
    /// A block device of the backend at a socket, whose signals are passed on by `executor`. Waits
    /// for the backend's answers.
    pub fn block(
        executor: ExecutorHandle,
        options: VhostUserConfig,
    ) -> Result<Self, VhostUserError> {
        let several = if options.queues > 1 { blk::MQ } else { 0 };
        let needs =
            Needs { features: several, config_len: BLOCK_CONFIG_LEN, queues: Some(options.queues) };
        let host = |source| VhostUserError::Host { what: "eventfd", source };
        let calls: io::Result<_> = (0..options.queues).map(|_| Event::new()).collect();
        let (calls, fault) = (calls.map_err(host)?, Event::new().map_err(host)?);
        let mut this = Self {
            executor,
            options,
            needs,
            offered: 0,
            config: Vec::new(),
            counts: Arc::default(),
            calls,
            fault,
            connection: None,
            live: None,
        };
        let connection = this.connect()?;
        this.offered = connection.features();
        this.config = this.config_of(&connection);
        this.connection = Some(connection);
        Ok(this)
    }

    fn connect(&self) -> Result<Connection, VhostUserError> {
        let VhostUserConfig { socket, patience, .. } = &self.options;
        let connection = Connection::open(socket, self.needs, *patience)?;
        self.counts.connections.one();
        Ok(connection)
    }

    /// The configuration space, with the number of queues that we have.
    fn config_of(&self, connection: &Connection) -> Vec<u8> {
        let mut config = connection.config().to_vec();
        let queues = self.options.queues.to_le_bytes();
        for (to, from) in config.iter_mut().skip(BLOCK_NUM_QUEUES).zip(queues) {
            *to = from;
        }
        config
    }

    /// The connection that there is, or a new one to a backend that is as the guest knows it.
    fn connected(&mut self) -> Result<Connection, VhostUserError> {
        if let Some(connection) = self.connection.take().filter(Connection::is_alive) {
            return Ok(connection);
        }
        let connection = self.connect()?;
        if self.config_of(&connection) != self.config {
            return Err(VhostUserError::Changed);
        }
        Ok(connection)
    }

    fn begin(&mut self, activation: Activation) -> Result<(), StartError> {
        let Activation { memory, mut queues, features, notifier } = activation;
        queues.sort_by_key(ActiveQueue::index);
        self.fault.clear();
        let mut calls = Vec::with_capacity(queues.len());
        let mut wired = Vec::with_capacity(queues.len());
        for queue in &queues {
            let index = queue.index().0;
            let call = self.calls.get(usize::from(index)).ok_or(StartError::MissingQueue(index))?;
            call.clear();
            calls.push(Call { event: call.clone(), interrupt: queue.interrupt().clone() });
            wired.push((queue, Wires { call, fault: &self.fault }));
        }
        let failed = |error| StartError::Host {
            what: "starting the vhost-user backend",
            source: io::Error::other(error),
        };
        // Cloned events, so that `self` is free.
        let fault = self.fault.clone();
        let connection = self.connection.as_mut().ok_or_else(|| failed(VhostUserError::Rings))?;
        connection.start(&memory, features, &wired).map_err(failed)?;
        let peer = connection
            .peer()
            .map_err(|source| StartError::Host { what: "watching the backend", source })?;
        let broken = Arc::<AtomicBool>::default();
        let pump = Pump {
            device: "vhost-user device",
            calls,
            fault,
            peer: Some(peer),
            notifier,
            signals: self.counts.signals.clone(),
            broken: broken.clone(),
        };
        let pump = self.executor.run(pump).map_err(|no| StartError::Executor(no.error))?;
        self.live = Some(Live { queues, pump, broken });
        Ok(())
    }
}

impl VirtioDevice for VhostUser {
    fn identity(&self) -> Identity {
        let several = if self.options.queues > 1 { blk::MQ } else { 0 };
        Identity {
            device_type: DeviceType::Block,
            features: self.offered & (BLOCK_FEATURES | several),
            queue_sizes: QUEUE_SIZES.get(..usize::from(self.options.queues)).unwrap_or(QUEUE_SIZES),
            config_len: self.config.len() as u64,
        }
    }

    fn ring_features(&self) -> u64 {
        self.offered & feature::COMMON
    }

    fn meter(&self) -> Option<Meter> {
        Some(self.counts.clone())
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        for (to, from) in data.iter_mut().zip(self.config.iter().skip(offset)) {
            *to = *from;
        }
    }

    fn start(&mut self, activation: Activation) -> Result<(), StartError> {
        // The first queue is needed; of the others the driver has as many as it wants.
        if activation.queues.iter().all(|queue| queue.index().0 != 0) {
            return Err(StartError::MissingQueue(0));
        }
        let connection = self.connected().map_err(|error| {
            self.counts.failures.one();
            StartError::Host {
                what: "connecting to the vhost-user backend",
                source: io::Error::other(error),
            }
        })?;
        self.connection = Some(connection);
        self.begin(activation).inspect_err(|_| {
            // The backend may have part of the queues: only its end takes them back.
            self.connection = None;
            self.counts.failures.one();
        })
    }

    /// Waits for what is in flight, as long as [`VhostUserConfig::patience`] says. A backend that
    /// cannot finish is let go, and the driver is asked for a reset.
    fn stop(&mut self) -> Vec<ActiveQueue> {
        let Some(live) = self.live.take() else {
            return Vec::new();
        };
        let Live { mut queues, pump, broken } = live;
        let fault = self.fault.clone();
        // Signals are left to the pump until the queues are back: an interrupt may end a wait.
        let stopped = match self.connection.as_mut().filter(|connection| connection.is_alive()) {
            Some(connection) => {
                connection.stop(&mut queues, true, || broken.load(Ordering::Acquire))
            }
            None => Err(VhostUserError::Answer {
                what: "GET_VRING_BASE",
                source: vhost::Error::VhostUserProtocol(vhost::vhost_user::Error::Disconnected),
            }),
        };
        let notifier = pump.stop().map(|pump| pump.notifier);
        fault.clear();
        if let Err(error) = stopped {
            self.connection = None;
            for queue in &mut queues {
                // As above, and the driver is told that its requests may be lost.
                let _ = queue.take_over(None);
            }
            if !broken.load(Ordering::Acquire) {
                self.counts.signals.losses.one();
                if let Some(notifier) = notifier {
                    notifier.gives_up("vhost-user device", error);
                }
            }
        }
        queues
    }

    fn reset(&mut self) {}
}
