//! `floor`: how close `cube-vmm` comes to the least that KVM allows, from exec to the first guest
//! instruction. `README.md` tells what the figures mean.

use std::env;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::Parser;

use cube_benches::bare_kvm;
use cube_benches::host::Host;
use cube_benches::peer::Peer;
use cube_benches::process::monotonic_ns;
use cube_benches::report::{Report, Row, Section, ratio};
use cube_benches::rounds::{Entrant, Record, measure};
use cube_benches::vmm::{self, FIRST_INSTRUCTION, Ground};

/// Measure exec to the first guest instruction: bare KVM beside cube-vmm, in turn
#[derive(Parser)]
#[command(name = "floor", version)]
struct Options {
    /// Measured rounds; there are two unmeasured ones before them
    #[arg(long, default_value_t = 30, value_name = "N",
          value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..))]
    runs: usize,

    /// The cube-vmm to measure [default: the one beside this program]
    #[arg(long, value_name = "FILE")]
    vmm: Option<PathBuf>,

    /// Another VMM to compare with, firecracker=FILE or cloud-hypervisor=FILE; may be repeated
    #[arg(long = "peer", value_name = "NAME=FILE")]
    peers: Vec<Peer>,

    /// Write the figures to FILE as JSON, in nanoseconds
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

fn main() -> ExitCode {
    let entered = monotonic_ns();
    let outcome = match env::args_os().nth(1) {
        Some(argument) if argument == bare_kvm::ARGUMENT => be_the_floor(entered),
        _ => compare(&Options::parse()),
    };
    match outcome {
        Ok(code) => code,
        Err(error) => {
            eprintln!("floor: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn be_the_floor(entered: u64) -> anyhow::Result<ExitCode> {
    bare_kvm::be_the_floor(entered)?;
    Ok(ExitCode::SUCCESS)
}

fn compare(options: &Options) -> anyhow::Result<ExitCode> {
    let program = match &options.vmm {
        Some(path) => path.clone(),
        None => vmm::default_vmm()?,
    };
    let ground = Ground::new().context("cannot make the tiny guest")?;
    let mut entrants = vec![
        Entrant { name: "bare KVM".to_owned(), attempt: Box::new(vmm::bare) },
        Entrant {
            name: "cube-vmm".to_owned(),
            attempt: Box::new(|| vmm::cube_vmm(&program, &ground)),
        },
    ];
    for peer in &options.peers {
        let attempt = Box::new(|| peer.attempt(&ground));
        entrants.push(Entrant { name: peer.name().to_owned(), attempt });
    }
    let host = Host::examine();
    let records = measure(&entrants, options.runs, |_| ());
    let report = report(host, options.runs, &records);
    print!("{}", report.render());
    if let Some(path) = &options.json {
        report.write_json(path)?;
    }
    Ok(if report.has_failures() { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn report(host: Host, runs: usize, records: &[Record]) -> Report {
    let ours = &records[..2];
    let first = |record: &Record| record.row(&record.to_mark(FIRST_INSTRUCTION));
    let whole = |record: &Record| record.row(&record.to_end());
    let to_first: Vec<Row> = ours.iter().map(first).collect();
    let conclusions = conclude(&to_first).into_iter().collect();
    let mut sections = vec![
        Section::compared("from exec to the first guest instruction", to_first),
        Section::compared(
            "from exec to the end of the process",
            records.iter().map(whole).collect(),
        ),
    ];
    for record in ours {
        let title = format!("{}, steps since exec", record.name);
        sections.push(Section::plain(title, record.ladder()));
    }
    Report { schema: 1, bench: "floor", host, runs, sections, conclusions }
}

fn conclude(rows: &[Row]) -> Option<String> {
    let [floor, vmm] = rows else { return None };
    let (floor, vmm) = (floor.summary?, vmm.summary?);
    let (p50, p95) = (ratio(vmm.p50, floor.p50)?, ratio(vmm.p95, floor.p95)?);
    Some(format!(
        "cube-vmm reaches the first guest instruction in {p50:.2} times the floor (p50; p95 {p95:.2})"
    ))
}
