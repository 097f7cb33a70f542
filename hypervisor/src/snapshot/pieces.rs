//! Guest RAM as pieces that are looked at and written: in its place while the VM stands still, or as
//! a copy while it runs.

use std::fs::File;
use std::io::{self, IoSlice, Seek, SeekFrom, Write};
use std::ops::Range;

use devices::memory::{Bytes, Memory};
use vm_memory::bitmap::AtomicBitmap;
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion, GuestRegionMmap, MemoryRegionAddress};

use super::pages::PageSet;
use super::sums::{CHUNK, PAGE};

/// Whether somebody writes to guest RAM meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guest {
    /// Nobody: the vCPUs are parked, devices have nothing in flight.
    Still,
    /// The guest and its devices, at any time.
    Running,
}

/// Some pages of guest RAM one after the other: the number of the first, and their content.
pub type Piece<'a> = (u64, &'a [u8]);

/// The region that has the byte `at` of guest RAM, which is counted through its regions without the
/// gap between them, and which byte of the region that is.
fn region_of(memory: &Memory, mut at: u64) -> io::Result<(&GuestRegionMmap<AtomicBitmap>, u64)> {
    for region in memory.iter() {
        if at < region.len() {
            return Ok((region, at));
        }
        at -= region.len();
    }
    Err(io::ErrorKind::UnexpectedEof.into())
}

/// Guest RAM from `at` on: `len` bytes, or less if a region ends before.
///
/// Must not be used beyond the time for which the VM stands still.
fn content(memory: &Memory, at: u64, len: usize) -> io::Result<&[u8]> {
    let (region, at) = region_of(memory, at)?;
    let len = usize::try_from(region.len() - at).unwrap_or(usize::MAX).min(len);
    let slice = region.get_slice(MemoryRegionAddress(at), len).map_err(io::Error::other)?;
    // SAFETY: the slice is a part of a live mapping, which `memory` keeps. Nobody writes to it:
    // the vCPUs are parked, devices have nothing in flight, and no other process maps it.
    Ok(unsafe { std::slice::from_raw_parts(slice.ptr_guard().as_ptr(), len) })
}

/// Gives the content of pages of guest RAM to `act`, about [`CHUNK`] bytes at a time: what is looked
/// at, and then written, is in the processor's cache meanwhile.
pub fn for_each_batch(
    memory: &Memory,
    pages: &PageSet,
    guest: Guest,
    act: impl FnMut(&[Piece<'_>]) -> io::Result<()>,
) -> io::Result<()> {
    match guest {
        Guest::Still => for_each_batch_in_place(memory, pages, act),
        Guest::Running => for_each_batch_copied(memory, pages, act),
    }
}

fn for_each_batch_in_place(
    memory: &Memory,
    pages: &PageSet,
    mut act: impl FnMut(&[Piece<'_>]) -> io::Result<()>,
) -> io::Result<()> {
    let (mut batch, mut room) = (Vec::new(), CHUNK);
    for run in pages.runs() {
        let (mut at, end) = (run.start * PAGE as u64, run.end * PAGE as u64);
        while at < end {
            let len = usize::try_from(end - at).unwrap_or(room).min(room);
            let piece = content(memory, at, len)?;
            batch.push((at / PAGE as u64, piece));
            (at, room) = (at + piece.len() as u64, room - piece.len());
            if room == 0 {
                act(&batch)?;
                batch.clear();
                room = CHUNK;
            }
        }
    }
    act(&batch)
}

/// A copy does not change between the looks that are taken at it, as its checksum and as what is
/// written.
fn for_each_batch_copied(
    memory: &Memory,
    pages: &PageSet,
    mut act: impl FnMut(&[Piece<'_>]) -> io::Result<()>,
) -> io::Result<()> {
    let mut buffer = vec![0; CHUNK];
    let (mut batch, mut used) = (Vec::new(), 0);
    let mut flush = |batch: &mut Vec<(u64, Range<usize>)>, buffer: &[u8]| {
        let piece = |(first, place): (u64, Range<usize>)| Some((first, buffer.get(place)?));
        act(&batch.drain(..).filter_map(piece).collect::<Vec<_>>())
    };
    for run in pages.runs() {
        let (mut at, end) = (run.start * PAGE as u64, run.end * PAGE as u64);
        while at < end {
            let (region, inside) = region_of(memory, at)?;
            let left = (end - at).min(region.len() - inside);
            let len = usize::try_from(left).unwrap_or(CHUNK).min(CHUNK - used);
            let place = used..used + len;
            let copy = buffer.get_mut(place.clone()).unwrap_or_default();
            region.read_slice(copy, MemoryRegionAddress(inside)).map_err(io::Error::other)?;
            batch.push((at / PAGE as u64, place));
            (at, used) = (at + len as u64, used + len);
            if used == CHUNK {
                flush(&mut batch, &buffer)?;
                used = 0;
            }
        }
    }
    flush(&mut batch, &buffer)
}

/// Pieces that are written in one call, as far as they follow each other in the file.
pub struct Gathered<'f, 'b> {
    file: &'f mut File,
    /// Where the first is, and the next one would be.
    place: Range<u64>,
    pending: Vec<IoSlice<'b>>,
    /// The last of them, which may grow.
    last: Option<(&'b [u8], Range<usize>)>,
}

/// Fewer than any kernel takes at a time (`IOV_MAX`).
const MOST_PENDING: usize = 512;

impl<'f, 'b> Gathered<'f, 'b> {
    /// None yet.
    pub fn new(file: &'f mut File) -> Self {
        Self { file, place: 0..0, pending: Vec::new(), last: None }
    }

    /// Writes a part of `bytes` to `at`, at the latest when it is flushed.
    pub fn put(&mut self, at: u64, bytes: &'b [u8], part: Range<usize>) -> io::Result<()> {
        if self.place.end != at || self.pending.len() >= MOST_PENDING {
            self.flush()?;
            self.place = at..at;
        }
        self.place.end += part.len() as u64;
        match &mut self.last {
            Some((of, last)) if std::ptr::eq(*of, bytes) && last.end == part.start => {
                last.end = part.end;
            }
            _ => {
                self.settle();
                self.last = Some((bytes, part));
            }
        }
        Ok(())
    }

    fn settle(&mut self) {
        if let Some((of, part)) = self.last.take() {
            self.pending.push(IoSlice::new(of.get(part).unwrap_or_default()));
        }
    }

    /// Writes those that are not written yet.
    pub fn flush(&mut self) -> io::Result<()> {
        self.settle();
        if self.pending.is_empty() {
            return Ok(());
        }
        self.file.seek(SeekFrom::Start(self.place.start))?;
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
        self.place.start = self.place.end;
        Ok(())
    }
}
