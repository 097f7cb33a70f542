//! The memory of a VM on its way into a snapshot's folder.
//!
//! Where there is a log of what changes, most of it is written while the guest runs: what is logged is
//! looked at, then those pages are written, and what has been written to meanwhile is in the log
//! again. When the guest stands still only that is left. Two rounds at most are made before: a guest
//! that writes faster than its pages are copied has to stand still for them in any case.

use std::fs::File;
use std::path::Path;

use super::folder::{FolderError, NewFolder};
use super::image::{Guest, Image, Written};
use super::load;
use super::manifest::Parent;
use super::pages::{self, PageSet};
use super::save::SnapshotError;
use super::sums::PAGE;
use super::{MEMORY, PAGES};
use crate::api::MemoryMethod;
use crate::vm::Vm;

/// What a snapshot will be a difference to.
pub struct Base {
    /// That, as it will stand in the description.
    pub parent: Parent,
    /// Its memory, if it is whole.
    memory: Option<File>,
}

impl Base {
    /// Reads what a VM shall be saved as a difference to.
    pub fn open(dir: &Path, vm: &Vm) -> Result<Self, SnapshotError> {
        let manifest = load::manifest(dir).map_err(SnapshotError::Base)?;
        let (found, here) = (manifest.memory_bytes, vm.config().memory.bytes());
        if found != here {
            let dir = dir.display().to_string();
            return Err(SnapshotError::BaseSize { dir, found, here });
        }
        let memory = match &manifest.parent {
            Some(_) => None,
            None => {
                let path = dir.join(MEMORY);
                let file = load::open(&path).and_then(|file| {
                    load::expect_size(&path, &file, found)?;
                    Ok(file)
                });
                Some(file.map_err(SnapshotError::Base)?)
            }
        };
        let dir = std::path::absolute(dir).unwrap_or_else(|_| dir.to_owned());
        let parent = Parent { id: manifest.id, dir, runs_crc64: String::new(), pages_bytes: 0 };
        Ok(Self { parent, memory })
    }
}

/// Memory in a file that has been begun.
pub struct MemoryFile {
    /// How it was known which pages to write.
    pub method: MemoryMethod,
    /// Bytes of memory that were read while the guest stood still.
    pub still_bytes: u64,
    name: &'static str,
    image: Image,
    /// Pages that were written to since they were copied.
    stale: PageSet,
}

/// Pages that take no time worth mentioning: 256 KiB.
const FEW: u64 = 64;

impl MemoryFile {
    /// Writes as much as there is sense in while the guest runs; nothing where there is no log that
    /// tells what has to be written again.
    pub fn ahead(
        vm: &mut Vm,
        folder: &mut NewFolder,
        base: Option<&Base>,
    ) -> Result<Option<Self>, SnapshotError> {
        let known = match base {
            Some(base) => vm.tracking.logged_since(&base.parent.id).is_some(),
            None => vm.tracking.is_logging(),
        };
        if !known || !vm.unlogged_writers().is_empty() {
            return Ok(None);
        }
        vm.tracking.take(&vm.handle, &vm.memory)?;
        let pages = match base {
            Some(base) => vm.tracking.logged_since(&base.parent.id).cloned(),
            None => Some(vm.occupied()),
        };
        let Some(pages) = pages else { return Ok(None) };
        let method = if base.is_some() { MemoryMethod::Log } else { MemoryMethod::Whole };
        let mut this = Self::write(vm, folder, method, |image, file| {
            image.write(file, &vm.memory, &pages, Guest::Running)
        })?;
        let written = pages.count();
        if written > FEW {
            let stale = vm.tracking.take(&vm.handle, &vm.memory)?;
            if (FEW..written / 2).contains(&stale.count()) {
                this.write_again(vm, folder, &stale, Guest::Running)?;
            } else {
                this.stale = stale;
            }
        }
        Ok(Some(this))
    }

    /// Writes all of it, while the guest stands still.
    pub fn at_once(
        vm: &Vm,
        folder: &mut NewFolder,
        base: Option<&Base>,
    ) -> Result<Self, SnapshotError> {
        let bytes = vm.config().memory.bytes();
        let Some(base) = base else {
            let pages = vm.occupied();
            return Self::write_still(vm, folder, MemoryMethod::Whole, &pages);
        };
        let id = &base.parent.id;
        // What vhost-net writes is not in the log; it is in the page map.
        let complete = vm.unlogged_writers().is_empty();
        if let Some(logged) = vm.tracking.logged_since(id).filter(|_| complete) {
            return Self::write_still(vm, folder, MemoryMethod::Log, logged);
        }
        if let Some(mapped) = vm.tracking.mapped_since(id, &vm.memory) {
            return Self::write_still(vm, folder, MemoryMethod::Mapping, &mapped);
        }
        let Some(memory) = &base.memory else {
            let dir = base.parent.dir.display().to_string();
            return Err(SnapshotError::BaseIsDifference { dir });
        };
        let mut pages = vm.occupied();
        // What is zeros here may not be there.
        if pages.insert_extents(memory, bytes).is_err() {
            pages = PageSet::all(bytes);
        }
        let mut this = Self::write(vm, folder, MemoryMethod::Compared, |image, file| {
            image.write_differing(file, &vm.memory, &pages, memory)
        })?;
        this.still_bytes = pages.count() * PAGE as u64;
        Ok(this)
    }

    fn write_still(
        vm: &Vm,
        folder: &mut NewFolder,
        method: MemoryMethod,
        pages: &PageSet,
    ) -> Result<Self, SnapshotError> {
        let mut this = Self::write(vm, folder, method, |image, file| {
            image.write(file, &vm.memory, pages, Guest::Still)
        })?;
        this.still_bytes = pages.count() * PAGE as u64;
        Ok(this)
    }

    fn write(
        vm: &Vm,
        folder: &mut NewFolder,
        method: MemoryMethod,
        write: impl FnOnce(&mut Image, &mut File) -> std::io::Result<()>,
    ) -> Result<Self, SnapshotError> {
        let bytes = vm.config().memory.bytes();
        let name = if method == MemoryMethod::Whole { MEMORY } else { PAGES };
        let image = folder.write(name, |file| {
            let mut image = match method {
                MemoryMethod::Whole => Image::whole(file, bytes)?,
                _ => Image::difference(bytes),
            };
            write(&mut image, file)?;
            Ok(image)
        })?;
        Ok(Self { method, still_bytes: 0, name, image, stale: PageSet::none(bytes) })
    }

    fn write_again(
        &mut self,
        vm: &Vm,
        folder: &mut NewFolder,
        pages: &PageSet,
        guest: Guest,
    ) -> Result<(), FolderError> {
        folder.rewrite(self.name, |file| self.image.write(file, &vm.memory, pages, guest))
    }

    /// Writes what was written to since, of which the log has told `newest` last. While the guest
    /// stands still.
    pub fn complete(
        &mut self,
        vm: &Vm,
        folder: &mut NewFolder,
        newest: &PageSet,
    ) -> Result<(), FolderError> {
        let mut pages = std::mem::replace(&mut self.stale, PageSet::none(0));
        pages.insert_all(newest);
        self.still_bytes += pages.count() * PAGE as u64;
        self.write_again(vm, folder, &pages, Guest::Still)
    }

    /// Makes the checksums that are not known yet. The guest may run.
    pub fn finish(self, folder: &mut NewFolder) -> Result<Written, FolderError> {
        folder.rewrite(self.name, |file| self.image.finish(file))
    }
}

impl Vm {
    /// The pages that may hold something else than zeros.
    fn occupied(&self) -> PageSet {
        let bytes = self.config().memory.bytes();
        // What a VM was made of is in its mapping's file. If there is none it is somewhere that the
        // page map does not tell.
        if self.tracking.is_restored() && !pages::are_of_image(&self.memory) {
            return PageSet::all(bytes);
        }
        pages::occupied(&self.memory).unwrap_or_else(|error| {
            tracing::warn!(%error, "all of memory is read, since the page map cannot be");
            PageSet::all(bytes)
        })
    }
}
