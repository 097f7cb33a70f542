//! What a call is refused with, and the only place that knows which code of ttrpc that is.
//!
//! containerd decides by the code: `NotFound` means that the thing is gone and its own records can
//! go too, anything that it does not know makes it try again for ever. So nothing here is ever
//! `Unknown`.

use std::io;

use containerd_shim_protos::ttrpc::{self, Code};

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no such container, process, or there is no longer.
    #[error("{0}: not found")]
    NotFound(String),
    /// The name is taken.
    #[error("{0} already exists")]
    Exists(String),
    /// The request, or a file that it names, is wrong.
    #[error("{0}")]
    Invalid(String),
    /// Not in this state.
    #[error("{0}")]
    State(String),
    /// The guest, or the VM around it, does not answer.
    #[error("{0}")]
    Unavailable(String),
    /// The program could not be run; containerd's clients look for these words.
    #[error("{0}")]
    Program(String),
    /// The host's kernel refused.
    #[error("cannot {action}: {source}")]
    Io {
        /// What was tried.
        action: String,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
}

/// The result of most things here.
pub type Result<T> = std::result::Result<T, Error>;

/// Says what failed: `.map_err(io("mount X on Y"))`.
pub fn io<E: Into<io::Error>>(action: impl Into<String>) -> impl FnOnce(E) -> Error {
    let action = action.into();
    move |source| Error::Io { action, source: source.into() }
}

impl Error {
    fn code(&self) -> Code {
        match self {
            Self::NotFound(_) => Code::NOT_FOUND,
            Self::Exists(_) => Code::ALREADY_EXISTS,
            Self::Invalid(_) => Code::INVALID_ARGUMENT,
            Self::State(_) | Self::Program(_) => Code::FAILED_PRECONDITION,
            Self::Unavailable(_) => Code::UNAVAILABLE,
            Self::Io { .. } => Code::INTERNAL,
        }
    }
}

impl From<Error> for ttrpc::Error {
    fn from(error: Error) -> Self {
        ttrpc::Error::RpcStatus(ttrpc::get_status(error.code(), error.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(error: Error) -> i32 {
        let ttrpc::Error::RpcStatus(status) = error.into() else { return -1 };
        status.code.value()
    }

    #[test]
    fn what_is_gone_is_not_found_and_nothing_is_unknown() {
        assert_eq!(code(Error::NotFound("task x".to_owned())), Code::NOT_FOUND as i32);
        assert_eq!(code(Error::State("paused".to_owned())), Code::FAILED_PRECONDITION as i32);
        let io: Error = io("mount x")(io::Error::from_raw_os_error(28));
        assert_eq!(io.to_string(), "cannot mount x: No space left on device (os error 28)");
        assert_eq!(code(io), Code::INTERNAL as i32);
    }
}
