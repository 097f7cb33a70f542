//! Sets of pages of guest RAM, counted through its regions without the gap between them.

use std::fs;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use devices::memory::Memory;
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion, MmapRegion};

use super::extents;
use super::sums::PAGE;

/// Some of the pages of guest RAM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageSet {
    words: Vec<u64>,
    pages: u64,
}

impl PageSet {
    /// None of `bytes` of RAM.
    pub fn none(bytes: u64) -> Self {
        let pages = bytes / PAGE as u64;
        Self { words: vec![0; usize::try_from(pages.div_ceil(64)).unwrap_or(0)], pages }
    }

    /// All of them.
    pub fn all(bytes: u64) -> Self {
        let mut set = Self::none(bytes);
        set.insert(0..set.pages);
        set
    }

    /// How many there are.
    pub fn count(&self) -> u64 {
        self.words.iter().map(|word| u64::from(word.count_ones())).sum()
    }

    /// Adds pages; those beyond the end are none.
    pub fn insert(&mut self, pages: Range<u64>) {
        let end = pages.end.min(self.pages);
        let mut at = pages.start;
        while at < end {
            let (bit, left) = (at % 64, end - at);
            let count = left.min(64 - bit);
            // `count` ones, at `bit`.
            self.or((at / 64) as usize, u64::MAX >> (64 - count) << bit);
            at += count;
        }
    }

    /// Adds a page, unless it is beyond the end.
    pub fn insert_one(&mut self, page: u64) {
        if page < self.pages {
            self.or((page / 64) as usize, 1 << (page % 64));
        }
    }

    /// Takes a page out.
    pub fn remove(&mut self, page: u64) {
        if let Some(word) = self.words.get_mut((page / 64) as usize) {
            *word &= !(1 << (page % 64));
        }
    }

    /// Whether a page is in it.
    pub fn contains(&self, page: u64) -> bool {
        self.words.get((page / 64) as usize).is_some_and(|word| word & 1 << (page % 64) != 0)
    }

    fn or(&mut self, word: usize, bits: u64) {
        if let Some(word) = self.words.get_mut(word) {
            *word |= bits;
        }
    }

    /// Adds those of a bitmap whose first bit is page `first`.
    pub fn insert_bitmap(&mut self, first: u64, bitmap: &[u64]) {
        let (word, shift) = ((first / 64) as usize, (first % 64) as u32);
        for (at, &bits) in (word..).zip(bitmap).filter(|(_, bits)| **bits != 0) {
            self.or(at, bits << shift);
            self.or(at + 1, bits.checked_shr(64 - shift).unwrap_or(0));
        }
        self.cut();
    }

    /// Adds those of another set of the same RAM.
    pub fn insert_all(&mut self, other: &Self) {
        self.insert_bitmap(0, &other.words);
    }

    /// Adds the pages of a file of all RAM that may hold something else than zeros.
    pub fn insert_extents(&mut self, file: &fs::File, bytes: u64) -> io::Result<()> {
        for extent in extents::of(file, bytes) {
            let extent = extent?;
            self.insert(extent.start / PAGE as u64..extent.end.div_ceil(PAGE as u64));
        }
        Ok(())
    }

    fn cut(&mut self) {
        let over = self.words.len() as u64 * 64 - self.pages;
        if let Some(last) = self.words.last_mut() {
            *last &= u64::MAX.checked_shr(over as u32).unwrap_or(0);
        }
    }

    /// Runs of pages that are in it, in order.
    pub fn runs(&self) -> impl Iterator<Item = Range<u64>> {
        let mut at = 0;
        std::iter::from_fn(move || {
            let start = self.next(at, false)?;
            at = self.next(start, true).unwrap_or(self.pages);
            Some(start..at)
        })
    }

    /// The first page from `from` on that is in it, or that is not.
    fn next(&self, from: u64, absent: bool) -> Option<u64> {
        let mut mask = u64::MAX << (from % 64);
        let words = self.words.get((from / 64) as usize..)?;
        for (index, &word) in (from / 64..).zip(words) {
            let word = if absent { !word } else { word } & mask;
            if word != 0 {
                let page = index * 64 + u64::from(word.trailing_zeros());
                return (page < self.pages).then_some(page);
            }
            mask = u64::MAX;
        }
        None
    }
}

// Linux, Documentation/admin-guide/mm/pagemap.rst.
const PRESENT: u64 = 1 << 63;
const SWAPPED: u64 = 1 << 62;
const OF_FILE: u64 = 1 << 61;

/// Entries of the page map that are read at a time: 256 MiB of memory.
const ENTRIES: usize = 65536;

/// The pages of RAM that this process has of its own: of fresh memory those that have ever been
/// touched, of a private mapping of a file those that have been written to. In memory or in swap.
pub fn owned(memory: &Memory) -> io::Result<PageSet> {
    mapped(memory, |entry| entry & SWAPPED != 0 || entry & (PRESENT | OF_FILE) == PRESENT)
}

/// The pages of RAM that this process has, be they its own or a file's. In memory or in swap.
pub fn present(memory: &Memory) -> io::Result<PageSet> {
    mapped(memory, |entry| entry & (PRESENT | SWAPPED) != 0)
}

/// The pages of RAM with such entries in the page map.
fn mapped(memory: &Memory, wanted: impl Fn(u64) -> bool) -> io::Result<PageSet> {
    let map = fs::File::open("/proc/self/pagemap")?;
    let mut set = PageSet::none(crate::memory::size(memory));
    let mut buffer = vec![0; ENTRIES * 8];
    let mut first = 0;
    for region in memory.iter() {
        let start = region.as_ptr() as u64 / PAGE as u64;
        let pages = region.len() / PAGE as u64;
        for at in (0..pages).step_by(ENTRIES) {
            let count = (pages - at).min(ENTRIES as u64) as usize;
            let bytes = buffer.get_mut(..count * 8).unwrap_or_default();
            map.read_exact_at(bytes, (start + at) * 8)?;
            insert_wanted(&mut set, first + at, bytes, &wanted);
        }
        first += pages;
    }
    Ok(set)
}

fn insert_wanted(set: &mut PageSet, first: u64, entries: &[u8], wanted: impl Fn(u64) -> bool) {
    for (word, entries) in (first..).step_by(64).zip(entries.chunks(64 * 8)) {
        let mut bits = 0;
        for (bit, entry) in entries.chunks_exact(8).enumerate() {
            let entry = entry.try_into().map_or(0, u64::from_le_bytes);
            bits |= u64::from(wanted(entry)) << bit;
        }
        set.insert_bitmap(word, &[bits]);
    }
}

/// The pages that the VMM itself has written to, or given back to the host, since it was last asked.
pub fn take_written(memory: &Memory) -> PageSet {
    let mut set = PageSet::none(crate::memory::size(memory));
    let mut first = 0;
    for region in memory.iter() {
        // Not that of the region, which only marks.
        let mapping: &MmapRegion<_> = region;
        set.insert_bitmap(first, &mapping.bitmap().get_and_reset());
        first += region.len() / PAGE as u64;
    }
    set
}

/// Whether RAM is a private mapping of a file.
pub fn are_of_image(memory: &Memory) -> bool {
    memory.iter().all(|region| region.file_offset().is_some())
}

/// The pages that may hold something else than zeros, of memory that was fresh, or that of a
/// private mapping of a file.
pub fn occupied(memory: &Memory) -> io::Result<PageSet> {
    let mut set = owned(memory)?;
    let mut first = 0;
    for region in memory.iter() {
        if let Some(image) = region.file_offset() {
            let (start, end) = (image.start(), image.start() + region.len());
            for extent in extents::of(image.file(), end) {
                let extent = extent?;
                let from = extent.start.max(start) - start;
                let to = extent.end.max(start) - start;
                set.insert(first + from / PAGE as u64..first + to.div_ceil(PAGE as u64));
            }
        }
        first += region.len() / PAGE as u64;
    }
    Ok(set)
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use devices::memory::{Bytes, GuestAddress};

    use super::*;

    fn runs(set: &PageSet) -> Vec<Range<u64>> {
        set.runs().collect()
    }

    #[test]
    fn runs_are_what_was_inserted() {
        let mut set = PageSet::none(300 * PAGE as u64);
        assert_eq!(runs(&set), []);
        for range in [3..4, 60..70, 128..192, 192..193, 299..400] {
            set.insert(range);
        }
        assert_eq!(runs(&set), [3..4, 60..70, 128..193, 299..300]);
        assert_eq!(set.count(), 1 + 10 + 65 + 1);
        let mut again = PageSet::none(300 * PAGE as u64);
        again.insert_bitmap(70, &[u64::MAX, 0, 1]);
        assert_eq!(runs(&again), [70..134, 198..199]);
        again.insert_bitmap(295, &[u64::MAX]);
        again.insert_all(&set);
        assert_eq!(runs(&again), [3..4, 60..193, 198..199, 295..300]);
        for all in [128, 300_u64] {
            let whole = runs(&PageSet::all(all * PAGE as u64));
            assert_eq!((whole.len(), whole.first()), (1, Some(&(0..all))));
        }
    }

    #[test]
    fn fresh_memory_is_occupied_where_it_was_touched() {
        let memory = crate::memory::fresh(5 << 30).unwrap();
        assert_eq!(owned(&memory).unwrap().count(), 0);
        memory.write_slice(&[1; PAGE + 1], GuestAddress(0x7000)).unwrap();
        memory.write_slice(&[1; 1], GuestAddress(4 << 30)).unwrap();
        let expected = [7..9, (3 << 30) / 4096..(3 << 30) / 4096 + 1];
        let touched = occupied(&memory).unwrap();
        for run in &expected {
            assert!(runs(&touched).iter().any(|r| r.start <= run.start && run.end <= r.end));
        }
        assert!(touched.count() <= 2 * 512, "more than two huge pages");
        assert_eq!(runs(&take_written(&memory)), expected);
        assert_eq!(runs(&take_written(&memory)), []);
    }

    #[test]
    fn memory_of_an_image_is_owned_where_it_was_written_and_occupied_where_there_is_data() {
        let image = tempfile::tempfile().unwrap();
        let bytes = 4_u64 << 30;
        image.set_len(bytes).unwrap();
        image.write_all_at(&[1; 2 * PAGE], 0x2_0000).unwrap();
        image.write_all_at(&[1; PAGE], bytes - PAGE as u64).unwrap();
        let memory = crate::memory::from_image(bytes, File::try_clone(&image).unwrap()).unwrap();
        let mut read = [0; 2 * PAGE];
        memory.read_slice(&mut read, GuestAddress(0x2_0000)).unwrap();
        memory.read_slice(&mut read, GuestAddress(0x9_0000)).unwrap();
        assert_eq!(owned(&memory).unwrap().count(), 0);
        let there = present(&memory).unwrap();
        assert!([0x20, 0x21, 0x90].iter().all(|&page| there.contains(page)), "{:?}", runs(&there));
        assert!(there.count() <= 3 * 16 && !there.contains(0x60), "{:?}", runs(&there));
        memory.write_slice(&[2], GuestAddress(0x2_1000)).unwrap();
        memory.write_slice(&[2], GuestAddress(0x9_0000)).unwrap();
        assert_eq!(runs(&owned(&memory).unwrap()), [0x21..0x22, 0x90..0x91]);
        let last = bytes / PAGE as u64 - 1;
        let occupied = runs(&occupied(&memory).unwrap());
        assert_eq!(occupied, [0x20..0x22, 0x90..0x91, last..last + 1]);
    }
}
