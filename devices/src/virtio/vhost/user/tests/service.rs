//! With a backend that does as it should, and one that comes and goes.

use std::os::unix::fs::FileExt;

use super::*;
use crate::testing::{Conformance, PATIENCE, register};
use crate::virtio::lifecycle::status;

const USED_BUFFER: u32 = 1;
const CONFIG_CHANGE: u32 = 2;

#[test]
fn conforms() {
    let service = Service::start(true, 2);
    Conformance::new(|executor| service.device(executor))
        .in_memory(shared_ram)
        .exercise(reads)
        .answers(&[0, 1])
        .thinned(11)
        .run();
}

fn sector(service: &Service, number: u64) -> Vec<u8> {
    let mut data = vec![0; 512];
    service.image.as_file().read_exact_at(&mut data, number * 512).unwrap();
    data
}

#[test]
fn what_is_written_is_in_the_backends_file_and_is_read_again() {
    let (service, executor) = (Service::start(false, 2), Executor::spawn("vhost").unwrap());
    let mut driver = service.driver(&executor);
    driver.initialize();
    assert_eq!(driver.config(0, 8), (SECTORS as u64).to_le_bytes());
    assert_eq!(driver.config(34, 2), [2, 0]);
    for (queue, number) in [(0, 5), (1, 9)] {
        let status = asks_to_write(&mut driver, queue, number, 0xa0 + queue as u8);
        // Before a look at the ring: who has taken the chain by himself is owed no interrupt.
        driver.wait_interrupt(USED_BUFFER);
        assert_eq!(driver.wait_used(queue).len, 1);
        assert_eq!(driver.bytes(status, 1), [OK]);
        assert_eq!(sector(&service, number), [0xa0 + queue as u8; 512]);
    }
    reads(&mut driver);
}

#[test]
fn a_pause_and_a_restore_lose_no_request() {
    let (service, executor) = (Service::start(true, 1), Executor::spawn("vhost").unwrap());
    let mut driver = service.driver(&executor);
    driver.initialize();
    for round in 0..50 {
        let head = driver.alloc_with(&header(IN, 3));
        let answers: Vec<_> = (0..8).map(|_| driver.alloc(513)).collect();
        for answer in &answers {
            driver.add(0, &[Buffer::readable(head, 16), Buffer::writable(*answer, 513)]);
        }
        driver.kick(0);
        driver.pause();
        if round % 5 == 0 {
            let record = driver.save();
            driver.replace(service.device(executor.handle()), record).unwrap();
        }
        driver.resume();
        for _ in &answers {
            assert_eq!(driver.wait_used(0).len, 513);
        }
        for answer in answers {
            assert_eq!(driver.bytes(answer, 513), [vec![4; 512], vec![OK]].concat());
        }
        driver.reset();
        driver.initialize();
    }
}

#[test]
fn h61_a_backend_that_goes_costs_the_guest_a_reset_and_one_that_comes_back_is_used() {
    let (mut service, executor) = (Service::start(false, 1), Executor::spawn("vhost").unwrap());
    let device = service.device(executor.handle());
    let meter = device.meter().unwrap();
    let mut driver = GuestDriver::with_memory(device, shared_ram());
    driver.initialize();
    writes(&mut driver, 0, 7, 0x77);
    for round in 1..=3 {
        drop(service.backend.take());
        assert!(eventually(PATIENCE, || driver.needs_reset()));
        driver.wait_interrupt(CONFIG_CHANGE);
        assert_eq!(metric(&*meter, "vhost_user_losses_total"), round);
        // A pause is still possible, and so are resets without anybody at the socket.
        driver.pause();
        driver.resume();
        driver.reset();
        let features = driver.offered();
        assert!(driver.negotiate(features));
        driver.set_up_queues();
        driver.write(register::STATUS, 0xf).unwrap();
        assert!(driver.needs_reset());
        assert!(metric(&*meter, "vhost_user_failures_total") >= round);
        service.come_back();
        driver.reset();
        driver.initialize();
        writes(&mut driver, 0, 7 + round, 0x70 + round as u8);
        assert_eq!(sector(&service, 7 + round), [0x70 + round as u8; 512]);
    }
    assert_eq!(metric(&*meter, "vhost_user_connections_total"), 4);
}

#[test]
fn a_backend_that_hangs_up_once_is_connected_to_again() {
    let (service, executor) = (Service::start(true, 1), Executor::spawn("vhost").unwrap());
    let mut driver = service.driver(&executor);
    driver.initialize();
    for _ in 0..20 {
        service.backend.as_ref().unwrap().hang_up();
        assert!(eventually(PATIENCE, || driver.needs_reset()));
        driver.reset();
        driver.initialize();
        reads(&mut driver);
    }
}

#[test]
fn another_disk_does_not_take_the_place_of_the_one_that_the_guest_knows() {
    let (mut service, executor) = (Service::start(true, 1), Executor::spawn("vhost").unwrap());
    let mut driver = service.driver(&executor);
    driver.initialize();
    drop(service.backend.take());
    service.image.as_file().set_len(512 * 10).unwrap();
    service.come_back();
    assert!(eventually(PATIENCE, || driver.needs_reset()));
    driver.reset();
    let features = driver.offered();
    assert!(driver.negotiate(features));
    driver.set_up_queues();
    driver.driver_ok();
    assert!(driver.needs_reset());
}

#[test]
fn memory_that_is_not_shared_is_refused() {
    let (service, executor) = (Service::start(true, 1), Executor::spawn("vhost").unwrap());
    let mut driver = GuestDriver::new(service.device(executor.handle()));
    let features = driver.offered();
    assert!(driver.negotiate(features));
    driver.set_up_queues();
    driver.driver_ok();
    assert_ne!(driver.status() & status::NEEDS_RESET, 0);
}

#[test]
fn more_queues_than_the_backend_has_are_refused() {
    let (service, executor) = (Service::start(true, 2), Executor::spawn("vhost").unwrap());
    let options = VhostUserConfig { queues: 5, ..service.options() };
    let error = VhostUser::block(executor.handle(), options).err().unwrap().to_string();
    assert!(error.contains("has 2 queues and 5 are asked for"), "{error}");
}
