//! What every virtio device must stand, whatever it does.

mod counts;
mod hostile;
mod life;
mod lines;
mod registers;
mod stimuli;

use std::cell::Cell;
use std::time::Duration;

use super::driver::{GuestDriver, Kind};
use super::ram;
use crate::executor::{Executor, ExecutorHandle};
use crate::memory::Memory;
use crate::virtio::VirtioDevice;

/// Time that a device which may keep a chain has to show that it does not.
const GRACE: Duration = Duration::from_millis(5);

type Make<'a> = Box<dyn Fn(ExecutorHandle) -> Box<dyn VirtioDevice> + 'a>;
type Exercise<'a> = Box<dyn Fn(&mut GuestDriver) + 'a>;

/// Runs all checks on devices from `make`; see [`Conformance`].
pub fn conformance(make: impl Fn(ExecutorHandle) -> Box<dyn VirtioDevice>) {
    Conformance::new(make).run();
}

/// The checks, and what they need to know of the device.
pub struct Conformance<'a> {
    make: Make<'a>,
    exercise: Exercise<'a>,
    answers: Vec<u16>,
    ram: fn() -> Memory,
    thinned: usize,
    calmed: usize,
    kind: Cell<Kind>,
    executor: Executor,
    thread: String,
}

impl<'a> Conformance<'a> {
    /// Checks devices from `make`. Each call must give a device that a record of another one can
    /// be restored into.
    pub fn new(make: impl Fn(ExecutorHandle) -> Box<dyn VirtioDevice> + 'a) -> Self {
        let thread = lines::thread_name();
        Self {
            make: Box::new(make),
            exercise: Box::new(|_| {}),
            answers: Vec::new(),
            ram,
            thinned: 1,
            calmed: 1,
            kind: Cell::new(Kind::Mmio),
            executor: Executor::spawn(&thread).unwrap(),
            thread,
        }
    }

    /// `exercise` is an exchange with the device, which must succeed on a device that was just
    /// initialized, after each ordeal, and any number of times in a row.
    pub fn exercise(mut self, exercise: impl Fn(&mut GuestDriver) + 'a) -> Self {
        self.exercise = Box::new(exercise);
        self
    }

    /// On `queues` the device gives each chain back at once, or asks for a reset; on the others it
    /// may keep a chain until it has a use for it.
    pub fn answers(mut self, queues: &[u16]) -> Self {
        self.answers = queues.to_vec();
        self
    }

    /// The device works in memory from `ram`, laid out as [`ram()`] does it.
    pub fn in_memory(mut self, ram: fn() -> Memory) -> Self {
        self.ram = ram;
        self
    }

    /// One in `factor` only of the resets and of the damaged records, which are a thousand or more
    /// of each: for a device that is slow to make and to start.
    pub fn thinned(mut self, factor: usize) -> Self {
        self.thinned = factor;
        self
    }

    /// One in `factor` only of the storms on its rings: for a device that is busy with each of them.
    pub fn calmed(mut self, factor: usize) -> Self {
        self.calmed = factor;
        self
    }

    /// Runs all checks, over either transport.
    pub fn run(&self) {
        for kind in [Kind::Mmio, Kind::Pci] {
            self.kind.set(kind);
            registers::check(self);
            hostile::check(self);
            stimuli::check(self);
            life::check(self);
            lines::check(self);
            counts::check(self);
        }
    }

    /// How many of `all` are left when it is calmed, and at least `least`.
    fn some_of(&self, all: u16, least: u16) -> u16 {
        (usize::from(all) / self.calmed).max(usize::from(least)).min(usize::from(all)) as u16
    }

    fn kind(&self) -> Kind {
        self.kind.get()
    }

    fn device(&self) -> Box<dyn VirtioDevice> {
        (self.make)(self.executor.handle())
    }

    /// A driver with a fresh device.
    fn driver(&self) -> GuestDriver {
        GuestDriver::over(self.kind(), self.device(), (self.ram)())
    }

    /// A driver with a live device.
    fn live(&self) -> GuestDriver {
        let mut driver = self.driver();
        driver.initialize();
        driver
    }

    /// Expects the live device to do its work.
    fn exercise_now(&self, driver: &mut GuestDriver) {
        (self.exercise)(driver);
        assert!(!driver.needs_reset(), "the device wants a reset");
    }

    /// Expects the device, in whatever state, to work after a reset.
    fn recovers(&self, driver: &mut GuestDriver) {
        driver.reset();
        driver.initialize();
        self.exercise_now(driver);
    }
}
