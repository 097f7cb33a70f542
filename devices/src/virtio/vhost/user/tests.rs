//! The frontend with a real backend (our own block device behind the protocol), and with one that
//! does not do as it should.

mod hostile;
mod service;

use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use tempfile::{NamedTempFile, TempDir};
use vm_memory::GuestAddress;

use super::*;
use crate::executor::Executor;
use crate::testing::{Buffer, GuestDriver, VhostUserBackend, eventually, metric, shared_ram};
use crate::virtio::block::{Block, BlockConfig, RawFile, SECTOR_SIZE};

const SECTORS: usize = 64;
const IN: u32 = 0;
const OUT: u32 = 1;
const OK: u8 = 0;

/// A disk image, each sector of it filled with its number plus one.
fn image() -> NamedTempFile {
    let mut file = NamedTempFile::new().unwrap();
    let data: Vec<u8> =
        (0..SECTORS * SECTOR_SIZE as usize).map(|byte| (byte / 512) as u8 + 1).collect();
    file.write_all(&data).unwrap();
    file
}

/// A backend that serves an image at a socket of its own.
struct Service {
    backend: Option<VhostUserBackend>,
    image: NamedTempFile,
    folder: TempDir,
    read_only: bool,
    queues: u16,
}

impl Service {
    fn start(read_only: bool, queues: u16) -> Self {
        let folder = TempDir::new().unwrap();
        let mut this = Self { backend: None, image: image(), folder, read_only, queues };
        this.come_back();
        this
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    /// Serves again after it was dropped.
    fn come_back(&mut self) {
        let (path, read_only, queues) = (self.image.path().to_owned(), self.read_only, self.queues);
        let make = Arc::new(move |executor: ExecutorHandle| -> Box<dyn VirtioDevice> {
            Box::new(block_on(&path, read_only, queues, executor))
        });
        self.backend = Some(VhostUserBackend::listen(&self.socket(), make).unwrap());
    }

    fn options(&self) -> VhostUserConfig {
        let patience = Duration::from_secs(20);
        VhostUserConfig { socket: self.socket(), queues: self.queues, patience }
    }

    fn device(&self, executor: ExecutorHandle) -> Box<VhostUser> {
        Box::new(VhostUser::block(executor, self.options()).unwrap())
    }

    fn driver(&self, executor: &Executor) -> GuestDriver {
        GuestDriver::with_memory(self.device(executor.handle()), shared_ram())
    }
}

/// Our block device on the image. A writable one is locked until the connection before has ended.
fn block_on(path: &Path, read_only: bool, queues: u16, executor: ExecutorHandle) -> Block {
    let mut disk = None;
    assert!(eventually(PATIENCE, || {
        disk = RawFile::open(path, read_only).ok();
        disk.is_some()
    }));
    let config = BlockConfig { queues, read_only, ..BlockConfig::new("service") };
    Block::new(executor, Box::new(disk.unwrap()), config).unwrap()
}

fn header(kind: u32, sector: u64) -> Vec<u8> {
    [&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat()
}

/// Reads sector 3 through each queue.
fn reads(driver: &mut GuestDriver) {
    for queue in 0..driver.queue_count() {
        let head = driver.alloc_with(&header(IN, 3));
        let answer = driver.alloc(513);
        let chain = [Buffer::readable(head, 16), Buffer::writable(answer, 513)];
        assert_eq!(driver.exchange(queue, &chain), 513);
        assert_eq!(driver.bytes(answer, 513), [vec![4; 512], vec![OK]].concat());
    }
}

/// Fills a sector through a queue.
fn writes(driver: &mut GuestDriver, queue: u16, sector: u64, byte: u8) {
    let status = asks_to_write(driver, queue, sector, byte);
    assert_eq!(driver.wait_used(queue).len, 1);
    assert_eq!(driver.bytes(status, 1), [OK]);
}

/// Asks for a sector to be filled, without waiting; where the status will be.
fn asks_to_write(driver: &mut GuestDriver, queue: u16, sector: u64, byte: u8) -> GuestAddress {
    let head = driver.alloc_with(&header(OUT, sector));
    let (data, status) = (driver.alloc_with(&[byte; 512]), driver.alloc_with(&[0xee]));
    let chain =
        [Buffer::readable(head, 16), Buffer::readable(data, 512), Buffer::writable(status, 1)];
    driver.add(queue, &chain);
    driver.kick(queue);
    status
}
