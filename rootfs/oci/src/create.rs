//! `create`: makes a container, and keeps its first process.

use crate::cgroup::Cgroup;
use crate::device_filter;
use crate::error::{Error, Failure, Kind, chain};
use crate::executor::LastSteps;
use crate::guest::Guest;
use crate::keeper::{Ended, Keeper, Report};
use crate::record::{Created, Exit, Id, ProcessName, Record, read_json};
use crate::seccomp::Profile;
use crate::spec::{self, Adapted, Last, Place, Sandbox};
use crate::terminal::{self, ConsoleSocket};
use libcontainer::container::builder::ContainerBuilder;
use libcontainer::oci_spec::runtime::Spec;
use libcontainer::syscall::syscall::SyscallType;
use serde_json::Value;
use std::fs;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// The annotation by which CRI implementations name a container's sandbox.
const SANDBOX: &str = "io.kubernetes.cri.sandbox-id";

/// What to make.
pub struct Request {
    /// Its name.
    pub id: Id,
    /// The folder with `config.json`.
    pub bundle: PathBuf,
    /// Whose namespaces it shares where the spec says so; by default the annotation's.
    pub sandbox: Option<Id>,
}

/// Makes the container and keeps it to its end; gives the exit code.
pub fn run(request: &Request) -> u8 {
    let record = Record::of_container(&request.id);
    if let Err(error) = record.create(request.id.as_str()) {
        // There is no record to tell it by.
        eprintln!("cube-oci: {}", chain(&error));
        return Failure { kind: Kind::Invalid, message: String::new() }.exit_code();
    }
    let cgroup = Cgroup::of(&request.id);
    let ended = make(request, &record).and_then(|(made, keeper)| {
        let running = || drop(record.mark("running"));
        let ended = keeper.keep(running)?;
        // In a pid namespace of its own the kernel has killed the others.
        if !made.private_pids {
            cgroup.kill()?;
        }
        Ok(ended)
    });
    conclude(&record, ended, cgroup.oom_kills())
}

/// Writes down how it ended, and gives the exit code.
pub fn conclude(record: &Record, ended: Result<Ended, Error>, oom_kills: u64) -> u8 {
    let ended = ended.unwrap_or_else(|error| {
        let failure = error.into_failure();
        Ended { status: failure.exit_code(), failure: Some(failure) }
    });
    let exit = Exit { status: ended.status, oom_kills, error: ended.failure };
    if let Err(error) = record.write("exit.json", &exit) {
        // Gone with the container, most likely.
        eprintln!("cube-oci: {}", chain(&error));
    }
    exit.status
}

fn make(request: &Request, record: &Record) -> Result<(Created, Keeper), Error> {
    let bundle = fs::canonicalize(&request.bundle);
    let bundle = bundle.map_err(Error::file("find", &request.bundle))?;
    let config = bundle.join("config.json");
    let spec: Value = read_json(&config)?.ok_or_else(|| {
        Error::file("read", &config)(std::io::Error::from_raw_os_error(libc::ENOENT))
    })?;
    let guest = Guest::look(&spec);
    let sandbox = find_sandbox(request, &spec);
    let place = Place { id: request.id.as_str(), bundle: &bundle };
    let adapted = spec::adapt(spec, place, &guest, sandbox)?;
    let parsed: Spec =
        serde_json::from_value(adapted.spec.clone()).map_err(spec::Error::Malformed)?;
    record.write("config.json", &adapted.spec)?;
    record.write("last.json", &adapted.last)?;
    set_sysctls(&adapted.sysctls)?;
    make_working_folder(&parsed);
    let mut report = Report::new()?;
    let steps = last_steps(&adapted.last, &report)?;
    let console = console(&adapted.last)?;
    capture_log(record)?;
    let pid = build(request, record, steps, console.as_ref());
    report.inherited();
    let pid = pid.map_err(|error| failed(&error, &mut report, record))?;
    finish(request, record, adapted, report, console, pid)
}

/// From a container that waits in libcontainer's hands to one that is kept.
fn finish(
    request: &Request,
    record: &Record,
    adapted: Adapted,
    report: Report,
    console: Option<ConsoleSocket>,
    pid: i32,
) -> Result<(Created, Keeper), Error> {
    let process = ProcessName::of(pid).map_err(Error::system("look at the process"))?;
    let terminal: Option<OwnedFd> = console.map(ConsoleSocket::take_master).transpose()?;
    // What uses a device has not run yet.
    device_filter::attach(&adapted.devices, Cgroup::of(&request.id).path())?;
    let keeper = Keeper::new(process, report, terminal)?;
    let created =
        Created { process, private_pids: adapted.private_pids, warnings: adapted.warnings };
    record.write("created.json", &created)?;
    Ok((created, keeper))
}

fn build(
    request: &Request,
    record: &Record,
    steps: LastSteps,
    console: Option<&ConsoleSocket>,
) -> Result<i32, libcontainer::error::LibcontainerError> {
    let id = request.id.as_str().to_owned();
    let container = ContainerBuilder::new(id, SyscallType::default())
        .with_root_path(record.path("runtime"))?
        .with_executor(steps)
        .with_console_socket(console.map(ConsoleSocket::path))
        .as_init(record.dir())
        .with_systemd(false)
        .with_detach(true)
        .with_no_pivot(root_is_first_mount())
        .build()?;
    Ok(container.pid().map_or(0, |pid| pid.as_raw()))
}

/// A container that is running, or waits to, under the name that is given, or annotated.
fn find_sandbox(request: &Request, spec: &Value) -> Option<Sandbox> {
    let annotated = spec["annotations"][SANDBOX].as_str().and_then(|id| Id::new(id).ok());
    let id = request.sandbox.clone().or(annotated).filter(|id| *id != request.id)?;
    let created: Created = Record::of_container(&id).read("created.json").ok()??;
    created.process.is_alive().then_some(Sandbox { pid: created.process.pid })
}

/// Whether `pivot_root` does not work: from the first mount of all, pivot_root(2).
fn root_is_first_mount() -> bool {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    mounts.lines().any(is_first_mount)
}

/// That one is its own parent, proc_pid_mountinfo(5).
fn is_first_mount(line: &str) -> bool {
    let mut words = line.split(' ');
    let (id, parent, at) = (words.next(), words.next(), words.nth(2));
    id == parent && at == Some("/")
}

fn set_sysctls(sysctls: &[(String, String)]) -> Result<(), Error> {
    for (name, value) in sysctls {
        let path = Path::new("/proc/sys").join(name.replace('.', "/"));
        // It comes from a spec: nothing but a parameter may be written.
        if name.contains("..") {
            return Err(spec::Error::Missing("such kernel parameter").into());
        }
        fs::write(&path, value).map_err(Error::file("set", &path))?;
    }
    Ok(())
}

/// Container engines expect a missing working directory to be made. If it cannot be, the
/// container's own attempt to enter it tells.
fn make_working_folder(spec: &Spec) {
    let (Some(root), Some(process)) = (spec.root(), spec.process()) else { return };
    if let Ok(root) = pathrs::Root::open(root.path()) {
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        let _ = root.mkdir_all(process.cwd(), &mode);
    }
}

/// The executor for what the spec leaves to it.
///
/// # Errors
/// [`Error::Spec`] if that cannot be carried out.
pub fn last_steps(last: &Last, report: &Report) -> Result<LastSteps, Error> {
    let sets = last.capabilities.clone().map(serde_json::from_value).transpose();
    Ok(LastSteps {
        report: report.executors_end(),
        capabilities: sets.map_err(spec::Error::Malformed)?,
        seccomp: last.seccomp.as_ref().map(Profile::compile).transpose()?,
        no_new_privileges: last.no_new_privileges,
        size: terminal::size().or(last.size).filter(|_| last.terminal),
    })
}

/// Where the terminal will come from, if there shall be one.
///
/// # Errors
/// [`Error::File`].
pub fn console(last: &Last) -> Result<Option<ConsoleSocket>, Error> {
    if !last.terminal {
        return Ok(None);
    }
    terminal::make_raw();
    ConsoleSocket::new().map(Some)
}

/// libcontainer tells the causes of its errors in its log only.
///
/// # Errors
/// [`Error::File`].
pub fn capture_log(record: &Record) -> Result<(), Error> {
    let path = record.path("log");
    let file = fs::File::create(&path).map_err(Error::file("make", &path))?;
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::ERROR)
        .with_ansi(false)
        .without_time()
        .with_target(false)
        .with_level(false)
        .with_writer(Mutex::new(file));
    // A second one in this process is refused, and not needed.
    let _ = subscriber.try_init();
    Ok(())
}

/// What libcontainer's error means: the executor's failure, or else its first complaint.
pub fn failed(
    error: &libcontainer::error::LibcontainerError,
    report: &mut Report,
    record: &Record,
) -> Error {
    if let Some(Some(failure)) = report.look() {
        return Error::Failed(failure);
    }
    let log = fs::read_to_string(record.path("log")).unwrap_or_default();
    let first = log.lines().map(str::trim).find(|line| !line.is_empty());
    let message = match first {
        Some(line) => format!("{}: {line}", chain(error)),
        None => chain(error),
    };
    Error::Failed(Failure { kind: Kind::System, message })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_mount_is_its_own_parent() {
        assert!(is_first_mount("1 1 0:2 / / rw - rootfs rootfs rw,size=241360k"));
        assert!(!is_first_mount("27 1 0:2 / / rw - rootfs rootfs rw,size=241360k"));
        assert!(!is_first_mount("28 27 0:22 / /proc rw,nosuid - proc proc rw"));
    }
}
