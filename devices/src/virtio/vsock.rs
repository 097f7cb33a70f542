//! The socket device (virtio 1.3, section 5.10): streams between the guest and the host.
//!
//! The host's side of a connection is a unix socket ("hybrid" vsock), so nothing here needs the
//! host kernel's vsock, and guests of the same address do not meet:
//!
//! ```text
//!  host program ── socket ── CONNECT 1024 ──►┐            ┌── rx ring ──► guest
//!  this process ── VsockHandle::connect ────►├─ Muxer ────┤
//!  this process ◄─ VsockHandle::listen ──────┤            │
//!  host program ◄─ socket_1024 ──────────────┘            └◄─ tx ring ─── guest
//! ```
//!
//! - From the host: connect to the socket, write `CONNECT <port>\n`, read `OK <host port>\n`. A
//!   connection that is closed instead was refused, by the guest or because no driver is there.
//! - From the guest: a connection to CID 2, port P, goes to the in-process listener of P, or to the
//!   socket file with `_P` after its name, or is refused.
//!
//! Connections outlive a pause. They do not outlive a reset of the device, nor a snapshot: after a
//! restore the guest is told so before it hears of any new connection.
//!
//! In the folder: `handle` for this process, `greeting` and `host` for programs, `packet` and
//! `credit` for the guest's protocol, `connection` and `muxer` for the state, `rings` and `worker`
//! for what moves.

mod complaints;
mod connection;
mod counters;
mod credit;
mod greeting;
mod handle;
mod host;
mod muxer;
mod packet;
mod rings;
mod stream;
#[cfg(test)]
mod tests;
mod worker;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

pub use self::handle::{CONNECT_TIMEOUT, VsockHandle, VsockListener};
use self::handle::{Phase, Shared};
use self::host::{Endpoints, HostSocket};
use self::muxer::{FIRST_HOST_PORT, Key, LAST_HOST_PORT, MAX_CONNECTIONS, Muxer};
use self::rings::{Gate, Rings};
use self::worker::Worker;
use super::queue::ActiveQueue;
use super::{Activation, DeviceType, Identity, StartError, VirtioDevice};
use crate::executor::{ExecutorError, ExecutorHandle, Running};
use crate::metrics::Meter;
use crate::snapshot::{RestoreError, SaveError, Schema, Snapshot};

// --- configuration -----------------------------------------------------------------------------

/// Receive, transmit, event. A Linux driver keeps all of the first filled with pages: a megabyte.
const QUEUE_SIZES: &[u16] = &[256, 256, 64];

/// VIRTIO_VSOCK_F_STREAM: stream sockets. Those of sequenced packets are not offered.
const FEATURE_STREAM: u64 = 1 << 0;

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
    executor: ExecutorHandle,
    shared: Arc<Shared>,
    place: Place,
    started: bool,
    /// A driver is there: from start to reset, pauses included.
    driven: bool,
}

/// Where the worker is.
enum Place {
    /// On the loop: started, or turning programs away.
    Running(Running<Worker>),
    /// Here: paused.
    Parked(Box<Worker>),
    /// Nowhere: the loop ended with it.
    Lost,
}

impl Vsock {
    /// A device whose worker runs on `executor` from now on, and the way into it for this process.
    pub fn new(
        executor: ExecutorHandle,
        config: VsockConfig,
    ) -> Result<(Self, VsockHandle), VsockError> {
        if !is_guest_cid(config.guest_cid) {
            return Err(VsockError::Cid(config.guest_cid));
        }
        let shared =
            Shared::new().map_err(|source| VsockError::Host { what: "wake-up eventfd", source })?;
        let shared = Arc::new(shared);
        let host = config.socket.as_deref().map(HostSocket::bind).transpose()?;
        let endpoints = Endpoints { shared: shared.clone(), prefix: config.socket.clone() };
        let muxer = Muxer::new(config.guest_cid, endpoints);
        let worker = Worker::new(muxer, shared.clone(), host)?;
        let handle = VsockHandle::new(shared.clone());
        let place = Place::Parked(Box::new(worker));
        let mut vsock = Self { config, executor, shared, place, started: false, driven: false };
        vsock.run().map_err(VsockError::Executor)?;
        Ok((vsock, handle))
    }

    /// Puts the worker on the loop.
    fn run(&mut self) -> Result<(), ExecutorError> {
        let Some(worker) = self.park() else {
            return Err(ExecutorError::Gone);
        };
        let (place, result) = match self.executor.run(*worker) {
            Ok(running) => (Place::Running(running), Ok(())),
            Err(refused) => {
                let parked = refused.handler.map(|worker| Place::Parked(Box::new(worker)));
                (parked.unwrap_or(Place::Lost), Err(refused.error))
            }
        };
        self.place = place;
        result
    }

    /// Takes the worker off the loop. What comes in meanwhile waits in the sockets.
    fn park(&mut self) -> Option<Box<Worker>> {
        match std::mem::replace(&mut self.place, Place::Lost) {
            Place::Running(running) => running.stop().map(Box::new),
            Place::Parked(worker) => Some(worker),
            Place::Lost => None,
        }
    }

    fn look<R>(&self, look: impl FnOnce(&Worker) -> R) -> Option<R> {
        match &self.place {
            Place::Running(running) => running.with(|worker| look(worker)),
            Place::Parked(worker) => Some(look(worker)),
            Place::Lost => None,
        }
    }
}

/// Reserved are 0 to 2, the largest number, and the upper half (virtio 1.3, section 5.10.4).
fn is_guest_cid(cid: u64) -> bool {
    (3..u64::from(u32::MAX)).contains(&cid)
}

impl VirtioDevice for Vsock {
    fn identity(&self) -> Identity {
        Identity {
            device_type: DeviceType::Vsock,
            features: FEATURE_STREAM,
            queue_sizes: QUEUE_SIZES,
            config_len: 8,
        }
    }

    fn meter(&self) -> Option<Meter> {
        Some(self.shared.clone())
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let bytes = self.config.guest_cid.to_le_bytes();
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        for (at, byte) in data.iter_mut().enumerate() {
            *byte = bytes.get(start.saturating_add(at)).copied().unwrap_or(0);
        }
    }

    fn start(&mut self, mut activation: Activation) -> Result<(), StartError> {
        let (rx, tx) = (activation.take_queue(0)?, activation.take_queue(1)?);
        let event = activation.take_queue(2)?;
        let mut worker = self.park().ok_or(StartError::Executor(ExecutorError::Gone))?;
        worker.rings = Some(Rings { rx, tx, event, tx_waits: false });
        worker.notifier = Some(activation.notifier);
        self.place = Place::Parked(worker);
        // First, or requests made from now on would be refused though the guest is up.
        self.shared.set_phase(Phase::Driven);
        if let Err(error) = self.run() {
            self.shared.set_phase(Phase::Undriven);
            if let Place::Parked(worker) = &mut self.place {
                worker.rings = None;
            }
            return Err(StartError::Executor(error));
        }
        (self.started, self.driven) = (true, true);
        Ok(())
    }

    fn stop(&mut self) -> Vec<ActiveQueue> {
        if !std::mem::take(&mut self.started) {
            return Vec::new();
        }
        let Some(mut worker) = self.park() else {
            return Vec::new();
        };
        let rings = worker.rings.take();
        self.place = Place::Parked(worker);
        rings.map(|rings| vec![rings.rx, rings.tx, rings.event]).unwrap_or_default()
    }

    fn reset(&mut self) {
        self.driven = false;
        self.shared.set_phase(Phase::Undriven);
        let Place::Parked(worker) = &mut self.place else {
            return;
        };
        worker.reset();
        if let Err(error) = self.run() {
            tracing::error!(%error, "vsock device does not answer programs until it is started");
        }
    }
}

impl Drop for Vsock {
    fn drop(&mut self) {
        self.shared.set_phase(Phase::Gone);
        if let Some(mut worker) = self.park() {
            worker.reset();
        }
    }
}

// --- state -------------------------------------------------------------------------------------

/// The saved form of the device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VsockState {
    /// The guest's address when it was saved. A restored device has that of its own configuration,
    /// which the driver reads anew when it hears that its connections are gone.
    pub guest_cid: u64,
    /// A driver was there.
    pub driven: bool,
    /// The host port to try first for the next connection.
    pub next_host_port: u32,
    /// The connections that the guest may believe to exist.
    pub connections: Vec<SavedConnection>,
}

/// What is left of a connection in a snapshot: its name, so that it can be ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SavedConnection {
    /// Port on the host's side.
    pub host_port: u32,
    /// Port on the guest's side.
    pub guest_port: u32,
}

impl Schema for VsockState {
    const KIND: &'static str = "virtio-vsock";
    const VERSION: u32 = 1;
}

impl VsockState {
    fn check(&self) -> Result<(), RestoreError> {
        let invalid =
            |field, value: String| Err(RestoreError::Invalid { kind: Self::KIND, field, value });
        if !is_guest_cid(self.guest_cid) {
            return invalid("guest_cid", self.guest_cid.to_string());
        }
        if !(FIRST_HOST_PORT..=LAST_HOST_PORT).contains(&self.next_host_port) {
            return invalid("next_host_port", self.next_host_port.to_string());
        }
        if self.connections.len() > MAX_CONNECTIONS {
            return invalid("connections", self.connections.len().to_string());
        }
        let mut sorted = self.connections.clone();
        sorted.sort_unstable();
        sorted.dedup();
        if sorted.len() != self.connections.len() {
            return invalid("connections", "with duplicates".to_owned());
        }
        Ok(())
    }
}

impl Snapshot for Vsock {
    type State = VsockState;

    fn save(&self) -> Result<VsockState, SaveError> {
        if self.started {
            return Err(SaveError::Running("virtio-vsock"));
        }
        let looked =
            self.look(|worker| (worker.muxer.next_host_port(), worker.muxer.known_to_guest()));
        let (next_host_port, known) = looked.unwrap_or((FIRST_HOST_PORT, Vec::new()));
        let mut connections: Vec<_> = known
            .into_iter()
            .map(|key| SavedConnection { host_port: key.host, guest_port: key.guest })
            .collect();
        connections.sort_unstable();
        let guest_cid = self.config.guest_cid;
        Ok(VsockState { guest_cid, driven: self.driven, next_host_port, connections })
    }

    fn restore(&mut self, state: VsockState) -> Result<(), RestoreError> {
        state.check()?;
        if self.started {
            return Err(RestoreError::Running("virtio-vsock"));
        }
        let Some(mut worker) = self.park() else {
            return Err(RestoreError::Running("virtio-vsock without event loop"));
        };
        let lost: Vec<_> = state
            .connections
            .iter()
            .map(|saved| Key { host: saved.host_port, guest: saved.guest_port })
            .collect();
        worker.reset();
        worker.muxer.restore(state.next_host_port, &lost);
        worker.gate = if state.driven { Gate::Announce } else { Gate::Open };
        self.place = Place::Parked(worker);
        self.driven = state.driven;
        if state.driven {
            // As after a pause: who comes before the guest goes on waits for it.
            self.shared.set_phase(Phase::Driven);
        } else if let Err(error) = self.run() {
            tracing::error!(%error, "vsock device does not answer programs until it is started");
        }
        Ok(())
    }
}
