//! What a snapshot holds of shares, without making a VM of it.
//!
//! That is in the file server's own format, which the file server reads: it gives up all that it could do
//! with it first.

use std::io::{self, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use devices::snapshot::from_record;
use devices::virtio::fs::FsState;
use serde::Serialize;

use super::inspect::{self, InspectError};
use super::manifest::Manifest;
use crate::config::ShareConfig;

/// A share in a snapshot.
#[derive(Debug, Serialize)]
pub struct SavedShare {
    /// What the VM was told of it.
    #[serde(flatten)]
    pub config: ShareConfig,
    /// What the guest had of it, as `cube-fsd --describe` tells it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<serde_json::Value>,
    /// Why that cannot be told.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// All shares of the snapshot in `dir`, with what `program` says of each.
pub fn shares(
    dir: &Path,
    manifest: &Manifest,
    program: &Path,
) -> Result<Vec<SavedShare>, InspectError> {
    let all = manifest.config.all_fs();
    if all.is_empty() {
        return Ok(Vec::new());
    }
    let state = inspect::state(dir, manifest)?;
    let told = all.into_iter().map(|config| {
        let record = state.devices.get(&config.id).and_then(|record| record.within("virtio-fs"));
        let content = match record.map(from_record::<FsState>) {
            Some(Ok(saved)) => describe(program, saved.share()),
            Some(Err(error)) => Err(error.to_string()),
            None => Err("the state has nothing of it".to_owned()),
        };
        let (content, error) = match content {
            Ok(content) => (Some(content), None),
            Err(error) => (None, Some(error)),
        };
        SavedShare { config, content, error }
    });
    Ok(told.collect())
}

fn describe(program: &Path, state: &[u8]) -> Result<serde_json::Value, String> {
    let failed = |error: io::Error| format!("{} cannot be asked: {error}", program.display());
    let mut command = Command::new(program);
    command.arg("--describe").env_clear().current_dir("/");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(failed)?;
    if let Some(mut stdin) = child.stdin.take() {
        // It has read all of it before it answers. If it ends before, it says why.
        let _ = stdin.write_all(state);
    }
    let output = child.wait_with_output().map_err(failed)?;
    match output.status.success() {
        true => serde_json::from_slice(&output.stdout).map_err(|error| failed(error.into())),
        false => Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
    }
}
