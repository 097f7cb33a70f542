//! Disks on their way into a VM: opened first, then made into a device with a loop of its own.
//!
//! Each disk has a thread, whatever its engine: storage that does not answer then holds up that
//! disk, and nothing else of the VM.

use std::fs::File;

use devices::executor::Executor;
use devices::ids::DeviceId;
use devices::virtio::VirtioDevice;
use devices::virtio::block::{Block, BlockConfig, EngineKind, OpenDisk};
use devices::virtio::vhost::user::{PATIENCE, VhostUser, VhostUserConfig};
use serde::{Deserialize, Serialize};

use crate::builder::BuildError;
use crate::config::DiskConfig;

/// Most queues that a disk has when nobody says how many. One thread serves them all: what more of
/// them would gain is the guest's processors not waiting for each other, which four achieve.
const DEFAULT_QUEUES: u32 = 4;

/// Who does the I/O of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DiskEngine {
    /// We do, through io_uring.
    IoUring,
    /// We do, with a system call for each request.
    Sync,
    /// Another process.
    #[serde(rename = "vhost-user")]
    VhostUser,
}

impl From<EngineKind> for DiskEngine {
    fn from(engine: EngineKind) -> Self {
        match engine {
            EngineKind::IoUring => DiskEngine::IoUring,
            EngineKind::Sync => DiskEngine::Sync,
        }
    }
}

/// What a VM tells of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskInfo {
    /// The device's name.
    pub id: String,
    /// The engine that it has, whatever was asked for.
    pub engine: DiskEngine,
    /// Why that is not io_uring, if io_uring was tried.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fallback: Option<String>,
    /// Request queues.
    pub queues: u16,
}

/// A disk that is there, open and locked or connected to, and not in a VM yet. Its thread comes
/// first, and outlives it.
pub struct OpenedDisk {
    device: Box<dyn VirtioDevice>,
    running: RunningDisk,
}

/// A disk in a VM. Must outlive its device, and ends its thread when it is dropped.
pub struct RunningDisk {
    /// The device's name.
    pub id: DeviceId,
    /// What is told of it.
    pub info: DiskInfo,
    /// What is behind it, unless another process serves it; for copies while the VM stands still.
    pub(crate) file: Option<File>,
    _executor: Executor,
}

impl OpenedDisk {
    /// Opens a disk for a guest with `cpus` vCPUs, or connects to its backend.
    pub fn open(disk: &DiskConfig, cpus: u32) -> Result<Self, BuildError> {
        if disk.vhost_user { Self::connect(disk) } else { Self::open_file(disk, cpus) }
    }

    fn open_file(disk: &DiskConfig, cpus: u32) -> Result<Self, BuildError> {
        let open = OpenDisk::open(&disk.path, disk.read_only, disk.engine)?;
        if let Some(reason) = &open.fallback {
            tracing::info!(disk = %disk.id, reason, "synchronous I/O instead of io_uring");
        }
        let queues = disk.queues.unwrap_or(default_queues(cpus));
        let config = BlockConfig {
            read_only: disk.read_only,
            serial: disk.id.clone(),
            queues,
            rate: disk.rate,
        };
        let executor = executor(disk)?;
        let (id, engine, fallback) = (disk.id.clone(), open.engine.into(), open.fallback);
        let info = DiskInfo { id, engine, fallback, queues };
        let device = Block::new(executor.handle(), open.disk, config)?;
        Ok(Self::new(Box::new(device), info, Some(open.file), executor))
    }

    fn connect(disk: &DiskConfig) -> Result<Self, BuildError> {
        // Most backends have one unless they are told otherwise.
        let queues = disk.queues.unwrap_or(1);
        let (socket, patience) = (disk.path.clone(), PATIENCE);
        let executor = executor(disk)?;
        let config = VhostUserConfig { socket, queues, patience };
        let device = VhostUser::block(executor.handle(), config)
            .map_err(|source| BuildError::DiskBackend { id: disk.id.clone(), source })?;
        let (id, engine) = (disk.id.clone(), DiskEngine::VhostUser);
        let info = DiskInfo { id, engine, fallback: None, queues };
        Ok(Self::new(Box::new(device), info, None, executor))
    }

    fn new(
        device: Box<dyn VirtioDevice>,
        info: DiskInfo,
        file: Option<File>,
        executor: Executor,
    ) -> Self {
        let id = DeviceId::new(info.id.clone());
        Self { device, running: RunningDisk { id, info, file, _executor: executor } }
    }

    /// The device, and what stays of the disk beside it.
    pub fn into_device(self) -> (RunningDisk, Box<dyn VirtioDevice>) {
        (self.running, self.device)
    }
}

fn executor(disk: &DiskConfig) -> Result<Executor, BuildError> {
    Ok(Executor::spawn(&format!("disk-{}", disk.id))?)
}

/// One per vCPU, within reason.
fn default_queues(cpus: u32) -> u16 {
    // Not above DEFAULT_QUEUES.
    u16::try_from(cpus.clamp(1, DEFAULT_QUEUES)).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use devices::virtio::block::Engine;

    use super::*;

    fn disk(id: &str, options: &str) -> (tempfile::NamedTempFile, DiskConfig) {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(4096).unwrap();
        let text = format!("path={},id={id}{options}", file.path().display());
        (file, text.parse().unwrap())
    }

    #[test]
    fn a_disk_has_a_queue_per_vcpu_up_to_four_or_as_many_as_is_said() {
        for (cpus, options, queues) in
            [(1, "", 1), (2, "", 2), (32, "", 4), (32, ",queues=16", 16), (2, ",queues=5", 5)]
        {
            let (_file, config) = disk("a", options);
            let (running, device) = OpenedDisk::open(&config, cpus).unwrap().into_device();
            assert_eq!(running.info.queues, queues);
            assert_eq!(device.identity().queue_sizes.len(), usize::from(queues));
        }
    }

    #[test]
    fn the_engine_that_a_disk_has_is_told() {
        let (_file, config) = disk("a", ",engine=sync");
        assert_eq!(config.engine, Engine::Sync);
        let (running, _device) = OpenedDisk::open(&config, 1).unwrap().into_device();
        let told = serde_json::to_value(&running.info).unwrap();
        assert_eq!(told, serde_json::json!({"id": "a", "engine": "sync", "queues": 1}));
    }

    #[test]
    fn each_disk_has_a_thread_of_its_own_which_ends_with_it() {
        let threads = |name: &str| {
            let tasks = std::fs::read_dir("/proc/self/task").unwrap().filter_map(Result::ok);
            let names =
                tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
            names.filter(|comm| comm.trim_end() == name).count()
        };
        let (one, two) = (disk("own-one", ""), disk("own-two", ""));
        let running =
            [&one.1, &two.1].map(|config| OpenedDisk::open(config, 1).unwrap().into_device().0);
        // A thread gives itself its name, and goes a moment after its end.
        let become_so = |count: usize| {
            let deadline = Instant::now() + Duration::from_secs(20);
            while [threads("disk-own-one"), threads("disk-own-two")] != [count; 2] {
                assert!(Instant::now() < deadline, "never {count} threads of each disk");
                std::thread::yield_now();
            }
        };
        become_so(1);
        drop(running);
        become_so(0);
    }
}
