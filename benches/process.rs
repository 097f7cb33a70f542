//! Runs one process from before its start to its end, on the clock that it shares with its parent.

use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, bail};

/// CLOCK_MONOTONIC, which all processes read alike, in nanoseconds.
pub fn monotonic_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes one timespec into a live local; the clock exists on every Linux.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// A process that has ended.
#[derive(Debug)]
pub struct Finished {
    /// Just before it was started.
    pub spawned_ns: u64,
    /// Just after it had ended.
    pub ended_ns: u64,
    /// How it ended.
    pub status: ExitStatus,
    /// What it wrote.
    pub stdout: String,
    /// What it complained.
    pub stderr: String,
}

impl Finished {
    /// From start to end.
    pub fn lifetime_ns(&self) -> u64 {
        self.ended_ns - self.spawned_ns
    }

    /// How it ended and its last words, for a message on one line.
    pub fn describe(&self) -> String {
        let last_words = self.stderr.lines().chain(self.stdout.lines()).next_back();
        format!("{}, said {:?}", self.status, last_words.unwrap_or_default().trim())
    }
}

/// Runs `command` without input. One that is not done within `limit` is killed, and is an error.
pub fn run(mut command: Command, limit: Duration) -> anyhow::Result<Finished> {
    // Files, unlike pipes, never make the process wait for us.
    let (stdout, stderr) = (tempfile::tempfile()?, tempfile::tempfile()?);
    command.stdin(Stdio::null()).stdout(stdout.try_clone()?).stderr(stderr.try_clone()?);
    let spawned_ns = monotonic_ns();
    let mut child = command
        .spawn()
        .with_context(|| format!("cannot start {}", command.get_program().display()))?;
    let in_time = ends_within(&child, limit);
    let ended_ns = monotonic_ns();
    if !matches!(in_time, Ok(true)) {
        // Fails only if it has ended after all.
        let _ = child.kill();
    }
    let status = child.wait()?;
    let finished = Finished {
        spawned_ns,
        ended_ns,
        status,
        stdout: text_of(stdout)?,
        stderr: text_of(stderr)?,
    };
    if !in_time? {
        bail!("not done after {} s, {}", limit.as_secs(), finished.describe());
    }
    Ok(finished)
}

fn text_of(mut file: File) -> io::Result<String> {
    let mut bytes = Vec::new();
    file.rewind()?;
    file.read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Waits for the end without reaping, so that the time can be taken before anything else happens.
fn ends_within(child: &Child, limit: Duration) -> io::Result<bool> {
    let process = pidfd(child)?;
    let mut poll = libc::pollfd { fd: process.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    let timeout = i32::try_from(limit.as_millis()).unwrap_or(i32::MAX);
    loop {
        // SAFETY: one live pollfd, and its descriptor is open.
        match unsafe { libc::poll(&mut poll, 1, timeout) } {
            0 => return Ok(false),
            1.. => return Ok(true),
            _ if io::Error::last_os_error().kind() == io::ErrorKind::Interrupted => {}
            _ => return Err(io::Error::last_os_error()),
        }
    }
}

fn pidfd(child: &Child) -> io::Result<OwnedFd> {
    // SAFETY: the call takes two numbers; the child is not reaped yet, so the pid is its own.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, child.id(), 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn a_process_is_timed_and_heard() {
        let finished = run(shell("echo out; echo err >&2; exit 3"), LONG).unwrap();
        assert_eq!(finished.status.code(), Some(3));
        assert_eq!((finished.stdout.as_str(), finished.stderr.as_str()), ("out\n", "err\n"));
        assert!(finished.lifetime_ns() > 0);
        assert!(finished.describe().contains("\"out\""), "{}", finished.describe());
    }

    #[test]
    fn a_process_that_hangs_is_killed_and_told() {
        let error = run(shell("echo here >&2; exec sleep 1000"), Duration::from_millis(300));
        let text = error.unwrap_err().to_string();
        assert!(text.starts_with("not done after 0 s, signal: 9"), "{text}");
    }

    #[test]
    fn a_program_that_is_not_there_is_named() {
        let error = run(Command::new("/nowhere/vmm"), LONG).unwrap_err();
        assert!(error.to_string().contains("/nowhere/vmm"), "{error}");
    }
}
