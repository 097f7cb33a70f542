//! The terminal that a command in the guest is attached to.

use std::io::{self, IsTerminal};
use std::os::fd::AsFd;

use guest_protocol::WindowSize;
use nix::sys::termios::{SetArg, Termios, cfmakeraw, tcgetattr, tcsetattr};

/// A terminal in raw mode; restored when dropped.
#[derive(Debug)]
pub struct RawTerminal {
    before: Termios,
}

impl RawTerminal {
    /// Puts the terminal in raw mode, if standard input and output are one.
    pub fn enter() -> io::Result<Option<Self>> {
        if !io::stdin().is_terminal() || !io::stdout().is_terminal() {
            return Ok(None);
        }
        let before = tcgetattr(io::stdin())?;
        let mut raw = before.clone();
        cfmakeraw(&mut raw);
        tcsetattr(io::stdin(), SetArg::TCSANOW, &raw)?;
        Ok(Some(Self { before }))
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        // Nothing can be done for a terminal that has gone.
        let _ = tcsetattr(io::stdin(), SetArg::TCSADRAIN, &self.before);
    }
}

/// The size of the terminal on standard output.
pub fn window_size() -> WindowSize {
    let mut size = libc::winsize { ws_row: 0, ws_col: 0, ws_xpixel: 0, ws_ypixel: 0 };
    let stdout = io::stdout();
    let fd = std::os::fd::AsRawFd::as_raw_fd(&stdout.as_fd());
    // SAFETY: size is a valid place for the result of this ioctl.
    let got = unsafe { libc::ioctl(fd, libc::TIOCGWINSZ, &mut size) };
    if got != 0 || size.ws_row == 0 || size.ws_col == 0 {
        return WindowSize { rows: 24, cols: 80 };
    }
    WindowSize { rows: size.ws_row, cols: size.ws_col }
}
