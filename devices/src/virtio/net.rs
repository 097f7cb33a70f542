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
//! In the folder: `config` and `tap` for the host's side, `header` and `control` for the guest's
//! words, `buffers`, `receive` and `transmit` for what moves, `pair` for when it moves.

mod buffers;
pub mod config;
mod control;
pub mod handle;
pub mod header;
mod metrics;
mod pair;
mod receive;
pub mod tap;
#[cfg(test)]
mod tests;
mod transmit;
mod vectors;

use std::sync::Arc;

use serde::{Deserialize, Serialize};

pub use self::config::{
    MAX_QUEUE_PAIRS, MIN_MTU, MacAddress, MacError, NetConfig, NetOption, NetOptionError, TapSource,
};
use self::control::Control;
use self::handle::Shared;
pub use self::handle::{NetCounters, NetHandle};
use self::pair::Pair;
pub use self::tap::{Offloads, Tap, TapError};
use super::queue::ActiveQueue;
use super::{Activation, DeviceType, Identity, StartError, VirtioDevice};
use crate::executor::{ExecutorHandle, Running};
use crate::metrics::Meter;
use crate::snapshot::{RestoreError, SaveError, Schema, Snapshot};

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
}

// --- device ------------------------------------------------------------------------------------

/// The device as the transport holds it.
pub struct Net {
    executors: Vec<ExecutorHandle>,
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
    pairs: Vec<Running<Pair>>,
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
        let id = config.id.as_str().to_owned();
        if executors.is_empty() || !(1..=usize::from(MAX_QUEUE_PAIRS)).contains(&taps.len()) {
            return Err(NetError::Queues { id, queues: taps.len() });
        }
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

    /// Queue pairs that the device has.
    fn max_pairs(&self) -> u16 {
        // At most 8, which was checked when it was made.
        u16::try_from(self.shared.taps.len()).unwrap_or(MAX_QUEUE_PAIRS)
    }

    fn features(&self) -> u64 {
        let always = feature::MAC
            | feature::MRG_RXBUF
            | feature::STATUS
            | feature::CTRL_VQ
            | feature::CTRL_MAC_ADDR
            | feature::GUEST_ANNOUNCE;
        let mtu = if self.mtu.is_some() { feature::MTU } else { 0 };
        let pairs = if self.max_pairs() > 1 { feature::MQ } else { 0 };
        always | mtu | pairs | self.offload_features()
    }

    /// The features that all of the interface's queues can do.
    fn offload_features(&self) -> u64 {
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
        for index in 0..possible {
            let ready = |number| activation.queues.iter().any(|queue| queue.index().0 == number);
            let (rx, tx) = (2 * index, 2 * index + 1);
            // The first pair is needed; of the others the driver has as many as it wants.
            if index > 0 && !(ready(rx) && ready(tx)) {
                break;
            }
            let (rx, tx) = (activation.take_queue(rx)?, activation.take_queue(tx)?);
            let pair = Pair::new(usize::from(index), rx, tx, &activation, self.shared.clone())?;
            let executor = self.executors.iter().cycle().nth(usize::from(index));
            let executor = executor.or(self.executors.first()).ok_or_else(no_executor)?;
            let running = executor.run(pair).map_err(|no| StartError::Executor(no.error))?;
            workers.pairs.push(running);
        }
        if activation.has(feature::CTRL_VQ)
            && let Ok(queue) = activation.take_queue(2 * possible)
        {
            let usable = workers.pairs.len() as u16;
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

    fn meter(&self) -> Option<Meter> {
        Some(Arc::new(self.handle()))
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
            queues.extend(pair.stop().map(Pair::into_queues).into_iter().flatten());
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

// --- state -------------------------------------------------------------------------------------

/// The saved form of the card.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetState {
    /// The address that the guest knows.
    mac: [u8; 6],
    /// The MTU that it was told.
    mtu: Option<u16>,
    /// Queue pairs that there are.
    max_pairs: u16,
    /// Queue pairs in use.
    pairs: u16,
    /// What it has chosen of its offloads.
    offloads: Option<u64>,
    /// The status that it was last told.
    status: u16,
    /// It has been asked to announce itself and has not done so.
    announce: bool,
}

impl Schema for NetState {
    const KIND: &'static str = "virtio-net";
    const VERSION: u32 = 1;
}

impl Net {
    fn check(&self, state: &NetState) -> Result<MacAddress, RestoreError> {
        let invalid = |field, value: String| {
            Err(RestoreError::Invalid { kind: NetState::KIND, field, value })
        };
        let Ok(mac) = MacAddress::new(state.mac) else {
            return invalid("mac", format!("{:02x?}", state.mac));
        };
        let pairs = self.max_pairs();
        if state.max_pairs != pairs {
            return invalid("max_pairs", format!("{}, the card has {pairs}", state.max_pairs));
        }
        if !(1..=pairs).contains(&state.pairs) {
            return invalid("pairs", state.pairs.to_string());
        }
        if state.mtu != self.mtu {
            return invalid("mtu", format!("{:?}, the card has {:?}", state.mtu, self.mtu));
        }
        if state.offloads.is_some_and(|offloads| offloads & !feature::GUEST_OFFLOADS != 0) {
            return invalid("offloads", format!("{:#x}", state.offloads.unwrap_or(0)));
        }
        if state.status & !(handle::status::LINK_UP | handle::status::ANNOUNCE) != 0 {
            return invalid("status", state.status.to_string());
        }
        Ok(mac)
    }
}

impl Snapshot for Net {
    type State = NetState;

    fn save(&self) -> Result<NetState, SaveError> {
        if self.workers.is_some() {
            return Err(SaveError::Running("virtio-net"));
        }
        Ok(NetState {
            mac: self.shared.mac(),
            mtu: self.mtu,
            max_pairs: self.max_pairs(),
            pairs: self.shared.pairs(),
            offloads: self.chosen_offloads,
            status: self.told,
            announce: self.shared.announce_wanted(),
        })
    }

    /// The link is as the operator of this process wants it, whatever it was; the guest is told
    /// when it goes on.
    fn restore(&mut self, state: NetState) -> Result<(), RestoreError> {
        let mac = self.check(&state)?;
        if self.workers.is_some() {
            return Err(RestoreError::Running("virtio-net"));
        }
        self.shared.restore(mac, state.pairs, state.announce);
        self.chosen_offloads = state.offloads;
        self.told = state.status;
        Ok(())
    }
}
