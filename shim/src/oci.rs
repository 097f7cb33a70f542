//! `cube-oci` in the guest: what it is called with, and what it answers.

use std::time::Duration;

use guest_protocol::ExitStatus;
use serde::Deserialize;
use serde_json::Value;

use crate::error::{Error, Result};
use crate::guest::{Guest, Output};
use crate::place::GUEST_SHARE;

/// Where the program is in the guest.
const PROGRAM: &str = "/bin/cube-oci";
/// How long a call may take that does one thing.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long a container may take to be made, in seconds.
const CREATE: u64 = 30;

/// What `cube-oci start` exits with if the program cannot be executed, as a shell does.
const NOT_EXECUTABLE: u8 = 126;
/// The same if there is none.
const NO_PROGRAM: u8 = 127;

/// What the guest tells of a container.
#[derive(Clone, Debug, Deserialize)]
pub struct State {
    /// `created`, `running`, …
    pub status: String,
    /// The guest's number of its first process; 0 if there is none.
    #[serde(default)]
    pub pid: i32,
    /// The kernel has killed one of its processes for want of memory.
    #[serde(default)]
    pub oom_killed: bool,
    /// Why it could not be made.
    pub error: Option<Failure>,
}

/// Why a container could not be made.
#[derive(Clone, Debug, Deserialize)]
pub struct Failure {
    /// For programs.
    pub kind: String,
    /// For people.
    pub message: String,
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        match failure.kind.as_str() {
            "not_found" | "not_executable" => Error::Program(failure.message),
            "invalid" => Error::Invalid(failure.message),
            _ => Error::State(failure.message),
        }
    }
}

/// The keeper of a container.
pub fn create(id: &str) -> Vec<String> {
    call(["create", "--bundle", &format!("{GUEST_SHARE}/{id}"), id])
}

/// The keeper of a further process, whose spec is in the share.
pub fn exec(id: &str, exec: &str) -> Vec<String> {
    call(["exec", "--process", &format!("{GUEST_SHARE}/{id}/{}", exec_file(exec)), id, exec])
}

/// The name of the file with the spec of a further process, in its container's folder.
pub fn exec_file(exec: &str) -> String {
    format!("exec-{exec}.json")
}

fn call<'a>(words: impl IntoIterator<Item = &'a str>) -> Vec<String> {
    std::iter::once(PROGRAM).chain(words).map(str::to_owned).collect()
}

/// Runs one of the commands that end at once.
async fn run<'a>(guest: &Guest, words: impl IntoIterator<Item = &'a str>) -> Result<Vec<u8>> {
    let patience = PATIENCE + Duration::from_secs(CREATE);
    let Output { status, stdout, stderr } = guest.run(call(words), patience).await?;
    let said = String::from_utf8_lossy(&stderr);
    let message = said.trim().trim_start_matches("cube-oci: ").to_owned();
    match status {
        ExitStatus::Code(0) => Ok(stdout),
        ExitStatus::Code(2) => Err(Error::Invalid(message)),
        ExitStatus::Code(3) => Err(Error::NotFound(message)),
        ExitStatus::Code(NOT_EXECUTABLE | NO_PROGRAM) => Err(Error::Program(message)),
        _ => Err(Error::State(message)),
    }
}

/// Waits until a container is made, or a further process of it runs. An error tells why not.
pub async fn created(guest: &Guest, id: &str, exec: &str) -> Result<State> {
    let patience = CREATE.to_string();
    let mut words = vec!["state", "--wait-created", &patience];
    if !exec.is_empty() {
        words.extend(["--exec", exec]);
    }
    words.push(id);
    let state: State = parse(&run(guest, words).await?)?;
    match state.error {
        Some(failure) => Err(failure.into()),
        None => Ok(state),
    }
}

/// How a container is.
pub async fn state(guest: &Guest, id: &str) -> Result<State> {
    parse(&run(guest, ["state", id]).await?)
}

fn parse<T: for<'de> Deserialize<'de>>(bytes: &[u8]) -> Result<T> {
    serde_json::from_slice(bytes)
        .map_err(|error| Error::Unavailable(format!("cube-oci in the guest answered: {error}")))
}

/// Lets a container's first process run.
pub async fn start(guest: &Guest, id: &str) -> Result<()> {
    run(guest, ["start", id]).await.map(drop)
}

/// Sends a signal to one process of a container, or to all.
pub async fn kill(guest: &Guest, id: &str, exec: &str, signal: u32, all: bool) -> Result<()> {
    let signal = signal.to_string();
    let words = match (exec, all) {
        ("", false) => vec!["kill", id, &signal],
        ("", true) => vec!["kill", "--all", id, &signal],
        (exec, _) => vec!["kill", "--exec", exec, id, &signal],
    };
    run(guest, words).await.map(drop)
}

/// Takes away all that the guest has of a container, its processes too.
pub async fn delete(guest: &Guest, id: &str) -> Result<()> {
    match run(guest, ["delete", "--force", id]).await {
        Err(Error::NotFound(_)) => Ok(()),
        done => done.map(drop),
    }
}

/// Forgets a further process, so that its name can be used again without being taken for it.
pub async fn forget(guest: &Guest, id: &str, exec: &str) -> Result<()> {
    match run(guest, ["delete", "--exec", exec, id]).await {
        Err(Error::NotFound(_)) => Ok(()),
        done => done.map(drop),
    }
}

/// Freezes a container's processes.
pub async fn pause(guest: &Guest, id: &str) -> Result<()> {
    run(guest, ["pause", id]).await.map(drop)
}

/// Lets them go on.
pub async fn resume(guest: &Guest, id: &str) -> Result<()> {
    run(guest, ["resume", id]).await.map(drop)
}

/// Changes its limits; they are in this file of its folder in the share.
pub async fn update(guest: &Guest, id: &str, file: &str) -> Result<()> {
    let path = format!("{GUEST_SHARE}/{id}/{file}");
    run(guest, ["update", "--resources", &path, id]).await.map(drop)
}

/// What it uses.
pub async fn stats(guest: &Guest, id: &str) -> Result<Value> {
    parse(&run(guest, ["stats", id]).await?)
}
