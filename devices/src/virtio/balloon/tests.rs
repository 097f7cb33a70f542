use std::time::Duration;

use super::*;
use crate::executor::Executor;
use crate::memory::{Bytes, GuestAddress, GuestMemoryBackend, Memory};
use crate::testing::{
    Buffer, Conformance, GuestDriver, HIGH_RAM, HOLE, PATIENCE, RAM_SIZE, eventually, metric,
    register, snapshot_roundtrip,
};
use crate::virtio::feature::VERSION_1;

const INFLATE: u16 = 0;
const DEFLATE: u16 = 1;
const STATS: u16 = 2;
const REPORT: u16 = 4;
const CONFIG_CHANGE: u32 = 2;
/// Pages of the second piece of RAM, where the driver has nothing of its own.
const HIGH_PFN: u32 = (HIGH_RAM.0 / PAGE_SIZE) as u32;
const RAM_PAGES: u64 = RAM_SIZE / PAGE_SIZE;

/// A driver that has touched nothing yet.
fn undriven(executor: &Executor) -> (GuestDriver, BalloonHandle) {
    let (balloon, handle) = Balloon::new(executor.handle(), BalloonConfig::default());
    (GuestDriver::new(Box::new(balloon)), handle)
}

fn live() -> (Executor, GuestDriver, BalloonHandle) {
    let executor = Executor::spawn("balloon").unwrap();
    let (mut driver, handle) = undriven(&executor);
    driver.initialize();
    (executor, driver, handle)
}

fn send(driver: &mut GuestDriver, queue: u16, bytes: &[u8]) {
    let array = driver.alloc_with(bytes);
    assert_eq!(driver.exchange(queue, &[Buffer::readable(array, bytes.len() as u32)]), 0);
}

fn send_pages(driver: &mut GuestDriver, queue: u16, pages: &[u32]) {
    let bytes: Vec<u8> = pages.iter().flat_map(|page| page.to_le_bytes()).collect();
    send(driver, queue, &bytes);
}

fn report(driver: &mut GuestDriver, pages: &[(u32, u32)]) {
    let buffer = |&(first, pages): &(u32, u32)| {
        let start = GuestAddress(u64::from(first) * PAGE_SIZE);
        Buffer::writable(start, pages * PAGE_SIZE as u32)
    };
    let buffers: Vec<_> = pages.iter().map(buffer).collect();
    assert_eq!(driver.exchange(REPORT, &buffers), 0);
}

fn fill_high(memory: &Memory) {
    memory.write_slice(&vec![7; RAM_SIZE as usize], HIGH_RAM).unwrap();
}

fn byte(driver: &GuestDriver, page: u32) -> u8 {
    driver.memory().read_obj(GuestAddress(u64::from(page) * PAGE_SIZE)).unwrap()
}

/// Pages of the second piece of RAM that the process really has.
fn resident(memory: &Memory) -> usize {
    let start = memory.get_host_address(HIGH_RAM).unwrap();
    let mut answer = vec![0u8; RAM_PAGES as usize];
    // SAFETY: the range is mapped, and there is a byte of room for each of its pages.
    let result = unsafe { libc::mincore(start.cast(), RAM_SIZE as usize, answer.as_mut_ptr()) };
    assert_eq!(result, 0);
    answer.iter().filter(|byte| *byte & 1 != 0).count()
}

fn write_field(driver: &mut GuestDriver, field: u64, value: u32) {
    driver.write(register::CONFIG + field, value).unwrap();
}

fn field(driver: &mut GuestDriver, field: u64) -> u32 {
    u32::from_le_bytes(driver.config(field, 4).try_into().unwrap())
}

fn stats(entries: &[(u16, u64)]) -> Vec<u8> {
    let pieces = entries.iter();
    pieces
        .flat_map(|(tag, value)| [&tag.to_le_bytes()[..], &value.to_le_bytes()].concat())
        .collect()
}

/// Offers a statistics buffer with `bytes` in it.
fn offer_stats(driver: &mut GuestDriver, bytes: &[u8]) -> u16 {
    let buffer = driver.alloc_with(bytes);
    let head = driver.add(STATS, &[Buffer::readable(buffer, bytes.len() as u32)]);
    driver.kick(STATS);
    head
}

/// Asks for statistics and answers with `bytes` as often as the device wants, as the driver does.
fn ask(driver: &mut GuestDriver, handle: &BalloonHandle, bytes: &[u8]) -> Option<Stats> {
    std::thread::scope(|threads| {
        let asking = threads.spawn(|| handle.statistics(PATIENCE));
        while !asking.is_finished() {
            if driver.used(STATS).is_some() {
                offer_stats(driver, bytes);
            }
            std::thread::yield_now();
        }
        asking.join().unwrap()
    })
}

fn conformance() -> Conformance<'static> {
    Conformance::new(|executor| Box::new(Balloon::new(executor, BalloonConfig::default()).0))
        .exercise(|driver| {
            fill_high(driver.memory());
            send_pages(driver, INFLATE, &[HIGH_PFN + 2, HIGH_PFN + 1]);
            let accepted = driver.accepted();
            let mut expected = [7, 0, 0, 7];
            if accepted & feature::PAGE_REPORTING != 0 {
                report(driver, &[(HIGH_PFN + 3, 1)]);
                expected[3] = 0;
            }
            send_pages(driver, DEFLATE, &[HIGH_PFN + 1]);
            assert_eq!([0, 1, 2, 3].map(|page| byte(driver, HIGH_PFN + page)), expected);
        })
        .answers(&[INFLATE, DEFLATE, REPORT])
}

#[test]
fn conforms() {
    conformance().run();
}

#[test]
fn only_what_is_configured_is_offered() {
    let executor = Executor::spawn("balloon").unwrap();
    let offered = |deflate_on_oom, statistics, free_page_reporting| {
        let config = BalloonConfig { deflate_on_oom, statistics, free_page_reporting };
        Balloon::new(executor.handle(), config).0.identity().features
    };
    assert_eq!(offered(false, false, false), 0);
    assert_eq!(offered(true, false, false), feature::DEFLATE_ON_OOM);
    assert_eq!(offered(false, true, false), feature::STATS_VQ);
    assert_eq!(offered(false, false, true), feature::PAGE_REPORTING | feature::PAGE_POISON);
}

#[test]
fn inflated_pages_leave_the_process() {
    let (_executor, mut driver, handle) = live();
    fill_high(driver.memory());
    let before = resident(driver.memory());
    let half: Vec<u32> = (0..RAM_PAGES as u32 / 2).rev().map(|page| HIGH_PFN + page).collect();
    for request in half.chunks(256) {
        send_pages(&mut driver, INFLATE, request);
    }
    assert_eq!(before - resident(driver.memory()), half.len());
    let counters = handle.counters();
    assert_eq!(counters.inflated_pages, half.len() as u64);
    assert_eq!(counters.released_bytes, half.len() as u64 * PAGE_SIZE);
    assert_eq!((counters.refused_pages, counters.kept_bytes), (0, 0));
    assert_eq!(byte(&driver, HIGH_PFN + half.len() as u32), 7);
}

#[test]
fn reported_pages_leave_the_process() {
    let (_executor, mut driver, handle) = live();
    fill_high(driver.memory());
    let before = resident(driver.memory());
    report(&mut driver, &[(HIGH_PFN, 1024), (HIGH_PFN + 1536, 512)]);
    assert_eq!(before - resident(driver.memory()), 1536);
    assert_eq!(handle.counters().reported_bytes, 1536 * PAGE_SIZE);
    assert_eq!(handle.counters().released_bytes, 1536 * PAGE_SIZE);
    assert_eq!(
        [0, 1023, 1024, 1535, 1536].map(|page| byte(&driver, HIGH_PFN + page)),
        [0, 0, 7, 7, 0]
    );
}

#[test]
fn memory_comes_back_when_the_guest_touches_it() {
    let (_executor, mut driver, handle) = live();
    fill_high(driver.memory());
    send_pages(&mut driver, INFLATE, &[HIGH_PFN]);
    send_pages(&mut driver, DEFLATE, &[HIGH_PFN]);
    assert_eq!(handle.counters().deflated_pages, 1);
    handle.set_target(3 * PAGE_SIZE);
    let counted = ["balloon_inflated_pages_total", "balloon_deflated_pages_total"];
    assert_eq!(counted.map(|name| metric(&handle, name)), [1, 1]);
    assert_eq!(metric(&handle, "balloon_released_bytes_total"), PAGE_SIZE);
    assert_eq!(metric(&handle, "balloon_target_bytes"), 3 * PAGE_SIZE);
    driver.memory().write_slice(&[1, 2], HIGH_RAM).unwrap();
    assert_eq!(driver.bytes(HIGH_RAM, 3), [1, 2, 0]);
}

#[test]
fn the_target_is_told_at_once() {
    let (_executor, mut driver, handle) = live();
    handle.set_target(10 * PAGE_SIZE + 1);
    driver.wait_interrupt(CONFIG_CHANGE);
    assert_eq!((field(&mut driver, TARGET), handle.target_bytes()), (10, 10 * PAGE_SIZE));
    write_field(&mut driver, ACTUAL, 9);
    assert_eq!((field(&mut driver, ACTUAL), handle.actual_bytes()), (9, 9 * PAGE_SIZE));
    handle.set_target(u64::MAX);
    assert_eq!(field(&mut driver, TARGET), u32::MAX);
}

#[test]
fn the_target_is_told_to_a_guest_that_could_not_hear() {
    let executor = Executor::spawn("balloon").unwrap();
    let (mut driver, handle) = undriven(&executor);
    handle.set_target(4 * PAGE_SIZE);
    driver.initialize();
    driver.wait_interrupt(CONFIG_CHANGE);
    assert_eq!(field(&mut driver, TARGET), 4);

    write_field(&mut driver, ACTUAL, 4);
    driver.pause();
    handle.set_target(6 * PAGE_SIZE);
    assert_eq!(driver.read(register::INTERRUPT_STATUS) & CONFIG_CHANGE, 0);
    driver.resume();
    driver.wait_interrupt(CONFIG_CHANGE);
    assert_eq!(field(&mut driver, TARGET), 6);
}

#[test]
fn a_reset_empties_the_balloon_and_keeps_the_target() {
    let (_executor, mut driver, handle) = live();
    handle.set_target(10 * PAGE_SIZE);
    write_field(&mut driver, ACTUAL, 9);
    write_field(&mut driver, POISON, 0xaa);
    driver.reset();
    assert_eq!([TARGET, ACTUAL, POISON].map(|at| field(&mut driver, at)), [10, 0, 0]);
    assert_eq!(handle.actual_bytes(), 0);
}

#[test]
fn only_the_drivers_fields_can_be_written() {
    let (_executor, mut driver, handle) = live();
    handle.set_target(5 * PAGE_SIZE);
    for at in [TARGET, 8] {
        write_field(&mut driver, at, u32::MAX);
    }
    assert_eq!([TARGET, ACTUAL, 8, POISON].map(|at| field(&mut driver, at)), [5, 0, 0, 0]);
    // Byte by byte, and over the edges of two fields.
    let transport = driver.transport();
    crate::bus::BusDevice::write(transport, register::CONFIG + 5, &[1]).unwrap();
    crate::bus::BusDevice::write(transport, register::CONFIG + 7, &[2, 3]).unwrap();
    assert_eq!([TARGET, ACTUAL, 8].map(|at| field(&mut driver, at)), [5, 0x0200_0100, 0]);
}

/// A driver without some features, which makes only the queues in `ready` ready.
fn live_with(queues: &[u16], unwanted: u64) -> (Executor, GuestDriver, BalloonHandle) {
    let executor = Executor::spawn("balloon").unwrap();
    let (mut driver, handle) = undriven(&executor);
    let features = driver.offered() & !unwanted;
    assert!(driver.negotiate(features));
    driver.set_up_queues();
    for queue in (0..5).filter(|queue| !queues.contains(queue)) {
        driver.write(register::QUEUE_SELECT, queue.into()).unwrap();
        driver.write(register::QUEUE_READY, 0).unwrap();
    }
    driver.driver_ok();
    (executor, driver, handle)
}

#[test]
fn reports_are_found_where_linux_counts_their_queue() {
    for (unwanted, queue) in [(0, 3), (feature::STATS_VQ, 2)] {
        let (_executor, mut driver, handle) = live_with(&[0, 1, 2, queue], unwanted);
        assert!(!driver.needs_reset());
        let page = Buffer::writable(HIGH_RAM, PAGE_SIZE as u32);
        assert_eq!(driver.exchange(queue, &[page]), 0);
        assert_eq!(handle.counters().released_bytes, PAGE_SIZE);
    }
}

#[test]
fn a_driver_needs_the_first_two_queues_only() {
    let (_executor, mut driver, handle) = live_with(&[0, 1], !VERSION_1);
    send_pages(&mut driver, INFLATE, &[HIGH_PFN]);
    assert_eq!(handle.counters().released_bytes, PAGE_SIZE);
    assert_eq!(handle.statistics(PATIENCE), None);
    for missing in [0, 1] {
        let (_executor, mut driver, _handle) = live_with(&[1 - missing, 2, 4], 0);
        assert!(driver.needs_reset());
    }
}

#[test]
fn reports_without_the_feature_are_left_alone() {
    let (_executor, mut driver, handle) = live_with(&[0, 1, 2, 3, 4], feature::PAGE_REPORTING);
    fill_high(driver.memory());
    driver.add(REPORT, &[Buffer::writable(HIGH_RAM, PAGE_SIZE as u32)]);
    driver.kick(REPORT);
    send_pages(&mut driver, INFLATE, &[HIGH_PFN + 1]);
    assert_eq!((byte(&driver, HIGH_PFN), driver.used_index(REPORT)), (7, 0));
    assert_eq!(handle.counters().released_bytes, PAGE_SIZE);
}

#[test]
fn pages_with_a_poison_that_would_be_lost_stay() {
    let (_executor, mut driver, handle) = live();
    fill_high(driver.memory());
    write_field(&mut driver, POISON, 0x0707_0707);
    report(&mut driver, &[(HIGH_PFN, 2)]);
    assert_eq!((byte(&driver, HIGH_PFN), handle.counters().kept_bytes), (7, 2 * PAGE_SIZE));
    // A guest that clears free pages gets them back cleared.
    write_field(&mut driver, POISON, 0);
    report(&mut driver, &[(HIGH_PFN, 2)]);
    assert_eq!(byte(&driver, HIGH_PFN), 0);
}

#[test]
fn poison_means_nothing_unless_it_was_negotiated() {
    let (_executor, mut driver, handle) = live_with(&[0, 1, 2, 4], feature::PAGE_POISON);
    write_field(&mut driver, POISON, 0x0707_0707);
    report(&mut driver, &[(HIGH_PFN, 1)]);
    assert_eq!(handle.counters().released_bytes, PAGE_SIZE);
}

#[test]
fn statistics_are_fresh() {
    let (_executor, mut driver, handle) = live();
    offer_stats(&mut driver, &stats(&[(4, 1)]));
    for free in [2, 3] {
        let answer = ask(&mut driver, &handle, &stats(&[(4, free), (5, 100)]));
        let expected = Stats { free: Some(free), total: Some(100), ..Stats::default() };
        assert_eq!(answer, Some(expected));
    }
    assert_eq!(handle.counters().statistics, 2);
}

#[test]
fn statistics_that_many_ask_for_come_to_all() {
    let (_executor, mut driver, handle) = live();
    offer_stats(&mut driver, &stats(&[(4, 1)]));
    let mut answered = 0;
    std::thread::scope(|threads| {
        let asking: Vec<_> =
            (0..8).map(|_| threads.spawn(|| handle.statistics(PATIENCE))).collect();
        while !asking.iter().all(|thread| thread.is_finished()) {
            if driver.used(STATS).is_some() {
                answered += 1;
                offer_stats(&mut driver, &stats(&[(4, 2)]));
            }
            std::thread::yield_now();
        }
        let free = asking.into_iter().map(|thread| thread.join().unwrap().unwrap().free);
        assert!(free.into_iter().all(|free| free == Some(2)));
    });
    assert!((1..=8).contains(&answered));
}

#[test]
fn without_an_answer_there_are_no_statistics() {
    let executor = Executor::spawn("balloon").unwrap();
    let (mut driver, handle) = undriven(&executor);
    assert_eq!(handle.statistics(PATIENCE), None, "no driver");
    driver.initialize();
    let short = Duration::from_millis(5);
    assert_eq!(handle.statistics(short), None, "no buffer");
    offer_stats(&mut driver, &stats(&[(4, 1)]));
    assert_eq!(handle.statistics(short), None, "the driver does not answer");
    // The answer comes late, and is not taken for that of the next question.
    driver.wait_used(STATS);
    offer_stats(&mut driver, &stats(&[(4, 2)]));
    assert!(eventually(PATIENCE, || handle.counters().statistics > 0));
    let fresh = ask(&mut driver, &handle, &stats(&[(4, 3)]));
    assert_eq!(fresh.unwrap().free, Some(3));
    driver.pause();
    assert_eq!(handle.statistics(PATIENCE), None, "paused");
}

#[test]
fn who_waits_for_statistics_is_not_left_waiting_by_a_reset() {
    let (_executor, mut driver, handle) = live();
    offer_stats(&mut driver, &stats(&[]));
    let answer = std::thread::scope(|threads| {
        let asking = threads.spawn(|| handle.statistics(Duration::MAX / 4));
        driver.wait_used(STATS);
        driver.reset();
        asking.join().unwrap()
    });
    assert_eq!(answer, None);
}

#[test]
fn the_statistics_buffer_survives_a_snapshot() {
    let (executor, mut driver, handle) = live();
    offer_stats(&mut driver, &stats(&[(4, 1)]));
    assert_eq!(ask(&mut driver, &handle, &stats(&[(4, 2)])).unwrap().free, Some(2));
    driver.pause();
    let record = driver.save();
    let (balloon, handle) = Balloon::new(executor.handle(), BalloonConfig::default());
    driver.replace(Box::new(balloon), record).unwrap();
    driver.resume();
    assert_eq!(ask(&mut driver, &handle, &stats(&[(4, 3)])).unwrap().free, Some(3));
}

#[test]
fn a_record_comes_back() {
    let executor = Executor::spawn("balloon").unwrap();
    let make = || Balloon::new(executor.handle(), BalloonConfig::default()).0;
    snapshot_roundtrip(make, |balloon| {
        balloon.shared.set_target(3);
        balloon.shared.set_actual(2);
        balloon.shared.set_poison(0xaa);
    });
}

mod hostile;
