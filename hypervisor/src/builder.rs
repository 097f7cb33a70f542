//! The one place where a VM is wired together.
//!
//! Files are opened and checked first, so that a mistake costs nothing. Then two things happen at
//! once: KVM makes the VM, its interrupt controllers and vCPUs (the kernel waits for RCU there,
//! several times), while memory is mapped, the kernel is copied into it, and the devices are made.

use std::io;
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
use devices::virtio::net::{NetConfig, NetError, Tap, TapError};
use devices::virtio::pmem::{PmemBacking, PmemError};
use devices::virtio::vhost::user::VhostUserError;
use devices::virtio::vsock::{VsockError, VsockHandle};
use kvm_bindings::{CpuId, Msrs};
use kvm_ioctls::VcpuFd;

use crate::boot::entry::{self, Entry};
use crate::boot::kernel::{InitrdFile, KernelError, KernelFile};
use crate::boot::linux::BootInfo;
use crate::boot::tables::{self, Description, TablesError};
use crate::config::{ConfigError, TransportKind, VmConfig};
use crate::console::ConsoleLog;
use crate::disks::OpenedDisk;
use crate::event::Events;
use crate::generation::{Generation, GenerationError};
use crate::kvm::{Host, KvmError, VmHandle};
use crate::memory::{MemoryError, Sharing};
use crate::state::VmState;
use crate::trace::{Ladder, step};
use crate::vcpu::{Machine, Vcpu, VcpuError, install_kick_signal};
use crate::vm::Vm;
use crate::wiring::{LateHandle, PlacedPmem, Wiring, console};
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
    kernel: KernelFile,
    initrd: Option<InitrdFile>,
    disks: Vec<OpenedDisk>,
    pmem: Vec<(DeviceId, PmemBacking)>,
    net: Vec<(NetConfig, Vec<Tap>)>,
}

impl Files {
    fn open(config: &VmConfig) -> Result<Self, BuildError> {
        let kernel = KernelFile::open(&config.kernel)?;
        let initrd = config.initrd.as_deref().map(InitrdFile::open).transpose()?;
        let disks = config.all_disks();
        let disks = disks.iter().map(|disk| OpenedDisk::open(disk, config.cpus));
        let disks = disks.collect::<Result<_, _>>()?;
        let mut pmem = Vec::new();
        for config in config.all_pmem() {
            let backing = PmemBacking::open(&config.path, config.read_only)?;
            pmem.push((DeviceId::new(config.id), backing));
        }
        let mut net = Vec::new();
        for option in config.all_net() {
            let card = option.config(DeviceId::new(option.id.clone()));
            net.push((card, option.open()?));
        }
        Ok(Self { kernel, initrd, disks, pmem, net })
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
}

/// The part of the VM that is in the kernel.
struct InKernel {
    handle: VmHandle,
    vcpus: Vec<VcpuFd>,
    cpuid: CpuId,
}

/// Builds a VM whose vCPUs are parked.
pub fn build(config: &VmConfig, observers: &Observers) -> Result<Vm, BuildError> {
    config.validate()?;
    let files = Files::open(config)?;
    install_kick_signal()?;
    let (memory_to_kvm, memory_for_kvm) = sync_channel(1);
    let ladder = &observers.ladder;
    std::thread::scope(|scope| {
        let cpus = config.cpus;
        let in_kernel = std::thread::Builder::new()
            .name("kvm".to_owned())
            .spawn_scoped(scope, move || make_in_kernel(cpus, &memory_for_kvm, ladder))
            .map_err(|source| BuildError::Host { what: "thread", source })?;
        let sharing = if config.shares_memory() { Sharing::Shared } else { Sharing::Private };
        let memory = memory::mapped(config.memory.bytes(), sharing)?;
        ladder.mark(step::MEMORY_MAPPED);
        // Fails only if KVM did, which is told when that thread is joined.
        let _ = memory_to_kvm.send(memory.clone());
        drop(memory_to_kvm);
        let parts = Parts::make(config, files, &memory, observers)?;
        let in_kernel = in_kernel.join().map_err(|_| BuildError::Lost)??;
        parts.join(config, in_kernel, observers, &memory)
    })
}

fn make_in_kernel(
    cpus: u32,
    memory: &Receiver<Memory>,
    ladder: &Ladder,
) -> Result<InKernel, BuildError> {
    let host = Host::open()?;
    host.check_capabilities()?;
    let handle = host.create_vm()?;
    handle.create_irqchip()?;
    ladder.mark(step::VM_CREATED);
    let cpuid = cpu::supported(host.kvm())?;
    let vcpus = (0..cpus).map(|id| handle.create_vcpu(id)).collect::<Result<_, _>>()?;
    // Not sent when mapping it failed, which the other side reports.
    let memory = memory.recv().map_err(|_| BuildError::Lost)?;
    handle.map_memory(&memory)?;
    Ok(InKernel { handle, vcpus, cpuid })
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
    entry: Entry,
    handle: LateHandle,
}

impl<'a> Parts<'a> {
    fn make(
        config: &VmConfig,
        files: Files,
        memory: &'a Memory,
        observers: &Observers,
    ) -> Result<Self, BuildError> {
        let kernel = files.kernel.load(memory, config.boot_protocol)?;
        let initrd = files.initrd.map(|file| file.load(memory, kernel.end)).transpose()?;
        observers.ladder.mark(step::KERNEL_LOADED);

        let executor = Executor::spawn("vmm-loop")?;
        let console = console(config)?;
        let handle = LateHandle::default();
        let mut wiring =
            Wiring::new(config, memory, executor.handle(), handle.clone(), &observers.events)?;
        wiring.legacy_devices(observers, console.clone())?;
        let power_button = wiring.line(layout::EVENT_GSI)?;
        let generation = Generation::new(memory, wiring.line(layout::GENERATION_GSI)?)?;
        let vsock = wiring.virtio_devices(config, files.disks)?;
        wiring.console(config, &console)?;
        wiring.net(files.net)?;
        let balloon = wiring.balloon(config)?;
        let pmem = wiring.pmem(config, files.pmem)?;

        let description = Description {
            cpus: config.cpus,
            virtio: &wiring.described(),
            pci: config.transport == TransportKind::Pci,
        };
        let rsdp = tables::write(memory, &description)?;
        let boot =
            BootInfo { cmdline: &config.cmdline(), initrd, rsdp, ram: config.memory.bytes() };
        boot.write(memory, &kernel)?;
        let entry =
            if observers.stamp_entry { kernel.entry.stamped(memory)? } else { kernel.entry };
        Ok(Self {
            wiring,
            executor,
            console,
            power_button,
            generation,
            vsock,
            balloon,
            pmem,
            entry,
            handle,
        })
    }

    /// Brings both halves together.
    fn join(
        self,
        config: &VmConfig,
        in_kernel: InKernel,
        observers: &Observers,
        memory: &Memory,
    ) -> Result<Vm, BuildError> {
        let handle = Arc::new(in_kernel.handle);
        for (gsi, event) in &self.wiring.lines {
            handle.connect_interrupt(*gsi, event)?;
        }
        let ram_slots = layout::ram_regions(config.memory.bytes()).len() as u32;
        for (slot, pmem) in (ram_slots..).zip(&self.pmem) {
            handle.map_pmem(slot, pmem)?;
        }
        // Was empty: this is the only place that sets it.
        let _ = self.handle.set(handle.clone());
        let machine = Machine {
            pio: self.wiring.pio,
            mmio: self.wiring.mmio,
            events: observers.events.clone(),
            ladder: observers.ladder.clone(),
        };
        let mut vcpus = Vec::with_capacity(in_kernel.vcpus.len());
        for (id, fd) in (0..).zip(in_kernel.vcpus) {
            let leaves = cpu::leaves(&in_kernel.cpuid, id, config.cpus);
            let boot_entry = (id == 0).then_some(self.entry);
            set_up_vcpu(&fd, &leaves, boot_entry, memory)?;
            vcpus.push(Vcpu::spawn(id, fd, machine.clone())?);
        }
        Ok(Vm {
            vcpus,
            transports: self.wiring.transports,
            meters: self.wiring.meters,
            disks: self.wiring.disks,
            doorbells: self.wiring.doorbells,
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
            state: VmState::Created,
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
