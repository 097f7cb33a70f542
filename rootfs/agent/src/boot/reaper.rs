//! What PID 1 does for the rest of its life: reap orphans, and end the guest when it is told to or
//! when the agent has died.

use crate::log::Log;
use crate::power;
use guest_protocol::PowerOff;
use nix::errno::Errno;
use nix::sys::reboot::set_cad_enabled;
use nix::sys::signal::{SigSet, SigmaskHow, Signal, sigprocmask};
use nix::unistd::Pid;
use std::fmt;

/// The signals that PID 1 waits for, blocked so that none is lost before it does.
pub struct Signals {
    waited: SigSet,
    before: SigSet,
}

/// What ends the guest: `kill 1`, Ctrl-Alt-Del, a failing power supply, and busybox's `halt` and
/// `poweroff`.
const ENDING: [Signal; 5] =
    [Signal::SIGTERM, Signal::SIGINT, Signal::SIGPWR, Signal::SIGUSR1, Signal::SIGUSR2];

impl Signals {
    /// Blocks them.
    pub fn block() -> Self {
        let mut waited: SigSet = ENDING.into_iter().collect();
        waited.add(Signal::SIGCHLD);
        let mut before = SigSet::empty();
        let _ = sigprocmask(SigmaskHow::SIG_BLOCK, Some(&waited), Some(&mut before));
        // Ctrl-Alt-Del becomes a SIGINT instead of a reset.
        let _ = set_cad_enabled(false);
        Self { waited, before }
    }

    /// Unblocks them, for the agent.
    pub fn restore(&self) {
        let _ = sigprocmask(SigmaskHow::SIG_SETMASK, Some(&self.before), None);
    }

    /// Reaps until the end of the guest.
    pub fn reap(&self, agent: Pid, log: Log) -> ! {
        loop {
            match self.waited.wait() {
                Ok(Signal::SIGCHLD) => {
                    if let Some(status) = reap_all(agent) {
                        log.error(format_args!("agent (pid {agent}) {status}; powering off"));
                        break;
                    }
                }
                Ok(signal) => {
                    log.info(format_args!("got {signal}; powering off"));
                    break;
                }
                Err(_) => {}
            }
        }
        power::settle();
        power::off(PowerOff::Poweroff)
    }
}

/// How the agent ended.
struct Death(i32);

impl fmt::Display for Death {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match libc::WIFSIGNALED(self.0) {
            true => write!(f, "was killed by signal {}", libc::WTERMSIG(self.0)),
            false => write!(f, "exited with {}", libc::WEXITSTATUS(self.0)),
        }
    }
}

/// Reaps everything that has exited; returns how the agent did, if it was among it.
fn reap_all(agent: Pid) -> Option<Death> {
    let mut death = None;
    loop {
        let mut status = 0;
        // SAFETY: the status is the kernel's to write.
        let pid = unsafe { libc::waitpid(-1, &raw mut status, libc::WNOHANG) };
        match Errno::result(pid) {
            Ok(0) | Err(Errno::ECHILD) => return death,
            Ok(pid) if pid == agent.as_raw() => death = Some(Death(status)),
            Ok(_) | Err(Errno::EINTR) => {}
            Err(_) => return death,
        }
    }
}
