//! What a prefetch of hot pages is worth: a guest that touches many pages after a restore, with and
//! without.

use std::path::Path;

use anyhow::{Context, ensure};

use crate::report::{Row, Section};
use crate::rounds::{Entrant, Record, measure};
use crate::saved::{Saved, TOUCHED};
use crate::tiny_guest;
use crate::vmm::Ground;

/// What is measured.
#[derive(Clone, Copy)]
pub struct Question<'a> {
    /// `cube-vmm`.
    pub program: &'a Path,
    /// Where snapshots are made.
    pub ground: &'a Ground,
    /// Memory of the guests.
    pub sizes: &'a [String],
    /// How memory comes in.
    pub modes: &'a [String],
    /// MiB that a guest touches, a power of two.
    pub touched_mib: usize,
    /// Measured rounds.
    pub runs: usize,
    /// Without the cold page cache.
    pub warm_only: bool,
}

/// A snapshot, and how it is restored.
struct Case {
    name: String,
    saved: Saved,
    options: Vec<String>,
}

impl Question<'_> {
    /// The figures, and what follows from them.
    pub fn answer(&self) -> anyhow::Result<(Vec<Section>, Vec<String>)> {
        ensure!(
            self.touched_mib.is_power_of_two(),
            "--prefetch takes a power of two, such as 256M"
        );
        let bytes = u32::try_from(self.touched_mib << 20).ok().filter(|bytes| *bytes <= 1 << 31);
        let code =
            tiny_guest::scattering(bytes.context("--prefetch is too large; the most is 2G")?);
        let mut cases = Vec::new();
        for size in self.sizes {
            let saved = Saved::tiny(self.program, self.ground, &code, size);
            let saved = saved.with_context(|| format!("no snapshot of a guest with {size}"))?;
            saved.record_hot().context("no hot pages")?;
            for mode in self.modes {
                let limit = format!("{}M", 2 * self.touched_mib);
                let with: &[&str] = &["--prefetch", "--prefetch-limit", &limit];
                for (what, more) in [("", &[][..]), (", prefetch", with)] {
                    let name = format!("restore, {size}, {mode}{what}");
                    let options = ["--memory-mode", mode].into_iter().chain(more.iter().copied());
                    let options = options.map(str::to_owned).collect();
                    cases.push(Case { name, saved: saved.clone(), options });
                }
            }
        }
        let mut sections = Vec::new();
        let mut conclusions = Vec::new();
        for cold in [false, true].into_iter().take(if self.warm_only { 1 } else { 2 }) {
            let records = self.rounds(&cases, cold);
            let row = |record: &Record| record.row(&record.to_mark(TOUCHED));
            let rows: Vec<Row> = records.iter().map(row).collect();
            let cache = if cold { "snapshot not in the page cache" } else { "page cache" };
            let what = format!("{} MiB", self.touched_mib);
            conclusions.extend(rows.chunks(2).filter_map(|pair| conclude(pair, cache)));
            let title = format!("from exec until a restored guest has touched {what}, {cache}");
            sections.push(Section::compared(title, rows));
        }
        Ok((sections, conclusions))
    }

    fn rounds(&self, cases: &[Case], cold: bool) -> Vec<Record> {
        let entrants = cases.iter().map(|case| {
            let attempt = move || {
                if cold {
                    case.saved.chill()?;
                }
                let options: Vec<&str> = case.options.iter().map(String::as_str).collect();
                case.saved.attempt_scattering(&options, |_| Ok(()))
            };
            Entrant { name: case.name.clone(), attempt: Box::new(attempt) }
        });
        measure(&entrants.collect::<Vec<_>>(), self.runs, |_| ())
    }
}

/// What a row says of that before it.
fn conclude(pair: &[Row], cache: &str) -> Option<String> {
    let [without, with] = pair else { return None };
    let times = without.summary?.p50 as f64 / with.summary?.p50 as f64;
    Some(format!("{}: {times:.2} times as fast as without (p50, {cache})", with.name))
}
