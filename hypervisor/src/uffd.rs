//! Page faults that are answered by a program: the kernel's userfaultfd, as far as guest memory
//! needs it (ioctl_userfaultfd(2)).
//!
//! With [`crate::snapshot::paging`] the only place that knows of it. The crate of that name makes
//! its bindings with libclang, which everybody who builds this would need then; there are five calls.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Bytes of a page, as far as this is concerned.
pub const PAGE: u64 = 4096;

const API: u64 = 0xaa;
/// Ranges that are given back (`MADV_DONTNEED`) are told, since they read as zeros afterwards.
const FEATURE_EVENT_REMOVE: u64 = 1 << 3;
const REGISTER_MODE_MISSING: u64 = 1;

const IOC_API: libc::c_ulong = 0xc018_aa3f;
const IOC_REGISTER: libc::c_ulong = 0xc020_aa00;
const IOC_WAKE: libc::c_ulong = 0x8010_aa02;
const IOC_COPY: libc::c_ulong = 0xc028_aa03;
const IOC_ZEROPAGE: libc::c_ulong = 0xc020_aa04;
/// Of `/dev/userfaultfd`.
const IOC_NEW: libc::c_ulong = 0xaa00;

const EVENT_PAGEFAULT: u8 = 0x12;
const EVENT_REMOVE: u8 = 0x15;
/// Bytes of an event.
const MESSAGE: usize = 32;
/// Events that are read at once.
const MESSAGES: usize = 64;

/// Page faults of ranges of this process's memory, as a descriptor.
#[derive(Debug)]
pub struct Uffd(File);

/// What has happened in a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// Somebody waits for the page with this address.
    Fault(u64),
    /// The pages from the first to before the second address have been given back.
    Removed(u64, u64),
}

impl Uffd {
    /// A new one, without ranges. Also for faults of the kernel, as those of KVM are, for which the
    /// kernel wants a privilege or access to `/dev/userfaultfd`.
    pub fn new() -> io::Result<Self> {
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
        // SAFETY: the call takes flags only.
        let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
        let fd = match libc::c_int::try_from(fd) {
            Ok(fd) if fd >= 0 => fd,
            _ => Self::from_device(flags, &io::Error::last_os_error())?,
        };
        // SAFETY: the kernel has just made this descriptor for us.
        let this = Self(unsafe { File::from_raw_fd(fd) });
        let mut api = [API, FEATURE_EVENT_REMOVE, 0];
        this.call(IOC_API, &mut api)?;
        Ok(this)
    }

    fn from_device(flags: libc::c_int, refusal: &io::Error) -> io::Result<libc::c_int> {
        if refusal.raw_os_error() != Some(libc::EPERM) {
            return Err(io::Error::from_raw_os_error(refusal.raw_os_error().unwrap_or(libc::EIO)));
        }
        let device = File::options().read(true).write(true).open("/dev/userfaultfd")?;
        // SAFETY: this call of the device takes flags and gives a descriptor.
        match unsafe { libc::ioctl(device.as_raw_fd(), IOC_NEW as _, flags) } {
            fd if fd >= 0 => Ok(fd),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Answers for all pages from `start` on that are not there yet: whole pages of anonymous memory
    /// of this process.
    pub fn register(&self, start: u64, len: u64) -> io::Result<()> {
        self.call(IOC_REGISTER, &mut [start, len, REGISTER_MODE_MISSING, 0])
    }

    /// Fills the pages from `page` on with `content`, whole pages, and wakes who waits for them.
    /// [`io::ErrorKind::AlreadyExists`]: there was something already; nothing has changed there.
    /// [`io::ErrorKind::WouldBlock`]: there are events that must be read before.
    pub fn fill(&self, page: u64, content: &[u8]) -> io::Result<()> {
        let mut copy = [page, content.as_ptr() as u64, content.len() as u64, 0, 0];
        self.call(IOC_COPY, &mut copy)
    }

    /// The same with zeros.
    pub fn fill_zeros(&self, page: u64, len: u64) -> io::Result<()> {
        self.call(IOC_ZEROPAGE, &mut [page, len, 0, 0])
    }

    /// As [`Uffd::fill`], up to a page that is there already; how many bytes, which are some.
    pub fn fill_some(&self, page: u64, content: &[u8]) -> io::Result<usize> {
        let mut copy = [page, content.as_ptr() as u64, content.len() as u64, 0, 0];
        let done = self.call(IOC_COPY, &mut copy);
        let [.., filled] = copy;
        some(done, filled)
    }

    /// The same with zeros.
    pub fn fill_zeros_some(&self, page: u64, len: usize) -> io::Result<usize> {
        let mut zero = [page, len as u64, 0, 0];
        let done = self.call(IOC_ZEROPAGE, &mut zero);
        let [.., filled] = zero;
        some(done, filled)
    }

    /// Lets those who wait for a page look again.
    pub fn wake(&self, page: u64) -> io::Result<()> {
        self.call(IOC_WAKE, &mut [page, PAGE])
    }

    fn call<const N: usize>(&self, request: libc::c_ulong, words: &mut [u64; N]) -> io::Result<()> {
        // SAFETY: each request takes a structure of that many 64-bit words. What is copied to the
        // ranges only fills pages that nobody has seen yet, in memory that is the guest's; the source
        // of a copy is a live slice.
        match unsafe { libc::ioctl(self.0.as_raw_fd(), request as _, words.as_mut_ptr()) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// What has happened since the last call; nothing, if nothing has. Ends of whoever waits for it:
    /// each is told once.
    pub fn events(&self) -> io::Result<Vec<Event>> {
        let mut bytes = [0; MESSAGE * MESSAGES];
        let len = match (&self.0).read(&mut bytes) {
            Ok(len) => len,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => 0,
            Err(error) => return Err(error),
        };
        let messages = bytes.get(..len).unwrap_or_default().chunks_exact(MESSAGE);
        Ok(messages.filter_map(parse).collect())
    }

    /// A second descriptor of the same.
    pub fn try_clone(&self) -> io::Result<OwnedFd> {
        self.0.as_fd().try_clone_to_owned()
    }
}

impl From<OwnedFd> for Uffd {
    /// That of another process, which has handed it over.
    fn from(fd: OwnedFd) -> Self {
        Self(fd.into())
    }
}

impl AsFd for Uffd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// What a call has done of what it should. To the kernel a part is a failure.
fn some(done: io::Result<()>, filled: u64) -> io::Result<usize> {
    // Negative if it is an error.
    let filled = i64::from_ne_bytes(filled.to_ne_bytes());
    match (done, usize::try_from(filled)) {
        (_, Ok(filled)) if filled > 0 => Ok(filled),
        (Err(error), _) => Err(error),
        (Ok(()), _) => Err(io::ErrorKind::WouldBlock.into()),
    }
}

/// struct uffd_msg: the event, seven bytes of nothing, and two words or more.
fn parse(message: &[u8]) -> Option<Event> {
    let word = |at: usize| Some(u64::from_ne_bytes(message.get(at..at + 8)?.try_into().ok()?));
    match *message.first()? {
        // Flags, then the address.
        EVENT_PAGEFAULT => Some(Event::Fault(word(16)? / PAGE * PAGE)),
        EVENT_REMOVE => Some(Event::Removed(word(8)?, word(16)?)),
        // Not asked for.
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_read_as_the_kernel_writes_them() {
        let mut message = [0; MESSAGE];
        message[0] = EVENT_PAGEFAULT;
        message[16..24].copy_from_slice(&0x7000_0123_u64.to_ne_bytes());
        assert_eq!(parse(&message), Some(Event::Fault(0x7000_0000)));
        message[0] = EVENT_REMOVE;
        message[8..16].copy_from_slice(&0x6000_0000_u64.to_ne_bytes());
        assert_eq!(parse(&message), Some(Event::Removed(0x6000_0000, 0x7000_0123)));
        message[0] = 0x13;
        assert_eq!(parse(&message), None);
        assert_eq!(parse(&message[..20]), None);
    }
}
