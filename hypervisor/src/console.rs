//! The serial console's output on the host: the last part of it is always kept, and it can be
//! passed on as it comes.
//!
//! The guest writes from its vCPU thread, which must not wait for whoever reads: passing on goes
//! through a bounded channel to a thread, and what does not fit is dropped and counted.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};

use devices::event::Event;
use devices::metrics::{Count, Metered, Metric};
use devices::virtio::console::ConsoleOutput;
use nix::poll::{PollFd, PollFlags, PollTimeout};

/// Bytes of output that are kept.
const KEPT: usize = 32 * 1024;
/// Pieces on their way to a slow reader.
const QUEUE: usize = 4096;

/// Where the output of a console that is shown goes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ConsoleSink {
    /// This process's standard error.
    #[default]
    Stderr,
    /// A file, at whose end it is written.
    File(PathBuf),
    /// It is only kept.
    Nowhere,
}

/// Where console output goes. Clones share it.
#[derive(Clone, Default)]
pub struct ConsoleLog {
    ring: Arc<Mutex<VecDeque<u8>>>,
    dropped: Arc<Count>,
    forward: Option<SyncSender<Vec<u8>>>,
    virtio: Option<Arc<VirtioLog>>,
}

/// A virtio console whose output a thread brings in. The thread ends with it.
struct VirtioLog {
    output: ConsoleOutput,
    stop: Event,
}

impl Drop for VirtioLog {
    fn drop(&mut self) {
        self.stop.signal();
    }
}

impl ConsoleLog {
    /// Keeps the last output only.
    pub fn new() -> Self {
        Self::default()
    }

    /// Also writes it to `sink`, on a thread of its own that ends with the last clone.
    pub fn forwarding(mut sink: impl Write + Send + 'static) -> io::Result<Self> {
        let (sender, receiver) = sync_channel::<Vec<u8>>(QUEUE);
        std::thread::Builder::new().name("console".to_owned()).spawn(move || {
            while let Ok(piece) = receiver.recv() {
                if sink.write_all(&piece).and_then(|()| sink.flush()).is_err() {
                    return;
                }
            }
        })?;
        Ok(Self { forward: Some(sender), ..Self::default() })
    }

    /// Takes in a virtio console too, whose output goes the same ways, by a thread that ends with the
    /// last clone.
    pub fn with_virtio(mut self) -> io::Result<Self> {
        let (output, stop) = (ConsoleOutput::new(KEPT), Event::new()?);
        let mut reader = output.subscribe()?;
        // Without the virtio console, or it would keep itself.
        let (mut log, stopped) = (self.clone(), stop.clone());
        std::thread::Builder::new().name("hvc".to_owned()).spawn(move || {
            let mut piece = vec![0; 4096];
            loop {
                match reader.read(&mut piece) {
                    0 if wait_for(reader.event(), &stopped) => {}
                    0 => return,
                    count => {
                        // A log takes everything.
                        let _ = log.write_all(piece.get(..count).unwrap_or_default());
                    }
                }
            }
        })?;
        self.virtio = Some(Arc::new(VirtioLog { output, stop }));
        Ok(self)
    }

    /// Where a virtio console prints, if there is one.
    pub fn virtio_output(&self) -> Option<&ConsoleOutput> {
        self.virtio.as_ref().map(|virtio| &virtio.output)
    }

    /// What the virtio console has kept, which may not have come through its thread yet.
    fn virtio_kept(&self) -> Vec<u8> {
        let mut kept = Vec::new();
        let reader = self.virtio_output().and_then(|output| output.subscribe().ok());
        if let Some(mut reader) = reader {
            let mut piece = vec![0; 4096];
            loop {
                match reader.read(&mut piece) {
                    0 => break,
                    count => kept.extend(piece.get(..count).unwrap_or_default()),
                }
            }
        }
        kept
    }

    /// The last `lines` lines, without control characters that could upset a terminal.
    pub fn tail(&self, lines: usize) -> Vec<String> {
        let virtio = self.virtio_kept();
        let bytes: Vec<u8> = if virtio.is_empty() {
            let ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
            ring.iter().copied().collect()
        } else {
            virtio
        };
        let text = String::from_utf8_lossy(&bytes);
        let mut tail: Vec<String> = text
            .lines()
            .map(|line| line.chars().filter(|c| !c.is_control()).collect::<String>())
            .filter(|line| !line.trim().is_empty())
            .collect();
        tail.drain(..tail.len().saturating_sub(lines));
        tail
    }

    /// Bytes that a slow reader did not get.
    pub fn dropped(&self) -> u64 {
        self.dropped.get()
    }
}

impl Metered for ConsoleLog {
    fn metrics(&self) -> Vec<Metric> {
        let help = "Bytes of console output that a slow reader did not get";
        vec![Metric::counter("console_log_dropped_bytes_total", help, self.dropped())]
    }
}

impl Write for ConsoleLog {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let mut ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        let data_end = data.get(data.len().saturating_sub(KEPT)..).unwrap_or_default();
        let excess = (ring.len() + data_end.len()).saturating_sub(KEPT);
        ring.drain(..excess);
        ring.extend(data_end);
        drop(ring);
        if let Some(forward) = &self.forward
            && let Err(TrySendError::Full(_)) = forward.try_send(data.to_vec())
        {
            self.dropped.add(data.len() as u64);
        }
        Ok(data.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Waits until `event` is signalled; false when only `stop` is, and so nothing is left to wait for.
fn wait_for(event: &Event, stop: &Event) -> bool {
    let wanted = |event| PollFd::new(event, PollFlags::POLLIN);
    let mut poll = [wanted(event.as_fd()), wanted(stop.as_fd())];
    // An interruption is as good as a signal: the reader looks again.
    let interrupted = nix::poll::poll(&mut poll, PollTimeout::NONE).is_err();
    interrupted || poll.first().and_then(PollFd::any).unwrap_or(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_lines_are_kept() {
        let mut log = ConsoleLog::new();
        for line in 0..10_000 {
            write!(log, "line {line}\r\n").unwrap();
        }
        assert_eq!(log.tail(2), ["line 9998", "line 9999"]);
        assert!(log.ring.lock().unwrap().len() <= KEPT);
    }

    #[test]
    fn escape_sequences_do_not_reach_the_terminal() {
        let mut log = ConsoleLog::new();
        log.write_all(b"\x1b[2Jhello\x07\n\n").unwrap();
        assert_eq!(log.tail(5), ["[2Jhello"]);
    }

    #[test]
    fn both_threads_end_with_the_last_clone_and_what_was_printed_is_passed_on() {
        /// Tells when it is dropped, with its thread.
        struct Told(std::sync::mpsc::Sender<Vec<u8>>);
        impl Write for Told {
            fn write(&mut self, data: &[u8]) -> io::Result<usize> {
                let _ = self.0.send(data.to_vec());
                Ok(data.len())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let (sender, told) = std::sync::mpsc::channel();
        let log = ConsoleLog::forwarding(Told(sender)).unwrap().with_virtio().unwrap();
        let (clone, output) = (log.clone(), log.virtio_output().unwrap().clone());
        drop(log);
        output.write(b"first ");
        let mut said = told.recv().unwrap();
        output.write(b"last");
        drop(clone);
        // Ends only when both threads have: one has the sink, the other a way to it.
        said.extend(told.iter().flatten());
        assert_eq!(said, b"first last");
    }

    #[test]
    fn a_reader_that_stalls_costs_bytes_and_not_time() {
        struct Stalled(std::sync::mpsc::Receiver<()>);
        impl Write for Stalled {
            fn write(&mut self, data: &[u8]) -> io::Result<usize> {
                let _ = self.0.recv();
                Ok(data.len())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let (_keep, never) = std::sync::mpsc::channel();
        let mut log = ConsoleLog::forwarding(Stalled(never)).unwrap();
        for _ in 0..2 * QUEUE {
            log.write_all(b"x").unwrap();
        }
        assert!(log.dropped() > 0);
    }
}
