//! PCI: configuration registers, windows that move, message tables.

use super::driver::{BUFFER, Register, still_works};
use super::machine::{Device, Kind, devices, run_well};
use super::script::Script;

const ECAM: u64 = 0xe000_0000;
const ADDRESS: u16 = 0xcf8;
const DATA: u16 = 0xcfc;

/// For every function of a machine; each is then put back to where it was.
fn each(body: impl Fn(&mut Script, &Device)) {
    let mut script = Script::new();
    for device in devices(Kind::Pci) {
        device.meet(&mut script);
        body(&mut script, &device);
        device.meet(&mut script);
        device.reset(&mut script);
    }
    still_works(&mut script, Kind::Pci);
    run_well(Kind::Pci, &mut script);
}

#[test]
fn configuration_registers_full_of_ones() {
    each(|script, device| {
        let over = device.function()..device.function() + 0x120;
        for size in [1, 2, 4, 8] {
            script.sweep_write(size, over.clone(), 1, u64::MAX).sweep_read(size, over.clone(), 1);
            script.sweep_write(size, over.clone(), 1, 0).sweep_read(size, over.clone(), 3);
        }
    });
}

#[test]
fn the_whole_of_the_enhanced_configuration_space() {
    let mut script = Script::new();
    script.sweep_read(4, ECAM..ECAM + (1 << 20), 100);
    // Not the functions that are there: those have their own test.
    script.sweep_write(4, ECAM + (10 << 15)..ECAM + (1 << 20), 52, u64::MAX);
    script.sweep_write(2, ECAM..ECAM + 0x8000, 14, u64::MAX);
    still_works(&mut script, Kind::Pci);
    run_well(Kind::Pci, &mut script);
}

#[test]
fn configuration_by_ports_of_what_is_not_there() {
    let mut script = Script::new();
    for address in [0, 0x7fff_ffff, 0x8000_0000, 0x8000_ff00, 0x80ff_0000, 0xffff_ffff] {
        script.out(4, ADDRESS, address);
        for size in [1, 2, 4] {
            for port in DATA..DATA + 4 {
                script.out(size, port, u64::MAX).ins(size, port, 1);
            }
        }
    }
    for size in [1, 2, 4] {
        script.sweep_out(size, 0xcf8..0xd00, 1, 0x5555_5555).sweep_in(size, 0xcf8..0xd00, 1);
    }
    still_works(&mut script, Kind::Pci);
    run_well(Kind::Pci, &mut script);
}

/// Over RAM, the code that runs, other windows, the ECAM, the interrupt controllers, nowhere.
#[test]
fn windows_over_everything() {
    let places = [
        0,
        0x10_0000,
        0x20_0000,
        0xc001_0000,
        0xd000_0000,
        ECAM,
        0xfec0_0000,
        0xfee0_0000,
        0xfffb_0000,
        0xffff_0000,
        1 << 32,
        1 << 63,
        u64::MAX,
    ];
    each(|script, device| {
        script.write(8, BUFFER, 0x1234_5678);
        for place in places {
            let bar = device.function() + 0x10;
            script.write(4, bar, place & 0xffff_ffff).write(4, bar + 4, place >> 32);
            // RAM stays RAM.
            script.check(8, BUFFER, 0x1234_5678);
            if place < 1 << 32 {
                script.read(4, place + 0x14);
            }
        }
    });
}

/// Each move is work for the VMM that must not pile up.
#[test]
fn windows_that_move_ten_thousand_times() {
    each(|script, device| {
        let command = device.function() + 4;
        script.repeat(2500, |script| {
            script.write(2, command, 0).write(2, command, 6);
            script.write(4, device.function() + 0x10, 0xc080_0000);
            script.write(4, device.function() + 0x10, device.window());
        });
    });
}

#[test]
fn two_windows_at_one_place() {
    let mut script = Script::new();
    let all = devices(Kind::Pci);
    all.iter().for_each(|device| device.meet(&mut script));
    for device in &all {
        script.write(4, device.function() + 0x10, 0xc080_0000);
        script.read(4, 0xc080_0000);
    }
    for device in &all {
        device.meet(&mut script);
        let (status, size) = device.register(Register::Status);
        script.check(size, status, 0);
    }
    still_works(&mut script, Kind::Pci);
    run_well(Kind::Pci, &mut script);
}

#[test]
fn message_tables_full_of_nonsense() {
    each(|script, device| {
        let (table, pending) = (device.window() + 0x8000, device.window() + 0xc000);
        device.initialize(script, 0);
        for value in [u64::MAX, 0, 0xfee0_0000_fee0_0000] {
            script.sweep_write(4, table..table + 0x200, 4, value);
            script.sweep_write(8, table..table + 0x200, 8, value);
            script.sweep_write(4, pending..pending + 64, 4, value);
            // Messages on, masked, unmasked; wherever the capability is.
            for at in (0x40..0x100).step_by(4) {
                for control in [0xc000_0000, 0x8000_0000, 0x4000_0000] {
                    script.write(4, device.function() + at, control | value & 0xff);
                }
            }
            for queue in 0..device.queues {
                device.notify(script, queue, 2);
            }
        }
        for size in [1, 2] {
            script.sweep_write(size, table..table + 64, 1, u64::MAX);
        }
        script.sweep_read(4, table..pending, 0x204).sweep_read(8, pending..pending + 0x4000, 0x408);
    });
}

#[test]
fn slots_that_nobody_plugged_are_let_go() {
    let mut script = Script::new();
    for port in 0x620..0x62c {
        for size in [1, 2, 4] {
            script.ins(size, port, 2);
        }
    }
    // Not those that are taken: a guest that lets a device go does not have it any more.
    script.outs(4, 0x628, 0xffff_f000, 1000).outs(4, 0x620, u64::MAX, 10).outs(2, 0x628, 1, 10);
    still_works(&mut script, Kind::Pci);
    run_well(Kind::Pci, &mut script);
}
