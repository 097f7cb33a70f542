//! Chains that no driver would make: the device lives, answers or asks for a reset, and works again
//! afterwards.

use super::Conformance;
use crate::memory::GuestAddress;
use crate::testing::driver::{Descriptor, GuestDriver, flags};
use crate::testing::{HIGH_RAM, HOLE, PATIENCE, RAM_SIZE, eventually};
use std::time::Duration;

const END_OF_RAM: u64 = HIGH_RAM.0 + RAM_SIZE;

/// Time that a device which may keep a chain has to show that it does not.
const GRACE: Duration = Duration::from_millis(5);

/// Random tables per queue.
const STORMS: u64 = 60;

pub(super) fn check(conformance: &Conformance<'_>) {
    let count = conformance.driver().queue_count();
    for queue in 0..count {
        let mut driver = conformance.live();
        for (name, attack) in ATTACKS {
            attack(&mut driver, queue);
            settle(conformance, &mut driver, queue, name);
            conformance.recovers(&mut driver);
        }
        same_head_twice(conformance, &mut driver, queue);
        storm(conformance, &mut driver, queue);
    }
}

fn settle(conformance: &Conformance<'_>, driver: &mut GuestDriver, queue: u16, name: &str) {
    let must = conformance.answers.contains(&queue);
    let before = driver.used_index(queue);
    driver.kick(queue);
    let time = if must { PATIENCE } else { GRACE };
    let settled = eventually(time, || driver.used_index(queue) != before || driver.needs_reset());
    assert!(settled || !must, "queue {queue}, {name}: neither an answer nor a wish to be reset");
}

type Attack = fn(&mut GuestDriver, u16);

/// Each leaves one chain available that is wrong in one way.
const ATTACKS: &[(&str, Attack)] = &[
    ("points to itself", |driver, queue| {
        one(driver, queue, Descriptor { address: 0x1000, len: 16, flags: flags::NEXT, next: 0 });
    }),
    ("two that point to each other", |driver, queue| {
        for (place, next) in [(0, 1), (1, 0)] {
            let entry = Descriptor { address: 0x1000, len: 16, flags: flags::NEXT, next };
            driver.put_descriptor(queue, place, entry);
        }
        driver.publish(queue, 0);
    }),
    ("writable loop", |driver, queue| {
        let flags = flags::NEXT | flags::WRITE;
        one(driver, queue, Descriptor { address: 0x1000, len: 16, flags, next: 0 });
    }),
    ("next beyond the table", |driver, queue| {
        one(
            driver,
            queue,
            Descriptor { address: 0x1000, len: 16, flags: flags::NEXT, next: 0x8000 },
        );
    }),
    ("next just beyond the table", |driver, queue| {
        let size = driver.transport().lifecycle().queue_size(queue);
        one(driver, queue, Descriptor { address: 0x1000, len: 16, flags: flags::NEXT, next: size });
    }),
    ("length 0", |driver, queue| one(driver, queue, readable(0x1000, 0))),
    ("length 0, writable", |driver, queue| one(driver, queue, writable(0x1000, 0))),
    ("length 0 outside memory", |driver, queue| one(driver, queue, writable(u64::MAX, 0))),
    ("length 1", |driver, queue| one(driver, queue, readable(0x1000, 1))),
    ("length 1, writable", |driver, queue| one(driver, queue, writable(0x1000, 1))),
    ("length 4 GiB", |driver, queue| one(driver, queue, readable(0, u32::MAX))),
    ("length 4 GiB, writable", |driver, queue| one(driver, queue, writable(0, u32::MAX))),
    ("last byte and one more", |driver, queue| one(driver, queue, writable(END_OF_RAM - 1, 2))),
    ("behind the end", |driver, queue| one(driver, queue, readable(END_OF_RAM, 1))),
    ("into the hole", |driver, queue| one(driver, queue, writable(HOLE.0 - 8, 16))),
    ("in the hole", |driver, queue| one(driver, queue, readable(HOLE.0, 16))),
    ("out of the hole", |driver, queue| one(driver, queue, readable(HIGH_RAM.0 - 8, 16))),
    ("over the hole", |driver, queue| {
        one(driver, queue, writable(HOLE.0 - 8, RAM_SIZE as u32 + 16));
    }),
    ("wraps around", |driver, queue| one(driver, queue, readable(u64::MAX - 7, 16))),
    ("wraps around, writable", |driver, queue| one(driver, queue, writable(u64::MAX, u32::MAX))),
    ("sum of 4 GiB", |driver, queue| {
        let size = driver.transport().lifecycle().queue_size(queue);
        let len = RAM_SIZE as u32;
        for place in 0..size {
            let flags = if place + 1 < size { flags::NEXT } else { 0 };
            driver.put_descriptor(
                queue,
                place,
                Descriptor { address: 0, len, flags, next: place + 1 },
            );
        }
        driver.publish(queue, 0);
    }),
    ("readable after writable", |driver, queue| {
        let flags = flags::NEXT | flags::WRITE;
        driver.put_descriptor(queue, 0, Descriptor { address: 0x1000, len: 64, flags, next: 1 });
        driver.put_descriptor(queue, 1, readable(0x2000, 64));
        driver.publish(queue, 0);
    }),
    ("unknown flags", |driver, queue| {
        one(driver, queue, Descriptor { address: 0x1000, len: 16, flags: 0xfff8, next: 0 });
    }),
    ("nested indirect", |driver, queue| {
        let table = driver.alloc(16);
        let entry = Descriptor { address: table.0, len: 16, flags: flags::INDIRECT, next: 0 };
        driver.put_entry(table, 0, entry);
        one(driver, queue, entry);
    }),
    ("indirect loop", |driver, queue| {
        let table = driver.alloc(16);
        let entry = Descriptor { address: 0x1000, len: 16, flags: flags::NEXT, next: 0 };
        driver.put_entry(table, 0, entry);
        indirect(driver, queue, table.0, 16, 0);
    }),
    ("indirect next beyond its table", |driver, queue| {
        let table = driver.alloc(32);
        let entry = Descriptor { address: 0x1000, len: 16, flags: flags::NEXT, next: 1 };
        driver.put_entry(table, 0, entry);
        indirect(driver, queue, table.0, 16, 0);
    }),
    ("indirect of 15 bytes", |driver, queue| indirect(driver, queue, 0x40_0000, 15, 0)),
    ("indirect of 17 bytes", |driver, queue| indirect(driver, queue, 0x40_0000, 17, 0)),
    ("indirect of 0 bytes", |driver, queue| indirect(driver, queue, 0x40_0000, 0, 0)),
    ("indirect of 4 GiB", |driver, queue| indirect(driver, queue, 0, 0xffff_fff0, 0)),
    ("indirect in the hole", |driver, queue| indirect(driver, queue, HOLE.0, 32, 0)),
    ("indirect that wraps", |driver, queue| indirect(driver, queue, u64::MAX - 15, 32, 0)),
    ("indirect and continued", |driver, queue| {
        let table = driver.alloc(16);
        driver.put_entry(table, 0, readable(0x1000, 16));
        driver.put_descriptor(queue, 1, readable(0x1000, 16));
        indirect(driver, queue, table.0, 16, flags::NEXT);
    }),
    ("available index too far ahead", |driver, queue| {
        let size = driver.transport().lifecycle().queue_size(queue);
        driver.set_avail_index(queue, size + 1);
    }),
    ("available index backwards", |driver, queue| driver.set_avail_index(queue, u16::MAX)),
    ("head just beyond the table", |driver, queue| {
        let size = driver.transport().lifecycle().queue_size(queue);
        driver.publish(queue, size);
    }),
    ("head far beyond the table", |driver, queue| driver.publish(queue, u16::MAX)),
];

fn readable(address: u64, len: u32) -> Descriptor {
    Descriptor { address, len, flags: 0, next: 0 }
}

fn writable(address: u64, len: u32) -> Descriptor {
    Descriptor { address, len, flags: flags::WRITE, next: 0 }
}

fn one(driver: &mut GuestDriver, queue: u16, descriptor: Descriptor) {
    driver.put_descriptor(queue, 0, descriptor);
    driver.publish(queue, 0);
}

fn indirect(driver: &mut GuestDriver, queue: u16, address: u64, len: u32, more: u16) {
    let flags = flags::INDIRECT | more;
    one(driver, queue, Descriptor { address, len, flags, next: 1 });
}

/// A head that is made available twice is two chains, and comes back at most twice.
fn same_head_twice(conformance: &Conformance<'_>, driver: &mut GuestDriver, queue: u16) {
    driver.put_descriptor(queue, 0, writable(0x40_0000, 1));
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
    for seed in 0..STORMS {
        let mut random = Random(seed + 1);
        let size = driver.transport().lifecycle().queue_size(queue).min(32);
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

const TABLE: GuestAddress = GuestAddress(0x30_0000);

/// A generator that gives the same storm each time (SplitMix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, bound: u32) -> u32 {
        (self.next() % u64::from(bound.max(1))) as u32
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
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
