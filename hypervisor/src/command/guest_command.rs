//! A command in the guest, attached to this process's standard streams.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use guest_protocol::{Connect, Error, ExitStatus, Remote, Session, Spawn, Stdio};

use crate::event::{Event, Events};
use crate::terminal::{RawTerminal, window_size};

/// A command that is being started, runs, or has ended. [`Event::Finished`] tells of its end.
pub struct GuestCommand {
    progress: Arc<Mutex<Progress>>,
    result: Arc<Mutex<Option<Result<ExitStatus, Error>>>>,
    // Restores the terminal when the command is dropped.
    _terminal: Option<RawTerminal>,
}

/// How far a command is. Its first output may be seen before the guest has said that it runs, so
/// a signal may come in between.
enum Progress {
    /// Being started, and the signal that it shall get then.
    Starting(Option<i32>),
    Started(Remote),
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The command runs: it can be reached, and gets the signal that came before.
fn has_started(progress: &Mutex<Progress>, remote: Remote) {
    let before = std::mem::replace(&mut *lock(progress), Progress::Started(remote.clone()));
    if let Progress::Starting(Some(signal)) = before
        && let Err(error) = remote.signal(signal)
    {
        tracing::warn!(%error, signal, "signal not passed on");
    }
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
        let progress = Arc::new(Mutex::new(Progress::Starting(None)));
        let result = Arc::new(Mutex::new(None));
        let (shared_progress, shared_result) = (progress.clone(), result.clone());
        let work = move || {
            let ended = Session::start(guest, spawn, stdio).and_then(|session| {
                has_started(&shared_progress, session.remote());
                on_start();
                session.wait()
            });
            *lock(&shared_result) = Some(ended);
            events.send(Event::Finished);
        };
        std::thread::Builder::new().name("command".to_owned()).spawn(work)?;
        Ok(Self { progress, result, _terminal: terminal })
    }

    /// Passes a signal on to the command, at once or as soon as it has started. False if the guest
    /// does not answer.
    pub fn signal(&self, signal: i32) -> bool {
        match &mut *lock(&self.progress) {
            Progress::Started(remote) => remote.signal(signal).is_ok(),
            Progress::Starting(pending) => {
                *pending = Some(signal);
                true
            }
        }
    }

    /// The terminal's size has changed.
    pub fn resize(&self) {
        if let Progress::Started(remote) = &*lock(&self.progress)
            && let Err(error) = remote.resize(window_size())
        {
            tracing::debug!(%error, "terminal not resized");
        }
    }

    /// True if the command's end is not known because the way to the guest has broken.
    pub fn lost_the_guest(&self) -> bool {
        let result = lock(&self.result);
        matches!(
            result.as_ref(),
            Some(Err(Error::Connect { .. } | Error::Send { .. } | Error::Receive { .. }))
        )
    }

    /// The exit code and the message, if it failed to run, of a command that has ended.
    pub fn exit_code(&self) -> (u8, Option<String>) {
        match lock(&self.result).as_ref() {
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
