//! Where a sandbox lives on the host: one folder for all that it has, so that whoever knows its
//! name can end it and clear it away, the shim's own successor included.
//!
//! ```text
//! /run/cube/<hash of containerd, namespace and sandbox>/
//!     vm.json              who runs here, see `record`
//!     api.sock, vsock.sock the VMM's sockets
//!     vmm.log              what the VMM had to say
//!     metrics.prom         numbers for Prometheus, see `metrics`
//!     paused               link to the folder of its state on the disk, if it was ever paused to it
//!     share/               what the guest sees, at /run/cube/share
//!         <container>/config.json, rootfs/, mounts/<n>, <exec>.json
//! ```

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};

use crate::error::{Result, io};

/// Where all of them are.
pub const ROOT: &str = "/run/cube";
/// The link to its state on the disk.
const PAUSED: &str = "paused";
/// Where the guest sees `share`.
pub const GUEST_SHARE: &str = "/run/cube/share";

/// The folder of one sandbox.
#[derive(Clone, Debug)]
pub struct Place(PathBuf);

impl Place {
    /// The folder of the sandbox whose shim listens on `socket`, whose name is unique per
    /// containerd, namespace and sandbox.
    pub fn of(socket: &Path) -> Self {
        let name = socket.file_name().unwrap_or_default().to_string_lossy();
        // A unix socket's path has at most 107 bytes.
        Self(Path::new(ROOT).join(name.get(..32).unwrap_or(&name)))
    }

    /// What tells it from all others, in lower-case letters and digits.
    pub fn name(&self) -> &OsStr {
        self.0.file_name().unwrap_or_default()
    }

    /// A file in it.
    pub fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// What the guest sees.
    pub fn share(&self) -> PathBuf {
        self.0.join("share")
    }

    /// What the guest sees of a container.
    pub fn container(&self, id: &str) -> PathBuf {
        self.share().join(id)
    }

    /// Makes it, with a share whose mounts the file server gets to see too: it has mounts of its
    /// own, and takes over those that are made below a shared one.
    pub fn make(&self) -> Result<()> {
        let share = self.share();
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&share)
            .map_err(io(format!("make the folder {}", share.display())))?;
        let none = None::<&str>;
        mount(Some(&share), &share, none, MsFlags::MS_BIND, none)
            .and_then(|()| mount(none, &share, none, MsFlags::MS_SHARED, none))
            .map_err(io(format!("mount {} on itself", share.display())))
    }

    /// Takes all mounts below it away, its state on the disk, and then it. Whatever is not there is
    /// as good.
    pub fn clear(&self) -> Result<()> {
        unmount_below(&self.0)?;
        let state = fs::read_link(self.file(PAUSED));
        // Whatever else the link may lead to is nothing of this sandbox's.
        if let Some(state) = state.ok().filter(|state| state.file_name() == Some(self.name())) {
            remove(&state)?;
        }
        remove(&self.0)
    }

    /// Makes a folder for its state in `dir`, which is on a disk.
    pub fn bed(&self, dir: &Path) -> Result<PathBuf> {
        let bed = dir.join(self.name());
        let failed = || format!("make the folder {}", bed.display());
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&bed).map_err(io(failed()))?;
        match std::os::unix::fs::symlink(&bed, self.file(PAUSED)) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                Err(io(failed())(error))
            }
            _ => Ok(bed),
        }
    }

    /// Clears what a container has.
    pub fn clear_container(&self, id: &str) -> Result<()> {
        unmount_below(&self.container(id))?;
        remove(&self.container(id))
    }
}

/// Removes a folder, which may not be there.
pub fn remove(path: &Path) -> Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(io(format!("remove {}", path.display()))(error))
        }
        _ => Ok(()),
    }
}

/// Unmounts all at `path` and below, the innermost first, as often as something is mounted there.
/// Fails rather than leave a mount: what is removed next would be the files behind it.
pub fn unmount_below(path: &Path) -> Result<()> {
    let list = fs::read_to_string("/proc/self/mountinfo").map_err(io("read the mounts"))?;
    for point in mounts_below(&list, path).into_iter().rev() {
        match umount2(&point, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW) {
            Ok(()) | Err(Errno::EINVAL | Errno::ENOENT) => {}
            Err(errno) => return Err(io(format!("unmount {}", point.display()))(errno)),
        }
    }
    Ok(())
}

/// The mount points at `path` and below, in the order of the kernel's list: outer ones first.
fn mounts_below(mountinfo: &str, path: &Path) -> Vec<PathBuf> {
    let points = mountinfo.lines().filter_map(|line| line.split(' ').nth(4));
    points.map(unescape).filter(|point| point.starts_with(path)).collect()
}

/// The kernel writes blanks and the like as `\040`.
fn unescape(text: &str) -> PathBuf {
    let mut result = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('\\') {
        result.push_str(before);
        let code = after.get(..3).and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match code {
            Some(code) => {
                result.push(char::from(code));
                rest = &after[3..];
            }
            None => {
                result.push('\\');
                rest = after;
            }
        }
    }
    result.push_str(rest);
    result.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_mounts_below_are_found() {
        let list = "1 0 8:1 / / rw - ext4 /dev/a rw\n\
                    2 1 0:5 / /run/cube/a/share rw shared:1 - tmpfs t rw\n\
                    3 2 0:6 / /run/cube/a/share/c\\040d/rootfs rw - overlay o rw\n\
                    4 1 0:7 / /run/cube/ab rw - tmpfs t rw\n";
        let found = mounts_below(list, Path::new("/run/cube/a"));
        let expected = ["/run/cube/a/share", "/run/cube/a/share/c d/rootfs"];
        assert_eq!(found, expected.map(PathBuf::from));
    }

    #[test]
    fn the_state_on_the_disk_goes_with_its_sandbox() {
        let dir = tempfile::tempdir().unwrap();
        let place = Place(dir.path().join("run/abc"));
        fs::create_dir_all(&place.0).unwrap();
        let disk = dir.path().join("disk");
        let bed = place.bed(&disk).unwrap();
        assert_eq!(place.bed(&disk).unwrap(), bed, "again");
        fs::write(bed.join("memory"), "").unwrap();
        place.clear().unwrap();
        assert_eq!(fs::read_dir(&disk).unwrap().count(), 0);
        assert!(!place.0.exists());
    }

    #[test]
    fn sockets_fit_into_the_folder() {
        let socket = format!("/run/containerd/s/{}", "a".repeat(64));
        let place = Place::of(Path::new(&socket));
        assert!(place.file("vsock.sock_1025").as_os_str().len() < 107);
    }
}
