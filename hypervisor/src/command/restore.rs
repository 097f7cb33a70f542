//! `cube-vmm restore`: a VM that goes on where a snapshot was taken, with a control socket.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use devices::virtio::net::NetSource;

use super::background::{Background, Role};
use super::hot::PrefetchOptions;
use super::overrides::{self, Overridden};
use super::run::{check_writable, write_trace};
use super::start::{beside, until_the_end};
use crate::agent::HelloListener;
use crate::api_socket::ApiSocket;
use crate::builder::{self, Observers, Restoration};
use crate::config::VmConfig;
use crate::control::Control;
use crate::event::Events;
use crate::identity::{ClockPolicy, GuestInterface, Hostname, Identity, MachineId};
use crate::outcome::EXIT_MEMORY_LOST;
use crate::signals;
use crate::snapshot::disks::{self, DiskPlace};
use crate::snapshot::host_files::{self, Consent};
use crate::snapshot::load::Saved;
use crate::snapshot::paging::{Lost, MemoryMode};
use crate::trace::Ladder;

/// Options of `restore`.
#[derive(Args, Clone, Debug)]
pub struct RestoreOptions {
    /// Folder that `cube-vmm snapshot` has written
    #[arg(value_name = "DIR")]
    pub dir: PathBuf,

    /// Unix socket on which the VM takes requests
    #[arg(long, value_name = "PATH")]
    pub api_socket: PathBuf,

    /// Let the guest go on at once; otherwise `cube-vmm resume` does
    #[arg(long)]
    pub resume: bool,

    /// Return when the guest is ready, and leave the VM in the background, where it says nothing (a
    /// console can go to a file, see --override); fail, and leave nothing, if the guest is not ready
    /// within so many seconds [default: 60]
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, require_equals = true, requires = "resume",
          default_missing_value = "60", value_parser = super::options::seconds())]
    pub wait_ready: Option<u64>,

    /// What becomes of the guest's time of day; its monotonic clock goes on from where it was
    #[arg(long, value_enum, default_value = "advance")]
    pub clock: ClockPolicy,

    /// How guest memory is brought in
    #[arg(long, value_enum, default_value = "private")]
    pub memory_mode: MemoryModeOption,

    /// With --memory-mode uffd: the socket of another process that brings memory in
    #[arg(long, value_name = "PATH")]
    pub uffd_socket: Option<PathBuf>,

    /// Which of it is brought in sooner.
    #[command(flatten)]
    pub hot: PrefetchOptions,

    /// Give a device something else than it had: disk:ID=FILE, pmem:ID=FILE, net:ID=tap:NAME,
    /// net:ID=fd:N[:N…], fs:ID=path=DIR,policy=strict|tolerant|remap|copy (either part), vsock=PATH or
    /// console=off|stderr|file:PATH; may be repeated. A rootfs is disk:rootfs. vsock is the api socket's path with .vsock added otherwise
    #[arg(long = "override", value_name = "KIND:ID=…")]
    pub overrides: Vec<String>,

    /// The file server of shares [default: cube-fsd beside this program]
    #[arg(long, value_name = "FILE", env = "CUBE_FSD")]
    pub fsd: Option<PathBuf>,

    /// Refuse shares that are not within this directory, whatever the snapshot says; may be repeated
    #[arg(long, value_name = "DIR")]
    pub fs_allow: Vec<PathBuf>,

    /// Folder for the VM's own disks, disk-ID each, which stay when it ends; without it they have no
    /// names, and are gone with it
    #[arg(long, value_name = "DIR")]
    pub disk_dir: Option<PathBuf>,

    /// Open the files and interfaces of this host that the snapshot names, wherever they are
    #[arg(long)]
    pub trust_paths: bool,

    /// The guest's new host name
    #[arg(long, value_name = "NAME")]
    pub hostname: Option<Hostname>,

    /// The guest's new /etc/machine-id
    #[arg(long, value_name = "ID")]
    pub machine_id: Option<MachineId>,

    /// New addresses of an interface of the guest, in the place of those that it has, e.g.
    /// eth0=192.0.2.7/24,gateway=192.0.2.1; may be repeated
    #[arg(long, value_name = "NAME=ADDRESS/BITS[,…]")]
    pub network: Vec<GuestInterface>,

    /// Write when each step was reached to FILE, as JSON, or as a table to standard error with -
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
}

/// How guest memory is brought in, on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum MemoryModeOption {
    /// A private mapping of the file: each page when the guest touches it
    Private,
    /// The same, with all that is not zero mapped before the guest runs
    Prefault,
    /// Page faults are answered by a thread, or by another process (--uffd-socket)
    Uffd,
}

/// What `restore --help` ends with.
pub const RESTORE_HELP: &str = "\
The folder is not changed, and must not be as long as the VM runs: its memory is a private mapping of
the file there. Any number of VMs can be made of it. Each is another machine: it has a new generation
id before it runs, and its agent takes fresh randomness, the time of day, names and addresses before
it counts as ready.

Each VM has its own copy of the disks that are in the folder, so none sees what another one writes; on
file systems that share blocks it costs nothing. Disks that are not in it are those of the VM that was
saved, and must be as they were by then.

A folder may name any file of this host, and its guest would read it. So files and network interfaces
outside of the folder are opened only if you name them yourself (--override), or trust whoever made the
folder (--trust-paths).

Shares (--fs) go on with all that the guest has open in them. Files that have changed meanwhile are
stale (ESTALE) to whoever had them open, and are found anew by their paths; policy=strict refuses the
restore instead. policy=remap puts another directory in the place of the share: all that was open in the
old one is stale. policy=copy says that the directory is a copy: what has the same name there, and is of
the same kind, is taken for the same file. cube-vmm fs report tells what has become of what.

A page fault handler (--uffd-socket) gets one line of JSON with the regions of guest memory, and with
it two descriptors: the userfaultfd, and the file with the content. It answers \"ready\" and a newline
within 10 s, and serves faults as long as it keeps the connection. Ranges that the guest gives back
are told as removed, and are zeros from then on. Without it the VM ends, with exit code 118.

With --prefetch the pages that an earlier copy has touched come in while the guest runs already, in the
order of their addresses, so that it need not wait for each; cube-vmm snapshot hot records them. It ends
early when the VM ends, when it is saved, or when the host asks it for memory (cube-vmm balloon);
cube-vmm info tells how far it is.

Examples:
  cube-vmm restore base --api-socket S --resume --wait-ready && cube-vmm snapshot hot --api-socket S
  cube-vmm restore base --api-socket T --resume --prefetch --prefetch-limit 128M
  cube-vmm restore base --api-socket S --resume --override fs:fs0=path=/other,policy=remap
  cube-vmm restore base --api-socket S --resume --disk-dir /var/lib/vm/one
  cp --reflink=auto data.img two.img
  cube-vmm restore base --api-socket T --resume --wait-ready --override disk:data=two.img \\
      --hostname two --network eth0=192.0.2.2/24,gateway=192.0.2.1 && cube-vmm exec --api-socket T -- ip a";

impl RestoreOptions {
    fn memory_mode(&self) -> anyhow::Result<MemoryMode> {
        Ok(match (self.memory_mode, &self.uffd_socket) {
            (MemoryModeOption::Private, None) => MemoryMode::Private,
            (MemoryModeOption::Prefault, None) => MemoryMode::Prefault,
            (MemoryModeOption::Uffd, None) => MemoryMode::Uffd,
            (MemoryModeOption::Uffd, Some(path)) => MemoryMode::UffdBy(path.clone()),
            (_, Some(_)) => anyhow::bail!("--uffd-socket needs --memory-mode uffd"),
        })
    }

    fn identity(&self) -> Identity {
        Identity {
            clock: self.clock,
            hostname: self.hostname.clone(),
            machine_id: self.machine_id.clone(),
            network: self.network.clone(),
        }
    }
}

/// The machine of the snapshot with other things for its devices, all of which may be opened.
fn overridden(options: &RestoreOptions, saved: &Saved) -> anyhow::Result<(VmConfig, Overridden)> {
    let mut config = saved.manifest.config.clone();
    host_files::resolve(&mut config, &options.dir);
    config.vsock = Some(beside(&options.api_socket));
    config.fsd.clone_from(&options.fsd);
    config.fs_allow.clone_from(&options.fs_allow);
    let changes = overrides::apply(&options.overrides, &mut config)?;
    let inherited = |source: &NetSource| matches!(source, NetSource::Fd(_));
    let gone = |id: &String| !changes.ids.contains(id);
    if let Some(card) = config.net.iter().find(|card| inherited(&card.source) && gone(&card.id)) {
        anyhow::bail!(
            "network card {:?} was on descriptors that are gone; add --override net:{}=tap:NAME",
            card.id,
            card.id
        );
    }
    disks::refer_to_copies(&options.dir, &saved.manifest, &mut config, &changes.ids);
    let consent = Consent { all: options.trust_paths, given: changes.ids.clone() };
    host_files::check(&saved.manifest, &config, &options.dir, &consent)?;
    Ok((config, changes))
}

/// Ends this process when guest memory cannot be brought in any more. Its vCPUs wait for a page, and
/// cannot be told to end.
fn lost(sockets: Vec<PathBuf>) -> Lost {
    Box::new(move |message| {
        eprintln!("cube-vmm: {message}");
        for socket in sockets {
            let _ = std::fs::remove_file(socket);
        }
        std::process::exit(i32::from(EXIT_MEMORY_LOST));
    })
}

/// Runs it until the guest ends. The exit code tells how.
pub fn restore(options: &RestoreOptions, ladder: Ladder) -> anyhow::Result<u8> {
    let Some(seconds) = options.wait_ready else {
        return hold(options, ladder, None);
    };
    let patience = Duration::from_secs(seconds);
    match Background::divide()? {
        Role::Caller(vm) => vm.wait(),
        Role::Vm(background) => hold(options, ladder, Some((patience, background))),
    }
}

fn hold(
    options: &RestoreOptions,
    ladder: Ladder,
    mut background: Option<(Duration, Background)>,
) -> anyhow::Result<u8> {
    let mode = options.memory_mode()?;
    if let Some(path) = &options.trace {
        check_writable(path)?;
    }
    let mut saved = Saved::open(&options.dir)?;
    let prefetch = options.hot.plan(&options.dir, &saved.manifest, &mode)?;
    // The VM may be asked about it when its folder is gone.
    let dir = std::path::absolute(&options.dir)?;
    let (mut config, changes) = overridden(options, &saved)?;
    let place = options.disk_dir.as_deref().map_or(DiskPlace::Unnamed, DiskPlace::Folder);
    // Open as long as the VM lives: some have no other name.
    let _own = disks::place(&options.dir, &saved.manifest, &mut config, &changes.ids, place)?;
    let hello = saved.state.hello.take();
    let identity = options.identity();
    let socket = ApiSocket::bind(&options.api_socket)?;
    let (events, receiver) = Events::channel();
    let console = changes.console.unwrap_or_default();
    let observers = Observers { ladder, stamp_entry: false, events: events.clone(), console };
    let sockets = [Some(&options.api_socket), config.vsock.as_ref()];
    let lost = lost(sockets.into_iter().flatten().cloned().collect());
    let from = Restoration { saved, dir, mode, prefetch, lost };
    let vm = builder::restore(&config, &observers, from)?;
    // For a guest that was saved before its agent has said it.
    let listening = HelloListener::new(vm.vsock())?;
    let mut control = Control::new(vm, events.clone(), receiver).restored(hello, identity);
    if options.resume {
        control.resume()?;
    }
    // The guest need not wait for threads that wait themselves.
    signals::watch(events.clone())?;
    listening.watch(events)?;
    socket.serve(observers.events.clone())?;
    let patience = background.as_ref().map(|(patience, _)| *patience);
    let ready = || background.take().is_none_or(|(_, background)| background.ready());
    let code = until_the_end(&mut control, patience, &observers.ladder, ready);
    if let Some(path) = &options.trace {
        write_trace(path, &observers.ladder)?;
    }
    Ok(code)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::manifest::Manifest;

    fn options(more: &[&str]) -> RestoreOptions {
        use clap::Parser;
        #[derive(Parser)]
        struct Cli {
            #[command(flatten)]
            options: RestoreOptions,
        }
        let words = ["restore", "/s", "--api-socket", "/api"];
        Cli::try_parse_from(words.iter().chain(more)).unwrap().options
    }

    fn saved(net: &str) -> Saved {
        let config = r#"{"cpus": 1, "memory": "64M", "kernel": "/k", "vsock": "/v"}"#;
        let mut config: VmConfig = serde_json::from_str(config).unwrap();
        config.net = vec![net.parse().unwrap()];
        Saved {
            manifest: Manifest::new(config, "0".repeat(32), 0, b""),
            state: crate::snapshot::machine::tests::example(),
            memory: tempfile::tempfile().unwrap(),
        }
    }

    #[test]
    fn the_socket_of_the_saved_vm_is_not_used() {
        let saved = saved("tap=t0,id=net0");
        let trusting = options(&["--trust-paths"]);
        let (config, _) = overridden(&trusting, &saved).unwrap();
        assert_eq!(config.vsock, Some("/api.vsock".into()));
        let elsewhere = options(&["--trust-paths", "--override", "vsock=/w"]);
        assert_eq!(overridden(&elsewhere, &saved).unwrap().0.vsock, Some("/w".into()));
    }

    #[test]
    fn descriptors_of_the_saved_vm_are_not_those_of_this_process() {
        let saved = saved("fd=9,id=net0");
        let error = overridden(&options(&["--trust-paths"]), &saved).unwrap_err().to_string();
        assert!(error.contains("--override net:net0=tap:NAME"), "{error}");
        let (config, _) = overridden(&options(&["--override", "net:net0=fd:5"]), &saved).unwrap();
        assert_eq!(config.net[0].source, NetSource::Fd(vec![5]));
    }

    #[test]
    fn a_handler_without_faults_for_it_is_refused() {
        assert!(options(&["--uffd-socket", "/u"]).memory_mode().is_err());
        let external = options(&["--uffd-socket", "/u", "--memory-mode", "uffd"]);
        assert_eq!(external.memory_mode().unwrap(), MemoryMode::UffdBy("/u".into()));
    }
}
