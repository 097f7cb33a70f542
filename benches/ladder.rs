//! The boot ladder that `cube-vmm run --trace FILE` writes.

use std::fs;
use std::path::Path;

use anyhow::{Context, ensure};
use serde::Deserialize;

use crate::tiny_guest::STAMP;

/// The steps of a boot in order, as `cube-vmm` names them.
pub const STEPS: [&str; 9] = [
    "T0 exec",
    "T1 vm created",
    "T2 memory mapped",
    "T3 kernel loaded",
    "T4 first KVM_RUN",
    "T5 guest kernel entry",
    "T6 userspace",
    "T7 agent ready",
    "T8 command started",
];
/// The step that is an instruction of the guest before the kernel's first one.
const GUEST_ENTRY: &str = "T5 guest kernel entry";

/// A ladder.
#[derive(Clone, Debug, Deserialize)]
pub struct Ladder {
    /// CLOCK_MONOTONIC at `T0 exec`.
    pub exec_monotonic_ns: u64,
    /// What was reached, in order.
    pub stamps: Vec<Stamp>,
}

/// One step reached.
#[derive(Clone, Debug, Deserialize)]
pub struct Stamp {
    /// One of [`STEPS`], or `guest stamp 0xNN`.
    pub name: String,
    /// Nanoseconds since `T0 exec`.
    pub ns: u64,
    /// Nanoseconds of CLOCK_MONOTONIC.
    pub monotonic_ns: u64,
}

impl Ladder {
    /// Reads the file that `cube-vmm` has written.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let text = fs::read_to_string(path)
            .with_context(|| format!("no trace was written to {}", path.display()))?;
        serde_json::from_str(&text)
            .with_context(|| format!("the trace in {} is not understood", path.display()))
    }

    /// CLOCK_MONOTONIC when this step was first reached.
    pub fn at(&self, name: &str) -> Option<u64> {
        self.stamps.iter().find(|stamp| stamp.name == name).map(|stamp| stamp.monotonic_ns)
    }

    /// When the first instruction that the tiny guest executed was seen.
    ///
    /// That is the stamp before the kernel's entry if `cube-vmm` has put one there, else the
    /// guest's own. Without the latter the guest has not run, whatever else was seen.
    pub fn first_guest_instruction(&self) -> anyhow::Result<u64> {
        let own = self.at(&format!("guest stamp {STAMP:#04x}"));
        ensure!(own.is_some(), "the guest's own stamp is not in the trace: {:?}", self.names());
        self.at(GUEST_ENTRY).or(own).context("no guest stamp")
    }

    fn names(&self) -> Vec<&str> {
        self.stamps.iter().map(|stamp| stamp.name.as_str()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ladder(names: &[&str]) -> Ladder {
        let stamp = |(index, name): (usize, &&str)| Stamp {
            name: (*name).to_owned(),
            ns: index as u64,
            monotonic_ns: 100 + index as u64,
        };
        let stamps = names.iter().enumerate().map(stamp).collect();
        Ladder { exec_monotonic_ns: 100, stamps }
    }

    #[test]
    fn the_stamp_before_the_entry_is_the_first_instruction() {
        let ladder = ladder(&["T0 exec", "T5 guest kernel entry", "guest stamp 0xf0"]);
        assert_eq!(ladder.first_guest_instruction().unwrap(), 101);
    }

    #[test]
    fn without_it_the_guests_own_stamp_is() {
        let ladder = ladder(&["T0 exec", "T4 first KVM_RUN", "guest stamp 0xf0"]);
        assert_eq!(ladder.first_guest_instruction().unwrap(), 102);
    }

    #[test]
    fn a_guest_that_did_not_stamp_has_not_run() {
        let ladder = ladder(&["T0 exec", "T5 guest kernel entry"]);
        assert!(ladder.first_guest_instruction().unwrap_err().to_string().contains("T5 guest"));
    }

    #[test]
    fn the_file_of_cube_vmm_is_understood() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("trace");
        fs::write(
            &path,
            r#"{"exec_monotonic_ns":7,"stamps":[{"name":"T0 exec","ns":0,"monotonic_ns":7}]}"#,
        )
        .unwrap();
        assert_eq!(Ladder::read(&path).unwrap().at("T0 exec"), Some(7));
        fs::write(&path, "[]").unwrap();
        assert!(Ladder::read(&path).unwrap_err().to_string().contains("not understood"));
        assert!(Ladder::read(&directory.path().join("none")).is_err());
    }
}
