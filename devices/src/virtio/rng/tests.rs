use super::*;
use crate::executor::Executor;
use crate::irq::Interrupt;
use crate::testing::{Buffer, Conformance, GuestDriver, metric, snapshot_roundtrip};
use crate::testing::{FuzzRing, fuzz};

fn sevens(buffer: &mut [u8]) -> io::Result<()> {
    buffer.fill(7);
    Ok(())
}

fn exhausted(_: &mut [u8]) -> io::Result<()> {
    Err(io::ErrorKind::WouldBlock.into())
}

fn driver(executor: &Executor, entropy: Entropy) -> GuestDriver {
    let mut driver = GuestDriver::new(Box::new(Rng::new(executor.handle(), entropy)));
    driver.initialize();
    driver
}

fn request(driver: &mut GuestDriver, lens: &[u32]) -> u32 {
    let buffers: Vec<_> =
        lens.iter().map(|&len| Buffer::writable(driver.alloc(len as usize), len)).collect();
    driver.exchange(0, &buffers)
}

#[test]
fn conforms() {
    Conformance::new(|executor| Box::new(Rng::new(executor, sevens)))
        .exercise(|driver| {
            let buffer = driver.alloc(16);
            assert_eq!(driver.exchange(0, &[Buffer::writable(buffer, 16)]), 16);
            assert_eq!(driver.bytes(buffer, 16), [7; 16]);
        })
        .answers(&[0])
        .run();
}

#[test]
fn every_byte_of_a_scattered_request_is_filled_and_no_other() {
    let executor = Executor::spawn("rng").unwrap();
    let mut driver = driver(&executor, sevens);
    let (first, second) = (driver.alloc(5000), driver.alloc(64));
    let len = driver.exchange(0, &[Buffer::writable(first, 4999), Buffer::writable(second, 3)]);
    assert_eq!(len, 5002);
    assert_eq!(driver.bytes(first, 5000), [&[7; 4999][..], &[0]].concat());
    assert_eq!(driver.bytes(second, 4), [7, 7, 7, 0]);
}

#[test]
fn a_request_for_too_much_gets_the_most_there_is() {
    let executor = Executor::spawn("rng").unwrap();
    let mut driver = driver(&executor, sevens);
    let most = MAX_REQUEST as u32;
    assert_eq!(request(&mut driver, &[most]), most);
    assert_eq!(request(&mut driver, &[most + 1]), most);
    assert_eq!(request(&mut driver, &[most, most, 1]), most);
    assert_eq!(request(&mut driver, &[1, most]), most);
}

#[test]
fn requests_without_room_are_answered_with_nothing() {
    let executor = Executor::spawn("rng").unwrap();
    let mut driver = driver(&executor, sevens);
    assert_eq!(request(&mut driver, &[0]), 0);
    assert_eq!(request(&mut driver, &[0, 4, 0]), 4);
    let data = driver.alloc_with(b"data");
    assert_eq!(driver.exchange(0, &[Buffer::readable(data, 4)]), 0);
    assert_eq!(driver.bytes(data, 4), b"data");
}

#[test]
fn without_entropy_the_request_comes_back_empty() {
    let executor = Executor::spawn("rng").unwrap();
    let mut driver = driver(&executor, exhausted);
    assert_eq!(request(&mut driver, &[16]), 0);
}

#[test]
fn the_host_generator_fills_differently_each_time() {
    let (mut first, mut second) = ([0; 32], [0; 32]);
    host_entropy(&mut first).unwrap();
    host_entropy(&mut second).unwrap();
    assert_ne!(first, second);
}

#[test]
fn a_record_comes_back() {
    let executor = Executor::spawn("rng").unwrap();
    snapshot_roundtrip(|| Rng::new(executor.handle(), sevens), |_| {});
}

#[test]
fn requests_bytes_and_failures_are_counted() {
    let executor = Executor::spawn("rng").unwrap();
    let counts = |entropy, requests: &[&[u32]]| {
        let device = Rng::new(executor.handle(), entropy);
        let meter = device.meter().unwrap();
        let mut driver = GuestDriver::new(Box::new(device));
        for lens in requests {
            driver.initialize();
            request(&mut driver, lens);
            driver.reset();
        }
        ["rng_requests_total", "rng_bytes_total", "rng_failures_total"]
            .map(|name| metric(&*meter, name))
    };
    assert_eq!(counts(sevens, &[&[100, 20], &[3]]), [2, 123, 0]);
    assert_eq!(counts(exhausted, &[&[100]]), [1, 0, 1]);
}

#[test]
fn fuzz_rng_request() {
    let ring = FuzzRing::new();
    let notifier = Notifier::new(Interrupt::none());
    let mut worker =
        Worker { queue: ring.queue(0), notifier, entropy: sevens, counters: Arc::default() };
    fuzz("rng request", &FuzzRing::seeds(&[0; 16]), |input| {
        ring.offer(&worker.queue, input);
        worker.serve().map_err(|fault| fault.to_string().len() % 16)
    });
}
