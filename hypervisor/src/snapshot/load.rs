//! Reads a snapshot and checks it, before anything is made of it.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use super::machine::{MachineState, StateError};
use super::manifest::{Manifest, ManifestError};
use super::{MANIFEST, MAX_MANIFEST, MAX_STATE, MEMORY, STATE, checksum, folder};
use crate::config::TransportKind;

/// Why a snapshot is refused.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// A file is not there or cannot be read.
    #[error("{} cannot be read: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// Its VMM is not done with it.
    #[error("{} is a snapshot that is still being written; wait for it", .0.display())]
    BeingWritten(PathBuf),
    /// It needs another one.
    #[error(
        "{} has only what differs from {}; make a whole one of both with `cube-vmm snapshot merge {} {} \
         OUT`",
        dir.display(), base.display(), base.display(), dir.display()
    )]
    Difference {
        /// The folder.
        dir: PathBuf,
        /// Where the other one was.
        base: PathBuf,
    },
    /// It was never finished.
    #[error("{} has no {MANIFEST}: it is no snapshot, or one that was not completed", .0.display())]
    Incomplete(PathBuf),
    /// A folder, a FIFO, a link.
    #[error("{} is not a regular file", .0.display())]
    NotAFile(PathBuf),
    /// Longer or shorter than it was.
    #[error("{} has {found} bytes, expected {expected}", path.display())]
    Size {
        /// The file.
        path: PathBuf,
        /// Its length.
        found: u64,
        /// What it should be, or may be at most.
        expected: String,
    },
    /// The description.
    #[error("{}: {source}", path.display())]
    Manifest {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: ManifestError,
    },
    /// The state is not what was written.
    #[error("{} does not have its checksum; the file is damaged", .0.display())]
    Damaged(PathBuf),
    /// The state.
    #[error("{}: {source}", path.display())]
    State {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: StateError,
    },
    /// State and description are of different machines.
    #[error("{}: {what} is not that of the machine in {MANIFEST}", path.display())]
    Machine {
        /// The file.
        path: PathBuf,
        /// The part.
        what: &'static str,
    },
}

/// A snapshot whose parts are whole and fit together.
pub struct Saved {
    /// What it is.
    pub manifest: Manifest,
    /// All but memory.
    pub state: MachineState,
    /// Guest RAM.
    pub memory: File,
}

impl Saved {
    /// Reads the one in the folder `dir`. Does not read memory.
    pub fn open(dir: &Path) -> Result<Self, LoadError> {
        let manifest = manifest(dir)?;
        if let Some(parent) = &manifest.parent {
            return Err(LoadError::Difference { dir: dir.to_owned(), base: parent.dir.clone() });
        }
        let path = dir.join(STATE);
        let bytes = read(&path, &open(&path)?, Some(manifest.state_bytes), MAX_STATE)?;
        if checksum::of(&bytes) != manifest.state_crc64 {
            return Err(LoadError::Damaged(path));
        }
        let state = match MachineState::parse(&bytes) {
            Ok(state) => state,
            Err(source) => return Err(LoadError::State { path, source }),
        };
        if let Some(what) = contradiction(&manifest, &state) {
            return Err(LoadError::Machine { path, what });
        }
        let path = dir.join(MEMORY);
        let memory = open(&path)?;
        expect_size(&path, &memory, manifest.memory_bytes)?;
        Ok(Self { manifest, state, memory })
    }
}

/// Reads the description of the one in the folder `dir`, and nothing else.
pub fn manifest(dir: &Path) -> Result<Manifest, LoadError> {
    let path = dir.join(MANIFEST);
    let missing = |error: &LoadError| matches!(error, LoadError::Read { source, .. } if source.kind() == io::ErrorKind::NotFound);
    let bytes = match open(&path) {
        Err(error) if missing(&error) && folder::is_being_written(dir) => {
            return Err(LoadError::BeingWritten(dir.to_owned()));
        }
        Err(error) if missing(&error) && dir.is_dir() => {
            return Err(LoadError::Incomplete(dir.to_owned()));
        }
        file => read(&path, &file?, None, MAX_MANIFEST)?,
    };
    Manifest::parse(&bytes).map_err(|source| LoadError::Manifest { path, source })
}

/// What of the state is of another machine.
fn contradiction(manifest: &Manifest, state: &MachineState) -> Option<&'static str> {
    let config = &manifest.config;
    let slots = state.pci.as_ref().map(crate::pci_slots::PciState::slots);
    let distinct = |slots: &Vec<u8>| slots.len() == slots.iter().collect::<BTreeSet<_>>().len();
    let has_pci = config.transport == TransportKind::Pci;
    [
        (state.vcpus.len() != config.cpus as usize, "the number of vCPUs"),
        (state.irqchips.len() != 3, "the number of interrupt controllers"),
        (slots.is_some() != has_pci, "the transport"),
        (slots.as_ref().is_some_and(|slots| !distinct(slots)), "the PCI bus"),
    ]
    .into_iter()
    .find_map(|(wrong, what)| wrong.then_some(what))
}

/// Opens a regular file. Neither follows a link nor waits for the other end of a FIFO.
pub(super) fn open(path: &Path) -> Result<File, LoadError> {
    let flags = libc::O_CLOEXEC | libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let opened = OpenOptions::new().read(true).custom_flags(flags).open(path);
    let file = opened.map_err(|source| match source.raw_os_error() {
        Some(libc::ELOOP) => LoadError::NotAFile(path.to_owned()),
        _ => LoadError::Read { path: path.to_owned(), source },
    })?;
    let metadata = file.metadata();
    match metadata.map_err(|source| LoadError::Read { path: path.to_owned(), source })?.is_file() {
        true => Ok(file),
        false => Err(LoadError::NotAFile(path.to_owned())),
    }
}

pub(super) fn size(path: &Path, file: &File) -> Result<u64, LoadError> {
    let metadata = file.metadata();
    let metadata = metadata.map_err(|source| LoadError::Read { path: path.to_owned(), source })?;
    Ok(metadata.len())
}

fn wrong_size(path: &Path, found: u64, expected: String) -> LoadError {
    LoadError::Size { path: path.to_owned(), found, expected }
}

pub(super) fn expect_size(path: &Path, file: &File, expected: u64) -> Result<(), LoadError> {
    match size(path, file)? {
        found if found == expected => Ok(()),
        found => Err(wrong_size(path, found, expected.to_string())),
    }
}

/// Reads all of a file of that size, or of at most `max` bytes.
pub(super) fn read(
    path: &Path,
    file: &File,
    expected: Option<u64>,
    max: u64,
) -> Result<Vec<u8>, LoadError> {
    if let Some(expected) = expected {
        expect_size(path, file, expected)?;
    }
    let found = size(path, file)?;
    if found > max {
        return Err(wrong_size(path, found, format!("at most {max}")));
    }
    let mut bytes = Vec::new();
    let reading = file.take(max).read_to_end(&mut bytes);
    reading.map_err(|source| LoadError::Read { path: path.to_owned(), source })?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::machine::tests::example;
    use super::*;
    use crate::config::VmConfig;

    fn config() -> VmConfig {
        let config = r#"{"cpus": 1, "memory": "64M", "kernel": "/k"}"#;
        serde_json::from_str(config).unwrap()
    }

    fn written(change: impl FnOnce(&mut MachineState)) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let mut state = example();
        state.irqchips.resize(3, state.irqchips[0]);
        change(&mut state);
        let state = state.to_bytes().unwrap();
        let manifest = Manifest::new(config(), "0".repeat(32), 0, &state).to_bytes().unwrap();
        fs::write(folder.path().join(STATE), state).unwrap();
        fs::write(folder.path().join(MANIFEST), manifest).unwrap();
        File::create(folder.path().join(MEMORY)).unwrap().set_len(64 << 20).unwrap();
        folder
    }

    fn refusal(folder: &Path) -> String {
        Saved::open(folder).err().expect("it is refused").to_string()
    }

    #[test]
    fn what_was_written_is_read() {
        let folder = written(|_| {});
        let saved = Saved::open(folder.path()).unwrap();
        assert_eq!((saved.state.clock_nanos, saved.manifest.memory_bytes), (77, 64 << 20));
    }

    #[test]
    fn every_flipped_bit_and_truncation_of_the_state_is_refused() {
        let folder = written(|_| {});
        let path = folder.path().join(STATE);
        let bytes = fs::read(&path).unwrap();
        for bit in 0..bytes.len() * 8 {
            let mut damaged = bytes.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            fs::write(&path, damaged).unwrap();
            assert!(refusal(folder.path()).contains("damaged"));
        }
        for len in 0..bytes.len() {
            fs::write(&path, &bytes[..len]).unwrap();
            assert!(refusal(folder.path()).contains(&format!("has {len} bytes")));
        }
    }

    #[test]
    fn memory_of_another_size_is_refused() {
        let folder = written(|_| {});
        for len in [0, (64 << 20) - 1, (64 << 20) + 1] {
            File::create(folder.path().join(MEMORY)).unwrap().set_len(len).unwrap();
            assert!(refusal(folder.path()).contains("expected 67108864"));
        }
    }

    #[test]
    fn huge_files_are_not_read() {
        for name in [MANIFEST, STATE] {
            let folder = written(|_| {});
            let file = File::options().write(true).open(folder.path().join(name)).unwrap();
            file.set_len(1 << 40).unwrap();
            assert!(refusal(folder.path()).contains("1099511627776 bytes"));
        }
    }

    #[test]
    fn folders_fifos_links_and_missing_files_are_refused() {
        for name in [MANIFEST, STATE, MEMORY] {
            let folder = written(|_| {});
            let path = folder.path().join(name);
            let moved = folder.path().join("moved");
            fs::rename(&path, &moved).unwrap();
            let missing = refusal(folder.path());
            assert!(missing.contains("cannot be read") || missing.contains("no snapshot"));
            std::os::unix::fs::symlink(&moved, &path).unwrap();
            assert!(refusal(folder.path()).contains("not a regular file"));
            fs::remove_file(&path).unwrap();
            nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
            assert!(refusal(folder.path()).contains("not a regular file"));
            fs::remove_file(&path).unwrap();
            fs::create_dir(&path).unwrap();
            assert!(refusal(folder.path()).contains("not a regular file"));
        }
        assert!(refusal(Path::new("/nonexistent")).contains("cannot be read"));
    }

    #[test]
    fn parts_of_different_machines_are_refused() {
        let more = written(|state| state.vcpus.push(state.vcpus[0].clone()));
        assert!(refusal(more.path()).contains("number of vCPUs"));
        let fewer = written(|state| state.irqchips.clear());
        assert!(refusal(fewer.path()).contains("interrupt controllers"));
    }
}
