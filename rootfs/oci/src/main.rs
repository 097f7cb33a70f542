//! `cube-oci`: runs OCI containers in a CubeVMM guest. The host's shim calls it through the
//! guest's agent; see README.md for who does what.

mod cgroup;
mod control;
mod create;
mod device_filter;
mod error;
mod exec;
mod executor;
mod guest;
mod keeper;
mod own_file;
mod record;
mod seccomp;
mod spec;
mod state;
mod stats;
mod terminal;

use clap::{Args, Parser, Subcommand};
use control::Target;
use error::{Error, chain};
use record::Id;
use serde::Serialize;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

const EXIT_CODES: &str = "\
Exit codes of all but create and exec: 0 done, 1 the kernel refused, 2 bad words or a bad spec,
3 no such container or process (any more), 4 not now: the id is taken, or it runs, or it does not.
start: 127 and 126 as a shell, if the program cannot be executed after all.

create and exec stay until the process ends, and end as it did: its code, or 128 and the signal.
What never ran is told by state: the code is then 127 (no such program), 126 (not executable) or
125. One that ends with 125 and a line on standard error left no trace at all: the id was taken.";

/// Runs OCI containers in this guest.
#[derive(Parser)]
#[command(name = "cube-oci", version, after_help = EXIT_CODES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Make a container, then keep it: its standard streams are those of this process, which ends
    /// with its exit code.
    Create {
        /// Folder with config.json, and the root in rootfs/ unless config.json says otherwise.
        #[arg(long)]
        bundle: PathBuf,
        /// Container whose namespaces take the place of those of the host that config.json names.
        /// By default the one that the annotation io.kubernetes.cri.sandbox-id names.
        #[arg(long)]
        sandbox: Option<Id>,
        /// The name it shall have.
        id: Id,
    },
    /// Tell what a container is, as JSON: id, status (creating, created, running, paused,
    /// stopped), pid, `exit_status`, `oom_killed`, error (kind, message), warnings.
    State {
        /// Wait so many seconds at most until it has been created, or has failed to be.
        #[arg(long, value_name = "SECONDS", value_parser = seconds)]
        wait_created: Option<Duration>,
        /// Tell that of a process that was added; it counts as created when it runs.
        #[arg(long, value_name = "EXEC_ID")]
        exec: Option<Id>,
        /// The container.
        id: Id,
    },
    /// Let the program of a created container run.
    Start {
        /// The container.
        id: Id,
    },
    /// Add a process to a container, then keep it as create does.
    Exec {
        /// File with the process as JSON, as in the OCI spec.
        #[arg(long, value_name = "FILE")]
        process: PathBuf,
        /// The container.
        id: Id,
        /// The name it shall have.
        exec_id: Id,
    },
    /// Send a signal to the first process of a container.
    Kill(Kill),
    /// Stop all processes of a container.
    Pause {
        /// The container.
        id: Id,
    },
    /// Let all processes of a paused container go on.
    Resume {
        /// The container.
        id: Id,
    },
    /// Remove a container that does not run, and whatever is left of it.
    Delete {
        /// Kill it if it runs. Not to be there is no error.
        #[arg(long, conflicts_with = "exec")]
        force: bool,
        /// Only forget a process that was added, and has ended.
        #[arg(long, value_name = "EXEC_ID")]
        exec: Option<Id>,
        /// The container.
        id: Id,
    },
    /// List the processes of a container, as JSON: pid, `exec_id`.
    Ps {
        /// The container.
        id: Id,
    },
    /// Tell what a container has used, as JSON: memory, cpu, pids, io.
    Stats {
        /// The container.
        id: Id,
    },
    /// Set other limits; prints what was left out as JSON: warnings.
    Update {
        /// File with the limits as JSON, as `linux.resources` in the OCI spec.
        #[arg(long, value_name = "FILE")]
        resources: PathBuf,
        /// The container.
        id: Id,
    },
}

#[derive(Args)]
struct Kill {
    /// To all of its processes.
    #[arg(long, conflicts_with = "exec")]
    all: bool,
    /// To a process that was added.
    #[arg(long, value_name = "EXEC_ID")]
    exec: Option<Id>,
    /// The container.
    id: Id,
    /// A number or a name, such as 15, TERM or SIGTERM; 0 only asks whether it is there.
    signal: String,
}

/// What `update` prints.
#[derive(Serialize)]
struct Warnings {
    warnings: Vec<String>,
}

/// What `ps` prints.
#[derive(Serialize)]
struct Processes {
    processes: Vec<control::Listed>,
}

fn seconds(text: &str) -> Result<Duration, String> {
    let number: f64 = text.parse().map_err(|_| format!("'{text}' is no number of seconds"))?;
    Duration::try_from_secs_f64(number).map_err(|error| error.to_string())
}

fn main() -> ExitCode {
    match run(Cli::parse().command) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("cube-oci: {}", chain(&error));
            ExitCode::from(error.exit_code())
        }
    }
}

fn run(command: Command) -> Result<u8, Error> {
    match command {
        Command::Create { bundle, sandbox, id } => {
            own_file::protect()?;
            return Ok(create::run(&create::Request { id, bundle, sandbox }));
        }
        Command::Exec { process, id, exec_id } => {
            own_file::protect()?;
            return Ok(exec::run(&exec::Request { id, exec: exec_id, process }));
        }
        Command::State { wait_created: None, exec, id } => print(&state::look(&id, exec.as_ref())?),
        Command::State { wait_created: Some(limit), exec, id } => {
            print(&state::wait_created(&id, exec.as_ref(), limit)?)
        }
        Command::Start { id } => control::start(&id),
        Command::Kill(Kill { all, exec, id, signal }) => {
            let target = match &exec {
                Some(exec) => Target::Process(exec),
                None if all => Target::All,
                None => Target::First,
            };
            control::kill(&id, &target, control::parse_signal(&signal)?)
        }
        Command::Pause { id } => control::freeze(&id, true),
        Command::Resume { id } => control::freeze(&id, false),
        Command::Delete { exec: Some(exec), id, .. } => control::delete_process(&id, &exec),
        Command::Delete { force, id, exec: None } => control::delete(&id, force),
        Command::Ps { id } => print(&Processes { processes: control::list(&id)? }),
        Command::Stats { id } => print(&stats::look(&id)?),
        Command::Update { resources, id } => {
            print(&Warnings { warnings: control::update(&id, &resources)? })
        }
    }?;
    Ok(0)
}

/// Prints one line of JSON.
fn print(answer: &impl Serialize) -> Result<(), Error> {
    let text = serde_json::to_string(answer)
        .map_err(|source| Error::Json { path: "standard output".into(), source })?;
    writeln!(io::stdout(), "{text}").map_err(Error::system("write the answer"))
}
