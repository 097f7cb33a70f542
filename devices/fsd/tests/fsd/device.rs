//! Through the device: a driver without a guest, the VMM's side, and the real server in its jail.

mod jail;
mod lent;
mod life;
mod many;
mod permit;
mod succession;

use std::fs;
use std::path::{Path, PathBuf};
use std::process;
use std::time::{Duration, Instant};

use devices::executor::Executor;
use devices::memory::{Bytes, GuestAddress};
use devices::metrics::Meter;
use devices::snapshot::{Record, Stateful};
use devices::testing::{Buffer, GuestDriver};
use devices::virtio::VirtioDevice;
use devices::virtio::fs::{Fs, FsConfig, FsError, FsHandle};

use crate::guest::{Answers, Guest};

const REQUESTS: u16 = 1;
const HIGH_PRIORITY: u16 = 0;
const ROOM: usize = 256 << 10;

/// A share with the tag "work", served by the real server.
pub fn config(path: &Path) -> FsConfig {
    let program = PathBuf::from(env!("CARGO_BIN_EXE_cube-fsd"));
    FsConfig::new(program, "work", path.to_owned())
}

/// A driver with a device.
pub struct Driven {
    pub driver: GuestDriver,
    pub executor: Executor,
    pub meter: Meter,
    pub handle: FsHandle,
    request: GuestAddress,
    reply: GuestAddress,
}

impl Driven {
    pub fn start(config: FsConfig) -> Result<Self, FsError> {
        let executor = Executor::spawn("test-fs").unwrap();
        let device = Fs::new(executor.handle(), config)?;
        Ok(Self::with(device, executor))
    }

    /// Another guest, whose device begins with what was saved of one; how long that took.
    pub fn restored(config: FsConfig, record: Record) -> (Self, Duration) {
        let executor = Executor::spawn("test-fs").unwrap();
        let mut device = Fs::new(executor.handle(), config).unwrap();
        let start = Instant::now();
        device.restore_record(record).unwrap();
        let took = start.elapsed();
        (Self::with(device, executor), took)
    }

    fn with(device: Fs, executor: Executor) -> Self {
        let (meter, handle) = (device.meter().unwrap(), device.handle());
        let mut driver = GuestDriver::new(Box::new(device));
        driver.initialize();
        let (request, reply) = (driver.alloc(ROOM), driver.alloc(ROOM));
        Self { driver, executor, meter, handle, request, reply }
    }

    /// Puts a message into a queue, without waiting.
    pub fn send(&mut self, request: &[u8], room: usize) -> u16 {
        let buffers = self.buffers(request, room);
        let head = self.driver.add(REQUESTS, &buffers);
        self.driver.kick(REQUESTS);
        head
    }

    fn buffers(&self, request: &[u8], room: usize) -> Vec<Buffer> {
        assert!(request.len() <= ROOM && room <= ROOM);
        self.driver.memory().write_slice(request, self.request).unwrap();
        let sent = Buffer::readable(self.request, request.len() as u32);
        let back = Buffer::writable(self.reply, room as u32);
        if room > 0 { vec![sent, back] } else { vec![sent] }
    }

    /// Asks by the queue for what must not wait.
    pub fn ask_urgently(&mut self, request: &[u8], room: usize) -> Vec<u8> {
        let buffers = self.buffers(request, room);
        let len = self.driver.exchange(HIGH_PRIORITY, &buffers);
        self.reply(len)
    }

    /// What is in the place for answers.
    pub fn reply(&self, len: u32) -> Vec<u8> {
        self.driver.bytes(self.reply, len as usize)
    }

    /// Pauses, takes the record, and lets the old server end with its device.
    pub fn stop(mut self) -> (Record, GuestDriver) {
        self.driver.pause();
        (self.driver.save(), self.driver)
    }
}

impl Answers for Driven {
    fn ask(&mut self, request: &[u8], room: usize) -> Vec<u8> {
        let buffers = self.buffers(request, room);
        let forgets = matches!(request.get(4), Some(2 | 42)) && room == 0;
        let queue = if forgets { HIGH_PRIORITY } else { REQUESTS };
        let len = self.driver.exchange(queue, &buffers);
        self.reply(len)
    }
}

/// A guest that has mounted the share.
pub fn mounted(config: FsConfig) -> Guest<Driven> {
    let mut guest = Guest::new(Driven::start(config).unwrap());
    guest.mount();
    guest
}

/// The guest goes on with a device of that configuration, on the same memory.
pub fn moved(
    mut guest: Guest<Driven>,
    config: FsConfig,
) -> Result<Guest<Driven>, Box<dyn std::error::Error>> {
    let server = &mut guest.server;
    server.driver.pause();
    let record = server.driver.save();
    let device = Fs::new(server.executor.handle(), config)?;
    (server.meter, server.handle) = (device.meter().unwrap(), device.handle());
    server.driver.replace(Box::new(device), record)?;
    server.driver.resume();
    Ok(guest)
}

/// The record of the device in that of its transport.
pub fn of_device(record: &Record) -> Record {
    record.within("virtio-fs").unwrap()
}

/// The process that serves `path` to this one.
pub fn server_of(path: &Path) -> Option<i32> {
    let ours = process::id().to_string();
    let path = path.to_str()?;
    fs::read_dir("/proc").ok()?.filter_map(Result::ok).find_map(|entry| {
        let pid = entry.file_name().to_str()?.parse().ok()?;
        let stat = fs::read_to_string(entry.path().join("stat")).ok()?;
        let parent = stat.rsplit_once(") ")?.1.split(' ').nth(1)?.to_owned();
        let command = fs::read(entry.path().join("cmdline")).ok()?;
        let named = command.split(|byte| *byte == 0).any(|word| word == path.as_bytes());
        (parent == ours && named).then_some(pid)
    })
}
