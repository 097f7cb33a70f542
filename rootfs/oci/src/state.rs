//! What a container, or a process in it, is.

use crate::cgroup::Cgroup;
use crate::error::{Error, Failure, Kind};
use crate::record::{Created, Exit, Id, Record, wait_for};
use serde::Serialize;
use std::time::Duration;

/// Where it is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// Its keeper works on it.
    Creating,
    /// It waits to be started.
    Created,
    /// Its program runs.
    Running,
    /// Its processes are stopped.
    Paused,
    /// It has ended, or never came to be.
    Stopped,
}

impl Status {
    /// As in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Creating => "creating",
            Self::Created => "created",
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Stopped => "stopped",
        }
    }
}

/// The answer of `state`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct State {
    /// The container's.
    pub id: String,
    /// Of a process that was added.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exec_id: Option<String>,
    /// Where it is in its life.
    pub status: Status,
    /// Its first process, as the guest's PID 1 sees it; 0 if there never was one.
    pub pid: i32,
    /// When it has ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exit_status: Option<u8>,
    /// Whether the kernel has killed one of its processes for want of memory.
    pub oom_killed: bool,
    /// How many.
    pub oom_kills: u64,
    /// Why it never ran.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<Failure>,
    /// What of its spec was not carried out.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

/// Looks at a container, or at a process in it.
///
/// # Errors
/// [`Error::NoContainer`], [`Error::NoProcess`], or that a record cannot be read.
pub fn look(id: &Id, exec: Option<&Id>) -> Result<State, Error> {
    let container = Record::of_container(id);
    if !container.exists() {
        return Err(Error::NoContainer(id.as_str().to_owned()));
    }
    let record = exec.map_or(container, |exec| Record::of_process(id, exec));
    if let Some(exec) = exec
        && !record.exists()
    {
        let (id, exec) = (id.as_str().to_owned(), exec.as_str().to_owned());
        return Err(Error::NoProcess { id, exec });
    }
    // Before the end is looked for: who ends after this was alive at this.
    let orphaned = record.is_orphaned();
    let mut exit: Option<Exit> = record.read("exit.json")?;
    let cgroup = Cgroup::of(id);
    if exit.is_none() && orphaned {
        let message = "the keeper died".to_owned();
        let error = Some(Failure { kind: Kind::System, message });
        exit = Some(Exit { status: 137, oom_kills: cgroup.oom_kills(), error });
    }
    let created: Option<Created> = record.read("created.json")?;
    let status = match (&exit, &created) {
        (Some(_), _) => Status::Stopped,
        (None, None) => Status::Creating,
        _ if !record.has("running") => Status::Created,
        _ if cgroup.is_frozen() => Status::Paused,
        _ => Status::Running,
    };
    let oom_kills = exit.as_ref().map_or_else(|| cgroup.oom_kills(), |exit| exit.oom_kills);
    Ok(State {
        id: id.as_str().to_owned(),
        exec_id: exec.map(|exec| exec.as_str().to_owned()),
        status,
        pid: created.as_ref().map_or(0, |created| created.process.pid),
        exit_status: exit.as_ref().map(|exit| exit.status),
        oom_killed: oom_kills > 0,
        oom_kills,
        error: exit.and_then(|exit| exit.error),
        warnings: created.map(|created| created.warnings).unwrap_or_default(),
    })
}

/// Looks until it has come to be, or failed to, at most so long. A process that was added counts
/// when its program runs, since nobody starts it.
///
/// # Errors
/// Those of [`look`].
pub fn wait_created(id: &Id, exec: Option<&Id>, limit: Duration) -> Result<State, Error> {
    let reached = || match look(id, exec) {
        Ok(state) if state.status == Status::Creating => None,
        Ok(state) if exec.is_some() && state.status == Status::Created => None,
        // Its keeper may not have begun.
        Err(Error::NoContainer(_) | Error::NoProcess { .. }) => None,
        other => Some(other),
    };
    wait_for(limit, reached).unwrap_or_else(|| look(id, exec))
}
