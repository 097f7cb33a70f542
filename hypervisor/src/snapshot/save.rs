//! Writes a VM that stands still into a directory: all of it or nothing.
//!
//! In three steps, of which the guest notices only the second: [`Job::prepare`] finds every mistake
//! that can be found while it runs, [`Job::freeze`] takes the instant, and [`Frozen::finish`] brings it
//! to the disk while the guest goes on.

use std::fs::File;
use std::io::{self, Write};
use std::sync::PoisonError;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use devices::snapshot::SaveError;
use devices::virtio::rng::host_entropy;
use guest_protocol::Hello;

use super::disks::{self, DiskCopyError, Outside, Plan};
use super::folder::{FolderError, NewFolder};
use super::host_files::{self, HostFileError};
use super::image::{self, Run, Written};
use super::load::LoadError;
use super::machine::MachineState;
use super::manifest::{Manifest, Parent};
use super::pages::{self, PageSet};
use super::vcpu::VcpuState;
use super::{MANIFEST, MAX_STATE, MEMORY, PAGES, RUNS, STATE, SUMS, checksum, load};
use crate::api::{MemoryMethod, SnapshotReport, SnapshotRequest};
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
}

/// What it will be a difference to.
struct Base {
    parent: Parent,
    /// Its memory, if it is whole.
    memory: Option<File>,
}

/// A snapshot of an instant that is over, not on the disk yet.
pub struct Frozen {
    folder: NewFolder,
    outside: Outside,
    manifest: Manifest,
    report: SnapshotReport,
    started: Instant,
}

/// What of memory has been written.
struct SavedMemory {
    method: MemoryMethod,
    written: Written,
    /// Of a difference: which pages.
    runs: Option<Vec<Run>>,
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
        Ok(Self { started, id, folder, base, disks, track })
    }

    /// Takes the instant. The VM must be paused; `hello` is what the agent has said.
    pub fn freeze(self, vm: &mut Vm, hello: Option<&Hello>) -> Result<Frozen, SnapshotError> {
        let Self { started, id, mut folder, base, disks, track } = self;
        let state = vm.machine_state(hello)?.to_bytes().map_err(device("the machine"))?;
        if state.len() as u64 > MAX_STATE {
            return Err(SnapshotError::TooLarge(state.len()));
        }
        folder.write(STATE, |file| file.write_all(&state))?;
        let mut manifest = Manifest::new(absolute(vm.config()), id, now(), &state);
        // After all that might write to memory.
        vm.tracking.take(&vm.handle, &vm.memory)?;
        let SavedMemory { method, written, runs } = match &base {
            Some(base) => vm.write_difference(&mut folder, base)?,
            None => vm.write_whole(&mut folder)?,
        };
        let sums = written.sums.to_bytes();
        manifest.sums_crc64 = Some(checksum::of(&sums));
        folder.write(SUMS, |file| file.write_all(&sums))?;
        if let (Some(base), Some(runs)) = (base, runs) {
            let runs = image::runs_to_bytes(&runs);
            folder.write(RUNS, |file| file.write_all(&runs))?;
            let (runs_crc64, pages_bytes) = (checksum::of(&runs), written.bytes);
            manifest.parent = Some(Parent { runs_crc64, pages_bytes, ..base.parent });
        }
        let mut outside = Outside::default();
        for disk in disks {
            manifest.disks.push(disk.copy(&mut folder, &mut outside)?);
        }
        manifest.files = host_files::measure(vm.config(), &manifest.disks)?;
        if track {
            vm.tracking.start(&vm.handle, &vm.memory)?;
        }
        let report = SnapshotReport {
            id: manifest.id.clone(),
            paused_us: None,
            total_us: 0,
            memory: method,
            memory_bytes: written.bytes,
            disks: manifest.disks.clone(),
        };
        Ok(Frozen { folder, outside, manifest, report, started })
    }
}

impl Frozen {
    /// Completes the folder, which makes it a snapshot. The guest, which has stood still for
    /// `paused`, may run.
    pub fn finish(mut self, paused: Option<Duration>) -> Result<SnapshotReport, SnapshotError> {
        self.folder.sync()?;
        let manifest = &self.manifest;
        self.folder.write(MANIFEST, |file| file.write_all(&manifest.to_bytes()?))?;
        self.folder.complete()?;
        self.outside.keep();
        let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let (paused_us, total_us) = (paused.map(micros), micros(self.started.elapsed()));
        Ok(SnapshotReport { paused_us, total_us, ..self.report })
    }
}

fn now() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_nanos()).unwrap_or(0)
}

impl Base {
    /// Reads what a VM shall be saved as a difference to.
    fn open(dir: &std::path::Path, vm: &Vm) -> Result<Self, SnapshotError> {
        let manifest = load::manifest(dir).map_err(SnapshotError::Base)?;
        let (found, here) = (manifest.memory_bytes, vm.config().memory.bytes());
        if found != here {
            let dir = dir.display().to_string();
            return Err(SnapshotError::BaseSize { dir, found, here });
        }
        let memory = match &manifest.parent {
            Some(_) => None,
            None => {
                let path = dir.join(MEMORY);
                let file = load::open(&path).and_then(|file| {
                    load::expect_size(&path, &file, found)?;
                    Ok(file)
                });
                Some(file.map_err(SnapshotError::Base)?)
            }
        };
        let dir = std::path::absolute(dir).unwrap_or_else(|_| dir.to_owned());
        let parent = Parent { id: manifest.id, dir, runs_crc64: String::new(), pages_bytes: 0 };
        Ok(Self { parent, memory })
    }
}

impl Vm {
    /// There is a snapshot `id` of the instant that was frozen last.
    pub fn saved(&mut self, id: &str) {
        self.tracking.succeeded(id.to_owned(), &self.memory);
    }

    fn write_whole(&self, folder: &mut NewFolder) -> Result<SavedMemory, SnapshotError> {
        let occupied = self.occupied();
        let written =
            folder.write(MEMORY, |file| image::write_whole(file, &self.memory, &occupied))?;
        Ok(SavedMemory { method: MemoryMethod::Whole, written, runs: None })
    }

    /// The pages that may hold something else than zeros.
    fn occupied(&self) -> PageSet {
        let bytes = self.config().memory.bytes();
        // What a VM was made of is in its mapping's file. If there is none it is somewhere that the
        // page map does not tell.
        if self.tracking.is_restored() && !pages::are_of_image(&self.memory) {
            return PageSet::all(bytes);
        }
        pages::occupied(&self.memory).unwrap_or_else(|error| {
            tracing::warn!(%error, "all of memory is read, since the page map cannot be");
            PageSet::all(bytes)
        })
    }

    fn write_difference(
        &self,
        folder: &mut NewFolder,
        base: &Base,
    ) -> Result<SavedMemory, SnapshotError> {
        let id = &base.parent.id;
        // What vhost-net writes is not in the log; it is in the page map.
        let complete = self.unlogged_writers().is_empty();
        let logged = self.tracking.logged_since(id).filter(|_| complete);
        let (pages, compared, method) = if let Some(logged) = logged {
            (logged.clone(), None, MemoryMethod::Log)
        } else if let Some(mapped) = self.tracking.mapped_since(id, &self.memory) {
            (mapped, None, MemoryMethod::Mapping)
        } else if let Some(memory) = &base.memory {
            let mut pages = self.occupied();
            let bytes = self.config().memory.bytes();
            // What is zeros here may not be there.
            if pages.insert_extents(memory, bytes).is_err() {
                pages = PageSet::all(bytes);
            }
            (pages, Some(memory), MemoryMethod::Compared)
        } else {
            let dir = base.parent.dir.display().to_string();
            return Err(SnapshotError::BaseIsDifference { dir });
        };
        let (runs, written) = folder
            .write(PAGES, |file| image::write_difference(file, &self.memory, &pages, compared))?;
        Ok(SavedMemory { method, written, runs: Some(runs) })
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
