//! Descriptors and rings that no driver would make, on every queue of every device.

use super::driver::{self, AVAIL, BUFFER, DESC, USED, descriptor, publish};
use super::machine::{Device, Kind, MEMORY, devices, run_well};
use super::script::Script;

const NEXT: u64 = 1;
const WRITE: u64 = 2;
const INDIRECT: u64 = 4;

/// Address, length, flags and next of a few descriptors, from the first one on.
type Table = &'static [(u64, u64, u64, u64)];

/// Does each of `tables` to each queue of each device, on machines of their own.
fn each_queue(tables: &[Table]) {
    each(|script, device, queue| {
        for table in tables {
            device.initialize(script, queue);
            for (place, &(address, len, flags, next)) in (0..).zip(*table) {
                descriptor(script, place, address, len, flags, next);
            }
            publish(script, 0, 1);
            device.notify(script, queue, 1);
            device.reset(script);
        }
    });
}

fn each(body: impl Fn(&mut Script, &Device, u64)) {
    for kind in [Kind::Mmio, Kind::Pci] {
        let mut script = Script::new();
        for device in devices(kind) {
            device.meet(&mut script);
            for queue in 0..device.queues {
                body(&mut script, &device, queue);
                device.reset(&mut script);
            }
        }
        driver::still_works(&mut script, kind);
        run_well(kind, &mut script);
    }
}

#[test]
fn h01_loops() {
    each_queue(&[
        &[(BUFFER, 16, NEXT, 0)],
        &[(BUFFER, 16, NEXT | WRITE, 0)],
        &[(BUFFER, 16, NEXT, 1), (BUFFER, 16, NEXT, 0)],
        &[(BUFFER, 0, NEXT, 1), (BUFFER, 0, NEXT, 2), (BUFFER, 0, NEXT, 1)],
        &[(BUFFER, 16, NEXT, 8)],
        &[(BUFFER, 16, NEXT, 0xffff)],
    ]);
}

#[test]
fn h05_lengths() {
    each_queue(&[
        &[(BUFFER, 0, 0, 0)],
        &[(BUFFER, 0, WRITE, 0)],
        &[(BUFFER, 1, 0, 0)],
        &[(BUFFER, 1, WRITE, 0)],
        &[(0, 0xffff_ffff, 0, 0)],
        &[(0, 0xffff_ffff, WRITE, 0)],
        &[(BUFFER, 0xffff_ffff, NEXT, 1), (BUFFER, 0xffff_ffff, 0, 0)],
    ]);
}

#[test]
fn h06_addresses_outside_of_memory() {
    each_queue(&[
        &[(MEMORY - 1, 2, WRITE, 0)],
        &[(MEMORY - 1, 2, 0, 0)],
        &[(MEMORY, 1, 0, 0)],
        &[(0xd000_0000, 4, WRITE, 0)],
        &[(0xfee0_0000, 16, 0, 0)],
        &[(0xc001_0000, 16, WRITE, 0)],
        &[(u64::MAX, 2, WRITE, 0)],
        &[(u64::MAX - 7, 16, 0, 0)],
        &[(1 << 63, 0xffff_ffff, WRITE, 0)],
        &[(1 << 32, 4096, WRITE, 0)],
    ]);
}

#[test]
fn h09_indirect_tables() {
    each_queue(&[
        &[(DESC, 16, INDIRECT, 0)],
        &[(BUFFER, 15, INDIRECT, 0)],
        &[(BUFFER, 0, INDIRECT, 0)],
        &[(BUFFER, 0xffff_fff0, INDIRECT, 0)],
        &[(BUFFER, 16, INDIRECT | NEXT, 1), (BUFFER, 16, 0, 0)],
        &[(0xd000_0000, 32, INDIRECT, 0)],
        &[(MEMORY - 8, 16, INDIRECT, 0)],
        &[(u64::MAX - 15, 32, INDIRECT, 0)],
        &[(DESC + 16, 32, INDIRECT, 0), (BUFFER, 16, NEXT, 1), (BUFFER, 16, NEXT, 0)],
    ]);
}

#[test]
fn h11_order_and_pieces() {
    each_queue(&[
        &[(BUFFER, 16, WRITE | NEXT, 1), (BUFFER, 16, 0, 0)],
        &[(BUFFER, 1, NEXT, 1), (BUFFER, 1, NEXT, 2), (BUFFER, 1, NEXT, 3), (BUFFER, 1, WRITE, 0)],
        &[(BUFFER, 16, 0xfff8, 0)],
        &[(BUFFER, 16, NEXT, 1), (MEMORY, 16, NEXT, 2), (BUFFER, 16, 0, 0)],
    ]);
}

#[test]
fn rings_that_are_buffers() {
    each_queue(&[
        &[(DESC, 128, WRITE, 0)],
        &[(AVAIL, 64, WRITE, 0)],
        &[(USED, 64, WRITE, 0)],
        &[(DESC, 128, NEXT, 1), (USED, 64, WRITE, 0)],
    ]);
}

#[test]
fn h04_heads_and_indices() {
    each(|script, device, queue| {
        let heads = [(0, 9), (0, 0x8000), (0, 0xffff), (8, 1), (0xffff, 1), (0, 8)];
        for (head, count) in heads {
            device.initialize(script, queue);
            publish(script, head, count);
            device.notify(script, queue, 1);
            device.reset(script);
        }
        // The same head eight times; then an index that goes back.
        device.initialize(script, queue);
        descriptor(script, 1, BUFFER, 16, 0, 0);
        for slot in 0..8 {
            script.write(2, AVAIL + 4 + 2 * slot, 1);
        }
        for count in [8, 4, 0, 0xfff8] {
            script.write(2, AVAIL + 2, count);
            device.notify(script, queue, 1);
        }
    });
}

/// Rings and buffers in one place, and in the code of the guest's own tables.
#[test]
fn rings_on_top_of_each_other() {
    each(|script, device, queue| {
        for rings in [[DESC; 3], [DESC, DESC + 2, DESC + 4], [DESC, DESC, USED]] {
            device.negotiate(script);
            device.set_queue(script, queue, 8, rings);
            device.set(script, driver::Register::Status, 15);
            script.fill(DESC..DESC + 0x80, 1);
            device.notify(script, queue, 3);
            device.reset(script);
        }
    });
}

/// While the device may be looking.
#[test]
fn h10_descriptors_that_change_under_way() {
    each(|script, device, queue| {
        device.initialize(script, queue);
        script.repeat(30, |script| {
            descriptor(script, 0, BUFFER, 64, NEXT, 1);
            descriptor(script, 1, BUFFER + 64, 64, WRITE, 0);
            publish(script, 0, 1);
            device.notify(script, queue, 1);
            descriptor(script, 0, u64::MAX, 0xffff_ffff, NEXT, 0);
            script.fill(BUFFER..BUFFER + 32, 0xff);
            device.initialize(script, queue);
        });
    });
}
