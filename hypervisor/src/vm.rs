//! A VM that has been built: start, pause, resume, and its end when it is dropped.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use devices::executor::Executor;
use devices::ids::DeviceId;
use devices::irq::Interrupt;
use devices::memory::Memory;
use devices::metrics::Meter;
use devices::virtio::balloon::BalloonHandle;
use devices::virtio::transport::Transport;
use devices::virtio::vsock::VsockHandle;
use guest_protocol::Hello;
use kvm_bindings::kvm_cpuid_entry2;

use crate::builder::BuildError;
use crate::cards::CardInfo;
use crate::config::{ConfigError, DiskConfig, VmConfig};
use crate::console::ConsoleLog;
use crate::disks::{DiskInfo, OpenedDisk, RunningDisk};
use crate::doorbells::Doorbells;
use crate::generation::{Generation, GenerationError};
use crate::kvm::VmHandle;
use crate::metrics::{Family, Gathering};
use crate::pci_slots::PciSlots;
use crate::shares::{AllowError, RunningShare, ShareInfo};
use crate::snapshot::paging::Pager;
use crate::snapshot::prefetch::{Prefetch, PrefetchInfo};
use crate::snapshot::record::Origin;
use crate::snapshot::save::{Frozen, Job, SnapshotError};
use crate::snapshot::tracking::Tracking;
use crate::state::VmState;
use crate::vcpu::{Vcpu, VcpuError};
use crate::wiring::{Legacy, PlacedPmem};

/// Why a device was not plugged or unplugged. Nothing has changed.
#[derive(Debug, thiserror::Error)]
pub enum PlugError {
    /// Only PCI has slots.
    #[error("this VM has no slots for devices; start it with --transport pci")]
    NoSlots,
    /// The device makes no sense beside the others.
    #[error(transparent)]
    Config(ConfigError),
    /// Descriptors of somebody else.
    #[error(
        "fd={0:?} cannot be plugged: the numbers mean other files in the VM's process; use tap=NAME"
    )]
    Descriptors(Vec<i32>),
    /// A device that the guest, or its host, cannot do without.
    #[error("{0:?} is neither a disk nor a network card of this VM, so it cannot be unplugged")]
    NotPluggable(String),
    /// A backend in another process cannot see guest RAM.
    #[error(
        "guest memory is not shared, which vhost-user device {0:?} needs; start the VM with one of \
         these, then more can be plugged"
    )]
    PrivateMemory(String),
    /// A device that could not be unplugged again.
    #[error("a device that is plugged needs a name; add id=NAME")]
    NoName,
    /// The device could not be made, or is not there.
    #[error(transparent)]
    Device(#[from] BuildError),
}

/// A device on the bus, shared with it.
pub type SharedTransport = Arc<Mutex<dyn Transport>>;

/// A VM. The fields are dropped in this order: first the vCPUs, so that nothing calls a device,
/// then the devices, then the loop that runs them, then the VM in the kernel and its memory.
pub struct Vm {
    pub(crate) vcpus: Vec<Vcpu>,
    /// The features that each was given. KVM does not tell them back as they were on every host.
    pub(crate) cpuid: Vec<Vec<kvm_cpuid_entry2>>,
    pub(crate) transports: Vec<(DeviceId, SharedTransport)>,
    /// What counts beside vCPUs and virtio devices: its kind, its name, its counts.
    pub(crate) meters: Vec<(&'static str, &'static str, Meter)>,
    pub(crate) doorbells: Doorbells,
    pub(crate) legacy: Legacy,
    pub(crate) pci: Option<PciSlots>,
    /// After the devices, which run in their threads.
    pub(crate) disks: Vec<RunningDisk>,
    pub(crate) shares: Vec<RunningShare>,
    /// What is told of the network cards.
    pub(crate) cards: Vec<CardInfo>,
    /// Runs all other devices.
    pub(crate) executor: Executor,
    pub(crate) handle: Arc<VmHandle>,
    pub(crate) memory: Memory,
    pub(crate) config: VmConfig,
    pub(crate) console: ConsoleLog,
    pub(crate) power_button: Interrupt,
    pub(crate) generation: Generation,
    pub(crate) vsock: VsockHandle,
    pub(crate) balloon: Option<BalloonHandle>,
    /// Here so that it outlives the memory slots.
    pub(crate) _pmem: Vec<PlacedPmem>,
    /// Brings guest memory in, until nobody needs it any more.
    pub(crate) pager: Option<Pager>,
    /// Brings some of it in sooner.
    pub(crate) prefetch: Option<Prefetch>,
    /// What it was restored from.
    pub(crate) origin: Option<Origin>,
    pub(crate) state: VmState,
    pub(crate) tracking: Tracking,
}

impl Vm {
    /// Where it is in its life.
    pub fn state(&self) -> VmState {
        self.state
    }

    /// What it was made from.
    pub fn config(&self) -> &VmConfig {
        &self.config
    }

    /// Its serial console's output.
    pub fn console(&self) -> &ConsoleLog {
        &self.console
    }

    /// Connections to the guest.
    pub fn vsock(&self) -> &VsockHandle {
        &self.vsock
    }

    /// The balloon, if there is one.
    pub fn balloon(&self) -> Option<&BalloonHandle> {
        self.balloon.as_ref()
    }

    /// Guest RAM.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Presses the ACPI power button.
    pub fn press_power_button(&self) {
        self.power_button.raise();
    }

    /// Gives the machine another generation id, which tells the guest that what it knows may no
    /// longer be known to itself alone: after it was restored, or copied. Legal while running or
    /// paused.
    pub fn renew_generation(&self) -> Result<(), GenerationError> {
        self.generation.renew()
    }

    /// Lets the guest run for the first time. Legal in [`VmState::Created`].
    pub fn start(&mut self) -> Result<(), VcpuError> {
        self.run_vcpus()?;
        self.state = VmState::Running;
        self.connect_doorbells();
        Ok(())
    }

    /// Does nothing but the first time.
    fn connect_doorbells(&self) {
        if let Err(error) = self.doorbells.start(self.handle.clone()) {
            tracing::warn!(%error, "doorbells work through exits");
        }
    }

    fn run_vcpus(&self) -> Result<(), VcpuError> {
        self.vcpus.iter().try_for_each(Vcpu::run)
    }

    /// Stops everything: vCPUs first, so that no new work comes, then the devices, which finish
    /// what they have. Legal while running. Goes on when the result is dropped, unless kept.
    pub fn pause(&mut self) -> Result<Paused<'_>, VcpuError> {
        for vcpu in &self.vcpus {
            vcpu.ask_to_park()?;
        }
        for vcpu in &self.vcpus {
            vcpu.wait()?;
        }
        for (_, transport) in &self.transports {
            lock(transport).lifecycle().pause();
        }
        self.state = VmState::Paused;
        Ok(Paused { vm: Some(self) })
    }

    /// Goes on after a pause that was kept, or for the first time after a restore: devices before vCPUs,
    /// so that the first notification finds somebody. Legal while paused.
    pub fn resume(&mut self) -> Result<(), VcpuError> {
        for (_, transport) in &self.transports {
            lock(transport).lifecycle().resume();
        }
        self.run_vcpus()?;
        self.state = VmState::Running;
        // Not before: the guest's first instruction does not wait for it.
        if let Some(prefetch) = &mut self.prefetch {
            prefetch.start();
        }
        self.connect_doorbells();
        Ok(())
    }

    /// How far the prefetch of hot pages is, if there is one.
    pub fn prefetch(&self) -> Option<PrefetchInfo> {
        self.prefetch.as_ref().map(|prefetch| prefetch.progress().info())
    }

    /// Nobody wants hot pages any more: what they would be good for is over, or memory is short. Any
    /// time; waits for nobody.
    pub fn cancel_prefetch(&self) {
        if let Some(prefetch) = &self.prefetch {
            prefetch.progress().cancel();
        }
    }

    /// The devices, by name.
    pub fn devices(&self) -> Vec<String> {
        self.transports.iter().map(|(id, _)| id.to_string()).collect()
    }

    /// What vCPUs, devices and buses have counted, from the making of each on. Waits for nothing
    /// but a register access that is under way.
    pub fn metrics(&self) -> Vec<Family> {
        let mut gathering = Gathering::default();
        gathering.add_devices(&self.transports);
        for (kind, name, meter) in &self.meters {
            gathering.add(kind, name, meter);
        }
        for vcpu in &self.vcpus {
            gathering.add("vcpu", &vcpu.id().to_string(), &vcpu.meter());
        }
        gathering.families()
    }

    /// Its shares, and what their servers say. Waits a second at most for each.
    pub fn shares(&self) -> Vec<ShareInfo> {
        self.shares.iter().map(RunningShare::info).collect()
    }

    /// See [`crate::shares::allow`].
    pub fn allow_shares(&self, allowed: Option<&[std::path::PathBuf]>) -> Result<(), AllowError> {
        crate::shares::allow(&self.shares, allowed)
    }

    /// Its disks, and which engine each has.
    pub fn disks(&self) -> Vec<DiskInfo> {
        self.disks.iter().map(|disk| disk.info.clone()).collect()
    }

    /// Its network cards, and who moves the frames of each.
    pub fn cards(&self) -> Vec<CardInfo> {
        self.cards.clone()
    }

    /// Devices that write to guest memory behind the backs of KVM and this process, so that what has
    /// changed since some moment is not known of the VM.
    pub fn unlogged_writers(&self) -> Vec<String> {
        let unlogged = |transport| !lock(transport).lifecycle().writes_are_logged();
        let writers = self.transports.iter().filter(|(_, transport)| unlogged(transport));
        writers.map(|(id, _)| id.to_string()).collect()
    }

    pub(crate) fn slots(&self) -> Result<PciSlots, PlugError> {
        self.pci.clone().ok_or(PlugError::NoSlots)
    }

    /// Plugs a disk while the guest runs. Legal while running, with PCI.
    pub fn add_disk(&mut self, disk: &DiskConfig) -> Result<(), PlugError> {
        let slots = self.slots()?;
        self.check_plugged(&disk.id, disk.vhost_user)?;
        let mut config = self.config.clone();
        config.disks.push(disk.clone());
        config.validate().map_err(PlugError::Config)?;
        let (running, device) = OpenedDisk::open(disk, self.config.cpus)?.into_device();
        let id = running.id.clone();
        let (slot, transport) = slots.attach(&id, device)?;
        self.transports.push((id, transport));
        self.disks.push(running);
        self.config = config;
        slots.announce(slot);
        Ok(())
    }

    /// Asks the guest to let go of a device; [`Vm::collect_ejected`] takes it out when it has.
    /// Legal while running, with PCI.
    pub fn remove_device(&mut self, id: &str) -> Result<(), PlugError> {
        let slots = self.slots()?;
        if !self.can_be_unplugged(id) {
            return Err(PlugError::NotPluggable(id.to_owned()));
        }
        Ok(slots.ask_to_eject(&DeviceId::new(id)).map_err(BuildError::Slot)?)
    }

    /// Takes out what the guest has let go.
    pub fn collect_ejected(&mut self) {
        let Some(slots) = self.pci.clone() else { return };
        for id in slots.take_ejected() {
            if let Err(error) = slots.remove(&id) {
                tracing::warn!(%error, "device not taken out");
            }
            for (_, transport) in self.transports.extract_if(.., |(other, _)| other == &id) {
                let mut transport = lock(&transport);
                transport.lifecycle().pause();
                if !transport.lifecycle().writes_are_logged() {
                    self.tracking.forget_log();
                }
            }
            self.config.disks.retain(|disk| disk.id != id.as_str());
            self.config.net.retain(|card| card.id != id.as_str());
            self.disks.retain(|disk| disk.id != id);
            self.cards.retain(|card| card.id != id.as_str());
            tracing::info!(device = %id, "unplugged");
        }
    }

    /// The guest has ended: nothing of it moves from here on.
    pub fn end(&mut self) {
        self.cancel_prefetch();
        self.vcpus.clear();
        for (_, transport) in &self.transports {
            lock(transport).lifecycle().pause();
        }
        self.state = VmState::Ended;
    }
}

pub(crate) fn lock(transport: &SharedTransport) -> MutexGuard<'_, dyn Transport + 'static> {
    transport.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A VM that stands still. Dropping it lets the VM go on.
pub struct Paused<'a> {
    vm: Option<&'a mut Vm>,
}

impl Paused<'_> {
    /// Takes the instant for a snapshot.
    pub fn freeze(&mut self, job: Job, hello: Option<&Hello>) -> Result<Frozen, SnapshotError> {
        // Always there: only the end of this value takes it.
        self.vm.as_mut().map_or(Err(SnapshotError::Ended), |vm| job.freeze(vm, hello))
    }

    /// Leaves the VM paused.
    pub fn keep(mut self) {
        self.vm = None;
    }
}

impl Drop for Paused<'_> {
    fn drop(&mut self) {
        if let Some(vm) = self.vm.take()
            && let Err(error) = vm.resume()
        {
            tracing::error!(%error, "the VM does not go on after a pause");
        }
    }
}
