//! Between fork and exec, in the child of a process with threads: only async-signal-safe calls,
//! no allocation, no locks, no panics. All it needs has been prepared in [`Plan`].

use libc::{c_char, c_int};
use nix::errno::Errno;
use std::ffi::{CStr, CString};
use std::os::fd::RawFd;

/// Where the child failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Step {
    /// A new session.
    Session,
    /// The controlling terminal.
    Terminal,
    /// Its standard streams.
    Stdio,
    /// Its user and groups.
    User,
    /// Its working directory.
    Directory,
    /// The program.
    Execute,
}

impl Step {
    const ALL: [Self; 6] =
        [Self::Session, Self::Terminal, Self::Stdio, Self::User, Self::Directory, Self::Execute];
}

/// What the child writes to its parent instead of executing: the step and the errno.
pub type Report = [u8; 5];

/// Reads a child's report.
pub fn parse_report(report: Report) -> Option<(Step, Errno)> {
    let [step, errno @ ..] = report;
    let step = Step::ALL.into_iter().find(|known| *known as u8 == step)?;
    Some((step, Errno::from_raw(i32::from_le_bytes(errno))))
}

/// What the child shall become.
pub struct Plan<'a> {
    /// Standard input, output and error; none is 0, 1 or 2.
    pub stdio: [RawFd; 3],
    /// Whether they are a terminal, to be the controlling one.
    pub terminal: bool,
    /// User, group, and supplementary groups; `None` stays as it is.
    pub user: Option<(u32, u32, &'a [u32])>,
    /// The working directory.
    pub cwd: &'a CStr,
    /// The paths to execute, in turn.
    pub candidates: &'a [CString],
    /// Null-terminated.
    pub argv: &'a [*const c_char],
    /// Null-terminated.
    pub envp: &'a [*const c_char],
    /// Where the report goes; closed by exec.
    pub report: RawFd,
}

/// Becomes the program of `plan`, or reports why not and exits.
///
/// # Safety
/// Only in a process that has just been forked. The pointers of `plan` must be valid.
pub unsafe fn run(plan: &Plan<'_>) -> ! {
    // SAFETY: passed on to the caller.
    let (step, errno) = unsafe { become_program(plan) };
    let mut report: Report = [step as u8; 5];
    report[1..].copy_from_slice(&errno.to_le_bytes());
    // SAFETY: a valid buffer; then the process is gone.
    unsafe {
        libc::write(plan.report, report.as_ptr().cast(), report.len());
        libc::_exit(127)
    }
}

/// Returns only on failure, with the step and the errno.
unsafe fn become_program(plan: &Plan<'_>) -> (Step, i32) {
    // SAFETY: all calls are async-signal-safe and their pointers valid, as the caller promised.
    unsafe {
        if libc::setsid() < 0 {
            return (Step::Session, errno());
        }
        for (target, fd) in (0..).zip(plan.stdio) {
            if libc::dup2(fd, target) < 0 {
                return (Step::Stdio, errno());
            }
        }
        if plan.terminal && libc::ioctl(0, libc::TIOCSCTTY, 0) < 0 {
            return (Step::Terminal, errno());
        }
        reset_inheritance();
        if let Some((uid, gid, groups)) = plan.user
            && (libc::setgroups(groups.len(), groups.as_ptr()) < 0
                || libc::setgid(gid) < 0
                || libc::setuid(uid) < 0)
        {
            return (Step::User, errno());
        }
        if libc::chdir(plan.cwd.as_ptr()) < 0 {
            return (Step::Directory, errno());
        }
        reset_signals();
        (Step::Execute, execute(plan))
    }
}

/// What the agent has set for itself and no program should get.
///
/// # Safety
/// Only in a process that has just been forked.
unsafe fn reset_inheritance() {
    // SAFETY: valid buffers and numbers; failures leave what was inherited.
    unsafe {
        libc::umask(0o022);
        let fd = libc::open(c"/proc/self/oom_score_adj".as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
        if fd >= 0 {
            libc::write(fd, c"0".as_ptr().cast(), 1);
            libc::close(fd);
        }
        // All are close-on-exec from birth; this is for what a library may have opened.
        let flags = libc::CLOSE_RANGE_CLOEXEC;
        libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, flags);
    }
}

/// Default dispositions, nothing blocked.
///
/// # Safety
/// Only in a process that has just been forked.
unsafe fn reset_signals() {
    // The kernel's structure, not the C library's, whose functions leave out two signals that it
    // has taken for itself. Zeroes are the default disposition, and the empty set.
    let default = [0_u64; 4];
    let none = 0_u64;
    let size = size_of_val(&none);
    // SAFETY: the buffers are as large as the kernel's structures, and only read.
    unsafe {
        let nothing = std::ptr::null_mut::<u64>();
        for signal in 1..=64 {
            libc::syscall(libc::SYS_rt_sigaction, signal, default.as_ptr(), nothing, size);
        }
        let how = libc::SIG_SETMASK;
        libc::syscall(libc::SYS_rt_sigprocmask, how, &raw const none, nothing, size);
    }
}

/// Tries the candidates as `execvp` does, and returns the errno that tells most.
///
/// # Safety
/// The pointers of `plan` must be valid.
unsafe fn execute(plan: &Plan<'_>) -> c_int {
    let mut denied = false;
    for candidate in plan.candidates {
        // SAFETY: all are null-terminated, as the caller promised.
        unsafe { libc::execve(candidate.as_ptr(), plan.argv.as_ptr(), plan.envp.as_ptr()) };
        match errno() {
            libc::ENOENT | libc::ENOTDIR => {}
            libc::EACCES => denied = true,
            other => return other,
        }
    }
    if denied { libc::EACCES } else { libc::ENOENT }
}

fn errno() -> c_int {
    Errno::last_raw()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_are_read_back() {
        assert_eq!(parse_report([4, 2, 0, 0, 0]), Some((Step::Directory, Errno::ENOENT)));
        assert_eq!(parse_report([9, 2, 0, 0, 0]), None);
    }
}
