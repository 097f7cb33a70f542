//! Registers and rings of a device, as a script touches them.

use super::machine::{Device, Kind, rng};
use super::script::Script;

/// Where the rings of a device's first queue are: descriptors, available, used, a buffer.
pub const DESC: u64 = 0x20_0000;
pub const AVAIL: u64 = 0x21_0000;
pub const USED: u64 = 0x22_0000;
pub const BUFFER: u64 = 0x23_0000;

/// Registers that both transports have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Register {
    DriverFeaturesSelect,
    DriverFeatures,
    Status,
    QueueSelect,
    QueueSize,
    QueueReady,
    /// Half of a ring's address.
    Ring(u64, bool),
}

/// All of them.
pub const REGISTERS: [Register; 12] = [
    Register::DriverFeaturesSelect,
    Register::DriverFeatures,
    Register::Status,
    Register::QueueSelect,
    Register::QueueSize,
    Register::QueueReady,
    Register::Ring(0, false),
    Register::Ring(0, true),
    Register::Ring(1, false),
    Register::Ring(1, true),
    Register::Ring(2, false),
    Register::Ring(2, true),
];

impl Device {
    /// Where its registers are.
    pub fn window(&self) -> u64 {
        match self.kind {
            Kind::Mmio => 0xd000_0000 + 0x1000 * self.index,
            Kind::Pci => 0xc000_0000 + 0x1_0000 * (self.index + 1),
        }
    }

    /// Bytes of them that there is something in.
    pub fn window_len(&self) -> u64 {
        if self.kind == Kind::Mmio { 0x200 } else { 0x80 }
    }

    /// Where its function's configuration registers are.
    pub fn function(&self) -> u64 {
        0xe000_0000 + ((self.index + 1) << 15)
    }

    /// Address and size of a register.
    pub fn register(&self, register: Register) -> (u64, u64) {
        let half = |high: bool| if high { 4 } else { 0 };
        let (offset, size) = match self.kind {
            Kind::Mmio => match register {
                Register::DriverFeatures => (0x20, 4),
                Register::DriverFeaturesSelect => (0x24, 4),
                Register::QueueSelect => (0x30, 4),
                Register::QueueSize => (0x38, 4),
                Register::QueueReady => (0x44, 4),
                Register::Status => (0x70, 4),
                Register::Ring(ring, high) => (0x80 + 0x10 * ring + half(high), 4),
            },
            Kind::Pci => match register {
                Register::DriverFeaturesSelect => (0x08, 4),
                Register::DriverFeatures => (0x0c, 4),
                Register::Status => (0x14, 1),
                Register::QueueSelect => (0x16, 2),
                Register::QueueSize => (0x18, 2),
                Register::QueueReady => (0x1c, 2),
                Register::Ring(ring, high) => (0x20 + 8 * ring + half(high), 4),
            },
        };
        (self.window() + offset, size)
    }

    /// Writes a register.
    pub fn set(&self, script: &mut Script, register: Register, value: u64) {
        let (address, size) = self.register(register);
        script.write(size, address, value);
    }

    /// Notifies of a queue, so many times.
    pub fn notify(&self, script: &mut Script, queue: u64, times: u64) {
        match self.kind {
            Kind::Mmio => script.writes(4, self.window() + 0x50, queue, times),
            Kind::Pci => script.writes(2, self.window() + 0x6000 + 4 * queue, queue, times),
        };
    }

    /// Makes sure that it is the device that it is taken for.
    pub fn meet(&self, script: &mut Script) {
        match self.kind {
            Kind::Mmio => {
                script.check(4, self.window(), 0x7472_6976).check(4, self.window() + 8, self.id);
            }
            Kind::Pci => {
                script.check(4, self.function(), 0x1af4 | (0x1040 + self.id) << 16);
                // Memory accesses and bus mastering, at the place that it has.
                script.write(4, self.function() + 0x10, self.window());
                script.write(4, self.function() + 0x14, 0).write(2, self.function() + 4, 6);
            }
        }
    }

    pub fn reset(&self, script: &mut Script) {
        self.set(script, Register::Status, 0);
        let (address, size) = self.register(Register::Status);
        script.check(size, address, 0);
    }

    /// From reset to FEATURES_OK, with VERSION_1 and indirect descriptors.
    pub fn negotiate(&self, script: &mut Script) {
        for status in [0, 1, 3] {
            self.set(script, Register::Status, status);
        }
        for (select, features) in [(0, 1 << 28), (1, 1)] {
            self.set(script, Register::DriverFeaturesSelect, select);
            self.set(script, Register::DriverFeatures, features);
        }
        self.set(script, Register::Status, 11);
        let (address, size) = self.register(Register::Status);
        script.check(size, address, 11);
    }

    /// Gives a queue rings, and makes it ready.
    pub fn set_queue(&self, script: &mut Script, queue: u64, size: u64, rings: [u64; 3]) {
        self.set(script, Register::QueueSelect, queue);
        self.set(script, Register::QueueSize, size);
        for (ring, address) in (0..).zip(rings) {
            self.set(script, Register::Ring(ring, false), address & 0xffff_ffff);
            self.set(script, Register::Ring(ring, true), address >> 32);
        }
        self.set(script, Register::QueueReady, 1);
    }

    /// From reset to DRIVER_OK; all queues have eight entries, queue `first` at [`DESC`].
    pub fn initialize(&self, script: &mut Script, first: u64) {
        self.negotiate(script);
        script.fill(DESC..DESC + 0x100, 0).fill(AVAIL..AVAIL + 0x40, 0);
        script.fill(USED..USED + 0x80, 0);
        for queue in 0..self.queues {
            let away = if queue == first { 0 } else { 0x1000 * (queue + 1) };
            let rings = [DESC + away, AVAIL + away, USED + away];
            self.set_queue(script, queue, 8, rings);
        }
        self.set(script, Register::Status, 15);
    }
}

/// Writes a descriptor of the first queue.
pub fn descriptor(script: &mut Script, place: u64, address: u64, len: u64, flags: u64, next: u64) {
    let entry = DESC + 16 * place;
    script.write(8, entry, address).write(4, entry + 8, len);
    script.write(2, entry + 12, flags).write(2, entry + 14, next);
}

/// Makes a head available as the first one, and says that there are `count`.
pub fn publish(script: &mut Script, head: u64, count: u64) {
    script.write(2, AVAIL + 4, head).write(2, AVAIL + 2, count);
}

/// The rest of the machine is alive: the entropy device, reset, gives random bytes.
pub fn still_works(script: &mut Script, kind: Kind) {
    let device = rng(kind);
    device.meet(script);
    device.reset(script);
    device.initialize(script, 0);
    script.fill(BUFFER..BUFFER + 64, 0);
    descriptor(script, 0, BUFFER, 64, 2, 0);
    publish(script, 0, 1);
    device.notify(script, 0, 1);
    script.wait(USED + 2, 1).check(4, USED + 8, 64);
    script.differs(8, BUFFER, 0).differs(8, BUFFER + 56, 0);
    device.reset(script);
}
