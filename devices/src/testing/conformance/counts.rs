//! What a device counts: well named, never forgotten, and a fault of the guest is among it.

use super::Conformance;
use crate::metrics::{Kind, Meter, Metric};
use crate::testing::driver::{Descriptor, GuestDriver, flags};
use crate::testing::{PATIENCE, eventually};

pub(super) fn check(conformance: &Conformance<'_>) {
    let device = conformance.device();
    let Some(meter) = device.meter() else { return };
    names_are_in_order(&meter.metrics());
    let mut driver = GuestDriver::with_memory(device, (conformance.ram)());
    driver.initialize();
    let mut last = meter.metrics();
    let steps: [fn(&mut GuestDriver); 3] = [
        |_| {},
        |driver| {
            driver.pause();
            driver.resume();
        },
        |driver| {
            driver.reset();
            driver.initialize();
        },
    ];
    for step in steps {
        conformance.exercise_now(&mut driver);
        step(&mut driver);
        let now = meter.metrics();
        nothing_is_forgotten(&last, &now);
        last = now;
    }
    faults_are_counted(conformance, &meter);
}

fn names_are_in_order(metrics: &[Metric]) {
    assert!(!metrics.is_empty());
    for metric in metrics {
        let name = metric.name;
        assert!(name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_'), "{name}");
        assert_eq!(name.ends_with("_total"), metric.kind == Kind::Counter, "{name}");
        assert!(!metric.help.is_empty() && !metric.help.ends_with('.'), "{name}");
        assert_eq!(metrics.iter().filter(|other| other.name == name).count(), 1, "{name}");
    }
}

fn nothing_is_forgotten(before: &[Metric], after: &[Metric]) {
    assert_eq!(before.len(), after.len());
    for (before, after) in before.iter().zip(after) {
        assert_eq!(before.name, after.name);
        assert!(before.kind == Kind::Gauge || before.value <= after.value, "{before:?} {after:?}");
    }
}

fn faults(meter: &Meter) -> u64 {
    let metrics = meter.metrics();
    let faults = metrics.iter().find(|metric| metric.name.ends_with("_guest_faults_total"));
    faults.expect("the device counts no faults of the guest").value
}

/// On queues where every chain is looked at, one that has no end costs the device a reset.
fn faults_are_counted(conformance: &Conformance<'_>, meter: &Meter) {
    let before = faults(meter);
    for &queue in &conformance.answers {
        let device = conformance.device();
        let meter = device.meter().expect("the meter has gone");
        let mut driver = GuestDriver::with_memory(device, (conformance.ram)());
        driver.initialize();
        let endless = Descriptor { address: 0x1000, len: 16, flags: flags::NEXT, next: 0 };
        driver.put_descriptor(queue, 0, endless);
        driver.publish(queue, 0);
        driver.kick(queue);
        assert!(eventually(PATIENCE, || driver.needs_reset() && faults(&meter) == 1));
        conformance.recovers(&mut driver);
        assert_eq!(faults(&meter), 1, "a reset makes the device forget a fault");
    }
    assert_eq!(faults(meter), before, "devices share their counts");
}
