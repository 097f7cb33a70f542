//! What another process has to do: this program, started with a word for it.

use std::fs::OpenOptions;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio};

const HELPER: &str = "--helper";

/// A process that does one thing, waits for a line, and does another.
pub struct Helper {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Helper {
    pub fn start(task: &str, path: &Path) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args([HELPER, task]).arg(path).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let (stdin, stdout) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        Self { child, stdin, stdout: BufReader::new(stdout) }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it says next; nothing once it has ended.
    pub fn says(&mut self) -> String {
        let mut line = String::new();
        self.stdout.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    /// Lets it go on; what it says then.
    pub fn goes_on(&mut self) -> String {
        writeln!(self.stdin).unwrap();
        self.says()
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Does what a helper does, if this is one.
pub fn run(words: &[String]) -> Option<ExitCode> {
    let at = words.iter().position(|word| word == HELPER)?;
    let path = Path::new(&words[at + 2]);
    match words[at + 1].as_str() {
        "lock" => lock(path),
        "map" => map(path),
        other => panic!("no helper does {other}"),
    }
    Some(ExitCode::SUCCESS)
}

fn say(text: &str) {
    println!("{text}");
    std::io::stdout().flush().unwrap();
}

fn wait() {
    std::io::stdin().read_line(&mut String::new()).unwrap();
}

/// A lock of bytes 10 to 19, for writing.
pub fn range() -> libc::flock {
    libc::flock {
        l_type: libc::F_WRLCK as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: 10,
        l_len: 10,
        l_pid: 0,
    }
}

/// Holds two kinds of locks.
fn lock(path: &Path) {
    let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
    // SAFETY: an open descriptor.
    assert_eq!(unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX) }, 0);
    // SAFETY: an open descriptor, and a description that outlives the call.
    assert_eq!(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLK, &range()) }, 0);
    say("locked");
    wait();
    drop(file);
    say("closed");
    wait();
}

/// Maps two pages of a file, and reads one before and one after.
fn map(path: &Path) {
    const PAGE: usize = 4096;
    let file = OpenOptions::new().read(true).open(path).unwrap();
    let (read, shared, fd) = (libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd());
    // SAFETY: a new mapping of an open file.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), 2 * PAGE, read, shared, fd, 0) };
    assert_ne!(at, libc::MAP_FAILED);
    // No page is read that was not asked for.
    // SAFETY: the mapping that was just made.
    unsafe { libc::madvise(at, 2 * PAGE, libc::MADV_RANDOM) };
    let at = at.cast::<u8>();
    // SAFETY: within the mapping; the file has two pages.
    let byte = |page: usize| unsafe { at.add(page * PAGE).read_volatile() };
    say(&byte(0).to_string());
    wait();
    say(&byte(0).to_string());
    wait();
    say(&byte(1).to_string());
}
