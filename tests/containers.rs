//! OCI containers in a real guest, run by `cube-oci` as the host's shim calls it.
//!
//! `cargo test -p cube-tests --test containers [FILTER]` runs these, on this machine if its KVM runs
//! Linux guests and in the lab otherwise.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panics")]

use std::process::ExitCode;

#[path = "containers/bundle.rs"]
mod bundle;
#[path = "containers/endings.rs"]
mod endings;
#[path = "containers/limits.rs"]
mod limits;
#[path = "containers/processes.rs"]
mod processes;
#[path = "containers/walls.rs"]
mod walls;

fn main() -> ExitCode {
    let modules = [processes::trials(), walls::trials(), limits::trials(), endings::trials()];
    harness::lab::run_here_or_in_lab(modules.into_iter().flatten().collect())
}
