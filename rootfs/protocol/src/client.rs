//! The host's side of a control connection.

use crate::frame::{self, Deadline};
use crate::{
    AGENT_PORT, Configure, Connect, ErrorKind, ExitStatus, FrameError, Info, MAX_FRAME, PowerOff,
    ProcessId, Renew, Request, Response, Spawn, Spawned, Stream, WindowSize,
};
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

/// Why a request to the agent failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No connection.
    #[error("cannot connect to port {port} of the guest")]
    Connect {
        /// The port.
        port: u32,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The request could not be sent.
    #[error("cannot send {request} to the agent")]
    Send {
        /// Its name.
        request: &'static str,
        /// Why.
        #[source]
        source: FrameError,
    },
    /// No answer: the guest is gone, or the agent hangs.
    #[error("no answer from the agent to {request}")]
    Receive {
        /// Its name.
        request: &'static str,
        /// Why.
        #[source]
        source: FrameError,
    },
    /// The agent refused; its message names what and why.
    #[error("{message}")]
    Refused {
        /// For programs.
        kind: ErrorKind,
        /// For people.
        message: String,
    },
    /// The agent answered something else than was asked.
    #[error("agent answered {request} with {response:?}")]
    Unexpected {
        /// The request's name.
        request: &'static str,
        /// The answer.
        response: Box<Response>,
    },
    /// An earlier failure left the connection in an unknown state.
    #[error("cannot send {request} to the agent: the connection failed before")]
    Broken {
        /// The request's name.
        request: &'static str,
    },
    /// Bytes could not be passed on.
    #[error("cannot forward {stream}")]
    Forward {
        /// The stream.
        stream: Stream,
        /// Why.
        #[source]
        source: io::Error,
    },
}

impl Error {
    /// What a CLI should exit with, as shells and container tools do: 127 for a command that was
    /// not found, 126 for one that cannot be executed, 125 for all else.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Refused { kind: ErrorKind::NotFound, .. } => 127,
            Self::Refused { kind: ErrorKind::NotExecutable, .. } => 126,
            _ => 125,
        }
    }
}

/// A control connection to the agent: one request at a time, each answered.
///
/// After an error that is not [`Error::Refused`] the connection is of no more use.
pub struct Client {
    connector: Arc<dyn Connect>,
    stream: Option<UnixStream>,
    timeout: Option<Duration>,
}

impl Client {
    /// How long an answer may take by default; [`Client::wait`] waits forever.
    pub const TIMEOUT: Duration = Duration::from_secs(30);

    /// Connects to the agent.
    ///
    /// # Errors
    /// [`Error::Connect`].
    pub fn connect(connector: impl Connect + 'static) -> Result<Self, Error> {
        Self::over(Arc::new(connector))
    }

    pub(crate) fn connector(&self) -> Arc<dyn Connect> {
        self.connector.clone()
    }

    fn over(connector: Arc<dyn Connect>) -> Result<Self, Error> {
        let stream = Some(open(&*connector)?);
        Ok(Self { connector, stream, timeout: Some(Self::TIMEOUT) })
    }

    /// Opens a second control connection to the same agent, say to signal a process while this
    /// one waits for it.
    ///
    /// # Errors
    /// [`Error::Connect`].
    pub fn another(&self) -> Result<Self, Error> {
        Self::over(self.connector.clone())
    }

    /// Sets how long an answer may take; `None` is forever.
    pub fn set_timeout(&mut self, timeout: Option<Duration>) {
        self.timeout = timeout;
    }

    /// Asks whether the agent is there.
    ///
    /// # Errors
    /// Like all requests: [`Error`].
    pub fn ping(&mut self) -> Result<(), Error> {
        self.done(&Request::Ping)
    }

    /// Asks for the state of the guest.
    ///
    /// # Errors
    /// Like all requests: [`Error`].
    pub fn info(&mut self) -> Result<Info, Error> {
        match self.call(&Request::Info)? {
            Response::Info(info) => Ok(info),
            response => Err(unexpected(&Request::Info, response)),
        }
    }

    /// Starts a process.
    ///
    /// # Errors
    /// [`Error::Refused`] with [`ErrorKind::NotFound`] or [`ErrorKind::NotExecutable`] if its
    /// program cannot be executed.
    pub fn spawn(&mut self, spawn: Spawn) -> Result<Spawned, Error> {
        let request = Request::Spawn(spawn);
        match self.call(&request)? {
            Response::Spawned(spawned) => Ok(spawned),
            response => Err(unexpected(&request, response)),
        }
    }

    /// Connects to a stream of a process: what is written to or read from the result are its bytes
    /// until it is shut down or closed.
    ///
    /// # Errors
    /// [`Error::Refused`] with [`ErrorKind::NoSuchStream`] if there is none or it is attached.
    pub fn attach(&self, process: ProcessId, stream: Stream) -> Result<UnixStream, Error> {
        let mut attaching = self.another()?;
        attaching.timeout = self.timeout;
        attaching.done(&Request::Attach { process, stream })?;
        let stream = attaching.stream.ok_or(Error::Broken { request: "attach" })?;
        let untimed = stream.set_read_timeout(None).and(stream.set_write_timeout(None));
        untimed.map_err(|source| Error::Connect { port: AGENT_PORT, source })?;
        Ok(stream)
    }

    /// Ends the connection of a stream in a way that loses no byte, see [`Request::Detach`].
    ///
    /// # Errors
    /// Like all requests: [`Error`].
    pub fn detach(&mut self, process: ProcessId, stream: Stream) -> Result<(), Error> {
        self.done(&Request::Detach { process, stream })
    }

    /// Sends a signal to a process.
    ///
    /// # Errors
    /// Like all requests: [`Error`].
    pub fn signal(&mut self, process: ProcessId, signal: i32) -> Result<(), Error> {
        self.done(&Request::Signal { process, signal, group: false })
    }

    /// Sends a signal to a process and all of its group, as a terminal does.
    ///
    /// # Errors
    /// Like all requests: [`Error`].
    pub fn signal_group(&mut self, process: ProcessId, signal: i32) -> Result<(), Error> {
        self.done(&Request::Signal { process, signal, group: true })
    }

    /// Sets the size of a process's terminal.
    ///
    /// # Errors
    /// [`Error::Refused`] if it has none.
    pub fn resize(&mut self, process: ProcessId, size: WindowSize) -> Result<(), Error> {
        self.done(&Request::Resize { process, size })
    }

    /// Waits for the end of a process, however long that takes.
    ///
    /// # Errors
    /// Like all requests: [`Error`].
    pub fn wait(&mut self, process: ProcessId) -> Result<ExitStatus, Error> {
        let request = Request::Wait { process };
        match self.exchange(&request, None)? {
            Response::Exited { status } => Ok(status),
            response => Err(unexpected(&request, response)),
        }
    }

    /// Makes the agent forget a process, now or as soon as it exits.
    ///
    /// # Errors
    /// Like all requests: [`Error`].
    pub fn release(&mut self, process: ProcessId) -> Result<(), Error> {
        self.done(&Request::Release { process })
    }

    /// Gives a restored guest its time, entropy and name.
    ///
    /// # Errors
    /// Like all requests: [`Error`].
    pub fn renew(&mut self, renew: Renew) -> Result<(), Error> {
        self.done(&Request::Renew(renew))
    }

    /// Gives a guest names and addresses of its own.
    ///
    /// # Errors
    /// Like all requests: [`Error`].
    pub fn configure(&mut self, configure: Configure) -> Result<(), Error> {
        self.done(&Request::Configure(configure))
    }

    /// Ends the guest. It goes away just after the answer.
    ///
    /// # Errors
    /// Like all requests: [`Error`].
    pub fn power_off(&mut self, how: PowerOff) -> Result<(), Error> {
        self.done(&Request::PowerOff { how })
    }

    /// Sends any request and returns the answer, an error of the agent's as [`Error::Refused`].
    ///
    /// # Errors
    /// Like all requests: [`Error`].
    pub fn call(&mut self, request: &Request) -> Result<Response, Error> {
        self.exchange(request, self.timeout)
    }

    fn done(&mut self, request: &Request) -> Result<(), Error> {
        match self.call(request)? {
            Response::Done => Ok(()),
            response => Err(unexpected(request, response)),
        }
    }

    fn exchange(
        &mut self,
        request: &Request,
        timeout: Option<Duration>,
    ) -> Result<Response, Error> {
        let name = request.name();
        // Taken, so that it is closed on failure: a late answer must not be taken for the next.
        let stream = self.stream.take().ok_or(Error::Broken { request: name })?;
        let mut timed = Deadline::new(&stream, timeout);
        let sent = frame::write(&mut timed, request);
        if let Err(source) = sent {
            if matches!(source, FrameError::TooLong { .. }) {
                self.stream = Some(stream);
            }
            return Err(Error::Send { request: name, source });
        }
        let response = frame::read(&mut timed, MAX_FRAME)
            .map_err(|source| Error::Receive { request: name, source })?;
        self.stream = Some(stream);
        match response {
            Response::Error { kind, message } => Err(Error::Refused { kind, message }),
            response => Ok(response),
        }
    }
}

fn unexpected(request: &Request, response: Response) -> Error {
    Error::Unexpected { request: request.name(), response: Box::new(response) }
}

fn open(connector: &dyn Connect) -> Result<UnixStream, Error> {
    connector.connect(AGENT_PORT).map_err(|source| Error::Connect { port: AGENT_PORT, source })
}
