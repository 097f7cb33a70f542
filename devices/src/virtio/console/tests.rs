use super::*;
use crate::event::Event;
use crate::executor::Executor;
use crate::irq::Interrupt;
use crate::memory::GuestAddress;
use crate::testing::{
    Buffer, Conformance, GuestDriver, HIGH_RAM, PATIENCE, RAM_SIZE, eventually, metric, register,
    snapshot_roundtrip,
};
use crate::testing::{FuzzRing, fuzz};

const RECEIVE: u16 = 0;
const TRANSMIT: u16 = 1;
const CONFIG_CHANGE: u32 = 2;

fn device(executor: ExecutorHandle) -> (Console, ConsoleHandle) {
    Console::new(executor, ConsoleConfig::default(), ConsoleOutput::default())
}

fn undriven() -> (Executor, GuestDriver, ConsoleHandle) {
    let executor = Executor::spawn("console").unwrap();
    let (console, handle) = device(executor.handle());
    (executor, GuestDriver::new(Box::new(console)), handle)
}

fn live() -> (Executor, GuestDriver, ConsoleHandle) {
    let (executor, mut driver, handle) = undriven();
    driver.initialize();
    (executor, driver, handle)
}

fn print(driver: &mut GuestDriver, bytes: &[u8]) {
    let buffer = driver.alloc_with(bytes);
    assert_eq!(driver.exchange(TRANSMIT, &[Buffer::readable(buffer, bytes.len() as u32)]), 0);
}

fn printed(reader: &mut OutputReader) -> Vec<u8> {
    let (mut all, mut bytes) = (Vec::new(), [0; 4096]);
    loop {
        match reader.read(&mut bytes) {
            0 => return all,
            count => all.extend(&bytes[..count]),
        }
    }
}

/// Reads `len` typed bytes as Linux does, with a page at a time.
fn typed(driver: &mut GuestDriver, len: usize) -> Vec<u8> {
    let mut all = Vec::new();
    while all.len() < len {
        let buffer = GuestAddress(HIGH_RAM.0);
        let count = driver.exchange(RECEIVE, &[Buffer::writable(buffer, 4096)]);
        assert_ne!(count, 0, "a buffer came back empty");
        all.extend(driver.bytes(buffer, count as usize));
    }
    all
}

fn size(driver: &mut GuestDriver) -> [u16; 2] {
    let space = driver.config(0, 4);
    [[space[0], space[1]], [space[2], space[3]]].map(u16::from_le_bytes)
}

#[test]
fn conforms() {
    Conformance::new(|executor| Box::new(device(executor).0))
        .exercise(|driver| print(driver, b"still here\n"))
        .answers(&[TRANSMIT])
        .run();
}

#[test]
fn what_is_printed_arrives_in_order() {
    let (_executor, mut driver, handle) = live();
    let mut reader = handle.output().subscribe().unwrap();
    print(&mut driver, b"first ");
    let (a, b) = (driver.alloc_with(b"sec"), driver.alloc_with(b"ond\n"));
    let pieces = [Buffer::readable(a, 3), Buffer::readable(b, 0), Buffer::readable(b, 4)];
    assert_eq!(driver.exchange(TRANSMIT, &pieces), 0);
    assert_eq!(printed(&mut reader), b"first second\n");
    assert_eq!(handle.counters().printed_bytes, 13);
}

#[test]
fn late_readers_get_the_earlier_lines_even_after_a_reset() {
    let (_executor, mut driver, handle) = live();
    print(&mut driver, b"before\n");
    driver.reset();
    driver.initialize();
    print(&mut driver, b"after\n");
    assert_eq!(printed(&mut handle.output().subscribe().unwrap()), b"before\nafter\n");
}

#[test]
fn h33_a_gigabyte_with_a_stalled_reader_stops_nobody() {
    let (_executor, mut driver, handle) = live();
    let mut stalled = handle.output().subscribe().unwrap();
    print(&mut driver, b"start");
    // In one write: only what the ring can hold is looked at.
    let huge = [Buffer::readable(HIGH_RAM, RAM_SIZE as u32); 63];
    assert_eq!(driver.exchange(TRANSMIT, &huge), 0);
    // And 64 MiB in many.
    let piece = [Buffer::readable(HIGH_RAM, 64 << 10)];
    for _ in 0..1024 {
        assert_eq!(driver.exchange(TRANSMIT, &piece), 0);
    }
    print(&mut driver, b"end");
    let total = 5 + 63 * RAM_SIZE + (64 << 20) + 3;
    assert_eq!(handle.counters().printed_bytes, total);
    assert_eq!(handle.counters().dropped_bytes, 63 * RAM_SIZE - DEFAULT_CAPACITY as u64);
    let kept = printed(&mut stalled);
    assert_eq!((kept.len(), &kept[kept.len() - 3..]), (DEFAULT_CAPACITY, &b"end"[..]));
    assert_eq!(stalled.lost() + kept.len() as u64, total);
    assert_eq!(handle.output().dropped(), stalled.lost());
}

#[test]
fn what_is_typed_arrives_in_order() {
    let (_executor, mut driver, handle) = live();
    // First the buffer, then the bytes, and the other way round.
    let buffer = driver.alloc(64);
    driver.add(RECEIVE, &[Buffer::writable(buffer, 64)]);
    driver.kick(RECEIVE);
    assert_eq!(handle.input().write(b"ls\n"), 3);
    assert_eq!(driver.wait_used(RECEIVE).len, 3);
    assert_eq!(driver.bytes(buffer, 4), b"ls\n\0");
    assert_eq!(handle.input().write(b"pwd\n"), 4);
    assert_eq!(typed(&mut driver, 4), b"pwd\n");
    assert_eq!(handle.counters().typed_bytes, 7);
    let meter = driver.transport().lifecycle().meter().unwrap();
    assert_eq!(metric(&*meter, "console_typed_bytes_total"), 7);
    print(&mut driver, b"four");
    assert_eq!(metric(&*meter, "console_printed_bytes_total"), 4);
}

#[test]
fn buffers_of_any_shape_are_filled_as_far_as_they_go() {
    let (_executor, mut driver, handle) = live();
    handle.input().write(b"abcdefgh");
    let (a, b) = (driver.alloc(8), driver.alloc(8));
    let scattered = [Buffer::writable(a, 1), Buffer::writable(a, 0), Buffer::writable(b, 2)];
    assert_eq!(driver.exchange(RECEIVE, &scattered), 3);
    assert_eq!((driver.bytes(a, 2), driver.bytes(b, 3)), (b"a\0".to_vec(), b"bc\0".to_vec()));
    // Those without room come back and cost nothing.
    assert_eq!(driver.exchange(RECEIVE, &[Buffer::writable(a, 0)]), 0);
    assert_eq!(driver.exchange(RECEIVE, &[Buffer::readable(a, 8)]), 0);
    assert_eq!(typed(&mut driver, 5), b"defgh");
}

#[test]
fn h33_a_flood_of_input_is_bounded_and_none_of_what_was_accepted_is_lost() {
    let (_executor, mut driver, handle) = live();
    let room = Event::new().unwrap();
    handle.input().when_room(room.clone());
    assert_eq!(room.clear(), 1, "there is room now");
    let flood: Vec<u8> = (0..1_000_000u32).map(|number| number as u8).collect();
    let accepted = handle.input().write(&flood);
    assert_eq!((accepted, handle.input().waiting()), (MAX_INPUT, MAX_INPUT));
    assert_eq!(handle.input().write(b"more"), 0);
    assert_eq!(handle.input().refused(), (flood.len() - accepted + 4) as u64);
    assert_eq!(room.clear(), 0);
    assert_eq!(typed(&mut driver, accepted), flood[..accepted]);
    assert_eq!(room.clear(), 1, "one wake-up for whoever waits for room");
    assert_eq!(handle.input().write(b"more"), 4);
    assert_eq!(typed(&mut driver, 4), b"more");
}

#[test]
fn what_is_typed_waits_for_a_guest_that_is_not_there_yet() {
    let (_executor, mut driver, handle) = undriven();
    handle.input().write(b"a");
    driver.initialize();
    driver.reset();
    handle.input().write(b"b");
    driver.initialize();
    driver.pause();
    handle.input().write(b"c");
    driver.resume();
    assert_eq!(typed(&mut driver, 3), b"abc");
}

#[test]
fn what_is_typed_survives_a_snapshot_and_more_can_be_typed_at_once() {
    let (executor, mut driver, handle) = live();
    handle.input().write(b"before ");
    driver.pause();
    let record = driver.save();
    let (console, handle) = device(executor.handle());
    driver.replace(Box::new(console), record).unwrap();
    handle.input().write(b"after");
    driver.resume();
    assert_eq!(typed(&mut driver, 12), b"before after");
}

#[test]
fn too_much_input_in_a_record_is_refused() {
    let executor = Executor::spawn("console").unwrap();
    let (mut console, handle) = device(executor.handle());
    let state = ConsoleState { columns: 1, rows: 2, input: vec![7; MAX_INPUT + 1] };
    let refused = console.restore(state).unwrap_err().to_string();
    assert!(refused.contains("65537 bytes"), "{refused}");
    assert_eq!(handle.input().waiting(), 0);
}

#[test]
fn a_new_size_is_told_at_once() {
    let (_executor, mut driver, handle) = live();
    assert_eq!(size(&mut driver), [80, 25]);
    let before = driver.read(register::CONFIG_GENERATION);
    handle.resize(ConsoleConfig { columns: 132, rows: 43 });
    driver.wait_interrupt(CONFIG_CHANGE);
    assert_eq!(size(&mut driver), [132, 43]);
    assert_ne!(driver.read(register::CONFIG_GENERATION), before);
}

#[test]
fn a_new_size_is_told_after_a_pause_and_after_a_restore() {
    let (executor, mut driver, handle) = live();
    driver.pause();
    handle.resize(ConsoleConfig { columns: 132, rows: 43 });
    assert_eq!(driver.read(register::INTERRUPT_STATUS), 0);
    let record = driver.save();
    driver.resume();
    driver.wait_interrupt(CONFIG_CHANGE);
    assert_eq!(size(&mut driver), [132, 43]);

    driver.pause();
    driver.replace(Box::new(device(executor.handle()).0), record).unwrap();
    driver.resume();
    driver.wait_interrupt(CONFIG_CHANGE);
    assert_eq!(size(&mut driver), [132, 43]);
}

#[test]
fn the_configuration_space_has_one_port_and_nothing_to_read_back() {
    let (_executor, mut driver, _handle) = live();
    driver.write(register::CONFIG + EMERG_WRITE, u32::from(b'x')).unwrap();
    assert_eq!(driver.config(0, 12), [80, 0, 25, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn a_guest_in_trouble_prints_before_it_has_a_driver() {
    let (_executor, mut driver, handle) = undriven();
    let write = |driver: &mut GuestDriver, offset, data: &[u8]| {
        crate::bus::BusDevice::write(driver.transport(), register::CONFIG + offset, data)
    };
    write(&mut driver, 8, b"o").unwrap();
    write(&mut driver, 8, b"o\0").unwrap();
    write(&mut driver, 8, b"p\0\0\0").unwrap();
    for elsewhere in [0, 2, 4, 9, 11] {
        assert!(write(&mut driver, elsewhere, b"x").is_err());
    }
    driver.initialize();
    write(&mut driver, 8, b"s\xff\xff\xff").unwrap();
    for elsewhere in [0, 2, 4, 9, 11] {
        write(&mut driver, elsewhere, b"x").unwrap();
    }
    write(&mut driver, 6, b"xx!x").unwrap();
    assert_eq!(printed(&mut handle.output().subscribe().unwrap()), b"oops!");
    assert_eq!((handle.counters().emergency_bytes, handle.counters().printed_bytes), (5, 5));
    assert_eq!(size(&mut driver), [80, 25]);
}

#[test]
fn a_driver_that_breaks_the_rules_loses_its_console_and_no_line() {
    let (_executor, mut driver, handle) = live();
    print(&mut driver, b"last words\n");
    driver.set_avail_index(TRANSMIT, u16::MAX);
    driver.kick(TRANSMIT);
    assert!(eventually(PATIENCE, || driver.needs_reset()));
    assert_eq!(handle.counters().guest_faults, 1);
    assert_eq!(handle.input().write(b"still accepted"), 14);
    driver.reset();
    driver.initialize();
    assert_eq!(typed(&mut driver, 14), b"still accepted");
    assert_eq!(printed(&mut handle.output().subscribe().unwrap()), b"last words\n");
}

#[test]
fn typing_and_printing_under_resets_end_with_a_console_that_works() {
    let (_executor, mut driver, handle) = live();
    let ended = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|threads| {
        threads.spawn(|| {
            while !ended.load(Ordering::Acquire) {
                handle.input().write(b"typed");
                std::thread::yield_now();
            }
        });
        for _ in 0..200 {
            let buffer = driver.alloc(64);
            driver.add(RECEIVE, &[Buffer::writable(buffer, 64)]);
            driver.add(TRANSMIT, &[Buffer::readable(buffer, 64)]);
            driver.kick(RECEIVE);
            driver.kick(TRANSMIT);
            driver.reset();
            driver.initialize();
        }
        ended.store(true, Ordering::Release);
    });
    let waiting = handle.input().waiting();
    assert_eq!(typed(&mut driver, waiting).len(), waiting);
    assert!(eventually(PATIENCE, || handle.input().waiting() == 0));
}

#[test]
fn a_record_comes_back() {
    let executor = Executor::spawn("console").unwrap();
    snapshot_roundtrip(
        || device(executor.handle()).0,
        |console| {
            console.input.write(b"ls\n");
            console.shared.set_size(ConsoleConfig { columns: 1, rows: 2 });
        },
    );
}

#[test]
fn fuzz_console_request() {
    let (out, typed) = (FuzzRing::new(), FuzzRing::new());
    let output = ConsoleOutput::new(4096);
    let executor = Executor::spawn("console").unwrap();
    let (console, handle) = device(executor.handle());
    let mut worker = Worker {
        receive: typed.queue(RECEIVE),
        transmit: out.queue(TRANSMIT),
        capacity: output.capacity(),
        output,
        input: console.input.clone(),
        shared: console.shared.clone(),
        notifier: Notifier::new(Interrupt::none()),
    };
    fuzz("console request", &FuzzRing::seeds(b"hello\n"), |input| {
        handle.input().write(b"typed");
        out.offer(&worker.transmit, input);
        typed.offer(&worker.receive, input);
        let printed = worker.print_all().map_err(|fault| fault.to_string().len() % 16);
        let typed = worker.type_all().map_err(|fault| fault.to_string().len() % 16);
        (printed, typed)
    });
}
