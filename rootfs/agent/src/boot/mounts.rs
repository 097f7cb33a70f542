//! The kernel's own file systems, and the temporary ones.

use super::Error;
use crate::log::Log;
use nix::errno::Errno;
use nix::mount::{MsFlags, mount};
use nix::sys::stat::Mode;
use nix::unistd::mkdir;
use std::os::unix::fs::symlink;
use std::{fs, io};

/// A file system to mount.
struct Mount {
    fstype: &'static str,
    target: &'static str,
    flags: MsFlags,
    data: &'static str,
    /// Whether the guest is of no use without it.
    needed: bool,
}

const NOTHING_SPECIAL: MsFlags =
    MsFlags::MS_NOSUID.union(MsFlags::MS_NODEV).union(MsFlags::MS_NOEXEC);

const fn needed(
    fstype: &'static str,
    target: &'static str,
    flags: MsFlags,
    data: &'static str,
) -> Mount {
    Mount { fstype, target, flags, data, needed: true }
}

const fn wanted(fstype: &'static str, target: &'static str) -> Mount {
    Mount { fstype, target, flags: NOTHING_SPECIAL, data: "", needed: false }
}

/// What is needed to find the root, and moves there with it.
pub const MOVED: [&str; 3] = ["/proc", "/sys", "/dev"];

const EARLY: &[Mount] = &[
    needed("proc", "/proc", NOTHING_SPECIAL, ""),
    needed("sysfs", "/sys", NOTHING_SPECIAL, ""),
    needed("devtmpfs", "/dev", MsFlags::MS_NOSUID, "mode=755"),
];

const LATE: &[Mount] = &[
    needed("devpts", "/dev/pts", MsFlags::MS_NOSUID, "mode=620,gid=5,ptmxmode=666"),
    needed("tmpfs", "/dev/shm", MsFlags::MS_NOSUID.union(MsFlags::MS_NODEV), "mode=1777"),
    needed("tmpfs", "/run", MsFlags::MS_NOSUID.union(MsFlags::MS_NODEV), "mode=755"),
    needed("tmpfs", "/tmp", MsFlags::MS_NOSUID.union(MsFlags::MS_NODEV), "mode=1777"),
    wanted("cgroup2", "/sys/fs/cgroup"),
    wanted("mqueue", "/dev/mqueue"),
    wanted("bpf", "/sys/fs/bpf"),
    wanted("tracefs", "/sys/kernel/tracing"),
];

const LINKS: &[(&str, &str)] = &[
    ("/proc/self/fd", "/dev/fd"),
    ("/proc/self/fd/0", "/dev/stdin"),
    ("/proc/self/fd/1", "/dev/stdout"),
    ("/proc/self/fd/2", "/dev/stderr"),
];

/// Mounts what is needed to find the root.
pub fn early() -> Result<(), Error> {
    EARLY.iter().try_for_each(Mount::perform)
}

/// Mounts the rest, on the root that commands see.
pub fn late(log: Log) -> Result<(), Error> {
    for mount in LATE {
        match mount.perform() {
            // A kernel without it, or without the directory for it.
            Err(Error::Mount { errno: Errno::ENODEV | Errno::ENOENT, .. }) if !mount.needed => {}
            Err(error) if !mount.needed => log.error(error),
            result => result?,
        }
    }
    for (target, link) in LINKS {
        match symlink(target, link) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                log.error(format_args!("cannot make '{link}': {error}"));
            }
            _ => {}
        }
    }
    Ok(())
}

impl Mount {
    fn perform(&self) -> Result<(), Error> {
        // An image may lack the directory, and may not want it made.
        let _ = mkdir(self.target, Mode::from_bits_truncate(0o755));
        let data = Some(self.data).filter(|data| !data.is_empty());
        match mount(Some(self.fstype), self.target, Some(self.fstype), self.flags, data) {
            // The kernel has mounted it itself.
            Ok(()) | Err(Errno::EBUSY) => Ok(()),
            Err(errno) => Err(Error::Mount {
                fstype: self.fstype.to_owned(),
                target: self.target.to_owned(),
                errno,
            }),
        }
    }
}

/// Lets groups below the root one have every controller that there is.
pub fn delegate_cgroups() {
    let controllers = fs::read_to_string("/sys/fs/cgroup/cgroup.controllers").unwrap_or_default();
    for controller in controllers.split_whitespace() {
        // One by one: a controller that refuses shall not hinder the others.
        let _ = fs::write("/sys/fs/cgroup/cgroup.subtree_control", format!("+{controller}"));
    }
}
