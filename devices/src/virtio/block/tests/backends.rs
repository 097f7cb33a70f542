//! The device on a disk that completes when, and in the order, the test says.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::*;
use crate::event::Event;
use crate::testing::{PATIENCE, eventually};

/// What the test sees of the disk.
#[derive(Clone)]
struct Desk {
    submitted: Arc<Mutex<VecDeque<(Tag, DiskOp)>>>,
    completed: Arc<Mutex<VecDeque<Completion>>>,
    ready: Event,
}

impl Desk {
    fn new() -> Self {
        let ready = Event::new().unwrap();
        Self { submitted: Arc::default(), completed: Arc::default(), ready }
    }

    fn waits_for(&self, count: usize) {
        assert!(eventually(PATIENCE, || self.submitted.lock().unwrap().len() == count));
    }

    fn take(&self, position: usize) -> (Tag, DiskOp) {
        self.submitted.lock().unwrap().remove(position).unwrap()
    }

    fn complete(&self, tag: Tag, result: io::Result<()>, moved: u64) {
        self.completed.lock().unwrap().push_back(Completion { tag, result, moved });
        self.ready.signal();
    }
}

struct Slow(Desk);

impl Disk for Slow {
    fn geometry(&self) -> Geometry {
        Geometry { sectors: SECTORS, logical_block: 512, physical_block: 4096, read_only: false }
    }
    fn submit(&mut self, tag: Tag, op: DiskOp) {
        self.0.submitted.lock().unwrap().push_back((tag, op));
    }
    fn completed(&mut self) -> Option<Completion> {
        self.0.ready.clear();
        self.0.completed.lock().unwrap().pop_front()
    }
    fn completion_fd(&self) -> BorrowedFd<'_> {
        self.0.ready.as_fd()
    }
}

struct SlowBench {
    driver: GuestDriver,
    desk: Desk,
    executor: Executor,
}

impl SlowBench {
    fn new() -> Self {
        let executor = Executor::spawn("slow").unwrap();
        let desk = Desk::new();
        let mut driver = GuestDriver::new(slow(&executor, &desk));
        driver.initialize();
        Self { driver, desk, executor }
    }

    fn read(&mut self, sector: u64) -> (u16, GuestAddress) {
        let head = self.driver.alloc_with(&header(kind::IN, sector));
        let answer = self.driver.alloc_with(&[0xee; 513]);
        let chain = [Buffer::readable(head, 16), Buffer::writable(answer, 513)];
        let head = self.driver.add(0, &chain);
        self.driver.kick(0);
        (head, GuestAddress(answer.0 + 512))
    }
}

fn slow(executor: &Executor, desk: &Desk) -> Box<Block> {
    Box::new(Block::new(executor.handle(), Box::new(Slow(desk.clone())), config(false)).unwrap())
}

fn offset(op: &DiskOp) -> u64 {
    let DiskOp::Read { offset, .. } = op else { panic!("{op:?} is not a read") };
    *offset
}

#[test]
fn completions_in_any_order_answer_their_own_request() {
    let mut bench = SlowBench::new();
    let (first, first_status) = bench.read(1);
    let (second, second_status) = bench.read(2);
    bench.desk.waits_for(2);
    let (tag, op) = bench.desk.take(1);
    assert_eq!(offset(&op), 1024);
    bench.desk.complete(tag, Ok(()), 512);
    assert_eq!(bench.driver.wait_used(0).head, second);
    assert_eq!(bench.driver.bytes(second_status, 1), [OK]);
    assert_eq!(bench.driver.bytes(first_status, 1), [0xee]);
    let (tag, _) = bench.desk.take(0);
    bench.desk.complete(tag, Ok(()), 512);
    assert_eq!(bench.driver.wait_used(0).head, first);
}

#[test]
fn failures_become_status_bytes_and_exact_lengths() {
    let mut bench = SlowBench::new();
    let cases = [
        (io::ErrorKind::Other, 0, IO_ERROR, 0),
        (io::ErrorKind::Other, 100, IO_ERROR, 100),
        (io::ErrorKind::StorageFull, 512, IO_ERROR, 513),
        (io::ErrorKind::Unsupported, 0, UNSUPPORTED, 0),
    ];
    for (error, moved, status, len) in cases {
        let (_, at) = bench.read(0);
        bench.desk.waits_for(1);
        let (tag, _) = bench.desk.take(0);
        bench.desk.complete(tag, Err(error.into()), moved);
        assert_eq!(bench.driver.wait_used(0).len, len);
        assert_eq!(bench.driver.bytes(at, 1), [status]);
    }
}

#[test]
fn a_completion_of_nothing_is_ignored() {
    let mut bench = SlowBench::new();
    for tag in [0, 7, 255, 256, u32::MAX] {
        bench.desk.complete(Tag(tag), Ok(()), 512);
    }
    let (head, _) = bench.read(0);
    bench.desk.waits_for(1);
    let (tag, _) = bench.desk.take(0);
    bench.desk.complete(tag, Ok(()), 512);
    bench.desk.complete(tag, Ok(()), 512);
    assert_eq!(bench.driver.wait_used(0).head, head);
    assert_eq!(bench.driver.used(0), None);
}

#[test]
fn a_pause_waits_for_what_is_in_flight() {
    let mut bench = SlowBench::new();
    let heads: Vec<_> = (0..8).map(|sector| bench.read(sector).0).collect();
    bench.desk.waits_for(8);
    let desk = bench.desk.clone();
    let storage = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(30));
        for _ in 0..8 {
            let (tag, _) = desk.take(0);
            desk.complete(tag, Ok(()), 512);
        }
    });
    bench.driver.pause();
    assert_eq!(bench.driver.used_index(0), 8, "the pause did not wait");
    storage.join().unwrap();
    // The record of the paused device goes on with the next request, not with these.
    let record = bench.driver.save();
    bench.driver.replace(slow(&bench.executor, &bench.desk), record).unwrap();
    bench.driver.resume();
    let back: Vec<_> = (0..8).map(|_| bench.driver.wait_used(0).head).collect();
    assert_eq!(back, heads);
    let (head, _) = bench.read(0);
    bench.desk.waits_for(1);
    let (tag, _) = bench.desk.take(0);
    bench.desk.complete(tag, Ok(()), 512);
    assert_eq!(bench.driver.wait_used(0).head, head);
}

#[test]
fn a_driver_without_flush_gets_durable_writes() {
    for (unwanted, expected) in [(0, false), (feature::FLUSH, true)] {
        let mut bench = SlowBench::new();
        bench.driver.reset();
        bench.driver.initialize_without(unwanted);
        let out = bench.driver.alloc_with(&[header(kind::OUT, 0), vec![0; 512]].concat());
        let chain = [Buffer::readable(out, 528), Buffer::writable(out, 1)];
        bench.driver.add(0, &chain);
        bench.driver.kick(0);
        bench.desk.waits_for(1);
        let (tag, op) = bench.desk.take(0);
        assert!(matches!(op, DiskOp::Write { durable, .. } if durable == expected));
        bench.desk.complete(tag, Ok(()), 512);
        bench.driver.wait_used(0);
    }
}

#[test]
fn the_same_head_again_and_again_fills_the_device_and_then_waits() {
    let mut bench = SlowBench::new();
    let (head, _) = bench.read(0);
    for _ in 0..255 {
        bench.driver.publish(0, head);
    }
    bench.driver.kick(0);
    bench.desk.waits_for(256);
    // All 256 places are taken; the ring has room again, the device has not.
    for _ in 0..10 {
        bench.driver.publish(0, head);
    }
    bench.driver.kick(0);
    std::thread::sleep(Duration::from_millis(20));
    bench.desk.waits_for(256);
    for _ in 0..266 {
        assert!(eventually(PATIENCE, || !bench.desk.submitted.lock().unwrap().is_empty()));
        let (tag, _) = bench.desk.take(0);
        bench.desk.complete(tag, Ok(()), 512);
    }
    assert!(eventually(PATIENCE, || bench.driver.used_index(0) == 266));
}

#[test]
fn a_device_that_cannot_start_keeps_its_disk() {
    let gone = Executor::spawn("gone").unwrap();
    let handle = gone.handle();
    drop(gone);
    let disk = Box::new(Slow(Desk::new()));
    let device = Block::new(handle, disk, config(false)).unwrap();
    let mut driver = GuestDriver::new(Box::new(device));
    for _ in 0..2 {
        let features = driver.offered();
        assert!(driver.negotiate(features));
        driver.set_up_queues();
        driver.driver_ok();
        assert!(driver.needs_reset());
        driver.reset();
    }
    driver.pause();
    assert!(!driver.needs_reset());
}
