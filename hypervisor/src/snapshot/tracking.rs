//! Which pages of a VM's memory have changed since one of its snapshots.
//!
//! Three ways, each of which may tell more than there are, never less:
//!
//! - the log: KVM tells which pages the guest has written to, vm-memory's bitmap which the VMM has.
//!   From the snapshot on with which it was started, and to each of the latest few;
//! - the mapping: of a VM that was restored, the pages that this process has of its own are those
//!   that were written to since. For differences to the snapshot it was restored from, at no cost;
//! - to compare: the other snapshot is read. Always right, and slow.

use std::collections::VecDeque;

use devices::memory::Memory;
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};

use super::pages::{self, PageSet};
use super::sums::PAGE;
use crate::kvm::{KvmError, VmHandle};

/// What is known of a VM's memory.
#[derive(Default)]
pub struct Tracking {
    /// The snapshot that the VM was made of.
    restored: Option<String>,
    /// What the VMM itself has written, or given back to the host, since then.
    written: Option<PageSet>,
    /// The log is on.
    log: Option<Log>,
}

/// How many snapshots the log tells differences to.
const REMEMBERED: usize = 4;

/// The latest snapshots with the pages that have been written to since, as of when the log was last
/// looked at.
#[derive(Default)]
struct Log(VecDeque<(String, PageSet)>);

impl Tracking {
    /// Of a VM that was made of the snapshot with that id.
    pub fn restored_from(id: String) -> Self {
        Self { restored: Some(id), ..Self::default() }
    }

    /// Whether the log tells what changes from now on.
    pub fn is_logging(&self) -> bool {
        self.log.is_some()
    }

    /// Whether the VM was made of a snapshot.
    pub fn is_restored(&self) -> bool {
        self.restored.is_some()
    }

    /// Looks at all that has been logged; the pages that have been written to since the last time,
    /// as far as there is a log. What is read of a page afterwards is what was written before, or
    /// will be in the log the next time: the VM may run, but only what is taken when it stands still is
    /// all.
    pub fn take(&mut self, handle: &VmHandle, memory: &Memory) -> Result<PageSet, KvmError> {
        let Some(log) = &mut self.log else {
            let written = pages::take_written(memory);
            self.remember(&written);
            return Ok(written);
        };
        // What one region has told is lost if another one fails: then comparing is left.
        let bitmaps = handle.take_dirty_log(memory).inspect_err(|_| log.0.clear())?;
        let written = pages::take_written(memory);
        let (mut all, mut first) = (written.clone(), 0);
        for (bitmap, region) in bitmaps.iter().zip(memory.iter()) {
            all.insert_bitmap(first, bitmap);
            first += region.len() / PAGE as u64;
        }
        log.0.iter_mut().for_each(|(_, pages)| pages.insert_all(&all));
        self.remember(&written);
        Ok(all)
    }

    /// For the mapping, which does not know all of it.
    fn remember(&mut self, written: &PageSet) {
        match &mut self.written {
            _ if self.restored.is_none() => {}
            Some(all) => all.insert_all(written),
            None => self.written = Some(written.clone()),
        }
    }

    /// The pages that may differ from those of the snapshot `id`, if the log knows, as of when it
    /// was last looked at.
    pub fn logged_since(&self, id: &str) -> Option<&PageSet> {
        let known = self.log.as_ref()?.0.iter().find(|(of, _)| of == id);
        known.map(|(_, pages)| pages)
    }

    /// The pages that may differ from those of the snapshot `id`, if the mapping knows.
    pub fn mapped_since(&self, id: &str, memory: &Memory) -> Option<PageSet> {
        if self.restored.as_deref() != Some(id) || !pages::are_of_image(memory) {
            return None;
        }
        // Without the page map, comparing is left.
        let mut changed = pages::owned(memory).ok()?;
        // Pages that were given back to the host are nobody's until they are touched again.
        if let Some(written) = &self.written {
            changed.insert_all(written);
        }
        Some(changed)
    }

    /// Somebody whose writes are not logged was there, and is gone: the log does not know of all of
    /// them.
    pub fn forget_log(&mut self) {
        if let Some(Log(since)) = &mut self.log {
            since.clear();
        }
    }

    /// Starts the log, if it is not on yet. While the VM stands still.
    pub fn start(&mut self, handle: &VmHandle, memory: &Memory) -> Result<(), KvmError> {
        if self.log.is_none() {
            handle.log_dirty(memory)?;
            self.log = Some(Log::default());
        }
        Ok(())
    }

    /// There is a snapshot `id` of the instant at which the log was last looked at: it runs from
    /// there on. If there is none, nothing is lost.
    pub fn succeeded(&mut self, id: String, memory: &Memory) {
        if let Some(Log(since)) = &mut self.log {
            since.truncate(REMEMBERED - 1);
            since.push_front((id, PageSet::none(crate::memory::size(memory))));
        }
    }
}
