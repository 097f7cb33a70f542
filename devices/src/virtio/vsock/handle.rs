//! The way into a guest's sockets for code of the same process, without files on the host.
//!
//! A [`VsockHandle`] puts requests into an inbox that the worker empties; the worker never waits
//! for the handle's user, and the user waits for the worker with a bound. Not for use on an event
//! loop: [`VsockHandle::connect`] blocks its caller.

use std::collections::HashMap;
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::counters::Counters;
use crate::event::Event;
use crate::metrics::{Metered, Metric};

/// How long [`VsockHandle::connect`] waits for the guest's answer.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Requests that may wait for the worker. It takes them all at each wake-up, so more than this
/// means that the VM is paused or its loop is stuck.
const MAX_REQUESTS: usize = 256;

/// Connections that an in-process listener may have waiting, as in listen(2).
const BACKLOG: usize = 128;

/// Whether requests make sense now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// No driver, or one that broke the rules: nobody will answer.
    Undriven,
    /// A driver is there; its VM runs, or is paused and will go on.
    Driven,
    /// The device no longer exists.
    Gone,
}

/// A connection that someone in this process wants.
pub(super) struct ConnectRequest {
    pub(super) port: u32,
    pub(super) socket: UnixStream,
    pub(super) deadline: Instant,
    pub(super) reply: Reply,
}

/// Tells the user of a handle what became of the request, once.
pub(super) struct Reply(SyncSender<io::Result<()>>);

impl Reply {
    /// Never blocks; a user that has given up does not mind.
    pub(super) fn send(self, result: io::Result<()>) {
        let _ = self.0.try_send(result);
    }
}

struct Inbox {
    phase: Phase,
    requests: Vec<ConnectRequest>,
    listeners: HashMap<u32, SyncSender<UnixStream>>,
}

/// What handles and the device share.
pub(super) struct Shared {
    pub(super) counters: Counters,
    wake: Event,
    inbox: Mutex<Inbox>,
}

impl Shared {
    pub(super) fn new() -> io::Result<Self> {
        let inbox =
            Inbox { phase: Phase::Undriven, requests: Vec::new(), listeners: HashMap::new() };
        Ok(Self { counters: Counters::default(), wake: Event::new()?, inbox: Mutex::new(inbox) })
    }

    fn inbox(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Signalled when there are requests.
    pub(super) fn wake(&self) -> &Event {
        &self.wake
    }

    /// Changes the phase. Outside [`Phase::Driven`], the requests that wait are refused.
    pub(super) fn set_phase(&self, phase: Phase) {
        let refused = {
            let mut inbox = self.inbox();
            inbox.phase = phase;
            if phase == Phase::Gone {
                inbox.listeners.clear();
            }
            if phase == Phase::Driven { Vec::new() } else { std::mem::take(&mut inbox.requests) }
        };
        for request in refused {
            request.reply.send(Err(not_driven()));
        }
    }

    /// The requests so far.
    pub(super) fn take_requests(&self) -> Vec<ConnectRequest> {
        std::mem::take(&mut self.inbox().requests)
    }

    /// Offers the guest's new connection to the listener of `port`. `None` if there is none, an
    /// error if its backlog is full.
    pub(super) fn offer(&self, port: u32) -> Option<io::Result<UnixStream>> {
        let mut inbox = self.inbox();
        let listener = inbox.listeners.get(&port)?;
        let pair = UnixStream::pair();
        let offered = pair.and_then(|(ours, theirs)| {
            ours.set_nonblocking(true)?;
            match listener.try_send(theirs) {
                Ok(()) => Ok(ours),
                Err(TrySendError::Full(_)) => Err(io::ErrorKind::ConnectionRefused.into()),
                Err(TrySendError::Disconnected(_)) => Err(io::ErrorKind::NotConnected.into()),
            }
        });
        if matches!(&offered, Err(error) if error.kind() == io::ErrorKind::NotConnected) {
            inbox.listeners.remove(&port);
            return None;
        }
        Some(offered)
    }
}

impl Metered for Shared {
    fn metrics(&self) -> Vec<Metric> {
        self.counters.metrics()
    }
}

fn not_driven() -> io::Error {
    io::Error::new(io::ErrorKind::NotConnected, "the guest does not drive its vsock device")
}

/// Connects to the guest and listens for it. Cheap to clone; outlives the device harmlessly.
#[derive(Clone)]
pub struct VsockHandle {
    shared: Arc<Shared>,
}

impl VsockHandle {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self { shared }
    }

    /// True if a driver is there, so that [`VsockHandle::connect`] has somebody to ask.
    pub fn is_driven(&self) -> bool {
        self.shared.inbox().phase == Phase::Driven
    }

    /// Connects to `port` of the guest, waiting [`CONNECT_TIMEOUT`] at most.
    pub fn connect(&self, port: u32) -> io::Result<UnixStream> {
        self.connect_timeout(port, CONNECT_TIMEOUT)
    }

    /// Connects to `port` of the guest; returns once the guest has accepted.
    ///
    /// `ConnectionRefused`: nobody listens there, or the device has no room. `TimedOut`: no answer
    /// within `timeout`, as while the VM is paused. `NotConnected`, at once: no driver is there yet.
    /// `ConnectionReset`: the driver went away meanwhile.
    pub fn connect_timeout(&self, port: u32, timeout: Duration) -> io::Result<UnixStream> {
        let (ours, theirs) = UnixStream::pair()?;
        theirs.set_nonblocking(true)?;
        let (sender, answer) = sync_channel(1);
        let now = Instant::now();
        let deadline = now.checked_add(timeout).unwrap_or(now);
        let request = ConnectRequest { port, socket: theirs, deadline, reply: Reply(sender) };
        self.post(request)?;
        match answer.recv_timeout(timeout) {
            Ok(Ok(())) => Ok(ours),
            Ok(Err(error)) => Err(error),
            // Dropping our end tells the device that nobody waits any more.
            Err(RecvTimeoutError::Timeout) => Err(io::ErrorKind::TimedOut.into()),
            Err(RecvTimeoutError::Disconnected) => Err(io::ErrorKind::ConnectionReset.into()),
        }
    }

    fn post(&self, request: ConnectRequest) -> io::Result<()> {
        let mut inbox = self.shared.inbox();
        if inbox.phase != Phase::Driven {
            return Err(not_driven());
        }
        if inbox.requests.len() >= MAX_REQUESTS {
            let waiting = Instant::now();
            inbox.requests.retain(|request| request.deadline > waiting);
        }
        if inbox.requests.len() >= MAX_REQUESTS {
            return Err(io::Error::new(
                io::ErrorKind::ConnectionRefused,
                "too many connection requests wait for the vsock device",
            ));
        }
        inbox.requests.push(request);
        self.shared.wake.signal();
        Ok(())
    }

    /// Listens for connections that the guest makes to `port` of the host. Takes precedence over
    /// the socket file of that port.
    pub fn listen(&self, port: u32) -> io::Result<VsockListener> {
        let mut inbox = self.shared.inbox();
        if inbox.phase == Phase::Gone {
            return Err(io::ErrorKind::NotConnected.into());
        }
        if inbox.listeners.contains_key(&port) {
            return Err(io::ErrorKind::AddrInUse.into());
        }
        let (sender, connections) = sync_channel(BACKLOG);
        inbox.listeners.insert(port, sender);
        Ok(VsockListener { port, connections, shared: self.shared.clone() })
    }
}

/// Takes the connections that the guest makes to one port. Dropping it ends the listening.
pub struct VsockListener {
    port: u32,
    connections: Receiver<UnixStream>,
    shared: Arc<Shared>,
}

impl VsockListener {
    /// The port.
    pub fn port(&self) -> u32 {
        self.port
    }

    /// The next connection. `TimedOut` if there is none within `timeout`, `NotConnected` once the
    /// device no longer exists.
    pub fn accept_timeout(&self, timeout: Duration) -> io::Result<UnixStream> {
        self.connections.recv_timeout(timeout).map_err(|error| match error {
            RecvTimeoutError::Timeout => io::ErrorKind::TimedOut.into(),
            RecvTimeoutError::Disconnected => io::ErrorKind::NotConnected.into(),
        })
    }
}

impl Drop for VsockListener {
    fn drop(&mut self) {
        self.shared.inbox().listeners.remove(&self.port);
    }
}
