//! Starts a process: everything is prepared, then fork, and the parent learns through a pipe that
//! closes on exec whether the program runs.

use crate::child::{self, Plan, Report, Step};
use crate::process::{self, Processes, Slot, Slots, Started};
use crate::program::{self, Program};
use crate::refusal::Refusal;
use crate::terminal;
use guest_protocol::{Spawn, Spawned};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl, open};
use nix::sys::stat::Mode;
use nix::unistd::{ForkResult, Gid, Pid, Uid, fchown, fork, geteuid, pipe2};
use std::ffi::CString;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, OwnedFd};

/// Starts what `spawn` says and takes it in.
pub fn spawn(processes: &Processes, spawn: &Spawn) -> Result<Spawned, Refusal> {
    processes.check_room()?;
    let account = program::account(spawn.uid.unwrap_or(0));
    let program = Program::new(spawn, &account.home)?;
    let cwd = spawn.cwd.as_deref().unwrap_or("/");
    let user = User::new(spawn, account.gid);
    let stdio = Stdio::new(spawn, user.as_ref())?;
    let pid = start(spawn, &program, user.as_ref(), cwd, &stdio.theirs)?;
    let pidfd = process::watch(pid).map_err(|errno| {
        process::destroy(pid);
        Refusal::System { action: "watch the process", errno }
    })?;
    let started = Started { pid, pidfd, terminal: stdio.terminal, slots: stdio.slots };
    Ok(Spawned { process: processes.add(started, spawn).id, pid: pid.as_raw() })
}

/// Whom the process runs as.
struct User<'a> {
    uid: u32,
    gid: u32,
    groups: &'a [u32],
}

impl<'a> User<'a> {
    /// `None` where there is nothing to change, as for an agent without privileges, in tests.
    fn new(spawn: &'a Spawn, gid: u32) -> Option<Self> {
        let wanted = spawn.uid.is_some() || spawn.gid.is_some() || !spawn.groups.is_empty();
        (wanted || geteuid().is_root()).then(|| Self {
            uid: spawn.uid.unwrap_or(0),
            gid: spawn.gid.unwrap_or(gid),
            groups: &spawn.groups,
        })
    }
}

/// Both ends of the standard streams.
struct Stdio {
    /// The process's.
    theirs: [OwnedFd; 3],
    /// The agent's.
    slots: Slots,
    /// The agent's side of the terminal.
    terminal: Option<OwnedFd>,
}

impl Stdio {
    fn new(spawn: &Spawn, user: Option<&User<'_>>) -> Result<Self, Refusal> {
        let stdio = match spawn.tty {
            Some(size) => {
                let (master, slave) =
                    terminal::open(size).map_err(Refusal::system("make a terminal"))?;
                Self::on_terminal(spawn, master, slave)
            }
            None => Self::on_pipes(spawn),
        };
        let stdio = stdio.map_err(Refusal::io("make the standard streams"))?;
        if let Some(user) = user.filter(|user| user.uid != 0) {
            // So that it can open /dev/stdout and the like anew.
            for fd in &stdio.theirs {
                let _ = fchown(fd, Some(Uid::from_raw(user.uid)), None::<Gid>);
            }
        }
        Ok(stdio)
    }

    fn on_terminal(spawn: &Spawn, master: OwnedFd, slave: OwnedFd) -> io::Result<Self> {
        let end = |wanted| -> io::Result<Slot> {
            Ok(if wanted { Slot::Waiting(master.try_clone()?.into()) } else { Slot::None })
        };
        Ok(Self {
            slots: Slots {
                stdin: end(spawn.stdin)?,
                stdout: end(spawn.stdout)?,
                stderr: Slot::None,
            },
            theirs: [slave.try_clone()?, slave.try_clone()?, slave],
            terminal: Some(master),
        })
    }

    fn on_pipes(spawn: &Spawn) -> io::Result<Self> {
        let input = || -> Result<_, Errno> {
            if !spawn.stdin {
                return Ok((null(OFlag::O_RDONLY)?, Slot::None));
            }
            let (theirs, ours) = pipe2(OFlag::O_CLOEXEC)?;
            fcntl(&ours, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
            Ok((theirs, Slot::Waiting(ours.into())))
        };
        let output = |wanted: bool| -> Result<_, Errno> {
            if !wanted {
                return Ok((null(OFlag::O_WRONLY)?, Slot::None));
            }
            let (ours, theirs) = pipe2(OFlag::O_CLOEXEC)?;
            fcntl(&ours, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
            Ok((theirs, Slot::Waiting(ours.into())))
        };
        let ((stdin, stdin_slot), (stdout, stdout_slot), (stderr, stderr_slot)) =
            (input()?, output(spawn.stdout)?, output(spawn.stderr)?);
        Ok(Self {
            theirs: [stdin, stdout, stderr],
            slots: Slots { stdin: stdin_slot, stdout: stdout_slot, stderr: stderr_slot },
            terminal: None,
        })
    }
}

fn null(flags: OFlag) -> Result<OwnedFd, Errno> {
    open("/dev/null", flags | OFlag::O_CLOEXEC, Mode::empty())
}

/// Forks, and returns once the program runs or has failed to.
fn start(
    spawn: &Spawn,
    program: &Program,
    user: Option<&User<'_>>,
    cwd: &str,
    stdio: &[OwnedFd; 3],
) -> Result<Pid, Refusal> {
    let directory = CString::new(cwd);
    let directory = directory.map_err(|_| Refusal::Invalid("the directory has a NUL in it"))?;
    let argv = Program::pointers(&program.argv);
    let envp = Program::pointers(&program.envp);
    let (reports, report) =
        pipe2(OFlag::O_CLOEXEC).map_err(Refusal::system("make a pipe for the process"))?;
    let plan = Plan {
        stdio: [stdio[0].as_raw_fd(), stdio[1].as_raw_fd(), stdio[2].as_raw_fd()],
        terminal: spawn.tty.is_some(),
        user: user.map(|user| (user.uid, user.gid, user.groups)),
        cwd: &directory,
        candidates: &program.candidates,
        argv: &argv,
        envp: &envp,
        report: report.as_raw_fd(),
    };
    // SAFETY: the child does only what `child::run` does, which is made for it.
    let pid = match unsafe { fork() }.map_err(Refusal::system("fork"))? {
        // SAFETY: this is the child; the pointers are those of vectors that live here.
        ForkResult::Child => unsafe { child::run(&plan) },
        ForkResult::Parent { child } => child,
    };
    drop(report);
    let mut bytes = Report::default();
    if File::from(reports).read_exact(&mut bytes).is_err() {
        return Ok(pid);
    }
    process::discard(pid);
    Err(refusal(spawn, program, cwd, bytes))
}

/// What a child's report means to the host.
fn refusal(spawn: &Spawn, program: &Program, cwd: &str, report: Report) -> Refusal {
    let (step, errno) = child::parse_report(report).unwrap_or((Step::Execute, Errno::EIO));
    let name = spawn.argv.first().cloned().unwrap_or_default();
    match (step, &program.searched) {
        (Step::Execute, Some(path)) if errno == Errno::ENOENT => {
            Refusal::NotInPath { program: name, path: path.clone() }
        }
        (Step::Execute, _) => Refusal::Execute { program: name, errno },
        (Step::Directory, _) => Refusal::Directory { cwd: cwd.to_owned(), errno },
        (Step::Session, _) => Refusal::System { action: "make a session", errno },
        (Step::Terminal, _) => Refusal::System { action: "take the terminal", errno },
        (Step::Stdio, _) => Refusal::System { action: "set the standard streams", errno },
        (Step::User, _) => Refusal::System { action: "become the user", errno },
    }
}
