use std::os::unix::fs::FileExt;

use devices::memory::{Bytes, GuestAddress};

use super::*;

const BYTES: u64 = 5 << 30;
/// Places in both regions, by guest address and by place in the file.
const PLACES: [(u64, u64); 3] =
    [(0x1234, 0x1234), ((3 << 30) - 16, (3 << 30) - 16), (4 << 30, 3 << 30)];

fn image() -> File {
    let image = tempfile::tempfile().unwrap();
    image.set_len(BYTES).unwrap();
    for (number, (_, offset)) in (1..).zip(PLACES) {
        image.write_all_at(&[number; 16], offset).unwrap();
    }
    image
}

fn never() -> Lost {
    Box::new(|message| panic!("{message}"))
}

fn assert_content(memory: &Memory) {
    for (number, (address, _)) in (1..).zip(PLACES) {
        let mut read = [0; 16];
        memory.read_slice(&mut read, GuestAddress(address)).unwrap();
        assert_eq!(read, [number; 16], "{address:#x}");
    }
}

#[test]
fn all_of_the_file_is_found_and_its_holes_are_not_touched() {
    let image = image();
    let mut found = Vec::new();
    let mut at = 0;
    while let Some((start, stop)) = next_data(&image, at, BYTES).unwrap() {
        found.push(start..stop);
        at = stop;
    }
    for (_, offset) in PLACES {
        assert!(found.iter().any(|range| range.contains(&offset)), "{offset:#x} in {found:?}");
    }
    let bytes: u64 = found.iter().map(|range| range.end - range.start).sum();
    assert!(bytes < 16 << 20, "{found:?}");
    assert_eq!(next_data(&image, BYTES, BYTES).unwrap(), None);
}

#[test]
fn memory_is_there_at_once_or_when_it_is_touched() {
    for mode in [MemoryMode::Private, MemoryMode::Prefault] {
        let loaded = load(&mode, BYTES, image(), None, never()).unwrap();
        assert!(loaded.pager.is_none());
        assert_content(&loaded.memory);
    }
}

#[test]
fn what_was_given_back_is_remembered_page_by_page() {
    let mut removed = Removed::new(1 << 20);
    removed.add(63 * PAGE);
    assert!(removed.any(60 * PAGE, 64 * PAGE));
    assert!(!removed.any(64 * PAGE, 128 * PAGE) && !removed.any(0, 63 * PAGE));
    removed.add(1 << 40);
    assert!(!removed.any(1 << 40, (1 << 40) + PAGE));
}
