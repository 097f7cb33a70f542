//! Files that the server lends the device: what is answered without it is what it would have answered.

use std::collections::HashSet;
use std::fs::{self, File, Metadata};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use devices::testing::metric;
use devices::virtio::fs::FsConfig;
use tempfile::tempdir;

use super::{Driven, config, mounted, moved};
use crate::guest::{BOTH, Guest, READ, ROOT};

const LEN: usize = 300_000;

fn content() -> Vec<u8> {
    (0..LEN).map(|at| (at / 7 % 251) as u8).collect()
}

fn direct(guest: &Guest<Driven>) -> u64 {
    metric(&*guest.server.meter, "fs_direct_total")
}

/// Reads until a read is answered without the server.
fn warm(guest: &mut Guest<Driven>, node: u64, handle: u64) {
    let before = direct(guest);
    for _ in 0..1000 {
        guest.read(node, handle, 0, 1).unwrap();
        if direct(guest) > before {
            return;
        }
    }
    panic!("the file is not lent");
}

/// A share with one file, and that file open.
fn opened(path: &Path, flags: i32) -> (Guest<Driven>, u64, u64) {
    fs::write(path.join("f"), content()).unwrap();
    let mut guest = mounted(config(path));
    let node = guest.lookup(ROOT, "f").unwrap().node;
    let handle = guest.open(node, flags).unwrap();
    (guest, node, handle)
}

#[test]
fn y1_what_is_read_again_and_again_is_read_without_the_server() {
    let share = tempdir().unwrap();
    let (mut guest, node, handle) = opened(share.path(), READ);
    guest.read(node, handle, 0, 10).unwrap();
    assert_eq!(direct(&guest), 0, "what is used once is not lent");
    warm(&mut guest, node, handle);
    let content = content();
    for (at, size) in [(0, 4096), (1, 1), (4095, 8193), (299_000, 4096), (131_072, 131_072)] {
        let before = direct(&guest);
        let end = LEN.min(at + size);
        let read = guest.read(node, handle, at as u64, size as u32).unwrap();
        assert!(read == content[at..end], "{size} bytes at {at}");
        assert_eq!(direct(&guest), before + 1, "{size} bytes at {at}");
    }
    // Behind the end, and what the host has changed meanwhile.
    assert_eq!(guest.read(node, handle, LEN as u64, 10).unwrap(), [0_u8; 0]);
    assert_eq!(guest.read(node, handle, 1 << 40, 10).unwrap(), [0_u8; 0]);
    let file = File::options().write(true).open(share.path().join("f")).unwrap();
    file.write_all_at(b"changed", 5000).unwrap();
    file.set_len(5010).unwrap();
    let now = guest.read(node, handle, 4990, 100).unwrap();
    assert_eq!((now.len(), &now[10..17]), (20, &b"changed"[..]));
}

#[test]
fn y2_what_is_not_in_memory_comes_from_the_server() {
    let share = tempdir().unwrap();
    let (mut guest, node, handle) = opened(share.path(), READ);
    warm(&mut guest, node, handle);
    let file = File::open(share.path().join("f")).unwrap();
    file.sync_all().unwrap();
    // SAFETY: an open descriptor and numbers.
    let told = unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
    assert_eq!(told, 0);
    // Half of it may be there and half not: whoever answers, all of it comes.
    let content = content();
    for at in [200_000, 0, 100_000, 199_000] {
        let read = guest.read(node, handle, at as u64, 50_000).unwrap();
        assert!(read == content[at..at + 50_000], "at {at}");
    }
}

#[test]
fn y3_what_is_written_is_in_the_file_whoever_writes_it() {
    let share = tempdir().unwrap();
    let (mut guest, node, handle) = opened(share.path(), BOTH);
    warm(&mut guest, node, handle);
    let mut expected = content();
    for (round, at) in [0, 4096, 299_999, 123_457].into_iter().enumerate() {
        let data = vec![round as u8; 70_000];
        assert_eq!(guest.write(node, handle, at as u64, &data), Ok(70_000));
        expected.resize(expected.len().max(at + data.len()), 0);
        expected[at..at + data.len()].copy_from_slice(&data);
        assert!(fs::read(share.path().join("f")).unwrap() == expected, "at {at}");
        let read = guest.read(node, handle, at as u64, 70_000).unwrap();
        assert!(read == data, "at {at}");
    }
    // At the end, wherever that is: the host's kernel knows.
    guest.write_as(node, handle, 0, b"end", 0, BOTH | libc::O_APPEND).unwrap();
    expected.extend(b"end");
    assert!(fs::read(share.path().join("f")).unwrap() == expected, "not at its end");
}

#[test]
fn y4_a_handle_that_is_closed_leads_nowhere() {
    let share = tempdir().unwrap();
    let (mut guest, node, handle) = opened(share.path(), READ);
    warm(&mut guest, node, handle);
    let before = direct(&guest);
    assert_eq!(guest.read(ROOT, handle, 0, 10), Err(libc::EBADF), "another node's");
    assert_eq!(guest.read(node, handle + 1, 0, 10), Err(libc::EBADF));
    assert_eq!(guest.read(node, handle, u64::MAX - 5, 10), Err(libc::EINVAL));
    guest.release(node, handle).unwrap();
    assert_eq!(guest.read(node, handle, 0, 10), Err(libc::EBADF));
    let other = guest.open(node, READ).unwrap();
    assert_ne!(other, handle);
    guest.read(node, other, 0, 10).unwrap();
    assert_eq!(direct(&guest), before);
    // Nothing of it is held open.
    assert_eq!(held_open(&[&share.path().join("f")]), 0);
}

/// How many descriptors this process has of files, by whatever path.
fn held_open(paths: &[&Path]) -> usize {
    let which = |file: Metadata| (file.dev(), file.ino());
    let files: HashSet<_> = paths.iter().map(|path| which(path.metadata().unwrap())).collect();
    let all = fs::read_dir("/proc/self/fd").unwrap().filter_map(Result::ok);
    // Some are closed by other tests meanwhile.
    all.filter(|fd| fs::metadata(fd.path()).is_ok_and(|file| files.contains(&which(file)))).count()
}

#[test]
fn y5_closed_at_once_it_is_not_kept() {
    let share = tempdir().unwrap();
    let (mut guest, node, handle) = opened(share.path(), READ);
    guest.release(node, handle).unwrap();
    for _ in 0..100 {
        let handle = guest.open(node, READ).unwrap();
        for _ in 0..2 {
            guest.read(node, handle, 0, 10).unwrap();
        }
        guest.release(node, handle).unwrap();
        assert_eq!(held_open(&[&share.path().join("f")]), 0);
    }
}

#[test]
fn y6_a_mount_and_a_restore_begin_with_nothing() {
    let share = tempdir().unwrap();
    let (mut guest, node, handle) = opened(share.path(), READ);
    warm(&mut guest, node, handle);
    let mut guest = moved(guest, config(share.path())).unwrap();
    assert_eq!(direct(&guest), 0);
    guest.read(node, handle, 0, 10).unwrap();
    warm(&mut guest, node, handle);
    assert!(guest.read(node, handle, 0, 4096).unwrap() == content()[..4096]);
    guest.mount();
    assert_eq!(guest.read(node, handle, 0, 10), Err(libc::EBADF));
    assert_eq!(held_open(&[&share.path().join("f")]), 0);
}

#[test]
fn y7_many_files_are_lent_and_few_are_kept() {
    let share = tempdir().unwrap();
    let mut guest = mounted(config(share.path()));
    let mut open = Vec::new();
    for number in 0..150 {
        let name = format!("f{number}");
        fs::write(share.path().join(&name), name.repeat(100)).unwrap();
        let node = guest.lookup(ROOT, &name).unwrap().node;
        let handle = guest.open(node, READ).unwrap();
        warm(&mut guest, node, handle);
        open.push((node, handle, name));
    }
    let paths: Vec<_> = open.iter().map(|(.., name)| share.path().join(name)).collect();
    let paths: Vec<_> = paths.iter().map(PathBuf::as_path).collect();
    assert_eq!(held_open(&paths), 64);
    for (node, handle, name) in &open {
        assert_eq!(guest.read(*node, *handle, 0, 20).unwrap(), name.repeat(100).as_bytes()[..20]);
    }
}

#[test]
fn y8_nothing_is_written_to_what_may_only_be_read() {
    let share = tempdir().unwrap();
    let (mut guest, node, handle) = opened(share.path(), READ);
    warm(&mut guest, node, handle);
    assert_eq!(guest.write(node, handle, 0, b"no"), Err(libc::EBADF));
    drop(guest);
    let read_only = FsConfig { read_only: true, ..config(share.path()) };
    let mut guest = mounted(read_only);
    let node = guest.lookup(ROOT, "f").unwrap().node;
    let handle = guest.open(node, READ).unwrap();
    warm(&mut guest, node, handle);
    assert!(guest.write(node, handle, 0, b"no").is_err());
    assert!(fs::read(share.path().join("f")).unwrap() == content());
}
