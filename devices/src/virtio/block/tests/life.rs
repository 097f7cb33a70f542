//! Resets and pauses in the middle of traffic, many times, and storage that does not answer.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Condvar, Mutex};
use std::time::Duration;

use super::*;
use crate::event::Event;
use crate::testing::{PATIENCE, eventually};

const RESETS: usize = 10_000;

/// Descriptors of this process on `file`.
fn descriptors_on(file: &NamedTempFile) -> usize {
    let ours = file.path().to_owned();
    let links = std::fs::read_dir("/proc/self/fd").unwrap().filter_map(Result::ok);
    links.filter(|link| std::fs::read_link(link.path()).is_ok_and(|to| to == ours)).count()
}

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Kilobytes of memory of this process.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Reads, writes, flushes and discards, on all queues, without waiting for any.
fn traffic(driver: &mut GuestDriver) {
    let range = [&40_u64.to_le_bytes()[..], &8_u32.to_le_bytes(), &[0; 4]].concat();
    for queue in 0..driver.queue_count() {
        for kind in [kind::IN, kind::OUT, kind::FLUSH, kind::OUT, kind::DISCARD] {
            let head = driver.alloc_with(&header(kind, 32));
            let data = driver.alloc_with(&range);
            let block = driver.alloc(1024);
            let status = driver.alloc(1);
            let data = match kind {
                kind::IN => vec![Buffer::writable(block, 1024)],
                kind::OUT => vec![Buffer::readable(block, 1024)],
                kind::DISCARD => vec![Buffer::readable(data, 16)],
                _ => vec![],
            };
            let chain = [vec![Buffer::readable(head, 16)], data, vec![Buffer::writable(status, 1)]];
            driver.add(queue, &chain.concat());
        }
        driver.kick(queue);
    }
}

#[test]
fn ten_thousand_resets_in_traffic_leak_nothing() {
    for engine in host::engines() {
        let executor = Executor::spawn("block").unwrap();
        let file = image();
        let rate = RateLimit { bytes: None, operations: Some("1M/s".parse().unwrap()) };
        let config = BlockConfig { queues: 2, rate, ..config(false) };
        let mut driver = GuestDriver::new(with_engine(executor.handle(), engine, &file, config));
        driver.initialize();
        let mut before = (0, 0);
        for round in 0..RESETS {
            if round == RESETS / 10 {
                before = (open_files(), resident());
            }
            traffic(&mut driver);
            driver.reset();
            driver.initialize();
        }
        // Other tests open files and use memory meanwhile; a leak would be one per reset.
        let leaked = open_files().saturating_sub(before.0);
        assert!(leaked < RESETS / 2, "{engine:?}: {leaked} descriptors leaked");
        let grown = resident().saturating_sub(before.1);
        assert!(grown < 256 << 10, "{engine:?}: {grown} KiB more than before");
        assert_eq!(descriptors_on(&file), 2, "{engine:?}: the test's and the disk's");
        reads_a_sector(&mut driver);
    }
}

#[test]
fn pauses_in_traffic_lose_nothing() {
    for engine in host::engines() {
        let executor = Executor::spawn("block").unwrap();
        let file = image();
        let config = BlockConfig { queues: 2, ..config(false) };
        let mut driver = GuestDriver::new(with_engine(executor.handle(), engine, &file, config));
        driver.initialize();
        for _ in 0..300 {
            traffic(&mut driver);
            driver.pause();
            driver.resume();
            for queue in [0, 1] {
                for _ in 0..5 {
                    driver.wait_used(queue);
                }
            }
            reads_a_sector(&mut driver);
            driver.reset();
            driver.initialize();
        }
    }
}

// --- storage that does not answer --------------------------------------------------------------

/// Lets waiting storage go on.
#[derive(Default)]
struct Gate {
    open: Mutex<bool>,
    opened: Condvar,
}

impl Gate {
    fn open(&self) {
        *self.open.lock().unwrap() = true;
        self.opened.notify_all();
    }

    fn pass(&self) {
        let mut open = self.open.lock().unwrap();
        while !*open {
            open = self.opened.wait(open).unwrap();
        }
    }
}

/// A disk whose thread hangs in the first operation until the gate is opened, as synchronous I/O
/// does on storage that has gone away.
struct Stalled {
    gate: Arc<Gate>,
    event: Event,
    jobs: Vec<Tag>,
}

impl Disk for Stalled {
    fn geometry(&self) -> Geometry {
        Geometry { sectors: SECTORS, logical_block: 512, physical_block: 4096, read_only: false }
    }
    fn submit(&mut self, tag: Tag, _op: DiskOp) {
        self.jobs.push(tag);
    }
    fn completed(&mut self) -> Option<Completion> {
        let tag = self.jobs.pop()?;
        self.gate.pass();
        Some(Completion { tag, result: Ok(()), moved: 512 })
    }
    fn completion_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

fn add_reads(driver: &mut GuestDriver, count: usize) {
    for _ in 0..count {
        let head = driver.alloc_with(&header(kind::IN, 3));
        let answer = driver.alloc(513);
        driver.add(0, &[Buffer::readable(head, 16), Buffer::writable(answer, 513)]);
    }
    driver.kick(0);
}

#[test]
fn a_disk_that_stalls_holds_up_no_other() {
    let gate = Arc::new(Gate::default());
    let (stalled_loop, other_loop) =
        (Executor::spawn("stalled").unwrap(), Executor::spawn("other").unwrap());
    let disk = Stalled { gate: gate.clone(), event: Event::new().unwrap(), jobs: Vec::new() };
    let device = Block::new(stalled_loop.handle(), Box::new(disk), config(false)).unwrap();
    let mut stalled = GuestDriver::new(Box::new(device));
    stalled.initialize();
    add_reads(&mut stalled, 1);
    let file = image();
    let mut other = GuestDriver::new(block(other_loop.handle(), &file, false));
    other.initialize();
    for _ in 0..100 {
        reads_a_sector(&mut other);
        other.reset();
        other.initialize();
    }
    assert_eq!(stalled.used_index(0), 0);
    gate.open();
    assert_eq!(stalled.wait_used(0).len, 513);
}

/// Storage that takes its time: answers each operation from another thread, a moment later, and
/// writes into guest memory right before that.
struct SlowStorage {
    orders: std::sync::mpsc::Sender<(Tag, DiskOp)>,
    done: Arc<Mutex<Vec<Tag>>>,
    event: Event,
}

impl SlowStorage {
    fn new() -> Self {
        let (orders, received) = std::sync::mpsc::channel::<(Tag, DiskOp)>();
        let (done, event) = (Arc::new(Mutex::new(Vec::new())), Event::new().unwrap());
        let (finished, signal) = (done.clone(), event.clone());
        std::thread::spawn(move || {
            while let Ok((tag, op)) = received.recv() {
                std::thread::sleep(Duration::from_micros(20));
                if let DiskOp::Read { buffers, .. } = &op {
                    for slice in buffers.slices(0, 512, 16).unwrap() {
                        slice.copy_from(&[4_u8; 512]);
                    }
                }
                drop(op);
                finished.lock().unwrap().push(tag);
                signal.signal();
            }
        });
        Self { orders, done, event }
    }
}

impl Disk for SlowStorage {
    fn geometry(&self) -> Geometry {
        Geometry { sectors: SECTORS, logical_block: 512, physical_block: 4096, read_only: false }
    }
    fn submit(&mut self, tag: Tag, op: DiskOp) {
        self.orders.send((tag, op)).unwrap();
    }
    fn completed(&mut self) -> Option<Completion> {
        self.event.clear();
        let tag = self.done.lock().unwrap().pop()?;
        Some(Completion { tag, result: Ok(()), moved: 512 })
    }
    fn completion_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

#[test]
fn resets_and_pauses_wait_for_all_that_is_in_flight_on_slow_storage() {
    let executor = Executor::spawn("slow").unwrap();
    let disk = Box::new(SlowStorage::new());
    let device = Block::new(executor.handle(), disk, config(false)).unwrap();
    let counts = device.counts.clone();
    let mut driver = GuestDriver::new(Box::new(device));
    driver.initialize();
    for round in 0..20_u64 {
        let begun = counts.reads.get();
        add_reads(&mut driver, 128);
        if round.is_multiple_of(2) {
            driver.pause();
            let record = driver.save();
            assert!(!record.kind.is_empty());
            driver.resume();
            for _ in 0..128 {
                assert_eq!(driver.wait_used(0).len, 513);
            }
            assert_eq!(counts.reads.get() - begun, 128);
        }
        driver.reset();
        // Nothing writes into the memory of a device that was reset.
        let heap = GuestAddress(0x40_0000);
        let before = driver.bytes(heap, 256 << 10);
        std::thread::yield_now();
        assert_eq!(driver.bytes(heap, 256 << 10), before);
        driver.initialize();
    }
}

#[test]
fn io_errors_of_in_flight_requests_end_a_drain() {
    // A file that was cut under 128 requests: each fails, none is lost.
    for engine in host::engines() {
        let executor = Executor::spawn("cut").unwrap();
        let file = image();
        let device = with_engine(executor.handle(), engine, &file, config(false));
        let counts = device.counts.clone();
        let mut driver = GuestDriver::new(device);
        driver.initialize();
        file.as_file().set_len(0).unwrap();
        add_reads(&mut driver, 128);
        assert!(eventually(PATIENCE, || driver.used_index(0) == 128), "{engine:?}");
        driver.pause();
        assert_eq!(counts.errors.get(), 128);
        let _: io::Result<()> = file.as_file().set_len(SECTORS * 512);
        driver.reset();
        driver.initialize();
        assert_eq!(request(&mut driver, kind::IN, 0, &[], 512), (OK, 513, vec![0; 512]));
    }
}
