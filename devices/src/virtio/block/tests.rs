//! The device through its registers and rings, on files and on a disk that answers when told to.

mod backends;
pub mod host;
mod requests;

use std::io::Write;
use std::os::unix::fs::FileExt;

use tempfile::NamedTempFile;

use super::request::kind;
use super::*;
use crate::executor::Executor;
use crate::memory::GuestAddress;
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
    BlockConfig { read_only, serial: "disk-7".to_owned() }
}

fn block(executor: ExecutorHandle, file: &NamedTempFile, read_only: bool) -> Box<Block> {
    let disk = RawFile::open(file.path(), read_only).unwrap();
    Box::new(Block::new(executor, Box::new(disk), config(read_only)))
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

fn reads_a_sector(driver: &mut GuestDriver) {
    let head = driver.alloc_with(&header(kind::IN, 3));
    let answer = driver.alloc(513);
    let chain = [Buffer::readable(head, 16), Buffer::writable(answer, 513)];
    assert_eq!(driver.exchange(0, &chain), 513);
    assert_eq!(driver.bytes(GuestAddress(answer.0 + 512), 1), [OK]);
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
    let device = Block::new(executor.handle(), Box::new(disk), config(false));
    assert_ne!(device.identity().features & feature::RO, 0);
}

#[test]
fn a_long_serial_is_cut() {
    let executor = Executor::spawn("block").unwrap();
    let file = image();
    let disk = RawFile::open(file.path(), true).unwrap();
    let serial = "0123456789abcdefghijKLM".to_owned();
    let config = BlockConfig { read_only: true, serial };
    let mut driver =
        GuestDriver::new(Box::new(Block::new(executor.handle(), Box::new(disk), config)));
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
    ];
    for other in others {
        assert!(matches!(make().restore(other), Err(RestoreError::Invalid { .. })));
    }
    make().restore(good).unwrap();
}
