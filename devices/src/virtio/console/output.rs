//! What the guest has printed: a bounded ring with any number of readers, each at its own pace.
//!
//! Whoever writes never waits: the ring drops its oldest bytes, and a reader that was behind them
//! is told how many it has missed. A reader that comes late starts with what is kept.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::event::Event;

/// Readers at a time. Each costs the writer a look, so there is a limit.
pub const MAX_READERS: usize = 64;

/// What a guest prints while it boots is some 100 KiB.
pub const DEFAULT_CAPACITY: usize = 256 << 10;

/// The most that a ring can keep; a guest can make the host copy that much in one go.
pub const MAX_CAPACITY: usize = 16 << 20;

/// Bytes copied while the ring is locked, so that a reader does not hold the writer up.
const MAX_READ: usize = 64 << 10;

struct Reader {
    number: u64,
    /// It has read everything and waits for this event.
    waiting: bool,
    event: Event,
}

struct Ring {
    capacity: usize,
    kept: VecDeque<u8>,
    /// Bytes written since the ring was made; the last of them are kept.
    written: u64,
    readers: Vec<Reader>,
    next_reader: u64,
}

impl Ring {
    /// Position of the first byte that is kept, counted from the first ever written.
    fn start(&self) -> u64 {
        self.written.saturating_sub(self.kept.len() as u64)
    }

    fn reader(&mut self, number: u64) -> Option<&mut Reader> {
        self.readers.iter_mut().find(|reader| reader.number == number)
    }
}

/// The output of a console. Clones share it.
#[derive(Clone)]
pub struct ConsoleOutput(Arc<Mutex<Ring>>);

impl Default for ConsoleOutput {
    fn default() -> Self {
        Self::new(DEFAULT_CAPACITY)
    }
}

impl ConsoleOutput {
    /// Keeps the last `capacity` bytes, from 1 to [`MAX_CAPACITY`]. Memory is only used for what is
    /// kept.
    pub fn new(capacity: usize) -> Self {
        Self(Arc::new(Mutex::new(Ring {
            capacity: capacity.clamp(1, MAX_CAPACITY),
            kept: VecDeque::new(),
            written: 0,
            readers: Vec::new(),
            next_reader: 0,
        })))
    }

    fn ring(&self) -> MutexGuard<'_, Ring> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes that are kept at most.
    pub fn capacity(&self) -> usize {
        self.ring().capacity
    }

    /// Appends `bytes` and wakes the readers that wait. Never blocks for longer than a reader
    /// copies a few pages.
    pub fn write(&self, bytes: &[u8]) {
        let mut ring = self.ring();
        ring.written = ring.written.saturating_add(bytes.len() as u64);
        let capacity = ring.capacity;
        let last = bytes.get(bytes.len().saturating_sub(capacity)..).unwrap_or_default();
        let surplus = (ring.kept.len() + last.len()).saturating_sub(capacity);
        ring.kept.drain(..surplus);
        ring.kept.extend(last);
        for reader in ring.readers.iter_mut().filter(|reader| reader.waiting) {
            reader.waiting = false;
            reader.event.signal();
        }
    }

    /// Counts `bytes` as printed and lost, such as the start of a piece that is longer than the
    /// whole ring. What is kept from before is lost with them, for there are no gaps in the ring.
    pub(super) fn skip(&self, bytes: u64) {
        let mut ring = self.ring();
        ring.written = ring.written.saturating_add(bytes);
        ring.kept.clear();
    }

    /// Bytes printed so far.
    pub fn written(&self) -> u64 {
        self.ring().written
    }

    /// Bytes printed so far and no longer kept. Whether somebody has read them in time is known to
    /// the readers.
    pub fn dropped(&self) -> u64 {
        self.ring().start()
    }

    /// A reader that starts with the oldest byte that is kept. Fails when there are
    /// [`MAX_READERS`], or no more descriptors.
    pub fn subscribe(&self) -> io::Result<OutputReader> {
        let event = Event::new()?;
        let mut ring = self.ring();
        if ring.readers.len() >= MAX_READERS {
            let message = format!("{MAX_READERS} readers of the console already; end one of them");
            return Err(io::Error::new(io::ErrorKind::ResourceBusy, message));
        }
        let number = ring.next_reader;
        ring.next_reader += 1;
        // What is kept can be read at once.
        event.signal();
        ring.readers.push(Reader { number, waiting: false, event: event.clone() });
        let position = ring.start();
        Ok(OutputReader { output: self.clone(), number, event, position, lost: 0 })
    }
}

/// Reads a console's output from some point on. Dropping it ends the subscription.
pub struct OutputReader {
    output: ConsoleOutput,
    number: u64,
    event: Event,
    position: u64,
    lost: u64,
}

impl OutputReader {
    /// Readable when [`OutputReader::read`] may have something.
    pub fn event(&self) -> &Event {
        &self.event
    }

    /// Bytes that were dropped before this reader came to them.
    pub fn lost(&self) -> u64 {
        self.lost
    }

    /// Fills `buffer` with what comes next; how many bytes, 0 if there is nothing yet. Never
    /// blocks. Bytes that were dropped meanwhile are passed over and counted.
    pub fn read(&mut self, buffer: &mut [u8]) -> usize {
        let mut ring = self.output.ring();
        let start = ring.start();
        if self.position < start {
            self.lost = self.lost.saturating_add(start - self.position);
            self.position = start;
        }
        let behind = usize::try_from(self.position - start).unwrap_or(usize::MAX);
        let count = ring.kept.len().saturating_sub(behind).min(buffer.len()).min(MAX_READ);
        if count == 0 && !buffer.is_empty() {
            self.event.clear();
            if let Some(reader) = ring.reader(self.number) {
                reader.waiting = true;
            }
            return 0;
        }
        for (to, from) in buffer.iter_mut().zip(ring.kept.iter().skip(behind).take(count)) {
            *to = *from;
        }
        self.position += count as u64;
        count
    }
}

impl Drop for OutputReader {
    fn drop(&mut self) {
        self.output.ring().readers.retain(|reader| reader.number != self.number);
    }
}

#[cfg(test)]
mod tests;
