//! Command-line options, and what they mean as a configuration.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use devices::virtio::net::NetOption;

use crate::config::{
    BootProtocol, ConfigError, Console, DiskConfig, MemorySize, PmemConfig, ShareConfig,
    TransportKind, VmConfig, default_artifact,
};

/// What a VM is made of; shared by `run` and `start`.
#[derive(Args, Clone, Debug)]
pub struct VmOptions {
    /// Number of vCPUs, 1 to 32
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub cpus: u32,

    /// Guest memory, a number with a unit: 256M, 4G
    #[arg(long, default_value = "256M", value_name = "SIZE")]
    pub memory: String,

    /// Kernel, an ELF vmlinux or a bzImage [default: the one that guest-kernel/build.sh made]
    #[arg(long, value_name = "FILE", env = "CUBE_KERNEL")]
    pub kernel: Option<PathBuf>,

    /// Initramfs with the agent [default: the one that rootfs/build.sh made]
    #[arg(long, value_name = "FILE", env = "CUBE_INITRD")]
    pub initrd: Option<PathBuf>,

    /// File system image (ext4, erofs, …) that becomes the guest's root; it is not written to,
    /// changes stay in guest memory
    #[arg(long, value_name = "IMG")]
    pub rootfs: Option<PathBuf>,

    /// Attach a disk: path=FILE[,id=NAME][,ro], a raw image or a block device; may be repeated.
    /// Also engine=auto|io_uring|sync, queues=N (1 to 16), rate_bytes=RATE and rate_ops=RATE, with
    /// a RATE such as 10M/s, 1000/100ms or 10M/s+64M (a burst, once). vhost-user=SOCKET[,id=NAME]
    /// [,queues=N] in the place of all that: a disk that another process serves, which gets access to
    /// all of guest memory
    #[arg(long = "disk", value_name = "path=FILE[,id=NAME][,ro][,…]")]
    pub disks: Vec<String>,

    /// Attach a file as persistent memory, /dev/pmem0 and on: path=FILE[,id=NAME][,ro]. Read-only it
    /// shares the host's page cache; otherwise writes stay in the guest's own copy
    #[arg(long, value_name = "path=FILE[,id=NAME][,ro]")]
    pub pmem: Vec<String>,

    /// Attach a network card to a TAP: tap=NAME or fd=N, then [,mac=M][,mtu=N][,queues=N][,id=NAME].
    /// Also rx_bytes=RATE, rx_frames=RATE, tx_bytes=RATE and tx_frames=RATE, with a RATE such as 10M/s;
    /// or vhost=on, with which the host's kernel moves the frames (/dev/vhost-net), without limits.
    /// vhost-user=SOCKET in the place of tap=: another process moves them, such as a software switch,
    /// and gets access to all of guest memory
    #[arg(long, value_name = "tap=NAME[,mac=…]")]
    pub net: Vec<String>,

    /// Share a directory of the host, which the guest mounts with `mount -t virtiofs TAG DIR`: tag=TAG,
    /// path=DIR, then [,ro][,cache=none|auto|always][,writeback][,xattr][,acl][,id=NAME]
    /// [,uid_map=GUEST:HOST:COUNT][,gid_map=…][,rate_bytes=RATE]
    /// [,rate_ops=RATE]; may be
    /// repeated. It is served by a jailed process of its own, and survives snapshots
    #[arg(long = "fs", value_name = "tag=TAG,path=DIR[,ro][,…]")]
    pub fs: Vec<String>,

    /// The file server of shares [default: cube-fsd beside this program]
    #[arg(long, value_name = "FILE", env = "CUBE_FSD")]
    pub fsd: Option<PathBuf>,

    /// Refuse shares that are not within this directory; may be repeated
    #[arg(long, value_name = "DIR")]
    pub fs_allow: Vec<PathBuf>,

    /// Do without the balloon, through which memory that the guest has freed goes back to the host
    #[arg(long)]
    pub no_balloon: bool,

    /// Append to the kernel command line
    #[arg(long, default_value = "", value_name = "TEXT", allow_hyphen_values = true)]
    pub cmdline_append: String,

    /// Console: off keeps the last lines for error messages; serial (complete) and virtio (fast)
    /// also write everything to standard error
    #[arg(long, value_enum, default_value_t = ConsoleOption::Off)]
    pub console: ConsoleOption,

    /// How the kernel is entered; auto takes PVH where the kernel has it
    #[arg(long, value_enum, default_value_t = ProtocolOption::Auto)]
    pub boot_protocol: ProtocolOption,

    /// How virtio devices are attached: mmio boots fastest, pci is what distribution kernels are
    /// made for
    #[arg(long, value_enum, default_value_t = TransportOption::Mmio)]
    pub transport: TransportOption,

    /// Write the boot ladder (when each step of the boot was reached) to FILE as JSON; - prints it
    /// to standard error as a table
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,

    /// Seconds until a guest whose agent does not answer counts as failed
    #[arg(long, default_value_t = 60, value_name = "SECONDS", value_parser = seconds())]
    pub boot_timeout: u64,
}

/// Reads a number of seconds that can be added to any time: up to a year.
pub fn seconds() -> clap::builder::RangedU64ValueParser {
    clap::value_parser!(u64).range(..=31_536_000)
}

/// See [`Console`].
#[derive(Clone, Copy, Debug, ValueEnum)]
#[expect(missing_docs, reason = "see the type it stands for")]
pub enum ConsoleOption {
    Off,
    Serial,
    Virtio,
}

/// See [`BootProtocol`].
#[derive(Clone, Copy, Debug, ValueEnum)]
#[expect(missing_docs, reason = "see the type it stands for")]
pub enum ProtocolOption {
    Auto,
    Pvh,
    Linux,
}

/// See [`TransportKind`].
#[derive(Clone, Copy, Debug, ValueEnum)]
#[expect(missing_docs, reason = "see the type it stands for")]
pub enum TransportOption {
    Mmio,
    Pci,
}

impl VmOptions {
    /// The configuration. `agent`: an initrd is needed, for the agent in it.
    pub fn config(&self, agent: bool) -> Result<VmConfig, ConfigError> {
        let memory: MemorySize = self.memory.parse()?;
        let disks = self.disks.iter().map(|text| text.parse::<DiskConfig>());
        let disks = disks.collect::<Result<_, _>>()?;
        let pmem = self.pmem.iter().map(|text| text.parse::<PmemConfig>());
        let pmem = pmem.collect::<Result<_, _>>()?;
        let net = self.net.iter().map(|text| text.parse::<NetOption>());
        let net = net.collect::<Result<_, _>>()?;
        let fs = self.fs.iter().map(|text| text.parse::<ShareConfig>());
        let fs = fs.collect::<Result<_, _>>()?;
        let found = |given: &Option<PathBuf>, name: &str| match given {
            Some(path) => Ok(path.clone()),
            None => {
                let path = default_artifact(name);
                if path.exists() { Ok(path) } else { Err(path) }
            }
        };
        let kernel = found(&self.kernel, "vmlinux").map_err(ConfigError::NoKernel)?;
        let initrd = match (&self.initrd, agent) {
            (None, false) => None,
            (given, _) => Some(found(given, "initrd.cpio").map_err(ConfigError::NoInitrd)?),
        };
        let config = VmConfig {
            cpus: self.cpus,
            memory,
            kernel,
            initrd,
            cmdline_append: self.cmdline_append.clone(),
            rootfs: self.rootfs.clone(),
            disks,
            pmem,
            net,
            fs,
            fsd: self.fsd.clone(),
            fs_allow: self.fs_allow.clone(),
            balloon: !self.no_balloon,
            vsock: None,
            console: match self.console {
                ConsoleOption::Off => Console::Off,
                ConsoleOption::Serial => Console::Serial,
                ConsoleOption::Virtio => Console::Virtio,
            },
            boot_protocol: match self.boot_protocol {
                ProtocolOption::Auto => BootProtocol::Auto,
                ProtocolOption::Pvh => BootProtocol::Pvh,
                ProtocolOption::Linux => BootProtocol::Linux,
            },
            transport: match self.transport {
                TransportOption::Mmio => TransportKind::Mmio,
                TransportOption::Pci => TransportKind::Pci,
            },
        };
        config.validate()?;
        Ok(config)
    }

    /// See `--boot-timeout`.
    pub fn boot_timeout(&self) -> Duration {
        Duration::from_secs(self.boot_timeout)
    }
}

/// What a command in the guest runs with; shared by `run` and `exec`.
#[derive(Args, Clone, Debug)]
pub struct SpawnOptions {
    /// Set an environment variable of the command; may be repeated
    #[arg(short, long = "env", value_name = "NAME=VALUE")]
    pub env: Vec<String>,

    /// Working directory of the command
    #[arg(short, long, value_name = "DIR")]
    pub workdir: Option<String>,

    /// User of the command, by number
    #[arg(short, long, value_name = "UID[:GID]")]
    pub user: Option<String>,

    /// The command and its arguments
    // Without allow_hyphen_values, so that a mistyped option before it is not taken for a command.
    #[arg(required = true, trailing_var_arg = true, value_name = "CMD")]
    pub argv: Vec<String>,
}

/// A spawn option that is not understood.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SpawnError {
    /// No `=`.
    #[error("environment variable {0:?} has no value; write NAME=VALUE")]
    Env(String),
    /// Not numbers.
    #[error("user {0:?} is not UID or UID:GID in numbers")]
    User(String),
}

impl SpawnOptions {
    /// The request for the agent.
    pub fn spawn(&self) -> Result<guest_protocol::Spawn, SpawnError> {
        let mut spawn = guest_protocol::Spawn::new(self.argv.iter().cloned());
        spawn.kill_on_disconnect = true;
        spawn.cwd.clone_from(&self.workdir);
        for variable in &self.env {
            let (name, value) = variable
                .split_once('=')
                .filter(|(name, _)| !name.is_empty())
                .ok_or_else(|| SpawnError::Env(variable.clone()))?;
            spawn.env.push((name.to_owned(), value.to_owned()));
        }
        if let Some(user) = &self.user {
            let (uid, gid) = match user.split_once(':') {
                Some((uid, gid)) => (uid, Some(gid)),
                None => (user.as_str(), None),
            };
            let number =
                |text: &str| text.parse::<u32>().map_err(|_| SpawnError::User(user.clone()));
            spawn.uid = Some(number(uid)?);
            spawn.gid = gid.map(number).transpose()?;
        }
        Ok(spawn)
    }
}
