//! Memory that is given back while hot pages come in: it must read as zeros, whoever was faster.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::thread;

use hypervisor::snapshot::hot::HotSet;
use hypervisor::snapshot::pages::PageSet;
use hypervisor::snapshot::paging::{self, Loaded, MemoryMode};
use hypervisor::snapshot::prefetch::{Plan, PrefetchState};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

use crate::PAGE;

const BYTES: u64 = 64 << 20;

/// Memory with the number of each page in it, but for zeros in each fifth, all of which is hot.
fn loaded() -> Loaded {
    let image: File = tempfile::tempfile().unwrap();
    image.set_len(BYTES).unwrap();
    for page in (1..BYTES / PAGE).filter(|page| page % 5 != 0) {
        image.write_all_at(&page.to_le_bytes(), page * PAGE).unwrap();
    }
    let set = HotSet::of("0".repeat(32), BYTES, &PageSet::all(BYTES));
    let plan = Some(Plan { set, limit: BYTES });
    let lost = Box::new(|message: &str| panic!("{message}"));
    paging::load(&MemoryMode::Uffd, BYTES, image, plan, lost).unwrap()
}

#[test]
fn pages_that_are_given_back_meanwhile_do_not_come_back() {
    for round in 0..4 {
        let Loaded { memory, pager, prefetch } = loaded();
        let mut prefetch = prefetch.unwrap();
        let host = memory.get_host_address(GuestAddress(0)).unwrap() as usize;
        // Each third page, of which some are there by then, and some are on their way.
        let mut gone: Vec<u64> = (0..BYTES / PAGE).filter(|page| page % 3 == 0).collect();
        if round % 2 == 1 {
            gone.reverse();
        }
        prefetch.start();
        let give_back = {
            let gone = gone.clone();
            thread::spawn(move || {
                for page in gone {
                    let address = (host + (page * PAGE) as usize) as *mut libc::c_void;
                    // SAFETY: a page of guest memory that lives as long as the test.
                    let done =
                        unsafe { libc::madvise(address, PAGE as usize, libc::MADV_DONTNEED) };
                    assert_eq!(done, 0);
                }
            })
        };
        give_back.join().unwrap();
        let state = || prefetch.progress().info().state;
        harness::eventually("all is prefetched", || state() == PrefetchState::Over);
        for page in 0..BYTES / PAGE {
            let expected = if page % 3 == 0 || page % 5 == 0 { 0 } else { page };
            let found: u64 = memory.read_obj(GuestAddress(page * PAGE)).unwrap();
            assert_eq!(found, expected, "page {page} in round {round}");
        }
        drop((prefetch, pager, memory));
    }
}
