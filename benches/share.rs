//! `share`: a directory of the host in a Linux guest, through `cube-vmm` beside QEMU and a stock
//! `virtiofsd`. `README.md` tells what the figures mean.

use std::cell::Cell;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, ensure};
use clap::Parser;

use cube_benches::fio::{LOADER, Load};
use cube_benches::guests;
use cube_benches::host::Host;
use cube_benches::report::{Report, Section};
use cube_benches::rounds::{Entrant, Trial, measure};
use cube_benches::sharing::{Cache, Files, Guest, Kind, MEMORY_MIB, executable};
use cube_benches::{vmm, workload};

/// Measure a directory of the host in a Linux guest: cube-vmm, and QEMU with virtiofsd, in turn
#[derive(Parser)]
#[command(name = "share", version, after_help = EXAMPLES)]
struct Options {
    /// Measured rounds; there are two unmeasured ones before them
    #[arg(long, default_value_t = 5, value_name = "N",
          value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..))]
    runs: usize,

    /// Measure only what has this in its title
    #[arg(long, default_value = "", value_name = "TEXT")]
    only: String,

    /// How long guests may believe what they were told; may be repeated [default: both]
    #[arg(long = "cache", value_name = "POLICY")]
    caches: Vec<Cache>,

    /// How devices of cube-vmm are attached; may be repeated [default: both]
    #[arg(long = "transport", value_name = "pci|mmio", value_parser = ["pci", "mmio"])]
    transports: Vec<String>,

    /// How many more requests than by default; a guest on hardware wants about 30
    #[arg(long, default_value_t = 1, value_name = "N",
          value_parser = clap::value_parser!(u64).range(1..=10_000))]
    scale: u64,

    /// How many small files are looked at and unpacked
    #[arg(long, default_value_t = 10_000, value_name = "N",
          value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=1_000_000))]
    files: usize,

    /// Where the directory is made that is shared; it is removed at the end
    #[arg(long, default_value = ".", value_name = "DIR")]
    dir: PathBuf,

    /// The cube-vmm to measure, with its cube-fsd beside it [default: the one beside this program]
    #[arg(long, value_name = "FILE")]
    vmm: Option<PathBuf>,

    /// A stock virtiofsd (the one written in Rust) to compare with, behind QEMU
    #[arg(long, value_name = "FILE")]
    virtiofsd: Option<PathBuf>,

    /// The QEMU to compare with
    #[arg(long, default_value = "qemu-system-x86_64", value_name = "FILE", requires = "virtiofsd")]
    qemu: PathBuf,

    /// The kernel of all guests, an ELF file with virtiofs [default: cube-vmm's own]
    #[arg(long, value_name = "FILE")]
    kernel: Option<PathBuf>,

    /// Their root image, with the agent [default: cube-vmm's own]
    #[arg(long, value_name = "FILE")]
    initrd: Option<PathBuf>,

    /// Write the figures to FILE as JSON, in nanoseconds
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

const EXAMPLES: &str = "\
Examples:
  share --dir /var/tmp                           # cube-vmm alone, both transports
  share --dir /var/tmp --virtiofsd /opt/virtiofsd --scale 30      # beside QEMU, on hardware
  share --only 4 --cache auto --runs 9           # requests of 4 KiB only
  tests/lab/run -- sh -c 'target/release/share --dir $LAB_SCRATCH --files 1000 \\
      --virtiofsd /opt/virtiofsd'                # where there is no KVM

A stock virtiofsd: apt-get install virtiofsd, from Debian 13 on; or cargo install virtiofsd.
QEMU's guest is reached by vsock: modprobe vhost_vsock. It takes root, and fio.
Exit code: 0 if all was measured, 1 if something failed; the table says what and why.";

/// MiB of the file that requests go to.
const DATA_MIB: usize = 64;

const fn load(name: &'static str, pattern: &'static str, depth: u32, count: u64) -> Load {
    Load { name, pattern, size: "4k", depth, count }
}

const LOADS: &[Load] = &[
    load("random reads of 4 KiB", "randread", 1, 1000),
    load("random reads of 4 KiB", "randread", 16, 2000),
    load("random writes of 4 KiB", "randwrite", 1, 1000),
    load("random writes of 4 KiB", "randwrite", 16, 2000),
    Load { size: "128k", ..load("sequential reads of 128 KiB", "read", 1, 200) },
    Load { size: "128k", ..load("sequential reads of 128 KiB", "read", 8, 400) },
    Load { size: "128k", ..load("sequential writes of 128 KiB", "write", 1, 200) },
    Load { size: "128k", ..load("sequential writes of 128 KiB", "write", 8, 400) },
];

/// What a guest does with a share that it has mounted there, and how long it takes.
type Act<'a> = Box<dyn Fn(&Guest, &str) -> anyhow::Result<u64> + 'a>;

/// Something that every guest does.
struct Job<'a> {
    title: String,
    act: Act<'a>,
}

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().collect();
    let outcome = match arguments.get(1) {
        Some(argument) if argument == workload::ARGUMENT => {
            workload::be_in_guest(arguments.get(2..).unwrap_or_default()).map(|()| true)
        }
        _ => run(&Options::parse()),
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("share: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> anyhow::Result<bool> {
    let kinds = kinds(options)?;
    let caches = match options.caches.as_slice() {
        [] => &[Cache::Auto, Cache::None],
        some => some,
    };
    let folder = tempfile::tempdir_in(&options.dir)
        .with_context(|| format!("nothing can be made in {}", options.dir.display()))?;
    // Absolute: whoever is told of it may have another directory as its own.
    let folder_path = fs::canonicalize(folder.path())?;
    let files = files(options, &folder_path)?;
    let jobs = jobs(options, &files.share);
    let wanted = |cache: Cache, job: &Job<'_>| title(cache, job).contains(&options.only);
    let any = caches.iter().any(|cache| jobs.iter().any(|job| wanted(*cache, job)));
    ensure!(any, "no title has {:?} in it", options.only);
    eprintln!("share: files are made, guests are booted");
    let numbered = (0..).zip(&kinds);
    let guests: Vec<Guest> = numbered
        .map(|(number, kind)| Guest::boot(kind, number, &files, caches))
        .collect::<Result<_, _>>()?;
    let mut sections = Vec::new();
    for cache in caches {
        for job in jobs.iter().filter(|job| wanted(*cache, job)) {
            sections.push(section(title(*cache, job), job, &guests, *cache, options.runs));
        }
    }
    let conclusions = conclusions(&sections);
    let (host, runs) = (Host::examine(), options.runs);
    let report = Report { schema: 1, bench: "share", host, runs, sections, conclusions };
    print!("{}", report.render());
    if let Some(path) = &options.json {
        report.write_json(path)?;
    }
    Ok(!report.has_failures())
}

fn title(cache: Cache, job: &Job<'_>) -> String {
    format!("cache={}: {}", cache.name(), job.title)
}

fn section(title: String, job: &Job<'_>, guests: &[Guest], cache: Cache, runs: usize) -> Section {
    eprintln!("share: {title}");
    let mount = cache.mount();
    let attempt = |guest: &Guest| {
        let ended = (job.act)(guest, &mount).map_err(|error| guest.explain(error))?;
        Ok(Trial { ended, marks: Vec::new() })
    };
    let entrants: Vec<Entrant<'_>> = guests
        .iter()
        .map(|guest| Entrant {
            name: guest.agent.name.clone(),
            attempt: Box::new(move || attempt(guest)),
        })
        .collect();
    let records = measure(&entrants, runs, |_| {});
    let rows = records.iter().map(|record| record.row(&record.to_end())).collect();
    let section = Section::compared(title, rows);
    // What is measured takes long enough to be waited for.
    for row in &section.rows {
        let times = row.times_first.map_or_else(|| "failed".to_owned(), |x| format!("{x:.2}"));
        eprintln!("share:   {}: {times}", row.name);
    }
    section
}

/// Who is measured. Ours comes first, as what the others are compared with.
fn kinds(options: &Options) -> anyhow::Result<Vec<Kind>> {
    let program = match &options.vmm {
        Some(path) => executable(path, "--vmm")?,
        None => vmm::default_vmm()?,
    };
    let transports = ["pci", "mmio"].into_iter().filter(|name| {
        options.transports.is_empty() || options.transports.iter().any(|wanted| wanted == name)
    });
    let mut kinds: Vec<Kind> =
        transports.map(|transport| Kind::Cube { program: program.clone(), transport }).collect();
    if let Some(virtiofsd) = &options.virtiofsd {
        let virtiofsd = executable(virtiofsd, "--virtiofsd")?;
        let qemu = executable(&options.qemu, "--qemu")?;
        let vsock = Path::new("/dev/vhost-vsock");
        ensure!(vsock.exists(), "QEMU needs {}: modprobe vhost_vsock", vsock.display());
        kinds.push(Kind::Stock { qemu, virtiofsd });
    }
    Ok(kinds)
}

/// What the guests are made of, and the directory that they share.
fn files(options: &Options, folder: &Path) -> anyhow::Result<Files> {
    let ours = || {
        let program = vmm::default_vmm()?;
        let target = program.ancestors().nth(2).context("cube-vmm is in no folder")?;
        anyhow::Ok(target.join("guest"))
    };
    let file = |given: &Option<PathBuf>, name: &str| {
        let path = given.clone().map_or_else(|| Ok(ours()?.join(name)), anyhow::Ok)?;
        ensure!(path.is_file(), "{} is not a file: give one by --kernel, --initrd", path.display());
        Ok(fs::canonicalize(path)?)
    };
    let (kernel, initrd) =
        (file(&options.kernel, "vmlinux")?, file(&options.initrd, "initrd.cpio")?);
    let share = folder.join("share");
    fs::create_dir(&share)?;
    fs::write(share.join("data"), vec![0x5a; DATA_MIB << 20])?;
    workload::prepare(&share.join("tree"), &share.join("files.tar"), options.files)?;
    let this = env::current_exe()?;
    let tools = guests::tools(folder, &["/usr/bin/fio".as_ref(), &this])?;
    Ok(Files { kernel, initrd, tools, share, folder: folder.to_owned() })
}

fn jobs<'a>(options: &Options, share: &'a Path) -> Vec<Job<'a>> {
    let mut jobs: Vec<Job<'a>> = Vec::new();
    for load in LOADS.iter().map(|load| load.scaled(options.scale)) {
        let act = move |guest: &Guest, mount: &str| {
            load.run(&guest.agent, "libaio", &format!("{mount}/data"), DATA_MIB)
        };
        jobs.push(Job { title: load.title(), act: Box::new(act) });
    }
    let files = options.files;
    let stat = move |guest: &Guest, mount: &str| {
        in_guest(guest, "true", &format!("stat {mount}/tree {files}"))
    };
    let title = format!("stat of {files} files that the guest has forgotten");
    jobs.push(Job { title, act: Box::new(stat) });
    let attempts = Cell::new(0);
    let unpack = move |guest: &Guest, mount: &str| {
        attempts.set(attempts.get() + 1);
        let name = format!("unpacked-{}", attempts.get());
        let copy = format!("cp {mount}/files.tar /tmp");
        let done = in_guest(guest, &copy, &format!("unpack /tmp/files.tar {mount}/{name}"));
        // By the host, which is faster; nobody asks for it again. There may be none after an error.
        let _ = fs::remove_dir_all(share.join(name));
        done
    };
    let title = format!("a tar of {files} files unpacked");
    jobs.push(Job { title, act: Box::new(unpack) });
    jobs
}

/// Does this program's part in the guest, which has forgotten what it knew of files.
fn in_guest(guest: &Guest, before: &str, arguments: &str) -> anyhow::Result<u64> {
    let argument = workload::ARGUMENT;
    let said = guest.agent.sh(&format!(
        "{before} && sync && echo 3 >/proc/sys/vm/drop_caches && sleep 1 && {LOADER}/share {argument} {arguments}"
    ))?;
    said.trim().parse().with_context(|| format!("{}: no time in {said:?}", guest.agent.name))
}

/// How the others compare with ours, and how all were set up.
fn conclusions(sections: &[Section]) -> Vec<String> {
    let mut names: Vec<&str> = Vec::new();
    for row in sections.iter().flat_map(|section| section.rows.iter().skip(1)) {
        if !names.contains(&row.name.as_str()) {
            names.push(&row.name);
        }
    }
    let mut sentences = vec![format!(
        "All guests: the same kernel, root image and directory, 1 vCPU, {MEMORY_MIB} MiB of memory; x first \
         above 1.00 is slower than the first."
    )];
    for name in names {
        let rows = sections.iter().flat_map(|section| &section.rows);
        let times: Vec<f64> =
            rows.filter(|row| row.name == name).filter_map(|row| row.times_first).collect();
        let (Some(least), Some(most)) =
            (times.iter().copied().reduce(f64::min), times.iter().copied().reduce(f64::max))
        else {
            continue;
        };
        let slower = times.iter().filter(|times| **times >= 1.0).count();
        sentences.push(format!(
            "{name}: {least:.2} to {most:.2} times as long as the first; not faster in {slower} of {}.",
            times.len()
        ));
    }
    sentences
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use cube_benches::report::{Row, Samples};

    use super::*;

    fn options(words: &[&str]) -> Result<Options, clap::Error> {
        Options::try_parse_from(["share"].iter().chain(words))
    }

    fn row(name: &str, time: u64) -> Row {
        Row::new(name, &Samples::from_iter([time]))
    }

    #[test]
    fn every_piece_of_work_has_a_title_of_its_own() {
        let options = options(&["--files", "7"]).unwrap();
        let jobs = jobs(&options, Path::new("/"));
        let mut titles: Vec<String> = jobs.into_iter().map(|job| job.title).collect();
        let count = titles.len();
        titles.sort();
        titles.dedup();
        assert_eq!(titles.len(), count);
        assert!(titles.contains(&"a tar of 7 files unpacked".to_owned()), "{titles:?}");
    }

    #[test]
    fn what_follows_is_told_of_each_but_the_first() {
        let section = |stock| Section::compared("t", vec![row("us", 100), row("stock", stock)]);
        let told = conclusions(&[section(90), section(150), section(200)]);
        assert_eq!(
            told[1],
            "stock: 0.90 to 2.00 times as long as the first; not faster in 2 of 3."
        );
        assert_eq!(told.len(), 2);
    }

    #[test]
    fn what_failed_is_not_compared() {
        let failed = Row::new("stock", &Samples::default()).with_failures(&["why".to_owned()]);
        let told = conclusions(&[Section::compared("t", vec![row("us", 100), failed])]);
        assert_eq!(told.len(), 1);
    }

    #[test]
    fn options_that_make_no_sense_are_refused() {
        Options::command().debug_assert();
        for words in [&["--qemu", "/bin/true"][..], &["--runs", "0"], &["--cache", "always"]] {
            assert!(options(words).is_err(), "{words:?}");
        }
        let missing = options(&["--vmm", "/bin/true", "--virtiofsd", "/nonexistent"]).unwrap();
        let error = kinds(&missing).unwrap_err().to_string();
        assert_eq!(error, "/nonexistent: give a program by --virtiofsd");
        let none = options(&["--kernel", "/nonexistent"]).unwrap();
        assert!(files(&none, Path::new("/")).is_err());
    }
}
