//! Stimuli of the list that concern one kind of device and are not next to its other tests.

use std::fs;
use std::os::unix::fs::MetadataExt;

use tempfile::NamedTempFile;

use super::VirtioDevice;
use super::block::{Block, BlockConfig, RawFile};
use crate::executor::Executor;
use crate::testing::{Buffer, GuestDriver};

const SECTORS: usize = 64;
const OK: u8 = 0;
const IO_ERROR: u8 = 1;
const UNSUPPORTED: u8 = 2;
/// Request types: read, write, flush, identity.
const IN: u32 = 0;
const OUT: u32 = 1;
const FLUSH: u32 = 4;

/// A live disk in a file.
struct Bench {
    driver: GuestDriver,
    file: NamedTempFile,
    executor: Executor,
}

fn disk(executor: &Executor, file: &NamedTempFile, read_only: bool) -> Box<dyn VirtioDevice> {
    let disk = RawFile::open(file.path(), read_only).unwrap();
    let config = BlockConfig { read_only, queues: 2, ..BlockConfig::new("disk") };
    Box::new(Block::new(executor.handle(), Box::new(disk), config).unwrap())
}

impl Bench {
    fn new(read_only: bool, unwanted: u64) -> Self {
        let executor = Executor::spawn("block").unwrap();
        let file = NamedTempFile::new().unwrap();
        fs::write(file.path(), vec![7; SECTORS * 512]).unwrap();
        let mut driver = GuestDriver::new(disk(&executor, &file, read_only));
        driver.initialize_without(unwanted);
        Self { driver, file, executor }
    }

    /// Sends a header of `header` bytes, and gives the status that comes back, or none.
    fn send(&mut self, kind: u32, sector: u64, header: u32, data: &[Buffer], room: u32) -> u8 {
        let head = [&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat();
        let head = self.driver.alloc_with(&head);
        let status = self.driver.alloc_with(&[0xee; 64]);
        let mut chain = vec![Buffer::readable(head, header)];
        chain.extend(data);
        chain.extend((room > 0).then(|| Buffer::writable(status, room)));
        self.driver.exchange(0, &chain);
        // The status is the last byte of what can be written.
        self.driver.bytes(status, 64)[room.saturating_sub(1) as usize]
    }

    fn still_works(&mut self) {
        let data = self.driver.alloc(512);
        assert_eq!(self.send(IN, 3, 16, &[Buffer::writable(data, 512)], 1), OK);
        assert_eq!(self.driver.bytes(data, 512), [7; 512]);
        assert!(!self.driver.needs_reset());
    }
}

#[test]
fn h30_requests_that_are_none_get_their_error() {
    let mut bench = Bench::new(false, 0);
    for short in [1, 8, 15] {
        assert_eq!(bench.send(IN, 0, short, &[], 1), IO_ERROR, "a header of {short} bytes");
    }
    // SCSI commands of old, barriers, and what never was.
    for kind in [2, 3, 7, 9, 0x8000_0000, u32::MAX] {
        assert_eq!(bench.send(kind, 0, 16, &[], 1), UNSUPPORTED, "type {kind:#x}");
    }
    // No status, one that can only be read, one that is long.
    assert_eq!(bench.send(FLUSH, 0, 16, &[], 0), 0xee);
    let readable = bench.driver.alloc_with(&[0xee]);
    bench.send(FLUSH, 0, 16, &[Buffer::readable(readable, 1)], 0);
    assert_eq!(bench.driver.bytes(readable, 1), [0xee]);
    assert_eq!(bench.send(FLUSH, 0, 16, &[], 64), OK);
    bench.still_works();
}

#[test]
fn h32_a_read_only_file_stays_as_it_is_whatever_was_negotiated() {
    let read_only = 1 << 5;
    let mut bench = Bench::new(true, read_only);
    let before = fs::metadata(bench.file.path()).unwrap();
    let data = bench.driver.alloc_with(&[1; 512]);
    for kind in [OUT, 11, 13] {
        let status = bench.send(kind, 0, 16, &[Buffer::readable(data, 512)], 1);
        assert_ne!(status, OK, "type {kind}");
    }
    bench.send(FLUSH, 0, 16, &[], 1);
    let after = fs::metadata(bench.file.path()).unwrap();
    assert_eq!((before.mtime_nsec(), before.mtime()), (after.mtime_nsec(), after.mtime()));
    assert_eq!(fs::read(bench.file.path()).unwrap(), vec![7; SECTORS * 512]);
    bench.still_works();
}

/// Fills the queue with reads, up to three descriptors each.
fn fill_queue(driver: &mut GuestDriver) {
    let head = [&IN.to_le_bytes()[..], &[0; 12]].concat();
    for _ in 0..driver.queue_size(0) / 3 {
        let (head, data) = (driver.alloc_with(&head), driver.alloc(8192));
        let status = driver.alloc(1);
        let chain =
            [Buffer::readable(head, 16), Buffer::writable(data, 8192), Buffer::writable(status, 1)];
        driver.add(0, &chain);
    }
    driver.kick(0);
}

#[test]
fn h34_a_full_queue_in_flight_ends_with_a_reset_a_pause_or_the_device() {
    let mut bench = Bench::new(false, 0);
    for round in 0..200 {
        fill_queue(&mut bench.driver);
        match round % 3 {
            0 => {}
            1 => bench.driver.pause(),
            _ => {
                bench.driver.pause();
                bench.driver.try_save().unwrap();
                bench.driver.resume();
            }
        }
        bench.driver.reset();
        bench.driver.initialize();
    }
    bench.still_works();
    fill_queue(&mut bench.driver);
    // Unplugged with all of it in flight.
    drop(bench.driver);
    drop(bench.executor);
    assert_eq!(fs::metadata(bench.file.path()).unwrap().len(), SECTORS as u64 * 512);
}

#[test]
fn h35_the_header_of_another_format_is_data() {
    let headers: [&[u8]; 4] = [b"QFI\xfb\0\0\0\x03", b"conectix", b"KDMV", b"vhdxfile"];
    for header in headers {
        let mut bench = Bench::new(false, 0);
        let sector = [header, &[0; 512][header.len()..]].concat();
        let data = bench.driver.alloc_with(&sector);
        assert_eq!(bench.send(OUT, 0, 16, &[Buffer::readable(data, 512)], 1), OK);
        // The VM starts again on the same file.
        let Bench { driver, file, executor } = bench;
        drop(driver);
        let mut driver = GuestDriver::new(disk(&executor, &file, false));
        driver.initialize();
        let sectors = driver.config(0, 8);
        assert_eq!(sectors, (SECTORS as u64).to_le_bytes());
        let mut bench = Bench { driver, file, executor };
        let data = bench.driver.alloc(512);
        assert_eq!(bench.send(IN, 0, 16, &[Buffer::writable(data, 512)], 1), OK);
        assert_eq!(bench.driver.bytes(data, 512), sector);
    }
}
