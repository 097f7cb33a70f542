//! Linux guests with a directory of the host: of `cube-vmm`, and of QEMU with a stock `virtiofsd`.
//! Both have it twice, as it is with and without a cache.

use std::ffi::OsString;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use guest_protocol::HybridSocket;

use crate::agent::{Agent, KernelVsock};
use crate::vmm::Staying;

/// Memory of each guest.
pub const MEMORY_MIB: u32 = 512;

/// A `virtiofsd` that does not listen by then never will.
const LISTENS_WITHIN: Duration = Duration::from_secs(30);

/// How long a guest may believe what it was told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Cache {
    /// A second; file content until the next opening.
    Auto,
    /// Not at all.
    None,
}

impl Cache {
    /// Its name, for all who are told of it; also the tag of the share.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::None => "none",
        }
    }

    /// Where the guest has the share.
    pub fn mount(self) -> String {
        format!("/mnt/{}", self.name())
    }
}

/// Who runs a guest, and how.
#[derive(Clone, Debug)]
pub enum Kind {
    /// `cube-vmm`, which serves shares itself.
    Cube {
        /// The program.
        program: PathBuf,
        /// `mmio` or `pci`.
        transport: &'static str,
    },
    /// QEMU, and a `virtiofsd` for each share.
    Stock {
        /// The program of QEMU.
        qemu: PathBuf,
        /// The file server.
        virtiofsd: PathBuf,
    },
}

impl Kind {
    /// Its name in the tables.
    pub fn name(&self) -> String {
        match self {
            Self::Cube { transport, .. } => format!("cube-vmm, {transport}"),
            Self::Stock { .. } => "QEMU, virtiofsd".to_owned(),
        }
    }
}

/// What all guests are given.
#[derive(Clone, Debug)]
pub struct Files {
    /// Kernel.
    pub kernel: PathBuf,
    /// Root image with the agent.
    pub initrd: PathBuf,
    /// The image of programs, `/dev/vda`.
    pub tools: PathBuf,
    /// The directory that is shared.
    pub share: PathBuf,
    /// Where sockets and logs are made.
    pub folder: PathBuf,
}

/// A guest that is ready and has its shares mounted. Dropped, its processes are killed.
pub struct Guest {
    /// What it is asked by.
    pub agent: Agent,
    processes: Vec<Child>,
    /// Where its VMM and its console are heard.
    logs: [PathBuf; 2],
}

impl Drop for Guest {
    fn drop(&mut self) {
        for process in self.processes.iter_mut().rev() {
            // Both fail if it has ended by itself.
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

impl Guest {
    /// An error with what the VMM or the guest's kernel have said last.
    pub fn explain(&self, error: anyhow::Error) -> anyhow::Error {
        match self.logs.iter().find_map(|log| last_line(log)) {
            Some(line) => error.context(format!("the last line of its VMM or console is {line:?}")),
            None => error,
        }
    }

    /// Boots the guest with this number, which names its files.
    pub fn boot(kind: &Kind, number: u32, files: &Files, caches: &[Cache]) -> anyhow::Result<Self> {
        let path = |name: &str| files.folder.join(format!("{number}.{name}"));
        let logs = [path("log"), path("console")];
        let mut guest = match kind {
            Kind::Cube { program, transport } => {
                let vsock = path("vsock");
                let agent = Agent::new(kind.name(), HybridSocket::new(&vsock));
                let Files { kernel, initrd, tools, .. } = files;
                let (memory_mib, api) = (MEMORY_MIB, &path("api"));
                let vsock = &vsock;
                let staying = Staying { transport, memory_mib, api, vsock, kernel, initrd, tools };
                let mut start = staying.command(program);
                for cache in caches.iter().map(|cache| cache.name()) {
                    let share = files.share.display();
                    start.arg("--fs").arg(format!("tag={cache},path={share},cache={cache}"));
                }
                Self { agent, processes: vec![spawn(start, &path("log"))?], logs }
            }
            Kind::Stock { qemu, virtiofsd } => {
                // Nobody else's, since a host has one of each at a time.
                let cid = std::process::id() + number + 3;
                let agent = Agent::new(kind.name(), KernelVsock { cid });
                let mut guest = Self { agent, processes: Vec::new(), logs };
                let mut shares = Vec::new();
                for cache in caches {
                    let socket = path(cache.name());
                    let start = server(virtiofsd, &files.share, *cache, &socket);
                    guest.processes.push(spawn(start, &path("virtiofsd.log"))?);
                    guest.wait_until_served(&socket, &path("virtiofsd.log"))?;
                    shares.push((*cache, socket));
                }
                let mut start = Command::new(qemu);
                start.args(machine(files, cid, &shares));
                start.arg("-serial").arg(file_option("file:", &path("console"), ""));
                guest.processes.push(spawn(start, &path("log"))?);
                guest
            }
        };
        guest.mount(caches).map_err(|error| guest.explain(error))?;
        Ok(guest)
    }

    fn wait_until_served(&mut self, socket: &Path, log: &Path) -> anyhow::Result<()> {
        let deadline = Instant::now() + LISTENS_WITHIN;
        while !socket.exists() {
            if let Some(status) =
                self.processes.last_mut().map(Child::try_wait).transpose()?.flatten()
            {
                bail!("virtiofsd: {status}, said {:?}", last_line(log).unwrap_or_default());
            }
            ensure!(Instant::now() < deadline, "virtiofsd does not listen");
            thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    fn mount(&mut self, caches: &[Cache]) -> anyhow::Result<()> {
        let vmm = self.processes.last_mut().context("no VMM")?;
        self.agent.wait_until_ready(vmm)?;
        let known = self.agent.sh("cat /proc/filesystems")?;
        ensure!(
            known.split_whitespace().any(|name| name == "virtiofs"),
            "the kernel of the guest has no virtiofs: give one that has CONFIG_VIRTIO_FS=y, by --kernel"
        );
        self.agent.sh("mkdir -p /tools && mount -t erofs /dev/vda /tools")?;
        for cache in caches {
            let (tag, at) = (cache.name(), cache.mount());
            self.agent.sh(&format!("mkdir -p {at} && mount -t virtiofs {tag} {at}"))?;
        }
        Ok(())
    }
}

/// A program that can be started, or why it cannot be.
pub fn executable(path: &Path, option: &str) -> anyhow::Result<PathBuf> {
    let found = match path.components().count() {
        1 => in_search_path(path).unwrap_or_else(|| path.to_owned()),
        _ => path.to_owned(),
    };
    let shown = found.display();
    let file =
        fs::metadata(&found).with_context(|| format!("{shown}: give a program by {option}"))?;
    ensure!(file.is_file(), "{shown} is not a file: give a program by {option}");
    let mode = file.permissions().mode();
    ensure!(mode & 0o111 != 0, "{shown} is not executable (mode {:o}): chmod +x it", mode & 0o777);
    Ok(found)
}

fn in_search_path(name: &Path) -> Option<PathBuf> {
    let folders = std::env::var_os("PATH")?;
    std::env::split_paths(&folders).map(|folder| folder.join(name)).find(|path| path.is_file())
}

/// What `cube-fsd` does for a share, asked of a stock server.
fn server(program: &Path, share: &Path, cache: Cache, socket: &Path) -> Command {
    let mut start = Command::new(program);
    start.arg("--socket-path").arg(socket).arg("--shared-dir").arg(share);
    let policy = match cache {
        Cache::Auto => "auto",
        Cache::None => "never",
    };
    start.args(["--cache", policy, "--log-level", "error"]);
    start
}

/// QEMU's arguments for a machine like ours.
fn machine(files: &Files, cid: u32, shares: &[(Cache, PathBuf)]) -> Vec<OsString> {
    let memory = format!("memory-backend-memfd,id=memory,share=on,size={MEMORY_MIB}M");
    let size = MEMORY_MIB.to_string();
    // Without reports of accesses to the APIC's priority, which 64-bit Linux does not need: QEMU writes a
    // vCPU's registers back on each, after which the lab's emulator forbids `ioperm`.
    let mut words: Vec<OsString> = [
        "-accel",
        "kvm",
        "-M",
        "q35,memory-backend=memory",
        "-cpu",
        "host",
        "-smp",
        "1",
        "-m",
        &size,
        "-object",
        &memory,
        "-nodefaults",
        "-no-user-config",
        "-global",
        "kvm-apic.vapic=off",
        "-no-reboot",
        "-display",
        "none",
        "-append",
        "console=ttyS0 reboot=t panic=-1 quiet",
        "-device",
        "virtio-blk-pci,drive=tools",
    ]
    .map(OsString::from)
    .into();
    words.extend(["-kernel".into(), files.kernel.clone().into()]);
    words.extend(["-initrd".into(), files.initrd.clone().into()]);
    // It is ours at the same time, who hold a lock on it.
    let drive = ",if=none,id=tools,format=raw,readonly=on,file.locking=off";
    words.extend(["-drive".into(), file_option("file=", &files.tools, drive)]);
    words.extend(["-device".into(), format!("vhost-vsock-pci,guest-cid={cid}").into()]);
    for (tag, socket) in shares.iter().map(|(cache, socket)| (cache.name(), socket)) {
        let chardev = format!("socket,id={tag},path=");
        words.extend(["-chardev".into(), file_option(&chardev, socket, "")]);
        let device = format!("vhost-user-fs-pci,chardev={tag},tag={tag},queue-size=1024");
        words.extend(["-device".into(), device.into()]);
    }
    words
}

/// An option of QEMU with a path in it, where a comma is written twice.
fn file_option(before: &str, path: &Path, after: &str) -> OsString {
    let mut option = before.as_bytes().to_vec();
    for byte in path.as_os_str().as_bytes() {
        option.extend(std::iter::repeat_n(*byte, if *byte == b',' { 2 } else { 1 }));
    }
    option.extend(after.as_bytes());
    std::ffi::OsStr::from_bytes(&option).to_owned()
}

fn spawn(mut start: Command, log: &Path) -> anyhow::Result<Child> {
    let log = File::create(log).with_context(|| format!("{}", log.display()))?;
    start.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    start.spawn().with_context(|| format!("cannot start {}", start.get_program().display()))
}

fn last_line(log: &Path) -> Option<String> {
    let text = String::from_utf8_lossy(&fs::read(log).ok()?).into_owned();
    text.lines().rev().map(str::trim).find(|line| !line.is_empty()).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(list: &[OsString]) -> Vec<&str> {
        list.iter().map(|word| word.to_str().unwrap()).collect()
    }

    #[test]
    fn the_machine_beside_ours_has_the_same_memory_and_shares() {
        let [kernel, initrd, tools, share, folder] = ["k", "i", "t,1", "s", "f"].map(PathBuf::from);
        let files = Files { kernel, initrd, tools, share, folder };
        let list = machine(&files, 7, &[(Cache::Auto, "/a,b".into()), (Cache::None, "/c".into())]);
        let list = words(&list);
        for wanted in [
            "memory-backend-memfd,id=memory,share=on,size=512M",
            "vhost-vsock-pci,guest-cid=7",
            "file=t,,1,if=none,id=tools,format=raw,readonly=on,file.locking=off",
            "socket,id=auto,path=/a,,b",
            "vhost-user-fs-pci,chardev=none,tag=none,queue-size=1024",
        ] {
            assert!(list.contains(&wanted), "{wanted} in {list:?}");
        }
        assert_eq!(list.iter().filter(|word| word.starts_with("vhost-user-fs-pci")).count(), 2);
    }

    #[test]
    fn a_stock_server_is_told_the_same_settings() {
        for (cache, policy) in [(Cache::Auto, "auto"), (Cache::None, "never")] {
            let start = server("v".as_ref(), "/share".as_ref(), cache, "/socket".as_ref());
            let told: Vec<_> = start.get_args().map(|word| word.to_str().unwrap()).collect();
            assert!(told.windows(2).any(|pair| pair == ["--cache", policy]), "{told:?}");
            assert!(told.windows(2).any(|pair| pair == ["--shared-dir", "/share"]), "{told:?}");
        }
    }

    #[test]
    fn what_cannot_be_started_is_named_with_its_cure() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("plain");
        fs::write(&file, "").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).unwrap();
        for (path, words) in [
            (Path::new("/nonexistent/virtiofsd"), "/nonexistent/virtiofsd: give a program by --x"),
            (Path::new("no-such-program"), "no-such-program: give a program by --x"),
            (folder.path(), "is not a file: give a program by --x"),
            (&file, "plain is not executable (mode 644): chmod +x it"),
        ] {
            let error = executable(path, "--x").unwrap_err().to_string();
            assert!(error.contains(words), "{path:?}: {error}");
        }
        assert!(executable("sh".as_ref(), "--x").unwrap().ends_with("sh"));
    }

    #[test]
    fn a_server_that_ends_at_once_says_why() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        let mut start = Command::new("sh");
        start.args(["-c", "echo first; echo 'no such option' >&2; exit 2"]);
        let agent = Agent::new("x", KernelVsock { cid: 3 });
        let mut guest = Guest {
            agent,
            processes: vec![spawn(start, &log).unwrap()],
            logs: [log.clone(), log.clone()],
        };
        let socket = folder.path().join("never");
        let error = guest.wait_until_served(&socket, &log).unwrap_err().to_string();
        assert_eq!(error, "virtiofsd: exit status: 2, said \"no such option\"");
    }
}
