//! The one place where a VM is wired together.
//!
//! Files are opened and checked first, so that a mistake costs nothing. Then two things happen at
//! once: KVM makes the VM, its interrupt controllers and vCPUs (the kernel waits for RCU there,
//! several times), while memory is mapped, the kernel is copied into it, and the devices are made.

use std::io;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex};

use devices::bus::{Bus, BusDevice, BusError};
use devices::event::Event;
use devices::executor::{Executor, ExecutorError, ExecutorHandle};
use devices::ids::{DeviceId, Gsi};
use devices::irq::Interrupt;
use devices::legacy::debug::DebugPort;
use devices::legacy::i8042::I8042;
use devices::legacy::pvpanic::Pvpanic;
use devices::legacy::serial::{self, Serial};
use devices::legacy::sleep::SleepRegisters;
use devices::memory::Memory;
use devices::virtio::block::{Block, BlockConfig, DiskError, RawFile};
use devices::virtio::mmio::{MmioTransport, REGION_SIZE};
use devices::virtio::rng::{Rng, host_entropy};
use devices::virtio::vsock::{Vsock, VsockConfig, VsockError, VsockHandle};
use devices::virtio::{StartError, VirtioDevice};
use kvm_bindings::{CpuId, Msrs};
use kvm_ioctls::VcpuFd;

use crate::boot::entry::{self, Entry};
use crate::boot::kernel::{InitrdFile, KernelError, KernelFile};
use crate::boot::linux::BootInfo;
use crate::boot::tables::{self, MmioDevice, TablesError};
use crate::config::{ConfigError, Console, VmConfig};
use crate::console::ConsoleLog;
use crate::event::Events;
use crate::kvm::{Host, KvmError, VmHandle};
use crate::memory::MemoryError;
use crate::outcome::Outcome;
use crate::state::VmState;
use crate::trace::{Ladder, step};
use crate::vcpu::{Machine, Vcpu, VcpuError, install_kick_signal};
use crate::vm::{Transport, Vm};
use crate::{cpu, layout, memory};

/// The guest's context id: the only guest on its own vsock device, so it needs no other.
const GUEST_CID: u64 = 3;

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
    Kvm(#[from] KvmError),
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error(transparent)]
    Tables(#[from] TablesError),
    #[error(transparent)]
    Vcpu(#[from] VcpuError),
    #[error(transparent)]
    Executor(#[from] ExecutorError),
    #[error(transparent)]
    Bus(#[from] BusError),
    #[error(transparent)]
    Vsock(#[from] VsockError),
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
    disks: Vec<(DeviceId, RawFile, BlockConfig)>,
}

impl Files {
    fn open(config: &VmConfig) -> Result<Self, BuildError> {
        let kernel = KernelFile::open(&config.kernel)?;
        let initrd = config.initrd.as_deref().map(InitrdFile::open).transpose()?;
        let mut disks = Vec::new();
        for disk in config.all_disks() {
            let file = RawFile::open(&disk.path, disk.read_only)?;
            let block = BlockConfig { read_only: disk.read_only, serial: disk.id.clone() };
            disks.push((DeviceId::new(disk.id), file, block));
        }
        Ok(Self { kernel, initrd, disks })
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
        let memory = memory::fresh(config.memory.bytes())?;
        ladder.mark(step::MEMORY_MAPPED);
        // Fails only if KVM did, which is told when that thread is joined.
        let _ = memory_to_kvm.send(memory.clone());
        drop(memory_to_kvm);
        let parts = Parts::make(config, files, &memory, observers)?;
        let in_kernel = in_kernel.join().map_err(|_| BuildError::Lost)??;
        parts.join(config, memory, in_kernel, observers)
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
struct Parts {
    pio: Bus,
    mmio: Bus,
    executor: Executor,
    transports: Vec<(DeviceId, Transport)>,
    lines: Vec<(Gsi, Event)>,
    console: ConsoleLog,
    power_button: Interrupt,
    vsock: VsockHandle,
    entry: Entry,
}

impl Parts {
    fn make(
        config: &VmConfig,
        files: Files,
        memory: &Memory,
        observers: &Observers,
    ) -> Result<Self, BuildError> {
        let kernel = files.kernel.load(memory, config.boot_protocol)?;
        let initrd = files.initrd.map(|file| file.load(memory, kernel.end)).transpose()?;
        observers.ladder.mark(step::KERNEL_LOADED);

        let executor = Executor::spawn("vmm-loop")?;
        let console = console(config)?;
        let mut wiring = Wiring::new(memory, executor.handle());
        wiring.legacy_devices(observers, console.clone())?;
        let power_button = wiring.line(layout::EVENT_GSI)?;
        let vsock = wiring.virtio_devices(config, files.disks)?;

        let rsdp = tables::write(memory, config.cpus, &wiring.described())?;
        let boot =
            BootInfo { cmdline: &config.cmdline(), initrd, rsdp, ram: config.memory.bytes() };
        boot.write(memory, &kernel)?;
        let entry =
            if observers.stamp_entry { kernel.entry.stamped(memory)? } else { kernel.entry };
        let Wiring { pio, mmio, transports, lines, .. } = wiring;
        Ok(Self { pio, mmio, executor, transports, lines, console, power_button, vsock, entry })
    }

    /// Brings both halves together.
    fn join(
        self,
        config: &VmConfig,
        memory: Memory,
        in_kernel: InKernel,
        observers: &Observers,
    ) -> Result<Vm, BuildError> {
        for (gsi, event) in &self.lines {
            in_kernel.handle.connect_interrupt(*gsi, event)?;
        }
        let machine = Machine {
            pio: Arc::new(self.pio),
            mmio: Arc::new(self.mmio),
            events: observers.events.clone(),
            ladder: observers.ladder.clone(),
        };
        let mut vcpus = Vec::with_capacity(in_kernel.vcpus.len());
        for (id, fd) in (0..).zip(in_kernel.vcpus) {
            let leaves = cpu::leaves(&in_kernel.cpuid, id, config.cpus);
            let boot_entry = (id == 0).then_some(self.entry);
            set_up_vcpu(&fd, &leaves, boot_entry, &memory)?;
            vcpus.push(Vcpu::spawn(id, fd, machine.clone())?);
        }
        Ok(Vm {
            vcpus,
            transports: self.transports,
            _executor: self.executor,
            handle: Arc::new(in_kernel.handle),
            memory,
            config: config.clone(),
            console: self.console,
            power_button: self.power_button,
            vsock: self.vsock,
            state: VmState::Created,
        })
    }
}

fn console(config: &VmConfig) -> Result<ConsoleLog, BuildError> {
    match config.console {
        Console::Off => Ok(ConsoleLog::new()),
        Console::Serial => ConsoleLog::forwarding(io::stderr())
            .map_err(|source| BuildError::Host { what: "console thread", source }),
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

/// Devices on their way to the buses.
struct Wiring<'a> {
    memory: &'a Memory,
    executor: ExecutorHandle,
    pio: Bus,
    mmio: Bus,
    transports: Vec<(DeviceId, Transport)>,
    lines: Vec<(Gsi, Event)>,
}

impl<'a> Wiring<'a> {
    fn new(memory: &'a Memory, executor: ExecutorHandle) -> Self {
        Self {
            memory,
            executor,
            pio: Bus::new(),
            mmio: Bus::new(),
            transports: Vec::new(),
            lines: Vec::new(),
        }
    }

    fn line(&mut self, gsi: Gsi) -> Result<Interrupt, BuildError> {
        let event = Event::new().map_err(|source| BuildError::Host { what: "eventfd", source })?;
        self.lines.push((gsi, event.clone()));
        Ok(Interrupt::from_event(event))
    }

    fn port(
        &mut self,
        name: &str,
        port: u16,
        len: u64,
        device: impl BusDevice + 'static,
    ) -> Result<(), BuildError> {
        let device = Arc::new(Mutex::new(device));
        Ok(self.pio.insert(name, u64::from(port), len, device)?)
    }

    fn legacy_devices(
        &mut self,
        observers: &Observers,
        console: ConsoleLog,
    ) -> Result<(), BuildError> {
        let serial = Serial::new(self.line(layout::SERIAL_GSI)?, Box::new(console));
        self.port("serial", layout::SERIAL_PORT, serial::LEN, serial)?;
        let end = |outcome: Outcome| {
            let events = observers.events.clone();
            move || events.end(outcome.clone())
        };
        let reset = I8042::new(Box::new(end(Outcome::Reset)));
        self.port("i8042", layout::I8042_PORT, devices::legacy::i8042::LEN, reset)?;
        let sleep = SleepRegisters::new(Box::new(end(Outcome::PowerOff)));
        self.port("sleep", layout::SLEEP_PORT, devices::legacy::sleep::LEN, sleep)?;
        let panic = end(Outcome::Panic);
        let pvpanic = Pvpanic::new(Box::new(move |_| panic()));
        self.port("pvpanic", layout::PVPANIC_PORT, devices::legacy::pvpanic::LEN, pvpanic)?;
        let ladder = observers.ladder.clone();
        let debug = DebugPort::new(Box::new(move |value| ladder.guest_stamp(value)));
        self.port("debug", guest_protocol::DEBUG_PORT, 1, debug)
    }

    fn virtio_devices(
        &mut self,
        config: &VmConfig,
        disks: Vec<(DeviceId, RawFile, BlockConfig)>,
    ) -> Result<VsockHandle, BuildError> {
        // Disks first: the guest names them in the order in which it finds them.
        for (id, file, block) in disks {
            let device = Block::new(self.executor.clone(), Box::new(file), block);
            self.virtio(id, Box::new(device))?;
        }
        let socket: Option<PathBuf> = config.vsock.clone();
        let vsock = VsockConfig { guest_cid: GUEST_CID, socket };
        let (vsock, handle) = Vsock::new(self.executor.clone(), vsock)?;
        self.virtio(DeviceId::new("vsock"), Box::new(vsock))?;
        let rng = Rng::new(self.executor.clone(), host_entropy);
        self.virtio(DeviceId::new("rng"), Box::new(rng))?;
        Ok(handle)
    }

    fn virtio(&mut self, id: DeviceId, device: Box<dyn VirtioDevice>) -> Result<(), BuildError> {
        let index = self.transports.len();
        let interrupt = self.line(layout::virtio_mmio_gsi(index))?;
        let transport = MmioTransport::new(id.clone(), device, self.memory.clone(), &interrupt)
            .map_err(|source| BuildError::Device { id: id.clone(), source })?;
        let transport = Arc::new(Mutex::new(transport));
        let base = layout::virtio_mmio_base(index);
        self.mmio.insert(id.as_str(), base, REGION_SIZE, transport.clone())?;
        self.transports.push((id, transport));
        Ok(())
    }

    fn described(&self) -> Vec<MmioDevice> {
        (0..self.transports.len())
            .map(|index| MmioDevice {
                base: layout::virtio_mmio_base(index),
                gsi: layout::virtio_mmio_gsi(index),
            })
            .collect()
    }
}
