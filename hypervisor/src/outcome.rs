//! How a guest ends, with the exit code and the words for each way.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The end of a guest. Each has its own exit code.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "outcome", rename_all = "snake_case")]
pub enum Outcome {
    /// The guest powered itself off (ACPI S5).
    PowerOff,
    /// The guest reset itself (i8042 or ACPI), which ends a microVM.
    Reset,
    /// The guest's kernel panicked.
    Panic,
    /// A vCPU met a fault it could not handle while handling another.
    TripleFault,
    /// KVM could not go on.
    InternalError {
        /// KVM's suberror and what it says of it.
        detail: String,
    },
    /// The processor refused the guest's state.
    EntryFailed {
        /// The hardware's reason code.
        reason: u64,
    },
    /// An exit that this VMM does not know, or an ioctl that failed.
    VcpuFailed {
        /// What happened.
        detail: String,
    },
    /// Ended from outside: a signal, or a request.
    Stopped,
}

impl Outcome {
    /// The exit code of `cube-vmm` when the guest ends so and nothing else decides.
    pub fn exit_code(&self) -> u8 {
        match self {
            Outcome::PowerOff | Outcome::Stopped => 0,
            Outcome::Reset => 111,
            Outcome::Panic => 112,
            Outcome::TripleFault => 113,
            Outcome::InternalError { .. } => 114,
            Outcome::EntryFailed { .. } => 115,
            Outcome::VcpuFailed { .. } => 116,
        }
    }

    /// True if the guest wanted to end and did so in order.
    pub fn is_orderly(&self) -> bool {
        matches!(self, Outcome::PowerOff | Outcome::Reset | Outcome::Stopped)
    }
}

/// `cube-vmm run`: the guest was not ready in time.
pub const EXIT_NOT_READY: u8 = 117;
/// `cube-vmm run`: the guest powered off before the command had ended.
pub const EXIT_POWERED_OFF_EARLY: u8 = 110;
/// `cube-vmm restore`: guest memory can no longer be brought in.
pub const EXIT_MEMORY_LOST: u8 = 118;
/// Set-up failed: a bad value, a missing file, no KVM.
pub const EXIT_SETUP: u8 = 125;

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Outcome::PowerOff => f.write_str("the guest powered off"),
            Outcome::Reset => f.write_str("the guest reset itself"),
            Outcome::Panic => f.write_str("the guest's kernel panicked"),
            Outcome::TripleFault => f.write_str("the guest triple-faulted"),
            Outcome::InternalError { detail } => write!(f, "KVM internal error: {detail}"),
            Outcome::EntryFailed { reason } => {
                write!(f, "the processor refused the guest's state, reason {reason:#x}")
            }
            Outcome::VcpuFailed { detail } => write!(f, "a vCPU failed: {detail}"),
            Outcome::Stopped => f.write_str("the guest was stopped"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_failure_has_an_exit_code_of_its_own() {
        let detail = String::new;
        let failures = [
            Outcome::Reset,
            Outcome::Panic,
            Outcome::TripleFault,
            Outcome::InternalError { detail: detail() },
            Outcome::EntryFailed { reason: 0 },
            Outcome::VcpuFailed { detail: detail() },
        ];
        let mut codes: Vec<_> = failures.iter().map(Outcome::exit_code).collect();
        codes.extend([0, EXIT_NOT_READY, EXIT_POWERED_OFF_EARLY, EXIT_SETUP]);
        codes.sort_unstable();
        codes.dedup();
        assert_eq!(codes.len(), failures.len() + 4);
    }
}
