//! `manifest.json`: what a snapshot is. Read and checked before anything is made.

use std::io;

use serde::{Deserialize, Serialize};

use super::checksum;
use super::host_files::HostFile;
use crate::config::{ConfigError, VmConfig};

/// What every description begins with.
const FORMAT: &str = "cubevmm-snapshot";
/// Raised with each change of the format. Records inside have versions of their own.
const VERSION: u32 = 1;
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
    /// Nanoseconds since 1970 at which the VM stood still.
    pub taken_unix_nanos: u64,
    /// Bytes of the state.
    pub state_bytes: u64,
    /// Checksum of the state.
    pub state_crc64: String,
    /// Bytes of memory.
    pub memory_bytes: u64,
    /// The VM, with what has been plugged. Paths are absolute, or inside of the folder.
    pub config: VmConfig,
    /// The files of its disks and persistent memory, as they were.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<HostFile>,
    /// Checksum of this description with nothing here.
    checksum: String,
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
    /// It is of another release.
    #[error("it has version {0} of the format, this release reads version {VERSION}")]
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
    /// Describes a VM with that state.
    pub fn new(config: VmConfig, taken_unix_nanos: u64, state: &[u8]) -> Self {
        Self {
            format: FORMAT.to_owned(),
            version: VERSION,
            arch: ARCH.to_owned(),
            vmm: env!("CARGO_PKG_VERSION").to_owned(),
            taken_unix_nanos,
            state_bytes: state.len() as u64,
            state_crc64: checksum::of(state),
            memory_bytes: config.memory.bytes(),
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
        if head.version != VERSION {
            return Err(ManifestError::Version(head.version));
        }
        if head.arch != ARCH {
            return Err(ManifestError::Arch(head.arch));
        }
        let manifest: Self = serde_json::from_slice(bytes).map_err(ManifestError::NotOne)?;
        // Byte for byte what would be written: this covers the checksum, and what JSON leaves open.
        if manifest.to_bytes().ok().as_deref() != Some(bytes) {
            return Err(ManifestError::Damaged);
        }
        manifest.config.validate()?;
        if manifest.config.shares_memory() {
            return Err(ManifestError::Shared);
        }
        let (memory_bytes, ram) = (manifest.memory_bytes, manifest.config.memory.bytes());
        if memory_bytes != ram {
            return Err(ManifestError::Memory { memory_bytes, ram });
        }
        Ok(manifest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest() -> Manifest {
        let config = r#"{"cpus": 2, "memory": "64M", "kernel": "/k", "vsock": "/v",
                         "disks": [{"path": "/disk", "id": "data"}]}"#;
        Manifest::new(serde_json::from_str(config).unwrap(), 5, b"state")
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
        let newer = refusal(&text.replacen("\"version\": 1", "\"version\": 7, \"new\": 1", 1));
        assert!(newer.contains("version 7") && newer.contains("version 1"), "{newer}");
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
        let shorter = Manifest { memory_bytes: 4096, ..manifest() };
        let error = Manifest::parse(&shorter.to_bytes().unwrap()).unwrap_err();
        assert!(matches!(error, ManifestError::Memory { .. }));
    }
}
