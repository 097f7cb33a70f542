//! The agent and the host's client, talking over a unix socket on this very machine: everything
//! but the guest. Needs no KVM and no root; what does need root says so and is not run without.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod harness;
mod life;
mod protocol;
mod run;
mod streams;
mod tty;
