//! The control group of a container, `/sys/fs/cgroup/cube/ID`, cgroup version 2.

use crate::error::Error;
use crate::record::{Id, wait_for};
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Where those of all containers are.
const PARENT: &str = "/sys/fs/cgroup/cube";
/// How long the kernel may take to end, freeze or forget processes.
const PATIENCE: Duration = Duration::from_secs(10);
/// Deeper than containers nest groups.
const MAX_DEPTH: usize = 32;

/// A container's.
#[derive(Clone, Debug)]
pub struct Cgroup {
    path: PathBuf,
}

impl Cgroup {
    /// That of a container, which may not exist.
    pub fn of(id: &Id) -> Self {
        Self { path: Path::new(PARENT).join(id.as_str()) }
    }

    /// Its folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether it is there.
    pub fn exists(&self) -> bool {
        self.path.is_dir()
    }

    /// The text of one of its files; empty if it is not there.
    pub fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path.join(name)).unwrap_or_default()
    }

    /// A number of one of its files of names and numbers.
    pub fn number(&self, file: &str, name: &str) -> u64 {
        number(&self.read(file), name)
    }

    /// How many of its processes the kernel killed for want of memory.
    pub fn oom_kills(&self) -> u64 {
        self.number("memory.events", "oom_kill")
    }

    /// Whether its processes are stopped.
    pub fn is_frozen(&self) -> bool {
        self.number("cgroup.events", "frozen") == 1
    }

    /// Stops its processes, or lets them go on, and waits until that is so.
    ///
    /// # Errors
    /// [`Error::File`], or [`Error::Late`].
    pub fn freeze(&self, frozen: bool) -> Result<(), Error> {
        self.write("cgroup.freeze", if frozen { "1" } else { "0" })?;
        let reached = || (self.is_frozen() == frozen).then_some(());
        wait_for(PATIENCE, reached).ok_or(Error::Late("the change of all processes"))
    }

    fn write(&self, name: &str, text: &str) -> Result<(), Error> {
        let path = self.path.join(name);
        fs::write(&path, text).map_err(Error::file("write", &path))
    }

    /// Kills all of its processes. They may not be gone yet.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn kill(&self) -> Result<(), Error> {
        match self.write("cgroup.kill", "1") {
            Err(Error::File { source, .. }) if source.kind() == ErrorKind::NotFound => Ok(()),
            other => other,
        }
    }

    /// Its processes and those of groups in it.
    pub fn pids(&self) -> Vec<i32> {
        let mut pids = Vec::new();
        collect(&self.path, 0, &mut |dir| {
            let text = fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
            pids.extend(text.lines().filter_map(|line| line.parse::<i32>().ok()));
        });
        pids
    }

    /// Kills all of its processes, waits for their end and removes it with the groups in it.
    ///
    /// # Errors
    /// [`Error::File`], or [`Error::Late`].
    pub fn remove(&self) -> Result<(), Error> {
        if !self.exists() {
            return Ok(());
        }
        self.kill()?;
        let empty = || (self.number("cgroup.events", "populated") == 0).then_some(());
        wait_for(PATIENCE, empty).ok_or(Error::Late("the end of all processes"))?;
        let removed = || match self.remove_folders() {
            // A process is dead before the group knows.
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => None,
            other => Some(other),
        };
        let removed = wait_for(PATIENCE, removed);
        let removed = removed.ok_or(Error::Late("the removal of the control group"))?;
        removed.map_err(Error::file("remove", &self.path))
    }

    fn remove_folders(&self) -> io::Result<()> {
        let mut folders = Vec::new();
        collect(&self.path, 0, &mut |dir| folders.push(dir.to_owned()));
        // Inner ones were found after those they are in.
        for folder in folders.iter().rev() {
            match fs::remove_dir(folder) {
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                other => other?,
            }
        }
        Ok(())
    }
}

/// Calls `visit` with a folder, then with those in it.
fn collect(dir: &Path, depth: usize, visit: &mut dyn FnMut(&Path)) {
    visit(dir);
    if depth == MAX_DEPTH {
        return;
    }
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            collect(&entry.path(), depth + 1, visit);
        }
    }
}

/// The number after `name` in a file of such lines; zero if there is none.
pub fn number(text: &str, name: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.and_then(|rest| rest.trim().parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_found_by_whole_names() {
        let events = "low 0\noom 2\noom_kill 3\noom_group_kill 1\n";
        assert_eq!((number(events, "oom"), number(events, "oom_kill")), (2, 3));
        assert_eq!(number(events, "kill"), 0);
    }

    #[test]
    fn folders_are_removed_from_the_inside() {
        let dir = tempfile::tempdir().unwrap();
        let cgroup = Cgroup { path: dir.path().join("c") };
        fs::create_dir_all(cgroup.path.join("a/b")).unwrap();
        fs::create_dir_all(cgroup.path.join("d")).unwrap();
        cgroup.remove_folders().unwrap();
        assert!(!cgroup.exists());
    }
}
