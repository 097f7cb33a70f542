//! Persistent memory (virtio 1.3, section 5.19): a file that the guest sees as memory.
//!
//! The guest reads the file without a request: its pages are mapped into the guest's address space,
//! and for a read-only file they are the host's page cache, shared by all guests. What is left for
//! the device is to say where the memory is, and to answer the request to flush it.
//!
//! Writes to read-only memory are dropped by KVM. The driver has no way to know beforehand, so a
//! flush fails: that is how the guest hears that what it wrote is gone.
//!
//! A writable device is a private copy: what the guest writes stays in this process, the file never
//! changes, and a flush has nothing to do. A snapshot of the VM needs these pages too:
//! [`PmemBacking::save_changes`].
//!
//! The memory is not part of guest RAM: a request of another device with a buffer in it is refused
//! like one with a buffer outside all memory. Linux makes such requests only for direct I/O on the
//! mapped memory of a DAX file.

mod backing;
mod changes;

use std::io::{self, Read};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

pub use self::backing::{ALIGNMENT, PmemBacking, PmemError};
pub use self::changes::{PmemChange, PmemChangeError};
use super::queue::{ActiveQueue, QueueFault};
use super::{Activation, Chain, DeviceType, Identity, Notifier, StartError, VirtioDevice};
use crate::executor::{ExecutorHandle, Flow, Handler, Interest, Running, Sources};
use crate::ids::Token;
use crate::memory::{GuestAddress, Memory};
use crate::metrics::{Count, GUEST_FAULTS, LOGGED_FAULTS, Meter, Metered, Metric};
use crate::snapshot::{RestoreError, SaveError, Schema, Snapshot};

// --- configuration -----------------------------------------------------------------------------

const QUEUE_SIZES: &[u16] = &[64];

/// Bytes of the configuration space: start and size.
const CONFIG_LEN: usize = 16;

/// Chains handled per wake-up before other devices get their turn. As a flush costs the host
/// nothing, this also keeps a flood of them harmless.
const BUDGET: usize = 64;

/// Where the guest sees the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PmemConfig {
    /// First guest physical address: a multiple of [`ALIGNMENT`], and as many bytes from there on
    /// as [`PmemBacking::len`] says must be free. The builder maps the memory there.
    pub start: GuestAddress,
}

// --- device ------------------------------------------------------------------------------------

/// What the device has done since it was made. Clones look at the same device.
#[derive(Clone, Debug, Default)]
pub struct PmemCounters(Arc<Counters>);

#[derive(Debug, Default)]
struct Counters {
    flushes: Count,
    refused: Count,
    guest_faults: Count,
}

impl PmemCounters {
    /// Flush requests that succeeded.
    pub fn flushes(&self) -> u64 {
        self.0.flushes.get()
    }

    /// Requests that failed: unknown ones, and flushes of read-only memory.
    pub fn refused(&self) -> u64 {
        self.0.refused.get()
    }

    /// Times the driver broke the rules of its ring, so that the device had to be reset.
    pub fn guest_faults(&self) -> u64 {
        self.0.guest_faults.get()
    }
}

impl Metered for PmemCounters {
    fn metrics(&self) -> Vec<Metric> {
        let refused = "Requests that failed: unknown ones, and flushes of read-only memory";
        vec![
            Metric::counter("pmem_flushes_total", "Flushes that succeeded", self.flushes()),
            Metric::counter("pmem_failed_requests_total", refused, self.refused()),
            Metric::counter("pmem_guest_faults_total", GUEST_FAULTS, self.guest_faults()),
        ]
    }
}

/// The device as the transport holds it.
pub struct Pmem {
    executor: ExecutorHandle,
    backing: PmemBacking,
    start: GuestAddress,
    counters: PmemCounters,
    worker: Option<Running<Worker>>,
}

impl Pmem {
    /// A device whose worker runs on `executor`. The backing stays mapped as long as the device or
    /// a clone of it lives; the memory slot of the guest must have ended by then.
    pub fn new(
        executor: ExecutorHandle,
        backing: PmemBacking,
        config: PmemConfig,
    ) -> Result<Self, PmemError> {
        let start = config.start.0;
        let fits = start.is_multiple_of(ALIGNMENT) && start.checked_add(backing.len()).is_some();
        if !fits {
            return Err(PmemError::Address { start, len: backing.len() });
        }
        let counters = PmemCounters::default();
        Ok(Self { executor, backing, start: config.start, counters, worker: None })
    }

    /// What it has done.
    pub fn counters(&self) -> PmemCounters {
        self.counters.clone()
    }
}

impl VirtioDevice for Pmem {
    fn identity(&self) -> Identity {
        Identity {
            device_type: DeviceType::Pmem,
            features: 0,
            queue_sizes: QUEUE_SIZES,
            config_len: CONFIG_LEN as u64,
        }
    }

    fn meter(&self) -> Option<Meter> {
        Some(Arc::new(self.counters()))
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let fields = [self.start.0, self.backing.len()].map(u64::to_le_bytes);
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        for (to, from) in data.iter_mut().zip(fields.iter().flatten().skip(offset)) {
            *to = *from;
        }
    }

    fn start(&mut self, mut activation: Activation) -> Result<(), StartError> {
        let queue = activation.take_queue(0)?;
        let notifier = activation.notifier;
        let (read_only, counters) = (self.backing.read_only(), self.counters.clone());
        let worker = Worker { queue, notifier, read_only, counters };
        let running = self.executor.run(worker).map_err(|no| StartError::Executor(no.error))?;
        self.worker = Some(running);
        Ok(())
    }

    fn stop(&mut self) -> Vec<ActiveQueue> {
        let worker = self.worker.take().and_then(Running::stop);
        worker.map(|worker| worker.queue).into_iter().collect()
    }

    fn reset(&mut self) {}
}

// --- worker ------------------------------------------------------------------------------------

const QUEUE: Token = Token(0);

struct Worker {
    queue: ActiveQueue,
    notifier: Notifier,
    read_only: bool,
    counters: PmemCounters,
}

impl Worker {
    /// Answers up to [`BUDGET`] requests; true if there may be more.
    fn serve(&mut self) -> Result<bool, QueueFault> {
        for _ in 0..BUDGET {
            let Some(chain) = self.queue.pop()? else {
                self.queue.notify()?;
                return self.queue.enable_notification();
            };
            let request = Request::read(&chain, self.queue.memory());
            let done = request == Request::Flush && !self.read_only;
            let counters = &self.counters.0;
            let counter = if done { &counters.flushes } else { &counters.refused };
            counter.one();
            let written = answer(&chain, self.queue.memory(), done);
            self.queue.complete(&chain, written)?;
        }
        self.queue.notify()?;
        Ok(true)
    }
}

impl Handler for Worker {
    fn attach(&mut self, sources: &mut Sources<'_, '_>) -> io::Result<()> {
        sources.add(QUEUE, self.queue.kick(), Interest::Read)
    }

    fn handle(&mut self, _token: Token, _sources: &mut Sources<'_, '_>) -> Flow {
        self.queue.kick().clear();
        match self.serve() {
            Ok(more) => {
                if more {
                    self.queue.kick().signal();
                }
                Flow::Continue
            }
            Err(fault) => {
                if self.counters.0.guest_faults.one() < LOGGED_FAULTS {
                    tracing::warn!(%fault, "persistent memory device stopped");
                }
                self.notifier.needs_reset();
                Flow::Finished
            }
        }
    }
}

// --- requests ----------------------------------------------------------------------------------

/// What the driver wants (virtio 1.3, section 5.19.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Request {
    /// Make persistent what was written.
    Flush,
    /// Nothing that there is.
    Unknown,
}

const FLUSH: u32 = 0;

/// Answers: done, and failed, which the specification writes as -1.
const OK: u32 = 0;
const FAILED: u32 = u32::MAX;

impl Request {
    fn read(chain: &Chain, memory: &Memory) -> Self {
        let mut kind = [0; 4];
        match chain.reader(memory).read_exact(&mut kind) {
            Ok(()) if u32::from_le_bytes(kind) == FLUSH => Self::Flush,
            _ => Self::Unknown,
        }
    }
}

/// Writes the answer, whether the request was `done`; how many bytes, 0 if there is no room for all
/// of it.
fn answer(chain: &Chain, memory: &Memory, done: bool) -> u32 {
    let answer = if done { OK } else { FAILED };
    let mut writer = chain.writer(memory);
    if writer.remaining() < size_of::<u32>() as u64 {
        return 0;
    }
    match io::Write::write_all(&mut writer, &answer.to_le_bytes()) {
        Ok(()) => writer.written(),
        Err(_) => 0,
    }
}

// --- state -------------------------------------------------------------------------------------

/// What the guest knows of the memory; one that differs cannot take its place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PmemState {
    /// First guest physical address.
    pub start: u64,
    /// Bytes that the guest sees.
    pub len: u64,
    /// Bytes of the file.
    pub file_len: u64,
    /// The guest cannot write to it.
    pub read_only: bool,
}

impl Schema for PmemState {
    const KIND: &'static str = "virtio-pmem";
    const VERSION: u32 = 1;
}

impl Pmem {
    fn state(&self) -> PmemState {
        PmemState {
            start: self.start.0,
            len: self.backing.len(),
            file_len: self.backing.file_len(),
            read_only: self.backing.read_only(),
        }
    }
}

impl Snapshot for Pmem {
    type State = PmemState;

    fn save(&self) -> Result<PmemState, SaveError> {
        match self.worker {
            Some(_) => Err(SaveError::Running("virtio-pmem")),
            None => Ok(self.state()),
        }
    }

    fn restore(&mut self, saved: PmemState) -> Result<(), RestoreError> {
        if self.worker.is_some() {
            return Err(RestoreError::Running("virtio-pmem"));
        }
        let here = self.state();
        let invalid = |field, saved: String, here: String| {
            let value = format!("{saved}, the attached memory has {here}");
            Err(RestoreError::Invalid { kind: PmemState::KIND, field, value })
        };
        if saved.start != here.start {
            return invalid("start", format!("{:#x}", saved.start), format!("{:#x}", here.start));
        }
        if saved.file_len != here.file_len {
            return invalid("file_len", saved.file_len.to_string(), here.file_len.to_string());
        }
        if saved.len != here.len {
            return invalid("len", saved.len.to_string(), here.len.to_string());
        }
        if saved.read_only != here.read_only {
            return invalid("read_only", saved.read_only.to_string(), here.read_only.to_string());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
