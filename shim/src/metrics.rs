//! Numbers of a sandbox for Prometheus, in a file of its own folder: how often it was created,
//! restored, paused and resumed, how long that took, and the stages of the last time.
//!
//! A file of the sandbox's, and not a part of what its VMM tells: the VMM is gone while the sandbox
//! is paused to disk, and knows nothing of calls. It goes with the folder, whoever clears that.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use hypervisor::metrics::{Family, FamilyKind, Sample, prometheus};

use crate::ladder::{Climb, Operation, micros};
use crate::record;

/// The file's name. Prometheus's node exporter reads what ends like this.
pub const FILE: &str = "metrics.prom";

/// The numbers of one sandbox.
#[derive(Debug)]
pub struct Metrics {
    namespace: String,
    sandbox: String,
    path: PathBuf,
    book: Mutex<Book>,
}

#[derive(Debug, Default)]
struct Book {
    /// The folder is about to go.
    closed: bool,
    /// By operation and outcome.
    sums: BTreeMap<(Operation, &'static str), Sum>,
    /// Microseconds of each stage, the last time.
    stages: BTreeMap<Operation, BTreeMap<&'static str, u64>>,
}

#[derive(Debug, Default)]
struct Sum {
    count: u64,
    us: u64,
}

impl Metrics {
    /// Those of a new one, to be kept in the file at `path`.
    pub fn new(namespace: &str, sandbox: &str, path: PathBuf) -> Self {
        let (namespace, sandbox) = (namespace.to_owned(), sandbox.to_owned());
        Self { namespace, sandbox, path, book: Mutex::default() }
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes in how a call went, and writes the file.
    pub fn take_in(&self, climb: &Climb) {
        let mut book = self.book();
        let sum = book.sums.entry((climb.operation, climb.outcome())).or_default();
        sum.count = sum.count.saturating_add(1);
        sum.us = sum.us.saturating_add(micros(climb.total));
        if climb.error.is_none() {
            let mut stages = BTreeMap::<_, u64>::new();
            for stage in &climb.stages {
                let us = stages.entry(stage.name).or_default();
                *us = us.saturating_add(micros(stage.took));
            }
            book.stages.insert(climb.operation, stages);
        }
        if book.closed {
            return;
        }
        // Written with the book held: the later one must not be replaced by the earlier one, and
        // nothing may come into a folder that is being removed.
        let text = prometheus(&self.families(&book));
        if let Err(error) = record::put(&self.path, text.as_bytes()) {
            tracing::warn!(%error, "the sandbox's metrics are not written");
        }
    }

    /// Writes nothing any more.
    pub fn close(&self) {
        self.book().closed = true;
    }

    fn families(&self, book: &Book) -> Vec<Family> {
        let counted = |what: fn(&Sum) -> u64| -> Vec<Sample> {
            let sample = |(&(operation, outcome), sum): (&(Operation, &'static str), &Sum)| {
                self.sample(operation, ("outcome", outcome), what(sum))
            };
            book.sums.iter().map(sample).collect()
        };
        let of_stages = book.stages.iter().flat_map(|(operation, stages)| {
            stages.iter().map(|(stage, us)| self.sample(*operation, ("stage", stage), *us))
        });
        vec![
            Family {
                name: "cubevmm_sandbox_operations_total".to_owned(),
                kind: FamilyKind::Counter,
                help:
                    "Calls that have created, restored, paused or resumed a sandbox, or failed to"
                        .to_owned(),
                samples: counted(|sum| sum.count),
            },
            Family {
                name: "cubevmm_sandbox_operation_microseconds_total".to_owned(),
                kind: FamilyKind::Counter,
                help: "Microseconds that these calls have taken".to_owned(),
                samples: counted(|sum| sum.us),
            },
            Family {
                name: "cubevmm_sandbox_stage_microseconds".to_owned(),
                kind: FamilyKind::Gauge,
                help:
                    "Microseconds that each stage of such a call has taken the last time that it \
                       was done"
                        .to_owned(),
                samples: of_stages.collect(),
            },
        ]
    }

    fn sample(&self, operation: Operation, (key, value): (&str, &str), number: u64) -> Sample {
        let labels = [
            ("namespace", self.namespace.as_str()),
            ("sandbox", self.sandbox.as_str()),
            ("operation", operation.name()),
            (key, value),
        ];
        let labels = labels.map(|(key, value)| (key.to_owned(), value.to_owned()));
        Sample { labels: labels.into(), value: number }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::time::Duration;

    use super::*;
    use crate::ladder::Stage;

    fn climb(total: u64, stage: u64, error: Option<&str>) -> Climb {
        let stage =
            Stage { name: "streams", at: Duration::ZERO, took: Duration::from_micros(stage) };
        Climb {
            operation: Operation::PauseToDisk,
            total: Duration::from_micros(total),
            stages: vec![stage],
            error: error.map(str::to_owned),
        }
    }

    #[test]
    fn calls_are_counted_and_the_last_one_s_stages_told() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(FILE);
        let metrics = Metrics::new("default", "web", path.clone());
        metrics.take_in(&climb(100, 40, None));
        metrics.take_in(&climb(200, 50, None));
        metrics.take_in(&climb(7, 3, Some("the disk is full")));
        let text = fs::read_to_string(&path).unwrap();
        let of = "namespace=\"default\",operation=\"pause_to_disk\"";
        for line in [
            format!("cubevmm_sandbox_operations_total{{{of},outcome=\"done\",sandbox=\"web\"}} 2"),
            format!(
                "cubevmm_sandbox_operations_total{{{of},outcome=\"failed\",sandbox=\"web\"}} 1"
            ),
            format!(
                "cubevmm_sandbox_operation_microseconds_total{{{of},outcome=\"done\",sandbox=\"web\"}} 300"
            ),
            format!(
                "cubevmm_sandbox_stage_microseconds{{{of},sandbox=\"web\",stage=\"streams\"}} 50"
            ),
        ] {
            assert!(text.lines().any(|told| told == line), "{line} in\n{text}");
        }
        let names: Vec<_> = fs::read_dir(dir.path()).unwrap().collect();
        assert_eq!(names.len(), 1, "nothing half written is left: {names:?}");
    }

    #[test]
    fn nothing_is_written_into_a_folder_that_goes() {
        let dir = tempfile::tempdir().unwrap();
        let metrics = Metrics::new("default", "web", dir.path().join(FILE));
        metrics.close();
        metrics.take_in(&climb(1, 1, None));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
