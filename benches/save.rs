//! `save`: how long a guest stands still for a snapshot of what it has written. `README.md` tells what
//! the figures mean.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use clap::Parser;
use serde::Deserialize;

use cube_benches::host::Host;
use cube_benches::report::{Report, Row, Samples, Section};
use cube_benches::tiny_guest;
use cube_benches::vmm::{self, Ground};

/// Measure how long guests stand still for differences
#[derive(Parser)]
#[command(name = "save", version)]
struct Options {
    /// Measured rounds; there is an unmeasured one before them
    #[arg(long, default_value_t = 10, value_name = "N",
          value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..))]
    runs: usize,

    /// The cube-vmm to measure [default: the one beside this program]
    #[arg(long, value_name = "FILE")]
    vmm: Option<PathBuf>,

    /// Another cube-vmm, to be measured in the same rounds
    #[arg(long, value_name = "FILE")]
    beside: Option<PathBuf>,

    /// MiB that a guest writes to between two snapshots
    #[arg(long, default_value_t = 512, value_name = "MIB",
          value_parser = clap::value_parser!(u32).range(1..=2048))]
    dirty: u32,

    /// Where the snapshots are made [default: the temporary folder]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,

    /// Write the figures to FILE as JSON, in nanoseconds
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

fn main() -> ExitCode {
    match measure(&Options::parse()) {
        Ok(report) => {
            print!("{}", report.render());
            if report.has_failures() { ExitCode::FAILURE } else { ExitCode::SUCCESS }
        }
        Err(error) => {
            eprintln!("save: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Nobody waits longer for a tiny guest, or for a byte of it.
const PATIENCE: Duration = Duration::from_secs(60);

/// A guest that writes, and its snapshots. Dropped, it is killed.
struct Writer {
    name: String,
    program: PathBuf,
    folder: PathBuf,
    vmm: Child,
    /// Snapshots so far.
    taken: usize,
    paused: Samples,
    total: Samples,
    /// Bytes of the last difference, and those that were read while the guest stood still.
    bytes: (u64, Option<u64>),
}

impl Drop for Writer {
    fn drop(&mut self) {
        // Both fail if it has ended by itself.
        let _ = self.vmm.kill();
        let _ = self.vmm.wait();
    }
}

/// What `cube-vmm snapshot --json` says, as far as it is of concern here.
#[derive(Deserialize)]
struct Saved {
    paused_us: Option<u64>,
    total_us: u64,
    memory_bytes: u64,
    /// Older ones do not tell.
    still_bytes: Option<u64>,
}

impl Writer {
    fn start(
        name: String,
        program: &Path,
        ground: &Ground,
        (dirty, steadily): (u32, u32),
    ) -> anyhow::Result<Self> {
        let folder = ground.path(&name.replace([' ', ','], "-"));
        fs::create_dir(&folder)?;
        let kernel = folder.join("guest");
        fs::write(&kernel, tiny_guest::image_of(&tiny_guest::dirtying(dirty, steadily)))?;
        let mut command = Command::new(program);
        command.args(["start", "--console", "serial", "--boot-protocol", "pvh"]);
        command.args(["--boot-timeout", "1000000", "--memory"]);
        command.arg(format!("{}M", (dirty >> 20) + 64));
        command.arg("--kernel").arg(&kernel).arg("--initrd").arg(&kernel);
        command.arg("--api-socket").arg(folder.join("api"));
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let vmm = command.stderr(File::create(folder.join("said"))?).spawn()?;
        let (paused, total) = Default::default();
        let program = program.to_owned();
        let mut this =
            Self { name, program, folder, vmm, taken: 0, paused, total, bytes: (0, None) };
        this.wait_for_more_than(0)?;
        this.save(&["--track"])?;
        this.request("pause")?;
        Ok(this)
    }

    /// Bytes that the guest has printed.
    fn said(&self) -> anyhow::Result<usize> {
        let said = fs::read(self.folder.join("said"))?;
        ensure!(said.iter().all(|&byte| byte == b'x'), "{}", String::from_utf8_lossy(&said));
        Ok(said.len())
    }

    fn wait_for_more_than(&mut self, said: usize) -> anyhow::Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while self.said()? <= said {
            ensure!(self.vmm.try_wait()?.is_none(), "the VMM has ended");
            ensure!(Instant::now() < deadline, "the guest says nothing");
            thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    fn request(&self, request: &str) -> anyhow::Result<()> {
        let mut api = UnixStream::connect(self.folder.join("api"))?;
        writeln!(api, "{{\"request\":\"{request}\"}}")?;
        let mut answer = String::new();
        BufReader::new(api).read_line(&mut answer)?;
        ensure!(answer.contains("done"), "{request}: {}", answer.trim());
        Ok(())
    }

    fn snapshot(&self, number: usize) -> PathBuf {
        self.folder.join(number.to_string())
    }

    fn save(&mut self, options: &[&str]) -> anyhow::Result<Saved> {
        let mut command = Command::new(&self.program);
        command.arg("snapshot").arg("--api-socket").arg(self.folder.join("api"));
        command.arg(self.snapshot(self.taken)).args(["--json", "--durability", "none"]);
        let output = command.args(options).output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{}: {}", self.name, said.trim());
        self.taken += 1;
        serde_json::from_slice(&output.stdout).context("the answer")
    }

    /// One difference of what the guest has written. It is paused before and after, so that only one
    /// guest runs at a time.
    fn round(&mut self, measured: bool) -> anyhow::Result<()> {
        let said = self.said()?;
        self.request("resume")?;
        self.request("new_generation")?;
        self.wait_for_more_than(said)?;
        let before = self.snapshot(self.taken - 1);
        let base = before.to_str().context("a name that is no text")?.to_owned();
        let saved = self.save(&["--diff-of", &base])?;
        self.request("pause")?;
        fs::remove_dir_all(before)?;
        let Some(paused) = saved.paused_us else { bail!("the guest was paused before") };
        if measured {
            self.paused.push(paused * 1000);
            self.total.push(saved.total_us * 1000);
            self.bytes = (saved.memory_bytes, saved.still_bytes);
        }
        Ok(())
    }

    /// What a difference may cost, in nanoseconds: 10 ms, and what 2 GB/s take.
    fn budget(&self) -> u64 {
        10_000_000 + self.bytes.0 / 2
    }
}

fn measure(options: &Options) -> anyhow::Result<Report> {
    let program = match &options.vmm {
        Some(path) => path.clone(),
        None => vmm::default_vmm()?,
    };
    let ground = Ground::new_in(options.dir.as_deref()).context("no place for snapshots")?;
    let host = Host::examine();
    let dirty = options.dirty << 20;
    let mut writers = Vec::new();
    for (what, steadily) in
        [("then idle", 0), ("then 8 MiB steadily", dirty.min(8 << 20)), ("all the time", dirty)]
    {
        let beside = options.beside.iter().map(|path| (", beside", path));
        for (which, program) in [("", &program)].into_iter().chain(beside) {
            let name = format!("{} MiB, {what}{which}", options.dirty);
            writers.push(Writer::start(name, program, &ground, (dirty, steadily))?);
        }
    }
    for round in 0..=options.runs {
        for writer in &mut writers {
            writer.round(round > 0).with_context(|| writer.name.clone())?;
        }
    }
    let rows = |samples: fn(&Writer) -> &Samples| {
        writers.iter().map(|writer| Row::new(&writer.name, samples(writer))).collect()
    };
    let sections = vec![
        Section::plain("the guest stood still", rows(|writer| &writer.paused)),
        Section::plain("all of the snapshot", rows(|writer| &writer.total)),
    ];
    let conclusions = writers.iter().map(conclusion).collect();
    let report =
        Report { schema: 1, bench: "save", host, runs: options.runs, sections, conclusions };
    if let Some(path) = &options.json {
        report.write_json(path)?;
    }
    Ok(report)
}

fn conclusion(writer: &Writer) -> String {
    let mib = |bytes: u64| bytes as f64 / 1048576.0;
    let (bytes, still) = writer.bytes;
    let still = still.map_or_else(String::new, |still| {
        format!(", {:.1} MiB of them while it stood still", mib(still))
    });
    let p50 = writer.paused.summary().map_or(0.0, |summary| summary.p50 as f64 / 1e6);
    format!(
        "{}: {:.1} MiB written{still}; {p50:.1} ms, and 10 ms + bytes / (2 GB/s) are {:.1} ms",
        writer.name,
        mib(bytes),
        writer.budget() as f64 / 1e6
    )
}
