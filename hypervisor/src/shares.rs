//! Shares on their way into a VM: each has a file server and a thread of its own, so that one with
//! much traffic holds up nothing else.

use std::io;
use std::path::PathBuf;

use devices::executor::Executor;
use devices::ids::DeviceId;
use devices::virtio::VirtioDevice;
use devices::virtio::fs::{Fs, FsHandle};
use serde::{Deserialize, Serialize};

use crate::builder::BuildError;
use crate::config::{ConfigError, ShareConfig, VmConfig};

/// The file server where none is named: beside this program.
pub fn default_program() -> PathBuf {
    let beside = std::env::current_exe().ok();
    let beside = beside.and_then(|exe| Some(exe.parent()?.join("cube-fsd")));
    beside.unwrap_or_else(|| PathBuf::from("/usr/lib/cubevmm/cube-fsd"))
}

/// A share in a VM. Must outlive its device, and ends its thread when it is dropped.
pub struct RunningShare {
    id: String,
    handle: FsHandle,
    tag: String,
    /// Without links and detours, as it is served.
    path: PathBuf,
    _executor: Executor,
}

/// What a VM tells of a share.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ShareInfo {
    /// The device's name.
    pub id: String,
    /// What its file server says: how much the guest has open, and what a restore has come to. `None`
    /// if it does not answer.
    pub status: Option<serde_json::Value>,
    /// False while its directory is in none of those that are allowed: nobody serves it.
    #[serde(default = "yes")]
    pub allowed: bool,
    /// How many of its file servers have ended unasked.
    #[serde(default)]
    pub server_losses: u64,
    /// How many have gone on in the place of one of those.
    #[serde(default)]
    pub server_restarts: u64,
}

impl RunningShare {
    /// Asks its file server, for a second at most.
    pub fn info(&self) -> ShareInfo {
        let status = self.handle.status();
        let status = status.and_then(|text| serde_json::from_str(&text).ok());
        let (server_losses, server_restarts) = self.handle.ends();
        let allowed = self.handle.is_allowed();
        ShareInfo { id: self.id.clone(), status, allowed, server_losses, server_restarts }
    }

    /// Whether its directory is in one of those, which are without links and detours.
    fn is_within(&self, allowed: &[PathBuf]) -> bool {
        allowed.iter().any(|directory| self.path.starts_with(directory))
    }
}

/// Starts the server of a share, and makes its device.
pub fn open(
    share: &ShareConfig,
    config: &VmConfig,
) -> Result<(DeviceId, Box<dyn VirtioDevice>, RunningShare), BuildError> {
    let program = config.fsd.clone().unwrap_or_else(default_program);
    let executor = Executor::spawn(&format!("fs-{}", share.id))?;
    let path = share.allowed_path(&config.fs_allow).map_err(ConfigError::from)?;
    let device = Fs::new(executor.handle(), share.device(program, path.clone()))?;
    let (id, tag, handle) = (share.id.clone(), share.tag.clone(), device.handle());
    let running = RunningShare { id, handle, tag, path, _executor: executor };
    Ok((DeviceId::new(share.id.clone()), Box::new(device), running))
}

/// Allows the shares whose directory is in one of `allowed`, and forbids all others, at once. `None`: all
/// are allowed. A directory that is not there changes nothing.
pub fn allow(shares: &[RunningShare], allowed: Option<&[PathBuf]>) -> Result<(), AllowError> {
    let real = |path: &PathBuf| {
        let relative = path.is_relative().then(|| io::Error::other("it is not an absolute path"));
        let real = relative.map_or_else(|| path.canonicalize(), Err);
        real.map_err(|source| AllowError { path: path.clone(), source })
    };
    let allowed = allowed.map(|list| list.iter().map(real).collect::<Result<Vec<_>, _>>());
    let allowed = allowed.transpose()?;
    for share in shares {
        let within = allowed.as_ref().is_none_or(|allowed| share.is_within(allowed));
        if within != share.handle.is_allowed() {
            tracing::info!(tag = share.tag, path = ?share.path, allowed = within, "share");
        }
        share.handle.allow(within);
    }
    Ok(())
}

/// Why a list of directories is refused.
#[derive(Debug, thiserror::Error)]
#[error("{path:?} cannot be allowed: {source}; nothing is changed")]
pub struct AllowError {
    /// The one.
    pub path: PathBuf,
    source: io::Error,
}

fn yes() -> bool {
    true
}
