//! Other VMMs, run with the same tiny guest when their binaries are given.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::str::FromStr;

use anyhow::{Context, bail, ensure};

use crate::bare_kvm::MEMORY_MIB;
use crate::process::{self, Finished};
use crate::rounds::Trial;
use crate::vmm::{Ground, LIMIT};

/// A kind of VMM that we know how to start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Firecracker,
    CloudHypervisor,
}

/// A VMM to compare with: `firecracker=PATH` or `cloud-hypervisor=PATH`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    kind: Kind,
    program: PathBuf,
}

impl FromStr for Peer {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        let (name, path) =
            text.split_once('=').context("write firecracker=FILE or cloud-hypervisor=FILE")?;
        let kind = match name {
            "firecracker" => Kind::Firecracker,
            "cloud-hypervisor" => Kind::CloudHypervisor,
            other => bail!("unknown peer {other:?}; write firecracker or cloud-hypervisor"),
        };
        let program = PathBuf::from(path);
        ensure!(program.is_file(), "{path:?} is not a file; give the program of {name}");
        Ok(Self { kind, program })
    }
}

impl Peer {
    /// Its name in the tables.
    pub fn name(&self) -> &'static str {
        match self.kind {
            Kind::Firecracker => "firecracker",
            Kind::CloudHypervisor => "cloud-hypervisor",
        }
    }

    /// Its program.
    pub fn program(&self) -> &Path {
        &self.program
    }

    /// Runs the tiny guest to its end.
    pub fn attempt(&self, ground: &Ground) -> anyhow::Result<Trial> {
        let command = match self.kind {
            Kind::Firecracker => self.firecracker(ground)?,
            Kind::CloudHypervisor => self.cloud_hypervisor(ground),
        };
        let finished = process::run(command, LIMIT)?;
        check(&finished)?;
        Ok(Trial { ended: finished.lifetime_ns(), marks: Vec::new() })
    }

    fn firecracker(&self, ground: &Ground) -> anyhow::Result<Command> {
        let config = ground.path("firecracker.json");
        write_firecracker_config(&config, &ground.guest())?;
        let mut command = Command::new(&self.program);
        command.args(["--no-api", "--level", "Error", "--config-file"]).arg(config);
        Ok(command)
    }

    fn cloud_hypervisor(&self, ground: &Ground) -> Command {
        let mut command = Command::new(&self.program);
        command.arg("--kernel").arg(ground.guest());
        command.args(["--cpus", "boot=1", "--serial", "tty", "--console", "off"]);
        command.arg("--memory").arg(format!("size={MEMORY_MIB}M"));
        command
    }
}

fn write_firecracker_config(path: &Path, guest: &Path) -> anyhow::Result<()> {
    let config = serde_json::json!({
        "boot-source": { "kernel_image_path": guest, "boot_args": "console=ttyS0" },
        "drives": [],
        "machine-config": { "vcpu_count": 1, "mem_size_mib": MEMORY_MIB },
    });
    fs::write(path, config.to_string()).with_context(|| format!("cannot write {}", path.display()))
}

/// A peer has run the guest if it says so by its exit code and has shown the guest's output.
fn check(finished: &Finished) -> anyhow::Result<()> {
    ensure!(finished.status.success(), "{}", finished.describe());
    ensure!(finished.stdout.contains('x'), "the guest's output is not in {:?}", finished.stdout);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_is_named_with_its_path() {
        let peer: Peer = "firecracker=/bin/true".parse().unwrap();
        assert_eq!((peer.name(), peer.program.as_path()), ("firecracker", Path::new("/bin/true")));
        let peer: Peer = "cloud-hypervisor=/bin/true".parse().unwrap();
        assert_eq!(peer.name(), "cloud-hypervisor");
    }

    #[test]
    fn what_is_no_peer_is_refused_with_what_is() {
        let error = "qemu=/usr/bin/qemu".parse::<Peer>().unwrap_err().to_string();
        assert!(error.contains("\"qemu\"") && error.contains("firecracker"), "{error}");
        for (text, words) in [
            ("/nonexistent", "write firecracker=FILE or cloud-hypervisor=FILE"),
            ("firecracker=/nonexistent", "\"/nonexistent\" is not a file; give the program of"),
            ("firecracker=", "is not a file"),
        ] {
            let error = text.parse::<Peer>().unwrap_err().to_string();
            assert!(error.contains(words), "{text}: {error}");
        }
    }

    #[test]
    fn a_peer_that_fails_says_how() {
        let peer = Peer { kind: Kind::CloudHypervisor, program: "/bin/false".into() };
        let error = peer.attempt(&Ground::new().unwrap()).unwrap_err().to_string();
        assert!(error.contains("exit status: 1"), "{error}");
    }

    #[test]
    fn a_peer_whose_guest_said_nothing_has_failed() {
        let peer = Peer { kind: Kind::Firecracker, program: "/bin/true".into() };
        let error = peer.attempt(&Ground::new().unwrap()).unwrap_err().to_string();
        assert!(error.contains("guest's output"), "{error}");
    }
}
