//! How containerd and a shim greet each other: what `start` is told on its command line, in the
//! environment and on standard input, and the form of its one answer.
//!
//! | containerd | tells | expects |
//! |---|---|---|
//! | 1.6, 1.7 | flags, `TTRPC_ADDRESS`, runtime options as an `Any` | the bare address |
//! | 2.0 to 2.2 | the same | the bare address, or JSON |
//! | 2.3 and later | `BootstrapParams` | `BootstrapResult` |
//!
//! The older ones get the bare address, which says that the Task service of version 2 is spoken:
//! all of them understand it, and clean up after a shim that has crashed container by container.
//! With the JSON form, 2.0 to 2.2 only clean up after the sandbox and leave its containers
//! "running".

use std::io::{IsTerminal, Read};

use containerd_shim::Flags;
use containerd_shim::bootstrap::{BootstrapParams, BootstrapResult};
use containerd_shim_protos::TASK_API_VERSION;
use containerd_shim_protos::protobuf::Message;

use crate::error::{Error, Result, io};

/// Longest input in bytes that is read; containerd's own limit.
const MAX_INPUT: u64 = 10 << 20;

/// What `start` was told.
#[derive(Clone, Debug, PartialEq)]
pub struct Start {
    /// The containerd namespace.
    pub namespace: String,
    /// The container that is about to be created, or the sandbox.
    pub id: String,
    /// containerd's own socket, part of the name of the shim's.
    pub address: String,
    /// Where events go.
    pub ttrpc_address: String,
    /// Where the shim's socket shall be, if containerd cares.
    pub socket_dir: Option<String>,
    /// More words in the log.
    pub debug: bool,
    /// The form of the answer.
    pub form: Form,
}

/// The form of the answer to `start`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// The address and nothing else.
    Bare,
    /// A `BootstrapResult`.
    Protobuf,
}

/// Reads what containerd piped in. Nothing if a person started us at a terminal.
pub fn input() -> Result<Vec<u8>> {
    let stdin = std::io::stdin();
    let mut input = Vec::new();
    if !stdin.is_terminal() {
        let mut limited = stdin.lock().take(MAX_INPUT);
        limited.read_to_end(&mut input).map_err(io("read standard input"))?;
    }
    Ok(input)
}

impl Start {
    /// Puts together what was told in whichever way. `environment` looks a variable up.
    pub fn new(
        flags: &Flags,
        input: &[u8],
        environment: impl Fn(&str) -> Option<String>,
    ) -> Result<Self> {
        let params = BootstrapParams::parse_from_bytes(input).ok();
        // The older input, an `Any`, can be read as one too, with a type's name for an id.
        let params = params
            .filter(|params| params.instance_id == flags.id && params.namespace == flags.namespace);
        let start = match params {
            Some(params) => Self {
                namespace: params.namespace,
                id: params.instance_id,
                address: params.containerd_grpc_address,
                ttrpc_address: params.containerd_ttrpc_address,
                socket_dir: params.socket_dir.filter(|dir| !dir.is_empty()),
                debug: flags.debug,
                form: Form::Protobuf,
            },
            None => Self {
                namespace: flags.namespace.clone(),
                id: flags.id.clone(),
                address: match flags.address.as_str() {
                    "" => environment("GRPC_ADDRESS").unwrap_or_default(),
                    address => address.to_owned(),
                },
                ttrpc_address: environment("TTRPC_ADDRESS").unwrap_or_default(),
                socket_dir: None,
                debug: flags.debug,
                form: Form::Bare,
            },
        };
        start.check()
    }

    fn check(self) -> Result<Self> {
        check_name("namespace", &self.namespace)?;
        check_name("id", &self.id)?;
        if self.ttrpc_address.is_empty() {
            let message = "containerd did not say where events go: TTRPC_ADDRESS is not set; \
                           this program is started by containerd";
            return Err(Error::Invalid(message.to_owned()));
        }
        Ok(self)
    }

    /// The bytes that containerd reads from standard output.
    pub fn answer(&self, address: &str) -> Result<Vec<u8>> {
        match self.form {
            Form::Bare => Ok(address.as_bytes().to_vec()),
            Form::Protobuf => {
                let result = BootstrapResult {
                    version: TASK_API_VERSION,
                    address: address.to_owned(),
                    protocol: "ttrpc".to_owned(),
                    ..Default::default()
                };
                result.write_to_bytes().map_err(|error| Error::Invalid(error.to_string()))
            }
        }
    }
}

/// Names become parts of paths: containerd allows letters, digits, and `_.-` between them.
pub fn check_name(what: &str, name: &str) -> Result<()> {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-');
    let first = name.chars().next().is_some_and(|c| c.is_ascii_alphanumeric());
    if first && name.len() <= 255 && name.chars().all(plain) {
        return Ok(());
    }
    Err(Error::Invalid(format!(
        "{what} {name:?} is not a name: expected letters, digits, '_', '.' and '-', beginning with \
         a letter or digit"
    )))
}

#[cfg(test)]
mod tests {
    use containerd_shim_protos::protobuf::well_known_types::any::Any;

    use super::*;

    fn flags() -> Flags {
        Flags {
            id: "web".to_owned(),
            namespace: "default".to_owned(),
            address: "/run/containerd/containerd.sock".to_owned(),
            ..Default::default()
        }
    }

    fn environment(name: &str) -> Option<String> {
        (name == "TTRPC_ADDRESS").then(|| "/run/containerd/containerd.sock.ttrpc".to_owned())
    }

    #[test]
    fn an_older_containerd_gets_the_bare_address() {
        let options = Any { type_url: "some.Options".to_owned(), ..Default::default() };
        let start = Start::new(&flags(), &options.write_to_bytes().unwrap(), environment).unwrap();
        assert_eq!(start.ttrpc_address, "/run/containerd/containerd.sock.ttrpc");
        assert_eq!(start.answer("unix:///s").unwrap(), b"unix:///s");
    }

    #[test]
    fn a_newer_containerd_gets_protobuf() {
        let params = BootstrapParams {
            instance_id: "web".to_owned(),
            namespace: "default".to_owned(),
            containerd_ttrpc_address: "/c.ttrpc".to_owned(),
            socket_dir: Some("/run/x".to_owned()),
            ..Default::default()
        };
        let start = Start::new(&flags(), &params.write_to_bytes().unwrap(), |_| None).unwrap();
        let answer = BootstrapResult::parse_from_bytes(&start.answer("unix:///s").unwrap());
        assert_eq!(answer.unwrap().address, "unix:///s");
        assert_eq!(start.socket_dir.as_deref(), Some("/run/x"));
    }

    #[test]
    fn a_name_that_is_a_path_is_refused() {
        let bad = Flags { id: "../../etc".to_owned(), ..flags() };
        let error = Start::new(&bad, b"", environment).unwrap_err().to_string();
        assert!(error.starts_with("id \"../../etc\" is not a name"), "{error}");
    }

    #[test]
    fn without_containerd_the_cause_is_told() {
        let error = Start::new(&flags(), b"", |_| None).unwrap_err().to_string();
        assert!(error.contains("TTRPC_ADDRESS is not set"), "{error}");
    }
}
