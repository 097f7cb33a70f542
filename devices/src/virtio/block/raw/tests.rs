use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use tempfile::{NamedTempFile, TempDir};

use super::*;
use crate::memory::{Bytes, GuestAddress, GuestMemoryBackend, Memory};
use crate::testing::ram;
use crate::virtio::Segment;

fn image(size: u64) -> NamedTempFile {
    let file = NamedTempFile::new().unwrap();
    file.as_file().set_len(size).unwrap();
    file
}

fn refusal(path: &Path, read_only: bool) -> DiskError {
    RawFile::open(path, read_only).err().unwrap()
}

fn buffers(memory: &Arc<Memory>, pieces: &[(u64, u32)]) -> Buffers {
    let segment = |&(address, len)| Segment { address: GuestAddress(address), len };
    Buffers::new(memory.clone(), pieces.iter().map(segment).collect())
}

/// Runs `op` to its end; how often the disk wanted to be called again.
fn run(disk: &mut RawFile, op: DiskOp) -> (Completion, usize) {
    disk.submit(Tag(1), op);
    let mut turns = 0;
    loop {
        match disk.completed() {
            Some(completion) => return (completion, turns),
            None => turns += 1,
        }
    }
}

#[test]
fn an_image_has_its_size_in_sectors() {
    let file = image(1536);
    let disk = RawFile::open(file.path(), false).unwrap();
    let geometry = disk.geometry();
    assert_eq!((geometry.sectors, geometry.logical_block, geometry.read_only), (3, 512, false));
    assert!(geometry.physical_block >= 4096);
}

#[test]
fn what_is_no_disk_is_refused_with_the_path_and_a_cure() {
    let dir = TempDir::new().unwrap();
    let (small, uneven) = (image(511), image(1025));
    let missing = dir.path().join("missing");
    let cases = [
        (missing.as_path(), "does not exist", "truncate"),
        (dir.path(), "is a directory", "name a raw image"),
        (Path::new("/dev/null"), "neither a file nor a block device", "name one"),
        (small.path(), "511 bytes", "enlarge"),
        (uneven.path(), "1025 bytes, not a multiple of 512", "truncate --size=%512"),
    ];
    for (path, reason, cure) in cases {
        for read_only in [false, true] {
            let text = refusal(path, read_only).to_string();
            assert!(text.contains(&path.display().to_string()), "{text}");
            assert!(text.contains(reason) && text.contains(cure), "{text}");
            assert!(!text.contains('\n'), "{text}");
        }
    }
}

#[test]
fn a_named_pipe_does_not_hold_us_up() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("pipe");
    std::process::Command::new("mkfifo").arg(&path).status().unwrap();
    assert!(matches!(refusal(&path, true), DiskError::NotStorage(_)));
    assert!(matches!(refusal(&path, false), DiskError::NotStorage(_)));
}

#[test]
fn errors_of_the_host_are_told_apart() {
    let error = |errno, read_only| {
        open_error(Path::new("/disk"), read_only, io::Error::from_raw_os_error(errno)).to_string()
    };
    assert!(error(libc::EACCES, true).contains("for reading"));
    assert!(error(libc::EACCES, false).contains("for writing"));
    assert!(error(libc::EROFS, false).contains("attach it read-only"));
    assert!(error(libc::EMFILE, false).contains("cannot be opened"));
}

#[test]
fn a_writable_disk_excludes_everybody_and_a_read_only_one_writers() {
    let file = image(4096);
    let writer = RawFile::open(file.path(), false).unwrap();
    assert!(matches!(refusal(file.path(), false), DiskError::InUse(_)));
    assert!(refusal(file.path(), true).to_string().contains("stop that one"));
    drop(writer);
    let _reader = RawFile::open(file.path(), true).unwrap();
    let _second = RawFile::open(file.path(), true).unwrap();
    assert!(matches!(refusal(file.path(), false), DiskError::InUse(_)));
}

#[test]
fn an_image_format_is_never_recognised() {
    let mut file = image(4096);
    file.write_all(b"QFI\xfb\0\0\0\x03").unwrap();
    let disk = RawFile::open(file.path(), false).unwrap();
    assert_eq!(disk.geometry().sectors, 8);
}

#[test]
fn scattered_data_arrives_in_order() {
    let file = image(8192);
    let mut disk = RawFile::open(file.path(), false).unwrap();
    let memory = Arc::new(ram());
    let data: Vec<u8> = (0..1024_u32).map(|i| i as u8).collect();
    memory.write_slice(&data, GuestAddress(0x1000)).unwrap();
    let from = buffers(&memory, &[(0x1000, 1), (0x1001, 0), (0x1001, 1000), (0x13e9, 23)]);
    let write = DiskOp::Write { offset: 512, buffers: from, durable: true };
    let (completion, _) = run(&mut disk, write);
    assert_eq!((completion.result.unwrap(), completion.moved), ((), 1024));
    let to = buffers(&memory, &[(0x9000, 700), (0x8000, 324)]);
    let (completion, _) = run(&mut disk, DiskOp::Read { offset: 512, buffers: to });
    assert_eq!((completion.result.unwrap(), completion.moved), ((), 1024));
    let mut back = vec![0; 1024];
    memory.read_slice(&mut back[..700], GuestAddress(0x9000)).unwrap();
    memory.read_slice(&mut back[700..], GuestAddress(0x8000)).unwrap();
    assert_eq!(back, data);
    let mut whole = vec![0; 8192];
    file.as_file().read_exact_at(&mut whole, 0).unwrap();
    assert_eq!(&whole[512..1536], data);
    assert!(whole[..512].iter().chain(&whole[1536..]).all(|byte| *byte == 0));
}

#[test]
fn a_read_marks_the_pages_it_fills_and_no_others() {
    let file = image(8192);
    let mut disk = RawFile::open(file.path(), true).unwrap();
    let memory = Arc::new(ram());
    let to = buffers(&memory, &[(0x5000, 4096), (0x8000, 512)]);
    run(&mut disk, DiskOp::Read { offset: 0, buffers: to }).0.result.unwrap();
    let region = memory.iter().next().unwrap();
    let bitmap = vm_memory::GuestMemoryRegion::bitmap(region);
    let dirty: Vec<bool> =
        (4..10).map(|page| vm_memory::bitmap::Bitmap::dirty_at(&bitmap, page << 12)).collect();
    assert_eq!(dirty, [false, true, false, false, true, false]);
}

#[test]
fn more_segments_than_one_call_takes_are_all_moved() {
    let file = image(1 << 20);
    file.as_file().write_all_at(&[9; 3000], 0).unwrap();
    let mut disk = RawFile::open(file.path(), true).unwrap();
    let memory = Arc::new(ram());
    let pieces: Vec<_> = (0..3000).map(|piece| (0x1000 + 2 * piece, 1)).collect();
    let to = buffers(&memory, &pieces);
    let (completion, _) = run(&mut disk, DiskOp::Read { offset: 0, buffers: to });
    assert_eq!(completion.moved, 3000);
    let mut back = vec![0; 6000];
    memory.read_slice(&mut back, GuestAddress(0x1000)).unwrap();
    assert_eq!(back, [9, 0].repeat(3000));
}

#[test]
fn a_huge_request_takes_turns_and_says_so() {
    let size = 7 << 20;
    let file = image(size);
    file.as_file().write_all_at(&[3; 4096], size - 4096).unwrap();
    let mut disk = RawFile::open(file.path(), true).unwrap();
    let memory = Arc::new(ram());
    disk.submit(Tag(5), DiskOp::Read { offset: 0, buffers: buffers(&memory, &[(0, size as u32)]) });
    assert!(disk.completed().is_none());
    assert_eq!(disk.more.clear(), 1, "the caller must be told to come again");
    disk.more.signal();
    assert_eq!(disk.completed().unwrap().moved, size);
    assert!(disk.completed().is_none());
    assert_eq!(disk.more.clear(), 0);
    let mut tail = [0; 4096];
    memory.read_slice(&mut tail, GuestAddress(size - 4096)).unwrap();
    assert_eq!(tail, [3; 4096]);
}

#[test]
fn a_file_that_was_cut_gives_what_is_left_and_an_error() {
    let file = image(8192);
    let mut disk = RawFile::open(file.path(), true).unwrap();
    file.as_file().set_len(1000).unwrap();
    let memory = Arc::new(ram());
    let to = buffers(&memory, &[(0x1000, 4096)]);
    let (completion, _) = run(&mut disk, DiskOp::Read { offset: 0, buffers: to });
    assert_eq!(completion.moved, 1000);
    assert_eq!(completion.result.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
}

#[test]
fn a_read_only_disk_refuses_what_the_device_would_never_send() {
    let file = image(4096);
    let mut disk = RawFile::open(file.path(), true).unwrap();
    let memory = Arc::new(ram());
    let extents = vec![Extent { offset: 0, len: 512 }];
    let from = buffers(&memory, &[(0, 512)]);
    let ops = [
        DiskOp::Write { offset: 0, buffers: from, durable: false },
        DiskOp::Discard { extents: extents.clone(), durable: false },
        DiskOp::WriteZeroes { extents, unmap: true, durable: false },
    ];
    for op in ops {
        assert!(run(&mut disk, op).0.result.is_err());
    }
    assert!(run(&mut disk, DiskOp::Flush).0.result.is_ok());
}

#[test]
fn discard_gives_space_back_and_keeps_the_size() {
    let file = image(1 << 20);
    file.as_file().write_all_at(&vec![5; 1 << 20], 0).unwrap();
    file.as_file().sync_all().unwrap();
    let before = file.as_file().metadata().unwrap().blocks();
    let mut disk = RawFile::open(file.path(), false).unwrap();
    let extents =
        vec![Extent { offset: 0, len: 256 << 10 }, Extent { offset: 512 << 10, len: 256 << 10 }];
    run(&mut disk, DiskOp::Discard { extents, durable: true }).0.result.unwrap();
    let after = file.as_file().metadata().unwrap();
    assert_eq!(after.blocks(), before - 1024);
    assert_eq!(after.len(), 1 << 20);
}

fn zeroes_are_written(file: &File, path: &Path) {
    let size = 6 << 20;
    for unmap in [false, true] {
        file.write_all_at(&vec![5; size], 0).unwrap();
        let mut disk = RawFile::open(path, false).unwrap();
        let long = Extent { offset: 512, len: 5 << 20 };
        let short = Extent { offset: (5 << 20) + 1024, len: 512 };
        let extents = vec![long, short];
        run(&mut disk, DiskOp::WriteZeroes { extents, unmap, durable: false }).0.result.unwrap();
        let mut whole = vec![0; size];
        file.read_exact_at(&mut whole, 0).unwrap();
        let zero = |range: std::ops::Range<usize>| whole[range].iter().all(|byte| *byte == 0);
        let kept = |range: std::ops::Range<usize>| whole[range].iter().all(|byte| *byte == 5);
        let end = 512 + (5 << 20);
        assert!(kept(0..512) && zero(512..end) && kept(end..end + 512));
        assert!(zero(end + 512..end + 1024) && kept(end + 1024..size));
    }
}

#[test]
fn zeroes_are_written_by_the_file_system() {
    let file = image(6 << 20);
    zeroes_are_written(file.as_file(), file.path());
}

#[test]
fn zeroes_are_written_by_hand_where_the_file_system_cannot() {
    // tmpfs, on which memory files are, punches holes and has no ZERO_RANGE.
    let name = c"disk";
    // SAFETY: a name that ends with a zero byte, and flags; the result is checked.
    let fd = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) };
    assert!(fd >= 0);
    // SAFETY: the descriptor was just made and belongs to nobody else.
    let file = unsafe { <File as std::os::fd::FromRawFd>::from_raw_fd(fd) };
    file.set_len(6 << 20).unwrap();
    let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    zeroes_are_written(&file, &path);
}

#[test]
fn nothing_to_do_is_done_at_once() {
    let file = image(4096);
    let mut disk = RawFile::open(file.path(), false).unwrap();
    assert!(disk.completed().is_none());
    let memory = Arc::new(ram());
    let ops = [
        DiskOp::Read { offset: 4096, buffers: buffers(&memory, &[]) },
        DiskOp::Write { offset: 0, buffers: buffers(&memory, &[(0, 0)]), durable: true },
        DiskOp::Discard { extents: Vec::new(), durable: false },
        DiskOp::WriteZeroes { extents: Vec::new(), unmap: false, durable: true },
        DiskOp::Flush,
    ];
    for op in ops {
        let (completion, turns) = run(&mut disk, op);
        assert!(completion.result.is_ok());
        assert_eq!((completion.moved, turns), (0, 0));
    }
}
