//! Full disks, disks that fail, and a VMM that is killed: no snapshot is ever half, the one before it
//! is not touched, the VM goes on, and the next difference is complete.

use std::path::Path;
use std::thread;
use std::time::Duration;

use harness::Running;
use harness::counter::{before, follows, goes_on, may_skip};
use harness::filesystem::Filesystem;
use harness::image::Noise;

use crate::guest::{Guests, differing_pages, text};

/// After a snapshot that came to nothing: the VM goes on, and a difference to `base` of what it has
/// done since and before is what memory is.
fn assert_nothing_is_lost(guests: &Guests, running: &Running, base: &Path) {
    goes_on(running);
    guests.snapshot(&["verify", text(base)]).output(0);
    let [difference, whole, merged] =
        ["difference", "whole", "merged"].map(|name| guests.dir(name));
    guests.save("api", &difference, &["--diff-of", text(base), "--keep-paused"]);
    guests.save("api", &whole, &[]);
    guests.ask(&["resume", "api"]).output(0);
    guests.snapshot(&["merge", text(base), text(&difference), text(&merged)]).output(0);
    assert_eq!(differing_pages(&merged, &whole), [0; 0]);
    for dir in [difference, whole, merged] {
        std::fs::remove_dir_all(dir).unwrap();
    }
}

#[test]
fn a_full_disk_leaves_nothing_and_loses_nothing() {
    if may_skip() {
        return;
    }
    let guests = Guests::new();
    // Before the VMM, which sees what was mounted by then.
    let full = Filesystem::memory(&guests.place, "full", 1 << 20);
    let original = guests.start(&[]);
    let (base, dir) = (guests.dir("base"), full.join("snapshot"));
    let needed = guests.save("api", &base, &["--track"]).memory_bytes;
    let parts = [0, 1, 4, 8, 16, 32, 64, 96].map(|percent| needed * percent / 100);
    let mut noise = Noise::new(std::process::id().into());
    let random = (0..kills()).map(|_| random(&mut noise) % needed);
    for part in parts.into_iter().chain(random) {
        full.resize(part.max(4096));
        guests.ask(&["snapshot", "api", text(&dir)]).assert_refused(&["No space left"]);
        let words = ["snapshot", "api", text(&dir), "--diff-of", text(&base), "--keep-paused"];
        let difference = guests.ask(&words);
        assert!(difference.code == 125 || dir.exists(), "{difference:?}");
        guests.ask(&["resume", "api"]);
        goes_on(&original);
        let left = std::fs::read_dir(&full.path).unwrap().count();
        assert_eq!(left, usize::from(dir.exists()), "{part} bytes");
        dir.exists().then(|| std::fs::remove_dir_all(&dir).unwrap());
    }
    assert_nothing_is_lost(&guests, &original, &base);
    follows('a', &guests.end("api", original));
}

#[test]
fn storage_that_fails_leaves_nothing_and_loses_nothing() {
    if may_skip() {
        return;
    }
    let guests = Guests::new();
    let failing = Filesystem::failing(&guests.place, "failing");
    let original = guests.start(&[]);
    let base = guests.dir("base");
    guests.save("api", &base, &["--track"]);
    let dir = failing.join("snapshot");
    guests.ask(&["snapshot", "api", text(&dir)]).assert_refused(&["cannot be written"]);
    assert!(!dir.exists() && !failing.join("snapshot.tmp").exists());
    assert_nothing_is_lost(&guests, &original, &base);
    follows('a', &guests.end("api", original));
}

fn random(noise: &mut Noise) -> u64 {
    let mut random = [0; 8];
    noise.fill(&mut random);
    u64::from_le_bytes(random)
}

/// How often the VMM is killed, or finds the disk full at a random place.
fn kills() -> u64 {
    std::env::var("CUBE_KILLS").map_or(4, |count| count.parse().unwrap())
}

#[test]
fn whenever_the_vmm_is_killed_no_snapshot_is_half() {
    if may_skip() {
        return;
    }
    let mut noise = Noise::new(std::process::id().into());
    for round in 0..kills() {
        let guests = Guests::new();
        let original = guests.start(&[]);
        let [base, dir] = ["base", "snapshot"].map(|name| guests.dir(name));
        let took = guests.save("api", &base, &["--track"]).total_us;
        goes_on(&original);
        let wait = Duration::from_micros(random(&mut noise) % (took + took / 2));
        let words = ["snapshot", "--api-socket", "api", text(&dir)];
        let difference = ["--diff-of", text(&base)];
        let difference = if round % 2 == 0 { &difference[..] } else { &[] };
        let asking = guests.place.call(words).arguments(difference).start();
        thread::sleep(wait);
        guests.murder(original);
        let answered = asking.end().code == 0;
        assert!(dir.exists() || !answered, "after {wait:?}");
        guests.snapshot(&["verify", text(&base)]).output(0);
        let complete = dir.exists().then_some(&dir);
        complete.map(|dir| guests.snapshot(&["verify", text(dir)]).output(0));
        // The name is free for the next one, if it was not reached.
        let next = if complete.is_some() { guests.dir("next") } else { dir };
        let copy = guests.restore(&base, "api", &["--resume"]);
        goes_on(&copy);
        guests.save("api", &next, &["--diff-of", text(&base), "--keep-paused"]);
        guests.snapshot(&["verify", text(&next)]).output(0);
        let [now, merged] = ["now", "merged"].map(|name| guests.dir(name));
        guests.save("api", &now, &[]);
        guests.snapshot(&["merge", text(&base), text(&next), text(&merged)]).output(0);
        assert_eq!(differing_pages(&merged, &now), [0; 0]);
        let printed = guests.end("api", copy);
        follows(before(&printed), &printed);
    }
}
