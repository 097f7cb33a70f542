//! `cube-vmm restore`: a VM that goes on where a snapshot was taken, with a control socket.

use std::path::PathBuf;

use clap::Args;
use devices::virtio::net::TapSource;

use super::start::{beside, until_the_end};
use crate::agent::watch_for_hello;
use crate::api_socket::ApiSocket;
use crate::builder::{self, Observers};
use crate::config::VmConfig;
use crate::control::Control;
use crate::event::Events;
use crate::signals;
use crate::snapshot::load::Saved;
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

    /// Give a device something else than it had: disk:ID=FILE, pmem:ID=FILE, net:ID=tap:NAME or
    /// vsock=PATH; may be repeated. A rootfs is disk:rootfs. vsock is the api socket's path with
    /// .vsock added otherwise
    #[arg(long = "override", value_name = "KIND:ID=…")]
    pub overrides: Vec<String>,
}

/// What `restore --help` ends with.
pub const RESTORE_HELP: &str = "\
The folder is not changed, and must not be as long as the VM runs: its memory is a private mapping of
the file there. Any number of VMs can be made of it. Each gets a new generation id, fresh randomness
and the time of day from the host before it counts as ready; host name and addresses stay.

Disks are those of the VM that was saved, at the same paths, and must be as they were by then. A disk
that can be written belongs to one VM at a time: give the others a copy.

Examples:
  cube-vmm restore base --api-socket S --resume
  cp --reflink=auto data.img two.img
  cube-vmm restore base --api-socket T --resume --override disk:data=two.img";

/// What `snapshot --help` ends with.
pub const SNAPSHOT_HELP: &str = "\
The VM stands still while its state and memory are written, and then goes on. If anything fails it goes
on as well, and nothing is left of the folder. Disks are not copied: the folder refers to them by their
paths, and they must be the same when it is restored. Copy them while the VM is paused (--keep-paused).
Persistent memory must be read-only.

Examples:
  cube-vmm snapshot --api-socket S base
  cube-vmm snapshot --api-socket S base --keep-paused && cp data.img base.img
  cube-vmm resume --api-socket S";

/// Something else for a device.
#[derive(Debug, PartialEq, Eq)]
enum Override {
    Disk { id: String, path: PathBuf },
    Pmem { id: String, path: PathBuf },
    Net { id: String, tap: String },
    Vsock(PathBuf),
}

impl Override {
    fn parse(text: &str) -> anyhow::Result<Self> {
        let Some((what, value)) = text.split_once('=').filter(|(_, value)| !value.is_empty())
        else {
            anyhow::bail!("override {text:?} has no value; write KIND:ID=VALUE");
        };
        let (kind, id) = what.split_once(':').unwrap_or((what, ""));
        let (id, path) = (id.to_owned(), PathBuf::from(value));
        Ok(match (kind, id.is_empty()) {
            ("disk", false) => Self::Disk { id, path },
            ("pmem", false) => Self::Pmem { id, path },
            ("vsock", true) => Self::Vsock(path),
            ("net", false) => match value.strip_prefix("tap:") {
                Some(tap) if !tap.is_empty() => Self::Net { id, tap: tap.to_owned() },
                _ => anyhow::bail!("override {text:?} is not understood; write net:ID=tap:NAME"),
            },
            _ => anyhow::bail!(
                "override {text:?} is not understood; write disk:ID=FILE, pmem:ID=FILE, \
                 net:ID=tap:NAME or vsock=PATH"
            ),
        })
    }

    fn apply(self, config: &mut VmConfig) -> anyhow::Result<()> {
        let (kind, id, done) = match self {
            Self::Disk { id, path } if id == "rootfs" => {
                ("disk", id, config.rootfs.as_mut().map(|rootfs| *rootfs = path))
            }
            Self::Disk { id, path } => {
                let disk = config.disks.iter_mut().find(|disk| disk.id == id);
                ("disk", id, disk.map(|disk| disk.path = path))
            }
            Self::Pmem { id, path } => {
                let pmem = config.pmem.iter_mut().find(|pmem| pmem.id == id);
                ("pmem", id, pmem.map(|pmem| pmem.path = path))
            }
            Self::Net { id, tap } => {
                let card = config.net.iter_mut().find(|card| card.id == id);
                ("net", id, card.map(|card| card.source = TapSource::Tap(tap)))
            }
            Self::Vsock(path) => {
                config.vsock = Some(path);
                return Ok(());
            }
        };
        done.ok_or_else(|| anyhow::anyhow!("the snapshot has no {kind} device called {id:?}"))
    }
}

/// The machine of the snapshot, with other things for its devices.
fn overridden(options: &RestoreOptions, saved: &VmConfig) -> anyhow::Result<VmConfig> {
    let mut config = saved.clone();
    config.vsock = Some(beside(&options.api_socket));
    for text in &options.overrides {
        Override::parse(text)?.apply(&mut config)?;
    }
    let inherited = |source: &TapSource| matches!(source, TapSource::Fd(_));
    if let Some(card) = config.net.iter().find(|card| inherited(&card.source)) {
        anyhow::bail!(
            "network card {:?} was on descriptors that are gone; add --override net:{}=tap:NAME",
            card.id,
            card.id
        );
    }
    Ok(config)
}

/// Runs it until the guest ends. The exit code tells how.
pub fn restore(options: &RestoreOptions, ladder: Ladder) -> anyhow::Result<u8> {
    let mut saved = Saved::open(&options.dir)?;
    let config = overridden(options, &saved.manifest.config)?;
    let hello = saved.state.hello.take();
    let socket = ApiSocket::bind(&options.api_socket)?;
    let (events, receiver) = Events::channel();
    let observers = Observers { ladder, stamp_entry: false, events: events.clone() };
    let vm = builder::restore(&config, &observers, saved)?;
    signals::watch(events.clone())?;
    let mut control = Control::new(vm, events, receiver).restored(hello);
    // For a guest that was saved before its agent has said it.
    watch_for_hello(control.vm().vsock(), observers.events.clone())?;
    if options.resume {
        control.resume()?;
    }
    socket.serve(observers.events.clone())?;
    Ok(until_the_end(&mut control, None, &observers.ladder))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(overrides: &[&str]) -> RestoreOptions {
        RestoreOptions {
            dir: "/s".into(),
            api_socket: "/api".into(),
            resume: true,
            overrides: overrides.iter().map(|&text| text.to_owned()).collect(),
        }
    }

    fn saved() -> VmConfig {
        let config = r#"{"cpus": 1, "memory": "64M", "kernel": "/k", "rootfs": "/root", "vsock": "/v",
            "disks": [{"path": "/a", "id": "data"}], "pmem": [{"path": "/p", "id": "pmem0"}]}"#;
        let mut config: VmConfig = serde_json::from_str(config).unwrap();
        config.net = vec!["fd=9,id=net0".parse().unwrap()];
        config
    }

    #[test]
    fn overrides_change_what_they_name() {
        let all = ["disk:data=/b", "disk:rootfs=/r2", "pmem:pmem0=/q", "net:net0=tap:t1"];
        let config = overridden(&options(&all), &saved()).unwrap();
        assert_eq!(config.disks[0].path, PathBuf::from("/b"));
        assert_eq!(config.rootfs, Some("/r2".into()));
        assert_eq!(config.pmem[0].path, PathBuf::from("/q"));
        assert_eq!(config.net[0].source, TapSource::Tap("t1".to_owned()));
        assert_eq!(config.vsock, Some("/api.vsock".into()));
        let more = [&all[..], &["vsock=/w"]].concat();
        assert_eq!(overridden(&options(&more), &saved()).unwrap().vsock, Some("/w".into()));
    }

    #[test]
    fn overrides_of_nothing_are_refused() {
        let refusal = |text| overridden(&options(&[text]), &saved()).unwrap_err().to_string();
        for text in ["", "disk", "disk:data", "disk:data=", "disk=/b", "vsock:x=/b", "tpm:a=/b"] {
            assert!(refusal(text).contains("override"), "{text:?}");
        }
        assert!(refusal("disk:other=/b").contains("no disk device called \"other\""));
        assert!(refusal("disk:pmem0=/b").contains("no disk device"));
        assert!(refusal("net:net0=fd:3").contains("net:ID=tap:NAME"));
        assert!(refusal("disk:data=/b").contains("--override net:net0=tap:NAME"));
    }
}
