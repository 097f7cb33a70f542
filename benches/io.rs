//! `io`: disks, vsock and network of Linux guests: engines and transports of `cube-vmm` beside each
//! other and beside a peer. `README.md` tells what the figures mean.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::process::ExitCode;
use std::thread;
use std::time::Instant;

use anyhow::{Context, bail, ensure};
use clap::Parser;
use guest_protocol::{Spawn, Stream};

use cube_benches::fio::Load;
use cube_benches::guests::{self, Files, Guest, Kind, Part};
use cube_benches::host::Host;
use cube_benches::peer::Peer;
use cube_benches::report::{Report, Section};
use cube_benches::rounds::{Entrant, Trial, measure};
use cube_benches::vmm;

/// Measure disks, vsock and network of Linux guests, in turn
#[derive(Parser)]
#[command(name = "io", version)]
struct Options {
    /// Measured rounds; there are two unmeasured ones before them
    #[arg(long, default_value_t = 5, value_name = "N",
          value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..))]
    runs: usize,

    /// Measure only what has this in its title
    #[arg(long, default_value = "", value_name = "TEXT")]
    only: String,

    /// How much more work than by default; a guest on hardware wants about 30
    #[arg(long, default_value_t = 1, value_name = "N",
          value_parser = clap::value_parser!(u64).range(1..=10_000))]
    scale: u64,

    /// Where the guests' disks are made; they are removed at the end
    #[arg(long, default_value = ".", value_name = "DIR")]
    dir: PathBuf,

    /// The cube-vmm to measure [default: the one beside this program]
    #[arg(long, value_name = "FILE")]
    vmm: Option<PathBuf>,

    /// A VMM to compare with; only Firecracker has all that is measured
    #[arg(long = "peer", value_name = "firecracker=FILE")]
    peers: Vec<Peer>,

    /// Write the figures to FILE as JSON, in nanoseconds
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

const DISK_MIB: usize = 64;
/// Bytes of a stream.
const STREAM: u64 = 16 << 20;
/// Messages that are answered.
const MESSAGES: u64 = 100;
const fn load(name: &'static str, pattern: &'static str, depth: u32, count: u64) -> Load {
    Load { name, pattern, size: "4k", depth, count }
}

/// And whether the host has nothing of it in its page cache.
const LOADS: &[(Load, bool)] = &[
    (load("random reads of 4 KiB", "randread", 32, 4000), false),
    (load("random reads of 4 KiB, cold page cache", "randread", 32, 2000), true),
    (load("random reads of 4 KiB, one at a time", "randread", 1, 1000), false),
    (load("random writes of 4 KiB", "randwrite", 32, 4000), false),
    (Load { size: "128k", ..load("sequential reads of 128 KiB", "read", 32, 400) }, false),
    (Load { size: "128k", ..load("sequential writes of 128 KiB", "write", 32, 400) }, false),
];

/// What a guest does, and how long it takes.
type Act = Box<dyn Fn(&Guest) -> anyhow::Result<u64>>;

/// Something that every guest does that it is of use for.
struct Job {
    title: String,
    part: Part,
    act: Act,
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("io: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> anyhow::Result<bool> {
    guests::leave_network()?;
    let folder = tempfile::tempdir_in(&options.dir)?;
    let mut jobs = jobs(options.scale);
    jobs.retain(|job| job.title.contains(&options.only));
    ensure!(!jobs.is_empty(), "no title has {:?} in it", options.only);
    let guests = boot_all(options, folder.path(), &jobs)?;
    let mut sections = Vec::new();
    for Job { title, part, act } in jobs {
        eprintln!("io: {title}");
        let entrants: Vec<Entrant<'_>> = guests
            .iter()
            .filter(|guest| guest.kind.is_of_use(part))
            .map(|guest| Entrant {
                name: guest.name.clone(),
                attempt: Box::new(|| Ok(Trial { ended: act(guest)?, marks: Vec::new() })),
            })
            .collect();
        let records = measure(&entrants, options.runs, |_| {});
        let rows = records.iter().map(|record| record.row(&record.to_end())).collect();
        sections.push(Section::compared(title, rows));
    }
    let (host, runs, conclusions) = (Host::examine(), options.runs, Vec::new());
    let report = Report { schema: 1, bench: "io", host, runs, sections, conclusions };
    print!("{}", report.render());
    if let Some(path) = &options.json {
        report.write_json(path)?;
    }
    Ok(!report.has_failures())
}

/// One guest of each kind; they stay, and are idle unless it is their turn.
fn boot_all(
    options: &Options,
    folder: &std::path::Path,
    jobs: &[Job],
) -> anyhow::Result<Vec<Guest>> {
    let program = options.vmm.clone().map_or_else(vmm::default_vmm, Ok)?;
    let guest = program.ancestors().nth(2).context("cube-vmm is in no folder")?.join("guest");
    let files = Files {
        kernel: guest.join("vmlinux"),
        initrd: guest.join("initrd.cpio"),
        tools: guests::tools(folder, &["/usr/bin/fio".as_ref()])?,
        folder: folder.to_owned(),
    };
    let mut kinds = Vec::new();
    for engine in ["sync", "io_uring"] {
        for transport in ["mmio", "pci"] {
            kinds.push(Kind::Cube { program: program.clone(), transport, engine, vhost: false });
        }
    }
    if std::path::Path::new("/dev/vhost-net").exists() {
        for transport in ["mmio", "pci"] {
            let (program, engine) = (program.clone(), "io_uring");
            kinds.push(Kind::Cube { program, transport, engine, vhost: true });
        }
    } else {
        eprintln!("io: vhost-net is not measured: there is no /dev/vhost-net (modprobe vhost_net)");
    }
    for peer in &options.peers {
        ensure!(peer.name() == "firecracker", "{} cannot be measured here", peer.name());
        for engine in ["Sync", "Async"] {
            kinds.push(Kind::Firecracker { peer: peer.clone(), engine });
        }
    }
    kinds.retain(|kind| jobs.iter().any(|job| kind.is_of_use(job.part)));
    let numbered = (0..).zip(&kinds);
    numbered.map(|(number, kind)| Guest::boot(kind, number, &files, DISK_MIB)).collect()
}

fn jobs(scale: u64) -> Vec<Job> {
    let mut jobs = Vec::new();
    for (load, cold) in LOADS {
        let load = load.scaled(scale);
        jobs.push(job(load.title(), Part::Disk, move |guest| disk(guest, &load, *cold)));
    }
    let (bytes, messages) = (STREAM * scale, MESSAGES * scale);
    let mib = bytes >> 20;
    let title = |what: &str| format!("{what}, {mib} MiB");
    jobs.push(job(title("vsock, to the guest"), Part::Vsock, move |g| vsock_to(g, bytes)));
    jobs.push(job(title("vsock, to the host"), Part::Vsock, move |g| vsock_from(g, bytes)));
    let answers = format!("vsock, {messages} requests and answers, one after the other");
    jobs.push(job(answers, Part::Vsock, move |guest| vsock_latency(guest, messages)));
    jobs.push(job(title("TAP, TCP, to the guest"), Part::Net, move |g| tcp_to(g, bytes)));
    jobs.push(job(title("TAP, TCP, to the host"), Part::Net, move |g| tcp_from(g, bytes)));
    let echoes = "TAP, mean of 100 echoes, one after the other".to_owned();
    jobs.push(job(echoes, Part::Net, tap_latency));
    jobs
}

fn job(title: String, part: Part, act: impl Fn(&Guest) -> anyhow::Result<u64> + 'static) -> Job {
    Job { title, part, act: Box::new(act) }
}

/// What the guest's clock says between the first request and the last answer.
fn disk(guest: &Guest, load: &Load, cold: bool) -> anyhow::Result<u64> {
    if cold {
        forget(&File::open(&guest.disk)?)?;
    }
    load.run(&guest.agent, "io_uring", "/dev/vdb", DISK_MIB)
}

fn forget(file: &File) -> anyhow::Result<()> {
    let fd = file.as_raw_fd();
    // SAFETY: the descriptor is open; neither call takes a pointer.
    let failed =
        unsafe { libc::fdatasync(fd) | libc::posix_fadvise(fd, 0, 0, libc::POSIX_FADV_DONTNEED) };
    ensure!(failed == 0, "the page cache cannot be emptied");
    Ok(())
}

fn since(started: Instant) -> anyhow::Result<u64> {
    Ok(u64::try_from(started.elapsed().as_nanos())?)
}

const PIECE: usize = 64 << 10;

fn write_bytes(mut to: impl Write, bytes: u64) -> anyhow::Result<()> {
    let piece = vec![0x5a; PIECE];
    for _ in 0..bytes / PIECE as u64 {
        to.write_all(&piece)?;
    }
    Ok(())
}

fn read_bytes(mut from: impl Read, bytes: u64) -> anyhow::Result<()> {
    let (mut piece, mut done) = (vec![0; PIECE], 0);
    while done < bytes {
        let got = from.read(&mut piece)?;
        ensure!(got > 0, "the stream ended after {done} bytes of {bytes}");
        done += got as u64;
    }
    Ok(())
}

/// Until a command that reads all has ended.
fn vsock_to(guest: &Guest, bytes: u64) -> anyhow::Result<u64> {
    let mut client = guest.client()?;
    let mut spawn = Spawn::new(["sh", "-c", "exec cat >/dev/null"]);
    spawn.stdin = true;
    let process = client.spawn(spawn)?.process;
    let stream = client.attach(process, Stream::Stdin)?;
    let started = Instant::now();
    write_bytes(&stream, bytes)?;
    drop(stream);
    client.wait(process)?;
    let took = since(started)?;
    client.release(process)?;
    Ok(took)
}

fn vsock_from(guest: &Guest, bytes: u64) -> anyhow::Result<u64> {
    let mut client = guest.client()?;
    let line = format!("dd if=/dev/zero bs={PIECE} count={}", bytes / PIECE as u64);
    let mut spawn = Spawn::new(line.split(' '));
    spawn.stdout = true;
    let started = Instant::now();
    let process = client.spawn(spawn)?.process;
    read_bytes(client.attach(process, Stream::Stdout)?, bytes)?;
    let took = since(started)?;
    client.wait(process)?;
    client.release(process)?;
    Ok(took)
}

fn vsock_latency(guest: &Guest, messages: u64) -> anyhow::Result<u64> {
    let mut client = guest.client()?;
    let started = Instant::now();
    for _ in 0..messages {
        client.ping()?;
    }
    since(started)
}

/// What the host does with the guest's next connection, while the guest runs a line about it.
fn tcp(
    guest: &Guest,
    line: impl Fn(u16) -> String,
    serve: impl FnOnce(TcpStream) -> anyhow::Result<u64> + Send,
) -> anyhow::Result<u64> {
    let listener = TcpListener::bind((guest.host, 0))?;
    let port = listener.local_addr()?.port();
    thread::scope(|scope| {
        let serving = scope.spawn(|| serve(listener.accept()?.0));
        if let Err(error) = guest.sh(&line(port)) {
            // It may not have connected, and would be waited for.
            let _ = TcpStream::connect((guest.host, port));
            return Err(error);
        }
        serving.join().unwrap_or_else(|_| bail!("the host's end has failed"))
    })
}

/// Until the guest has closed, having read all.
fn tcp_to(guest: &Guest, bytes: u64) -> anyhow::Result<u64> {
    let host = guest.host;
    tcp(
        guest,
        |port| format!("wget -q -O /dev/null http://{host}:{port}/"),
        |mut stream| {
            let mut request = [0; 1024];
            ensure!(stream.read(&mut request)? > 0, "no request");
            let started = Instant::now();
            write!(stream, "HTTP/1.0 200 OK\r\nContent-Length: {bytes}\r\n\r\n")?;
            write_bytes(&stream, bytes)?;
            stream.shutdown(std::net::Shutdown::Write)?;
            while stream.read(&mut request)? > 0 {}
            since(started)
        },
    )
}

/// From the guest's httpd, which hands whole files to its kernel.
fn tcp_from(guest: &Guest, bytes: u64) -> anyhow::Result<u64> {
    guest.sh(&format!(
        "mkdir -p /tmp/www && truncate -s {bytes} /tmp/www/zeros && \
         {{ pidof httpd || httpd -p 8000 -h /tmp/www; }} >/dev/null 2>&1"
    ))?;
    let [a, b, c, _] = guest.host.octets();
    let started = Instant::now();
    let mut stream = TcpStream::connect((Ipv4Addr::new(a, b, c, 2), 8000))?;
    stream.write_all(b"GET /zeros HTTP/1.0\r\n\r\n")?;
    read_bytes(stream, bytes)?;
    since(started)
}

fn tap_latency(guest: &Guest) -> anyhow::Result<u64> {
    mean_of_ping(&guest.sh(&format!("ping -A -q -c 100 {}", guest.host))?)
}

/// Of "round-trip min/avg/max = 0.1/0.2/0.3 ms" the mean.
fn mean_of_ping(text: &str) -> anyhow::Result<u64> {
    let mean = text.rsplit_once("= ").and_then(|(_, figures)| figures.split('/').nth(1));
    let mean: f64 = mean.context("ping tells no times")?.parse()?;
    Ok((mean * 1e6) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mean_of_pings_is_read() {
        let text = "100 packets received\nround-trip min/avg/max = 0.101/1.5/3.25 ms\n";
        assert_eq!(mean_of_ping(text).unwrap(), 1_500_000);
        assert!(mean_of_ping("0 packets received\n").is_err());
    }

    #[test]
    fn every_piece_of_work_has_a_title_of_its_own() {
        let mut titles: Vec<String> = jobs(1).into_iter().map(|job| job.title).collect();
        let count = titles.len();
        titles.sort();
        titles.dedup();
        assert_eq!(titles.len(), count);
    }
}
