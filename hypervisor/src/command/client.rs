//! `cube-vmm exec|info|metrics|pause|resume|stop`: requests to a VM that `start` holds.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::{Args, Subcommand, ValueEnum};
use devices::virtio::net::NetOption;
use guest_protocol::HybridSocket;
use nix::sys::signal::Signal;

use super::guest_command::GuestCommand;
use super::options::{SpawnOptions, seconds};
use crate::api::{Info, MetricsFormat, Reply, Request, StopHow};
use crate::api_socket::request;
use crate::config::{DiskConfig, MemorySize};
use crate::event::{Event, Events};
use crate::signals;

/// Which VM.
#[derive(Args, Clone, Debug)]
pub struct Target {
    /// The control socket of the VM
    #[arg(long, value_name = "PATH")]
    pub api_socket: PathBuf,
}

/// Options of `exec`.
#[derive(Args, Clone, Debug)]
pub struct ExecOptions {
    /// The VM.
    #[command(flatten)]
    pub target: Target,

    /// Seconds to wait for a guest that is not ready yet
    #[arg(long, default_value_t = 60, value_name = "SECONDS", value_parser = seconds())]
    pub wait: u64,

    /// The command.
    #[command(flatten)]
    pub spawn: SpawnOptions,
}

/// Options of `balloon`.
#[derive(Args, Clone, Debug)]
pub struct BalloonOptions {
    /// The VM.
    #[command(flatten)]
    pub target: Target,

    /// Memory that the guest shall give back: a number with a unit, or 0
    #[arg(value_name = "SIZE")]
    pub size: String,
}

/// Asks the guest for memory, or gives it back.
pub fn balloon(options: &BalloonOptions) -> anyhow::Result<u8> {
    let bytes = match options.size.as_str() {
        "0" => 0,
        text => text.parse::<MemorySize>()?.bytes(),
    };
    plain(&options.target, &Request::SetBalloon { bytes })
}

/// Options of `plug`.
#[derive(Args, Clone, Debug)]
pub struct PlugOptions {
    /// The VM.
    #[command(flatten)]
    pub target: Target,

    /// What is plugged.
    #[command(flatten)]
    pub device: PluggedDevice,
}

/// One of these.
#[derive(Args, Clone, Debug)]
#[group(required = true, multiple = false)]
pub struct PluggedDevice {
    /// A disk, in the words of `run --disk`, with an id
    #[arg(long, value_name = "path=FILE,id=NAME[,ro]")]
    pub disk: Option<String>,

    /// A network card, in the words of `run --net`, with an id
    #[arg(long, value_name = "tap=NAME,id=NAME")]
    pub net: Option<String>,
}

/// Options of `unplug`.
#[derive(Args, Clone, Debug)]
pub struct UnplugOptions {
    /// The VM.
    #[command(flatten)]
    pub target: Target,

    /// The device's name
    pub id: String,

    /// Seconds that the guest may take to let go
    #[arg(long, default_value_t = 10, value_name = "SECONDS")]
    pub wait: u64,
}

/// What `plug --help` ends with.
pub const PLUG_HELP: &str = "\
The VM must have been started with --transport pci. `cube-vmm unplug` takes the device out again.

Examples:
  cube-vmm plug --api-socket S --disk path=data.img,id=data
  cube-vmm plug --api-socket S --net tap=tap1,id=lan
  cube-vmm unplug --api-socket S lan";

/// Plugs a disk or a network card into a running VM.
pub fn plug(options: &PlugOptions) -> anyhow::Result<u8> {
    match (&options.device.disk, &options.device.net) {
        (_, Some(text)) => {
            let net: NetOption = text.parse()?;
            if net.id.is_empty() {
                anyhow::bail!("network card {text:?} has no id; add id=NAME");
            }
            plain(&options.target, &Request::AddNet { net })
        }
        (Some(text), None) => plug_disk(options, text),
        (None, None) => anyhow::bail!("neither --disk nor --net was given"),
    }
}

fn plug_disk(options: &PlugOptions, text: &str) -> anyhow::Result<u8> {
    let disk: DiskConfig = text.parse()?;
    if disk.id.is_empty() {
        anyhow::bail!("disk {text:?} has no id; add id=NAME");
    }
    // The VM may have been started elsewhere.
    let path = std::path::absolute(&disk.path)?;
    plain(&options.target, &Request::AddDisk { disk: DiskConfig { path, ..disk } })
}

/// Takes a device out of a running VM, and waits until the guest has let go.
pub fn unplug(options: &UnplugOptions) -> anyhow::Result<u8> {
    plain(&options.target, &Request::RemoveDevice { id: options.id.clone() })?;
    let deadline = Instant::now() + Duration::from_secs(options.wait);
    while info_of(&options.target.api_socket)?.devices.contains(&options.id) {
        if Instant::now() > deadline {
            anyhow::bail!("the guest does not let go of {}; is it in use there?", options.id);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(0)
}

/// Options of `stop`.
#[derive(Args, Clone, Debug)]
pub struct StopOptions {
    /// The VM.
    #[command(flatten)]
    pub target: Target,

    /// How: power-off asks the agent, power-button presses the ACPI button, kill does not ask
    #[arg(long, value_enum, default_value_t = HowOption::PowerOff)]
    pub how: HowOption,

    /// Seconds until a guest that does not end is ended by force
    #[arg(long, default_value_t = 5, value_name = "SECONDS", value_parser = seconds())]
    pub timeout: u64,
}

/// See [`StopHow`].
#[derive(Clone, Copy, Debug, ValueEnum)]
#[expect(missing_docs, reason = "see the type it stands for")]
pub enum HowOption {
    PowerOff,
    PowerButton,
    Kill,
}

fn info_of(path: &Path) -> anyhow::Result<Info> {
    match request(path, &Request::Info {})? {
        Reply::Info(info) => Ok(*info),
        Reply::Error { message, .. } => anyhow::bail!("{message}"),
        other => anyhow::bail!("the VM answered info with {other:?}"),
    }
}

/// Sends a request whose answer is that it is done.
pub fn plain(target: &Target, asked: &Request) -> anyhow::Result<u8> {
    match request(&target.api_socket, asked)? {
        Reply::Error { message, .. } => anyhow::bail!("{message}"),
        _ => Ok(0),
    }
}

/// Prints what the VM tells of itself, as JSON.
pub fn info(target: &Target) -> anyhow::Result<u8> {
    print(&format!("{}\n", serde_json::to_string_pretty(&info_of(&target.api_socket)?)?))
}

/// What can be done with the shares of a VM.
#[derive(Subcommand, Clone, Debug)]
pub enum FsCommand {
    /// Tell what the guest has of its shares, as JSON: nodes that it knows, handles that are open,
    /// tombstones of what is gone; and after a restore, what was restored and what is stale, with paths
    /// and reasons
    Report(Target),
    /// Change which directories may be shared while the VM runs, in place of --fs-allow. A share that is
    /// in none of them is not served any more, at once: the guest gets "Permission denied". When it is
    /// allowed again, its open files, current directories and mount go on. Prints the report
    Allow(AllowOptions),
}

/// Options of `fs allow`.
#[derive(Args, Clone, Debug)]
pub struct AllowOptions {
    /// The VM.
    #[command(flatten)]
    target: Target,
    /// All directories may be shared.
    #[arg(long, conflicts_with = "directories")]
    any: bool,
    /// Directories that may be shared, with all that is in them.
    #[arg(required_unless_present = "any", value_name = "DIR")]
    directories: Vec<PathBuf>,
}

/// Carries it out.
pub fn fs(command: &FsCommand) -> anyhow::Result<u8> {
    let (target, asked) = match command {
        FsCommand::Report(target) => (target, Request::Shares {}),
        FsCommand::Allow(options) => {
            let directories = options.directories.iter().map(std::path::absolute).collect();
            let directories = if options.any { None } else { Some(directories) };
            let directories = directories.transpose()?;
            (&options.target, Request::AllowShares { directories })
        }
    };
    match request(&target.api_socket, &asked)? {
        Reply::Shares { shares } => print(&format!("{}\n", serde_json::to_string_pretty(&shares)?)),
        Reply::Error { message, .. } => anyhow::bail!("{message}"),
        other => anyhow::bail!("the VM answered shares with {other:?}"),
    }
}

/// Options of `metrics`.
#[derive(Args, Clone, Debug)]
pub struct MetricsOptions {
    /// The VM.
    #[command(flatten)]
    pub target: Target,

    /// In which form
    #[arg(long, value_enum, default_value_t = FormatOption::Prometheus)]
    pub format: FormatOption,
}

/// See [`MetricsFormat`].
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum FormatOption {
    /// The text format of Prometheus
    Prometheus,
    /// A list of families, each with its samples
    Json,
}

/// What `metrics --help` ends with.
pub const METRICS_HELP: &str = "\
Counters run from the start of the VM and survive pauses and resets of devices. Labels say whose they
are: device=\"data\", vcpu=\"0\", bus=\"ports\". Received and sent are meant as the guest sees it.

Examples:
  cube-vmm metrics --api-socket S
  cube-vmm metrics --api-socket S | grep guest_faults       does the guest misbehave?
  cube-vmm metrics --api-socket S --format json | jq '.[] | {name, samples}'
  cube-vmm metrics --api-socket S >vm.prom.new && mv vm.prom.new vm.prom
                  for the textfile collector of Prometheus' node exporter

Programs ask the socket itself: {\"request\":\"metrics\",\"format\":\"prometheus\"}";

/// Prints what the VM has counted.
pub fn metrics(options: &MetricsOptions) -> anyhow::Result<u8> {
    let format = match options.format {
        FormatOption::Prometheus => MetricsFormat::Prometheus,
        FormatOption::Json => MetricsFormat::Json,
    };
    match request(&options.target.api_socket, &Request::Metrics { format })? {
        Reply::Metrics { families } => {
            print(&format!("{}\n", serde_json::to_string_pretty(&families)?))
        }
        Reply::MetricsText { text } => print(&text),
        Reply::Error { message, .. } => anyhow::bail!("{message}"),
        other => anyhow::bail!("the VM answered metrics with {other:?}"),
    }
}

/// Prints to whoever reads; one who stops early has seen enough.
pub(super) fn print(text: &str) -> anyhow::Result<u8> {
    match io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(0),
    }
}

/// Ends the VM, and waits until its process has let go of the socket.
pub fn stop(options: &StopOptions) -> anyhow::Result<u8> {
    let how = match options.how {
        HowOption::PowerOff => StopHow::PowerOff,
        HowOption::PowerButton => StopHow::PowerButton,
        HowOption::Kill => StopHow::Kill,
    };
    let timeout = Duration::from_secs(options.timeout);
    plain(&options.target, &Request::Stop { how, timeout_ms: timeout.as_millis() as u64 })?;
    let deadline = Instant::now() + timeout + Duration::from_secs(5);
    while options.target.api_socket.exists() {
        if Instant::now() > deadline {
            anyhow::bail!("the VM has not ended; use --how kill");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(0)
}

/// Runs a command in the guest, attached to this process.
pub fn exec(options: &ExecOptions) -> anyhow::Result<u8> {
    let spawn = options.spawn.spawn()?;
    let info = wait_until_ready(&options.target.api_socket, Duration::from_secs(options.wait))?;
    let Some(vsock) = info.vsock else {
        anyhow::bail!("the VM has no vsock socket");
    };
    let (events, receiver) = Events::channel();
    signals::watch(events.clone())?;
    let command = GuestCommand::start(HybridSocket::new(vsock), spawn, events, || {})?;
    while let Ok(event) = receiver.recv() {
        match event {
            Event::Finished => break,
            Event::Signal(signal) if signal == Signal::SIGWINCH as i32 => command.resize(),
            Event::Signal(signal) if !command.signal(signal) => {
                return Ok(u8::try_from(128 + signal).unwrap_or(u8::MAX));
            }
            _ => {}
        }
    }
    let (code, message) = command.exit_code();
    drop(command);
    if let Some(message) = message {
        eprintln!("cube-vmm: {message}");
    }
    Ok(code)
}

fn wait_until_ready(path: &Path, patience: Duration) -> anyhow::Result<Info> {
    let deadline = Instant::now() + patience;
    loop {
        let info = info_of(path)?;
        if info.ready {
            return Ok(info);
        }
        if Instant::now() > deadline {
            anyhow::bail!("the guest is not ready after {} s", patience.as_secs());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}
