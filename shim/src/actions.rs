//! What Update is asked for by annotations, in Cubelet's words.
//!
//! An action is understood as a whole, or refused before anything has been done.

use std::collections::HashMap;
use std::path::PathBuf;

use serde::Deserialize;

use crate::annotations;
use crate::config::Config;
use crate::error::{Error, Result};

/// The annotation that names the action.
pub const ACTION: &str = "cube.shimapi.update.action";
/// What `PauseToSnapshot` needs.
pub const PAUSE: &str = "cube.shimapi.update.pause.snapshot_config";
/// What all keys of actions begin with.
const PREFIX: &str = "cube.shimapi.update.";
/// The only form of `destination_url`, beside a plain path.
const FILE: &str = "file://";

/// Something that is done to a sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Its state is written to this folder, as a checkpoint, and its VM goes.
    PauseToSnapshot(PathBuf),
}

/// The annotation [`PAUSE`].
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct PauseConfig {
    destination_url: String,
    #[serde(default)]
    memory_vol_url: String,
    #[serde(default)]
    snapshot_type: SnapshotType,
}

/// How theirs finds what has to be written. Here all of it is: that serves for each of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum SnapshotType {
    #[default]
    Full,
    Incremental,
    SoftDirty,
}

fn invalid<T>(why: String) -> Result<T> {
    Err(Error::Invalid(why))
}

impl Action {
    /// The action that an Update asks for, if it asks for one. Refuses what is not understood, by
    /// name, and annotations that mean something else than the action.
    pub fn of(annotations: &HashMap<String, String>, config: &Config) -> Result<Option<Self>> {
        let keys = || annotations.keys().map(String::as_str);
        annotations::check_names(keys())?;
        let mut parameters: Vec<&str> = keys().filter(|key| is_parameter(key)).collect();
        parameters.sort_unstable();
        let Some(name) = annotations.get(ACTION) else {
            return match parameters.first() {
                Some(key) => invalid(format!("the annotation {key} needs {ACTION} beside it")),
                None => Ok(None),
            };
        };
        if name != "PauseToSnapshot" {
            return Err(Error::Invalid(unknown(name)));
        }
        if let Some(other) = parameters.iter().find(|key| **key != PAUSE) {
            return invalid(format!(
                "the annotation {other} contradicts {ACTION}, which is {name}; leave one out"
            ));
        }
        let Some(text) = annotations.get(PAUSE) else {
            return invalid(format!("{ACTION} is {name}, which needs the annotation {PAUSE}"));
        };
        pause(text, config).map(Some)
    }
}

fn is_parameter(key: &str) -> bool {
    key.starts_with(PREFIX) && key != ACTION
}

/// Why an action is refused that is not done here.
fn unknown(name: &str) -> String {
    let instead = match name {
        "RollbackSnapshot" => "a sandbox does not go back yet; make another one of the checkpoint",
        "SnapshotCapture" | "SnapshotResume" => {
            "a sandbox is not kept still for others yet; Checkpoint writes it, and it goes on"
        }
        _ => "expected PauseToSnapshot",
    };
    format!("the annotation {ACTION} is {name:?}: {instead}")
}

fn pause(text: &str, config: &Config) -> Result<Action> {
    let parsed: PauseConfig = serde_json::from_str(text).map_err(|error| {
        Error::Invalid(format!(
            "the annotation {PAUSE} is {text:?}: {error}; expected for example \
             {{\"destination_url\":\"file:///var/lib/cube/snapshots/one\"}}"
        ))
    })?;
    if !parsed.memory_vol_url.is_empty() {
        return invalid(format!(
            "the annotation {PAUSE} has memory_vol_url {:?}: memory is in the snapshot's folder; \
             leave it out",
            parsed.memory_vol_url
        ));
    }
    if parsed.snapshot_type != SnapshotType::Full {
        let asked = parsed.snapshot_type;
        tracing::info!(?asked, "a full snapshot is written, which serves for this type too");
    }
    let url = parsed.destination_url.as_str();
    let path = url.strip_prefix(FILE).unwrap_or(url);
    if !path.starts_with('/') {
        return invalid(format!(
            "the annotation {PAUSE} has destination_url {url:?}; expected {FILE}/FOLDER"
        ));
    }
    config.check_new(PAUSE, path.as_ref()).map(Action::PauseToSnapshot)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// What comes of these annotations, where a folder may be made below `dir`.
    fn of(dir: &std::path::Path, all: &[(&str, &str)]) -> Result<Option<Action>> {
        let config = Config { annotation_dirs: vec![dir.into()], ..Config::default() };
        let all = all.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        Action::of(&all.collect(), &config)
    }

    fn refusal(all: &[(&str, &str)]) -> String {
        let dir = tempfile::tempdir().unwrap();
        let error = of(dir.path(), all).unwrap_err();
        assert!(matches!(error, Error::Invalid(_)), "{error:?}");
        error.to_string()
    }

    #[test]
    fn an_update_without_an_action_is_one_of_limits() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(of(dir.path(), &[]).unwrap(), None);
        let others = [("io.kubernetes.cri.x", "y"), ("cube.product", "z")];
        assert_eq!(of(dir.path(), &others).unwrap(), None);
    }

    #[test]
    fn a_pause_names_its_folder_by_url_or_path() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().canonicalize().unwrap().join("one");
        for url in [format!("file://{}", folder.display()), folder.display().to_string()] {
            for kind in ["full", "incremental", "soft-dirty"] {
                let config = json!({"destination_url": url, "snapshot_type": kind}).to_string();
                let action = of(dir.path(), &[(ACTION, "PauseToSnapshot"), (PAUSE, &config)]);
                assert_eq!(action.unwrap(), Some(Action::PauseToSnapshot(folder.clone())));
            }
        }
    }

    #[test]
    fn what_is_not_understood_is_refused_with_the_datum() {
        for bad in
            ["{", "[]", "{\"destination_url\":1}", "{}", "{\"destination_url\":\"/a\",\"x\":1}"]
        {
            let error = refusal(&[(ACTION, "PauseToSnapshot"), (PAUSE, bad)]);
            assert!(error.contains(PAUSE) && error.contains(&format!("{bad:?}")), "{error}");
        }
        for (config, datum) in [
            (json!({"destination_url": "s3://bucket/x"}), "s3://bucket/x"),
            (json!({"destination_url": "relative"}), "relative"),
            (json!({"destination_url": "/nowhere/at/all"}), "/nowhere/at"),
            (json!({"destination_url": "/etc/snapshot"}), "is not below"),
            (json!({"destination_url": "/a", "memory_vol_url": "file:///m"}), "file:///m"),
            (json!({"destination_url": "/a", "snapshot_type": "half"}), "half"),
        ] {
            let config = config.to_string();
            let error = refusal(&[(ACTION, "PauseToSnapshot"), (PAUSE, &config)]);
            assert!(error.contains(datum), "{error}");
        }
        let error = refusal(&[(ACTION, "Explode")]);
        assert!(error.contains("\"Explode\"") && error.contains("PauseToSnapshot"), "{error}");
    }

    #[test]
    fn what_is_not_done_yet_says_what_to_do_instead() {
        for name in ["RollbackSnapshot", "SnapshotCapture", "SnapshotResume"] {
            let error = refusal(&[(ACTION, name)]);
            assert!(error.contains(name) && error.contains("heckpoint"), "{error}");
        }
    }

    #[test]
    fn keys_that_contradict_each_other_or_stand_alone_are_named() {
        let config = "{\"destination_url\":\"/a\"}";
        let capture = "cube.shimapi.update.snapshot.capture_config";
        let error = refusal(&[(ACTION, "PauseToSnapshot"), (PAUSE, config), (capture, "{}")]);
        assert!(error.contains(capture), "{error}");
        let error = refusal(&[(PAUSE, config)]);
        assert!(error.contains(PAUSE) && error.contains(ACTION), "{error}");
        let error = refusal(&[(ACTION, "PauseToSnapshot")]);
        assert!(error.contains(PAUSE), "{error}");
        let error = refusal(&[("cube.vfio.disk", "[]")]);
        assert!(error.contains("cube.vfio.disk is not supported"), "{error}");
    }
}
