//! What a console tells of what it has done.

use std::sync::atomic::{AtomicU64, Ordering};

use super::{ConsoleCounters, Shared};
use crate::metrics::{GUEST_FAULTS, Metered, Metric};

impl Shared {
    pub(super) fn counters(&self) -> ConsoleCounters {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        ConsoleCounters {
            printed_bytes: load(&self.printed),
            emergency_bytes: load(&self.emergency),
            dropped_bytes: load(&self.dropped),
            typed_bytes: load(&self.typed),
            guest_faults: load(&self.guest_faults),
        }
    }
}

impl Metered for Shared {
    fn metrics(&self) -> Vec<Metric> {
        let done = self.counters();
        let counter = Metric::counter;
        vec![
            counter(
                "console_printed_bytes_total",
                "Bytes that the guest printed",
                done.printed_bytes,
            ),
            counter(
                "console_emergency_bytes_total",
                "Bytes of these that were printed without a queue",
                done.emergency_bytes,
            ),
            counter(
                "console_dropped_bytes_total",
                "Bytes of writes longer than the whole output ring, that nobody could read",
                done.dropped_bytes,
            ),
            counter("console_typed_bytes_total", "Bytes given to the guest", done.typed_bytes),
            counter("console_guest_faults_total", GUEST_FAULTS, done.guest_faults),
        ]
    }
}
