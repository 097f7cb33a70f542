//! What differs from another snapshot, in each of the ways to know it.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use harness::Running;
use harness::counter::{before, follows, goes_on, may_skip};
use hypervisor::api::MemoryMethod::{self, Compared, Log, Mapping, Whole};

use crate::guest::{Guests, assert_same_but_for_the_generation, differing_pages, text};

/// Merges a whole snapshot and differences; where that is.
fn merged(guests: &Guests, parts: &[PathBuf], name: &str) -> PathBuf {
    let out = guests.dir(name);
    let words = parts.iter().map(|dir| text(dir));
    let words: Vec<_> = ["merge"].into_iter().chain(words).chain([text(&out)]).collect();
    guests.snapshot(&words).output(0);
    guests.snapshot(&["verify", text(&out)]).output(0);
    out
}

/// Takes five differences of a VM, each to the one before and the first found in the way `first`.
/// Each time a whole snapshot is taken of the same instant, and must be what the chain becomes.
pub fn chain_of_five(
    guests: &Guests,
    api: &str,
    running: &Running,
    base: &Path,
    first: MemoryMethod,
) -> PathBuf {
    chain_of_five_with(guests, api, running, (base, first), || ())
}

/// The same, with something that happens before each snapshot.
pub fn chain_of_five_with(
    guests: &Guests,
    api: &str,
    running: &Running,
    (base, first): (&Path, MemoryMethod),
    before_each: impl Fn(),
) -> PathBuf {
    let mut parts = vec![base.to_owned()];
    let mut becomes = PathBuf::new();
    for number in 1..=5 {
        goes_on(running);
        let difference = guests.dir(&format!("{api}.difference.{number}"));
        let how = if number == 1 { first } else { Log };
        before_each();
        guests.save_difference(api, &difference, &parts[number - 1], how);
        parts.push(difference);
        before_each();
        let whole = guests.dir(&format!("{api}.whole.{number}"));
        assert_eq!(guests.save(api, &whole, &[]).memory, Whole);
        becomes = merged(guests, &parts, &format!("{api}.merged.{number}"));
        assert_eq!(differing_pages(&becomes, &whole), [0; 0]);
        guests.ask(&["resume", api]).output(0);
    }
    becomes
}

#[test]
fn a_chain_of_differences_becomes_what_memory_was_on_both_sides_of_the_gap() {
    if may_skip() {
        return;
    }
    let guests = Guests::new();
    let original = guests.start(&[]);
    let base = guests.dir("base");
    guests.save("api", &base, &["--track"]);
    let end = chain_of_five(&guests, "api", &original, &base, Log);
    guests.end("api", original);

    let copy = guests.restore(&end, "copy", &[]);
    guests.save("copy", &guests.dir("again"), &[]);
    assert_same_but_for_the_generation(&end, &guests.dir("again"));
    guests.ask(&["resume", "copy"]).output(0);
    goes_on(&copy);
    let printed = guests.end("copy", copy);
    follows(before(&printed), &printed);
}

#[test]
fn the_first_difference_is_right_when_nothing_was_tracked() {
    if may_skip() {
        return;
    }
    let guests = Guests::new();
    let original = guests.start(&[]);
    let base = guests.dir("base");
    guests.save("api", &base, &[]);
    chain_of_five(&guests, "api", &original, &base, Compared);
    follows('a', &guests.end("api", original));
}

#[test]
fn a_restored_vm_knows_what_differs_from_where_it_comes_from() {
    if may_skip() {
        return;
    }
    let guests = Guests::new();
    let original = guests.start(&[]);
    let base = guests.dir("base");
    guests.save("api", &base, &[]);
    guests.end("api", original);
    let copy = guests.restore(&base, "copy", &["--resume"]);
    chain_of_five(&guests, "copy", &copy, &base, Mapping);
    guests.end("copy", copy);
}

#[test]
fn what_a_vm_cannot_differ_from_is_refused_and_it_goes_on() {
    if may_skip() {
        return;
    }
    let guests = Guests::new();
    let original = guests.start(&[]);
    let [base, one, out] = ["base", "one", "out"].map(|name| guests.dir(name));
    guests.save("api", &base, &[]);
    guests.save("api", &one, &["--diff-of", text(&base)]);
    for (of, why) in [(&out, "cannot be read"), (&guests.dir(""), "no manifest.json")] {
        guests.ask(&["snapshot", "api", text(&out), "--diff-of", text(of)]).assert_refused(&[why]);
    }
    // Another VM, of which it can only tell what differs by reading.
    let copy = guests.restore(&base, "copy", &["--resume"]);
    let words = ["snapshot", "copy", text(&out), "--diff-of", text(&one)];
    guests.ask(&words).assert_refused(&["is itself one"]);
    assert!(!out.exists());
    guests
        .place
        .call(["restore", text(&one), "--api-socket", "third"])
        .end()
        .assert_refused(&["snapshot merge", text(&one)]);
    goes_on(&original);
    goes_on(&copy);
    guests.end("copy", copy);
    follows('a', &guests.end("api", original));
}

#[test]
fn what_a_snapshot_is_can_be_asked_without_a_vm() {
    if may_skip() {
        return;
    }
    let guests = Guests::new();
    let original = guests.start(&[]);
    let [base, one] = ["all/base", "all/one"].map(|name| guests.dir(name));
    guests.place.given_folder("all");
    let id = guests.save("api", &base, &["--durability", "none"]).id;
    guests.save("api", &one, &["--diff-of", text(&base)]);
    guests.end("api", original);
    let told = guests.snapshot(&["info", text(&base)]).output(0);
    assert!(told.contains(&id) && told.contains("3200M, whole"), "{told}");
    let json = guests.snapshot(&["info", text(&one), "--json"]).output(0);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["parent"]["id"], *id);
    let all = guests.dir("all");
    let listed = guests.snapshot(&["list", text(&all)]).output(0);
    let kinds: Vec<_> = listed.lines().map(|line| line.split_whitespace().nth(2)).collect();
    assert_eq!(kinds, [Some("MEMORY"), Some("whole"), Some("differs")], "{listed}");
    guests.snapshot(&["verify", text(&base)]).output(0);
    guests.snapshot(&["verify", text(&one)]).output(0);
    let memory = File::options().write(true).open(base.join("memory")).unwrap();
    memory.write_all_at(b"x", 0x20_0001).unwrap();
    guests.snapshot(&["verify", text(&base)]).assert_refused(&["memory is damaged", "2097152"]);
}
