//! Guest memory goes back to the host.
//!
//! How depends on what is mapped there. Whatever the way, the page reads as zeroes afterwards, and
//! the dirty bitmap says that it has changed:
//!
//! - anonymous memory of this process: `MADV_DONTNEED`;
//! - memory that is shared with other processes: `MADV_REMOVE`, which takes it from all of them;
//! - a private mapping of a file, as after a restore: fresh anonymous memory is mapped over it,
//!   since `MADV_DONTNEED` would bring the content of the file back. Each such piece splits a
//!   mapping of the process, of which the kernel allows some 65,000 (`vm.max_map_count`), so a
//!   guest that scatters its pages gets [`MAX_PIECES`] of them; the rest stays with it.

use std::collections::BTreeMap;
use std::io;

use vm_memory::bitmap::Bitmap;
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion, MemoryRegionAddress};

use super::request::PAGE_SIZE;
use crate::memory::{GuestAddress, Memory};

/// Pieces of file mappings that are replaced at most, counting neighbours as one.
const MAX_PIECES: usize = 4096;

/// Failures of the host that are logged; the later ones only show in the counters.
const LOGGED_FAILURES: u64 = 8;

/// What became of a range, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Outcome {
    /// Given back to the host.
    pub(super) released: u64,
    /// Guest memory that stays where it is.
    pub(super) kept: u64,
    /// Not guest memory.
    pub(super) refused: u64,
}

/// Gives guest memory back. It remembers which mappings it has replaced, so there is one for the
/// whole life of a VM's memory.
pub(super) struct Reclaimer {
    host_page: usize,
    replaced: Pieces,
    failures: u64,
}

impl Default for Reclaimer {
    fn default() -> Self {
        Self::new()
    }
}

/// What stands behind a region.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Backing {
    Anonymous,
    Shared,
    PrivateFile { protection: i32 },
}

impl Reclaimer {
    pub(super) fn new() -> Self {
        // SAFETY: sysconf has no preconditions.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        let host_page = usize::try_from(page).ok().filter(|page| page.is_power_of_two());
        let host_page = host_page.unwrap_or(PAGE_SIZE as usize);
        Self { host_page, replaced: Pieces::default(), failures: 0 }
    }

    /// Gives the guest addresses from `start` on back, as far as they are guest memory.
    pub(super) fn release(&mut self, memory: &Memory, start: u64, len: u64) -> Outcome {
        let mut outcome = Outcome::default();
        let end = start.saturating_add(len);
        let mut at = start;
        while at < end {
            let Some((region, offset)) = memory.to_region_addr(GuestAddress(at)) else {
                // The next page may be memory again.
                let next = (at / PAGE_SIZE + 1).saturating_mul(PAGE_SIZE).min(end);
                outcome.refused += next - at;
                at = next;
                continue;
            };
            let piece = region.len().saturating_sub(offset.0).min(end - at);
            let released = self.release_in(region, offset, piece);
            outcome.released += released;
            outcome.kept += piece.saturating_sub(released);
            at = at.saturating_add(piece.max(1));
        }
        outcome
    }

    /// Gives back the host's whole pages of `len` bytes at `offset` of `region`, all of which the
    /// region has; how many bytes that were.
    fn release_in(
        &mut self,
        region: &<Memory as GuestMemoryBackend>::R,
        offset: MemoryRegionAddress,
        len: u64,
    ) -> u64 {
        let (Ok(base), Ok(offset), Ok(len)) = (
            region.get_host_address(MemoryRegionAddress(0)),
            usize::try_from(offset.0),
            usize::try_from(len),
        ) else {
            return 0;
        };
        let first = offset.next_multiple_of(self.host_page);
        let end = offset.saturating_add(len) / self.host_page * self.host_page;
        if first >= end || end > region.size() {
            return 0;
        }
        let backing = if region.flags() & libc::MAP_SHARED != 0 {
            Backing::Shared
        } else if region.file_offset().is_some() {
            Backing::PrivateFile { protection: region.prot() }
        } else {
            Backing::Anonymous
        };
        // SAFETY: base is the start of the region's mapping, and first..end was checked to be
        // whole host pages of it (mappings start at a page). The region is alive for the whole
        // call. No reference to guest memory exists in this process, only volatile accesses, to
        // which a page that turns to zeroes looks like one that the guest has cleared.
        let result = unsafe { self.release_pages(base.add(first), end - first, backing) };
        match result {
            Ok(true) => {
                GuestMemoryRegion::bitmap(region).mark_dirty(first, end - first);
                (end - first) as u64
            }
            Ok(false) => 0,
            Err(error) => {
                self.failures = self.failures.saturating_add(1);
                if self.failures <= LOGGED_FAILURES {
                    tracing::warn!(%error, bytes = end - first, "guest memory not given back");
                }
                0
            }
        }
    }

    /// Gives `len` bytes at `start` back; false if they had better stay.
    ///
    /// # Safety
    ///
    /// They must be whole host pages of one mapping, backed as `backing` says, to which no
    /// reference exists.
    unsafe fn release_pages(
        &mut self,
        start: *mut u8,
        len: usize,
        backing: Backing,
    ) -> io::Result<bool> {
        let advice = match backing {
            Backing::Anonymous => libc::MADV_DONTNEED,
            Backing::Shared => libc::MADV_REMOVE,
            // What was replaced before is anonymous by now.
            Backing::PrivateFile { .. } if self.replaced.contain(start.addr(), len) => {
                libc::MADV_DONTNEED
            }
            Backing::PrivateFile { protection } => {
                if !self.replaced.insert(start.addr(), len, MAX_PIECES) {
                    return Ok(false);
                }
                // SAFETY: as for this function.
                return unsafe { map_anonymous(start, len, protection) }.map(|()| true);
            }
        };
        // SAFETY: as for this function; the advice changes the content of these pages only.
        match unsafe { libc::madvise(start.cast(), len, advice) } {
            0 => Ok(true),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// Puts fresh, zeroed pages in the place of a mapping.
///
/// # Safety
///
/// `start` and `len` must be whole host pages of a mapping to which no reference exists.
unsafe fn map_anonymous(start: *mut u8, len: usize, protection: i32) -> io::Result<()> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
    // SAFETY: the pages belong to the caller's mapping, so nobody else's are replaced. They are
    // unmapped with the rest of it.
    let mapped = unsafe { libc::mmap(start.cast(), len, protection, flags, -1, 0) };
    if mapped == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// A set of addresses, as pieces that do not touch: start and end.
#[derive(Default)]
struct Pieces(BTreeMap<usize, usize>);

impl Pieces {
    /// True if all of `start..start + len` is in the set.
    fn contain(&self, start: usize, len: usize) -> bool {
        let before = self.0.range(..=start).next_back();
        before.is_some_and(|(_, &end)| start.saturating_add(len) <= end)
    }

    /// Adds `start..start + len`, unless that needs more than `limit` pieces: then it changes
    /// nothing and says false.
    fn insert(&mut self, start: usize, len: usize, limit: usize) -> bool {
        let (mut start, mut end) = (start, start.saturating_add(len));
        let mut swallowed = Vec::new();
        for (&other, &other_end) in self.0.range(..=end).rev() {
            if other_end < start {
                break;
            }
            swallowed.push(other);
            start = start.min(other);
            end = end.max(other_end);
        }
        if swallowed.is_empty() && self.0.len() >= limit {
            return false;
        }
        for other in swallowed {
            self.0.remove(&other);
        }
        self.0.insert(start, end);
        true
    }
}

#[cfg(test)]
mod tests;
