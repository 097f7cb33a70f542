//! Snapshots of guests that need no Linux: a few bytes of machine code that count, in a register and
//! in memory, and print each number over the serial port as one of sixteen letters. So whatever is
//! lost, or done twice, is a gap in the alphabet.
//!
//! These run on every KVM, natively, be it one that interprets its guests. What Linux makes of a
//! restore is in `api/snapshot.rs`.

#![allow(clippy::unwrap_used, clippy::panic, missing_docs, reason = "tests fail by panics")]

use std::fs::{self, File};
use std::path::Path;
use std::thread;
use std::time::Duration;

use harness::counter::{Counter, before, follows, goes_on, may_skip};
use harness::eventually;
use nix::sys::signal::Signal;

#[path = "snapshot/golden.rs"]
mod golden;

fn one_guest_becomes_two(transport: &str) {
    if may_skip() {
        return;
    }
    let counter = Counter::new();
    let original = counter.start(transport);
    counter.ask(&["snapshot", "api", counter.dir(), "--keep-paused"]).output(0);
    let last = follows('a', &counter.end("api", original));

    let one = counter.restore("one", &["--resume"]);
    let two = counter.restore("two", &["--resume"]);
    goes_on(&one);
    goes_on(&two);
    for (api, running) in [("one", one), ("two", two)] {
        follows(last, &counter.end(api, running));
    }
}

#[test]
fn one_guest_becomes_two_that_go_on_where_it_was_over_mmio() {
    one_guest_becomes_two("mmio");
}

#[test]
fn one_guest_becomes_two_that_go_on_where_it_was_over_pci() {
    one_guest_becomes_two("pci");
}

#[test]
fn a_guest_that_is_saved_goes_on_and_its_copies_can_be_saved_in_turn() {
    if may_skip() {
        return;
    }
    let mut counter = Counter::new();
    let original = counter.start("mmio");
    for round in 0..5 {
        counter.dir = counter.place.given_path(&format!("round{round}"));
        counter.ask(&["snapshot", "api", counter.dir()]).output(0);
        goes_on(&original);
    }
    follows('a', &counter.end("api", original));
    for generation in 0..4 {
        let copy = counter.restore("api", &[]);
        eventually("it answers", || counter.ask(&["info", "api"]).code == 0);
        assert!(counter.ask(&["info", "api"]).text().contains("\"state\": \"paused\""));
        assert_eq!(copy.stderr.so_far(), b"");
        counter.ask(&["resume", "api"]).output(0);
        goes_on(&copy);
        counter.dir = counter.place.given_path(&format!("generation{generation}"));
        counter.ask(&["pause", "api"]).output(0);
        counter.ask(&["snapshot", "api", counter.dir()]).output(0);
        assert!(counter.ask(&["info", "api"]).text().contains("\"state\": \"paused\""));
        let printed = counter.end("api", copy);
        follows(before(&printed), &printed);
    }
}

#[test]
fn a_snapshot_that_fails_leaves_nothing_and_the_guest_goes_on() {
    if may_skip() {
        return;
    }
    let counter = Counter::new();
    let original = counter.start("mmio");
    let taken = counter.place.given_folder("taken");
    let half = counter.place.given_folder("half.tmp");
    fs::write(Path::new(&half).join("thesis"), "mine").unwrap();
    let beside = Path::new(&half).with_file_name("half");
    let missing = counter.place.given_path("missing").join("snapshot");
    for (dir, why) in [
        (taken.as_str(), "exists"),
        (beside.to_str().unwrap(), "half.tmp exists and has \"thesis\" in it"),
        (missing.to_str().unwrap(), "cannot be written"),
        ("/", "no name"),
    ] {
        counter.ask(&["snapshot", "api", dir]).assert_refused(&[why]);
        goes_on(&original);
    }
    assert_eq!(fs::read_dir(&taken).unwrap().count(), 0);
    assert!(!beside.exists() && !missing.exists());
    follows('a', &counter.end("api", original));
}

/// Whenever the VMM is killed while it writes: what bears the name of a snapshot is one.
#[test]
fn a_vmm_that_dies_while_it_writes_leaves_no_half_snapshot() {
    if may_skip() {
        return;
    }
    for round in 0..12 {
        let counter = Counter::new();
        let original = counter.start("mmio");
        let words = ["snapshot", "--api-socket", "api", counter.dir()];
        let asking = counter.place.call(words).start();
        // Any point in time will do.
        thread::sleep(Duration::from_millis(round * 5));
        original.signal(Signal::SIGKILL);
        original.end();
        let answered = asking.end().code == 0;
        let exists = counter.dir.exists();
        assert!(exists || !answered, "round {round}");
        if exists {
            let copy = counter.restore("copy", &[]);
            eventually("it answers", || counter.ask(&["info", "copy"]).code == 0);
            counter.ask(&["resume", "copy"]).output(0);
            goes_on(&copy);
            let printed = counter.end("copy", copy);
            follows(before(&printed), &printed);
        } else {
            counter.restore("copy", &[]).end().assert_refused(&["cannot be read"]);
        }
        // A VMM that is killed cannot clean up.
        fs::remove_file(counter.place.path("api")).unwrap();
        fs::remove_file(counter.place.path("api.vsock")).unwrap();
    }
}

#[test]
fn what_is_no_snapshot_is_refused_and_leaves_nothing() {
    if may_skip() {
        return;
    }
    let counter = Counter::new();
    let original = counter.start("mmio");
    counter.ask(&["snapshot", "api", counter.dir()]).output(0);
    let refused = |options: &[&str], why: &[&str]| {
        counter.restore("copy", options).end().assert_refused(why);
    };
    refused(
        &["--override", &format!("disk:data={}", counter.place.given_path("disk").display())],
        &["in use"],
    );
    refused(&["--override", "disk:none=/dev/zero"], &["none"]);
    refused(&["--override", "tpm:a=b"], &["tpm:a=b"]);
    counter.end("api", original);
    let manifest = counter.dir.join("manifest.json");
    let whole = fs::read(&manifest).unwrap();
    for bit in (0..whole.len() * 8).step_by(whole.len() / 3) {
        let mut damaged = whole.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        fs::write(&manifest, damaged).unwrap();
        refused(&[], &["manifest.json"]);
    }
    fs::write(&manifest, &whole).unwrap();
    for name in ["memory", "state"] {
        let path = counter.dir.join(name);
        let len = fs::metadata(&path).unwrap().len();
        File::options().write(true).open(&path).unwrap().set_len(len - 1).unwrap();
        refused(&[], &[name, "bytes"]);
        File::options().write(true).open(&path).unwrap().set_len(len).unwrap();
    }
    fs::remove_file(&manifest).unwrap();
    refused(&[], &["no manifest.json"]);
}

/// As with `info | head -n 1`.
#[test]
fn a_reader_that_has_seen_enough_is_no_failure() {
    if may_skip() {
        return;
    }
    let counter = Counter::new();
    let original = counter.start("mmio");
    let pipe = ["bash", "-c", "set -o pipefail; \"$@\" | true", "bash"];
    for command in ["info", "metrics"] {
        let ended = counter.place.call([command, "--api-socket", "api"]).through(&pipe).end();
        assert_eq!(ended.output(0), "");
        assert_eq!(ended.stderr, "", "{command}");
    }
    follows('a', &counter.end("api", original));
}
