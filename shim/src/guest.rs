//! Talks to the agent in the guest, and through it to `cube-oci`, which runs the containers.
//!
//! Each request has a connection of its own: one that waits for the end of a process for days
//! holds up nobody.

use std::path::PathBuf;
use std::time::Duration;

use guest_protocol::{
    AGENT_PORT, ErrorKind, ExitStatus, MAX_FRAME, ProcessId, Request, Response, Spawn, Spawned,
    Stream,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::time::timeout;

use crate::error::{Error, Result, io};

/// How long the agent may take to answer what it can do at once.
const PATIENCE: Duration = Duration::from_secs(10);
/// Longest answer to `CONNECT`: `OK` and a number.
const MAX_ANSWER: usize = 32;
/// The most that a program of ours in the guest may print.
const MAX_OUTPUT: u64 = 4 << 20;

/// The way to a guest.
#[derive(Clone, Debug)]
pub struct Guest {
    vsock: PathBuf,
}

/// What a program of ours in the guest printed, and how it ended.
#[derive(Clone, Debug)]
pub struct Output {
    /// How it ended.
    pub status: ExitStatus,
    /// Standard output.
    pub stdout: Vec<u8>,
    /// Standard error.
    pub stderr: Vec<u8>,
}

impl Guest {
    /// The guest behind the VMM's vsock socket.
    pub fn new(vsock: PathBuf) -> Self {
        Self { vsock }
    }

    /// Asks something that is answered at once.
    pub async fn call(&self, request: &Request) -> Result<Response> {
        let asked = async {
            let mut connection = self.connect().await?;
            exchange(&mut connection, request).await
        };
        within(PATIENCE, request, asked).await
    }

    /// Starts a process.
    pub async fn spawn(&self, spawn: Spawn) -> Result<Spawned> {
        match self.call(&Request::Spawn(spawn)).await? {
            Response::Spawned(spawned) => Ok(spawned),
            other => Err(unexpected("spawn", &other)),
        }
    }

    /// Connects to a stream of a process.
    pub async fn attach(&self, process: ProcessId, stream: Stream) -> Result<UnixStream> {
        let request = Request::Attach { process, stream };
        let attached = async {
            let mut connection = self.connect().await?;
            exchange(&mut connection, &request).await?;
            Ok(connection)
        };
        within(PATIENCE, &request, attached).await
    }

    /// Waits for the end of a process, however long that takes.
    pub async fn wait(&self, process: ProcessId) -> Result<ExitStatus> {
        let mut connection = self.connect().await?;
        match exchange(&mut connection, &Request::Wait { process }).await? {
            Response::Exited { status } => Ok(status),
            other => Err(unexpected("wait", &other)),
        }
    }

    /// Runs a program of ours to its end, within `patience`, and gives what it printed.
    pub async fn run<A: Into<String>>(
        &self,
        argv: impl IntoIterator<Item = A>,
        patience: Duration,
    ) -> Result<Output> {
        let spawn = Spawn { stdout: true, stderr: true, ..Spawn::new(argv) };
        let name = spawn.argv.join(" ");
        let run = async {
            let process = self.spawn(spawn).await?.process;
            let (stdout, stderr, status) = tokio::try_join!(
                self.output(process, Stream::Stdout),
                self.output(process, Stream::Stderr),
                self.wait(process),
            )?;
            self.call(&Request::Release { process }).await?;
            Ok(Output { status, stdout, stderr })
        };
        timeout(patience, run).await.unwrap_or_else(|_| {
            let seconds = patience.as_secs();
            Err(Error::Unavailable(format!("`{name}` in the guest took more than {seconds} s")))
        })
    }

    async fn output(&self, process: ProcessId, stream: Stream) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let connection = self.attach(process, stream).await?;
        let read = connection.take(MAX_OUTPUT).read_to_end(&mut bytes).await;
        read.map_err(io(format!("read the {stream} of a program in the guest")))?;
        Ok(bytes)
    }

    async fn connect(&self) -> Result<UnixStream> {
        let failed =
            |what: &str| Error::Unavailable(format!("the guest's agent cannot be reached: {what}"));
        let mut stream = UnixStream::connect(&self.vsock)
            .await
            .map_err(|error| failed(&format!("{}: {error}", self.vsock.display())))?;
        let request = format!("CONNECT {AGENT_PORT}\n");
        let sent = stream.write_all(request.as_bytes()).await;
        sent.map_err(|error| failed(&error.to_string()))?;
        let mut answer = Vec::with_capacity(MAX_ANSWER);
        // Byte by byte: what follows the line belongs to the stream.
        while answer.last() != Some(&b'\n') && answer.len() < MAX_ANSWER {
            let byte = stream.read_u8().await.map_err(|_| failed("nobody listens there"))?;
            answer.push(byte);
        }
        if answer.starts_with(b"OK ") {
            return Ok(stream);
        }
        Err(failed(&format!("the VMM answered '{}'", answer.escape_ascii())))
    }
}

async fn within<T>(
    patience: Duration,
    request: &Request,
    work: impl Future<Output = Result<T>>,
) -> Result<T> {
    timeout(patience, work).await.unwrap_or_else(|_| {
        let (name, seconds) = (request.name(), patience.as_secs());
        Err(Error::Unavailable(format!("the guest's agent did not answer {name} in {seconds} s")))
    })
}

async fn exchange(stream: &mut UnixStream, request: &Request) -> Result<Response> {
    let name = request.name();
    let broken = |what: String| Error::Unavailable(format!("the guest's agent to {name}: {what}"));
    let mut frame = vec![0; 4];
    serde_json::to_writer(&mut frame, request).map_err(|error| broken(error.to_string()))?;
    let length = frame.len() - 4;
    let header = u32::try_from(length).ok().filter(|_| length <= MAX_FRAME);
    let header = header.ok_or_else(|| {
        Error::Invalid(format!("{name} has {length} bytes, more than {MAX_FRAME}"))
    })?;
    frame[..4].copy_from_slice(&header.to_le_bytes());
    stream.write_all(&frame).await.map_err(|error| broken(error.to_string()))?;
    let length = stream.read_u32_le().await.map_err(|error| broken(error.to_string()))? as usize;
    if length > MAX_FRAME {
        return Err(broken(format!("an answer of {length} bytes")));
    }
    let mut body = vec![0; length];
    stream.read_exact(&mut body).await.map_err(|error| broken(error.to_string()))?;
    match serde_json::from_slice(&body).map_err(|error| broken(error.to_string()))? {
        Response::Error { kind, message } => Err(refused(kind, message)),
        response => Ok(response),
    }
}

fn refused(kind: ErrorKind, message: String) -> Error {
    match kind {
        ErrorKind::NoSuchProcess | ErrorKind::NoSuchStream => Error::NotFound(message),
        ErrorKind::NotFound | ErrorKind::NotExecutable => Error::Program(message),
        ErrorKind::Invalid => Error::Invalid(message),
        _ => Error::Unavailable(format!("the guest refused: {message}")),
    }
}

fn unexpected(request: &str, response: &Response) -> Error {
    Error::Unavailable(format!("the guest's agent answered {request} with {response:?}"))
}

#[cfg(test)]
mod tests {
    use tokio::net::UnixListener;

    use super::*;

    /// A guest that answers one connection with these bytes after `OK`.
    async fn guest(answer: Vec<u8>) -> (tempfile::TempDir, Guest) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vsock");
        let listener = UnixListener::bind(&path).unwrap();
        tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = [0; 13];
            stream.read_exact(&mut request).await.unwrap();
            stream.write_all(&answer).await.unwrap();
            let mut rest = Vec::new();
            let _ = stream.read_to_end(&mut rest).await;
        });
        (dir, Guest::new(path))
    }

    fn answer(json: &str) -> Vec<u8> {
        let length = u32::try_from(json.len()).unwrap().to_le_bytes();
        [b"OK 5\n".as_slice(), &length, json.as_bytes()].concat()
    }

    #[tokio::test]
    async fn an_answer_is_read() {
        let (_dir, guest) = guest(answer(r#"{"type":"done"}"#)).await;
        assert_eq!(guest.call(&Request::Ping).await.unwrap(), Response::Done);
    }

    #[tokio::test]
    async fn a_refusal_keeps_its_meaning() {
        let refusal = r#"{"type":"error","kind":"no_such_process","message":"no process 7"}"#;
        let (_dir, guest) = guest(answer(refusal)).await;
        let error = guest.call(&Request::Ping).await.unwrap_err();
        assert!(matches!(error, Error::NotFound(message) if message == "no process 7"));
    }

    #[tokio::test]
    async fn an_absurd_length_is_refused() {
        let (_dir, guest) = guest([b"OK 5\n".as_slice(), &[0xff; 4]].concat()).await;
        let error = guest.call(&Request::Ping).await.unwrap_err().to_string();
        assert!(error.ends_with("an answer of 4294967295 bytes"), "{error}");
    }

    #[tokio::test]
    async fn a_guest_that_is_gone_is_unavailable() {
        let guest = Guest::new("/nonexistent/vsock".into());
        let error = guest.call(&Request::Ping).await.unwrap_err();
        assert!(matches!(error, Error::Unavailable(_)), "{error}");
    }
}
