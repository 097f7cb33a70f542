//! One call of `cube-vmm`: its input, environment and user; how it ended.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs;
use std::io::{self, PipeWriter, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, geteuid};

use crate::artifacts::Artifact;
use crate::place::{MARK, NOBODY, Place};

/// A call that has not ended by then hangs. Long, since the lab is slow and a machine can be busy.
const HANGS_AFTER: Duration = Duration::from_secs(400);

/// The most that a refusal of bad input may take. A second is what a person shall wait at most;
/// the rest is for machines that are busy with something else.
pub const REFUSES_WITHIN: Duration = Duration::from_secs(5);

/// A call of `cube-vmm` that has not been made yet.
pub struct Call<'a> {
    place: &'a Place,
    wrapper: Vec<String>,
    program: PathBuf,
    arguments: Vec<OsString>,
    environment: Vec<(String, OsString)>,
    removed: Vec<String>,
    stdin: Option<Vec<u8>>,
}

impl<'a> Call<'a> {
    pub(crate) fn new(place: &'a Place) -> Self {
        Self {
            place,
            wrapper: Vec::new(),
            program: Artifact::Vmm.arg().into(),
            arguments: Vec::new(),
            environment: Vec::new(),
            removed: Vec::new(),
            stdin: Some(Vec::new()),
        }
    }

    /// Appends arguments.
    #[must_use]
    pub fn arguments<A: AsRef<OsStr>>(mut self, arguments: impl IntoIterator<Item = A>) -> Self {
        self.arguments.extend(arguments.into_iter().map(|word| word.as_ref().to_owned()));
        self
    }

    /// What it reads from standard input; nothing by default.
    #[must_use]
    pub fn stdin(mut self, bytes: impl Into<Vec<u8>>) -> Self {
        self.stdin = Some(bytes.into());
        self
    }

    /// Standard input stays open: [`Running::stdin`] writes to it.
    #[must_use]
    pub fn open_stdin(mut self) -> Self {
        self.stdin = None;
        self
    }

    /// Sets an environment variable.
    #[must_use]
    pub fn env(mut self, name: &str, value: impl Into<OsString>) -> Self {
        self.environment.push((name.to_owned(), value.into()));
        self
    }

    /// Runs it through another program, such as `setpriv`, and that through those of later calls.
    #[must_use]
    pub fn through(mut self, wrapper: &[&str]) -> Self {
        self.wrapper.splice(0..0, wrapper.iter().map(|&word| word.to_owned()));
        self
    }

    /// Leaves an environment variable out.
    #[must_use]
    pub fn without_env(mut self, name: &str) -> Self {
        self.removed.push(name.to_owned());
        self
    }

    /// Calls a copy of the program, which has nothing beside it.
    #[must_use]
    pub fn from_copy(mut self) -> Self {
        fs::create_dir_all(self.place.given_path("bin")).unwrap();
        let copy = self.place.given_path("bin/cube-vmm");
        fs::copy(&self.program, &copy).unwrap();
        fs::set_permissions(&copy, fs::Permissions::from_mode(0o755)).unwrap();
        self.program = copy;
        self
    }

    /// Runs it as a user without rights. Who is such a user already stays so.
    #[must_use]
    pub fn as_nobody(mut self) -> Self {
        if !geteuid().is_root() {
            return self;
        }
        // The program can be in a folder that others may not enter.
        self = self.from_copy();
        self.place.open_to_nobody();
        let user = format!("--reuid={NOBODY}");
        let group = format!("--regid={NOBODY}");
        self.through(&["setpriv", &user, &group, "--clear-groups"])
    }

    /// Runs it where `/dev` is `folder` instead, and `/dev/kvm` is `kvm` if that is given.
    #[must_use]
    pub fn with_dev(self, folder: &str, kvm: Option<&str>) -> Self {
        let mut script = format!("mount --bind '{folder}' /dev");
        if let Some(kvm) = kvm {
            script.push_str(&format!(" && mount --bind '{kvm}' /dev/kvm"));
        }
        self.with_mounts(&script)
    }

    /// Runs it where `file` is on a file system that may only be read.
    #[must_use]
    pub fn with_read_only(self, file: &str) -> Self {
        let bind = format!("mount --bind '{file}' '{file}'");
        self.with_mounts(&format!("{bind} && mount -o remount,bind,ro '{file}'"))
    }

    /// Runs it with mounts of its own.
    fn with_mounts(self, script: &str) -> Self {
        let script = format!("{script} && exec \"$@\"");
        let flags = if geteuid().is_root() { "-m" } else { "-Urm" };
        self.through(&["unshare", flags, "sh", "-c", &script, "sh"])
    }

    /// Limits a resource, as `prlimit` writes it, such as `--nofile=8`.
    #[must_use]
    pub fn limited(self, limit: &str) -> Self {
        self.through(&["prlimit", limit])
    }

    /// The command, without its standard streams.
    pub(crate) fn command(&self) -> Command {
        let program = self.program.as_os_str().to_owned();
        let mut words: Vec<OsString> = self.wrapper.iter().map(OsString::from).collect();
        words.push(program);
        let mut words = words.into_iter();
        let mut command = Command::new(words.next().unwrap_or_default());
        command.args(words).args(&self.arguments);
        command.current_dir(self.place.work()).env("TMPDIR", self.place.work());
        command.env(MARK, self.place.root()).envs(self.environment.iter().cloned());
        for name in &self.removed {
            command.env_remove(name);
        }
        tie(&mut command);
        command
    }

    /// Makes the call.
    pub fn start(self) -> Running {
        let mut command = self.command();
        let (stdin, input) = io::pipe().unwrap();
        command.stdin(stdin).stdout(Stdio::piped()).stderr(Stdio::piped());
        let started = Instant::now();
        let mut child = command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"));
        // It holds the reading end of the input, which must close with the child.
        drop(command);
        let stdout = Captured::of(child.stdout.take().unwrap());
        let stderr = Captured::of(child.stderr.take().unwrap());
        let mut running = Running { child, started, stdin: Some(input), stdout, stderr };
        if let Some(bytes) = self.stdin {
            running.feed(bytes);
        }
        running
    }

    /// Makes the call and waits for its end.
    ///
    /// # Panics
    /// If it does not end.
    pub fn end(self) -> Ended {
        self.start().end()
    }
}

/// Makes a child die with the thread that starts it, whatever ends that.
fn tie(command: &mut Command) {
    let hook = || set_pdeathsig(Signal::SIGKILL).map_err(io::Error::from);
    // SAFETY: between fork and exec the hook makes one system call and touches no memory.
    unsafe { command.pre_exec(hook) };
}

/// What a stream has brought so far, read by a thread of its own.
pub struct Captured {
    shared: Arc<(Mutex<Content>, Condvar)>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Content {
    bytes: Vec<u8>,
    ended: bool,
}

impl Captured {
    /// Reads a stream to its end.
    pub fn of(mut stream: impl Read + Send + 'static) -> Self {
        let shared: Arc<(Mutex<Content>, Condvar)> = Arc::default();
        let filled = shared.clone();
        let read = move || {
            let mut buffer = vec![0; 64 << 10];
            loop {
                // The end of a terminal is an error.
                let read = stream.read(&mut buffer).unwrap_or(0);
                let mut content = filled.0.lock().unwrap();
                content.bytes.extend_from_slice(&buffer[..read]);
                content.ended = read == 0;
                filled.1.notify_all();
                if read == 0 {
                    return;
                }
            }
        };
        Self { shared, thread: Some(std::thread::spawn(read)) }
    }

    /// All that has come so far.
    pub fn so_far(&self) -> Vec<u8> {
        self.shared.0.lock().unwrap().bytes.clone()
    }

    /// Waits until `wanted` has come.
    ///
    /// # Panics
    /// If the stream ends without it, or it takes too long.
    #[track_caller]
    pub fn wait_for(&self, wanted: &str) {
        let has = |content: &Content| {
            content.bytes.windows(wanted.len()).any(|window| window == wanted.as_bytes())
        };
        let content = self.shared.0.lock().unwrap();
        let waiting = |content: &mut Content| !has(content) && !content.ended;
        let (content, _) = self.shared.1.wait_timeout_while(content, HANGS_AFTER, waiting).unwrap();
        let seen = String::from_utf8_lossy(&content.bytes);
        assert!(has(&content), "no {wanted:?} came, but:\n{seen}");
    }

    /// All, after the stream has ended.
    pub fn to_end(&mut self) -> Vec<u8> {
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
        std::mem::take(&mut self.shared.0.lock().unwrap().bytes)
    }
}

/// A call that has been made. Dropped, it is killed.
pub struct Running {
    child: Child,
    started: Instant,
    /// Writes to its standard input; `None` closes that.
    pub stdin: Option<PipeWriter>,
    /// Its standard output.
    pub stdout: Captured,
    /// Its standard error.
    pub stderr: Captured,
}

impl Running {
    /// Starts a command whose standard streams are set already, and who else reads what comes.
    pub(crate) fn attached(mut command: Command, stdout: Captured) -> Self {
        let started = Instant::now();
        let child = command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"));
        Self { child, started, stdin: None, stdout, stderr: Captured::of(io::empty()) }
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.pid().cast_signed()), signal).unwrap();
    }

    /// Writes `bytes` to its input from a thread, and closes that.
    pub fn feed(&mut self, bytes: Vec<u8>) {
        let mut input = self.stdin.take().unwrap();
        // Whoever does not read all of it may: that is told by other means.
        std::thread::spawn(move || drop(input.write_all(&bytes)));
    }

    /// Whether it has ended.
    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    /// Waits for its end.
    ///
    /// # Panics
    /// If it does not end.
    #[track_caller]
    pub fn end(self) -> Ended {
        self.end_within(HANGS_AFTER)
    }

    /// Waits for its end, so long.
    ///
    /// # Panics
    /// If it does not end.
    #[track_caller]
    pub fn end_within(mut self, limit: Duration) -> Ended {
        self.stdin = None;
        let deadline = Instant::now() + limit;
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            if Instant::now() > deadline {
                let text = String::from_utf8_lossy(&self.stderr.so_far()).into_owned();
                panic!("it has not ended after {limit:?}; its standard error:\n{text}");
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        let took = self.started.elapsed();
        let (stdout, stderr) = (self.stdout.to_end(), self.stderr.to_end());
        Ended { code: code(status), stdout, stderr: String::from_utf8_lossy(&stderr).into(), took }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Both fail if it has ended and been waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn code(status: ExitStatus) -> i32 {
    status.code().or_else(|| Some(128 + status.signal()?)).unwrap_or(-1)
}

/// How a call ended.
pub struct Ended {
    /// Its exit code, or 128 + n if signal n killed it.
    pub code: i32,
    /// Its standard output.
    pub stdout: Vec<u8>,
    /// Its standard error.
    pub stderr: String,
    /// From its start to its end.
    pub took: Duration,
}

impl fmt::Debug for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let start = &self.stdout[..self.stdout.len().min(2000)];
        writeln!(f, "exit code {} after {:?}", self.code, self.took)?;
        writeln!(f, "standard output ({} bytes):", self.stdout.len())?;
        writeln!(f, "{}", String::from_utf8_lossy(start))?;
        write!(f, "standard error:\n{}", self.stderr)
    }
}

impl Ended {
    /// Its standard output as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }

    /// Its standard output, after having made sure of its exit code.
    ///
    /// # Panics
    /// If the code is another.
    #[track_caller]
    pub fn output(&self, code: i32) -> String {
        assert_eq!(self.code, code, "{self:?}");
        self.text()
    }

    /// That bad input was refused as it should: one line that has all `words`, the exit code for
    /// that, quickly.
    ///
    /// # Panics
    /// If it was not.
    #[track_caller]
    pub fn assert_refused(&self, words: &[&str]) {
        assert_eq!(self.code, 125, "{self:?}");
        assert_eq!(self.stderr.lines().count(), 1, "{self:?}");
        assert!(self.stderr.starts_with("cube-vmm: "), "{self:?}");
        self.assert_told(words);
    }

    /// That a call with wrong usage was refused by the parser of the command line: its exit code,
    /// a first line that has all `words`, quickly.
    ///
    /// # Panics
    /// If it was not.
    #[track_caller]
    pub fn assert_usage(&self, words: &[&str]) {
        assert_eq!(self.code, 2, "{self:?}");
        assert!(self.stderr.starts_with("error: "), "{self:?}");
        self.assert_told(words);
    }

    #[track_caller]
    fn assert_told(&self, words: &[&str]) {
        for word in words {
            assert!(self.stderr.contains(word), "no {word:?} in what it said: {self:?}");
        }
        assert!(!self.stderr.contains("panicked"), "{self:?}");
        assert!(self.stdout.is_empty(), "{self:?}");
        assert!(self.took < REFUSES_WITHIN, "it took too long: {self:?}");
    }
}
