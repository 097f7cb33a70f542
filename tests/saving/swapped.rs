//! Memory in swap is memory: it is saved, and told from what was never touched.

use harness::Running;
use harness::counter::{before, follows, goes_on, may_skip};
use harness::swap::{Swap, page_out, swapped};
use hypervisor::api::MemoryMethod::{Compared, Mapping, Whole};

use crate::differences::chain_of_five_with;
use crate::guest::{Guests, differing_pages};

/// Bytes that a guest has written by the time that it has printed some letters.
const SOME: u64 = 256 << 10;

fn swap_out(running: &Running) {
    page_out(running.pid());
    assert!(swapped(running.pid()) >= SOME, "{} bytes", swapped(running.pid()));
}

#[test]
fn memory_in_swap_is_saved_as_it_was_in_memory() {
    if may_skip() {
        return;
    }
    let guests = Guests::new();
    let _swap = Swap::add(&guests.place, 64 << 20);
    let original = guests.start(&[]);
    goes_on(&original);
    let [here, there] = ["here", "there"].map(|name| guests.dir(name));
    guests.save("api", &here, &["--keep-paused"]);
    swap_out(&original);
    assert_eq!(guests.save("api", &there, &[]).memory, Whole);
    assert_eq!(differing_pages(&here, &there), [0; 0]);
    guests.ask(&["resume", "api"]).output(0);
    follows('a', &guests.end("api", original));
    let copy = guests.restore(&there, "copy", &["--resume"]);
    goes_on(&copy);
    let printed = guests.end("copy", copy);
    follows(before(&printed), &printed);
}

#[test]
fn a_chain_of_differences_is_right_when_memory_is_in_swap() {
    if may_skip() {
        return;
    }
    let guests = Guests::new();
    let _swap = Swap::add(&guests.place, 64 << 20);
    let original = guests.start(&[]);
    let base = guests.dir("base");
    guests.save("api", &base, &[]);
    let end =
        chain_of_five_with(&guests, "api", &original, (&base, Compared), || swap_out(&original));
    guests.end("api", original);
    // The pages of a restored VM that are its own are in swap, too.
    let copy = guests.restore(&end, "copy", &["--resume"]);
    chain_of_five_with(&guests, "copy", &copy, (&end, Mapping), || swap_out(&copy));
    guests.end("copy", copy);
}
