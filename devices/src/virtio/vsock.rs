//! The socket device (virtio 1.3, section 5.10): streams between the guest and the host.
//!
//! Hybrid: on the host a connection is a unix socket, so nothing here needs the host kernel's vsock.

mod handle;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

pub use self::handle::{CONNECT_TIMEOUT, VsockHandle, VsockListener};
use self::handle::{Phase, Shared};
use super::queue::ActiveQueue;
use super::{Activation, DeviceType, Identity, StartError, VirtioDevice};
use crate::executor::{ExecutorError, ExecutorHandle};
use crate::snapshot::{RestoreError, SaveError, Schema, Snapshot};

// --- configuration -----------------------------------------------------------------------------

const QUEUE_SIZES: &[u16] = &[256, 256, 16];

/// Which guest this is and where the host finds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VsockConfig {
    /// The guest's address: 3 or more, 32 bits.
    pub guest_cid: u64,
    /// Where host programs connect, if they shall.
    pub socket: Option<PathBuf>,
}

impl Default for VsockConfig {
    fn default() -> Self {
        Self { guest_cid: 3, socket: None }
    }
}

/// Why the device could not be made.
#[derive(Debug, thiserror::Error)]
pub enum VsockError {
    /// An address that is reserved or too long (virtio 1.3, section 5.10.4).
    #[error("guest cid {0} is reserved or longer than 32 bits")]
    Cid(u64),
    /// Somebody answers at the socket.
    #[error("socket {} is in use", .0.display())]
    InUse(PathBuf),
    /// A file that is not a socket stands there.
    #[error("{} exists and is not a socket", .0.display())]
    NotASocket(PathBuf),
    /// The name does not fit a socket address once `_` and a port are added.
    #[error("socket path {} is too long", .0.display())]
    PathTooLong(PathBuf),
    /// The socket could not be made.
    #[error("socket {} cannot be bound", .path.display())]
    Bind {
        /// Where.
        path: PathBuf,
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// Another host resource failed.
    #[error("{what} failed")]
    Host {
        /// What was tried.
        what: &'static str,
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// The handler could not be run.
    #[error("the device's handler cannot be run")]
    Executor(#[source] ExecutorError),
}

// --- device ------------------------------------------------------------------------------------

/// The device as the transport holds it.
pub struct Vsock {
    config: VsockConfig,
    #[allow(dead_code)]
    executor: ExecutorHandle,
    shared: Arc<Shared>,
    queues: Vec<ActiveQueue>,
}

impl Vsock {
    /// A device whose worker runs on `executor`, and the way into it for this process.
    pub fn new(
        executor: ExecutorHandle,
        config: VsockConfig,
    ) -> Result<(Self, VsockHandle), VsockError> {
        let reserved = config.guest_cid < 3 || config.guest_cid >= u64::from(u32::MAX);
        if reserved {
            return Err(VsockError::Cid(config.guest_cid));
        }
        let shared =
            Shared::new().map_err(|source| VsockError::Host { what: "wake-up eventfd", source })?;
        let shared = Arc::new(shared);
        let handle = VsockHandle::new(shared.clone());
        Ok((Self { config, executor, shared, queues: Vec::new() }, handle))
    }
}

impl VirtioDevice for Vsock {
    fn identity(&self) -> Identity {
        Identity {
            device_type: DeviceType::Vsock,
            features: 0,
            queue_sizes: QUEUE_SIZES,
            config_len: 8,
        }
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let bytes = self.config.guest_cid.to_le_bytes();
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        for (at, byte) in data.iter_mut().enumerate() {
            *byte = bytes.get(start.saturating_add(at)).copied().unwrap_or(0);
        }
    }

    fn start(&mut self, activation: Activation) -> Result<(), StartError> {
        self.queues = activation.queues;
        self.shared.set_phase(Phase::Driven);
        Ok(())
    }

    fn stop(&mut self) -> Vec<ActiveQueue> {
        std::mem::take(&mut self.queues)
    }

    fn reset(&mut self) {
        self.shared.set_phase(Phase::Undriven);
    }
}

impl Drop for Vsock {
    fn drop(&mut self) {
        self.shared.set_phase(Phase::Gone);
    }
}

// --- state -------------------------------------------------------------------------------------

/// The saved form of the device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VsockState {
    /// The guest's address when it was saved.
    pub guest_cid: u64,
    /// A driver was there.
    pub driven: bool,
    /// The host port to try first for the next connection.
    pub next_host_port: u32,
    /// Host and guest port of each connection that the guest may believe to be open.
    pub connections: Vec<(u32, u32)>,
}

impl Schema for VsockState {
    const KIND: &'static str = "virtio-vsock";
    const VERSION: u32 = 1;
}

impl Snapshot for Vsock {
    type State = VsockState;

    fn save(&self) -> Result<VsockState, SaveError> {
        let guest_cid = self.config.guest_cid;
        Ok(VsockState {
            guest_cid,
            driven: false,
            next_host_port: 1 << 30,
            connections: Vec::new(),
        })
    }

    fn restore(&mut self, _state: VsockState) -> Result<(), RestoreError> {
        Ok(())
    }
}
