//! What a VM shall be: parsed from the command line or from JSON, validated before anything is made.

mod share;
mod storage;

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use devices::rate_limiter::RateError;
use devices::virtio::block::{MAX_QUEUES, UnknownEngine};
use devices::virtio::net::{NetOption, NetOptionError};
use serde::{Deserialize, Serialize};

pub use self::share::{ShareConfig, ShareError, policy};
use self::storage::checked_id;
pub use self::storage::{DiskConfig, PmemConfig};

use crate::layout;

/// Smallest guest: a stripped Linux with its initramfs needs about this much to boot.
pub const MIN_MEMORY: u64 = 32 << 20;
/// Largest guest.
pub const MAX_MEMORY: u64 = 4 << 40;

/// A setting with a value that cannot be. The text names the value and the cure.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// Not a size.
    #[error("memory size {0:?} is not a number with a unit; write for example 256M or 4G")]
    MemoryFormat(String),
    /// Too small.
    #[error("memory size {0} is too small; a guest needs at least 32M")]
    MemoryTooSmall(String),
    /// Too large.
    #[error("memory size {0} is too large; the most is 4T")]
    MemoryTooLarge(String),
    /// Not whole pages.
    #[error("memory size {0} is not a multiple of 4096 bytes; use whole megabytes")]
    MemoryUnaligned(String),
    /// No vCPU, or too many.
    #[error("{0} vCPUs cannot be; use 1 to {max}", max = layout::MAX_CPUS)]
    Cpus(u32),
    /// The kernel would cut the command line.
    #[error("kernel command line has {len} bytes; the kernel takes {max}, shorten --cmdline-append",
            max = layout::CMDLINE_MAX - 1)]
    CmdlineTooLong {
        /// Its length in bytes.
        len: usize,
    },
    /// A NUL or newline in the command line.
    #[error("kernel command line contains the control character {0:?}; remove it")]
    CmdlineCharacter(char),
    /// A disk option that is not understood.
    #[error(
        "disk option {0:?} is not known; use path=FILE[,id=NAME][,ro] or vhost-user=SOCKET, and \
         engine=, queues=, rate_bytes=, rate_ops="
    )]
    DiskOption(String),
    /// The same option, twice.
    #[error("disk option {0:?} is given twice; leave one out")]
    DiskTwice(String),
    /// Two things at once.
    #[error("disk {0:?} needs one of path=FILE and vhost-user=SOCKET")]
    DiskSource(String),
    /// An option of ours, on a disk that is not.
    #[error("disk option {0:?} is up to the backend of a vhost-user disk; give it to that instead")]
    DiskVhostUser(&'static str),
    /// No queue, or too many.
    #[error("disk option queues={0:?} is not a number from 1 to {max}", max = MAX_QUEUES)]
    DiskQueues(String),
    /// An engine that does not exist.
    #[error(transparent)]
    DiskEngine(#[from] UnknownEngine),
    /// A rate that makes no sense.
    #[error(transparent)]
    Rate(#[from] RateError),
    /// A disk without a file.
    #[error("disk {0:?} has no path; use path=FILE[,id=NAME][,ro]")]
    DiskPath(String),
    /// A pmem option that is not understood.
    #[error("pmem option {0:?} is not known; use path=FILE[,id=NAME][,ro]")]
    PmemOption(String),
    /// A pmem device without a file.
    #[error("pmem {0:?} has no path; use path=FILE[,id=NAME][,ro]")]
    PmemPath(String),
    /// A network card that makes no sense.
    #[error(transparent)]
    Net(#[from] NetOptionError),
    /// A share that makes no sense.
    #[error(transparent)]
    Share(#[from] ShareError),
    /// Two devices of one name.
    #[error("two devices are called {0:?}; give each its own id=")]
    DuplicateId(String),
    /// A name that cannot be.
    #[error("device id {0:?} is not usable; take 1 to 20 letters, digits, '-' or '_'")]
    BadId(String),
    /// More devices than lines.
    #[error("{count} virtio devices do not fit; a VM takes {max} on this transport")]
    TooManyDevices {
        /// Devices asked for.
        count: usize,
        /// Devices that fit.
        max: usize,
    },
    /// No kernel given and none found.
    #[error("no kernel was given and {} does not exist; build one with guest-kernel/build.sh or use --kernel FILE", .0.display())]
    NoKernel(PathBuf),
    /// No initrd given and none found.
    #[error("no initrd was given and {} does not exist; build one with rootfs/build.sh or use --initrd FILE", .0.display())]
    NoInitrd(PathBuf),
}

/// Reads a number and the power of two that its unit is (K, M, G or T), if it has one.
pub(crate) fn number_with_unit(text: &str) -> Option<(u64, Option<u32>)> {
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let unit = text.get(digits.len()..)?.to_ascii_uppercase();
    let shift = match unit.as_str() {
        "" => None,
        "K" | "KB" | "KIB" => Some(10),
        "M" | "MB" | "MIB" => Some(20),
        "G" | "GB" | "GIB" => Some(30),
        "T" | "TB" | "TIB" => Some(40),
        _ => return None,
    };
    Some((digits.parse().ok()?, shift))
}

/// An amount of guest memory in bytes: whole pages, at least [`MIN_MEMORY`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct MemorySize(u64);

impl MemorySize {
    /// The size in bytes.
    pub fn bytes(self) -> u64 {
        self.0
    }
}

impl Default for MemorySize {
    fn default() -> Self {
        Self(256 << 20)
    }
}

impl FromStr for MemorySize {
    type Err = ConfigError;

    /// Reads a number and a unit (K, M, G or T, powers of 1024), such as `256M`.
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let format = || ConfigError::MemoryFormat(text.to_owned());
        let (number, shift) = number_with_unit(text).ok_or_else(format)?;
        let large = || ConfigError::MemoryTooLarge(text.to_owned());
        let bytes = number.checked_mul(1 << shift.unwrap_or(0)).ok_or_else(large)?;
        match bytes {
            _ if bytes > MAX_MEMORY => Err(large()),
            // A bare number is most likely a forgotten unit.
            _ if shift.is_none() && number != 0 => Err(format()),
            _ if bytes < MIN_MEMORY => Err(ConfigError::MemoryTooSmall(text.to_owned())),
            _ if bytes % 4096 != 0 => Err(ConfigError::MemoryUnaligned(text.to_owned())),
            _ => Ok(Self(bytes)),
        }
    }
}

impl TryFrom<String> for MemorySize {
    type Error = ConfigError;
    fn try_from(text: String) -> Result<Self, ConfigError> {
        text.parse()
    }
}

impl From<MemorySize> for String {
    fn from(size: MemorySize) -> String {
        size.to_string()
    }
}

impl fmt::Display for MemorySize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (mut value, mut unit) = (self.0 >> 10, 'K');
        for next in ['M', 'G', 'T'] {
            if value % 1024 != 0 {
                break;
            }
            (value, unit) = (value >> 10, next);
        }
        write!(f, "{value}{unit}")
    }
}

/// How the kernel is entered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BootProtocol {
    /// PVH where the ELF file has the note for it, the Linux 64-bit entry otherwise.
    #[default]
    Auto,
    /// PVH: 32-bit protected mode, ELF only.
    Pvh,
    /// The 64-bit entry of the Linux boot protocol.
    Linux,
}

/// How the guest finds its virtio devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TransportKind {
    /// Registers at fixed addresses: the fastest to boot.
    #[default]
    Mmio,
    /// PCI functions with MSI-X: what distribution kernels are made for.
    Pci,
}

/// What happens with the serial console's output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Console {
    /// Kept (the last part of it) to be shown when the guest fails.
    #[default]
    Off,
    /// Also written to standard error while the guest runs, all kernel messages included.
    Serial,
    /// The same over a virtio console, which costs the guest far less than the serial port; what
    /// the kernel says before it has found the console comes late.
    Virtio,
}

/// A VM, complete.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmConfig {
    /// Number of vCPUs.
    pub cpus: u32,
    /// Guest RAM.
    pub memory: MemorySize,
    /// ELF `vmlinux` or bzImage.
    pub kernel: PathBuf,
    /// Initial RAM file system; the agent is in it.
    #[serde(default)]
    pub initrd: Option<PathBuf>,
    /// Appended to the kernel command line.
    #[serde(default)]
    pub cmdline_append: String,
    /// An image that becomes the guest's root file system; writes go to guest memory.
    #[serde(default)]
    pub rootfs: Option<PathBuf>,
    /// Further disks, `/dev/vda` (or `/dev/vdb` with a rootfs) and on.
    #[serde(default)]
    pub disks: Vec<DiskConfig>,
    /// Files that the guest sees as persistent memory, `/dev/pmem0` and on.
    #[serde(default)]
    pub pmem: Vec<PmemConfig>,
    /// Network cards, `eth0` and on.
    #[serde(default)]
    pub net: Vec<NetOption>,
    /// Directories of the host.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub fs: Vec<ShareConfig>,
    /// The file server, if it is not beside this program. Of this host, so not saved.
    #[serde(skip)]
    pub fsd: Option<PathBuf>,
    /// Where shares may be; anywhere if empty. Of this host, so not saved.
    #[serde(skip)]
    pub fs_allow: Vec<PathBuf>,
    /// A balloon: memory that the guest does not need goes back to the host.
    #[serde(default)]
    pub balloon: bool,
    /// Unix socket for vsock.
    #[serde(default)]
    pub vsock: Option<PathBuf>,
    /// Serial console.
    #[serde(default)]
    pub console: Console,
    /// Entry of the kernel.
    #[serde(default)]
    pub boot_protocol: BootProtocol,
    /// How virtio devices are attached.
    #[serde(default)]
    pub transport: TransportKind,
}

/// The kernel parameters that every guest gets, before `--cmdline-append`.
///
/// `reboot=k panic=-1`: a reboot, also after a panic, is a reset of the i8042, which ends the VM.
/// `no_timer_check`, `tsc=reliable`: the clock is the hypervisor's and needs no calibration.
/// `random.trust_cpu=on`: RDRAND may seed the generator, so that nothing waits for entropy.
const CMDLINE: &str = "reboot=k panic=-1 no_timer_check tsc=reliable \
                       random.trust_cpu=on 8250.nr_uarts=1";

impl VmConfig {
    /// The whole kernel command line.
    pub fn cmdline(&self) -> String {
        let mut line = CMDLINE.to_owned();
        line.push_str(match self.console {
            Console::Off | Console::Serial => " console=ttyS0",
            Console::Virtio => " console=hvc0",
        });
        if self.transport == TransportKind::Mmio {
            // There is no PCI bus: the kernel need not look for one.
            line.push_str(" pci=off");
        }
        if self.console == Console::Off {
            // Errors and panics still reach the console, and from there the user.
            line.push_str(" quiet");
        }
        if self.rootfs.is_some() {
            line.push_str(" cube.root=/dev/vda");
        }
        if !self.cmdline_append.is_empty() {
            line.push(' ');
            line.push_str(&self.cmdline_append);
        }
        line
    }

    /// All disks in the order in which the guest sees them, named.
    pub fn all_disks(&self) -> Vec<DiskConfig> {
        let rootfs = self.rootfs.iter().map(|path| DiskConfig {
            id: "rootfs".to_owned(),
            read_only: true,
            ..DiskConfig::new(path)
        });
        let mut disks: Vec<_> = rootfs.chain(self.disks.iter().cloned()).collect();
        for (index, disk) in disks.iter_mut().enumerate() {
            if disk.id.is_empty() {
                disk.id = format!("disk{index}");
            }
        }
        disks
    }

    /// True if another process works on guest RAM, which must be made so that it can be shared.
    pub fn shares_memory(&self) -> bool {
        let cards = self.net.iter().any(|card| card.backend().is_some());
        cards || self.disks.iter().any(|disk| disk.vhost_user)
    }

    /// All persistent memory, named.
    pub fn all_pmem(&self) -> Vec<PmemConfig> {
        let mut all = self.pmem.clone();
        for (index, pmem) in all.iter_mut().enumerate() {
            if pmem.id.is_empty() {
                pmem.id = format!("pmem{index}");
            }
        }
        all
    }

    /// All network cards, named.
    pub fn all_net(&self) -> Vec<NetOption> {
        let mut all = self.net.clone();
        for (index, net) in all.iter_mut().enumerate() {
            if net.id.is_empty() {
                net.id = format!("net{index}");
            }
        }
        all
    }

    /// All shares, named.
    pub fn all_fs(&self) -> Vec<ShareConfig> {
        let mut all = self.fs.clone();
        for (index, share) in all.iter_mut().enumerate() {
            if share.id.is_empty() {
                share.id = format!("fs{index}");
            }
        }
        all
    }

    /// The same with every device named, so that its name stays when others come and go.
    #[must_use]
    pub fn named(&self) -> Self {
        let mut disks = self.all_disks();
        if self.rootfs.is_some() {
            // Its name is fixed.
            disks.remove(0);
        }
        let (pmem, net, fs) = (self.all_pmem(), self.all_net(), self.all_fs());
        Self { disks, pmem, net, fs, ..self.clone() }
    }

    fn device_ids(&self) -> Vec<String> {
        let disks = self.all_disks().into_iter().map(|disk| disk.id);
        let pmem = self.all_pmem().into_iter().map(|pmem| pmem.id);
        let net = self.all_net().into_iter().map(|net| net.id);
        let fs = self.all_fs().into_iter().map(|share| share.id);
        let ours = ["vsock", "rng", "balloon", "console"].map(str::to_owned);
        disks.chain(pmem).chain(net).chain(fs).chain(ours).collect()
    }

    fn validate_shares(&self) -> Result<(), ShareError> {
        for (index, share) in self.fs.iter().enumerate() {
            share.validate()?;
            if self.fs.iter().take(index).any(|other| other.tag == share.tag) {
                return Err(ShareError::DuplicateTag(share.tag.clone()));
            }
        }
        Ok(())
    }

    /// Checks all that can be told without touching the host.
    pub fn validate(&self) -> Result<(), ConfigError> {
        if self.cpus == 0 || self.cpus > layout::MAX_CPUS {
            return Err(ConfigError::Cpus(self.cpus));
        }
        let cmdline = self.cmdline();
        if let Some(control) = cmdline.chars().find(|c| c.is_control()) {
            return Err(ConfigError::CmdlineCharacter(control));
        }
        if cmdline.len() >= layout::CMDLINE_MAX {
            return Err(ConfigError::CmdlineTooLong { len: cmdline.len() });
        }
        let ids = self.device_ids();
        for (index, id) in ids.iter().enumerate() {
            checked_id(id)?;
            if ids.iter().take(index).any(|other| other == id) {
                return Err(ConfigError::DuplicateId(id.clone()));
            }
        }
        for net in &self.net {
            net.validate()?;
        }
        for disk in &self.disks {
            disk.validate()?;
        }
        self.validate_shares()?;
        // Entropy and vsock are always there.
        let optional = [self.balloon, self.console == Console::Virtio];
        let count = self.all_disks().len()
            + self.pmem.len()
            + self.net.len()
            + self.fs.len()
            + optional.iter().filter(|&&wanted| wanted).count()
            + 2;
        let max = match self.transport {
            TransportKind::Mmio => layout::MAX_VIRTIO_MMIO,
            TransportKind::Pci => usize::from(devices::pci::SLOTS) - 1,
        };
        if count > max {
            return Err(ConfigError::TooManyDevices { count, max });
        }
        Ok(())
    }
}

/// Where the kernel and the initrd are when none is named: `../guest` beside the folder of the
/// executable, which is where the build scripts link them, or `/usr/lib/cubevmm`.
pub fn default_artifact(name: &str) -> PathBuf {
    let built = std::env::current_exe()
        .ok()
        .and_then(|exe| Some(exe.parent()?.parent()?.join("guest").join(name)));
    let installed = Path::new("/usr/lib/cubevmm").join(name);
    match built {
        Some(path) if path.exists() || !installed.exists() => path,
        _ => installed,
    }
}

#[cfg(test)]
mod tests;
