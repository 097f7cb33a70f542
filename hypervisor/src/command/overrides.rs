//! `--override`: something else for a device of a snapshot.

use std::os::fd::RawFd;
use std::path::PathBuf;

use devices::virtio::fs::Policy;
use devices::virtio::net::NetSource;

use crate::config::{self, Console, VmConfig};
use crate::console::ConsoleSink;

/// All the forms there are.
const FORMS: &str = "disk:ID=FILE, pmem:ID=FILE, net:ID=tap:NAME, net:ID=fd:N[:N…], \
                     fs:ID=path=DIR,policy=strict|tolerant|remap|copy (either part), vsock=PATH or \
                     console=off|stderr|file:PATH";

/// Why an override is refused.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum OverrideError {
    /// Not one.
    #[error("override {0:?} is not understood; write {FORMS}")]
    Form(String),
    /// Two for one thing.
    #[error("override of {0} is given twice; leave one out")]
    Twice(String),
    /// A device of another kind.
    #[error(
        "override {given}:{id}: {id:?} is not a {given} device, but a {is} device; write {is}:{id}=…"
    )]
    Kind {
        /// What was given.
        given: &'static str,
        /// The device.
        id: String,
        /// What it is.
        is: &'static str,
    },
    /// No such device.
    #[error("the snapshot has no {kind} device called {id:?}; {known}")]
    Unknown {
        /// What was given.
        kind: &'static str,
        /// The name.
        id: String,
        /// Those that there are.
        known: String,
    },
}

/// Something else for a device.
#[derive(Debug, PartialEq, Eq)]
enum Override {
    Disk { id: String, path: PathBuf },
    Pmem { id: String, path: PathBuf },
    Net { id: String, source: NetSource },
    Fs { id: String, path: Option<PathBuf>, policy: Option<Policy> },
    Vsock(PathBuf),
    Console(ConsoleSink),
}

/// What overrides have changed.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Overridden {
    /// The devices that have been given something else.
    pub ids: Vec<String>,
    /// Where the console goes, if that has been said.
    pub console: Option<ConsoleSink>,
}

/// Applies all of `texts` to the configuration of a snapshot.
pub fn apply(texts: &[String], config: &mut VmConfig) -> Result<Overridden, OverrideError> {
    let mut overridden = Overridden::default();
    let mut seen = Vec::new();
    for text in texts {
        let one = Override::parse(text).ok_or_else(|| OverrideError::Form(text.clone()))?;
        let what = one.what();
        if seen.contains(&what) {
            return Err(OverrideError::Twice(what));
        }
        seen.push(what);
        one.apply(config, &mut overridden)?;
    }
    Ok(overridden)
}

impl Override {
    fn parse(text: &str) -> Option<Self> {
        let (what, value) = text.split_once('=').filter(|(_, value)| !value.is_empty())?;
        let (kind, id) = what.split_once(':').unwrap_or((what, ""));
        let (id, path) = (id.to_owned(), PathBuf::from(value));
        match (kind, id.is_empty()) {
            ("disk", false) => Some(Self::Disk { id, path }),
            ("pmem", false) => Some(Self::Pmem { id, path }),
            ("net", false) => Some(Self::Net { id, source: tap_source(value)? }),
            ("fs", false) => share(id, value),
            ("vsock", true) => Some(Self::Vsock(path)),
            ("console", true) => Some(Self::Console(match value {
                "off" => ConsoleSink::Nowhere,
                "stderr" => ConsoleSink::Stderr,
                _ => ConsoleSink::File(value.strip_prefix("file:")?.into()),
            })),
            _ => None,
        }
    }

    fn what(&self) -> String {
        match self {
            Self::Disk { id, .. } => format!("disk:{id}"),
            Self::Pmem { id, .. } => format!("pmem:{id}"),
            Self::Net { id, .. } => format!("net:{id}"),
            Self::Fs { id, .. } => format!("fs:{id}"),
            Self::Vsock(_) => "vsock".to_owned(),
            Self::Console(_) => "console".to_owned(),
        }
    }

    fn apply(
        self,
        config: &mut VmConfig,
        overridden: &mut Overridden,
    ) -> Result<(), OverrideError> {
        let (kind, id) = match self {
            Self::Vsock(path) => {
                config.vsock = Some(path);
                return Ok(());
            }
            Self::Console(sink) => {
                // The guest has a serial port either way.
                if config.console == Console::Off {
                    config.console = Console::Serial;
                }
                overridden.console = Some(sink);
                return Ok(());
            }
            Self::Disk { id, path } => {
                let rootfs = config.rootfs.as_mut().filter(|_| id == "rootfs");
                let disks =
                    config.disks.iter_mut().filter(|disk| disk.id == id && !disk.vhost_user);
                let mut places = rootfs.into_iter().chain(disks.map(|disk| &mut disk.path));
                match places.next() {
                    Some(place) => *place = path,
                    None => return Err(not_there("disk", id, config)),
                }
                ("disk", id)
            }
            Self::Pmem { id, path } => {
                match config.pmem.iter_mut().find(|pmem| pmem.id == id) {
                    Some(pmem) => pmem.path = path,
                    None => return Err(not_there("pmem", id, config)),
                }
                ("pmem", id)
            }
            Self::Net { id, source } => {
                match config.net.iter_mut().find(|card| card.id == id) {
                    Some(card) => card.source = source,
                    None => return Err(not_there("net", id, config)),
                }
                ("net", id)
            }
            Self::Fs { id, path, policy } => {
                let Some(share) = config.fs.iter_mut().find(|share| share.id == id) else {
                    return Err(not_there("fs", id, config));
                };
                share.policy = policy.unwrap_or(share.policy);
                // A policy alone names no directory, and so consents to none.
                let Some(path) = path else { return Ok(()) };
                share.path = path;
                ("fs", id)
            }
        };
        tracing::debug!(kind, id, "overridden");
        overridden.ids.push(id);
        Ok(())
    }
}

/// `path=DIR` and `policy=POLICY`, one of them or both.
fn share(id: String, text: &str) -> Option<Override> {
    let (mut path, mut policy) = (None, None);
    for option in text.split(',') {
        match option.split_once('=')? {
            ("path", value) if !value.is_empty() && path.is_none() => path = Some(value.into()),
            ("policy", value) if policy.is_none() => policy = Some(config::policy(value).ok()?),
            _ => return None,
        }
    }
    Some(Override::Fs { id, path, policy })
}

fn tap_source(value: &str) -> Option<NetSource> {
    let (kind, what) = value.split_once(':').filter(|(_, what)| !what.is_empty())?;
    match kind {
        "tap" => Some(NetSource::Tap(what.to_owned())),
        "fd" => {
            let fds: Result<Vec<RawFd>, _> = what.split(':').map(str::parse).collect();
            Some(NetSource::Fd(fds.ok().filter(|fds| fds.iter().all(|&fd| fd >= 0))?))
        }
        _ => None,
    }
}

fn not_there(kind: &'static str, id: String, config: &VmConfig) -> OverrideError {
    let disks: Vec<_> = config.all_disks().into_iter().map(|disk| disk.id).collect();
    let pmem: Vec<_> = config.all_pmem().into_iter().map(|pmem| pmem.id).collect();
    let net: Vec<_> = config.all_net().into_iter().map(|card| card.id).collect();
    let fs: Vec<_> = config.all_fs().into_iter().map(|share| share.id).collect();
    let kinds = [("disk", disks), ("pmem", pmem), ("net", net), ("fs", fs)];
    if let Some((is, _)) = kinds.iter().find(|(is, ids)| *is != kind && ids.contains(&id)) {
        return OverrideError::Kind { given: kind, id, is };
    }
    let ids = kinds.into_iter().find(|(is, _)| *is == kind).map(|(_, ids)| ids.join(", "));
    let known = match ids.as_deref() {
        None | Some("") => "it has none".to_owned(),
        Some(ids) => format!("it has {ids}"),
    };
    OverrideError::Unknown { kind, id, known }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn saved() -> VmConfig {
        let config = r#"{"cpus": 1, "memory": "64M", "kernel": "/k", "rootfs": "/root", "vsock": "/v",
            "disks": [{"path": "/a", "id": "data"}], "pmem": [{"path": "/p", "id": "pmem0"}]}"#;
        let mut config: VmConfig = serde_json::from_str(config).unwrap();
        config.net = vec!["fd=9,id=net0".parse().unwrap()];
        config.fs = vec!["tag=t,path=/s,id=work".parse().unwrap()];
        config
    }

    fn applied(texts: &[&str]) -> Result<(VmConfig, Overridden), OverrideError> {
        let mut config = saved();
        let texts: Vec<_> = texts.iter().map(|&text| text.to_owned()).collect();
        let overridden = apply(&texts, &mut config)?;
        Ok((config, overridden))
    }

    #[test]
    fn overrides_change_what_they_name() {
        let all = ["disk:data=/b", "disk:rootfs=/r2", "pmem:pmem0=/q", "net:net0=tap:t1"];
        let more = ["vsock=/w", "console=file:/tmp/log"];
        let (config, overridden) = applied(&[&all[..], &more].concat()).unwrap();
        assert_eq!(config.disks[0].path, PathBuf::from("/b"));
        assert_eq!(config.rootfs, Some("/r2".into()));
        assert_eq!(config.pmem[0].path, PathBuf::from("/q"));
        assert_eq!(config.net[0].source, NetSource::Tap("t1".to_owned()));
        assert_eq!(config.vsock, Some("/w".into()));
        assert_eq!(overridden.ids, ["data", "rootfs", "pmem0", "net0"]);
        assert_eq!(overridden.console, Some(ConsoleSink::File("/tmp/log".into())));
        let (config, _) = applied(&["net:net0=fd:3:4"]).unwrap();
        assert_eq!(config.net[0].source, NetSource::Fd(vec![3, 4]));
    }

    #[test]
    fn shares_get_another_directory_a_policy_or_both() {
        let share = |texts: &[&str]| {
            applied(texts).map(|(config, changed)| (config.fs[0].clone(), changed))
        };
        let (both, changed) = share(&["fs:work=policy=remap,path=/b"]).unwrap();
        assert_eq!((both.path, both.policy), (PathBuf::from("/b"), Policy::Remap));
        assert_eq!(changed.ids, ["work"]);
        let (strict, changed) = share(&["fs:work=policy=strict"]).unwrap();
        assert_eq!((strict.path, strict.policy), (PathBuf::from("/s"), Policy::Strict));
        assert!(changed.ids.is_empty(), "a policy is no consent to a directory");
        let unknown = share(&["fs:other=path=/b"]).unwrap_err().to_string();
        assert!(unknown.contains("no fs device called \"other\"; it has work"), "{unknown}");
    }

    #[test]
    fn what_is_none_is_refused_with_all_forms() {
        for text in [
            "",
            "disk",
            "disk:data",
            "disk:data=",
            "disk=/b",
            "vsock:x=/b",
            "tpm:a=/b",
            "net:net0=t1",
            "net:net0=fd:x",
            "net:net0=fd:-1",
            "net:net0=tap:",
            "console=loud",
            "fs:work=/b",
            "fs:work=path=",
            "fs:work=policy=lax",
            "fs=path=/b",
        ] {
            let error = applied(&[text]).unwrap_err();
            assert_eq!(error, OverrideError::Form(text.to_owned()));
            assert!(error.to_string().contains("console=off|stderr|file:PATH"));
        }
    }

    #[test]
    fn unknown_ids_wrong_kinds_and_repetitions_are_named() {
        let refusal = |texts: &[&str]| applied(texts).unwrap_err().to_string();
        let unknown = refusal(&["disk:other=/b"]);
        assert!(
            unknown.contains("no disk device called \"other\"; it has rootfs, data"),
            "{unknown}"
        );
        let kind = refusal(&["disk:pmem0=/b"]);
        assert!(kind.contains("\"pmem0\" is not a disk device, but a pmem device"), "{kind}");
        assert!(refusal(&["disk:data=/a", "disk:data=/b"]).contains("disk:data is given twice"));
        assert!(refusal(&["vsock=/a", "vsock=/b"]).contains("vsock is given twice"));
    }
}
