//! TAPs, as the kernel makes them.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};

use crate::error::{Result, io};

/// What their names begin with; a number follows.
const PREFIX: &str = "cube";

/// Makes one in this thread's network namespace, of the kind that a VMM wants.
pub fn open(number: usize) -> Result<OwnedFd> {
    let name = format!("{PREFIX}{number}");
    let failed = || format!("make the TAP {name}");
    let tun = File::options().read(true).write(true).open("/dev/net/tun");
    let tun = tun.map_err(io("open /dev/net/tun"))?;
    // SAFETY: zeroes are a valid value of this structure of numbers.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes().take(libc::IFNAMSIZ - 1)) {
        *to = from.cast_signed();
    }
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    request.ifr_ifru.ifru_flags = libc::c_short::try_from(flags).unwrap_or_default();
    // SAFETY: the request is a valid structure of the kind that this call reads and writes.
    let made = unsafe { libc::ioctl(tun.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
    if made < 0 {
        return Err(io(failed())(std::io::Error::last_os_error()));
    }
    Ok(tun.into())
}

/// Whether an interface of this name is one.
pub fn is_ours(name: &str) -> bool {
    let number = name.strip_prefix(PREFIX).filter(|rest| !rest.is_empty());
    number.is_some_and(|rest| rest.bytes().all(|byte| byte.is_ascii_digit()))
}

/// The number of a TAP's interface; 0, which is none, if it cannot be found.
pub fn interface(tap: &OwnedFd) -> u32 {
    // SAFETY: zeroes are a valid value of this structure of numbers.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // SAFETY: the request is a valid structure of the kind that this call writes.
    unsafe { libc::ioctl(tap.as_raw_fd(), libc::TUNGETIFF, &raw mut request) };
    // SAFETY: the name is an array that ends in a NUL, as the kernel and the zeroes above see to.
    unsafe { libc::if_nametoindex(request.ifr_name.as_ptr()) }
}
