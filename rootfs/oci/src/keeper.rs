//! Keeps a process of a container: stands in for it towards the agent, which knows the keeper
//! only, until it ends. One thread, since libcontainer clones it.

use crate::error::{Error, Failure, Kind};
use crate::record::ProcessName;
use crate::terminal::Pump;
use nix::errno::Errno;
use nix::sys::signal::{SigSet, SigmaskHow, Signal, pthread_sigmask};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{Pid, pipe2};
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// What is passed on to the process; `SIGWINCH` only by its effect.
const FORWARDED: [Signal; 6] = [
    Signal::SIGHUP,
    Signal::SIGINT,
    Signal::SIGQUIT,
    Signal::SIGTERM,
    Signal::SIGUSR1,
    Signal::SIGUSR2,
];

/// Where the executor tells of its failure, see [`LastSteps`](crate::executor::LastSteps).
pub struct Report {
    read: File,
    write: Option<OwnedFd>,
}

impl Report {
    /// A new one.
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn new() -> Result<Self, Error> {
        let flags = nix::fcntl::OFlag::O_CLOEXEC | nix::fcntl::OFlag::O_NONBLOCK;
        let (read, write) = pipe2(flags).map_err(Error::system("make a pipe"))?;
        Ok(Self { read: read.into(), write: Some(write) })
    }

    /// The executor's end.
    pub fn executors_end(&self) -> RawFd {
        self.write.as_ref().map_or(-1, AsRawFd::as_raw_fd)
    }

    /// Closes the executor's end here, once it has been inherited.
    pub fn inherited(&mut self) {
        self.write = None;
    }

    /// What has been told; `Some(None)` if nothing ever will be.
    pub fn look(&mut self) -> Option<Option<Failure>> {
        let mut text = [0; 4096];
        match self.read.read(&mut text) {
            Err(_) => None,
            Ok(0) => Some(None),
            Ok(count) => Some(Some(serde_json::from_slice(&text[..count]).unwrap_or_else(|_| {
                let message = "the program was not executed, for unknown reasons".into();
                Failure { kind: Kind::System, message }
            }))),
        }
    }
}

/// How a kept process ended.
pub struct Ended {
    /// As a shell tells it.
    pub status: u8,
    /// Why its program did not run.
    pub failure: Option<Failure>,
}

/// A process to keep, a child of this one.
pub struct Keeper {
    process: ProcessName,
    pidfd: OwnedFd,
    signals: SignalFd,
    report: Option<Report>,
    pump: Option<Pump>,
}

impl Keeper {
    /// Takes charge. `terminal` is the master of the process's, if it has one; else it has this
    /// process's streams, which are let go of.
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn new(
        process: ProcessName,
        report: Report,
        terminal: Option<OwnedFd>,
    ) -> Result<Self, Error> {
        let pidfd = open_pidfd(process).map_err(Error::system("watch the process"))?;
        let mut set = SigSet::empty();
        FORWARDED.into_iter().for_each(|signal| set.add(signal));
        set.add(Signal::SIGWINCH);
        pthread_sigmask(SigmaskHow::SIG_BLOCK, Some(&set), None)
            .map_err(Error::system("block signals"))?;
        let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
        let signals = SignalFd::with_flags(&set, flags).map_err(Error::system("await signals"))?;
        let pump = match terminal {
            Some(master) => Some(Pump::new(master).map_err(Error::system("use the terminal"))?),
            None => {
                let_go_of_streams().map_err(Error::system("let go of the streams"))?;
                None
            }
        };
        // The container's score was set on this process, to be inherited. This one is to go last.
        let _ = fs::write("/proc/self/oom_score_adj", "-999");
        Ok(Self { process, pidfd, signals, report: Some(report), pump })
    }

    /// Waits for its end. `running` is called when its program runs.
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn keep(mut self, mut running: impl FnMut()) -> Result<Ended, Error> {
        let mut failure = None;
        loop {
            let mut polled =
                vec![readable(self.signals.as_raw_fd()), readable(self.pidfd.as_raw_fd())];
            polled
                .push(readable(self.report.as_ref().map_or(-1, |report| report.read.as_raw_fd())));
            if let Some(pump) = &self.pump {
                polled.extend(pump.wishes());
            }
            poll(&mut polled).map_err(Error::system("wait"))?;
            if let Some(told) = self.report.as_mut().and_then(Report::look) {
                self.report = None;
                match told {
                    None => running(),
                    told => failure = told,
                }
            }
            self.pass_on_signals();
            if let Some(pump) = &mut self.pump {
                pump.turn(&polled[3..]);
            }
            if polled[1].revents != 0 {
                break;
            }
        }
        if let Some(pump) = &mut self.pump {
            pump.finish();
        }
        let status = self.reap()?;
        Ok(Ended { status: failure.as_ref().map_or(status, Failure::exit_code), failure })
    }

    fn pass_on_signals(&mut self) {
        while let Ok(Some(signal)) = self.signals.read_signal() {
            let number = signal.ssi_signo.cast_signed();
            if number == libc::SIGWINCH {
                if let Some(pump) = &self.pump {
                    pump.resize();
                }
            } else {
                // It may have ended by now.
                let _ = signal_pidfd(&self.pidfd, number);
            }
        }
    }

    fn reap(&self) -> Result<u8, Error> {
        let pid = Pid::from_raw(self.process.pid);
        loop {
            match waitpid(pid, Some(WaitPidFlag::__WALL)) {
                Err(Errno::EINTR) => {}
                Ok(WaitStatus::Exited(_, code)) => {
                    return Ok(u8::try_from(code & 0xff).unwrap_or(255));
                }
                Ok(WaitStatus::Signaled(_, signal, _)) => return Ok(128 + signal as u8),
                Ok(_) => {}
                Err(errno) => return Err(Error::system("wait for the process")(errno)),
            }
        }
    }
}

fn readable(fd: RawFd) -> libc::pollfd {
    libc::pollfd { fd, events: libc::POLLIN, revents: 0 }
}

/// `poll` without an end; negative descriptors are passed over.
fn poll(polled: &mut [libc::pollfd]) -> io::Result<()> {
    loop {
        let count = libc::nfds_t::try_from(polled.len()).unwrap_or(0);
        // SAFETY: the slice is as long as it says.
        if unsafe { libc::poll(polled.as_mut_ptr(), count, -1) } >= 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.raw_os_error() != Some(libc::EINTR) {
            return Err(error);
        }
    }
}

/// So that their ends are seen when the program closes its own.
fn let_go_of_streams() -> Result<(), Errno> {
    let null = File::options().read(true).write(true).open("/dev/null");
    let null = null.map_err(|error| Errno::from_raw(error.raw_os_error().unwrap_or(libc::EIO)))?;
    for stream in 0..3 {
        // SAFETY: numbers; the standard streams are nobody's in this program.
        Errno::result(unsafe { libc::dup2(null.as_raw_fd(), stream) })?;
    }
    Ok(())
}

/// A handle that stays with the very process, or `ESRCH`.
///
/// # Errors
/// The kernel's.
pub fn open_pidfd(process: ProcessName) -> io::Result<OwnedFd> {
    // SAFETY: numbers.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, process.pid, 0) };
    let fd = RawFd::try_from(Errno::result(fd)?).map_err(io::Error::other)?;
    // SAFETY: it has just been opened, for nobody else.
    let pidfd = unsafe { OwnedFd::from_raw_fd(fd) };
    // The pid may have become another's before it was opened, but not after.
    match ProcessName::of(process.pid) {
        Ok(name) if name == process => Ok(pidfd),
        _ => Err(io::Error::from_raw_os_error(libc::ESRCH)),
    }
}

/// Sends a signal, or with 0 none, to what is behind the handle.
///
/// # Errors
/// The kernel's.
pub fn signal_pidfd(pidfd: &OwnedFd, signal: i32) -> io::Result<()> {
    let info = std::ptr::null::<libc::siginfo_t>();
    // SAFETY: numbers, and no information for the receiver.
    let sent =
        unsafe { libc::syscall(libc::SYS_pidfd_send_signal, pidfd.as_raw_fd(), signal, info, 0) };
    Errno::result(sent).map(drop).map_err(Into::into)
}
