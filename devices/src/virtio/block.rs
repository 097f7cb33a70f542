//! The block device (virtio 1.3, section 5.2): sectors of a [`Disk`].
//!
//! Everything that the guest says is checked here and in [`request`], before the disk hears of it;
//! that a read-only disk is not written is enforced here, whatever was negotiated. One worker
//! serves all queues and owns the disk while the device is live.
//!
//! ```text
//!  queue 0 ─┐            ┌──────────────── Worker ────────────────┐
//!  queue 1 ─┼─ chains ─► │ throttle ─► request ─► DiskOp ─► Disk  │ ─► job: one step after another
//!  queue n ─┘ ◄ answers  │             counts ◄── Completion ◄─  │ ◄─ raw or uring: carries it out
//!                        └─────────────────────────────────────────┘
//! ```

pub mod counts;
pub mod disk;
pub mod engine;
pub mod file;
mod job;
pub mod raw;
pub mod request;
pub mod uring;
mod worker;

use std::io;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

pub use self::counts::BlockCounts;
pub use self::disk::{Buffers, Completion, Disk, DiskOp, Extent, Geometry, SECTOR_SIZE, Tag};
pub use self::engine::{Engine, EngineKind, OpenDisk, UnknownEngine};
pub use self::file::{DiskError, DiskFile};
pub use self::raw::RawFile;
pub use self::request::SERIAL_LEN;
use self::request::{Limits, MAX_RANGE_SECTORS, MAX_RANGES};
pub use self::uring::UringFile;
use self::worker::{InFlight, Worker};
use super::queue::ActiveQueue;
use super::throttle::Throttle;
use super::{Activation, DeviceType, Identity, StartError, VirtioDevice};
use crate::executor::{ExecutorHandle, Running};
use crate::metrics::Meter;
use crate::rate_limiter::RateLimit;
use crate::snapshot::{RestoreError, SaveError, Schema, Snapshot};

// --- configuration -----------------------------------------------------------------------------

/// Feature bits (virtio 1.3, section 5.2.3).
pub mod feature {
    /// `size_max` is valid. Not ours; a backend may have it.
    pub const SIZE_MAX: u64 = 1 << 1;
    /// `seg_max` is valid.
    pub const SEG_MAX: u64 = 1 << 2;
    /// `geometry` is valid. Not ours; a backend may have it.
    pub const GEOMETRY: u64 = 1 << 4;
    /// The disk is read-only.
    pub const RO: u64 = 1 << 5;
    /// `blk_size` is valid.
    pub const BLK_SIZE: u64 = 1 << 6;
    /// There is a cache, and a request to flush it.
    pub const FLUSH: u64 = 1 << 9;
    /// `topology` is valid.
    pub const TOPOLOGY: u64 = 1 << 10;
    /// `num_queues` is valid.
    pub const MQ: u64 = 1 << 12;
    /// Discard requests.
    pub const DISCARD: u64 = 1 << 13;
    /// Write-zeroes requests.
    pub const WRITE_ZEROES: u64 = 1 << 14;
}

/// Queues at most.
pub const MAX_QUEUES: u16 = 16;

const QUEUE_SIZES: &[u16] = &[256; MAX_QUEUES as usize];

/// Data segments of one request; two more descriptors are its header and its status byte.
const SEG_MAX: u32 = 254;

/// Bytes of the configuration space, up to the fields of write-zeroes.
const CONFIG_LEN: usize = 60;

/// What the builder says about a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockConfig {
    /// The guest may not change the disk.
    pub read_only: bool,
    /// What the guest sees in `/sys/block/vda/serial`. Cut at [`SERIAL_LEN`] bytes.
    pub serial: String,
    /// Request queues, 1 to [`MAX_QUEUES`].
    pub queues: u16,
    /// Limits of what the guest reads and writes, together.
    pub rate: RateLimit,
}

impl BlockConfig {
    /// A disk that can be written, with one queue and without limits.
    pub fn new(serial: impl Into<String>) -> Self {
        Self { read_only: false, serial: serial.into(), queues: 1, rate: RateLimit::default() }
    }
}

/// Why a disk cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum BlockError {
    /// No queue, or too many.
    #[error("disk {serial} has {queues} queues; give it 1 to {MAX_QUEUES}")]
    Queues {
        /// The disk.
        serial: String,
        /// What it was given.
        queues: u16,
    },
    /// The process is out of descriptors.
    #[error(
        "disk {serial} has no timer for its rate limit: {source}; raise the limit of open files"
    )]
    Timer {
        /// The disk.
        serial: String,
        /// The reason.
        source: io::Error,
    },
}

// --- device ------------------------------------------------------------------------------------

/// The device as the transport holds it.
pub struct Block {
    executor: ExecutorHandle,
    geometry: Geometry,
    serial: [u8; SERIAL_LEN],
    queues: u16,
    counts: Arc<BlockCounts>,
    /// Here while stopped, with the worker while live.
    host: Option<HostSide>,
    worker: Option<Running<Worker>>,
}

/// What outlives resets.
struct HostSide {
    disk: Box<dyn Disk>,
    throttle: Option<Throttle>,
}

impl Block {
    /// A device whose worker runs on `executor`, which no other disk should share: a disk may wait
    /// for its storage. Read-only if either the configuration or the disk says so.
    pub fn new(
        executor: ExecutorHandle,
        disk: Box<dyn Disk>,
        config: BlockConfig,
    ) -> Result<Self, BlockError> {
        let mut geometry = disk.geometry();
        geometry.read_only |= config.read_only;
        let mut serial = [0; SERIAL_LEN];
        for (to, from) in serial.iter_mut().zip(config.serial.bytes()) {
            *to = from;
        }
        let BlockConfig { serial: name, queues, rate, .. } = config;
        if !(1..=MAX_QUEUES).contains(&queues) {
            return Err(BlockError::Queues { serial: name, queues });
        }
        let throttle = (!rate.is_none()).then(|| Throttle::new(rate)).transpose();
        let throttle = throttle.map_err(|source| BlockError::Timer { serial: name, source })?;
        let host = Some(HostSide { disk, throttle });
        let counts = Arc::default();
        Ok(Self { executor, geometry, serial, queues, counts, host, worker: None })
    }

    fn limits(&self) -> Limits {
        Limits { sectors: self.geometry.sectors, read_only: self.geometry.read_only }
    }

    fn config_space(&self) -> [u8; CONFIG_LEN] {
        let Geometry { sectors, logical_block, physical_block, .. } = self.geometry;
        let ratio = physical_block.checked_div(logical_block).unwrap_or(1).max(1);
        let mut space = [0; CONFIG_LEN];
        let mut put = |offset: usize, bytes: &[u8]| {
            for (to, from) in space.iter_mut().skip(offset).zip(bytes) {
                *to = *from;
            }
        };
        put(0, &sectors.to_le_bytes());
        put(12, &SEG_MAX.to_le_bytes());
        put(20, &logical_block.to_le_bytes());
        // Topology: log2 of logical blocks per physical one, and the smallest good I/O.
        put(24, &[ratio.ilog2() as u8]);
        put(26, &u16::try_from(ratio).unwrap_or(1).to_le_bytes());
        put(34, &self.queues.to_le_bytes());
        put(36, &MAX_RANGE_SECTORS.to_le_bytes());
        put(40, &(MAX_RANGES as u32).to_le_bytes());
        put(44, &(physical_block / SECTOR_SIZE as u32).to_le_bytes());
        put(48, &MAX_RANGE_SECTORS.to_le_bytes());
        put(52, &(MAX_RANGES as u32).to_le_bytes());
        put(56, &[1]);
        space
    }
}

impl VirtioDevice for Block {
    fn identity(&self) -> Identity {
        let always = feature::SEG_MAX | feature::BLK_SIZE | feature::TOPOLOGY | feature::FLUSH;
        let rest = match self.geometry.read_only {
            true => feature::RO,
            false => feature::DISCARD | feature::WRITE_ZEROES,
        };
        let several = if self.queues > 1 { feature::MQ } else { 0 };
        Identity {
            device_type: DeviceType::Block,
            features: always | rest | several,
            queue_sizes: QUEUE_SIZES.get(..usize::from(self.queues)).unwrap_or(QUEUE_SIZES),
            config_len: CONFIG_LEN as u64,
        }
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let space = self.config_space();
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        for (to, from) in data.iter_mut().zip(space.iter().skip(offset)) {
            *to = *from;
        }
    }

    fn start(&mut self, mut activation: Activation) -> Result<(), StartError> {
        // The first queue is needed; of the others the driver has as many as it wants.
        let first = activation.take_queue(0)?;
        let mut queues = activation.queues;
        queues.push(first);
        queues.sort_by_key(ActiveQueue::index);
        let host = self.host.take().ok_or_else(|| StartError::Host {
            what: "taking the disk",
            source: io::ErrorKind::NotFound.into(),
        })?;
        let places = queues.iter().map(|queue| usize::from(queue.size())).sum();
        let worker = Worker {
            disk: host.disk,
            throttle: host.throttle,
            counts: self.counts.clone(),
            queues,
            memory: Arc::new(activation.memory.clone()),
            in_flight: InFlight::new(places),
            limits: self.limits(),
            serial: self.serial,
            // Without the flush request every completed write must be stable (section 5.2.6.2).
            durable: activation.features & feature::FLUSH == 0,
            notifier: activation.notifier,
        };
        match self.executor.run(worker) {
            Ok(running) => {
                self.worker = Some(running);
                Ok(())
            }
            Err(refused) => {
                self.host = refused.handler.map(|worker| worker.into_parts().0);
                Err(StartError::Executor(refused.error))
            }
        }
    }

    /// Waits for what is in flight, as long as the host's storage takes.
    fn stop(&mut self) -> Vec<ActiveQueue> {
        let Some(mut worker) = self.worker.take().and_then(Running::stop) else {
            return Vec::new();
        };
        worker.drain();
        let (host, queues) = worker.into_parts();
        self.host = Some(host);
        queues
    }

    fn reset(&mut self) {}

    fn meter(&self) -> Option<Meter> {
        Some(self.counts.clone())
    }
}

// --- state -------------------------------------------------------------------------------------

/// What the guest knows of the disk; a disk that differs cannot take its place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockState {
    sectors: u64,
    logical_block: u32,
    read_only: bool,
    serial: Vec<u8>,
    /// Records of version 1 are of disks with one queue, and do not say so.
    #[serde(default = "one")]
    queues: u16,
}

fn one() -> u16 {
    1
}

impl Schema for BlockState {
    const KIND: &'static str = "virtio-blk";
    const VERSION: u32 = 2;

    fn upgrade(version: u32, old: ciborium::Value) -> Result<Self, RestoreError> {
        match version {
            1 => old
                .deserialized()
                .map_err(|source| RestoreError::Decode { kind: Self::KIND, source }),
            _ => Err(RestoreError::NoUpgrade { kind: Self::KIND, found: version }),
        }
    }
}

impl Snapshot for Block {
    type State = BlockState;

    fn save(&self) -> Result<BlockState, SaveError> {
        if self.worker.is_some() {
            return Err(SaveError::Running("virtio-blk"));
        }
        Ok(BlockState {
            sectors: self.geometry.sectors,
            logical_block: self.geometry.logical_block,
            read_only: self.geometry.read_only,
            serial: self.serial.to_vec(),
            queues: self.queues,
        })
    }

    fn restore(&mut self, state: BlockState) -> Result<(), RestoreError> {
        let invalid = |field, value: String| {
            Err(RestoreError::Invalid { kind: BlockState::KIND, field, value })
        };
        if self.worker.is_some() {
            return Err(RestoreError::Running("virtio-blk"));
        }
        if state.sectors != self.geometry.sectors {
            return invalid(
                "sectors",
                format!("{}, disk has {}", state.sectors, self.geometry.sectors),
            );
        }
        if state.logical_block != self.geometry.logical_block {
            return invalid("logical_block", state.logical_block.to_string());
        }
        if state.read_only != self.geometry.read_only {
            return invalid("read_only", state.read_only.to_string());
        }
        if state.queues != self.queues {
            return invalid("queues", format!("{}, disk has {}", state.queues, self.queues));
        }
        if state.serial != self.serial {
            return invalid("serial", String::from_utf8_lossy(&state.serial).into_owned());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
