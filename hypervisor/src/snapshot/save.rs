//! Writes a VM that stands still into a directory: all of it or nothing.
//!
//! In four steps, of which the guest notices only the third: [`Job::prepare`] finds every mistake that
//! can be found while it runs, [`Job::copy_ahead`] writes the memory of which is known what changes
//! meanwhile, [`Job::freeze`] takes the instant, and [`Frozen::finish`] brings it to the disk while the
//! guest goes on.

use std::io::{self, Write};
use std::sync::PoisonError;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use devices::snapshot::SaveError;
use devices::virtio::rng::host_entropy;
use guest_protocol::Hello;

use super::disks::{self, DiskCopyError, Outside, Plan};
use super::folder::{FolderError, NewFolder};
use super::host_files::{self, HostFileError};
use super::load::LoadError;
use super::machine::MachineState;
use super::manifest::{Manifest, Parent};
use super::memory_file::{Base, MemoryFile};
use super::vcpu::VcpuState;
use super::{MANIFEST, MAX_STATE, RUNS, STATE, SUMS, checksum, runs};
use crate::api::{SnapshotReport, SnapshotRequest};
use crate::config::VmConfig;
use crate::kvm::KvmError;
use crate::vcpu::VcpuError;
use crate::vm::{Vm, lock};

/// Why there is no snapshot. Nothing is left of it, and the VM is as it was.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// The folder cannot be made.
    #[error(transparent)]
    Folder(#[from] FolderError),
    /// A disk cannot be copied.
    #[error(transparent)]
    Disk(#[from] DiskCopyError),
    /// What it shall be a difference to cannot be read.
    #[error("no difference can be made: {0}")]
    Base(#[source] LoadError),
    /// Nothing to compare with.
    #[error(
        "no difference can be made: {dir} is itself one, and this VM does not know what has changed \
         since; merge it with its base first, or name the snapshot that was taken last"
    )]
    BaseIsDifference {
        /// The folder.
        dir: String,
    },
    /// Memory of another machine.
    #[error("no difference can be made: {dir} has {found} bytes of memory, this VM has {here}")]
    BaseSize {
        /// The folder.
        dir: String,
        /// Its bytes.
        found: u64,
        /// Those of the VM.
        here: u64,
    },
    /// What would be lost.
    #[error(
        "{0:?} cannot be saved: what the guest has written to it is in memory of its own; use ro"
    )]
    WritablePmem(String),
    /// What another process knows.
    #[error(
        "a VM with vhost-user devices cannot be saved yet: their backends have state of their own"
    )]
    Shared,
    /// The guest is over.
    #[error("the guest has ended")]
    Ended,
    /// A device does not tell its state.
    #[error("the state of {device} cannot be saved: {source}")]
    Device {
        /// Its name.
        device: String,
        /// The reason.
        source: SaveError,
    },
    /// A file of the VM is gone.
    #[error(transparent)]
    Files(#[from] HostFileError),
    /// No name for it.
    #[error("the host's random number generator failed: {0}")]
    Entropy(#[source] io::Error),
    /// Nobody would read it again.
    #[error(
        "the state of the machine has {0} bytes, and the most is {MAX_STATE}; let the guest drop its caches \
         of shares, and close files that it has removed"
    )]
    TooLarge(usize),
    /// KVM does not tell its state.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// A vCPU is gone.
    #[error(transparent)]
    Vcpu(#[from] VcpuError),
}

/// A snapshot that is going to be taken.
pub struct Job {
    started: Instant,
    id: String,
    folder: NewFolder,
    base: Option<Base>,
    disks: Vec<Plan>,
    track: bool,
    /// Memory that was written while the guest ran.
    ahead: Option<MemoryFile>,
}

/// A snapshot of an instant that is over, not on the disk yet.
pub struct Frozen {
    folder: NewFolder,
    outside: Outside,
    manifest: Manifest,
    base: Option<Base>,
    memory: MemoryFile,
    started: Instant,
}

impl Job {
    /// Checks what can be checked, and makes the folder. While the guest may run.
    pub fn prepare(vm: &Vm, request: &SnapshotRequest) -> Result<Self, SnapshotError> {
        let started = Instant::now();
        if let Some(pmem) = vm.config().all_pmem().into_iter().find(|pmem| !pmem.read_only) {
            return Err(SnapshotError::WritablePmem(pmem.id));
        }
        if vm.config().shares_memory() {
            return Err(SnapshotError::Shared);
        }
        let mut id = [0; 16];
        host_entropy(&mut id).map_err(SnapshotError::Entropy)?;
        let id = id.iter().map(|byte| format!("{byte:02x}")).collect();
        let base = request.diff_of.as_ref().map(|dir| Base::open(dir, vm)).transpose()?;
        let folder = NewFolder::make(&request.dir, request.durability)?;
        let disks = disks::plan(vm.config(), &vm.disks, &request.disk_clones, &folder)?;
        let track = request.track || base.is_some();
        Ok(Self { started, id, folder, base, disks, track, ahead: None })
    }

    /// Writes what can be written of memory before the instant. While the guest runs.
    pub fn copy_ahead(
        &mut self,
        vm: &mut Vm,
        request: &SnapshotRequest,
    ) -> Result<(), SnapshotError> {
        self.ahead = MemoryFile::ahead(vm, &mut self.folder, self.base.as_ref())?;
        if self.ahead.is_some() {
            // It took its time: what the guest has let go is not saved, and what it has written to its
            // disks meanwhile goes to the host's before it stands still.
            vm.collect_ejected();
            self.disks = disks::plan(vm.config(), &vm.disks, &request.disk_clones, &self.folder)?;
        }
        Ok(())
    }

    /// Takes the instant. The VM must be paused; `hello` is what the agent has said.
    pub fn freeze(self, vm: &mut Vm, hello: Option<&Hello>) -> Result<Frozen, SnapshotError> {
        let Self { started, id, mut folder, base, disks, track, ahead } = self;
        let state = vm.machine_state(hello)?.to_bytes().map_err(device("the machine"))?;
        if state.len() as u64 > MAX_STATE {
            return Err(SnapshotError::TooLarge(state.len()));
        }
        folder.write(STATE, |file| file.write_all(&state))?;
        let mut manifest = Manifest::new(absolute(vm.config()), id, now(), &state);
        // After all that might write to memory.
        let newest = vm.tracking.take(&vm.handle, &vm.memory)?;
        let memory = match ahead {
            Some(mut memory) => {
                memory.complete(vm, &mut folder, &newest)?;
                memory
            }
            None => MemoryFile::at_once(vm, &mut folder, base.as_ref())?,
        };
        let mut outside = Outside::default();
        for disk in disks {
            manifest.disks.push(disk.copy(&mut folder, &mut outside)?);
        }
        manifest.files = host_files::measure(vm.config(), &manifest.disks)?;
        if track {
            vm.tracking.start(&vm.handle, &vm.memory)?;
        }
        Ok(Frozen { folder, outside, manifest, base, memory, started })
    }
}

impl Frozen {
    /// Completes the folder, which makes it a snapshot. The guest, which has stood still for
    /// `paused`, may run.
    pub fn finish(self, paused: Option<Duration>) -> Result<SnapshotReport, SnapshotError> {
        let Self { mut folder, mut outside, mut manifest, base, memory, started } = self;
        let (method, still_bytes) = (memory.method, memory.still_bytes);
        let written = memory.finish(&mut folder)?;
        let sums = written.sums.to_bytes();
        manifest.sums_crc64 = Some(checksum::of(&sums));
        folder.write(SUMS, |file| file.write_all(&sums))?;
        if let (Some(base), Some(runs)) = (base, written.runs) {
            let runs = runs::to_bytes(&runs);
            folder.write(RUNS, |file| file.write_all(&runs))?;
            let (runs_crc64, pages_bytes) = (checksum::of(&runs), written.bytes);
            manifest.parent = Some(Parent { runs_crc64, pages_bytes, ..base.parent });
        }
        folder.sync()?;
        folder.write(MANIFEST, |file| file.write_all(&manifest.to_bytes()?))?;
        folder.complete()?;
        outside.keep();
        let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        Ok(SnapshotReport {
            id: manifest.id,
            paused_us: paused.map(micros),
            total_us: micros(started.elapsed()),
            memory: method,
            memory_bytes: written.bytes,
            still_bytes,
            disks: manifest.disks,
        })
    }
}

fn now() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_nanos()).unwrap_or(0)
}

impl Vm {
    /// There is a snapshot `id` of the instant that was frozen last.
    pub fn saved(&mut self, id: &str) {
        self.tracking.succeeded(id.to_owned(), &self.memory);
    }

    fn machine_state(&self, hello: Option<&Hello>) -> Result<MachineState, SnapshotError> {
        let mut vcpus = Vec::with_capacity(self.vcpus.len());
        for (vcpu, cpuid) in self.vcpus.iter().zip(&self.cpuid) {
            let (msrs, size) = (self.handle.msrs().to_vec(), self.handle.xsave_size());
            let cpuid = cpuid.clone();
            vcpus.push(vcpu.with(move |fd| VcpuState::save(fd, cpuid, &msrs, size))??);
        }
        let legacy = self.legacy.stateful().into_iter().map(|(name, legacy)| {
            let record = legacy.lock().unwrap_or_else(PoisonError::into_inner).save_record();
            Ok((name.to_owned(), record.map_err(device(name))?))
        });
        let devices = self.transports.iter().map(|(id, transport)| {
            let record = lock(transport).save_record().map_err(device(id.as_str()))?;
            Ok((id.to_string(), record))
        });
        Ok(MachineState {
            vcpus,
            irqchips: self.handle.irqchips()?,
            clock_nanos: self.handle.clock()?.clock,
            legacy: legacy.collect::<Result<_, SnapshotError>>()?,
            devices: devices.collect::<Result<_, SnapshotError>>()?,
            pci: self.pci.as_ref().map(|pci| pci.save().map_err(device("pci"))).transpose()?,
            hello: hello.cloned(),
        })
    }
}

fn device(name: &str) -> impl FnOnce(SaveError) -> SnapshotError {
    let device = name.to_owned();
    move |source| SnapshotError::Device { device, source }
}

/// Whoever restores it may stand elsewhere.
fn absolute(config: &VmConfig) -> VmConfig {
    let mut config = config.clone();
    let disks = config.disks.iter_mut().map(|disk| &mut disk.path);
    let pmem = config.pmem.iter_mut().map(|pmem| &mut pmem.path);
    let other = [&mut config.rootfs, &mut config.initrd, &mut config.vsock].into_iter().flatten();
    let shares = config.fs.iter_mut().map(|share| &mut share.path);
    for path in disks.chain(pmem).chain(shares).chain(other).chain([&mut config.kernel]) {
        if let Ok(absolute) = std::path::absolute(&*path) {
            *path = absolute;
        }
    }
    config
}
