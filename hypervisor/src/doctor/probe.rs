//! Runs the guests of [`programs`](super::programs) and judges what they show.

use std::time::{Duration, Instant};

use kvm_bindings::KVM_MAX_CPUID_ENTRIES;
use kvm_ioctls::Kvm;
use serde::Serialize;

use super::machine::{self, End, Machine, Outcome};
use super::programs::{
    LOOP_PARTS, PART_INSTRUCTIONS, PART_ITERATIONS, PROGRAMS, Program, TIMED_LOOP,
};

/// Below this many instructions per second of processor time, the guest is interpreted.
///
/// KVM's instruction interpreter, which PVM uses for every supervisor instruction of an unmodified
/// guest, was measured at 2 to 4 million per second. The slowest thing that deserves to be called a
/// processor here is KVM on an SVM emulated by QEMU's TCG, with 100 million and more. The
/// threshold is the geometric mean of the two, so that each may be off by a factor of five.
/// Processor time, not wall time, is counted, and the fastest part of the loop counts, so that
/// neither a busy host nor one whose own processor is taken away now and then changes anything.
const INTERPRETED_BELOW: u64 = 20_000_000;

/// How long one small program may take. Each is done in microseconds; the rest is for hosts whose
/// processors are all taken.
const PROGRAM_BUDGET: Duration = Duration::from_millis(400);
/// How long the loop may run: at the threshold it would need this much processor time to finish.
const LOOP_BUDGET: Duration =
    Duration::from_millis(LOOP_PARTS * PART_INSTRUCTIONS * 1000 / INTERPRETED_BELOW);
/// All guests together. What does not fit is not tried.
const TOTAL_BUDGET: Duration = Duration::from_millis(1400);

/// Whether `/dev/kvm` runs guests, and how. JSON: `"verdict": "hardware" | "interpreting" | "none"`
/// beside `"reason"`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "verdict", rename_all = "lowercase")]
pub enum Verdict {
    /// Guests run on the processor: an unmodified Linux kernel boots.
    Hardware,
    /// Guests run, but the host kernel interprets them and lacks instructions: an unmodified Linux
    /// kernel does not boot.
    Interpreting {
        /// What showed it.
        reason: String,
    },
    /// No guest runs.
    None {
        /// Why not.
        reason: String,
    },
}

/// How one program went.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Ran {
    /// It ended as it should, with the effects it should have.
    Yes,
    /// It did not; `detail` says how it ended.
    No,
    /// The processor does not offer the instruction, so nothing follows.
    NotOffered,
    /// The examination's time was over.
    NotTried,
}

/// One guest program and how it went.
#[derive(Clone, Debug, Serialize)]
pub struct Probe {
    /// `real-mode`, `long-mode`, `int3`, `xsave`, `cmpxchg16b`, `vex` or `loop`.
    pub name: &'static str,
    /// How it went.
    pub ran: Ran,
    /// Whether an unmodified Linux kernel cannot do without it.
    pub decisive: bool,
    /// How it ended, when it did not run.
    pub detail: Option<String>,
}

impl Probe {
    fn new(program: &Program, ran: Ran, detail: Option<String>) -> Self {
        Self { name: program.name, ran, decisive: program.decisive, detail }
    }
}

/// The timed loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Speed {
    /// Guest instructions that were executed before the end or the kick.
    pub instructions: u64,
    /// Processor time they took.
    pub cpu_ns: u64,
    /// Instructions per second of the fastest tenth of the loop.
    pub instructions_per_second: u64,
}

/// Runs the loop, then all programs. The loop comes first because nothing can be said without it.
pub(super) fn examine(kvm: &Kvm) -> (Vec<Probe>, Option<Speed>) {
    let deadline = Instant::now() + TOTAL_BUDGET;
    let leaf1_ecx = kvm
        .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
        .map_or(0, |cpuid| machine::leaf1_ecx(&cpuid));
    let mut machine = Machine::new(kvm);
    let outcome = machine.run(&TIMED_LOOP, LOOP_BUDGET);
    let speed = speed(&outcome);
    let mut probes = Vec::with_capacity(PROGRAMS.len() + 1);
    for program in PROGRAMS {
        probes.push(probe(&mut machine, program, leaf1_ecx, deadline));
    }
    probes.push(judge_loop(&outcome, speed));
    (probes, speed)
}

fn probe(
    machine: &mut Machine,
    program: &'static Program,
    leaf1_ecx: u32,
    deadline: Instant,
) -> Probe {
    if !program.needs.offered_by(leaf1_ecx) {
        return Probe::new(program, Ran::NotOffered, None);
    }
    let Some(budget) = time_left(deadline, PROGRAM_BUDGET) else {
        return Probe::new(program, Ran::NotTried, None);
    };
    judge(program, &machine.run(program, budget))
}

fn time_left(deadline: Instant, wanted: Duration) -> Option<Duration> {
    let left = deadline.saturating_duration_since(Instant::now()).min(wanted);
    (left > Duration::ZERO).then_some(left)
}

fn judge(program: &Program, outcome: &Outcome) -> Probe {
    if outcome.end == End::Halted && outcome.as_expected {
        return Probe::new(program, Ran::Yes, None);
    }
    Probe::new(program, Ran::No, Some(describe(program, outcome)))
}

/// A loop that was kicked after its time did run: its speed tells what is to be told.
fn judge_loop(outcome: &Outcome, speed: Option<Speed>) -> Probe {
    match (&outcome.end, speed) {
        (End::OutOfTime, Some(_)) => Probe::new(&TIMED_LOOP, Ran::Yes, None),
        _ => judge(&TIMED_LOOP, outcome),
    }
}

fn describe(program: &Program, outcome: &Outcome) -> String {
    let how = match &outcome.end {
        End::Halted => "halted without the expected effect".to_owned(),
        End::Fault(vector) => format!("exception {vector}"),
        End::Shutdown => "triple fault (KVM_EXIT_SHUTDOWN)".to_owned(),
        End::InternalError(suberror) => format!("KVM_EXIT_INTERNAL_ERROR, suberror {suberror}"),
        End::FailEntry(reason) => format!("KVM_EXIT_FAIL_ENTRY, reason {reason:#x}"),
        End::Unexpected(exit) => format!("unexpected exit {exit}"),
        End::RunFailed(errno) => format!("KVM_RUN failed with errno {errno}"),
        End::OutOfTime => "did not end in time".to_owned(),
        End::Stuck => "did not leave KVM_RUN when kicked".to_owned(),
        End::NotSetUp(step, errno) => return format!("{step} failed with errno {errno}"),
    };
    match outcome.regs.map(|regs| (regs.rip, program.instruction_at(regs.rip))) {
        Some((_, Some(instruction))) => format!("{how} at '{instruction}'"),
        Some((rip, None)) => format!("{how} at rip {rip:#x}"),
        None => how,
    }
}

fn speed(outcome: &Outcome) -> Option<Speed> {
    let (at_end, greetings) = outcome.times.split_last()?;
    let whole_parts = greetings.len() as u64;
    let rest = match outcome.end {
        End::Halted => 0,
        // Between two parts, and before the first one, the counter is 0.
        End::OutOfTime => outcome
            .regs
            .map(|regs| regs.rcx)
            .filter(|left| *left > 0)
            .map_or(0, |left| 2 * PART_ITERATIONS.saturating_sub(left)),
        _ => return None,
    };
    let mut begin = Duration::ZERO;
    let mut parts = Vec::with_capacity(outcome.times.len());
    for end in &outcome.times {
        let instructions = if parts.len() < greetings.len() { PART_INSTRUCTIONS } else { rest };
        parts.push(rate(instructions, end.saturating_sub(begin)));
        begin = *end;
    }
    let instructions_per_second = parts.into_iter().max().filter(|rate| *rate > 0)?;
    let instructions = whole_parts * PART_INSTRUCTIONS + rest;
    Some(Speed { instructions, cpu_ns: nanoseconds(*at_end), instructions_per_second })
}

fn rate(instructions: u64, cpu: Duration) -> u64 {
    let rate = u128::from(instructions) * 1_000_000_000 / u128::from(nanoseconds(cpu).max(1));
    u64::try_from(rate).unwrap_or(u64::MAX)
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// Weighs everything that was seen.
pub(super) fn verdict(probes: &[Probe], speed: Option<Speed>) -> Verdict {
    let decisive = |ran| probes.iter().find(move |probe| probe.decisive && probe.ran == ran);
    let (failed, untried) = (decisive(Ran::No), decisive(Ran::NotTried));
    let blame = |probe: &Probe| match &probe.detail {
        Some(detail) => format!("{}: {detail}", probe.name),
        None => format!("{}: no time was left to try it", probe.name),
    };
    if !probes.iter().any(|probe| probe.ran == Ran::Yes) {
        let reason = failed.or(untried).map_or_else(|| "no guest was run".to_owned(), blame);
        return Verdict::None { reason };
    }
    let slow = speed.filter(|speed| speed.instructions_per_second < INTERPRETED_BELOW);
    let reason = match (failed.or(untried), slow) {
        (None, None) => return Verdict::Hardware,
        (None, Some(slow)) => millions_per_second(slow),
        (Some(probe), None) => blame(probe),
        (Some(probe), Some(slow)) => format!("{}; {}", blame(probe), millions_per_second(slow)),
    };
    Verdict::Interpreting { reason }
}

pub(super) fn millions_per_second(speed: Speed) -> String {
    format!("{:.1} million instructions per second", speed.instructions_per_second as f64 / 1e6)
}

#[cfg(test)]
#[path = "probe_tests.rs"]
mod tests;
