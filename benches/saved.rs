//! Snapshots of guests, for the measurements of what becomes of them.

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};

use crate::process;
use crate::rounds::Trial;
use crate::tiny_guest::{self, STAMP};
use crate::vmm::{FIRST_INSTRUCTION, Ground, LIMIT, marks, take_ladder};

/// The mark at which a guest of [`tiny_guest::scattering`] has been at all of its pages.
pub const TOUCHED: &str = "all pages touched";

/// A guest that has not come so far by then never will.
const COMES_WITHIN: Duration = Duration::from_secs(320);
/// Exit code of `cube-vmm` when the guest has reset itself.
const EXIT_RESET: i32 = 111;

/// A folder with a saved guest.
#[derive(Clone, Debug)]
pub struct Saved {
    program: PathBuf,
    /// The folder.
    pub dir: PathBuf,
    ground: PathBuf,
}

impl Saved {
    /// Saves a tiny guest of `code` with `memory`, such as `256M`, once it has printed its byte.
    pub fn tiny(
        program: &Path,
        ground: &Ground,
        code: &[u8],
        memory: &str,
    ) -> anyhow::Result<Self> {
        let kernel = ground.path("tiny");
        fs::write(&kernel, tiny_guest::image_of(code))?;
        let mut start = Command::new(program);
        start.args(["start", "--memory", memory, "--console", "serial"]);
        start.args(["--boot-protocol", "pvh", "--boot-timeout", "1000000"]);
        start.arg("--kernel").arg(&kernel).arg("--initrd").arg(&kernel);
        Self::of(program, ground, memory, start, |said, _| {
            fs::read(said).is_ok_and(|said| said == b"x")
        })
    }

    /// Saves a Linux guest with `memory` and these other options of `start`, once it is ready.
    pub fn linux(
        program: &Path,
        ground: &Ground,
        options: &[String],
        memory: &str,
    ) -> anyhow::Result<Self> {
        let mut start = Command::new(program);
        start.args(["start", "--boot-timeout", "300", "--memory", memory]).args(options);
        Self::of(program, ground, memory, start, |_, api| is_ready(program, api))
    }

    fn of(
        program: &Path,
        ground: &Ground,
        name: &str,
        mut start: Command,
        has_come: impl Fn(&Path, &Path) -> bool,
    ) -> anyhow::Result<Self> {
        let (api, said) = (ground.path("api"), ground.path("said"));
        let dir = ground.path(&format!("snapshot-{name}"));
        start.arg("--api-socket").arg(&api).stdin(Stdio::null()).stdout(Stdio::null());
        let mut vmm = start.stderr(File::create(&said)?).spawn()?;
        let deadline = Instant::now() + COMES_WITHIN;
        while !has_come(&said, &api) {
            let ended = vmm.try_wait()?.is_some();
            if ended || Instant::now() > deadline {
                let _ = vmm.kill();
                let _ = vmm.wait();
                bail!("the guest does not run: {}", fs::read_to_string(&said)?.trim());
            }
            thread::sleep(Duration::from_millis(10));
        }
        let saved = ask(program, &["snapshot", "--keep-paused"], &api, &[&dir]);
        let stopped = ask(program, &["stop", "--how", "kill"], &api, &[]);
        let _ = vmm.wait();
        saved.and(stopped)?;
        Ok(Self { program: program.to_owned(), dir, ground: ground.path("") })
    }

    /// `cube-vmm restore` of it, with its api at this socket.
    pub fn command(&self, api: &Path) -> Command {
        let mut command = Command::new(&self.program);
        command.arg("restore").arg(&self.dir).arg("--api-socket").arg(api).arg("--resume");
        command.stdin(Stdio::null());
        command
    }

    /// Takes its files out of the host's page cache.
    pub fn chill(&self) -> anyhow::Result<()> {
        for entry in fs::read_dir(&self.dir)? {
            let path = entry?.path();
            if !path.is_file() {
                continue;
            }
            let file = File::open(&path)?;
            file.sync_all()?;
            // SAFETY: the descriptor is open; the call takes no pointer.
            let failed =
                unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
            ensure!(failed == 0, "{} cannot be taken from the page cache", path.display());
        }
        Ok(())
    }

    /// Restores a guest of [`tiny_guest::UNTIL_RESTORED`], which then ends.
    pub fn attempt(&self, options: &[&str]) -> anyhow::Result<Trial> {
        let trace = self.ground.join("trace.json");
        let mut command = self.command(&self.ground.join("r"));
        command.args(options).arg("--trace").arg(&trace);
        let finished = process::run(command, LIMIT)?;
        let ended_well = matches!(finished.status.code(), Some(0 | EXIT_RESET));
        ensure!(ended_well, "{}", finished.describe());
        let ladder = take_ladder(&trace)?;
        let stamp = format!("guest stamp {STAMP:#04x}");
        let first = ladder.at(&stamp).context("the guest has not said that it runs")?;
        let mut marks = marks(&ladder, finished.spawned_ns);
        marks.retain(|(name, _)| *name != stamp);
        marks.push((FIRST_INSTRUCTION.to_owned(), first - finished.spawned_ns));
        Ok(Trial { ended: finished.lifetime_ns(), marks })
    }

    /// Restores a guest of [`tiny_guest::scattering`] until it has been at all of its pages, asks `then` about
    /// the VM that answers at this socket, and ends it.
    pub fn attempt_scattering(
        &self,
        options: &[&str],
        then: impl Fn(&Path) -> anyhow::Result<()>,
    ) -> anyhow::Result<Trial> {
        let [trace, api, said] = ["trace.json", "r", "said"].map(|name| self.ground.join(name));
        let mut command = self.command(&api);
        command.args(options).arg("--trace").arg(&trace);
        command.stdout(Stdio::null()).stderr(File::create(&said)?);
        let spawned_ns = process::monotonic_ns();
        let mut vmm = command.spawn()?;
        let has_come = || fs::read(&said).is_ok_and(|said| said == b"x");
        let come = wait_for(&mut vmm, has_come, "the guest does not get to all of its pages");
        let asked = come.and_then(|()| then(&api));
        let stopped = ask(&self.program, &["stop", "--how", "kill"], &api, &[]);
        if stopped.is_err() {
            let _ = vmm.kill();
        }
        let _ = vmm.wait();
        let ended = process::monotonic_ns() - spawned_ns;
        asked.and(stopped).with_context(|| fs::read_to_string(&said).unwrap_or_default())?;
        let ladder = take_ladder(&trace)?;
        let stamp = format!("guest stamp {STAMP:#04x}");
        let touched = ladder.at(&stamp).context("the guest has not said that it is done")?;
        let mut marks = marks(&ladder, spawned_ns);
        marks.retain(|(name, _)| *name != stamp);
        marks.push((TOUCHED.to_owned(), touched - spawned_ns));
        Ok(Trial { ended, marks })
    }

    /// Writes which pages such a guest touches, for later restores.
    pub fn record_hot(&self) -> anyhow::Result<()> {
        let record = |api: &Path| ask(&self.program, &["snapshot", "hot"], api, &[]);
        self.attempt_scattering(&[], record).map(drop)
    }

    /// Restores a Linux guest until its agent has made it another, and ends it.
    pub fn attempt_linux(&self, options: &[&str]) -> anyhow::Result<Trial> {
        let (trace, api) = (self.ground.join("trace.json"), self.ground.join("r"));
        let mut command = self.command(&api);
        command.args(options).arg("--trace").arg(&trace);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let spawned_ns = process::monotonic_ns();
        let mut vmm = command.spawn()?;
        let ready = wait_until_ready(&self.program, &mut vmm, &api);
        let stopped = ask(&self.program, &["stop", "--how", "kill"], &api, &[]);
        let _ = vmm.wait();
        let ended = process::monotonic_ns() - spawned_ns;
        ready.and(stopped)?;
        Ok(Trial { ended, marks: marks(&take_ladder(&trace)?, spawned_ns) })
    }
}

/// Waits until the guest behind `api` is ready.
pub fn wait_until_ready(program: &Path, vmm: &mut Child, api: &Path) -> anyhow::Result<()> {
    wait_for(vmm, || is_ready(program, api), "the guest does not get ready")
}

fn wait_for(vmm: &mut Child, come: impl Fn() -> bool, otherwise: &str) -> anyhow::Result<()> {
    let deadline = Instant::now() + COMES_WITHIN;
    while !come() {
        if let Some(status) = vmm.try_wait()? {
            bail!("the VMM has ended, {status}");
        }
        ensure!(Instant::now() < deadline, "{otherwise}");
        // Whoever asks takes time from the guest.
        thread::sleep(Duration::from_millis(100));
    }
    Ok(())
}

fn is_ready(program: &Path, api: &Path) -> bool {
    let info = Command::new(program).arg("info").arg("--api-socket").arg(api).output();
    let info = info.ok().filter(|output| output.status.success());
    let info =
        info.and_then(|output| serde_json::from_slice::<serde_json::Value>(&output.stdout).ok());
    info.is_some_and(|info| info["ready"] == true)
}

/// Runs a subcommand about the VM at `api`.
pub fn ask(program: &Path, words: &[&str], api: &Path, more: &[&Path]) -> anyhow::Result<()> {
    let mut command = Command::new(program);
    command.args(words).arg("--api-socket").arg(api).args(more);
    let output = command.output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "cube-vmm {}: {}", words.join(" "), said.trim());
    Ok(())
}
