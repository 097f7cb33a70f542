//! `density`: many VMs of one snapshot: how fast they come, what each costs, and that each is another
//! machine. `README.md` tells what the figures mean.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitCode, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use clap::Parser;
use guest_protocol::{Client, HybridSocket, Spawn, Stream};
use serde::Serialize;

use cube_benches::host::Host;
use cube_benches::saved::{Saved, wait_until_ready};
use cube_benches::tiny_guest::{GENERATION, IDLE};
use cube_benches::vmm::{self, Ground};

/// Make many VMs of one snapshot, and look at each
#[derive(Parser)]
#[command(name = "density", version)]
struct Options {
    /// VMs
    #[arg(long, default_value_t = 100, value_name = "N")]
    clones: usize,

    /// Memory of the guest
    #[arg(long, default_value = "256M", value_name = "SIZE")]
    memory: String,

    /// The cube-vmm to measure [default: the one beside this program]
    #[arg(long, value_name = "FILE")]
    vmm: Option<PathBuf>,

    /// Take Linux guests, with these options of `start` (none: the default kernel and root image),
    /// and ask each for random numbers; needs a KVM that runs Linux, or the lab
    #[arg(long, value_name = "OPTION", num_args = 0.., allow_hyphen_values = true)]
    linux: Option<Vec<String>>,

    /// Where the snapshot is made [default: the temporary folder]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,

    /// Write the figures to FILE as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("density: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// What was seen, in bytes and seconds.
#[derive(Serialize)]
struct Figures {
    schema: u32,
    bench: &'static str,
    host: Host,
    clones: usize,
    memory: String,
    guest: &'static str,
    /// From the first exec until the last VM runs.
    seconds: f64,
    clones_per_second: f64,
    /// Memory that is the process's own, guest memory left out: median and most.
    vmm_private: [u64; 2],
    /// Guest memory that is not the snapshot's any more.
    guest_private: [u64; 2],
    /// Share of everything, with what is shared divided among those who share it.
    proportional: [u64; 2],
    generations: usize,
    random_numbers: Option<usize>,
    alive_after_one_was_killed: usize,
}

/// A VM of the snapshot. Dropped, it is killed.
struct Twin {
    vmm: Child,
    api: PathBuf,
}

impl Drop for Twin {
    fn drop(&mut self) {
        // Both fail if it has ended by itself.
        let _ = self.vmm.kill();
        let _ = self.vmm.wait();
    }
}

fn run(options: &Options) -> anyhow::Result<()> {
    let program = match &options.vmm {
        Some(path) => path.clone(),
        None => vmm::default_vmm()?,
    };
    let ground = Ground::new_in(options.dir.as_deref()).context("no place for a snapshot")?;
    let saved = match &options.linux {
        Some(more) => Saved::linux(&program, &ground, more, &options.memory),
        None => Saved::tiny(&program, &ground, IDLE, &options.memory),
    };
    let saved = saved.context("no snapshot")?;
    let started = Instant::now();
    let mut clones = Vec::with_capacity(options.clones);
    for number in 0..options.clones {
        clones.push(start(&saved, &ground, number)?);
    }
    for clone in &mut clones {
        match options.linux {
            Some(_) => wait_until_ready(&program, &mut clone.vmm, &clone.api)?,
            None => clone.wait_until_it_runs()?,
        }
    }
    let seconds = started.elapsed().as_secs_f64();
    // So that what comes after the start has come.
    thread::sleep(Duration::from_secs(1));
    let usage: Vec<Usage> =
        clones.iter().map(|clone| clone.usage(&saved)).collect::<Result<_, _>>()?;
    let generations = clones.iter().map(|clone| clone.generation(&saved));
    let generations: BTreeSet<[u8; 16]> = generations.collect::<Result<_, _>>()?;
    let random_numbers = options.linux.as_ref().map(|_| distinct_randoms(&clones)).transpose()?;
    let figures = Figures {
        schema: 1,
        bench: "density",
        host: Host::examine(),
        clones: clones.len(),
        memory: options.memory.clone(),
        guest: if options.linux.is_some() { "Linux" } else { "idle" },
        seconds,
        clones_per_second: clones.len() as f64 / seconds,
        vmm_private: spread(usage.iter().map(|usage| usage.vmm)),
        guest_private: spread(usage.iter().map(|usage| usage.guest)),
        proportional: spread(usage.iter().map(|usage| usage.proportional)),
        generations: generations.len(),
        random_numbers,
        alive_after_one_was_killed: alive_without_the_first(&mut clones)?,
    };
    tell(&figures);
    if let Some(path) = &options.json {
        fs::write(path, serde_json::to_string_pretty(&figures)? + "\n")?;
    }
    check(&figures)
}

fn start(saved: &Saved, ground: &Ground, number: usize) -> anyhow::Result<Twin> {
    let api = ground.path(&format!("{number}"));
    let mut command = saved.command(&api);
    let vmm = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
    Ok(Twin { vmm, api })
}

/// Median and most.
fn spread(values: impl Iterator<Item = u64>) -> [u64; 2] {
    let mut values: Vec<u64> = values.collect();
    values.sort_unstable();
    [values.get(values.len() / 2), values.last()].map(|value| value.copied().unwrap_or(0))
}

fn tell(figures: &Figures) {
    let Figures { clones, memory, guest, seconds, clones_per_second, .. } = figures;
    let mib = |[median, most]: [u64; 2]| {
        format!("{:8.2} {:8.2}", median as f64 / 1048576.0, most as f64 / 1048576.0)
    };
    println!("{}\n", figures.host);
    println!(
        "{clones} VMs of one {guest} guest with {memory}: {seconds:.2} s, {clones_per_second:.1}/s\n"
    );
    println!("MiB of each                     median     most");
    println!("the VMM's own, without guest  {}", mib(figures.vmm_private));
    println!("guest memory written          {}", mib(figures.guest_private));
    println!("proportional share of all     {}", mib(figures.proportional));
    println!("\n{} generation ids", figures.generations);
    if let Some(count) = figures.random_numbers {
        println!("{count} answers of random number generators");
    }
    println!("{} alive after one was killed", figures.alive_after_one_was_killed);
}

fn check(figures: &Figures) -> anyhow::Result<()> {
    let clones = figures.clones;
    ensure!(figures.generations == clones, "generation ids that are not distinct");
    ensure!(figures.random_numbers.is_none_or(|count| count == clones), "equal random numbers");
    ensure!(figures.alive_after_one_was_killed + 1 == clones, "one took others with it");
    Ok(())
}

/// Memory of a process, in bytes.
struct Usage {
    vmm: u64,
    guest: u64,
    proportional: u64,
}

impl Twin {
    fn wait_until_it_runs(&mut self) -> anyhow::Result<()> {
        let deadline = Instant::now() + Duration::from_secs(60);
        while UnixStream::connect(&self.api).is_err() {
            let ended = self.vmm.try_wait()?;
            ensure!(ended.is_none(), "a VMM has ended: {ended:?}");
            ensure!(Instant::now() < deadline, "a VM does not answer");
            thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    fn of_process(&self, name: &str) -> String {
        format!("/proc/{}/{name}", self.vmm.id())
    }

    /// Mappings of the snapshot's memory are the guest's, all others the VMM's own.
    fn usage(&self, saved: &Saved) -> anyhow::Result<Usage> {
        let image = saved.dir.join("memory");
        let image = image.display().to_string();
        let mut usage = Usage { vmm: 0, guest: 0, proportional: 0 };
        let mut guest = false;
        for line in fs::read_to_string(self.of_process("smaps"))?.lines() {
            let mut words = line.split_whitespace();
            let (name, value) = (words.next().unwrap_or(""), words.next().unwrap_or(""));
            let bytes = || value.parse::<u64>().unwrap_or(0) << 10;
            match name {
                "Private_Dirty:" if guest => usage.guest += bytes(),
                "Private_Dirty:" => usage.vmm += bytes(),
                "Pss:" => usage.proportional += bytes(),
                _ if !name.ends_with(':') => guest = line.ends_with(&image),
                _ => {}
            }
        }
        Ok(usage)
    }

    /// The generation id, from the guest's memory.
    fn generation(&self, saved: &Saved) -> anyhow::Result<[u8; 16]> {
        let image = saved.dir.join("memory").display().to_string();
        let maps = fs::read_to_string(self.of_process("maps"))?;
        // Range, access, offset: that of the first gigabytes is at the file's start.
        let is_first = |line: &&str| line.ends_with(&image) && line.contains(" 00000000 ");
        let range = maps.lines().find(is_first).context("no guest memory")?;
        let start = range.split('-').next().unwrap_or("");
        let start = u64::from_str_radix(start, 16)?;
        let mut id = [0; 16];
        let memory = File::open(self.of_process("mem"))?;
        memory.read_exact_at(&mut id, start + u64::from(GENERATION))?;
        Ok(id)
    }

    fn random(&self) -> anyhow::Result<String> {
        let mut vsock = self.api.clone().into_os_string();
        vsock.push(".vsock");
        let line = "cat /proc/sys/kernel/random/uuid; head -c 16 /dev/urandom | od -tx1";
        let mut client = Client::connect(HybridSocket::new(Path::new(&vsock)))?;
        let mut spawn = Spawn::new(["sh", "-c", line]);
        spawn.stdout = true;
        let process = client.spawn(spawn)?.process;
        let mut text = String::new();
        let mut output = client.attach(process, Stream::Stdout)?;
        std::io::Read::read_to_string(&mut output, &mut text)?;
        ensure!(client.wait(process)?.success() && text.len() > 60, "no random numbers: {text:?}");
        Ok(text)
    }
}

/// Distinct answers, where neither of both numbers is another's.
fn distinct_randoms(clones: &[Twin]) -> anyhow::Result<usize> {
    let (mut uuids, mut bytes) = (BTreeSet::new(), BTreeSet::new());
    for clone in clones {
        let text = clone.random()?;
        let (uuid, rest) = text.split_once('\n').context("one line only")?;
        uuids.insert(uuid.to_owned());
        bytes.insert(rest.to_owned());
    }
    Ok(uuids.len().min(bytes.len()))
}

/// Kills the first, and counts who answers of the others.
fn alive_without_the_first(clones: &mut [Twin]) -> anyhow::Result<usize> {
    let Some((first, others)) = clones.split_first_mut() else { return Ok(0) };
    first.vmm.kill()?;
    first.vmm.wait()?;
    let mut alive = 0;
    for clone in others {
        let answers = clone.wait_until_it_runs().is_ok() && clone.vmm.try_wait()?.is_none();
        alive += usize::from(answers);
    }
    Ok(alive)
}
