//! Checksums of guest memory, cheap enough to be made while the guest stands still.
//!
//! Each page has an XXH3 hash that depends on its place; the checksum of a piece of 1 MiB is the sum
//! of the hashes of its pages. Pages of zeros count nothing: so a hole and zeros that a tool has
//! written in its place are the same, and what was never touched costs nothing. A page that is
//! replaced changes the sum by the difference of two hashes, and what was wrong in the others stays
//! wrong. They find damage, and are no proof against forgery.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::extents;

/// Bytes that are left out if they are all zeros.
pub const PAGE: usize = 4096;
/// Bytes that have a checksum.
pub const PIECE: u64 = 1 << 20;
/// Bytes that are read and written at a time.
pub const CHUNK: usize = 1 << 20;

static ZEROS: [u8; PAGE] = [0; PAGE];

/// Whether there is nothing in it.
pub fn is_zero(page: &[u8]) -> bool {
    ZEROS.get(..page.len()) == Some(page)
}

/// The checksums of a file, piece by piece.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sums(Vec<u64>);

/// A part of a file whose checksum is not what it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("bytes {} to {} do not have their checksum", .0, .1)]
pub struct Damage(u64, u64);

fn hash(page: &[u8], index: u64) -> u64 {
    xxh3_64_with_seed(page, index)
}

impl Sums {
    /// Of a file of that many bytes, all zeros.
    pub fn of_zeros(bytes: u64) -> Self {
        Self(vec![0; usize::try_from(bytes.div_ceil(PIECE)).unwrap_or(0)])
    }

    /// Bytes that the checksums of a file of `bytes` take.
    pub fn size(bytes: u64) -> u64 {
        bytes.div_ceil(PIECE) * 8
    }

    /// Reads what [`Sums::to_bytes`] gave.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        let words = bytes.chunks_exact(8);
        Self(words.map(|word| word.try_into().map_or(0, u64::from_le_bytes)).collect())
    }

    /// Those of the first `bytes`, when nothing but zeros follows.
    pub fn shorten(&mut self, bytes: u64) {
        self.0.truncate(usize::try_from(bytes.div_ceil(PIECE)).unwrap_or(usize::MAX));
    }

    /// As they stand in a file.
    pub fn to_bytes(&self) -> Vec<u8> {
        self.0.iter().flat_map(|sum| sum.to_le_bytes()).collect()
    }

    /// A page that is not all zeros, at `offset`, comes.
    pub fn add(&mut self, offset: u64, page: &[u8]) {
        self.change(offset, hash(page, offset / PAGE as u64));
    }

    /// A page at `offset`, if it is not all zeros, goes.
    pub fn remove(&mut self, offset: u64, page: &[u8]) {
        if !is_zero(page) {
            self.change(offset, hash(page, offset / PAGE as u64).wrapping_neg());
        }
    }

    fn change(&mut self, offset: u64, by: u64) {
        let piece = usize::try_from(offset / PIECE).unwrap_or(usize::MAX);
        if let Some(sum) = self.0.get_mut(piece) {
            *sum = sum.wrapping_add(by);
        }
    }

    /// Makes those of a file. Does not read its holes.
    pub fn of_file(file: &File, bytes: u64) -> io::Result<Self> {
        let mut sums = Self::of_zeros(bytes);
        let mut buffer = vec![0; CHUNK];
        for extent in extents::of(file, bytes) {
            sums.add_extent(file, extent?, &mut buffer)?;
        }
        Ok(sums)
    }

    /// Makes the checksum of one piece that of what is in the file now, which ends at `end`.
    pub fn renew(
        &mut self,
        file: &File,
        piece: u64,
        end: u64,
        buffer: &mut [u8],
    ) -> io::Result<()> {
        if let Some(sum) = usize::try_from(piece).ok().and_then(|piece| self.0.get_mut(piece)) {
            *sum = 0;
        }
        let start = piece * PIECE;
        self.add_extent(file, start..(start + PIECE).min(end), buffer)
    }

    fn add_extent(&mut self, file: &File, extent: Range<u64>, buffer: &mut [u8]) -> io::Result<()> {
        let mut at = extent.start;
        while at < extent.end {
            let len = usize::try_from(extent.end - at).unwrap_or(CHUNK).min(CHUNK);
            let chunk = buffer.get_mut(..len).unwrap_or_default();
            file.read_exact_at(chunk, at)?;
            for (offset, page) in (at..).step_by(PAGE).zip(chunk.chunks(PAGE)) {
                if !is_zero(page) {
                    self.add(offset, page);
                }
            }
            at += len as u64;
        }
        Ok(())
    }

    /// The first piece that is another in `found`.
    pub fn compare(&self, found: &Self) -> Result<(), Damage> {
        let differs = self.0.iter().zip(&found.0).position(|(one, other)| one != other);
        match differs {
            Some(piece) => {
                let start = piece as u64 * PIECE;
                Err(Damage(start, start + PIECE - 1))
            }
            None if self.0.len() != found.0.len() => Err(Damage(0, u64::MAX)),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(pages: &[(usize, u8)], bytes: usize) -> File {
        let file = tempfile::tempfile().unwrap();
        file.set_len(bytes as u64).unwrap();
        for &(page, pattern) in pages {
            file.write_all_at(&[pattern; PAGE], (page * PAGE) as u64).unwrap();
        }
        file
    }

    const BYTES: usize = 5 << 20;

    fn sums(pages: &[(usize, u8)]) -> Sums {
        Sums::of_file(&file(pages, BYTES), BYTES as u64).unwrap()
    }

    #[test]
    fn holes_and_zeros_are_the_same() {
        let zeros = sums(&[(3, 0), (900, 0)]);
        assert_eq!(zeros, Sums::of_zeros(BYTES as u64));
        assert_eq!(sums(&[(3, 1), (4, 0)]), sums(&[(3, 1)]));
        let bytes = zeros.to_bytes();
        assert_eq!(bytes.len() as u64, Sums::size(BYTES as u64));
        assert_eq!(Sums::from_bytes(&bytes), zeros);
    }

    #[test]
    fn every_change_is_found_and_its_place_told() {
        let whole = sums(&[(3, 1), (600, 2), (601, 3)]);
        for changed in [
            sums(&[(3, 1), (600, 3), (601, 2)]),
            sums(&[(3, 1), (601, 2), (602, 3)]),
            sums(&[(3, 1), (600, 2)]),
            sums(&[(3, 1), (600, 2), (601, 3), (603, 1)]),
        ] {
            let damage = whole.compare(&changed).unwrap_err().to_string();
            assert_eq!(damage, "bytes 2097152 to 3145727 do not have their checksum");
        }
        assert_eq!(whole.compare(&whole), Ok(()));
        assert!(whole.compare(&Sums::of_zeros(1)).is_err());
    }

    #[test]
    fn a_replaced_page_changes_the_sum_as_if_it_had_always_been_there() {
        let mut sum = sums(&[(3, 1), (4, 9)]);
        sum.remove(3 * PAGE as u64, &[1; PAGE]);
        sum.add(3 * PAGE as u64, &[2; PAGE]);
        sum.remove(5 * PAGE as u64, &[0; PAGE]);
        assert_eq!(sum, sums(&[(3, 2), (4, 9)]));
    }
}
