//! The hot pages of a snapshot: those that a VM which was made of it has touched, for the next ones to
//! have them sooner.
//!
//! A file of its own, written after the snapshot and bound to it by its id; the snapshot is whole
//! without it. All numbers have 64 bits, the lowest byte first:
//!
//! ```text
//!  0  "CubeHot\n"
//!  8  version of the format
//! 16  id of the snapshot, 32 digits
//! 48  bytes of guest RAM
//! 56  how many runs
//! 64  each run: its first page, and how many; in order, never side by side
//!  …  checksum of all that (CRC-64), 16 digits
//! ```

use std::io::{self, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use super::load::{self, LoadError};
use super::manifest::Manifest;
use super::pages::PageSet;
use super::sums::PAGE;
use super::{HOT_PAGES, checksum};

const MAGIC: &[u8; 8] = b"CubeHot\n";
const VERSION: u64 = 1;
/// Bytes before the runs.
const HEADER: usize = 64;
/// Digits of an id.
const ID: usize = 32;
/// Bytes of a run.
const ENTRY: usize = 16;
/// Digits of the checksum.
const CHECKSUM: usize = 16;
/// Most runs of a set, so that reading one takes neither time nor room: 16 MiB.
const MAX_RUNS: usize = 1 << 20;

/// Why a set is refused.
#[derive(Debug, thiserror::Error)]
pub enum HotError {
    /// There is none.
    #[error(
        "{} does not exist; restore the snapshot without --prefetch, let the guest work, and write it \
         with cube-vmm snapshot hot --api-socket S",
        .0.display()
    )]
    Missing(PathBuf),
    /// It cannot be read, or is too long.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// It is none, or damaged.
    #[error("{}: {source}", path.display())]
    Bad {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: BadHotSet,
    },
    /// It belongs elsewhere.
    #[error(
        "{} has the hot pages of snapshot {found}, this one is {expected}; record its own with \
         cube-vmm snapshot hot",
        path.display()
    )]
    Other {
        /// The file.
        path: PathBuf,
        /// Of which it is.
        found: String,
        /// Of which it should be.
        expected: String,
    },
    /// It is of a machine with another memory.
    #[error(
        "{} has pages of a guest with {found} bytes of memory, this one has {expected}",
        path.display()
    )]
    Memory {
        /// The file.
        path: PathBuf,
        /// Bytes that it says.
        found: u64,
        /// Bytes of the snapshot.
        expected: u64,
    },
}

/// Why bytes are no set.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadHotSet {
    /// They are something else.
    #[error("it is not a list of hot pages")]
    NotOne,
    /// Written by a newer release.
    #[error("it has version {0} of the format, this release reads version {VERSION}")]
    Version(u64),
    /// Changed, cut or continued.
    #[error("it is not as it was written; the file is damaged, record the hot pages again")]
    Damaged,
    /// No release writes that.
    #[error("its run of {count} pages from page {first} on is out of order, or not in memory")]
    Run {
        /// Its first page.
        first: u64,
        /// How many it has.
        count: u64,
    },
}

/// Which pages of a snapshot's memory are hot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HotSet {
    /// The snapshot.
    pub id: String,
    /// Bytes of its memory.
    pub memory_bytes: u64,
    /// Runs of pages in order, counted through the regions of RAM without the gap between them.
    pub runs: Vec<Range<u64>>,
}

/// Most bytes of a file, of a guest with so many bytes of RAM.
fn most_bytes(memory_bytes: u64) -> u64 {
    let runs = (memory_bytes / PAGE as u64 / 2 + 1).min(MAX_RUNS as u64);
    (HEADER + CHECKSUM) as u64 + runs * ENTRY as u64
}

impl HotSet {
    /// Of these pages of the snapshot `id`. Pages that are scattered more than a file takes get those
    /// between them for company.
    pub fn of(id: String, memory_bytes: u64, pages: &PageSet) -> Self {
        let runs = few(pages.runs().collect(), MAX_RUNS);
        Self { id, memory_bytes, runs }
    }

    /// How many pages.
    pub fn pages(&self) -> u64 {
        self.runs.iter().map(|run| run.end - run.start).sum()
    }

    /// The bytes of a file.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(self.id.as_bytes());
        bytes.extend(self.memory_bytes.to_le_bytes());
        bytes.extend((self.runs.len() as u64).to_le_bytes());
        for run in &self.runs {
            bytes.extend(run.start.to_le_bytes());
            bytes.extend((run.end - run.start).to_le_bytes());
        }
        let checksum = checksum::of(&bytes);
        bytes.extend(checksum.as_bytes());
        bytes
    }

    /// Reads the bytes of a file that nobody vouches for.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, BadHotSet> {
        let word = |at: usize| -> Option<u64> {
            Some(u64::from_le_bytes(bytes.get(at..at.checked_add(8)?)?.try_into().ok()?))
        };
        let word = |at| word(at).ok_or(BadHotSet::Damaged);
        if !bytes.starts_with(MAGIC) {
            return Err(BadHotSet::NotOne);
        }
        match word(8)? {
            VERSION => {}
            version => return Err(BadHotSet::Version(version)),
        }
        let end = bytes.len().checked_sub(CHECKSUM).ok_or(BadHotSet::Damaged)?;
        let (content, checksum) = bytes.split_at_checked(end).ok_or(BadHotSet::Damaged)?;
        let list = content.get(HEADER..).ok_or(BadHotSet::Damaged)?;
        let count = usize::try_from(word(56)?).ok().and_then(|count| count.checked_mul(ENTRY));
        if count != Some(list.len()) || checksum::of(content).as_bytes() != checksum {
            return Err(BadHotSet::Damaged);
        }
        let id = bytes.get(16..16 + ID).and_then(|id| std::str::from_utf8(id).ok());
        let id = id.filter(|id| id.bytes().all(|digit| digit.is_ascii_hexdigit()));
        let id = id.ok_or(BadHotSet::NotOne)?.to_owned();
        let memory_bytes = word(48)?;
        let mut runs = Vec::with_capacity(list.len() / ENTRY);
        let mut least = 0;
        for at in (HEADER..end).step_by(ENTRY) {
            let (first, count) = (word(at)?, word(at + 8)?);
            let end = first.checked_add(count).filter(|&end| end <= memory_bytes / PAGE as u64);
            let end = end.filter(|_| count > 0 && first >= least);
            let end = end.ok_or(BadHotSet::Run { first, count })?;
            runs.push(first..end);
            // Two that are side by side would be one.
            least = end + 1;
        }
        Ok(Self { id, memory_bytes, runs })
    }

    /// Reads the set in the file `path`, which must be that of the snapshot with this description.
    pub fn read(path: &Path, manifest: &Manifest) -> Result<Self, HotError> {
        let file = load::open(path).map_err(|error| match error {
            LoadError::Read { path, source } if source.kind() == io::ErrorKind::NotFound => {
                HotError::Missing(path)
            }
            other => other.into(),
        })?;
        let bytes = load::read(path, &file, None, most_bytes(manifest.memory_bytes))?;
        let path = path.to_owned();
        let set = match Self::from_bytes(&bytes) {
            Ok(set) => set,
            Err(source) => return Err(HotError::Bad { path, source }),
        };
        if set.id != manifest.id {
            let expected = manifest.id.clone();
            return Err(HotError::Other { path, found: set.id, expected });
        }
        if set.memory_bytes != manifest.memory_bytes {
            let (found, expected) = (set.memory_bytes, manifest.memory_bytes);
            return Err(HotError::Memory { path, found, expected });
        }
        Ok(set)
    }

    /// Reads that in the folder `dir` of a snapshot, if it has one.
    pub fn in_folder(dir: &Path, manifest: &Manifest) -> Result<Option<Self>, HotError> {
        match Self::read(&dir.join(HOT_PAGES), manifest) {
            Err(HotError::Missing(_)) => Ok(None),
            set => set.map(Some),
        }
    }

    /// Writes the file `path`, in the place of an older one if there is one: all of it or nothing.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        // A device or a link would give way to the file.
        if path.symlink_metadata().is_ok_and(|old| !old.is_file()) {
            return Err(io::Error::other("it exists and is not a regular file"));
        }
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        let mut builder = tempfile::Builder::new();
        let builder = builder.prefix(".hot-pages-").suffix(".tmp");
        let mut file = builder.tempfile_in(folder.unwrap_or(Path::new(".")))?;
        file.write_all(&self.to_bytes())?;
        file.as_file().sync_all()?;
        file.persist(path).map(drop).map_err(|error| error.error)
    }
}

/// At most `most` runs that have all pages of these, and as few others as will do.
fn few(mut runs: Vec<Range<u64>>, most: usize) -> Vec<Range<u64>> {
    let mut gap: u64 = 1;
    while runs.len() > most {
        runs = runs.into_iter().fold(Vec::new(), |mut joined, run| {
            match joined.last_mut() {
                Some(Range { end, .. }) if run.start - *end <= gap => *end = run.end,
                _ => joined.push(run),
            }
            joined
        });
        gap = gap.saturating_mul(2);
    }
    runs
}

#[cfg(test)]
mod tests;
