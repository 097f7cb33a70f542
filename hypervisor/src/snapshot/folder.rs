//! The folder that a snapshot is written into: all of it, or nothing.
//!
//! It is called `NAME.tmp` until it is complete, and locked by whoever writes it. The lock goes with
//! the process, however that ends: a folder of that name without a lock is what somebody has left
//! behind, and gives way to the next one.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};

use super::{MANIFEST, MEMORY, PAGES, RUNS, STATE, SUMS};

/// What a snapshot survives once it has its name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Durability {
    /// A crash of the host: everything is on its disk by then.
    #[default]
    Fsync,
    /// A crash of this process only, for snapshots that need not outlive the host. Sooner done.
    None,
}

/// Why a folder cannot be written. Nothing of it is left.
#[derive(Debug, thiserror::Error)]
pub enum FolderError {
    /// Somebody else's.
    #[error("{} exists; choose another name, or remove it", .0.display())]
    Exists(PathBuf),
    /// Another process, or another request to this one.
    #[error("{} is still being written by another process; choose another name, or wait for it", .0.display())]
    BeingWritten(PathBuf),
    /// What would be lost if it gave way.
    #[error("{} exists and has {file:?} in it, which is of no snapshot; remove it", path.display())]
    Foreign {
        /// The folder.
        path: PathBuf,
        /// What is in it.
        file: String,
    },
    /// Not something with a parent.
    #[error("{} is no name for a new folder", .0.display())]
    Name(PathBuf),
    /// The host refuses.
    #[error("{} cannot be written: {source}", path.display())]
    Write {
        /// The file or folder.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
}

/// How often a folder is tried that others make, complete or remove at the same time.
const ATTEMPTS: usize = 16;

/// A folder under its preliminary name. Gone when it is dropped before it is complete.
pub struct NewFolder {
    preliminary: PathBuf,
    path: PathBuf,
    durability: Durability,
    /// In the order in which they were written.
    files: Vec<(PathBuf, File)>,
    complete: bool,
    _lock: Flock<File>,
}

/// The preliminary name of a folder.
pub fn preliminary_name(path: &Path) -> Option<PathBuf> {
    let mut name = path.file_name()?.to_owned();
    name.push(".tmp");
    Some(path.with_file_name(name))
}

/// Whether somebody writes the folder `path`, or the one that will be called so, at this moment.
pub fn is_being_written(path: &Path) -> bool {
    let is_locked = |path: &Path| {
        let Ok(folder) = open_folder(path) else { return false };
        matches!(Flock::lock(folder, FlockArg::LockSharedNonblock), Err((_, Errno::EWOULDBLOCK)))
    };
    is_locked(path) || preliminary_name(path).is_some_and(|path| is_locked(&path))
}

/// Opens a folder, not what a link of that name points to.
fn open_folder(path: &Path) -> io::Result<File> {
    let flags = libc::O_CLOEXEC | libc::O_NOFOLLOW | libc::O_DIRECTORY;
    OpenOptions::new().read(true).custom_flags(flags).open(path)
}

impl NewFolder {
    /// Makes the folder that will be called `path`, which must not exist. What a process that is
    /// gone has left of it gives way.
    pub fn make(path: &Path, durability: Durability) -> Result<Self, FolderError> {
        let preliminary = preliminary_name(path);
        let preliminary = preliminary.ok_or_else(|| FolderError::Name(path.to_owned()))?;
        let lock = lock(path, &preliminary)?;
        let files = Vec::new();
        let path = path.to_owned();
        let new = Self { preliminary, path, durability, files, complete: false, _lock: lock };
        // Only now: who had the lock may just have given the folder its name.
        if new.path.symlink_metadata().is_ok() {
            return Err(FolderError::Exists(new.path.clone()));
        }
        Ok(new)
    }

    /// Where it will be.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Where a file of that name is meanwhile.
    pub fn place_of(&self, name: &str) -> PathBuf {
        self.preliminary.join(name)
    }

    /// Writes a file. Nothing is on the disk before [`NewFolder::complete`].
    pub fn write<T>(
        &mut self,
        name: &str,
        content: impl FnOnce(&mut File) -> io::Result<T>,
    ) -> Result<T, FolderError> {
        let path = self.preliminary.join(name);
        let mut options = OpenOptions::new();
        let mut open = || options.read(true).write(true).create_new(true).mode(0o600).open(&path);
        let written = open().and_then(|mut file| Ok((content(&mut file)?, file)));
        let (told, file) =
            written.map_err(|source| FolderError::Write { path: path.clone(), source })?;
        self.files.push((path, file));
        Ok(told)
    }

    /// Goes on writing a file that was written since the last [`NewFolder::sync`].
    pub fn rewrite<T>(
        &mut self,
        name: &str,
        content: impl FnOnce(&mut File) -> io::Result<T>,
    ) -> Result<T, FolderError> {
        let path = self.preliminary.join(name);
        let mut files = self.files.iter_mut();
        let file = files.find(|(other, _)| *other == path).map(|(_, file)| file);
        let gone = || io::ErrorKind::NotFound.into();
        let told = file.ok_or_else(gone).and_then(content);
        told.map_err(|source| FolderError::Write { path, source })
    }

    /// Opens a file that has been written.
    pub fn read_back(&self, name: &str) -> Result<File, FolderError> {
        let path = self.preliminary.join(name);
        File::open(&path).map_err(|source| FolderError::Write { path, source })
    }

    /// Takes a file that must be on the disk when the folder is complete.
    pub fn adopt(&mut self, path: PathBuf, file: File) {
        self.files.push((path, file));
    }

    /// Brings what has been written so far to the disk, if the durability asks for it.
    pub fn sync(&mut self) -> Result<(), FolderError> {
        if self.durability == Durability::None {
            return Ok(());
        }
        for (path, file) in self.files.drain(..) {
            file.sync_all().map_err(|source| FolderError::Write { path, source })?;
        }
        sync_folder(&self.preliminary)
    }

    /// Gives the folder its name. The file that says that there is a snapshot should have been
    /// written after the others had come to the disk.
    pub fn complete(mut self) -> Result<(), FolderError> {
        self.sync()?;
        // An empty folder that came in the meantime would be replaced; anything else is not.
        fs::rename(&self.preliminary, &self.path)
            .map_err(|source| FolderError::Write { path: self.path.clone(), source })?;
        self.complete = true;
        let parent = self.path.parent().filter(|parent| !parent.as_os_str().is_empty());
        if self.durability == Durability::Fsync
            && let Err(error) = sync_folder(parent.unwrap_or(Path::new(".")))
        {
            tracing::warn!(%error, "the snapshot's name may not survive a crash of the host");
        }
        Ok(())
    }
}

impl Drop for NewFolder {
    fn drop(&mut self) {
        if !self.complete
            && let Err(error) = fs::remove_dir_all(&self.preliminary)
        {
            tracing::warn!(%error, folder = %self.preliminary.display(), "not removed");
        }
    }
}

fn sync_folder(path: &Path) -> Result<(), FolderError> {
    let synced = File::open(path).and_then(|folder| folder.sync_all());
    synced.map_err(|source| FolderError::Write { path: path.to_owned(), source })
}

/// Makes the folder `preliminary`, or takes over what is left of one, empties and locks it.
fn lock(path: &Path, preliminary: &Path) -> Result<Flock<File>, FolderError> {
    let failed = |source| FolderError::Write { path: preliminary.to_owned(), source };
    let busy = || FolderError::BeingWritten(path.to_owned());
    if path.symlink_metadata().is_ok() {
        return Err(FolderError::Exists(path.to_owned()));
    }
    for _ in 0..ATTEMPTS {
        match DirBuilder::new().mode(0o700).create(preliminary) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(failed(error));
            }
            _ => {}
        }
        let folder = match open_folder(preliminary) {
            Ok(folder) => folder,
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(_) => return Err(FolderError::Exists(preliminary.to_owned())),
        };
        let inode = folder.metadata().map_err(failed)?.ino();
        let lock = match Flock::lock(folder, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => lock,
            Err((_, Errno::EWOULDBLOCK)) => return Err(busy()),
            Err((_, errno)) => return Err(failed(errno.into())),
        };
        // Whoever had it may have given it its name, or removed it.
        if fs::symlink_metadata(preliminary).is_ok_and(|now| now.ino() == inode) {
            clear(preliminary)?;
            return Ok(lock);
        }
    }
    Err(busy())
}

/// Removes what a process that is gone has left. Touches nothing if it is not all of a snapshot.
fn clear(folder: &Path) -> Result<(), FolderError> {
    let failed = |source| FolderError::Write { path: folder.to_owned(), source };
    let mut left = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name();
        let ours = name.to_str().is_some_and(is_ours);
        if !ours || !entry.file_type().map_err(failed)?.is_file() {
            let file = name.to_string_lossy().into_owned();
            return Err(FolderError::Foreign { path: folder.to_owned(), file });
        }
        left.push(entry.path());
    }
    for path in left {
        fs::remove_file(&path).map_err(|source| FolderError::Write { path, source })?;
    }
    Ok(())
}

/// Whether a snapshot has files of that name.
fn is_ours(name: &str) -> bool {
    [MANIFEST, STATE, MEMORY, SUMS, PAGES, RUNS].contains(&name) || name.starts_with("disk-")
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn make(path: &Path) -> Result<NewFolder, FolderError> {
        NewFolder::make(path, Durability::Fsync)
    }

    fn refusal(path: &Path) -> String {
        make(path).err().expect("it is refused").to_string()
    }

    #[test]
    fn what_is_not_complete_is_gone() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("s");
        let mut folder = make(&path).unwrap();
        folder.write(STATE, |file| file.write_all(b"x")).unwrap();
        let full = folder.write(MEMORY, |_| Err::<(), _>(io::ErrorKind::StorageFull.into()));
        assert!(full.unwrap_err().to_string().contains("memory cannot be written"));
        drop(folder);
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
    }

    #[test]
    fn two_do_not_write_the_same() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("s");
        let mut folder = make(&path).unwrap();
        folder.write(STATE, |file| file.write_all(b"mine")).unwrap();
        assert!(is_being_written(&path) && is_being_written(&root.path().join("s.tmp")));
        assert!(refusal(&path).contains("still being written"));
        folder.complete().unwrap();
        assert!(!is_being_written(&path));
        assert_eq!(fs::read(path.join(STATE)).unwrap(), b"mine");
        assert!(refusal(&path).contains("s exists"));
    }

    #[test]
    fn what_a_dead_process_has_left_gives_way() {
        let root = tempfile::tempdir().unwrap();
        let left = root.path().join("s.tmp");
        fs::create_dir(&left).unwrap();
        for name in [STATE, MEMORY, SUMS, "disk-data"] {
            fs::write(left.join(name), "old").unwrap();
        }
        let path = root.path().join("s");
        let mut folder = make(&path).unwrap();
        folder.write(STATE, |file| file.write_all(b"new")).unwrap();
        folder.complete().unwrap();
        let names = fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().file_name());
        assert_eq!(names.collect::<Vec<_>>(), [STATE]);
        assert_eq!(fs::read(path.join(STATE)).unwrap(), b"new");
    }

    #[test]
    fn what_is_somebody_elses_does_not_give_way() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("s");
        fs::write(&path, "mine").unwrap();
        assert!(refusal(&path).contains("exists"));
        for name in ["/", "..", "/nonexistent/folder"] {
            assert!(make(Path::new(name)).is_err(), "{name}");
        }
        let left = root.path().join("other.tmp");
        fs::create_dir(&left).unwrap();
        fs::write(left.join(MEMORY), "").unwrap();
        fs::write(left.join("thesis"), "mine").unwrap();
        assert!(refusal(&root.path().join("other")).contains("\"thesis\""));
        assert_eq!(fs::read_dir(&left).unwrap().count(), 2);
        std::os::unix::fs::symlink(&left, root.path().join("link.tmp")).unwrap();
        assert!(refusal(&root.path().join("link")).contains("link.tmp exists"));
    }

    #[test]
    fn many_at_once_make_one() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("s");
        let write = || {
            let mut folder = make(&path).ok()?;
            folder.write(STATE, |file| file.write_all(&[7; 100_000])).ok()?;
            folder.complete().ok()
        };
        let made = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(write)).collect();
            threads.into_iter().filter_map(|thread| thread.join().unwrap()).count()
        });
        assert_eq!(made, 1);
        assert_eq!(fs::metadata(path.join(STATE)).unwrap().len(), 100_000);
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 1);
    }
}
