//! One process of a container, its first or one that was added: its state, and its end, which is
//! told once and can be waited for at any time.

use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use containerd_shim_protos::types::task::Status;
use guest_protocol::{ProcessId, Request, Spawn, WindowSize};
use tokio::sync::watch;

use crate::checkpoint::Saved;
use crate::error::{Error, Result};
use crate::guest::Guest;
use crate::stdio::{Ends, Stdio};
use crate::streams::Streams;

/// How long output may take to be read by the client after the process has ended.
pub const DRAIN: Duration = Duration::from_secs(10);

/// Which process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Name {
    /// The container.
    pub container: String,
    /// Empty for its first process.
    pub exec: String,
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.exec.as_str() {
            "" => write!(f, "task {}", self.container),
            exec => write!(f, "exec {exec} of task {}", self.container),
        }
    }
}

/// How a process has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct End {
    /// The exit status, a signal's number counted from 128.
    pub status: u32,
    /// When.
    pub at: SystemTime,
}

/// A process.
#[derive(Debug)]
pub struct Process {
    /// Its name.
    pub name: Name,
    /// Where its streams go.
    pub stdio: Stdio,
    state: Mutex<State>,
    end: watch::Sender<Option<End>>,
}

#[derive(Debug, Default)]
struct State {
    /// What containerd knows it as; 0 before it is there.
    pid: u32,
    /// Its keeper in the guest.
    keeper: Option<ProcessId>,
    started: bool,
    size: Option<WindowSize>,
    input_closed: bool,
    streams: Option<std::sync::Arc<Streams>>,
}

impl Process {
    /// One that is not in the guest yet.
    pub fn new(name: Name, stdio: Stdio) -> Self {
        Self { name, stdio, state: Mutex::default(), end: watch::Sender::new(None) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `argv` in the guest, a keeper whose streams are this process's, and passes them on.
    pub async fn launch(&self, guest: &Guest, argv: Vec<String>) -> Result<()> {
        let ends = Ends::open(&self.stdio).await?;
        let size = self.state().size;
        let has = |stream| self.stdio.has(stream);
        let spawn = Spawn {
            tty: self.stdio.terminal.then(|| size.unwrap_or(WindowSize { rows: 24, cols: 80 })),
            stdin: has(guest_protocol::Stream::Stdin),
            stdout: has(guest_protocol::Stream::Stdout),
            stderr: has(guest_protocol::Stream::Stderr),
            ..Spawn::new(argv)
        };
        let keeper = guest.spawn(spawn).await?.process;
        let streams = std::sync::Arc::new(Streams::connect(ends, guest, keeper).await?);
        let mut state = self.state();
        if state.input_closed {
            streams.close_input();
        }
        state.keeper = Some(keeper);
        state.streams = Some(streams);
        Ok(())
    }

    /// Takes over a process that goes on from a checkpoint, with its streams.
    pub async fn adopt(&self, guest: &Guest, saved: &Saved) -> Result<()> {
        let ends = Ends::open(&self.stdio).await?.like(saved);
        let streams = std::sync::Arc::new(Streams::connect(ends, guest, saved.keeper).await?);
        let mut state = self.state();
        if state.input_closed {
            streams.close_input();
        }
        state.keeper = Some(saved.keeper);
        state.streams = Some(streams);
        Ok(())
    }

    /// Passes the client's input on from now on. It must have been launched.
    pub async fn connect_input(&self, guest: &Guest) -> Result<()> {
        let (keeper, streams) = {
            let state = self.state();
            (state.keeper, state.streams.clone())
        };
        match (keeper, streams) {
            (Some(keeper), Some(streams)) => {
                streams.connect_input(&self.stdio, guest, keeper).await
            }
            _ => Err(Error::State(format!("{} is not in the guest", self.name))),
        }
    }

    fn connected(&self) -> Option<(ProcessId, std::sync::Arc<Streams>)> {
        let state = self.state();
        state.keeper.zip(state.streams.clone())
    }

    /// Makes the guest let go of its streams, so that it can be saved.
    pub async fn let_go(&self, guest: &Guest) -> Result<()> {
        match self.connected() {
            Some((keeper, streams)) => streams.let_go(guest, keeper).await,
            None => Ok(()),
        }
    }

    /// Connects its streams with the guest that goes on; `new` if in another VM.
    pub async fn attach(&self, guest: &Guest, new: bool) -> Result<()> {
        match self.connected() {
            Some((keeper, streams)) => streams.attach(guest, keeper, new).await,
            None => Ok(()),
        }
    }

    /// The guest goes on for good.
    pub fn settle(&self) {
        if let Some((_, streams)) = self.connected() {
            streams.settle();
        }
    }

    /// Its keeper in the guest.
    pub fn keeper(&self) -> Option<ProcessId> {
        self.state().keeper
    }

    /// What containerd knows it as.
    pub fn pid(&self) -> u32 {
        self.state().pid
    }

    /// It is there, under this number.
    pub fn set_pid(&self, pid: u32) {
        self.state().pid = pid;
    }

    /// It is about to be started. Refused if it has been.
    pub fn start(&self) -> Result<()> {
        if self.end().is_some() {
            return Err(Error::State(format!("{} has ended and cannot be started", self.name)));
        }
        let mut state = self.state();
        if std::mem::replace(&mut state.started, true) {
            return Err(Error::State(format!("cannot start a running process: {}", self.name)));
        }
        Ok(())
    }

    /// It could not be started after all.
    pub fn not_started(&self) {
        self.state().started = false;
    }

    /// Whether it has been started; it may have ended since.
    pub fn has_started(&self) -> bool {
        self.state().started
    }

    /// Its state, but for a pause.
    pub fn status(&self) -> Status {
        match (self.end(), self.state().started) {
            (Some(_), _) => Status::STOPPED,
            (None, true) => Status::RUNNING,
            (None, false) => Status::CREATED,
        }
    }

    /// How it has ended, if it has.
    pub fn end(&self) -> Option<End> {
        *self.end.borrow()
    }

    /// Tells its end. False if that has been told.
    pub fn tell_end(&self, end: End) -> bool {
        self.end.send_if_modified(|told| {
            let first = told.is_none();
            told.get_or_insert(end);
            first
        })
    }

    /// Waits for its end.
    pub async fn wait(&self) -> End {
        let mut told = self.end.subscribe();
        loop {
            if let Some(end) = *told.borrow_and_update() {
                return end;
            }
            // Cannot fail while the sender, this process, is there.
            if told.changed().await.is_err() {
                return End { status: 255, at: SystemTime::now() };
            }
        }
    }

    /// The client will write no more. May come before the process is there.
    pub fn close_input(&self) {
        let mut state = self.state();
        state.input_closed = true;
        if let Some(streams) = &state.streams {
            streams.close_input();
        }
    }

    /// Sets the size of its terminal, now or when it gets one.
    pub async fn resize(&self, guest: Option<&Guest>, size: WindowSize) -> Result<()> {
        let keeper = {
            let mut state = self.state();
            state.size = Some(size);
            state.keeper
        };
        if let (Some(process), Some(guest), None) = (keeper, guest, self.end()) {
            guest.call(&Request::Resize { process, size }).await?;
        }
        Ok(())
    }

    /// Waits until what it has written has been passed on, and lets its streams go.
    pub async fn drain(&self) {
        let streams = self.state().streams.take();
        if let Some(streams) = streams {
            streams.drain(DRAIN).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process() -> Process {
        let name = Name { container: "web".to_owned(), exec: String::new() };
        Process::new(name, Stdio::default())
    }

    fn end(status: u32) -> End {
        End { status, at: SystemTime::UNIX_EPOCH }
    }

    #[tokio::test]
    async fn the_end_is_told_once_and_can_be_waited_for_afterwards() {
        let process = process();
        assert!(process.tell_end(end(7)));
        assert!(!process.tell_end(end(137)));
        assert_eq!(process.wait().await, end(7));
        assert_eq!(process.status(), Status::STOPPED);
    }

    #[test]
    fn it_is_started_once_and_not_after_its_end() {
        let process = process();
        assert_eq!(process.status(), Status::CREATED);
        process.start().unwrap();
        let again = process.start().unwrap_err().to_string();
        assert_eq!(again, "cannot start a running process: task web");
        process.tell_end(end(0));
        assert!(process.start().is_err());
    }

    #[tokio::test]
    async fn a_size_may_come_before_the_terminal() {
        let process = process();
        process.resize(None, WindowSize { rows: 10, cols: 20 }).await.unwrap();
        assert_eq!(process.state().size, Some(WindowSize { rows: 10, cols: 20 }));
    }
}
