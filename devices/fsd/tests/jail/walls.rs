//! What is outside, and ways there.

use std::ffi::{CStr, CString};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::net::TcpStream;
use std::os::fd::{AsRawFd, RawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use cube_fsd::jail::Inside;
use serde::{Deserialize, Serialize};

/// What there is to be reached.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Outside {
    /// Another share, with a file `secret` and a socket.
    pub other: PathBuf,
    /// Where somebody listens on the loopback.
    pub port: u16,
    /// The abstract name of a socket on which somebody listens.
    pub name: String,
    /// A process.
    pub process: u32,
    /// The key of a segment of shared memory.
    pub memory: i32,
}

/// A way out: `Ok` if it leads there.
type Way = fn(&Outside, &Inside) -> io::Result<()>;

/// Each with the errors that it may end with.
pub const WALLS: &[(&str, Way, &[i32])] = &[
    ("the host's root", |_, _| open("/etc/passwd"), &[libc::ENOENT]),
    ("the way up", |_, _| open("../../../../../../etc/passwd"), &[libc::ENOENT]),
    ("the current directory", |_, _| open("etc/passwd"), &[libc::ENOENT]),
    ("another share", |outside, _| open(outside.other.join("secret")), &[libc::ENOENT]),
    ("a link to another share", |_, _| open("/link"), &[libc::ENOENT]),
    ("/proc", |_, _| open("/proc/self/root/etc/passwd"), &[libc::ENOENT]),
    ("above /proc/self/fd", |_, inside| above(&inside.proc_self_fd), &[libc::ENOENT]),
    ("a descriptor of another directory", |_, _| descriptors(), &[libc::ENOENT]),
    ("a file handle", |_, _| by_handle(), &[libc::EPERM]),
    ("the network", |outside, _| network(outside), &[libc::ENETUNREACH]),
    ("a socket's path", |outside, _| socket(outside), &[libc::ENOENT]),
    ("a socket's name", |outside, _| abstract_socket(outside), &[libc::ECONNREFUSED]),
    ("shared memory", |outside, _| shared_memory(outside), &[libc::ENOENT]),
    ("a signal to a process", |outside, _| signal(outside), &[libc::ESRCH]),
    ("its file descriptors", |outside, _| pidfd(outside), &[libc::ESRCH]),
    ("its memory", |outside, _| memory(outside), &[libc::ESRCH]),
    ("ptrace of it", |outside, _| ptrace(outside), &[libc::ESRCH]),
    ("the parent", |_, _| parent(), &[libc::ESRCH]),
    ("a device node", |_, _| device_in("/made"), &[libc::EPERM]),
    ("a device node that is there", |_, _| open("/null"), &[libc::EACCES, libc::ENOENT]),
    (
        "a program of the share",
        |_, _| Err(Command::new("/program").exec()),
        &[libc::EACCES, libc::ENOENT],
    ),
    ("a mount", |_, _| mount(c"none", c"tmpfs", 0), &[libc::EPERM]),
    ("a mount made writable", |_, _| mount(c"none", c"", remount()), &[libc::EPERM]),
    ("another root", |_, _| chroot(), &[libc::EPERM]),
    ("a capability", |_, _| capability(), &[libc::EPERM]),
    (
        "a new file",
        |_, _| OpenOptions::new().write(true).create_new(true).open("/new").map(drop),
        &[0],
    ),
];

fn numbers(results: Vec<(&str, io::Result<()>)>) -> Vec<(String, i32)> {
    let number = |result: io::Result<()>| match result {
        Ok(()) => 0,
        Err(error) => error.raw_os_error().unwrap_or(-1),
    };
    results.into_iter().map(|(name, result)| (name.to_owned(), number(result))).collect()
}

/// Tries all of them.
pub fn try_all(outside: &Outside, inside: &Inside) -> Vec<(String, i32)> {
    numbers(WALLS.iter().map(|(name, way, _)| (*name, way(outside, inside))).collect())
}

/// Tries those whose aim only somebody outside can reach; they all lead there from outside.
pub fn try_outside(outside: &Outside) -> Vec<(String, i32)> {
    numbers(vec![
        ("root", open("/etc/passwd")),
        ("share", open(outside.other.join("secret"))),
        ("network", network(outside)),
        ("socket", socket(outside)),
        ("abstract", abstract_socket(outside)),
        ("memory", shared_memory(outside)),
        ("signal", signal(outside)),
        ("pidfd", pidfd(outside)),
        ("read", memory(outside)),
    ])
}

fn done(result: i64) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn open(path: impl AsRef<Path>) -> io::Result<()> {
    File::open(path).map(drop)
}

fn open_at(directory: RawFd, path: &CStr) -> io::Result<()> {
    // SAFETY: a descriptor or a number that is none, and a string with its end.
    let fd = unsafe { libc::openat(directory, path.as_ptr(), libc::O_RDONLY) };
    done(fd.into())?;
    // SAFETY: it was just opened.
    done(unsafe { libc::close(fd) }.into())
}

fn above(proc_self_fd: &File) -> io::Result<()> {
    let fd = proc_self_fd.as_raw_fd();
    let ways = [c"../../1/root/etc/passwd", c"../root/etc/passwd", c"../../etc/passwd"];
    let none = Err(io::ErrorKind::Other.into());
    ways.into_iter().fold(none, |found, path| found.or_else(|_: io::Error| open_at(fd, path)))
}

/// Whatever is open, nothing of the host's is below or above it.
fn descriptors() -> io::Result<()> {
    let ways = [c"etc/passwd", c"../etc/passwd", c"../../../../etc/passwd"];
    let all = (0..1024).flat_map(|fd| ways.map(|way| (fd, way)));
    match all.map(|(fd, way)| open_at(fd, way)).any(|opened| opened.is_ok()) {
        true => Ok(()),
        false => Err(io::Error::from_raw_os_error(libc::ENOENT)),
    }
}

fn by_handle() -> io::Result<()> {
    // Eight bytes that name inode 2, as ext4 does.
    let mut handle = [8_u32, 1, 2, 0];
    let root = File::open("/")?;
    let flags = libc::O_RDONLY;
    // SAFETY: an open descriptor, and a handle of the length that it says.
    done(unsafe {
        libc::syscall(libc::SYS_open_by_handle_at, root.as_raw_fd(), handle.as_mut_ptr(), flags)
    })
}

fn network(outside: &Outside) -> io::Result<()> {
    TcpStream::connect(("127.0.0.1", outside.port)).map(drop)
}

fn socket(outside: &Outside) -> io::Result<()> {
    UnixStream::connect(outside.other.join("socket")).map(drop)
}

fn abstract_socket(outside: &Outside) -> io::Result<()> {
    UnixStream::connect_addr(&SocketAddr::from_abstract_name(&outside.name)?).map(drop)
}

fn shared_memory(outside: &Outside) -> io::Result<()> {
    // SAFETY: takes numbers only.
    done(unsafe { libc::shmget(outside.memory, 1, 0) }.into())
}

fn process(outside: &Outside) -> i32 {
    // One that cannot be, for who knows of none.
    i32::try_from(outside.process).ok().filter(|pid| *pid > 0).unwrap_or(i32::MAX)
}

fn signal(outside: &Outside) -> io::Result<()> {
    // SAFETY: takes numbers only, and no signal is sent.
    done(unsafe { libc::kill(process(outside), 0) }.into())
}

fn pidfd(outside: &Outside) -> io::Result<()> {
    // SAFETY: takes numbers only.
    done(unsafe { libc::syscall(libc::SYS_pidfd_open, process(outside), 0) })
}

fn memory(outside: &Outside) -> io::Result<()> {
    let mut byte = 0_u8;
    let local = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    let remote = libc::iovec { iov_base: WALLS.as_ptr().cast_mut().cast(), iov_len: 1 };
    // SAFETY: one byte of ours is written; the address in the other process is only a number here.
    done(unsafe { libc::process_vm_readv(process(outside), &local, 1, &remote, 1, 0) } as i64)
}

fn ptrace(outside: &Outside) -> io::Result<()> {
    let none = std::ptr::null_mut::<libc::c_void>();
    // SAFETY: takes numbers only.
    done(unsafe { libc::ptrace(libc::PTRACE_SEIZE, process(outside), none, none) })
}

/// In a namespace of processes of its own nobody has a parent.
fn parent() -> io::Result<()> {
    // SAFETY: takes nothing.
    match unsafe { libc::getppid() } {
        0 => Err(io::Error::from_raw_os_error(libc::ESRCH)),
        _ => Ok(()),
    }
}

fn device_in(path: &str) -> io::Result<()> {
    let path = CString::new(Path::new(path).as_os_str().as_bytes())?;
    let number = libc::makedev(1, 3);
    // SAFETY: a string with its end, and numbers.
    done(unsafe { libc::mknod(path.as_ptr(), libc::S_IFCHR | 0o666, number) }.into())
}

/// Makes the node of /dev/null.
pub fn device_node(path: &Path) {
    device_in(path.to_str().unwrap()).unwrap();
    fs::File::open(path).unwrap();
}

const fn remount() -> libc::c_ulong {
    libc::MS_REMOUNT | libc::MS_BIND
}

fn mount(source: &CStr, kind: &CStr, flags: libc::c_ulong) -> io::Result<()> {
    let none = std::ptr::null();
    // SAFETY: strings with their ends, and no further data.
    done(unsafe { libc::mount(source.as_ptr(), c"/".as_ptr(), kind.as_ptr(), flags, none) }.into())
}

fn chroot() -> io::Result<()> {
    // SAFETY: a string with its end.
    done(unsafe { libc::chroot(c"/".as_ptr()) }.into())
}

/// All of them, in all sets.
fn capability() -> io::Result<()> {
    // Version 3 of the header, for this process.
    let header = [0x2008_0522_u32, 0];
    let all = [u32::MAX; 6];
    // SAFETY: a header and two sets of three words, as that version has them.
    done(unsafe { libc::syscall(libc::SYS_capset, header.as_ptr(), all.as_ptr()) })
}

/// A segment of shared memory, which goes when this does.
pub struct SharedMemory {
    /// By what others find it.
    pub key: i32,
    id: i32,
}

impl SharedMemory {
    /// One byte of it.
    pub fn new() -> Self {
        let key = i32::try_from(std::process::id()).unwrap();
        // SAFETY: takes numbers only.
        let id = unsafe { libc::shmget(key, 1, libc::IPC_CREAT | 0o600) };
        assert!(id >= 0, "{}", io::Error::last_os_error());
        Self { key, id }
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: no structure is passed with that command.
        unsafe { libc::shmctl(self.id, libc::IPC_RMID, std::ptr::null_mut()) };
    }
}
