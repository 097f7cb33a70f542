//! The device through its registers and rings, on files and on a disk that answers when told to.

mod backends;
mod counts;
mod devices;
pub mod host;
mod life;
mod queues;
mod requests;
mod throttle;

use std::io::Write;
use std::os::unix::fs::FileExt;

use tempfile::NamedTempFile;

use super::request::kind;
use super::*;
use crate::executor::Executor;
use crate::memory::GuestAddress;
use crate::snapshot::Stateful;
use crate::testing::{Buffer, Conformance, GuestDriver, snapshot_roundtrip};

const OK: u8 = 0;
const IO_ERROR: u8 = 1;
const UNSUPPORTED: u8 = 2;
const SECTORS: u64 = 64;

fn image() -> NamedTempFile {
    let mut file = NamedTempFile::new().unwrap();
    let data: Vec<u8> = (0..SECTORS * SECTOR_SIZE).map(|byte| (byte / 512) as u8 + 1).collect();
    file.write_all(&data).unwrap();
    file
}

fn config(read_only: bool) -> BlockConfig {
    BlockConfig { read_only, ..BlockConfig::new("disk-7") }
}

fn block(executor: ExecutorHandle, file: &NamedTempFile, read_only: bool) -> Box<Block> {
    let disk = RawFile::open(file.path(), read_only).unwrap();
    Box::new(Block::new(executor, Box::new(disk), config(read_only)).unwrap())
}

/// A live device on `file`, and the driver's way to send requests.
struct Bench {
    driver: GuestDriver,
    file: NamedTempFile,
    _executor: Executor,
}

impl Bench {
    fn new(read_only: bool) -> Self {
        let executor = Executor::spawn("block").unwrap();
        let file = image();
        let mut driver = GuestDriver::new(block(executor.handle(), &file, read_only));
        driver.initialize();
        Self { driver, file, _executor: executor }
    }

    /// Sends header and `out`, with `room` bytes for the answer: status, length, data.
    fn request(&mut self, kind: u32, sector: u64, out: &[u8], room: usize) -> (u8, u32, Vec<u8>) {
        request(&mut self.driver, kind, sector, out, room)
    }

    fn disk(&self) -> Vec<u8> {
        let mut data = vec![0; (SECTORS * SECTOR_SIZE) as usize];
        self.file.as_file().read_exact_at(&mut data, 0).unwrap();
        data
    }
}

fn header(kind: u32, sector: u64) -> Vec<u8> {
    [&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat()
}

fn request(
    driver: &mut GuestDriver,
    kind: u32,
    sector: u64,
    out: &[u8],
    room: usize,
) -> (u8, u32, Vec<u8>) {
    let head = driver.alloc_with(&header(kind, sector));
    let data = driver.alloc_with(out);
    let answer = driver.alloc(room);
    let status = driver.alloc_with(&[0xee]);
    let mut chain = vec![Buffer::readable(head, 16)];
    chain.extend((!out.is_empty()).then(|| Buffer::readable(data, out.len() as u32)));
    chain.extend((room > 0).then(|| Buffer::writable(answer, room as u32)));
    chain.push(Buffer::writable(status, 1));
    let len = driver.exchange(0, &chain);
    (driver.bytes(status, 1)[0], len, driver.bytes(answer, room))
}

/// Reads a sector through each queue.
fn reads_a_sector(driver: &mut GuestDriver) {
    for queue in 0..driver.queue_count() {
        let head = driver.alloc_with(&header(kind::IN, 3));
        let answer = driver.alloc(513);
        let chain = [Buffer::readable(head, 16), Buffer::writable(answer, 513)];
        assert_eq!(driver.exchange(queue, &chain), 513);
        assert_eq!(driver.bytes(answer, 513), [vec![4; 512], vec![OK]].concat());
    }
}

/// A device with an engine of the test's choice.
fn with_engine(
    executor: ExecutorHandle,
    engine: Engine,
    file: &NamedTempFile,
    config: BlockConfig,
) -> Box<Block> {
    let disk = host::open(engine, file.path(), config.read_only);
    Box::new(Block::new(executor, disk, config).unwrap())
}

#[test]
fn conforms() {
    // Read-only, so that two devices can hold the same file.
    let file = image();
    Conformance::new(|executor| block(executor, &file, true))
        .exercise(reads_a_sector)
        .answers(&[0])
        .run();
}

#[test]
fn conforms_when_writable() {
    let make = |executor: ExecutorHandle| -> Box<dyn VirtioDevice> {
        let file = image();
        block(executor, &file, false)
    };
    Conformance::new(make).exercise(reads_a_sector).answers(&[0]).run();
}

#[test]
fn conforms_with_each_engine_and_several_queues() {
    for engine in host::engines() {
        let make = |executor: ExecutorHandle| -> Box<dyn VirtioDevice> {
            let config = BlockConfig { queues: 3, ..config(false) };
            with_engine(executor, engine, &image(), config)
        };
        Conformance::new(make).exercise(reads_a_sector).answers(&[0, 1, 2]).run();
    }
}

#[test]
fn conforms_through_io_uring() {
    for engine in host::engines().into_iter().filter(|engine| *engine == Engine::IoUring) {
        let file = image();
        let make = |executor: ExecutorHandle| -> Box<dyn VirtioDevice> {
            with_engine(executor, engine, &file, config(true))
        };
        Conformance::new(make).exercise(reads_a_sector).answers(&[0]).run();
    }
}

#[test]
fn the_configuration_space_says_what_the_disk_is() {
    let mut bench = Bench::new(false);
    let whole = bench.driver.config(0, CONFIG_LEN);
    let word = |offset: usize| u32::from_le_bytes(whole[offset..offset + 4].try_into().unwrap());
    assert_eq!(whole[..8], SECTORS.to_le_bytes());
    assert_eq!((word(12), word(20)), (254, 512));
    assert_eq!(whole[24], 3, "physical blocks of 4096 bytes");
    assert_eq!(whole[34..36], [1, 0]);
    assert_eq!((word(36), word(40), word(44)), (MAX_RANGE_SECTORS, 16, 8));
    assert_eq!((word(48), word(52), whole[56]), (MAX_RANGE_SECTORS, 16, 1));
    let writable = bench.driver.offered();
    assert_eq!(writable & feature::RO, 0);
    let changing = feature::DISCARD | feature::WRITE_ZEROES;
    assert_eq!(writable & changing, changing);
    let read_only = Bench::new(true).driver.offered();
    assert_ne!(read_only & feature::RO, 0);
    assert_eq!(read_only & changing, 0);
}

#[test]
fn a_disk_that_is_read_only_makes_the_device_so() {
    let executor = Executor::spawn("block").unwrap();
    let file = image();
    let disk = RawFile::open(file.path(), true).unwrap();
    let device = Block::new(executor.handle(), Box::new(disk), config(false)).unwrap();
    assert_ne!(device.identity().features & feature::RO, 0);
}

#[test]
fn a_long_serial_is_cut() {
    let executor = Executor::spawn("block").unwrap();
    let file = image();
    let disk = RawFile::open(file.path(), true).unwrap();
    let serial = "0123456789abcdefghijKLM".to_owned();
    let device = Block::new(executor.handle(), Box::new(disk), BlockConfig::new(serial)).unwrap();
    let mut driver = GuestDriver::new(Box::new(device));
    driver.initialize();
    let (status, _, id) = request(&mut driver, kind::GET_ID, 0, &[], 20);
    assert_eq!((status, &id[..]), (OK, &b"0123456789abcdefghij"[..]));
}

#[test]
fn a_record_fits_the_same_disk_and_no_other() {
    let executor = Executor::spawn("block").unwrap();
    let file = image();
    let make = || *block(executor.handle(), &file, true);
    snapshot_roundtrip(make, |_| {});
    let good = make().save().unwrap();
    let others = [
        BlockState { sectors: SECTORS + 1, ..good.clone() },
        BlockState { logical_block: 4096, ..good.clone() },
        BlockState { read_only: false, ..good.clone() },
        BlockState { serial: b"other".to_vec(), ..good.clone() },
        BlockState { queues: 2, ..good.clone() },
    ];
    for other in others {
        assert!(matches!(make().restore(other), Err(RestoreError::Invalid { .. })));
    }
    make().restore(good).unwrap();
}

#[test]
fn records_of_the_time_of_one_queue_are_read() {
    let executor = Executor::spawn("block").unwrap();
    let file = image();
    let mut device = block(executor.handle(), &file, true);
    let mut record = device.save_record().unwrap();
    let ciborium::Value::Map(fields) = &mut record.state else { panic!("{record:?}") };
    fields.retain(|(name, _)| name.as_text() != Some("queues"));
    record.version = 1;
    device.restore_record(record.clone()).unwrap();
    record.version = 0;
    assert!(matches!(device.restore_record(record), Err(RestoreError::NoUpgrade { .. })));
}
