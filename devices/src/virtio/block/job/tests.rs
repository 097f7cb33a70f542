use std::sync::Arc;

use tempfile::NamedTempFile;

use super::*;
use crate::memory::GuestAddress;
use crate::testing::ram;
use crate::virtio::Segment;

fn disk(read_only: bool) -> (NamedTempFile, DiskFile) {
    let file = NamedTempFile::new().unwrap();
    file.as_file().set_len(1 << 20).unwrap();
    let disk = DiskFile::open(file.path(), read_only).unwrap();
    (file, disk)
}

fn write(len: u32, durable: bool) -> Job {
    let segment = Segment { address: GuestAddress(0), len };
    let buffers = Buffers::new(Arc::new(ram()), vec![segment]);
    Job::new(Tag(0), DiskOp::Write { offset: 512, buffers, durable })
}

fn zero(extents: &[(u64, u64)], unmap: bool) -> Job {
    let extents = extents.iter().map(|&(offset, len)| Extent { offset, len }).collect();
    Job::new(Tag(0), DiskOp::WriteZeroes { extents, unmap, durable: false })
}

fn errno(errno: i32) -> io::Result<usize> {
    Err(io::Error::from_raw_os_error(errno))
}

/// The steps of `job` when the storage answers with `results`.
fn steps(job: &mut Job, disk: &DiskFile, results: Vec<io::Result<usize>>) -> Vec<Step> {
    let mut steps = Vec::new();
    for result in results {
        let step = job.next(disk).unwrap().unwrap();
        steps.push(step);
        job.advance(step, result).unwrap();
    }
    steps
}

#[test]
fn what_was_not_moved_is_moved_next() {
    let (_file, disk) = disk(false);
    let mut job = write(4096, true);
    let results = vec![Ok(100), errno(libc::EINTR), Ok(3996), Ok(0)];
    let steps = steps(&mut job, &disk, results);
    let write = |skip| Step::Write { offset: 512, skip };
    assert_eq!(steps, [write(0), write(100), write(100), Step::Sync]);
    assert_eq!(job.next(&disk).unwrap(), None);
    assert_eq!(job.complete(Ok(())).moved, 4096);
}

#[test]
fn only_a_durable_write_is_synced() {
    let (_file, disk) = disk(false);
    let mut job = write(512, false);
    assert_eq!(steps(&mut job, &disk, vec![Ok(512)]).len(), 1);
    assert_eq!(job.next(&disk).unwrap(), None);
}

#[test]
fn a_write_that_moves_nothing_or_fails_is_an_error() {
    let (_file, disk) = disk(false);
    for (result, kind) in [
        (Ok(0), io::ErrorKind::UnexpectedEof),
        (errno(libc::ENOSPC), io::ErrorKind::StorageFull),
        (errno(libc::EOPNOTSUPP), io::ErrorKind::Unsupported),
    ] {
        let mut job = write(512, false);
        let step = job.next(&disk).unwrap().unwrap();
        assert_eq!(job.advance(step, result).unwrap_err().kind(), kind);
    }
}

#[test]
fn a_sync_that_fails_fails_the_write() {
    let (_file, disk) = disk(false);
    let mut job = write(512, true);
    steps(&mut job, &disk, vec![Ok(512)]);
    let step = job.next(&disk).unwrap().unwrap();
    assert!(job.advance(step, errno(libc::EIO)).is_err());
}

#[test]
fn zeroes_take_the_next_way_when_one_is_not_there() {
    let (_file, disk) = disk(false);
    let mut job = zero(&[(0, 100_000), (200_000, 512)], true);
    let results =
        vec![errno(libc::EOPNOTSUPP), errno(libc::EOPNOTSUPP), Ok(65_536), Ok(34_464), Ok(512)];
    let first = Extent { offset: 0, len: 100_000 };
    let expected = [
        Step::Allocate { mode: Mode::PunchHole, extent: first },
        Step::Allocate { mode: Mode::ZeroRange, extent: first },
        Step::Zeroes { offset: 0, len: 65_536 },
        Step::Zeroes { offset: 65_536, len: 34_464 },
        Step::Zeroes { offset: 200_000, len: 512 },
    ];
    assert_eq!(steps(&mut job, &disk, results), expected);
    assert_eq!(job.next(&disk).unwrap(), None);
}

#[test]
fn zeroes_that_shall_keep_their_space_punch_no_hole() {
    let (_file, disk) = disk(false);
    let step = zero(&[(0, 512)], false).next(&disk).unwrap().unwrap();
    assert!(matches!(step, Step::Allocate { mode: Mode::ZeroRange, .. }));
}

#[test]
fn a_discard_that_nobody_can_do_is_unsupported() {
    let (_file, disk) = disk(false);
    let extents = vec![Extent { offset: 0, len: 512 }];
    let mut job = Job::new(Tag(0), DiskOp::Discard { extents, durable: false });
    steps(&mut job, &disk, vec![errno(libc::EOPNOTSUPP)]);
    assert_eq!(job.next(&disk).unwrap_err().kind(), io::ErrorKind::Unsupported);
}

#[test]
fn devices_are_discarded_and_not_zeroed_instead() {
    let extents = vec![Extent { offset: 0, len: 512 }];
    let job = Job::new(Tag(0), DiskOp::Discard { extents, durable: false });
    let extent = Extent { offset: 0, len: 512 };
    assert_eq!(job.on_extent(extent, true).unwrap(), Step::Discard { extent });
}

#[test]
fn nothing_is_changed_on_a_disk_that_is_read_only() {
    let (_file, disk) = disk(true);
    for job in [write(512, true), zero(&[(0, 512)], true)] {
        assert_eq!(job.next(&disk).unwrap_err().kind(), io::ErrorKind::ReadOnlyFilesystem);
    }
    assert_eq!(Job::new(Tag(0), DiskOp::Flush).next(&disk).unwrap(), None);
}
