//! A snapshot and those that are differences to it become one whole snapshot.
//!
//! It is of the instant of the last one, and has its id: what is a difference to the one is one to the
//! other. A VM is made of whole snapshots only, since its memory is the mapping of one file; where the
//! file system shares blocks the merged file costs room for the pages that differ, and no time.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::folder::{Durability, FolderError, NewFolder};
use super::inspect::{self, InspectError, StoredMemory};
use super::load::{self, LoadError};
use super::manifest::{Manifest, SavedDisk, disk_file};
use super::sums::{CHUNK, PAGE, Sums, is_zero};
use super::{MANIFEST, MAX_STATE, MEMORY, STATE, SUMS, checksum, copy};

/// Why snapshots cannot be merged. Nothing is left.
#[derive(Debug, thiserror::Error)]
pub enum MergeError {
    /// One of them is not whole.
    #[error(transparent)]
    Inspect(#[from] InspectError),
    /// One of them cannot be read.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The new one cannot be written.
    #[error(transparent)]
    Folder(#[from] FolderError),
    /// The first is a difference.
    #[error("{} is itself a difference to {}; begin with that", dir.display(), base.display())]
    NotWhole {
        /// The first.
        dir: PathBuf,
        /// What it is a difference to.
        base: PathBuf,
    },
    /// One in the middle is no difference.
    #[error("{} is whole, so there is nothing to merge it with", .0.display())]
    Whole(PathBuf),
    /// They do not follow each other.
    #[error(
        "{} is a difference to snapshot {wanted} ({}), which {} is not", dir.display(),
        base.display(), before.display()
    )]
    Order {
        /// The difference.
        dir: PathBuf,
        /// The id of what it is a difference to.
        wanted: String,
        /// Where that was.
        base: PathBuf,
        /// What was given in its place.
        before: PathBuf,
    },
    /// They are of different machines.
    #[error("{} has another size of memory than {}", dir.display(), before.display())]
    Memory {
        /// The difference.
        dir: PathBuf,
        /// What it is a difference to.
        before: PathBuf,
    },
    /// The copy of a disk.
    #[error("{} cannot be copied: {source}", path.display())]
    Disk {
        /// The copy.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
}

/// A snapshot that is merged.
struct Part {
    dir: PathBuf,
    manifest: Manifest,
    memory: StoredMemory,
}

impl Part {
    fn open(dir: &Path) -> Result<Self, MergeError> {
        let manifest = load::manifest(dir)?;
        let memory = StoredMemory::open(dir, &manifest)?;
        if memory.sums.is_none() {
            let (dir, vmm) = (dir.to_owned(), manifest.vmm);
            return Err(InspectError::NoSums { dir, vmm }.into());
        }
        Ok(Self { dir: dir.to_owned(), manifest, memory })
    }

    fn follows(&self, before: &Self) -> Result<(), MergeError> {
        let (dir, before_dir) = (self.dir.clone(), before.dir.clone());
        let Some(parent) = &self.manifest.parent else { return Err(MergeError::Whole(dir)) };
        if parent.id != before.manifest.id {
            let (wanted, base) = (parent.id.clone(), parent.dir.clone());
            return Err(MergeError::Order { dir, wanted, base, before: before_dir });
        }
        if self.manifest.memory_bytes != before.manifest.memory_bytes {
            return Err(MergeError::Memory { dir, before: before_dir });
        }
        Ok(())
    }
}

/// Merges the whole snapshot in `base` with `differences`, of which each follows the one before it,
/// into `out`, which must not exist. What is read is checked.
pub fn merge(
    base: &Path,
    differences: &[PathBuf],
    out: &Path,
    durability: Durability,
) -> Result<(), MergeError> {
    let base = Part::open(base)?;
    if let Some(parent) = &base.manifest.parent {
        return Err(MergeError::NotWhole { dir: base.dir, base: parent.dir.clone() });
    }
    let parts = differences.iter().map(|dir| Part::open(dir));
    let parts = parts.collect::<Result<Vec<_>, _>>()?;
    let mut before = &base;
    for part in &parts {
        part.follows(before)?;
        before = part;
    }
    let last = before;
    let mut folder = NewFolder::make(out, durability)?;
    let state = state(last)?;
    folder.write(STATE, |file| file.write_all(&state))?;
    let sums = folder.write(MEMORY, |file| overlay(file, &base, &parts))?;
    let bytes = sums.to_bytes();
    folder.write(SUMS, |file| file.write_all(&bytes))?;
    let mut manifest = last.manifest.clone();
    (manifest.parent, manifest.sums_crc64) = (None, Some(checksum::of(&bytes)));
    let mut disks = Vec::new();
    for disk in &last.manifest.disks {
        disks.push(copy_disk(&last.dir, disk, &mut folder)?);
    }
    manifest.disks = disks;
    folder.sync()?;
    folder.write(MANIFEST, |file| file.write_all(&manifest.to_bytes()?))?;
    // The sums are carried over, so what was damaged in the parts does not have its checksum now.
    let found = folder.read_back(MEMORY)?;
    let found = Sums::of_file(&found, base.memory.bytes);
    let path = folder.place_of(MEMORY);
    let found = found.map_err(|source| InspectError::Read { path: path.clone(), source })?;
    let whole = sums.compare(&found);
    whole.map_err(|source| InspectError::Damaged { path: base.memory.path, source })?;
    Ok(folder.complete()?)
}

fn state(of: &Part) -> Result<Vec<u8>, MergeError> {
    let manifest = &of.manifest;
    let bytes = manifest.state_bytes.min(MAX_STATE);
    Ok(inspect::checked(&of.dir, STATE, bytes, &manifest.state_crc64)?)
}

/// Makes `file` what memory was at the last of the snapshots; its checksums.
fn overlay(file: &mut File, base: &Part, parts: &[Part]) -> io::Result<Sums> {
    copy::file(&base.memory.file, file, base.memory.bytes)?;
    let of_zeros = || Sums::of_zeros(base.memory.bytes);
    let mut sums = base.memory.sums.clone().unwrap_or_else(of_zeros);
    for part in parts {
        apply(file, &part.memory, &mut sums)?;
    }
    Ok(sums)
}

/// Puts the pages of a difference in their places.
fn apply(file: &File, difference: &StoredMemory, sums: &mut Sums) -> io::Result<()> {
    check(difference)?;
    let (mut new, mut old) = (vec![0; CHUNK], vec![0; CHUNK]);
    for run in difference.runs.iter().flatten() {
        let (mut at, end) = (run.pages.start * PAGE as u64, run.pages.end * PAGE as u64);
        let start = at;
        while at < end {
            let len = usize::try_from(end - at).unwrap_or(CHUNK).min(CHUNK);
            let new = new.get_mut(..len).unwrap_or_default();
            let old = old.get_mut(..len).unwrap_or_default();
            match run.at {
                Some(from) => difference.file.read_exact_at(new, from + (at - start))?,
                None => new.fill(0),
            }
            file.read_exact_at(old, at)?;
            replace(sums, at, old, new);
            // Zeros in place of zeros would only fill a hole.
            if old != new {
                file.write_all_at(new, at)?;
            }
            at += len as u64;
        }
    }
    Ok(())
}

/// The pages at `at` are others now.
fn replace(sums: &mut Sums, at: u64, old: &[u8], new: &[u8]) {
    let pages = old.chunks(PAGE).zip(new.chunks(PAGE));
    for (at, (old, new)) in (at..).step_by(PAGE).zip(pages) {
        sums.remove(at, old);
        if !is_zero(new) {
            sums.add(at, new);
        }
    }
}

/// Refuses a difference whose pages are not what they were.
fn check(difference: &StoredMemory) -> io::Result<()> {
    let Some(sums) = &difference.sums else { return Ok(()) };
    let found = Sums::of_file(&difference.file, difference.bytes)?;
    sums.compare(&found).map_err(|damage| {
        io::Error::other(format!("{} is damaged: {damage}", difference.path.display()))
    })
}

fn copy_disk(
    dir: &Path,
    disk: &SavedDisk,
    folder: &mut NewFolder,
) -> Result<SavedDisk, MergeError> {
    let path = dir.join(&disk.path);
    let from = load::open(&path)?;
    load::expect_size(&path, &from, disk.bytes)?;
    // One that is elsewhere stays there: the merged snapshot refers to it as the other one does.
    if disk.path.is_absolute() {
        return Ok(disk.clone());
    }
    let place = folder.place_of(&disk_file(&disk.id));
    let failed = |source| MergeError::Disk { path: place.clone(), source };
    let mut options = OpenOptions::new();
    let to = options.write(true).create_new(true).mode(0o400).open(&place).map_err(failed)?;
    let shared = copy::file(&from, &to, disk.bytes).map_err(failed)?;
    folder.adopt(place, to);
    Ok(SavedDisk { shared, ..disk.clone() })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use devices::memory::{Bytes, GuestAddress, Memory};

    use super::super::image::{Guest, Image, Written};
    use super::super::machine::tests::example;
    use super::super::manifest::Parent;
    use super::super::pages::{self, PageSet};
    use super::super::{PAGES, RUNS, runs};
    use super::*;

    const RAM: u64 = 4 << 30;

    fn id(number: u8) -> String {
        format!("{number:032x}")
    }

    fn put(dir: &Path, name: &str, bytes: &[u8]) {
        fs::write(dir.join(name), bytes).unwrap();
    }

    /// Writes a snapshot as a VM would, of which only memory is of concern.
    fn snapshot(dir: &Path, number: u8, memory: &Memory, changed: Option<&PageSet>) {
        fs::create_dir(dir).unwrap();
        let mut state = example();
        state.clock_nanos = number.into();
        state.irqchips.resize(3, state.irqchips[0]);
        let state = state.to_bytes().unwrap();
        let config = r#"{"cpus": 1, "memory": "4G", "kernel": "/k", "disks":
            [{"path": "/gone", "id": "data"}]}"#;
        let config = serde_json::from_str(config).unwrap();
        let mut manifest = Manifest::new(config, id(number), number.into(), &state);
        let written = if let Some(changed) = changed {
            let mut file = File::options()
                .read(true)
                .write(true)
                .create_new(true)
                .open(dir.join(PAGES))
                .unwrap();
            let mut image = Image::difference(RAM);
            image.write(&mut file, memory, changed, Guest::Still).unwrap();
            let written = image.finish(&file).unwrap();
            let runs = runs::to_bytes(written.runs.as_deref().unwrap());
            put(dir, RUNS, &runs);
            manifest.parent = Some(Parent {
                id: id(number - 1),
                dir: dir.with_file_name((number - 1).to_string()),
                runs_crc64: checksum::of(&runs),
                pages_bytes: written.bytes,
            });
            written
        } else {
            let mut file = File::options()
                .read(true)
                .write(true)
                .create_new(true)
                .open(dir.join(MEMORY))
                .unwrap();
            whole(&mut file, memory)
        };
        put(dir, SUMS, &written.sums.to_bytes());
        manifest.sums_crc64 = Some(checksum::of(&written.sums.to_bytes()));
        put(dir, "disk-data", &[number; 4096]);
        manifest.disks.push(SavedDisk {
            id: "data".to_owned(),
            path: "disk-data".into(),
            bytes: 4096,
            shared: false,
        });
        put(dir, STATE, &state);
        put(dir, MANIFEST, &manifest.to_bytes().unwrap());
    }

    fn whole(file: &mut File, memory: &Memory) -> Written {
        let mut image = Image::whole(file, RAM).unwrap();
        image.write(file, memory, &pages::occupied(memory).unwrap(), Guest::Still).unwrap();
        image.finish(file).unwrap()
    }

    /// Snapshots 0 to 3, of which all but the first are differences, and the memory at the end.
    fn chain(root: &Path) -> (Vec<PathBuf>, Memory) {
        let memory = crate::memory::fresh(RAM).unwrap();
        let fill = |place: u64, len: usize, pattern: u8| {
            memory.write_slice(&vec![pattern; len], GuestAddress(place)).unwrap();
        };
        fill(0x1000, 5 << 20, 1);
        fill(4 << 30, 3 << 20, 2);
        pages::take_written(&memory);
        let dirs: Vec<_> = (0..4).map(|number| root.join(number.to_string())).collect();
        snapshot(&dirs[0], 0, &memory, None);
        for number in 1..4_u8 {
            fill(0x8000 * u64::from(number), 0x3000, number + 10);
            fill((4 << 30) + 0x1000, 0x2000, number + 20);
            fill(0x30_0000 + 0x1000 * u64::from(number), 0x1000, 0);
            fill(0x900_0000, 0x800, number);
            let changed = pages::take_written(&memory);
            snapshot(&dirs[usize::from(number)], number, &memory, Some(&changed));
        }
        (dirs, memory)
    }

    fn content(memory: &Memory) -> Sums {
        let mut file = tempfile::tempfile().unwrap();
        whole(&mut file, memory).sums
    }

    #[test]
    fn a_chain_becomes_what_memory_was_at_its_end() {
        let root = tempfile::tempdir().unwrap();
        let (dirs, memory) = chain(root.path());
        let out = root.path().join("out");
        merge(&dirs[0], &dirs[1..], &out, Durability::None).unwrap();
        inspect::verify(&out).unwrap();
        let saved = load::Saved::open(&out).unwrap();
        assert_eq!((saved.manifest.id, saved.state.clock_nanos), (id(3), 3));
        let again = crate::memory::from_image(RAM, saved.memory).unwrap();
        assert_eq!(content(&again), content(&memory));
        assert_eq!(fs::read(out.join("disk-data")).unwrap(), [3; 4096]);

        // In two steps it is the same.
        let half = root.path().join("half");
        merge(&dirs[0], &dirs[1..2], &half, Durability::None).unwrap();
        let again = root.path().join("again");
        merge(&half, &dirs[2..], &again, Durability::None).unwrap();
        assert_eq!(fs::read(again.join(SUMS)).unwrap(), fs::read(out.join(SUMS)).unwrap());
        assert!(fs::read(again.join(MANIFEST)).unwrap() == fs::read(out.join(MANIFEST)).unwrap());
    }

    #[test]
    fn what_does_not_follow_is_refused_and_leaves_nothing() {
        let root = tempfile::tempdir().unwrap();
        let (dirs, _) = chain(root.path());
        let out = root.path().join("out");
        let refusal = |base: usize, others: &[usize]| {
            let others: Vec<_> = others.iter().map(|&other| dirs[other].clone()).collect();
            merge(&dirs[base], &others, &out, Durability::None).unwrap_err().to_string()
        };
        assert!(refusal(0, &[2]).contains("is a difference to snapshot"));
        assert!(refusal(0, &[1, 3]).contains("is a difference to snapshot"));
        assert!(refusal(1, &[2]).contains("is itself a difference"));
        assert!(refusal(0, &[0]).contains("is whole"));
        assert!(load::Saved::open(&dirs[1]).err().unwrap().to_string().contains("snapshot merge"));
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 4);
    }

    #[test]
    fn damage_is_found_by_whoever_merges_or_verifies() {
        let root = tempfile::tempdir().unwrap();
        let (dirs, _) = chain(root.path());
        let out = root.path().join("out");
        for (dir, name, at) in [(0, MEMORY, 0x9000), (0, MEMORY, 0x10_0000), (2, PAGES, 0x100)] {
            let path = dirs[dir].join(name);
            let file = File::options().read(true).write(true).open(&path).unwrap();
            let mut byte = [0];
            file.read_exact_at(&mut byte, at).unwrap();
            file.write_all_at(&[byte[0] ^ 1], at).unwrap();
            let found = inspect::verify(&dirs[dir]).unwrap_err().to_string();
            assert!(found.contains("damaged") && found.contains(name), "{found}");
            let error = merge(&dirs[0], &dirs[1..], &out, Durability::None).unwrap_err();
            assert!(error.to_string().contains("damaged"), "{error}");
            file.write_all_at(&byte, at).unwrap();
        }
        for name in [RUNS, SUMS, STATE] {
            let path = dirs[1].join(name);
            let whole = fs::read(&path).unwrap();
            let mut damaged = whole.clone();
            damaged[3] ^= 1;
            fs::write(&path, damaged).unwrap();
            assert!(inspect::verify(&dirs[1]).unwrap_err().to_string().contains("damaged"));
            fs::write(&path, whole).unwrap();
        }
        assert!(!out.exists());
        merge(&dirs[0], &dirs[1..], &out, Durability::None).unwrap();
    }

    #[test]
    fn a_list_tells_snapshots_and_what_was_to_be_one() {
        let root = tempfile::tempdir().unwrap();
        let (dirs, _) = chain(root.path());
        fs::create_dir(root.path().join("old.tmp")).unwrap();
        put(&root.path().join("old.tmp"), STATE, b"");
        fs::create_dir(root.path().join("other")).unwrap();
        put(&dirs[3], MANIFEST, b"{}");
        let _writing = NewFolder::make(&root.path().join("new"), Durability::None).unwrap();
        let listed = inspect::list(root.path()).unwrap();
        let kinds: Vec<_> = listed
            .iter()
            .map(|one| match one {
                inspect::Listed::Snapshot(about) => about.manifest.id.clone(),
                inspect::Listed::BeingWritten(dir) => format!("writing {}", dir.display()),
                inspect::Listed::LeftBehind(dir) => format!("left {}", dir.display()),
                inspect::Listed::Refused { why, .. } => why.clone(),
            })
            .collect();
        assert_eq!(kinds[..3], [id(0), id(1), id(2)]);
        assert!(kinds[3].starts_with("writing") && kinds[3].ends_with("new.tmp"), "{kinds:?}");
        assert!(kinds[4].starts_with("left") && kinds[4].ends_with("old.tmp"), "{kinds:?}");
        assert!(kinds[5].contains("not a description") && kinds.len() == 6, "{kinds:?}");
    }
}
