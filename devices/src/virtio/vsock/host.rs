//! The listening socket for host programs, and those that have not yet said what they want.
//!
//! Few of them are kept and none for long, so that programs that say nothing, or say it slowly,
//! cannot keep others out. The rest wait in the kernel, where the backlog bounds them.

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::VsockError;
use super::greeting::{Greeting, Said};
use super::handle::Shared;
use super::stream;

/// Programs that may be about to say what they want.
pub const MAX_GREETINGS: usize = 64;

/// How long a program may take for its request line: enough for someone who types it.
const PATIENCE: Duration = Duration::from_secs(10);

/// How long it may take while others wait.
const PATIENCE_UNDER_LOAD: Duration = Duration::from_secs(1);

/// Bytes that `_` and a port add to the path.
const SUFFIX: usize = 11;

/// The listening socket. Its file goes when it goes.
pub struct HostSocket {
    listener: UnixListener,
    path: PathBuf,
    file: (u64, u64),
    greetings: Vec<Option<(Greeting, Instant)>>,
    out_of_resources: bool,
}

impl HostSocket {
    /// Listens at `path`. Takes the place of a socket that nobody listens to any more.
    pub fn bind(path: &Path) -> Result<Self, VsockError> {
        if !stream::fits(path, SUFFIX) {
            return Err(VsockError::PathTooLong(path.to_owned()));
        }
        let failed = |source| VsockError::Bind { path: path.to_owned(), source };
        remove_stale(path)?;
        let listener = stream::listen(path).map_err(|error| match error.kind() {
            io::ErrorKind::AddrInUse => VsockError::InUse(path.to_owned()),
            _ => failed(error),
        })?;
        let metadata = fs::symlink_metadata(path).map_err(failed)?;
        let mut greetings = Vec::new();
        greetings.resize_with(MAX_GREETINGS, || None);
        Ok(Self {
            listener,
            path: path.to_owned(),
            file: (metadata.dev(), metadata.ino()),
            greetings,
            out_of_resources: false,
        })
    }

    /// The next program that has come, if it can be served now.
    pub fn accept(&mut self) -> Option<Greeting> {
        match self.listener.accept().and_then(|(socket, _)| {
            socket.set_nonblocking(true)?;
            Ok(socket)
        }) {
            Ok(socket) => Some(Greeting::new(socket)),
            Err(error) if stream::is_transient(&error) => None,
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => None,
            Err(_) => {
                // Most likely out of descriptors.
                self.pause();
                None
            }
        }
    }

    /// Accepts nobody until the next tick: the host is out of resources, and the socket would
    /// stay ready all the time.
    pub fn pause(&mut self) {
        self.out_of_resources = true;
    }

    /// True if another program could be accepted.
    pub fn has_room(&self) -> bool {
        !self.out_of_resources && self.greetings.iter().any(Option::is_none)
    }

    /// Keeps a program until it has said more; under which number. Gone if there is no room.
    pub fn keep(&mut self, greeting: Greeting, now: Instant) -> Option<usize> {
        let free = self.greetings.iter().position(Option::is_none)?;
        *self.greetings.get_mut(free)? = Some((greeting, now));
        Some(free)
    }

    /// Program `number`, to be watched.
    pub fn greeting(&self, number: usize) -> Option<&Greeting> {
        self.greetings.get(number)?.as_ref().map(|(greeting, _)| greeting)
    }

    /// All programs that are kept, with their numbers.
    pub fn greetings(&self) -> impl Iterator<Item = (usize, &Greeting)> {
        let slots = self.greetings.iter().enumerate();
        slots.filter_map(|(number, slot)| slot.as_ref().map(|(greeting, _)| (number, greeting)))
    }

    /// Listens to program `number`; gives it away once it has said something.
    pub fn listen(&mut self, number: usize) -> Option<(Said, Greeting)> {
        let slot = self.greetings.get_mut(number)?;
        match slot.as_mut()?.0.listen() {
            Said::Unfinished => None,
            said => slot.take().map(|(greeting, _)| (said, greeting)),
        }
    }

    /// Drops program `number`.
    pub fn drop_greeting(&mut self, number: usize) {
        if let Some(slot) = self.greetings.get_mut(number) {
            *slot = None;
        }
    }

    /// The programs whose time is over.
    pub fn overdue(&mut self, now: Instant) -> Vec<usize> {
        let full = self.greetings.iter().all(Option::is_some);
        let patience = if full { PATIENCE_UNDER_LOAD } else { PATIENCE };
        self.out_of_resources = false;
        let late = |slot: &Option<(Greeting, Instant)>| {
            slot.as_ref().is_some_and(|(_, since)| now.saturating_duration_since(*since) > patience)
        };
        let slots = self.greetings.iter().enumerate();
        slots.filter(|(_, slot)| late(slot)).map(|(number, _)| number).collect()
    }

    /// True if [`HostSocket::overdue`] should be asked from time to time.
    pub fn needs_tick(&self) -> bool {
        self.out_of_resources || self.greetings.iter().any(Option::is_some)
    }

    /// Forgets all programs that have not said what they want.
    pub fn drop_greetings(&mut self) {
        self.greetings.iter_mut().for_each(|slot| *slot = None);
    }
}

/// Where connections of the guest go.
pub struct Endpoints {
    /// With the listeners of this process.
    pub shared: Arc<Shared>,
    /// Port P is the socket that has `_P` after this.
    pub prefix: Option<PathBuf>,
}

impl Endpoints {
    /// Connects to `port` of the host without blocking.
    pub fn connect(&self, port: u32) -> io::Result<UnixStream> {
        if let Some(offered) = self.shared.offer(port) {
            return offered;
        }
        let prefix = self.prefix.as_ref().ok_or(io::ErrorKind::NotFound)?;
        let mut path = prefix.clone().into_os_string();
        path.push(format!("_{port}"));
        stream::connect(path.as_ref())
    }
}

/// Makes way at `path`: a socket without listener is removed, anything else is left alone.
fn remove_stale(path: &Path) -> Result<(), VsockError> {
    let failed = |source| VsockError::Bind { path: path.to_owned(), source };
    let metadata = match fs::symlink_metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(failed(error)),
    };
    if !metadata.file_type().is_socket() {
        return Err(VsockError::NotASocket(path.to_owned()));
    }
    match stream::connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            fs::remove_file(path).map_err(failed)
        }
        // A full backlog has a listener, too.
        Ok(_) => Err(VsockError::InUse(path.to_owned())),
        Err(error) if stream::is_transient(&error) => Err(VsockError::InUse(path.to_owned())),
        Err(error) => Err(failed(error)),
    }
}

impl AsFd for HostSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

impl Drop for HostSocket {
    fn drop(&mut self) {
        let ours = fs::symlink_metadata(&self.path)
            .is_ok_and(|metadata| (metadata.dev(), metadata.ino()) == self.file);
        if ours {
            let _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn path() -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("v.sock");
        (dir, path)
    }

    #[test]
    fn the_file_is_private_and_goes_with_its_owner() {
        let (_dir, path) = path();
        let socket = HostSocket::bind(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        drop(socket);
        assert!(!path.exists());
    }

    #[test]
    fn a_socket_in_use_is_left_alone() {
        let (_dir, path) = path();
        let first = HostSocket::bind(&path).unwrap();
        assert!(matches!(HostSocket::bind(&path), Err(VsockError::InUse(at)) if at == path));
        assert!(UnixStream::connect(&path).is_ok());
        drop(first);
    }

    #[test]
    fn a_stale_socket_is_replaced() {
        let (_dir, path) = path();
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        let _socket = HostSocket::bind(&path).unwrap();
        assert!(UnixStream::connect(&path).is_ok());
    }

    #[test]
    fn a_file_that_is_no_socket_is_left_alone() {
        let (_dir, path) = path();
        fs::write(&path, "precious").unwrap();
        assert!(matches!(HostSocket::bind(&path), Err(VsockError::NotASocket(_))));
        assert_eq!(fs::read(&path).unwrap(), b"precious");
    }

    #[test]
    fn the_successors_file_is_not_removed() {
        let (_dir, path) = path();
        let first = HostSocket::bind(&path).unwrap();
        fs::remove_file(&path).unwrap();
        let _second = HostSocket::bind(&path).unwrap();
        drop(first);
        assert!(path.exists());
    }

    #[test]
    fn a_path_without_room_for_a_port_is_refused() {
        let long = PathBuf::from("/tmp").join("x".repeat(100));
        assert!(matches!(HostSocket::bind(&long), Err(VsockError::PathTooLong(_))));
    }

    #[test]
    fn h43_silent_programs_are_given_less_time_when_others_wait() {
        let (_dir, path) = path();
        let mut socket = HostSocket::bind(&path).unwrap();
        let now = Instant::now();
        let programs: Vec<_> = (0..MAX_GREETINGS)
            .map(|number| {
                let program = UnixStream::connect(&path).unwrap();
                let greeting = socket.accept().unwrap();
                assert_eq!(socket.keep(greeting, now), Some(number));
                program
            })
            .collect();
        assert!(!socket.has_room());
        assert_eq!(socket.overdue(now + PATIENCE_UNDER_LOAD * 2).len(), MAX_GREETINGS);
        socket.drop_greeting(5);
        assert!(socket.overdue(now + PATIENCE_UNDER_LOAD * 2).is_empty());
        assert_eq!(socket.overdue(now + PATIENCE * 2).len(), MAX_GREETINGS - 1);
        drop(programs);
    }
}
