//! What is written down so that it outlives the shim: who runs in a sandbox, and how a container
//! has ended. Each file is written under another name first, so nobody reads half of one.

use std::fs;
use std::io::Write;
use std::path::Path;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::cgroup::Group;
use crate::error::{Result, io};

/// The file in a sandbox's folder that holds a [`Sandbox`].
pub const SANDBOX: &str = "vm.json";
/// The file in a container's bundle that holds an [`Exit`].
pub const EXIT: &str = "exit.json";

/// A process that cannot be mistaken for another of the same number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Its number.
    pub pid: u32,
    /// When it started, in ticks since boot; field 22 of `/proc/PID/stat`.
    pub started: u64,
}

impl Identity {
    /// Of a process that runs.
    pub fn of(pid: u32) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        Some(Self { pid, started: started(&stat)? })
    }

    /// Whether it still runs; a zombie does not.
    pub fn lives(&self) -> bool {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid)).unwrap_or_default();
        started(&stat) == Some(self.started) && !is_zombie(&stat)
    }

    /// Whether it does nothing until it is told to go on (SIGSTOP).
    pub fn is_stopped(&self) -> bool {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid)).unwrap_or_default();
        started(&stat) == Some(self.started) && matches!(fields(&stat).next(), Some("T" | "t"))
    }
}

/// The fields after the name, which may have blanks and parentheses itself.
fn fields(stat: &str) -> impl Iterator<Item = &str> {
    stat.rsplit_once(')').map_or("", |(_, rest)| rest).split_ascii_whitespace()
}

fn started(stat: &str) -> Option<u64> {
    fields(stat).nth(19)?.parse().ok()
}

fn is_zombie(stat: &str) -> bool {
    matches!(fields(stat).next(), Some("Z" | "X"))
}

/// Who runs in a sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sandbox {
    /// The containerd namespace.
    pub namespace: String,
    /// The sandbox.
    pub id: String,
    /// The shim.
    pub shim: Identity,
    /// The VMM, if it has been started.
    pub vmm: Option<Identity>,
    /// The control group of the VMM and its file servers, if it has one.
    #[serde(default)]
    pub group: Option<Group>,
}

/// How a container has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exit {
    /// The exit status, a signal's number counted from 128.
    pub status: u32,
    /// Nanoseconds since 1970.
    pub unix_nanos: u128,
    /// What containerd knows the process as.
    pub pid: u32,
}

/// Writes a record.
pub fn write<T: Serialize>(path: &Path, record: &T) -> Result<()> {
    let bytes = serde_json::to_vec(record).map_err(io(format!("write {}", path.display())))?;
    put(path, &bytes)
}

/// Writes a file, all of it or nothing.
pub fn put(path: &Path, bytes: &[u8]) -> Result<()> {
    let failed = || format!("write {}", path.display());
    let folder = path.parent().unwrap_or(Path::new("."));
    let mut file = tempfile::NamedTempFile::new_in(folder).map_err(io(failed()))?;
    file.write_all(bytes).map_err(io(failed()))?;
    file.persist(path).map_err(|error| io(failed())(error.error))?;
    Ok(())
}

/// Reads a record; `None` if there is none, or it is not one.
pub fn read<T: DeserializeOwned>(path: &Path) -> Option<T> {
    serde_json::from_slice(&fs::read(path).ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_known_by_its_start() {
        let me = Identity::of(std::process::id()).unwrap();
        assert!(me.lives());
        assert!(!Identity { started: me.started + 1, ..me }.lives());
    }

    #[test]
    fn who_is_stopped_is_known() {
        let mut child = std::process::Command::new("sleep").arg("100").spawn().unwrap();
        let it = Identity::of(child.id()).unwrap();
        assert!(!it.is_stopped());
        let pid = nix::unistd::Pid::from_raw(child.id() as i32);
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGSTOP).unwrap();
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
        while !it.is_stopped() {
            assert!(std::time::Instant::now() < deadline, "it is not stopped");
            std::thread::yield_now();
        }
        assert!(it.lives());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!it.is_stopped());
    }

    #[test]
    fn a_name_with_parentheses_does_not_shift_the_fields() {
        let stat = "7 (a) b (c) S 1 7 7 0 -1 4194304 1 0 0 0 1 2 0 0 20 0 1 0 99887 1 1";
        assert_eq!(started(stat), Some(99887));
        assert!(is_zombie("7 (a) Z 1"));
    }

    #[test]
    fn a_record_is_read_as_it_was_written() {
        let dir = tempfile::tempdir().unwrap();
        let exit = Exit { status: 137, unix_nanos: 1, pid: 9 };
        write(&dir.path().join(EXIT), &exit).unwrap();
        assert_eq!(read(&dir.path().join(EXIT)), Some(exit));
        fs::write(dir.path().join(EXIT), "{").unwrap();
        assert_eq!(read::<Exit>(&dir.path().join(EXIT)), None);
    }
}
