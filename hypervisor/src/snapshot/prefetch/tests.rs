use std::iter::once;
use std::time::{Duration, Instant};

use devices::memory::{Bytes, GuestAddress};

use super::super::pages::{self, PageSet};
use super::super::paging::{self, Loaded, MemoryMode};
use super::*;

const BYTES: u64 = 5 << 30;
/// Pages with data, on both sides of the gap between regions.
const DATA: [Range<u64>; 3] = [16..80, 4096..4097, (3 << 18) - 8..(3 << 18) + 8];

fn image() -> File {
    let image = tempfile::tempfile().unwrap();
    image.set_len(BYTES).unwrap();
    for page in DATA.into_iter().flatten() {
        image.write_all_at(&page.to_le_bytes(), page * PAGE).unwrap();
    }
    image
}

fn plan(runs: impl IntoIterator<Item = Range<u64>>, limit: u64) -> Plan {
    let mut pages = PageSet::none(BYTES);
    runs.into_iter().for_each(|run| pages.insert(run));
    Plan { set: HotSet::of("0".repeat(32), BYTES, &pages), limit }
}

fn loaded(runs: impl IntoIterator<Item = Range<u64>>, limit: u64) -> (Memory, Prefetch) {
    let lost = Box::new(|message: &str| panic!("{message}"));
    let plan = Some(plan(runs, limit));
    let loaded = paging::load(&MemoryMode::Private, BYTES, image(), plan, lost);
    let Loaded { memory, prefetch, .. } = loaded.unwrap();
    (memory, prefetch.unwrap())
}

/// Waits for the end; what is told of it then.
fn end(prefetch: &Prefetch) -> PrefetchInfo {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let info = prefetch.progress().info();
        if !matches!(info.state, PrefetchState::Waiting | PrefetchState::Running) {
            return info;
        }
        assert!(Instant::now() < deadline, "{info:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn info(state: PrefetchState, pages: u64, planned: u64, left_out: u64) -> PrefetchInfo {
    let (planned_pages, left_out_pages) = (planned, left_out);
    PrefetchInfo { state, pages, planned_pages, left_out_pages, error: None }
}

#[test]
fn pages_of_a_mapping_are_there_and_nobodys_own() {
    let (memory, mut prefetch) = loaded(DATA, 1 << 30);
    assert_eq!(prefetch.progress().info(), info(PrefetchState::Waiting, 0, 0, 0));
    assert_eq!(pages::present(&memory).unwrap().count(), 0);
    prefetch.start();
    assert_eq!(end(&prefetch), info(PrefetchState::Over, 64 + 1 + 16, 64 + 1 + 16, 0));
    let there = pages::present(&memory).unwrap();
    assert!(DATA.into_iter().flatten().all(|page| there.contains(page)));
    assert_eq!(pages::owned(&memory).unwrap().count(), 0);
    let above: u64 = memory.read_obj(GuestAddress((4 << 30) + 7 * PAGE)).unwrap();
    assert_eq!(above, (3 << 18) + 7);
}

#[test]
fn holes_and_what_is_beyond_the_limit_are_left_out() {
    let (memory, mut prefetch) = loaded(once(0..BYTES / PAGE), 65 * PAGE + 1);
    prefetch.start();
    let told = end(&prefetch);
    assert_eq!((told.state, told.pages, told.planned_pages), (PrefetchState::Over, 65, 65));
    // File systems may have larger blocks.
    assert!((16..1024).contains(&told.left_out_pages), "{told:?}");
    assert!(!pages::present(&memory).unwrap().contains(3 << 18));
}

#[test]
fn what_this_process_has_written_to_or_given_back_is_not_touched() {
    let (memory, mut prefetch) = loaded(once(16..80), 1 << 30);
    for page in [16, 40, 41] {
        memory.write_obj(7_u64, GuestAddress(page * PAGE)).unwrap();
    }
    prefetch.start();
    assert_eq!(end(&prefetch), info(PrefetchState::Over, 61, 64, 0));
    assert_eq!(memory.read_obj::<u64>(GuestAddress(40 * PAGE)).unwrap(), 7);
}

#[test]
fn what_is_cancelled_before_it_begins_never_does() {
    let (memory, mut prefetch) = loaded(DATA, 1 << 30);
    prefetch.progress().cancel();
    prefetch.start();
    assert_eq!(end(&prefetch), info(PrefetchState::Cancelled, 0, 0, 0));
    assert_eq!(pages::present(&memory).unwrap().count(), 0);
}

fn by_handler(runs: impl IntoIterator<Item = Range<u64>>) -> (Prefetch, Feed) {
    let memory = crate::memory::fresh(BYTES).unwrap();
    let (mut prefetch, feed) =
        Prefetch::by_handler(plan(runs, 1 << 30), paging::regions(&memory), image()).unwrap();
    prefetch.start();
    (prefetch, feed)
}

#[test]
fn a_handler_gets_all_pages_in_pieces_and_is_told_the_end() {
    let (prefetch, feed) = by_handler(DATA);
    let mut pieces = Vec::new();
    while let Some(pages) = feed.pieces.recv().unwrap() {
        pieces.push(pages.content.len() as u64 / PAGE);
    }
    // No more than 128 KiB, nor from both sides of the gap.
    assert_eq!(pieces, [32, 32, 1, 8, 8]);
    assert!(feed.ready.clear() > 0);
    assert_eq!(prefetch.progress().info().state, PrefetchState::Running);
    feed.progress.finish();
    assert_eq!(prefetch.progress().info().state, PrefetchState::Over);
}

#[test]
fn a_cancelled_thread_ends_although_nobody_takes_its_pages() {
    let (prefetch, feed) = by_handler(once(0..BYTES / PAGE));
    prefetch.progress().cancel();
    assert!(feed.progress.has_ended());
    drop(feed);
    assert_eq!(end(&prefetch).state, PrefetchState::Cancelled);
    // Waits for the thread.
    drop(prefetch);
}

#[test]
fn a_file_that_is_shorter_than_memory_ends_it_and_nothing_else() {
    let memory = crate::memory::fresh(BYTES).unwrap();
    let (image, plan) = (image(), plan(once(0..64), 1 << 30));
    image.set_len(PAGE).unwrap();
    let (mut prefetch, _feed) =
        Prefetch::by_handler(plan, paging::regions(&memory), image).unwrap();
    prefetch.start();
    let told = end(&prefetch);
    assert_eq!(told.state, PrefetchState::Failed);
    assert!(told.error.is_some());
}
