//! The requests that a running VM takes over its control socket.
//!
//! One connection, any number of requests: a line of JSON each, answered by a line of JSON.
//!
//! ```text
//! → {"request":"info"}
//! ← {"reply":"info","state":"running","ready":true,…}
//! → {"request":"stop","how":"power_off","timeout_ms":5000}
//! ← {"reply":"done"}
//! ← {"reply":"error","kind":"illegal","message":"pause is not legal while the VM is paused"}
//! ```

use std::collections::BTreeMap;
use std::path::PathBuf;

use devices::virtio::net::NetOption;
use guest_protocol::Hello;
use serde::{Deserialize, Serialize};

use crate::cards::CardInfo;
use crate::config::{DiskConfig, VmConfig};
use crate::disks::DiskInfo;
use crate::metrics::Family;
use crate::shares::ShareInfo;
use crate::snapshot::folder::Durability;
use crate::snapshot::manifest::SavedDisk;
use crate::snapshot::prefetch::PrefetchInfo;
use crate::snapshot::record::HotReport;
use crate::state::VmState;

/// Longest request line in bytes.
pub const MAX_REQUEST: usize = 64 * 1024;

/// What can be asked of a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// What the VM is and how it is. Always legal. Answer: [`Reply::Info`].
    Info {},
    /// What the VM and its devices have counted. Always legal. Answer: [`Reply::Metrics`] or
    /// [`Reply::MetricsText`].
    Metrics {
        /// In which form.
        #[serde(default)]
        format: MetricsFormat,
    },
    /// What the guest has of its shares, and what a restore has come to. Always legal. Answer:
    /// [`Reply::Shares`].
    Shares {},
    /// Changes which directories may be shared, for all shares at once: one that is in none of them loses
    /// its server, and the guest gets EACCES, until it is allowed again, and goes on. Always legal.
    /// Answer: [`Reply::Shares`].
    AllowShares {
        /// Absolute paths that exist. `None`: all may.
        directories: Option<Vec<PathBuf>>,
    },
    /// Takes all vCPUs out of the guest and stops the devices. Legal while running. Answer:
    /// [`Reply::Done`] when nothing moves any more.
    Pause {},
    /// Goes on after a pause. Legal while paused. Answer: [`Reply::Done`].
    Resume {},
    /// Writes the VM into a folder, from which `cube-vmm restore` makes VMs. Legal while running or
    /// paused. Answer: [`Reply::Saved`] when the folder is complete. If it fails, nothing is left of
    /// it, and the VM goes on if it ran.
    Snapshot(SnapshotRequest),
    /// Writes which pages of memory have been touched since the VM was restored, for copies to have them
    /// sooner. Legal while running or paused, of a VM that was restored. Answer: [`Reply::HotPages`]
    /// when the file is on the disk.
    RecordHotPages {
        /// The file, an absolute path. Not given: `hot-pages` in the folder of the snapshot.
        #[serde(default)]
        file: Option<PathBuf>,
    },
    /// Asks the guest for memory: sets the size that its balloon shall grow or shrink to. Legal
    /// while running, on a VM with a balloon. Answer: [`Reply::Done`] when the guest has been
    /// asked; [`Info::balloon`] tells how far it is.
    SetBalloon {
        /// Bytes that the host shall get.
        bytes: u64,
    },
    /// Gives the machine another generation id, for guests that were copied: a Linux guest draws
    /// fresh randomness then. Legal while running or paused. Answer: [`Reply::Done`] when the guest
    /// has been told.
    NewGeneration {},
    /// Plugs a disk. Legal while running, on a VM with PCI. Answer: [`Reply::Done`] when it is in
    /// its slot; the guest finds it a moment later.
    AddDisk {
        /// The disk; its id must be given and not be taken.
        disk: DiskConfig,
    },
    /// Plugs a network card. Legal while running, on a VM with PCI. Answer: [`Reply::Done`] when it
    /// is in its slot; the guest finds it a moment later.
    AddNet {
        /// The card, on a TAP by name; its id must be given and not be taken.
        net: NetOption,
    },
    /// Asks the guest to let go of a disk or a network card. Legal while running, on a VM with PCI. Answer:
    /// [`Reply::Done`] when the guest has been asked; [`Info::devices`] tells when it is gone.
    RemoveDevice {
        /// The device's name.
        id: String,
    },
    /// Ends the VM. Always legal. Answer: [`Reply::Done`] when the end has begun; the process
    /// exits right after it.
    Stop {
        /// By which means.
        #[serde(default)]
        how: StopHow,
        /// How long the guest may take before it is ended by force, in milliseconds.
        #[serde(default = "default_stop_timeout")]
        timeout_ms: u64,
    },
}

/// How a snapshot is taken. Paths are absolute, unless who asks stands where the VM does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SnapshotRequest {
    /// The folder; must not exist.
    pub dir: PathBuf,
    /// Leaves the VM paused.
    #[serde(default)]
    pub keep_paused: bool,
    /// What it survives when the answer comes.
    #[serde(default)]
    pub durability: Durability,
    /// Writes only the pages of memory that differ from this snapshot of the same VM.
    #[serde(default)]
    pub diff_of: Option<PathBuf>,
    /// Tracks which pages the guest writes to from now on, so that the next difference need not
    /// look for them. A difference always does.
    #[serde(default)]
    pub track: bool,
    /// Where the copies of disks go, by the name of the disk: a file that does not exist, or
    /// `none`. Not given: into the folder, for each disk that can be written.
    #[serde(default)]
    pub disk_clones: BTreeMap<String, PathBuf>,
}

impl SnapshotRequest {
    /// A whole snapshot in `dir`, with nothing special.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self {
            dir: dir.into(),
            keep_paused: false,
            durability: Durability::default(),
            diff_of: None,
            track: false,
            disk_clones: BTreeMap::new(),
        }
    }
}

/// What a snapshot has cost.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotReport {
    /// The id of the snapshot.
    pub id: String,
    /// How long the guest stood still for it, in microseconds. Nothing if it was paused before, or
    /// still is.
    pub paused_us: Option<u64>,
    /// How long all of it took, in microseconds.
    pub total_us: u64,
    /// How it was known which pages of memory to write.
    pub memory: MemoryMethod,
    /// Bytes of memory that were written.
    pub memory_bytes: u64,
    /// Bytes of memory that were read while the guest stood still. The others were written before,
    /// and did not change since.
    pub still_bytes: u64,
    /// The copies of disks.
    pub disks: Vec<SavedDisk>,
}

/// How it was known which pages of memory to write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryMethod {
    /// All that are not zeros.
    Whole,
    /// Those that KVM and the VMM have logged.
    Log,
    /// Those that the guest has of its own instead of the page of the snapshot it was made of.
    Mapping,
    /// Those that differ from the other snapshot, which was read. The slowest.
    Compared,
}

/// Milliseconds that [`Request::Stop`] gives the guest by default.
pub fn default_stop_timeout() -> u64 {
    5000
}

/// How a VM is ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StopHow {
    /// Asks the agent to sync the file systems and power off.
    #[default]
    PowerOff,
    /// Presses the ACPI power button; what follows is up to the guest.
    PowerButton,
    /// At once: the guest does not notice.
    Kill,
}

/// In which form counts are told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MetricsFormat {
    /// JSON, in [`Reply::Metrics`].
    #[default]
    Json,
    /// The text format of Prometheus, as one string in [`Reply::MetricsText`].
    Prometheus,
}

/// The answer to a [`Request`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case")]
pub enum Reply {
    /// It is done.
    Done,
    /// To [`Request::Info {}`].
    Info(Box<Info>),
    /// To [`Request::Shares`] and [`Request::AllowShares`].
    Shares {
        /// One for each `--fs`.
        shares: Vec<ShareInfo>,
    },
    /// To [`Request::Metrics`].
    Metrics {
        /// By name.
        families: Vec<Family>,
    },
    /// To [`Request::Metrics`] in the text format of Prometheus.
    MetricsText {
        /// Lines, each with its end.
        text: String,
    },
    /// To [`Request::Snapshot`].
    Saved(Box<SnapshotReport>),
    /// To [`Request::RecordHotPages`].
    HotPages(HotReport),
    /// Refused, or failed.
    Error {
        /// For programs.
        kind: ErrorKind,
        /// For people.
        message: String,
    },
}

/// Why a request was not carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorKind {
    /// Not a request: malformed, unknown, or too long.
    Invalid,
    /// Not legal in the VM's state. Nothing has changed.
    Illegal,
    /// Tried, and failed.
    Failed,
}

/// What a VM tells of itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Info {
    /// Where it is in its life.
    pub state: VmState,
    /// The agent has said hello.
    pub ready: bool,
    /// The agent's hello.
    pub hello: Option<Hello>,
    /// Process id of the VMM.
    pub pid: u32,
    /// Version of the VMM.
    pub version: String,
    /// Unix socket for vsock: `CONNECT <port>` reaches the guest.
    pub vsock: Option<PathBuf>,
    /// Its balloon, if it has one.
    pub balloon: Option<BalloonInfo>,
    /// The names of its virtio devices.
    pub devices: Vec<String>,
    /// Its disks, and which engine each has.
    pub disks: Vec<DiskInfo>,
    /// Its network cards, and who moves the frames of each.
    #[serde(default)]
    pub net: Vec<CardInfo>,
    /// How far the prefetch of hot pages is, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefetch: Option<PrefetchInfo>,
    /// What the VM was made from, with what has been plugged since.
    pub config: VmConfig,
}

/// How far a balloon is, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BalloonInfo {
    /// What the host has asked for.
    pub target_bytes: u64,
    /// What the guest has given.
    pub actual_bytes: u64,
}
