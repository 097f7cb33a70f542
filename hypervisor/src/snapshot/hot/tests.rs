use std::fs;
use std::os::unix::fs::symlink;

use devices::testing::fuzz;

use super::*;
use crate::config::VmConfig;

const BYTES: u64 = 64 << 20;

fn set() -> HotSet {
    let mut pages = PageSet::none(BYTES);
    for run in [0..1, 5..9, 200..300, BYTES / 4096 - 1..BYTES / 4096] {
        pages.insert(run);
    }
    HotSet::of("0123456789abcdef".repeat(2), BYTES, &pages)
}

fn manifest() -> Manifest {
    let config = r#"{"cpus": 1, "memory": "64M", "kernel": "/k"}"#;
    let config: VmConfig = serde_json::from_str(config).unwrap();
    Manifest::new(config, set().id, 0, b"")
}

/// A set with these numbers in the place of the runs, and a checksum that is right.
fn forged(words: &[u64]) -> Vec<u8> {
    let mut bytes = set().to_bytes();
    bytes.truncate(HEADER);
    bytes[56..HEADER].copy_from_slice(&(words.len() as u64 / 2).to_le_bytes());
    bytes.extend(words.iter().flat_map(|word| word.to_le_bytes()));
    let checksum = checksum::of(&bytes);
    bytes.extend(checksum.as_bytes());
    bytes
}

fn refusal(path: &Path) -> String {
    HotSet::read(path, &manifest()).expect_err("it is refused").to_string()
}

#[test]
fn what_was_written_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(HOT_PAGES);
    assert_eq!(HotSet::in_folder(folder.path(), &manifest()).unwrap(), None);
    fs::write(&path, "older").unwrap();
    set().write(&path).unwrap();
    assert_eq!(HotSet::in_folder(folder.path(), &manifest()).unwrap(), Some(set()));
    assert_eq!(set().pages(), 1 + 4 + 100 + 1);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    let none = HotSet::of(set().id, BYTES, &PageSet::none(BYTES));
    assert_eq!(HotSet::from_bytes(&none.to_bytes()).unwrap(), none);
}

#[test]
fn every_flipped_bit_and_truncation_is_refused() {
    let bytes = set().to_bytes();
    for bit in 0..bytes.len() * 8 {
        let mut damaged = bytes.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        assert!(HotSet::from_bytes(&damaged).is_err(), "bit {bit}");
    }
    for len in 0..bytes.len() {
        assert!(HotSet::from_bytes(&bytes[..len]).is_err(), "{len} bytes");
    }
    assert!(HotSet::from_bytes(&[&bytes[..], b"0"].concat()).is_err());
}

#[test]
fn runs_that_cannot_be_are_refused() {
    let last = BYTES / 4096 - 1;
    assert_eq!(HotSet::from_bytes(&forged(&[0, 1, 2, 1, last, 1])).unwrap().pages(), 3);
    for words in [
        &[0, 0][..],
        &[last, 2],
        &[u64::MAX, 1],
        &[1, u64::MAX],
        &[5, 1, 5, 1],
        &[5, 2, 6, 2],
        &[5, 2, 7, 2],
        &[9, 1, 5, 1],
    ] {
        let error = HotSet::from_bytes(&forged(words)).unwrap_err();
        assert!(matches!(error, BadHotSet::Run { .. }), "{words:?}: {error}");
    }
}

#[test]
fn numbers_of_runs_that_are_not_there_are_refused() {
    for count in [0, 1, 1 << 32, 1 << 60, u64::MAX] {
        let mut bytes = set().to_bytes();
        bytes.truncate(bytes.len() - CHECKSUM);
        bytes[56..HEADER].copy_from_slice(&count.to_le_bytes());
        let checksum = checksum::of(&bytes);
        bytes.extend(checksum.as_bytes());
        assert_eq!(HotSet::from_bytes(&bytes), Err(BadHotSet::Damaged), "{count}");
    }
}

#[test]
fn sets_of_others_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("set");
    assert!(refusal(&path).contains("snapshot hot --api-socket"));
    let other = HotSet { id: "f".repeat(32), ..set() };
    other.write(&path).unwrap();
    assert!(refusal(&path).contains(&format!("snapshot {}", other.id)));
    HotSet { memory_bytes: BYTES * 2, ..set() }.write(&path).unwrap();
    assert!(refusal(&path).contains("134217728 bytes"));
    let mut newer = set().to_bytes();
    newer[8] = 2;
    fs::write(&path, newer).unwrap();
    assert!(refusal(&path).contains("has version 2"));
    fs::write(&path, b"#!/bin/sh\n").unwrap();
    assert!(refusal(&path).contains("not a list of hot pages"));
}

#[test]
fn what_is_no_file_is_neither_read_nor_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    set().write(&at("set")).unwrap();
    symlink(at("set"), at("link")).unwrap();
    fs::create_dir(at("folder")).unwrap();
    nix::unistd::mkfifo(&at("pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    for name in ["link", "folder", "pipe"] {
        assert!(refusal(&at(name)).contains("not a regular file"), "{name}");
        assert!(set().write(&at(name)).is_err(), "{name}");
    }
    assert!(set().write(Path::new("/dev/null")).is_err());
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 4);
}

#[test]
fn a_file_that_is_too_long_is_not_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("set");
    // A hole, which would be read for minutes.
    fs::File::create(&path).unwrap().set_len(1 << 40).unwrap();
    assert!(refusal(&path).contains("at most"));
    assert!(most_bytes(4 << 40) < 17 << 20);
}

#[test]
fn scattered_pages_become_few_runs() {
    let mut pages = PageSet::none(BYTES);
    (0..1000).for_each(|at| pages.insert_one(at * 2));
    (1000..1010).for_each(|at| pages.insert_one(at * 8));
    let runs: Vec<_> = pages.runs().collect();
    assert_eq!(few(runs.clone(), 1010), runs);
    let joined = few(runs, 20);
    assert_eq!((joined.len(), joined[0].clone()), (11, 0..1999));
}

#[test]
fn fuzz_hot_sets_with_changes() {
    let golden = set().to_bytes();
    let seeds = [vec![0, 0, 1, 0], vec![56, 0, 255, 1], vec![70, 0, 128, 1]];
    fuzz("hot sets", &seeds, |script| {
        let mut bytes = golden.clone();
        for edit in script.chunks_exact(4).take(8) {
            let at = usize::from(u16::from_le_bytes([edit[0], edit[1]])) % bytes.len();
            bytes[at] = edit[2];
            if edit[3] & 1 == 1 {
                // As if it had been written so.
                bytes.truncate(bytes.len() - CHECKSUM);
                let checksum = checksum::of(&bytes);
                bytes.extend(checksum.as_bytes());
            }
        }
        let set = HotSet::from_bytes(&bytes).map_err(|error| std::mem::discriminant(&error))?;
        assert!(set.runs.iter().all(|run| run.start < run.end));
        assert_eq!(set.to_bytes(), bytes);
        Ok::<_, std::mem::Discriminant<BadHotSet>>(set.runs.len())
    });
}
