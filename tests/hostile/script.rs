//! What the guest shall do, record by record.

use std::ops::Range;

use harness::image;

use super::code::{CODE, Op, SCRIPT};

/// Ports and values with which a guest ends: serial line, i8042, ACPI, pvpanic.
pub const SERIAL: u16 = 0x3f8;
pub const I8042: u16 = 0x64;
pub const SLEEP: u16 = 0x600;
pub const PVPANIC: u16 = 0x505;

/// Exits that the guest waits for an answer, some half a minute on a fast machine.
const WAITS: u64 = 20_000_000;

/// Records, in order.
#[derive(Default)]
pub struct Script(Vec<u8>);

impl Script {
    pub fn new() -> Self {
        Self::default()
    }

    fn record(&mut self, op: Op, size: u64, step: u32, numbers: [u64; 3]) -> &mut Self {
        assert!(size.is_power_of_two() && size <= 8);
        self.0.extend((op as u16).to_le_bytes());
        self.0.extend((size.trailing_zeros() as u16).to_le_bytes());
        self.0.extend(step.to_le_bytes());
        for number in numbers {
            self.0.extend(number.to_le_bytes());
        }
        self
    }

    /// Number of the next record, which is what a guest that fails says.
    pub fn here(&self) -> usize {
        self.0.len() / 32
    }

    pub fn write(&mut self, size: u64, address: u64, value: u64) -> &mut Self {
        self.writes(size, address, value, 1)
    }

    pub fn writes(&mut self, size: u64, address: u64, value: u64, times: u64) -> &mut Self {
        assert!(times > 0);
        self.record(Op::Write, size, 0, [address, value, times])
    }

    pub fn read(&mut self, size: u64, address: u64) -> &mut Self {
        self.record(Op::Read, size, 0, [address, 0, 1])
    }

    /// The guest fails if there is anything else.
    pub fn check(&mut self, size: u64, address: u64, value: u64) -> &mut Self {
        self.check_masked(size, address, value, u64::MAX)
    }

    pub fn check_masked(&mut self, size: u64, address: u64, value: u64, mask: u64) -> &mut Self {
        self.record(Op::Check, size, 0, [address, value, mask])
    }

    /// The guest fails if there is this.
    pub fn differs(&mut self, size: u64, address: u64, value: u64) -> &mut Self {
        self.record(Op::Differs, size, 0, [address, value, 0])
    }

    pub fn out(&mut self, size: u64, port: u16, value: u64) -> &mut Self {
        self.record(Op::Out, size, 0, [port.into(), value, 1])
    }

    pub fn outs(&mut self, size: u64, port: u16, value: u64, times: u64) -> &mut Self {
        assert!(times > 0);
        self.record(Op::Out, size, 0, [port.into(), value, times])
    }

    pub fn ins(&mut self, size: u64, port: u16, times: u64) -> &mut Self {
        assert!(times > 0);
        self.record(Op::In, size, 0, [port.into(), 0, times])
    }

    pub fn sweep_write(&mut self, size: u64, over: Range<u64>, step: u32, value: u64) -> &mut Self {
        self.record(Op::SweepWrite, size, step, [over.start, value, over.end])
    }

    pub fn sweep_read(&mut self, size: u64, over: Range<u64>, step: u32) -> &mut Self {
        self.record(Op::SweepRead, size, step, [over.start, 0, over.end])
    }

    pub fn sweep_out(&mut self, size: u64, over: Range<u64>, step: u32, value: u64) -> &mut Self {
        self.record(Op::SweepOut, size, step, [over.start, value, over.end])
    }

    pub fn sweep_in(&mut self, size: u64, over: Range<u64>, step: u32) -> &mut Self {
        self.record(Op::SweepIn, size, step, [over.start, 0, over.end])
    }

    /// The guest fails if the 16 bits do not become this in a long time.
    pub fn wait(&mut self, address: u64, value: u16) -> &mut Self {
        self.record(Op::Wait, 2, 0, [address, value.into(), WAITS])
    }

    pub fn fill(&mut self, over: Range<u64>, byte: u8) -> &mut Self {
        self.record(Op::Fill, 1, 0, [over.start, byte.into(), over.end - over.start])
    }

    /// What `body` says, so many times.
    pub fn repeat(&mut self, times: u64, body: impl FnOnce(&mut Self)) -> &mut Self {
        let start = SCRIPT + self.0.len() as u64;
        body(self);
        self.record(Op::Again, 1, 0, [start, times, 0])
    }

    pub fn seed(&mut self, seed: u64) -> &mut Self {
        self.record(Op::Seed, 1, 0, [0, seed | 1, 0])
    }

    pub fn random_memory(&mut self, base: u64, mask: u64, times: u64) -> &mut Self {
        self.record(Op::RandomMemory, 1, 0, [base, mask, times])
    }

    pub fn random_port(&mut self, base: u16, mask: u64, times: u64) -> &mut Self {
        self.record(Op::RandomPort, 1, 0, [base.into(), mask, times])
    }

    /// Says something on the serial line.
    pub fn say(&mut self, text: &str) -> &mut Self {
        text.bytes().for_each(|byte| {
            self.out(1, SERIAL, byte.into());
        });
        self
    }

    pub fn halt(&mut self) -> &mut Self {
        self.record(Op::Halt, 1, 0, [0; 3])
    }

    /// Says that all went well, and powers off.
    pub fn power_off(&mut self) -> &mut Self {
        // S5 and the enable bit.
        self.say("good\n").out(1, SLEEP, 5 << 2 | 1 << 5).halt()
    }

    /// The guest as a kernel.
    pub fn kernel(&self) -> Vec<u8> {
        let place = (SCRIPT - 0x10_0000) as usize;
        let mut code = CODE.to_vec();
        assert!(code.len() <= place && self.0.len() < 0x7_0000, "{} records", self.here());
        code.resize(place, 0);
        code.extend(&self.0);
        image::kernel(&code)
    }
}
