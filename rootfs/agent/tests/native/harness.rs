//! An agent in a directory of its own, and ways to run commands with it.

use guest_protocol::{Client, Connect, Error, ExitStatus, Remote, Session, Spawn, Stdio};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A running agent; killed when dropped.
pub struct Agent {
    child: Child,
    dir: TempDir,
}

/// The way to its socket.
#[derive(Clone)]
pub struct Socket(PathBuf);

impl Connect for Socket {
    fn connect(&self, _port: u32) -> io::Result<UnixStream> {
        UnixStream::connect(&self.0)
    }
}

/// What a command left behind.
#[derive(Debug)]
pub struct Outcome {
    pub status: ExitStatus,
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
}

impl Outcome {
    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.stdout).unwrap()
    }
}

/// Polls until `done`, or fails after 10 s.
pub fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < Duration::from_secs(10), "never: {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

impl Agent {
    pub fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let child = Command::new(env!("CARGO_BIN_EXE_cube-agent"))
            .arg("--serve-unix")
            .arg(dir.path())
            .spawn()
            .unwrap();
        let agent = Self { child, dir };
        eventually("the agent listens", || agent.socket().connect(0).is_ok());
        agent
    }

    pub fn socket(&self) -> Socket {
        Socket(self.dir.path().join("agent.sock"))
    }

    pub fn client(&self) -> Client {
        Client::connect(self.socket()).unwrap()
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Starts `spawn` with pipes for its output.
    pub fn start_session(&self, spawn: Spawn, stdin: Option<OwnedFd>) -> Result<Running, Error> {
        let ((out, stdout), (err, stderr)) = (io::pipe().unwrap(), io::pipe().unwrap());
        let stdio = Stdio { stdin, stdout: Some(stdout.into()), stderr: Some(stderr.into()) };
        let session = Session::start(self.socket(), spawn, stdio)?;
        Ok(Running { session, stdout: Collected::start(out), stderr: Collected::start(err) })
    }

    /// Runs `spawn` to its end, `input` being all of its stdin.
    pub fn run_with(&self, spawn: Spawn, input: Vec<u8>) -> Outcome {
        let (stdin, mut feed) = io::pipe().unwrap();
        let running = self.start_session(spawn, Some(stdin.into())).unwrap();
        let feeding = thread::spawn(move || {
            // A command need not read all of it.
            let _ = feed.write_all(&input);
        });
        let outcome = running.finish();
        feeding.join().unwrap();
        outcome
    }

    /// Runs `spawn` to its end, with no stdin.
    pub fn run(&self, spawn: Spawn) -> Outcome {
        self.start_session(spawn, None).unwrap().finish()
    }

    /// Runs a line of shell to its end.
    pub fn shell(&self, line: &str) -> Outcome {
        self.run(sh(line))
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A line of shell.
pub fn sh(line: &str) -> Spawn {
    Spawn::new(["/bin/sh", "-c", line])
}

/// What comes out of a pipe.
struct Collected {
    bytes: Arc<Mutex<Vec<u8>>>,
    thread: thread::JoinHandle<()>,
}

impl Collected {
    fn start(mut pipe: io::PipeReader) -> Self {
        let bytes: Arc<Mutex<Vec<u8>>> = Arc::default();
        let collected = bytes.clone();
        let thread = thread::spawn(move || {
            let mut buffer = vec![0; 1 << 16];
            loop {
                match pipe.read(&mut buffer).unwrap() {
                    0 => return,
                    read => collected.lock().unwrap().extend_from_slice(&buffer[..read]),
                }
            }
        });
        Self { bytes, thread }
    }

    fn finish(self) -> Vec<u8> {
        self.thread.join().unwrap();
        std::mem::take(&mut *self.bytes.lock().unwrap())
    }
}

pub struct Running {
    session: Session,
    stdout: Collected,
    stderr: Collected,
}

impl Running {
    pub fn remote(&self) -> Remote {
        self.session.remote()
    }

    /// Waits until `text` is the start of what the command has written.
    pub fn wait_for(&self, text: &str) {
        eventually(text, || self.stdout.bytes.lock().unwrap().starts_with(text.as_bytes()));
    }

    pub fn finish(self) -> Outcome {
        let status = self.session.wait().unwrap();
        Outcome { status, stdout: self.stdout.finish(), stderr: self.stderr.finish() }
    }
}

/// Whether a process exists and is no zombie.
pub fn alive(pid: i32) -> bool {
    let mut stat = String::new();
    let read = File::open(format!("/proc/{pid}/stat")).map(|mut f| f.read_to_string(&mut stat));
    read.is_ok() && !stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('Z'))
}

/// Whether this test may run as another user; tells if not.
pub fn is_root() -> bool {
    let root = nix::unistd::geteuid().is_root();
    if !root {
        eprintln!("\x1b[31mSKIPPED: needs root\x1b[0m");
    }
    root
}
