//! The jail: what is left of the host for whoever gets hold of this process.
//!
//! Its root is the share, mounted once more without devices, set-user-id and programs, and read-only
//! if the share is; no network, no other process's IPC, none of the VMM's descriptors, the capabilities
//! that a file server needs, and the system calls that it makes ([`filter`]).

mod filter;

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

pub use self::filter::FilterError;

/// Capabilities that stay: those of a server that acts for users of all kinds. Without MKNOD: no
/// device nodes are made. Without DAC_READ_SEARCH: nothing is opened by file handle.
const CAPABILITIES: [&str; 7] =
    ["CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "SETGID", "SETUID", "SETFCAP"];

/// Why there is no jail.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "each says what it is")]
pub enum JailError {
    #[error("{what}: {source}")]
    Call { what: &'static str, source: io::Error },
    #[error("capabilities cannot be dropped")]
    Capabilities,
    #[error(transparent)]
    Filter(#[from] FilterError),
}

/// What the library needs of the world outside.
pub struct Inside {
    /// `/proc/self/fd`, without a way up.
    pub proc_self_fd: File,
}

fn call(what: &'static str) -> impl Fn(io::Error) -> JailError {
    move |source| JailError::Call { what, source }
}

fn done(result: libc::c_long) -> io::Result<libc::c_long> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Closes all descriptors but the standard ones and `kept`.
pub fn close_others(kept: &mut [RawFd]) -> Result<(), JailError> {
    kept.sort_unstable();
    let mut first = 3;
    for &fd in kept.iter().filter(|fd| **fd >= 3) {
        close_range(first, fd - 1)?;
        first = fd + 1;
    }
    close_range(first, RawFd::MAX)
}

fn close_range(first: RawFd, last: RawFd) -> Result<(), JailError> {
    if first > last {
        return Ok(());
    }
    // SAFETY: closes descriptors that nothing in this process owns yet.
    let closed = done(unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) });
    closed.map(|_| ()).map_err(call("inherited descriptors cannot be closed"))
}

/// Allows as many open files as there may be; how many that is.
pub fn raise_descriptor_limit() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: a valid rlimit that outlives the call.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) } != 0 {
        return 1024;
    }
    let most = libc::rlimit { rlim_cur: limit.rlim_max, ..limit };
    // SAFETY: as above.
    match unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &most) } {
        0 => most.rlim_cur,
        _ => limit.rlim_cur,
    }
}

/// Makes `share` all that this process can see. The process must have one thread.
pub fn enter(share: &Path, read_only: bool) -> Result<Inside, JailError> {
    leave_namespaces()?;
    mount(None, c"/", libc::MS_SLAVE | libc::MS_REC).map_err(call("mounts cannot be separated"))?;
    // A directory whose way up is cut off with the old root.
    mount(Some(c"/proc/self/fd"), c"/proc", libc::MS_BIND)
        .map_err(call("/proc/self/fd cannot be mounted"))?;
    let proc_self_fd = open_path(c"/proc").map_err(call("/proc/self/fd cannot be opened"))?;
    let path = CString::new(share.as_os_str().as_bytes())
        .map_err(|error| call("the share's path")(error.into()))?;
    let root = clone_tree(&path).map_err(call("the share cannot be cloned"))?;
    restrict(&root, read_only).map_err(call("the share's mount cannot be restricted"))?;
    // SAFETY: an open descriptor, strings with their ends, and flags.
    let moved = done(unsafe {
        libc::syscall(
            libc::SYS_move_mount,
            root.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_FDCWD,
            path.as_ptr(),
            libc::MOVE_MOUNT_F_EMPTY_PATH,
        )
    });
    moved.map_err(call("the share cannot be mounted"))?;
    pivot(&root)?;
    Ok(Inside { proc_self_fd })
}

/// Away from everything shared. Without privileges, that takes a user namespace.
fn leave_namespaces() -> Result<(), JailError> {
    let flags = libc::CLONE_NEWNS | libc::CLONE_NEWNET | libc::CLONE_NEWIPC | libc::CLONE_NEWUTS;
    // SAFETY: takes flags only.
    let left = unsafe { libc::unshare(flags) };
    if left == 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    if error.raw_os_error() != Some(libc::EPERM) {
        return Err(call("namespaces cannot be left")(error));
    }
    // SAFETY: take no pointers.
    let (uid, gid) = unsafe { (libc::geteuid(), libc::getegid()) };
    // SAFETY: takes flags only.
    let left = done(unsafe { libc::unshare(flags | libc::CLONE_NEWUSER) }.into());
    left.map_err(call("namespaces cannot be left; allow user namespaces, or be root"))?;
    // The guest's root is who runs the VMM, and there is nobody else.
    let maps = [
        ("/proc/self/setgroups", "deny".to_owned()),
        ("/proc/self/uid_map", format!("0 {uid} 1")),
        ("/proc/self/gid_map", format!("0 {gid} 1")),
    ];
    for (file, text) in maps {
        std::fs::write(file, text).map_err(call("user ids cannot be mapped"))?;
    }
    Ok(())
}

fn mount(source: Option<&CStr>, target: &CStr, flags: libc::c_ulong) -> io::Result<()> {
    let source = source.map_or(std::ptr::null(), CStr::as_ptr);
    let none = std::ptr::null();
    // SAFETY: strings with their ends, or null where the kernel allows it.
    let mounted = unsafe { libc::mount(source, target.as_ptr(), none, flags, none.cast()) };
    done(mounted.into()).map(|_| ())
}

fn open_path(path: &CStr) -> io::Result<File> {
    let flags = libc::O_PATH | libc::O_DIRECTORY | libc::O_CLOEXEC;
    // SAFETY: a string with its end.
    let fd = done(unsafe { libc::open(path.as_ptr(), flags) }.into())?;
    // SAFETY: the descriptor was just made, and is owned by nobody else.
    Ok(unsafe { File::from_raw_fd(fd as RawFd) })
}

/// A mount of the share of our own, with all that is mounted in it.
fn clone_tree(path: &CStr) -> io::Result<File> {
    let flags = libc::OPEN_TREE_CLONE | libc::OPEN_TREE_CLOEXEC | libc::AT_RECURSIVE as u32;
    // SAFETY: a string with its end, and flags.
    let fd = unsafe { libc::syscall(libc::SYS_open_tree, libc::AT_FDCWD, path.as_ptr(), flags) };
    // SAFETY: the descriptor was just made, and is owned by nobody else.
    done(fd).map(|fd| unsafe { File::from_raw_fd(fd as RawFd) })
}

fn restrict(root: &File, read_only: bool) -> io::Result<()> {
    let mut set = libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV | libc::MOUNT_ATTR_NOEXEC;
    if read_only {
        set |= libc::MOUNT_ATTR_RDONLY;
    }
    let attributes =
        libc::mount_attr { attr_set: set, attr_clr: 0, propagation: libc::MS_SLAVE, userns_fd: 0 };
    let flags = libc::AT_EMPTY_PATH | libc::AT_RECURSIVE;
    // SAFETY: an open descriptor, a string with its end, and a structure of the given size.
    let restricted = done(unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            root.as_raw_fd(),
            c"".as_ptr(),
            flags,
            &raw const attributes,
            std::mem::size_of::<libc::mount_attr>(),
        )
    });
    restricted.map(|_| ())
}

fn pivot(root: &File) -> Result<(), JailError> {
    // SAFETY: an open descriptor.
    done(unsafe { libc::fchdir(root.as_raw_fd()) }.into()).map_err(call("fchdir"))?;
    let here = c".".as_ptr();
    // SAFETY: strings with their ends.
    done(unsafe { libc::syscall(libc::SYS_pivot_root, here, here) })
        .map_err(call("the root cannot be changed"))?;
    // The old root is mounted over the new one now, and goes with all that is in it.
    // SAFETY: a string with its end.
    done(unsafe { libc::umount2(here, libc::MNT_DETACH) }.into())
        .map_err(call("the old root cannot be left"))?;
    // SAFETY: a string with its end.
    done(unsafe { libc::chdir(c"/".as_ptr()) }.into()).map_err(call("chdir"))?;
    Ok(())
}

/// Gives up all privileges but [`CAPABILITIES`], and all system calls that are not needed.
pub fn drop_privileges() -> Result<(), JailError> {
    drop_capabilities()?;
    Ok(filter::install()?)
}

/// The second half of [`drop_privileges`], for who has opened nothing.
pub fn restrict_calls() -> Result<(), JailError> {
    no_new_privileges()?;
    Ok(filter::install()?)
}

fn no_new_privileges() -> Result<(), JailError> {
    // SAFETY: takes numbers only.
    done(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }.into())
        .map_err(call("PR_SET_NO_NEW_PRIVS"))?;
    Ok(())
}

/// The first half of [`drop_privileges`]: what is left holds without the filter, too.
pub fn drop_capabilities() -> Result<(), JailError> {
    no_new_privileges()?;
    // SAFETY: takes numbers only. No core of this process lies around.
    done(unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0) }.into())
        .map_err(call("PR_SET_DUMPABLE"))?;
    capng::clear(capng::Set::BOTH);
    let kept = capng::Type::PERMITTED | capng::Type::EFFECTIVE;
    capng::updatev(capng::Action::ADD, kept, CAPABILITIES.to_vec())
        .map_err(|_| JailError::Capabilities)?;
    capng::apply(capng::Set::BOTH).map_err(|_| JailError::Capabilities)
}
