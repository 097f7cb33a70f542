//! The one place where a VM is wired together.
//!
//! Files are opened and checked first, so that a mistake costs nothing. Then two things happen at
//! once: KVM makes the VM, its interrupt controllers and vCPUs (the kernel waits for RCU there,
//! several times), while memory is mapped, the kernel is copied into it, and the devices are made. A
//! guest that goes on gets the state of its vCPUs and interrupt controllers on the first side, that of
//! its devices on the second.

use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};

use devices::bus::BusError;
use devices::executor::{Executor, ExecutorError};
use devices::ids::DeviceId;
use devices::irq::Interrupt;
use devices::memory::Memory;
use devices::pci::root::SlotError;
use devices::virtio::StartError;
use devices::virtio::balloon::BalloonHandle;
use devices::virtio::block::{BlockError, DiskError};
use devices::virtio::fs::FsError;
use devices::virtio::net::{NetError, TapError};
use devices::virtio::pmem::{PmemBacking, PmemError};
use devices::virtio::vhost::user::VhostUserError;
use devices::virtio::vsock::{VsockError, VsockHandle};
use kvm_bindings::{CpuId, Msrs};
use kvm_ioctls::VcpuFd;

use crate::boot::entry::{self, Entry};
use crate::boot::kernel::{InitrdFile, KernelError, KernelFile, LoadedKernel};
use crate::boot::linux::BootInfo;
use crate::boot::tables::{self, Description, TablesError};
use crate::cards::OpenedCard;
use crate::config::{ConfigError, TransportKind, VmConfig};
use crate::console::{ConsoleLog, ConsoleSink};
use crate::disks::OpenedDisk;
use crate::event::Events;
use crate::generation::{Generation, GenerationError};
use crate::kvm::{Host, KvmError, VmHandle};
use crate::memory::{MemoryError, Sharing};
use crate::snapshot::load::Saved;
use crate::snapshot::machine::MachineState;
use crate::snapshot::paging::{self, Loaded, Lost, MemoryMode, PagingError};
use crate::snapshot::prefetch::{Plan, Prefetch};
use crate::snapshot::record::Origin;
use crate::snapshot::restore::{ApplyError, KernelState, Records};
use crate::snapshot::tracking::Tracking;
use crate::state::VmState;
use crate::trace::{Ladder, step};
use crate::vcpu::{Machine, Vcpu, VcpuError, install_kick_signal};
use crate::vm::Vm;
use crate::wiring::{LateHandle, Legacy, PlacedPmem, Wiring, console, place_pmem};
use crate::{cpu, layout, memory};

/// Why a VM could not be built. Nothing is left behind.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "each wraps the error of one step, which says it all")]
pub enum BuildError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Kernel(#[from] KernelError),
    #[error(transparent)]
    Disk(#[from] DiskError),
    #[error(transparent)]
    Block(#[from] BlockError),
    #[error("disk {id} cannot use its vhost-user backend: {source}")]
    DiskBackend { id: String, source: VhostUserError },
    #[error(transparent)]
    Pmem(#[from] PmemError),
    #[error(transparent)]
    Fs(#[from] FsError),
    #[error(transparent)]
    Tap(#[from] TapError),
    #[error(transparent)]
    Net(#[from] NetError),
    #[error(transparent)]
    Kvm(#[from] KvmError),
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error(transparent)]
    Tables(#[from] TablesError),
    #[error(transparent)]
    Generation(#[from] GenerationError),
    #[error(transparent)]
    Vcpu(#[from] VcpuError),
    #[error(transparent)]
    Executor(#[from] ExecutorError),
    #[error(transparent)]
    Bus(#[from] BusError),
    #[error(transparent)]
    Vsock(#[from] VsockError),
    #[error(transparent)]
    Slot(#[from] SlotError),
    #[error(transparent)]
    Apply(#[from] ApplyError),
    #[error(transparent)]
    Paging(#[from] PagingError),
    #[error("device {id} cannot be made: {source}")]
    Device { id: DeviceId, source: StartError },
    #[error("boot structures cannot be written to guest memory: {0}")]
    Boot(#[from] vm_memory::GuestMemoryError),
    #[error("{what} cannot be made: {source}")]
    Host { what: &'static str, source: io::Error },
    #[error("the thread that talks to KVM has died")]
    Lost,
}

/// The files of a VM, open.
struct Files {
    /// Not for a guest that goes on, which has left its kernel's file behind.
    boot: Option<BootFiles>,
    disks: Vec<OpenedDisk>,
    pmem: Vec<(DeviceId, PmemBacking)>,
    net: Vec<OpenedCard>,
}

/// The files of devices, in their places.
struct DeviceFiles {
    disks: Vec<OpenedDisk>,
    net: Vec<OpenedCard>,
    pmem: Vec<PlacedPmem>,
}

struct BootFiles {
    kernel: KernelFile,
    initrd: Option<InitrdFile>,
}

impl BootFiles {
    fn open(config: &VmConfig) -> Result<Self, BuildError> {
        let kernel = KernelFile::open(&config.kernel)?;
        let initrd = config.initrd.as_deref().map(InitrdFile::open).transpose()?;
        Ok(Self { kernel, initrd })
    }

    fn load(self, memory: &Memory, config: &VmConfig) -> Result<LoadedBoot, BuildError> {
        let kernel = self.kernel.load(memory, config.boot_protocol)?;
        let initrd = self.initrd.map(|file| file.load(memory, kernel.end)).transpose()?;
        Ok(LoadedBoot { kernel, initrd })
    }
}

/// What a guest boots from, in its memory.
struct LoadedBoot {
    kernel: LoadedKernel,
    /// Address and length.
    initrd: Option<(u64, u64)>,
}

impl LoadedBoot {
    /// Writes the tables that the kernel finds the machine by; where the guest starts.
    fn describe(
        self,
        config: &VmConfig,
        wiring: &Wiring<'_>,
        memory: &Memory,
        observers: &Observers,
    ) -> Result<Entry, BuildError> {
        let description = Description {
            cpus: config.cpus,
            virtio: &wiring.described(),
            pci: config.transport == TransportKind::Pci,
        };
        let rsdp = tables::write(memory, &description)?;
        let (cmdline, ram) = (config.cmdline(), config.memory.bytes());
        let boot = BootInfo { cmdline: &cmdline, initrd: self.initrd, rsdp, ram };
        boot.write(memory, &self.kernel)?;
        let entry = self.kernel.entry;
        Ok(if observers.stamp_entry { entry.stamped(memory)? } else { entry })
    }
}

impl Files {
    fn open(config: &VmConfig, boots: bool) -> Result<Self, BuildError> {
        let boot = boots.then(|| BootFiles::open(config)).transpose()?;
        let disks = config.all_disks();
        let disks = disks.iter().map(|disk| OpenedDisk::open(disk, config.cpus));
        let disks = disks.collect::<Result<_, _>>()?;
        let mut pmem = Vec::new();
        for config in config.all_pmem() {
            let backing = PmemBacking::open(&config.path, config.read_only)?;
            pmem.push((DeviceId::new(config.id), backing));
        }
        let net = config.all_net().iter().map(OpenedCard::open).collect::<Result<_, _>>()?;
        Ok(Self { boot, disks, pmem, net })
    }
}

/// What a boot should record, and who hears of its end.
#[derive(Clone, Debug)]
pub struct Observers {
    /// The boot ladder.
    pub ladder: Ladder,
    /// Whether the guest's entry is stamped too, which costs an exit.
    pub stamp_entry: bool,
    /// The control thread.
    pub events: Events,
    /// Where the console is shown, if it is.
    pub console: ConsoleSink,
}

/// The part of the VM that is in the kernel.
struct InKernel {
    handle: VmHandle,
    vcpus: Vec<VcpuFd>,
}

/// Builds a VM whose vCPUs are parked at the start of its kernel.
pub fn build(config: &VmConfig, observers: &Observers) -> Result<Vm, BuildError> {
    build_from(config, observers, None)
}

/// What a VM is restored from.
pub struct Restoration {
    /// The snapshot.
    pub saved: Saved,
    /// Its folder, as an absolute path.
    pub dir: PathBuf,
    /// How its memory comes in.
    pub mode: MemoryMode,
    /// What of it is brought in sooner.
    pub prefetch: Option<Plan>,
    /// Called when it does not any more.
    pub lost: Lost,
}

/// Builds a VM that is paused where the saved one was. `config` is the saved one, or differs from it
/// in what a guest does not see: paths.
pub fn restore(
    config: &VmConfig,
    observers: &Observers,
    from: Restoration,
) -> Result<Vm, BuildError> {
    build_from(config, observers, Some(from))
}

fn build_from(
    config: &VmConfig,
    observers: &Observers,
    from: Option<Restoration>,
) -> Result<Vm, BuildError> {
    config.validate()?;
    if let Some(from) = &from {
        from.saved.state.check_processor()?;
    }
    let files = Files::open(config, from.is_none())?;
    install_kick_signal()?;
    let (memory_to_kvm, memory_for_kvm) = sync_channel(1);
    let ladder = &observers.ladder;
    let (state, image) = from.map(Restoration::divide).unzip();
    let (kernel_state, records) = state.map(MachineState::divide).unzip();
    let kernel_state = kernel_state.as_ref();
    std::thread::scope(|scope| {
        let cpus = config.cpus;
        let in_kernel = std::thread::Builder::new()
            .name("kvm".to_owned())
            .spawn_scoped(scope, move || {
                make_in_kernel(cpus, &memory_for_kvm, kernel_state, ladder)
            })
            .map_err(|source| BuildError::Host { what: "thread", source })?;
        let bytes = config.memory.bytes();
        let sharing = if config.shares_memory() { Sharing::Shared } else { Sharing::Private };
        let (Loaded { memory, pager, prefetch }, tracking, origin) = match image {
            Some(Image { mode, file, plan, lost, tracking, origin }) => {
                (paging::load(&mode, bytes, file, plan, lost)?, tracking, Some(origin))
            }
            None => {
                let memory = memory::mapped(bytes, sharing)?;
                (Loaded { memory, pager: None, prefetch: None }, Tracking::default(), None)
            }
        };
        ladder.mark(step::MEMORY_MAPPED);
        // Fails only if KVM did, which is told when that thread is joined.
        let pmem = place_pmem(config, files.pmem);
        let _ = memory_to_kvm.send((memory.clone(), pmem.clone()));
        drop(memory_to_kvm);
        let devices = DeviceFiles { disks: files.disks, net: files.net, pmem };
        let parts = Parts::make(config, files.boot, devices, (&memory, records), observers)?;
        // Takes a while, for which the other thread has no time.
        let cpuid = cpu::supported(Host::open()?.kvm())?;
        let checked = kernel_state.map(|state| state.check_features(&cpuid)).transpose();
        let in_kernel = in_kernel.join().map_err(|_| BuildError::Lost)?;
        // It says more than what KVM has refused therefore.
        checked?;
        let mut vm = parts.join(config, (in_kernel?, &cpuid), observers, &memory)?;
        (vm.pager, vm.tracking, vm.origin) = (pager, tracking, origin);
        vm.meters.extend(prefetch.as_ref().map(Prefetch::meter));
        vm.prefetch = prefetch;
        if let Some(state) = kernel_state {
            vm.restored(state)?;
        }
        Ok(vm)
    })
}

/// Where the memory of a guest that goes on is.
struct Image {
    mode: MemoryMode,
    file: File,
    plan: Option<Plan>,
    lost: Lost,
    tracking: Tracking,
    origin: Origin,
}

impl Restoration {
    fn divide(self) -> (MachineState, Image) {
        let Self { saved, dir, mode, prefetch: plan, lost } = self;
        let origin = Origin::new(dir, saved.manifest.id.clone(), &mode, plan.is_some());
        let tracking = Tracking::restored_from(saved.manifest.id);
        (saved.state, Image { mode, file: saved.memory, plan, lost, tracking, origin })
    }
}

fn make_in_kernel(
    cpus: u32,
    memory: &Receiver<(Memory, Vec<PlacedPmem>)>,
    state: Option<&KernelState>,
    ladder: &Ladder,
) -> Result<InKernel, BuildError> {
    let host = Host::open()?;
    host.check_capabilities()?;
    let handle = host.create_vm()?;
    // Not sent when mapping it failed, which the other side reports.
    let (memory, pmem) = memory.recv().map_err(|_| BuildError::Lost)?;
    // Before the interrupt controllers: they leave the kernel with something to do after a grace
    // period, and each change of memory slots would wait for the end of that, some milliseconds.
    let ram_slots = handle.map_memory(&memory)?;
    for (slot, pmem) in (ram_slots..).zip(&pmem) {
        handle.map_pmem(slot, pmem)?;
    }
    handle.create_irqchip()?;
    ladder.mark(step::VM_CREATED);
    let vcpus = (0..cpus).map(|id| handle.create_vcpu(id)).collect::<Result<Vec<_>, _>>()?;
    if let Some(state) = state {
        state.apply(&handle, &vcpus)?;
    }
    Ok(InKernel { handle, vcpus })
}

/// The part of the VM that needs no KVM.
struct Parts<'a> {
    wiring: Wiring<'a>,
    executor: Executor,
    console: ConsoleLog,
    power_button: Interrupt,
    generation: Generation,
    vsock: VsockHandle,
    balloon: Option<BalloonHandle>,
    pmem: Vec<PlacedPmem>,
    legacy: Legacy,
    /// Where the guest starts, if it does.
    entry: Option<Entry>,
    handle: LateHandle,
}

impl<'a> Parts<'a> {
    fn make(
        config: &VmConfig,
        boot: Option<BootFiles>,
        files: DeviceFiles,
        (memory, records): (&'a Memory, Option<Records>),
        observers: &Observers,
    ) -> Result<Self, BuildError> {
        let loaded = boot.map(|boot| boot.load(memory, config)).transpose()?;
        observers.ladder.mark(step::KERNEL_LOADED);

        let executor = Executor::spawn("vmm-loop")?;
        let console = console(config, &observers.console)?;
        let handle = LateHandle::default();
        let mut wiring =
            Wiring::new(config, memory, executor.handle(), handle.clone(), &observers.events)?;
        let pci = records.as_ref().and_then(|records| records.pci.as_ref());
        if let (Some(slots), Some(pci)) = (&mut wiring.pci, pci) {
            slots.set_places(pci.places());
        }
        let legacy = wiring.legacy_devices(observers, console.clone())?;
        let power_button = wiring.line(layout::EVENT_GSI)?;
        let generation = Generation::new(memory, wiring.line(layout::GENERATION_GSI)?)?;
        let vsock = wiring.virtio_devices(config, files.disks)?;
        wiring.console(config, &console)?;
        wiring.net(files.net)?;
        wiring.shares(config)?;
        let balloon = wiring.balloon(config)?;
        wiring.pmem(&files.pmem)?;
        let describe = |loaded: LoadedBoot| loaded.describe(config, &wiring, memory, observers);
        let entry = loaded.map(describe).transpose()?;
        if let Some(records) = records {
            records.apply(&legacy, &wiring.transports, wiring.pci.as_ref())?;
        }
        Ok(Self {
            wiring,
            executor,
            console,
            power_button,
            generation,
            vsock,
            balloon,
            pmem: files.pmem,
            legacy,
            entry,
            handle,
        })
    }

    /// Brings both halves together.
    fn join(
        self,
        config: &VmConfig,
        (in_kernel, supported): (InKernel, &CpuId),
        observers: &Observers,
        memory: &Memory,
    ) -> Result<Vm, BuildError> {
        let handle = Arc::new(in_kernel.handle);
        for (gsi, event) in &self.wiring.lines {
            handle.connect_interrupt(*gsi, event)?;
        }
        // Was empty: this is the only place that sets it.
        let _ = self.handle.set(handle.clone());
        let machine = Machine {
            pio: self.wiring.pio,
            mmio: self.wiring.mmio,
            events: observers.events.clone(),
            ladder: observers.ladder.clone(),
        };
        let (mut vcpus, mut cpuid) = (Vec::with_capacity(in_kernel.vcpus.len()), Vec::new());
        for (id, fd) in (0..).zip(in_kernel.vcpus) {
            // Without an entry, it has its state as a whole.
            if let Some(entry) = self.entry {
                let leaves = cpu::leaves(supported, id, config.cpus);
                set_up_vcpu(&fd, &leaves, (id == 0).then_some(entry), memory)?;
                cpuid.push(leaves.as_slice().to_vec());
            }
            vcpus.push(Vcpu::spawn(id, fd, machine.clone())?);
        }
        Ok(Vm {
            vcpus,
            cpuid,
            transports: self.wiring.transports,
            meters: self.wiring.meters,
            disks: self.wiring.disks,
            shares: self.wiring.shares,
            cards: self.wiring.cards,
            doorbells: self.wiring.doorbells,
            legacy: self.legacy,
            pci: self.wiring.pci,
            executor: self.executor,
            handle,
            memory: memory.clone(),
            config: config.named(),
            console: self.console,
            power_button: self.power_button,
            generation: self.generation,
            vsock: self.vsock,
            balloon: self.balloon,
            _pmem: self.pmem,
            pager: None,
            prefetch: None,
            origin: None,
            state: VmState::Created,
            tracking: Tracking::default(),
        })
    }
}

/// Sets a vCPU's state at boot. Only the first has an entry; the others wait for it to wake them.
fn set_up_vcpu(
    fd: &VcpuFd,
    cpuid: &CpuId,
    entry: Option<Entry>,
    memory: &Memory,
) -> Result<(), BuildError> {
    let call = |what| move |source| BuildError::Kvm(KvmError::Call { what, source });
    fd.set_cpuid2(cpuid).map_err(call("set CPU features"))?;
    let msrs = entry::msrs();
    let wanted = msrs.len();
    let msrs = Msrs::from_entries(&msrs).map_err(|_| BuildError::Lost)?;
    let set = fd.set_msrs(&msrs).map_err(call("set model-specific registers"))?;
    if set != wanted {
        tracing::warn!(set, wanted, "KVM does not know all model-specific registers");
    }
    if let Some(entry) = entry {
        let mut sregs = fd.get_sregs().map_err(call("get system registers"))?;
        entry.system_registers(memory, &mut sregs)?;
        fd.set_sregs(&sregs).map_err(call("set system registers"))?;
        fd.set_regs(&entry.registers()).map_err(call("set registers"))?;
    }
    Ok(())
}

#[cfg(test)]
mod golden;
