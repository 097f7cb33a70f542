use super::*;
use crate::testing::{Buffer, GuestDriver, StubDesk};

struct Bench {
    driver: GuestDriver,
    desk: StubDesk,
}

impl Bench {
    fn new(unwanted: u64) -> Self {
        let desk = StubDesk::new();
        let mut driver = GuestDriver::new(desk.device());
        driver.initialize_without(unwanted);
        Self { driver, desk }
    }

    fn add(&mut self) -> u16 {
        let buffer = Buffer::writable(GuestAddress(0x40_0000), 16);
        self.driver.add(0, &[buffer])
    }

    fn queue<R>(&self, act: impl FnOnce(&mut ActiveQueue) -> R) -> R {
        self.desk.with_queue(0, act)
    }

    fn pop(&self) -> Option<Chain> {
        self.queue(|queue| queue.pop().unwrap())
    }

    fn complete(&self) {
        let chain = self.pop().unwrap();
        self.queue(|queue| queue.complete(&chain, 16).unwrap());
    }

    /// Interrupts of a call to notify.
    fn notify(&self) -> u32 {
        self.driver.irq().take();
        self.queue(|queue| queue.notify().unwrap());
        self.driver.irq().take()
    }

    fn set_avail_flags(&self, flags: u16) {
        let address = GuestAddress(GuestDriver::ring_addresses(0)[1]);
        self.driver.memory().write_obj(flags.to_le(), address).unwrap();
    }

    fn set_used_event(&self, index: u16) {
        let address = GuestAddress(GuestDriver::ring_addresses(0)[1] + 4 + 2 * 64);
        self.driver.memory().write_obj(index.to_le(), address).unwrap();
    }
}

#[test]
fn chains_come_in_order_and_go_back_with_their_length() {
    let mut bench = Bench::new(0);
    let heads = [bench.add(), bench.add()];
    assert_eq!(bench.queue(|queue| queue.pending().unwrap()), 2);
    for (head, len) in heads.into_iter().zip([5, 7]) {
        let chain = bench.pop().unwrap();
        assert_eq!(chain.head(), head);
        bench.queue(|queue| queue.complete(&chain, len).unwrap());
        let used = bench.driver.used(0).unwrap();
        assert_eq!((used.head, used.len), (head, len));
    }
    assert!(bench.pop().is_none());
}

#[test]
fn a_chain_that_was_put_back_comes_again() {
    let mut bench = Bench::new(0);
    let head = bench.add();
    assert_eq!(bench.pop().unwrap().head(), head);
    bench.queue(ActiveQueue::undo_pop);
    assert_eq!(bench.pop().unwrap().head(), head);
    assert!(bench.pop().is_none());
}

#[test]
fn indices_wrap_around() {
    let mut bench = Bench::new(0);
    for _ in 0..70_000 {
        let head = bench.add();
        bench.complete();
        assert_eq!(bench.driver.used(0).unwrap().head, head);
    }
    assert_eq!(bench.driver.used_index(0), (70_000_u32 % 65_536) as u16);
}

#[test]
fn an_index_too_far_ahead_is_a_fault_and_exactly_the_size_is_none() {
    let mut bench = Bench::new(0);
    bench.driver.set_avail_index(0, 64);
    assert_eq!(bench.queue(|queue| queue.pending().unwrap()), 64);
    for index in [65, 0x8000, u16::MAX] {
        bench.driver.set_avail_index(0, index);
        let fault = bench.queue(|queue| queue.pop().unwrap_err());
        assert!(matches!(fault, QueueFault::AvailIndex { ahead, size: 64, .. } if ahead == index));
    }
}

#[test]
fn a_refused_chain_is_off_the_ring() {
    let mut bench = Bench::new(0);
    bench.driver.publish(0, 64);
    let head = bench.add();
    let fault = bench.queue(|queue| queue.pop().unwrap_err());
    assert_eq!(fault.to_string(), "queue 0: descriptor 64 is beyond the table of 64");
    assert_eq!(bench.pop().unwrap().head(), head);
}

#[test]
fn a_head_that_cannot_be_is_not_given_back() {
    let bench = Bench::new(0);
    let fault = bench.queue(|queue| queue.complete_head(64, 0).unwrap_err());
    assert!(matches!(fault, QueueFault::Rings { .. }));
    assert_eq!(bench.driver.used_index(0), 0);
}

#[test]
fn chains_given_back_together_are_seen_together_over_the_end_of_the_ring() {
    let mut bench = Bench::new(0);
    for round in 0..30 {
        let heads = [bench.add(), bench.add(), bench.add(), bench.add(), bench.add()];
        let given: Vec<_> = heads.iter().map(|&head| (head, u32::from(head) + round)).collect();
        for head in heads {
            assert_eq!(bench.pop().unwrap().head(), head);
        }
        let before = bench.driver.used_index(0);
        bench.queue(|queue| queue.complete_all(&given).unwrap());
        assert_eq!(bench.driver.used_index(0), before + 5);
        assert_eq!(bench.notify(), 1);
        for (head, len) in given {
            let used = bench.driver.used(0).unwrap();
            assert_eq!((used.head, used.len), (head, len));
        }
    }
    bench.queue(|queue| queue.complete_all(&[]).unwrap());
    assert_eq!(bench.notify(), 0);
    assert_eq!(bench.driver.used_index(0), 150);
}

#[test]
fn an_interrupt_wanted_within_chains_given_back_together_comes() {
    let mut bench = Bench::new(0);
    bench.set_used_event(2);
    let heads = [bench.add(), bench.add(), bench.add(), bench.add()];
    for _ in heads {
        bench.pop().unwrap();
    }
    bench.queue(|queue| queue.complete_all(&heads.map(|head| (head, 0))).unwrap());
    assert_eq!(bench.notify(), 1);
    bench.set_used_event(2);
    bench.add();
    bench.complete();
    assert_eq!(bench.notify(), 0);
}

#[test]
fn without_a_completed_chain_there_is_no_interrupt() {
    for unwanted in [0, feature::RING_EVENT_IDX] {
        let mut bench = Bench::new(unwanted);
        assert_eq!(bench.notify(), 0);
        bench.add();
        bench.complete();
        assert_eq!(bench.notify(), 1);
        assert_eq!(bench.notify(), 0);
    }
}

#[test]
fn a_driver_that_polls_is_not_interrupted() {
    let mut bench = Bench::new(feature::RING_EVENT_IDX);
    bench.set_avail_flags(AVAIL_NO_INTERRUPT);
    bench.add();
    bench.complete();
    assert_eq!(bench.notify(), 0);
    bench.set_avail_flags(0);
    bench.add();
    bench.complete();
    assert_eq!(bench.notify(), 1);
}

#[test]
fn with_indices_the_interrupt_comes_when_the_driver_said() {
    let mut bench = Bench::new(0);
    // Interrupt when entry 2 of the used ring is filled, the third.
    bench.set_used_event(2);
    for expected in [0, 0, 1, 0] {
        bench.add();
        bench.complete();
        assert_eq!(bench.notify(), expected);
    }
    // The same if it is passed within a batch.
    bench.set_used_event(5);
    for _ in 0..4 {
        bench.add();
        bench.complete();
    }
    assert_eq!(bench.notify(), 1);
}

#[test]
fn asking_for_notification_tells_of_chains_that_came_meanwhile() {
    for unwanted in [0, feature::RING_EVENT_IDX] {
        let mut bench = Bench::new(unwanted);
        bench.queue(|queue| queue.disable_notification().unwrap());
        assert!(!bench.queue(|queue| queue.enable_notification().unwrap()));
        bench.add();
        assert!(bench.queue(|queue| queue.enable_notification().unwrap()));
    }
}

#[test]
fn a_nudge_wakes_both_sides() {
    let bench = Bench::new(0);
    bench.driver.irq().take();
    bench.queue(|queue| queue.kick().clear());
    bench.queue(|queue| queue.nudge());
    assert_eq!(bench.queue(|queue| queue.kick().clear()), 1);
    assert_eq!(bench.driver.irq().take(), 1);
}

#[test]
fn a_record_keeps_the_place_in_the_rings() {
    let mut bench = Bench::new(0);
    for _ in 0..3 {
        bench.add();
    }
    bench.complete();
    let record = bench.queue(|queue| queue.record());
    assert_eq!((record.next_avail, record.next_used, record.size), (1, 1, 64));
    let queue = record.to_queue(64).unwrap();
    assert_eq!((queue.next_avail(), queue.next_used(), queue.ready()), (1, 1, true));
    assert_eq!(queue.desc_table(), record.desc_table);
}

#[test]
fn records_that_cannot_be_are_refused() {
    let bench = Bench::new(0);
    let good = bench.queue(|queue| queue.record());
    let bad = [
        QueueRecord { size: 0, ..good.clone() },
        QueueRecord { size: 3, ..good.clone() },
        QueueRecord { size: 128, ..good.clone() },
        QueueRecord { desc_table: 8, ..good.clone() },
        QueueRecord { avail_ring: 1, ..good.clone() },
        QueueRecord { used_ring: 2, ..good.clone() },
    ];
    for record in bad {
        assert!(matches!(record.to_queue(64), Err(RestoreError::Invalid { .. })));
    }
    assert!(good.to_queue(64).is_ok());
}
