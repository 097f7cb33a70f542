//! Bad input: whatever a person or a program gives to `cube-vmm` that cannot be, it answers with
//! one line that names the datum and the cure, a code of its own, soon, and leaves nothing behind.
//!
//! No guest runs here, and no guest kernel or root image is needed; `/dev/kvm` need not exist. What
//! is left behind is looked at when a test's [`Place`] is dropped.
//!
//! Two kinds of refusal, told apart on purpose: a value that cannot be ends with 125 and one line
//! ([`Ended::assert_refused`](harness::Ended::assert_refused)); usage that the parser of the
//! command line does not understand ends with 2, and below the line that tells it stand a hint and
//! the way to the help ([`Ended::assert_usage`](harness::Ended::assert_usage)).

#![allow(clippy::unwrap_used, clippy::panic, missing_docs, reason = "tests fail by panics")]

use harness::{Call, Place, image};

#[path = "faults/files.rs"]
mod files;
#[path = "faults/kvm.rs"]
mod kvm;
#[path = "faults/sockets.rs"]
mod sockets;
#[path = "faults/values.rs"]
mod values;

/// A call of `run` with a kernel and an initrd that pass all checks, and other options.
fn run<'a>(place: &'a Place, options: &[&str]) -> Call<'a> {
    with_kernel(place, &place.given("kernel", image::idle_kernel()), options)
}

/// The same with another kernel.
fn with_kernel<'a>(place: &'a Place, kernel: &str, options: &[&str]) -> Call<'a> {
    let initrd = place.given("initrd", image::noise(5000, 1));
    let call = place.call(["run", "--kernel", kernel, "--initrd", &initrd]);
    call.arguments(options).arguments(["--", "true"])
}

/// A call of `start` on `api`, with a kernel that is missing: what is wrong with the socket comes
/// first, and what is right is undone.
fn start<'a>(place: &'a Place, api: &str, options: &[&str]) -> Call<'a> {
    let initrd = place.given("initrd", image::noise(5000, 1));
    let call = place.call(["start", "--kernel", "no-kernel", "--initrd", &initrd]);
    call.arguments(["--api-socket", api]).arguments(options)
}
