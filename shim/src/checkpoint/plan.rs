//! A checkpoint's folder, from its making to the moment in which it is whole.

use std::path::{Path, PathBuf};

use super::{POD, Pod, VM};
use crate::error::{Error, Result, io};
use crate::record;

/// A checkpoint that is being written.
#[derive(Debug)]
pub struct Plan {
    folder: PathBuf,
    pod: Pod,
    /// Whether the folder was not there before.
    made: bool,
}

impl Plan {
    /// One in this folder, which is made.
    pub(super) fn make(folder: &Path, pod: Pod) -> Result<Self> {
        let made = !folder.exists();
        let plan = Self { folder: folder.to_owned(), pod, made };
        if plan.snapshot().exists() {
            let snapshot = plan.snapshot();
            return Err(Error::Exists(format!("the snapshot {}", snapshot.display())));
        }
        make_folder(folder)?;
        Ok(plan)
    }

    /// Where the VM's part of it goes.
    pub fn snapshot(&self) -> PathBuf {
        self.folder.join(VM)
    }

    /// That part is whole: now the folder becomes a checkpoint, which outlasts a loss of power.
    pub fn finish(&self) -> Result<()> {
        let path = self.folder.join(POD);
        record::write(&path, &self.pod)?;
        for path in [&path, &self.folder] {
            let synced = std::fs::File::open(path).and_then(|file| file.sync_all());
            synced.map_err(io(format!("write {} to the disk", path.display())))?;
        }
        Ok(())
    }

    /// It could not be written: what was begun goes, and the folder if it was made for it.
    pub fn give_up(&self) {
        let _ = std::fs::remove_file(self.folder.join(POD));
        if self.made {
            let _ = std::fs::remove_dir(&self.folder);
        }
    }
}

/// Makes the folder of a checkpoint, in which there must not be one.
pub(super) fn make_folder(folder: &Path) -> Result<()> {
    if folder.join(POD).exists() {
        return Err(Error::Exists(format!("the checkpoint {}", folder.display())));
    }
    std::fs::create_dir_all(folder).map_err(io(format!("make {}", folder.display())))
}

#[cfg(test)]
mod tests {
    use super::super::VERSION;
    use super::*;

    #[test]
    fn a_checkpoint_that_is_planned_takes_nothing_s_place_and_leaves_nothing() {
        let pod = || Pod { version: VERSION, containers: Vec::new(), cards: Vec::new() };
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("a/b");
        Plan::make(&folder, pod()).unwrap().give_up();
        assert!(!folder.exists());
        let plan = Plan::make(&folder, pod()).unwrap();
        std::fs::create_dir(plan.snapshot()).unwrap();
        let error = Plan::make(&folder, pod()).unwrap_err();
        assert!(matches!(&error, Error::Exists(what) if what.contains("a/b/vm")), "{error}");
        std::fs::remove_dir(plan.snapshot()).unwrap();
        plan.finish().unwrap();
        let error = Plan::make(&folder, pod()).unwrap_err();
        assert!(matches!(&error, Error::Exists(what) if what.contains("a/b")), "{error}");
        std::fs::write(folder.join("of somebody"), "").unwrap();
        plan.give_up();
        assert!(!folder.join(POD).exists() && folder.join("of somebody").exists());
    }
}
