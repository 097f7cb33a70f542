//! Lends the VMM the descriptors of files that the guest reads and writes again and again, so that what
//! the host has in memory of them need not pass through this process.
//!
//! One datagram for each: the numbers of node and handle, and the descriptor. It is sent while a read or
//! a write is answered, so the VMM has it before the guest can close the handle. Nothing is lent that
//! could make the VMM wait: files whose kernel does not know `RWF_NOWAIT`, and those past the page cache.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixDatagram;

use virtiofsd::filesystem::{ZeroCopyReader, ZeroCopyWriter};
use virtiofsd::oslib::{ReadvFlags, WritevFlags};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

/// Which use of a handle makes its file worth lending.
const WORTH: u8 = 2;

/// Who borrows, and what handles were used for.
pub struct Lender {
    socket: UnixDatagram,
    uses: HashMap<u64, u8>,
}

impl Lender {
    /// Lends to whoever has the other end.
    pub fn new(socket: UnixDatagram) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        Ok(Self { socket, uses: HashMap::new() })
    }

    /// A handle is used; whether its file is to be lent now.
    pub fn is_due(&mut self, handle: u64) -> bool {
        let uses = self.uses.entry(handle).or_default();
        *uses = uses.saturating_add(1);
        *uses == WORTH
    }

    /// A handle is closed.
    pub fn forget(&mut self, handle: u64) {
        self.uses.remove(&handle);
    }

    /// All are.
    pub fn clear(&mut self) {
        self.uses.clear();
    }

    /// Lends the file behind a handle, if it is one that can be.
    pub fn lend(&self, node: u64, handle: u64, file: &File) {
        if !answers_at_once(file) {
            return;
        }
        let [node, handle] = [node, handle].map(u64::to_le_bytes);
        // One that the VMM has no room for is not lent.
        let _ = self.socket.send_with_fd([node, handle].as_flattened(), file.as_raw_fd());
    }
}

/// Whether a read of it never waits, if that is asked for.
fn answers_at_once(file: &File) -> bool {
    // SAFETY: an open descriptor, and no argument.
    let flags = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) };
    if flags < 0 || flags & (libc::O_DIRECT | libc::O_PATH) != 0 {
        return false;
    }
    let mut byte = [0_u8];
    let vector = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
    // SAFETY: an open descriptor, and one byte of this function's.
    let read =
        unsafe { libc::preadv2(file.as_raw_fd(), &raw const vector, 1, 0, libc::RWF_NOWAIT) };
    read >= 0 || io::Error::last_os_error().kind() == io::ErrorKind::WouldBlock
}

/// An end of a message's data that lets somebody see the file at the other end, once.
pub struct Shown<T, S>(pub T, pub Option<S>);

impl<T, S: FnOnce(&File)> Shown<T, S> {
    fn show(&mut self, file: &File) {
        if let Some(see) = self.1.take() {
            see(file);
        }
    }
}

impl<T: ZeroCopyWriter, S: FnOnce(&File)> ZeroCopyWriter for Shown<T, S> {
    fn read_from_file_at(
        &mut self,
        file: &File,
        count: usize,
        offset: u64,
        flags: Option<ReadvFlags>,
    ) -> io::Result<usize> {
        self.show(file);
        self.0.read_from_file_at(file, count, offset, flags)
    }
}

impl<T: ZeroCopyReader, S: FnOnce(&File)> ZeroCopyReader for Shown<T, S> {
    fn write_to_file_at(
        &mut self,
        file: &File,
        count: usize,
        offset: u64,
        flags: Option<WritevFlags>,
    ) -> io::Result<usize> {
        self.show(file);
        self.0.write_to_file_at(file, count, offset, flags)
    }
}
