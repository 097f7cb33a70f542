//! Passes the bytes of a process's standard streams on, between the guest and the files that
//! containerd's client waits at, through the times when there is no guest.
//!
//! A connection to the guest does not outlive its VM. So before a VM is saved and ended its streams
//! are let go of, in a way that leaves no byte on the way, and each gets another connection from the
//! VM that goes on. The client's files stay open meanwhile, and what has not been written to them yet
//! waits here.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use guest_protocol::{ProcessId, Request, Stream};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::net::unix::pipe;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::error::{Error, Result, io as failed};
use crate::guest::Guest;
use crate::stdio::{self, Ends, Sink, Stdio};

/// How many bytes are moved at once.
const CHUNK: usize = 16 << 10;
/// How many bytes of output may wait for the client.
const ROOM: usize = 64 << 10;
/// How many may while the guest is let go of: what is on the way then has to be somewhere.
const HELD: usize = 16 << 20;
/// How long the guest may take to let go of a stream.
const LETTING_GO: Duration = Duration::from_secs(10);

/// Where a line is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    /// Bytes go.
    Connected,
    /// Between two connections.
    Between,
    /// All is passed on, or cannot be.
    Ended,
}

/// Whoever steers the passing on of one stream.
#[derive(Debug)]
struct Line {
    stream: Stream,
    connections: Mutex<Option<mpsc::UnboundedSender<UnixStream>>>,
    /// The end of a connection is not that of the stream.
    holding: watch::Sender<bool>,
    at: Arc<watch::Sender<At>>,
}

/// Its other end, of the task that passes bytes on.
struct Steered {
    connections: mpsc::UnboundedReceiver<UnixStream>,
    holding: watch::Receiver<bool>,
    at: Arc<watch::Sender<At>>,
}

fn line(stream: Stream) -> (Line, Steered) {
    let (sender, connections) = mpsc::unbounded_channel();
    let (hold, holding) = watch::channel(false);
    let at = Arc::new(watch::Sender::new(At::Connected));
    let connections_to = Mutex::new(Some(sender));
    let line = Line { stream, connections: connections_to, holding: hold, at: at.clone() };
    (line, Steered { connections, holding, at })
}

impl Drop for Steered {
    fn drop(&mut self) {
        self.at.send_replace(At::Ended);
    }
}

impl Steered {
    fn holds(&self) -> bool {
        *self.holding.borrow()
    }

    /// Waits for what changes; `connected` is whether there is a connection.
    async fn news(&mut self, connected: bool) -> News {
        let news = if !connected && !self.holds() {
            self.connections.try_recv().ok().map_or(News::Over, News::Connection)
        } else {
            tokio::select! {
                biased;
                connection = self.connections.recv() => {
                    connection.map_or(News::Over, News::Connection)
                }
                changed = self.holding.changed() => match changed {
                    Ok(()) => News::Changed,
                    Err(_) => News::Over,
                }
            }
        };
        if matches!(news, News::Connection(_)) {
            self.at.send_replace(At::Connected);
        }
        news
    }
}

/// What the task that passes bytes on is told.
enum News {
    /// This one counts from now on.
    Connection(UnixStream),
    /// Whether the end of a connection is that of the stream.
    Changed,
    /// There will be no other connection.
    Over,
}

impl Line {
    fn sender(&self) -> MutexGuard<'_, Option<mpsc::UnboundedSender<UnixStream>>> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn let_go(&self, guest: &Guest, process: ProcessId) -> Result<()> {
        if *self.at.borrow() == At::Ended {
            return Ok(());
        }
        let stream = self.stream;
        if stream != Stream::Stdin {
            self.holding.send_replace(true);
        }
        let asked = guest.call(&Request::Detach { process, stream }).await;
        // A process that nobody knows any more has no streams either.
        if let Err(error) = asked.map(drop).or_else(ignore_not_found) {
            self.holding.send_replace(false);
            return Err(error);
        }
        // Input only now: its end would be taken for the stream's before.
        self.holding.send_replace(true);
        let mut at = self.at.subscribe();
        let gone = timeout(LETTING_GO, at.wait_for(|at| *at != At::Connected)).await;
        gone.map(drop).map_err(|_| {
            let seconds = LETTING_GO.as_secs();
            Error::Unavailable(format!("{stream} was not let go of by the guest in {seconds} s"))
        })
    }

    /// Connects it again, without taking the end of this connection for its own yet. A guest that is
    /// the same as before, not a `new` one, has to let go of it first.
    async fn connect(&self, guest: &Guest, process: ProcessId, new: bool) -> Result<()> {
        let mut at = self.at.subscribe();
        let let_go = timeout(LETTING_GO, at.wait_for(|at| new || *at != At::Connected));
        if let_go.await.is_err() || *self.at.borrow() == At::Ended {
            return Ok(());
        }
        match guest.attach(process, self.stream).await {
            Ok(connection) => {
                self.at.send_if_modified(|at| {
                    let waits = *at == At::Between;
                    if waits {
                        *at = At::Connected;
                    }
                    waits
                });
                if let Some(sender) = &*self.sender() {
                    let _ = sender.send(connection);
                }
                Ok(())
            }
            // It has ended in the very moment.
            Err(Error::NotFound(_)) => {
                self.sender().take();
                Ok(())
            }
            Err(error) => Err(error),
        }
    }
}

fn ignore_not_found(error: Error) -> Result<()> {
    if matches!(error, Error::NotFound(_)) { Ok(()) } else { Err(error) }
}

/// Streams that are connected. Dropping them ends the passing on.
#[derive(Debug)]
pub struct Streams {
    output: tokio::sync::Mutex<JoinSet<()>>,
    lines: Mutex<Vec<Arc<Line>>>,
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
    /// Connects the client's ends with the output of a process that has been started.
    pub async fn connect(ends: Ends, guest: &Guest, process: ProcessId) -> Result<Self> {
        let mut output = JoinSet::new();
        let mut lines = Vec::new();
        for (sink, stream) in [(ends.stdout, Stream::Stdout), (ends.stderr, Stream::Stderr)] {
            if let Some(sink) = sink {
                let from = match guest.attach(process, stream).await {
                    // It had ended before it was saved.
                    Err(Error::NotFound(_)) => continue,
                    attached => attached?,
                };
                let (line, steered) = line(stream);
                lines.push(Arc::new(line));
                output.spawn(async move {
                    if let Err(error) = pass_on(sink, from, steered).await {
                        tracing::warn!(%error, %stream, %process, "output not passed on");
                    }
                });
            }
        }
        let (output, lines) = (tokio::sync::Mutex::new(output), Mutex::new(lines));
        Ok(Self { output, lines, input: Mutex::default() })
    }

    fn input(&self) -> MutexGuard<'_, Input> {
        self.input.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lines(&self) -> Vec<Arc<Line>> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner).clone()
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
        let to = guest.attach(process, Stream::Stdin).await?;
        let path = stdio::path(&stdio.stdin);
        let opened = pipe::OpenOptions::new().open_receiver(path).and_then(|receiver| {
            let mut hold = OpenOptions::new();
            hold.write(true).custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC);
            Ok((receiver, hold.open(path)?))
        });
        let (from, hold) = opened.map_err(failed(format!("open {path} for input")))?;
        let (line, steered) = line(Stream::Stdin);
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        lines.push(Arc::new(line));
        drop(lines);
        let mut input = self.input();
        input.hold = (!input.closed).then_some(hold);
        input.passing.spawn(feed(from, to, steered));
        Ok(())
    }

    /// The client will write no more.
    pub fn close_input(&self) {
        let mut input = self.input();
        input.closed = true;
        input.hold = None;
    }

    /// Makes the guest let go of all of them, so that it can be saved: no byte is on the way then.
    /// If that fails, [`Streams::attach`] and [`Streams::settle`] make it undone.
    pub async fn let_go(&self, guest: &Guest, process: ProcessId) -> Result<()> {
        for line in self.lines() {
            line.let_go(guest, process).await?;
        }
        Ok(())
    }

    /// Connects them again, with the guest that goes on. As long as it is not settled that it does,
    /// the ends of these connections mean nothing.
    pub async fn attach(&self, guest: &Guest, process: ProcessId, new: bool) -> Result<()> {
        for line in self.lines().iter().filter(|line| *line.holding.borrow()) {
            line.connect(guest, process, new).await?;
        }
        Ok(())
    }

    /// The guest goes on for good: from now on the end of a connection is that of the stream.
    pub fn settle(&self) {
        for line in self.lines() {
            line.holding.send_replace(false);
        }
    }

    /// Waits until all output has been passed on, `patience` at most.
    pub async fn drain(&self, patience: Duration) {
        // What waits for another connection will have none.
        self.settle();
        let mut output = self.output.lock().await;
        let all = async { while output.join_next().await.is_some() {} };
        if timeout(patience, all).await.is_err() {
            tracing::warn!("output not read by the client in time is dropped");
        }
    }
}

/// Reads what there is, never if there is nothing to read from.
async fn read(from: &mut Option<UnixStream>, to: &mut [u8]) -> io::Result<usize> {
    match from {
        Some(from) => from.read(to).await,
        None => std::future::pending().await,
    }
}

/// From the guest to the client, until the guest ends the stream.
async fn pass_on(mut sink: Sink, from: UnixStream, mut steered: Steered) -> io::Result<()> {
    let mut from = Some(from);
    let (mut buffer, mut waiting) = (vec![0; CHUNK], Vec::with_capacity(ROOM));
    loop {
        let room = if steered.holds() { HELD } else { ROOM };
        let connected = from.is_some();
        tokio::select! {
            read = read(&mut from, &mut buffer), if waiting.len() < room => match read {
                Ok(read @ 1..) => waiting.extend_from_slice(&buffer[..read]),
                // A connection that breaks has ended: the VM is gone.
                _ => {
                    from = None;
                    if steered.holds() {
                        steered.at.send_replace(At::Between);
                    }
                }
            },
            news = steered.news(connected) => match news {
                News::Connection(connection) => from = Some(connection),
                News::Changed => {}
                News::Over => break,
            },
            written = sink.write(&waiting), if !waiting.is_empty() => {
                waiting.drain(..written?);
            }
        }
    }
    while !waiting.is_empty() {
        let written = sink.write(&waiting).await?;
        waiting.drain(..written);
    }
    sink.flush().await
}

/// From the client to the guest, until either ends it.
async fn feed(mut from: pipe::Receiver, to: UnixStream, mut steered: Steered) {
    let mut to = Some(to);
    let (mut buffer, mut waiting) = (vec![0; CHUNK], Vec::with_capacity(CHUNK));
    // That the client's input has ended; that this connection shall, and the input goes on.
    let (mut ended, mut let_go) = (false, false);
    loop {
        let holds = steered.holds();
        if waiting.is_empty()
            && (let_go || (ended && !holds))
            && let Some(connection) = to.take()
        {
            finish(connection).await;
            if let_go {
                steered.at.send_replace(At::Between);
            }
        }
        let connected = to.is_some();
        // Nothing is given to a guest that may not be the one that goes on.
        let reads = connected && waiting.is_empty() && !ended && !holds;
        tokio::select! {
            read = from.read(&mut buffer), if reads => {
                match read {
                    Ok(read @ 1..) => waiting.extend_from_slice(&buffer[..read]),
                    _ => ended = true,
                }
            }
            written = write(&mut to, &waiting), if connected && !waiting.is_empty() => match written {
                Ok(written) => drop(waiting.drain(..written)),
                // A process that reads no more closes the connection: nothing to report.
                Err(_) => waiting.clear(),
            },
            news = steered.news(connected) => match news {
                News::Connection(connection) => {
                    to = Some(connection);
                    let_go = false;
                }
                News::Changed => let_go = steered.holds(),
                News::Over => return,
            },
        }
    }
}

async fn write(to: &mut Option<UnixStream>, bytes: &[u8]) -> io::Result<usize> {
    match to {
        Some(to) => to.write(bytes).await,
        None => std::future::pending().await,
    }
}

/// Ends a connection; the agent closes its side when it has got all of it.
async fn finish(mut connection: UnixStream) {
    let _ = connection.shutdown().await;
    let _ = tokio::io::copy(&mut connection, &mut tokio::io::sink()).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn output_goes_on_with_the_next_connection() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let sink = open(&path).await;
        let (line, steered) = line(Stream::Stdout);
        let (mut guest, shim) = UnixStream::pair().unwrap();
        let passing = tokio::spawn(pass_on(sink, shim, steered));
        guest.write_all(b"one ").await.unwrap();
        line.holding.send_replace(true);
        drop(guest);
        line.at.subscribe().wait_for(|at| *at == At::Between).await.unwrap();
        // One that fails, whose end means nothing, and at once one that stays.
        let (failed, shim) = UnixStream::pair().unwrap();
        line.sender().as_ref().unwrap().send(shim).unwrap();
        drop(failed);
        let (mut guest, shim) = UnixStream::pair().unwrap();
        line.sender().as_ref().unwrap().send(shim).unwrap();
        guest.write_all(b"two").await.unwrap();
        line.holding.send_replace(false);
        drop(guest);
        passing.await.unwrap().unwrap();
        assert_eq!(std::fs::read_to_string(path).unwrap(), "one two");
        assert_eq!(*line.at.borrow(), At::Ended);
    }

    async fn open(path: &std::path::Path) -> Sink {
        let stdio = Stdio { stdout: format!("file://{}", path.display()), ..Default::default() };
        Ends::open(&stdio).await.unwrap().stdout.unwrap()
    }

    #[tokio::test]
    async fn what_is_not_connected_again_ends() {
        let dir = tempfile::tempdir().unwrap();
        let (line, steered) = line(Stream::Stdout);
        let (guest, shim) = UnixStream::pair().unwrap();
        let passing = tokio::spawn(pass_on(open(&dir.path().join("log")).await, shim, steered));
        line.holding.send_replace(true);
        drop(guest);
        line.at.subscribe().wait_for(|at| *at == At::Between).await.unwrap();
        line.sender().take();
        passing.await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn input_is_let_go_of_between_two_connections() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("in");
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let from = pipe::OpenOptions::new().open_receiver(&path).unwrap();
        let mut client = pipe::OpenOptions::new().open_sender(&path).unwrap();
        let (line, steered) = line(Stream::Stdin);
        let (mut guest, shim) = UnixStream::pair().unwrap();
        let passing = tokio::spawn(feed(from, shim, steered));
        client.write_all(b"one").await.unwrap();
        let mut bytes = [0; 3];
        guest.read_exact(&mut bytes).await.unwrap();
        line.holding.send_replace(true);
        assert_eq!(guest.read(&mut bytes).await.unwrap(), 0, "the end of the connection");
        drop(guest);
        line.at.subscribe().wait_for(|at| *at == At::Between).await.unwrap();
        client.write_all(b"two").await.unwrap();
        drop(client);
        // A guest that does not come to go on gets none of it.
        let (failed, shim) = UnixStream::pair().unwrap();
        line.sender().as_ref().unwrap().send(shim).unwrap();
        line.at.subscribe().wait_for(|at| *at == At::Connected).await.unwrap();
        drop(failed);
        let (mut guest, shim) = UnixStream::pair().unwrap();
        line.sender().as_ref().unwrap().send(shim).unwrap();
        line.holding.send_replace(false);
        let mut text = String::new();
        guest.read_to_string(&mut text).await.unwrap();
        assert_eq!(text, "two");
        drop(guest);
        passing.await.unwrap();
    }
}
