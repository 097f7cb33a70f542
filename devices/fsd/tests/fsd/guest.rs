//! A guest's kernel, as far as a file server can tell: it asks FUSE messages and keeps the answers.

use std::collections::BTreeMap;

/// Whoever answers messages.
pub trait Answers {
    /// Sends `request`; the answer, for which there are `room` bytes.
    fn ask(&mut self, request: &[u8], room: usize) -> Vec<u8>;
}

/// What is told of a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Attr {
    pub ino: u64,
    pub size: u64,
    pub mode: u32,
    pub nlink: u32,
    pub uid: u32,
}

/// What a lookup finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    pub node: u64,
    pub attr: Attr,
}

pub type Answer<T> = Result<T, i32>;

/// The root.
pub const ROOT: u64 = 1;
/// O_RDONLY, O_WRONLY, O_RDWR.
pub const READ: i32 = libc::O_RDONLY;
pub const WRITE: i32 = libc::O_WRONLY;
pub const BOTH: i32 = libc::O_RDWR;

/// What Linux says that it can do: nearly all that there is.
const CAPABLE: u64 = 0x1_7fff_ffff | 1 << 34;

/// A kernel with a share. Its numbers go on when the share's server is replaced.
pub struct Guest<A> {
    pub server: A,
    unique: u64,
    /// As whom it asks.
    pub uid: u32,
    pub gid: u32,
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

fn attr(bytes: &[u8]) -> Attr {
    Attr {
        ino: u64_at(bytes, 0),
        size: u64_at(bytes, 8),
        mode: u32_at(bytes, 60),
        nlink: u32_at(bytes, 64),
        uid: u32_at(bytes, 68),
    }
}

fn found(bytes: &[u8]) -> Found {
    Found { node: u64_at(bytes, 0), attr: attr(&bytes[40..]) }
}

/// Numbers, one after the other.
pub fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn name(name: impl AsRef<[u8]>) -> Vec<u8> {
    [name.as_ref(), &[0]].concat()
}

fn wide(number: u64) -> [u32; 2] {
    [number as u32, (number >> 32) as u32]
}

impl<A: Answers> Guest<A> {
    /// One that has not mounted the share yet.
    pub fn new(server: A) -> Self {
        Self { server, unique: 1, uid: 0, gid: 0 }
    }

    /// The same kernel with another server.
    pub fn with<B>(self, server: B) -> Guest<B> {
        Guest { server, unique: self.unique, uid: self.uid, gid: self.gid }
    }

    /// A message with its head.
    pub fn message(&mut self, opcode: u32, node: u64, body: &[u8]) -> Vec<u8> {
        self.unique += 2;
        let [unique, node] = [wide(self.unique), wide(node)];
        let head = [40 + body.len() as u32, opcode, unique[0], unique[1], node[0], node[1]];
        [&words(&head)[..], &words(&[self.uid, self.gid, 7, 0]), body].concat()
    }

    /// Asks; the body of the answer, or its error.
    pub fn ask(&mut self, opcode: u32, node: u64, body: &[u8], room: usize) -> Answer<Vec<u8>> {
        let message = self.message(opcode, node, body);
        let reply = self.server.ask(&message, 16 + room);
        assert!(reply.len() >= 16, "opcode {opcode}: an answer of {} bytes", reply.len());
        assert_eq!(u32_at(&reply, 0) as usize, reply.len(), "opcode {opcode}: its length");
        assert_eq!(u64_at(&reply, 8), self.unique, "opcode {opcode}: another message's answer");
        match u32_at(&reply, 4) as i32 {
            0 => Ok(reply[16..].to_vec()),
            error => Err(-error),
        }
    }

    /// Tells, without waiting for an answer.
    fn tell(&mut self, opcode: u32, node: u64, body: &[u8]) {
        let message = self.message(opcode, node, body);
        assert_eq!(self.server.ask(&message, 0), [0; 0]);
    }

    /// Mounts; what was agreed on.
    pub fn mount(&mut self) -> u64 {
        self.mount_as(CAPABLE)
    }

    /// Mounts as a kernel that can do that.
    pub fn mount_as(&mut self, capable: u64) -> u64 {
        let flags = wide(capable);
        let body = [&words(&[7, 38, 131_072, flags[0], flags[1]])[..], &[0; 44]].concat();
        let reply = self.ask(26, 0, &body, 64).unwrap();
        u64::from(u32_at(&reply, 12)) | u64::from(u32_at(&reply, 32)) << 32
    }

    pub fn lookup(&mut self, parent: u64, called: impl AsRef<[u8]>) -> Answer<Found> {
        self.ask(1, parent, &name(called), 128).map(|reply| found(&reply))
    }

    /// Looks up a path, component by component.
    pub fn walk(&mut self, path: &str) -> Answer<Found> {
        let mut at = Found { node: ROOT, attr: Attr::default() };
        for part in path.split('/') {
            at = self.lookup(at.node, part)?;
        }
        Ok(at)
    }

    pub fn forget(&mut self, node: u64, count: u64) {
        self.tell(2, node, &words(&wide(count)));
    }

    pub fn getattr(&mut self, node: u64) -> Answer<Attr> {
        self.ask(3, node, &[0; 16], 104).map(|reply| attr(&reply[16..]))
    }

    /// Cuts off or extends.
    pub fn truncate(&mut self, node: u64, size: u64) -> Answer<Attr> {
        let size = wide(size);
        let head = words(&[1 << 3, 0, 0, 0, size[0], size[1]]);
        self.ask(4, node, &[&head[..], &[0; 64]].concat(), 104).map(|reply| attr(&reply[16..]))
    }

    pub fn readlink(&mut self, node: u64) -> Answer<Vec<u8>> {
        self.ask(5, node, &[], 4096)
    }

    pub fn symlink(&mut self, parent: u64, called: &str, to: &str) -> Answer<Found> {
        let body = [name(called), name(to)].concat();
        self.ask(6, parent, &body, 128).map(|reply| found(&reply))
    }

    pub fn mknod(&mut self, parent: u64, called: &str, mode: u32, rdev: u32) -> Answer<Found> {
        let body = [words(&[mode, rdev, 0, 0]), name(called)].concat();
        self.ask(8, parent, &body, 128).map(|reply| found(&reply))
    }

    pub fn mkdir(&mut self, parent: u64, called: impl AsRef<[u8]>) -> Answer<Found> {
        let body = [words(&[0o755, 0]), name(called)].concat();
        self.ask(9, parent, &body, 128).map(|reply| found(&reply))
    }

    pub fn unlink(&mut self, parent: u64, called: impl AsRef<[u8]>) -> Answer<()> {
        self.ask(10, parent, &name(called), 0).map(|_| ())
    }

    pub fn rmdir(&mut self, parent: u64, called: impl AsRef<[u8]>) -> Answer<()> {
        self.ask(11, parent, &name(called), 0).map(|_| ())
    }

    /// RENAME2 with flags.
    pub fn rename(&mut self, from: (u64, &str), to: (u64, &str), flags: u32) -> Answer<()> {
        let new = wide(to.0);
        let body = [words(&[new[0], new[1], flags, 0]), name(from.1), name(to.1)].concat();
        self.ask(45, from.0, &body, 0).map(|_| ())
    }

    pub fn link(&mut self, node: u64, parent: u64, called: &str) -> Answer<Found> {
        let body = [words(&wide(node)), name(called)].concat();
        self.ask(13, parent, &body, 128).map(|reply| found(&reply))
    }

    pub fn open(&mut self, node: u64, flags: i32) -> Answer<u64> {
        self.ask(14, node, &words(&[flags as u32, 0]), 16).map(|reply| u64_at(&reply, 0))
    }

    pub fn create(&mut self, parent: u64, called: &str, flags: i32) -> Answer<(u64, u64)> {
        let head = words(&[flags as u32, libc::S_IFREG | 0o644, 0, 0]);
        let reply = self.ask(35, parent, &[head, name(called)].concat(), 144)?;
        Ok((found(&reply).node, u64_at(&reply, 128)))
    }

    pub fn read(&mut self, node: u64, handle: u64, at: u64, size: u32) -> Answer<Vec<u8>> {
        let (handle, at) = (wide(handle), wide(at));
        let body = words(&[handle[0], handle[1], at[0], at[1], size, 0, 0, 0, 0, 0]);
        self.ask(15, node, &body, size as usize)
    }

    pub fn write(&mut self, node: u64, handle: u64, at: u64, data: &[u8]) -> Answer<u32> {
        self.write_as(node, handle, at, data, 0, 0)
    }

    /// With flags of the write (1: delayed) and of the file.
    pub fn write_as(
        &mut self,
        node: u64,
        handle: u64,
        at: u64,
        data: &[u8],
        how: u32,
        flags: i32,
    ) -> Answer<u32> {
        let (handle, at, size) = (wide(handle), wide(at), data.len() as u32);
        let flags = flags as u32;
        let head = words(&[handle[0], handle[1], at[0], at[1], size, how, 0, 0, flags, 0]);
        self.ask(16, node, &[&head[..], data].concat(), 8).map(|reply| u32_at(&reply, 0))
    }

    pub fn release(&mut self, node: u64, handle: u64) -> Answer<()> {
        let handle = wide(handle);
        let body = words(&[handle[0], handle[1], 0, 0, 0, 0]);
        self.ask(18, node, &body, 0).map(|_| ())
    }

    pub fn flush(&mut self, node: u64, handle: u64) -> Answer<()> {
        let handle = wide(handle);
        self.ask(25, node, &words(&[handle[0], handle[1], 0, 0, 0, 0]), 0).map(|_| ())
    }

    pub fn setxattr(&mut self, node: u64, called: &str, value: &[u8], ext: bool) -> Answer<()> {
        let mut head = vec![value.len() as u32, 0];
        if ext {
            head.extend([0, 0]);
        }
        let body = [words(&head), name(called), value.to_vec()].concat();
        self.ask(21, node, &body, 0).map(|_| ())
    }

    pub fn getxattr(&mut self, node: u64, called: &str) -> Answer<Vec<u8>> {
        let body = [words(&[1024, 0]), name(called)].concat();
        self.ask(22, node, &body, 1024)
    }

    pub fn opendir(&mut self, node: u64) -> Answer<u64> {
        let flags = (libc::O_DIRECTORY | READ) as u32;
        self.ask(27, node, &words(&[flags, 0]), 16).map(|reply| u64_at(&reply, 0))
    }

    /// Names, each with the place of what comes behind it.
    pub fn readdir(
        &mut self,
        node: u64,
        handle: u64,
        at: u64,
        size: u32,
    ) -> Answer<Vec<(String, u64)>> {
        let (handle, at) = (wide(handle), wide(at));
        let body = words(&[handle[0], handle[1], at[0], at[1], size, 0, 0, 0, 0, 0]);
        let reply = self.ask(28, node, &body, size as usize)?;
        let (mut names, mut rest) = (Vec::new(), &reply[..]);
        while rest.len() >= 24 {
            let len = u32_at(rest, 16) as usize;
            let called = String::from_utf8_lossy(&rest[24..24 + len]).into_owned();
            names.push((called, u64_at(rest, 8)));
            rest = &rest[(24 + len).next_multiple_of(8)..];
        }
        Ok(names)
    }

    pub fn releasedir(&mut self, node: u64, handle: u64) -> Answer<()> {
        let handle = wide(handle);
        self.ask(29, node, &words(&[handle[0], handle[1], 0, 0, 0, 0]), 0).map(|_| ())
    }

    /// All of a directory with its nodes, through READDIRPLUS.
    pub fn list(&mut self, node: u64) -> Answer<BTreeMap<String, u64>> {
        let handle = self.opendir(node)?;
        let (mut all, mut at) = (BTreeMap::new(), 0);
        loop {
            let (wide_handle, wide_at) = (wide(handle), wide(at));
            let size = 4096;
            let numbers = [wide_handle[0], wide_handle[1], wide_at[0], wide_at[1], size];
            let body = [&words(&numbers)[..], &[0; 20]].concat();
            let reply = self.ask(44, node, &body, size as usize)?;
            if reply.is_empty() {
                break;
            }
            let mut rest = &reply[..];
            while rest.len() >= 152 {
                let (node, entry) = (u64_at(rest, 0), &rest[128..]);
                let len = u32_at(entry, 16) as usize;
                at = u64_at(entry, 8);
                let called = String::from_utf8_lossy(&entry[24..24 + len]).into_owned();
                all.insert(called, node);
                rest = &rest[(152 + len).next_multiple_of(8)..];
            }
        }
        self.releasedir(node, handle)?;
        Ok(all)
    }
}

/// Nobody: for a guest between two servers.
impl Answers for () {
    fn ask(&mut self, _request: &[u8], _room: usize) -> Vec<u8> {
        Vec::new()
    }
}
