//! Memory that is written while the guest runs: what it writes meanwhile is in the snapshot as of the
//! instant at which it stands still, and nothing of it was written twice at rest.

use std::path::PathBuf;

use harness::Running;
use harness::counter::{before, follows, goes_on, may_skip};
use hypervisor::api::MemoryMethod::{Log, Whole};

use crate::differences::chain_of_five;
use crate::guest::{Guests, assert_same_but_for_the_generation, differing_pages, text};

/// Writes the number of the turn to each of 1024 pages at 16 MiB, but zeros in every fourth turn, and
/// prints: pages become holes and data all the time, faster than they are copied.
#[rustfmt::skip]
const SWEEP: &[u8] = &[
    0x83, 0xc9, 0xff,                   // or ecx,-1
    0x66, 0xba, 0xf8, 0x03,             // mov dx,0x3f8
    // turn:
    0xff, 0xc1,                         // inc ecx
    0x89, 0xc8,                         // mov eax,ecx
    0xa8, 0x03,                         // test al,3
    0x75, 0x02,                         // jnz write
    0x31, 0xc0,                         // xor eax,eax
    // write:
    0xbf, 0x00, 0x00, 0x00, 0x01,       // mov edi,0x1000000
    // page:
    0x48, 0x89, 0x07,                   // mov QWORD PTR [rdi],rax
    0x48, 0x81, 0xc7, 0, 0x10, 0, 0,    // add rdi,0x1000
    0x48, 0x81, 0xff, 0, 0, 0x40, 0x01, // cmp rdi,0x1400000
    0x72, 0xed,                         // jb page
    0x89, 0xc8,                         // mov eax,ecx
    0x24, 0x0f,                         // and al,0xf
    0x04, b'a',                         // add al,'a'
    0xee,                               // out dx,al
    0xeb, 0xd5,                         // jmp turn
];

fn sweeping(guests: &Guests) -> Running {
    guests.start_of(SWEEP, "64M", &[])
}

#[test]
fn a_chain_of_differences_of_a_guest_that_writes_all_the_time_is_of_its_instants() {
    if may_skip() {
        return;
    }
    let guests = Guests::new();
    let original = sweeping(&guests);
    let base = guests.dir("base");
    guests.save("api", &base, &["--track"]);
    let end = chain_of_five(&guests, "api", &original, &base, Log);
    follows('p', &guests.end("api", original));

    let copy = guests.restore(&end, "copy", &[]);
    guests.save("copy", &guests.dir("again"), &[]);
    assert_same_but_for_the_generation(&end, &guests.dir("again"));
    guests.ask(&["resume", "copy"]).output(0);
    goes_on(&copy);
    let printed = guests.end("copy", copy);
    follows(before(&printed), &printed);
}

/// Takes whole snapshots of a VM whose writes are logged, and of the same instants at rest.
fn assert_whole_ones_are_of_one_instant(guests: &Guests, original: Running) {
    guests.save("api", &guests.dir("base"), &["--track"]);
    for number in 0..5 {
        goes_on(&original);
        let dir = |what| -> PathBuf { guests.dir(&format!("{what}.{number}")) };
        let [running, still] = ["running", "still"].map(dir);
        let report = guests.save("api", &running, &["--keep-paused"]);
        assert_eq!(report.memory, Whole);
        let report = guests.save("api", &still, &[]);
        assert!(report.still_bytes >= report.memory_bytes, "{report:?}");
        assert_eq!(differing_pages(&running, &still), [0; 0]);
        guests.snapshot(&["verify", text(&running)]).output(0);
        guests.ask(&["resume", "api"]).output(0);
    }
    let written = guests.end("api", original);
    follows(before(&written), &written);
}

#[test]
fn whole_memory_that_is_written_while_the_guest_runs_is_of_one_instant() {
    if may_skip() {
        return;
    }
    let guests = Guests::new();
    let original = guests.start(&[]);
    assert_whole_ones_are_of_one_instant(&guests, original);
}

#[test]
fn whole_memory_of_a_guest_that_writes_all_the_time_is_of_one_instant() {
    if may_skip() {
        return;
    }
    let guests = Guests::new();
    let original = sweeping(&guests);
    assert_whole_ones_are_of_one_instant(&guests, original);
}

#[test]
fn a_guest_stands_still_for_what_it_has_written_to_since_it_was_copied() {
    if may_skip() {
        return;
    }
    let guests = Guests::new();
    let original = guests.start(&[]);
    let [base, one, two] = ["base", "one", "two"].map(|name| guests.dir(name));
    guests.save("api", &base, &["--track"]);
    goes_on(&original);
    let report = guests.save("api", &one, &["--diff-of", text(&base)]);
    assert_eq!(report.memory, Log);
    assert!(report.still_bytes < report.memory_bytes, "{report:?}");
    // When it does not run there is nothing to write before.
    goes_on(&original);
    guests.ask(&["pause", "api"]).output(0);
    let report = guests.save("api", &two, &["--diff-of", text(&one)]);
    assert!(report.still_bytes >= report.memory_bytes, "{report:?}");
    guests.ask(&["resume", "api"]).output(0);
    follows('a', &guests.end("api", original));
}
