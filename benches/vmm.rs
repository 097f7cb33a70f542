//! One run of the bare floor, or of `cube-vmm`, as a [`Trial`].

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, ensure};
use tempfile::TempDir;

use crate::bare_kvm::{self, MEMORY_MIB, Steps};
use crate::ladder::Ladder;
use crate::process;
use crate::rounds::Trial;
use crate::tiny_guest;

/// The mark at which the floor and `cube-vmm` are compared.
pub const FIRST_INSTRUCTION: &str = "first guest instruction";

/// No run of a tiny guest takes longer, on any host.
pub const LIMIT: Duration = Duration::from_secs(30);

/// Exit code of `cube-vmm` when the guest has reset itself.
const EXIT_RESET: i32 = 111;

/// A directory with the tiny guest, for as long as it is measured.
pub struct Ground(TempDir);

impl Ground {
    /// Makes it.
    pub fn new() -> anyhow::Result<Self> {
        Self::new_in(None)
    }

    /// Makes it in a folder.
    pub fn new_in(folder: Option<&Path>) -> anyhow::Result<Self> {
        let ground = Self(match folder {
            Some(folder) => tempfile::tempdir_in(folder)?,
            None => tempfile::tempdir()?,
        });
        fs::write(ground.guest(), tiny_guest::image())?;
        Ok(ground)
    }

    /// The guest's ELF file.
    pub fn guest(&self) -> PathBuf {
        self.path("tiny.elf")
    }

    /// A file in the directory.
    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }
}

/// `cube-vmm` beside the running program, where cargo puts both.
pub fn default_vmm() -> anyhow::Result<PathBuf> {
    let path = env::current_exe()?.with_file_name("cube-vmm");
    ensure!(
        path.is_file(),
        "{} does not exist: cargo build --release -p cube-vmm, or give --vmm PATH",
        path.display()
    );
    Ok(path)
}

/// Starts this very program as the floor.
pub fn bare() -> anyhow::Result<Trial> {
    bare_with(MEMORY_MIB)
}

/// The same, with so many MiB in its slot.
pub fn bare_with(mib: usize) -> anyhow::Result<Trial> {
    let mut command = Command::new(env::current_exe()?);
    command.arg(bare_kvm::ARGUMENT).arg(mib.to_string());
    let finished = process::run(command, LIMIT)?;
    ensure!(finished.status.success(), "{}", finished.describe());
    let steps: Steps = serde_json::from_str(&finished.stdout)
        .with_context(|| format!("not the steps of the floor: {:?}", finished.stdout))?;
    let marks = [
        ("main", steps.main),
        ("vm", steps.vm),
        ("memory", steps.memory),
        ("interrupt controllers", steps.irqchip),
        ("vcpu", steps.vcpu),
        (FIRST_INSTRUCTION, steps.first_exit),
    ];
    let since = |(name, time): (&str, u64)| (name.to_owned(), time - finished.spawned_ns);
    Ok(Trial { ended: finished.lifetime_ns(), marks: marks.map(since).to_vec() })
}

/// Runs the tiny guest in `cube-vmm` to its end.
pub fn cube_vmm(program: &Path, ground: &Ground) -> anyhow::Result<Trial> {
    let trace = ground.path("trace.json");
    let mut command = Command::new(program);
    command.args(["run", "--no-agent", "--memory"]).arg(format!("{MEMORY_MIB}M"));
    command.arg("--kernel").arg(ground.guest()).arg("--trace").arg(&trace);
    // Its defaults must not come from the caller's environment.
    command.env_remove("CUBE_INITRD");
    let finished = process::run(command, LIMIT)?;
    let ended_well = matches!(finished.status.code(), Some(0 | EXIT_RESET));
    ensure!(ended_well, "{}", finished.describe());
    let ladder = take_ladder(&trace)?;
    let first = ladder.first_guest_instruction()? - finished.spawned_ns;
    let mut marks = marks(&ladder, finished.spawned_ns);
    marks.push((FIRST_INSTRUCTION.to_owned(), first));
    Ok(Trial { ended: finished.lifetime_ns(), marks })
}

/// A boot of a Linux guest: what is booted, and how.
#[derive(Clone, Debug)]
pub struct Boot {
    /// `cube-vmm`.
    pub program: PathBuf,
    /// Arguments of `run` that say what to boot.
    pub options: Vec<String>,
    /// The command in the guest.
    pub command: Vec<String>,
    /// How long it may take.
    pub limit: Duration,
}

impl Boot {
    /// Boots it, runs the command, and waits for the end.
    pub fn attempt(&self, ground: &Ground) -> anyhow::Result<Trial> {
        let trace = ground.path("trace.json");
        let mut command = Command::new(&self.program);
        command.arg("run").args(&self.options).arg("--trace").arg(&trace);
        command.arg("--").args(&self.command);
        let finished = process::run(command, self.limit)?;
        ensure!(finished.status.success(), "{}", finished.describe());
        let ladder = take_ladder(&trace)?;
        let marks = marks(&ladder, finished.spawned_ns);
        Ok(Trial { ended: finished.lifetime_ns(), marks })
    }
}

/// Reads the trace and removes it, so that it cannot be taken for that of the next run.
pub fn take_ladder(trace: &Path) -> anyhow::Result<Ladder> {
    let ladder = Ladder::read(trace);
    // Not there: then reading has failed, too, and says so.
    let _ = fs::remove_file(trace);
    ladder
}

/// The steps of a ladder, since the process was started.
pub fn marks(ladder: &Ladder, spawned_ns: u64) -> Vec<(String, u64)> {
    let since = |stamp: &crate::ladder::Stamp| {
        (stamp.name.clone(), stamp.monotonic_ns.saturating_sub(spawned_ns))
    };
    ladder.stamps.iter().map(since).collect()
}

/// A Linux guest of cube-vmm that stays, and is asked through its vsock.
pub struct Staying<'a> {
    /// How its devices are attached.
    pub transport: &'a str,
    /// Its memory, in MiB.
    pub memory_mib: u32,
    /// Where its api socket is made.
    pub api: &'a Path,
    /// Where its vsock is made.
    pub vsock: &'a Path,
    /// Kernel.
    pub kernel: &'a Path,
    /// Root image with the agent.
    pub initrd: &'a Path,
    /// The image of programs, `/dev/vda`.
    pub tools: &'a Path,
}

impl Staying<'_> {
    /// What starts it, to which more devices may be added.
    pub fn command(&self, program: &Path) -> Command {
        let mut start = Command::new(program);
        start.args(["start", "--boot-timeout", "300", "--transport", self.transport]);
        start.arg("--memory").arg(format!("{}M", self.memory_mib));
        start.arg("--api-socket").arg(self.api).arg("--vsock").arg(self.vsock);
        start.arg("--kernel").arg(self.kernel).arg("--initrd").arg(self.initrd);
        start.arg("--disk").arg(format!("path={},ro", self.tools.display()));
        start
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vmm_that_writes_no_trace_has_failed() {
        let ground = Ground::new().unwrap();
        let error = cube_vmm(Path::new("/bin/true"), &ground).unwrap_err().to_string();
        assert!(error.contains("no trace was written"), "{error}");
    }

    #[test]
    fn a_vmm_that_fails_says_how() {
        let ground = Ground::new().unwrap();
        let error = cube_vmm(Path::new("/bin/false"), &ground).unwrap_err().to_string();
        assert!(error.contains("exit status: 1"), "{error}");
    }

    #[test]
    fn a_trace_is_read_once() {
        let ground = Ground::new().unwrap();
        let trace = ground.path("trace.json");
        fs::write(&trace, r#"{"exec_monotonic_ns":7,"stamps":[]}"#).unwrap();
        assert!(take_ladder(&trace).is_ok());
        assert!(take_ladder(&trace).is_err());
    }
}
