//! Devices and system calls of the host: each check tries the thing itself, not its file name.

use std::env;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process;

use super::check::Check;

/// Every device, system call and file system that CubeVMM may use. Those that may have to load a
/// kernel module come last.
pub(super) const CHECKS: &[fn() -> Check] =
    &[reflink_cache, reflink_tmp, lab, userfaultfd, tun, vhost_net, vhost_vsock];

fn reflink_cache() -> Check {
    let environment = |name: &str| env::var_os(name).map(PathBuf::from);
    reflink("reflink-cache", &existing_ancestor(&cache_directory(environment)))
}

fn reflink_tmp() -> Check {
    reflink("reflink-tmp", &env::temp_dir())
}

fn vhost_net() -> Check {
    vhost("vhost-net", Path::new("/dev/vhost-net"), "frames bypass the VMM; not needed")
}

fn vhost_vsock() -> Check {
    vhost("vhost-vsock", Path::new("/dev/vhost-vsock"), "CubeVMM has its own vsock; not needed")
}

fn open_both_ways(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open(path)
}

fn tun() -> Check {
    const NAME: &str = "tun";
    const MEANING: &str = "tap devices connect guests to the host's networks";
    const PATH: &str = "/dev/net/tun";
    match open_both_ways(Path::new(PATH)) {
        Err(error) => {
            let cure = format!("modprobe tun, or give this user access to {PATH}");
            Check::missing(NAME, format!("{PATH}: {error}"), MEANING, cure)
        }
        Ok(_) if has_net_admin(&fs::read_to_string("/proc/self/status").unwrap_or_default()) => {
            Check::ok(NAME, PATH, MEANING)
        }
        Ok(_) => Check::limited(
            NAME,
            "no CAP_NET_ADMIN",
            "only a tap device that was made for this user can be used",
            "run with CAP_NET_ADMIN, or make the tap beforehand: ip tuntap add ... mode tap user ...",
        ),
    }
}

/// Whether the text of `/proc/self/status` has `CAP_NET_ADMIN` among the effective capabilities.
fn has_net_admin(status: &str) -> bool {
    const CAP_NET_ADMIN: u32 = 12;
    status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .is_some_and(|mask| mask >> CAP_NET_ADMIN & 1 == 1)
}

/// From linux/userfaultfd.h: `_IO(0xAA, 0x00)` on `/dev/userfaultfd`.
const USERFAULTFD_IOC_NEW: libc::Ioctl = 0xaa00;
const UFFD_USER_MODE_ONLY: libc::c_int = 1;

fn userfaultfd() -> Check {
    const NAME: &str = "userfaultfd";
    const MEANING: &str = "a restored guest's memory can be loaded page by page on demand";
    const CURE: &str = "sysctl vm.unprivileged_userfaultfd=1, run with CAP_SYS_PTRACE, or give \
                        this user access to /dev/userfaultfd";
    // Faults of a guest are taken by the kernel (in KVM_RUN), so "user mode only" is not enough.
    let error = match userfaultfd_syscall(0) {
        Ok(_) => return Check::ok(NAME, "system call", MEANING),
        Err(error) => error,
    };
    if userfaultfd_device().is_ok() {
        return Check::ok(NAME, "/dev/userfaultfd", MEANING);
    }
    match userfaultfd_syscall(UFFD_USER_MODE_ONLY) {
        Ok(_) => Check::limited(
            NAME,
            "faults of user mode only",
            "not for guest memory, whose faults are taken by the kernel",
            CURE,
        ),
        Err(_) => Check::missing(NAME, error.to_string(), MEANING, CURE),
    }
}

fn userfaultfd_syscall(flags: libc::c_int) -> io::Result<OwnedFd> {
    // SAFETY: the call takes flags only and touches no memory.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | flags) };
    owned(fd as libc::c_int)
}

fn userfaultfd_device() -> io::Result<OwnedFd> {
    let device = open_both_ways(Path::new("/dev/userfaultfd"))?;
    // SAFETY: the descriptor is open, and this request takes flags instead of a pointer.
    owned(unsafe { libc::ioctl(device.as_raw_fd(), USERFAULTFD_IOC_NEW, libc::O_CLOEXEC) })
}

fn owned(fd: libc::c_int) -> io::Result<OwnedFd> {
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor for us, nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Where CubeVMM keeps kernels and templates.
fn cache_directory(environment: impl Fn(&str) -> Option<PathBuf>) -> PathBuf {
    let under = |name: &str, rest: &str| environment(name).map(|path| path.join(rest));
    environment("CUBE_CACHE")
        .or_else(|| under("XDG_CACHE_HOME", "cubevmm"))
        .or_else(|| under("HOME", ".cache/cubevmm"))
        .unwrap_or_else(env::temp_dir)
}

/// The directory itself, or the nearest one above it that exists.
fn existing_ancestor(path: &Path) -> PathBuf {
    path.ancestors().find(|path| path.is_dir()).unwrap_or(Path::new("/")).to_owned()
}

fn reflink(name: &'static str, directory: &Path) -> Check {
    const MEANING: &str = "a disk is copied for a snapshot or a clone without copying its blocks";
    let shown = directory.display();
    match clone_a_file(directory) {
        Ok(()) => Check::ok(name, shown.to_string(), MEANING),
        Err(error) => {
            // What cannot be written was not examined; only the kernel's "no" is about reflinks.
            let cure = match error.kind() {
                io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                    format!("make {shown} writable for this user, or name another directory")
                }
                _ => format!("put {shown} on xfs (mkfs.xfs -m reflink=1) or btrfs"),
            };
            Check::limited(
                name,
                format!("{shown}: {error}"),
                "disks are copied block by block for a snapshot or a clone",
                cure,
            )
        }
    }
}

fn clone_a_file(directory: &Path) -> io::Result<()> {
    let mut source = nameless_file(directory)?;
    source.write_all(&[1; 4096])?;
    let target = nameless_file(directory)?;
    // SAFETY: both descriptors are open; the request's argument is a descriptor, not a pointer.
    match unsafe { libc::ioctl(target.as_raw_fd(), libc::FICLONE, source.as_raw_fd()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A file that vanishes with its descriptor. Not every file system can make one without a name.
fn nameless_file(directory: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o600);
    if let Ok(file) = options.clone().custom_flags(libc::O_TMPFILE).open(directory) {
        return Ok(file);
    }
    let path = directory.join(format!(".cube-doctor-{}", process::id()));
    let file = options.create_new(true).open(&path)?;
    fs::remove_file(&path)?;
    Ok(file)
}

fn vhost(name: &'static str, path: &Path, meaning: &'static str) -> Check {
    match open_both_ways(path) {
        Ok(_) => Check::ok(name, path.display().to_string(), meaning),
        Err(error) => {
            let cure = format!("modprobe {}", name.replace('-', "_"));
            Check::missing(name, format!("{}: {error}", path.display()), meaning, cure)
        }
    }
}

/// The lab runs Linux guests on hosts whose own KVM cannot.
fn lab() -> Check {
    let path = env::var_os("PATH").unwrap_or_default();
    lab_in(env::split_paths(&path))
}

fn lab_in(mut search: impl Iterator<Item = PathBuf>) -> Check {
    const NAME: &str = "lab";
    const PROGRAM: &str = "qemu-system-x86_64";
    const MEANING: &str = "tests/lab/run gives an emulated host with KVM where this one has none";
    let found = search.find(|directory| directory.join(PROGRAM).is_file());
    match found.map(|directory| directory.join(PROGRAM)) {
        Some(path) => Check::ok(NAME, path.display().to_string(), MEANING),
        None => {
            let cure = "tests/lab/setup --install-packages";
            Check::missing(NAME, format!("no {PROGRAM} in PATH"), MEANING, cure)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::Status;
    use super::*;
    use vmm_sys_util::tempdir::TempDir;

    #[test]
    fn net_admin_is_bit_12_of_the_effective_set() {
        assert!(has_net_admin("Name:\tx\nCapEff:\t0000000000001000\n"));
        assert!(!has_net_admin("CapPrm:\t0000000000001000\nCapEff:\tffffffffffffefff\n"));
        assert!(!has_net_admin(""));
    }

    #[test]
    fn the_cache_follows_the_environment_in_order() {
        let all = |name: &str| Some(PathBuf::from(format!("/{name}")));
        let home = |name: &str| (name == "HOME").then(|| PathBuf::from("/root"));
        assert_eq!(cache_directory(all), Path::new("/CUBE_CACHE"));
        assert_eq!(cache_directory(home), Path::new("/root/.cache/cubevmm"));
        assert_eq!(cache_directory(|_| None), env::temp_dir());
    }

    #[test]
    fn a_directory_that_is_not_yet_there_is_judged_by_its_parent() {
        let parent = TempDir::new().unwrap();
        let wanted = parent.as_path().join("a/b");
        assert_eq!(existing_ancestor(&wanted), parent.as_path());
    }

    #[test]
    fn the_reflink_check_leaves_no_file_behind() {
        let directory = TempDir::new().unwrap();
        let check = reflink("reflink-tmp", directory.as_path());
        assert_ne!(check.status, Status::Missing);
        assert_eq!(fs::read_dir(directory.as_path()).unwrap().count(), 0);
    }

    #[test]
    fn a_directory_that_cannot_be_written_is_limited_with_its_error() {
        let check = reflink("reflink-tmp", Path::new("/nowhere"));
        assert_eq!(check.status, Status::Limited);
        assert!(check.value.contains("/nowhere: No such file"), "{}", check.value);
    }

    #[test]
    fn a_missing_vhost_device_names_its_module() {
        let check = vhost("vhost-net", Path::new("/nowhere/vhost-net"), "meaning");
        assert_eq!(check.status, Status::Missing);
        assert_eq!(check.cure.unwrap(), "modprobe vhost_net");
    }

    #[test]
    fn the_lab_needs_qemu_on_the_path() {
        let directory = TempDir::new().unwrap();
        assert_eq!(lab_in([directory.as_path().to_owned()].into_iter()).status, Status::Missing);
        File::create(directory.as_path().join("qemu-system-x86_64")).unwrap();
        assert_eq!(lab_in([directory.as_path().to_owned()].into_iter()).status, Status::Ok);
    }
}
