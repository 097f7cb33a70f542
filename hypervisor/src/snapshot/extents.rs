//! Where a sparse file has data.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;

/// The ranges of the first `bytes` of a file that may hold something else than zeros. A file system
/// that knows no holes has one range.
pub fn of(file: &File, bytes: u64) -> impl Iterator<Item = io::Result<Range<u64>>> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let found = next(file, at, bytes).transpose()?;
        // Ends with an error, too.
        at = found.as_ref().map_or(bytes, |extent| extent.end);
        Some(found)
    })
}

fn next(file: &File, from: u64, bytes: u64) -> io::Result<Option<Range<u64>>> {
    if from >= bytes {
        return Ok(None);
    }
    let start = match seek(file, from, libc::SEEK_DATA) {
        Ok(start) => start,
        // Nothing but a hole up to the end.
        Err(error) if error.raw_os_error() == Some(libc::ENXIO) => return Ok(None),
        Err(error) => return Err(error),
    };
    if start >= bytes {
        return Ok(None);
    }
    let end = seek(file, start, libc::SEEK_HOLE)?.min(bytes);
    // A file that changes meanwhile could claim a hole where there was data.
    Ok((end > start).then_some(start..end))
}

fn seek(file: &File, from: u64, whence: i32) -> io::Result<u64> {
    let from = libc::off_t::try_from(from).map_err(io::Error::other)?;
    // SAFETY: the descriptor is open; the call moves its position, which nobody relies on.
    let found = unsafe { libc::lseek(file.as_raw_fd(), from, whence) };
    u64::try_from(found).map_err(|_| io::Error::last_os_error())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    fn extents(file: &File, bytes: u64) -> Vec<Range<u64>> {
        of(file, bytes).collect::<io::Result<_>>().unwrap()
    }

    #[test]
    fn data_is_found_and_holes_are_not() {
        let file = tempfile::tempfile().unwrap();
        assert_eq!(extents(&file, 0), []);
        file.set_len(8 << 20).unwrap();
        assert_eq!(extents(&file, 8 << 20), []);
        file.write_all_at(&[1; 65536], 1 << 20).unwrap();
        file.write_all_at(&[1; 65536], (8 << 20) - 65536).unwrap();
        let expected = [1 << 20..(1 << 20) + 65536, (8 << 20) - 65536..8 << 20];
        assert_eq!(extents(&file, 8 << 20), expected);
        let cut_off = std::slice::from_ref(&(1 << 20..(1 << 20) + 100)).to_vec();
        assert_eq!(extents(&file, (1 << 20) + 100), cut_off);
    }
}
