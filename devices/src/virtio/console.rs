//! The console (virtio 1.3, section 5.3): one port, `hvc0` in Linux.
//!
//! What the guest prints goes into a bounded ring ([`ConsoleOutput`]) that never makes it wait;
//! what is typed waits in a bounded queue ([`ConsoleInput`]) until it has buffers. Who reads and
//! types, and over which sockets, is not known here. Both outlive a reset of the device, as the
//! terminal does.
//!
//! A guest in trouble can print byte by byte without a queue (emergency write), even before its
//! driver has found the device.

mod input;
mod metrics;
mod output;

use std::io::{self, Read};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

pub use self::input::{ConsoleInput, MAX_INPUT};
pub use self::output::{ConsoleOutput, DEFAULT_CAPACITY, MAX_CAPACITY, MAX_READERS, OutputReader};
use super::queue::{ActiveQueue, QueueFault};
use super::{Activation, Chain, DeviceType, Identity, Notifier, StartError, VirtioDevice};
use crate::executor::{ExecutorHandle, Flow, Handler, Interest, Running, Sources};
use crate::ids::Token;
use crate::memory::{Bytes, Memory};
use crate::metrics::{LOGGED_FAULTS, Meter};
use crate::snapshot::{RestoreError, SaveError, Schema, Snapshot};

// --- configuration -----------------------------------------------------------------------------

/// Feature bits (virtio 1.3, section 5.3.3).
pub mod feature {
    /// `cols` and `rows` are valid.
    pub const SIZE: u64 = 1 << 0;
    /// `emerg_wr` is valid.
    pub const EMERG_WRITE: u64 = 1 << 2;
}

/// Receive, transmit.
const QUEUE_SIZES: &[u16] = &[64, 64];

/// Bytes of the configuration space: columns, rows, number of ports, emergency write.
const CONFIG_LEN: u64 = 12;
const EMERG_WRITE: u64 = 8;

/// Bytes moved per queue and wake-up before other devices get their turn.
const TURN: usize = 256 << 10;

/// Chains handled per queue and wake-up.
const BUDGET: usize = 64;

/// Bytes copied at a time.
const STEP: usize = 4096;

/// The size of a terminal in characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConsoleConfig {
    /// Columns.
    pub columns: u16,
    /// Rows.
    pub rows: u16,
}

impl Default for ConsoleConfig {
    fn default() -> Self {
        Self { columns: 80, rows: 25 }
    }
}

impl ConsoleConfig {
    fn pack(self) -> u32 {
        u32::from(self.columns) | u32::from(self.rows) << 16
    }

    fn unpack(size: u32) -> Self {
        Self { columns: size as u16, rows: (size >> 16) as u16 }
    }
}

// --- device ------------------------------------------------------------------------------------

/// What a console has done since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConsoleCounters {
    /// Bytes that the guest printed through its queue or as emergency writes.
    pub printed_bytes: u64,
    /// Of these, the emergency writes.
    pub emergency_bytes: u64,
    /// Bytes of writes longer than the whole output ring, that nobody could read.
    pub dropped_bytes: u64,
    /// Bytes that were typed and given to the guest.
    pub typed_bytes: u64,
    /// Times the driver broke the rules of its rings, so that the device had to be reset.
    pub guest_faults: u64,
}

#[derive(Default)]
struct Shared {
    /// [`ConsoleConfig::pack`].
    size: AtomicU32,
    printed: AtomicU64,
    emergency: AtomicU64,
    dropped: AtomicU64,
    typed: AtomicU64,
    guest_faults: AtomicU64,
    line: Mutex<Line>,
}

/// The way to a driver that is there.
#[derive(Default)]
struct Line {
    notifier: Option<Notifier>,
    /// The size has changed since a driver could last be told.
    untold: bool,
}

impl Shared {
    fn line(&self) -> MutexGuard<'_, Line> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn connect(&self, notifier: Notifier) {
        let untold = {
            let mut line = self.line();
            line.notifier = Some(notifier.clone());
            std::mem::take(&mut line.untold)
        };
        if untold {
            notifier.config_changed();
        }
    }

    fn disconnect(&self) {
        self.line().notifier = None;
    }

    fn set_size(&self, size: ConsoleConfig) {
        self.size.store(size.pack(), Ordering::Release);
        let notifier = {
            let mut line = self.line();
            line.untold = line.notifier.is_none();
            line.notifier.clone()
        };
        if let Some(notifier) = notifier {
            notifier.config_changed();
        }
    }
}

/// The device as the transport holds it.
pub struct Console {
    executor: ExecutorHandle,
    shared: Arc<Shared>,
    output: ConsoleOutput,
    input: ConsoleInput,
    worker: Option<Running<Worker>>,
}

impl Console {
    /// A device whose worker runs on `executor`. It prints into `output`, which may have other
    /// writers, and gives the guest what comes into the handle's input.
    pub fn new(
        executor: ExecutorHandle,
        config: ConsoleConfig,
        output: ConsoleOutput,
    ) -> (Self, ConsoleHandle) {
        let shared = Arc::new(Shared::default());
        shared.size.store(config.pack(), Ordering::Release);
        let input = ConsoleInput::default();
        let handle =
            ConsoleHandle { shared: shared.clone(), output: output.clone(), input: input.clone() };
        (Self { executor, shared, output, input, worker: None }, handle)
    }
}

impl VirtioDevice for Console {
    fn identity(&self) -> Identity {
        Identity {
            device_type: DeviceType::Console,
            features: feature::SIZE | feature::EMERG_WRITE,
            queue_sizes: QUEUE_SIZES,
            config_len: CONFIG_LEN,
        }
    }

    fn meter(&self) -> Option<Meter> {
        Some(self.shared.clone())
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let size = self.shared.size.load(Ordering::Acquire);
        // One port; the emergency write reads as zero.
        let fields = [size, 1, 0].map(u32::to_le_bytes);
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        for (to, from) in data.iter_mut().zip(fields.iter().flatten().skip(offset)) {
            *to = *from;
        }
    }

    fn write_config(&mut self, offset: u64, data: &[u8]) {
        // The character is in the low byte of the field (section 5.3.6.1).
        let place = EMERG_WRITE.checked_sub(offset).and_then(|place| usize::try_from(place).ok());
        if let Some(&byte) = place.and_then(|place| data.get(place)) {
            self.output.write(&[byte]);
            self.shared.printed.fetch_add(1, Ordering::Relaxed);
            self.shared.emergency.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn takes_undriven_write(&self, offset: u64) -> bool {
        offset == EMERG_WRITE
    }

    fn start(&mut self, mut activation: Activation) -> Result<(), StartError> {
        let (receive, transmit) = (activation.take_queue(0)?, activation.take_queue(1)?);
        let kick = receive.kick().clone();
        let worker = Worker {
            receive,
            transmit,
            output: self.output.clone(),
            capacity: self.output.capacity(),
            input: self.input.clone(),
            shared: self.shared.clone(),
            notifier: activation.notifier.clone(),
        };
        let running = self.executor.run(worker).map_err(|no| StartError::Executor(no.error))?;
        self.worker = Some(running);
        self.shared.connect(activation.notifier);
        self.input.connect(kick);
        Ok(())
    }

    fn stop(&mut self) -> Vec<ActiveQueue> {
        self.input.disconnect();
        self.shared.disconnect();
        match self.worker.take().and_then(Running::stop) {
            Some(worker) => vec![worker.receive, worker.transmit],
            None => Vec::new(),
        }
    }

    fn reset(&mut self) {}
}

/// The host's side of a console. Cheap to clone; outlives the device harmlessly.
#[derive(Clone)]
pub struct ConsoleHandle {
    shared: Arc<Shared>,
    output: ConsoleOutput,
    input: ConsoleInput,
}

impl ConsoleHandle {
    /// What the guest prints.
    pub fn output(&self) -> &ConsoleOutput {
        &self.output
    }

    /// What is typed for it.
    pub fn input(&self) -> &ConsoleInput {
        &self.input
    }

    /// Tells the guest that its terminal has another size: at once, or when it is back from a pause.
    pub fn resize(&self, size: ConsoleConfig) {
        self.shared.set_size(size);
    }

    /// What the console has done so far.
    pub fn counters(&self) -> ConsoleCounters {
        self.shared.counters()
    }
}

// --- worker ------------------------------------------------------------------------------------

const RECEIVE: Token = Token(0);
const TRANSMIT: Token = Token(1);

struct Worker {
    receive: ActiveQueue,
    transmit: ActiveQueue,
    output: ConsoleOutput,
    /// Of the output.
    capacity: usize,
    input: ConsoleInput,
    shared: Arc<Shared>,
    notifier: Notifier,
}

impl Worker {
    /// Prints what is in up to [`BUDGET`] chains; true if there may be more.
    fn print_all(&mut self) -> Result<bool, QueueFault> {
        let mut left = TURN;
        for _ in 0..BUDGET {
            let Some(chain) = self.transmit.pop()? else {
                self.transmit.notify()?;
                return self.transmit.enable_notification();
            };
            let printed = self.print(&chain);
            self.transmit.complete(&chain, 0)?;
            left = left.saturating_sub(printed);
            if left == 0 {
                break;
            }
        }
        self.transmit.notify()?;
        Ok(true)
    }

    /// Prints one chain; how many bytes it copied. A guest may print 4 GiB at once; of what does
    /// not fit into the ring only the end is looked at.
    fn print(&self, chain: &Chain) -> usize {
        let memory = self.transmit.memory();
        let mut reader = chain.reader(memory);
        let len = chain.readable_len();
        self.shared.printed.fetch_add(len, Ordering::Relaxed);
        let mut surplus = len.saturating_sub(self.capacity as u64);
        if surplus > 0 {
            self.output.skip(surplus);
            self.shared.dropped.fetch_add(surplus, Ordering::Relaxed);
        }
        while let Some(skipped) =
            reader.take_segment(usize::try_from(surplus).unwrap_or(usize::MAX))
        {
            surplus = surplus.saturating_sub(u64::from(skipped.len));
        }
        let mut bytes = [0; STEP];
        let mut copied: usize = 0;
        while let Ok(count) = reader.read(&mut bytes)
            && count > 0
        {
            self.output.write(bytes.get(..count).unwrap_or_default());
            copied = copied.saturating_add(count);
        }
        copied
    }

    /// Gives what was typed to the guest, as far as it has buffers; true if there may be more.
    fn type_all(&mut self) -> Result<bool, QueueFault> {
        for _ in 0..BUDGET {
            if self.input.waiting() == 0 {
                self.receive.notify()?;
                return Ok(false);
            }
            let Some(chain) = self.receive.pop()? else {
                self.receive.notify()?;
                return self.receive.enable_notification();
            };
            let written = type_into(&chain, self.receive.memory(), &self.input);
            self.shared.typed.fetch_add(written.into(), Ordering::Relaxed);
            self.receive.complete(&chain, written)?;
        }
        self.receive.notify()?;
        Ok(true)
    }
}

/// Fills the writable part of `chain` with what was typed; how many bytes.
fn type_into(chain: &Chain, memory: &Memory, input: &ConsoleInput) -> u32 {
    let mut writer = chain.writer(memory);
    let mut bytes = [0; STEP];
    let mut written = 0;
    loop {
        let wanted = input.waiting().min(bytes.len());
        let Some(segment) = writer.take_segment(wanted) else {
            return written;
        };
        let count = input.take(bytes.get_mut(..segment.len as usize).unwrap_or_default());
        let piece = bytes.get(..count).unwrap_or_default();
        // Cannot fail: the chain was checked to lie in guest RAM.
        if memory.write_slice(piece, segment.address).is_err() {
            return written;
        }
        written += count as u32;
    }
}

impl Handler for Worker {
    fn attach(&mut self, sources: &mut Sources<'_, '_>) -> io::Result<()> {
        sources.add(RECEIVE, self.receive.kick(), Interest::Read)?;
        sources.add(TRANSMIT, self.transmit.kick(), Interest::Read)
    }

    fn handle(&mut self, token: Token, _sources: &mut Sources<'_, '_>) -> Flow {
        let queue = if token == RECEIVE { &self.receive } else { &self.transmit };
        let kick = queue.kick().clone();
        kick.clear();
        let served = if token == RECEIVE { self.type_all() } else { self.print_all() };
        match served {
            Ok(more) => {
                if more {
                    kick.signal();
                }
                Flow::Continue
            }
            Err(fault) => {
                if self.shared.guest_faults.fetch_add(1, Ordering::Relaxed) < LOGGED_FAULTS {
                    tracing::warn!(%fault, "console stopped");
                }
                self.notifier.needs_reset();
                Flow::Finished
            }
        }
    }
}

// --- state -------------------------------------------------------------------------------------

/// The saved form. What was printed is not part of it: that is the terminal's, not the guest's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConsoleState {
    /// Columns.
    pub columns: u16,
    /// Rows.
    pub rows: u16,
    /// Bytes that were typed and wait for the guest.
    pub input: Vec<u8>,
}

impl Schema for ConsoleState {
    const KIND: &'static str = "virtio-console";
    const VERSION: u32 = 1;
}

impl Snapshot for Console {
    type State = ConsoleState;

    fn save(&self) -> Result<ConsoleState, SaveError> {
        if self.worker.is_some() {
            return Err(SaveError::Running("virtio-console"));
        }
        let size = ConsoleConfig::unpack(self.shared.size.load(Ordering::Acquire));
        Ok(ConsoleState { columns: size.columns, rows: size.rows, input: self.input.save() })
    }

    fn restore(&mut self, state: ConsoleState) -> Result<(), RestoreError> {
        if self.worker.is_some() {
            return Err(RestoreError::Running("virtio-console"));
        }
        if state.input.len() > MAX_INPUT {
            let value = format!("{} bytes, more than {MAX_INPUT}", state.input.len());
            return Err(RestoreError::Invalid { kind: ConsoleState::KIND, field: "input", value });
        }
        self.shared.set_size(ConsoleConfig { columns: state.columns, rows: state.rows });
        self.input.restore(&state.input);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
