//! Linux guests that stay, of `cube-vmm` and of a peer, asked the same way: through the agent of the
//! root image, over vsock.

use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, ensure};
use guest_protocol::{Client, HybridSocket};

use crate::agent::Agent;
use crate::peer::Peer;
use crate::vmm::Staying;

/// Memory of each guest.
const MEMORY_MIB: u32 = 256;

/// Who runs a guest, and how.
#[derive(Clone, Debug)]
pub enum Kind {
    /// `cube-vmm`.
    Cube {
        /// The program.
        program: PathBuf,
        /// `mmio` or `pci`.
        transport: &'static str,
        /// `sync` or `io_uring`.
        engine: &'static str,
        /// The kernel moves its frames.
        vhost: bool,
    },
    /// Firecracker.
    Firecracker {
        /// The program.
        peer: Peer,
        /// `Sync` or `Async`.
        engine: &'static str,
    },
}

impl Kind {
    /// Its name in the tables.
    pub fn name(&self) -> String {
        match self {
            Self::Cube { transport, vhost: true, .. } => format!("vhost-net, {transport}"),
            Self::Cube { transport, engine, .. } => format!("{engine}, {transport}"),
            Self::Firecracker { peer, engine } => format!("{}, {engine}", peer.name()),
        }
    }

    /// Whether a piece of work shows anything of this kind that it does not of another.
    pub fn is_of_use(&self, part: Part) -> bool {
        match (self, part) {
            (Self::Cube { vhost, .. }, Part::Disk) => !vhost,
            (Self::Cube { vhost, engine, .. }, Part::Vsock) => !vhost && *engine != "sync",
            (Self::Cube { engine, .. }, Part::Net) => *engine != "sync",
            (Self::Firecracker { .. }, Part::Disk) => true,
            (Self::Firecracker { engine, .. }, Part::Vsock | Part::Net) => *engine != "Sync",
        }
    }
}

/// What of a guest a piece of work is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Its disk.
    Disk,
    /// Its vsock device.
    Vsock,
    /// Its network card.
    Net,
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
    /// Where each guest's disk, `/dev/vdb`, and sockets are made.
    pub folder: PathBuf,
}

/// A guest that is ready. Dropped, its VMM is killed.
pub struct Guest {
    /// What it is.
    pub kind: Kind,
    /// Its name in the tables.
    pub name: String,
    /// The file of its disk.
    pub disk: PathBuf,
    /// The host's address on its TAP.
    pub host: Ipv4Addr,
    /// What it is asked by.
    pub agent: Agent,
    vmm: Child,
}

impl Drop for Guest {
    fn drop(&mut self) {
        // Both fail if it has ended by itself.
        let _ = self.vmm.kill();
        let _ = self.vmm.wait();
    }
}

impl Guest {
    /// Boots the guest with this number, which names its TAP and its addresses.
    pub fn boot(kind: &Kind, number: u8, files: &Files, disk_mib: usize) -> anyhow::Result<Self> {
        let path = |name: &str| files.folder.join(format!("{number}.{name}"));
        let (disk, vsock) = (path("disk"), path("vsock"));
        fs::write(&disk, vec![0x5a; disk_mib << 20])?;
        let tap = format!("tap{number}");
        let host = Ipv4Addr::new(198, 18, number, 1);
        command("ip", &["tuntap", "add", &tap, "mode", "tap"])?;
        command("ip", &["addr", "add", &format!("{host}/24"), "dev", &tap])?;
        command("ip", &["link", "set", &tap, "up"])?;
        let mut start = match kind {
            Kind::Cube { program, transport, engine, vhost } => {
                let Files { kernel, initrd, tools, .. } = files;
                let (memory_mib, api) = (MEMORY_MIB, &path("api"));
                let vsock = &vsock;
                let staying = Staying { transport, memory_mib, api, vsock, kernel, initrd, tools };
                let mut start = staying.command(program);
                start.arg("--disk").arg(format!("path={},engine={engine}", disk.display()));
                let vhost = if *vhost { ",vhost=on" } else { "" };
                start.args(["--net", &format!("tap={tap}{vhost}")]);
                start
            }
            Kind::Firecracker { peer, engine } => {
                let config = firecracker(files, &disk, &vsock, &tap, engine);
                fs::write(path("json"), config)?;
                let mut start = Command::new(peer.program());
                start.args(["--no-api", "--level", "Error", "--config-file"]).arg(path("json"));
                start
            }
        };
        start.stdin(Stdio::null()).stdout(Stdio::null());
        let vmm = start.spawn().with_context(|| format!("{start:?}"))?;
        let agent = Agent::new(kind.name(), HybridSocket::new(vsock));
        let mut guest = Self { kind: kind.clone(), name: kind.name(), disk, host, agent, vmm };
        guest.agent.wait_until_ready(&mut guest.vmm)?;
        guest.sh(&format!(
            "mkdir -p /tools && mount -t erofs /dev/vda /tools && ip link set eth0 up && \
             ip addr add 198.18.{number}.2/24 dev eth0"
        ))?;
        Ok(guest)
    }

    /// A connection to the agent.
    pub fn client(&self) -> anyhow::Result<Client> {
        self.agent.client()
    }

    /// Runs a line of shell and gives what it prints. Its errors are on standard output, too.
    pub fn sh(&self, line: &str) -> anyhow::Result<String> {
        self.agent.sh(line)
    }
}

fn firecracker(files: &Files, disk: &Path, vsock: &Path, tap: &str, engine: &str) -> String {
    let drive = |id: &str, path: &Path, ro: bool| {
        serde_json::json!({
            "drive_id": id, "path_on_host": path, "is_root_device": false,
            "is_read_only": ro, "io_engine": engine,
        })
    };
    serde_json::json!({
        "boot-source": {
            "kernel_image_path": files.kernel, "initrd_path": files.initrd,
            "boot_args": "reboot=t panic=-1 quiet",
        },
        "drives": [drive("tools", &files.tools, true), drive("disk", disk, false)],
        "machine-config": { "vcpu_count": 1, "mem_size_mib": MEMORY_MIB },
        "vsock": { "guest_cid": 3, "uds_path": vsock },
        "network-interfaces": [{ "iface_id": "eth0", "host_dev_name": tap }],
    })
    .to_string()
}

/// What makes images of programs for guests, here and in the tests.
const TOOL_IMAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/harness/tool-image");

/// Makes an erofs image with programs of the host in `bin` and their libraries in `lib`, the loader
/// as `ld.so`.
pub fn tools(folder: &Path, programs: &[&Path]) -> anyhow::Result<PathBuf> {
    let image = folder.join("tools.erofs");
    let paths = [image.as_path()].into_iter().chain(programs.iter().copied());
    let paths: Vec<String> = paths.map(|path| path.display().to_string()).collect();
    command(TOOL_IMAGE, &paths.iter().map(String::as_str).collect::<Vec<_>>())?;
    Ok(image)
}

/// Runs a program of the host that prepares something.
pub(crate) fn command(program: &str, arguments: &[&str]) -> anyhow::Result<()> {
    let path = std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin";
    let output = Command::new(program).args(arguments).env("PATH", path).output();
    let output = output.with_context(|| format!("{program} is missing: run tests/packages"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{program} {arguments:?}: {}", said.trim());
    Ok(())
}

/// Puts this process into a network namespace of its own.
pub fn leave_network() -> anyhow::Result<()> {
    // SAFETY: the call takes no pointer; there are no other threads yet that would stay behind.
    let failed = unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0;
    let error = std::io::Error::last_os_error();
    ensure!(!failed, "no network of its own: {error}; run it as root");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_has_the_same_disks_in_the_same_order() {
        let [kernel, initrd, tools, folder] = ["k", "i", "t", "f"].map(PathBuf::from);
        let files = Files { kernel, initrd, tools, folder };
        let text = firecracker(&files, "d".as_ref(), "v".as_ref(), "tap0", "Async");
        let config: serde_json::Value = serde_json::from_str(&text).unwrap();
        let drives = &config["drives"];
        assert_eq!([&drives[0]["path_on_host"], &drives[1]["path_on_host"]], ["t", "d"]);
        assert_eq!(drives[0]["is_read_only"], true);
        assert_eq!(drives[1]["io_engine"], "Async");
        assert_eq!(config["network-interfaces"][0]["host_dev_name"], "tap0");
    }

    #[test]
    fn what_is_missing_is_named_with_its_cure() {
        let folder = tempfile::tempdir().unwrap();
        let error = tools(folder.path(), &["/nonexistent/fio".as_ref()]).unwrap_err().to_string();
        assert!(error.ends_with("/nonexistent/fio is missing: run tests/packages"), "{error}");
    }
}
