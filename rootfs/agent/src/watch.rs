//! Waiting for several descriptors at once. Not nix's, which does not know `POLLRDHUP`.

use nix::errno::Errno;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

/// What to wait for, or what happened: `POLL*`.
pub type Events = libc::c_short;

/// Something to read, be it the end.
pub const READABLE: Events = libc::POLLIN | libc::POLLHUP | libc::POLLERR | libc::POLLNVAL;

/// Room to write.
pub const WRITABLE: Events = libc::POLLOUT;

/// The other side of a pipe or terminal is closed.
pub const CLOSED: Events = libc::POLLHUP | libc::POLLERR | libc::POLLNVAL;

/// The host is gone. Half a goodbye is a whole one: vsock does not tell them apart, and the only
/// stream on which the host may end its sending side, stdin, is read to its end instead.
pub const GONE: Events = libc::POLLRDHUP | CLOSED;

/// Waits until one of the events happens, at most for `timeout`; `None` is for ever. An event is
/// given for each descriptor; those that are `None` are not looked at.
pub fn wait<const N: usize>(
    watched: [(Option<BorrowedFd<'_>>, Events); N],
    timeout: Option<Duration>,
) -> Result<[Events; N], Errno> {
    let mut fds = watched.map(|(fd, events)| libc::pollfd {
        fd: fd.map_or(-1, |fd| fd.as_raw_fd()),
        events,
        revents: 0,
    });
    let timeout =
        timeout.map_or(-1, |timeout| i32::try_from(timeout.as_millis()).unwrap_or(i32::MAX));
    loop {
        // SAFETY: the array is valid, of that length, and the kernel's to write.
        let result = unsafe { libc::poll(fds.as_mut_ptr(), N as libc::nfds_t, timeout) };
        match Errno::result(result) {
            Err(Errno::EINTR) => {}
            result => return result.map(|_| fds.map(|fd| fd.revents)),
        }
    }
}
