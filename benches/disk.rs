//! `disk`: the two engines of the block device beside each other, without a guest. `README.md`
//! tells what the figures mean.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, bail, ensure};
use clap::Parser;
use devices::memory::{GuestAddress, Memory};
use devices::virtio::Segment;
use devices::virtio::block::{
    Buffers, Disk, DiskFile, DiskOp, EngineKind, RawFile, Tag, UringFile,
};

use cube_benches::host::Host;
use cube_benches::report::{Report, Section};
use cube_benches::rounds::{Entrant, Trial, measure};

/// Measure the engines of the block device: synchronous I/O beside io_uring, in turn
#[derive(Parser)]
#[command(name = "disk", version)]
struct Options {
    /// Measured rounds; there are two unmeasured ones before them
    #[arg(long, default_value_t = 9, value_name = "N",
          value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..))]
    runs: usize,

    /// Where the file is made that is read and written; it is removed at the end
    #[arg(long, default_value = ".", value_name = "DIR")]
    dir: PathBuf,

    /// Size of the file in MiB
    #[arg(long, default_value_t = 256, value_name = "MIB",
          value_parser = clap::value_parser!(u64).range(16..=65536))]
    size: u64,

    /// Write the figures to FILE as JSON, in nanoseconds
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Where reads find their data and writes leave it.
#[derive(Clone, Copy, PartialEq)]
enum Cache {
    /// In the page cache already.
    Warm,
    /// Through the page cache, which is empty.
    Cold,
    /// Past the page cache.
    Direct,
}

/// One way to use a disk.
struct Load {
    name: &'static str,
    write: bool,
    random: bool,
    len: u32,
    count: u64,
    cache: Cache,
    depth: usize,
}

const fn load(name: &'static str, cache: Cache, depth: usize, count: u64) -> Load {
    Load { name, write: false, random: true, len: 4096, count, cache, depth }
}

const LOADS: &[Load] = &[
    load("random reads of 4 KiB, page cache", Cache::Warm, 32, 16_384),
    load("random reads of 4 KiB, page cache, one at a time", Cache::Warm, 1, 8192),
    load("random reads of 4 KiB, cold page cache", Cache::Cold, 32, 4096),
    load("random reads of 4 KiB, O_DIRECT", Cache::Direct, 32, 8192),
    load("random reads of 4 KiB, O_DIRECT, one at a time", Cache::Direct, 1, 1024),
    Load { write: true, ..load("random writes of 4 KiB, page cache", Cache::Warm, 32, 8192) },
    Load { write: true, ..load("random writes of 4 KiB, O_DIRECT", Cache::Direct, 32, 4096) },
    Load {
        random: false,
        len: 128 << 10,
        ..load("sequential reads of 128 KiB, page cache", Cache::Warm, 32, 2048)
    },
    Load {
        random: false,
        len: 128 << 10,
        ..load("sequential reads of 128 KiB, O_DIRECT", Cache::Direct, 32, 1024)
    },
    Load {
        random: false,
        len: 128 << 10,
        write: true,
        ..load("sequential writes of 128 KiB, page cache", Cache::Warm, 32, 1024)
    },
];

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("disk: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> anyhow::Result<bool> {
    let file = tempfile::NamedTempFile::new_in(&options.dir)
        .with_context(|| format!("cannot make a file in {}", options.dir.display()))?;
    fill(file.as_file(), options.size << 20)?;
    let (path, size) = (file.path(), options.size << 20);
    let host = Host::examine();
    let mut sections = Vec::new();
    for load in LOADS {
        let entrants = [EngineKind::Sync, EngineKind::IoUring].map(|engine| Entrant {
            name: engine.to_string(),
            attempt: Box::new(move || attempt(path, size, load, engine)),
        });
        let records = measure(&entrants, options.runs, |_| {});
        let rows = records.iter().map(|record| record.row(&record.to_end())).collect();
        let depth = load.depth;
        let title = format!("{}: {} requests, {depth} in flight", load.name, load.count);
        sections.push(Section::compared(title, rows));
    }
    let conclusions = Vec::new();
    let report =
        Report { schema: 1, bench: "disk", host, runs: options.runs, sections, conclusions };
    print!("{}", report.render());
    if let Some(path) = &options.json {
        report.write_json(path)?;
    }
    Ok(!report.has_failures())
}

fn fill(file: &File, size: u64) -> anyhow::Result<()> {
    use std::io::Write;
    let mut file = file;
    let piece = vec![0x5a; 1 << 20];
    for _ in 0..size >> 20 {
        file.write_all(&piece)?;
    }
    file.sync_all().context("cannot write the file")
}

fn attempt(path: &Path, size: u64, load: &Load, engine: EngineKind) -> anyhow::Result<Trial> {
    let file = DiskFile::open(path, false)?;
    match load.cache {
        Cache::Warm => {}
        Cache::Cold => forget(file.as_fd())?,
        Cache::Direct => {
            forget(file.as_fd())?;
            direct(file.as_fd())?;
        }
    }
    let mut disk: Box<dyn Disk> = match engine {
        EngineKind::Sync => Box::new(RawFile::new(file)?),
        EngineKind::IoUring => Box::new(UringFile::with_ring(file).context("no io_uring here")?),
    };
    let memory = Arc::new(Memory::from_ranges(&[(GuestAddress(0), 64 << 20)])?);
    let started = Instant::now();
    drive(disk.as_mut(), &memory, size, load)?;
    let ended = u64::try_from(started.elapsed().as_nanos())?;
    Ok(Trial { ended, marks: Vec::new() })
}

/// Keeps `depth` requests in flight, as the block device does: a batch of new ones, then all that
/// has ended.
fn drive(disk: &mut dyn Disk, memory: &Arc<Memory>, size: u64, load: &Load) -> anyhow::Result<()> {
    let blocks = size / u64::from(load.len);
    let (mut random, mut begun, mut ended) = (0x9e37_79b9_7f4a_7c15_u64, 0, 0);
    while ended < load.count {
        while begun < load.count && begun - ended < load.depth as u64 {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let block = if load.random { random % blocks } else { begun % blocks };
            let place = begun % load.depth as u64;
            let address = GuestAddress(place * u64::from(load.len));
            let segment = Segment { address, len: load.len };
            let buffers = Buffers::new(memory.clone(), vec![segment]);
            let offset = block * u64::from(load.len);
            let op = match load.write {
                true => DiskOp::Write { offset, buffers, durable: false },
                false => DiskOp::Read { offset, buffers },
            };
            disk.submit(Tag(u32::try_from(begun)?), op);
            begun += 1;
        }
        let before = ended;
        while let Some(completion) = disk.completed() {
            completion.result?;
            ensure!(completion.moved == u64::from(load.len), "a request was cut short");
            ended += 1;
        }
        if ended == before {
            wait(disk.completion_fd());
        }
    }
    Ok(())
}

fn wait(fd: BorrowedFd<'_>) {
    let mut poll = libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one pollfd that outlives the call. A signal only makes the caller look again.
    unsafe { libc::poll(&mut poll, 1, -1) };
}

/// Writes back and drops what the page cache has of a file.
fn forget(file: BorrowedFd<'_>) -> anyhow::Result<()> {
    let fd = file.as_raw_fd();
    // SAFETY: the descriptor is open; neither call takes a pointer.
    let failed =
        unsafe { libc::fdatasync(fd) | libc::posix_fadvise(fd, 0, 0, libc::POSIX_FADV_DONTNEED) };
    ensure!(failed == 0, "the page cache cannot be emptied");
    Ok(())
}

fn direct(file: BorrowedFd<'_>) -> anyhow::Result<()> {
    // SAFETY: the descriptor is open; the call takes no pointer.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFL, libc::O_DIRECT) } != 0 {
        bail!("this file system has no O_DIRECT: {}", std::io::Error::last_os_error());
    }
    Ok(())
}
