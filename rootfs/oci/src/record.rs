//! What is known of containers, as files below `/run/cube/oci`, a tmpfs: each has one writer and
//! comes into being whole, so that nobody needs a lock, and who is killed leaves nothing half done.
//!
//! ```text
//! ID/keeper.json    who keeps it: written first, by its keeper
//!    config.json    the adapted spec
//!    last.json      what the executor does last: capabilities, seccomp
//!    created.json   it waits to be started: by its keeper
//!    starting       it is being started: by `start`
//!    running        its program runs: by its keeper
//!    exit.json      it has ended, or never was: by its keeper, before it ends itself
//!    log            what libcontainer complained of
//!    runtime/       libcontainer's own
//!    exec/EXEC_ID/  the same for a process that was added, without `starting`
//! ```

use crate::error::{Error, Failure};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Where all is.
pub const ROOT: &str = "/run/cube/oci";
/// Longer is no file name.
const MAX_ID: usize = 255;

/// A name of a container, or of a process in it, that is safe as a file name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Id(String);

impl Id {
    /// As given.
    ///
    /// # Errors
    /// [`Error::BadId`].
    pub fn new(text: &str) -> Result<Self, Error> {
        let known = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '+' | '-' | '.');
        let fine = !text.is_empty() && text.len() <= MAX_ID && text.chars().all(known);
        if !fine || text == "." || text == ".." {
            return Err(Error::BadId(text.chars().take(MAX_ID).collect()));
        }
        Ok(Self(text.to_owned()))
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl std::str::FromStr for Id {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        Self::new(text)
    }
}

/// A process that cannot be taken for another that got its pid later.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessName {
    /// Its pid, as the guest's PID 1 sees it.
    pub pid: i32,
    /// When it was started, in clock ticks since boot.
    pub start: u64,
}

impl ProcessName {
    /// Of a process that exists.
    pub fn of(pid: i32) -> io::Result<Self> {
        Ok(Self { pid, start: start_time(pid)? })
    }

    /// Whether it is there and no zombie.
    pub fn is_alive(self) -> bool {
        let Ok(stat) = fs::read_to_string(format!("/proc/{}/stat", self.pid)) else { return false };
        parse_start(&stat) == Some(self.start) && !matches!(parse_state(&stat), Some("Z" | "X"))
    }
}

fn start_time(pid: i32) -> io::Result<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    parse_start(&stat).ok_or_else(|| io::Error::from(ErrorKind::InvalidData))
}

/// The 22nd word, proc(5). The second is in parentheses and may have any in it.
fn parse_start(stat: &str) -> Option<u64> {
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(19)?.parse().ok()
}

fn parse_state(stat: &str) -> Option<&str> {
    stat.rsplit_once(')')?.1.split_ascii_whitespace().next()
}

/// A container, or a process in one, that waits or runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Created {
    /// Its first process.
    pub process: ProcessName,
    /// Whether it is the first of a pid namespace, whose other processes end with it.
    pub private_pids: bool,
    /// What of the spec was not carried out.
    pub warnings: Vec<String>,
}

/// How it ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exit {
    /// As a shell tells it: a signal's number counts from 128.
    pub status: u8,
    /// How many of its processes the kernel killed for want of memory.
    pub oom_kills: u64,
    /// Why its program never ran.
    pub error: Option<Failure>,
}

/// The folder of a container, or of a process in one.
#[derive(Clone, Debug)]
pub struct Record {
    dir: PathBuf,
}

impl Record {
    /// That of a container, which need not exist.
    pub fn of_container(id: &Id) -> Self {
        Self { dir: Path::new(ROOT).join(id.as_str()) }
    }

    /// That of a process in a container.
    pub fn of_process(id: &Id, exec: &Id) -> Self {
        Self { dir: Self::of_container(id).path("exec").join(exec.as_str()) }
    }

    #[cfg(test)]
    pub fn at(dir: &Path) -> Self {
        Self { dir: dir.to_owned() }
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Something in it.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Whether there is such a record.
    pub fn exists(&self) -> bool {
        self.dir.is_dir()
    }

    /// Makes the folder, for a keeper, which is this process.
    ///
    /// # Errors
    /// [`Error::Exists`], or [`Error::File`].
    pub fn create(&self, what: &str) -> Result<(), Error> {
        let me = std::process::id();
        let parent = self.dir.parent().unwrap_or(&self.dir);
        // No id has a comma in it. It gets its name when it says who keeps it.
        let unfinished = Self { dir: parent.join(format!(",{me}")) };
        unfinished.remove()?;
        fs::create_dir_all(&unfinished.dir).map_err(Error::file("make", &unfinished.dir))?;
        let me = ProcessName::of(me.cast_signed()).map_err(Error::system("look at myself"))?;
        unfinished.write("keeper.json", &me)?;
        let named = fs::rename(&unfinished.dir, &self.dir);
        named.map_err(|error| {
            // Worth nothing, and in memory only.
            let _ = unfinished.remove();
            match error.kind() {
                ErrorKind::DirectoryNotEmpty | ErrorKind::AlreadyExists => {
                    Error::Exists(what.to_owned())
                }
                _ => Error::file("make", &self.dir)(error),
            }
        })
    }

    /// Writes a file, whole or not at all.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn write(&self, name: &str, content: &impl Serialize) -> Result<(), Error> {
        let path = self.path(name);
        let text = serde_json::to_vec(content)
            .map_err(|source| Error::Json { path: path.clone(), source })?;
        let unfinished = self.path(&format!(".{name}.new"));
        let written = fs::File::create(&unfinished).and_then(|mut file| file.write_all(&text));
        written.map_err(Error::file("write", &unfinished))?;
        fs::rename(&unfinished, &path).map_err(Error::file("write", &path))
    }

    /// Reads a file; `None` if it is not there.
    ///
    /// # Errors
    /// [`Error::File`] or [`Error::Json`].
    pub fn read<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>, Error> {
        read_json(&self.path(name))
    }

    /// Makes an empty file; whether it was not there before.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn mark(&self, name: &str) -> Result<bool, Error> {
        let path = self.path(name);
        match fs::File::create_new(&path) {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(false),
            Err(error) => Err(Error::file("make", &path)(error)),
        }
    }

    /// Whether a file is there.
    pub fn has(&self, name: &str) -> bool {
        self.path(name).exists()
    }

    /// Removes all of it, at once for those who look: of half a record nobody could tell what it
    /// is.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn remove(&self) -> Result<(), Error> {
        let parent = self.dir.parent().unwrap_or(&self.dir);
        // No id has a comma in it, and no two processes have one pid.
        let doomed = parent.join(format!(",{}-gone", std::process::id()));
        remove_all(&doomed)?;
        match fs::rename(&self.dir, &doomed) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            Err(error) => Err(Error::file("remove", &self.dir)(error)),
            Ok(()) => remove_all(&doomed),
        }
    }

    /// Whether its keeper has gone without a word.
    pub fn is_orphaned(&self) -> bool {
        let keeper = self.read::<ProcessName>("keeper.json").ok().flatten();
        !keeper.is_some_and(ProcessName::is_alive) && !self.has("exit.json")
    }

    /// The ids of the processes that were added to this container.
    pub fn processes(&self) -> Vec<Id> {
        let entries = fs::read_dir(self.path("exec")).into_iter().flatten().flatten();
        entries.filter_map(|entry| Id::new(entry.file_name().to_str()?).ok()).collect()
    }
}

fn remove_all(folder: &Path) -> Result<(), Error> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(Error::file("remove", folder)(error))
        }
        _ => Ok(()),
    }
}

/// Reads a file of JSON; `None` if it is not there.
///
/// # Errors
/// [`Error::File`] or [`Error::Json`].
pub fn read_json<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, Error> {
    let text = match fs::read(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        read => read.map_err(Error::file("read", path))?,
    };
    let parsed = serde_json::from_slice(&text);
    parsed.map(Some).map_err(|source| Error::Json { path: path.to_owned(), source })
}

/// Asks until there is an answer, at most so long, and ever more slowly.
pub fn wait_for<T>(limit: Duration, mut ask: impl FnMut() -> Option<T>) -> Option<T> {
    let start = Instant::now();
    let mut pause = Duration::from_micros(200);
    loop {
        let answer = ask();
        if answer.is_some() || start.elapsed() >= limit {
            return answer;
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(10));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::MetadataExt;
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn ids_are_file_names() {
        for fine in ["a", "A-1_2.x+y", "...", &"x".repeat(255)] {
            assert_eq!(Id::new(fine).unwrap().as_str(), fine);
        }
        for bad in ["", ".", "..", "a/b", "../x", "a b", "a\0", "ü", &"x".repeat(256)] {
            assert!(matches!(Id::new(bad), Err(Error::BadId(_))), "{bad:?}");
        }
    }

    #[test]
    fn start_times_are_found_after_any_name() {
        let stat = "7 (a) b) S 1 7 7 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 4711 9 9";
        assert_eq!((parse_start(stat), parse_state(stat)), (Some(4711), Some("S")));
        assert_eq!(parse_start("7 (a"), None);
    }

    #[test]
    fn a_process_is_alive_under_its_own_start_time_only() {
        let me = ProcessName::of(std::process::id().cast_signed()).unwrap();
        assert!(me.is_alive());
        assert!(!ProcessName { start: me.start + 1, ..me }.is_alive());
    }

    #[test]
    fn a_record_that_is_removed_and_made_anew_is_never_half_there() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c");
        let done = AtomicBool::new(false);
        let halves = std::thread::scope(|scope| {
            let looks = scope.spawn(|| {
                let record = Record::at(&path);
                let mut halves = 0;
                while !done.load(Ordering::Relaxed) {
                    // A folder that is open stays the one that it was, whatever has its name now.
                    let Ok(folder) = fs::File::open(&path) else { continue };
                    let held = format!("/proc/self/fd/{}", folder.as_raw_fd());
                    let keeper = Path::new(&held).join("keeper.json").exists();
                    let named = fs::metadata(&path).is_ok_and(|meta| {
                        folder.metadata().is_ok_and(|held| held.ino() == meta.ino())
                    });
                    halves += u32::from(!keeper && named && record.exists());
                }
                halves
            });
            for _ in 0..300 {
                let record = Record::at(&path);
                record.create("c").unwrap();
                for file in 0..8 {
                    record.mark(&format!("file{file}")).unwrap();
                }
                record.remove().unwrap();
            }
            done.store(true, Ordering::Relaxed);
            looks.join().unwrap()
        });
        assert_eq!(halves, 0);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn what_is_written_is_read_and_a_mark_is_made_once() {
        let dir = tempfile::tempdir().unwrap();
        let record = Record::at(&dir.path().join("c"));
        record.create("c").unwrap();
        assert!(matches!(record.create("c"), Err(Error::Exists(_))));
        let exit = Exit { status: 137, oom_kills: 1, error: None };
        record.write("exit.json", &exit).unwrap();
        assert_eq!(record.read::<Exit>("exit.json").unwrap(), Some(exit));
        assert_eq!(record.read::<Created>("created.json").unwrap(), None);
        assert_eq!(
            (record.mark("starting").unwrap(), record.mark("starting").unwrap()),
            (true, false)
        );
        record.remove().unwrap();
        record.remove().unwrap();
        assert!(!record.exists());
    }
}
