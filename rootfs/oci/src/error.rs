//! Why something was not done, and how that is told: by the exit code and one line of a command,
//! and by [`Failure`] of what a keeper could not start.

use crate::spec;
use serde::{Deserialize, Serialize};
use std::io;
use std::path::{Path, PathBuf};

/// What went wrong, for programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// The program to run, or its working directory, does not exist.
    NotFound,
    /// The program to run exists and cannot be executed.
    NotExecutable,
    /// What was asked for cannot be: a malformed spec, say.
    Invalid,
    /// The guest's kernel refused.
    System,
}

/// Why a container or a process in it did not run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// For programs.
    pub kind: Kind,
    /// For people.
    pub message: String,
}

impl Failure {
    /// What a keeper ends with, as shells do.
    pub fn exit_code(&self) -> u8 {
        match self.kind {
            Kind::NotFound => 127,
            Kind::NotExecutable => 126,
            Kind::Invalid | Kind::System => 125,
        }
    }
}

/// Why a command was not carried out.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Not an id.
    #[error("'{0}' is no id: letters, digits, '_', '+', '-' and '.', at most 255")]
    BadId(String),
    /// Not a signal.
    #[error("'{0}' is no signal: a number up to 64, or a name such as SIGTERM")]
    BadSignal(String),
    /// No such container.
    #[error("no container '{0}'")]
    NoContainer(String),
    /// No such process in the container.
    #[error("no process '{exec}' in container '{id}'")]
    NoProcess {
        /// The container.
        id: String,
        /// The process.
        exec: String,
    },
    /// It has ended.
    #[error("process already finished")]
    Finished,
    /// The id is taken.
    #[error("'{0}' exists already")]
    Exists(String),
    /// Not legal now.
    #[error("cannot {action} container '{id}': it is {status}")]
    WrongState {
        /// What was asked.
        action: &'static str,
        /// Of which container.
        id: String,
        /// What it is.
        status: &'static str,
    },
    /// The spec cannot be carried out.
    #[error(transparent)]
    Spec(#[from] spec::Error),
    /// A file of JSON that is none.
    #[error("'{path}' is not what it should be")]
    Json {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: serde_json::Error,
    },
    /// A file could not be worked with.
    #[error("cannot {action} '{path}'")]
    File {
        /// What was to be done.
        action: &'static str,
        /// To what.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The kernel refused something else.
    #[error("cannot {action}")]
    System {
        /// What was to be done.
        action: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The control group did not take the limits.
    #[error("cannot set the limits of the control group")]
    Limits(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The container, or the process in it, could not be made.
    #[error("{}", .0.message)]
    Failed(Failure),
    /// It takes too long.
    #[error("{0} did not happen in time")]
    Late(&'static str),
}

impl Error {
    /// For `map_err` on what is done to a file.
    pub fn file(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::File { action, path, source }
    }

    /// For `map_err` on any other system call.
    pub fn system<E: Into<io::Error>>(action: &'static str) -> impl FnOnce(E) -> Self {
        move |source| Self::System { action, source: source.into() }
    }

    /// The exit code of a command: see `cube-oci --help`.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::BadId(_) | Self::BadSignal(_) | Self::Spec(_) | Self::Json { .. } => 2,
            Self::NoContainer(_) | Self::NoProcess { .. } | Self::Finished => 3,
            Self::Exists(_) | Self::WrongState { .. } => 4,
            Self::Failed(failure) => failure.exit_code(),
            _ => 1,
        }
    }

    /// The same, as what `state` tells of a container or process that did not come to be.
    pub fn into_failure(self) -> Failure {
        match self {
            Self::Failed(failure) => failure,
            Self::BadId(_) | Self::Spec(_) | Self::Json { .. } | Self::Exists(_) => {
                Failure { kind: Kind::Invalid, message: chain(&self) }
            }
            other => Failure { kind: Kind::System, message: chain(&other) },
        }
    }
}

/// An error with its causes, in one line.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let said = error.to_string();
        // Some errors quote their cause.
        if !text.ends_with(&said) {
            text.push_str(": ");
            text.push_str(&said);
        }
        cause = error.source();
    }
    text.replace('\n', " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causes_are_told_in_one_line_and_once() {
        let cause = io::Error::from_raw_os_error(libc::ENOENT);
        let error = Error::file("read", Path::new("/x"))(cause);
        assert_eq!(chain(&error), "cannot read '/x': No such file or directory (os error 2)");
        let quoted = Error::Failed(Failure { kind: Kind::System, message: "a\nb".into() });
        assert_eq!(chain(&quoted), "a b");
    }

    #[test]
    fn exit_codes_are_those_of_shells_for_programs_and_small_ones_for_commands() {
        let failure = |kind| Failure { kind, message: String::new() };
        assert_eq!(failure(Kind::NotFound).exit_code(), 127);
        assert_eq!(failure(Kind::NotExecutable).exit_code(), 126);
        assert_eq!(Error::Failed(failure(Kind::Invalid)).exit_code(), 125);
        assert_eq!(Error::NoContainer("x".into()).exit_code(), 3);
        assert_eq!(Error::Exists("x".into()).exit_code(), 4);
    }
}
