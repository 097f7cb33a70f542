//! Random accesses. `CUBE_RANDOM_ACCESSES` says how many there are to each device and to the ports,
//! `CUBE_SEED` with which number they start; that is in the message of a failure.

use super::driver::still_works;
use super::machine::{Kind, devices, run_well};
use super::script::Script;

fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).ok().map_or(default, |text| text.parse().unwrap())
}

/// Prints the seed if the test fails.
struct Seed(u64);

impl Seed {
    fn new() -> Self {
        Self(number("CUBE_SEED", 20_240_607))
    }
}

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("CUBE_SEED={}", self.0);
        }
    }
}

fn registers(kind: Kind) {
    let seed = Seed::new();
    let times = number("CUBE_RANDOM_ACCESSES", 5000);
    let mut script = Script::new();
    script.seed(seed.0);
    for device in devices(kind) {
        device.meet(&mut script);
        device.initialize(&mut script, 0);
        script.random_memory(device.window(), 0x1ff, times);
        device.reset(&mut script);
        // Without a driver, and over all of the window.
        script.random_memory(device.window(), 0xfff, times / 4 + 1);
        device.reset(&mut script);
    }
    still_works(&mut script, kind);
    run_well(kind, &mut script);
}

#[test]
fn random_accesses_to_mmio_registers() {
    registers(Kind::Mmio);
}

#[test]
fn random_accesses_to_pci_windows() {
    registers(Kind::Pci);
}

#[test]
fn random_accesses_to_pci_configuration() {
    let seed = Seed::new();
    let times = number("CUBE_RANDOM_ACCESSES", 5000);
    let mut script = Script::new();
    script.seed(seed.0);
    for device in devices(Kind::Pci) {
        script.random_memory(device.function(), 0x13f, times);
    }
    for device in devices(Kind::Pci) {
        device.meet(&mut script);
    }
    still_works(&mut script, Kind::Pci);
    run_well(Kind::Pci, &mut script);
}

/// Ports from 0x1000 on, where nothing ends the guest, and those of single devices.
#[test]
fn random_accesses_to_ports() {
    let seed = Seed::new();
    let times = number("CUBE_RANDOM_ACCESSES", 5000);
    for kind in [Kind::Mmio, Kind::Pci] {
        let mut script = Script::new();
        script.seed(seed.0).random_port(0x1000, 0x7fff, times);
        for (base, mask) in [(0x20, 1), (0x40, 3), (0xa0, 1), (0x70, 1), (0x620, 7), (0xcf8, 7)] {
            script.random_port(base, mask, times / 4 + 1);
        }
        still_works(&mut script, kind);
        run_well(kind, &mut script);
    }
}
