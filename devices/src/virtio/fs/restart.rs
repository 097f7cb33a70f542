//! A file server in the place of one that has ended.
//!
//! It is started by a thread of its own, since that takes some milliseconds, and more for a guest that
//! knows many files. Until it serves, what the guest asks waits in the guest's queues.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::server::Server;
use super::shadow::ShadowQueue;
use super::worker::Owner;
use super::{FsConfig, FsError, Session};
use crate::event::Event;

/// So many servers may end within [`WINDOW`] before nobody takes their place: what ends every server
/// would go on doing so.
const MOST: usize = 5;
const WINDOW: Duration = Duration::from_secs(60);

/// A server, with a shadow queue that the one before has never seen.
type Begun = (Server, ShadowQueue<Owner>);
type Outcome = Arc<Mutex<Option<Result<Begun, FsError>>>>;

/// One that is on its way.
pub(super) struct Restart {
    /// Signalled when it is there, or never will be.
    pub done: Event,
    outcome: Outcome,
}

impl Restart {
    /// Has it started.
    pub fn begin(config: FsConfig, journal: Arc<OwnedFd>) -> io::Result<Self> {
        let this = Self { done: Event::new()?, outcome: Outcome::default() };
        let (done, outcome) = (this.done.clone(), this.outcome.clone());
        std::thread::Builder::new().name("fs-restart".to_owned()).spawn(move || {
            let begun = begin(&config, &journal);
            *outcome.lock().unwrap_or_else(PoisonError::into_inner) = Some(begun);
            done.signal();
        })?;
        Ok(this)
    }

    /// What has come of it, once.
    pub fn take(&self) -> Option<Result<Begun, FsError>> {
        self.done.clear();
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Waits for it, until `end`.
    pub fn wait(&self, end: Instant) {
        let left = end.saturating_duration_since(Instant::now());
        let fd = self.done.as_raw_fd();
        let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        let millis = i32::try_from(left.as_millis()).unwrap_or(i32::MAX);
        // SAFETY: one pollfd that outlives the call, with an open descriptor.
        unsafe { libc::poll(&mut poll, 1, millis) };
    }
}

fn begin(config: &FsConfig, journal: &OwnedFd) -> Result<Begun, FsError> {
    let shadow = ShadowQueue::new();
    let shadow = shadow.map_err(|source| FsError::Host { what: "shadow queue", source })?;
    Ok((Server::start(config, &shadow, journal)?, shadow))
}

impl Session {
    /// True if another server may take the place of one that ends now.
    pub(super) fn may_restart(&mut self) -> bool {
        self.ends.retain(|end| end.elapsed() < WINDOW);
        self.ends.push(Instant::now());
        self.ends.len() <= MOST
    }
}
