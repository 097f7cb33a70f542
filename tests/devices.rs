//! What a guest does with its devices, with the tools that people use.
//!
//! `cargo test -p cube-tests --test devices [FILTER]` runs these, on this machine if its KVM runs Linux
//! guests and in the lab otherwise.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panics")]

use std::process::ExitCode;

#[path = "devices/balloon.rs"]
mod balloon;
#[path = "devices/cycles.rs"]
mod cycles;
#[path = "devices/fio.rs"]
mod fio;
#[path = "devices/kernel_card.rs"]
mod kernel_card;
#[path = "devices/link.rs"]
mod link;
#[path = "devices/network.rs"]
mod network;
#[path = "devices/paths.rs"]
mod paths;
#[path = "devices/pmem.rs"]
mod pmem;
#[path = "devices/shares.rs"]
mod shares;
#[path = "devices/storage.rs"]
mod storage;
#[path = "devices/together.rs"]
mod together;

fn main() -> ExitCode {
    let modules = [
        network::trials(),
        link::trials(),
        paths::trials(),
        kernel_card::trials(),
        balloon::trials(),
        pmem::trials(),
        together::trials(),
        storage::trials(),
        shares::trials(),
        fio::trials(),
        cycles::trials(),
    ];
    harness::lab::run_here_or_in_lab(modules.into_iter().flatten().collect())
}
