//! Commands in a guest that [`TestVm`](crate::TestVm) holds, over its vsock socket.

use std::fmt;
use std::io::{self, PipeWriter, Write};
use std::path::Path;

use guest_protocol::{ExitStatus, HybridSocket, Remote, Session, Spawn, Stdio};

use crate::call::Captured;

/// The words that run a line in the guest's shell.
pub fn sh(line: &str) -> [&str; 3] {
    ["sh", "-c", line]
}

/// What a command in the guest did.
#[derive(Clone, PartialEq, Eq)]
pub struct Output {
    /// How it ended.
    pub status: ExitStatus,
    /// Its standard output.
    pub stdout: Vec<u8>,
    /// Its standard error.
    pub stderr: Vec<u8>,
}

impl fmt::Debug for Output {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (stdout, stderr) = (self.stdout.escape_ascii(), self.stderr.escape_ascii());
        write!(f, "{:?}, standard output \"{stdout}\", standard error \"{stderr}\"", self.status)
    }
}

impl Output {
    /// Its standard output without the white space around it, after having made sure that it
    /// succeeded.
    ///
    /// # Panics
    /// If it failed.
    #[track_caller]
    pub fn text(&self) -> String {
        assert!(self.status.success(), "{self:?}");
        String::from_utf8_lossy(&self.stdout).trim().to_owned()
    }

    /// Like [`Output::text`], as a number.
    ///
    /// # Panics
    /// If it failed, or printed something else.
    #[track_caller]
    pub fn number(&self) -> u64 {
        self.text().parse().unwrap_or_else(|_| panic!("not a number: {self:?}"))
    }
}

/// A command in the guest that runs. Dropped, it is killed.
pub struct GuestProcess {
    session: Session,
    /// Writes to its standard input; `None` closes that.
    pub stdin: Option<PipeWriter>,
    /// Its standard output.
    pub stdout: Captured,
    stderr: Captured,
}

impl GuestProcess {
    /// Starts it, all three streams attached.
    pub(crate) fn start(vsock: &Path, spawn: Spawn) -> Result<Self, guest_protocol::Error> {
        let (stdin, input) = io::pipe().unwrap();
        let (stdout, output) = io::pipe().unwrap();
        let (stderr, errors) = io::pipe().unwrap();
        let stdio = Stdio {
            stdin: Some(stdin.into()),
            stdout: Some(output.into()),
            stderr: Some(errors.into()),
        };
        let session =
            Session::start(HybridSocket::new(vsock), spawn.kill_on_disconnect(true), stdio)?;
        let (stdout, stderr) = (Captured::of(stdout), Captured::of(stderr));
        Ok(Self { session, stdin: Some(input), stdout, stderr })
    }

    /// Signals and resizes it.
    pub fn remote(&self) -> Remote {
        self.session.remote()
    }

    /// Writes `bytes` to its input and closes that. Waits while the command does not read.
    pub fn feed(&mut self, bytes: &[u8]) {
        self.stdin.take().unwrap().write_all(bytes).unwrap();
    }

    /// Closes its input and waits for its end.
    ///
    /// # Panics
    /// If the guest goes away, or output was lost.
    #[track_caller]
    pub fn end(mut self) -> Output {
        self.stdin = None;
        let status = self.session.wait().unwrap();
        Output { status, stdout: self.stdout.to_end(), stderr: self.stderr.to_end() }
    }
}
