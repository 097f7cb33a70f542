//! Copies of a VM's disks, of the same instant as its memory, and the disks of VMs made of them.
//!
//! The copy in a snapshot belongs to nobody: each VM that is made of it gets a copy of its own, so
//! that no two of them see each other's writes and the next one begins where the first did. Where the
//! file system can, all of these share their blocks, and cost room for what is written only.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use super::folder::{FolderError, NewFolder};
use super::manifest::{Manifest, SavedDisk, disk_file};
use super::{copy, load};
use crate::config::VmConfig;
use crate::disks::RunningDisk;

/// What stands for a path when a disk shall not be copied.
pub const NO_COPY: &str = "none";

/// Bytes of a disk whose copy takes a time that somebody might wonder about.
const LARGE: u64 = 128 << 20;

/// Where files without names are found.
const UNNAMED: &str = "/proc/self/fd";

/// Why a disk cannot be copied.
#[derive(Debug, thiserror::Error)]
pub enum DiskCopyError {
    /// A name that no disk has.
    #[error(
        "there is no disk called {0:?} that could be copied; `cube-vmm info` tells their names"
    )]
    Unknown(String),
    /// It has no blocks that could be shared, and is large.
    #[error(
        "disk {0:?} is a block device; say where its copy shall be with --disk-clone {0}=FILE, or \
         that there shall be none with {0}=none"
    )]
    BlockDevice(String),
    /// Nobody could find it again.
    #[error(
        "disk {0:?} has no name, so a snapshot cannot refer to it; let it be copied, or restore with \
         --disk-dir"
    )]
    Unnamed(String),
    /// Something is there.
    #[error("the copy of a disk, {}, exists; choose another name, or remove it", .0.display())]
    Exists(PathBuf),
    /// Not a place.
    #[error("{} is no absolute path for the copy of a disk", .0.display())]
    Relative(PathBuf),
    /// It cannot be read, or its copy not be written.
    #[error("disk {id:?} cannot be copied to {}: {source}", path.display())]
    Copy {
        /// The disk.
        id: String,
        /// The copy.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// The copy in a snapshot is not what it was.
    #[error(transparent)]
    Load(#[from] load::LoadError),
    /// The folder.
    #[error(transparent)]
    Folder(#[from] FolderError),
}

/// A disk that is going to be copied.
pub struct Plan {
    id: String,
    from: File,
    /// Where the copy will be found.
    path: PathBuf,
    /// Where it is written.
    place: PathBuf,
    bytes: u64,
}

/// Copies outside of the folder, which are removed unless all of the snapshot comes about.
#[derive(Default)]
pub struct Outside(Vec<PathBuf>);

impl Outside {
    /// They stay.
    pub fn keep(&mut self) {
        self.0.clear();
    }
}

impl Drop for Outside {
    fn drop(&mut self) {
        for path in &self.0 {
            if let Err(error) = fs::remove_file(path) {
                tracing::warn!(%error, path = %path.display(), "copy of a disk not removed");
            }
        }
    }
}

/// Which disks are copied to where, checked before the VM stands still.
pub fn plan(
    config: &VmConfig,
    running: &[RunningDisk],
    wanted: &BTreeMap<String, PathBuf>,
    folder: &NewFolder,
) -> Result<Vec<Plan>, DiskCopyError> {
    let known = |id: &String| running.iter().any(|disk| disk.id.as_str() == id);
    if let Some(unknown) = wanted.keys().find(|id| !known(id)) {
        return Err(DiskCopyError::Unknown(unknown.clone()));
    }
    let mut plans = Vec::new();
    for disk in config.all_disks() {
        let place = wanted.get(&disk.id);
        let running = running.iter().find(|running| running.id.as_str() == disk.id);
        let Some(file) = running.and_then(|running| running.file.as_ref()) else { continue };
        // One that cannot be written is referred to, unless somebody wants it otherwise.
        if place.is_some_and(|place| place.as_os_str() == NO_COPY)
            || (place.is_none() && disk.read_only)
        {
            if disk.path.starts_with(UNNAMED) {
                return Err(DiskCopyError::Unnamed(disk.id));
            }
            continue;
        }
        plans.push(Plan::new(disk.id, file, place, folder)?);
    }
    Ok(plans)
}

impl Plan {
    fn new(
        id: String,
        file: &File,
        place: Option<&PathBuf>,
        folder: &NewFolder,
    ) -> Result<Self, DiskCopyError> {
        let name = disk_file(&id);
        let inside = (PathBuf::from(&name), folder.place_of(&name));
        let (path, place) = place.map_or(inside, |place| (place.clone(), place.clone()));
        let failed = |source| DiskCopyError::Copy { id: id.clone(), path: place.clone(), source };
        let from = file.try_clone().map_err(failed)?;
        let metadata = from.metadata().map_err(failed)?;
        if !metadata.is_file() && path.is_relative() {
            return Err(DiskCopyError::BlockDevice(id));
        }
        if path == place && path.is_relative() {
            return Err(DiskCopyError::Relative(path));
        }
        if place.symlink_metadata().is_ok() {
            return Err(DiskCopyError::Exists(place));
        }
        // What is not on the disk yet has to go there before blocks can be shared: rather now, while
        // the guest runs. That it fails is told by the copy, if it is of concern.
        let _ = from.sync_data();
        // The end is also that of a block device, whose metadata has no size.
        let bytes = io::Seek::seek(&mut &from, io::SeekFrom::End(0)).map_err(failed)?;
        Ok(Self { id, from, path, place, bytes })
    }

    /// Makes the copy. While the VM stands still.
    pub fn copy(
        self,
        folder: &mut NewFolder,
        outside: &mut Outside,
    ) -> Result<SavedDisk, DiskCopyError> {
        let Self { id, from, path, place, bytes } = self;
        let failed = |source| DiskCopyError::Copy { id: id.clone(), path: place.clone(), source };
        let mut options = OpenOptions::new();
        // Nobody shall write to it by mistake.
        options.write(true).create_new(true).mode(0o400);
        let to = match options.open(&place) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                return Err(DiskCopyError::Exists(place));
            }
            to => to.map_err(failed)?,
        };
        if path.is_absolute() {
            outside.0.push(place.clone());
        }
        let shared = copy::file(&from, &to, bytes).map_err(failed)?;
        folder.adopt(place, to);
        Ok(SavedDisk { id, path, bytes, shared })
    }
}

/// Where the disks of a VM are that is made of a snapshot.
#[derive(Clone, Copy, Debug)]
pub enum DiskPlace<'a> {
    /// Files without a name, on the file system of the snapshot, that are gone with the VM.
    Unnamed,
    /// Files `disk-ID` in this folder, which must not exist and stay.
    Folder(&'a Path),
}

/// Makes the copies in the snapshot in `dir` the disks of a configuration, but for those in
/// `overridden`.
pub fn refer_to_copies(
    dir: &Path,
    manifest: &Manifest,
    config: &mut VmConfig,
    overridden: &[String],
) {
    for saved in manifest.disks.iter().filter(|saved| !overridden.contains(&saved.id)) {
        set_path(config, &saved.id, dir.join(&saved.path));
    }
}

fn set_path(config: &mut VmConfig, id: &str, path: PathBuf) {
    match config.disks.iter_mut().find(|disk| disk.id == id) {
        Some(disk) => disk.path = path,
        // Its name is fixed.
        None => config.rootfs = Some(path),
    }
}

/// Gives a VM that is made of the snapshot in `dir` a copy of each disk that was copied there, but
/// for those in `overridden`. The files must be kept open as long as the
/// VM lives.
pub fn place(
    dir: &Path,
    manifest: &Manifest,
    config: &mut VmConfig,
    overridden: &[String],
    place: DiskPlace<'_>,
) -> Result<Vec<File>, DiskCopyError> {
    let mut files = Vec::new();
    for saved in manifest.disks.iter().filter(|saved| !overridden.contains(&saved.id)) {
        let from_path = dir.join(&saved.path);
        let from = load::open(&from_path)?;
        load::expect_size(&from_path, &from, saved.bytes)?;
        let (path, to) = own(&from_path, saved, place)?;
        let made = copy::file(&from, &to, saved.bytes);
        match made {
            Ok(false) if saved.bytes >= LARGE => tracing::warn!(
                disk = saved.id,
                bytes = saved.bytes,
                "copied, since this file system shares no blocks with that of the snapshot"
            ),
            Ok(_) => {}
            Err(source) => {
                if matches!(place, DiskPlace::Folder(_)) {
                    let _ = fs::remove_file(&path);
                }
                return Err(DiskCopyError::Copy { id: saved.id.clone(), path, source });
            }
        }
        set_path(config, &saved.id, path);
        files.push(to);
    }
    Ok(files)
}

/// Makes the empty file that becomes a VM's own disk.
fn own(
    from: &Path,
    saved: &SavedDisk,
    place: DiskPlace<'_>,
) -> Result<(PathBuf, File), DiskCopyError> {
    let (path, to) = match place {
        DiskPlace::Unnamed => {
            let beside = from.parent().unwrap_or(Path::new("/")).to_owned();
            // Also where the file system makes no files without names, as overlayfs may.
            let to = tempfile::tempfile_in(&beside);
            let path = to.as_ref().map(|to| format!("{UNNAMED}/{}", to.as_raw_fd()));
            (path.map_or(beside, PathBuf::from), to)
        }
        DiskPlace::Folder(folder) => {
            let path = folder.join(disk_file(&saved.id));
            let mut options = OpenOptions::new();
            let to = options.read(true).write(true).mode(0o600).create_new(true).open(&path);
            (path, to)
        }
    };
    match to {
        Ok(to) => {
            // Not that of the copy in the snapshot, which is for reading only.
            let _ = to.set_permissions(fs::Permissions::from_mode(0o600));
            Ok((path, to))
        }
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            Err(DiskCopyError::Exists(path))
        }
        Err(source) => Err(DiskCopyError::Copy { id: saved.id.clone(), path, source }),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::super::folder::Durability;
    use super::*;

    fn config() -> VmConfig {
        let config = r#"{"cpus": 1, "memory": "64M", "kernel": "/k", "disks":
            [{"path": "/a", "id": "data"}, {"path": "/b", "id": "tools", "read_only": true}]}"#;
        serde_json::from_str(config).unwrap()
    }

    fn manifest(disks: Vec<SavedDisk>) -> Manifest {
        let mut manifest = Manifest::new(config(), "0".repeat(32), 0, b"");
        manifest.disks = disks;
        manifest
    }

    fn saved(path: &str) -> SavedDisk {
        SavedDisk { id: "data".to_owned(), path: path.into(), bytes: 4096, shared: false }
    }

    #[test]
    fn every_vm_gets_a_disk_of_its_own() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("disk-data"), [7; 4096]).unwrap();
        let manifest = manifest(vec![saved("disk-data")]);
        let mut configs = [config(), config(), config()];
        let mut files = Vec::new();
        for config in &mut configs {
            let made = place(dir.path(), &manifest, config, &[], DiskPlace::Unnamed).unwrap();
            let file = OpenOptions::new().write(true).open(&config.disks[0].path).unwrap();
            let mut read = [0; 4096];
            made[0].read_exact_at(&mut read, 0).unwrap();
            assert_eq!(read, [7; 4096]);
            file.write_all_at(&[9; 4096], 0).unwrap();
            files.push(made);
        }
        assert_eq!(fs::read(dir.path().join("disk-data")).unwrap(), [7; 4096]);
        assert_eq!(configs[0].disks[1].path, PathBuf::from("/b"));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_folder_of_disks_stays_and_is_not_overwritten() {
        let (dir, own) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        fs::write(dir.path().join("disk-data"), [7; 4096]).unwrap();
        let manifest = manifest(vec![saved("disk-data")]);
        let folder = DiskPlace::Folder(own.path());
        let mut config = config();
        place(dir.path(), &manifest, &mut config, &[], folder).unwrap();
        assert_eq!(config.disks[0].path, own.path().join("disk-data"));
        fs::write(&config.disks[0].path, "mine").unwrap();
        let again = place(dir.path(), &manifest, &mut config, &[], folder);
        assert!(matches!(again, Err(DiskCopyError::Exists(_))));
        assert_eq!(fs::read(own.path().join("disk-data")).unwrap(), b"mine");
        let other = ["data".to_owned()];
        assert_eq!(place(dir.path(), &manifest, &mut config, &other, folder).unwrap().len(), 0);
    }

    #[test]
    fn copies_that_are_not_what_they_were_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let manifest = manifest(vec![saved("disk-data")]);
        let refusal = || {
            let place = place(dir.path(), &manifest, &mut config(), &[], DiskPlace::Unnamed);
            place.unwrap_err().to_string()
        };
        assert!(refusal().contains("disk-data cannot be read"));
        fs::write(dir.path().join("disk-data"), [7; 4095]).unwrap();
        assert!(refusal().contains("4095 bytes"));
        fs::remove_file(dir.path().join("disk-data")).unwrap();
        std::os::unix::fs::symlink("/dev/zero", dir.path().join("disk-data")).unwrap();
        assert!(refusal().contains("not a regular file"));
    }

    #[test]
    fn disks_that_cannot_be_copied_are_refused_before_anything_happens() {
        let root = tempfile::tempdir().unwrap();
        let folder = NewFolder::make(&root.path().join("s"), Durability::None).unwrap();
        let refusal = |id: &str, place: &Path| {
            let wanted = BTreeMap::from([(id.to_owned(), place.to_owned())]);
            let plan = plan(&config(), &[], &wanted, &folder);
            plan.err().expect("it is refused").to_string()
        };
        assert!(refusal("none", Path::new("/x")).contains("no disk called \"none\""));
        let disk = tempfile::tempfile().unwrap();
        let plan = |place: &Path| {
            let place = place.to_owned();
            Plan::new("data".to_owned(), &disk, Some(&place), &folder).err().map(|e| e.to_string())
        };
        assert!(plan(Path::new("here")).unwrap().contains("no absolute path"));
        assert!(plan(Path::new("/dev/null")).unwrap().contains("exists"));
        assert_eq!(plan(&root.path().join("copy")), None);
    }
}
