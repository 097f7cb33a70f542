//! `checkpoint` and `update`: ask the shim of a sandbox for what containerd's own client has no word
//! for, a checkpoint in a folder that is named, and an action by annotations.

use std::collections::HashMap;
use std::path::Path;

use containerd_shim::Flags;
use containerd_shim_protos::api::{CheckpointTaskRequest, UpdateTaskRequest};
use containerd_shim_protos::shim_async::{Client, TaskClient};
use containerd_shim_protos::ttrpc;
use containerd_shim_protos::ttrpc::context::with_duration;

use crate::bootstrap::check_name;
use crate::error::{Error, Result, io};

/// How long either may take: as long as a workload may need to be ready, and a disk to write.
const PATIENCE: std::time::Duration = std::time::Duration::from_secs(3900);

/// Asks for a checkpoint of a container's sandbox in `folder`, and waits until it is there.
pub fn checkpoint(flags: &Flags, folder: &str) -> Result<()> {
    if !Path::new(folder).is_absolute() {
        return Err(Error::Invalid(format!("{folder:?} is not an absolute path")));
    }
    let request = CheckpointTaskRequest {
        id: flags.id.clone(),
        path: folder.to_owned(),
        ..Default::default()
    };
    ask(flags, async |task| task.checkpoint(with_duration(PATIENCE), &request).await.map(drop))
}

/// Asks for an update of a container by the annotations that stand behind the word `update` in
/// `args`, and waits until it is done.
pub fn update(flags: &Flags, args: &[String]) -> Result<()> {
    let request = UpdateTaskRequest {
        id: flags.id.clone(),
        annotations: annotations(args)?,
        ..Default::default()
    };
    ask(flags, async |task| task.update(with_duration(PATIENCE), &request).await.map(drop))
}

fn annotations(args: &[String]) -> Result<HashMap<String, String>> {
    // No annotation is this word: the last one is the action.
    let words = args.rsplit(|arg| arg == "update").next().unwrap_or_default();
    let mut all = HashMap::new();
    for word in words {
        let pair = word.split_once('=').filter(|(key, _)| !key.is_empty());
        let (key, value) = pair.ok_or_else(|| {
            Error::Invalid(format!("{word:?} is no annotation; expected KEY=VALUE, see --help"))
        })?;
        if all.insert(key.to_owned(), value.to_owned()).is_some() {
            return Err(Error::Invalid(format!("the annotation {key} is there twice")));
        }
    }
    if all.is_empty() {
        return Err(Error::Invalid("update needs annotations, KEY=VALUE; see --help".to_owned()));
    }
    Ok(all)
}

/// Calls the shim that has a container.
fn ask(flags: &Flags, call: impl AsyncFnOnce(TaskClient) -> ttrpc::Result<()>) -> Result<()> {
    check_name("namespace", &flags.namespace)?;
    check_name("id", &flags.id)?;
    let socket = containerd_shim::socket_address(&flags.address, &flags.namespace, &flags.id);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(io("start a thread"))?;
    runtime.block_on(async {
        let reached = Client::connect(&socket).await.map_err(|error| {
            Error::NotFound(format!(
                "the shim of {} in namespace {} of {} ({socket}: {error})",
                flags.id, flags.namespace, flags.address
            ))
        })?;
        let asked = call(TaskClient::new(reached)).await;
        asked.map_err(|error| Error::Unavailable(error.to_string()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(words: &[&str]) -> Result<HashMap<String, String>> {
        annotations(&words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn annotations_are_what_follows_the_action() {
        let all = of(&["-id", "update", "update", "a=b=c", "d="]).unwrap();
        assert_eq!(all["a"], "b=c");
        assert_eq!(all["d"], "");
        assert_eq!(all.len(), 2);
    }

    #[test]
    fn what_is_no_annotation_is_named() {
        for (words, datum) in [
            (&["update"][..], "KEY=VALUE"),
            (&["update", "plain"], "\"plain\""),
            (&["update", "=x"], "\"=x\""),
            (&["update", "a=1", "a=2"], "a is there twice"),
        ] {
            let error = of(words).unwrap_err().to_string();
            assert!(error.contains(datum), "{error}");
        }
    }
}
