//! A running VM becomes a directory, and the directory becomes a running VM.
//!
//! ```text
//! NAME/manifest.json   what it is, sizes and checksums; written last, into NAME.tmp
//! NAME/state           everything but memory: one record in CBOR
//! NAME/memory          guest RAM, its regions one after the other; zero pages are holes
//! ```
//!
//! [`save`] writes it while the VM stands still, [`load`] reads and checks it before anything is
//! made, and [`restore`] brings a VM that [`crate::builder`] has built to that state. Disks are not
//! in it: it refers to them by their paths, see [`host_files`].
//!
//! What is read is not trusted: sizes are bounded before anything is read, checksums tell damage, and
//! devices and KVM check their records themselves.

pub mod checksum;
pub mod features;
pub mod host_files;
pub mod load;
pub mod machine;
pub mod manifest;
pub mod paging;
pub mod restore;
pub mod save;
pub mod vcpu;

/// Name of the description in the directory.
pub const MANIFEST: &str = "manifest.json";
/// Name of the file with everything but memory.
pub const STATE: &str = "state";
/// Name of the file with guest RAM.
pub const MEMORY: &str = "memory";

/// Most bytes of a description.
pub const MAX_MANIFEST: u64 = 1 << 20;
/// Most bytes of the state: 32 vCPUs with the largest registers there are, and all devices.
pub const MAX_STATE: u64 = 16 << 20;
