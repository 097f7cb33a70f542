//! Which engine a disk works with.

use std::fmt;
use std::fs::File;
use std::io;
use std::path::Path;
use std::str::FromStr;

use io_uring::IoUring;
use serde::{Deserialize, Serialize};

use super::disk::Disk;
use super::file::{DiskError, DiskFile};
use super::raw::RawFile;
use super::uring::{self, UringFile};

/// The engine that is asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Engine {
    /// io_uring where the host has it, and synchronous I/O elsewhere.
    #[default]
    Auto,
    /// io_uring, or no disk.
    IoUring,
    /// Synchronous I/O.
    Sync,
}

/// A name that is not that of an engine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("disk engine {0:?} is not known; use auto, io_uring or sync")]
pub struct UnknownEngine(String);

impl FromStr for Engine {
    type Err = UnknownEngine;

    fn from_str(text: &str) -> Result<Self, UnknownEngine> {
        match text {
            "auto" => Ok(Engine::Auto),
            "io_uring" => Ok(Engine::IoUring),
            "sync" => Ok(Engine::Sync),
            _ => Err(UnknownEngine(text.to_owned())),
        }
    }
}

/// The engine that a disk has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EngineKind {
    /// Requests are given to the kernel in batches and end when the storage is done.
    IoUring,
    /// Each request is a system call of the disk's thread.
    Sync,
}

impl fmt::Display for EngineKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            EngineKind::IoUring => "io_uring",
            EngineKind::Sync => "sync",
        })
    }
}

/// An open disk, and what became of the wish for an engine.
pub struct OpenDisk {
    /// The disk.
    pub disk: Box<dyn Disk>,
    /// The file or block device behind it, for copies of it while nothing is in flight. Reading or
    /// writing it at the same time is a mistake.
    pub file: File,
    /// Its engine.
    pub engine: EngineKind,
    /// Why it is not io_uring, if that was tried.
    pub fallback: Option<String>,
}

impl OpenDisk {
    /// Opens `path`, as [`DiskFile::open`] does, for `engine`.
    pub fn open(path: &Path, read_only: bool, engine: Engine) -> Result<Self, DiskError> {
        Self::open_with(path, read_only, engine, uring::ring)
    }

    /// The same with rings from `ring`.
    pub(super) fn open_with(
        path: &Path,
        read_only: bool,
        engine: Engine,
        ring: impl FnOnce() -> io::Result<IoUring>,
    ) -> Result<Self, DiskError> {
        let file = DiskFile::open(path, read_only)?;
        let same = file.file().try_clone();
        let same = same.map_err(|source| DiskError::Open { path: path.to_owned(), source })?;
        let fallback = match engine {
            Engine::Sync => None,
            Engine::Auto | Engine::IoUring => match ring() {
                Ok(ring) => {
                    let disk = Box::new(UringFile::new(file, ring));
                    let engine = EngineKind::IoUring;
                    return Ok(Self { disk, file: same, engine, fallback: None });
                }
                Err(error) => Some(reason(&error)),
            },
        };
        if let (Engine::IoUring, Some(reason)) = (engine, &fallback) {
            return Err(DiskError::NoRing { path: path.to_owned(), reason: reason.clone() });
        }
        let disk = RawFile::new(file)
            .map_err(|source| DiskError::Event { path: path.to_owned(), source })?;
        Ok(Self { disk: Box::new(disk), file: same, engine: EngineKind::Sync, fallback })
    }
}

/// Why the host gives us no ring.
fn reason(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => {
            "it is forbidden here, by kernel.io_uring_disabled or a seccomp filter".to_owned()
        }
        Some(libc::ENOSYS) => {
            "the kernel does not have it, or is older than Linux 5.6, or a seccomp filter hides it"
                .to_owned()
        }
        Some(libc::ENOMEM) => {
            "there is not enough memory that may be locked (ulimit -l)".to_owned()
        }
        _ => error.to_string(),
    }
}

#[cfg(test)]
mod tests;
