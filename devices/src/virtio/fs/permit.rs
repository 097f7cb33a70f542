//! Whether a share may be served, as its host says while the VM runs.
//!
//! A share that may not be served any more loses its server at once: what is on its way fails, and what
//! the guest asks is refused with EACCES. The journal stays. When it may be served again, another server
//! goes on from there, as after the death of one: open files, current directories and the mount are as
//! they were.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::restart::Restart;
use super::worker::Worker;
use super::{Serving, Session};
use crate::event::Event;
use crate::virtio::queue::QueueFault;

/// What the host says. All clones are the same one.
#[derive(Clone)]
pub(super) struct Permit {
    given: Arc<AtomicBool>,
    /// Signalled when it has changed.
    pub changed: Event,
}

impl Permit {
    /// Given.
    pub fn new() -> io::Result<Self> {
        Ok(Self { given: Arc::new(AtomicBool::new(true)), changed: Event::new()? })
    }

    pub fn is_given(&self) -> bool {
        self.given.load(Ordering::Acquire)
    }

    /// Gives or takes it. The worker acts on it at once, or before anything else when it runs again.
    pub fn set(&self, given: bool) {
        if self.given.swap(given, Ordering::AcqRel) != given {
            self.changed.signal();
        }
    }
}

impl Session {
    /// Has a server started that goes on from the journal.
    pub(super) fn restart(&mut self, tag: &str) {
        match Restart::begin(self.config.clone(), self.journal.clone()) {
            Ok(restart) => self.serving = Serving::Restarting(restart),
            Err(error) => tracing::error!(tag, %error, "no file server any more"),
        }
    }
}

impl Worker {
    /// Does what the host says by now.
    pub(super) fn heed(&mut self) -> Result<(), QueueFault> {
        self.session.permit.changed.clear();
        match (&self.session.serving, self.session.permit.is_given()) {
            (Serving::Live(_), false) => {
                // What it has answered before, counts.
                self.reap()?;
                let answered = self.abandon();
                // Its end is that of the process, and of all that it holds open.
                self.session.serving = Serving::Forbidden;
                tracing::warn!(
                    tag = self.tag,
                    "the share is not allowed any more; its server is gone"
                );
                answered
            }
            (Serving::Forbidden, true) => {
                tracing::info!(tag = self.tag, "the share is allowed again");
                self.session.restart(&self.tag);
                Ok(())
            }
            // One that is on its way is looked at when it is there.
            _ => Ok(()),
        }
    }
}
