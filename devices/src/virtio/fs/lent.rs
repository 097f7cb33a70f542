//! Files that the server has lent: what the host's page cache has of them is read and written at once.
//!
//! A message to another process costs two changes of process and a second copy of its data. For data of
//! a file that the guest has open, and that the host has in memory, neither is needed: the server hands
//! over the descriptor of a handle that is used again and again, and the kernel moves the data between
//! its page cache and guest memory, as for a disk. Whatever would have to wait for storage, is not
//! plain, or fails, goes to the server like everything else (`RWF_NOWAIT`; preadv2(2)). The flag is about
//! data: for the time of an access that has to be noted, or on a file system that is mounted `sync`, the
//! kernel may wait all the same.
//!
//! What is lent is a duplicate of what the guest has opened: same file, same rights. Handles are never
//! numbered alike, so one that was closed leads nowhere.

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixDatagram;

use vmm_sys_util::sock_ctrl_msg::ScmSocket;

use super::message::{Data, Direction, OUT_HEADER, WRITE_REPLY, success};
use super::shadow::MAX_REPLY;
use crate::memory::Memory;
use crate::virtio::Chain;
use crate::virtio::vectors::{Gather, MAX_VECTORS, Scatter};

/// Most files that are kept of a share; the one lent first is let go for another.
const MOST: usize = 64;
/// Files that are taken in at a time.
const AT_ONCE: usize = 16;
/// Bytes of what comes with a descriptor: the numbers of node and handle.
const NUMBERS: usize = 16;

/// Node and handle.
type Key = (u64, u64);

struct LentFile {
    file: File,
    /// Written to at once as well: neither appended to nor brought to the storage with each write.
    plain: bool,
}

/// The files of one server. Dropped, they are closed.
pub(super) struct Lent {
    socket: UnixDatagram,
    files: BTreeMap<Key, LentFile>,
    /// In the order in which they have come.
    order: VecDeque<Key>,
    /// The server has got messages of data since the socket was looked at.
    unseen: bool,
}

impl AsFd for Lent {
    /// Readable when there is something to take in.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Lent {
    /// Nothing yet; with the end for the server.
    pub fn pair() -> io::Result<(Self, UnixDatagram)> {
        let (socket, theirs) = UnixDatagram::pair()?;
        socket.set_nonblocking(true)?;
        let (files, order) = Default::default();
        Ok((Self { socket, files, order, unseen: false }, theirs))
    }

    /// Takes in what the server has lent, as far as it is something to be read at once.
    pub fn take_in(&mut self) {
        self.unseen = false;
        for _ in 0..AT_ONCE {
            let mut numbers = [0; NUMBERS];
            // Fails when there is no more.
            let Ok((len, file)) = self.socket.recv_with_fd(&mut numbers) else { return };
            let (Some(file), NUMBERS) = (file, len) else { continue };
            let Some(file) = LentFile::accept(file) else { continue };
            let [node, handle] = [numbers.first_chunk(), numbers.last_chunk()]
                .map(|number| number.map_or(0, |bytes| u64::from_le_bytes(*bytes)));
            self.keep((node, handle), file);
        }
    }

    fn keep(&mut self, key: Key, file: LentFile) {
        if self.files.insert(key, file).is_none() {
            self.order.push_back(key);
        }
        if self.order.len() > MOST
            && let Some(first) = self.order.pop_front()
        {
            self.files.remove(&first);
        }
    }

    /// The guest closes a handle.
    pub fn give_back(&mut self, key: Key) {
        if self.unseen {
            // It was lent before the guest got the answer, so it is there by now.
            self.take_in();
        }
        if self.files.remove(&key).is_some() {
            self.order.retain(|kept| *kept != key);
        }
    }

    /// The guest forgets all.
    pub fn clear(&mut self) {
        self.take_in();
        self.files.clear();
        self.order.clear();
    }

    /// The server gets a message of data.
    pub fn passed_on(&mut self) {
        self.unseen = true;
    }

    /// Answers a message of data in `chain`, if that takes no waiting; the length of the answer.
    pub fn answer(&self, memory: &Memory, chain: &Chain, data: &Data) -> Option<u32> {
        let lent = self.files.get(&(data.node, data.handle))?;
        // The kernel's offsets have a sign.
        i64::try_from(data.offset.checked_add(u64::from(data.size))?).ok()?;
        match data.direction {
            Direction::Read => lent.read(memory, chain, data),
            Direction::Write if lent.plain => lent.write(memory, chain, data),
            Direction::Write => None,
        }
    }
}

impl LentFile {
    /// Takes a descriptor of a server that is not trusted: for something that is a file and cannot
    /// make us wait.
    fn accept(file: File) -> Option<Self> {
        if !file.metadata().ok()?.is_file() {
            return None;
        }
        // SAFETY: an open descriptor, and no arguments; then a number. Programs that are started
        // meanwhile close what is not theirs.
        let flags = unsafe {
            libc::fcntl(file.as_raw_fd(), libc::F_SETFD, libc::FD_CLOEXEC);
            libc::fcntl(file.as_raw_fd(), libc::F_GETFL)
        };
        if flags < 0 || flags & (libc::O_DIRECT | libc::O_PATH) != 0 {
            return None;
        }
        let plain = flags & (libc::O_APPEND | libc::O_SYNC | libc::O_DSYNC) == 0;
        Some(Self { file, plain })
    }

    fn read(&self, memory: &Memory, chain: &Chain, data: &Data) -> Option<u32> {
        let room = chain.writable_len().checked_sub(OUT_HEADER)?.min(MAX_REPLY);
        let size = usize::try_from(data.size).ok().filter(|size| *size as u64 <= room)?;
        let mut writer = chain.writer(memory);
        let (mut left, mut into) = (OUT_HEADER as usize, Scatter::with_capacity(64));
        while left > 0 {
            left -= writer.take_segment(left)?.len as usize;
        }
        left = size;
        while left > 0 {
            let segment = writer.take_segment(left)?;
            if into.push_guest(memory, segment, MAX_VECTORS) < segment.len as usize {
                return None;
            }
            left -= segment.len as usize;
        }
        let vectors = into.vectors();
        // SAFETY: the vectors are slices of guest RAM, writable, mapped for as long as `into` lives, and
        // no more than the kernel takes. Nothing in this process refers to those bytes; that the guest
        // changes them meanwhile is allowed, as only the kernel touches them.
        let read = unsafe { self.at_once(libc::preadv2, vectors, data.offset) }?;
        into.written(read);
        if read < size && !self.ends_at(data.offset + read as u64) {
            return None;
        }
        reply(memory, chain, &success(data.unique, read as u32, &[]))?;
        Some((OUT_HEADER as usize + read) as u32)
    }

    fn write(&self, memory: &Memory, chain: &Chain, data: &Data) -> Option<u32> {
        let mut reader = chain.reader(memory);
        let (mut left, mut from) = (Data::LEN, Gather::with_capacity(64));
        while left > 0 {
            left -= reader.take_segment(left)?.len as usize;
        }
        left = data.size as usize;
        while left > 0 {
            let segment = reader.take_segment(left)?;
            if !from.push_guest(memory, segment) {
                return None;
            }
            left -= segment.len as usize;
        }
        // SAFETY: as for reading; the kernel only reads.
        let written = unsafe { self.at_once(libc::pwritev2, from.vectors(), data.offset) }?;
        if written < data.size as usize {
            // The server writes all of it, which comes to the same.
            return None;
        }
        let [a, b, c, d] = data.size.to_le_bytes();
        reply(memory, chain, &success(data.unique, 0, &[a, b, c, d, 0, 0, 0, 0]))?;
        Some(WRITE_REPLY as u32)
    }

    /// Whether there is nothing from `offset` on, as far as that is known without waiting.
    fn ends_at(&self, offset: u64) -> bool {
        let mut byte = [0_u8];
        let vector = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
        // SAFETY: one byte of this function's.
        unsafe { self.at_once(libc::preadv2, &[vector], offset) == Some(0) }
    }

    /// Moves bytes by `call`, if that takes no waiting.
    ///
    /// # Safety
    /// The vectors are of memory that is mapped during the call and may be read, and written if `call`
    /// does.
    unsafe fn at_once(&self, call: Call, vectors: &[libc::iovec], offset: u64) -> Option<usize> {
        let (count, offset) = (i32::try_from(vectors.len()).ok()?, i64::try_from(offset).ok()?);
        let (fd, first) = (self.file.as_raw_fd(), vectors.as_ptr());
        // SAFETY: the descriptor is open; as the caller says for the rest.
        let moved = unsafe { call(fd, first, count, offset, libc::RWF_NOWAIT) };
        usize::try_from(moved).ok()
    }
}

type Call = unsafe extern "C" fn(i32, *const libc::iovec, i32, i64, i32) -> isize;

/// Writes the head of an answer.
fn reply(memory: &Memory, chain: &Chain, bytes: &[u8]) -> Option<()> {
    chain.writer(memory).write_all(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lend(socket: &UnixDatagram, key: Key, file: &impl AsFd) {
        let numbers = [key.0.to_le_bytes(), key.1.to_le_bytes()];
        let fd = file.as_fd().as_raw_fd();
        socket.send_with_fd(numbers.as_flattened(), fd).unwrap();
    }

    #[test]
    fn what_is_lent_is_a_file_in_the_page_cache_or_is_not_taken() {
        let (mut lent, theirs) = Lent::pair().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, "content").unwrap();
        let file = File::open(&path).unwrap();
        lend(&theirs, (1, 1), &File::open(folder.path()).unwrap());
        lend(&theirs, (1, 2), &std::io::pipe().unwrap().0);
        lend(&theirs, (1, 3), &File::open("/dev/zero").unwrap());
        lend(&theirs, (1, 4), &theirs);
        // Without a descriptor, too short, and too long.
        theirs.send(&[0; NUMBERS]).unwrap();
        theirs.send_with_fd(&[7_u8; 3][..], file.as_raw_fd()).unwrap();
        theirs.send(&[0; 100]).unwrap();
        lend(&theirs, (1, 5), &file);
        lent.take_in();
        assert_eq!(lent.files.keys().collect::<Vec<_>>(), [&(1, 5)]);
        assert!(lent.files.values().all(|lent| lent.plain));
        lent.give_back((2, 5));
        assert_eq!(lent.files.len(), 1);
        lent.give_back((1, 5));
        assert!(lent.files.is_empty() && lent.order.is_empty());
    }

    #[test]
    fn what_is_lent_later_takes_the_place_of_what_was_lent_first() {
        let (mut lent, theirs) = Lent::pair().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let file = File::create(&path).unwrap();
        for number in 0..2 * MOST as u64 {
            lend(&theirs, (9, number), &file);
            lent.take_in();
        }
        assert_eq!((lent.files.len(), lent.order.len()), (MOST, MOST));
        assert!(lent.files.keys().all(|(_, handle)| *handle >= MOST as u64));
        lend(&theirs, (9, 1), &file);
        lent.clear();
        assert!(lent.files.is_empty() && lent.order.is_empty());
    }
}
