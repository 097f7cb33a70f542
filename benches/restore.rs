//! `restore`: how long a snapshot takes to become a running guest, whatever its size. `README.md`
//! tells what the figures mean.

use std::env;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::Parser;

use cube_benches::bare_kvm;
use cube_benches::host::Host;
use cube_benches::prefetched::Question;
use cube_benches::process::monotonic_ns;
use cube_benches::report::{Report, Row, Section};
use cube_benches::rounds::{Entrant, Record, measure};
use cube_benches::saved::Saved;
use cube_benches::tiny_guest::UNTIL_RESTORED;
use cube_benches::vmm::{self, FIRST_INSTRUCTION, Ground};

/// Measure exec to the first guest instruction after a restore, bare KVM beside snapshots of several
/// sizes, in turn
#[derive(Parser)]
#[command(name = "restore", version)]
struct Options {
    /// Measured rounds; there are two unmeasured ones before them
    #[arg(long, default_value_t = 30, value_name = "N",
          value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..))]
    runs: usize,

    /// The cube-vmm to measure [default: the one beside this program]
    #[arg(long, value_name = "FILE")]
    vmm: Option<PathBuf>,

    /// Memory of the guests; may be repeated
    #[arg(long = "memory", value_name = "SIZE", default_values = ["256M", "1G", "8G"])]
    sizes: Vec<String>,

    /// How memory comes in: private, prefault or uffd; may be repeated
    #[arg(long = "mode", value_name = "MODE", default_values = ["private"])]
    modes: Vec<String>,

    /// Measure a Linux guest until its agent has made it another, with these options of `start`
    /// (none: the default kernel and root image); needs a KVM that runs Linux, or the lab
    #[arg(long, value_name = "OPTION", num_args = 0.., allow_hyphen_values = true)]
    linux: Option<Vec<String>>,

    /// Measure a guest that touches so much of its memory after the restore, in no order, until it has:
    /// with hot pages prefetched, and without. A power of two; the guest needs 16M more
    #[arg(long, value_name = "SIZE", conflicts_with = "linux")]
    prefetch: Option<String>,

    /// Leave out the measurement with a cold page cache
    #[arg(long)]
    warm_only: bool,

    /// Where the snapshots are made [default: the temporary folder]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,

    /// Write the figures to FILE as JSON, in nanoseconds
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// The step at which a Linux guest counts as restored.
const READY: &str = "T7 agent ready";

fn main() -> ExitCode {
    let entered = monotonic_ns();
    let outcome = match env::args_os().nth(1) {
        Some(argument) if argument == bare_kvm::ARGUMENT => be_the_floor(entered),
        _ => compare(&Options::parse()),
    };
    match outcome {
        Ok(code) => code,
        Err(error) => {
            eprintln!("restore: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn be_the_floor(entered: u64) -> anyhow::Result<ExitCode> {
    bare_kvm::be_the_floor(entered)?;
    Ok(ExitCode::SUCCESS)
}

/// A snapshot that is measured, and how.
struct Case {
    name: String,
    saved: Saved,
    mode: String,
}

fn compare(options: &Options) -> anyhow::Result<ExitCode> {
    let program = match &options.vmm {
        Some(path) => path.clone(),
        None => vmm::default_vmm()?,
    };
    let ground = Ground::new_in(options.dir.as_deref()).context("no place for snapshots")?;
    if let Some(touched) = &options.prefetch {
        return prefetched(options, &program, &ground, touched);
    }
    let mut cases = Vec::new();
    for size in &options.sizes {
        let saved = match &options.linux {
            Some(more) => Saved::linux(&program, &ground, more, size),
            None => Saved::tiny(&program, &ground, UNTIL_RESTORED, size),
        };
        let saved = saved.with_context(|| format!("no snapshot of a guest with {size}"))?;
        for mode in &options.modes {
            let name = match options.modes.len() {
                1 => format!("restore, {size}"),
                _ => format!("restore, {size}, {mode}"),
            };
            cases.push(Case { name, saved: saved.clone(), mode: mode.clone() });
        }
    }
    let (linux, host) = (options.linux.is_some(), Host::examine());
    let sizes = options.sizes.iter().filter_map(|size| mib(size));
    let largest = sizes.max().filter(|_| !linux);
    let warm = rounds(&cases, (linux, largest), options.runs, false);
    let cold = !options.warm_only;
    let cold = cold.then(|| rounds(&cases, (linux, largest), options.runs, true));
    tell(options, &report(host, options, &warm, cold.as_deref()))
}

fn tell(options: &Options, report: &Report) -> anyhow::Result<ExitCode> {
    print!("{}", report.render());
    if let Some(path) = &options.json {
        report.write_json(path)?;
    }
    Ok(if report.has_failures() { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn prefetched(
    options: &Options,
    program: &Path,
    ground: &Ground,
    touched: &str,
) -> anyhow::Result<ExitCode> {
    let touched_mib = mib(touched).context("--prefetch takes a size such as 256M")?;
    let Options { sizes, modes, runs, warm_only, .. } = options;
    let (runs, warm_only) = (*runs, *warm_only);
    let question = Question { program, ground, sizes, modes, touched_mib, runs, warm_only };
    let host = Host::examine();
    let (sections, conclusions) = question.answer()?;
    tell(options, &Report { schema: 1, bench: "restore", host, runs, sections, conclusions })
}

/// What every row of the floor begins with.
const FLOOR: &str = "bare KVM";

/// MiB of a size such as `8G`.
fn mib(size: &str) -> Option<usize> {
    let (number, unit) = size.split_at_checked(size.len().checked_sub(1)?)?;
    let number: usize = number.parse().ok()?;
    match unit {
        "M" => Some(number),
        "G" => number.checked_mul(1024),
        _ => None,
    }
}

fn rounds(
    cases: &[Case],
    (linux, largest): (bool, Option<usize>),
    runs: usize,
    cold: bool,
) -> Vec<Record> {
    let mut entrants = vec![Entrant { name: FLOOR.to_owned(), attempt: Box::new(vmm::bare) }];
    // What the size of the slot costs in KVM itself.
    if let Some(mib) = largest {
        let attempt = Box::new(move || vmm::bare_with(mib));
        entrants.push(Entrant { name: format!("{FLOOR}, {mib} MiB"), attempt });
    }
    for case in cases {
        let attempt = move || {
            if cold {
                case.saved.chill()?;
            }
            let options = ["--memory-mode", case.mode.as_str()];
            if linux { case.saved.attempt_linux(&options) } else { case.saved.attempt(&options) }
        };
        entrants.push(Entrant { name: case.name.clone(), attempt: Box::new(attempt) });
    }
    measure(&entrants, runs, |_| ())
}

fn report(host: Host, options: &Options, warm: &[Record], cold: Option<&[Record]>) -> Report {
    let (mark, what) = match options.linux {
        Some(_) => (READY, "the agent of a restored guest is ready"),
        None => (FIRST_INSTRUCTION, "the first instruction of a restored guest"),
    };
    let rows = |records: &[Record]| -> Vec<Row> {
        let row = |record: &Record| {
            let floor = record.name.starts_with(FLOOR);
            record.row(&record.to_mark(if floor { FIRST_INSTRUCTION } else { mark }))
        };
        records.iter().map(row).collect()
    };
    let warm_rows = rows(warm);
    let conclusions = conclude(&warm_rows).into_iter().collect();
    let mut sections =
        vec![Section::compared(format!("from exec until {what}, page cache"), warm_rows)];
    if let Some(cold) = cold {
        let title = format!("from exec until {what}, snapshot not in the page cache");
        sections.push(Section::compared(title, rows(cold)));
    }
    let ends = warm.iter().map(|record| record.row(&record.to_end())).collect();
    sections.push(Section::compared("from exec to the end of the process", ends));
    let restores = warm.iter().filter(|record| !record.name.starts_with(FLOOR));
    let restores: Vec<_> = restores.collect();
    let (first, last) = (restores.first(), restores.last().filter(|_| restores.len() > 1));
    for record in warm.iter().take(1).chain(first.copied()).chain(last.copied()) {
        sections
            .push(Section::plain(format!("{}, steps since exec", record.name), record.ladder()));
    }
    Report { schema: 1, bench: "restore", host, runs: options.runs, sections, conclusions }
}

fn conclude(rows: &[Row]) -> Option<String> {
    let median = |row: &Row| Some(row.summary?.p50);
    let (floors, restores): (Vec<_>, Vec<_>) =
        rows.iter().partition(|row| row.name.starts_with(FLOOR));
    let restores: Vec<u64> = restores.into_iter().map(median).collect::<Option<_>>()?;
    let floors: Vec<u64> = floors.into_iter().map(median).collect::<Option<_>>()?;
    let ms = |ns: u64| ns as f64 / 1e6;
    let (least, most) = (*restores.iter().min()?, *restores.iter().max()?);
    let (floor, large) = (*floors.first()?, floors.get(1));
    let mut text = format!(
        "the slowest restore is {:.2} ms above the floor, and {:.2} ms above the fastest (p50)",
        ms(most) - ms(floor),
        ms(most - least)
    );
    if let Some(&large) = large {
        text += &format!(
            "; bare KVM with the largest memory is {:.2} ms above the floor",
            ms(large) - ms(floor)
        );
    }
    Some(text)
}
