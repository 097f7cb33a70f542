//! An end to waiting for a backend.
//!
//! A time limit of the socket itself would not do: the `vhost` crate takes its expiry for an
//! interruption and asks again, and a backend that sends a byte now and then would never reach it.
//! So a thread cuts the connection when the time is over, which ends whatever waits on it.

use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Cuts a connection when it takes too long. Dropped, it cuts it in any case.
pub(in crate::virtio) struct Watchdog {
    shared: Arc<Shared>,
    socket: UnixStream,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    until: Option<Instant>,
    expired: bool,
    ended: bool,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn watch(&self, socket: &UnixStream) {
        let mut state = self.state();
        while !state.ended {
            let Some(until) = state.until else {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                (state.until, state.expired) = (None, true);
                // Fails if it is cut already.
                let _ = socket.shutdown(Shutdown::Both);
            } else {
                let waited = self.changed.wait_timeout(state, left);
                state = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
        }
    }
}

impl Watchdog {
    /// Watches `socket`, without a limit yet. Fails when the process is out of threads or
    /// descriptors.
    pub fn new(socket: &UnixStream) -> io::Result<Self> {
        let shared = Arc::<Shared>::default();
        let (watched, theirs) = (socket.try_clone()?, shared.clone());
        let thread = std::thread::Builder::new().name("vhost-watchdog".to_owned());
        let thread = thread.stack_size(64 * 1024).spawn(move || theirs.watch(&watched))?;
        Ok(Self { shared, socket: socket.try_clone()?, thread: Some(thread) })
    }

    /// From now on there is `patience` left.
    pub fn arm(&self, patience: Duration) {
        self.shared.state().until = Instant::now().checked_add(patience);
        self.shared.changed.notify_one();
    }

    /// No more limit; true if it has come.
    pub fn disarm(&self) -> bool {
        let mut state = self.shared.state();
        state.until = None;
        state.expired
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.shared.state().ended = true;
        self.shared.changed.notify_one();
        // Whoever else has the descriptor: for the backend this is the end.
        let _ = self.socket.shutdown(Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn whoever_waits_is_released_and_whoever_is_done_is_left_alone() {
        let (mut one, mut other) = UnixStream::pair().unwrap();
        let watchdog = Watchdog::new(&one).unwrap();
        for _ in 0..3 {
            watchdog.arm(Duration::from_secs(3600));
            assert!(!watchdog.disarm());
        }
        other.set_nonblocking(true).unwrap();
        assert_eq!(other.read(&mut [0]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        watchdog.arm(Duration::from_millis(1));
        assert_eq!(one.read(&mut [0]).unwrap(), 0);
        assert!(watchdog.disarm());
        assert_eq!(other.read(&mut [0]).unwrap(), 0);
    }

    #[test]
    fn the_end_of_the_watch_is_that_of_the_connection() {
        let (one, mut other) = UnixStream::pair().unwrap();
        drop(Watchdog::new(&one).unwrap());
        assert_eq!(other.read(&mut [0]).unwrap(), 0);
    }
}
