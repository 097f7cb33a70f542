//! The files of the host that a VM uses beside its folder: measured when it is saved, checked before
//! it is restored.
//!
//! A folder that came from elsewhere may name any file of this host, and its guest would read it. So
//! what lies outside of the folder is only opened if whoever restores it has said so: with an
//! override for that device, or for all of them.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Component, Path, PathBuf};

use devices::virtio::net::NetSource;
use serde::{Deserialize, Serialize};

use super::manifest::{Manifest, SavedDisk};
use crate::config::VmConfig;

/// A file as it was when the VM was saved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostFile {
    /// The device that it is behind.
    pub id: String,
    /// Its size.
    pub bytes: u64,
    /// When it was last written to, in nanoseconds since 1970; a block device does not say.
    pub modified_unix_nanos: Option<u64>,
}

/// Why a VM does not get its files.
#[derive(Debug, thiserror::Error)]
pub enum HostFileError {
    /// Somebody who is not trusted names them.
    #[error(
        "the snapshot names things of this host that are outside of it: {}; give each with \
         --override, or all with --trust-paths if you trust whoever made it", .0.join(", ")
    )]
    Untrusted(Vec<String>),
    /// Not there, or not readable.
    #[error("{id:?} needs {}, which cannot be read: {source}", path.display())]
    Read {
        /// The device.
        id: String,
        /// The file.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// Of another size.
    #[error("{id:?} needs {}, which has {found} bytes, and had {expected} when the VM was saved",
            path.display())]
    Size {
        /// The device.
        id: String,
        /// The file.
        path: PathBuf,
        /// Its size.
        found: u64,
        /// Its size by then.
        expected: u64,
    },
    /// Written to.
    #[error(
        "{id:?} needs {} as it was when the VM was saved, and it has been written to since; take \
         a copy of that time with --override", path.display()
    )]
    Changed {
        /// The device.
        id: String,
        /// The file.
        path: PathBuf,
    },
}

/// What whoever restores a snapshot has consented to.
#[derive(Debug, Default)]
pub struct Consent {
    /// All that the snapshot names.
    pub all: bool,
    /// Devices that they have named files for themselves.
    pub given: Vec<String>,
}

impl Consent {
    fn is_given(&self, id: &str) -> bool {
        self.given.iter().any(|given| given == id)
    }
}

/// Measures the files of a VM whose devices are at rest, but for those of which there are copies.
pub fn measure(config: &VmConfig, copied: &[SavedDisk]) -> Result<Vec<HostFile>, HostFileError> {
    let is_copied = |id: &str| copied.iter().any(|disk| disk.id == id);
    let files = files(config).into_iter().filter(|(id, _)| !is_copied(id));
    files.map(|(id, path)| look_at(&id, &path)).collect()
}

/// Makes the paths of a configuration that are inside of the snapshot's folder `dir` those from
/// here.
pub fn resolve(config: &mut VmConfig, dir: &Path) {
    let disks = config.disks.iter_mut().map(|disk| &mut disk.path);
    let pmem = config.pmem.iter_mut().map(|pmem| &mut pmem.path);
    for path in disks.chain(pmem).chain(config.rootfs.as_mut()) {
        if path.is_relative() {
            *path = dir.join(&*path);
        }
    }
}

/// Checks that the VM of `config`, which differs from that of the manifest in the devices that the
/// consent names, finds its files as they were, and may have them. Opens nothing that is not
/// consented to.
pub fn check(
    manifest: &Manifest,
    config: &VmConfig,
    dir: &Path,
    consent: &Consent,
) -> Result<(), HostFileError> {
    let untrusted = untrusted(config, dir, consent);
    if !untrusted.is_empty() {
        return Err(HostFileError::Untrusted(untrusted));
    }
    for (id, path) in files(config) {
        let found = look_at(&id, &path)?;
        // What stands in for a disk that was copied; the copies themselves are checked when they are
        // taken.
        let copied = manifest.disks.iter().find(|saved| saved.id == id && consent.is_given(&id));
        let saved = manifest.files.iter().find(|saved| saved.id == id);
        let sizes = [copied.map(|disk| disk.bytes), saved.map(|saved| saved.bytes)];
        if let Some(expected) = sizes.into_iter().flatten().find(|&bytes| bytes != found.bytes) {
            let found = found.bytes;
            return Err(HostFileError::Size { id, path, found, expected });
        }
        let Some(saved) = saved else { continue };
        // Whoever names a file has made it for this; a copy has a time of its own.
        if !consent.is_given(&id) && found.modified_unix_nanos != saved.modified_unix_nanos {
            return Err(HostFileError::Changed { id, path });
        }
    }
    Ok(())
}

fn untrusted(config: &VmConfig, dir: &Path, consent: &Consent) -> Vec<String> {
    if consent.all {
        return Vec::new();
    }
    let files = files(config).into_iter().filter(|(_, path)| !is_inside(path, dir));
    let files = files.map(|(id, path)| (format!("{id:?} is {}", path.display()), id));
    let taps = config.all_net().into_iter().filter_map(|card| match card.source {
        NetSource::Tap(name) => Some((format!("{:?} is the interface {name:?}", card.id), card.id)),
        NetSource::VhostUser(socket) => {
            Some((format!("{:?} is served at {}", card.id, socket.display()), card.id))
        }
        NetSource::Fd(_) => None,
    });
    // Never inside: a folder holds no shares.
    let shares = config.all_fs().into_iter();
    let shares = shares.map(|one| (format!("{:?} is {}", one.id, one.path.display()), one.id));
    let unknown = files.chain(taps).chain(shares).filter(|(_, id)| !consent.is_given(id));
    unknown.map(|(what, _)| what).collect()
}

/// The files of all devices, by the devices' names.
fn files(config: &VmConfig) -> Vec<(String, PathBuf)> {
    let disks = config.all_disks().into_iter().filter(|disk| !disk.vhost_user);
    let disks = disks.map(|disk| (disk.id, disk.path));
    let pmem = config.all_pmem().into_iter().map(|pmem| (pmem.id, pmem.path));
    disks.chain(pmem).collect()
}

/// Also if nothing is there.
fn is_inside(path: &Path, dir: &Path) -> bool {
    match (path.canonicalize(), dir.canonicalize()) {
        (Ok(path), Ok(dir)) => path.starts_with(dir),
        _ => path.starts_with(dir) && !path.components().any(|part| part == Component::ParentDir),
    }
}

fn look_at(id: &str, path: &Path) -> Result<HostFile, HostFileError> {
    let failed = |source| HostFileError::Read { id: id.to_owned(), path: path.to_owned(), source };
    let metadata = std::fs::metadata(path).map_err(failed)?;
    let id = id.to_owned();
    if metadata.file_type().is_block_device() {
        let bytes = block_device_size(path).map_err(failed)?;
        return Ok(HostFile { id, bytes, modified_unix_nanos: None });
    }
    if !metadata.is_file() {
        return Err(failed(io::Error::other("it is neither a file nor a block device")));
    }
    Ok(HostFile { id, bytes: metadata.len(), modified_unix_nanos: modified(&metadata) })
}

fn modified(metadata: &Metadata) -> Option<u64> {
    let seconds = u64::try_from(metadata.mtime()).ok()?;
    let nanos = u64::try_from(metadata.mtime_nsec()).ok()?;
    seconds.checked_mul(1_000_000_000)?.checked_add(nanos)
}

fn block_device_size(path: &Path) -> io::Result<u64> {
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
    let mut device: File = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    device.seek(SeekFrom::End(0))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    struct Ground {
        folder: tempfile::TempDir,
        manifest: Manifest,
        config: VmConfig,
    }

    /// A snapshot in `snapshot` with a disk beside it.
    fn ground() -> Ground {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path().join("snapshot");
        fs::create_dir(&dir).unwrap();
        let disk = folder.path().join("disk");
        fs::write(&disk, [7; 4096]).unwrap();
        let text = format!(
            r#"{{"cpus": 1, "memory": "64M", "kernel": "/k",
                 "disks": [{{"path": {disk:?}, "id": "data"}}]}}"#
        );
        let config: VmConfig = serde_json::from_str(&text).unwrap();
        let mut manifest = Manifest::new(config.clone(), "0".repeat(32), 0, b"");
        manifest.files = measure(&config, &[]).unwrap();
        Ground { folder, manifest, config }
    }

    impl Ground {
        fn check(&self, consent: &Consent) -> Result<(), HostFileError> {
            let dir = self.folder.path().join("snapshot");
            check(&self.manifest, &self.config, &dir, consent)
        }

        fn disk(&self) -> PathBuf {
            self.folder.path().join("disk")
        }
    }

    fn all() -> Consent {
        Consent { all: true, given: Vec::new() }
    }

    fn given(id: &str) -> Consent {
        Consent { all: false, given: vec![id.to_owned()] }
    }

    #[test]
    fn files_outside_of_the_folder_need_consent() {
        let ground = ground();
        let refusal = ground.check(&Consent::default()).unwrap_err().to_string();
        assert!(
            refusal.contains("\"data\" is /") && refusal.contains("--trust-paths"),
            "{refusal}"
        );
        assert!(ground.check(&given("other")).is_err());
        ground.check(&all()).unwrap();
        ground.check(&given("data")).unwrap();
    }

    #[test]
    fn files_in_the_folder_do_not_unless_a_link_leads_out() {
        let mut ground = ground();
        let dir = ground.folder.path().join("snapshot");
        fs::rename(ground.disk(), dir.join("data.img")).unwrap();
        ground.config.disks[0].path = "data.img".into();
        resolve(&mut ground.config, &dir);
        ground.check(&Consent::default()).unwrap();
        let outside = ground.folder.path().join("outside");
        fs::rename(dir.join("data.img"), &outside).unwrap();
        std::os::unix::fs::symlink(&outside, dir.join("data.img")).unwrap();
        assert!(matches!(ground.check(&Consent::default()), Err(HostFileError::Untrusted(_))));
        ground.config.disks[0].path = dir.join("../outside");
        assert!(matches!(ground.check(&Consent::default()), Err(HostFileError::Untrusted(_))));
        ground.config.disks[0].path = dir.join("../missing");
        assert!(matches!(ground.check(&Consent::default()), Err(HostFileError::Untrusted(_))));
        ground.config.disks[0].path = dir.join("missing");
        assert!(matches!(ground.check(&Consent::default()), Err(HostFileError::Read { .. })));
    }

    #[test]
    fn interfaces_need_consent() {
        let mut ground = ground();
        ground.config.net = vec!["tap=tap7,id=net0".parse().unwrap()];
        let refusal = ground.check(&given("data")).unwrap_err().to_string();
        assert!(refusal.contains("\"net0\" is the interface \"tap7\""), "{refusal}");
        ground.check(&all()).unwrap();
    }

    #[test]
    fn what_stands_in_for_a_copied_disk_has_its_size() {
        let mut ground = ground();
        ground.manifest.files.clear();
        let (path, shared) = ("disk-data".into(), false);
        ground.manifest.disks =
            vec![SavedDisk { id: "data".to_owned(), path, bytes: 8192, shared }];
        let smaller = ground.check(&given("data")).unwrap_err().to_string();
        assert!(smaller.contains("has 4096 bytes, and had 8192"), "{smaller}");
        fs::write(ground.disk(), [7; 8193]).unwrap();
        let larger = ground.check(&given("data")).unwrap_err().to_string();
        assert!(larger.contains("has 8193 bytes, and had 8192"), "{larger}");
        fs::write(ground.disk(), [7; 8192]).unwrap();
        ground.check(&given("data")).unwrap();
    }

    #[test]
    fn missing_smaller_and_changed_files_are_told_apart() {
        let ground = ground();
        let whole = ground.manifest.files[0].clone();
        fs::write(ground.disk(), [7; 4096]).unwrap();
        let at = std::time::UNIX_EPOCH + std::time::Duration::from_secs(1);
        File::options().write(true).open(ground.disk()).unwrap().set_modified(at).unwrap();
        let changed = ground.check(&all()).unwrap_err().to_string();
        assert!(changed.contains("\"data\"") && changed.contains("written to since"), "{changed}");
        ground.check(&given("data")).unwrap();
        fs::write(ground.disk(), [7; 512]).unwrap();
        let smaller = ground.check(&given("data")).unwrap_err().to_string();
        assert!(smaller.contains("has 512 bytes, and had 4096"), "{smaller}");
        fs::remove_file(ground.disk()).unwrap();
        let missing = ground.check(&all()).unwrap_err().to_string();
        assert!(missing.contains("cannot be read"), "{missing}");
        nix::unistd::mkfifo(&ground.disk(), nix::sys::stat::Mode::S_IRWXU).unwrap();
        let fifo = ground.check(&all()).unwrap_err().to_string();
        assert!(fifo.contains("neither a file nor a block device"), "{fifo}");
        assert_eq!((whole.bytes, whole.modified_unix_nanos.is_some()), (4096, true));
    }
}
