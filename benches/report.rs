//! Figures: from raw samples to percentiles, ratios, a table for people and JSON for machines.

use std::fmt::Write;
use std::fs;
use std::path::Path;

use anyhow::Context;
use serde::Serialize;

use crate::host::Host;

/// Nanoseconds of repeated measurements of one thing.
#[derive(Clone, Debug, Default)]
pub struct Samples(Vec<u64>);

/// What is told of [`Samples`]. All in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Summary {
    /// Number of samples.
    pub n: usize,
    /// The least.
    pub min: u64,
    /// The median.
    pub p50: u64,
    /// 95 of 100 are not above it.
    pub p95: u64,
    /// 99 of 100 are not above it; with fewer than 100 samples, the greatest.
    pub p99: u64,
    /// The greatest.
    pub max: u64,
}

impl Samples {
    /// Adds one measurement.
    pub fn push(&mut self, nanoseconds: u64) {
        self.0.push(nanoseconds);
    }

    /// The figures, if anything was measured.
    pub fn summary(&self) -> Option<Summary> {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        let (min, max) = (*sorted.first()?, *sorted.last()?);
        let at = |percent| nearest_rank(&sorted, percent);
        Some(Summary { n: sorted.len(), min, p50: at(50), p95: at(95), p99: at(99), max })
    }
}

impl FromIterator<u64> for Samples {
    fn from_iter<I: IntoIterator<Item = u64>>(samples: I) -> Self {
        Self(samples.into_iter().collect())
    }
}

/// The least sample that `percent` of all do not exceed: always one that was really measured.
fn nearest_rank(sorted: &[u64], percent: usize) -> u64 {
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted[rank - 1]
}

/// How often `part` is contained in `whole`.
pub fn ratio(whole: u64, part: u64) -> Option<f64> {
    (part > 0).then(|| whole as f64 / part as f64)
}

/// One line of a table: who, and what was measured.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Who or what was measured.
    pub name: String,
    /// The figures; none if every attempt failed.
    #[serde(flatten)]
    pub summary: Option<Summary>,
    /// Median divided by that of the section's first row.
    pub times_first: Option<f64>,
    /// Attempts that failed.
    pub failed: usize,
    /// Why the first of them did.
    pub failure: Option<String>,
}

impl Row {
    /// A row without failures.
    pub fn new(name: impl Into<String>, samples: &Samples) -> Self {
        let (name, summary) = (name.into(), samples.summary());
        Self { name, summary, times_first: None, failed: 0, failure: None }
    }

    /// Adds what went wrong.
    pub fn with_failures(self, failures: &[String]) -> Self {
        Self { failed: failures.len(), failure: failures.first().cloned(), ..self }
    }
}

/// Rows that can be compared with each other.
#[derive(Clone, Debug, Serialize)]
pub struct Section {
    /// What the figures are.
    pub title: String,
    /// The rows.
    pub rows: Vec<Row>,
}

impl Section {
    /// Compares all rows with the first.
    pub fn compared(title: impl Into<String>, mut rows: Vec<Row>) -> Self {
        let median = |row: &Row| row.summary.map(|summary| summary.p50);
        let first = rows.first().and_then(median);
        for row in &mut rows {
            row.times_first = median(row).zip(first).and_then(|(this, first)| ratio(this, first));
        }
        Self { title: title.into(), rows }
    }

    /// Rows of different things.
    pub fn plain(title: impl Into<String>, rows: Vec<Row>) -> Self {
        Self { title: title.into(), rows }
    }
}

/// The result of one program of this directory. Fields are added, never renamed or removed, within
/// one `schema`. Times are in nanoseconds.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Version of the fields.
    pub schema: u32,
    /// The program's name.
    pub bench: &'static str,
    /// Where it ran.
    pub host: Host,
    /// Measured rounds.
    pub runs: usize,
    /// The figures.
    pub sections: Vec<Section>,
    /// Sentences that follow from them.
    pub conclusions: Vec<String>,
}

impl Report {
    /// Writes it as JSON.
    pub fn write_json(&self, path: &Path) -> anyhow::Result<()> {
        let text = serde_json::to_string_pretty(self)? + "\n";
        fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
    }

    /// Whether anything failed.
    pub fn has_failures(&self) -> bool {
        self.sections.iter().flat_map(|section| &section.rows).any(|row| row.failed > 0)
    }

    /// The table, in milliseconds.
    pub fn render(&self) -> String {
        let mut text = String::new();
        // Writing to a String cannot fail.
        let _ = self.write_table(&mut text);
        text
    }

    fn write_table(&self, text: &mut String) -> std::fmt::Result {
        writeln!(text, "{}", self.host)?;
        let names = self.sections.iter().flat_map(|section| &section.rows);
        let width = names.map(|row| row.name.chars().count()).max().unwrap_or(0).max(24);
        for section in &self.sections {
            write_section(text, section, width)?;
        }
        if !self.conclusions.is_empty() {
            writeln!(text)?;
        }
        self.conclusions.iter().try_for_each(|sentence| writeln!(text, "{sentence}"))
    }
}

fn write_section(text: &mut String, section: &Section, width: usize) -> std::fmt::Result {
    let compared = section.rows.iter().any(|row| row.times_first.is_some());
    let last = if compared { "   x first" } else { "" };
    writeln!(text, "\n{} (ms)", section.title)?;
    writeln!(
        text,
        "  {:width$} {:>5} {:>9} {:>9} {:>9} {:>9}{last}",
        "", "n", "min", "p50", "p95", "p99"
    )?;
    section.rows.iter().try_for_each(|row| write_row(text, row, width))
}

fn write_row(text: &mut String, row: &Row, width: usize) -> std::fmt::Result {
    write!(text, "  {:width$} ", row.name)?;
    if let Some(Summary { n, min, p50, p95, p99, .. }) = row.summary {
        write!(text, "{n:>5} {} {} {} {}", ms(min), ms(p50), ms(p95), ms(p99))?;
    }
    if let Some(times) = row.times_first {
        write!(text, " {times:>9.2}")?;
    }
    if row.failed > 0 {
        write!(text, "  {} FAILED", row.failed)?;
    }
    match &row.failure {
        Some(failure) => writeln!(text, ": {failure}"),
        None => writeln!(text),
    }
}

/// Nanoseconds as milliseconds, in a column of nine characters.
fn ms(nanoseconds: u64) -> String {
    format!("{:>9.3}", nanoseconds as f64 / 1e6)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(values: impl IntoIterator<Item = u64>) -> Samples {
        values.into_iter().collect()
    }

    fn report(rows: Vec<Row>) -> Report {
        let sections = vec![Section::compared("to the end", rows)];
        let host = Host::default();
        Report { schema: 1, bench: "x", host, runs: 3, sections, conclusions: vec!["So.".into()] }
    }

    #[test]
    fn percentiles_are_by_nearest_rank() {
        let summary = samples((1..=100).rev()).summary().unwrap();
        let wanted = Summary { n: 100, min: 1, p50: 50, p95: 95, p99: 99, max: 100 };
        assert_eq!(summary, wanted);
    }

    #[test]
    fn few_samples_give_only_values_that_were_measured() {
        let summary = samples([7, 1, 4]).summary().unwrap();
        assert_eq!(summary, Summary { n: 3, min: 1, p50: 4, p95: 7, p99: 7, max: 7 });
        let summary = samples([5]).summary().unwrap();
        assert_eq!(summary, Summary { n: 1, min: 5, p50: 5, p95: 5, p99: 5, max: 5 });
    }

    #[test]
    fn an_even_number_of_samples_takes_the_lower_middle() {
        assert_eq!(samples([1, 2, 3, 4]).summary().unwrap().p50, 2);
    }

    #[test]
    fn nothing_measured_has_no_figures() {
        assert_eq!(Samples::default().summary(), None);
    }

    #[test]
    fn a_ratio_to_nothing_is_none() {
        assert_eq!(ratio(3, 2), Some(1.5));
        assert_eq!(ratio(3, 0), None);
    }

    #[test]
    fn medians_are_compared_with_the_first_row() {
        let rows = vec![Row::new("a", &samples([4, 4])), Row::new("b", &samples([6]))];
        let section = Section::compared("t", rows);
        assert_eq!(section.rows[0].times_first, Some(1.0));
        assert_eq!(section.rows[1].times_first, Some(1.5));
    }

    #[test]
    fn a_first_row_that_failed_leaves_nothing_to_compare_with() {
        let rows = vec![Row::new("a", &samples([])), Row::new("b", &samples([6]))];
        assert_eq!(Section::compared("t", rows).rows[1].times_first, None);
    }

    #[test]
    fn a_failure_is_in_the_table_and_in_the_json() {
        let failures = ["no such file".to_owned(), "other".to_owned()];
        let row = Row::new("peer", &samples([])).with_failures(&failures);
        let report = report(vec![Row::new("us", &samples([1_500_000])), row]);
        let text = report.render();
        assert!(report.has_failures());
        assert!(text.contains("2 FAILED: no such file"), "{text}");
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["sections"][0]["rows"][1]["failed"], 2);
        assert_eq!(json["sections"][0]["rows"][1]["failure"], "no such file");
    }

    #[test]
    fn the_table_is_in_milliseconds_and_the_json_in_nanoseconds() {
        let report = report(vec![Row::new("us", &samples([1_500_000, 2_500_000]))]);
        let text = report.render();
        assert!(text.contains("1.500     1.500     2.500     2.500      1.00"), "{text}");
        assert!(text.ends_with("\nSo.\n"), "{text}");
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["sections"][0]["rows"][0]["p95"], 2_500_000);
        assert!(!report.has_failures());
    }
}
