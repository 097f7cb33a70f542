//! The stages of a create, a restore, a pause or a resume, from the Task call to its answer, and how
//! long each took. `metrics` makes numbers of it, and the log gets one line.
//!
//! ```text
//! {"event":"ladder","unix_us":…,"namespace":"default","sandbox":"web","container":"web",
//!  "operation":"create","outcome":"done","us":412000,
//!  "stages":[{"stage":"spec","at_us":0,"us":310},{"stage":"files","at_us":310,"us":9100},…]}
//! ```

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use serde::Serialize;

use crate::clock::nanos;
use crate::error::Result;
use crate::logs;
use crate::sandbox::Sandbox;

/// How many bytes of an error the line has at most: all of it must fit into a FIFO at once.
const MAX_ERROR: usize = 1000;

/// What a call has brought about, or was about to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Operation {
    /// A VM was booted for its first container.
    Create,
    /// A container was made in a VM that was there.
    Add,
    /// A VM was made of a checkpoint.
    Restore,
    /// In memory.
    Pause,
    /// The VM is gone.
    PauseToDisk,
    /// In memory.
    Resume,
    /// A VM was made of what was on the disk.
    ResumeFromDisk,
}

impl Operation {
    /// As in the log and in labels.
    pub fn name(self) -> &'static str {
        match self {
            Self::Create => "create",
            Self::Add => "add",
            Self::Restore => "restore",
            Self::Pause => "pause",
            Self::PauseToDisk => "pause_to_disk",
            Self::Resume => "resume",
            Self::ResumeFromDisk => "resume_from_disk",
        }
    }
}

/// One stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stage {
    /// What was done.
    pub name: &'static str,
    /// When it began, from the call on.
    pub at: Duration,
    /// How long it took.
    pub took: Duration,
}

/// A ladder that is being climbed.
#[derive(Debug)]
pub struct Ladder {
    start: Instant,
    so_far: Mutex<SoFar>,
}

#[derive(Debug)]
struct SoFar {
    operation: Operation,
    /// The end of the last stage of those that follow each other.
    reached: Duration,
    stages: Vec<Stage>,
}

impl Ladder {
    /// The call has just come.
    pub fn begin(operation: Operation) -> Self {
        let so_far = SoFar { operation, reached: Duration::ZERO, stages: Vec::new() };
        Self { start: Instant::now(), so_far: Mutex::new(so_far) }
    }

    fn so_far(&self) -> MutexGuard<'_, SoFar> {
        self.so_far.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// It turns out to be this.
    pub fn is(&self, operation: Operation) {
        self.so_far().operation = operation;
    }

    /// A stage is done that has begun when the one before was.
    pub fn reach(&self, name: &'static str) {
        let (now, mut so_far) = (self.start.elapsed(), self.so_far());
        let at = so_far.reached;
        so_far.stages.push(Stage { name, at, took: now.saturating_sub(at) });
        so_far.reached = now;
    }

    /// Does a stage beside those that follow each other.
    pub async fn beside<T>(&self, name: &'static str, work: impl Future<Output = T>) -> T {
        let at = self.start.elapsed();
        let done = work.await;
        let took = self.start.elapsed().saturating_sub(at);
        self.so_far().stages.push(Stage { name, at, took });
        done
    }

    /// The call is about to be answered.
    pub fn end(&self, error: Option<String>) -> Climb {
        let (total, so_far) = (self.start.elapsed(), self.so_far());
        let mut stages = so_far.stages.clone();
        stages.sort_by_key(|stage| stage.at);
        Climb { operation: so_far.operation, total, stages, error }
    }
}

/// A ladder that was climbed, or fallen from.
#[derive(Clone, Debug)]
pub struct Climb {
    /// What was climbed for.
    pub operation: Operation,
    /// From the call to its answer.
    pub total: Duration,
    /// In the order in which they began; what had not ended when it failed is not among them.
    pub stages: Vec<Stage>,
    /// Why it failed, if it did.
    pub error: Option<String>,
}

/// Whole microseconds.
pub fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

#[derive(Serialize)]
struct Line<'a> {
    event: &'static str,
    unix_us: u64,
    namespace: &'a str,
    sandbox: &'a str,
    container: &'a str,
    operation: Operation,
    outcome: &'static str,
    us: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'a str>,
    stages: Vec<Part>,
}

#[derive(Serialize)]
struct Part {
    stage: &'static str,
    at_us: u64,
    us: u64,
}

impl Climb {
    /// `done` or `failed`.
    pub fn outcome(&self) -> &'static str {
        if self.error.is_none() { "done" } else { "failed" }
    }

    /// The line of the log, without the end of a line.
    fn line(&self, namespace: &str, sandbox: &str, container: &str) -> String {
        let part = |stage: &Stage| Part {
            stage: stage.name,
            at_us: micros(stage.at),
            us: micros(stage.took),
        };
        let line = Line {
            event: "ladder",
            unix_us: u64::try_from(nanos(SystemTime::now()) / 1000).unwrap_or_default(),
            namespace,
            sandbox,
            container,
            operation: self.operation,
            outcome: self.outcome(),
            us: micros(self.total),
            error: self.error.as_deref().map(|error| start_of(error, MAX_ERROR)),
            stages: self.stages.iter().map(part).collect(),
        };
        // Neither maps nor errors of its own: this does not fail.
        serde_json::to_string(&line).unwrap_or_default()
    }
}

/// As much of a text as has at most this many bytes.
fn start_of(text: &str, bytes: usize) -> &str {
    let end = (0..=bytes.min(text.len())).rev().find(|end| text.is_char_boundary(*end));
    end.and_then(|end| text.get(..end)).unwrap_or_default()
}

impl Sandbox {
    /// Tells how a call went on `container`, in the log and in numbers.
    pub fn tell_ladder<T>(&self, container: &str, ladder: &Ladder, result: &Result<T>) {
        let climb = ladder.end(result.as_ref().err().map(ToString::to_string));
        logs::line(&climb.line(&self.namespace, &self.id, container));
        self.metrics.take_in(&climb);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[tokio::test]
    async fn stages_follow_each_other_and_others_are_beside_them() {
        let ladder = Ladder::begin(Operation::Create);
        ladder.reach("spec");
        ladder.beside("files", async { ladder.reach("vmm") }).await;
        ladder.reach("container");
        let climb = ladder.end(None);
        let names: Vec<&str> = climb.stages.iter().map(|stage| stage.name).collect();
        assert_eq!(names[0], "spec");
        assert_eq!(names[3], "container");
        let find = |name| *climb.stages.iter().find(|stage| stage.name == name).unwrap();
        let (spec, vmm, files) = (find("spec"), find("vmm"), find("files"));
        assert_eq!(spec.at, Duration::ZERO);
        assert_eq!(vmm.at, spec.took, "no time is lost between two");
        assert_eq!(find("container").at, vmm.at + vmm.took);
        assert!(files.at >= vmm.at && files.at + files.took >= vmm.at + vmm.took);
        assert!(climb.stages.iter().all(|stage| stage.at + stage.took <= climb.total));
    }

    #[test]
    fn the_line_tells_whose_it_is_and_what_went_wrong() {
        let ladder = Ladder::begin(Operation::Pause);
        ladder.is(Operation::PauseToDisk);
        ladder.reach("streams");
        let climb = ladder.end(Some("a \"disk\"\nis full".to_owned()));
        let text = climb.line("k8s.io", "pod", "web");
        assert_eq!(text.lines().count(), 1, "{text}");
        let line: Value = serde_json::from_str(&text).unwrap();
        for (key, value) in [
            ("event", "ladder"),
            ("namespace", "k8s.io"),
            ("sandbox", "pod"),
            ("container", "web"),
            ("operation", "pause_to_disk"),
            ("outcome", "failed"),
            ("error", "a \"disk\"\nis full"),
        ] {
            assert_eq!(line[key], value, "{key}");
        }
        assert_eq!(line["stages"][0]["stage"], "streams");
        assert_eq!(line["stages"][0]["at_us"], 0);
        assert!(line["us"].is_u64() && line["unix_us"].is_u64(), "{text}");
    }

    #[test]
    fn what_went_well_has_no_error() {
        let climb = Ladder::begin(Operation::Resume).end(None);
        let line: Value = serde_json::from_str(&climb.line("default", "web", "web")).unwrap();
        assert_eq!((line["outcome"].as_str(), line.get("error")), (Some("done"), None));
    }

    #[test]
    fn a_long_error_still_fits_into_a_fifo() {
        let ladder = Ladder::begin(Operation::Restore);
        (0..12).for_each(|_| ladder.reach("a_stage_with_a_long_name"));
        let long = "x".to_owned() + &"é\"".repeat(5000);
        let line = ladder.end(Some(long)).line(&"n".repeat(76), &"s".repeat(76), &"c".repeat(76));
        assert!(line.len() < libc::PIPE_BUF, "{}", line.len());
        assert!(serde_json::from_str::<Value>(&line).is_ok());
    }

    #[test]
    fn an_operation_has_one_name() {
        for operation in [
            Operation::Create,
            Operation::Add,
            Operation::Restore,
            Operation::Pause,
            Operation::PauseToDisk,
            Operation::Resume,
            Operation::ResumeFromDisk,
        ] {
            assert_eq!(serde_json::to_value(operation).unwrap(), operation.name());
        }
    }
}
