//! A guest that stays: `cube-vmm start`, and all that can be asked of it.
//!
//! `cargo test -p cube-tests --test api [FILTER]` runs these, on this machine if its KVM runs Linux
//! guests and in the lab otherwise. A [`TestVm`](harness::TestVm) that is dropped is killed through
//! its control socket, must end in order, and may leave nothing.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panics")]

use std::process::ExitCode;

#[path = "api/commands.rs"]
mod commands;
#[path = "api/control.rs"]
mod control;
#[path = "api/ends.rs"]
mod ends;
#[path = "api/generation.rs"]
mod generation;
#[path = "api/hostile.rs"]
mod hostile;
#[path = "api/identity.rs"]
mod identity;
#[path = "api/metrics.rs"]
mod metrics;
#[path = "api/plug.rs"]
mod plug;
#[path = "api/snapshot.rs"]
mod snapshot;
#[path = "api/streams.rs"]
mod streams;
#[path = "api/vhost_user.rs"]
mod vhost_user;

fn main() -> ExitCode {
    let modules = [
        commands::trials(),
        control::trials(),
        ends::trials(),
        streams::trials(),
        hostile::trials(),
        metrics::trials(),
        plug::trials(),
        generation::trials(),
        vhost_user::trials(),
        snapshot::trials(),
        identity::trials(),
    ];
    harness::lab::run_here_or_in_lab(modules.into_iter().flatten().collect())
}
