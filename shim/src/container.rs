//! A container: its first process, those that were added, and whether it is paused.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use containerd_shim_protos::types::task::Status;

use crate::checkpoint::Saved;
use crate::error::{Error, Result};
use crate::process::{Name, Process};
use crate::stdio::Stdio;

/// A container.
#[derive(Debug)]
pub struct Container {
    /// Its name.
    pub id: String,
    /// Its name in the guest: another one if it goes on from a checkpoint.
    pub inside: String,
    /// What it was there.
    pub copy_of: Option<Saved>,
    /// containerd's folder for it.
    pub bundle: PathBuf,
    /// Its first process.
    pub init: Arc<Process>,
    /// What changes it goes one by one.
    pub changing: tokio::sync::Mutex<()>,
    more: Mutex<More>,
}

#[derive(Debug, Default)]
struct More {
    execs: BTreeMap<String, Arc<Process>>,
    paused: bool,
    sleep: Sleep,
}

/// Whether there is a VM around it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sleep {
    /// There is.
    #[default]
    Awake,
    /// Its state is being written.
    FallingAsleep,
    /// Its state is on the disk, and the VM is gone.
    Asleep,
}

impl Container {
    /// One that is not in the guest yet.
    pub fn new(id: &str, bundle: PathBuf, stdio: Stdio) -> Self {
        let name = Name { container: id.to_owned(), exec: String::new() };
        Self {
            id: id.to_owned(),
            inside: id.to_owned(),
            copy_of: None,
            bundle,
            init: Arc::new(Process::new(name, stdio)),
            changing: tokio::sync::Mutex::default(),
            more: Mutex::default(),
        }
    }

    /// It is this one of a checkpoint.
    pub fn goes_on_from(&mut self, saved: Saved) {
        self.inside.clone_from(&saved.id);
        self.copy_of = Some(saved);
    }

    fn more(&self) -> MutexGuard<'_, More> {
        self.more.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A process of it; an empty name is its first.
    pub fn process(&self, exec: &str) -> Result<Arc<Process>> {
        if exec.is_empty() {
            return Ok(self.init.clone());
        }
        let name = Name { container: self.id.clone(), exec: exec.to_owned() };
        self.more().execs.get(exec).cloned().ok_or_else(|| Error::NotFound(name.to_string()))
    }

    /// The processes that were added.
    pub fn execs(&self) -> Vec<Arc<Process>> {
        self.more().execs.values().cloned().collect()
    }

    /// Adds a process, not started yet.
    pub fn add(&self, exec: &str, stdio: Stdio) -> Result<Arc<Process>> {
        let name = Name { container: self.id.clone(), exec: exec.to_owned() };
        if self.init.end().is_some() {
            return Err(Error::State(format!("cannot exec in a stopped container: {name}")));
        }
        let mut more = self.more();
        if more.paused || more.sleep != Sleep::Awake {
            return Err(Error::State(format!("cannot exec in a paused container: {name}")));
        }
        if more.execs.contains_key(exec) {
            return Err(Error::Exists(name.to_string()));
        }
        let process = Arc::new(Process::new(name, stdio));
        more.execs.insert(exec.to_owned(), process.clone());
        Ok(process)
    }

    /// Forgets a process that was added.
    pub fn forget(&self, exec: &str) {
        self.more().execs.remove(exec);
    }

    /// All processes, the first one included.
    pub fn processes(&self) -> Vec<Arc<Process>> {
        std::iter::once(self.init.clone()).chain(self.execs()).collect()
    }

    /// Whether it is paused, in whichever way.
    pub fn is_paused(&self) -> bool {
        let more = self.more();
        more.paused || more.sleep != Sleep::Awake
    }

    /// Whether it is paused in memory, be its VM awake or not.
    pub fn is_frozen(&self) -> bool {
        self.more().paused
    }

    /// Its VM is there, or is not.
    pub fn set_sleep(&self, sleep: Sleep) {
        self.more().sleep = sleep;
    }

    /// It is, or is no longer.
    pub fn set_paused(&self, paused: bool) {
        self.more().paused = paused;
    }

    /// The state of one of its processes, as containerd shall see it.
    pub fn status(&self, process: &Process) -> Status {
        match process.status() {
            Status::RUNNING if self.more().sleep == Sleep::FallingAsleep => Status::PAUSING,
            Status::RUNNING if self.is_paused() => Status::PAUSED,
            status => status,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;
    use crate::process::End;

    fn container() -> Container {
        Container::new("web", "/bundle".into(), Stdio::default())
    }

    #[test]
    fn the_name_of_a_process_is_free_again_when_it_is_forgotten() {
        let container = container();
        container.add("a", Stdio::default()).unwrap();
        let again = container.add("a", Stdio::default()).unwrap_err();
        assert_eq!(again.to_string(), "exec a of task web already exists");
        container.forget("a");
        assert!(matches!(container.process("a"), Err(Error::NotFound(_))));
        assert!(container.add("a", Stdio::default()).is_ok());
    }

    #[test]
    fn nothing_is_added_while_it_is_paused_or_after_its_end() {
        let container = container();
        container.set_paused(true);
        assert!(matches!(container.add("a", Stdio::default()), Err(Error::State(_))));
        container.set_paused(false);
        container.init.tell_end(End { status: 0, at: SystemTime::UNIX_EPOCH });
        assert!(matches!(container.add("a", Stdio::default()), Err(Error::State(_))));
    }

    #[test]
    fn a_pause_is_told_of_what_runs() {
        let container = container();
        container.set_paused(true);
        assert_eq!(container.status(&container.init), Status::CREATED);
        container.init.start().unwrap();
        assert_eq!(container.status(&container.init), Status::PAUSED);
    }

    #[test]
    fn sleep_is_a_pause_and_what_was_paused_before_stays_so() {
        let container = container();
        container.init.start().unwrap();
        container.set_sleep(Sleep::FallingAsleep);
        assert_eq!(container.status(&container.init), Status::PAUSING);
        container.set_sleep(Sleep::Asleep);
        assert_eq!(container.status(&container.init), Status::PAUSED);
        assert!(matches!(container.add("a", Stdio::default()), Err(Error::State(_))));
        container.set_sleep(Sleep::Awake);
        assert_eq!(container.status(&container.init), Status::RUNNING);
        container.set_paused(true);
        container.set_sleep(Sleep::Asleep);
        container.set_sleep(Sleep::Awake);
        assert_eq!(container.status(&container.init), Status::PAUSED);
    }
}
