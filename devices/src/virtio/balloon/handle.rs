//! The host's side of the balloon: its target, what the guest says of itself, counters.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::request::{PAGE_SIZE, Stats};
use crate::event::Event;
use crate::metrics::{GUEST_FAULTS, Metered, Metric};
use crate::virtio::Notifier;

/// What the balloon has done since it was made. Pages are of 4 KiB.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BalloonCounters {
    /// Pages that the driver put into the balloon.
    pub inflated_pages: u64,
    /// Pages that it took out.
    pub deflated_pages: u64,
    /// Bytes that it reported as free.
    pub reported_bytes: u64,
    /// Bytes given back to the host, of both kinds. A page counts each time.
    pub released_bytes: u64,
    /// Pages that are not guest memory.
    pub refused_pages: u64,
    /// Bytes that were offered and not given back: parts of a host page, filled with a poison that
    /// the host cannot keep, or more scattered than the host's mappings allow.
    pub kept_bytes: u64,
    /// Requests with a length that makes no sense.
    pub malformed_requests: u64,
    /// Statistics that came.
    pub statistics: u64,
    /// Times the driver broke the rules of its rings, so that the device had to be reset.
    pub guest_faults: u64,
}

/// The counters while they count.
#[derive(Default)]
pub(super) struct Counters {
    pub(super) inflated_pages: AtomicU64,
    pub(super) deflated_pages: AtomicU64,
    pub(super) reported_bytes: AtomicU64,
    pub(super) released_bytes: AtomicU64,
    pub(super) refused_pages: AtomicU64,
    pub(super) kept_bytes: AtomicU64,
    pub(super) malformed_requests: AtomicU64,
    pub(super) statistics: AtomicU64,
    pub(super) guest_faults: AtomicU64,
}

/// Adds; what it was before.
pub(super) fn count(counter: &AtomicU64, amount: u64) -> u64 {
    counter.fetch_add(amount, Ordering::Relaxed)
}

/// The way to a driver that is there.
pub(super) struct Line {
    pub(super) notifier: Notifier,
    /// Wakes the worker for the statistics queue; none if it was not negotiated.
    pub(super) statistics: Option<Event>,
}

#[derive(Default)]
struct Session {
    line: Option<Line>,
    /// Statistics asked for so far, and the last of them that was answered.
    requested: u64,
    answered: u64,
    stats: Stats,
}

/// What handles, device and worker share. The lock is held for a few assignments only.
#[derive(Default)]
pub(super) struct Shared {
    /// In pages, as in the configuration space.
    target: AtomicU32,
    actual: AtomicU32,
    poison: AtomicU32,
    /// Bytes of guest memory; 0 until there was a driver.
    ram: AtomicU64,
    pub(super) counters: Counters,
    session: Mutex<Session>,
    answer: Condvar,
}

impl Shared {
    fn session(&self) -> MutexGuard<'_, Session> {
        self.session.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn target(&self) -> u32 {
        self.target.load(Ordering::Acquire)
    }

    pub(super) fn set_target(&self, pages: u32) {
        self.target.store(pages, Ordering::Release);
    }

    pub(super) fn actual(&self) -> u32 {
        self.actual.load(Ordering::Acquire)
    }

    pub(super) fn set_actual(&self, pages: u32) {
        self.actual.store(pages, Ordering::Release);
    }

    pub(super) fn poison(&self) -> u32 {
        self.poison.load(Ordering::Acquire)
    }

    pub(super) fn set_poison(&self, value: u32) {
        self.poison.store(value, Ordering::Release);
    }

    /// A driver is there, in a guest with `ram` bytes of memory.
    pub(super) fn connect(&self, line: Line, ram: u64) {
        self.ram.store(ram, Ordering::Release);
        self.session().line = Some(line);
    }

    /// It no longer is, or is not heard for now.
    pub(super) fn disconnect(&self) {
        self.session().line = None;
        self.answer.notify_all();
    }

    /// The number of the last request for statistics, if it was not answered yet.
    pub(super) fn wanted(&self) -> Option<u64> {
        let session = self.session();
        (session.requested > session.answered).then_some(session.requested)
    }

    /// The driver has answered request `number`.
    pub(super) fn publish(&self, number: u64, stats: Stats) {
        let mut session = self.session();
        session.answered = session.answered.max(number);
        session.stats = stats;
        drop(session);
        count(&self.counters.statistics, 1);
        self.answer.notify_all();
    }
}

/// Sets the balloon's size and looks at the guest's memory. Cheap to clone; outlives the device
/// harmlessly.
#[derive(Clone)]
pub struct BalloonHandle {
    shared: Arc<Shared>,
}

impl BalloonHandle {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self { shared }
    }

    /// Asks the guest to hold `bytes` in the balloon, rounded down to 4 KiB: as much as the host
    /// wants back. It does so when it can; see [`BalloonHandle::actual_bytes`]. A guest that is not
    /// there yet finds the request when it comes. More than the guest has makes it give up all that
    /// it can, so the caller should not ask for that.
    pub fn set_target(&self, bytes: u64) {
        let pages = u32::try_from(bytes / PAGE_SIZE).unwrap_or(u32::MAX);
        self.shared.set_target(pages);
        let notifier = self.shared.session().line.as_ref().map(|line| line.notifier.clone());
        if let Some(notifier) = notifier {
            notifier.config_changed();
        }
    }

    /// The target in bytes.
    pub fn target_bytes(&self) -> u64 {
        u64::from(self.shared.target()) * PAGE_SIZE
    }

    /// Bytes that the guest says are in the balloon. A guest may lie, but not beyond what it has.
    pub fn actual_bytes(&self) -> u64 {
        let claimed = u64::from(self.shared.actual()) * PAGE_SIZE;
        match self.shared.ram.load(Ordering::Acquire) {
            0 => claimed,
            ram => claimed.min(ram),
        }
    }

    /// Asks the guest for fresh statistics and waits `timeout` at most. `None` if it does not
    /// answer, or has no driver that could. Not for use on an event loop.
    pub fn statistics(&self, timeout: Duration) -> Option<Stats> {
        let deadline = Instant::now().checked_add(timeout)?;
        let mut session = self.shared.session();
        let kick = session.line.as_ref()?.statistics.clone()?;
        session.requested += 1;
        let number = session.requested;
        kick.signal();
        while session.answered < number {
            session.line.as_ref()?;
            let left = deadline.checked_duration_since(Instant::now())?;
            let waited = self.shared.answer.wait_timeout(session, left);
            session = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        Some(session.stats)
    }

    /// What the balloon has done so far.
    pub fn counters(&self) -> BalloonCounters {
        let counters = &self.shared.counters;
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        BalloonCounters {
            inflated_pages: load(&counters.inflated_pages),
            deflated_pages: load(&counters.deflated_pages),
            reported_bytes: load(&counters.reported_bytes),
            released_bytes: load(&counters.released_bytes),
            refused_pages: load(&counters.refused_pages),
            kept_bytes: load(&counters.kept_bytes),
            malformed_requests: load(&counters.malformed_requests),
            statistics: load(&counters.statistics),
            guest_faults: load(&counters.guest_faults),
        }
    }
}

impl Metered for BalloonHandle {
    fn metrics(&self) -> Vec<Metric> {
        let done = self.counters();
        let counter = Metric::counter;
        vec![
            Metric::gauge(
                "balloon_target_bytes",
                "Bytes that the host wants from the guest",
                self.target_bytes(),
            ),
            Metric::gauge(
                "balloon_actual_bytes",
                "Bytes that the guest says are in the balloon",
                self.actual_bytes(),
            ),
            counter("balloon_inflated_pages_total", "Pages put in", done.inflated_pages),
            counter("balloon_deflated_pages_total", "Pages taken out", done.deflated_pages),
            counter(
                "balloon_reported_bytes_total",
                "Bytes that the guest reported as free",
                done.reported_bytes,
            ),
            counter(
                "balloon_released_bytes_total",
                "Bytes given back to the host, from the balloon and from reports",
                done.released_bytes,
            ),
            counter(
                "balloon_refused_pages_total",
                "Pages put in or reported that are not guest memory",
                done.refused_pages,
            ),
            counter(
                "balloon_kept_bytes_total",
                "Bytes that were offered and could not be given back",
                done.kept_bytes,
            ),
            counter(
                "balloon_malformed_requests_total",
                "Requests with a length that makes no sense",
                done.malformed_requests,
            ),
            counter("balloon_statistics_total", "Statistics that came", done.statistics),
            counter("balloon_guest_faults_total", GUEST_FAULTS, done.guest_faults),
        ]
    }
}
