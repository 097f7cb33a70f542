//! Shares as a Linux kernel sees them: this host's own, which mounts one as a guest's would. Its FUSE
//! messages come out of `/dev/fuse`, and go to a server in this process, which can be replaced by one
//! that goes on from its state while the kernel, and whoever has files open, notices nothing.
//!
//! It needs root and `/dev/fuse`; who does without it names `fuse` in `CUBE_ALLOW_SKIP`.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panics")]

#[allow(
    clippy::too_many_arguments,
    dead_code,
    reason = "the messages that the other tests make are made by a kernel here"
)]
#[path = "../fsd/guest.rs"]
mod guest;
mod helper;
#[allow(dead_code, reason = "the other tests use the rest")]
#[path = "../fsd/local.rs"]
mod local;
mod mounted;
mod posix;
mod scenarios;

use std::process::ExitCode;
use std::{env, fs};

use libtest_mimic::{Arguments, Trial};

fn main() -> ExitCode {
    let words: Vec<String> = env::args().collect();
    if let Some(code) = helper::run(&words) {
        return code;
    }
    let arguments = Arguments::from_args();
    let allowed = env::var("CUBE_ALLOW_SKIP").unwrap_or_default();
    let missing = fs::OpenOptions::new().read(true).write(true).open("/dev/fuse").err();
    if let Some(error) = missing.filter(|_| !arguments.list) {
        if allowed.split(',').any(|word| word == "fuse") {
            eprintln!("\x1b[31mSKIPPED: shares in this kernel: /dev/fuse: {error}\x1b[0m");
            return ExitCode::SUCCESS;
        }
        eprintln!("/dev/fuse: {error} (be root, or do without these tests: CUBE_ALLOW_SKIP=fuse)");
        return ExitCode::FAILURE;
    }
    let mut all = scenarios::all();
    if env::var_os("CUBE_PJDFSTEST").is_some() {
        all.push(("pjdfstest_fails_where_the_file_system_below_does", posix::pjdfstest));
    }
    let trials = all.into_iter().map(|(name, test)| {
        Trial::test(name, move || {
            test();
            Ok(())
        })
    });
    libtest_mimic::run(&arguments, trials.collect()).exit_code()
}
