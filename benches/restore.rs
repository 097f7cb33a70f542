//! `restore`: how long a snapshot takes to become a running guest, whatever its size. `README.md`
//! tells what the figures mean.

use std::env;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::Parser;

use cube_benches::bare_kvm;
use cube_benches::host::Host;
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
    println!("{}", serde_json::to_string(&bare_kvm::run(entered)?)?);
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
    let warm = rounds(&cases, linux, options.runs, false);
    let cold = (!options.warm_only).then(|| rounds(&cases, linux, options.runs, true));
    let report = report(host, options, &warm, cold.as_deref());
    print!("{}", report.render());
    if let Some(path) = &options.json {
        report.write_json(path)?;
    }
    Ok(if report.has_failures() { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn rounds(cases: &[Case], linux: bool, runs: usize, cold: bool) -> Vec<Record> {
    let mut entrants = vec![Entrant { name: "bare KVM".to_owned(), attempt: Box::new(vmm::bare) }];
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
        let row = |(index, record): (usize, &Record)| {
            record.row(&record.to_mark(if index == 0 { FIRST_INSTRUCTION } else { mark }))
        };
        records.iter().enumerate().map(row).collect()
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
    for record in warm.iter().take(2).chain(warm.last().filter(|_| warm.len() > 2)) {
        sections
            .push(Section::plain(format!("{}, steps since exec", record.name), record.ladder()));
    }
    Report { schema: 1, bench: "restore", host, runs: options.runs, sections, conclusions }
}

fn conclude(rows: &[Row]) -> Option<String> {
    let medians: Vec<u64> = rows.iter().map(|row| Some(row.summary?.p50)).collect::<Option<_>>()?;
    let (floor, restores) = medians.split_first()?;
    let ms = |ns: u64| ns as f64 / 1e6;
    let (least, most) = (*restores.iter().min()?, *restores.iter().max()?);
    Some(format!(
        "the slowest restore is {:.2} ms above the floor, and {:.2} ms above the fastest (p50)",
        ms(most) - ms(*floor),
        ms(most - least)
    ))
}
