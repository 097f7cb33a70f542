//! Shares on their way into a VM: each has a file server and a thread of its own, so that one with
//! much traffic holds up nothing else.

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
        ShareInfo { id: self.id.clone(), status, server_losses, server_restarts }
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
    let device = Fs::new(executor.handle(), share.device(program, path))?;
    let running =
        RunningShare { id: share.id.clone(), handle: device.handle(), _executor: executor };
    Ok((DeviceId::new(share.id.clone()), Box::new(device), running))
}
