//! From `cube-vmm run` to the end of a command in a real guest.
//!
//! `cargo test -p cube-tests --test boot [FILTER]` runs these, on this machine if its KVM runs Linux
//! guests and in the lab otherwise. What a test leaves behind is looked at when its
//! [`Place`](harness::Place) is dropped.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panics")]

use std::process::ExitCode;

#[path = "boot/commands.rs"]
mod commands;
#[path = "boot/disks.rs"]
mod disks;
#[path = "boot/endings.rs"]
mod endings;
#[path = "boot/machine.rs"]
mod machine;
#[path = "boot/remains.rs"]
mod remains;
#[path = "boot/signals.rs"]
mod signals;
#[path = "boot/stock.rs"]
mod stock;
#[path = "boot/terminal.rs"]
mod terminal;

fn main() -> ExitCode {
    let modules = [
        commands::trials(),
        machine::trials(),
        disks::trials(),
        endings::trials(),
        signals::trials(),
        terminal::trials(),
        remains::trials(),
        stock::trials(),
    ];
    harness::lab::run_here_or_in_lab(modules.into_iter().flatten().collect())
}
