//! A running VM becomes a directory, and the directory becomes a running VM.
//!
//! ```text
//! NAME/manifest.json   what it is, sizes and checksums; written last, into NAME.tmp
//! NAME/state           everything but memory: one record in CBOR
//! NAME/memory          guest RAM, its regions one after the other; zero pages are holes
//! NAME/sums            a checksum for each MiB of memory
//! NAME/disk-ID         a disk at the same instant
//! NAME/hot-pages       which pages VMs that were made of it have touched; may come later
//! ```
//!
//! A snapshot that is a difference to another one has, in place of `memory`,
//!
//! ```text
//! NAME/runs            which pages differ
//! NAME/pages           those of them that are not zeros
//! ```
//!
//! [`save`] writes it while the VM stands still, [`load`] reads and checks it before anything is
//! made, and [`restore`] brings a VM that [`crate::builder`] has built to that state. Disks that
//! have not been copied it refers to by their paths, see [`host_files`].
//!
//! What is read is not trusted: sizes are bounded before anything is read, checksums tell damage, and
//! devices and KVM check their records themselves.

pub mod checksum;
pub mod copy;
pub mod disks;
pub mod extents;
pub mod features;
pub mod folder;
pub mod host_files;
pub mod hot;
pub mod image;
pub mod inspect;
pub mod load;
pub mod machine;
pub mod manifest;
pub mod memory_file;
pub mod merge;
pub mod pages;
pub mod paging;
pub mod pieces;
pub mod prefetch;
pub mod record;
pub mod restore;
pub mod runs;
pub mod save;
pub mod shares;
pub mod sums;
pub mod tracking;
pub mod vcpu;

/// Name of the description in the directory.
pub const MANIFEST: &str = "manifest.json";
/// Name of the file with everything but memory.
pub const STATE: &str = "state";
/// Name of the file with guest RAM.
pub const MEMORY: &str = "memory";
/// Name of the file with the checksums of memory, or of the pages that differ.
pub const SUMS: &str = "sums";
/// Name of the list of pages that differ.
pub const RUNS: &str = "runs";
/// Name of the file with the pages that differ.
pub const PAGES: &str = "pages";
/// Name of the list of pages that VMs of the snapshot have touched.
pub const HOT_PAGES: &str = "hot-pages";

/// Most bytes of a description.
pub const MAX_MANIFEST: u64 = 1 << 20;
/// Most bytes of the state: 32 vCPUs with the largest registers there are, and all devices; shares with
/// a million files that the guest knows, and what it has open and removed.
pub const MAX_STATE: u64 = 64 << 20;
