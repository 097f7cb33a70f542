//! File systems of their own for tests, which are gone with the thread that made them.
//!
//! They are mounted in a mount namespace of the thread, which what it starts inherits. That needs
//! root, and loop devices for all but memory.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};

use crate::artifacts::text;
use crate::image::host;
use crate::place::Place;

/// Where a file system is mounted.
pub struct Filesystem {
    /// Its root.
    pub path: PathBuf,
}

/// The calling thread mounts for itself and for what it starts, no longer for others.
///
/// # Panics
/// If it may not, which root may.
fn private_mounts() {
    unshare(CloneFlags::CLONE_NEWNS).expect("root, to mount file systems");
    let flags = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    mount(None::<&str>, "/", None::<&str>, flags, None::<&str>).unwrap();
}

impl Filesystem {
    /// An XFS, whose files can share blocks.
    pub fn xfs(place: &Place, name: &str) -> Self {
        private_mounts();
        let image = sparse(place, name, 1 << 30);
        host("mkfs.xfs", &["-q", "-m", "reflink=1", &image]);
        on_loop(place, name, &image)
    }

    /// One in memory, of that many bytes, as the caller's mounts are.
    pub fn memory(place: &Place, name: &str, bytes: u64) -> Self {
        private_mounts();
        let path = PathBuf::from(place.given_folder(name));
        let size = format!("size={bytes}");
        mount(Some("tmpfs"), &path, Some("tmpfs"), MsFlags::empty(), Some(size.as_str())).unwrap();
        Self { path }
    }

    /// Makes one in memory larger or smaller.
    ///
    /// # Panics
    /// If there is more in it.
    pub fn resize(&self, bytes: u64) {
        let (flags, size) = (MsFlags::MS_REMOUNT, format!("size={bytes}"));
        mount(None::<&str>, &self.path, None::<&str>, flags, Some(size.as_str())).unwrap();
    }

    /// An ext4 on storage that fails to take more than a little.
    pub fn failing(place: &Place, name: &str) -> Self {
        let below = Self::memory(place, &format!("{name}.below"), 64 << 20);
        let image = text(&below.path.join("image"));
        fs::File::create(&image).unwrap().set_len(64 << 20).unwrap();
        host("mkfs.ext4", &["-q", "-O", "^has_journal", &image]);
        let mounted = on_loop(place, name, &image);
        below.resize(fs::metadata(&image).unwrap().blocks() * 512 + (128 << 10));
        mounted
    }

    /// A path in it.
    pub fn join(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }
}

fn sparse(place: &Place, name: &str, bytes: u64) -> String {
    let image = place.given(&format!("{name}.image"), "");
    fs::File::options().write(true).open(&image).unwrap().set_len(bytes).unwrap();
    image
}

/// The loop device goes when the namespace does.
fn on_loop(place: &Place, name: &str, image: &str) -> Filesystem {
    let path = place.given_folder(name);
    host("mount", &["-o", "loop", image, &path]);
    Filesystem { path: path.into() }
}

/// Whether two files have blocks in common.
///
/// # Panics
/// If that cannot be told.
pub fn share_blocks(one: &Path, other: &Path) -> bool {
    let places = |path: &Path| -> Vec<String> {
        let output = std::process::Command::new("filefrag").arg("-v").arg(path).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{said}");
        let extents = said.lines().filter(|line| line.contains("shared"));
        extents.filter_map(|line| Some(line.split(':').nth(2)?.trim().to_owned())).collect()
    };
    let (one, other) = (places(one), places(other));
    one.iter().any(|place| other.contains(place))
}
