//! What devices count, in one shape for whoever reads it.
//!
//! A device adds to a [`Count`] where something happens, which costs a relaxed atomic addition, and
//! tells all of its counts through [`Metered`]. The counts belong to the device, not to its worker:
//! they survive reset, pause and whatever the guest does. The VMM gathers the meters of a VM by the
//! names of the devices ([`crate::virtio::VirtioDevice::meter`]).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The help of every device's `guest_faults_total`.
pub const GUEST_FAULTS: &str =
    "Times the driver broke the rules of its rings, so that it has to reset the device";

/// Faults of the guest that a device logs; the later ones are only counted.
pub const LOGGED_FAULTS: u64 = 8;

/// How a number behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Only grows. Its name ends in `_total`.
    Counter,
    /// Goes up and down.
    Gauge,
}

/// A number that a device tells of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Metric {
    /// In the manner of Prometheus: the kind of device, what is counted, its unit, as in
    /// `net_received_bytes_total`. All devices of a kind tell the same names.
    pub name: &'static str,
    /// One sentence for people.
    pub help: &'static str,
    /// How it behaves.
    pub kind: Kind,
    /// What it is now.
    pub value: u64,
}

impl Metric {
    /// One that only grows.
    pub const fn counter(name: &'static str, help: &'static str, value: u64) -> Self {
        Self { name, help, kind: Kind::Counter, value }
    }

    /// One that goes up and down.
    pub const fn gauge(name: &'static str, help: &'static str, value: u64) -> Self {
        Self { name, help, kind: Kind::Gauge, value }
    }
}

/// Something that counts.
pub trait Metered: Send + Sync {
    /// All its numbers, in an order that does not change. Any thread; waits for nobody.
    fn metrics(&self) -> Vec<Metric>;
}

/// The reading side of a device's counts. Outlives the device harmlessly.
pub type Meter = Arc<dyn Metered>;

/// A number that many threads may add to.
#[derive(Debug, Default)]
pub struct Count(AtomicU64);

impl Count {
    /// Nothing yet.
    pub const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Adds one; what it was before.
    pub fn one(&self) -> u64 {
        self.add(1)
    }

    /// Adds `amount`; what it was before.
    pub fn add(&self, amount: u64) -> u64 {
        self.0.fetch_add(amount, Ordering::Relaxed)
    }

    /// For gauges: what it is from now on.
    pub fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }

    /// What it is now.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_addition_is_lost_between_threads() {
        let count = Count::new();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..1000 {
                        count.add(2);
                    }
                });
            }
        });
        assert_eq!(count.get(), 8000);
        assert_eq!(count.one(), 8000);
        count.set(7);
        assert_eq!(count.get(), 7);
    }
}
