use proptest::prelude::*;

use super::*;

fn read(reader: &mut OutputReader) -> Vec<u8> {
    let mut bytes = vec![0; 1 << 20];
    let mut len = 0;
    loop {
        match reader.read(&mut bytes[len..]) {
            0 => break,
            count => len += count,
        }
    }
    bytes.truncate(len);
    bytes
}

#[test]
fn late_readers_get_the_earlier_lines() {
    let output = ConsoleOutput::default();
    output.write(b"first\n");
    let mut early = output.subscribe().unwrap();
    output.write(b"second\n");
    let mut late = output.subscribe().unwrap();
    assert_eq!(read(&mut early), b"first\nsecond\n");
    assert_eq!(read(&mut late), b"first\nsecond\n");
    output.write(b"third\n");
    assert_eq!(read(&mut late), b"third\n");
    assert_eq!((read(&mut early), early.lost()), (b"third\n".to_vec(), 0));
}

#[test]
fn the_oldest_bytes_are_dropped_and_counted() {
    let output = ConsoleOutput::new(8);
    let mut reader = output.subscribe().unwrap();
    output.write(b"0123456789");
    assert_eq!((output.written(), output.dropped()), (10, 2));
    assert_eq!((read(&mut reader), reader.lost()), (b"23456789".to_vec(), 2));
    output.write(b"abc");
    output.write(&[b'x'; 100]);
    assert_eq!((read(&mut reader), reader.lost()), (b"xxxxxxxx".to_vec(), 2 + 95));
    assert_eq!(output.dropped(), 105);
    // Who comes later has missed nothing that was there to be read.
    assert_eq!(output.subscribe().unwrap().lost(), 0);
}

#[test]
fn what_is_skipped_leaves_no_gap() {
    let output = ConsoleOutput::new(8);
    let mut reader = output.subscribe().unwrap();
    output.write(b"old");
    output.skip(1 << 32);
    output.write(b"new");
    assert_eq!((read(&mut reader), reader.lost()), (b"new".to_vec(), (1 << 32) + 3));
}

#[test]
fn a_reader_is_woken_once_there_is_something() {
    let output = ConsoleOutput::default();
    let mut reader = output.subscribe().unwrap();
    assert_eq!(reader.event().clear(), 1, "there may be something from before");
    assert_eq!(read(&mut reader), b"");
    assert_eq!(reader.event().clear(), 0);
    for _ in 0..3 {
        output.write(b"x");
    }
    assert_eq!(reader.event().clear(), 1, "once is enough");
    assert_eq!(read(&mut reader), b"xxx");
    output.write(b"y");
    // The event that is not taken is taken by the read that finds nothing.
    assert_eq!(read(&mut reader), b"y");
    assert_eq!(reader.event().clear(), 0);
}

#[test]
fn an_empty_buffer_does_not_mean_that_there_is_nothing() {
    let output = ConsoleOutput::default();
    let mut reader = output.subscribe().unwrap();
    assert_eq!(reader.read(&mut []), 0);
    assert_eq!(reader.event().clear(), 1);
}

#[test]
fn readers_are_bounded_and_end_with_their_drop() {
    let output = ConsoleOutput::default();
    let mut readers: Vec<_> = (0..MAX_READERS).map(|_| output.subscribe().unwrap()).collect();
    assert_eq!(output.subscribe().err().unwrap().kind(), io::ErrorKind::ResourceBusy);
    readers.pop();
    assert!(output.subscribe().is_ok());
    drop(readers);
    assert!(output.ring().readers.is_empty());
}

#[test]
fn capacities_have_limits() {
    assert_eq!(ConsoleOutput::new(0).capacity(), 1);
    assert_eq!(ConsoleOutput::new(usize::MAX).capacity(), MAX_CAPACITY);
}

#[test]
fn a_reader_on_another_thread_misses_nothing() {
    let output = ConsoleOutput::new(1 << 20);
    let mut reader = output.subscribe().unwrap();
    let written: Vec<u8> = (0..500_000u32).map(|number| number as u8).collect();
    let received = std::thread::scope(|threads| {
        let reading = threads.spawn(move || {
            let (mut all, mut bytes) = (Vec::<u8>::new(), [0; 999]);
            while all.len() < 500_000 {
                match reader.read(&mut bytes) {
                    0 => wait(reader.event()),
                    count => all.extend(&bytes[..count]),
                }
            }
            assert_eq!(reader.lost(), 0);
            all
        });
        written.chunks(777).for_each(|piece| output.write(piece));
        reading.join().unwrap()
    });
    assert!(received == written);
}

fn wait(event: &Event) {
    let mut poll = libc::pollfd {
        fd: std::os::fd::AsRawFd::as_raw_fd(event),
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one pollfd, which outlives the call.
    assert_eq!(unsafe { libc::poll(&mut poll, 1, 20_000) }, 1, "nobody woke the reader");
}

#[derive(Clone, Debug)]
enum Step {
    Write(usize),
    Skip(u64),
    Read(usize),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (0..40usize).prop_map(Step::Write),
        (0..40u64).prop_map(Step::Skip),
        (1..40usize).prop_map(Step::Read),
    ]
}

proptest! {
    /// A reader sees each byte at its place, or counts it as lost.
    #[test]
    fn reading_and_losing_add_up(steps in prop::collection::vec(step(), 1..100), capacity in 1..32usize) {
        let output = ConsoleOutput::new(capacity);
        let mut reader = output.subscribe().unwrap();
        let (mut position, mut seen) = (0u64, 0u64);
        for step in steps {
            match step {
                Step::Write(len) => {
                    let bytes: Vec<u8> = (0..len as u64).map(|at| (position + at) as u8).collect();
                    output.write(&bytes);
                    position += len as u64;
                }
                Step::Skip(len) => {
                    output.skip(len);
                    position += len;
                }
                Step::Read(len) => {
                    let mut bytes = vec![0; len];
                    let count = reader.read(&mut bytes);
                    let first = reader.lost() + seen;
                    for (at, byte) in bytes[..count].iter().enumerate() {
                        prop_assert_eq!(*byte, (first + at as u64) as u8);
                    }
                    seen += count as u64;
                    prop_assert!(count > 0 || reader.lost() + seen == position);
                }
            }
            prop_assert!(output.ring().kept.len() <= capacity);
            prop_assert_eq!(output.written(), position);
        }
    }
}
