//! Several queues.

use super::*;
use crate::testing::register;

fn device(executor: &Executor, file: &NamedTempFile, queues: u16) -> Box<Block> {
    let config = BlockConfig { queues, ..config(false) };
    with_engine(executor.handle(), Engine::Sync, file, config)
}

#[test]
fn the_number_of_queues_is_told() {
    let executor = Executor::spawn("block").unwrap();
    for (queues, feature) in [(1, 0), (2, feature::MQ), (MAX_QUEUES, feature::MQ)] {
        let file = image();
        let mut driver = GuestDriver::new(device(&executor, &file, queues));
        assert_eq!(driver.offered() & feature::MQ, feature);
        assert_eq!(driver.config(34, 2), queues.to_le_bytes());
        assert_eq!(driver.queue_count(), queues);
        driver.initialize();
        reads_a_sector(&mut driver);
    }
}

#[test]
fn no_queue_and_too_many_are_refused_with_the_cure() {
    let executor = Executor::spawn("block").unwrap();
    for queues in [0, MAX_QUEUES + 1] {
        let file = image();
        let disk = host::open(Engine::Sync, file.path(), false);
        let config = BlockConfig { queues, ..config(false) };
        let error = Block::new(executor.handle(), disk, config).err().unwrap().to_string();
        assert!(error.contains("disk-7") && error.contains("give it 1 to 16"), "{error}");
    }
}

#[test]
fn a_driver_may_use_fewer_queues() {
    let executor = Executor::spawn("block").unwrap();
    let file = image();
    let mut driver = GuestDriver::new(device(&executor, &file, 4));
    for (unwanted, used) in [(0, &[0_u16, 2][..]), (feature::MQ, &[0])] {
        let features = driver.offered() & !unwanted;
        assert!(driver.negotiate(features));
        driver.set_up_queues();
        for queue in (0..4).filter(|queue| !used.contains(queue)) {
            driver.write(register::QUEUE_SELECT, queue.into()).unwrap();
            driver.write(register::QUEUE_READY, 0).unwrap();
        }
        driver.driver_ok();
        for &queue in used {
            let head = driver.alloc_with(&header(kind::IN, 3));
            let answer = driver.alloc(513);
            let chain = [Buffer::readable(head, 16), Buffer::writable(answer, 513)];
            assert_eq!(driver.exchange(queue, &chain), 513);
        }
        // One that is not set up is nobody's.
        driver.notify(1);
        driver.reset();
    }
}

#[test]
fn a_driver_without_the_first_queue_is_refused() {
    let executor = Executor::spawn("block").unwrap();
    let file = image();
    let mut driver = GuestDriver::new(device(&executor, &file, 2));
    let features = driver.offered();
    assert!(driver.negotiate(features));
    driver.set_up_queues();
    driver.write(register::QUEUE_SELECT, 0).unwrap();
    driver.write(register::QUEUE_READY, 0).unwrap();
    driver.driver_ok();
    assert!(driver.needs_reset());
    driver.reset();
    driver.initialize();
    reads_a_sector(&mut driver);
}

#[test]
fn a_full_ring_on_every_queue_is_answered_on_its_own_queue() {
    let executor = Executor::spawn("block").unwrap();
    for engine in host::engines() {
        let file = image();
        let config = BlockConfig { queues: 4, ..config(false) };
        let mut driver = GuestDriver::new(with_engine(executor.handle(), engine, &file, config));
        driver.initialize();
        for round in 0..3 {
            for queue in 0..4 {
                let head = driver.alloc_with(&header(kind::IN, u64::from(queue)));
                for _ in 0..128 {
                    let answer = driver.alloc(513);
                    let chain = [Buffer::readable(head, 16), Buffer::writable(answer, 513)];
                    driver.add(queue, &chain);
                }
                driver.kick(queue);
            }
            for queue in 0..4 {
                for _ in 0..128 {
                    assert_eq!(driver.wait_used(queue).len, 513, "round {round}");
                }
            }
        }
    }
}
