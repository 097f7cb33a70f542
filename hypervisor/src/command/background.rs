//! A VM that stays in the background: the caller returns as soon as its guest is ready.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;

use anyhow::Context;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, fork, pipe2, setsid};

use crate::outcome::EXIT_SETUP;
use crate::signals;

/// The VM's end of a division.
pub struct Background(File);

/// The caller's end of it.
pub struct Waiting {
    vm: Pid,
    news: File,
}

fn fall_silent() -> std::io::Result<()> {
    let nowhere = File::options().read(true).write(true).open("/dev/null")?;
    nix::unistd::dup2_stdin(&nowhere)?;
    nix::unistd::dup2_stdout(&nowhere)?;
    nix::unistd::dup2_stderr(&nowhere)?;
    Ok(())
}

/// Which of both processes this is.
pub enum Role {
    /// The one that was called, and returns.
    Caller(Waiting),
    /// The one that holds the VM.
    Vm(Background),
}

impl Background {
    /// Makes two processes of this one, which must have no threads.
    pub fn divide() -> anyhow::Result<Role> {
        let (news, teller): (OwnedFd, OwnedFd) =
            pipe2(nix::fcntl::OFlag::O_CLOEXEC).context("no pipe")?;
        // SAFETY: there is only this one thread, so the other process has everything that it needs.
        match unsafe { fork() }.context("no process for the VM")? {
            ForkResult::Parent { child } => {
                drop(teller);
                Ok(Role::Caller(Waiting { vm: child, news: news.into() }))
            }
            ForkResult::Child => {
                drop(news);
                // A session of its own: a terminal's Ctrl-C is not for it.
                setsid().context("no session for the VM")?;
                Ok(Role::Vm(Self(teller.into())))
            }
        }
    }

    /// Lets the caller return; false if it has gone. From here on the VM says nothing, since whoever
    /// reads what the caller has said waits for the end of that.
    pub fn ready(mut self) -> bool {
        if let Err(error) = fall_silent() {
            tracing::warn!(%error, "standard streams stay open");
        }
        self.0.write_all(b"r").is_ok()
    }
}

impl Waiting {
    /// Waits until the VM is ready, or has ended before it was, which its exit code tells.
    pub fn wait(mut self) -> anyhow::Result<u8> {
        // Whoever ends this process while it waits ends the VM, which finds nobody to be ready for.
        signals::unblock()?;
        let mut news = [0];
        if let Ok(1) = self.news.read(&mut news) {
            return Ok(0);
        }
        match waitpid(self.vm, None).context("the VM is lost")? {
            // An end in order is none for who waits for a guest that is ready.
            WaitStatus::Exited(_, 0) => anyhow::bail!("the guest has ended before it was ready"),
            WaitStatus::Exited(_, code) => Ok(u8::try_from(code).unwrap_or(EXIT_SETUP)),
            status => anyhow::bail!("the VM has died: {status:?}"),
        }
    }
}
