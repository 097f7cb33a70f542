//! Registers, negotiation and queue set-up: what the driver may do, and when.

use super::Conformance;
use crate::bus::{AccessError, BusDevice};
use crate::testing::driver::{GuestDriver, Kind, register};
use crate::testing::{HIGH_RAM, HOLE, RAM_SIZE};
use crate::virtio::feature;
use crate::virtio::lifecycle::status;
use crate::virtio::mmio::REGION_SIZE;

const CONFIG_CHANGE: u32 = 2;

pub(super) fn check(conformance: &Conformance<'_>) {
    identity(&mut conformance.driver());
    if conformance.kind() == Kind::Mmio {
        access_sizes(&mut conformance.driver());
        unknown_registers(&mut conformance.driver());
    }
    features_before_their_time(&mut conformance.driver());
    features_not_offered(conformance);
    features_are_frozen(&mut conformance.driver());
    status_only_grows(conformance);
    giving_up_is_final(conformance);
    queues_that_do_not_exist(&mut conformance.driver());
    queue_sizes(&mut conformance.driver());
    queues_before_their_time(&mut conformance.driver());
    queues_are_frozen(conformance);
    rings_outside_memory(conformance);
    misaligned_rings(&mut conformance.driver());
    config_space(&mut conformance.driver());
    notifications_out_of_place(conformance);
}

fn refused(result: Result<(), AccessError>) {
    assert!(result.is_err(), "a write was accepted that must be refused");
}

fn identity(driver: &mut GuestDriver) {
    if driver.kind() == Kind::Mmio {
        assert_eq!(driver.read(register::MAGIC), 0x7472_6976);
        assert_eq!(driver.read(register::VERSION), 2);
    }
    assert_ne!(driver.read(register::DEVICE_ID), 0, "0 says that there is no device");
    assert_eq!(driver.status(), 0);
    assert_eq!(driver.read(register::INTERRUPT_STATUS), 0);
    let sizes = driver.lifecycle(|life| life.identity().queue_sizes);
    for (index, size) in sizes.iter().enumerate() {
        assert!(size.is_power_of_two() && *size <= 32768);
        driver.write(register::QUEUE_SELECT, index as u32).unwrap();
        assert_eq!(driver.read(register::QUEUE_SIZE_MAX), u32::from(*size));
        assert_eq!(driver.read(register::QUEUE_READY), 0);
    }
}

fn access_sizes(driver: &mut GuestDriver) {
    for len in [1, 2, 8] {
        let mut data = [0; 8];
        let transport = driver.transport();
        assert!(transport.read(register::STATUS, &mut data[..len]).is_err());
        refused(transport.write(register::STATUS, &[1, 0, 0, 0, 0, 0, 0, 0][..len]));
    }
    for offset in [1, 2, 3, 0x71, 0xfe, 0xff] {
        assert!(driver.transport().read(offset, &mut [0; 4]).is_err());
        refused(driver.write(offset, 1));
    }
    assert_eq!(driver.status(), 0);
}

fn unknown_registers(driver: &mut GuestDriver) {
    for offset in [0x18, 0x1c, 0x28, 0x3c, 0x54, 0x68, 0x74, 0x88, 0x98, 0xa8, 0xd0, 0xf8] {
        assert!(driver.transport().read(offset, &mut [0; 4]).is_err(), "{offset:#x} was read");
        refused(driver.write(offset, 1));
    }
    let read_only = [
        register::MAGIC,
        register::DEVICE_ID,
        register::DEVICE_FEATURES,
        register::QUEUE_SIZE_MAX,
        register::INTERRUPT_STATUS,
        register::CONFIG_GENERATION,
    ];
    for offset in read_only {
        refused(driver.write(offset, 1));
    }
    // Shared memory regions: there are none.
    for offset in [0xb0, 0xb4, 0xb8, 0xbc] {
        assert_eq!(driver.read(offset), u32::MAX);
    }
}

fn features_before_their_time(driver: &mut GuestDriver) {
    refused(driver.write(register::DRIVER_FEATURES, 1));
    driver.write(register::STATUS, status::ACKNOWLEDGE.into()).unwrap();
    refused(driver.write(register::DRIVER_FEATURES, 1));
}

fn features_not_offered(conformance: &Conformance<'_>) {
    let offered = conformance.driver().offered();
    assert_eq!(offered & feature::COMMON, feature::COMMON);
    let missing = (0..64).map(|bit| 1 << bit).filter(|bit| offered & bit == 0);
    for bit in missing {
        let agreed = conformance.driver().negotiate(feature::VERSION_1 | bit);
        assert!(!agreed, "feature {bit:#x} is not offered and was accepted");
    }
    let mut driver = conformance.driver();
    assert!(!driver.negotiate(offered & !feature::VERSION_1), "VERSION_1 must be required");
    // The driver may try again with less, without a reset.
    assert!(driver.negotiate(feature::VERSION_1));
    for page in [2, 3, u32::MAX] {
        driver.write(register::DEVICE_FEATURES_SELECT, page).unwrap();
        assert_eq!(driver.read(register::DEVICE_FEATURES), 0);
    }
    let mut driver = conformance.driver();
    driver.write(register::STATUS, (status::ACKNOWLEDGE | status::DRIVER).into()).unwrap();
    driver.write(register::DRIVER_FEATURES_SELECT, 2).unwrap();
    driver.write(register::DRIVER_FEATURES, 0).unwrap();
    refused(driver.write(register::DRIVER_FEATURES, 1));
}

fn features_are_frozen(driver: &mut GuestDriver) {
    assert!(driver.negotiate(feature::VERSION_1));
    for word in 0..2 {
        driver.write(register::DRIVER_FEATURES_SELECT, word).unwrap();
        refused(driver.write(register::DRIVER_FEATURES, 0));
        refused(driver.write(register::DRIVER_FEATURES, u32::MAX));
    }
    assert_eq!(driver.accepted() >> 32, 1);
}

fn status_only_grows(conformance: &Conformance<'_>) {
    let mut driver = conformance.driver();
    // Nothing but the first steps is possible at first.
    refused(driver.write(register::STATUS, status::DRIVER_OK.into()));
    refused(driver.write(register::STATUS, (status::ACKNOWLEDGE | status::DRIVER_OK).into()));
    assert_eq!(driver.status(), 0);
    driver.write(register::STATUS, status::FEATURES_OK.into()).unwrap();
    assert_eq!(driver.status() & status::FEATURES_OK, 0, "FEATURES_OK without a driver");
    // Bits without a meaning do not stick, nor does the device's own.
    driver.write(register::STATUS, (0x30 | status::NEEDS_RESET).into()).unwrap();
    assert_eq!(driver.status(), 0);
    for wide in [0x100, 0x8000_0000, 0x101] {
        refused(driver.write(register::STATUS, wide));
    }
    assert_eq!(driver.status(), 0);

    let mut driver = conformance.live();
    let live = driver.status();
    for bit in [1, 2, 4, 8] {
        refused(driver.write(register::STATUS, (live & !bit).into()));
        assert_eq!(driver.status(), live);
    }
    driver.write(register::STATUS, live.into()).unwrap();
    driver.write(register::STATUS, (live | status::NEEDS_RESET).into()).unwrap();
    assert_eq!(driver.status(), live);
    conformance.exercise_now(&mut driver);
    driver.reset();
    assert_eq!(driver.read(register::INTERRUPT_STATUS), 0);
}

fn giving_up_is_final(conformance: &Conformance<'_>) {
    let mut driver = conformance.driver();
    assert!(driver.negotiate(feature::VERSION_1));
    driver.set_up_queues();
    let failed = driver.status() | status::FAILED;
    driver.write(register::STATUS, failed.into()).unwrap();
    refused(driver.write(register::STATUS, (failed | status::DRIVER_OK).into()));
    assert_eq!(driver.status(), failed);

    let mut driver = conformance.live();
    let failed = driver.status() | status::FAILED;
    driver.write(register::STATUS, failed.into()).unwrap();
    assert_eq!(driver.status(), failed);
    conformance.recovers(&mut driver);
}

fn queues_that_do_not_exist(driver: &mut GuestDriver) {
    assert!(driver.negotiate(feature::VERSION_1));
    let count = u32::from(driver.queue_count());
    for select in [count, count + 1, 0xffff, 0x1_0000, u32::MAX] {
        if driver.kind() == Kind::Pci && select > 0xffff {
            continue;
        }
        driver.write(register::QUEUE_SELECT, select).unwrap();
        assert_eq!(driver.read(register::QUEUE_SIZE_MAX), 0);
        assert_eq!(driver.read(register::QUEUE_READY), 0);
        for offset in [register::QUEUE_SIZE, register::QUEUE_READY] {
            refused(driver.write(offset, 1));
        }
        for base in [register::QUEUE_DESC, register::QUEUE_AVAIL, register::QUEUE_USED] {
            refused(driver.write(base, 0x1000));
            refused(driver.write(base + 4, 1));
            assert_eq!((driver.read(base), driver.read(base + 4)), (0, 0));
        }
    }
}

fn queue_sizes(driver: &mut GuestDriver) {
    assert!(driver.negotiate(feature::VERSION_1));
    for index in 0..driver.queue_count() {
        driver.write(register::QUEUE_SELECT, index.into()).unwrap();
        let max = driver.read(register::QUEUE_SIZE_MAX);
        let bad = [0, 3, max - 1, max + 1, 2 * max, 65535, 65536, 65536 + max, u32::MAX];
        let good = |size: u32| size.is_power_of_two() && size <= max;
        for size in bad.into_iter().filter(|&size| !good(size)) {
            refused(driver.write(register::QUEUE_SIZE, size));
        }
        if max < 32768 {
            refused(driver.write(register::QUEUE_SIZE, 32768));
        }
        let size = driver.queue_size(index);
        assert_eq!(u32::from(size), max, "a refused size was taken");
        driver.write(register::QUEUE_SIZE, 1).unwrap();
        assert_eq!(driver.queue_size(index), 1);
    }
}

fn touches_are_refused(driver: &mut GuestDriver) {
    for (offset, value) in [
        (register::QUEUE_SIZE, 1),
        (register::QUEUE_DESC, 0x5000),
        (register::QUEUE_DESC + 4, 1),
        (register::QUEUE_AVAIL, 0x5000),
        (register::QUEUE_AVAIL + 4, 1),
        (register::QUEUE_USED, 0x5000),
        (register::QUEUE_USED + 4, 1),
    ] {
        refused(driver.write(offset, value));
    }
}

fn queues_before_their_time(driver: &mut GuestDriver) {
    driver.write(register::QUEUE_SELECT, 0).unwrap();
    touches_are_refused(driver);
    driver.write(register::STATUS, (status::ACKNOWLEDGE | status::DRIVER).into()).unwrap();
    touches_are_refused(driver);
    refused(driver.write(register::QUEUE_READY, 1));
}

/// The lesson of CVE-2026-5747: a queue that is in use does not change.
fn queues_are_frozen(conformance: &Conformance<'_>) {
    let mut driver = conformance.driver();
    assert!(driver.negotiate(feature::VERSION_1));
    driver.set_up_queues();
    let count = driver.queue_count();
    let frozen = |driver: &mut GuestDriver| {
        for index in 0..count {
            driver.write(register::QUEUE_SELECT, index.into()).unwrap();
            touches_are_refused(driver);
            let addresses = GuestDriver::ring_addresses(index);
            assert_eq!(u64::from(driver.read(register::QUEUE_DESC)), addresses[0]);
            assert_eq!(u64::from(driver.read(register::QUEUE_AVAIL)), addresses[1]);
            assert_eq!(u64::from(driver.read(register::QUEUE_USED)), addresses[2]);
            assert_eq!(driver.read(register::QUEUE_READY), 1);
        }
    };
    frozen(&mut driver);
    driver.driver_ok();
    frozen(&mut driver);
    for index in 0..count {
        driver.write(register::QUEUE_SELECT, index.into()).unwrap();
        refused(driver.write(register::QUEUE_READY, 0));
    }
    frozen(&mut driver);
    conformance.exercise_now(&mut driver);
}

fn rings_outside_memory(conformance: &Conformance<'_>) {
    let end = HIGH_RAM.0 + RAM_SIZE;
    let outside: [u64; 6] = [HOLE.0, HOLE.0 - 16, end - 16, end, !0xfff, 0x7fff_ffff_ffff_f000];
    for address in outside {
        for ring in 0..3 {
            let mut driver = conformance.driver();
            assert!(driver.negotiate(feature::VERSION_1));
            let mut rings = GuestDriver::ring_addresses(0);
            rings[ring] = address;
            driver.set_rings(0, rings).unwrap();
            driver.write(register::QUEUE_READY, 1).unwrap();
            driver.driver_ok();
            assert!(driver.needs_reset(), "ring {ring} at {address:#x} was accepted");
            driver.wait_interrupt(CONFIG_CHANGE);
            conformance.recovers(&mut driver);
        }
    }
}

fn misaligned_rings(driver: &mut GuestDriver) {
    assert!(driver.negotiate(feature::VERSION_1));
    driver.write(register::QUEUE_SELECT, 0).unwrap();
    let rings = [(register::QUEUE_DESC, 8), (register::QUEUE_AVAIL, 1), (register::QUEUE_USED, 2)];
    for (offset, misalignment) in rings {
        driver.write(offset, 0x1000).unwrap();
        refused(driver.write(offset, 0x2000 + misalignment));
        assert_eq!(driver.read(offset), 0x1000);
    }
}

fn config_space(driver: &mut GuestDriver) {
    let len = driver.lifecycle(|life| life.identity().config_len);
    let whole = driver.config(0, len as usize);
    for size in [1, 2, 4, 8] {
        for offset in 0..len.saturating_sub(size) + 1 {
            if offset + size <= len {
                let piece = &whole[offset as usize..(offset + size) as usize];
                assert_eq!(driver.config(offset, size as usize), piece);
            }
        }
        let past = [len, len + 1, (len + 1).saturating_sub(size).max(1), u64::MAX - 0x100 - size];
        for offset in past.into_iter().filter(|offset| offset + size > len) {
            let mut data = [0; 8];
            let data = &mut data[..size as usize];
            if driver.kind() == Kind::Pci && offset > 0x1000 {
                continue;
            }
            assert!(driver.read_config(offset, data).is_err());
            refused(driver.write_config(offset, data));
        }
    }
    if len > 0 {
        // Nobody drives the device yet.
        refused(driver.write_config(0, &[0xff]));
    }
    assert!(len <= REGION_SIZE - register::CONFIG);
    let generation = driver.read(register::CONFIG_GENERATION);
    driver.config(0, len as usize);
    assert_eq!(driver.read(register::CONFIG_GENERATION), generation);
}

fn notifications_out_of_place(conformance: &Conformance<'_>) {
    let mut driver = conformance.driver();
    let count = driver.queue_count();
    let everything = |driver: &mut GuestDriver| {
        for index in 0..count {
            driver.kick(index);
        }
        for index in [0, u32::from(count), 0xffff, 0x1_0000, u32::MAX] {
            driver.notify(index);
        }
    };
    everything(&mut driver);
    assert!(driver.negotiate(feature::VERSION_1));
    driver.set_up_queues();
    everything(&mut driver);
    driver.driver_ok();
    everything(&mut driver);
    conformance.exercise_now(&mut driver);
    driver.reset();
    everything(&mut driver);
    driver.initialize();
    everything(&mut driver);
    conformance.exercise_now(&mut driver);
}
