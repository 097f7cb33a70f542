//! The network card (virtio 1.3, section 5.1): Ethernet between the guest and a TAP of the host.
//!
//! ```text
//!            ┌ rx queue ◄─┐
//!  pair 0 ── ┤            ├── Pair (a handler) ◄──► Tap queue 0 ┐
//!            └ tx queue ──┘                                     ├── interface of the host
//!  pair n ──   the same ────── Pair ◄─────────────► Tap queue n ┘
//!  control queue ───────────── Control (a handler) ──► Shared ◄── NetHandle
//! ```
//!
//! Frames go straight between guest memory and the kernel, with the header in between checked in
//! both directions. What guest, host and operator can change while the card works is in `Shared`.
//!
//! That is the way of a card on a TAP. The pairs may also be the kernel's (`kernel`, vhost-net) or those
//! of another process ([`super::vhost`], vhost-user); the rest stays as it is.
//!
//! In the folder: `config` and `tap` for the host's side, `header` and `control` for the guest's
//! words, `buffers`, `receive` and `transmit` for what moves, `pair` for when it moves.

mod buffers;
pub mod config;
mod control;
pub mod handle;
pub mod header;
mod kernel;
mod metrics;
mod pair;
mod path;
mod receive;
mod state;
pub mod tap;
#[cfg(test)]
mod tests;
mod transmit;

use std::sync::Arc;

pub use self::config::{
    MAX_QUEUE_PAIRS, MIN_MTU, MacAddress, MacError, NetConfig, NetOption, NetOptionError, NetSource,
};
use self::control::Control;
use self::handle::Shared;
pub use self::handle::{NetCounters, NetHandle};
use self::kernel::Kernel;
pub use self::kernel::KernelError;
pub use self::path::DataPath;
use self::path::{Mover, Path};
pub use self::state::NetState;
pub use self::tap::{Offloads, Tap, TapError};
use super::queue::ActiveQueue;
use super::vhost::user::{Backend, Needs, VhostUserConfig, VhostUserError};
use super::{Activation, DeviceType, Identity, StartError, VirtioDevice};
use crate::executor::{ExecutorHandle, Running};
use crate::metrics::Meter;

// --- configuration -----------------------------------------------------------------------------

/// Feature bits (virtio 1.3, section 5.1.3).
pub mod feature {
    /// The guest sends frames whose checksum is not finished.
    pub const CSUM: u64 = 1 << 0;
    /// The guest takes such frames.
    pub const GUEST_CSUM: u64 = 1 << 1;
    /// The guest may change what it takes.
    pub const CTRL_GUEST_OFFLOADS: u64 = 1 << 2;
    /// `mtu` is valid.
    pub const MTU: u64 = 1 << 3;
    /// `mac` is valid.
    pub const MAC: u64 = 1 << 5;
    /// The guest takes large TCP frames over IPv4.
    pub const GUEST_TSO4: u64 = 1 << 7;
    /// And over IPv6.
    pub const GUEST_TSO6: u64 = 1 << 8;
    /// Both with congestion notification.
    pub const GUEST_ECN: u64 = 1 << 9;
    /// The guest takes large UDP frames.
    pub const GUEST_UFO: u64 = 1 << 10;
    /// The guest sends large TCP frames over IPv4.
    pub const HOST_TSO4: u64 = 1 << 11;
    /// And over IPv6.
    pub const HOST_TSO6: u64 = 1 << 12;
    /// Both with congestion notification.
    pub const HOST_ECN: u64 = 1 << 13;
    /// The guest sends large UDP frames.
    pub const HOST_UFO: u64 = 1 << 14;
    /// A frame may be spread over several receive buffers.
    pub const MRG_RXBUF: u64 = 1 << 15;
    /// `status` is valid.
    pub const STATUS: u64 = 1 << 16;
    /// There is a control queue.
    pub const CTRL_VQ: u64 = 1 << 17;
    /// The guest can be asked to announce itself.
    pub const GUEST_ANNOUNCE: u64 = 1 << 21;
    /// There may be several queue pairs.
    pub const MQ: u64 = 1 << 22;
    /// The guest may change its address.
    pub const CTRL_MAC_ADDR: u64 = 1 << 23;

    /// All that a guest can take.
    pub const GUEST_OFFLOADS: u64 = GUEST_CSUM | GUEST_TSO4 | GUEST_TSO6 | GUEST_ECN | GUEST_UFO;
    /// The same, and all that a host can take.
    pub const OFFLOADS: u64 = GUEST_OFFLOADS | CSUM | HOST_TSO4 | HOST_TSO6 | HOST_ECN | HOST_UFO;
}

/// Two queues per pair and the control queue, all of one size: which of them is the control queue
/// depends on what is negotiated.
const QUEUE_SIZES: &[u16] = &[256; 2 * MAX_QUEUE_PAIRS as usize + 1];

/// Bytes of the configuration space, up to `mtu`.
const CONFIG_LEN: usize = 12;

/// Why a card cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum NetError {
    /// No TAP, or too many.
    #[error("network card {id} has {queues} queues of an interface; give it 1 to 8")]
    Queues {
        /// The card.
        id: String,
        /// What it was given.
        queues: usize,
    },
    /// An MTU that the specification does not allow.
    #[error("network card {id} has an MTU of {mtu} bytes; use 68 or more")]
    Mtu {
        /// The card.
        id: String,
        /// The MTU.
        mtu: u16,
    },
    /// The process is out of descriptors.
    #[error("network card {id} has no event: {source}; raise the limit of open files")]
    Event {
        /// The card.
        id: String,
        /// The reason.
        source: std::io::Error,
    },
    /// The kernel cannot move its frames.
    #[error("network card {id}: {source}")]
    Kernel {
        /// The card.
        id: String,
        /// The reason.
        source: KernelError,
    },
    /// The backend cannot.
    #[error("network card {id} cannot use its vhost-user backend: {source}")]
    Backend {
        /// The card.
        id: String,
        /// The reason.
        source: VhostUserError,
    },
}

// --- device ------------------------------------------------------------------------------------

/// The device as the transport holds it.
pub struct Net {
    executors: Vec<ExecutorHandle>,
    path: Path,
    pairs: u16,
    shared: Arc<Shared>,
    mac: MacAddress,
    mtu: Option<u16>,
    /// What the guest has chosen of the offloads it negotiated; `None`: all.
    chosen_offloads: Option<u64>,
    /// The status that the guest was last told.
    told: u16,
    workers: Option<Workers>,
}

/// Where the queues are while the device is live.
struct Workers {
    pairs: Vec<Mover>,
    control: Option<Running<Control>>,
    /// Queues that have no use with these features.
    idle: Vec<ActiveQueue>,
}

impl Net {
    /// A card with one queue pair per queue in `taps`, all of one interface, whose handlers run on
    /// `executor`.
    pub fn new(
        executor: ExecutorHandle,
        taps: Vec<Tap>,
        config: NetConfig,
    ) -> Result<Self, NetError> {
        Self::spread(vec![executor], taps, config)
    }

    /// The same with the pairs spread over several executors.
    pub fn spread(
        executors: Vec<ExecutorHandle>,
        taps: Vec<Tap>,
        config: NetConfig,
    ) -> Result<Self, NetError> {
        let pairs = taps.len();
        Self::on(Path::Own, executors, (taps, pairs), config)
    }

    /// The same with the kernel in our place, between guest memory and the TAP. It is not limited in
    /// what it moves: rate limits of `config` are without effect.
    pub fn with_kernel(
        executor: ExecutorHandle,
        taps: Vec<Tap>,
        config: NetConfig,
    ) -> Result<Self, NetError> {
        let kernels: Result<Vec<_>, _> =
            taps.iter().map(|_| Kernel::open().map(Arc::new)).collect();
        let refused = |source| NetError::Kernel { id: config.id.as_str().to_owned(), source };
        let (kernels, pairs) = (kernels.map_err(refused)?, taps.len());
        Self::on(Path::Kernel(kernels), vec![executor], (taps, pairs), config)
    }

    /// A card without a TAP, with a backend at a socket in our place. Waits for its answers.
    pub fn with_backend(
        executor: ExecutorHandle,
        options: VhostUserConfig,
        config: NetConfig,
    ) -> Result<Self, NetError> {
        let (id, pairs) = (config.id.as_str().to_owned(), options.queues);
        let needs =
            Needs { features: 0, config_len: 0, queues_at: None, queues: pairs, drains: false };
        let backend = Backend::connect("network card", options, needs, 2 * pairs)
            .map_err(|source| NetError::Backend { id, source })?;
        let (path, pairs) = (Path::Backend(Box::new(backend)), usize::from(pairs));
        let mut card = Self::on(path, vec![executor], (Vec::new(), pairs), config)?;
        card.follow_backend();
        Ok(card)
    }

    /// Links what can change with the backend.
    fn follow_backend(&mut self) {
        let (Path::Backend(backend), Some(shared)) =
            (&mut self.path, Arc::get_mut(&mut self.shared))
        else {
            return;
        };
        shared.set_switch(backend.switch());
        let shared = Arc::downgrade(&self.shared);
        backend.on_loss(Arc::new(move || {
            if let Some(shared) = shared.upgrade() {
                shared.backend_is_gone();
            }
        }));
    }

    fn on(
        path: Path,
        executors: Vec<ExecutorHandle>,
        (taps, pairs): (Vec<Tap>, usize),
        config: NetConfig,
    ) -> Result<Self, NetError> {
        let id = config.id.as_str().to_owned();
        if executors.is_empty() || !(1..=usize::from(MAX_QUEUE_PAIRS)).contains(&pairs) {
            return Err(NetError::Queues { id, queues: pairs });
        }
        // At most 8, as was just checked.
        let pairs = u16::try_from(pairs).unwrap_or(MAX_QUEUE_PAIRS);
        if let Some(mtu) = config.mtu.filter(|&mtu| mtu < MIN_MTU) {
            return Err(NetError::Mtu { id, mtu });
        }
        let interface = taps.first().map_or("", Tap::name);
        let mac = config.mac.unwrap_or_else(|| MacAddress::derived(&[&id, interface]));
        let shared = Shared::new(taps, mac, config.rx, config.tx)
            .map_err(|source| NetError::Event { id, source })?;
        let told = shared.status();
        Ok(Self {
            executors,
            path,
            pairs,
            shared: Arc::new(shared),
            mac,
            mtu: config.mtu,
            chosen_offloads: None,
            told,
            workers: None,
        })
    }

    /// The way to this card for the rest of the process.
    pub fn handle(&self) -> NetHandle {
        NetHandle::new(self.shared.clone())
    }

    /// By what way its frames go.
    pub fn data_path(&self) -> DataPath {
        self.path.name()
    }

    /// Queue pairs that the device has.
    fn max_pairs(&self) -> u16 {
        self.pairs
    }

    fn features(&self) -> u64 {
        let always = feature::MAC
            | feature::STATUS
            | feature::CTRL_VQ
            | feature::CTRL_MAC_ADDR
            | feature::GUEST_ANNOUNCE;
        let mtu = if self.mtu.is_some() { feature::MTU } else { 0 };
        let pairs = if self.max_pairs() > 1 { feature::MQ } else { 0 };
        let merges = if self.path.merges() { feature::MRG_RXBUF } else { 0 };
        always | mtu | pairs | merges | self.offload_features()
    }

    /// The features that all of the interface's queues can do, or the backend.
    fn offload_features(&self) -> u64 {
        if self.shared.taps.is_empty() {
            return self.path.backend_offloads();
        }
        let can = |offload| self.shared.taps.iter().all(|tap| tap.offloads().has(offload));
        let both = [
            (Offloads::CSUM, feature::CSUM | feature::GUEST_CSUM | feature::CTRL_GUEST_OFFLOADS),
            (Offloads::TSO4, feature::HOST_TSO4 | feature::GUEST_TSO4),
            (Offloads::TSO6, feature::HOST_TSO6 | feature::GUEST_TSO6),
            (Offloads::ECN, feature::HOST_ECN | feature::GUEST_ECN),
            (Offloads::UFO, feature::HOST_UFO | feature::GUEST_UFO),
        ];
        both.into_iter().filter(|&(offload, _)| can(offload)).fold(0, |all, (_, bits)| all | bits)
    }

    fn config_space(&self) -> [u8; CONFIG_LEN] {
        let [a, b, c, d, e, f] = self.shared.mac();
        let [s0, s1] = self.shared.status().to_le_bytes();
        let [p0, p1] = self.max_pairs().to_le_bytes();
        let [m0, m1] = self.mtu.unwrap_or(0).to_le_bytes();
        [a, b, c, d, e, f, s0, s1, p0, p1, m0, m1]
    }

    /// Puts in force what was negotiated and what the guest has chosen since.
    fn configure(&self, features: u64) -> Result<(), StartError> {
        let failed = |what| move |source| StartError::Host { what, source };
        self.shared.set_features(features);
        let negotiated = features & feature::GUEST_OFFLOADS;
        let offloads = self.chosen_offloads.map_or(negotiated, |chosen| chosen & negotiated);
        self.shared.set_offloads(offloads).map_err(failed("setting the interface's offloads"))?;
        let pairs = if self.shared.has(feature::MQ) { self.shared.pairs() } else { 1 };
        self.shared.set_pairs(pairs).map_err(failed("choosing the interface's queues"))
    }

    /// Runs a handler for each pair and for the control queue.
    fn run(&mut self, mut activation: Activation) -> Result<Workers, StartError> {
        let multi = activation.has(feature::MQ | feature::CTRL_VQ);
        let possible = if multi { self.max_pairs() } else { 1 };
        let mut workers = Workers { pairs: Vec::new(), control: None, idle: Vec::new() };
        let is_ours = self.path.name() != DataPath::Backend;
        let (mut usable, mut handed) = (0, Vec::new());
        for index in 0..possible {
            let ready = |number| activation.queues.iter().any(|queue| queue.index().0 == number);
            let (rx, tx) = (2 * index, 2 * index + 1);
            // The first pair is needed; of the others the driver has as many as it wants.
            if index > 0 && !(ready(rx) && ready(tx)) {
                break;
            }
            let queues = [activation.take_queue(rx)?, activation.take_queue(tx)?];
            match is_ours {
                true => workers.pairs.push(self.run_pair(index, queues, &activation)?),
                false => handed.extend(queues),
            }
            usable += 1;
        }
        self.run_backend(handed, &activation)?;
        if activation.has(feature::CTRL_VQ)
            && let Ok(queue) = activation.take_queue(2 * possible)
        {
            let notifier = activation.notifier.clone();
            let control = Control::new(queue, usable, notifier, self.shared.clone());
            let executor = self.executors.first().ok_or_else(no_executor)?;
            let running = executor.run(control).map_err(|no| StartError::Executor(no.error))?;
            workers.control = Some(running);
        }
        workers.idle = activation.queues;
        Ok(workers)
    }
}

fn no_executor() -> StartError {
    StartError::Executor(crate::executor::ExecutorError::Gone)
}

impl VirtioDevice for Net {
    fn identity(&self) -> Identity {
        let count = 2 * usize::from(self.max_pairs()) + 1;
        Identity {
            device_type: DeviceType::Net,
            features: self.features(),
            queue_sizes: QUEUE_SIZES.get(..count).unwrap_or(QUEUE_SIZES),
            config_len: CONFIG_LEN as u64,
        }
    }

    fn ring_features(&self) -> u64 {
        self.path.ring_features()
    }

    fn writes_are_logged(&self) -> bool {
        self.path.name() == DataPath::Tap
    }

    fn meter(&self) -> Option<Meter> {
        Some(Arc::new(self.counts()))
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let space = self.config_space();
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        for (to, from) in data.iter_mut().zip(space.iter().skip(offset)) {
            *to = *from;
        }
    }

    fn start(&mut self, activation: Activation) -> Result<(), StartError> {
        self.configure(activation.features)?;
        let notifier = activation.notifier.clone();
        self.workers = Some(self.run(activation)?);
        self.shared.set_notifier(Some(notifier));
        // While it was stopped, or before it was saved, it may have been another one.
        if self.shared.status() != self.told {
            self.shared.config_changed();
        }
        Ok(())
    }

    fn stop(&mut self) -> Vec<ActiveQueue> {
        let Some(workers) = self.workers.take() else {
            return Vec::new();
        };
        self.shared.set_notifier(None);
        self.told = self.shared.status();
        let mut queues = workers.idle;
        if let Some(control) = workers.control.and_then(Running::stop) {
            self.chosen_offloads = control.chosen_offloads().or(self.chosen_offloads);
            queues.push(control.into_queue());
        }
        for pair in workers.pairs {
            queues.extend(pair.stop().into_iter().flatten());
        }
        if let Path::Backend(backend) = &mut self.path {
            queues.extend(backend.stop());
        }
        queues.sort_by_key(ActiveQueue::index);
        queues
    }

    fn reset(&mut self) {
        self.chosen_offloads = None;
        self.shared.reset(self.mac);
        self.told = self.shared.status();
    }
}
