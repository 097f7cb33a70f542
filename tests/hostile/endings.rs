//! Ways for a guest to end, and what it may overwrite before it does.

use super::driver::still_works;
use super::machine::{Kind, run, run_well};
use super::script::{I8042, PVPANIC, SERIAL, SLEEP, Script};

#[test]
fn a_guest_that_does_nothing_powers_off() {
    run_well(Kind::Mmio, &mut Script::new());
    run_well(Kind::Pci, &mut Script::new());
}

#[test]
fn a_guest_that_finds_something_wrong_says_where() {
    let mut script = Script::new();
    script.check(4, 0xd000_0000, 0x7472_6976).check(4, 0xd000_0000, 0xdead);
    script.power_off();
    let Some(ended) = run(Kind::Mmio, &script) else { return };
    assert!(ended.code == 111 && ended.stderr.contains("bad 0001"), "{ended:?}");
}

/// Name, exit code, what the guest does.
type Ending = (&'static str, i32, fn(&mut Script));

#[test]
fn h28_each_ending_has_its_exit_code() {
    let endings: [Ending; 4] = [
        ("i8042", 111, |script| {
            script.out(1, I8042, 0xfe).halt();
        }),
        ("pvpanic", 112, |script| {
            script.out(1, PVPANIC, 1).halt();
        }),
        // No page is there, and no handler for the fault.
        ("triple fault", 113, |script| {
            script.read(1, 1 << 40).halt();
        }),
        ("power off", 0, |script| {
            script.out(1, SLEEP, 5 << 2 | 1 << 5).halt();
        }),
    ];
    for (name, code, end) in endings {
        let mut script = Script::new();
        end(&mut script);
        let Some(ended) = run(Kind::Mmio, &script) else { return };
        assert_eq!(ended.code, code, "{name}: {ended:?}");
    }
}

#[test]
fn h29_tables_and_boot_structures_are_the_guests_to_destroy() {
    let mut script = Script::new();
    // GDT, start info, command line; ACPI tables. Not the page tables it runs on, nor its stack.
    for place in [0x500..0x600, 0x6000..0x8000, 0x2_0000..0x2_1000, 0xe_0000..0x10_0000] {
        script.fill(place, 0xff);
    }
    still_works(&mut script, Kind::Mmio);
    run_well(Kind::Mmio, &mut script);
}

#[test]
fn h33_a_flood_on_the_serial_line_is_taken() {
    let mut script = Script::new();
    script.outs(1, SERIAL, 0, 300_000);
    still_works(&mut script, Kind::Mmio);
    script.say("\n");
    run_well(Kind::Mmio, &mut script);
}

/// All ports but those that end the guest, in every size.
#[test]
fn every_port_can_be_written_and_read() {
    for kind in [Kind::Mmio, Kind::Pci] {
        let mut script = Script::new();
        // i8042 takes four bytes at 0x60 to 0x63 as nothing; 0x64 resets with one value only.
        let free = [0..0x64, 0x65..0x3f8, 0x400..0x505, 0x506..0x600, 0x602..0x1_0000];
        for over in free {
            let (first, last) = (over.start, over.end);
            for size in [1, 2, 4] {
                // No access reaches over the end of the range.
                let over = first..last - size + 1;
                script.sweep_in(size, over.clone(), if last > 0x1000 { 7 } else { 1 });
                script.sweep_out(size, over, if last > 0x1000 { 11 } else { 1 }, 0xffff_ffff);
            }
        }
        for value in [0, 0x20, 0x1f, 0x60, 0xff] {
            // i8042 commands that do not reset, the sleep register without S5.
            script.out(1, I8042, value);
        }
        script.out(1, SLEEP, 0x2c).out(1, SLEEP, 0x14).out(1, SLEEP + 1, 0xff);
        script.out(1, PVPANIC, 0).ins(1, PVPANIC, 3).ins(4, PVPANIC, 1).ins(2, SLEEP, 1);
        still_works(&mut script, kind);
        run_well(kind, &mut script);
    }
}
