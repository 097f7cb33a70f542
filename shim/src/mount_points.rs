//! Places for mounts in a root that the guest cannot write to: who makes the container there needs
//! something to mount on, and images have little. Nothing of it leaves the root, whatever links an
//! image has.

use std::os::fd::OwnedFd;
use std::path::{Component, Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, open, openat, openat2, readlinkat};
use nix::sys::stat::{Mode, mkdirat};
use serde_json::Value;

use crate::error::{Result, io};
use crate::spec::Adapted;

/// As many as the kernel follows, path_resolution(7).
const MOST_LINKS: u32 = 40;

/// Makes those that are missing in the root at `rootfs`.
pub fn make(rootfs: &Path, adapted: &Adapted) -> Result<()> {
    let failed = || format!("open {}", rootfs.display());
    let root = open(rootfs, OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty())
        .map_err(io(failed()))?;
    let mounts: Vec<&Value> = adapted.spec["mounts"].as_array().into_iter().flatten().collect();
    for (number, mount) in mounts.iter().enumerate() {
        let destination = destination(mount);
        // What is mounted over is made there, not here.
        let covered = mounts[..number].iter().any(|other| {
            let other = self::destination(other);
            destination != other && destination.starts_with(other)
        });
        if !covered {
            let made = make_one(&root, &destination, is_file(mount, adapted), MOST_LINKS);
            made.map_err(io(format!("make {} in the root", destination.display())))?;
        }
    }
    Ok(())
}

fn destination(mount: &Value) -> PathBuf {
    lexical(Path::new(mount["destination"].as_str().unwrap_or_default()))
}

/// Whether a file is mounted there, which needs one.
fn is_file(mount: &Value, adapted: &Adapted) -> bool {
    let source = Path::new(mount["source"].as_str().unwrap_or_default());
    let volume = adapted
        .volumes
        .iter()
        .find(|volume| source.ends_with(Path::new("mounts").join(&volume.name)));
    volume.is_some_and(|volume| volume.source.metadata().is_ok_and(|meta| !meta.is_dir()))
}

/// `links` is how many may still be followed to something that is not there.
fn make_one(root: &OwnedFd, path: &Path, file: bool, links: u32) -> nix::Result<()> {
    let parts: Vec<_> = path.iter().collect();
    let mut parent = inside(root, Path::new("."))?;
    let mut so_far = PathBuf::new();
    for (number, part) in parts.iter().enumerate() {
        so_far.push(part);
        let last = number + 1 == parts.len();
        match inside(root, &so_far) {
            Ok(next) => {
                parent = next;
                continue;
            }
            Err(Errno::ENOENT) => {}
            Err(errno) => return Err(errno),
        }
        let made = if last && file {
            let flags = OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_WRONLY | OFlag::O_CLOEXEC;
            openat(&parent, *part, flags, Mode::from_bits_truncate(0o644)).map(drop)
        } else {
            mkdirat(&parent, *part, Mode::from_bits_truncate(0o755))
        };
        match made {
            Ok(()) => parent = inside(root, &so_far)?,
            // A link to what is not there.
            Err(Errno::EEXIST) if links > 0 => {
                let target = PathBuf::from(readlinkat(&parent, *part)?);
                so_far.pop();
                let rest: PathBuf = parts[number + 1..].iter().collect();
                let path = lexical(&so_far.join(target).join(rest));
                return make_one(root, &path, file, links - 1);
            }
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

/// A path from the root, without `..`.
fn lexical(path: &Path) -> PathBuf {
    let mut clean = PathBuf::new();
    for part in path.components() {
        match part {
            Component::Normal(name) => clean.push(name),
            Component::ParentDir => drop(clean.pop()),
            _ => {}
        }
    }
    clean
}

/// What is at a path, with the root for `/` of all links.
fn inside(root: &OwnedFd, path: &Path) -> nix::Result<OwnedFd> {
    let how = OpenHow::new()
        .flags(OFlag::O_PATH | OFlag::O_CLOEXEC)
        .resolve(ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_MAGICLINKS);
    openat2(root, path, how)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use serde_json::json;

    use super::*;
    use crate::spec::Volume;

    #[test]
    fn places_are_made_in_the_root_and_nowhere_else() {
        let dir = tempfile::tempdir().unwrap();
        let (root, outside) = (dir.path().join("root"), dir.path().join("outside"));
        fs::create_dir_all(root.join("real")).unwrap();
        fs::create_dir(&outside).unwrap();
        fs::write(outside.join("conf"), "x").unwrap();
        symlink(&outside, root.join("out")).unwrap();
        symlink("/real", root.join("link")).unwrap();
        let volume = |name: &str, source: &Path| Volume {
            source: source.to_owned(),
            name: name.to_owned(),
            read_only: true,
            recursive: true,
        };
        let adapted = Adapted {
            spec: json!({"mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                {"destination": "/proc/deeper", "type": "tmpfs", "source": "tmpfs"},
                {"destination": "/etc/resolv.conf", "source": "/run/cube/share/c/mounts/0"},
                {"destination": "/link/data", "source": "/run/cube/share/c/mounts/1"},
            ]}),
            volumes: vec![volume("0", &outside.join("conf")), volume("1", &outside)],
            read_only_root: true,
        };
        make(&root, &adapted).unwrap();
        make(&root, &adapted).unwrap();
        assert!(root.join("proc").is_dir() && !root.join("proc/deeper").exists());
        assert!(root.join("etc/resolv.conf").is_file() && root.join("real/data").is_dir());
        // A link out of the root, or to what is not there, is one to what could be in it.
        symlink("../../../run/later", root.join("etc/dangling")).unwrap();
        symlink("loop", root.join("loop")).unwrap();
        let more = |destination: &str| {
            let spec = json!({"mounts": [{"destination": destination, "type": "tmpfs"}]});
            make(&root, &Adapted { spec, ..adapted.clone() })
        };
        more("/out/new").unwrap();
        more("/etc/dangling").unwrap();
        assert!(root.join("run/later").is_dir());
        assert!(more("/loop").is_err());
        assert_eq!(fs::read_dir(&outside).unwrap().count(), 1);
    }
}
