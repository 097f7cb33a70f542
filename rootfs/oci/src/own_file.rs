//! This program's own file must not be written by a container: `/proc/PID/exe` leads to it as soon
//! as a container executes a link to `/proc/self/exe`, and what is written there would run with all
//! privileges of the guest the next time (the way of CVE-2019-5736). A container cannot write what
//! lies on a read-only mount.

use crate::error::Error;
use nix::errno::Errno;
use nix::mount::{MsFlags, mount};
use nix::sys::statvfs::{FsFlags, statvfs};
use std::convert::Infallible;
use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::{env, fs};

/// What this process runs from.
const SELF: &str = "/proc/self/exe";

/// Makes sure that this process runs from a read-only mount: the first time it mounts its file over
/// itself and starts anew from there.
///
/// # Errors
/// [`Error::System`], or [`Error::File`] if the mount fails.
pub fn protect() -> Result<(), Error> {
    if is_read_only(Path::new(SELF)).map_err(Error::system("look at my own file"))? {
        return Ok(());
    }
    let path = fs::read_link(SELF).map_err(Error::system("find my own file"))?;
    // Another process may have done it since this one was started.
    if !is_read_only(&path).map_err(Error::system("look at my own file"))? {
        let nothing = None::<&str>;
        let read_only = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
        let mounted = mount(Some(&path), &path, nothing, MsFlags::MS_BIND, nothing)
            .and_then(|()| mount(nothing, &path, nothing, read_only, nothing));
        mounted.map_err(|errno| Error::file("mount", &path)(errno.into()))?;
    }
    let Err(errno) = start_anew(&path);
    Err(Error::system("start anew")(errno))
}

fn is_read_only(path: &Path) -> Result<bool, Errno> {
    statvfs(path).map(|stat| stat.flags().contains(FsFlags::ST_RDONLY))
}

fn start_anew(path: &Path) -> Result<Infallible, Errno> {
    let words = env::args_os().map(|word| CString::new(word.as_bytes()));
    let words: Vec<_> = words.collect::<Result<_, _>>().map_err(|_| Errno::EINVAL)?;
    let path = CString::new(path.as_os_str().as_bytes()).map_err(|_| Errno::EINVAL)?;
    nix::unistd::execv(&path, &words)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_tells_whether_it_is_read_only() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(is_read_only(dir.path()), Ok(false));
        assert_eq!(is_read_only(Path::new("/nosuch")), Err(Errno::ENOENT));
    }
}
