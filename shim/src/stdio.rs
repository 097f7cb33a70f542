//! The standard streams of a process: the files that containerd's client waits at. `streams` connects
//! them with those of the guest.
//!
//! Two things decide whether output is lost. A FIFO forgets what is in it when its last end is
//! closed, and a client may open its own end late: so a process is not started before the client
//! has (or has not in [`PATIENCE`]), and the shim holds a reading end too, which also keeps a
//! client that goes away, containerd being restarted, from breaking the pipe. And an end of stream
//! is only passed on after everything before it.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::time::Duration;

use guest_protocol::Stream;
use tokio::io::AsyncWriteExt;
use tokio::net::unix::pipe;
use tokio::time::{Instant, sleep};

use crate::checkpoint::Saved;
use crate::error::{Error, Result, io as failed};

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

/// The path in it.
pub fn path(value: &str) -> &str {
    value.split_once("://").map_or(value, |(_, path)| path)
}

/// Where output goes.
pub enum Sink {
    /// A FIFO, and a reading end that keeps it.
    Fifo(pipe::Sender, File),
    /// A file that grows.
    File(tokio::fs::File),
    /// Nobody wants it, but it must be read.
    Nowhere,
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

    /// Writes some of `bytes`. Nothing is lost if this is given up before it is done.
    pub async fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Fifo(to, _hold) => to.write(bytes).await,
            Self::File(to) => to.write(bytes).await,
            Self::Nowhere => Ok(bytes.len()),
        }
    }

    /// Waits until all that was written is where it belongs.
    pub async fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Fifo(to, _hold) => to.flush().await,
            Self::File(to) => to.flush().await,
            Self::Nowhere => Ok(()),
        }
    }
}

/// The client's ends for output, open before the process is there.
pub struct Ends {
    pub stdout: Option<Sink>,
    pub stderr: Option<Sink>,
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
}

impl Ends {
    /// Those for a process that has other streams than the client wants: what it has must be read, and
    /// what it has not cannot be.
    pub fn like(self, saved: &Saved) -> Self {
        let like =
            |stream, sink: Option<Sink>| saved.has(stream).then(|| sink.unwrap_or(Sink::Nowhere));
        Self {
            stdout: like(Stream::Stdout, self.stdout),
            stderr: like(Stream::Stderr, self.stderr),
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
        let mut sink = Sink::open(fifo.to_str().unwrap()).await.unwrap();
        assert_eq!(sink.write(b"all of it").await.unwrap(), 9);
        drop(sink);
        assert_eq!(reader.await.unwrap(), "all of it");
    }

    #[tokio::test]
    async fn a_file_grows() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        for _ in 0..2 {
            let mut sink = Sink::open(&format!("file://{}", path.display())).await.unwrap();
            assert_eq!(sink.write(b"line\n").await.unwrap(), 5);
            sink.flush().await.unwrap();
        }
        assert_eq!(std::fs::read_to_string(path).unwrap(), "line\nline\n");
    }
}
