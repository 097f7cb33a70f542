//! `boot`: the boot ladder of Linux guests, for one kernel or for several in turn. `README.md`
//! tells what the figures mean.

use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use clap::Parser;

use cube_benches::host::Host;
use cube_benches::ladder::STEPS;
use cube_benches::report::{Report, Row, Section};
use cube_benches::rounds::{Entrant, Record, measure};
use cube_benches::vmm::{self, Boot, Ground};

/// Boot Linux guests with cube-vmm and tell when each step was reached
#[derive(Parser)]
#[command(name = "boot", version)]
struct Options {
    /// Measured rounds; there are two unmeasured ones before them
    #[arg(long, default_value_t = 10, value_name = "N",
          value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..))]
    runs: usize,

    /// A kernel to boot, with a name for the tables; may be repeated, the first is what the others
    /// are compared with [default: cube-vmm's own]
    #[arg(long = "kernel", value_name = "NAME=FILE[,initrd=FILE]")]
    kernels: Vec<Kernel>,

    /// Guest memory
    #[arg(long, default_value = "256M", value_name = "SIZE")]
    memory: String,

    /// Number of vCPUs
    #[arg(long, default_value_t = 1, value_name = "N")]
    cpus: u32,

    /// Seconds until a boot counts as failed
    #[arg(long, default_value_t = 120, value_name = "SECONDS")]
    timeout: u64,

    /// The cube-vmm to measure [default: the one beside this program]
    #[arg(long, value_name = "FILE")]
    vmm: Option<PathBuf>,

    /// Write the figures to FILE as JSON, in nanoseconds
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// The command in the guest
    #[arg(last = true, default_value = "true", value_name = "CMD")]
    command: Vec<String>,
}

/// `NAME=FILE[,initrd=FILE]`.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Kernel {
    name: String,
    options: Vec<String>,
}

impl FromStr for Kernel {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        let (name, rest) = text.split_once('=').context("write NAME=FILE[,initrd=FILE]")?;
        let mut parts = rest.split(',');
        let file = parts.next().unwrap_or_default();
        ensure!(!name.is_empty() && !file.is_empty(), "write NAME=FILE[,initrd=FILE]");
        let mut options = vec!["--kernel".to_owned(), file.to_owned()];
        for part in parts {
            match part.split_once('=') {
                Some(("initrd", file)) => options.extend(["--initrd".to_owned(), file.to_owned()]),
                _ => bail!("unknown part {part:?}; write NAME=FILE[,initrd=FILE]"),
            }
        }
        Ok(Self { name: name.to_owned(), options })
    }
}

fn main() -> ExitCode {
    match compare(Options::parse()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("boot: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn compare(mut options: Options) -> anyhow::Result<ExitCode> {
    let program = match options.vmm.take() {
        Some(path) => path,
        None => vmm::default_vmm()?,
    };
    if options.kernels.is_empty() {
        options.kernels.push(Kernel { name: "default".to_owned(), options: Vec::new() });
    }
    let ground = Ground::new()?;
    let boots: Vec<Boot> =
        options.kernels.iter().map(|kernel| boot(kernel, &options, &program)).collect();
    let entrant = |(kernel, boot): (&Kernel, &Boot)| {
        let (boot, ground) = (boot.clone(), &ground);
        Entrant { name: kernel.name.clone(), attempt: Box::new(move || boot.attempt(ground)) }
    };
    let entrants: Vec<Entrant> = options.kernels.iter().zip(&boots).map(entrant).collect();
    let host = Host::examine();
    let runs = options.runs;
    let records = measure(&entrants, runs, |round| eprint!("\rround {round} of {runs} "));
    eprintln!();
    let sections = sections(&records);
    let report = Report { schema: 1, bench: "boot", host, runs, sections, conclusions: Vec::new() };
    print!("{}", report.render());
    if let Some(path) = &options.json {
        report.write_json(path)?;
    }
    Ok(if report.has_failures() { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn boot(kernel: &Kernel, options: &Options, program: &std::path::Path) -> Boot {
    let size = ["--memory".to_owned(), options.memory.clone()];
    let cpus = ["--cpus".to_owned(), options.cpus.to_string()];
    let all = [kernel.options.as_slice(), &size, &cpus].concat();
    Boot {
        program: program.to_owned(),
        options: all,
        command: options.command.clone(),
        limit: Duration::from_secs(options.timeout),
    }
}

fn sections(records: &[Record]) -> Vec<Section> {
    let [.., entered, _, _, ready, _] = STEPS;
    let between = |record: &Record| record.row(&record.between(entered, ready));
    let whole = |record: &Record| record.row(&record.to_mark(ready));
    let all = |row: &dyn Fn(&Record) -> Row| records.iter().map(row).collect();
    let mut sections = vec![
        Section::compared(format!("from exec to {ready}"), all(&whole)),
        Section::compared(format!("from {entered} to {ready}: the guest's part"), all(&between)),
    ];
    for record in records {
        let title = format!("{}, steps since exec", record.name);
        sections.push(Section::plain(title, record.ladder()));
        let title = format!("{}, each step by itself", record.name);
        sections.push(Section::plain(title, steps(record)));
    }
    sections
}

fn steps(record: &Record) -> Vec<Row> {
    let marks = record.marks();
    let step =
        |(from, to): (&&str, &&str)| Row::new(format!("{from} → {to}"), &record.between(from, to));
    marks.iter().zip(marks.iter().skip(1)).map(step).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_is_a_name_and_files() {
        let kernel: Kernel = "6.12=/k/vmlinux,initrd=/k/initrd".parse().unwrap();
        assert_eq!(kernel.name, "6.12");
        assert_eq!(kernel.options, ["--kernel", "/k/vmlinux", "--initrd", "/k/initrd"]);
        assert_eq!("a=b".parse::<Kernel>().unwrap().options, ["--kernel", "b"]);
    }

    #[test]
    fn a_kernel_that_is_not_understood_is_refused() {
        for text in ["/k/vmlinux", "=x", "a=", "a=b,initramfs=c", "a=b,c"] {
            assert!(text.parse::<Kernel>().is_err(), "{text}");
        }
    }

    #[test]
    fn the_guests_part_is_compared_between_kernels() {
        let sections = sections(&[Record::new("a"), Record::new("b")]);
        assert_eq!(sections[1].title, "from T4 first KVM_RUN to T7 agent ready: the guest's part");
        assert_eq!(sections[1].rows.len(), 2);
        assert_eq!(sections.len(), 6);
    }
}
