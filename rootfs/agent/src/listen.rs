//! The agent proper: accepts connections and gives each a thread.

use crate::log::Log;
use crate::process::Processes;
use crate::refusal::Refusal;
use crate::{connection, guest};
use guest_protocol::{AGENT_PORT, Hello, Response, frame};
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, VsockAddr, accept4, bind, getpeername, listen,
    socket,
};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

/// How many connections the host may have at a time. Each is a thread, mostly asleep.
const MAX_CONNECTIONS: usize = 1024;

/// What parsing a request may take; only what is used costs memory.
const STACK: usize = 256 << 10;

/// What all connections share.
pub struct Agent {
    /// The processes.
    pub processes: Processes,
    /// What it says first.
    pub hello: Hello,
    /// Whether it runs in a guest, which it may end and change, and not on somebody's host.
    pub guest: bool,
    /// Whether a process has ever been started.
    pub started: AtomicBool,
    /// Where its lines go.
    pub log: Log,
    connections: AtomicUsize,
}

impl Agent {
    /// An agent, with the thread that reaps its released processes.
    pub fn new(root: String, guest: bool, log: Log) -> io::Result<Arc<Self>> {
        let agent = Arc::new(Self {
            processes: Processes::new()?,
            hello: guest::hello(root),
            guest,
            started: AtomicBool::new(false),
            log,
            connections: AtomicUsize::new(0),
        });
        let reaping = agent.clone();
        let thread = thread::Builder::new().name("reaper".into()).stack_size(64 << 10);
        thread.spawn(move || reaping.processes.reap())?;
        Ok(agent)
    }

    /// Serves `connection` in a thread of its own, or refuses it.
    fn serve(self: &Arc<Self>, mut connection: UnixStream) {
        if self.connections.fetch_add(1, Ordering::Relaxed) >= MAX_CONNECTIONS {
            let refusal = Refusal::TooMany { what: "connections", limit: MAX_CONNECTIONS };
            let _ = frame::write(&mut connection, &Response::from(refusal));
            self.connections.fetch_sub(1, Ordering::Relaxed);
            return;
        }
        let agent = self.clone();
        let thread = thread::Builder::new().name("connection".into()).stack_size(STACK);
        let serving = thread.spawn(move || {
            connection::serve(&agent, connection);
            agent.connections.fetch_sub(1, Ordering::Relaxed);
        });
        if let Err(error) = serving {
            self.connections.fetch_sub(1, Ordering::Relaxed);
            self.log.error(format_args!("no thread for a connection: {error}"));
        }
    }

    /// Serves every connection that `accept` brings, for ever.
    fn accept(self: &Arc<Self>, mut accept: impl FnMut() -> io::Result<Option<UnixStream>>) -> ! {
        loop {
            match accept() {
                Ok(Some(connection)) => self.serve(connection),
                Ok(None) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    self.log.error(format_args!("cannot accept a connection: {error}"));
                    // Most likely out of descriptors; do not spin.
                    thread::sleep(Duration::from_millis(100));
                }
            }
        }
    }

    /// Serves the host over vsock.
    pub fn serve_vsock(self: &Arc<Self>, listener: &OwnedFd) -> ! {
        self.accept(|| {
            let fd = accept4(listener.as_raw_fd(), SockFlag::SOCK_CLOEXEC)?;
            // SAFETY: it was just made, and belongs to nobody else.
            let fd = unsafe { OwnedFd::from_raw_fd(fd) };
            let peer: VsockAddr = getpeername(fd.as_raw_fd())?;
            // With the loopback transport a process of the guest could get here, and be root.
            let from_host = peer.cid() == libc::VMADDR_CID_HOST;
            Ok(from_host.then(|| UnixStream::from(fd)))
        })
    }
}

/// Listens on the agent's vsock port. Connections of it are handled as `UnixStream`, which does
/// the same calls for every kind of stream socket.
pub fn listen_vsock() -> Result<OwnedFd, Errno> {
    let flags = SockFlag::SOCK_CLOEXEC;
    let listener = socket(AddressFamily::Vsock, SockType::Stream, flags, None)?;
    bind(listener.as_raw_fd(), &VsockAddr::new(libc::VMADDR_CID_ANY, AGENT_PORT))?;
    listen(&listener, Backlog::new(128)?)?;
    Ok(listener)
}

/// Serves on `DIR/agent.sock`, for tests on a host.
pub fn serve_unix(dir: &Path) -> io::Result<()> {
    let listener = UnixListener::bind(dir.join("agent.sock"))?;
    let agent = Agent::new("host".into(), false, Log::Stderr)?;
    agent.accept(|| listener.accept().map(|(connection, _)| Some(connection)))
}
