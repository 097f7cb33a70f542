//! The words of the protocol. Unknown fields are ignored; an unknown word is read as `Unknown`, so
//! that it can be answered rather than break the connection.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::IpAddr;

/// Names a process from its [`Request::Spawn`] to its [`Request::Release`]. Never used twice in
/// the life of a guest, unlike a pid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ProcessId(pub u64);

impl fmt::Display for ProcessId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// What the host asks. Each request gets exactly one [`Response`], in order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Request {
    /// Are you there? Always legal. Answer: [`Response::Done`].
    Ping,
    /// Always legal. Answer: [`Response::Info`].
    Info,
    /// Starts a process. Always legal. Its output waits in kernel pipes until it is attached, so
    /// none is lost. Answer: [`Response::Spawned`], or an error of kind [`ErrorKind::NotFound`] or
    /// [`ErrorKind::NotExecutable`] when the program could not be executed.
    Spawn(Spawn),
    /// Turns this connection into a stream. Legal only as the first request of a connection, for a
    /// stream that the process was spawned with and that is not attached. Answer:
    /// [`Response::Done`], and from there on raw bytes in one direction:
    ///
    /// - stdin: the host sends, and ends the stream by a shutdown of its sending side. The agent
    ///   closes the connection when the process reads no more, or has got it all.
    /// - stdout, stderr: the agent sends, and closes the connection when all has been sent, see
    ///   [`Spawn::linger_ms`]. The host sends nothing; if it closes the connection, the process's
    ///   end is closed too, see [`Spawn::keep_streams`].
    Attach {
        /// Whose stream.
        process: ProcessId,
        /// Which one.
        stream: Stream,
    },
    /// Ends the connection that a stream is attached to, so that the stream waits for the next
    /// [`Request::Attach`] and no byte is lost: before a guest is saved, whose connections do not
    /// come along. Legal until the process is released; without effect on a stream that is not
    /// attached or has ended. Answer: [`Response::Done`], at once. Then
    ///
    /// - stdout, stderr: the agent closes the connection when it has sent what it has read.
    /// - stdin: the host shuts its sending side down, which is not the stream's end this time. The
    ///   agent closes the connection when it has got all; what the process has not read yet waits
    ///   in the agent.
    Detach {
        /// Whose stream.
        process: ProcessId,
        /// Which one.
        stream: Stream,
    },
    /// Sends a signal. Legal until the process is released; to one that has exited, only the rest
    /// of its group gets it. Answer: [`Response::Done`].
    Signal {
        /// The process.
        process: ProcessId,
        /// The signal's number.
        signal: i32,
        /// To its whole process group, as a terminal does, not to it alone.
        #[serde(default)]
        group: bool,
    },
    /// Sets the size of the terminal. Legal for a process with a tty. Answer: [`Response::Done`].
    Resize {
        /// The process.
        process: ProcessId,
        /// The new size.
        size: WindowSize,
    },
    /// Waits for the end of the process, blocking this connection. Legal until the process is
    /// released, any number of times. Answer: [`Response::Exited`].
    Wait {
        /// The process.
        process: ProcessId,
    },
    /// Forgets the process; its streams can no longer be attached, those that are stay so. Legal
    /// at any time once: a process still running is left alone and forgotten when it exits.
    /// Answer: [`Response::Done`].
    Release {
        /// The process.
        process: ProcessId,
    },
    /// Makes a guest its own after it has been restored from a snapshot. Always legal. Answer:
    /// [`Response::Done`].
    Renew(Renew),
    /// Gives a guest names and addresses of its own. Always legal. Answer: [`Response::Done`] when
    /// all of it is in force and the neighbours have been told.
    Configure(Configure),
    /// Ends the guest: kills its processes, without asking them, and syncs its file systems.
    /// Always legal. Answer: [`Response::Done`], just before the guest goes away.
    PowerOff {
        /// What shall follow.
        how: PowerOff,
    },
    /// Stands for what this version does not know. Answer: [`ErrorKind::UnknownRequest`].
    #[serde(other)]
    Unknown,
}

impl Request {
    /// The request's name, for messages.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Ping => "ping",
            Self::Info => "info",
            Self::Spawn(_) => "spawn",
            Self::Attach { .. } => "attach",
            Self::Detach { .. } => "detach",
            Self::Signal { .. } => "signal",
            Self::Resize { .. } => "resize",
            Self::Wait { .. } => "wait",
            Self::Release { .. } => "release",
            Self::Renew(_) => "renew",
            Self::Configure(_) => "configure",
            Self::PowerOff { .. } => "power-off",
            Self::Unknown => "an unknown request",
        }
    }
}

/// What the agent answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Response {
    /// It is done.
    Done,
    /// To [`Request::Info`].
    Info(Info),
    /// To [`Request::Spawn`].
    Spawned(Spawned),
    /// To [`Request::Wait`].
    Exited {
        /// How it ended.
        status: ExitStatus,
    },
    /// Instead of any other.
    Error {
        /// For programs.
        kind: ErrorKind,
        /// For people: names what was refused, and why.
        message: String,
    },
    /// Stands for what this version does not know.
    #[serde(other)]
    Unknown,
}

/// Why the agent refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorKind {
    /// The program to spawn, or its working directory, does not exist.
    NotFound,
    /// The program to spawn exists and cannot be executed.
    NotExecutable,
    /// The request is malformed, or not legal here.
    Invalid,
    /// The agent does not know this request.
    UnknownRequest,
    /// There is no such process (any more).
    NoSuchProcess,
    /// The process has no such stream, or it is attached already.
    NoSuchStream,
    /// A limit of the agent, on processes or connections, is reached.
    TooMany,
    /// The guest's kernel refused.
    System,
    /// Stands for what this version does not know.
    #[serde(other)]
    Unknown,
}

/// One direction of a process's standard streams. With a tty, stdin and stdout are the two
/// directions of the terminal, each with a connection of its own, and there is no stderr.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stream {
    /// Host to process. The host's end of stream is the process's; with a tty it becomes the end
    /// of file character (Ctrl-D) if the terminal is in line mode.
    Stdin,
    /// Process to host.
    Stdout,
    /// Process to host.
    Stderr,
}

impl fmt::Display for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Stdin => "stdin",
            Self::Stdout => "stdout",
            Self::Stderr => "stderr",
        })
    }
}

/// The size of a terminal, in characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "rows and columns")]
pub struct WindowSize {
    pub rows: u16,
    pub cols: u16,
}

/// What to run, and how. [`Spawn::new`] gives the defaults.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Spawn {
    /// The program and its arguments. A program without a slash is looked up in the `PATH` of
    /// the process's own environment.
    pub argv: Vec<String>,
    /// Variables that are set, after the agent's defaults (`PATH`, `HOME`, and `TERM` with a
    /// tty). A later one replaces an earlier one.
    pub env: Vec<(String, String)>,
    /// Leaves the agent's defaults out.
    pub clear_env: bool,
    /// The working directory; `/` by default.
    pub cwd: Option<String>,
    /// Root by default.
    pub uid: Option<u32>,
    /// By default the user's group in the guest's `/etc/passwd`, else 0.
    pub gid: Option<u32>,
    /// The supplementary groups.
    pub groups: Vec<u32>,
    /// Gives the process a controlling terminal of this size for all three streams.
    pub tty: Option<WindowSize>,
    /// Will be attached; `/dev/null` otherwise.
    pub stdin: bool,
    /// Will be attached; `/dev/null` otherwise.
    pub stdout: bool,
    /// Will be attached; `/dev/null` otherwise. Ignored with a tty.
    pub stderr: bool,
    /// The process's group is killed, and the process released, when the connection that spawned
    /// it closes.
    pub kill_on_disconnect: bool,
    /// A stream whose connection is lost can be attached anew, instead of being closed. Bytes in
    /// flight are lost. For processes that outlive the host's end: restored guests, containers.
    pub keep_streams: bool,
    /// After the process has exited and all its output is sent, something else may still hold its
    /// stdout or stderr: a background child. The agent waits until they have been silent for so
    /// long, then ends the streams; later output is discarded. `None` waits for their end forever.
    pub linger_ms: Option<u32>,
}

impl Default for Spawn {
    fn default() -> Self {
        Self {
            argv: Vec::new(),
            env: Vec::new(),
            clear_env: false,
            cwd: None,
            uid: None,
            gid: None,
            groups: Vec::new(),
            tty: None,
            stdin: false,
            stdout: false,
            stderr: false,
            kill_on_disconnect: false,
            keep_streams: false,
            linger_ms: Some(Self::LINGER_MS),
        }
    }
}

impl Spawn {
    /// The default of [`Spawn::linger_ms`].
    pub const LINGER_MS: u32 = 1000;

    /// Runs `argv` as root in `/` with the default environment and no stream attached.
    pub fn new<A: Into<String>>(argv: impl IntoIterator<Item = A>) -> Self {
        Self { argv: argv.into_iter().map(Into::into).collect(), ..Self::default() }
    }

    /// Sets a variable.
    #[must_use]
    pub fn env(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.env.push((name.into(), value.into()));
        self
    }

    /// Sets [`Spawn::cwd`].
    #[must_use]
    pub fn cwd(mut self, cwd: impl Into<String>) -> Self {
        self.cwd = Some(cwd.into());
        self
    }

    /// Sets [`Spawn::uid`] and [`Spawn::gid`].
    #[must_use]
    pub fn user(mut self, uid: u32, gid: u32) -> Self {
        self.uid = Some(uid);
        self.gid = Some(gid);
        self
    }

    /// Sets [`Spawn::tty`].
    #[must_use]
    pub fn tty(mut self, size: WindowSize) -> Self {
        self.tty = Some(size);
        self
    }

    /// Sets [`Spawn::kill_on_disconnect`].
    #[must_use]
    pub fn kill_on_disconnect(mut self, kill: bool) -> Self {
        self.kill_on_disconnect = kill;
        self
    }
}

/// A process that has been started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spawned {
    /// Its name in requests.
    pub process: ProcessId,
    /// Its pid in the guest, for people.
    pub pid: i32,
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExitStatus {
    /// It exited with this code.
    Code(u8),
    /// It was killed by this signal.
    Signal(i32),
}

impl ExitStatus {
    /// The code as a shell tells it: a signal's number counts from 128.
    pub fn to_exit_code(self) -> u8 {
        match self {
            Self::Code(code) => code,
            Self::Signal(signal) => u8::try_from(signal.saturating_add(128)).unwrap_or(u8::MAX),
        }
    }

    /// Whether it exited with 0.
    pub fn success(self) -> bool {
        self == Self::Code(0)
    }
}

/// What follows a [`Request::PowerOff`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[expect(missing_docs, reason = "the names say it")]
pub enum PowerOff {
    Poweroff,
    Reboot,
}

/// The new identity of a guest that was cloned from a snapshot; what is absent stays as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Renew {
    /// The time of day, in nanoseconds since 1970.
    pub unix_nanos: Option<u64>,
    /// Random bytes for the kernel's generator, at most 512; it is reseeded at once.
    pub entropy: Vec<u8>,
    /// The host name.
    pub hostname: Option<String>,
}

/// Names and addresses of a guest; what is absent stays as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Configure {
    /// The content of `/etc/machine-id`: 32 hexadecimal digits.
    pub machine_id: Option<String>,
    /// Network interfaces.
    pub network: Vec<Interface>,
}

/// A network interface: what is said here takes the place of all that it had.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Interface {
    /// Its name in the guest.
    pub name: String,
    /// Its addresses.
    pub addresses: Vec<Address>,
    /// Where default routes lead.
    pub gateways: Vec<IpAddr>,
    /// Neighbours that need not be asked for.
    pub neighbours: Vec<Neighbour>,
}

/// An address of an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Address {
    /// The address.
    pub address: IpAddr,
    /// Bits of its network.
    pub bits: u8,
}

/// A neighbour's hardware address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Neighbour {
    /// Whose.
    pub address: IpAddr,
    /// It.
    pub mac: [u8; 6],
}

/// Sent once by the agent to [`READY_PORT`](crate::READY_PORT) when it serves: the guest is ready.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Hello {
    /// [`PROTOCOL_VERSION`](crate::PROTOCOL_VERSION) of the agent.
    pub protocol_version: u32,
    /// The agent's own version.
    pub agent_version: String,
    /// As in `uname -r`.
    pub kernel_release: String,
    /// The kernel's random name for this boot.
    pub boot_id: String,
    /// What commands see as `/`: `initramfs`, or the device with its file system.
    pub root: String,
}

/// The answer to [`Request::Info`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Info {
    /// What the agent said at boot.
    pub hello: Hello,
    /// The host name.
    pub hostname: String,
    /// Since boot.
    pub uptime_ms: u64,
    /// CPUs online.
    pub cpus: u32,
    /// All memory that the kernel manages.
    pub memory_total_kib: u64,
    /// Memory that a new process could get.
    pub memory_available_kib: u64,
    /// Processes that the agent knows, those that have exited and are not released included.
    pub processes: u32,
}
