//! Pseudo terminals.

use guest_protocol::WindowSize;
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::pty::{PtyMaster, grantpt, posix_openpt, unlockpt};
use nix::sys::termios::{LocalFlags, SpecialCharacterIndices, tcgetattr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Both sides of a new terminal: the agent's, which does not block, and the process's.
pub fn open(size: WindowSize) -> Result<(OwnedFd, OwnedFd), Errno> {
    let flags = OFlag::O_RDWR | OFlag::O_NOCTTY | OFlag::O_CLOEXEC;
    let master: PtyMaster = posix_openpt(flags)?;
    grantpt(&master)?;
    unlockpt(&master)?;
    // By descriptor, not by a name that depends on where devpts is mounted.
    // SAFETY: takes a number; the result is a new descriptor or -1.
    let slave = unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCGPTPEER, flags.bits()) };
    let slave = Errno::result(slave)?;
    // SAFETY: it was just made, and belongs to nobody else.
    let slave = unsafe { OwnedFd::from_raw_fd(slave) };
    let master: OwnedFd = master.into();
    resize(master.as_fd(), size)?;
    fcntl(&master, FcntlArg::F_SETFL(OFlag::O_RDWR | OFlag::O_NONBLOCK))?;
    Ok((master, slave))
}

/// Sets the size; the foreground group of the terminal gets a SIGWINCH.
pub fn resize(master: BorrowedFd<'_>, size: WindowSize) -> Result<(), Errno> {
    let size = libc::winsize { ws_row: size.rows, ws_col: size.cols, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: the structure is valid, and the kernel only reads it.
    let result = unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCSWINSZ, &raw const size) };
    Errno::result(result).map(drop)
}

/// What stands for the end of input: the end of file character in line mode, twice if the first
/// would only end a line that has been begun; nothing in raw mode, which has no such thing.
pub fn end_of_input(master: BorrowedFd<'_>, last: Option<u8>) -> Vec<u8> {
    let Ok(settings) = tcgetattr(master) else { return Vec::new() };
    if !settings.local_flags.contains(LocalFlags::ICANON) {
        return Vec::new();
    }
    let end = settings.control_chars[SpecialCharacterIndices::VEOF as usize];
    let in_line = last.is_some_and(|last| !matches!(last, b'\n' | b'\r'));
    vec![end; if in_line { 2 } else { 1 }]
}
