//! The one guest memory type of the project.
//!
//! Every other file says [`Memory`], so that the choice of backend and dirty bitmap stands here
//! alone. Accesses go through vm-memory's volatile slices, which bounds-check against the mapped
//! regions: no device holds a host pointer to guest memory.

use vm_memory::GuestMemoryMmap;
use vm_memory::bitmap::AtomicBitmap;

pub use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

/// Guest RAM. Cloning it clones references, not memory. The bitmap marks the pages that the VMM
/// itself wrote, which KVM's dirty log cannot see.
pub type Memory = GuestMemoryMmap<AtomicBitmap>;

/// A slice of guest RAM as the devices get it.
pub type MemorySlice<'a> = vm_memory::VolatileSlice<'a, vm_memory::bitmap::BS<'a, AtomicBitmap>>;
