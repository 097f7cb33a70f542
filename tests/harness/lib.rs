//! What the tests are made with: `cube-vmm` as a person starts it, a guest as a person uses it, and
//! a look at what they leave behind.
//!
//! | module | what it gives |
//! |---|---|
//! | [`place`] | a folder for one test; when it is dropped, nothing may be left in it or alive from it |
//! | [`call`] | one call of `cube-vmm`: its input, environment and user; how it ended |
//! | [`vm`] | [`TestVm`]: a guest that stays, behind its control socket |
//! | [`guest`] | commands in such a guest |
//! | [`lifecycle`] | what a check must survive: pause and resume |
//! | [`counter`] | a guest that counts, for snapshots, on any KVM |
//! | [`census`] | processes, files and memory, as `/proc` has them |
//! | [`terminal`] | a terminal for `cube-vmm` |
//! | [`wire`] | a network namespace with a TAP, and the host's ends of connections |
//! | [`filesystem`] | an XFS, a full disk, one that fails |
//! | [`image`] | kernels of a few bytes, disk and root images |
//! | [`tools`] | programs of the host, with their libraries, for a guest |
//! | [`containerd`] | a containerd with the shim under test, and `ctr` |
//! | [`events`] | what such a containerd tells of its tasks |
//! | [`cri`] | a containerd that serves Kubernetes, with a network for pods, and `crictl` |
//! | [`oci_image`] | container images of a busybox |
//! | [`artifacts`] | where the things under test are, and what to say when they are missing |
//! | [`lab`] | the main function of tests that need real guests: here, or in the lab |
//!
//! Nothing here is part of the product. A failure is a panic with all that is known.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panics")]

pub mod artifacts;
pub mod call;
pub mod census;
pub mod containerd;
pub mod counter;
pub mod cri;
pub mod events;
pub mod filesystem;
pub mod guest;
pub mod image;
pub mod lab;
pub mod lifecycle;
pub mod oci_image;
pub mod place;
pub mod swap;
pub mod terminal;
pub mod tools;
pub mod vm;
pub mod wire;

pub use call::{Call, Ended, Running};
pub use guest::{GuestProcess, Output, sh};
pub use lifecycle::{Step, lifecycle};
pub use place::Place;
pub use vm::TestVm;

/// Waits until something is so.
///
/// # Panics
/// If it takes minutes.
#[track_caller]
pub fn eventually(what: &str, is_so: impl Fn() -> bool) {
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(120);
    while !is_so() {
        assert!(std::time::Instant::now() < deadline, "{what}: not in two minutes");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
}
