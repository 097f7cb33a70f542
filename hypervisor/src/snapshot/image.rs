//! Guest RAM as a file: all of it, or the pages that differ from those of another snapshot.
//!
//! All of it is an image, its regions one after the other, with holes for pages of zeros. What
//! differs are two files: a list of runs of pages, each either zeros or data, and the pages with
//! data, one after the other.

use std::fs::File;
use std::io::{self, IoSlice, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;

use devices::memory::Memory;
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion, MemoryRegionAddress};

use super::pages::PageSet;
use super::sums::{CHUNK, PAGE, Sums, is_zero};

/// What has been written of guest RAM.
pub struct Written {
    /// Checksums of the file.
    pub sums: Sums,
    /// Bytes of it that are no holes.
    pub bytes: u64,
}

/// Guest RAM from `at` on, which is counted through its regions without the gap between them: `len`
/// bytes, or less if a region ends before.
///
/// Must not be used beyond the time for which the VM stands still.
fn content(memory: &Memory, mut at: u64, len: usize) -> io::Result<&[u8]> {
    for region in memory.iter() {
        if at >= region.len() {
            at -= region.len();
            continue;
        }
        let len = usize::try_from(region.len() - at).unwrap_or(usize::MAX).min(len);
        let slice = region.get_slice(MemoryRegionAddress(at), len).map_err(io::Error::other)?;
        // SAFETY: the slice is a part of a live mapping, which `memory` keeps. Nobody writes to it:
        // the vCPUs are parked, devices have nothing in flight, and no other process maps it.
        return Ok(unsafe { std::slice::from_raw_parts(slice.ptr_guard().as_ptr(), len) });
    }
    Err(io::ErrorKind::UnexpectedEof.into())
}

/// Gives the content of pages of guest RAM to `act`, at most [`CHUNK`] bytes at a time: what is looked
/// at, and then written, is in the processor's cache meanwhile.
fn for_each_chunk<'m>(
    memory: &'m Memory,
    pages: &PageSet,
    mut act: impl FnMut(u64, &'m [u8]) -> io::Result<()>,
) -> io::Result<()> {
    for run in pages.runs() {
        let (mut at, end) = (run.start * PAGE as u64, run.end * PAGE as u64);
        while at < end {
            let len = usize::try_from(end - at).unwrap_or(CHUNK).min(CHUNK);
            let chunk = content(memory, at, len)?;
            act(at, chunk)?;
            at += chunk.len() as u64;
        }
    }
    Ok(())
}

/// Writes an image of guest RAM, of which all pages but `pages` are known to be zeros.
pub fn write_whole(file: &mut File, memory: &Memory, pages: &PageSet) -> io::Result<Written> {
    let size = crate::memory::size(memory);
    file.set_len(size)?;
    let mut written = Written { sums: Sums::of_zeros(size), bytes: 0 };
    for_each_chunk(memory, pages, |at, chunk| {
        let mut run = 0..0;
        for (from, page) in (0..).step_by(PAGE).zip(chunk.chunks(PAGE)) {
            if is_zero(page) {
                flush(file, at, chunk, &run, &mut written)?;
                run = from + page.len()..from + page.len();
            } else {
                written.sums.add(at + from as u64, page);
                run.end = from + page.len();
            }
        }
        flush(file, at, chunk, &run, &mut written)
    })?;
    Ok(written)
}

fn flush(
    file: &File,
    at: u64,
    chunk: &[u8],
    run: &Range<usize>,
    written: &mut Written,
) -> io::Result<()> {
    let bytes = chunk.get(run.clone()).unwrap_or_default();
    written.bytes += bytes.len() as u64;
    file.write_all_at(bytes, at + run.start as u64)
}

/// A run of pages that differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    /// Which.
    pub pages: Range<u64>,
    /// They are all zeros, so that their content is written nowhere.
    pub zero: bool,
}

/// Bytes of a run in a file: its first page, and how many there are, with the highest bit for zeros.
const RUN: usize = 16;
const ZERO: u64 = 1 << 63;

/// Most bytes of a list, of so many bytes of RAM.
pub fn most_bytes_of_runs(bytes: u64) -> u64 {
    bytes / PAGE as u64 * RUN as u64
}

/// Why a list of runs is refused.
#[derive(Debug, thiserror::Error)]
#[error(
    "its run of {count} pages from page {first} on is not after the one before it, or not in memory"
)]
pub struct BadRun {
    first: u64,
    count: u64,
}

/// The bytes of a list.
pub fn runs_to_bytes(runs: &[Run]) -> Vec<u8> {
    let words = runs.iter().flat_map(|run| {
        let count = run.pages.end - run.pages.start;
        [run.pages.start, if run.zero { count | ZERO } else { count }]
    });
    words.flat_map(u64::to_le_bytes).collect()
}

/// Reads a list, of `bytes` of RAM, that nobody vouches for.
pub fn runs_from_bytes(list: &[u8], bytes: u64) -> Result<Vec<Run>, BadRun> {
    let (mut runs, mut last) = (Vec::with_capacity(list.len() / RUN), 0);
    for entry in list.chunks(RUN) {
        let word = |at: usize| -> u64 {
            let bytes = entry.get(at..at + 8).and_then(|bytes| bytes.try_into().ok());
            bytes.map_or(0, u64::from_le_bytes)
        };
        let (first, count, zero) = (word(0), word(8) & !ZERO, word(8) & ZERO != 0);
        let end = first.saturating_add(count);
        if entry.len() != RUN || count == 0 || first < last || end > bytes / PAGE as u64 {
            return Err(BadRun { first, count });
        }
        runs.push(Run { pages: first..end, zero });
        last = end;
    }
    Ok(runs)
}

/// Bytes of the pages that are written for those runs.
pub fn bytes_of(runs: &[Run]) -> u64 {
    let data = runs.iter().filter(|run| !run.zero);
    data.map(|run| (run.pages.end - run.pages.start) * PAGE as u64).sum()
}

/// Writes those of `pages` that differ from `base`, an image of the same RAM, or all of them.
pub fn write_difference(
    file: &mut File,
    memory: &Memory,
    pages: &PageSet,
    base: Option<&File>,
) -> io::Result<(Vec<Run>, Written)> {
    let mut difference = Difference {
        file,
        runs: Vec::new(),
        // Pages of zeros are not written, so it is not known yet how many there will be.
        sums: Sums::of_zeros(pages.count() * PAGE as u64),
        pending: Vec::with_capacity(MOST_PENDING),
        bytes: 0,
    };
    let mut before = vec![0; CHUNK];
    for_each_chunk(memory, pages, |at, chunk| {
        let before = before.get_mut(..chunk.len()).unwrap_or_default();
        if let Some(base) = base {
            base.read_exact_at(before, at)?;
        }
        let both = chunk.chunks(PAGE).zip(before.chunks(PAGE));
        for (index, (page, before)) in (at / PAGE as u64..).zip(both) {
            if base.is_none() || page != before {
                difference.add(index, page)?;
            }
        }
        Ok(())
    })?;
    difference.finish()
}

/// Pages that are written at a time: as much as stays in the processor's cache.
const MOST_PENDING: usize = CHUNK / PAGE;

struct Difference<'f, 'm> {
    file: &'f mut File,
    runs: Vec<Run>,
    sums: Sums,
    /// Pages that are not in the file yet.
    pending: Vec<IoSlice<'m>>,
    /// All there are, also the pending ones.
    bytes: u64,
}

impl<'m> Difference<'_, 'm> {
    fn add(&mut self, index: u64, page: &'m [u8]) -> io::Result<()> {
        let zero = is_zero(page);
        match self.runs.last_mut().filter(|run| run.zero == zero && run.pages.end == index) {
            Some(run) => run.pages.end += 1,
            None => self.runs.push(Run { pages: index..index + 1, zero }),
        }
        if zero {
            return Ok(());
        }
        self.sums.add(self.bytes, page);
        self.bytes += page.len() as u64;
        self.pending.push(IoSlice::new(page));
        if self.pending.len() >= MOST_PENDING { self.flush() } else { Ok(()) }
    }

    fn flush(&mut self) -> io::Result<()> {
        let mut left = &mut self.pending[..];
        while !left.is_empty() {
            match self.file.write_vectored(left) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => IoSlice::advance_slices(&mut left, written),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.pending.clear();
        Ok(())
    }

    fn finish(mut self) -> io::Result<(Vec<Run>, Written)> {
        self.flush()?;
        self.sums.shorten(self.bytes);
        Ok((self.runs, Written { sums: self.sums, bytes: self.bytes }))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use devices::memory::{Bytes, GuestAddress};

    use super::super::pages;
    use super::*;

    const BYTES: u64 = 5 << 30;
    /// Guest addresses: two regions, their ends among them.
    const PLACES: [u64; 5] = [0x1234, 0x9f_fff0, (3 << 30) - 16, 4 << 30, (6 << 30) - 16];

    fn memory() -> Memory {
        let memory = crate::memory::fresh(BYTES).unwrap();
        for (place, pattern) in PLACES.into_iter().zip(1_u8..) {
            memory.write_slice(&[pattern; 16], GuestAddress(place)).unwrap();
        }
        memory
    }

    fn whole(memory: &Memory) -> (File, Written) {
        let mut image = tempfile::tempfile().unwrap();
        let occupied = pages::occupied(memory).unwrap();
        let written = write_whole(&mut image, memory, &occupied).unwrap();
        (image, written)
    }

    fn read(memory: &Memory, place: u64) -> [u8; 16] {
        let mut bytes = [0; 16];
        memory.read_slice(&mut bytes, GuestAddress(place)).unwrap();
        bytes
    }

    #[test]
    fn memory_comes_back_equal_and_zeros_take_no_room() {
        let (image, written) = whole(&memory());
        let metadata = image.metadata().unwrap();
        assert_eq!((metadata.len(), written.bytes), (BYTES, 5 * PAGE as u64));
        assert!(metadata.blocks() * 512 < 1 << 20, "{} blocks", metadata.blocks());
        assert_eq!(Sums::of_file(&image, BYTES).unwrap(), written.sums);
        let again = crate::memory::from_image(BYTES, image.try_clone().unwrap()).unwrap();
        for (place, pattern) in PLACES.into_iter().zip(1_u8..) {
            assert_eq!(read(&again, place), [pattern; 16], "{place:#x}");
        }
        // Writes stay in the mapping.
        again.write_slice(&[9; 16], GuestAddress(0x1234)).unwrap();
        let mut stored = [0; 16];
        image.read_exact_at(&mut stored, 0x1234).unwrap();
        assert_eq!(stored, [1; 16]);
    }

    #[test]
    fn memory_of_an_image_is_written_with_what_was_not_touched() {
        let (image, first) = whole(&memory());
        let again = crate::memory::from_image(BYTES, image).unwrap();
        let (_, second) = whole(&again);
        assert_eq!(second.sums, first.sums);
        again.write_slice(&[0; 16], GuestAddress(PLACES[1])).unwrap();
        again.write_slice(&[7; 16], GuestAddress(0x10_0000)).unwrap();
        let (image, third) = whole(&again);
        assert!(third.sums != first.sums && third.bytes == first.bytes);
        let last = crate::memory::from_image(BYTES, image).unwrap();
        assert_eq!(read(&last, PLACES[1]), [0; 16]);
        assert_eq!(read(&last, 0x10_0000), [7; 16]);
        assert_eq!(read(&last, PLACES[4]), [5; 16]);
    }

    #[test]
    fn a_difference_has_the_pages_that_differ() {
        let memory = memory();
        let (base, _) = whole(&memory);
        memory.write_slice(&[8; 16], GuestAddress(4 << 30)).unwrap();
        memory.write_slice(&[0; 16], GuestAddress(PLACES[1])).unwrap();
        memory.write_slice(&[6; PAGE], GuestAddress(0xa0_0800)).unwrap();
        let mut file = tempfile::tempfile().unwrap();
        let all = pages::occupied(&memory).unwrap();
        let (runs, written) = write_difference(&mut file, &memory, &all, Some(&base)).unwrap();
        let run = |first: u64, count, zero| Run { pages: first..first + count, zero };
        let high = (3 << 30) / PAGE as u64;
        assert_eq!(runs, [run(0x9ff, 1, true), run(0xa00, 2, false), run(high, 1, false)]);
        assert_eq!((written.bytes, bytes_of(&runs)), (3 * PAGE as u64, 3 * PAGE as u64));
        assert_eq!(file.metadata().unwrap().len(), written.bytes);
        assert_eq!(Sums::of_file(&file, written.bytes).unwrap(), written.sums);
        assert_eq!(runs_from_bytes(&runs_to_bytes(&runs), BYTES).unwrap(), runs);

        let mut some = PageSet::none(BYTES);
        some.insert(0..3);
        let (runs, written) =
            write_difference(&mut tempfile::tempfile().unwrap(), &memory, &some, None).unwrap();
        assert_eq!(runs, [run(0, 1, true), run(1, 1, false), run(2, 1, true)]);
        assert_eq!(written.bytes, PAGE as u64);
    }

    #[test]
    fn lists_of_runs_that_cannot_be_are_refused() {
        let list = |words: &[u64]| -> Vec<u8> {
            words.iter().flat_map(|word| word.to_le_bytes()).collect()
        };
        let parse = |words: &[u64]| runs_from_bytes(&list(words), 1 << 20);
        assert_eq!(parse(&[0, 1, 1, ZERO | 2, 255, 1]).unwrap().len(), 3);
        for words in [
            &[0, 0][..],
            &[0, ZERO],
            &[255, 2],
            &[u64::MAX, 1],
            &[5, 1, 5, 1],
            &[5, 1, 4, 1],
            &[1],
            &[1, ZERO - 1],
        ] {
            assert!(parse(words).is_err(), "{words:?}");
        }
    }
}
