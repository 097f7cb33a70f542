//! The root that commands see: the initramfs, or an image on a device, which then needs nothing of
//! ours inside.

use super::cmdline::Cmdline;
use super::mounts;
use nix::errno::Errno;
use nix::mount::{MsFlags, mount};
use nix::sys::statfs::{FsType, TMPFS_MAGIC, statfs};
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

/// How long a device may take to appear.
const DEVICE_PATIENCE: Duration = Duration::from_secs(10);

const IMAGE: &str = "/.cube/image";
const UPPER: &str = "/.cube/upper";
const UNION: &str = "/.cube/root";
/// Any directory of the initramfs.
const COVER: &str = "/mnt";

/// Why the guest has no root.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No such device.
    #[error(
        "root device '{device}' did not appear within {} s; there is: {found}",
        DEVICE_PATIENCE.as_secs()
    )]
    NoDevice {
        /// The one that is wanted.
        device: String,
        /// Those there are.
        found: String,
    },
    /// The device cannot be read.
    #[error("cannot read root device '{device}': {source}")]
    Read {
        /// The device.
        device: String,
        /// Why.
        source: io::Error,
    },
    /// No file system on it that we know.
    #[error("no known file system on root device '{device}'; name it with cube.rootfstype=")]
    Unknown {
        /// The device.
        device: String,
    },
    /// A mount failed.
    #[error("cannot mount {what} as {fstype}: {}", .errno.desc())]
    Mount {
        /// The device, or what it is for.
        what: String,
        /// The file system.
        fstype: String,
        /// Why.
        errno: Errno,
    },
    /// The last step failed.
    #[error("cannot make the image the root: {action} '{path}': {}", .errno.desc())]
    Switch {
        /// What failed.
        action: &'static str,
        /// On what.
        path: String,
        /// Why.
        errno: Errno,
    },
}

/// Makes the root that the command line asks for the root of this process, and says what it is.
pub fn enter(cmdline: &Cmdline) -> Result<String, Error> {
    let Some(device) = cmdline.get("cube.root") else {
        cover_initramfs()?;
        return Ok("initramfs".into());
    };
    let root = Root::find(device, cmdline)?;
    for dir in [IMAGE, UPPER, UNION] {
        fs::create_dir_all(dir).map_err(|error| switch_error("make", dir, &error))?;
    }
    root.mount_at(IMAGE)?;
    let top = if root.read_only {
        mount_union()?;
        UNION
    } else {
        IMAGE
    };
    switch(top)?;
    let kind = if root.read_only { "read-only under a tmpfs" } else { "writable" };
    Ok(format!("{device} ({}, {kind})", root.fstype))
}

/// What to mount.
struct Root {
    device: String,
    fstype: String,
    flags: MsFlags,
    data: String,
    read_only: bool,
}

impl Root {
    fn find(device: &str, cmdline: &Cmdline) -> Result<Self, Error> {
        let named = cmdline.get("cube.rootfstype");
        let (mut flags, data) = parse_flags(cmdline.get("cube.rootflags").unwrap_or(""));
        let fstype = match named {
            // Its device is a tag.
            Some("virtiofs") => "virtiofs".to_owned(),
            _ => {
                let file = wait_for(device)?;
                let read = |source| Error::Read { device: device.to_owned(), source };
                if is_read_only(&file).map_err(|errno| read(errno.into()))? {
                    flags |= MsFlags::MS_RDONLY;
                }
                let found = match named {
                    Some(named) => Some(named),
                    None => detect(file).map_err(read)?,
                };
                let unknown = || Error::Unknown { device: device.to_owned() };
                found.ok_or_else(unknown)?.to_owned()
            }
        };
        let never_written = matches!(fstype.as_str(), "erofs" | "squashfs");
        if never_written {
            flags |= MsFlags::MS_RDONLY;
        }
        let read_only = flags.contains(MsFlags::MS_RDONLY);
        Ok(Self { device: device.to_owned(), fstype, flags, data, read_only })
    }

    fn mount_at(&self, target: &str) -> Result<(), Error> {
        let data = Some(self.data.as_str()).filter(|data| !data.is_empty());
        let fstype = self.fstype.as_str();
        mount(Some(self.device.as_str()), target, Some(fstype), self.flags, data).map_err(|errno| {
            Error::Mount { what: self.device.clone(), fstype: fstype.to_owned(), errno }
        })
    }
}

/// Waits until the device can be opened.
fn wait_for(device: &str) -> Result<File, Error> {
    let start = Instant::now();
    let mut pause = Duration::from_micros(200);
    loop {
        match File::open(device) {
            Ok(file) => return Ok(file),
            // Not there, or there and its driver not yet.
            Err(_) if start.elapsed() < DEVICE_PATIENCE => thread::sleep(pause),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let found = block_devices();
                return Err(Error::NoDevice { device: device.to_owned(), found });
            }
            Err(source) => return Err(Error::Read { device: device.to_owned(), source }),
        }
        pause = (pause * 2).min(Duration::from_millis(20));
    }
}

fn block_devices() -> String {
    let entries = fs::read_dir("/sys/class/block").into_iter().flatten().flatten();
    let mut names: Vec<String> =
        entries.map(|entry| format!("/dev/{}", entry.file_name().display())).collect();
    names.sort();
    if names.is_empty() { "no block device".to_owned() } else { names.join(", ") }
}

fn is_read_only(device: &File) -> Result<bool, Errno> {
    const BLKROGET: libc::c_ulong = 0x125e;
    let mut read_only: libc::c_int = 0;
    // SAFETY: the number is the kernel's to write.
    let got = unsafe { libc::ioctl(device.as_raw_fd(), BLKROGET as _, &raw mut read_only) };
    Errno::result(got).map(|_| read_only != 0)
}

/// The file system on `device`, by its mark.
fn detect(device: impl Read) -> io::Result<Option<&'static str>> {
    const MARKS: [(&str, usize, &[u8]); 5] = [
        ("ext4", 0x438, b"\x53\xef"),
        ("erofs", 0x400, b"\xe2\xe1\xf5\xe0"),
        ("squashfs", 0, b"hsqs"),
        ("xfs", 0, b"XFSB"),
        ("btrfs", 0x1_0040, b"_BHRfS_M"),
    ];
    let mut start = Vec::new();
    device.take(0x1_0048).read_to_end(&mut start)?;
    let marked = |(_, at, mark): &&(&str, usize, &[u8])| {
        start.get(*at..).is_some_and(|rest| rest.starts_with(mark))
    };
    Ok(MARKS.iter().find(marked).map(|(name, ..)| *name))
}

/// Mount options: those that are flags, and the rest for the file system.
fn parse_flags(options: &str) -> (MsFlags, String) {
    let mut flags = MsFlags::empty();
    let mut data = Vec::new();
    for option in options.split(',').filter(|option| !option.is_empty()) {
        match option {
            "ro" => flags |= MsFlags::MS_RDONLY,
            "rw" => flags -= MsFlags::MS_RDONLY,
            "noatime" => flags |= MsFlags::MS_NOATIME,
            "nodiratime" => flags |= MsFlags::MS_NODIRATIME,
            "relatime" => flags |= MsFlags::MS_RELATIME,
            "nosuid" => flags |= MsFlags::MS_NOSUID,
            "nodev" => flags |= MsFlags::MS_NODEV,
            "noexec" => flags |= MsFlags::MS_NOEXEC,
            "sync" => flags |= MsFlags::MS_SYNCHRONOUS,
            other => data.push(other),
        }
    }
    (flags, data.join(","))
}

/// Puts a tmpfs over the image, so that commands can write.
fn mount_union() -> Result<(), Error> {
    let failed = |what: &str, fstype: &str, errno| Error::Mount {
        what: what.to_owned(),
        fstype: fstype.to_owned(),
        errno,
    };
    mount(Some("tmpfs"), UPPER, Some("tmpfs"), MsFlags::empty(), Some("mode=755"))
        .map_err(|errno| failed("the writable layer", "tmpfs", errno))?;
    let (upper, work) = (format!("{UPPER}/upper"), format!("{UPPER}/work"));
    for dir in [&upper, &work] {
        fs::create_dir(dir).map_err(|error| switch_error("make", dir, &error))?;
    }
    let data = format!("lowerdir={IMAGE},upperdir={upper},workdir={work}");
    let data = Some(data.as_str());
    mount(Some("overlay"), UNION, Some("overlay"), MsFlags::empty(), data)
        .map_err(|errno| failed("the layers", "overlay", errno))
}

/// Puts the initramfs over itself. The first mount of all cannot be pivoted away from
/// (pivot_root(2)), and containers in the guest would keep all of its mounts busy for want of that;
/// the same files mounted once more can.
fn cover_initramfs() -> Result<(), Error> {
    let bind = mount(Some("/"), COVER, None::<&str>, MsFlags::MS_BIND, None::<&str>);
    bind.map_err(|errno| Error::Switch { action: "bind to", path: COVER.into(), errno })?;
    switch(COVER)
}

/// Makes `top` the root of this process and all that come from it. An initramfs cannot be
/// unmounted or pivoted away from, so the new root is moved over it.
fn switch(top: &str) -> Result<(), Error> {
    let move_to = |from: &str, to: &str| {
        mount(Some(from), to, None::<&str>, MsFlags::MS_MOVE, None::<&str>)
            .map_err(|errno| Error::Switch { action: "move", path: from.to_owned(), errno })
    };
    for dir in mounts::MOVED {
        let target = format!("{top}{dir}");
        // If it cannot be made, the move tells.
        let _ = fs::create_dir(&target);
        move_to(dir, &target)?;
    }
    if top != COVER {
        forget_initramfs();
    }
    let failed = |action| move |errno| Error::Switch { action, path: top.to_owned(), errno };
    nix::unistd::chdir(top).map_err(failed("enter"))?;
    move_to(".", "/")?;
    nix::unistd::chroot(".").map_err(failed("chroot to"))?;
    nix::unistd::chdir("/").map_err(failed("enter"))
}

fn switch_error(action: &'static str, path: &str, error: &io::Error) -> Error {
    let errno = Errno::from_raw(error.raw_os_error().unwrap_or(libc::EIO));
    Error::Switch { action, path: path.to_owned(), errno }
}

/// Gives the memory of the initramfs back: nobody can reach its files any more. Only of an
/// initramfs, and only its own files: nothing that is mounted in it.
fn forget_initramfs() {
    const RAMFS_MAGIC: FsType = FsType(0x8584_58f6);
    let in_memory =
        statfs("/").is_ok_and(|stat| [RAMFS_MAGIC, TMPFS_MAGIC].contains(&stat.filesystem_type()));
    if let Ok(root) = fs::symlink_metadata("/")
        && in_memory
    {
        remove_below(Path::new("/"), root.dev(), 0);
    }
}

fn remove_below(dir: &Path, device: u64, depth: usize) {
    /// Deeper than any image of ours.
    const MAX_DEPTH: usize = 32;

    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        let Ok(metadata) = fs::symlink_metadata(&path) else { continue };
        if metadata.dev() != device || depth > MAX_DEPTH {
            continue;
        }
        // What stays, stays: a mount point, say.
        if metadata.is_dir() {
            remove_below(&path, device, depth + 1);
            let _ = fs::remove_dir(&path);
        } else {
            let _ = fs::remove_file(&path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn marked(at: usize, mark: &[u8]) -> Vec<u8> {
        let mut image = vec![0; 0x2_0000];
        image[at..at + mark.len()].copy_from_slice(mark);
        image
    }

    #[test]
    fn file_systems_are_known_by_their_marks() {
        let detect = |image: &[u8]| detect(image).unwrap();
        assert_eq!(detect(&marked(0x438, b"\x53\xef")), Some("ext4"));
        assert_eq!(detect(&marked(0x400, b"\xe2\xe1\xf5\xe0")), Some("erofs"));
        assert_eq!(detect(&marked(0, b"hsqs")), Some("squashfs"));
        assert_eq!(detect(&marked(0, b"XFSB")), Some("xfs"));
        assert_eq!(detect(&marked(0x1_0040, b"_BHRfS_M")), Some("btrfs"));
        assert_eq!(detect(&marked(0, b"")), None);
        assert_eq!(detect(b"hs"), None);
    }

    #[test]
    fn mount_options_are_flags_or_the_file_systems() {
        let (flags, data) = parse_flags("ro,noatime,,data=journal,dax");
        assert_eq!(flags, MsFlags::MS_RDONLY | MsFlags::MS_NOATIME);
        assert_eq!(data, "data=journal,dax");
        assert_eq!(parse_flags("ro,rw").0, MsFlags::empty());
    }
}
