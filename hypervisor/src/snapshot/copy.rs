//! Copies of files: with shared blocks where the file system can, else of all but the holes.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use super::extents;
use super::sums::{CHUNK, PAGE, is_zero};

/// Makes the empty file `to` a copy of `from`, which nobody must change meanwhile. Gives whether it
/// shares its blocks, so that it costs neither time nor room.
pub fn file(from: &File, to: &File, bytes: u64) -> io::Result<bool> {
    match share(from, to) {
        Ok(()) => Ok(true),
        Err(error) if cannot_share(&error) => {
            to.set_len(bytes)?;
            data(from, to, bytes)?;
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

/// Makes `to` share all blocks of `from` (ioctl_ficlone(2)). Writes to one are not seen in the other.
fn share(from: &File, to: &File) -> io::Result<()> {
    // SAFETY: both descriptors are open, and the argument is a number.
    match unsafe { libc::ioctl(to.as_raw_fd(), libc::FICLONE, from.as_raw_fd()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Another file system, one that shares no blocks, or a file that is none.
fn cannot_share(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EOPNOTSUPP | libc::EXDEV | libc::EINVAL | libc::ENOTTY | libc::ENOSYS)
    )
}

/// Copies what is not zeros.
fn data(from: &File, to: &File, bytes: u64) -> io::Result<()> {
    let mut buffer = vec![0; CHUNK];
    for extent in extents::of(from, bytes) {
        let extent = extent?;
        let mut at = extent.start;
        while at < extent.end {
            let len = usize::try_from(extent.end - at).unwrap_or(CHUNK).min(CHUNK);
            let chunk = buffer.get_mut(..len).unwrap_or_default();
            from.read_exact_at(chunk, at)?;
            write_data(to, chunk, at)?;
            at += len as u64;
        }
    }
    Ok(())
}

/// Writes the runs of pages that are not all zeros into a hole.
fn write_data(to: &File, chunk: &[u8], at: u64) -> io::Result<()> {
    let mut pages = chunk.chunks(PAGE).enumerate().peekable();
    while let Some((first, page)) = pages.next() {
        if is_zero(page) {
            continue;
        }
        let mut end = first + 1;
        while pages.next_if(|(_, page)| !is_zero(page)).is_some() {
            end += 1;
        }
        let run = chunk.get(first * PAGE..chunk.len().min(end * PAGE)).unwrap_or_default();
        to.write_all_at(run, at + (first * PAGE) as u64)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn a_copy_has_the_same_bytes_and_the_same_holes() {
        let from = tempfile::tempfile().unwrap();
        let bytes = (64 << 20) + 1000;
        from.set_len(bytes).unwrap();
        for (at, len) in [(100, 5000), (10 << 20, 3 << 20), (bytes - 7, 7)] {
            from.write_all_at(&vec![7; len], at).unwrap();
        }
        from.write_all_at(&vec![0; 1 << 20], 20 << 20).unwrap();
        let to = tempfile::tempfile().unwrap();
        file(&from, &to, bytes).unwrap();
        let read = |file: &File| {
            let mut content = vec![0; bytes as usize];
            file.read_exact_at(&mut content, 0).unwrap();
            content
        };
        assert!(read(&from) == read(&to));
        let metadata = to.metadata().unwrap();
        assert_eq!(metadata.len(), bytes);
        assert!(metadata.blocks() * 512 < 8 << 20, "{} blocks", metadata.blocks());
    }

    #[test]
    fn runs_of_pages_are_written_where_they_belong() {
        let file = tempfile::tempfile().unwrap();
        let mut chunk = vec![0; 6 * PAGE + 100];
        for page in [1, 2, 4, 6] {
            chunk[page * PAGE] = page as u8;
        }
        write_data(&file, &chunk, 0).unwrap();
        let mut read = vec![0; chunk.len()];
        file.read_exact_at(&mut read, 0).unwrap();
        assert_eq!(read, chunk);
        assert_eq!(file.metadata().unwrap().len(), chunk.len() as u64);
    }
}
