//! The device as a whole, with a driver in guest memory, an event loop and real sockets.

mod conforms;
mod counts;
mod driver;
mod fuzz;
mod hostile;
mod lifecycle;
mod opening;
mod programs;
mod stack;
mod streams;

use std::path::PathBuf;
use std::time::Duration;

use self::driver::Driver;
use self::stack::Guest;
use super::{Vsock, VsockConfig, VsockHandle};
use crate::executor::Executor;
use crate::virtio::VirtioDevice;

/// Longer than anything here takes.
const SOON: Duration = Duration::from_secs(20);

const CID: u64 = 3;

/// A started device with its guest and its host. Fields go in this order.
struct Fixture {
    guest: Guest,
    handle: VsockHandle,
    vsock: Vsock,
    executor: Executor,
    dir: tempfile::TempDir,
}

impl Fixture {
    /// With a usual driver: page-sized receive buffers.
    fn new() -> Self {
        Self::with(Driver::new(64, 4096))
    }

    fn with(driver: Driver) -> Self {
        Self::named("test", driver)
    }

    /// With a name for the thread of the loop.
    fn named(name: &str, driver: Driver) -> Self {
        let mut fixture = Self::on(Executor::spawn(name).unwrap(), driver);
        let activation = fixture.guest.driver.activation();
        fixture.vsock.start(activation).unwrap();
        fixture
    }

    /// Not started.
    fn idle(driver: Driver) -> Self {
        Self::on(Executor::spawn("test").unwrap(), driver)
    }

    fn on(executor: Executor, driver: Driver) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let socket = Some(dir.path().join("v.sock"));
        let (vsock, handle) =
            Vsock::new(executor.handle(), VsockConfig { guest_cid: CID, socket }).unwrap();
        Self { guest: Guest::new(driver), handle, vsock, executor, dir }
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("v.sock")
    }

    fn service(&self, port: u32) -> PathBuf {
        self.dir.path().join(format!("v.sock_{port}"))
    }
}
