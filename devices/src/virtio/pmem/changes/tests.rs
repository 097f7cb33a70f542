use std::io::Write;

use tempfile::NamedTempFile;

use super::*;
use crate::virtio::pmem::ALIGNMENT;
use crate::virtio::pmem::backing::tests::{byte, set_byte};

const PAGE: u64 = 4096;
const LEN: u64 = 64 * PAGE;

fn file() -> NamedTempFile {
    let mut file = NamedTempFile::new().unwrap();
    file.write_all(&[7; LEN as usize]).unwrap();
    file
}

fn change(offset: u64, len: u64) -> PmemChange {
    PmemChange { offset, len }
}

#[test]
fn what_was_written_and_nothing_else_comes_back_elsewhere() {
    let (image, saved) = (file(), tempfile::tempfile().unwrap());
    let original = PmemBacking::open(image.path(), false).unwrap();
    let last = ALIGNMENT - 1;
    for offset in [3 * PAGE, 4 * PAGE + 1, 9 * PAGE, last] {
        set_byte(&original, offset as usize, 8);
    }
    // Reading changes nothing.
    assert_eq!(byte(&original, 20 * 4096), 7);
    let changes = original.save_changes(&saved).unwrap();
    // The end is not of the file; the kernel may give more than a page of zeroes there.
    let (tail, in_file) = changes.split_last().unwrap();
    assert_eq!(in_file, [change(3 * PAGE, 2 * PAGE), change(9 * PAGE, PAGE)]);
    assert!(tail.offset >= LEN && tail.offset + tail.len == ALIGNMENT);

    let copy = PmemBacking::open(image.path(), false).unwrap();
    copy.load_changes(&saved, &changes).unwrap();
    for offset in (0..ALIGNMENT).step_by(512).chain([4 * PAGE + 1, last]) {
        let offset = offset as usize;
        assert_eq!(byte(&copy, offset), byte(&original, offset), "at {offset}");
    }
    // And once more, from the copy.
    let again = copy.save_changes(&tempfile::tempfile().unwrap()).unwrap();
    assert!(again.starts_with(in_file));
    assert_eq!(std::fs::read(image.path()).unwrap(), [7; LEN as usize]);
}

#[test]
fn untouched_and_read_only_memory_has_no_changes() {
    let image = file();
    for read_only in [true, false] {
        let backing = PmemBacking::open(image.path(), read_only).unwrap();
        assert_eq!(byte(&backing, 0), 7);
        assert_eq!(backing.save_changes(&tempfile::tempfile().unwrap()).unwrap(), []);
    }
}

#[test]
fn changes_that_do_not_fit_are_refused_before_anything_is_changed() {
    let (image, saved) = (file(), tempfile::tempfile().unwrap());
    saved.set_len(ALIGNMENT).unwrap();
    let backing = PmemBacking::open(image.path(), false).unwrap();
    for odd in
        [change(ALIGNMENT, 1), change(0, ALIGNMENT + 1), change(u64::MAX, 2), change(1, u64::MAX)]
    {
        let refused = backing.load_changes(&saved, &[change(0, PAGE), odd]).unwrap_err();
        assert!(matches!(refused, PmemChangeError::Invalid { .. }), "{refused}");
        assert_eq!(byte(&backing, 0), 7);
    }
    let read_only = PmemBacking::open(image.path(), true).unwrap();
    assert!(read_only.load_changes(&saved, &[change(0, PAGE)]).is_err());
    assert!(read_only.load_changes(&saved, &[]).is_ok());
}

#[test]
fn a_snapshot_that_was_cut_off_is_an_error() {
    let (image, saved) = (file(), tempfile::tempfile().unwrap());
    let backing = PmemBacking::open(image.path(), false).unwrap();
    let refused = backing.load_changes(&saved, &[change(0, PAGE)]).unwrap_err();
    assert!(matches!(refused, PmemChangeError::Copy { what: "loaded", .. }), "{refused}");
}

#[test]
fn an_image_that_was_cut_off_is_an_error_and_no_signal() {
    let (image, saved) = (file(), tempfile::tempfile().unwrap());
    saved.set_len(LEN).unwrap();
    let backing = PmemBacking::open(image.path(), false).unwrap();
    image.as_file().set_len(0).unwrap();
    let copied = backing.copy(&tempfile::tempfile().unwrap(), change(0, PAGE), Direction::Save);
    assert!(matches!(copied, Err(PmemChangeError::Copy { what: "saved", .. })));
}
