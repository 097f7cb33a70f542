//! Which file a name leads to: inode number and time of birth, which `FileSystem` does not tell.

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use virtiofsd::filesystem::ZeroCopyWriter;
use virtiofsd::oslib::ReadvFlags;

use crate::table::Identity;

/// What `statx` tells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Which file.
    pub identity: Identity,
    /// `S_IFMT` of its mode.
    pub kind: u32,
    /// The device that its file system is on.
    pub device: u64,
}

/// Asks about `name` in `directory`; an empty name is `directory` itself. Follows no link.
pub fn look(directory: &File, name: &CStr) -> io::Result<Seen> {
    // SAFETY: all-zero is a valid statx, which is plain numbers.
    let mut seen: libc::statx = unsafe { std::mem::zeroed() };
    let flags = libc::AT_SYMLINK_NOFOLLOW | libc::AT_EMPTY_PATH | libc::AT_NO_AUTOMOUNT;
    let mask = libc::STATX_INO | libc::STATX_TYPE | libc::STATX_BTIME;
    // SAFETY: an open descriptor, a string with its end and a statx, all of which outlive the call.
    let done =
        unsafe { libc::statx(directory.as_raw_fd(), name.as_ptr(), flags, mask, &raw mut seen) };
    if done != 0 {
        return Err(io::Error::last_os_error());
    }
    let born = seen.stx_mask & libc::STATX_BTIME != 0;
    let since = i128::from(seen.stx_btime.tv_sec) * 1_000_000_000;
    let btime = since + i128::from(seen.stx_btime.tv_nsec);
    Ok(Seen {
        identity: Identity {
            ino: seen.stx_ino,
            // Nothing that is there was made before 1970 or will be after 2500.
            btime: if born { u64::try_from(btime).unwrap_or(0) } else { 0 },
        },
        kind: u32::from(seen.stx_mode) & libc::S_IFMT,
        device: libc::makedev(seen.stx_dev_major, seen.stx_dev_minor),
    })
}

/// Gets at the descriptor behind a handle: the library hands it to whom it has read into.
#[derive(Default)]
pub struct Descriptor {
    /// A duplicate.
    pub file: Option<File>,
}

impl ZeroCopyWriter for Descriptor {
    fn read_from_file_at(
        &mut self,
        file: &File,
        _count: usize,
        _offset: u64,
        _flags: Option<ReadvFlags>,
    ) -> io::Result<usize> {
        self.file = Some(file.try_clone()?);
        Ok(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_takes_anothers_place_is_another() {
        let folder = tempfile::tempdir().unwrap();
        let (path, other) = (folder.path().join("f"), folder.path().join("g"));
        std::fs::write(&path, "old").unwrap();
        std::fs::write(&other, "new").unwrap();
        let directory = File::open(folder.path()).unwrap();
        let old = look(&directory, c"f").unwrap();
        assert_eq!((old, old.kind), (look(&directory, c"f").unwrap(), libc::S_IFREG));
        std::fs::rename(&other, &path).unwrap();
        assert_ne!(look(&directory, c"f").unwrap().identity, old.identity);
        assert_eq!(look(&directory, c"").unwrap().kind, libc::S_IFDIR);
    }
}
