//! Rings that change under the device's eyes: it lives, and works again after a reset.

use std::sync::atomic::{AtomicBool, Ordering};

use super::{Conformance, GRACE};
use crate::memory::{Bytes, GuestAddress};
use crate::testing::driver::{Descriptor, GuestDriver, flags};
use crate::testing::{HIGH_RAM, HOLE, PATIENCE, RAM_SIZE, eventually};

const END_OF_RAM: u64 = HIGH_RAM.0 + RAM_SIZE;

/// Chains that are rewritten while they are parsed, per queue.
const REWRITTEN: u16 = 400;

/// Random tables per queue.
const STORMS: u64 = 60;

pub(super) fn check(conformance: &Conformance<'_>) {
    let count = conformance.driver().queue_count();
    for queue in 0..count {
        let mut driver = conformance.live();
        same_head_twice(conformance, &mut driver, queue);
        storm(conformance, &mut driver, queue);
        h10_rewritten_by_another_processor(conformance, &mut driver, queue);
    }
}

/// A head that is made available twice is two chains, and comes back at most twice.
fn same_head_twice(conformance: &Conformance<'_>, driver: &mut GuestDriver, queue: u16) {
    let entry = Descriptor { address: 0x40_0000, len: 1, flags: flags::WRITE, next: 0 };
    driver.put_descriptor(queue, 0, entry);
    let before = driver.used_index(queue);
    for _ in 0..2 {
        driver.publish(queue, 0);
    }
    driver.kick(queue);
    if conformance.answers.contains(&queue) {
        let came = |driver: &mut GuestDriver| driver.used_index(queue).wrapping_sub(before);
        assert!(eventually(PATIENCE, || came(driver) == 2 || driver.needs_reset()));
    }
    std::thread::sleep(GRACE);
    assert!(driver.used_index(queue).wrapping_sub(before) <= 2, "a chain came back twice");
    conformance.recovers(driver);
}

/// Random descriptors, rewritten while the device looks at them.
fn storm(conformance: &Conformance<'_>, driver: &mut GuestDriver, queue: u16) {
    for seed in (0..STORMS).step_by(conformance.calmed) {
        let mut random = Random(seed + 1);
        let size = driver.queue_size(queue).min(32);
        for round in 0..8 {
            for place in 0..size {
                let entry = random.descriptor(size);
                driver.put_descriptor(queue, place, entry);
                driver.put_entry(TABLE, place, random.descriptor(size));
            }
            driver.publish(queue, random.below(u32::from(size)) as u16);
            if round % 2 == 0 {
                driver.kick(queue);
            }
        }
        driver.kick(queue);
        driver.reset();
        driver.initialize();
    }
    conformance.exercise_now(driver);
}

/// Another processor of the guest rewrites descriptors and what they point to, as fast as it can,
/// while the device parses them.
fn h10_rewritten_by_another_processor(
    conformance: &Conformance<'_>,
    driver: &mut GuestDriver,
    queue: u16,
) {
    let (memory, ring) = (driver.memory().clone(), GuestDriver::ring_addresses(queue)[0]);
    let size = driver.queue_size(queue).min(16);
    let done = AtomicBool::new(false);
    std::thread::scope(|threads| {
        threads.spawn(|| {
            let mut random = Random(0x10);
            while !done.load(Ordering::Relaxed) {
                let place = u64::from(random.below(u32::from(size)));
                let entry = random.descriptor(size);
                memory.write_slice(&entry.bytes(), GuestAddress(ring + 16 * place)).unwrap();
                let buffer = 0x40_0000 + u64::from(random.below(0x400));
                memory.write_obj(random.next(), GuestAddress(buffer)).unwrap();
            }
        });
        for round in 0..conformance.some_of(REWRITTEN, 2 * size) {
            driver.publish(queue, round % size);
            driver.kick(queue);
            if driver.needs_reset() || round % size == size - 1 {
                driver.reset();
                driver.initialize();
            }
        }
        done.store(true, Ordering::Relaxed);
    });
    conformance.recovers(driver);
}

const TABLE: GuestAddress = GuestAddress(0x30_0000);

/// A generator that gives the same storm each time (SplitMix64).
pub(super) struct Random(pub u64);

impl Random {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub(super) fn below(&mut self, bound: u32) -> u32 {
        (self.next() % u64::from(bound.max(1))) as u32
    }

    pub(super) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u32) as usize]
    }

    /// Mostly plausible: buffers stay out of the rings, so that the storm stays with the
    /// descriptors.
    fn descriptor(&mut self, size: u16) -> Descriptor {
        let near = 0x40_0000 + u64::from(self.below(0x10_0000));
        let far = self.next();
        let odd = [HOLE.0 - 8, HOLE.0, HIGH_RAM.0, END_OF_RAM - 1, u64::MAX - 3];
        let odd = self.pick(&odd);
        let mut address = self.pick(&[near, near, near, near, far, odd]);
        let exact = self.next() as u32;
        let mut len = self.pick(&[0, 1, 8, 15, 16, 17, 44, 512, 513, 4096, 65536, exact]);
        let kinds = [0, flags::NEXT, flags::WRITE, flags::NEXT | flags::WRITE, flags::INDIRECT];
        let flags = self.pick(&kinds);
        if flags == flags::INDIRECT {
            address = TABLE.0;
            len = 16 * self.below(u32::from(size) + 1);
        }
        Descriptor { address, len, flags, next: self.below(u32::from(size) + 2) as u16 }
    }
}
