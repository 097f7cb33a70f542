use proptest::prelude::*;

use super::*;
use crate::executor::Executor;
use crate::irq::Interrupt;
use crate::memory::Bytes;
use crate::testing::{Buffer, Conformance, GuestDriver, metric, ram, snapshot_roundtrip};
use crate::testing::{FuzzRing, fuzz};
use crate::virtio::rng::{Rng, host_entropy};

const START: u64 = 1 << 32;
const CONFIG: PmemConfig = PmemConfig { start: GuestAddress(START) };

fn backing(len: u64, read_only: bool) -> PmemBacking {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(len).unwrap();
    PmemBacking::open(file.path(), read_only).unwrap()
}

fn device(executor: ExecutorHandle, backing: &PmemBacking) -> Pmem {
    Pmem::new(executor, backing.clone(), CONFIG).unwrap()
}

fn live() -> (Executor, GuestDriver) {
    let executor = Executor::spawn("pmem").unwrap();
    let mut driver = GuestDriver::new(Box::new(device(executor.handle(), &backing(4096, false))));
    driver.initialize();
    (executor, driver)
}

/// Sends `request` and expects `answer`.
fn exchange(driver: &mut GuestDriver, request: &[u8], answer: u32) {
    let (from, to) = (driver.alloc_with(request), driver.alloc(4));
    driver.memory().write_obj(0x5555_5555_u32, to).unwrap();
    let buffers = [Buffer::readable(from, request.len() as u32), Buffer::writable(to, 4)];
    assert_eq!(driver.exchange(0, &buffers), 4);
    assert_eq!(driver.memory().read_obj::<u32>(to).unwrap(), answer);
}

fn flush(driver: &mut GuestDriver) {
    exchange(driver, &0u32.to_le_bytes(), 0);
}

#[test]
fn conforms() {
    let backing = backing(5000, false);
    Conformance::new(|executor| Box::new(device(executor, &backing)))
        .exercise(flush)
        .answers(&[0])
        .run();
}

#[test]
fn the_guest_sees_where_the_memory_is() {
    let (_executor, mut driver) = live();
    let space = [START, ALIGNMENT].map(u64::to_le_bytes).concat();
    assert_eq!(driver.config(0, 16), space);
}

#[test]
fn requests_that_are_not_a_flush_fail() {
    let (_executor, mut driver) = live();
    for request in [1u32, 2, 0x100, u32::MAX] {
        exchange(&mut driver, &request.to_le_bytes(), u32::MAX);
    }
    for short in [&[][..], &[0], &[0, 0, 0]] {
        exchange(&mut driver, short, u32::MAX);
    }
    // What follows is for later versions.
    exchange(&mut driver, &[0; 64], 0);
}

#[test]
fn a_flush_of_read_only_memory_tells_that_its_writes_are_gone() {
    let executor = Executor::spawn("pmem").unwrap();
    let pmem = device(executor.handle(), &backing(4096, true));
    let counters = pmem.counters();
    let mut driver = GuestDriver::new(Box::new(pmem));
    driver.initialize();
    exchange(&mut driver, &0u32.to_le_bytes(), u32::MAX);
    assert_eq!((counters.flushes(), counters.refused()), (0, 1));
}

#[test]
fn flushes_and_failures_are_counted() {
    let executor = Executor::spawn("pmem").unwrap();
    let pmem = device(executor.handle(), &backing(4096, false));
    let meter = pmem.meter().unwrap();
    let mut driver = GuestDriver::new(Box::new(pmem));
    driver.initialize();
    flush(&mut driver);
    exchange(&mut driver, &1u32.to_le_bytes(), u32::MAX);
    driver.reset();
    driver.initialize();
    flush(&mut driver);
    assert_eq!(metric(&*meter, "pmem_flushes_total"), 2);
    assert_eq!(metric(&*meter, "pmem_failed_requests_total"), 1);
}

#[test]
fn h11_request_and_answer_may_be_split() {
    let (_executor, mut driver) = live();
    let (from, to) = (driver.alloc(4), driver.alloc_with(&[9; 8]));
    let at = |start: GuestAddress, offset| GuestAddress(start.0 + offset);
    let mut buffers: Vec<_> = (0..4).map(|byte| Buffer::readable(at(from, byte), 1)).collect();
    buffers.extend((0..8).map(|byte| Buffer::writable(at(to, byte), 1)));
    assert_eq!(driver.exchange(0, &buffers), 4);
    assert_eq!(driver.bytes(to, 8), [0, 0, 0, 0, 9, 9, 9, 9]);
}

#[test]
fn without_room_for_the_answer_there_is_none() {
    let (_executor, mut driver) = live();
    let (from, to) = (driver.alloc(4), driver.alloc_with(&[9; 4]));
    assert_eq!(driver.exchange(0, &[Buffer::readable(from, 4)]), 0);
    assert_eq!(driver.exchange(0, &[Buffer::readable(from, 4), Buffer::writable(to, 3)]), 0);
    assert_eq!(driver.bytes(to, 4), [9; 4]);
    flush(&mut driver);
}

#[test]
fn h39_a_flood_of_flushes_leaves_other_devices_their_turn() {
    let executor = Executor::spawn("pmem").unwrap();
    let pmem = device(executor.handle(), &backing(4096, false));
    let counters = pmem.counters();
    let mut driver = GuestDriver::new(Box::new(pmem));
    let mut rng = GuestDriver::new(Box::new(Rng::new(executor.handle(), host_entropy)));
    driver.initialize();
    rng.initialize();
    let (from, to, buffer) = (driver.alloc(4), driver.alloc(4), rng.alloc(16));
    let request = [Buffer::readable(from, 4), Buffer::writable(to, 4)];
    let mut sent = 0;
    while sent < 10_000 {
        for _ in 0..32 {
            driver.add(0, &request);
            driver.kick(0);
            sent += 1;
        }
        assert_eq!(rng.exchange(0, &[Buffer::writable(buffer, 16)]), 16);
        for _ in 0..32 {
            assert_eq!(driver.wait_used(0).len, 4);
        }
    }
    assert_eq!((counters.flushes(), counters.refused(), counters.guest_faults()), (sent, 0, 0));
}

#[test]
fn other_devices_do_not_reach_the_memory() {
    let executor = Executor::spawn("pmem").unwrap();
    let mut rng = GuestDriver::new(Box::new(Rng::new(executor.handle(), host_entropy)));
    rng.initialize();
    rng.add(0, &[Buffer::writable(GuestAddress(START), 16)]);
    rng.kick(0);
    assert!(crate::testing::eventually(crate::testing::PATIENCE, || rng.needs_reset()));
}

#[test]
fn places_that_cannot_be_are_refused() {
    let executor = Executor::spawn("pmem").unwrap();
    let backing = backing(4096, true);
    for start in [1, 4096, ALIGNMENT - 4096, ALIGNMENT + 1, u64::MAX - ALIGNMENT + 1] {
        let config = PmemConfig { start: GuestAddress(start) };
        let refused = Pmem::new(executor.handle(), backing.clone(), config).err().unwrap();
        assert!(refused.to_string().contains(&format!("{start:#x}")), "{refused}");
    }
}

#[test]
fn a_record_comes_back() {
    let executor = Executor::spawn("pmem").unwrap();
    let backing = backing(ALIGNMENT, false);
    snapshot_roundtrip(|| device(executor.handle(), &backing), |_| {});
}

#[test]
fn other_memory_cannot_take_the_place_of_what_was_saved() {
    let executor = Executor::spawn("pmem").unwrap();
    let mut pmem = device(executor.handle(), &backing(5000, true));
    let state = pmem.save().unwrap();
    let mut refused = |field: &str, state: PmemState| {
        let error = pmem.restore(state).unwrap_err().to_string();
        assert!(error.contains(&format!(": {field} has")), "{error}");
    };
    refused("start", PmemState { start: 0, ..state.clone() });
    refused("len", PmemState { len: 2 * ALIGNMENT, ..state.clone() });
    refused("file_len", PmemState { file_len: 5001, ..state.clone() });
    refused("read_only", PmemState { read_only: false, ..state.clone() });
    assert!(pmem.restore(state).is_ok());
}

/// Only four zeroes flush, however they are cut, and only four bytes are written.
#[test]
fn any_request_gets_one_answer() {
    let memory = ram();
    let descriptor = |place: u64, address: u64, len: u32, flags: u16| {
        let head = [address, u64::from(len) | u64::from(flags) << 32 | (place + 1) << 48];
        let entry = GuestAddress(16 * place);
        memory.write_slice(&head.map(u64::to_le_bytes).concat(), entry).unwrap();
    };
    let byte = prop_oneof![3 => Just(0u8), 1 => any::<u8>()];
    let strategy = (prop::collection::vec(byte, 0..9), 0..9u32, 0..9u32);
    proptest!(|((request, cut, room) in strategy)| {
        let len = request.len() as u32;
        let cut = cut.min(len);
        memory.write_slice(&request, GuestAddress(0x1000)).unwrap();
        memory.write_slice(&[9; 9], GuestAddress(0x2000)).unwrap();
        descriptor(0, 0x1000, cut, 1);
        descriptor(1, 0x1000 + u64::from(cut), len - cut, 1);
        descriptor(2, 0x2000, room, 2);
        let chain = Chain::parse(&memory, GuestAddress(0), 4, 0, false).unwrap();
        let read = Request::read(&chain, &memory);
        prop_assert_eq!(read == Request::Flush, request.len() >= 4 && request[..4] == [0; 4]);
        let written = answer(&chain, &memory, true);
        prop_assert_eq!(written, if room >= 4 { 4 } else { 0 });
        let mut after = [0; 9];
        memory.read_slice(&mut after, GuestAddress(0x2000)).unwrap();
        prop_assert!(after[written as usize..].iter().all(|&byte| byte == 9));
    });
}

#[test]
fn fuzz_pmem_request() {
    let ring = FuzzRing::new();
    let counters = PmemCounters::default();
    let mut worker = Worker {
        queue: ring.queue(0),
        notifier: Notifier::new(Interrupt::none()),
        read_only: false,
        counters: counters.clone(),
    };
    let corpus = [FuzzRing::seeds(&[0; 4]), FuzzRing::seeds(&[1, 0, 0, 0])].concat();
    fuzz("pmem request", &corpus, |input| {
        let before = counters.flushes() + counters.refused();
        ring.offer(&worker.queue, input);
        let served = worker.serve();
        // A request is an answer, or a fault; an answer over the ring may make more of them.
        let counted = counters.flushes() + counters.refused() - before;
        assert!(counted <= BUDGET as u64 && (counted > 0 || served.is_err()), "{counted}");
        served.map_err(|fault| fault.to_string().len() % 16).map(|_| counters.flushes() % 2)
    });
}
