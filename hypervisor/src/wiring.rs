//! Devices on their way to the buses, for [`crate::builder`]: which address, which line, which
//! transport.

use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::{Arc, Mutex, OnceLock};

use devices::bus::{Bus, BusDevice};
use devices::event::Event;
use devices::executor::ExecutorHandle;
use devices::ids::{DeviceId, Gsi};
use devices::irq::Interrupt;
use devices::legacy::debug::{self, DebugPort};
use devices::legacy::i8042::{self, I8042};
use devices::legacy::pvpanic::{self, Pvpanic};
use devices::legacy::rtc::{self, Rtc};
use devices::legacy::serial::{self, Serial};
use devices::legacy::sleep::{self, SleepRegisters};
use devices::memory::{GuestAddress, Memory};
use devices::metrics::Meter;
use devices::snapshot::Stateful;
use devices::virtio::VirtioDevice;
use devices::virtio::balloon::{Balloon, BalloonConfig, BalloonHandle};
use devices::virtio::console::{Console, ConsoleConfig};
use devices::virtio::mmio::{MmioTransport, REGION_SIZE};
use devices::virtio::pmem::{Pmem, PmemBacking, PmemConfig};
use devices::virtio::rng::{Rng, host_entropy};
use devices::virtio::vsock::{Vsock, VsockConfig, VsockHandle};

use crate::boot::tables::MmioDevice;
use crate::builder::{BuildError, Observers};
use crate::cards::{CardInfo, OpenedCard};
use crate::config::{TransportKind, VmConfig};
use crate::console::{ConsoleLog, ConsoleSink};
use crate::disks::{OpenedDisk, RunningDisk};
use crate::doorbells::Doorbells;
use crate::event::Events;
use crate::kvm::VmHandle;
use crate::layout;
use crate::outcome::Outcome;
use crate::pci_slots::PciSlots;
use crate::shares::RunningShare;
use crate::vm::SharedTransport;

/// The guest's context id: the only guest on its own vsock device, so it needs no other.
const GUEST_CID: u64 = 3;

/// Persistent memory in the guest's address space.
#[derive(Clone)]
pub struct PlacedPmem {
    /// The device's name.
    pub id: DeviceId,
    /// Its first guest address.
    pub start: u64,
    /// Its memory.
    pub backing: PmemBacking,
}

/// Places persistent memory above RAM, one piece after the other.
pub fn place_pmem(config: &VmConfig, files: Vec<(DeviceId, PmemBacking)>) -> Vec<PlacedPmem> {
    let mut start = layout::above_ram(config.memory.bytes());
    let place = |(id, backing): (DeviceId, PmemBacking)| {
        let placed = PlacedPmem { id, start, backing };
        // Beyond the end of what there is, KVM and the device refuse it.
        start = start.saturating_add(placed.backing.len());
        placed
    };
    files.into_iter().map(place).collect()
}

/// The VM in the kernel, once it is there: devices are made before.
pub type LateHandle = Arc<OnceLock<Arc<VmHandle>>>;

/// The legacy devices that have state.
pub struct Legacy {
    /// The serial port.
    pub serial: Arc<Mutex<Serial>>,
    /// The CMOS clock.
    pub rtc: Arc<Mutex<Rtc>>,
}

impl Legacy {
    /// All of them, by name.
    pub fn stateful(&self) -> [(&'static str, Arc<Mutex<dyn Stateful + Send>>); 2] {
        [("serial", self.serial.clone()), ("rtc", self.rtc.clone())]
    }
}

/// Devices, buses and lines of a VM that is being built.
pub struct Wiring<'a> {
    memory: &'a Memory,
    executor: ExecutorHandle,
    /// The PCI bus, if there is one.
    pub pci: Option<PciSlots>,
    /// Port I/O.
    pub pio: Arc<Bus>,
    /// Memory-mapped I/O.
    pub mmio: Arc<Bus>,
    /// The virtio devices, in the order in which the guest finds them.
    pub transports: Vec<(DeviceId, SharedTransport)>,
    /// The disks among them. Here, so that they are dropped after the devices.
    pub disks: Vec<RunningDisk>,
    /// The shares among them, for the same reason.
    pub shares: Vec<RunningShare>,
    /// What is told of the network cards among them.
    pub cards: Vec<CardInfo>,
    /// What counts beside the virtio devices: its kind, its name, its counts.
    pub meters: Vec<(&'static str, &'static str, Meter)>,
    /// The lines to connect.
    pub lines: Vec<(Gsi, Event)>,
    /// The doorbells to connect.
    pub doorbells: Doorbells,
}

impl<'a> Wiring<'a> {
    /// Empty buses; a PCI bus if the configuration wants one.
    pub fn new(
        config: &VmConfig,
        memory: &'a Memory,
        executor: ExecutorHandle,
        handle: LateHandle,
        events: &Events,
    ) -> Result<Self, BuildError> {
        let mut this = Self {
            memory,
            executor,
            pci: None,
            pio: Arc::default(),
            mmio: Arc::default(),
            transports: Vec::new(),
            meters: Vec::new(),
            disks: Vec::new(),
            shares: Vec::new(),
            cards: Vec::new(),
            lines: Vec::new(),
            doorbells: Doorbells::default(),
        };
        if config.transport == TransportKind::Pci {
            let event = this.line(layout::HOTPLUG_GSI)?;
            let buses = (&*this.pio, &this.mmio);
            let doorbells = this.doorbells.clone();
            let slots = PciSlots::new(buses, memory, handle, doorbells, event, events.clone())?;
            this.pci = Some(slots);
        }
        Ok(this)
    }

    /// A new interrupt line.
    pub fn line(&mut self, gsi: Gsi) -> Result<Interrupt, BuildError> {
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
        self.shared_port(name, port, len, &Arc::new(Mutex::new(device)))
    }

    fn shared_port<D: BusDevice + 'static>(
        &mut self,
        name: &str,
        port: u16,
        len: u64,
        device: &Arc<Mutex<D>>,
    ) -> Result<(), BuildError> {
        Ok(self.pio.insert(name, u64::from(port), len, device.clone())?)
    }

    /// Serial port, reset, power off, clock, panic and debug ports.
    pub fn legacy_devices(
        &mut self,
        observers: &Observers,
        console: ConsoleLog,
    ) -> Result<Legacy, BuildError> {
        self.meters.push(("bus", "ports", self.pio.clone()));
        self.meters.push(("bus", "memory", self.mmio.clone()));
        self.meters.push(("device", "console-log", Arc::new(console.clone())));
        let serial = Serial::new(self.line(layout::SERIAL_GSI)?, Box::new(console));
        self.meters.push(("device", "serial", serial.meter()));
        let serial = Arc::new(Mutex::new(serial));
        self.shared_port("serial", layout::SERIAL_PORT, serial::LEN, &serial)?;
        let end = |outcome: Outcome| {
            let events = observers.events.clone();
            move || events.end(outcome.clone())
        };
        let reset = I8042::new(Box::new(end(Outcome::Reset)));
        self.port("i8042", layout::I8042_PORT, i8042::LEN, reset)?;
        let sleep = SleepRegisters::new(Box::new(end(Outcome::PowerOff)));
        self.port("sleep", layout::SLEEP_PORT, sleep::LEN, sleep)?;
        let panic = end(Outcome::Panic);
        let pvpanic = Pvpanic::new(Box::new(move |_| panic()));
        self.port("pvpanic", layout::PVPANIC_PORT, pvpanic::LEN, pvpanic)?;
        let rtc = Arc::new(Mutex::new(Rtc::new(Box::new(std::time::SystemTime::now))));
        self.shared_port("rtc", layout::RTC_PORT, rtc::LEN, &rtc)?;
        let ladder = observers.ladder.clone();
        let stamps = DebugPort::new(Box::new(move |value| ladder.guest_stamp(value)));
        self.port("debug", guest_protocol::DEBUG_PORT, debug::LEN, stamps)?;
        Ok(Legacy { serial, rtc })
    }

    /// All virtio devices of the configuration; the way into the vsock device.
    pub fn virtio_devices(
        &mut self,
        config: &VmConfig,
        disks: Vec<OpenedDisk>,
    ) -> Result<VsockHandle, BuildError> {
        // Disks first: the guest names them in the order in which it finds them.
        for disk in disks {
            let (disk, device) = disk.into_device();
            self.virtio(disk.id.clone(), device)?;
            self.disks.push(disk);
        }
        let vsock = VsockConfig { guest_cid: GUEST_CID, socket: config.vsock.clone() };
        let (vsock, handle) = Vsock::new(self.executor.clone(), vsock)?;
        self.virtio(DeviceId::new("vsock"), Box::new(vsock))?;
        let rng = Rng::new(self.executor.clone(), host_entropy);
        self.virtio(DeviceId::new("rng"), Box::new(rng))?;
        Ok(handle)
    }

    /// The network cards.
    pub fn net(&mut self, cards: Vec<OpenedCard>) -> Result<(), BuildError> {
        for card in cards {
            let (info, device) = card.into_device(self.executor.clone())?;
            self.virtio(DeviceId::new(info.id.clone()), device)?;
            self.cards.push(info);
        }
        Ok(())
    }

    /// The shares, each with its file server.
    pub fn shares(&mut self, config: &VmConfig) -> Result<(), BuildError> {
        for share in config.all_fs() {
            let (id, device, running) = crate::shares::open(&share, config)?;
            self.virtio(id, device)?;
            self.shares.push(running);
        }
        Ok(())
    }

    /// The balloon, if the VM has one.
    pub fn balloon(&mut self, config: &VmConfig) -> Result<Option<BalloonHandle>, BuildError> {
        if !config.balloon {
            return Ok(None);
        }
        let (balloon, handle) = Balloon::new(self.executor.clone(), BalloonConfig::default());
        self.virtio(DeviceId::new("balloon"), Box::new(balloon))?;
        Ok(Some(handle))
    }

    /// The virtio console, if the VM has one. It prints into `log`.
    pub fn console(&mut self, config: &VmConfig, log: &ConsoleLog) -> Result<(), BuildError> {
        let Some(output) = log.virtio_output() else { return Ok(()) };
        debug_assert_eq!(config.console, crate::config::Console::Virtio);
        let size = ConsoleConfig::default();
        let (console, _handle) = Console::new(self.executor.clone(), size, output.clone());
        self.virtio(DeviceId::new("console"), Box::new(console))
    }

    /// Persistent memory, where it has been placed.
    pub fn pmem(&mut self, placed: &[PlacedPmem]) -> Result<(), BuildError> {
        for pmem in placed {
            let place = PmemConfig { start: GuestAddress(pmem.start) };
            let device = Pmem::new(self.executor.clone(), pmem.backing.clone(), place)?;
            self.virtio(pmem.id.clone(), Box::new(device))?;
        }
        Ok(())
    }

    fn virtio(&mut self, id: DeviceId, device: Box<dyn VirtioDevice>) -> Result<(), BuildError> {
        match &self.pci {
            Some(slots) => {
                let (_, transport) = slots.attach(&id, device)?;
                self.transports.push((id, transport));
                Ok(())
            }
            None => self.virtio_mmio(id, device),
        }
    }

    fn virtio_mmio(
        &mut self,
        id: DeviceId,
        device: Box<dyn VirtioDevice>,
    ) -> Result<(), BuildError> {
        let index = self.transports.len();
        let interrupt = self.line(layout::virtio_mmio_gsi(index))?;
        let transport = MmioTransport::new(id.clone(), device, self.memory.clone(), &interrupt)
            .map_err(|source| BuildError::Device { id: id.clone(), source })?;
        self.doorbells.add_device(id.clone(), transport.doorbells().to_vec());
        let base = layout::virtio_mmio_base(index);
        let transport = Arc::new(Mutex::new(transport));
        self.mmio.insert(id.as_str(), base, REGION_SIZE, transport.clone())?;
        self.doorbells.place(&id, Some(base));
        self.transports.push((id, transport));
        Ok(())
    }

    /// The virtio-mmio devices, for the DSDT.
    pub fn described(&self) -> Vec<MmioDevice> {
        if self.pci.is_some() {
            return Vec::new();
        }
        (0..self.transports.len())
            .map(|index| MmioDevice {
                base: layout::virtio_mmio_base(index),
                gsi: layout::virtio_mmio_gsi(index),
            })
            .collect()
    }
}

/// The host's side of the console, whose output goes to `sink` if it is shown.
pub fn console(config: &VmConfig, sink: &ConsoleSink) -> Result<ConsoleLog, BuildError> {
    use crate::config::Console;
    let failed = |what| move |source| BuildError::Host { what, source };
    let log = match (config.console, sink) {
        (Console::Off, _) | (_, ConsoleSink::Nowhere) => ConsoleLog::new(),
        (_, ConsoleSink::Stderr) => {
            ConsoleLog::forwarding(io::stderr()).map_err(failed("console thread"))?
        }
        (_, ConsoleSink::File(path)) => {
            let file = OpenOptions::new().append(true).create(true).mode(0o600).open(path);
            let file = file.map_err(failed("console file"))?;
            ConsoleLog::forwarding(file).map_err(failed("console thread"))?
        }
    };
    match config.console {
        Console::Virtio => log.with_virtio().map_err(failed("console thread")),
        Console::Off | Console::Serial => Ok(log),
    }
}
