//! Files that the guest sees: disks and persistent memory.

use std::path::PathBuf;
use std::str::FromStr;

use devices::rate_limiter::RateLimit;
use devices::virtio::block::{Engine, MAX_QUEUES};
use serde::{Deserialize, Serialize};

use super::ConfigError;

/// A disk: a raw image or a block device, or what a vhost-user backend makes of something.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskConfig {
    /// The file, or the Unix socket of the backend.
    pub path: PathBuf,
    /// It is served by another process, a vhost-user backend at that socket.
    #[serde(default, skip_serializing_if = "is_false")]
    pub vhost_user: bool,
    /// The device's name, also its serial number in the guest. Empty: chosen by position.
    #[serde(default)]
    pub id: String,
    /// The guest cannot write, whatever it negotiates.
    #[serde(default)]
    pub read_only: bool,
    /// How the host does its I/O.
    #[serde(default)]
    pub engine: Engine,
    /// Request queues; not given: one per vCPU, four at most, and one of a vhost-user backend.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queues: Option<u16>,
    /// Limits of reads and writes together.
    #[serde(default, skip_serializing_if = "RateLimit::is_none")]
    pub rate: RateLimit,
}

impl DiskConfig {
    /// A disk that the guest can write, without anything special.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            vhost_user: false,
            id: String::new(),
            read_only: false,
            engine: Engine::default(),
            queues: None,
            rate: RateLimit::default(),
        }
    }

    /// Checks what text and JSON both can say.
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        // What happens to requests is up to the backend; we never see them.
        let ours = [
            (self.read_only, "ro"),
            (self.engine != Engine::default(), "engine="),
            (self.rate.bytes.is_some(), "rate_bytes="),
            (self.rate.operations.is_some(), "rate_ops="),
        ];
        if let Some((_, option)) = ours.iter().find(|(given, _)| *given && self.vhost_user) {
            return Err(ConfigError::DiskVhostUser(option));
        }
        match self.queues {
            Some(queues) if !(1..=MAX_QUEUES).contains(&queues) => {
                Err(ConfigError::DiskQueues(queues.to_string()))
            }
            _ => Ok(()),
        }
    }
}

fn is_false(flag: &bool) -> bool {
    !flag
}

/// `path=FILE[,id=NAME][,ro]`, in any order.
#[derive(Default)]
struct FileOptions {
    path: Option<PathBuf>,
    id: String,
    read_only: bool,
}

impl FileOptions {
    fn parse(text: &str, unknown: fn(String) -> ConfigError) -> Result<Self, ConfigError> {
        let mut options = Self::default();
        for option in text.split(',') {
            match option.split_once('=') {
                Some(("path", path)) if !path.is_empty() && options.path.is_none() => {
                    options.path = Some(path.into());
                }
                Some(("id", id)) => options.id = checked_id(id)?,
                None if option == "ro" => options.read_only = true,
                _ => return Err(unknown(option.to_owned())),
            }
        }
        Ok(options)
    }
}

impl FromStr for DiskConfig {
    type Err = ConfigError;

    /// Reads `path=FILE[,id=NAME][,ro][,engine=ENGINE][,queues=N][,rate_bytes=RATE][,rate_ops=RATE]`,
    /// or `vhost-user=SOCKET[,id=NAME][,queues=N]`, in any order.
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let mut disk = Self::new(PathBuf::new());
        let mut seen = Vec::new();
        for option in text.split(',') {
            let unknown = || ConfigError::DiskOption(option.to_owned());
            let (key, value) = match option.split_once('=') {
                Some((key, value)) if !value.is_empty() || key == "id" => (key, value),
                None if option == "ro" => ("ro", ""),
                _ => return Err(unknown()),
            };
            if seen.contains(&key) {
                return Err(ConfigError::DiskTwice(option.to_owned()));
            }
            seen.push(key);
            match key {
                "path" | "vhost-user" if !disk.path.as_os_str().is_empty() => {
                    return Err(ConfigError::DiskSource(text.to_owned()));
                }
                "path" => disk.path = value.into(),
                "vhost-user" => {
                    disk.path = value.into();
                    disk.vhost_user = true;
                }
                "id" => disk.id = checked_id(value)?,
                "ro" if option == "ro" => disk.read_only = true,
                "engine" => disk.engine = value.parse()?,
                "queues" => {
                    let bad = |_| ConfigError::DiskQueues(value.to_owned());
                    disk.queues = Some(value.parse().map_err(bad)?);
                }
                "rate_bytes" => disk.rate.bytes = Some(value.parse()?),
                "rate_ops" => disk.rate.operations = Some(value.parse()?),
                _ => return Err(unknown()),
            }
        }
        if disk.path.as_os_str().is_empty() {
            return Err(ConfigError::DiskPath(text.to_owned()));
        }
        disk.validate()?;
        Ok(disk)
    }
}

/// Persistent memory: a file that the guest sees as memory, for DAX.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PmemConfig {
    /// The file.
    pub path: PathBuf,
    /// The device's name. Empty: chosen by position.
    #[serde(default)]
    pub id: String,
    /// The guest cannot write, and shares the host's page cache. Otherwise its writes stay in its
    /// own copy; the file is never written.
    #[serde(default)]
    pub read_only: bool,
}

impl FromStr for PmemConfig {
    type Err = ConfigError;

    /// Reads `path=FILE[,id=NAME][,ro]`.
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let file = FileOptions::parse(text, ConfigError::PmemOption)?;
        let path = file.path.ok_or_else(|| ConfigError::PmemPath(text.to_owned()))?;
        Ok(Self { path, id: file.id, read_only: file.read_only })
    }
}

/// A device's name: short enough for a serial number, harmless in a path.
pub(super) fn checked_id(id: &str) -> Result<String, ConfigError> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    if id.is_empty() || id.len() > 20 || !id.chars().all(allowed) {
        return Err(ConfigError::BadId(id.to_owned()));
    }
    Ok(id.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disks_are_read_from_options() {
        let disk: DiskConfig = "path=/a/b.img,id=data,ro".parse().unwrap();
        let id = "data".to_owned();
        let expected = DiskConfig { id, read_only: true, ..DiskConfig::new("/a/b.img") };
        assert_eq!(disk, expected);
        let text = "engine=io_uring,queues=3,path=x,rate_bytes=10M/s+1G,rate_ops=500/s";
        let disk: DiskConfig = text.parse().unwrap();
        assert_eq!((disk.engine, disk.queues), (Engine::IoUring, Some(3)));
        assert_eq!(disk.rate.bytes, Some("10M/s+1G".parse().unwrap()));
        assert_eq!(disk.rate.operations, Some("500/s".parse().unwrap()));
        let json = serde_json::to_string(&disk).unwrap();
        assert_eq!(serde_json::from_str::<DiskConfig>(&json).unwrap(), disk);
    }

    #[test]
    fn disks_of_a_backend_are_read_from_options() {
        let disk: DiskConfig = "vhost-user=/run/blk.sock,id=data,queues=2".parse().unwrap();
        let id = "data".to_owned();
        let rest = DiskConfig::new("/run/blk.sock");
        assert_eq!(disk, DiskConfig { vhost_user: true, id, queues: Some(2), ..rest });
        let json = serde_json::to_string(&disk).unwrap();
        assert_eq!(serde_json::from_str::<DiskConfig>(&json).unwrap(), disk);
        let path = serde_json::to_string(&DiskConfig::new("/a")).unwrap();
        assert!(!path.contains("vhost_user"), "{path}");
    }

    #[test]
    fn bad_disk_options_are_refused() {
        for (text, words) in [
            ("", "use path=FILE"),
            ("ro", "has no path"),
            ("path=", "use path=FILE"),
            ("path=x,rw=1", "\"rw=1\" is not known"),
            ("path=x,ro=1", "\"ro=1\" is not known"),
            ("path=x,id=", "1 to 20 letters"),
            ("path=x,id=a/b", "1 to 20 letters"),
            ("x", "use path=FILE"),
            ("path=x,path=y", "\"path=y\" is given twice"),
            ("path=x,ro,ro", "\"ro\" is given twice"),
            ("path=x,engine=aio", "use auto, io_uring or sync"),
            ("path=x,queues=0", "1 to 16"),
            ("path=x,queues=17", "1 to 16"),
            ("path=x,queues=many", "1 to 16"),
            ("path=x,rate_bytes=10M", "write for example 10M/s"),
            ("path=x,rate_ops=0/s", "at least 1"),
            ("vhost-user=", "or vhost-user=SOCKET"),
            ("path=x,vhost-user=y", "one of path=FILE and vhost-user=SOCKET"),
            ("vhost-user=y,path=x", "one of path=FILE and vhost-user=SOCKET"),
            ("vhost-user=x,vhost-user=y", "given twice"),
            ("vhost-user=x,ro", "\"ro\" is up to the backend"),
            ("vhost-user=x,engine=sync", "\"engine=\" is up to the backend"),
            ("vhost-user=x,rate_ops=5/s", "\"rate_ops=\" is up to the backend"),
        ] {
            let error = text.parse::<DiskConfig>().unwrap_err().to_string();
            assert!(error.contains(words) && !error.contains('\n'), "{text}: {error}");
        }
    }

    #[test]
    fn persistent_memory_is_read_from_options() {
        let pmem: PmemConfig = "ro,path=/a.img".parse().unwrap();
        let expected = PmemConfig { path: "/a.img".into(), id: String::new(), read_only: true };
        assert_eq!(pmem, expected);
        for text in ["", "ro", "path=", "path=a,path=b", "path=x,cache=1"] {
            assert!(text.parse::<PmemConfig>().is_err(), "{text}");
        }
    }

    #[test]
    fn fuzz_disk_and_pmem_options() {
        let corpus = [
            "path=/a/b.img,id=data,ro",
            "ro,path=/a.img",
            "path=x,id=a-b_c",
            "path=a=b",
            "vhost-user=/run/x.sock,id=b,queues=2",
            "path=x,engine=io_uring,queues=16,rate_bytes=10M/s+1G,rate_ops=500/100ms",
        ];
        let corpus = corpus.map(|text| text.as_bytes().to_vec());
        devices::testing::fuzz("disk and pmem options", &corpus, |input| {
            let text = String::from_utf8_lossy(input);
            let (disk, pmem) = (text.parse::<DiskConfig>(), text.parse::<PmemConfig>());
            for error in [disk.as_ref().err(), pmem.as_ref().err()].into_iter().flatten() {
                assert!(!error.to_string().contains('\n'), "{error}");
            }
            let Ok(disk) = disk else { return 0 };
            assert!(!disk.path.as_os_str().is_empty() && disk.id.len() <= 20);
            assert!(disk.queues.is_none_or(|queues| (1..=MAX_QUEUES).contains(&queues)));
            1 + usize::from(disk.read_only) + 2 * disk.id.len()
        });
    }
}
