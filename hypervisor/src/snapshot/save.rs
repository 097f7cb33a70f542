//! Writes a VM that stands still into a directory: all of it or nothing.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::PoisonError;
use std::time::{SystemTime, UNIX_EPOCH};

use devices::memory::{Bytes, GuestAddress, Memory};
use devices::snapshot::SaveError;
use guest_protocol::Hello;
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};

use super::host_files::{self, HostFileError};
use super::machine::MachineState;
use super::manifest::Manifest;
use super::vcpu::VcpuState;
use super::{MANIFEST, MEMORY, STATE};
use crate::config::VmConfig;
use crate::kvm::KvmError;
use crate::vcpu::VcpuError;
use crate::vm::{Vm, lock};

/// Why there is no snapshot. Nothing is left of it, and the VM is as it was.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// Somebody else's.
    #[error("{} exists; choose another name, or remove it", .0.display())]
    Exists(PathBuf),
    /// Not something with a parent.
    #[error("{} is no name for a new folder", .0.display())]
    Name(PathBuf),
    /// The host refuses.
    #[error("{} cannot be written: {source}", path.display())]
    Write {
        /// The file or folder.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// What would be lost.
    #[error(
        "{0:?} cannot be saved: what the guest has written to it is in memory of its own; use ro"
    )]
    WritablePmem(String),
    /// What another process knows.
    #[error(
        "a VM with vhost-user disks cannot be saved yet: their backends have state of their own"
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
    /// Guest memory is not there.
    #[error("guest memory cannot be read: {0}")]
    Memory(#[source] vm_memory::GuestMemoryError),
    /// A file of the VM is gone.
    #[error(transparent)]
    Files(#[from] HostFileError),
    /// KVM does not tell its state.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// A vCPU is gone.
    #[error(transparent)]
    Vcpu(#[from] VcpuError),
}

/// Bytes of memory that are looked at and written at a time.
const CHUNK: usize = 1 << 20;
/// What is left out if it is all zeros.
const PAGE: usize = 4096;
static ZEROS: [u8; PAGE] = [0; PAGE];

impl Vm {
    /// Writes the VM, which must be paused, into the folder `dir`, which must not exist. `hello` is
    /// what the agent has said.
    pub fn snapshot(&self, dir: &Path, hello: Option<&Hello>) -> Result<(), SnapshotError> {
        if let Some(pmem) = self.config().all_pmem().into_iter().find(|pmem| !pmem.read_only) {
            return Err(SnapshotError::WritablePmem(pmem.id));
        }
        if self.config().shares_memory() {
            return Err(SnapshotError::Shared);
        }
        let folder = NewFolder::make(dir)?;
        let state = self.machine_state(hello)?.to_bytes().map_err(device("the machine"))?;
        folder.write(STATE, |file| file.write_all(&state))?;
        write_memory(self.memory(), &folder)?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let now = u64::try_from(now.as_nanos()).unwrap_or(0);
        let mut manifest = Manifest::new(absolute(self.config()), now, &state);
        manifest.files = host_files::measure(self.config())?;
        folder.write(MANIFEST, |file| file.write_all(&manifest.to_bytes()?))?;
        folder.complete()
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
    for path in disks.chain(pmem).chain(other).chain([&mut config.kernel]) {
        if let Ok(absolute) = std::path::absolute(&*path) {
            *path = absolute;
        }
    }
    config
}

/// A folder under a preliminary name. Gone when it is dropped before it is complete.
struct NewFolder {
    preliminary: PathBuf,
    path: PathBuf,
    complete: bool,
}

impl NewFolder {
    fn make(path: &Path) -> Result<Self, SnapshotError> {
        let Some(name) = path.file_name() else {
            return Err(SnapshotError::Name(path.to_owned()));
        };
        let mut preliminary = name.to_owned();
        preliminary.push(".tmp");
        let preliminary = path.with_file_name(preliminary);
        if path.symlink_metadata().is_ok() {
            return Err(SnapshotError::Exists(path.to_owned()));
        }
        match DirBuilder::new().mode(0o700).create(&preliminary) {
            Ok(()) => Ok(Self { preliminary, path: path.to_owned(), complete: false }),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                Err(SnapshotError::Exists(preliminary))
            }
            Err(source) => Err(SnapshotError::Write { path: preliminary, source }),
        }
    }

    fn write(
        &self,
        name: &str,
        content: impl FnOnce(&mut File) -> io::Result<()>,
    ) -> Result<(), SnapshotError> {
        let path = self.preliminary.join(name);
        let mut options = OpenOptions::new();
        let mut open = || options.write(true).create_new(true).mode(0o600).open(&path);
        let written = open().and_then(|mut file| {
            content(&mut file)?;
            file.sync_all()
        });
        written.map_err(|source| SnapshotError::Write { path, source })
    }

    fn complete(mut self) -> Result<(), SnapshotError> {
        let failed = |source| SnapshotError::Write { path: self.path.clone(), source };
        let sync = |path: &Path| File::open(path).and_then(|folder| folder.sync_all());
        sync(&self.preliminary).map_err(failed)?;
        // An empty folder that came in the meantime would be replaced; anything else is not.
        fs::rename(&self.preliminary, &self.path).map_err(failed)?;
        self.complete = true;
        let parent = self.path.parent().filter(|parent| !parent.as_os_str().is_empty());
        if let Err(error) = sync(parent.unwrap_or(Path::new("."))) {
            tracing::warn!(%error, "the snapshot's name may not survive a crash of the host");
        }
        Ok(())
    }
}

impl Drop for NewFolder {
    fn drop(&mut self) {
        if !self.complete
            && let Err(error) = fs::remove_dir_all(&self.preliminary)
        {
            tracing::warn!(%error, folder = %self.preliminary.display(), "not removed");
        }
    }
}

/// Writes guest RAM, one region after the other; pages of zeros become holes.
fn write_memory(memory: &Memory, folder: &NewFolder) -> Result<(), SnapshotError> {
    let mut failure = None;
    let written = folder.write(MEMORY, |file| {
        file.set_len(crate::memory::size(memory))?;
        let mut buffer = vec![0; CHUNK];
        let mut offset = 0;
        for region in memory.iter() {
            let (start, len) = (region.start_addr().0, region.len());
            for at in (0..len).step_by(CHUNK) {
                let size = usize::try_from(len - at).unwrap_or(CHUNK).min(CHUNK);
                let chunk = buffer.get_mut(..size).unwrap_or_default();
                if let Err(error) = memory.read_slice(chunk, GuestAddress(start + at)) {
                    failure = Some(error);
                    return Ok(());
                }
                write_pages(file, chunk, offset + at)?;
            }
            offset += len;
        }
        Ok(())
    });
    failure.map_or(written, |error| Err(SnapshotError::Memory(error)))
}

/// Writes the runs of pages that are not all zeros.
fn write_pages(file: &File, chunk: &[u8], offset: u64) -> io::Result<()> {
    let is_zero = |page: &[u8]| ZEROS.get(..page.len()) == Some(page);
    let mut pages = chunk.chunks(PAGE).enumerate().peekable();
    while let Some((first, page)) = pages.next() {
        if is_zero(page) {
            continue;
        }
        let mut end = first + 1;
        while pages.next_if(|(_, page)| !is_zero(page)).is_some() {
            end += 1;
        }
        let run = chunk.get(first * PAGE..chunk.len().min(end * PAGE)).unwrap_or_default();
        file.write_all_at(run, offset + (first * PAGE) as u64)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn memory_comes_back_equal_and_zeros_take_no_room() {
        let root = tempfile::tempdir().unwrap();
        let bytes = 5 << 30;
        let memory = crate::memory::fresh(bytes).unwrap();
        let places = [0x1234, 0x9f_fff0, (3 << 30) - 16, 4 << 30, (6 << 30) - 16];
        for (place, pattern) in places.into_iter().zip(1_u8..) {
            memory.write_slice(&[pattern; 16], GuestAddress(place)).unwrap();
        }
        let folder = NewFolder::make(&root.path().join("s")).unwrap();
        write_memory(&memory, &folder).unwrap();
        folder.complete().unwrap();
        let image = File::open(root.path().join("s").join(MEMORY)).unwrap();
        let metadata = image.metadata().unwrap();
        assert_eq!(metadata.len(), bytes);
        assert!(metadata.blocks() * 512 < 1 << 20, "{} blocks", metadata.blocks());
        let again = crate::memory::from_image(bytes, image).unwrap();
        for (place, pattern) in places.into_iter().zip(1_u8..) {
            let mut read = [0; 17];
            again.read_slice(&mut read[..16], GuestAddress(place)).unwrap();
            assert_eq!(read[..16], [pattern; 16], "{place:#x}");
        }
        // Writes stay in the mapping.
        again.write_slice(&[9; 16], GuestAddress(0x1234)).unwrap();
        let image = File::open(root.path().join("s").join(MEMORY)).unwrap();
        let mut stored = [0; 16];
        image.read_exact_at(&mut stored, 0x1234).unwrap();
        assert_eq!(stored, [1; 16]);
    }

    #[test]
    fn runs_of_pages_are_written_where_they_belong() {
        let file = tempfile::tempfile().unwrap();
        let mut chunk = vec![0; 6 * PAGE + 100];
        for page in [1, 2, 4, 6] {
            chunk[page * PAGE] = page as u8;
        }
        write_pages(&file, &chunk, 0).unwrap();
        let mut read = vec![0; chunk.len()];
        file.read_exact_at(&mut read, 0).unwrap();
        assert_eq!(read, chunk);
        assert_eq!(file.metadata().unwrap().len(), chunk.len() as u64);
    }

    #[test]
    fn what_is_not_complete_is_gone() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("s");
        let folder = NewFolder::make(&path).unwrap();
        folder.write(STATE, |file| file.write_all(b"x")).unwrap();
        assert!(matches!(NewFolder::make(&path), Err(SnapshotError::Exists(_))));
        let full = folder.write(MEMORY, |_| Err(io::ErrorKind::StorageFull.into()));
        assert!(full.unwrap_err().to_string().contains("memory cannot be written"));
        drop(folder);
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
    }

    #[test]
    fn nothing_is_replaced() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("s");
        fs::write(&path, "mine").unwrap();
        assert!(matches!(NewFolder::make(&path), Err(SnapshotError::Exists(_))));
        for name in ["/", "..", "/nonexistent/folder"] {
            assert!(NewFolder::make(Path::new(name)).is_err(), "{name}");
        }
    }
}
