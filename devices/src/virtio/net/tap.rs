//! One queue of a TAP interface of the host: an open `/dev/net/tun`.
//!
//! A TAP moves whole Ethernet frames, each after a header of [`HEADER_LEN`] bytes in the form of
//! virtio's (`Documentation/networking/tuntap.rst` of Linux). The calls here are those of the
//! interface's owner; all of them return at once.

mod holder;
mod open;

use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use crate::virtio::vectors::{Gather, Scatter};

/// Bytes of the header before each frame: that of virtio 1.x, whatever was negotiated.
pub const HEADER_LEN: usize = 12;

/// Why there is no TAP. Each says what to do about it.
#[derive(Debug, thiserror::Error)]
pub enum TapError {
    /// A name that no interface can have.
    #[error(
        "interface name {0:?} is not usable; use 1 to 15 characters other than '/', ':', '%' and \
         spaces"
    )]
    Name(String),
    /// No queue, or more than a card has.
    #[error("{0} queues were asked of one interface; use 1 to 8")]
    Queues(u16),
    /// The driver is not there, or not for us.
    #[error(
        "/dev/net/tun cannot be opened: {0}; load the driver (modprobe tun) and give this process \
         access to the file"
    )]
    NoDriver(#[source] io::Error),
    /// No permission for this interface.
    #[error(
        "interface {0} may not be used by this process; run it with CAP_NET_ADMIN, or prepare the \
         interface for its user: ip tuntap add {0} mode tap user NAME"
    )]
    Denied(String),
    /// Somebody else has it.
    #[error("interface {name} is in use by {holder}; stop that, or use another interface")]
    Busy {
        /// The interface.
        name: String,
        /// Who, as far as can be seen.
        holder: String,
    },
    /// An interface of this name exists and is of another kind.
    #[error(
        "interface {name} is {kind}, not a TAP; use another name, or remove it: ip link del {name}"
    )]
    NotTap {
        /// The interface.
        name: String,
        /// What it is.
        kind: &'static str,
    },
    /// The interface has a single queue and more were asked for.
    #[error(
        "interface {name} has one queue, {queues} were asked for; use queues=1, or make it anew: \
         ip tuntap add {name} mode tap multi_queue"
    )]
    SingleQueue {
        /// The interface.
        name: String,
        /// Queues that were asked for.
        queues: u16,
    },
    /// A descriptor that is not open.
    #[error("descriptor {0} is not open; pass one that is, without close-on-exec")]
    Closed(i32),
    /// A descriptor of something else.
    #[error("descriptor {fd} is not that of a TAP: {why}; open /dev/net/tun, then TUNSETIFF")]
    Foreign {
        /// The descriptor.
        fd: i32,
        /// What it is.
        why: &'static str,
    },
    /// A TAP that was attached in another way than we need.
    #[error("descriptor {fd} of interface {name} was attached {flag}; set that in TUNSETIFF")]
    Flags {
        /// The descriptor.
        fd: i32,
        /// The interface.
        name: String,
        /// What is wrong.
        flag: &'static str,
    },
    /// Another call failed.
    #[error("interface {name}: {what} failed: {source}")]
    Call {
        /// The interface.
        name: String,
        /// What was tried.
        what: &'static str,
        /// The reason.
        source: io::Error,
    },
}

/// What a TAP can be asked to leave to the guest (`TUN_F_…`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offloads(u32);

impl Offloads {
    /// Frames whose checksum is not finished.
    pub const CSUM: Self = Self(libc::TUN_F_CSUM);
    /// TCP over IPv4, larger than the MTU.
    pub const TSO4: Self = Self(libc::TUN_F_TSO4);
    /// TCP over IPv6, larger than the MTU.
    pub const TSO6: Self = Self(libc::TUN_F_TSO6);
    /// The same with congestion notification.
    pub const ECN: Self = Self(libc::TUN_F_TSO_ECN);
    /// UDP, to be fragmented. Linux accepts it and sends none since 4.14.
    pub const UFO: Self = Self(libc::TUN_F_UFO);

    /// None of them.
    pub const fn none() -> Self {
        Self(0)
    }

    /// Both.
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// True if all of `other` are in it.
    pub const fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

/// One queue of a TAP. Every call takes a shared reference and may come from any thread.
pub struct Tap {
    fd: OwnedFd,
    name: String,
    /// What the kernel can leave to the guest.
    offloads: Offloads,
    /// It can be one of several queues, and so be taken out and put back.
    multi_queue: bool,
    /// What a stand-in was asked for last.
    #[cfg(test)]
    stand_in: Option<std::sync::atomic::AtomicU32>,
}

/// What became of a frame that was to be read or written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moved {
    /// It was moved: bytes, header included.
    Frame(usize),
    /// Not now: the queue is empty, or full.
    NotNow,
    /// It was lost; the interface goes on.
    Lost,
    /// It was lost: the interface is down, which may change.
    Down,
    /// The interface is gone.
    Gone,
}

impl Tap {
    /// Its name on the host.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What can be asked of it with [`Tap::set_offloads`].
    pub fn offloads(&self) -> Offloads {
        self.offloads
    }

    /// From now on the guest gets frames with `offloads`. Counts for all queues of the interface.
    pub fn set_offloads(&self, offloads: Offloads) -> io::Result<()> {
        #[cfg(test)]
        if let Some(asked) = &self.stand_in {
            asked.store(offloads.0, std::sync::atomic::Ordering::SeqCst);
            return Ok(());
        }
        self.number(libc::TUNSETOFFLOAD, libc::c_ulong::from(offloads.0))
    }

    /// Takes this queue out of those that the host spreads frames over, or puts it back. Does
    /// nothing on an interface with a single queue.
    pub fn set_attached(&self, attached: bool) -> io::Result<()> {
        if !self.multi_queue {
            return Ok(());
        }
        let flag = if attached { libc::IFF_ATTACH_QUEUE } else { libc::IFF_DETACH_QUEUE };
        let mut request = open::request("");
        request.ifr_ifru.ifru_flags = flag as libc::c_short;
        match open::call(&self.fd, libc::TUNSETQUEUE, &mut request) {
            // It is as it should be already.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(()),
            result => result,
        }
    }

    /// True if the interface is gone; false if it merely has nothing to say.
    pub fn is_gone(&self) -> bool {
        self.poll(libc::POLLOUT) & (libc::POLLERR | libc::POLLHUP | libc::POLLNVAL) != 0
    }

    /// True if it would take a frame now, which it does not while it is down.
    pub fn is_writable(&self) -> bool {
        self.poll(libc::POLLOUT) & libc::POLLOUT != 0
    }

    /// True if there is a frame to be read, or the interface is gone.
    pub fn has_frame(&self) -> bool {
        self.poll(libc::POLLIN) != 0
    }

    fn poll(&self, events: libc::c_short) -> libc::c_short {
        let mut poll = libc::pollfd { fd: self.fd.as_raw_fd(), events, revents: 0 };
        // SAFETY: one pollfd that outlives the call, with a descriptor that self owns.
        let found = unsafe { libc::poll(&mut poll, 1, 0) };
        if found == 1 { poll.revents } else { 0 }
    }

    /// Reads the next frame. One that is longer than `into` is cut without a word.
    pub fn receive(&self, into: &mut Scatter<'_>) -> Moved {
        let (fd, vectors) = (self.fd.as_raw_fd(), into.vectors());
        let count = libc::c_int::try_from(vectors.len()).unwrap_or(libc::c_int::MAX);
        // SAFETY: the descriptor is open. By the promise of Scatter each vector is memory that may
        // be written for as long as it is borrowed, and to which nobody here holds a reference.
        let moved = unsafe { libc::readv(fd, vectors.as_ptr(), count) };
        match result(moved) {
            // A TAP has no end; other descriptors in its place have.
            Ok(0) => Moved::Gone,
            Ok(len) => {
                into.written(len);
                Moved::Frame(len)
            }
            Err(error) => match error.raw_os_error() {
                Some(libc::EAGAIN | libc::EINTR) => Moved::NotNow,
                Some(libc::ENOMEM | libc::ENOBUFS | libc::EFAULT | libc::EINVAL) => {
                    // A part may have been.
                    into.written(usize::MAX);
                    Moved::Lost
                }
                _ => self.gone("read", &error),
            },
        }
    }

    /// Writes a frame: all of it, or nothing.
    pub fn send(&self, from: &Gather<'_>) -> Moved {
        let (fd, vectors) = (self.fd.as_raw_fd(), from.vectors());
        let count = libc::c_int::try_from(vectors.len()).unwrap_or(libc::c_int::MAX);
        // SAFETY: the descriptor is open. By the promise of Gather each vector is memory that may
        // be read for as long as it is borrowed. The guest may change it meanwhile: only the kernel
        // reads it, and once.
        let moved = unsafe { libc::writev(fd, vectors.as_ptr(), count) };
        match result(moved) {
            Ok(len) => Moved::Frame(len),
            Err(error) => match error.raw_os_error() {
                Some(libc::EAGAIN | libc::EINTR) => Moved::NotNow,
                Some(libc::EIO) => Moved::Down,
                Some(libc::EBADFD | libc::EBADF | libc::ENODEV | libc::EPIPE) => {
                    self.gone("write", &error)
                }
                _ => Moved::Lost,
            },
        }
    }

    fn gone(&self, call: &str, error: &io::Error) -> Moved {
        tracing::error!(interface = %self.name, call, %error, "interface is gone");
        Moved::Gone
    }

    /// An ioctl whose argument is a number.
    fn number(&self, request: libc::Ioctl, number: libc::c_ulong) -> io::Result<()> {
        // SAFETY: the descriptor is open, and those of TUN's calls that come here take no pointer.
        let result = unsafe { libc::ioctl(self.fd.as_raw_fd(), request, number) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

fn result(moved: isize) -> io::Result<usize> {
    usize::try_from(moved).map_err(|_| io::Error::last_os_error())
}

impl AsFd for Tap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl fmt::Debug for Tap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tap").field("name", &self.name).field("fd", &self.fd).finish()
    }
}

#[cfg(test)]
impl Tap {
    /// A socket that keeps packets apart, in the place of a TAP.
    pub(super) fn stand_in(socket: OwnedFd) -> Self {
        let all = [Offloads::TSO4, Offloads::TSO6, Offloads::ECN, Offloads::UFO];
        let offloads = all.into_iter().fold(Offloads::CSUM, Offloads::and);
        let stand_in = Some(Default::default());
        Self { fd: socket, name: "stand-in".to_owned(), offloads, multi_queue: false, stand_in }
    }

    /// What a stand-in was asked for last.
    pub(super) fn asked(&self) -> Offloads {
        let asked = self.stand_in.as_ref().unwrap();
        Offloads(asked.load(std::sync::atomic::Ordering::SeqCst))
    }
}
