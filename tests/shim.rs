//! Containers as people run them: through a containerd, with `ctr`, in microVMs.
//!
//! `cargo test -p cube-tests --test shim [FILTER]` runs these, on this machine if its KVM runs
//! Linux guests and in the lab otherwise. They need root.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panics")]

use std::process::ExitCode;

#[path = "shim/battery.rs"]
mod battery;
#[path = "shim/contract.rs"]
mod contract;
#[path = "shim/copies.rs"]
mod copies;
#[path = "shim/cri.rs"]
mod cri;
#[path = "shim/cuts.rs"]
mod cuts;
#[path = "shim/endings.rs"]
mod endings;
#[path = "shim/faults.rs"]
mod faults;
#[path = "shim/ladders.rs"]
mod ladders;
#[path = "shim/leaks.rs"]
mod leaks;
#[path = "shim/network.rs"]
mod network;
#[path = "shim/sleep.rs"]
mod sleep;
#[path = "shim/upgrade.rs"]
mod upgrade;

fn main() -> ExitCode {
    let modules = [
        battery::trials(),
        contract::trials(),
        cri::trials(),
        endings::trials(),
        sleep::trials(),
        copies::trials(),
        cuts::trials(),
        network::trials(),
        faults::trials(),
        ladders::trials(),
        leaks::trials(),
        upgrade::trials(),
    ];
    harness::lab::run_here_or_in_lab(modules.into_iter().flatten().collect())
}
