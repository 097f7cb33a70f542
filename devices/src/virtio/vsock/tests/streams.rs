//! Data: whole, in order, within its credit, and not at the cost of other connections.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread;
use std::time::{Duration, Instant};

use super::driver::Driver;
use super::stack::Ports;
use super::{Fixture, SOON};

const MEGABYTE: usize = 1 << 20;

/// `len` bytes in which a lost, doubled or moved piece shows.
fn pattern(len: usize, seed: u32) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2_654_435_761) | 1;
    let mut data = Vec::with_capacity(len + 4);
    while data.len() < len {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        data.extend(state.to_le_bytes());
    }
    data.truncate(len);
    data
}

fn connect(fixture: &mut Fixture, listener: &UnixListener, ports: Ports) -> UnixStream {
    assert!(fixture.guest.connect(ports));
    let program = listener.accept().unwrap().0;
    program.set_read_timeout(Some(SOON)).unwrap();
    program
}

fn to_guest(fixture: &mut Fixture, len: usize) -> Duration {
    let listener = UnixListener::bind(fixture.service(52)).unwrap();
    let mut program = connect(fixture, &listener, (52, 5000));
    let data = pattern(len, 1);
    fixture.guest.streams.get_mut(&(52, 5000)).unwrap().data.reserve(len);
    let begin = Instant::now();
    let writer = thread::spawn(move || {
        program.write_all(&data).unwrap();
        program
    });
    fixture.guest.until(|guest| guest.streams[&(52, 5000)].data.len() >= len);
    let took = begin.elapsed();
    assert!(fixture.guest.streams[&(52, 5000)].data == pattern(len, 1));
    drop(writer.join().unwrap());
    took
}

fn from_guest(fixture: &mut Fixture, len: usize) -> Duration {
    let listener = UnixListener::bind(fixture.service(52)).unwrap();
    let mut program = connect(fixture, &listener, (52, 5000));
    let expected = pattern(len, 2);
    let begin = Instant::now();
    let reader = thread::spawn(move || {
        let mut data = vec![0; len];
        program.read_exact(&mut data).unwrap();
        data
    });
    fixture.guest.write((52, 5000), &expected);
    let data = reader.join().unwrap();
    let took = begin.elapsed();
    assert!(data == expected);
    took
}

#[test]
fn much_data_to_the_guest_through_a_small_buffer() {
    let mut fixture = Fixture::new();
    fixture.guest.alloc = 8192;
    to_guest(&mut fixture, 20 * MEGABYTE);
}

#[test]
fn much_data_to_the_guest_through_odd_buffers() {
    let mut fixture = Fixture::with(Driver::new(3, 777));
    fixture.guest.alloc = 5001;
    to_guest(&mut fixture, MEGABYTE);
}

#[test]
fn much_data_from_the_guest() {
    let mut fixture = Fixture::new();
    from_guest(&mut fixture, 20 * MEGABYTE);
}

#[test]
fn throughput_for_information() {
    let report = |what, took: Duration, name| {
        let busy = time_of_thread(name);
        let rate = |time: Duration| (16 * MEGABYTE) as f64 / time.as_secs_f64() / 1e6;
        eprintln!("{what}: {:.0} MB/s, {:.0} MB per second of the loop", rate(took), rate(busy));
    };
    let mut fixture = Fixture::named("vsock-rate-1", Driver::new(128, 4096));
    let took = to_guest(&mut fixture, 16 * MEGABYTE);
    report("to the guest, buffers of 4 KiB", took, "vsock-rate-1");
    let mut fixture = Fixture::named("vsock-rate-2", Driver::new(64, 65536));
    let took = to_guest(&mut fixture, 16 * MEGABYTE);
    report("to the guest, buffers of 64 KiB", took, "vsock-rate-2");
    let mut fixture = Fixture::named("vsock-rate-3", Driver::new(64, 4096));
    let took = from_guest(&mut fixture, 16 * MEGABYTE);
    report("from the guest", took, "vsock-rate-3");
}

#[test]
fn a_hundred_connections_at_once_each_way() {
    let mut fixture = Fixture::new();
    let listener = UnixListener::bind(fixture.service(52)).unwrap();
    let len = 100_000;
    let programs: Vec<_> = (0..100)
        .map(|number| {
            let mut program = connect(&mut fixture, &listener, (52, 5000 + number));
            thread::spawn(move || {
                program.write_all(&pattern(len, number)).unwrap();
                let mut data = vec![0; len];
                program.read_exact(&mut data).unwrap();
                data == pattern(len, number + 1000)
            })
        })
        .collect();
    for number in 0..100 {
        fixture.guest.write((52, 5000 + number), &pattern(len, number + 1000));
    }
    for (number, program) in (0..).zip(programs) {
        let ports = (52, 5000 + number);
        fixture.guest.until(|guest| guest.streams[&ports].data.len() >= len);
        assert!(fixture.guest.streams[&ports].data == pattern(len, number));
        assert!(program.join().unwrap());
    }
}

#[test]
fn a_program_that_does_not_read_holds_up_only_itself() {
    let mut fixture = Fixture::new();
    let listener = UnixListener::bind(fixture.service(52)).unwrap();
    let mut slow = connect(&mut fixture, &listener, (52, 5000));
    let stuck = fixture.guest.stuff((52, 5000));
    let mut quick = connect(&mut fixture, &listener, (52, 5001));
    let reader = thread::spawn(move || {
        let mut data = vec![0; 4 * MEGABYTE];
        quick.read_exact(&mut data).unwrap();
        data
    });
    fixture.guest.write((52, 5001), &pattern(4 * MEGABYTE, 9));
    assert!(reader.join().unwrap() == pattern(4 * MEGABYTE, 9));

    slow.read_exact(&mut vec![0; stuck]).unwrap();
    fixture.guest.until(|guest| guest.streams[&(52, 5000)].room() > 0);
}

#[test]
fn a_guest_that_does_not_read_holds_up_only_itself() {
    let mut fixture = Fixture::new();
    let listener = UnixListener::bind(fixture.service(52)).unwrap();
    fixture.guest.sleepy = true;
    let mut stuck = connect(&mut fixture, &listener, (52, 5000));
    fixture.guest.sleepy = false;
    let mut quick = connect(&mut fixture, &listener, (52, 5001));
    let writers = [
        thread::spawn(move || stuck.write_all(&pattern(2 * MEGABYTE, 1)).unwrap()),
        thread::spawn(move || quick.write_all(&pattern(4 * MEGABYTE, 2)).unwrap()),
    ];
    fixture.guest.until(|guest| guest.streams[&(52, 5001)].data.len() == 4 * MEGABYTE);
    assert!(fixture.guest.streams[&(52, 5001)].data == pattern(4 * MEGABYTE, 2));
    fixture.guest.until(|guest| guest.streams[&(52, 5000)].credit_requests == 1);
    assert_eq!(fixture.guest.streams[&(52, 5000)].data.len(), 256 * 1024);

    fixture.guest.streams.get_mut(&(52, 5000)).unwrap().asleep = false;
    fixture.guest.read((52, 5000));
    fixture.guest.until(|guest| guest.streams[&(52, 5000)].data.len() == 2 * MEGABYTE);
    assert!(fixture.guest.streams[&(52, 5000)].data == pattern(2 * MEGABYTE, 1));
    writers.into_iter().for_each(|writer| writer.join().unwrap());
}

/// Processor time of this process's threads called `name`.
fn time_of_thread(name: &str) -> Duration {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten().map(|task| task.path());
    let named = tasks.filter(|task| {
        std::fs::read_to_string(task.join("comm")).is_ok_and(|comm| comm.trim() == name)
    });
    let nanoseconds = named.map(|task| {
        let statistics = std::fs::read_to_string(task.join("schedstat")).unwrap_or_default();
        statistics.split(' ').next().and_then(|time| time.parse().ok()).unwrap_or(0)
    });
    Duration::from_nanos(nanoseconds.sum())
}

#[test]
fn waiting_for_either_side_takes_no_processor_time() {
    let mut fixture = Fixture::named("vsock-waits", Driver::new(64, 4096));
    let listener = UnixListener::bind(fixture.service(52)).unwrap();
    fixture.guest.sleepy = true;
    // One with data and no credit, one that left with data unread, one that does not read.
    let mut waiting = connect(&mut fixture, &listener, (52, 5000));
    let mut gone = connect(&mut fixture, &listener, (52, 5001));
    let full = connect(&mut fixture, &listener, (52, 5002));
    waiting.set_nonblocking(true).unwrap();
    gone.set_nonblocking(true).unwrap();
    for _ in 0..100 {
        let _ = waiting.write(&[0; 65536]);
        let _ = gone.write(&[0; 65536]);
        fixture.guest.idle(Duration::from_millis(2));
    }
    drop(gone);
    fixture.guest.stuff((52, 5002));
    fixture.guest.idle(Duration::from_millis(100));
    let before = time_of_thread("vsock-waits");
    fixture.guest.idle(Duration::from_millis(500));
    let after = time_of_thread("vsock-waits");
    assert!(after > Duration::ZERO, "the thread was not found");
    assert!(after - before < Duration::from_millis(20), "{:?}", after - before);
    drop((waiting, full));
}

#[test]
fn data_waits_for_receive_buffers_without_processor_time() {
    let mut fixture = Fixture::named("vsock-starves", Driver::new(1, 4096));
    let listener = UnixListener::bind(fixture.service(52)).unwrap();
    let mut program = connect(&mut fixture, &listener, (52, 5000));
    program.write_all(&pattern(100_000, 3)).unwrap();
    thread::sleep(Duration::from_millis(100));
    let before = time_of_thread("vsock-starves");
    thread::sleep(Duration::from_millis(300));
    let after = time_of_thread("vsock-starves");
    assert!(after - before < Duration::from_millis(20), "{:?}", after - before);
    fixture.guest.until(|guest| guest.streams[&(52, 5000)].data.len() == 100_000);
    assert!(fixture.guest.streams[&(52, 5000)].data == pattern(100_000, 3));
}
