//! H-37: page numbers, reports and statistics that make no sense.

use vm_memory::bitmap::AtomicBitmap;
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{FileOffset, GuestRegionMmap};

use super::*;
use crate::virtio::rng::{Rng, host_entropy};

/// The process has as much of the second piece of RAM as before, and the device goes on.
fn unharmed(driver: &mut GuestDriver, handle: &BalloonHandle) {
    let before = handle.counters().released_bytes;
    send_pages(driver, INFLATE, &[HIGH_PFN]);
    assert_eq!(handle.counters().released_bytes, before + PAGE_SIZE);
    assert!(!driver.needs_reset());
}

#[test]
fn h37_pages_that_are_not_memory_are_refused_one_by_one() {
    let (_executor, mut driver, handle) = live();
    fill_high(driver.memory());
    let (hole, end) = ((HOLE.0 / PAGE_SIZE) as u32, HIGH_PFN + RAM_PAGES as u32);
    let pages = [hole, hole + 1, HIGH_PFN - 1, HIGH_PFN, end - 1, end, u32::MAX, u32::MAX - 1];
    send_pages(&mut driver, INFLATE, &pages);
    let counters = handle.counters();
    assert_eq!((counters.refused_pages, counters.inflated_pages), (6, 2));
    assert_eq!(
        [HIGH_PFN, HIGH_PFN + 1, end - 2, end - 1].map(|page| byte(&driver, page)),
        [0, 7, 7, 0]
    );
    send_pages(&mut driver, DEFLATE, &pages);
    unharmed(&mut driver, &handle);
}

#[test]
fn h37_a_page_that_is_repeated_is_released_again() {
    let (_executor, mut driver, handle) = live();
    for _ in 0..3 {
        fill_high(driver.memory());
        send_pages(&mut driver, INFLATE, &[HIGH_PFN; 1000]);
        assert_eq!([0, 1].map(|page| byte(&driver, HIGH_PFN + page)), [0, 7]);
    }
    unharmed(&mut driver, &handle);
}

#[test]
fn h37_arrays_of_odd_lengths_are_taken_as_far_as_they_go() {
    let (_executor, mut driver, handle) = live();
    fill_high(driver.memory());
    let page = HIGH_PFN.to_le_bytes();
    for (bytes, malformed) in [(&[][..], 0), (&page[..1], 1), (&page[..3], 2)] {
        send(&mut driver, INFLATE, bytes);
        assert_eq!((byte(&driver, HIGH_PFN), handle.counters().malformed_requests), (7, malformed));
    }
    send(&mut driver, INFLATE, &[&page[..], &[1, 2]].concat());
    assert_eq!((byte(&driver, HIGH_PFN), handle.counters().malformed_requests), (0, 3));
    send(&mut driver, DEFLATE, &[1, 2, 3, 4, 5]);
    assert_eq!(handle.counters().malformed_requests, 4);
    unharmed(&mut driver, &handle);
}

#[test]
fn h11_numbers_may_be_split_over_descriptors() {
    let (_executor, mut driver, _handle) = live();
    fill_high(driver.memory());
    let bytes = [HIGH_PFN, HIGH_PFN + 2].map(u32::to_le_bytes).concat();
    let array = driver.alloc_with(&bytes);
    let piece = |at: u64| Buffer::readable(GuestAddress(array.0 + at), 1);
    let pieces: Vec<_> = (0..8).map(piece).collect();
    assert_eq!(driver.exchange(INFLATE, &pieces), 0);
    assert_eq!([0, 1, 2].map(|page| byte(&driver, HIGH_PFN + page)), [0, 7, 0]);
}

#[test]
fn h37_a_gigabyte_of_page_numbers_ends_soon() {
    let (_executor, mut driver, handle) = live();
    fill_high(driver.memory());
    let buffers = [Buffer::readable(HIGH_RAM, RAM_SIZE as u32); 120];
    assert_eq!(driver.exchange(INFLATE, &buffers), 0);
    // 7 in each byte: a page far outside. One number per page of RAM was looked at.
    let counters = handle.counters();
    assert!(counters.refused_pages <= 2 * RAM_PAGES, "{counters:?}");
    assert_eq!(counters.malformed_requests, 1);
    unharmed(&mut driver, &handle);
}

#[test]
fn h37_a_report_of_all_memory_many_times_ends() {
    let (_executor, mut driver, handle) = live();
    fill_high(driver.memory());
    let buffers = [Buffer::writable(HIGH_RAM, RAM_SIZE as u32); 120];
    assert_eq!(driver.exchange(REPORT, &buffers), 0);
    assert_eq!(handle.counters().reported_bytes, 120 * RAM_SIZE);
    assert_eq!(byte(&driver, HIGH_PFN), 0);
    unharmed(&mut driver, &handle);
}

#[test]
fn h37_reports_of_parts_of_pages_touch_no_other_byte() {
    let (_executor, mut driver, handle) = live();
    fill_high(driver.memory());
    let start = HIGH_RAM.0 + PAGE_SIZE - 1;
    let buffers = [
        Buffer::writable(GuestAddress(start), PAGE_SIZE as u32 + 2),
        Buffer::writable(GuestAddress(HIGH_RAM.0 + 8 * PAGE_SIZE), 1),
        Buffer::writable(GuestAddress(HIGH_RAM.0 + 9 * PAGE_SIZE), 0),
    ];
    assert_eq!(driver.exchange(REPORT, &buffers), 0);
    let around = driver.bytes(GuestAddress(start), PAGE_SIZE as usize + 2);
    assert_eq!((around[0], around[1], around[4096], around[4097]), (7, 0, 0, 7));
    assert_eq!(byte(&driver, HIGH_PFN + 8), 7);
    assert_eq!(handle.counters().kept_bytes, 3);
    unharmed(&mut driver, &handle);
}

#[test]
fn h37_reports_that_are_for_reading_are_not_reports() {
    let (_executor, mut driver, handle) = live();
    fill_high(driver.memory());
    assert_eq!(driver.exchange(REPORT, &[Buffer::readable(HIGH_RAM, 4096)]), 0);
    assert_eq!(byte(&driver, HIGH_PFN), 7);
    unharmed(&mut driver, &handle);
}

#[test]
fn h37_all_of_ram_with_the_rings_costs_the_guest_its_balloon() {
    let (_executor, mut driver, handle) = live();
    let low: Vec<u32> = (0..RAM_PAGES as u32).collect();
    let bytes: Vec<u8> = low.iter().flat_map(|page| page.to_le_bytes()).collect();
    driver.memory().write_slice(&bytes, HIGH_RAM).unwrap();
    driver.add(INFLATE, &[Buffer::readable(HIGH_RAM, bytes.len() as u32)]);
    driver.kick(INFLATE);
    // The available index reads as 0 now, which is behind the device.
    assert!(eventually(PATIENCE, || driver.needs_reset()));
    let counters = handle.counters();
    assert_eq!((counters.inflated_pages, counters.guest_faults), (RAM_PAGES, 1));
    driver.reset();
    driver.initialize();
    unharmed(&mut driver, &handle);
}

#[test]
fn h37_more_in_the_balloon_than_there_is_is_not_believed() {
    let (_executor, mut driver, handle) = live();
    write_field(&mut driver, ACTUAL, u32::MAX);
    assert_eq!(handle.actual_bytes(), 2 * RAM_SIZE);
    handle.set_target(PAGE_SIZE);
    driver.pause();
    driver.resume();
    assert_eq!(handle.actual_bytes(), 2 * RAM_SIZE);
    unharmed(&mut driver, &handle);
}

#[test]
fn h37_statistics_of_any_length_are_read_as_far_as_they_can_be() {
    let (_executor, mut driver, handle) = live();
    offer_stats(&mut driver, &[]);
    let one = stats(&[(4, 6)]);
    for (bytes, free) in [
        (vec![], None),
        (one[..9].to_vec(), None),
        ([&one[..], &[1, 2, 3]].concat(), Some(6)),
        (stats(&[(77, 6); 1000]), None),
        (stats(&[(4, 6); 1000]), Some(6)),
    ] {
        let answer = ask(&mut driver, &handle, &bytes).unwrap();
        assert_eq!(answer, Stats { free, ..Stats::default() });
    }
    assert_eq!(handle.counters().malformed_requests, 4);

    // A gigabyte.
    let answer = std::thread::scope(|threads| {
        let asking = threads.spawn(|| handle.statistics(PATIENCE));
        driver.wait_used(STATS);
        driver.add(STATS, &[Buffer::readable(HIGH_RAM, RAM_SIZE as u32); 120]);
        driver.kick(STATS);
        asking.join().unwrap()
    });
    assert_eq!(answer, Some(Stats { swap_in: Some(0), ..Stats::default() }));
    unharmed(&mut driver, &handle);
}

#[test]
fn h37_statistics_that_nobody_asked_for_wait() {
    let (_executor, mut driver, handle) = live();
    for _ in 0..50 {
        offer_stats(&mut driver, &stats(&[(4, 1)]));
    }
    unharmed(&mut driver, &handle);
    assert_eq!(driver.used_index(STATS), 0);
    assert_eq!(handle.statistics(PATIENCE).unwrap().free, Some(1));
    assert_eq!(driver.used_index(STATS), 1);
}

#[test]
fn h52_another_device_gets_its_turn_during_a_flood() {
    let (executor, mut driver, _handle) = live();
    let mut rng = GuestDriver::new(Box::new(Rng::new(executor.handle(), host_entropy)));
    rng.initialize();
    let buffer = rng.alloc(16);
    for _ in 0..20 {
        for _ in 0..driver.transport().lifecycle().queue_size(INFLATE) / 4 {
            driver.add(INFLATE, &[Buffer::readable(HIGH_RAM, RAM_SIZE as u32); 2]);
            driver.add(REPORT, &[Buffer::writable(HIGH_RAM, RAM_SIZE as u32); 2]);
        }
        driver.kick(INFLATE);
        driver.kick(REPORT);
        assert_eq!(rng.exchange(0, &[Buffer::writable(buffer, 16)]), 16);
        driver.reset();
        driver.initialize();
    }
}

#[test]
fn a_pause_in_the_middle_of_a_request_gives_each_chain_back_once() {
    let (_executor, mut driver, _handle) = live();
    for _ in 0..30 {
        let head = driver.add(REPORT, &[Buffer::writable(HIGH_RAM, RAM_SIZE as u32); 120]);
        driver.kick(REPORT);
        driver.pause();
        let record = driver.save();
        driver.pause();
        assert_eq!(driver.save(), record);
        driver.resume();
        assert_eq!(driver.wait_used(REPORT).head, head);
        assert_eq!(driver.used(REPORT), None);
    }
}

/// Memory as after a restore: private mappings of a file that is full of 5.
fn restored_memory() -> Memory {
    let file = tempfile::tempfile().unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &vec![5; 2 * RAM_SIZE as usize], 0).unwrap();
    let len = RAM_SIZE as usize;
    let region = |start, offset| {
        let bitmap = AtomicBitmap::new(len, std::num::NonZeroUsize::new(4096).unwrap());
        let mapping = MmapRegionBuilder::new_with_bitmap(len, bitmap)
            .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
            .with_mmap_flags(libc::MAP_PRIVATE | libc::MAP_NORESERVE)
            .with_file_offset(FileOffset::new(file.try_clone().unwrap(), offset))
            .build();
        GuestRegionMmap::new(mapping.unwrap(), start).unwrap()
    };
    Memory::from_regions(vec![region(GuestAddress(0), 0), region(HIGH_RAM, RAM_SIZE)]).unwrap()
}

#[test]
fn scattered_pages_of_a_restored_guest_read_as_zeroes_and_the_others_as_before() {
    let executor = Executor::spawn("balloon").unwrap();
    let (balloon, handle) = Balloon::new(executor.handle(), BalloonConfig::default());
    let mut driver = GuestDriver::with_memory(Box::new(balloon), restored_memory());
    driver.initialize();
    let pages: Vec<u32> = (0..RAM_PAGES as u32).step_by(2).map(|page| HIGH_PFN + page).collect();
    for _ in 0..2 {
        for request in pages.chunks(256) {
            send_pages(&mut driver, INFLATE, request);
        }
        driver.pause();
        driver.resume();
    }
    assert_eq!(handle.counters().released_bytes, 2 * pages.len() as u64 * PAGE_SIZE);
    assert!(pages.iter().all(|&page| byte(&driver, page) == 0 && byte(&driver, page + 1) == 5));
}
