//! Which pages a VM has touched since it was restored, as the hot pages of the snapshot it was made of.
//!
//! The page map of this process tells, in every mode: pages of RAM that are there are those that the
//! guest or a device has touched, and up to 15 beside each, which the kernel maps, or the thread that
//! answers faults brings in, at the same time.

use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::HOT_PAGES;
use super::hot::HotSet;
use super::load::{self, LoadError};
use super::pages;
use super::paging::MemoryMode;
use super::sums::PAGE;
use crate::vm::Vm;

/// Why hot pages are not recorded. Nothing has changed.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// There is no snapshot that they would be of.
    #[error(
        "this VM was booted, not restored: hot pages are those of a snapshot; take one, restore it, and \
         ask the VM that is made of it"
    )]
    NotRestored,
    /// More pages are there than those that were touched.
    #[error("{0}, so nobody can tell which pages the guest has touched; {1}")]
    Unknown(&'static str, &'static str),
    /// The kernel does not tell.
    #[error("the page map of the VM cannot be read: {0}")]
    PageMap(#[source] io::Error),
    /// The folder is not as it was.
    #[error("the snapshot that this VM was restored from is gone: {0}; say where with --to FILE")]
    Gone(#[source] LoadError),
    /// The folder is another snapshot.
    #[error(
        "{} is another snapshot than the one that this VM was restored from; say where with --to FILE",
        .0.display()
    )]
    Replaced(PathBuf),
    /// The file cannot be written.
    #[error("{} cannot be written: {source}; say where else with --to FILE", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
}

/// What was recorded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HotReport {
    /// The file.
    pub path: PathBuf,
    /// The snapshot that they are of.
    pub id: String,
    /// How many pages.
    pub pages: u64,
    /// The same in bytes.
    pub bytes: u64,
}

/// What a VM was made of, and what has become of its pages since.
#[derive(Clone, Debug)]
pub struct Origin {
    /// The folder of the snapshot.
    dir: PathBuf,
    /// Its id.
    id: String,
    /// Why the pages that are there are not those that were touched, and the cure.
    unknown: Option<(&'static str, &'static str)>,
}

impl Origin {
    /// The snapshot in `dir` with that id, whose memory comes in so.
    pub fn new(dir: PathBuf, id: String, mode: &MemoryMode, prefetches: bool) -> Self {
        let unknown = match mode {
            MemoryMode::Prefault => Some((
                "all of memory was mapped before the guest ran (--memory-mode prefault)",
                "restore with private or uffd, and ask that VM",
            )),
            _ if prefetches => {
                Some(("hot pages were prefetched (--prefetch)", "restore without, and ask that VM"))
            }
            _ => None,
        };
        Self { dir, id, unknown }
    }

    /// All of memory is read for a snapshot.
    pub fn read_for_a_snapshot(&mut self) {
        self.unknown.get_or_insert((
            "memory has been read for a snapshot",
            "restore again, and ask that VM before it is saved",
        ));
    }
}

/// Writes the pages of `vm` that have been touched into `file`, or into the folder of the snapshot it was
/// made of. The guest may run.
pub fn record(vm: &Vm, file: Option<&Path>) -> Result<HotReport, RecordError> {
    let origin = vm.origin.as_ref().ok_or(RecordError::NotRestored)?;
    if let Some((why, cure)) = origin.unknown {
        return Err(RecordError::Unknown(why, cure));
    }
    let path = match file {
        Some(path) => path.to_owned(),
        None => {
            let found = load::manifest(&origin.dir).map_err(RecordError::Gone)?;
            if found.id != origin.id {
                return Err(RecordError::Replaced(origin.dir.clone()));
            }
            origin.dir.join(HOT_PAGES)
        }
    };
    let touched = pages::present(&vm.memory).map_err(RecordError::PageMap)?;
    let set = HotSet::of(origin.id.clone(), crate::memory::size(&vm.memory), &touched);
    let pages = set.pages();
    match set.write(&path) {
        Ok(()) => Ok(HotReport { path, id: set.id, pages, bytes: pages * PAGE as u64 }),
        Err(source) => Err(RecordError::Write { path, source }),
    }
}
