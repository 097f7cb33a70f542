//! Files that the guest sees: disks and persistent memory.

use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::ConfigError;

/// A disk: a raw image or a block device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskConfig {
    /// The file.
    pub path: PathBuf,
    /// The device's name, also its serial number in the guest. Empty: chosen by position.
    #[serde(default)]
    pub id: String,
    /// The guest cannot write, whatever it negotiates.
    #[serde(default)]
    pub read_only: bool,
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

    /// Reads `path=FILE[,id=NAME][,ro]`.
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let file = FileOptions::parse(text, ConfigError::DiskOption)?;
        let path = file.path.ok_or_else(|| ConfigError::DiskPath(text.to_owned()))?;
        Ok(Self { path, id: file.id, read_only: file.read_only })
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
        let expected = DiskConfig { path: "/a/b.img".into(), id: "data".into(), read_only: true };
        assert_eq!(disk, expected);
    }

    #[test]
    fn bad_disk_options_are_refused() {
        for text in ["", "ro", "path=", "path=x,rw=1", "path=x,id=", "path=x,id=a/b", "x"] {
            assert!(text.parse::<DiskConfig>().is_err(), "{text}");
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
        let corpus = ["path=/a/b.img,id=data,ro", "ro,path=/a.img", "path=x,id=a-b_c", "path=a=b"];
        let corpus = corpus.map(|text| text.as_bytes().to_vec());
        devices::testing::fuzz("disk and pmem options", &corpus, |input| {
            let text = String::from_utf8_lossy(input);
            let (disk, pmem) = (text.parse::<DiskConfig>(), text.parse::<PmemConfig>());
            assert_eq!(disk.is_ok(), pmem.is_ok());
            let Ok(disk) = disk else { return 0 };
            assert!(!disk.path.as_os_str().is_empty() && disk.id.len() <= 20);
            1 + usize::from(disk.read_only) + 2 * disk.id.len()
        });
    }
}
