//! The rate limit.

use super::*;
use crate::testing::{PATIENCE, eventually};

struct Limited {
    driver: GuestDriver,
    counts: Arc<BlockCounts>,
    _executor: Executor,
    _file: NamedTempFile,
}

fn limited(bytes: Option<&str>, operations: Option<&str>) -> Limited {
    let executor = Executor::spawn("block").unwrap();
    let file = image();
    let rate = |text: Option<&str>| text.map(|text| text.parse().unwrap());
    let rate = RateLimit { bytes: rate(bytes), operations: rate(operations) };
    let config = BlockConfig { rate, queues: 2, ..config(false) };
    let device = with_engine(executor.handle(), Engine::Sync, &file, config);
    let counts = device.counts.clone();
    let mut driver = GuestDriver::new(device);
    driver.initialize();
    Limited { driver, counts, _executor: executor, _file: file }
}

impl Limited {
    fn read(&mut self, queue: u16, sectors: usize) -> u16 {
        let head = self.driver.alloc_with(&header(kind::IN, 0));
        let len = sectors * 512 + 1;
        let answer = self.driver.alloc(len);
        let chain = [Buffer::readable(head, 16), Buffer::writable(answer, len as u32)];
        self.driver.add(queue, &chain)
    }
}

#[test]
fn requests_beyond_the_limit_wait_in_their_ring_and_are_answered_in_time() {
    // Ten at once, and then one every twenty milliseconds.
    let mut bench = limited(None, Some("1/20ms+9"));
    let heads: Vec<_> = (0..20).map(|_| bench.read(0, 1)).collect();
    let start = std::time::Instant::now();
    bench.driver.kick(0);
    let answered: Vec<_> = (0..20).map(|_| bench.driver.wait_used(0).head).collect();
    assert_eq!(answered, heads);
    // A slow machine takes longer, never less.
    assert!(start.elapsed() >= std::time::Duration::from_millis(9 * 20), "{:?}", start.elapsed());
    assert!((1..=10).contains(&bench.counts.throttled.get()), "{:?}", bench.counts);
}

#[test]
fn bytes_are_limited_whatever_the_size_of_requests() {
    // The first uses up the bucket and the burst; each further one is paid for before the next.
    let mut bench = limited(Some("8K/100ms+4K"), None);
    for _ in 0..4 {
        bench.read(1, 32);
    }
    let start = std::time::Instant::now();
    bench.driver.kick(1);
    for _ in 0..4 {
        assert_eq!(bench.driver.wait_used(1).len, 32 * 512 + 1);
    }
    let least = std::time::Duration::from_millis(100) * ((3 * 16 - 12) / 8);
    assert!(start.elapsed() >= least, "{:?}", start.elapsed());
}

#[test]
fn the_limit_is_one_for_all_queues() {
    let mut bench = limited(None, Some("2/3600s"));
    for queue in [0, 1] {
        for _ in 0..4 {
            bench.read(queue, 1);
        }
        bench.driver.kick(queue);
    }
    assert!(eventually(PATIENCE, || bench.counts.throttled.get() > 0));
    // Notifications do not help.
    for _ in 0..100 {
        bench.driver.kick(0);
        bench.driver.notify(1);
    }
    bench.driver.pause();
    let used = bench.driver.used_index(0) + bench.driver.used_index(1);
    // The one that goes beyond the limit is let through, and paid for afterwards.
    assert!((2..=3).contains(&used), "{used}");
    assert_eq!(bench.counts.throttled.get(), 1, "one wait was counted several times");
}

#[test]
fn a_pause_does_not_wait_for_tokens_and_loses_nothing() {
    let mut bench = limited(None, Some("1/50ms"));
    for _ in 0..5 {
        bench.read(0, 1);
    }
    bench.driver.kick(0);
    for _ in 0..5 {
        bench.driver.pause();
        bench.driver.resume();
        bench.driver.wait_used(0);
    }
    assert_eq!(bench.counts.reads.get(), 5);
}

#[test]
fn a_reset_gives_no_new_tokens() {
    let mut bench = limited(None, Some("1/3600s+2"));
    for _ in 0..3 {
        bench.read(0, 1);
    }
    bench.driver.kick(0);
    for _ in 0..3 {
        bench.driver.wait_used(0);
    }
    for _ in 0..50 {
        bench.driver.reset();
        bench.driver.initialize();
        bench.read(0, 1);
        bench.driver.kick(0);
    }
    bench.driver.pause();
    assert!((3..=4).contains(&bench.counts.reads.get()), "{:?}", bench.counts);
}

#[test]
fn requests_that_are_refused_count_as_operations() {
    let mut bench = limited(None, Some("3/3600s"));
    for _ in 0..10 {
        let head = bench.driver.alloc_with(&header(99, 0));
        let status = bench.driver.alloc(1);
        bench.driver.add(0, &[Buffer::readable(head, 16), Buffer::writable(status, 1)]);
    }
    bench.driver.kick(0);
    assert!(eventually(PATIENCE, || bench.counts.throttled.get() == 1));
    bench.driver.pause();
    assert!((3..=4).contains(&bench.driver.used_index(0)), "{:?}", bench.counts);
}
