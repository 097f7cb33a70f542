//! The event loop that runs device handlers, on top of `event-manager`.
//!
//! An [`Executor`] is one named thread with one epoll set. A [`Handler`] is moved into it with
//! [`ExecutorHandle::run`] and taken back with [`Running::stop`], queues and all. `stop` takes the
//! handler by locking its slot and never asks the loop, so a loop that is busy with another
//! handler delays nobody, and a vCPU that resets a device waits for one bounded call at most.
//!
//! Each source is registered as a duplicate of the handler's descriptor: the loop can then drop
//! its registration whenever it gets to it, while the handler, or its successor with the same
//! eventfd, is already registered anew.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use event_manager::{
    EventManager, EventOps, Events, MutEventSubscriber, RemoteEndpoint, SubscriberId,
};
use vmm_sys_util::epoll::EventSet;

use crate::event::Event;
use crate::ids::Token;

type Subscriber = Box<dyn MutEventSubscriber + Send>;
type EventLoop = EventManager<Subscriber>;

/// What a handler wants after an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    /// Further events.
    Continue,
    /// None: it gave up, for example on a guest fault. It stays in its slot until stopped.
    Finished,
}

/// Which readiness wakes a handler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interest {
    /// Data to read, or the peer's end.
    Read,
    /// Room to write.
    Write,
    /// Both.
    ReadWrite,
    /// Errors and hang-ups only.
    Hangup,
}

impl Interest {
    fn event_set(self) -> EventSet {
        match self {
            Interest::Read => EventSet::IN,
            Interest::Write => EventSet::OUT,
            Interest::ReadWrite => EventSet::IN | EventSet::OUT,
            Interest::Hangup => EventSet::empty(),
        }
    }
}

/// Work that reacts to file descriptors.
///
/// `handle` never blocks, never waits for a vCPU, the control thread or another handler, and does
/// a bounded amount of work per call. Sources are level-triggered: what is not read comes again, but for
/// [`Sources::add_signal`].
pub trait Handler: Send {
    /// Registers the first sources. Called once, on the loop, before any `handle`.
    fn attach(&mut self, sources: &mut Sources<'_, '_>) -> io::Result<()>;
    /// Reacts to the source called `token`.
    fn handle(&mut self, token: Token, sources: &mut Sources<'_, '_>) -> Flow;
}

/// The sources of one handler, as it sees them during a call.
pub struct Sources<'a, 'b> {
    ops: &'a mut EventOps<'b>,
    registered: &'a mut HashMap<Token, OwnedFd>,
}

impl Sources<'_, '_> {
    /// Watches `fd` under `token`, replacing what had that token before.
    pub fn add(&mut self, token: Token, fd: &impl AsFd, interest: Interest) -> io::Result<()> {
        self.add_for(token, fd, interest.event_set())
    }

    /// Watches `event` under `token`, replacing what had that token before. Each signal is told once,
    /// and need not be cleared; what was signalled before is told at first.
    pub fn add_signal(&mut self, token: Token, event: &Event) -> io::Result<()> {
        self.add_for(token, event, EventSet::IN | EventSet::EDGE_TRIGGERED)
    }

    fn add_for(&mut self, token: Token, fd: &impl AsFd, what: EventSet) -> io::Result<()> {
        self.remove(token);
        let fd = fd.as_fd().try_clone_to_owned()?;
        let events = Events::with_data(&fd, token.0, what);
        self.ops.add(events).map_err(to_io)?;
        self.registered.insert(token, fd);
        Ok(())
    }

    /// Changes what `token` waits for.
    pub fn modify(&mut self, token: Token, interest: Interest) -> io::Result<()> {
        match self.registered.get(&token) {
            Some(fd) => {
                self.ops.modify(Events::with_data(fd, token.0, interest.event_set())).map_err(to_io)
            }
            None => Err(io::ErrorKind::NotFound.into()),
        }
    }

    /// Stops watching `token`. Does nothing if it is not watched.
    pub fn remove(&mut self, token: Token) {
        if let Some(fd) = self.registered.remove(&token) {
            // Only fails for a descriptor that is not registered, which our own duplicate is.
            let _ = self.ops.remove(Events::empty(&fd));
        }
    }

    fn remove_all(&mut self) {
        for (_, fd) in self.registered.drain() {
            let _ = self.ops.remove(Events::empty(&fd));
        }
    }
}

fn to_io(error: event_manager::Error) -> io::Error {
    match error {
        event_manager::Error::Epoll(errno) => io::Error::from_raw_os_error(errno.errno()),
        other => io::Error::other(other),
    }
}

/// What the loop keeps of one handler.
struct Slot<H> {
    handler: Arc<Mutex<Option<H>>>,
    registered: HashMap<Token, OwnedFd>,
    attach_error: Arc<Mutex<Option<io::Error>>>,
}

impl<H: Handler> MutEventSubscriber for Slot<H> {
    fn process(&mut self, events: Events, ops: &mut EventOps) {
        let mut sources = Sources { ops, registered: &mut self.registered };
        let mut slot = lock(&self.handler);
        let flow = match slot.as_mut() {
            Some(handler) => handler.handle(Token(events.data()), &mut sources),
            None => Flow::Finished,
        };
        if flow == Flow::Finished {
            sources.remove_all();
        }
    }

    fn init(&mut self, ops: &mut EventOps) {
        let mut sources = Sources { ops, registered: &mut self.registered };
        if let Some(handler) = lock(&self.handler).as_mut()
            && let Err(error) = handler.attach(&mut sources)
        {
            *lock(&self.attach_error) = Some(error);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A handler that panicked aborted the process (panic = "abort") or failed its test.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Why the executor refused.
#[derive(Debug, thiserror::Error)]
pub enum ExecutorError {
    /// The epoll set or the thread could not be made.
    #[error("event loop {name} cannot be started")]
    Spawn {
        /// The loop.
        name: String,
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// The loop has ended.
    #[error("the event loop has ended")]
    Gone,
    /// The handler could not register its sources.
    #[error("event sources cannot be registered")]
    Attach(#[source] io::Error),
}

/// A handler that could not be run, given back with the reason.
#[derive(Debug)]
pub struct NotRun<H> {
    /// The handler, unless the loop was already gone.
    pub handler: Option<H>,
    /// The reason.
    pub error: ExecutorError,
}

/// One event loop thread. Dropping it ends the loop and waits for the thread.
pub struct Executor {
    endpoint: RemoteEndpoint<Subscriber>,
    ending: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Executor {
    /// Starts a loop on a new thread called `name` (15 bytes at most are shown by the kernel).
    pub fn spawn(name: &str) -> Result<Self, ExecutorError> {
        let failed = |source| ExecutorError::Spawn { name: name.to_owned(), source };
        let mut events = EventLoop::new().map_err(|error| failed(to_io(error)))?;
        let endpoint = events.remote_endpoint();
        let ending = Arc::new(AtomicBool::new(false));
        let flag = ending.clone();
        let thread = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || {
                while !flag.load(Ordering::Acquire) {
                    if let Err(error) = events.run() {
                        tracing::error!(%error, "event loop failed");
                        return;
                    }
                }
            })
            .map_err(failed)?;
        Ok(Self { endpoint, ending, thread: Some(thread) })
    }

    /// A handle with which devices run their handlers here.
    pub fn handle(&self) -> ExecutorHandle {
        ExecutorHandle { endpoint: self.endpoint.clone() }
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        self.ending.store(true, Ordering::Release);
        // Fails only if the loop is gone, and then there is nothing to wake.
        let _ = self.endpoint.fire(|_| {});
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Runs handlers on an [`Executor`]. Cheap to clone. Not for use from within a handler.
#[derive(Clone)]
pub struct ExecutorHandle {
    endpoint: RemoteEndpoint<Subscriber>,
}

impl ExecutorHandle {
    /// Moves `handler` into the loop; returns when it is attached.
    pub fn run<H: Handler + 'static>(&self, handler: H) -> Result<Running<H>, NotRun<H>> {
        let handler = Arc::new(Mutex::new(Some(handler)));
        let attach_error = Arc::new(Mutex::new(None));
        let slot: Subscriber = Box::new(Slot {
            handler: handler.clone(),
            registered: HashMap::new(),
            attach_error: attach_error.clone(),
        });
        let added = self.endpoint.call_blocking(move |events| {
            Ok::<_, event_manager::Error>(events.add_subscriber(slot))
        });
        let Ok(id) = added else {
            return Err(NotRun { handler: lock(&handler).take(), error: ExecutorError::Gone });
        };
        let mut running = Running { handler, id, endpoint: self.endpoint.clone() };
        match lock(&attach_error).take() {
            None => Ok(running),
            Some(error) => {
                Err(NotRun { handler: running.take(), error: ExecutorError::Attach(error) })
            }
        }
    }
}

/// A handler that runs on an executor. Dropping it stops it.
pub struct Running<H: Handler> {
    handler: Arc<Mutex<Option<H>>>,
    id: SubscriberId,
    endpoint: RemoteEndpoint<Subscriber>,
}

impl<H: Handler> Running<H> {
    /// Takes the handler back. When this returns it is in no call and will get no further one.
    pub fn stop(mut self) -> Option<H> {
        self.take()
    }

    /// Looks into the running handler, between two of its calls.
    pub fn with<R>(&self, look: impl FnOnce(&mut H) -> R) -> Option<R> {
        lock(&self.handler).as_mut().map(look)
    }

    fn take(&mut self) -> Option<H> {
        let handler = lock(&self.handler).take();
        let id = self.id;
        // If the loop is gone, its registrations are too.
        let _ = self.endpoint.fire(move |events| {
            let _ = events.remove_subscriber(id);
        });
        handler
    }
}

impl<H: Handler> Drop for Running<H> {
    fn drop(&mut self) {
        if lock(&self.handler).is_some() {
            self.take();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Sender, channel};
    use std::time::Duration;

    use super::*;

    struct Counter {
        event: Event,
        seen: Sender<u64>,
        finish: bool,
    }

    impl Handler for Counter {
        fn attach(&mut self, sources: &mut Sources<'_, '_>) -> io::Result<()> {
            sources.add(Token(3), &self.event, Interest::Read)
        }
        fn handle(&mut self, token: Token, _sources: &mut Sources<'_, '_>) -> Flow {
            assert_eq!(token, Token(3));
            self.seen.send(self.event.clear()).unwrap();
            if self.finish { Flow::Finished } else { Flow::Continue }
        }
    }

    fn counter(event: &Event, finish: bool) -> (Counter, std::sync::mpsc::Receiver<u64>) {
        let (seen, receiver) = channel();
        (Counter { event: event.clone(), seen, finish }, receiver)
    }

    fn event() -> Event {
        Event::new().unwrap()
    }

    const SOON: Duration = Duration::from_secs(5);

    #[test]
    fn a_handler_is_called_and_comes_back() {
        let executor = Executor::spawn("test").unwrap();
        let event = event();
        let (handler, seen) = counter(&event, false);
        let running = executor.handle().run(handler).ok().unwrap();
        event.signal();
        assert_eq!(seen.recv_timeout(SOON), Ok(1));
        assert!(running.stop().is_some());
    }

    #[test]
    fn after_stop_events_are_left_for_the_successor() {
        let executor = Executor::spawn("test").unwrap();
        let event = event();
        for round in 1..50 {
            let (handler, seen) = counter(&event, false);
            let running = executor.handle().run(handler).ok().unwrap();
            event.signal();
            assert_eq!(seen.recv_timeout(SOON), Ok(1), "round {round}");
            running.stop().unwrap();
        }
        event.signal();
        let (handler, seen) = counter(&event, false);
        let _running = executor.handle().run(handler).ok().unwrap();
        assert_eq!(seen.recv_timeout(SOON), Ok(1));
    }

    #[test]
    fn a_finished_handler_gets_no_more_events_and_still_comes_back() {
        let executor = Executor::spawn("test").unwrap();
        let event = event();
        let (handler, seen) = counter(&event, true);
        let running = executor.handle().run(handler).ok().unwrap();
        event.signal();
        assert_eq!(seen.recv_timeout(SOON), Ok(1));
        event.signal();
        assert!(seen.recv_timeout(Duration::from_millis(50)).is_err());
        assert!(running.stop().is_some());
    }

    #[test]
    fn a_signal_is_told_once_and_nobody_clears_it() {
        struct Signalled(Event, Sender<()>);
        impl Handler for Signalled {
            fn attach(&mut self, sources: &mut Sources<'_, '_>) -> io::Result<()> {
                sources.add_signal(Token(3), &self.0)
            }
            fn handle(&mut self, _: Token, _: &mut Sources<'_, '_>) -> Flow {
                self.1.send(()).unwrap();
                Flow::Continue
            }
        }
        let executor = Executor::spawn("test").unwrap();
        let event = event();
        for round in 1..3 {
            let (sender, seen) = channel();
            event.signal();
            let handler = Signalled(event.clone(), sender);
            let running = executor.handle().run(handler).ok().unwrap();
            for signal in 0..3 {
                assert_eq!(seen.recv_timeout(SOON), Ok(()), "signal {signal}, round {round}");
                assert!(seen.recv_timeout(Duration::from_millis(20)).is_err());
                event.signal();
            }
            running.stop().unwrap();
        }
        assert_eq!(event.clear(), 8);
    }

    #[test]
    fn a_handler_that_cannot_attach_is_given_back() {
        struct Broken;
        impl Handler for Broken {
            fn attach(&mut self, _: &mut Sources<'_, '_>) -> io::Result<()> {
                Err(io::ErrorKind::OutOfMemory.into())
            }
            fn handle(&mut self, _: Token, _: &mut Sources<'_, '_>) -> Flow {
                Flow::Finished
            }
        }
        let executor = Executor::spawn("test").unwrap();
        let refused = executor.handle().run(Broken).err().unwrap();
        assert!(refused.handler.is_some());
        assert!(matches!(refused.error, ExecutorError::Attach(_)));
    }

    #[test]
    fn an_executor_that_is_gone_says_so() {
        let executor = Executor::spawn("test").unwrap();
        let handle = executor.handle();
        drop(executor);
        let (handler, _seen) = counter(&event(), false);
        let refused = handle.run(handler).err().unwrap();
        assert!(matches!(refused.error, ExecutorError::Gone));
    }
}
