use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use tempfile::NamedTempFile;

use super::*;
use crate::memory::{Bytes, GuestAddress, Memory};
use crate::testing::ram;
use crate::virtio::Segment;
use crate::virtio::block::disk::Buffers;
use crate::virtio::block::tests::host;
use crate::virtio::block::worker::wait_readable;

const SIZE: u64 = 4 << 20;

fn image() -> NamedTempFile {
    let file = NamedTempFile::new().unwrap();
    let data: Vec<u8> = (0..SIZE / 4).flat_map(|word| (word as u32).to_le_bytes()).collect();
    file.as_file().write_all_at(&data, 0).unwrap();
    file
}

/// A disk with a ring, where the host has one, that uses it for everything.
fn disk(path: &Path) -> Option<UringFile> {
    match ring() {
        Ok(ring) => {
            let mut disk = UringFile::new(DiskFile::open(path, false).unwrap(), ring);
            disk.cached = false;
            Some(disk)
        }
        Err(error) => {
            host::skip("io_uring", &format!("no io_uring ({error}): allow it on this host"));
            None
        }
    }
}

fn read(memory: &Arc<Memory>, offset: u64, to: u64) -> DiskOp {
    let segment = Segment { address: GuestAddress(to), len: 512 };
    DiskOp::Read { offset, buffers: Buffers::new(memory.clone(), vec![segment]) }
}

/// The next `count` completions.
fn wait(disk: &mut UringFile, count: usize) -> Vec<Completion> {
    let mut all = Vec::new();
    while all.len() < count {
        match disk.completed() {
            Some(completion) => all.push(completion),
            None => wait_readable(disk),
        }
    }
    all
}

#[test]
fn more_operations_than_the_ring_has_entries_are_all_done_once() {
    let file = image();
    let Some(mut disk) = disk(file.path()) else { return };
    let memory = Arc::new(ram());
    // A device has up to 4096 in flight.
    for place in 0..4096 {
        disk.submit(Tag(place), read(&memory, u64::from(place) * 512, u64::from(place) * 512));
    }
    let mut tags: Vec<u32> = wait(&mut disk, 4096)
        .into_iter()
        .map(|completion| {
            assert_eq!((completion.result.unwrap(), completion.moved), ((), 512));
            completion.tag.0
        })
        .collect();
    tags.sort_unstable();
    assert!(tags.into_iter().eq(0..4096));
    assert!(disk.completed().is_none());
    let mut read = vec![0; 4096 * 512];
    memory.read_slice(&mut read, GuestAddress(0)).unwrap();
    let mut expected = vec![0; 4096 * 512];
    file.as_file().read_exact_at(&mut expected, 0).unwrap();
    assert_eq!(read, expected);
}

#[test]
fn never_more_than_the_slots_are_in_the_kernel() {
    let file = image();
    let Some(mut disk) = disk(file.path()) else { return };
    let memory = Arc::new(ram());
    for place in 0..1000 {
        disk.submit(Tag(place), read(&memory, 0, 0));
    }
    disk.stage();
    assert_eq!((disk.staged.len(), disk.free.len()), (SLOTS as usize, 0));
    disk.enter();
    assert_eq!((disk.in_kernel, disk.staged.len()), (SLOTS as usize, 0));
    assert_eq!(wait(&mut disk, 1000).len(), 1000);
    assert_eq!((disk.in_kernel, disk.free.len()), (0, SLOTS as usize));
}

#[test]
fn a_disk_that_is_dropped_in_flight_touches_no_memory_afterwards() {
    let file = image();
    for staged_only in [false, true] {
        let Some(mut disk) = disk(file.path()) else { return };
        let memory = Arc::new(ram());
        for place in 0..500 {
            disk.submit(Tag(place), read(&memory, 512, u64::from(place) * 512));
        }
        disk.stage();
        if !staged_only {
            disk.enter();
        }
        drop(disk);
        // All operations, and with them their hold on guest memory, are gone.
        assert_eq!(Arc::strong_count(&memory), 1);
        memory.write_slice(&[0x55; 500 * 512], GuestAddress(0)).unwrap();
        let mut after = vec![0; 500 * 512];
        memory.read_slice(&mut after, GuestAddress(0)).unwrap();
        assert!(after.iter().all(|byte| *byte == 0x55));
    }
}

#[test]
fn a_kernel_that_takes_nothing_more_is_done_without() {
    let file = image();
    let Some(mut disk) = disk(file.path()) else { return };
    let memory = Arc::new(ram());
    for place in 0..300 {
        disk.submit(Tag(place), read(&memory, 512, u64::from(place) * 512));
    }
    disk.stage();
    disk.give_up(&io::Error::from_raw_os_error(libc::EPERM));
    let done = wait(&mut disk, 300);
    assert!(done.iter().all(|completion| completion.result.is_ok() && completion.moved == 512));
    disk.submit(Tag(0), DiskOp::Flush);
    assert!(wait(&mut disk, 1).iter().all(|completion| completion.result.is_ok()));
    assert!(disk.completed().is_none());
}

#[test]
fn operations_survive_the_end_of_the_thread_that_began_them() {
    let file = image();
    let Some(mut disk) = disk(file.path()) else { return };
    let memory = Arc::new(ram());
    for round in 0..20 {
        // Durable writes take steps that nobody can do at once. The kernel cancels those of a
        // thread that ends.
        for place in 0..64 {
            let segment = Segment { address: GuestAddress(0), len: 512 };
            let buffers = Buffers::new(memory.clone(), vec![segment]);
            let offset = u64::from(place) * 512;
            disk.submit(Tag(place), DiskOp::Write { offset, buffers, durable: true });
        }
        disk = std::thread::spawn(move || {
            disk.stage();
            disk.enter();
            disk
        })
        .join()
        .unwrap();
        for completion in wait(&mut disk, 64) {
            completion.result.unwrap_or_else(|error| panic!("round {round}: {error}"));
        }
    }
}

#[test]
fn completions_of_nothing_are_ignored() {
    let file = image();
    let Some(mut disk) = disk(file.path()) else { return };
    for user_data in [0, u64::from(SLOTS), u64::from(AGAIN), u64::MAX] {
        assert!(disk.landed(user_data, 0).is_none());
    }
}
