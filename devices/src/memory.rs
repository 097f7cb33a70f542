//! The one guest memory type of the project.
//!
//! Every other file says [`Memory`], so that the choice of backend and dirty bitmap stands here
//! alone. Accesses go through vm-memory's volatile slices, which bounds-check against the mapped
//! regions: no device holds a host pointer to guest memory.

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};

use vm_memory::bitmap::AtomicBitmap;
use vm_memory::{GuestMemoryMmap, GuestMemoryRegion};

pub use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

/// Guest RAM. Cloning it clones references, not memory. The bitmap marks the pages that the VMM
/// itself wrote, which KVM's dirty log cannot see.
pub type Memory = GuestMemoryMmap<AtomicBitmap>;

/// A slice of guest RAM as the devices get it.
pub type MemorySlice<'a> = vm_memory::VolatileSlice<'a, vm_memory::bitmap::BS<'a, AtomicBitmap>>;

const NAME: &CStr = c"guest-ram";

/// A file of `bytes` zeroes that exists only in memory, for guest RAM that another process shall map
/// too. Nobody can change its size: a process that has it could otherwise cut it off, and kill with
/// it whoever touches its mapping.
pub fn shareable_file(bytes: u64) -> io::Result<File> {
    // SAFETY: the name is a string with its end, and the result is checked.
    let fd =
        unsafe { libc::memfd_create(NAME.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just made, and is owned by nobody else.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(bytes)?;
    let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    // SAFETY: the descriptor is open, and the argument is a number.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) } {
        0 => Ok(file),
        _ => Err(io::Error::last_os_error()),
    }
}

/// True if all of guest RAM can be mapped by another process, with both seeing the same bytes.
pub fn is_shared(memory: &Memory) -> bool {
    GuestMemoryBackend::iter(memory)
        .all(|region| region.file_offset().is_some() && region.flags() & libc::MAP_SHARED != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_cuts_off_guest_ram() {
        let file = shareable_file(0x2000).unwrap();
        assert_eq!(file.metadata().unwrap().len(), 0x2000);
        assert!(file.set_len(0x1000).is_err() && file.set_len(0x3000).is_err());
    }
}
