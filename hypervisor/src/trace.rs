//! The boot ladder: when each step of a boot was reached.
//!
//! Times are of CLOCK_MONOTONIC, so that they can be compared with those of whoever started this
//! process. Marking is a clock read and a push; it costs nothing worth leaving out.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use guest_protocol::boot_stamp;
use serde::Serialize;

use crate::boot::entry::ENTRY_STAMP;

/// The steps of a boot, in order.
pub mod step {
    /// `main` was entered.
    pub const EXEC: &str = "T0 exec";
    /// The VM exists in the kernel, with its interrupt controllers.
    pub const VM_CREATED: &str = "T1 vm created";
    /// Guest RAM is mapped.
    pub const MEMORY_MAPPED: &str = "T2 memory mapped";
    /// Kernel and initrd are in it.
    pub const KERNEL_LOADED: &str = "T3 kernel loaded";
    /// The first vCPU enters the guest.
    pub const FIRST_RUN: &str = "T4 first KVM_RUN";
    /// The instruction before the kernel's first one.
    pub const KERNEL_ENTRY: &str = "T5 guest kernel entry";
    /// The first instruction of PID 1.
    pub const USERSPACE: &str = "T6 userspace";
    /// The agent's hello has arrived.
    pub const AGENT_READY: &str = "T7 agent ready";
    /// The command has been started.
    pub const COMMAND_STARTED: &str = "T8 command started";
}

/// One step reached.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Mark {
    /// The step.
    pub name: String,
    /// Nanoseconds since `T0 exec`.
    pub ns: u64,
    /// Nanoseconds of CLOCK_MONOTONIC.
    pub monotonic_ns: u64,
}

/// The ladder as it is written to a file.
#[derive(Clone, Debug, Serialize)]
pub struct LadderReport {
    /// CLOCK_MONOTONIC at `T0 exec`, nanoseconds.
    pub exec_monotonic_ns: u64,
    /// The steps in the order in which they were reached.
    pub stamps: Vec<Mark>,
}

impl LadderReport {
    /// As a table for people: the time of each step, and since the one before.
    pub fn render(&self) -> String {
        let millis = |ns: u64| ns as f64 / 1e6;
        let mut text = format!("{:<24}{:>12}{:>12}\n", "boot ladder", "at", "took");
        let mut before = 0;
        for mark in &self.stamps {
            let took = millis(mark.ns.saturating_sub(before));
            text += &format!("{:<24}{:>9.2} ms{:>9.2} ms\n", mark.name, millis(mark.ns), took);
            before = mark.ns;
        }
        text
    }
}

/// Collects marks. Clones share them.
#[derive(Clone, Debug)]
pub struct Ladder {
    start: u64,
    marks: Arc<Mutex<Vec<Mark>>>,
}

/// More marks than any boot has; a guest that stamps without end is not listened to.
const MAX_MARKS: usize = 256;

impl Ladder {
    /// Starts at `T0 exec`: call it first thing in `main`.
    pub fn start() -> Self {
        let ladder = Self { start: monotonic_ns(), marks: Arc::default() };
        ladder.add(step::EXEC.to_owned(), ladder.start);
        ladder
    }

    /// The step is reached now. Only the first time counts.
    pub fn mark(&self, name: &str) {
        self.add(name.to_owned(), monotonic_ns());
    }

    /// The guest wrote `value` to the debug port.
    pub fn guest_stamp(&self, value: u8) {
        match value {
            ENTRY_STAMP => self.mark(step::KERNEL_ENTRY),
            boot_stamp::USERSPACE => self.mark(step::USERSPACE),
            boot_stamp::COMMAND_STARTED => self.mark(step::COMMAND_STARTED),
            // Ready is what the VMM has heard, not what the agent believes.
            boot_stamp::AGENT_READY => {}
            other => self.add(format!("guest stamp {other:#04x}"), monotonic_ns()),
        }
    }

    fn add(&self, name: String, now: u64) {
        let mut marks = self.marks();
        let known = marks.iter().any(|mark| mark.name == name);
        if !known && marks.len() < MAX_MARKS {
            marks.push(Mark { name, ns: now - self.start, monotonic_ns: now });
        }
    }

    /// What was reached so far.
    pub fn report(&self) -> LadderReport {
        LadderReport { exec_monotonic_ns: self.start, stamps: self.marks().clone() }
    }

    fn marks(&self) -> MutexGuard<'_, Vec<Mark>> {
        self.marks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn monotonic_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: time is a valid place for the result; this clock exists on every Linux.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_kept_in_order() {
        let ladder = Ladder::start();
        ladder.mark(step::VM_CREATED);
        ladder.guest_stamp(boot_stamp::USERSPACE);
        ladder.guest_stamp(0x33);
        let report = ladder.report();
        let names: Vec<_> = report.stamps.iter().map(|mark| mark.name.as_str()).collect();
        assert_eq!(names, [step::EXEC, step::VM_CREATED, step::USERSPACE, "guest stamp 0x33"]);
        assert!(report.stamps.is_sorted_by_key(|mark| mark.ns));
    }

    #[test]
    fn the_table_has_a_row_for_each_step() {
        let mark = |name: &str, ns| Mark { name: name.to_owned(), ns, monotonic_ns: 7 + ns };
        let stamps = vec![mark(step::EXEC, 0), mark(step::VM_CREATED, 2_500_000)];
        let table = LadderReport { exec_monotonic_ns: 7, stamps }.render();
        let last = table.lines().last().unwrap();
        assert_eq!(last, "T1 vm created                2.50 ms     2.50 ms");
    }

    #[test]
    fn a_guest_cannot_fill_memory_with_marks() {
        let ladder = Ladder::start();
        (0..10_000).for_each(|n| ladder.guest_stamp(n as u8));
        assert!(ladder.report().stamps.len() <= MAX_MARKS);
    }
}
