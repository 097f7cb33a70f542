//! `containerd-shim-cube-v2`: containerd's Shim v2 for containers in microVMs.
//!
//! | file | purpose |
//! |---|---|
//! | `bootstrap`, `start`, `delete`, `serve`, `ask` | what the program is run for |
//! | `task`, `whole`, `lifecycle`, `hung`, `stats` | the Task service; what its calls do |
//! | `sandbox`, `container`, `process` | what there is, and how it is |
//! | `life`, `sleep`, `checkpoint` | where the VM is in its life; pauses; copies |
//! | `annotations`, `wishes`, `actions` | what pods ask for, and what Update is asked for |
//! | `vm`, `vmm`, `guest`, `oci` | the VM; its VMM; the agent in it; containers in it |
//! | `spec`, `sizing`, `rootfs`, `mount_points` | a container's spec, size and files |
//! | `stdio`, `streams` | its streams |
//! | `network`, `oom`, `cgroup` | a pod's interfaces, for the guest; who goes first when memory runs out; all processes of a VM |
//! | `events`, `logs`, `ladder`, `metrics`, `record`, `place` | what is told, and written down, and where |
//! | `config`, `clock`, `error` | the operator's settings; times; refusals |

mod actions;
mod annotations;
mod ask;
mod bootstrap;
mod cgroup;
mod checkpoint;
mod clock;
mod config;
mod container;
mod delete;
mod error;
mod events;
mod guest;
mod hung;
mod ladder;
mod life;
mod lifecycle;
mod logs;
mod metrics;
mod mount_points;
mod network;
mod oci;
mod oom;
mod place;
mod probe;
mod process;
mod record;
mod rootfs;
mod sandbox;
mod serve;
mod sizing;
mod sleep;
mod spec;
mod start;
mod stats;
mod stdio;
mod strays;
mod streams;
mod task;
mod vm;
mod vmm;
mod whole;
mod wishes;

use std::io::Write;
use std::process::ExitCode;

use containerd_shim::Flags;
use containerd_shim_protos::protobuf::Message;
use containerd_shim_protos::types::introspection::{RuntimeInfo, RuntimeVersion};

use crate::error::{Error, Result};

const NAME: &str = "io.containerd.cube.v2";

const HELP: &str = "\
containerd-shim-cube-v2: runs each pod of containerd's in a microVM of its own

containerd starts this program; people start containers:
  ctr run --rm --runtime io.containerd.cube.v2 IMAGE NAME uname -r

It is looked up in containerd's PATH. Settings are in /etc/cube/config.toml, or where CUBE_CONFIG
says; each has a default:
  vmm = \"/usr/local/bin/cube-vmm\"                       the VMM
  kernel = \"/usr/local/share/cube/vmlinux\"              the guest's kernel
  initrd = \"/usr/local/share/cube/container.cpio\"       its root image, with cube-oci
  cpus = 1, memory_mib = 512                            the size of a VM without limits
  overhead_mib = 128                                    added to a container's memory limit
  max_cpus = 64, max_memory_mib = 1048576               the largest VM
  boot_timeout_s = 60                                   how long a guest may take to boot
  pause_to = \"memory\"                                   where a pause leaves a VM: memory or disk
  pause_dir = \"/var/lib/cube/paused\"                   the states of those paused to disk
  resume_timeout_s = 30                                 how long a port may take after a resume
  annotation_dirs = [\"/var/lib/cube\"]                 where annotations may name files
  vmm_options = []                                      more options for `cube-vmm start`

Usage, by containerd:
  -namespace NS -id ID -address SOCKET [-debug] start   find or make the shim of ID's pod
  -namespace NS -id ID -address SOCKET delete           end and clear what ID has left
  -namespace NS -id ID -address SOCKET checkpoint DIR   write ID's sandbox into the folder DIR
  -namespace NS -id ID -address SOCKET update KEY=VALUE…  ask for an action, by annotations:
      cube.shimapi.update.action=PauseToSnapshot
      cube.shimapi.update.pause.snapshot_config='{\"destination_url\":\"file:///var/lib/cube/one\"}'
  -info                                                 print what runtime this is, as protobuf
  -v, --version                                         print the version
  --help                                                print this
";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if args.iter().any(|arg| matches!(arg.as_str(), "--help" | "-help" | "-h")) {
        print!("{HELP}");
        return ExitCode::SUCCESS;
    }
    match containerd_shim::parse(&args).map_err(|error| Error::Invalid(error.to_string())) {
        Ok(flags) => run(&flags, &args),
        Err(error) => Err(error),
    }
    .map_or_else(
        |error| {
            tracing::error!(%error, "the shim has failed");
            eprintln!("containerd-shim-cube-v2: {error}");
            ExitCode::FAILURE
        },
        |()| ExitCode::SUCCESS,
    )
}

fn run(flags: &Flags, args: &[String]) -> Result<()> {
    if flags.version {
        println!("containerd-shim-cube-v2 {}", env!("CARGO_PKG_VERSION"));
        return Ok(());
    }
    if flags.info {
        return info();
    }
    match flags.action.as_str() {
        "start" => start::start(flags),
        "delete" => delete::delete(flags),
        "checkpoint" => match args {
            [.., action, folder] if action == "checkpoint" => ask::checkpoint(flags, folder),
            _ => Err(Error::Invalid("checkpoint needs a folder; see --help".to_owned())),
        },
        "update" => ask::update(flags, args),
        "" if flags.id.is_empty() => {
            Err(Error::Invalid("this program is started by containerd; see --help".to_owned()))
        }
        "" => serve::serve(flags),
        other => Err(Error::Invalid(format!(
            "no such action: {other:?}; expected start, delete, checkpoint or update"
        ))),
    }
}

/// containerd's options for us, on standard input, are of no interest; but it wants to be read.
fn info() -> Result<()> {
    bootstrap::input()?;
    let info = RuntimeInfo {
        name: NAME.to_owned(),
        version: Some(RuntimeVersion {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            ..Default::default()
        })
        .into(),
        ..Default::default()
    };
    let bytes = info.write_to_bytes().map_err(|error| Error::Invalid(error.to_string()))?;
    std::io::stdout().write_all(&bytes).map_err(error::io("answer containerd"))
}
