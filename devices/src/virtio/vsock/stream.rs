//! System calls on unix stream sockets: data straight between guest RAM and socket, and the calls
//! that the standard library cannot make without blocking.
//!
//! Payload is not copied through a buffer of ours: one sendmsg or recvmsg per packet takes all its
//! pieces. Those calls, rather than vm-memory's read and write of one slice each, because they
//! never block whatever the mode of the socket (MSG_DONTWAIT), never raise SIGPIPE (MSG_NOSIGNAL),
//! and one call moves a packet that the driver has cut into pages.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use vm_memory::bitmap::Bitmap;

use crate::memory::{GuestMemoryBackend, Memory, MemorySlice};
use crate::virtio::Segment;

/// Connections that may wait in the kernel until the listening socket is served.
const BACKLOG: libc::c_int = 128;

/// Pieces per call. The kernel takes no more (UIO_MAXIOV); what is left is a partial transfer.
const MAX_PIECES: usize = 1024;

/// The pieces of guest RAM that `segments` are.
fn slices<'a>(memory: &'a Memory, segments: &[Segment]) -> io::Result<Vec<MemorySlice<'a>>> {
    let pieces = segments.iter().flat_map(|segment| {
        GuestMemoryBackend::get_slices(memory, segment.address, segment.len as usize)
    });
    pieces.take(MAX_PIECES).collect::<Result<_, _>>().map_err(io::Error::other)
}

fn message(pieces: &mut [libc::iovec]) -> libc::msghdr {
    // SAFETY: all-zeroes is a valid msghdr: no address, no buffers, no control data.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = pieces.as_mut_ptr();
    message.msg_iovlen = pieces.len() as _;
    message
}

fn count(result: libc::ssize_t) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// Sends from guest RAM; how many bytes the socket took. `WouldBlock` if none.
pub fn send_from(socket: &UnixStream, memory: &Memory, segments: &[Segment]) -> io::Result<usize> {
    let slices = slices(memory, segments)?;
    let guards: Vec<_> = slices.iter().map(MemorySlice::ptr_guard).collect();
    let mut pieces: Vec<_> = guards
        .iter()
        .map(|guard| libc::iovec {
            iov_base: guard.as_ptr().cast_mut().cast(),
            iov_len: guard.len(),
        })
        .collect();
    let message = message(&mut pieces);
    // SAFETY: the message points to the live `pieces`, and these to guest RAM that stays mapped as
    // long as `slices` and `guards`; the kernel only reads from it. The guest may write at the same
    // time, which changes the bytes sent and nothing else.
    count(unsafe {
        libc::sendmsg(socket.as_raw_fd(), &message, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL)
    })
}

/// Receives into guest RAM; how many bytes came, 0 at the end. `WouldBlock` if there are none.
pub fn receive_into(
    socket: &UnixStream,
    memory: &Memory,
    segments: &[Segment],
) -> io::Result<usize> {
    let slices = slices(memory, segments)?;
    let guards: Vec<_> = slices.iter().map(MemorySlice::ptr_guard_mut).collect();
    let mut pieces: Vec<_> = guards
        .iter()
        .map(|guard| libc::iovec { iov_base: guard.as_ptr().cast(), iov_len: guard.len() })
        .collect();
    let mut message = message(&mut pieces);
    // SAFETY: as for sending; the kernel writes into guest RAM that Rust holds no reference to, at
    // most the length of each slice.
    let received =
        count(unsafe { libc::recvmsg(socket.as_raw_fd(), &mut message, libc::MSG_DONTWAIT) })?;
    let mut left = received;
    for slice in &slices {
        let len = left.min(slice.len());
        // The kernel wrote behind vm-memory's back, so the dirty log is told here.
        slice.bitmap().mark_dirty(0, len);
        left -= len;
    }
    Ok(received)
}

/// Sends from our own memory; how many bytes the socket took. `WouldBlock` if none.
pub fn send(socket: &UnixStream, parts: [&[u8]; 2]) -> io::Result<usize> {
    let mut pieces = parts
        .map(|part| libc::iovec { iov_base: part.as_ptr().cast_mut().cast(), iov_len: part.len() });
    let message = message(&mut pieces);
    // SAFETY: the message points to the live `pieces` and `parts`, which the kernel only reads.
    count(unsafe {
        libc::sendmsg(socket.as_raw_fd(), &message, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL)
    })
}

/// Receives into our own memory, or looks at what would come if `peek`.
pub fn receive(socket: &UnixStream, buffer: &mut [u8], peek: bool) -> io::Result<usize> {
    let flags = libc::MSG_DONTWAIT | if peek { libc::MSG_PEEK } else { 0 };
    // SAFETY: the kernel writes at most the length of `buffer` into it.
    count(unsafe {
        libc::recv(socket.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len(), flags)
    })
}

/// True if the socket was not ready, and the call can be made again.
pub fn is_transient(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// True if `path` fits a socket address, with its terminating zero.
pub fn fits(path: &Path, extra: usize) -> bool {
    path.as_os_str().len() + extra < address_room()
}

fn address_room() -> usize {
    // SAFETY: all-zeroes is a valid sockaddr_un.
    let address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_path.len()
}

fn address(path: &Path) -> io::Result<libc::sockaddr_un> {
    if !fits(path, 0) {
        return Err(io::ErrorKind::InvalidFilename.into());
    }
    // SAFETY: all-zeroes is a valid sockaddr_un, and leaves the path terminated.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    for (to, from) in address.sun_path.iter_mut().zip(path.as_os_str().as_bytes()) {
        *to = from.cast_signed();
    }
    Ok(address)
}

fn socket() -> io::Result<OwnedFd> {
    let kind = libc::SOCK_STREAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: takes no pointers.
    let fd = unsafe { libc::socket(libc::AF_UNIX, kind, 0) };
    check(fd)?;
    // SAFETY: the descriptor is new and belongs to nobody else.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Connects to the socket at `path` without blocking: a listener with a full backlog refuses.
pub fn connect(path: &Path) -> io::Result<UnixStream> {
    let socket = socket()?;
    let address = address(path)?;
    let len = size_of_val(&address) as libc::socklen_t;
    // SAFETY: the address is a live sockaddr_un of that size.
    check(unsafe { libc::connect(socket.as_raw_fd(), (&raw const address).cast(), len) })?;
    Ok(UnixStream::from(socket))
}

/// Listens at `path`, where nothing may exist, for the same user only.
pub fn listen(path: &Path) -> io::Result<UnixListener> {
    let socket = socket()?;
    let address = address(path)?;
    let len = size_of_val(&address) as libc::socklen_t;
    // The kernel gives the file the mode of the socket, less the umask, so that it never stands
    // there with another mode.
    // SAFETY: takes no pointers.
    check(unsafe { libc::fchmod(socket.as_fd().as_raw_fd(), 0o600) })?;
    // SAFETY: the address is a live sockaddr_un of that size.
    check(unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), len) })?;
    // SAFETY: takes no pointers.
    check(unsafe { libc::listen(socket.as_raw_fd(), BACKLOG) })?;
    Ok(UnixListener::from(socket))
}

#[cfg(test)]
mod tests {
    use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};

    use super::*;
    use crate::memory::{Bytes, GuestAddress};

    /// Two regions that touch, so that a piece can lie in both.
    fn memory() -> Memory {
        let ranges = [(GuestAddress(0), 0x4000), (GuestAddress(0x4000), 0x4000)];
        Memory::from_ranges(&ranges).unwrap()
    }

    fn segment(address: u64, len: u32) -> Segment {
        Segment { address: GuestAddress(address), len }
    }

    fn is_dirty(memory: &Memory, address: u64) -> bool {
        let region = memory.find_region(GuestAddress(address)).unwrap();
        region.bitmap().dirty_at((address - region.start_addr().0) as usize)
    }

    #[test]
    fn data_goes_into_all_pieces_and_only_what_was_written_is_dirty() {
        let memory = memory();
        let (socket, program) = UnixStream::pair().unwrap();
        let pieces =
            [segment(0x1000, 0), segment(0x1ffe, 2), segment(0x3ffe, 4), segment(0x6000, 9)];
        let empty = receive_into(&socket, &memory, &pieces).unwrap_err();
        assert!(is_transient(&empty));
        assert_eq!(send(&program, [b"abc", b"def"]).unwrap(), 6);
        assert_eq!(receive_into(&socket, &memory, &pieces).unwrap(), 6);
        let mut data = [0; 6];
        memory.read_slice(&mut data[..2], GuestAddress(0x1ffe)).unwrap();
        memory.read_slice(&mut data[2..], GuestAddress(0x3ffe)).unwrap();
        assert_eq!(&data, b"abcdef");
        let dirty = [0x1000, 0x3000, 0x4000];
        assert!(dirty.iter().all(|&page| is_dirty(&memory, page)));
        assert!([0, 0x2000, 0x5000, 0x6000].iter().all(|&page| !is_dirty(&memory, page)));
    }

    #[test]
    fn data_comes_out_of_all_pieces() {
        let memory = memory();
        let (socket, program) = UnixStream::pair().unwrap();
        memory.write_slice(b"abcdef", GuestAddress(0x3ffd)).unwrap();
        let pieces = [segment(0x3ffd, 5), segment(0, 0), segment(0x4002, 1)];
        assert_eq!(send_from(&socket, &memory, &pieces).unwrap(), 6);
        let mut data = [0; 8];
        assert_eq!(receive(&program, &mut data, true).unwrap(), 6);
        assert_eq!(receive(&program, &mut data, false).unwrap(), 6);
        assert_eq!(&data[..6], b"abcdef");
    }

    #[test]
    fn a_full_socket_takes_a_part_and_a_closed_one_gives_an_error_and_no_signal() {
        let memory = Memory::from_ranges(&[(GuestAddress(0), 8 << 20)]).unwrap();
        let (socket, program) = UnixStream::pair().unwrap();
        let sent = send_from(&socket, &memory, &[segment(0, 8 << 20)]).unwrap();
        assert!(sent > 0 && sent < 8 << 20);
        assert!(is_transient(&send_from(&socket, &memory, &[segment(0, 1)]).unwrap_err()));
        drop(program);
        let error = send_from(&socket, &memory, &[segment(0, 1)]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    }

    #[test]
    fn pieces_outside_guest_memory_are_refused() {
        let (socket, _program) = UnixStream::pair().unwrap();
        assert!(send_from(&socket, &memory(), &[segment(0x7fff, 2)]).is_err());
        assert!(receive_into(&socket, &memory(), &[segment(0x8000, 1)]).is_err());
    }
}
