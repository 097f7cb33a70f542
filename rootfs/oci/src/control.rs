//! The commands about a container that exists.

use crate::cgroup::Cgroup;
use crate::error::Error;
use crate::guest::Guest;
use crate::keeper::{open_pidfd, signal_pidfd};
use crate::record::{Created, Exit, Id, ProcessName, Record, read_json, wait_for};
use crate::spec;
use crate::state::{self, Status};
use libcgroups::common::{CgroupManager, ControllerOpt};
use libcgroups::v2::manager::Manager;
use libcontainer::notify_socket::NotifySocket;
use libcontainer::oci_spec::runtime::LinuxResources;
use nix::sys::signal::Signal;
use serde::Serialize;
use serde_json::Value;
use std::path::Path;
use std::time::Duration;

/// How long a program may take from its start to its execution, and a keeper to conclude.
const PATIENCE: Duration = Duration::from_secs(30);

fn wrong(action: &'static str, id: &Id, status: Status) -> Error {
    Error::WrongState { action, id: id.as_str().to_owned(), status: status.name() }
}

/// Lets the program of a created container run, and waits until it does.
///
/// # Errors
/// [`Error::WrongState`] if it is anything else, [`Error::Failed`] if it cannot be executed.
pub fn start(id: &Id) -> Result<(), Error> {
    let record = Record::of_container(id);
    let status = state::look(id, None)?.status;
    if status != Status::Created {
        return Err(wrong("start", id, status));
    }
    if !record.mark("starting")? {
        return Err(wrong("start", id, Status::Running));
    }
    let socket = record.path("runtime").join(id.as_str()).join("notify.sock");
    // It fails if the container has been killed meanwhile, which its end tells.
    let notified = NotifySocket::new(socket).notify_container_start();
    let begun = || match record.read::<Exit>("exit.json") {
        Ok(None) if record.has("running") => Some(Ok(None)),
        Ok(None) if record.is_orphaned() => Some(Ok(None)),
        Ok(None) => None,
        other => Some(other),
    };
    let exit = wait_for(PATIENCE, begun).ok_or(Error::Late("the start of the program"))??;
    match exit {
        Some(Exit { error: Some(failure), .. }) => Err(Error::Failed(failure)),
        Some(_) => Ok(()),
        None => notified.map_err(|error| {
            Error::Failed(crate::error::Failure {
                kind: crate::error::Kind::System,
                message: crate::error::chain(&error),
            })
        }),
    }
}

/// To whom a signal goes.
pub enum Target<'a> {
    /// The container's first process.
    First,
    /// All of its processes.
    All,
    /// A process that was added.
    Process(&'a Id),
}

/// A signal by its number, or by its name with or without `SIG`; 0 is none, and only asks.
///
/// # Errors
/// [`Error::BadSignal`].
pub fn parse_signal(text: &str) -> Result<i32, Error> {
    /// The highest real-time signal.
    const MAX: i32 = 64;

    let upper = text.to_ascii_uppercase();
    let full = if upper.starts_with("SIG") { upper } else { format!("SIG{upper}") };
    let named = || full.parse::<Signal>().ok().map(|signal| signal as i32);
    let number = text.parse().ok().or_else(named).filter(|number| (0..=MAX).contains(number));
    number.ok_or_else(|| Error::BadSignal(text.chars().take(32).collect()))
}

/// Sends a signal. A container that has not been started is killed by any that would end it: as
/// the first of its pid namespace it would not notice most.
///
/// # Errors
/// [`Error::Finished`] if there is nobody left to get it.
pub fn kill(id: &Id, target: &Target<'_>, signal: i32) -> Result<(), Error> {
    let exec = if let Target::Process(exec) = target { Some(*exec) } else { None };
    let state = state::look(id, exec)?;
    let ends = !matches!(signal, 0 | libc::SIGCHLD | libc::SIGCONT | libc::SIGURG | libc::SIGWINCH);
    let signal = if state.status == Status::Created && ends { libc::SIGKILL } else { signal };
    if let Target::All = target {
        return kill_all(id, signal);
    }
    let record = exec.map_or(Record::of_container(id), |exec| Record::of_process(id, exec));
    let created: Option<Created> = record.read("created.json")?;
    let created = created.filter(|_| state.status != Status::Stopped).ok_or(Error::Finished)?;
    send(created.process, signal)
}

fn send(process: ProcessName, signal: i32) -> Result<(), Error> {
    let sent = open_pidfd(process).and_then(|pidfd| signal_pidfd(&pidfd, signal));
    sent.map_err(|error| match error.raw_os_error() {
        Some(libc::ESRCH) => Error::Finished,
        _ => Error::system("send the signal")(error),
    })
}

fn kill_all(id: &Id, signal: i32) -> Result<(), Error> {
    let cgroup = Cgroup::of(id);
    let pids = cgroup.pids();
    if pids.is_empty() {
        return Err(Error::Finished);
    }
    if signal == libc::SIGKILL {
        return cgroup.kill();
    }
    for pid in pids {
        // Who is gone needs none.
        if let Ok(process) = ProcessName::of(pid) {
            let _ = send(process, signal);
        }
    }
    Ok(())
}

/// Stops all processes of a running container, or lets those of a paused one go on.
///
/// # Errors
/// [`Error::WrongState`].
pub fn freeze(id: &Id, frozen: bool) -> Result<(), Error> {
    let status = state::look(id, None)?.status;
    let (action, needed) =
        if frozen { ("pause", Status::Running) } else { ("resume", Status::Paused) };
    if status != needed {
        return Err(wrong(action, id, status));
    }
    Cgroup::of(id).freeze(frozen)
}

/// Removes all of a container that does not run; with `force` of any, also one that is not known.
///
/// # Errors
/// [`Error::WrongState`] if it runs, [`Error::NoContainer`]; never with `force`.
pub fn delete(id: &Id, force: bool) -> Result<(), Error> {
    let record = Record::of_container(id);
    let status = match state::look(id, None) {
        Ok(state) => state.status,
        Err(_) if force => Status::Stopped,
        Err(error) => return Err(error),
    };
    let runs = matches!(status, Status::Creating | Status::Running | Status::Paused);
    if runs && !force {
        return Err(wrong("delete", id, status));
    }
    if status == Status::Creating {
        // It would go on to make what is removed here.
        end_keeper(&record);
    }
    Cgroup::of(id).remove()?;
    let execs = record.processes();
    execs.iter().for_each(|exec| end_keeper(&Record::of_process(id, exec)));
    end_keeper(&record);
    // Of a process that was being added, and made its group anew.
    Cgroup::of(id).remove()?;
    record.remove()
}

/// Waits until a keeper has ended, whose process has, and ends it if it does not.
fn end_keeper(record: &Record) {
    /// It only writes a small file.
    const CONCLUDES_WITHIN: Duration = Duration::from_secs(2);

    let Ok(Some(keeper)) = record.read::<ProcessName>("keeper.json") else { return };
    let creating = !record.has("created.json") && !record.has("exit.json");
    let gone = || (!keeper.is_alive()).then_some(());
    let limit = if creating { Duration::ZERO } else { CONCLUDES_WITHIN };
    if wait_for(limit, gone).is_none() {
        let _ = send(keeper, libc::SIGKILL);
        let _ = wait_for(CONCLUDES_WITHIN, gone);
    }
}

/// Forgets a process that was added and has ended.
///
/// # Errors
/// [`Error::WrongState`] if it has not.
pub fn delete_process(id: &Id, exec: &Id) -> Result<(), Error> {
    let status = state::look(id, Some(exec))?.status;
    if status != Status::Stopped {
        return Err(wrong("delete a process of", id, status));
    }
    let record = Record::of_process(id, exec);
    end_keeper(&record);
    record.remove()
}

/// A process, in the answer of `ps`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Listed {
    /// As the guest's PID 1 sees it.
    pub pid: i32,
    /// If it is the first of those that were added under this name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exec_id: Option<String>,
}

/// All processes of a container.
///
/// # Errors
/// [`Error::NoContainer`].
pub fn list(id: &Id) -> Result<Vec<Listed>, Error> {
    state::look(id, None)?;
    let record = Record::of_container(id);
    let added: Vec<(i32, String)> = record
        .processes()
        .into_iter()
        .filter_map(|exec| {
            let created: Created = Record::of_process(id, &exec).read("created.json").ok()??;
            let alive = created.process.is_alive();
            alive.then(|| (created.process.pid, exec.as_str().to_owned()))
        })
        .collect();
    let listed = |pid: i32| {
        let exec_id = added.iter().find(|(other, _)| *other == pid).map(|(_, exec)| exec.clone());
        Listed { pid, exec_id }
    };
    let mut pids = Cgroup::of(id).pids();
    pids.sort_unstable();
    Ok(pids.into_iter().map(listed).collect())
}

/// Sets other limits; those that `file`, OCI resources, does not name stay. Gives warnings.
///
/// # Errors
/// [`Error::WrongState`] if the container has ended, [`Error::Limits`] if the kernel refuses.
pub fn update(id: &Id, file: &Path) -> Result<Vec<String>, Error> {
    let status = state::look(id, None)?.status;
    if matches!(status, Status::Creating | Status::Stopped) {
        return Err(wrong("update", id, status));
    }
    let resources: Option<Value> = read_json(file)?;
    let mut resources = resources.ok_or_else(|| {
        Error::file("read", file)(std::io::Error::from_raw_os_error(libc::ENOENT))
    })?;
    let mut warnings = Vec::new();
    let object = resources.as_object_mut().ok_or(spec::Error::Missing("resources"))?;
    spec::adapt_resources(object, &Guest::look(&Value::Null), &mut warnings);
    let resources: LinuxResources =
        serde_json::from_value(resources).map_err(spec::Error::Malformed)?;
    let limits = ControllerOpt {
        resources: &resources,
        freezer_state: None,
        oom_score_adj: None,
        disable_oom_killer: false,
    };
    let manager = Manager::new("/sys/fs/cgroup".into(), Path::new("cube").join(id.as_str()));
    let applied = manager.and_then(|manager| manager.apply(&limits));
    applied.map_err(|error| Error::Limits(error.into()))?;
    Ok(warnings)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_are_numbers_or_names() {
        for (text, number) in [("9", 9), ("KILL", 9), ("sigterm", 15), ("SIGUSR1", 10), ("64", 64)]
        {
            assert_eq!(parse_signal(text).unwrap(), number, "{text}");
        }
        for bad in ["", "65", "-1", "SIGNOSUCH", "9x"] {
            assert!(matches!(parse_signal(bad), Err(Error::BadSignal(_))), "{bad}");
        }
    }

    #[test]
    fn a_container_that_nobody_knows_can_only_be_deleted_by_force() {
        let id = Id::new("nobody-knows-it").unwrap();
        assert!(matches!(delete(&id, false), Err(Error::NoContainer(_))));
        delete(&id, true).unwrap();
        delete(&id, true).unwrap();
    }
}
