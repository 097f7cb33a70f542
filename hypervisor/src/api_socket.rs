//! The control socket: takes connections, passes requests to the control thread, writes replies.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use nix::fcntl::{Flock, FlockArg};

use crate::api::{ErrorKind, MAX_REQUEST, Reply, Request};
use crate::event::{Call, Event, Events};

/// Connections at a time. A further one is closed at once.
const MAX_CONNECTIONS: usize = 16;
/// A connection that says nothing for so long is closed.
const IDLE: Duration = Duration::from_secs(600);
/// How long the end of the process waits for answers that are being written, the one to a request to
/// end among them.
const LAST_ANSWERS: Duration = Duration::from_secs(2);

/// Requests that have no answer yet.
type Unanswered = Arc<AtomicUsize>;

/// Why there is no control socket, or no answer from one.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// A VM answers there.
    #[error("api socket {} is in use by a running VM; choose another path or stop that VM", .0.display())]
    InUse(PathBuf),
    /// Something else is there.
    #[error("api socket {} exists and is not a socket; choose another path", .0.display())]
    NotASocket(PathBuf),
    /// It cannot be made.
    #[error("api socket {} cannot be made: {source}; choose a path of at most 107 bytes in an \
             existing folder that you may write to", path.display())]
    Bind {
        /// The path.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// Nobody answers.
    #[error("no VM answers at api socket {}: {source}; start one with `cube-vmm start`",
            path.display())]
    Connect {
        /// The path.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// The connection broke.
    #[error("the VM at api socket {} did not answer: {source}", path.display())]
    Broken {
        /// The path.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// The answer is not one.
    #[error("the VM at api socket {} answered what this version does not understand: {source}", path.display())]
    Answer {
        /// The path.
        path: PathBuf,
        /// The reason.
        source: serde_json::Error,
    },
}

/// A bound control socket. Removes its file when dropped.
#[derive(Debug)]
pub struct ApiSocket {
    path: PathBuf,
    listener: UnixListener,
    inode: u64,
    unanswered: Unanswered,
}

impl ApiSocket {
    /// Binds `path` for this user only. A socket that nobody serves any more is replaced.
    pub fn bind(path: &Path) -> Result<Self, SocketError> {
        let failed = |source| SocketError::Bind { path: path.to_owned(), source };
        let parent = match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        // Two VMs started on the same stale socket must not take it from each other.
        let folder = File::open(parent).map_err(failed)?;
        let _lock = Flock::lock(folder, FlockArg::LockExclusive)
            .map_err(|(_, errno)| failed(errno.into()))?;
        match std::fs::symlink_metadata(path) {
            Ok(metadata) if !metadata.file_type().is_socket() => {
                return Err(SocketError::NotASocket(path.to_owned()));
            }
            Ok(_) if UnixStream::connect(path).is_ok() => {
                return Err(SocketError::InUse(path.to_owned()));
            }
            Ok(_) => std::fs::remove_file(path).map_err(failed)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(failed(error)),
        }
        let listener = UnixListener::bind(path).map_err(failed)?;
        let permissions = std::fs::Permissions::from_mode(0o600);
        std::fs::set_permissions(path, permissions).map_err(failed)?;
        let inode = std::fs::symlink_metadata(path).map_err(failed)?.ino();
        let unanswered = Unanswered::default();
        Ok(Self { path: path.to_owned(), listener, inode, unanswered })
    }

    /// Serves connections on threads until the process ends.
    pub fn serve(&self, events: Events) -> Result<(), SocketError> {
        let failed = |source| SocketError::Bind { path: self.path.clone(), source };
        let listener = self.listener.try_clone().map_err(failed)?;
        let thread = std::thread::Builder::new().name("api".to_owned()).stack_size(128 * 1024);
        let unanswered = self.unanswered.clone();
        thread.spawn(move || accept(&listener, &events, &unanswered)).map_err(failed)?;
        Ok(())
    }
}

impl Drop for ApiSocket {
    fn drop(&mut self) {
        // Not if somebody has put another there meanwhile.
        let ours = std::fs::symlink_metadata(&self.path).is_ok_and(|m| m.ino() == self.inode);
        if ours && let Err(error) = std::fs::remove_file(&self.path) {
            tracing::warn!(%error, path = %self.path.display(), "api socket not removed");
        }
        let deadline = Instant::now() + LAST_ANSWERS;
        while self.unanswered.load(Ordering::Acquire) > 0 && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn accept(listener: &UnixListener, events: &Events, unanswered: &Unanswered) {
    let connections = Arc::new(AtomicUsize::new(0));
    for stream in listener.incoming() {
        let Ok(stream) = stream else {
            // Out of descriptors, most likely: some will be closed.
            std::thread::sleep(Duration::from_millis(50));
            continue;
        };
        if connections.fetch_add(1, Ordering::AcqRel) >= MAX_CONNECTIONS {
            connections.fetch_sub(1, Ordering::AcqRel);
            continue;
        }
        let (events, count) = (events.clone(), connections.clone());
        let unanswered = unanswered.clone();
        let serve = move || {
            // What ends a connection is no concern of the VM's.
            let _ = converse(stream, &events, &unanswered);
            count.fetch_sub(1, Ordering::AcqRel);
        };
        let thread = std::thread::Builder::new().name("api-conn".to_owned());
        if thread.stack_size(128 * 1024).spawn(serve).is_err() {
            connections.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

fn converse(mut stream: UnixStream, events: &Events, unanswered: &AtomicUsize) -> io::Result<()> {
    stream.set_read_timeout(Some(IDLE))?;
    stream.set_write_timeout(Some(Duration::from_secs(10)))?;
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut line = Vec::new();
    loop {
        line.clear();
        let read = (&mut reader).take(MAX_REQUEST as u64).read_until(b'\n', &mut line)?;
        if read == 0 {
            return Ok(());
        }
        unanswered.fetch_add(1, Ordering::AcqRel);
        let answered = answer(&mut stream, &line, events);
        unanswered.fetch_sub(1, Ordering::AcqRel);
        answered?;
        if !line.ends_with(b"\n") {
            return Ok(());
        }
    }
}

fn answer(stream: &mut UnixStream, line: &[u8], events: &Events) -> io::Result<()> {
    let reply = if line.ends_with(b"\n") || line.len() < MAX_REQUEST {
        dispatch(line, events)
    } else {
        invalid(format!("request is longer than {MAX_REQUEST} bytes"))
    };
    let mut text = serde_json::to_vec(&reply)?;
    text.push(b'\n');
    stream.write_all(&text)
}

fn invalid(message: String) -> Reply {
    Reply::Error { kind: ErrorKind::Invalid, message }
}

fn dispatch(line: &[u8], events: &Events) -> Reply {
    let request: Request = match serde_json::from_slice(line) {
        Ok(request) => request,
        Err(error) => return invalid(format!("not a request: {error}")),
    };
    let (reply, answer) = sync_channel(1);
    let gone = || Reply::Error { kind: ErrorKind::Failed, message: "the VM is ending".to_owned() };
    if !events.send(Event::Call(Call { request, reply })) {
        return gone();
    }
    answer.recv().unwrap_or_else(|_| gone())
}

/// Sends one request to the VM behind `path` and waits for its answer.
pub fn request(path: &Path, request: &Request) -> Result<Reply, SocketError> {
    let owned = || path.to_owned();
    let mut stream = UnixStream::connect(path)
        .map_err(|source| SocketError::Connect { path: owned(), source })?;
    let broken = |source| SocketError::Broken { path: owned(), source };
    let unreadable = |source| SocketError::Answer { path: owned(), source };
    let mut line = serde_json::to_vec(request).map_err(unreadable)?;
    line.push(b'\n');
    stream.write_all(&line).map_err(broken)?;
    let mut answer = String::new();
    let limit = 16 * MAX_REQUEST as u64;
    BufReader::new(stream.take(limit)).read_line(&mut answer).map_err(broken)?;
    if answer.is_empty() {
        return Err(broken(io::ErrorKind::UnexpectedEof.into()));
    }
    serde_json::from_str(&answer).map_err(unreadable)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn socket() -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("api");
        (folder, path)
    }

    /// A socket whose control thread answers everything with `Done`.
    fn served(path: &Path) -> ApiSocket {
        let socket = ApiSocket::bind(path).unwrap();
        let (events, receiver) = Events::channel();
        socket.serve(events).unwrap();
        std::thread::spawn(move || {
            while let Ok(Event::Call(call)) = receiver.recv() {
                call.reply.send(Reply::Done).unwrap();
            }
        });
        socket
    }

    #[test]
    fn a_live_socket_is_refused_and_a_stale_one_replaced() {
        let (_folder, path) = socket();
        drop(UnixListener::bind(&path).unwrap());
        let first = ApiSocket::bind(&path).unwrap();
        assert!(matches!(ApiSocket::bind(&path), Err(SocketError::InUse(_))));
        drop(first);
        assert!(!path.exists());
    }

    #[test]
    fn other_files_and_missing_folders_are_refused() {
        let (folder, path) = socket();
        std::fs::write(&path, "text").unwrap();
        assert!(matches!(ApiSocket::bind(&path), Err(SocketError::NotASocket(_))));
        let nowhere = folder.path().join("no/api");
        assert!(matches!(ApiSocket::bind(&nowhere), Err(SocketError::Bind { .. })));
    }

    #[test]
    fn requests_are_answered() {
        let (_folder, path) = socket();
        let _socket = served(&path);
        assert_eq!(request(&path, &Request::Pause {}).unwrap(), Reply::Done);
    }

    fn answer_to(bytes: &[u8]) -> String {
        let (_folder, path) = socket();
        let _socket = served(&path);
        let mut stream = UnixStream::connect(&path).unwrap();
        // The server may stop reading before all is written.
        let _ = stream.write_all(bytes);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let mut answer = String::new();
        let _ = BufReader::new(stream).read_line(&mut answer);
        answer
    }

    #[test]
    fn what_is_no_request_gets_an_error() {
        for bytes in [
            &b"\n"[..],
            b"{}\n",
            b"{\"request\":\"nosuch\"}\n",
            b"{\"request\":\"info\",\"more\":1}\n",
            b"\xff\xfe\n",
            b"[1,2",
        ] {
            assert!(answer_to(bytes).contains("\"invalid\""), "{bytes:?}");
        }
        assert!(answer_to(&vec![b'['; MAX_REQUEST]).contains("longer than"));
    }
}
