//! What every engine must do, on files.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;
use std::sync::Arc;

use tempfile::NamedTempFile;

use super::*;
use crate::memory::{Bytes, GuestAddress, GuestMemoryBackend, Memory};
use crate::testing::ram;
use crate::virtio::Segment;
use crate::virtio::block::disk::{Buffers, Completion, DiskOp, Extent, Tag};
use crate::virtio::block::tests::host::{engines, open};
use crate::virtio::block::worker::wait_readable;

fn image(size: u64) -> NamedTempFile {
    let file = NamedTempFile::new().unwrap();
    file.as_file().set_len(size).unwrap();
    file
}

fn buffers(memory: &Arc<Memory>, pieces: &[(u64, u32)]) -> Buffers {
    let segment = |&(address, len)| Segment { address: GuestAddress(address), len };
    Buffers::new(memory.clone(), pieces.iter().map(segment).collect())
}

/// Runs `op` to its end; how often the disk had to be called again.
fn run(disk: &mut Box<dyn Disk>, op: DiskOp) -> (Completion, usize) {
    disk.submit(Tag(1), op);
    let mut turns = 0;
    loop {
        match disk.completed() {
            Some(completion) => return (completion, turns),
            None => {
                wait_readable(disk.as_ref());
                turns += 1;
            }
        }
    }
}

#[test]
fn scattered_data_arrives_in_order() {
    for engine in engines() {
        let file = image(8192);
        let mut disk = open(engine, file.path(), false);
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
}

#[test]
fn a_read_marks_the_pages_it_fills_and_no_others() {
    for engine in engines() {
        let file = image(8192);
        let mut disk = open(engine, file.path(), true);
        let memory = Arc::new(ram());
        let to = buffers(&memory, &[(0x5000, 4096), (0x8000, 512)]);
        run(&mut disk, DiskOp::Read { offset: 0, buffers: to }).0.result.unwrap();
        let region = memory.iter().next().unwrap();
        let bitmap = vm_memory::GuestMemoryRegion::bitmap(region);
        let dirty: Vec<bool> =
            (4..10).map(|page| vm_memory::bitmap::Bitmap::dirty_at(&bitmap, page << 12)).collect();
        assert_eq!(dirty, [false, true, false, false, true, false]);
    }
}

#[test]
fn more_segments_than_one_call_takes_are_all_moved() {
    for engine in engines() {
        let file = image(1 << 20);
        file.as_file().write_all_at(&[9; 3000], 0).unwrap();
        let mut disk = open(engine, file.path(), true);
        let memory = Arc::new(ram());
        let pieces: Vec<_> = (0..3000).map(|piece| (0x1000 + 2 * piece, 1)).collect();
        let to = buffers(&memory, &pieces);
        let (completion, _) = run(&mut disk, DiskOp::Read { offset: 0, buffers: to });
        assert_eq!(completion.moved, 3000);
        let mut back = vec![0; 6000];
        memory.read_slice(&mut back, GuestAddress(0x1000)).unwrap();
        assert_eq!(back, [9, 0].repeat(3000));
    }
}

#[test]
fn a_huge_request_takes_turns_and_says_so() {
    for engine in engines() {
        let size = 7 << 20;
        let file = image(size);
        file.as_file().write_all_at(&[3; 4096], size - 4096).unwrap();
        let mut disk = open(engine, file.path(), true);
        let memory = Arc::new(ram());
        let to = buffers(&memory, &[(0, size as u32)]);
        let (completion, turns) = run(&mut disk, DiskOp::Read { offset: 0, buffers: to });
        assert_eq!((completion.result.unwrap(), completion.moved), ((), size));
        assert!(turns > 0, "nobody else got a turn");
        assert!(disk.completed().is_none());
        let mut tail = [0; 4096];
        memory.read_slice(&mut tail, GuestAddress(size - 4096)).unwrap();
        assert_eq!(tail, [3; 4096]);
    }
}

#[test]
fn a_file_that_was_cut_gives_what_is_left_and_an_error() {
    for engine in engines() {
        let file = image(8192);
        let mut disk = open(engine, file.path(), true);
        file.as_file().set_len(1000).unwrap();
        let memory = Arc::new(ram());
        let to = buffers(&memory, &[(0x1000, 4096)]);
        let (completion, _) = run(&mut disk, DiskOp::Read { offset: 0, buffers: to });
        assert_eq!(completion.moved, 1000);
        assert_eq!(completion.result.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }
}

#[test]
fn a_read_only_disk_refuses_what_the_device_would_never_send() {
    for engine in engines() {
        let file = image(4096);
        let mut disk = open(engine, file.path(), true);
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
}

#[test]
fn discard_gives_space_back_and_keeps_the_size() {
    for engine in engines() {
        let file = image(1 << 20);
        file.as_file().write_all_at(&vec![5; 1 << 20], 0).unwrap();
        file.as_file().sync_all().unwrap();
        let before = file.as_file().metadata().unwrap().blocks();
        let mut disk = open(engine, file.path(), false);
        let extents = vec![
            Extent { offset: 0, len: 256 << 10 },
            Extent { offset: 512 << 10, len: 256 << 10 },
        ];
        run(&mut disk, DiskOp::Discard { extents, durable: true }).0.result.unwrap();
        let after = file.as_file().metadata().unwrap();
        assert_eq!(after.blocks(), before - 1024);
        assert_eq!(after.len(), 1 << 20);
    }
}

fn zeroes_are_written(engine: Engine, file: &File, path: &Path) {
    let size = 6 << 20;
    for unmap in [false, true] {
        file.write_all_at(&vec![5; size], 0).unwrap();
        let mut disk = open(engine, path, false);
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
    for engine in engines() {
        zeroes_are_written(engine, file.as_file(), file.path());
    }
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
    for engine in engines() {
        zeroes_are_written(engine, &file, &path);
    }
}

#[test]
fn nothing_to_do_is_done_at_once() {
    for engine in engines() {
        let file = image(4096);
        let mut disk = open(engine, file.path(), false);
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
            assert_eq!(completion.moved, 0);
            assert!(turns == 0 || engine == Engine::IoUring);
        }
    }
}

// --- the choice --------------------------------------------------------------------------------

fn no_ring(errno: i32) -> impl Fn() -> io::Result<IoUring> {
    move || Err(io::Error::from_raw_os_error(errno))
}

#[test]
fn engines_are_read_from_text() {
    for (text, engine) in
        [("auto", Engine::Auto), ("io_uring", Engine::IoUring), ("sync", Engine::Sync)]
    {
        assert_eq!(text.parse(), Ok(engine));
    }
    let error = "aio".parse::<Engine>().unwrap_err().to_string();
    assert!(error.contains("\"aio\"") && error.contains("use auto, io_uring or sync"), "{error}");
}

#[test]
fn a_host_without_rings_is_told_and_done_without() {
    let file = image(4096);
    for (errno, reason) in [
        (libc::ENOSYS, "older than Linux 5.6"),
        (libc::EPERM, "kernel.io_uring_disabled or a seccomp filter"),
        (libc::ENOMEM, "ulimit -l"),
        (libc::EMFILE, "Too many open files"),
    ] {
        let open = OpenDisk::open_with(file.path(), false, Engine::Auto, no_ring(errno)).unwrap();
        assert_eq!(open.engine, EngineKind::Sync);
        assert!(open.fallback.as_deref().unwrap().contains(reason), "{:?}", open.fallback);
        drop(open);
        let open = OpenDisk::open_with(file.path(), false, Engine::IoUring, no_ring(errno));
        let text = open.err().unwrap().to_string();
        assert!(text.contains(reason) && text.contains("engine=sync"), "{text}");
        assert!(text.contains(&file.path().display().to_string()) && !text.contains('\n'));
    }
}

#[test]
fn who_asks_for_sync_gets_it_without_a_ring_being_tried() {
    let file = image(4096);
    let open = OpenDisk::open_with(file.path(), false, Engine::Sync, || panic!("tried")).unwrap();
    assert_eq!((open.engine, open.fallback), (EngineKind::Sync, None));
}

/// Makes `io_uring_setup` fail with `errno` in this thread, for good.
fn forbid_rings(errno: u32) {
    let code = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
    let number = libc::SYS_io_uring_setup as u32;
    let mut filter = [
        code(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        code(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, number),
        code(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ERRNO | errno),
        code(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the first call takes numbers; the second reads the program, which outlives it.
    let result = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
            | libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &program)
    };
    assert_eq!(result, 0, "{}", io::Error::last_os_error());
}

#[test]
fn a_seccomp_filter_is_a_host_without_rings() {
    for errno in [libc::EPERM, libc::ENOSYS] {
        let engine = std::thread::spawn(move || {
            forbid_rings(errno as u32);
            let file = image(4096);
            let disk = OpenDisk::open(file.path(), false, Engine::Auto).unwrap();
            assert!(disk.fallback.unwrap().contains("seccomp filter"));
            assert!(OpenDisk::open(file.path(), false, Engine::IoUring).is_err());
            disk.engine
        });
        assert_eq!(engine.join().unwrap(), EngineKind::Sync);
    }
}
