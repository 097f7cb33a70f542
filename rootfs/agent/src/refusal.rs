//! What a request is refused with.

use guest_protocol::{ErrorKind, ProcessId, Response, Stream};
use nix::errno::Errno;
use std::io;

/// An error that goes to the host.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    #[error("cannot execute '{program}': {}", .errno.desc())]
    Execute { program: String, errno: Errno },
    #[error("cannot execute '{program}': not found in PATH '{path}'")]
    NotInPath { program: String, path: String },
    #[error("cannot change to directory '{cwd}': {}", .errno.desc())]
    Directory { cwd: String, errno: Errno },
    #[error("cannot {action}: {}", .errno.desc())]
    System { action: &'static str, errno: Errno },
    #[error("{0}")]
    Invalid(&'static str),
    #[error("malformed request: {0}")]
    Malformed(String),
    #[error("request is not known to this agent")]
    UnknownRequest,
    #[error("no process {0}")]
    NoSuchProcess(ProcessId),
    #[error("process {process} has no {stream} to attach")]
    NoSuchStream { process: ProcessId, stream: Stream },
    #[error("process {0} has no terminal")]
    NoTerminal(ProcessId),
    #[error("limit of {limit} {what} reached")]
    TooMany { what: &'static str, limit: usize },
}

impl Refusal {
    /// For `map_err`: what failed.
    pub fn system(action: &'static str) -> impl Fn(Errno) -> Self {
        move |errno| Self::System { action, errno }
    }

    /// As [`Refusal::system`], for the standard library's errors.
    pub fn io(action: &'static str) -> impl Fn(io::Error) -> Self {
        move |error| {
            let errno = Errno::from_raw(error.raw_os_error().unwrap_or(libc::EIO));
            Self::System { action, errno }
        }
    }

    /// Its kind for programs.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::NotInPath { .. } => ErrorKind::NotFound,
            Self::Execute { errno, .. } | Self::Directory { errno, .. } => match errno {
                Errno::ENOENT | Errno::ENOTDIR => ErrorKind::NotFound,
                Errno::E2BIG => ErrorKind::Invalid,
                Errno::ENOMEM | Errno::EAGAIN => ErrorKind::System,
                _ => ErrorKind::NotExecutable,
            },
            Self::System { .. } => ErrorKind::System,
            Self::Invalid(_) | Self::Malformed(_) | Self::NoTerminal(_) => ErrorKind::Invalid,
            Self::UnknownRequest => ErrorKind::UnknownRequest,
            Self::NoSuchProcess(_) => ErrorKind::NoSuchProcess,
            Self::NoSuchStream { .. } => ErrorKind::NoSuchStream,
            Self::TooMany { .. } => ErrorKind::TooMany,
        }
    }
}

impl From<Refusal> for Response {
    fn from(refusal: Refusal) -> Self {
        Self::Error { kind: refusal.kind(), message: refusal.to_string() }
    }
}
