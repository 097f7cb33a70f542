//! A guest that is at fault again and again does not fill the log.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use super::Conformance;
use crate::testing::driver::register;
use crate::testing::{PATIENCE, eventually};
use crate::virtio::feature;

/// Faults per queue, and of the set-up.
const FAULTS: usize = 60;

/// Lines per queue that are still few.
const FEW: usize = 12;

static LINES: Mutex<Option<HashMap<String, usize>>> = Mutex::new(None);
static LOOPS: AtomicUsize = AtomicUsize::new(0);

/// A name for an event loop that no other has.
pub(super) fn thread_name() -> String {
    format!("conforms-{}", LOOPS.fetch_add(1, Ordering::Relaxed))
}

/// Counts the lines of each thread.
struct Counter;

impl Subscriber for Counter {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::INFO
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, _: &Event<'_>) {
        let name = std::thread::current().name().unwrap_or_default().to_owned();
        let mut lines = LINES.lock().unwrap_or_else(PoisonError::into_inner);
        *lines.get_or_insert_default().entry(name).or_insert(0) += 1;
    }
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

fn lines(of: &[&str]) -> usize {
    let lines = LINES.lock().unwrap_or_else(PoisonError::into_inner);
    let count = |name: &&str| lines.as_ref().and_then(|lines| lines.get(*name)).copied();
    of.iter().filter_map(count).sum()
}

pub(super) fn check(conformance: &Conformance<'_>) {
    // Fails if the test has a log of its own; then there is nothing to count.
    let _ = tracing::subscriber::set_global_default(Counter);
    let vcpu = std::thread::current().name().unwrap_or_default().to_owned();
    let threads = [vcpu.as_str(), conformance.thread.as_str()];
    let before = lines(&threads);
    let mut driver = conformance.live();
    for &queue in &conformance.answers {
        for _ in 0..FAULTS {
            driver.publish(queue, u16::MAX);
            driver.kick(queue);
            assert!(eventually(PATIENCE, || driver.needs_reset()));
            driver.reset();
            driver.initialize();
        }
    }
    for _ in 0..FAULTS {
        driver.reset();
        assert!(driver.negotiate(feature::VERSION_1));
        driver.set_rings(0, [0x7fff_f000; 3]).unwrap();
        driver.write(register::QUEUE_READY, 1).unwrap();
        driver.driver_ok();
    }
    let written = lines(&threads) - before;
    let few = FEW * (conformance.answers.len() + 1);
    assert!(written <= few, "{written} lines for {FAULTS} faults of each kind");
    assert!(written > 0 || conformance.answers.is_empty(), "no line at all");
    conformance.recovers(&mut driver);
}
