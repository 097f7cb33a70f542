use std::io::Write;
use std::os::unix::fs::{FileExt, PermissionsExt};

use tempfile::{NamedTempFile, TempDir};

use super::*;
use crate::virtio::block::RawFile;

fn file(content: &[u8]) -> NamedTempFile {
    let mut file = NamedTempFile::new().unwrap();
    file.write_all(content).unwrap();
    file
}

pub(in crate::virtio::pmem) fn byte(backing: &PmemBacking, offset: usize) -> u8 {
    assert!((offset as u64) < backing.len());
    // SAFETY: the byte is in the mapping, whose file is as long as it was.
    unsafe { backing.host_address().add(offset).read_volatile() }
}

pub(in crate::virtio::pmem) fn set_byte(backing: &PmemBacking, offset: usize, value: u8) {
    assert!((offset as u64) < backing.len() && !backing.read_only());
    // SAFETY: the byte is in the mapping, which is writable, and nobody else uses it.
    unsafe { backing.host_address().add(offset).write_volatile(value) }
}

/// What `/proc/self/maps` says of the mappings of `path`.
fn maps(path: &Path) -> Vec<String> {
    let text = std::fs::read_to_string("/proc/self/maps").unwrap();
    text.lines().filter(|line| line.contains(path.to_str().unwrap())).map(str::to_owned).collect()
}

#[test]
fn the_file_is_followed_by_zeroes() {
    for read_only in [true, false] {
        let file = file(&[7; 5000]);
        let backing = PmemBacking::open(file.path(), read_only).unwrap();
        assert_eq!((backing.len(), backing.file_len()), (ALIGNMENT, 5000));
        assert_eq!(backing.host_address().addr().get() as u64 % ALIGNMENT, 0);
        let last = ALIGNMENT as usize - 1;
        assert_eq!(
            [0, 4999, 5000, 8191, 8192, last].map(|at| byte(&backing, at)),
            [7, 7, 0, 0, 0, 0]
        );
    }
}

#[test]
fn lengths_are_rounded_up() {
    for (len, rounded) in [(1, 1), (ALIGNMENT - 1, 1), (ALIGNMENT, 1), (ALIGNMENT + 1, 2)] {
        let file = file(b"");
        file.as_file().set_len(len).unwrap();
        let backing = PmemBacking::open(file.path(), true).unwrap();
        assert_eq!((backing.len(), backing.file_len()), (rounded * ALIGNMENT, len));
    }
}

#[test]
fn read_only_memory_is_the_page_cache_and_protected() {
    let file = file(&[7; 4096]);
    let backing = PmemBacking::open(file.path(), true).unwrap();
    file.as_file().write_all_at(&[8], 1).unwrap();
    assert_eq!([0, 1].map(|at| byte(&backing, at)), [7, 8]);
    let maps = maps(file.path());
    assert!(maps.len() == 1 && maps[0].contains(" r--s "), "{maps:?}");
}

#[test]
fn writable_memory_never_reaches_the_file() {
    let file = file(&[7; 4096]);
    let first = PmemBacking::open(file.path(), false).unwrap();
    let second = PmemBacking::open(file.path(), false).unwrap();
    set_byte(&first, 1, 8);
    set_byte(&first, ALIGNMENT as usize - 1, 9);
    assert_eq!([0, 1].map(|at| byte(&first, at)), [7, 8]);
    assert_eq!([0, 1, ALIGNMENT as usize - 1].map(|at| byte(&second, at)), [7, 7, 0]);
    assert_eq!(std::fs::read(file.path()).unwrap(), [7; 4096]);
}

#[test]
fn a_file_that_may_only_be_read_can_be_copied_on_write() {
    let file = file(&[7; 4096]);
    std::fs::set_permissions(file.path(), PermissionsExt::from_mode(0o400)).unwrap();
    let backing = PmemBacking::open(file.path(), false).unwrap();
    set_byte(&backing, 0, 8);
    assert_eq!(byte(&backing, 0), 8);
}

#[test]
fn the_mapping_lives_as_long_as_a_clone() {
    let file = file(&[7; 4096]);
    let backing = PmemBacking::open(file.path(), true).unwrap();
    let clone = backing.clone();
    drop(backing);
    assert_eq!(byte(&clone, 0), 7);
    drop(clone);
    assert_eq!(maps(file.path()), Vec::<String>::new());
}

#[test]
fn locks_keep_writers_away() {
    let file = file(&[7; 4096]);
    let first = PmemBacking::open(file.path(), true).unwrap();
    let second = PmemBacking::open(file.path(), false).unwrap();
    assert!(RawFile::open(file.path(), true).is_ok());
    assert!(RawFile::open(file.path(), false).is_err());
    drop((first, second));
    let disk = RawFile::open(file.path(), false).unwrap();
    let refused = PmemBacking::open(file.path(), true).unwrap_err();
    assert!(matches!(refused, PmemError::InUse(_)), "{refused}");
    drop(disk);
    assert!(PmemBacking::open(file.path(), true).is_ok());
}

#[test]
fn what_cannot_be_mapped_is_refused_with_its_name() {
    let dir = TempDir::new().unwrap();
    let fifo = dir.path().join("fifo");
    let name = std::ffi::CString::new(fifo.to_str().unwrap()).unwrap();
    // SAFETY: the name is a C string that outlives the call.
    assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
    let empty = dir.path().join("empty");
    File::create(&empty).unwrap();
    let refused = |path: &Path| {
        let error = PmemBacking::open(path, true).unwrap_err();
        assert!(error.to_string().contains(path.to_str().unwrap()), "{error}");
        error
    };
    assert!(matches!(refused(&dir.path().join("none")), PmemError::NotFound(_)));
    assert!(matches!(refused(&empty.join("below")), PmemError::NotFound(_)));
    assert!(matches!(refused(&empty), PmemError::Empty(_)));
    for path in [dir.path(), &fifo, Path::new("/dev/null")] {
        assert!(matches!(refused(path), PmemError::NotStorage(_)));
    }
    // A file with holes may be longer than all address space.
    let huge = dir.path().join("huge");
    File::create(&huge).unwrap().set_len(1 << 43).unwrap();
    if let Err(error) = PmemBacking::open(&huge, true) {
        assert!(matches!(error, PmemError::Map { .. }), "{error}");
    }
}
