//! Guest RAM as a file: all of it, or the pages that differ from those of another snapshot.
//!
//! All of it is an image, its regions one after the other, with holes for pages of zeros. What
//! differs are two files: a list of [`runs`](super::runs) of pages, each either zeros or data, and the
//! pages with data.
//!
//! Either may be written several times: first while the guest runs, when pages may be torn and others
//! are written to behind it, and then, when it stands still, those that were written to since. What
//! was right by then is not touched again.

use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;

use devices::memory::Memory;
use nix::fcntl::{FallocateFlags, fallocate};

use super::pages::PageSet;
pub use super::pieces::Guest;
use super::pieces::{Gathered, Piece, for_each_batch};
use super::runs::Run;
use super::sums::{CHUNK, PAGE, PIECE, Sums, is_zero};

/// Where pages are in a file.
enum Layout {
    /// In their places; those that are no holes.
    Whole(PageSet),
    /// One after the other.
    Difference(Dense),
}

/// The pages of a difference.
struct Dense {
    /// Runs with data and where that is, in the order of memory.
    data: Vec<(Range<u64>, u64)>,
    /// Those that were written since.
    fresh: Vec<(Range<u64>, u64)>,
    zeros: PageSet,
    /// Of data.
    bytes: u64,
}

impl Dense {
    /// The runs with data, of which those before `from` are known not to be asked for any more: where
    /// the page `index` is.
    fn place_of(&self, from: &mut usize, index: u64) -> Option<u64> {
        while let Some((pages, at)) = self.data.get(*from) {
            if index < pages.end {
                return (pages.start <= index).then(|| at + (index - pages.start) * PAGE as u64);
            }
            *from += 1;
        }
        None
    }

    /// A place for one more.
    fn append(&mut self, index: u64) -> u64 {
        let at = self.bytes;
        match self.fresh.last_mut().filter(|(pages, _)| pages.end == index) {
            Some((pages, _)) => pages.end += 1,
            None => self.fresh.push((index..index + 1, at)),
        }
        self.bytes += PAGE as u64;
        at
    }

    fn settle(&mut self) {
        self.data.append(&mut self.fresh);
        self.data.sort_unstable_by_key(|(pages, _)| pages.start);
    }

    fn runs(self) -> Vec<Run> {
        let data = self.data.into_iter().map(|(pages, at)| Run { pages, at: Some(at) });
        let mut runs: Vec<_> = data.collect();
        runs.extend(self.zeros.runs().map(|pages| Run { pages, at: None }));
        runs.sort_unstable_by_key(|run| run.pages.start);
        runs
    }
}

/// Guest RAM that is being written to a file, which must be the same in all calls and was empty before
/// the first.
pub struct Image {
    layout: Layout,
    /// Bytes of RAM.
    size: u64,
    sums: Sums,
    /// Pages of the file whose checksums are those of something else.
    altered: PageSet,
}

/// What has been written of guest RAM.
pub struct Written {
    /// Checksums of the file.
    pub sums: Sums,
    /// Bytes of it that are no holes.
    pub bytes: u64,
    /// Of a difference: which pages.
    pub runs: Option<Vec<Run>>,
}

impl Image {
    /// All of `size` bytes, of which what is never written is zeros.
    pub fn whole(file: &File, size: u64) -> io::Result<Self> {
        file.set_len(size)?;
        Ok(Self::new(Layout::Whole(PageSet::none(size)), size))
    }

    /// What differs from another image of `size` bytes.
    pub fn difference(size: u64) -> Self {
        let zeros = PageSet::none(size);
        let dense = Dense { data: Vec::new(), fresh: Vec::new(), zeros, bytes: 0 };
        Self::new(Layout::Difference(dense), size)
    }

    fn new(layout: Layout, size: u64) -> Self {
        // A difference has no more pages than there are.
        Self { layout, size, sums: Sums::of_zeros(size), altered: PageSet::none(size) }
    }

    /// Writes those pages as they are now. The last time for each must be after the last write to it.
    pub fn write(
        &mut self,
        file: &mut File,
        memory: &Memory,
        pages: &PageSet,
        guest: Guest,
    ) -> io::Result<()> {
        let mut from = 0;
        for_each_batch(memory, pages, guest, |batch| self.write_batch(file, batch, &mut from))?;
        if let Layout::Difference(dense) = &mut self.layout {
            dense.settle();
        }
        Ok(())
    }

    /// Writes those of `pages` that differ from `base`, an image of the same RAM. While nobody writes
    /// to it, and instead of [`Image::write`].
    pub fn write_differing(
        &mut self,
        file: &mut File,
        memory: &Memory,
        pages: &PageSet,
        base: &File,
    ) -> io::Result<()> {
        let (mut before, mut from) = (vec![0; CHUNK], 0);
        for_each_batch(memory, pages, Guest::Still, |batch| {
            let mut differing = Vec::new();
            for &(first, bytes) in batch {
                let before = before.get_mut(..bytes.len()).unwrap_or_default();
                base.read_exact_at(before, first * PAGE as u64)?;
                let both = bytes.chunks(PAGE).zip(before.chunks(PAGE));
                let both = (first..).zip(both).filter(|(_, (now, before))| now != before);
                differing.extend(both.map(|(index, (now, _))| (index, now)));
            }
            self.write_batch(file, &differing, &mut from)
        })?;
        if let Layout::Difference(dense) = &mut self.layout {
            dense.settle();
        }
        Ok(())
    }

    fn write_batch(
        &mut self,
        file: &mut File,
        batch: &[Piece<'_>],
        from: &mut usize,
    ) -> io::Result<()> {
        let mut gathered = Gathered::new(file);
        let mut holes = Vec::new();
        for &(first, bytes) in batch {
            for (index, offset) in (first..).zip((0..bytes.len()).step_by(PAGE)) {
                let part = offset..offset + PAGE;
                let page = bytes.get(part.clone()).unwrap_or_default();
                match self.place(index, page, from) {
                    Place::Data(at) => gathered.put(at, bytes, part)?,
                    Place::Hole => holes.push(index),
                    Place::None => {}
                }
            }
        }
        gathered.flush()?;
        holes.into_iter().try_for_each(|index| punch(file, index * PAGE as u64))
    }

    /// Where a page shall be written, as which it counts from now on.
    fn place(&mut self, index: u64, page: &[u8], from: &mut usize) -> Place {
        let known = match &mut self.layout {
            Layout::Whole(data) if data.contains(index) => Some(index * PAGE as u64),
            Layout::Whole(_) => None,
            Layout::Difference(dense) => dense.place_of(from, index),
        };
        if let Some(at) = known {
            self.altered.insert_one(at / PAGE as u64);
        }
        let zero = is_zero(page);
        let at = match (&mut self.layout, known) {
            (Layout::Whole(data), Some(_)) if zero => {
                data.remove(index);
                return Place::Hole;
            }
            (_, Some(at)) => return Place::Data(at),
            (Layout::Whole(_), None) if zero => return Place::None,
            (Layout::Whole(data), None) => {
                data.insert_one(index);
                index * PAGE as u64
            }
            (Layout::Difference(dense), None) if zero => {
                dense.zeros.insert_one(index);
                return Place::None;
            }
            (Layout::Difference(dense), None) => {
                dense.zeros.remove(index);
                dense.append(index)
            }
        };
        self.sums.add(at, page);
        Place::Data(at)
    }

    /// Makes the checksums that are not known yet, of what is in `file`. The guest may run.
    pub fn finish(mut self, file: &File) -> io::Result<Written> {
        let bytes = match &self.layout {
            Layout::Whole(data) => data.count() * PAGE as u64,
            Layout::Difference(dense) => dense.bytes,
        };
        let end = match &self.layout {
            Layout::Whole(_) => self.size,
            Layout::Difference(_) => bytes,
        };
        self.sums.shorten(end);
        let mut buffer = vec![0; CHUNK];
        let mut next = 0;
        for run in self.altered.runs() {
            let (start, stop) = (run.start * PAGE as u64, run.end * PAGE as u64);
            for piece in next.max(start / PIECE)..stop.div_ceil(PIECE) {
                self.sums.renew(file, piece, end, &mut buffer)?;
                next = piece + 1;
            }
        }
        let runs = match self.layout {
            Layout::Whole(_) => None,
            Layout::Difference(dense) => Some(dense.runs()),
        };
        Ok(Written { sums: self.sums, bytes, runs })
    }
}

/// What becomes of a page.
enum Place {
    /// It is written there.
    Data(u64),
    /// What was there is no more.
    Hole,
    /// It is written nowhere.
    None,
}

/// Makes a page of the file a hole, or zeros where there are no holes.
fn punch(file: &mut File, at: u64) -> io::Result<()> {
    let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    let (Ok(start), len) = (i64::try_from(at), PAGE as i64) else { return Ok(()) };
    match fallocate(&*file, flags, start, len) {
        Err(nix::errno::Errno::EOPNOTSUPP) => {
            file.seek(SeekFrom::Start(at))?;
            file.write_all(&[0; PAGE])
        }
        done => Ok(done?),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use devices::memory::{Bytes, GuestAddress};

    use super::super::{pages, runs};
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
        let mut file = tempfile::tempfile().unwrap();
        let occupied = pages::occupied(memory).unwrap();
        let mut image = Image::whole(&file, BYTES).unwrap();
        image.write(&mut file, memory, &occupied, Guest::Still).unwrap();
        let written = image.finish(&file).unwrap();
        (file, written)
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
        let mut image = Image::difference(BYTES);
        image.write_differing(&mut file, &memory, &all, &base).unwrap();
        let written = image.finish(&file).unwrap();
        let run = |first: u64, count, at: Option<u64>| Run {
            pages: first..first + count,
            at: at.map(|page| page * PAGE as u64),
        };
        let high = (3 << 30) / PAGE as u64;
        let runs = written.runs.unwrap();
        assert_eq!(runs, [run(0x9ff, 1, None), run(0xa00, 2, Some(0)), run(high, 1, Some(2))]);
        assert_eq!((written.bytes, runs::data_bytes(&runs)), (3 * PAGE as u64, 3 * PAGE as u64));
        assert_eq!(file.metadata().unwrap().len(), written.bytes);
        assert_eq!(Sums::of_file(&file, written.bytes).unwrap(), written.sums);

        let mut some = PageSet::none(BYTES);
        some.insert(0..3);
        let mut file = tempfile::tempfile().unwrap();
        let mut image = Image::difference(BYTES);
        image.write(&mut file, &memory, &some, Guest::Still).unwrap();
        let written = image.finish(&file).unwrap();
        assert_eq!(written.runs.unwrap(), [run(0, 1, None), run(1, 1, Some(0)), run(2, 1, None)]);
        assert_eq!(written.bytes, PAGE as u64);
    }

    /// What a file and its list say of RAM that was `base` before.
    fn applied(base: &Memory, file: &File, runs: &[Run]) -> Sums {
        for run in runs {
            for (index, page) in (0..).zip(run.pages.clone()) {
                let mut bytes = [0; PAGE];
                if let Some(at) = run.at {
                    file.read_exact_at(&mut bytes, at + index * PAGE as u64).unwrap();
                }
                let at = GuestAddress(page * PAGE as u64);
                base.write_slice(&bytes, at).unwrap();
            }
        }
        whole(base).1.sums
    }

    /// Page `page` is all `pattern`.
    fn fill(memory: &Memory, page: u64, pattern: u8) {
        memory.write_slice(&[pattern; PAGE], GuestAddress(page * PAGE as u64)).unwrap();
    }

    /// Zeros become data and data zeros, pages are written again and others for the first time.
    fn change(memory: &Memory, round: u8) -> PageSet {
        let mut changed = PageSet::none(BYTES);
        for (page, pattern) in [
            (1, round),
            (2, 0),
            (3, if round.is_multiple_of(2) { 7 } else { 0 }),
            (0x300, round),
            (0x100 + u64::from(round), round),
            (0x100 - u64::from(round), 9),
        ] {
            fill(memory, page, pattern);
            changed.insert_one(page);
        }
        changed
    }

    #[test]
    fn what_is_written_again_is_what_it_was_last() {
        for last in 1..5 {
            let [memory, base] = [memory(), memory()];
            fill(&memory, 2, 1);
            fill(&base, 2, 1);
            let (mut file, mut all) =
                (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
            let mut difference = Image::difference(BYTES);
            let mut image = Image::whole(&all, BYTES).unwrap();
            let occupied = pages::occupied(&memory).unwrap();
            image.write(&mut all, &memory, &occupied, Guest::Running).unwrap();
            for round in 1..=last {
                let changed = change(&memory, round);
                let guest = if round == last { Guest::Still } else { Guest::Running };
                difference.write(&mut file, &memory, &changed, guest).unwrap();
                image.write(&mut all, &memory, &changed, guest).unwrap();
            }
            let (_, expected) = whole(&memory);
            let written = image.finish(&all).unwrap();
            assert_eq!((&written.sums, written.bytes), (&expected.sums, expected.bytes));
            assert_eq!(Sums::of_file(&all, BYTES).unwrap(), expected.sums);
            assert!(all.metadata().unwrap().blocks() * 512 <= expected.bytes + (64 << 10));

            let written = difference.finish(&file).unwrap();
            assert_eq!(Sums::of_file(&file, written.bytes).unwrap(), written.sums);
            let list = runs::to_bytes(&written.runs.unwrap());
            let runs = runs::from_bytes(&list, BYTES).unwrap();
            assert_eq!(applied(&base, &file, &runs), expected.sums, "{last} rounds");
        }
    }
}
