//! `exec`: adds a process to a container, and keeps it.

use crate::cgroup::Cgroup;
use crate::create::{capture_log, conclude, console, failed, last_steps};
use crate::error::{Error, Failure, Kind, chain};
use crate::executor::LastSteps;
use crate::guest::Guest;
use crate::keeper::{Keeper, Report};
use crate::record::{Created, Id, ProcessName, Record, read_json};
use crate::spec::{self, Last};
use crate::state::{self, Status};
use crate::terminal::ConsoleSocket;
use libcontainer::container::builder::ContainerBuilder;
use libcontainer::syscall::syscall::SyscallType;
use serde_json::{Value, json};
use std::fs;
use std::path::PathBuf;

/// What to add.
pub struct Request {
    /// To which container.
    pub id: Id,
    /// Its name there.
    pub exec: Id,
    /// The file with the process, as in the OCI spec.
    pub process: PathBuf,
}

/// Starts the process and keeps it to its end; gives the exit code.
pub fn run(request: &Request) -> u8 {
    let record = Record::of_process(&request.id, &request.exec);
    if let Err(error) = prepare(request, &record) {
        // There is no record to tell it by.
        eprintln!("cube-oci: {}", chain(&error));
        return Failure { kind: Kind::Invalid, message: String::new() }.exit_code();
    }
    let ended =
        start(request, &record).and_then(|keeper| keeper.keep(|| drop(record.mark("running"))));
    conclude(&record, ended, Cgroup::of(&request.id).oom_kills())
}

/// Makes the record. An id may be used again when its process has ended.
fn prepare(request: &Request, record: &Record) -> Result<(), Error> {
    let status = state::look(&request.id, None)?.status;
    if status != Status::Running {
        let id = request.id.as_str().to_owned();
        return Err(Error::WrongState { action: "exec in", id, status: status.name() });
    }
    if record.exists() && (record.has("exit.json") || record.is_orphaned()) {
        record.remove()?;
    }
    record.create(request.exec.as_str())
}

fn start(request: &Request, record: &Record) -> Result<Keeper, Error> {
    let container = Record::of_container(&request.id);
    let process: Option<Value> = read_json(&request.process)?;
    let mut process = process.ok_or_else(|| {
        Error::file("read", &request.process)(std::io::Error::from_raw_os_error(libc::ENOENT))
    })?;
    let guest = Guest::look(&Value::Null);
    let mut warnings = Vec::new();
    let object = process.as_object_mut().ok_or(spec::Error::Missing("process"))?;
    let mut last = spec::adapt_process(object, &guest, &mut warnings)?;
    // Who is added is bound by the same filter, and has at most the capabilities that it names.
    let first = container.read::<Last>("last.json")?.unwrap_or_default();
    last.seccomp = first.seccomp;
    last.capabilities = last.capabilities.or(first.capabilities);
    record.write("process.json", &process)?;
    copy_runtime(&container, record, &request.id)?;
    let mut report = Report::new()?;
    let steps = last_steps(&last, &report)?;
    let console = console(&last)?;
    capture_log(record)?;
    let pid = build(request, record, steps, console.as_ref());
    report.inherited();
    let pid = pid.map_err(|error| failed(&error, &mut report, record))?;
    let process = ProcessName::of(pid).map_err(Error::system("look at the process"))?;
    let terminal = console.map(ConsoleSocket::take_master).transpose()?;
    let keeper = Keeper::new(process, report, terminal)?;
    record.write("created.json", &Created { process, private_pids: false, warnings })?;
    Ok(keeper)
}

/// A copy of libcontainer's record of the container, for this process alone: it leaves sockets in
/// its folder, and must find the container running.
fn copy_runtime(container: &Record, record: &Record, id: &Id) -> Result<(), Error> {
    let from = container.path("runtime").join(id.as_str()).join("state.json");
    let state: Option<Value> = read_json(&from)?;
    let mut state = state.ok_or_else(|| Error::NoContainer(id.as_str().to_owned()))?;
    state["status"] = json!("running");
    let to = record.path("runtime").join(id.as_str());
    fs::create_dir_all(&to).map_err(Error::file("make", &to))?;
    let to = to.join("state.json");
    fs::write(&to, state.to_string()).map_err(Error::file("write", &to))
}

fn build(
    request: &Request,
    record: &Record,
    steps: LastSteps,
    console: Option<&ConsoleSocket>,
) -> Result<i32, libcontainer::error::LibcontainerError> {
    let id = request.id.as_str().to_owned();
    let pid = ContainerBuilder::new(id, SyscallType::default())
        .with_root_path(record.path("runtime"))?
        .with_executor(steps)
        .with_console_socket(console.map(ConsoleSocket::path))
        .as_tenant()
        .with_detach(true)
        .with_process(Some(record.path("process.json")))
        .build()?;
    Ok(pid.as_raw())
}
