//! The shim's log: containerd reads it from a FIFO in the bundle and puts it into its own.
//!
//! A reader that is slow or gone must not hold up a sandbox, so what does not fit is dropped.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use tracing::Level;
use tracing_subscriber::filter::LevelFilter;

/// The FIFO. Opened for both directions, so that it can be opened without a reader, and none that
/// goes away breaks it.
#[derive(Clone)]
struct Log(Arc<Mutex<Option<File>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if let Some(file) = self.0.lock().unwrap_or_else(PoisonError::into_inner).as_mut() {
            // A full FIFO: the line is dropped.
            let _ = file.write(bytes);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The one that is installed.
static LOG: OnceLock<Log> = OnceLock::new();

/// Writes a line of its own form, as it is, for programs that read the log.
pub fn line(text: &str) {
    if let Some(mut log) = LOG.get().cloned() {
        // At once, so that no other line comes between. Never fails.
        let _ = log.write(format!("{text}\n").as_bytes());
    }
}

/// Sends what is logged from here on to the FIFO at `path`, if there is one.
pub fn install(path: &Path, debug: bool) {
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC);
    let log = Log(Arc::new(Mutex::new(options.open(path).ok())));
    // Only the first one counts.
    let _ = LOG.set(log.clone());
    let level = if debug { Level::DEBUG } else { Level::INFO };
    let subscriber = tracing_subscriber::fmt()
        .with_ansi(false)
        .with_target(false)
        .with_max_level(LevelFilter::from_level(level))
        .with_writer(move || log.clone())
        .finish();
    // Only fails if there is one already.
    let _ = tracing::subscriber::set_global_default(subscriber);
}
