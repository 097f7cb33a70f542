//! `manifest.json`: what a snapshot is. Read and checked before anything is made.
//!
//! A description of an older version is read as what it would be in this one; a newer one is refused.
//! Its checksum is the last thing in it, in every version, and covers the bytes before and after it:
//! damage is told without understanding the rest.

use std::io;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::checksum;
use super::host_files::HostFile;
use crate::config::{ConfigError, VmConfig};

/// What every description begins with.
const FORMAT: &str = "cubevmm-snapshot";
/// Raised with each change of the format. Records inside have versions of their own.
///
/// 1: no identity, no checksums of memory, no copies of disks, always all of memory.
/// 2: the pages of a difference are in the order of memory.
const VERSION: u32 = 3;
/// The only architecture there is.
const ARCH: &str = "x86_64";

/// The description of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    format: String,
    version: u32,
    arch: String,
    /// Version of the VMM that has written it.
    pub vmm: String,
    /// Names the instant: what one snapshot is a difference to, another one has as its id.
    pub id: String,
    /// What it is a difference to; nothing: it is whole.
    pub parent: Option<Parent>,
    /// Nanoseconds since 1970 at which the VM stood still.
    pub taken_unix_nanos: u64,
    /// Bytes of the state.
    pub state_bytes: u64,
    /// Checksum of the state.
    pub state_crc64: String,
    /// Bytes of guest memory.
    pub memory_bytes: u64,
    /// Checksum of the checksums of memory. Version 1 had none.
    pub sums_crc64: Option<String>,
    /// The disks that have been copied.
    pub disks: Vec<SavedDisk>,
    /// The VM, with what has been plugged. Paths are absolute, or inside of the folder.
    pub config: VmConfig,
    /// The files of its disks and persistent memory, as they were.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<HostFile>,
    /// Checksum of this description with nothing here.
    checksum: String,
}

/// The snapshot that another one is a difference to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Parent {
    /// Its id.
    pub id: String,
    /// Where it was by then.
    pub dir: PathBuf,
    /// Checksum of the list of the pages that differ.
    pub runs_crc64: String,
    /// Bytes of the pages that differ.
    pub pages_bytes: u64,
}

/// A disk as it was when the VM stood still.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedDisk {
    /// The device's name.
    pub id: String,
    /// The copy: a name in the folder of the snapshot, or an absolute path elsewhere.
    pub path: PathBuf,
    /// Its length.
    pub bytes: u64,
    /// It shares blocks with the disk, so that it costs no room until one of them is written to.
    pub shared: bool,
}

/// Version 1 of [`Manifest`].
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct First {
    format: String,
    #[serde(rename = "version")]
    _version: u32,
    arch: String,
    vmm: String,
    taken_unix_nanos: u64,
    state_bytes: u64,
    state_crc64: String,
    memory_bytes: u64,
    config: VmConfig,
    #[serde(default)]
    files: Vec<HostFile>,
    checksum: String,
}

impl From<First> for Manifest {
    fn from(first: First) -> Self {
        Self {
            format: first.format,
            version: VERSION,
            arch: first.arch,
            vmm: first.vmm,
            // It has no other name.
            id: first.checksum.repeat(2),
            parent: None,
            taken_unix_nanos: first.taken_unix_nanos,
            state_bytes: first.state_bytes,
            state_crc64: first.state_crc64,
            memory_bytes: first.memory_bytes,
            sums_crc64: None,
            disks: Vec::new(),
            config: first.config,
            files: first.files,
            checksum: first.checksum,
        }
    }
}

/// The part that is the same in all versions.
#[derive(Deserialize)]
struct Head {
    format: String,
    version: u32,
    arch: String,
}

/// Why a description is refused.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    /// It is something else.
    #[error("it is not a description of a snapshot: {0}")]
    NotOne(#[source] serde_json::Error),
    /// Its format is another.
    #[error("its format is {0:?}, expected \"{FORMAT}\"")]
    Format(String),
    /// It is of a newer release.
    #[error("it has version {0} of the format, this release reads versions up to {VERSION}")]
    Version(u32),
    /// It is of another architecture.
    #[error("it is of a {0:?} machine, this is {ARCH}")]
    Arch(String),
    /// It was changed.
    #[error("it does not have the checksum that it was written with; the file is damaged")]
    Damaged,
    /// The machine cannot be.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Its memory cannot be private.
    #[error("its memory is shared with a vhost-user backend, which cannot be restored yet")]
    Shared,
    /// A name that does not name.
    #[error("its {what} {value:?} is none")]
    Name {
        /// Of what.
        what: &'static str,
        /// What stands there.
        value: String,
    },
    /// Sizes contradict each other.
    #[error("{memory_bytes} bytes of memory are not those of a guest with {ram}")]
    Memory {
        /// What it says.
        memory_bytes: u64,
        /// What the machine has.
        ram: u64,
    },
}

impl Manifest {
    /// Describes a VM with that state, whole and without copies of disks.
    pub fn new(config: VmConfig, id: String, taken_unix_nanos: u64, state: &[u8]) -> Self {
        Self {
            format: FORMAT.to_owned(),
            version: VERSION,
            arch: ARCH.to_owned(),
            vmm: env!("CARGO_PKG_VERSION").to_owned(),
            id,
            parent: None,
            taken_unix_nanos,
            state_bytes: state.len() as u64,
            state_crc64: checksum::of(state),
            memory_bytes: config.memory.bytes(),
            sums_crc64: None,
            disks: Vec::new(),
            config,
            files: Vec::new(),
            checksum: String::new(),
        }
    }

    /// The bytes of the file.
    pub fn to_bytes(&self) -> io::Result<Vec<u8>> {
        let blank = Self { checksum: String::new(), ..self.clone() };
        let checksum = checksum::of(&blank.encode()?);
        Self { checksum, ..blank }.encode()
    }

    fn encode(&self) -> io::Result<Vec<u8>> {
        let mut bytes = serde_json::to_vec_pretty(self).map_err(io::Error::other)?;
        bytes.push(b'\n');
        Ok(bytes)
    }

    /// Reads the bytes of a file that nobody vouches for.
    pub fn parse(bytes: &[u8]) -> Result<Self, ManifestError> {
        let head: Head = serde_json::from_slice(bytes).map_err(ManifestError::NotOne)?;
        if head.format != FORMAT {
            return Err(ManifestError::Format(head.format));
        }
        if head.version == 0 || head.version > VERSION {
            return Err(ManifestError::Version(head.version));
        }
        if head.arch != ARCH {
            return Err(ManifestError::Arch(head.arch));
        }
        if !is_whole(bytes) {
            return Err(ManifestError::Damaged);
        }
        let manifest = match head.version {
            1 => serde_json::from_slice::<First>(bytes).map(Self::from),
            _ => serde_json::from_slice(bytes),
        };
        let manifest = manifest.map_err(ManifestError::NotOne)?;
        manifest.check()?;
        Ok(manifest)
    }

    /// Refuses what no release writes, whatever the checksum.
    fn check(&self) -> Result<(), ManifestError> {
        self.config.validate()?;
        if self.config.shares_memory() {
            return Err(ManifestError::Shared);
        }
        let (memory_bytes, ram) = (self.memory_bytes, self.config.memory.bytes());
        if memory_bytes != ram {
            return Err(ManifestError::Memory { memory_bytes, ram });
        }
        let ids = [Some(&self.id), self.parent.as_ref().map(|parent| &parent.id)];
        if let Some(id) = ids.into_iter().flatten().find(|id| !is_id(id)) {
            return Err(ManifestError::Name { what: "id", value: id.clone() });
        }
        let disks = self.config.all_disks();
        for (index, saved) in self.disks.iter().enumerate() {
            let twice = self.disks.iter().take(index).any(|other| other.id == saved.id);
            if twice || !disks.iter().any(|disk| disk.id == saved.id) {
                return Err(ManifestError::Name { what: "disk", value: saved.id.clone() });
            }
            // Nothing but a file of the folder's own, unless somebody has said where.
            if !saved.path.is_absolute() && saved.path.as_os_str() != disk_file(&saved.id).as_str()
            {
                let value = saved.path.display().to_string();
                return Err(ManifestError::Name { what: "copy of a disk", value });
            }
        }
        Ok(())
    }
}

/// Name of the copy of a disk in the folder.
pub fn disk_file(id: &str) -> String {
    format!("disk-{id}")
}

/// 128 bits in hexadecimal digits.
fn is_id(text: &str) -> bool {
    text.len() == 32 && text.bytes().all(|digit| digit.is_ascii_hexdigit())
}

/// What follows the checksum, which is 16 digits long.
const END: &[u8] = b"\"\n}\n";
const DIGITS: usize = 16;

/// Whether the checksum at the end is that of the other bytes.
fn is_whole(bytes: &[u8]) -> bool {
    let Some(before_end) = bytes.strip_suffix(END) else { return false };
    let Some(at) = before_end.len().checked_sub(DIGITS) else { return false };
    let (before, digits) = before_end.split_at(at);
    let blank = [before, END].concat();
    before.ends_with(b"\"checksum\": \"") && checksum::of(&blank).as_bytes() == digits
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest() -> Manifest {
        let config = r#"{"cpus": 2, "memory": "64M", "kernel": "/k", "vsock": "/v",
                         "disks": [{"path": "/disk", "id": "data"}]}"#;
        Manifest::new(serde_json::from_str(config).unwrap(), "0af5".repeat(8), 5, b"state")
    }

    fn refusal(text: &str) -> String {
        Manifest::parse(text.as_bytes()).unwrap_err().to_string()
    }

    #[test]
    fn a_description_comes_back_equal() {
        let bytes = manifest().to_bytes().unwrap();
        let read = Manifest::parse(&bytes).unwrap();
        assert_eq!(read.to_bytes().unwrap(), bytes);
        assert_eq!((read.state_bytes, read.memory_bytes), (5, 64 << 20));
        assert_eq!(read.config, manifest().config);
    }

    #[test]
    fn every_truncation_is_refused() {
        let bytes = manifest().to_bytes().unwrap();
        for len in 0..bytes.len() {
            assert!(Manifest::parse(&bytes[..len]).is_err(), "{len} bytes");
        }
    }

    #[test]
    fn every_flipped_bit_is_refused() {
        let bytes = manifest().to_bytes().unwrap();
        for bit in 0..bytes.len() * 8 {
            let mut damaged = bytes.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(Manifest::parse(&damaged).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn other_formats_versions_and_machines_are_told_apart() {
        let text = String::from_utf8(manifest().to_bytes().unwrap()).unwrap();
        assert!(refusal(&text.replace(FORMAT, "other")).contains("\"other\""));
        let newer = refusal(&text.replacen("\"version\": 3", "\"version\": 7, \"new\": 1", 1));
        assert!(newer.contains("version 7") && newer.contains("up to 3"), "{newer}");
        assert!(refusal(&text.replace("x86_64", "riscv64")).contains("riscv64"));
        assert!(refusal(&text.replace("/disk", "/other")).contains("damaged"));
        assert!(refusal(&(text.clone() + " ")).contains("damaged"));
        assert!(refusal("{}").contains("not a description"));
    }

    #[test]
    fn a_machine_that_cannot_be_is_refused_whatever_the_checksum() {
        let mut impossible = manifest();
        impossible.config.cpus = 1000;
        let error = Manifest::parse(&impossible.to_bytes().unwrap()).unwrap_err();
        assert!(matches!(error, ManifestError::Config(_)));
        let disk = |id: &str, path: &str| SavedDisk {
            id: id.to_owned(),
            path: path.into(),
            bytes: 1,
            shared: true,
        };
        for (disks, datum) in [
            (vec![disk("none", "disk-none")], "none"),
            (vec![disk("data", "../secret")], "../secret"),
            (vec![disk("data", "disk-data"), disk("data", "/copy")], "data"),
        ] {
            let strange = Manifest { disks, ..manifest() };
            let error = Manifest::parse(&strange.to_bytes().unwrap()).unwrap_err().to_string();
            assert!(error.contains(datum), "{error}");
        }
        let nameless = Manifest { id: "../x".to_owned(), ..manifest() };
        let error = Manifest::parse(&nameless.to_bytes().unwrap()).unwrap_err();
        assert!(matches!(error, ManifestError::Name { .. }));
        let shorter = Manifest { memory_bytes: 4096, ..manifest() };
        let error = Manifest::parse(&shorter.to_bytes().unwrap()).unwrap_err();
        assert!(matches!(error, ManifestError::Memory { .. }));
    }
}
