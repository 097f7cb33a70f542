//! A terminal for `cube-vmm`.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;

use nix::pty::{Winsize, openpty};
use nix::sys::termios::{LocalFlags, tcgetattr};

use crate::call::{Call, Captured, Ended, Running};

/// The master side of a terminal that a call is attached to.
pub struct Terminal {
    master: File,
    running: Running,
}

fn winsize(rows: u16, columns: u16) -> Winsize {
    Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 }
}

impl Terminal {
    /// Makes a call whose standard streams are all a terminal of this size, which is also the
    /// controlling one.
    pub fn call(call: Call<'_>, rows: u16, columns: u16) -> Self {
        let pty = openpty(&winsize(rows, columns), None).unwrap();
        let slave = || pty.slave.try_clone().unwrap();
        let mut command = call.command();
        command.stdin(slave()).stdout(slave()).stderr(slave());
        let control = || {
            nix::unistd::setsid()?;
            // SAFETY: plain integers are passed; standard input is the terminal.
            let taken = unsafe { libc::ioctl(0, libc::TIOCSCTTY, 0) };
            if taken == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
        };
        // SAFETY: between fork and exec the hook makes two system calls and touches no memory.
        unsafe { command.pre_exec(control) };
        let output: OwnedFd = pty.master.try_clone().unwrap();
        let running = Running::attached(command, Captured::of(File::from(output)));
        Self { master: pty.master.into(), running }
    }

    /// What has been written to the terminal so far, and is still to come.
    pub fn screen(&self) -> &Captured {
        &self.running.stdout
    }

    /// Types something.
    pub fn type_in(&mut self, keys: &[u8]) {
        self.master.write_all(keys).unwrap();
    }

    /// Gives it another size, of which the kernel tells the foreground processes.
    pub fn resize(&self, rows: u16, columns: u16) {
        let size = winsize(rows, columns);
        // SAFETY: the descriptor is open, and the ioctl reads a structure that lives.
        let set =
            unsafe { libc::ioctl(self.master.as_raw_fd(), libc::TIOCSWINSZ, &raw const size) };
        assert_eq!(set, 0, "{}", io::Error::last_os_error());
    }

    /// Whether the terminal echoes what is typed: true unless somebody put it in raw mode.
    pub fn echoes(&self) -> bool {
        echoes(&self.master)
    }

    /// Waits for the end of the call.
    pub fn end(self) -> Ended {
        self.running.end()
    }

    /// Waits for the end of the call, and tells whether the terminal echoes then.
    pub fn end_with_echo(self) -> (Ended, bool) {
        let ended = self.running.end();
        (ended, echoes(&self.master))
    }
}

fn echoes(terminal: &File) -> bool {
    tcgetattr(terminal).unwrap().local_flags.contains(LocalFlags::ECHO)
}
