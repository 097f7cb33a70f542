//! A command in the guest with its standard streams on the host.

use crate::client::{Client, Error};
use crate::{Connect, ExitStatus, ProcessId, Spawn, Spawned, Stream, WindowSize, pump};
use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

/// The host's ends of a command's standard streams; `None` is `/dev/null` in the guest. With a tty
/// stdout takes all output and stderr is not used.
#[derive(Debug, Default)]
#[expect(missing_docs, reason = "the names say it")]
pub struct Stdio {
    pub stdin: Option<OwnedFd>,
    pub stdout: Option<OwnedFd>,
    pub stderr: Option<OwnedFd>,
}

impl Stdio {
    /// This process's own.
    ///
    /// # Errors
    /// If one of them cannot be duplicated.
    pub fn inherit() -> io::Result<Self> {
        Ok(Self {
            stdin: Some(io::stdin().as_fd().try_clone_to_owned()?),
            stdout: Some(io::stdout().as_fd().try_clone_to_owned()?),
            stderr: Some(io::stderr().as_fd().try_clone_to_owned()?),
        })
    }

    /// None at all.
    pub fn null() -> Self {
        Self::default()
    }
}

/// A running command. Dropped without [`Session::wait`], it lets go of the command, which then
/// lives or dies by [`Spawn::kill_on_disconnect`].
pub struct Session {
    client: Client,
    spawned: Spawned,
    outputs: Vec<Pump>,
    input: Option<(Pump, UnixStream)>,
}

const SIGKILL: i32 = 9;

struct Pump {
    stream: Stream,
    thread: JoinHandle<io::Result<()>>,
}

impl Pump {
    fn start(
        stream: Stream,
        work: impl FnOnce() -> io::Result<()> + Send + 'static,
    ) -> Result<Self, Error> {
        let thread = thread::Builder::new().name(stream.to_string()).stack_size(128 << 10);
        let thread = thread.spawn(work).map_err(|source| Error::Forward { stream, source })?;
        Ok(Self { stream, thread })
    }

    fn join(self) -> Result<(), Error> {
        let stream = self.stream;
        let result = self.thread.join().unwrap_or_else(|_| Err(io::Error::other("thread died")));
        result.map_err(|source| Error::Forward { stream, source })
    }
}

impl Session {
    /// Starts a command and connects its streams. Which of them it has follows from `stdio`, not
    /// from the flags in `spawn`.
    ///
    /// # Errors
    /// [`Error::Refused`] if it cannot be started; any other [`Error`] if the connection fails.
    pub fn start(
        connector: impl Connect + 'static,
        mut spawn: Spawn,
        stdio: Stdio,
    ) -> Result<Self, Error> {
        spawn.stdin = stdio.stdin.is_some();
        spawn.stdout = stdio.stdout.is_some();
        spawn.stderr = stdio.stderr.is_some() && spawn.tty.is_none();
        let stderr = stdio.stderr.filter(|_| spawn.stderr);
        let mut client = Client::connect(connector)?;
        let spawned = client.spawn(spawn)?;
        let mut session = Self { client, spawned, outputs: Vec::new(), input: None };
        let connected = session
            .connect_output(Stream::Stdout, stdio.stdout)
            .and_then(|()| session.connect_output(Stream::Stderr, stderr))
            .and_then(|()| session.connect_input(stdio.stdin));
        if let Err(error) = connected {
            // Nobody would know of it, so it must not go on. Best effort: the guest may be gone.
            let _ = session.client.signal_group(spawned.process, SIGKILL);
            let _ = session.client.release(spawned.process);
            return Err(error);
        }
        Ok(session)
    }

    fn connect_output(&mut self, stream: Stream, fd: Option<OwnedFd>) -> Result<(), Error> {
        let Some(fd) = fd else { return Ok(()) };
        let connection = self.client.attach(self.spawned.process, stream)?;
        self.outputs.push(Pump::start(stream, move || pump::to_host(connection, fd))?);
        Ok(())
    }

    fn connect_input(&mut self, fd: Option<OwnedFd>) -> Result<(), Error> {
        let Some(fd) = fd else { return Ok(()) };
        let stream = Stream::Stdin;
        let connection = self.client.attach(self.spawned.process, stream)?;
        let pair = UnixStream::pair();
        let (stop, stopped) = pair.map_err(|source| Error::Forward { stream, source })?;
        let pump = Pump::start(stream, move || pump::to_guest(fd, connection, stopped))?;
        self.input = Some((pump, stop));
        Ok(())
    }

    /// The command's names in the guest.
    pub fn spawned(&self) -> Spawned {
        self.spawned
    }

    /// A handle to signal and resize it with, from any thread.
    pub fn remote(&self) -> Remote {
        let connector = self.client.connector();
        let process = self.spawned.process;
        Remote { process, connector, client: Arc::new(Mutex::new(None)) }
    }

    /// Waits for the command's end, then until all its output has been written, as told at
    /// [`Spawn::linger_ms`]. Input that it did not read is left unread.
    ///
    /// # Errors
    /// [`Error::Forward`] if output was lost; any other [`Error`] if the guest is gone.
    pub fn wait(mut self) -> Result<ExitStatus, Error> {
        let status = self.client.wait(self.spawned.process)?;
        let mut lost = Ok(());
        for output in self.outputs {
            lost = lost.and(output.join());
        }
        if let Some((input, stop)) = self.input {
            drop(stop);
            // What it could not deliver nobody waits for any more.
            let _ = input.join();
        }
        // Forgotten anyway if the guest is gone by now.
        let _ = self.client.release(self.spawned.process);
        lost.map(|()| status)
    }
}

/// Signals and resizes a [`Session`]'s command over a connection of its own.
#[derive(Clone)]
pub struct Remote {
    process: ProcessId,
    connector: Arc<dyn Connect>,
    client: Arc<Mutex<Option<Client>>>,
}

impl fmt::Debug for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Remote").field("process", &self.process).finish_non_exhaustive()
    }
}

impl Remote {
    /// Sends a signal to the command itself.
    ///
    /// # Errors
    /// [`Error`].
    pub fn signal(&self, signal: i32) -> Result<(), Error> {
        self.with(|client| client.signal(self.process, signal))
    }

    /// Sends a signal to the command's process group, as a terminal does on Ctrl-C.
    ///
    /// # Errors
    /// [`Error`].
    pub fn signal_group(&self, signal: i32) -> Result<(), Error> {
        self.with(|client| client.signal_group(self.process, signal))
    }

    /// Tells the command's terminal its new size.
    ///
    /// # Errors
    /// [`Error`].
    pub fn resize(&self, size: WindowSize) -> Result<(), Error> {
        self.with(|client| client.resize(self.process, size))
    }

    fn with(&self, call: impl FnOnce(&mut Client) -> Result<(), Error>) -> Result<(), Error> {
        let mut slot = self.client.lock().unwrap_or_else(PoisonError::into_inner);
        let client = match slot.as_mut() {
            Some(client) => client,
            None => slot.insert(Client::connect(self.connector.clone())?),
        };
        let result = call(client);
        // A connection that broke is opened anew next time.
        if !matches!(result, Ok(()) | Err(Error::Refused { .. })) {
            *slot = None;
        }
        result
    }
}
