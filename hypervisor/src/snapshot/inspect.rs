//! What a snapshot is, whether it is whole, and which there are: without making a VM of it.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::folder::is_being_written;
use super::hot::{HotError, HotSet};
use super::load::{self, LoadError};
use super::machine::MachineState;
use super::manifest::{Manifest, Parent};
use super::runs::{self, BadRun, Run};
use super::sums::{Damage, Sums};
use super::{MANIFEST, MAX_STATE, MEMORY, PAGES, RUNS, STATE, SUMS, checksum};

/// Why a snapshot is not whole.
#[derive(Debug, thiserror::Error)]
pub enum InspectError {
    /// A part cannot be read, or is not that of the description.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The list of hot pages is no good.
    #[error(transparent)]
    Hot(#[from] HotError),
    /// Memory is not what was written.
    #[error("{} is damaged: {source}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Where.
        source: Damage,
    },
    /// The list of pages makes no sense.
    #[error("{} is damaged: {source}", path.display())]
    Runs {
        /// The file.
        path: PathBuf,
        /// Where.
        source: BadRun,
    },
    /// The list is of other pages than there are.
    #[error("{} is of {expected} bytes of pages, there are {found}", path.display())]
    Pages {
        /// The list.
        path: PathBuf,
        /// Bytes that it is of.
        expected: u64,
        /// Bytes that there are.
        found: u64,
    },
    /// Not a folder, or not to be read.
    #[error("{} cannot be read: {source}", path.display())]
    Read {
        /// The folder or file.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// Nothing to check it by.
    #[error(
        "the memory of {} has no checksums, since it was written by {vmm}; all else is whole",
        dir.display()
    )]
    NoSums {
        /// The folder.
        dir: PathBuf,
        /// Version of the VMM.
        vmm: String,
    },
}

/// Memory, or the pages of it that differ, with checksums. Nothing of it has been read.
pub struct StoredMemory {
    /// The file.
    pub path: PathBuf,
    /// The same, open.
    pub file: File,
    /// Its length.
    pub bytes: u64,
    /// Its checksums. Version 1 of the format had none.
    pub sums: Option<Sums>,
    /// Of a difference: which pages.
    pub runs: Option<Vec<Run>>,
}

impl StoredMemory {
    /// Opens that of the snapshot in `dir`.
    pub fn open(dir: &Path, manifest: &Manifest) -> Result<Self, InspectError> {
        let (name, bytes) = match &manifest.parent {
            Some(parent) => (PAGES, parent.pages_bytes),
            None => (MEMORY, manifest.memory_bytes),
        };
        let path = dir.join(name);
        let file = load::open(&path)?;
        load::expect_size(&path, &file, bytes)?;
        let sums = match &manifest.sums_crc64 {
            Some(crc) => Some(Sums::from_bytes(&checked(dir, SUMS, Sums::size(bytes), crc)?)),
            None => None,
        };
        let runs = manifest.parent.as_ref();
        let runs = runs.map(|parent| runs_of(dir, parent, manifest.memory_bytes)).transpose()?;
        Ok(Self { path, file, bytes, sums, runs })
    }
}

fn runs_of(dir: &Path, parent: &Parent, memory_bytes: u64) -> Result<Vec<Run>, InspectError> {
    let path = dir.join(RUNS);
    let file = load::open(&path)?;
    // No more runs than there are pages, whatever the file says.
    let most = runs::most_bytes(memory_bytes);
    let bytes = load::read(&path, &file, None, most)?;
    if checksum::of(&bytes) != parent.runs_crc64 {
        return Err(LoadError::Damaged(path).into());
    }
    let runs = match runs::from_bytes(&bytes, memory_bytes) {
        Ok(runs) => runs,
        Err(source) => return Err(InspectError::Runs { path, source }),
    };
    match runs::data_bytes(&runs) {
        found if found == parent.pages_bytes => Ok(runs),
        expected => Err(InspectError::Pages { path, expected, found: parent.pages_bytes }),
    }
}

pub(super) fn checked(
    dir: &Path,
    name: &str,
    bytes: u64,
    crc64: &str,
) -> Result<Vec<u8>, LoadError> {
    let path = dir.join(name);
    let content = load::read(&path, &load::open(&path)?, Some(bytes), bytes)?;
    if checksum::of(&content) == crc64 { Ok(content) } else { Err(LoadError::Damaged(path)) }
}

/// The state of the machine in `dir`, compared with its checksum.
pub fn state(dir: &Path, manifest: &Manifest) -> Result<MachineState, InspectError> {
    let path = dir.join(STATE);
    if manifest.state_bytes > MAX_STATE {
        let (found, expected) = (manifest.state_bytes, format!("at most {MAX_STATE}"));
        return Err(LoadError::Size { path, found, expected }.into());
    }
    let bytes = checked(dir, STATE, manifest.state_bytes, &manifest.state_crc64)?;
    MachineState::parse(&bytes).map_err(|source| LoadError::State { path, source }.into())
}

/// Reads all of the snapshot in `dir` and compares it with its checksums; the bytes that were
/// checked. Of disks there are none: only that they are there, and their sizes.
pub fn verify(dir: &Path) -> Result<u64, InspectError> {
    let manifest = load::manifest(dir)?;
    state(dir, &manifest)?;
    for disk in &manifest.disks {
        let path = dir.join(&disk.path);
        load::expect_size(&path, &load::open(&path)?, disk.bytes)?;
    }
    HotSet::in_folder(dir, &manifest)?;
    let memory = StoredMemory::open(dir, &manifest)?;
    let Some(sums) = memory.sums else {
        return Err(InspectError::NoSums { dir: dir.to_owned(), vmm: manifest.vmm });
    };
    let found = Sums::of_file(&memory.file, memory.bytes);
    let found = found.map_err(|source| InspectError::Read { path: memory.path.clone(), source })?;
    match sums.compare(&found) {
        Ok(()) => Ok(manifest.state_bytes + memory.bytes),
        Err(source) => Err(InspectError::Damaged { path: memory.path, source }),
    }
}

/// What a snapshot is.
#[derive(Debug, Serialize)]
pub struct About {
    /// The folder.
    pub dir: PathBuf,
    /// Bytes of the host's disk that it takes, less those of copies that share blocks.
    pub stored_bytes: u64,
    /// Its description.
    #[serde(flatten)]
    pub manifest: Manifest,
}

/// Tells about the snapshot in `dir`, of which only the description is read.
pub fn about(dir: &Path) -> Result<About, InspectError> {
    let manifest = load::manifest(dir)?;
    let shared = |name: &str| {
        let mut disks = manifest.disks.iter();
        disks.any(|disk| disk.shared && disk.path.as_os_str() == name)
    };
    let failed = |source| InspectError::Read { path: dir.to_owned(), source };
    let mut stored_bytes = 0;
    for entry in fs::read_dir(dir).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        if !entry.file_name().to_str().is_some_and(shared) {
            stored_bytes += entry.metadata().map_err(failed)?.blocks() * 512;
        }
    }
    Ok(About { dir: dir.to_owned(), stored_bytes, manifest })
}

/// One line of a list.
#[derive(Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Listed {
    /// A snapshot.
    Snapshot(Box<About>),
    /// Not complete yet.
    BeingWritten(PathBuf),
    /// Never completed: it gives way to the next snapshot of its name.
    LeftBehind(PathBuf),
    /// Not to be used.
    Refused {
        /// The folder.
        dir: PathBuf,
        /// Why.
        why: String,
    },
}

/// The snapshots in a folder, by time; then what is none and was to be.
pub fn list(folder: &Path) -> Result<Vec<Listed>, InspectError> {
    let failed = |source| InspectError::Read { path: folder.to_owned(), source };
    let mut listed = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        if entry.file_type().map_err(failed)?.is_dir() {
            listed.extend(look_at(entry.path()));
        }
    }
    listed.sort_by_key(|one| match one {
        Listed::Snapshot(about) => (0, about.manifest.taken_unix_nanos, about.dir.clone()),
        Listed::BeingWritten(dir) => (1, 0, dir.clone()),
        Listed::LeftBehind(dir) => (2, 0, dir.clone()),
        Listed::Refused { dir, .. } => (3, 0, dir.clone()),
    });
    Ok(listed)
}

fn look_at(dir: PathBuf) -> Option<Listed> {
    let is_preliminary = dir.extension().is_some_and(|extension| extension == "tmp");
    if is_preliminary && (dir.join(STATE).exists() || is_being_written(&dir)) {
        let live = is_being_written(&dir);
        return Some(if live { Listed::BeingWritten(dir) } else { Listed::LeftBehind(dir) });
    }
    if dir.join(MANIFEST).symlink_metadata().is_err() {
        return None;
    }
    Some(match about(&dir) {
        Ok(about) => Listed::Snapshot(Box::new(about)),
        Err(error) => Listed::Refused { dir, why: error.to_string() },
    })
}
