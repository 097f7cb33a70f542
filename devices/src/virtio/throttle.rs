//! The rate limit of a disk or a share: requests that are too many stay in the guest's rings.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Instant;

use crate::rate_limiter::{RateLimit, RateLimiter, RefillTimer};

/// A limit that lives as long as its device, so that a guest gains nothing by a reset.
#[derive(Debug)]
pub(super) struct Throttle {
    limiter: RateLimiter,
    timer: RefillTimer,
    /// When there are tokens again; the timer is set to it.
    until: Option<Instant>,
}

/// Whether a request may begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Admission {
    /// It may.
    Now,
    /// From now on nothing may, until the timer says so.
    Closed,
    /// It is so still.
    StillClosed,
}

impl Throttle {
    /// Fails when the process is out of descriptors.
    pub fn new(limit: RateLimit) -> io::Result<Self> {
        let limiter = RateLimiter::new(limit, Instant::now());
        Ok(Self { limiter, timer: RefillTimer::new()?, until: None })
    }

    /// Asked before each request.
    pub fn admit(&mut self, now: Instant) -> Admission {
        if self.until.is_some_and(|until| now < until) {
            return Admission::StillClosed;
        }
        self.until = None;
        let Err(wait) = self.limiter.admit(now) else {
            return Admission::Now;
        };
        if let Err(error) = self.timer.arm(wait) {
            // Without a timer nobody would ever look again.
            tracing::error!(%error, "rate limit of a device is not kept");
            return Admission::Now;
        }
        self.until = Some(now + wait);
        Admission::Closed
    }

    /// Pays for a request of `bytes` bytes.
    pub fn charge(&mut self, bytes: u64) {
        self.limiter.charge(bytes);
    }

    /// The timer has gone off.
    pub fn time_has_come(&mut self) {
        // What cannot be silenced comes again, and finds nothing to do.
        let _ = self.timer.disarm();
        self.until = None;
    }
}

impl AsFd for Throttle {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.timer.as_fd()
    }
}
