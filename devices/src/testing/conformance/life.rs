//! Reset, pause, snapshot and restore, idle and in the middle of traffic.

use ciborium::Value;

use super::Conformance;
use crate::snapshot::{Record, SaveError, Snapshot};
use crate::testing::driver::{Buffer, GuestDriver};
use crate::testing::{driver, snapshot_roundtrip};
use crate::virtio::feature;

/// Resets of a device that is idle, and as many under load.
const RESETS: usize = 1000;

pub(super) fn check(conformance: &Conformance<'_>) {
    without_optional_features(conformance);
    resets_leak_nothing(conformance);
    pauses_lose_nothing(conformance);
    stop_is_idempotent(conformance);
    live_devices_cannot_be_saved(conformance);
    idle_and_parked_records_come_back(conformance);
    restored_devices_go_on(conformance);
    wishes_to_be_reset_survive(conformance);
    damaged_records_do_no_harm(conformance);
}

fn without_optional_features(conformance: &Conformance<'_>) {
    for unwanted in [feature::RING_EVENT_IDX, feature::RING_INDIRECT_DESC, !feature::VERSION_1] {
        let mut driver = conformance.driver();
        driver.initialize_without(unwanted);
        conformance.exercise_now(&mut driver);
    }
}

/// Fills each queue with chains that are valid for some device.
fn traffic(driver: &mut GuestDriver) {
    for queue in 0..driver.queue_count() {
        for _ in 0..8 {
            let (request, answer) = (driver.alloc(64), driver.alloc(256));
            driver.add(queue, &[Buffer::readable(request, 64), Buffer::writable(answer, 256)]);
        }
        driver.kick(queue);
    }
}

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn resets_leak_nothing(conformance: &Conformance<'_>) {
    let idle: fn(&mut GuestDriver) = |_| {};
    for load in [idle, traffic] {
        let mut driver = conformance.live();
        let before = open_files();
        for _ in 0..RESETS {
            load(&mut driver);
            driver.reset();
            driver.initialize();
        }
        // Other tests open files too; a leak would be one per reset or more.
        let leaked = open_files().saturating_sub(before);
        assert!(leaked < RESETS / 2, "{leaked} descriptors leaked in {RESETS} resets");
        conformance.exercise_now(&mut driver);
    }
}

fn pauses_lose_nothing(conformance: &Conformance<'_>) {
    let mut driver = conformance.live();
    for _ in 0..50 {
        driver.pause();
        driver.pause();
        driver.resume();
        driver.resume();
        conformance.exercise_now(&mut driver);
    }
    for _ in 0..50 {
        traffic(&mut driver);
        driver.pause();
        driver.resume();
        conformance.recovers(&mut driver);
    }
    // Also before there is anything to pause.
    driver.reset();
    driver.pause();
    driver.resume();
    driver.initialize();
    conformance.exercise_now(&mut driver);
    // And a reset while paused.
    driver.pause();
    conformance.recovers(&mut driver);
}

fn stop_is_idempotent(conformance: &Conformance<'_>) {
    let mut device = conformance.device();
    assert!(device.stop().is_empty());
    assert!(device.stop().is_empty());
    device.reset();
    assert!(device.save_record().is_ok());
}

fn live_devices_cannot_be_saved(conformance: &Conformance<'_>) {
    let mut driver = conformance.live();
    assert!(matches!(driver.transport().save(), Err(SaveError::Running(_))));
}

fn idle_and_parked_records_come_back(conformance: &Conformance<'_>) {
    let fresh = || driver::transport(conformance.device(), &crate::testing::ram(), &<_>::default());
    snapshot_roundtrip(fresh, |_| {});
    let mut driver = conformance.live();
    conformance.exercise_now(&mut driver);
    driver.pause();
    let record = driver.save();
    driver.replace(conformance.device(), record.clone()).unwrap();
    assert_eq!(driver.save(), record);
}

fn restored_devices_go_on(conformance: &Conformance<'_>) {
    let mut driver = conformance.live();
    for _ in 0..5 {
        conformance.exercise_now(&mut driver);
        driver.pause();
        let (record, edges) = (driver.save(), driver.irq().count());
        driver.replace(conformance.device(), record).unwrap();
        assert_eq!(driver.irq().count(), edges, "a restore has raised an interrupt");
        driver.resume();
        conformance.exercise_now(&mut driver);
    }
    traffic(&mut driver);
    driver.pause();
    let record = driver.save();
    driver.replace(conformance.device(), record).unwrap();
    driver.resume();
    conformance.recovers(&mut driver);
}

fn wishes_to_be_reset_survive(conformance: &Conformance<'_>) {
    let mut driver = conformance.live();
    driver.transport().lifecycle().notifier().needs_reset();
    driver.pause();
    let (record, edges) = (driver.save(), driver.irq().count());
    driver.replace(conformance.device(), record).unwrap();
    assert_eq!(driver.irq().count(), edges, "a restore has raised an interrupt");
    assert!(driver.needs_reset());
    driver.resume();
    conformance.recovers(&mut driver);
}

/// A record is untrusted: with any byte changed it is refused or taken, and a device that took it
/// can still be reset and used.
fn damaged_records_do_no_harm(conformance: &Conformance<'_>) {
    let mut driver = conformance.live();
    conformance.exercise_now(&mut driver);
    driver.pause();
    let record = driver.save();
    let mut bytes = Vec::new();
    ciborium::into_writer(&record, &mut bytes).unwrap();
    for position in 0..bytes.len() {
        for flip in [1, 0x80] {
            let mut damaged = bytes.clone();
            damaged[position] ^= flip;
            if let Ok(damaged) = ciborium::from_reader::<Record, _>(damaged.as_slice()) {
                try_record(conformance, damaged);
            }
        }
    }
    for state in [Value::Null, Value::Map(Vec::new()), Value::from(7), Value::Array(Vec::new())] {
        let damaged = Record { state, ..record.clone() };
        assert!(driver.replace(conformance.device(), damaged).is_err());
    }
}

fn try_record(conformance: &Conformance<'_>, record: Record) {
    let mut driver = conformance.driver();
    match driver.replace(conformance.device(), record) {
        Ok(()) => {
            driver.resume();
            conformance.recovers(&mut driver);
        }
        Err(_) => assert_eq!(driver.status(), 0),
    }
}
