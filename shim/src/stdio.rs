//! The standard streams of a process: between the files that containerd's client waits at and the
//! streams of the guest.
//!
//! Two things decide whether output is lost. A FIFO forgets what is in it when its last end is
//! closed, and a client may open its own end late: so a process is not started before the client
//! has (or has not in [`PATIENCE`]), and the shim holds a reading end too, which also keeps a
//! client that goes away, containerd being restarted, from breaking the pipe. And an end of stream
//! is only passed on after everything before it.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use guest_protocol::{ProcessId, Stream};
use tokio::io::AsyncWriteExt;
use tokio::net::UnixStream;
use tokio::net::unix::pipe;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use crate::error::{Error, Result, io as failed};
use crate::guest::Guest;

/// How long a client may take to open its end.
const PATIENCE: Duration = Duration::from_secs(5);
/// How often it is looked for.
const LOOK: Duration = Duration::from_millis(1);

/// Where a process's streams shall go, in containerd's words: paths of FIFOs, `file://` and a path,
/// or nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stdio {
    pub stdin: String,
    pub stdout: String,
    pub stderr: String,
    pub terminal: bool,
}

impl Stdio {
    /// Refuses what is not served, by name.
    pub fn check(&self) -> Result<()> {
        for (name, value) in
            [("stdin", &self.stdin), ("stdout", &self.stdout), ("stderr", &self.stderr)]
        {
            let scheme = value.split_once("://").map(|(scheme, _)| scheme);
            let served = match scheme {
                None | Some("fifo") => true,
                Some("file") => name != "stdin",
                Some(_) => false,
            };
            if !served {
                return Err(Error::Invalid(format!(
                    "{name} is {value:?}: expected the path of a FIFO{}",
                    if name == "stdin" { "" } else { ", or file:// and a path" }
                )));
            }
        }
        Ok(())
    }

    /// Whether the process shall have this stream.
    pub fn has(&self, stream: Stream) -> bool {
        match stream {
            Stream::Stdin => !self.stdin.is_empty(),
            Stream::Stdout => !self.stdout.is_empty(),
            Stream::Stderr => !self.stderr.is_empty() && !self.terminal,
        }
    }
}

fn path(value: &str) -> &str {
    value.split_once("://").map_or(value, |(_, path)| path)
}

/// Where output goes.
enum Sink {
    /// A FIFO, and a reading end that keeps it.
    Fifo(pipe::Sender, File),
    /// A file that grows.
    File(tokio::fs::File),
}

impl Sink {
    async fn open(value: &str) -> Result<Self> {
        let path = path(value);
        let is_fifo = std::fs::metadata(path).is_ok_and(|meta| meta.file_type().is_fifo());
        let opened = if is_fifo { Self::fifo(path).await } else { Self::file(path).await };
        opened.map_err(failed(format!("open {value} for output")))
    }

    async fn file(path: &str) -> io::Result<Self> {
        let mut options = tokio::fs::OpenOptions::new();
        options.create(true).append(true).open(path).await.map(Self::File)
    }

    async fn fifo(path: &str) -> io::Result<Self> {
        let deadline = Instant::now() + PATIENCE;
        let sender = loop {
            match pipe::OpenOptions::new().open_sender(path) {
                Err(error)
                    if error.raw_os_error() == Some(libc::ENXIO) && Instant::now() < deadline =>
                {
                    sleep(LOOK).await;
                }
                Err(error) if error.raw_os_error() == Some(libc::ENXIO) => {
                    break pipe::OpenOptions::new().read_write(true).open_sender(path)?;
                }
                opened => break opened?,
            }
        };
        let mut hold = OpenOptions::new();
        hold.read(true).custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC);
        Ok(Self::Fifo(sender, hold.open(path)?))
    }

    /// Copies until the guest ends the stream.
    async fn fill(self, mut from: UnixStream) -> io::Result<()> {
        match self {
            Self::Fifo(mut to, hold) => {
                let copied = tokio::io::copy(&mut from, &mut to).await;
                drop(hold);
                copied.map(drop)
            }
            Self::File(mut to) => {
                tokio::io::copy(&mut from, &mut to).await?;
                to.flush().await
            }
        }
    }
}

/// The client's ends for output, open before the process is there.
pub struct Ends {
    stdout: Option<Sink>,
    stderr: Option<Sink>,
}

impl Ends {
    /// Opens them, and waits for a client that is about to.
    pub async fn open(stdio: &Stdio) -> Result<Self> {
        let sink = async |stream, value: &str| match stdio.has(stream) {
            true => Sink::open(value).await.map(Some),
            false => Ok(None),
        };
        let (stdout, stderr) = tokio::try_join!(
            sink(Stream::Stdout, &stdio.stdout),
            sink(Stream::Stderr, &stdio.stderr)
        )?;
        Ok(Self { stdout, stderr })
    }

    /// Connects them with the streams of a process that has been started.
    pub async fn connect(self, guest: &Guest, process: ProcessId) -> Result<Streams> {
        let mut output = JoinSet::new();
        for (sink, stream) in [(self.stdout, Stream::Stdout), (self.stderr, Stream::Stderr)] {
            if let Some(sink) = sink {
                let from = guest.attach(process, stream).await?;
                output.spawn(async move {
                    if let Err(error) = sink.fill(from).await {
                        tracing::warn!(%error, %stream, %process, "output not passed on");
                    }
                });
            }
        }
        Ok(Streams { output: tokio::sync::Mutex::new(output), input: Mutex::default() })
    }
}

/// Streams that are connected. Dropping them ends the passing on.
#[derive(Debug)]
pub struct Streams {
    output: tokio::sync::Mutex<JoinSet<()>>,
    input: Mutex<Input>,
}

#[derive(Debug, Default)]
struct Input {
    passing: JoinSet<()>,
    /// A writing end, without which the input ends with the client's.
    hold: Option<File>,
    closed: bool,
}

impl Streams {
    fn input(&self) -> MutexGuard<'_, Input> {
        self.input.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Connects the client's input, if it gives any. A client waits for this before it writes, and
    /// can only say that its input has ended when it knows the process, so it comes with the
    /// process's start, not before.
    pub async fn connect_input(
        &self,
        stdio: &Stdio,
        guest: &Guest,
        process: ProcessId,
    ) -> Result<()> {
        if !stdio.has(Stream::Stdin) {
            return Ok(());
        }
        let mut to = guest.attach(process, Stream::Stdin).await?;
        let path = path(&stdio.stdin);
        let opened = pipe::OpenOptions::new().open_receiver(path).and_then(|receiver| {
            let mut hold = OpenOptions::new();
            hold.write(true).custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC);
            Ok((receiver, hold.open(path)?))
        });
        let (mut from, hold) = opened.map_err(failed(format!("open {path} for input")))?;
        let mut input = self.input();
        input.hold = (!input.closed).then_some(hold);
        input.passing.spawn(async move {
            // A process that reads no more closes the connection: nothing to report.
            let _ = tokio::io::copy(&mut from, &mut to).await;
            let _ = to.shutdown().await;
            // The agent closes its side when the process has got all of it.
            let _ = tokio::io::copy(&mut to, &mut tokio::io::sink()).await;
        });
        Ok(())
    }

    /// The client will write no more.
    pub fn close_input(&self) {
        let mut input = self.input();
        input.closed = true;
        input.hold = None;
    }

    /// Waits until all output has been passed on, `patience` at most.
    pub async fn drain(&self, patience: Duration) {
        let mut output = self.output.lock().await;
        let all = async { while output.join_next().await.is_some() {} };
        if timeout(patience, all).await.is_err() {
            tracing::warn!("output not read by the client in time is dropped");
        }
    }
}

#[cfg(test)]
mod tests {
    use nix::sys::stat::Mode;
    use nix::unistd::mkfifo;

    use super::*;

    #[test]
    fn what_is_not_served_is_refused_by_name() {
        let stdio = Stdio { stdout: "npipe://x".to_owned(), ..Default::default() };
        let error = stdio.check().unwrap_err().to_string();
        assert!(error.starts_with("stdout is \"npipe://x\": expected"), "{error}");
        let stdio = Stdio { stdin: "file:///x".to_owned(), ..Default::default() };
        assert!(stdio.check().is_err());
        let stdio = Stdio { stdout: "file:///x".to_owned(), ..Default::default() };
        assert!(stdio.check().is_ok());
    }

    #[tokio::test]
    async fn output_waits_for_a_client_that_opens_its_end_late() {
        let dir = tempfile::tempdir().unwrap();
        let fifo = dir.path().join("out");
        mkfifo(&fifo, Mode::S_IRWXU).unwrap();
        let client = fifo.clone();
        let reader = tokio::task::spawn_blocking(move || {
            std::thread::sleep(Duration::from_millis(50));
            std::fs::read_to_string(client).unwrap()
        });
        let sink = Sink::open(fifo.to_str().unwrap()).await.unwrap();
        let (mut guest, shim) = UnixStream::pair().unwrap();
        guest.write_all(b"all of it").await.unwrap();
        drop(guest);
        sink.fill(shim).await.unwrap();
        assert_eq!(reader.await.unwrap(), "all of it");
    }

    #[tokio::test]
    async fn a_file_grows() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        for _ in 0..2 {
            let sink = Sink::open(&format!("file://{}", path.display())).await.unwrap();
            let (mut guest, shim) = UnixStream::pair().unwrap();
            guest.write_all(b"line\n").await.unwrap();
            drop(guest);
            sink.fill(shim).await.unwrap();
        }
        assert_eq!(std::fs::read_to_string(path).unwrap(), "line\nline\n");
    }
}
