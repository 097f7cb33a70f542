//! The entropy device (virtio 1.3, section 5.4): the reference to copy when writing a device.
//!
//! One queue of device-writable buffers that are filled from the host's generator. Each file of
//! this folder keeps the order below: configuration, device, worker, parsers, state, tests.

use std::io;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::queue::{ActiveQueue, QueueFault};
use super::{Activation, Chain, DeviceType, Identity, Notifier, StartError, VirtioDevice};
use crate::executor::{ExecutorHandle, Flow, Handler, Interest, Running, Sources};
use crate::ids::Token;
use crate::memory::{Bytes, Memory};
use crate::metrics::{Count, GUEST_FAULTS, LOGGED_FAULTS, Meter, Metered, Metric};
use crate::snapshot::{RestoreError, SaveError, Schema, Snapshot};

// --- configuration -----------------------------------------------------------------------------

const QUEUE_SIZES: &[u16] = &[64];

/// Bytes given for one request at most. A driver that asks for more gets that many, as the
/// specification allows; so a request cannot make the host work without bound.
pub const MAX_REQUEST: usize = 64 * 1024;

/// Chains handled per wake-up before other devices get their turn.
const BUDGET: usize = 64;

/// Where random bytes come from; a function so that tests can say what comes.
pub type Entropy = fn(&mut [u8]) -> io::Result<()>;

/// The host kernel's generator, which never blocks once the host has booted.
pub fn host_entropy(buffer: &mut [u8]) -> io::Result<()> {
    getrandom::fill(buffer).map_err(io::Error::from)
}

// --- device ------------------------------------------------------------------------------------

#[derive(Default)]
struct Counters {
    requests: Count,
    bytes: Count,
    failures: Count,
    guest_faults: Count,
}

impl Metered for Counters {
    fn metrics(&self) -> Vec<Metric> {
        vec![
            Metric::counter("rng_requests_total", "Requests answered", self.requests.get()),
            Metric::counter("rng_bytes_total", "Random bytes given to the guest", self.bytes.get()),
            Metric::counter(
                "rng_failures_total",
                "Requests cut short because the host's generator failed",
                self.failures.get(),
            ),
            Metric::counter("rng_guest_faults_total", GUEST_FAULTS, self.guest_faults.get()),
        ]
    }
}

/// The device as the transport holds it.
pub struct Rng {
    executor: ExecutorHandle,
    entropy: Entropy,
    counters: Arc<Counters>,
    worker: Option<Running<Worker>>,
}

impl Rng {
    /// A device whose worker runs on `executor`.
    pub fn new(executor: ExecutorHandle, entropy: Entropy) -> Self {
        Self { executor, entropy, counters: Arc::default(), worker: None }
    }
}

impl VirtioDevice for Rng {
    fn identity(&self) -> Identity {
        Identity {
            device_type: DeviceType::Rng,
            features: 0,
            queue_sizes: QUEUE_SIZES,
            config_len: 0,
        }
    }

    fn meter(&self) -> Option<Meter> {
        Some(self.counters.clone())
    }

    fn read_config(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn start(&mut self, mut activation: Activation) -> Result<(), StartError> {
        let queue = activation.take_queue(0)?;
        let notifier = activation.notifier;
        let (entropy, counters) = (self.entropy, self.counters.clone());
        let worker = Worker { queue, notifier, entropy, counters };
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
    entropy: Entropy,
    counters: Arc<Counters>,
}

impl Worker {
    /// Fills up to [`BUDGET`] requests; true if there may be more.
    fn serve(&mut self) -> Result<bool, QueueFault> {
        for _ in 0..BUDGET {
            let Some(chain) = self.queue.pop()? else {
                self.queue.notify()?;
                return self.queue.enable_notification();
            };
            let filled = fill(&chain, self.queue.memory(), self.entropy);
            let written = filled.unwrap_or_else(|short| {
                self.counters.failures.one();
                short
            });
            self.counters.requests.one();
            self.counters.bytes.add(u64::from(written));
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
                if self.counters.guest_faults.one() < LOGGED_FAULTS {
                    tracing::warn!(%fault, "entropy device stopped");
                }
                self.notifier.needs_reset();
                Flow::Finished
            }
        }
    }
}

// --- requests ----------------------------------------------------------------------------------

/// Fills the writable part of `chain`, up to [`MAX_REQUEST`]; how many bytes it wrote, as an error
/// if the host's generator has failed.
fn fill(chain: &Chain, memory: &Memory, entropy: Entropy) -> Result<u32, u32> {
    let mut writer = chain.writer(memory);
    let mut bytes = [0; 4096];
    let mut left = MAX_REQUEST;
    while let Some(segment) = writer.take_segment(left.min(bytes.len())) {
        let piece = bytes.get_mut(..segment.len as usize).unwrap_or_default();
        let filled = entropy(piece).is_ok() && memory.write_slice(piece, segment.address).is_ok();
        if !filled {
            // The driver asks again for what it did not get.
            return Err(writer.written().saturating_sub(segment.len));
        }
        left -= piece.len();
    }
    Ok(writer.written())
}

// --- state -------------------------------------------------------------------------------------

/// The device remembers nothing; its queue is in the transport's record.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RngState {}

impl Schema for RngState {
    const KIND: &'static str = "virtio-rng";
    const VERSION: u32 = 1;
}

impl Snapshot for Rng {
    type State = RngState;

    fn save(&self) -> Result<RngState, SaveError> {
        match self.worker {
            Some(_) => Err(SaveError::Running("virtio-rng")),
            None => Ok(RngState {}),
        }
    }

    fn restore(&mut self, _state: RngState) -> Result<(), RestoreError> {
        Ok(())
    }
}

#[cfg(test)]
mod tests;
