//! The last steps in the container, before its program: what libcontainer does in another order,
//! or not for processes that are added to a container.
//!
//! All runs in a process that has been cloned from a keeper with one thread.

use crate::error::{Failure, Kind};
use crate::seccomp::Profile;
use libcontainer::capabilities::drop_privileges;
use libcontainer::oci_spec::runtime::{LinuxCapabilities, Spec};
use libcontainer::syscall::linux::LinuxSyscall;
use libcontainer::workload::{Executor, ExecutorError, ExecutorValidationError};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::unistd::{AccessFlags, access};
use std::ffi::CString;
use std::os::fd::{BorrowedFd, RawFd};
use std::path::{Path, PathBuf};

/// Becomes the program of a spec.
#[derive(Clone)]
pub struct LastSteps {
    /// Where it tells why it could not, as a [`Failure`]; closed when it could.
    pub report: RawFd,
    /// All sets; `None` keeps all.
    pub capabilities: Option<LinuxCapabilities>,
    /// `None` filters nothing.
    pub seccomp: Option<Profile>,
    /// Whether the program can never gain privileges.
    pub no_new_privileges: bool,
    /// The size of its terminal, rows and columns.
    pub size: Option<(u16, u16)>,
}

impl Executor for LastSteps {
    /// Before the container counts as created, with its user and all capabilities.
    fn validate(&self, spec: &Spec) -> Result<(), ExecutorValidationError> {
        let told = |failure: Failure| {
            self.tell(&failure);
            ExecutorValidationError::ArgValidationError(failure.message)
        };
        die_with_keeper(self.report).map_err(|errno| told(system("bind to the keeper", errno)))?;
        own_streams(spec);
        if let Some((rows, cols)) = self.size {
            set_size(rows, cols);
        }
        find_program(spec).map(drop).map_err(told)
    }

    /// When it has been started.
    fn exec(&self, spec: &Spec) -> Result<(), ExecutorError> {
        let failure = self.become_program(spec);
        self.tell(&failure);
        Err(ExecutorError::Other(failure.message))
    }
}

impl LastSteps {
    fn become_program(&self, spec: &Spec) -> Failure {
        match self.restrict().and_then(|()| find_program(spec)) {
            Ok(program) => execute(&program, spec),
            Err(failure) => failure,
        }
    }

    /// Without `no_new_privs` only who may administer can install a filter, so that comes before
    /// capabilities are dropped; else it comes last, and need not allow for their dropping.
    fn restrict(&self) -> Result<(), Failure> {
        let install = || match &self.seccomp {
            Some(profile) => profile.install().map_err(|error| Failure {
                kind: Kind::System,
                message: format!("cannot install the seccomp profile: {error}"),
            }),
            None => Ok(()),
        };
        if !self.no_new_privileges {
            install()?;
        }
        if let Some(capabilities) = &self.capabilities {
            drop_privileges(capabilities, &LinuxSyscall).map_err(|error| Failure {
                kind: Kind::System,
                message: format!("cannot drop capabilities: {error}"),
            })?;
        }
        if self.no_new_privileges { install() } else { Ok(()) }
    }

    fn tell(&self, failure: &Failure) {
        /// Of a message, so that a report is written and read in one piece, whatever is escaped.
        const MOST: usize = 512;

        let message = failure.message.chars().take(MOST).collect();
        let text = serde_json::to_vec(&Failure { kind: failure.kind, message });
        let text = text.unwrap_or_default();
        // SAFETY: the descriptor is open until the program is executed, the buffer valid. It fits
        // into an empty pipe; if the keeper has gone nobody is to be told.
        unsafe { libc::write(self.report, text.as_ptr().cast(), text.len()) };
    }
}

fn system(action: &str, errno: Errno) -> Failure {
    Failure { kind: Kind::System, message: format!("cannot {action}: {}", errno.desc()) }
}

/// Has the kernel kill this process when its keeper dies, however that does.
fn die_with_keeper(report: RawFd) -> Result<(), Errno> {
    // SAFETY: sets a number.
    Errno::result(unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) })?;
    // It may have died before.
    // SAFETY: the descriptor is open until the program is executed.
    let report = unsafe { BorrowedFd::borrow_raw(report) };
    let mut polled = [PollFd::new(report, PollFlags::empty())];
    poll(&mut polled, PollTimeout::ZERO)?;
    let gone = polled[0].revents().is_some_and(|events| events.contains(PollFlags::POLLERR));
    if gone { Err(Errno::ESRCH) } else { Ok(()) }
}

/// Gives the streams to the user, who may want to open `/dev/stdout`. Not worth a word if not.
fn own_streams(spec: &Spec) {
    let Some(user) = spec.process().as_ref().map(|process| process.user()) else { return };
    for stream in 0..3 {
        // SAFETY: a zeroed structure is a valid one; the kernel writes it.
        let mut stat: libc::stat = unsafe { std::mem::zeroed() };
        // SAFETY: the structure is valid.
        let known = unsafe { libc::fstat(stream, &raw mut stat) } == 0;
        // /dev/null is everybody's.
        let null = libc::makedev(1, 3);
        if known && stat.st_rdev != null && stat.st_uid != user.uid() {
            // SAFETY: numbers only.
            unsafe { libc::fchown(stream, user.uid(), u32::MAX) };
        }
    }
}

fn set_size(rows: u16, cols: u16) {
    let size = libc::winsize { ws_row: rows, ws_col: cols, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: the kernel only reads the structure.
    unsafe { libc::ioctl(0, libc::TIOCSWINSZ, &raw const size) };
}

fn variable<'a>(spec: &'a Spec, name: &str) -> Option<&'a str> {
    let env = spec.process().as_ref()?.env().as_ref()?;
    // The last of that name counts.
    env.iter().rev().find_map(|line| line.strip_prefix(name)?.strip_prefix('='))
}

/// The program's path, as `execvp` finds it, checked as the user that it will run as.
fn find_program(spec: &Spec) -> Result<PathBuf, Failure> {
    let args = spec.process().as_ref().and_then(|process| process.args().as_ref());
    let name = args.and_then(|args| args.first()).map_or("", String::as_str);
    if name.contains('/') {
        return check_program(Path::new(name))
            .map(|()| name.into())
            .map_err(|errno| not_executed(name, errno));
    }
    let path = variable(spec, "PATH").unwrap_or("/bin:/usr/bin");
    let mut worst = None;
    for folder in path.split(':') {
        // An empty one is the current.
        let candidate = Path::new(if folder.is_empty() { "." } else { folder }).join(name);
        match check_program(&candidate) {
            Ok(()) => return Ok(candidate),
            Err(Errno::EACCES) => worst = Some(Errno::EACCES),
            Err(_) => {}
        }
    }
    Err(worst.map_or_else(
        || Failure {
            kind: Kind::NotFound,
            message: format!("exec: {name:?}: executable file not found in $PATH"),
        },
        |errno| not_executed(name, errno),
    ))
}

fn check_program(path: &Path) -> Result<(), Errno> {
    let metadata = std::fs::metadata(path)
        .map_err(|error| Errno::from_raw(error.raw_os_error().unwrap_or(libc::EIO)))?;
    if metadata.is_dir() {
        return Err(Errno::EACCES);
    }
    access(path, AccessFlags::X_OK)
}

fn not_executed(name: &str, errno: Errno) -> Failure {
    let kind = match errno {
        Errno::ENOENT | Errno::ENOTDIR => Kind::NotFound,
        _ => Kind::NotExecutable,
    };
    Failure { kind, message: format!("exec: {name:?}: {}", errno.desc().to_lowercase()) }
}

/// Returns only if it fails.
fn execute(program: &Path, spec: &Spec) -> Failure {
    let name = program.display().to_string();
    let args = spec.process().as_ref().and_then(|process| process.args().as_ref());
    let words = args.into_iter().flatten().map(|word| CString::new(word.as_str()));
    let words: Result<Vec<_>, _> = words.collect();
    let path = CString::new(name.as_str());
    let (Ok(words), Ok(path)) = (words, path) else {
        return Failure {
            kind: Kind::Invalid,
            message: format!("exec: {name:?}: a NUL in a word"),
        };
    };
    // Rust ignores it, and programs inherit that.
    // SAFETY: the default needs no handler.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
    let Err(errno) = nix::unistd::execv(&path, &words);
    not_executed(&name, errno)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn find(args: &[&str], env: &[&str]) -> Result<PathBuf, Failure> {
        let process =
            json!({ "args": args, "env": env, "cwd": "/", "user": { "uid": 0, "gid": 0 } });
        let spec = json!({ "ociVersion": "1.2.0", "process": process });
        find_program(&serde_json::from_value(spec).unwrap())
    }

    #[test]
    fn programs_are_found_in_the_containers_path() {
        assert_eq!(find(&["sh"], &["PATH=/nosuch:/bin"]), Ok("/bin/sh".into()));
        assert_eq!(find(&["/bin/sh"], &[]), Ok("/bin/sh".into()));
        assert_eq!(find(&["sh"], &["PATH=/bin", "PATH=/nosuch"]).unwrap_err().exit_code(), 127);
    }

    #[test]
    fn what_cannot_be_executed_is_told_as_people_know_it() {
        let missing = find(&["nosuch"], &["PATH=/bin"]).unwrap_err();
        assert_eq!(missing.message, "exec: \"nosuch\": executable file not found in $PATH");
        assert_eq!(missing.kind, Kind::NotFound);
        let missing = find(&["/bin/nosuch"], &[]).unwrap_err();
        assert_eq!(missing.message, "exec: \"/bin/nosuch\": no such file or directory");
        let data = find(&["/etc/passwd"], &[]).unwrap_err();
        assert_eq!(data.message, "exec: \"/etc/passwd\": permission denied");
        assert_eq!(data.kind, Kind::NotExecutable);
        assert_eq!(find(&["/etc"], &[]).unwrap_err().kind, Kind::NotExecutable);
    }
}
