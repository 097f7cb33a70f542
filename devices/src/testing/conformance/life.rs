//! Reset, pause, snapshot and restore, idle and in the middle of traffic.

use ciborium::Value;

use super::Conformance;
use crate::executor::Executor;
use crate::snapshot::{Record, SaveError};
use crate::testing::driver::{Buffer, GuestDriver, Kind};
use crate::testing::{IrqLog, PATIENCE, driver, eventually, snapshot_roundtrip};
use crate::virtio::feature;

/// Resets over each transport of a device that is idle, and as many under load.
const RESETS: usize = 500;

/// Says how many resets there shall be instead.
const RESETS_VARIABLE: &str = "CUBE_RESETS";

/// Pages by which the process may have grown in between, whatever the number of resets: 16 MiB. Only
/// looked at when a number is given, since tests that run beside this one use memory too.
const GROWTH: usize = 4096;

pub(super) fn check(conformance: &Conformance<'_>) {
    without_optional_features(conformance);
    h26_a_device_that_cannot_start_says_so(conformance);
    h27_resets_leak_nothing(conformance);
    pauses_lose_nothing(conformance);
    stop_is_idempotent(conformance);
    live_devices_cannot_be_saved(conformance);
    idle_and_parked_records_come_back(conformance);
    restored_devices_go_on(conformance);
    wishes_to_be_reset_survive(conformance);
    h53_damaged_records_do_no_harm(conformance);
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

/// Pages of memory that the process has.
fn resident() -> usize {
    let statistics = std::fs::read_to_string("/proc/self/statm").unwrap();
    statistics.split(' ').nth(1).unwrap().parse().unwrap()
}

fn h27_resets_leak_nothing(conformance: &Conformance<'_>) {
    let given = std::env::var(RESETS_VARIABLE).ok().map(|number| number.parse().unwrap());
    let resets: usize = given.unwrap_or(RESETS / conformance.thinned);
    let idle: fn(&mut GuestDriver) = |_| {};
    for (name, load) in [("idle", idle), ("under load", traffic)] {
        let mut driver = conformance.live();
        // What is allocated once is allocated by now.
        for _ in 0..50 {
            load(&mut driver);
            driver.reset();
            driver.initialize();
        }
        let (files, pages) = (open_files(), resident());
        let round = |driver: &mut GuestDriver| {
            let files = open_files();
            for _ in 0..resets {
                load(driver);
                driver.reset();
                driver.initialize();
            }
            open_files().saturating_sub(files)
        };
        // Other tests of this process open files too, some of them thousands. A leak is one per reset or
        // more, in each round.
        let mut rounds = Vec::new();
        let quiet = eventually(PATIENCE, || {
            rounds.push(round(&mut driver));
            rounds.last().is_some_and(|leaked| *leaked < resets / 2)
        });
        assert!(quiet, "descriptors leaked in each round of {resets} resets: {rounds:?}");
        let (more_files, more_pages) = (open_files(), resident());
        if given.is_some() {
            let device = driver.lifecycle(|life| life.identity().device_type);
            println!(
                "{device:?} over {:?}, {name}: {resets} resets; {files} files before, {more_files} \
                 after; {pages} pages before, {more_pages} after",
                conformance.kind()
            );
            assert!(more_pages < pages + GROWTH, "memory grew by {} pages", more_pages - pages);
        }
        conformance.exercise_now(&mut driver);
    }
}

/// A device whose event loop has ended, as one without memory or descriptors would have: it asks for
/// a reset at DRIVER_OK, and stays a device.
fn h26_a_device_that_cannot_start_says_so(conformance: &Conformance<'_>) {
    let executor = Executor::spawn("ends").unwrap();
    let device = (conformance.make)(executor.handle());
    drop(executor);
    let mut driver = GuestDriver::over(conformance.kind(), device, (conformance.ram)());
    for _ in 0..3 {
        let features = driver.offered();
        assert!(driver.negotiate(features));
        driver.set_up_queues();
        driver.driver_ok();
        assert!(driver.needs_reset() || conformance.answers.is_empty());
        driver.kick(0);
        driver.notify(0);
        driver.reset();
    }
    driver.pause();
    driver.resume();
    assert!(driver.try_save().is_ok());
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
    let driver = conformance.live();
    assert!(matches!(driver.try_save(), Err(SaveError::Running(_))));
}

fn idle_and_parked_records_come_back(conformance: &Conformance<'_>) {
    let (memory, irq) = ((conformance.ram)(), IrqLog::new());
    match conformance.kind() {
        Kind::Mmio => {
            snapshot_roundtrip(|| driver::mmio(conformance.device(), &memory, &irq), |_| {});
        }
        Kind::Pci => {
            snapshot_roundtrip(|| driver::pci(conformance.device(), &memory, &irq), |_| {});
        }
    }
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
    driver.lifecycle(|life| life.notifier().needs_reset());
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
fn h53_damaged_records_do_no_harm(conformance: &Conformance<'_>) {
    let mut driver = conformance.live();
    conformance.exercise_now(&mut driver);
    driver.pause();
    let record = driver.save();
    let mut bytes = Vec::new();
    ciborium::into_writer(&record, &mut bytes).unwrap();
    for position in (0..bytes.len()).step_by(conformance.thinned) {
        for flip in [1, 0x80] {
            let mut damaged = bytes.clone();
            damaged[position] ^= flip;
            if let Ok(damaged) = ciborium::from_reader::<Record, _>(damaged.as_slice()) {
                try_record(conformance, damaged);
            }
        }
    }
    for len in 0..bytes.len() {
        let cut = ciborium::from_reader::<Record, _>(&bytes[..len]);
        assert!(cut.is_err(), "a record of {} bytes was read from {len}", bytes.len());
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
