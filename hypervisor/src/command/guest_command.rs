//! A command in the guest, attached to this process's standard streams.

use std::io;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use guest_protocol::{Connect, Error, ExitStatus, Remote, Session, Spawn, Stdio};

use crate::event::{Event, Events};
use crate::terminal::{RawTerminal, window_size};

/// A command that is being started, runs, or has ended. [`Event::Finished`] tells of its end.
pub struct GuestCommand {
    remote: Arc<OnceLock<Remote>>,
    result: Arc<Mutex<Option<Result<ExitStatus, Error>>>>,
    // Restores the terminal when the command is dropped.
    _terminal: Option<RawTerminal>,
}

impl GuestCommand {
    /// Starts `spawn` on a thread, with a terminal if this process has one. `on_start` runs when
    /// the guest has started it.
    pub fn start(
        guest: impl Connect + 'static,
        mut spawn: Spawn,
        events: Events,
        on_start: impl FnOnce() + Send + 'static,
    ) -> io::Result<Self> {
        let terminal = RawTerminal::enter()?;
        if terminal.is_some() {
            spawn.tty = Some(window_size());
            let term = std::env::var("TERM").unwrap_or_else(|_| "xterm".to_owned());
            if !spawn.env.iter().any(|(name, _)| name == "TERM") {
                spawn = spawn.env("TERM", term);
            }
        }
        let stdio = Stdio::inherit()?;
        let remote = Arc::new(OnceLock::new());
        let result = Arc::new(Mutex::new(None));
        let (shared_remote, shared_result) = (remote.clone(), result.clone());
        let work = move || {
            let ended = Session::start(guest, spawn, stdio).and_then(|session| {
                let _ = shared_remote.set(session.remote());
                on_start();
                session.wait()
            });
            *shared_result.lock().unwrap_or_else(PoisonError::into_inner) = Some(ended);
            events.send(Event::Finished);
        };
        std::thread::Builder::new().name("command".to_owned()).spawn(work)?;
        Ok(Self { remote, result, _terminal: terminal })
    }

    /// Passes a signal on to the command. False if it has not been started yet, or the guest does
    /// not answer.
    pub fn signal(&self, signal: i32) -> bool {
        self.remote.get().is_some_and(|remote| remote.signal(signal).is_ok())
    }

    /// The terminal's size has changed.
    pub fn resize(&self) {
        if let Some(remote) = self.remote.get()
            && let Err(error) = remote.resize(window_size())
        {
            tracing::debug!(%error, "terminal not resized");
        }
    }

    /// True if the command's end is not known because the way to the guest has broken.
    pub fn lost_the_guest(&self) -> bool {
        let result = self.result.lock().unwrap_or_else(PoisonError::into_inner);
        matches!(
            result.as_ref(),
            Some(Err(Error::Connect { .. } | Error::Send { .. } | Error::Receive { .. }))
        )
    }

    /// The exit code and the message, if it failed to run, of a command that has ended.
    pub fn exit_code(&self) -> (u8, Option<String>) {
        match self.result.lock().unwrap_or_else(PoisonError::into_inner).as_ref() {
            Some(Ok(status)) => (status.to_exit_code(), None),
            Some(Err(error)) => (error.exit_code(), Some(with_causes(error))),
            None => (crate::outcome::EXIT_SETUP, Some("the command has not ended".to_owned())),
        }
    }
}

/// An error with its causes in one line, leaving out what the line says already.
pub fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(next) = cause {
        let part = next.to_string();
        if !text.contains(&part) {
            text = format!("{text}: {part}");
        }
        cause = next.source();
    }
    text
}
