//! What the annotations of a pod's containers ask for, about its sleep.

use std::time::Duration;

use serde::Deserialize;
use serde_json::Value;

use crate::config::Config;
use crate::error::{Error, Result};
use crate::probe::Probe;

/// Where a pause leaves the VM: `memory` or `disk`.
pub const PAUSE_TO: &str = "cube.pause.to";
/// What must answer before a resume is done: `tcp:PORT` or `http:PORT/PATH`, several with commas between
/// them.
pub const READY: &str = "cube.ready";
/// How many seconds that may take.
pub const PATIENCE: &str = "cube.ready.timeout";

/// Where a pause leaves the VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PauseTo {
    /// It stands still, with all its memory.
    #[default]
    Memory,
    /// Its state is on the disk, and it is gone.
    Disk,
}

/// What a pod asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wishes {
    /// Where a pause leaves it.
    pub pause_to: PauseTo,
    /// What must answer.
    pub probes: Vec<Probe>,
    /// How long they may take.
    pub patience: Duration,
}

impl Wishes {
    /// What the operator says, of pods that say nothing.
    pub fn new(config: &Config) -> Self {
        let patience = Duration::from_secs(config.resume_timeout_s);
        Self { pause_to: config.pause_to, probes: Vec::new(), patience }
    }

    /// With those of one more container. Where two say different things the later one counts, but
    /// the probes of all must be answered.
    pub fn with(mut self, spec: &Value) -> Result<Self> {
        let annotation = |name: &str| spec["annotations"][name].as_str();
        if let Some(text) = annotation(PAUSE_TO) {
            self.pause_to = match text {
                "memory" => PauseTo::Memory,
                "disk" => PauseTo::Disk,
                _ => return Err(refused(PAUSE_TO, text, "memory or disk")),
            };
        }
        for text in annotation(READY).into_iter().flat_map(|text| text.split(',')) {
            let expected = "tcp:PORT or http:PORT/PATH, as tcp:8080 or http:8080/health";
            let probe = Probe::parse(text.trim()).ok_or_else(|| refused(READY, text, expected))?;
            if !self.probes.contains(&probe) {
                self.probes.push(probe);
            }
        }
        if let Some(text) = annotation(PATIENCE) {
            let seconds = text.parse().ok().filter(|seconds| (1..=3600).contains(seconds));
            let seconds = seconds.ok_or_else(|| refused(PATIENCE, text, "1 to 3600 seconds"))?;
            self.patience = Duration::from_secs(seconds);
        }
        Ok(self)
    }
}

fn refused(name: &str, text: &str, expected: &str) -> Error {
    Error::Invalid(format!("the annotation {name} is {text:?}, expected {expected}"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn wishes(annotations: &Value) -> Result<Wishes> {
        Wishes::new(&Config::default()).with(&json!({"annotations": annotations}))
    }

    #[test]
    fn what_is_not_said_is_the_operator_s() {
        let config = Config { pause_to: PauseTo::Disk, resume_timeout_s: 7, ..Config::default() };
        let wishes = Wishes::new(&config).with(&json!({})).unwrap();
        assert_eq!(wishes.pause_to, PauseTo::Disk);
        assert_eq!(wishes.patience, Duration::from_secs(7));
    }

    #[test]
    fn the_probes_of_all_containers_must_be_answered() {
        let first = wishes(&json!({PAUSE_TO: "disk", READY: "tcp:80, tcp:443"})).unwrap();
        let both = first.with(&json!({"annotations": {READY: "tcp:80,tcp:9", PATIENCE: "3"}}));
        let both = both.unwrap();
        assert_eq!(both.probes, [80, 443, 9].map(Probe::Tcp));
        assert_eq!((both.pause_to, both.patience), (PauseTo::Disk, Duration::from_secs(3)));
    }

    #[test]
    fn what_is_not_understood_is_refused_with_the_datum() {
        for (name, value) in [
            (PAUSE_TO, "tape"),
            (READY, "80"),
            (READY, "tcp:0"),
            (READY, "tcp:80;reboot"),
            (PATIENCE, "0"),
            (PATIENCE, "soon"),
        ] {
            let error = wishes(&json!({name: value})).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains(value), "{error}");
        }
    }
}
