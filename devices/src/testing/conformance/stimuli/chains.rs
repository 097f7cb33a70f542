//! Descriptors and rings that no driver would make. Each leaves them as the device finds them at its
//! next notification.

use super::{Chain, Expect};
use crate::memory::{Bytes, GuestAddress};
use crate::testing::driver::{Descriptor, GuestDriver, flags};
use crate::testing::{HIGH_RAM, HOLE, RAM_SIZE};

const END_OF_RAM: u64 = HIGH_RAM.0 + RAM_SIZE;
/// A place for buffers that is nobody's.
const FREE: u64 = 0x30_0000;

pub(super) const CHAINS: &[Chain] = &[
    ("H-01", "points to itself", Expect::Reset, |driver, queue| {
        one(driver, queue, Descriptor { address: 0x1000, len: 16, flags: flags::NEXT, next: 0 });
    }),
    ("H-01", "two that point to each other", Expect::Reset, |driver, queue| {
        for (place, next) in [(0, 1), (1, 0)] {
            let entry = Descriptor { address: 0x1000, len: 16, flags: flags::NEXT, next };
            driver.put_descriptor(queue, place, entry);
        }
        driver.publish(queue, 0);
    }),
    ("H-01", "writable loop", Expect::Reset, |driver, queue| {
        let flags = flags::NEXT | flags::WRITE;
        one(driver, queue, Descriptor { address: 0x1000, len: 16, flags, next: 0 });
    }),
    ("H-01", "next beyond the table", Expect::Reset, |driver, queue| {
        one(
            driver,
            queue,
            Descriptor { address: 0x1000, len: 16, flags: flags::NEXT, next: 0x8000 },
        );
    }),
    ("H-01", "next just beyond the table", Expect::Reset, |driver, queue| {
        let size = driver.queue_size(queue);
        one(driver, queue, Descriptor { address: 0x1000, len: 16, flags: flags::NEXT, next: size });
    }),
    ("H-05", "length 0", Expect::Either, |driver, queue| one(driver, queue, readable(0x1000, 0))),
    ("H-05", "length 0, writable", Expect::Either, |driver, queue| {
        one(driver, queue, writable(0x1000, 0))
    }),
    ("H-05", "length 0 outside memory", Expect::Either, |driver, queue| {
        one(driver, queue, writable(u64::MAX, 0))
    }),
    ("H-05", "length 1", Expect::Either, |driver, queue| one(driver, queue, readable(0x1000, 1))),
    ("H-05", "length 1, writable", Expect::Either, |driver, queue| {
        one(driver, queue, writable(0x1000, 1))
    }),
    ("H-05", "length 4 GiB", Expect::Reset, |driver, queue| {
        one(driver, queue, readable(0, u32::MAX))
    }),
    ("H-05", "length 4 GiB, writable", Expect::Reset, |driver, queue| {
        one(driver, queue, writable(0, u32::MAX))
    }),
    ("H-06", "last byte and one more", Expect::Reset, |driver, queue| {
        one(driver, queue, writable(END_OF_RAM - 1, 2))
    }),
    ("H-06", "behind the end", Expect::Reset, |driver, queue| {
        one(driver, queue, readable(END_OF_RAM, 1))
    }),
    ("H-06", "into the hole", Expect::Reset, |driver, queue| {
        one(driver, queue, writable(HOLE.0 - 8, 16))
    }),
    ("H-06", "in the hole", Expect::Reset, |driver, queue| {
        one(driver, queue, readable(HOLE.0, 16))
    }),
    ("H-06", "out of the hole", Expect::Reset, |driver, queue| {
        one(driver, queue, readable(HIGH_RAM.0 - 8, 16))
    }),
    ("H-06", "over the hole", Expect::Reset, |driver, queue| {
        one(driver, queue, writable(HOLE.0 - 8, RAM_SIZE as u32 + 16));
    }),
    ("H-06", "wraps around", Expect::Reset, |driver, queue| {
        one(driver, queue, readable(u64::MAX - 7, 16))
    }),
    ("H-06", "wraps around, writable", Expect::Reset, |driver, queue| {
        one(driver, queue, writable(u64::MAX, u32::MAX))
    }),
    ("H-05", "sum of 4 GiB", Expect::Either, |driver, queue| {
        let size = driver.queue_size(queue);
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
    ("H-11", "readable after writable", Expect::Reset, |driver, queue| {
        let flags = flags::NEXT | flags::WRITE;
        driver.put_descriptor(queue, 0, Descriptor { address: 0x1000, len: 64, flags, next: 1 });
        driver.put_descriptor(queue, 1, readable(0x2000, 64));
        driver.publish(queue, 0);
    }),
    ("own", "unknown flags", Expect::Either, |driver, queue| {
        one(driver, queue, Descriptor { address: 0x1000, len: 16, flags: 0xfff8, next: 0 });
    }),
    ("H-09", "nested indirect", Expect::Reset, |driver, queue| {
        let table = driver.alloc(16);
        let entry = Descriptor { address: table.0, len: 16, flags: flags::INDIRECT, next: 0 };
        driver.put_entry(table, 0, entry);
        one(driver, queue, entry);
    }),
    ("H-09", "indirect loop", Expect::Reset, |driver, queue| {
        let table = driver.alloc(16);
        let entry = Descriptor { address: 0x1000, len: 16, flags: flags::NEXT, next: 0 };
        driver.put_entry(table, 0, entry);
        indirect(driver, queue, table.0, 16, 0);
    }),
    ("H-09", "indirect next beyond its table", Expect::Reset, |driver, queue| {
        let table = driver.alloc(32);
        let entry = Descriptor { address: 0x1000, len: 16, flags: flags::NEXT, next: 1 };
        driver.put_entry(table, 0, entry);
        indirect(driver, queue, table.0, 16, 0);
    }),
    ("H-09", "indirect of 15 bytes", Expect::Reset, |driver, queue| {
        indirect(driver, queue, 0x40_0000, 15, 0)
    }),
    ("H-09", "indirect of 17 bytes", Expect::Reset, |driver, queue| {
        indirect(driver, queue, 0x40_0000, 17, 0)
    }),
    ("H-09", "indirect of 0 bytes", Expect::Reset, |driver, queue| {
        indirect(driver, queue, 0x40_0000, 0, 0)
    }),
    ("H-09", "indirect of 4 GiB", Expect::Reset, |driver, queue| {
        indirect(driver, queue, 0, 0xffff_fff0, 0)
    }),
    ("H-09", "indirect in the hole", Expect::Reset, |driver, queue| {
        indirect(driver, queue, HOLE.0, 32, 0)
    }),
    ("H-09", "indirect that wraps", Expect::Reset, |driver, queue| {
        indirect(driver, queue, u64::MAX - 15, 32, 0)
    }),
    ("H-09", "indirect and continued", Expect::Reset, |driver, queue| {
        let table = driver.alloc(16);
        driver.put_entry(table, 0, readable(0x1000, 16));
        driver.put_descriptor(queue, 1, readable(0x1000, 16));
        indirect(driver, queue, table.0, 16, flags::NEXT);
    }),
    ("H-04", "available index too far ahead", Expect::Reset, |driver, queue| {
        let ahead = driver.queue_size(queue) + 1;
        driver.set_avail_index(queue, driver.used_index(queue).wrapping_add(ahead));
    }),
    ("H-04", "available index backwards", Expect::Reset, |driver, queue| {
        driver.set_avail_index(queue, u16::MAX)
    }),
    ("H-04", "head just beyond the table", Expect::Reset, |driver, queue| {
        let size = driver.queue_size(queue);
        driver.publish(queue, size);
    }),
    ("H-04", "head far beyond the table", Expect::Reset, |driver, queue| {
        driver.publish(queue, u16::MAX)
    }),
    // Own: descriptors.
    ("own", "one byte, readable, at address 0", Expect::Either, |d, q| one(d, q, readable(0, 1))),
    ("own", "the last byte of RAM", Expect::Either, |d, q| one(d, q, writable(END_OF_RAM - 1, 1))),
    ("own", "the last byte before the hole", Expect::Either, |d, q| {
        one(d, q, writable(HOLE.0 - 1, 1));
    }),
    ("own", "the first byte after the hole", Expect::Either, |d, q| {
        one(d, q, writable(HIGH_RAM.0, 1));
    }),
    ("own", "all of low RAM but the rings, readable", Expect::Either, |d, q| {
        one(d, q, readable(0x40_0000, 0x40_0000));
    }),
    ("own", "all of high RAM, readable", Expect::Either, |d, q| {
        one(d, q, readable(HIGH_RAM.0, RAM_SIZE as u32));
    }),
    ("own", "next set, and next is itself, length 0", Expect::Reset, |d, q| {
        one(d, q, Descriptor { address: FREE, len: 0, flags: flags::NEXT, next: 0 });
    }),
    ("own", "a loop that does not contain the head", Expect::Reset, |d, q| {
        linked(d, q, &[1, 2, 1], 16, 0);
        d.publish(q, 0);
    }),
    ("own", "a loop through the last descriptor", Expect::Reset, |d, q| {
        let last = d.queue_size(q) - 1;
        let entry = |next| Descriptor { address: FREE, len: 1, flags: flags::NEXT, next };
        d.put_descriptor(q, 0, entry(last));
        d.put_descriptor(q, last, entry(0));
        d.publish(q, 0);
    }),
    ("own", "as many descriptors as the queue has, one byte each", Expect::Either, |d, q| {
        whole_table(d, q, 1, 0, false);
    }),
    ("own", "as many writable ones, one byte each", Expect::Either, |d, q| {
        whole_table(d, q, 1, flags::WRITE, false);
    }),
    ("own", "as many empty ones", Expect::Either, |d, q| whole_table(d, q, 0, 0, false)),
    ("own", "as many, and the last points to the first", Expect::Reset, |d, q| {
        whole_table(d, q, 1, 0, true);
    }),
    ("own", "readable, writable, readable", Expect::Reset, |d, q| alternating(d, q, 3, 8)),
    ("own", "sixteen in turn readable and writable", Expect::Reset, |d, q| {
        alternating(d, q, 16, 8)
    }),
    ("own", "readable after an empty writable one", Expect::Reset, |d, q| alternating(d, q, 3, 0)),
    ("H-12", "a bad piece in the middle", Expect::Reset, |d, q| bad_middle(d, q, 0)),
    ("H-12", "a bad writable piece in the middle", Expect::Reset, |d, q| {
        bad_middle(d, q, flags::WRITE);
    }),
    ("H-11", "sixteen pieces of one byte", Expect::Either, |d, q| {
        let ring: Vec<u16> = (1..16).collect();
        linked(d, q, &ring, 1, 0);
        d.publish(q, 0);
    }),
    ("own", "next of a chain's end is not looked at", Expect::Either, |d, q| {
        one(d, q, Descriptor { next: 0xffff, ..readable(FREE, 16) });
    }),
    ("own", "only reserved flags", Expect::Either, |d, q| {
        one(d, q, Descriptor { flags: 0xfff8, ..readable(FREE, 0) });
    }),
    ("own", "two pieces whose sum is 2^32", Expect::Reset, |d, q| {
        d.put_descriptor(q, 1, readable(0, u32::MAX));
        one(d, q, Descriptor { flags: flags::NEXT, next: 1, ..readable(0, 1) });
    }),
    // Own: buffers that are the rings.
    ("own", "the descriptor table as a buffer to write", Expect::Alive, |d, q| over_ring(d, q, 0)),
    ("own", "the available ring as a buffer to write", Expect::Alive, |d, q| over_ring(d, q, 1)),
    ("own", "the used ring as a buffer to write", Expect::Alive, |d, q| over_ring(d, q, 2)),
    ("own", "the descriptor table as a buffer to read", Expect::Either, |d, q| {
        let ring = GuestDriver::ring_addresses(q)[0];
        one(d, q, readable(ring, 256));
    }),
    // Own: indirect tables.
    ("own", "an indirect table that says it is writable", Expect::Either, |d, q| {
        table(d, &[readable(FREE, 16)]);
        let flags = flags::INDIRECT | flags::WRITE;
        one(d, q, Descriptor { address: TABLE, len: 16, flags, next: 0 });
    }),
    ("own", "a direct descriptor before an indirect table", Expect::Either, |d, q| {
        table(d, &[readable(FREE, 16)]);
        let entry = Descriptor { address: TABLE, len: 16, flags: flags::INDIRECT, next: 0 };
        d.put_descriptor(q, 1, entry);
        one(d, q, Descriptor { flags: flags::NEXT, next: 1, ..readable(FREE, 16) });
    }),
    ("own", "two indirect tables one after the other", Expect::Reset, |d, q| {
        table(d, &[Descriptor { flags: flags::NEXT, next: 1, ..readable(FREE, 16) }]);
        indirect(d, q, TABLE, 16, flags::NEXT);
        let entry = Descriptor { address: TABLE, len: 16, flags: flags::INDIRECT, next: 0 };
        d.put_descriptor(q, 1, entry);
    }),
    ("H-09", "an indirect chain longer than the queue", Expect::Reset, |d, q| {
        let size = d.queue_size(q);
        for place in 0..=size {
            let more = if place < size { flags::NEXT } else { 0 };
            let entry = Descriptor { flags: more, next: place + 1, ..readable(FREE, 1) };
            d.put_entry(GuestAddress(TABLE), place, entry);
        }
        indirect(d, q, TABLE, 16 * (u32::from(size) + 1), 0);
    }),
    ("own", "an indirect table of 65535 entries of which one is used", Expect::Either, |d, q| {
        table(d, &[readable(FREE, 16)]);
        indirect(d, q, TABLE, 16 * 65535, 0);
    }),
    ("own", "an indirect table of 65536 entries", Expect::Reset, |d, q| {
        table(d, &[readable(FREE, 16)]);
        indirect(d, q, TABLE, 16 * 65536, 0);
    }),
    ("own", "an indirect table whose end is that of RAM", Expect::Either, |d, q| {
        d.put_entry(GuestAddress(END_OF_RAM - 16), 0, readable(FREE, 16));
        indirect(d, q, END_OF_RAM - 16, 16, 0);
    }),
    ("own", "an indirect table that is cut by the end of RAM", Expect::Reset, |d, q| {
        indirect(d, q, END_OF_RAM - 8, 16, 0);
    }),
    ("own", "an indirect table at an odd address", Expect::Either, |d, q| {
        d.put_entry(GuestAddress(TABLE + 7), 0, readable(FREE, 16));
        indirect(d, q, TABLE + 7, 16, 0);
    }),
    ("own", "an indirect table in the descriptor table", Expect::Reset, |d, q| {
        let ring = GuestDriver::ring_addresses(q)[0];
        indirect(d, q, ring, 16, 0);
    }),
    ("own", "an indirect table with a buffer in the hole", Expect::Reset, |d, q| {
        table(d, &[readable(HOLE.0, 16)]);
        indirect(d, q, TABLE, 16, 0);
    }),
    ("own", "an indirect table that loops over two", Expect::Reset, |d, q| {
        let entry = |next| Descriptor { flags: flags::NEXT, next, ..readable(FREE, 16) };
        table(d, &[entry(1), entry(0)]);
        indirect(d, q, TABLE, 32, 0);
    }),
    ("own", "an empty chain in an indirect table", Expect::Either, |d, q| {
        table(d, &[readable(FREE, 0)]);
        indirect(d, q, TABLE, 16, 0);
    }),
    // Own: the rings themselves.
    ("H-04", "the same head as often as the queue is long", Expect::Either, |d, q| {
        d.put_descriptor(q, 0, readable(FREE, 1));
        for _ in 0..d.queue_size(q) {
            d.publish(q, 0);
        }
    }),
    ("H-07", "all heads for ever, without anything behind them", Expect::Either, |d, q| {
        for _ in 0..d.queue_size(q) {
            d.publish(q, 1);
        }
    }),
    ("own", "one valid head among wrong ones", Expect::Either, |d, q| {
        d.put_descriptor(q, 0, readable(FREE, 1));
        for head in [0, 0xffff, 0, 0x8000] {
            d.publish(q, head);
        }
    }),
    ("own", "an available index that is half the ring of 2^16 ahead", Expect::Reset, |d, q| {
        d.set_avail_index(q, 0x8000);
    }),
    ("own", "flags of the available ring that mean nothing", Expect::Either, |d, q| {
        let avail = GuestDriver::ring_addresses(q)[1];
        d.memory().write_obj(0xfffe_u16, GuestAddress(avail)).unwrap();
        one(d, q, readable(FREE, 16));
    }),
    ("own", "a used index that the driver has changed", Expect::Alive, |d, q| {
        let used = GuestDriver::ring_addresses(q)[2];
        d.memory().write_obj(0x1234_u16, GuestAddress(used + 2)).unwrap();
        one(d, q, readable(FREE, 16));
    }),
    ("own", "an event index in the past", Expect::Either, |d, q| event(d, q, 0x8000)),
    ("own", "an event index in the future", Expect::Either, |d, q| event(d, q, 0x7fff)),
    ("own", "a used ring full of ones", Expect::Alive, |d, q| {
        let used = GuestDriver::ring_addresses(q)[2];
        d.memory().write_slice(&[0xff; 256], GuestAddress(used)).unwrap();
        one(d, q, readable(FREE, 16));
    }),
    ("own", "a descriptor table full of ones", Expect::Reset, |d, q| {
        let ring = GuestDriver::ring_addresses(q)[0];
        d.memory().write_slice(&[0xff; 256], GuestAddress(ring)).unwrap();
        d.publish(q, 0);
    }),
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

const TABLE: u64 = 0x38_0000;

fn table(driver: &mut GuestDriver, entries: &[Descriptor]) {
    for (place, &entry) in entries.iter().enumerate() {
        driver.put_entry(GuestAddress(TABLE), place as u16, entry);
    }
}

/// From descriptor 0 on, each points to the next of `ring`; the last one, if it is not a loop, ends.
fn linked(driver: &mut GuestDriver, queue: u16, ring: &[u16], len: u32, kind: u16) {
    let mut from = 0;
    for &next in ring {
        let entry = Descriptor { address: FREE, len, flags: flags::NEXT | kind, next };
        driver.put_descriptor(queue, from, entry);
        from = next;
    }
    if !ring[..ring.len() - 1].contains(&from) {
        let entry = Descriptor { address: FREE, len, flags: kind, next: 0 };
        driver.put_descriptor(queue, from, entry);
    }
}

fn whole_table(driver: &mut GuestDriver, queue: u16, len: u32, kind: u16, around: bool) {
    let size = driver.queue_size(queue);
    for place in 0..size {
        let last = place + 1 == size;
        let more = if last && !around { 0 } else { flags::NEXT };
        let next = if last { 0 } else { place + 1 };
        let entry = Descriptor { address: FREE, len, flags: more | kind, next };
        driver.put_descriptor(queue, place, entry);
    }
    driver.publish(queue, 0);
}

fn alternating(driver: &mut GuestDriver, queue: u16, count: u16, len: u32) {
    for place in 0..count {
        let write = if place % 2 == 1 { flags::WRITE } else { 0 };
        let more = if place + 1 < count { flags::NEXT } else { 0 };
        let entry = Descriptor { address: FREE, len, flags: write | more, next: place + 1 };
        driver.put_descriptor(queue, place, entry);
    }
    driver.publish(queue, 0);
}

/// Nine pieces of which the fifth is outside of memory.
fn bad_middle(driver: &mut GuestDriver, queue: u16, kind: u16) {
    for place in 0..9 {
        let address = if place == 4 { HOLE.0 } else { FREE + 64 * u64::from(place) };
        let more = if place < 8 { flags::NEXT } else { 0 };
        let entry = Descriptor { address, len: 8, flags: more | kind, next: place + 1 };
        driver.put_descriptor(queue, place, entry);
    }
    driver.publish(queue, 0);
}

fn over_ring(driver: &mut GuestDriver, queue: u16, ring: usize) {
    let address = GuestDriver::ring_addresses(queue)[ring];
    one(driver, queue, writable(address, 256));
}

fn event(driver: &mut GuestDriver, queue: u16, index: u16) {
    let avail = GuestDriver::ring_addresses(queue)[1];
    let place = avail + 4 + 2 * u64::from(driver.queue_size(queue));
    driver.memory().write_obj(index, GuestAddress(place)).unwrap();
    one(driver, queue, readable(FREE, 16));
}
