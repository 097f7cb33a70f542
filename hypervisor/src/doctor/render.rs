//! The report as text for people.

use std::fmt::Write;

use super::check::{Check, Status};
use super::probe::{Probe, Ran, Verdict, millions_per_second};
use super::{KvmReport, Report};

/// Width of the column of names.
const NAMES: usize = 24;

pub(super) fn report(report: &Report) -> String {
    let mut text = String::new();
    // Writing to a String cannot fail.
    let _ = write_report(&mut text, report);
    text
}

fn write_report(text: &mut String, report: &Report) -> std::fmt::Result {
    let host = &report.host;
    writeln!(
        text,
        "host     Linux {}, {} x {}{}",
        host.kernel,
        host.cpus,
        host.cpu.as_deref().unwrap_or("unknown processor"),
        if host.virtualized { ", itself a virtual machine" } else { "" },
    )?;
    write_verdict(text, &report.kvm)?;
    writeln!(text, "so       {}", advice(report))?;
    for probe in report.kvm.probes.iter().filter(|probe| !probe.decisive && probe.ran == Ran::No) {
        writeln!(text, "but      '{}' fails: hide it from guests' CPUID", probe.name)?;
    }
    if !report.kvm.probes.is_empty() {
        writeln!(text, "\nguests that were run")?;
    }
    for probe in &report.kvm.probes {
        write_probe(text, probe, &report.kvm)?;
    }
    writeln!(text, "\nchecks")?;
    report.checks.iter().try_for_each(|check| write_check(text, check))
}

fn write_verdict(text: &mut String, kvm: &KvmReport) -> std::fmt::Result {
    let module = kvm.module.as_deref().unwrap_or("no module");
    match &kvm.verdict {
        Verdict::Hardware => writeln!(text, "verdict  hardware: /dev/kvm ({module}) runs guests"),
        Verdict::Interpreting { reason } => {
            writeln!(text, "verdict  interpreting: /dev/kvm ({module}) lacks what Linux needs")?;
            writeln!(text, "because  {reason}")
        }
        Verdict::None { reason } => {
            writeln!(text, "verdict  none: no guest runs on /dev/kvm ({module})")?;
            writeln!(text, "because  {reason}")
        }
    }
}

fn advice(report: &Report) -> String {
    if report.runs_linux() {
        return "Linux guests run here".to_owned();
    }
    let lacking: Vec<_> = report.lacking().map(|check| check.name).collect();
    match (&report.kvm.verdict, lacking.is_empty()) {
        (Verdict::Hardware, _) => {
            format!("Linux guests do not run here for want of {}", lacking.join(", "))
        }
        (Verdict::Interpreting { .. }, _) => {
            "Linux guests run in the lab only: tests/lab/run -- COMMAND".to_owned()
        }
        (Verdict::None { .. }, _) => {
            "until that is cured, guests run in the lab only: tests/lab/run -- COMMAND".to_owned()
        }
    }
}

fn write_probe(text: &mut String, probe: &Probe, kvm: &KvmReport) -> std::fmt::Result {
    let word = match probe.ran {
        Ran::Yes => "ran",
        Ran::No => "failed",
        Ran::NotOffered => "absent",
        Ran::NotTried => "untried",
    };
    let speed = kvm.speed.filter(|_| probe.name == "loop").map(millions_per_second);
    let detail = match (&probe.detail, probe.ran) {
        (Some(detail), _) => detail.clone(),
        (None, Ran::NotOffered) => "CPUID does not offer it".to_owned(),
        (None, Ran::NotTried) => "no time was left".to_owned(),
        (None, _) => speed.unwrap_or_default(),
    };
    writeln!(text, "{}", format!("{word:9}{:NAMES$}{detail}", probe.name).trim_end())
}

fn write_check(text: &mut String, check: &Check) -> std::fmt::Result {
    let word = check.status.word();
    writeln!(text, "{word:9}{:NAMES$}{} ({})", check.name, check.value, check.meaning)?;
    match &check.cure {
        Some(cure) if check.status != Status::Ok => {
            writeln!(text, "{:9}{:NAMES$}cure: {cure}", "", "")
        }
        _ => Ok(()),
    }
}
