//! The file system device (virtio 1.3, section 5.11): a directory of the host, by its tag.
//!
//! ```text
//!   guest's queues ──► worker ──► shadow queue ──► cube-fsd (a jailed process per share)
//!   (hiprio, requests)   ◄──copies──  (8 MiB)   ◄──
//! ```
//!
//! The guest's queues, and so every message that is on its way, stay with the VMM; the file server
//! sees a small memory with copies of the messages and nothing of guest RAM. So RAM can be a private
//! mapping of a snapshot, a pause knows exactly what it waits for, and the end of the server costs the
//! guest an I/O error.

mod ids;
mod lent;
mod message;
mod permit;
mod restart;
mod server;
mod shadow;
mod state;
mod worker;

use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

pub use self::ids::{IdError, IdRange};
use self::permit::Permit;
use self::restart::Restart;
pub use self::server::PATIENCE;
use self::server::{Control, Server};
use self::shadow::ShadowQueue;
pub use self::state::FsState;
use self::worker::{Owner, Worker};
use super::queue::ActiveQueue;
use super::throttle::Throttle;
use super::{Activation, DeviceType, Identity, StartError, VirtioDevice};
use crate::executor::{ExecutorHandle, Running};
use crate::metrics::{Count, GUEST_FAULTS, Meter, Metered, Metric};
use crate::rate_limiter::RateLimit;

// --- configuration -----------------------------------------------------------------------------

/// One for what must not wait (forgets), one for requests. Linux splits what has more pages than the
/// queue has entries: 1024 are enough for a mebibyte.
const QUEUE_SIZES: &[u16] = &[256, 1024];

/// Longest tag, in bytes.
pub const MAX_TAG: usize = 36;

const CONFIG_LEN: usize = MAX_TAG + 4;

/// How long a guest may believe what it was told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Cache {
    /// Not at all: every access is asked for.
    None,
    /// A second; file content until the next opening.
    #[default]
    Auto,
    /// A day: nobody else changes the directory.
    Always,
}

/// What a restore does about files that are not as they were.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Policy {
    /// It fails.
    Strict,
    /// The directory must be the same; files that are gone from it are stale (ESTALE).
    #[default]
    Tolerant,
    /// Another directory takes its place: all that was known is stale, and is looked up anew.
    Remap,
    /// A copy of the directory takes its place: what has the same name and kind is the same.
    Copy,
}

/// A share.
#[derive(Clone, Debug)]
pub struct FsConfig {
    /// The file server, `cube-fsd`.
    pub program: PathBuf,
    /// By what name the guest mounts it: 1 to [`MAX_TAG`] bytes.
    pub tag: String,
    /// The directory.
    pub path: PathBuf,
    /// Nothing can be changed.
    pub read_only: bool,
    /// How long answers are valid.
    pub cache: Cache,
    /// The guest may keep what is written for a while.
    pub writeback: bool,
    /// Extended attributes.
    pub xattr: bool,
    /// POSIX access control lists.
    pub acl: bool,
    /// Users of the guest that are others on the host.
    pub uid_map: Option<IdRange>,
    /// Groups of the guest that are others on the host.
    pub gid_map: Option<IdRange>,
    /// How much may go through it: messages with the room for their answers, in bytes, and their number.
    pub rate: RateLimit,
    /// For a restore.
    pub policy: Policy,
    /// How long a pause waits for requests that are on their way.
    pub drain: Duration,
    /// Without a jail: for tests of what it would hide.
    pub unjailed: bool,
}

impl FsConfig {
    /// A directory that the guest can write, without anything special.
    pub fn new(program: PathBuf, tag: &str, path: PathBuf) -> Self {
        Self {
            program,
            tag: tag.to_owned(),
            path,
            read_only: false,
            cache: Cache::default(),
            writeback: false,
            xattr: false,
            acl: false,
            uid_map: None,
            gid_map: None,
            rate: RateLimit::default(),
            policy: Policy::default(),
            drain: Duration::from_secs(5),
            unjailed: false,
        }
    }
}

/// Why a share cannot be served, saved or restored.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "each says what it is")]
pub enum FsError {
    #[error("share tag {0:?} is not usable; take 1 to {MAX_TAG} bytes without NUL")]
    Tag(String),
    #[error("share {tag:?}: directory {path:?} cannot be served: {source}")]
    Directory { tag: String, path: PathBuf, source: io::Error },
    #[error("the file server {0:?} does not exist; build cube-fsd, or name it with --fsd FILE")]
    NoProgram(PathBuf),
    #[error("the file server {program:?} cannot be started: {source}")]
    Spawn { program: PathBuf, source: io::Error },
    #[error("share {tag:?}: {reason}")]
    Refused { tag: String, reason: String },
    #[error("share {tag:?}: its file server failed at {what}: {source}")]
    Server { tag: String, what: &'static str, source: vhost::Error },
    #[error("share {tag:?}: its file server has ended at {what} ({end})")]
    Ended { tag: String, what: &'static str, end: String },
    #[error("share {tag:?}: its file server did not get done with {what} within {PATIENCE:?}")]
    Silent { tag: String, what: &'static str },
    #[error("share {tag:?}: its file server has ended")]
    Gone { tag: String },
    #[error("share {tag:?}: its directory is not allowed; allow it again with cube-vmm fs allow")]
    Forbidden { tag: String },
    #[error("share {tag:?}: {what}")]
    Busy { tag: String, what: String },
    #[error("{what} cannot be made: {source}")]
    Host { what: &'static str, source: io::Error },
    #[error("the shadow queue is not accessible")]
    Shadow,
}

// --- device ------------------------------------------------------------------------------------

#[derive(Default)]
struct Counters {
    requests: Count,
    direct: Count,
    read_bytes: Count,
    written_bytes: Count,
    failures: Count,
    losses: Count,
    restarts: Count,
    throttled: Count,
    guest_faults: Count,
}

impl Metered for Counters {
    fn metrics(&self) -> Vec<Metric> {
        let counter = |name, help, count: &Count| Metric::counter(name, help, count.get());
        vec![
            counter("fs_requests_total", "Messages answered", &self.requests),
            counter(
                "fs_direct_total",
                "Reads and writes that were answered from the host's page cache, without the server",
                &self.direct,
            ),
            counter("fs_sent_bytes_total", "Bytes of messages, data included", &self.written_bytes),
            counter("fs_received_bytes_total", "Bytes of answers, data included", &self.read_bytes),
            counter(
                "fs_failures_total",
                "Messages that only got an error because they made no sense or nobody serves them",
                &self.failures,
            ),
            counter("fs_server_losses_total", "Ends of the file server", &self.losses),
            counter(
                "fs_server_restarts_total",
                "File servers that have gone on in the place of one that had ended",
                &self.restarts,
            ),
            counter("fs_throttled_total", "Times that the rate limit was reached", &self.throttled),
            counter("fs_guest_faults_total", GUEST_FAULTS, &self.guest_faults),
        ]
    }
}

/// The server and what is on its way to it: with the worker while the device is live.
struct Session {
    serving: Serving,
    shadow: ShadowQueue<Owner>,
    config: FsConfig,
    /// What a server has to know that comes after this one.
    journal: Arc<OwnedFd>,
    /// The way to ask whoever serves.
    control: Control,
    /// Lives as long as the device.
    throttle: Option<Throttle>,
    /// When servers have ended, as far as it matters.
    ends: Vec<Instant>,
    /// Whether it may be served.
    permit: Permit,
}

/// Who answers.
enum Serving {
    Live(Server),
    /// One has ended, and another one is on its way: the guest waits.
    Restarting(Restart),
    /// Nobody, until the host allows it again: the guest gets errors.
    Forbidden,
    /// Nobody, ever: the guest gets errors.
    Gone,
}

impl Session {
    fn server(&self) -> Option<&Server> {
        match &self.serving {
            Serving::Live(server) => Some(server),
            Serving::Restarting(_) | Serving::Forbidden | Serving::Gone => None,
        }
    }
}

/// Asks the file server of a share.
#[derive(Clone)]
pub struct FsHandle {
    control: Control,
    counters: Arc<Counters>,
    permit: Permit,
}

impl FsHandle {
    /// What it says about the share, as JSON. `None`, if nobody answers within a second. Not for a
    /// handler.
    pub fn status(&self) -> Option<String> {
        self.control.status().ok()
    }

    /// Allows or forbids that the share is served. What the guest has open goes on when it is allowed
    /// again; until then the guest gets EACCES.
    pub fn allow(&self, allowed: bool) {
        self.permit.set(allowed);
    }

    /// Whether it may be served.
    pub fn is_allowed(&self) -> bool {
        self.permit.is_given()
    }

    /// How many servers of the share have ended, and how many have gone on in their place.
    pub fn ends(&self) -> (u64, u64) {
        (self.counters.losses.get(), self.counters.restarts.get())
    }
}

/// The device as the transport holds it.
pub struct Fs {
    executor: ExecutorHandle,
    config: FsConfig,
    counters: Arc<Counters>,
    control: Control,
    permit: Permit,
    /// While it is not live.
    session: Option<Session>,
    worker: Option<Running<Worker>>,
}

impl Fs {
    /// A device whose file server is started now, and whose worker runs on `executor`.
    pub fn new(executor: ExecutorHandle, config: FsConfig) -> Result<Self, FsError> {
        let tag = &config.tag;
        if tag.is_empty() || tag.len() > MAX_TAG || tag.contains('\0') {
            return Err(FsError::Tag(tag.clone()));
        }
        server::check(&config.program)?;
        let directory = std::fs::read_dir(&config.path);
        directory.map_err(|source| {
            let (tag, path) = (config.tag.clone(), config.path.clone());
            FsError::Directory { tag, path, source }
        })?;
        let shadow = ShadowQueue::new();
        let shadow = shadow.map_err(|source| FsError::Host { what: "shadow queue", source })?;
        let journal = server::journal();
        let journal = journal.map_err(|source| FsError::Host { what: "journal", source })?;
        let throttle = (!config.rate.is_none()).then(|| Throttle::new(config.rate)).transpose();
        let throttle = throttle.map_err(|source| FsError::Host { what: "timer", source })?;
        let permit = Permit::new();
        let permit = permit.map_err(|source| FsError::Host { what: "event", source })?;
        let server = Server::start(&config, &shadow, &journal)?;
        let control = server.control();
        let session = Session {
            serving: Serving::Live(server),
            shadow,
            config: config.clone(),
            journal: Arc::new(journal),
            control: control.clone(),
            throttle,
            ends: Vec::new(),
            permit: permit.clone(),
        };
        let (counters, session) = (Arc::default(), Some(session));
        Ok(Self { executor, config, counters, control, permit, session, worker: None })
    }

    /// The way to ask the file server about the share, for as long as one likes.
    pub fn handle(&self) -> FsHandle {
        let (control, counters) = (self.control.clone(), self.counters.clone());
        FsHandle { control, counters, permit: self.permit.clone() }
    }

    fn gone(&self) -> FsError {
        FsError::Gone { tag: self.config.tag.clone() }
    }
}

impl VirtioDevice for Fs {
    fn identity(&self) -> Identity {
        Identity {
            device_type: DeviceType::Fs,
            features: 0,
            queue_sizes: QUEUE_SIZES,
            config_len: CONFIG_LEN as u64,
        }
    }

    fn meter(&self) -> Option<Meter> {
        Some(self.counters.clone())
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let mut config = [0; CONFIG_LEN];
        let tag = self.config.tag.bytes().chain(std::iter::repeat(0)).take(MAX_TAG);
        let request_queues = (QUEUE_SIZES.len() as u32 - 1).to_le_bytes();
        for (to, from) in config.iter_mut().zip(tag.chain(request_queues)) {
            *to = from;
        }
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        data.fill(0);
        for (to, from) in data.iter_mut().zip(config.iter().skip(offset)) {
            *to = *from;
        }
    }

    fn start(&mut self, activation: Activation) -> Result<(), StartError> {
        let Activation { memory, mut queues, notifier, .. } = activation;
        for (index, _) in (0..).zip(QUEUE_SIZES) {
            if queues.iter().all(|queue| queue.index().0 != index) {
                return Err(StartError::MissingQueue(index));
            }
        }
        queues.sort_by_key(ActiveQueue::index);
        let session = self.session.take().ok_or_else(|| StartError::Host {
            what: "taking up the file server",
            source: io::Error::other(self.gone()),
        })?;
        let (counters, tag) = (self.counters.clone(), self.config.tag.clone());
        let worker = Worker { session, memory, queues, notifier, counters, tag };
        match self.executor.run(worker) {
            Ok(running) => {
                self.worker = Some(running);
                Ok(())
            }
            Err(no) => {
                self.session = no.handler.map(|worker| worker.session);
                Err(StartError::Executor(no.error))
            }
        }
    }

    /// Waits for what is on its way, as long as [`FsConfig::drain`] says. What is still on its way then
    /// stays so: the device goes on with it when it is started again, and cannot be saved until.
    fn stop(&mut self) -> Vec<ActiveQueue> {
        let Some(mut worker) = self.worker.take().and_then(Running::stop) else {
            return Vec::new();
        };
        worker.drain(self.config.drain);
        self.session = Some(worker.session);
        worker.queues
    }

    fn reset(&mut self) {
        if let Some(session) = &mut self.session {
            session.forget_guest();
        }
    }
}
