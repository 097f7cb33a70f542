//! The processes that the host knows, from spawn to release.
//!
//! A process that has exited stays a zombie until it is released, so that neither its pid nor its
//! process group can become another's while the host may still send signals to it.

use crate::refusal::Refusal;
use crate::terminal;
use guest_protocol::{ExitStatus, ProcessId, Spawn, Stream, WindowSize};
use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::collections::HashMap;
use std::os::fd::{AsFd, FromRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// How many processes the host may have at a time.
pub const MAX_PROCESSES: usize = 1024;

/// The agent's end of a process's stream.
#[derive(Debug, Default)]
pub enum Slot {
    /// There is none, or it is closed.
    #[default]
    None,
    /// Waits to be attached.
    Waiting(Waiting),
    /// Is attached. The event asks whoever moves its bytes to let go of it.
    Attached(Arc<EventFd>),
}

/// An end that waits to be attached.
#[derive(Debug)]
pub struct Waiting {
    /// The end.
    pub fd: OwnedFd,
    /// What the process shall get before anything else.
    pub rest: Vec<u8>,
}

impl From<OwnedFd> for Waiting {
    fn from(fd: OwnedFd) -> Self {
        Self { fd, rest: Vec::new() }
    }
}

/// An end that is about to be attached.
#[derive(Debug)]
pub struct Taken {
    /// The end, and what comes first.
    pub end: Waiting,
    /// Readable when it shall be let go of.
    pub let_go: Arc<EventFd>,
}

/// The agent's ends of a process's streams.
#[derive(Debug, Default)]
pub struct Slots {
    pub stdin: Slot,
    pub stdout: Slot,
    pub stderr: Slot,
}

impl Slots {
    fn slot(&mut self, stream: Stream) -> &mut Slot {
        match stream {
            Stream::Stdin => &mut self.stdin,
            Stream::Stdout => &mut self.stdout,
            Stream::Stderr => &mut self.stderr,
        }
    }
}

/// One process.
pub struct Process {
    /// Its name in requests.
    pub id: ProcessId,
    /// Its pid, and its group's and session's.
    pub pid: Pid,
    /// Readable once it has exited.
    pub pidfd: OwnedFd,
    /// The agent's side of its terminal.
    pub terminal: Option<OwnedFd>,
    /// See [`Spawn::keep_streams`].
    pub keep_streams: bool,
    /// See [`Spawn::linger_ms`].
    pub linger_ms: Option<u32>,
    slots: Mutex<Slots>,
    end: Mutex<End>,
}

#[derive(Default)]
struct End {
    status: Option<ExitStatus>,
    reaped: bool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic ends the whole agent, so there is no half-done state to fear.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Process {
    /// How it ended; `None` while it runs.
    pub fn ended(&self) -> Option<ExitStatus> {
        let mut end = lock(&self.end);
        if end.status.is_none() {
            end.status = wait(self.pid, libc::WNOHANG | libc::WNOWAIT);
        }
        end.status
    }

    /// Lets its pid go. Without effect while it runs.
    fn reap(&self) {
        if self.ended().is_some() {
            let mut end = lock(&self.end);
            end.reaped = end.reaped || wait(self.pid, libc::WNOHANG).is_some();
        }
    }

    /// Sends `signal` to it, or to its group.
    pub fn signal(&self, signal: i32, group: bool) -> Result<(), Errno> {
        let end = lock(&self.end);
        if end.reaped {
            return Err(Errno::ESRCH);
        }
        let result = if group {
            // SAFETY: takes numbers; the pid is this process's own as long as it is not reaped.
            unsafe { libc::kill(-self.pid.as_raw(), signal) }
        } else {
            // SAFETY: as above.
            unsafe { libc::kill(self.pid.as_raw(), signal) }
        };
        Errno::result(result).map(drop)
    }

    /// Sets the size of its terminal.
    pub fn resize(&self, size: WindowSize) -> Result<(), Refusal> {
        let terminal = self.terminal.as_ref().ok_or(Refusal::NoTerminal(self.id))?;
        terminal::resize(terminal.as_fd(), size).map_err(Refusal::system("resize the terminal"))
    }

    /// Takes the agent's end of `stream`, to attach it.
    pub fn take(&self, stream: Stream) -> Result<Taken, Refusal> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let let_go = EventFd::from_flags(flags).map_err(Refusal::system("attach the stream"))?;
        let let_go = Arc::new(let_go);
        let mut slots = lock(&self.slots);
        let slot = slots.slot(stream);
        match std::mem::replace(slot, Slot::Attached(let_go.clone())) {
            Slot::Waiting(end) => Ok(Taken { end, let_go }),
            other => {
                *slot = other;
                Err(Refusal::NoSuchStream { process: self.id, stream })
            }
        }
    }

    /// Gives an end back that [`Process::take`] gave out, or tells that it is closed.
    pub fn give_back(&self, stream: Stream, end: Option<Waiting>) {
        let mut slots = lock(&self.slots);
        let slot = slots.slot(stream);
        // Otherwise the process has been released meanwhile.
        if matches!(slot, Slot::Attached(_)) {
            *slot = end.map_or(Slot::None, Slot::Waiting);
        }
    }

    /// Asks whoever moves the bytes of `stream` to give it back.
    pub fn detach(&self, stream: Stream) -> Result<(), Refusal> {
        match lock(&self.slots).slot(stream) {
            Slot::Attached(let_go) => {
                let_go.write(1).map(drop).map_err(Refusal::system("detach the stream"))
            }
            Slot::None | Slot::Waiting(_) => Ok(()),
        }
    }
}

/// All processes.
pub struct Processes {
    table: Mutex<Table>,
    released: Epoll,
}

#[derive(Default)]
struct Table {
    last: u64,
    known: HashMap<ProcessId, Arc<Process>>,
    /// Released and still running.
    leaving: HashMap<ProcessId, Arc<Process>>,
}

/// A process that has been started and has no name yet.
pub struct Started {
    pub pid: Pid,
    pub pidfd: OwnedFd,
    pub terminal: Option<OwnedFd>,
    pub slots: Slots,
}

impl Processes {
    /// None so far.
    pub fn new() -> Result<Self, Errno> {
        let released = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        Ok(Self { table: Mutex::default(), released })
    }

    /// Whether another may be started.
    pub fn check_room(&self) -> Result<(), Refusal> {
        let table = lock(&self.table);
        if table.known.len() + table.leaving.len() < MAX_PROCESSES {
            return Ok(());
        }
        Err(Refusal::TooMany { what: "processes", limit: MAX_PROCESSES })
    }

    /// Takes in what was started as `spawn` says.
    pub fn add(&self, started: Started, spawn: &Spawn) -> Arc<Process> {
        let mut table = lock(&self.table);
        table.last += 1;
        let id = ProcessId(table.last);
        let process = Arc::new(Process {
            id,
            pid: started.pid,
            pidfd: started.pidfd,
            terminal: started.terminal,
            keep_streams: spawn.keep_streams,
            linger_ms: spawn.linger_ms,
            slots: Mutex::new(started.slots),
            end: Mutex::default(),
        });
        table.known.insert(id, process.clone());
        process
    }

    /// Finds a process that is not released.
    pub fn get(&self, id: ProcessId) -> Result<Arc<Process>, Refusal> {
        lock(&self.table).known.get(&id).cloned().ok_or(Refusal::NoSuchProcess(id))
    }

    /// How many are not released.
    pub fn count(&self) -> usize {
        lock(&self.table).known.len()
    }

    /// Forgets a process. If it still runs it is reaped when it exits.
    pub fn release(&self, id: ProcessId) -> Result<(), Refusal> {
        let mut table = lock(&self.table);
        let process = table.known.remove(&id).ok_or(Refusal::NoSuchProcess(id))?;
        *lock(&process.slots) = Slots::default();
        if process.ended().is_some() {
            drop(table);
            process.reap();
            return Ok(());
        }
        let event = EpollEvent::new(EpollFlags::EPOLLIN, id.0);
        let watched = self.released.add(&process.pidfd, event);
        table.leaving.insert(id, process);
        watched.map_err(Refusal::system("watch the process"))
    }

    /// Kills a process with its group, and forgets it.
    pub fn kill(&self, id: ProcessId) {
        let Ok(process) = self.get(id) else { return };
        // It may be gone already, and its group with it.
        let _ = process.signal(Signal::SIGKILL as i32, true);
        let _ = self.release(id);
    }

    /// Reaps released processes as they exit, for ever.
    pub fn reap(&self) {
        let mut events = [EpollEvent::empty(); 16];
        loop {
            let count = self.released.wait(&mut events, EpollTimeout::NONE).unwrap_or(0);
            for event in &events[..count] {
                let process = lock(&self.table).leaving.remove(&ProcessId(event.data()));
                if let Some(process) = process {
                    let _ = self.released.delete(&process.pidfd);
                    process.reap();
                }
            }
        }
    }
}

/// The status of the child `pid` if it has exited; `flags` are `waitid`'s.
fn wait(pid: Pid, flags: i32) -> Option<ExitStatus> {
    let id = libc::id_t::try_from(pid.as_raw()).ok()?;
    // SAFETY: a zeroed structure is a valid one.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    loop {
        // SAFETY: the structure is valid and the kernel's to fill.
        let result = unsafe { libc::waitid(libc::P_PID, id, &raw mut info, libc::WEXITED | flags) };
        match Errno::result(result) {
            Err(Errno::EINTR) => {}
            Err(_) => return None,
            Ok(_) => break,
        }
    }
    // SAFETY: waitid fills these fields; a pid of 0 says that nothing has exited.
    let (exited, status) = unsafe { (info.si_pid() != 0, info.si_status()) };
    exited.then(|| match info.si_code {
        libc::CLD_EXITED => ExitStatus::Code(status.to_le_bytes()[0]),
        _ => ExitStatus::Signal(status),
    })
}

/// Waits for a child that is about to exit, and reaps it.
pub fn discard(pid: Pid) {
    wait(pid, 0);
}

/// Kills a child that cannot be taken in, and reaps it.
pub fn destroy(pid: Pid) {
    let _ = kill(pid, Signal::SIGKILL);
    discard(pid);
}

/// A descriptor that is readable once the child `pid` has exited.
pub fn watch(pid: Pid) -> Result<OwnedFd, Errno> {
    // SAFETY: takes numbers; the result is a new descriptor, close-on-exec, or -1.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid.as_raw(), 0) };
    let fd = RawFd::try_from(Errno::result(fd)?).map_err(|_| Errno::EBADF)?;
    // SAFETY: it was just made, and belongs to nobody else.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
