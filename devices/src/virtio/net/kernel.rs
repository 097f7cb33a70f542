//! A queue pair that the host's kernel works on (vhost-net): its frames go between guest memory and the
//! TAP without us.
//!
//! What is left to us is what the kernel does not do: interrupts, which have to go through the
//! transport; the link, of which it says nothing; and frames that the guest sends while there is none,
//! which are dropped here. A pair that the guest does not use, or whose link is down, is taken back
//! from the kernel until that changes.

use std::fs::File;
use std::io;
use std::ops::Deref;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use vhost::net::VhostNet;
use vhost::vhost_kern::net::Net as Driver;
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vm_memory::{GuestAddressSpace, GuestMemoryBackend, GuestMemoryRegion};

use super::feature::MRG_RXBUF;
use super::handle::{Shared, count};
use super::tap::Tap;
use crate::event::Event;
use crate::executor::{Flow, Handler, Interest, Sources};
use crate::ids::Token;
use crate::memory::Memory;
use crate::rate_limiter::RefillTimer;
use crate::virtio::queue::{ActiveQueue, QueueFault};
use crate::virtio::{Activation, Notifier, StartError, feature as ring};

/// Frames dropped per wake-up, before other devices get their turn.
const BUDGET: usize = 64;
/// How often the interface is looked at: the kernel says nothing of one that went down or away.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The kernel's numbers of the two queues.
const RX: usize = 0;
const TX: usize = 1;

const CALLS: [Token; 2] = [Token(RX as u32), Token(TX as u32)];
const FAULT: Token = Token(2);
const KICK: Token = Token(3);
const WAKE: Token = Token(4);
const TIMER: Token = Token(5);

/// Why the kernel does not do it.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "each says what it is")]
pub enum KernelError {
    #[error(
        "vhost=on needs /dev/vhost-net, which cannot be opened ({0}); load the driver (modprobe \
         vhost_net) and give this process access to the file, or leave vhost=on out"
    )]
    NoDriver(#[source] vhost::Error),
    #[error("/dev/vhost-net: {what} failed: {source}")]
    Call { what: &'static str, source: vhost::Error },
    #[error("/dev/vhost-net lacks the features {0:#x}, which every card needs; leave vhost=on out")]
    Features(u64),
}

fn call(what: &'static str) -> impl Fn(vhost::Error) -> KernelError {
    move |source| KernelError::Call { what, source }
}

impl KernelError {
    fn at_start(self) -> StartError {
        StartError::Host {
            what: "handing the queues to the kernel",
            source: io::Error::other(self),
        }
    }
}

// --- the kernel --------------------------------------------------------------------------------

/// Guest RAM for the driver: known only when the guest starts the card, and opened before.
#[derive(Clone)]
struct Ram(Arc<Mutex<Arc<Memory>>>);

#[derive(Clone)]
struct Snap(Arc<Memory>);

impl Deref for Snap {
    type Target = Memory;
    fn deref(&self) -> &Memory {
        &self.0
    }
}

impl GuestAddressSpace for Ram {
    type M = Memory;
    type T = Snap;
    fn memory(&self) -> Snap {
        Snap(self.0.lock().unwrap_or_else(PoisonError::into_inner).clone())
    }
}

/// An open `/dev/vhost-net`, for one queue pair.
pub(super) struct Kernel {
    driver: Driver<Ram>,
    ram: Ram,
    features: u64,
}

impl Kernel {
    /// Opens the driver for this process.
    pub fn open() -> Result<Self, KernelError> {
        let ram = Ram(Arc::new(Mutex::new(Arc::new(Memory::new()))));
        let driver = Driver::new(ram.clone()).map_err(KernelError::NoDriver)?;
        driver.set_owner().map_err(call("VHOST_SET_OWNER"))?;
        let features = driver.get_features().map_err(call("VHOST_GET_FEATURES"))?;
        match ring::VERSION_1 & !features {
            0 => Ok(Self { driver, ram, features }),
            missing => Err(KernelError::Features(missing)),
        }
    }

    /// What it can do, of what concerns it.
    pub fn features(&self) -> u64 {
        self.features & (ring::COMMON | MRG_RXBUF)
    }

    /// Tells it what was negotiated and where guest RAM is.
    fn prepare(&self, features: u64, memory: &Memory) -> Result<(), KernelError> {
        *self.ram.0.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(memory.clone());
        let features = features & self.features();
        self.driver.set_features(features).map_err(call("VHOST_SET_FEATURES"))?;
        let regions: Vec<_> = memory
            .iter()
            .map(|region| VhostUserMemoryRegionInfo {
                guest_phys_addr: region.start_addr().0,
                memory_size: region.len(),
                userspace_addr: region.as_ptr() as u64,
                ..VhostUserMemoryRegionInfo::default()
            })
            .collect();
        self.driver.set_mem_table(&regions).map_err(call("VHOST_SET_MEM_TABLE"))?;
        Ok(())
    }

    /// Describes a queue, from where it stands.
    fn set_up(
        &self,
        number: usize,
        queue: &ActiveQueue,
        wires: (&Event, &Event),
    ) -> Result<(), KernelError> {
        let (driver, ring, (calls, fault)) = (&self.driver, queue.record(), wires);
        driver.set_vring_num(number, ring.size).map_err(call("VHOST_SET_VRING_NUM"))?;
        let place = VringConfigData {
            queue_max_size: ring.size,
            queue_size: ring.size,
            flags: 0,
            desc_table_addr: ring.desc_table,
            used_ring_addr: ring.used_ring,
            avail_ring_addr: ring.avail_ring,
            log_addr: None,
        };
        driver.set_vring_addr(number, &place).map_err(call("VHOST_SET_VRING_ADDR"))?;
        driver.set_vring_base(number, ring.next_avail).map_err(call("VHOST_SET_VRING_BASE"))?;
        driver.set_vring_call(number, calls.eventfd()).map_err(call("VHOST_SET_VRING_CALL"))?;
        driver.set_vring_err(number, fault.eventfd()).map_err(call("VHOST_SET_VRING_ERR"))?;
        let kick = queue.kick();
        driver.set_vring_kick(number, kick.eventfd()).map_err(call("VHOST_SET_VRING_KICK"))?;
        // It may have been cleared, or never been signalled for what was added meanwhile.
        kick.signal();
        Ok(())
    }

    fn connect(&self, number: usize, tap: Option<&File>) -> Result<(), KernelError> {
        self.driver.set_backend(number, tap).map_err(call("VHOST_NET_SET_BACKEND"))
    }
}

/// Both queues in the hands of the kernel. Dropped, they are taken back: when that has happened it
/// touches guest memory no more.
struct Carried(Arc<Kernel>);

impl Carried {
    fn start(kernel: &Arc<Kernel>, tap: &Tap) -> Result<Self, KernelError> {
        let file = tap.as_fd().try_clone_to_owned().map(File::from);
        let file =
            file.map_err(|error| call("duplicating the TAP")(vhost::Error::IOError(error)))?;
        let carried = Self(kernel.clone());
        for number in [RX, TX] {
            kernel.connect(number, Some(&file))?;
        }
        Ok(carried)
    }

    /// The next entries of the available rings that it would have taken.
    fn stop(self) -> Result<[u16; 2], KernelError> {
        let kernel = self.0.clone();
        drop(self);
        let base = |number| {
            let base =
                kernel.driver.get_vring_base(number).map_err(call("VHOST_GET_VRING_BASE"))?;
            // An index of 16 bits, for split rings.
            Ok(base as u16)
        };
        Ok([base(RX)?, base(TX)?])
    }
}

impl Drop for Carried {
    fn drop(&mut self) {
        for number in [RX, TX] {
            if let Err(error) = self.0.connect(number, None) {
                tracing::error!(%error, "vhost-net keeps a queue");
            }
        }
    }
}

// --- handler -----------------------------------------------------------------------------------

/// The handler of a queue pair that the kernel works on.
pub(super) struct KernelPair {
    index: usize,
    rx: ActiveQueue,
    tx: ActiveQueue,
    kernel: Arc<Kernel>,
    /// While the kernel works on the queues.
    carried: Option<Carried>,
    calls: [Event; 2],
    fault: Event,
    timer: RefillTimer,
    /// The interface is gone for good.
    gone: bool,
    /// It was up when it was last looked at.
    up: bool,
    /// Notifications of the guest are ours to hear.
    listening: bool,
    shared: Arc<Shared>,
    notifier: Notifier,
}

impl KernelPair {
    /// The pair of place `index`, handed to the kernel if the guest uses it.
    pub fn new(
        index: usize,
        queues: [ActiveQueue; 2],
        activation: &Activation,
        kernel: Arc<Kernel>,
        shared: Arc<Shared>,
    ) -> Result<Self, StartError> {
        let host = |what| move |source| StartError::Host { what, source };
        let event = || Event::new().map_err(host("an event of vhost-net"));
        let timer = RefillTimer::new().map_err(host("a timer of vhost-net"))?;
        let [rx, tx] = queues;
        let notifier = activation.notifier.clone();
        kernel.prepare(activation.features, &activation.memory).map_err(KernelError::at_start)?;
        let mut this = Self {
            index,
            rx,
            tx,
            kernel,
            carried: None,
            calls: [event()?, event()?],
            fault: event()?,
            timer,
            gone: false,
            up: true,
            listening: false,
            shared,
            notifier,
        };
        this.look();
        this.hand_over().map_err(KernelError::at_start)?;
        Ok(this)
    }

    /// Receive and transmit queue, taken back from the kernel.
    pub fn into_queues(mut self) -> [ActiveQueue; 2] {
        self.take_back();
        [self.rx, self.tx]
    }

    fn tap(&self) -> Option<&Tap> {
        self.shared.taps.get(self.index)
    }

    /// Whether there is anything for the kernel to do.
    fn is_wanted(&self) -> bool {
        let used = self.index < usize::from(self.shared.pairs());
        used && self.up && self.shared.link_wanted()
    }

    /// Gives the kernel the queues, or takes them back, as is wanted now.
    fn hand_over(&mut self) -> Result<(), KernelError> {
        match (self.is_wanted(), self.carried.is_some()) {
            (true, false) => {
                let Some(tap) = self.shared.taps.get(self.index) else { return Ok(()) };
                let queues = [(RX, &self.rx), (TX, &self.tx)];
                for ((number, queue), calls) in queues.into_iter().zip(&self.calls) {
                    self.kernel.set_up(number, queue, (calls, &self.fault))?;
                }
                match Carried::start(&self.kernel, tap) {
                    // Between a look at the interface and now it may have gone.
                    Err(_) if tap.is_gone() => self.look(),
                    started => self.carried = Some(started?),
                }
            }
            (false, true) => {
                self.take_back();
                // What it has completed and not told of, and what the guest has added since.
                self.rx.interrupt().raise();
                self.tx.interrupt().raise();
                self.tx.kick().signal();
            }
            _ => {}
        }
        Ok(())
    }

    /// Takes the queues back from the kernel, which touches guest memory no more then.
    fn take_back(&mut self) {
        let Some(carried) = self.carried.take() else { return };
        match carried.stop() {
            Ok([rx, tx]) => {
                // Fails only for rings outside of guest RAM, which these were not at the start.
                let _ = self.rx.take_over(Some(rx));
                let _ = self.tx.take_over(Some(tx));
            }
            Err(error) => {
                let _ = self.rx.take_over(None);
                let _ = self.tx.take_over(None);
                self.notifier.gives_up("network card", error);
            }
        }
    }

    /// Finds out what has become of the interface.
    fn look(&mut self) {
        let (gone, up) = match self.tap() {
            Some(tap) => (tap.is_gone(), tap.is_writable()),
            None => (true, false),
        };
        self.gone |= gone;
        let up = up && !self.gone;
        if up != self.up {
            let name = self.tap().map_or("", Tap::name);
            tracing::info!(interface = name, queue = self.index, up, "network link");
            if !up {
                count(&self.shared.counters.link_losses);
            }
            self.up = up;
        }
        self.shared.set_lost(self.index, !up);
    }

    /// Drops what the guest sends while the kernel does not take it.
    fn drop_sent(&mut self) -> Result<(), QueueFault> {
        if self.carried.is_some() {
            return Ok(());
        }
        self.tx.kick().clear();
        for _ in 0..BUDGET {
            let Some(chain) = self.tx.pop()? else {
                self.tx.notify()?;
                if self.tx.enable_notification()? {
                    self.tx.kick().signal();
                }
                return Ok(());
            };
            self.tx.complete(&chain, 0)?;
            count(&self.shared.counters.tx_dropped);
        }
        self.tx.kick().signal();
        self.tx.notify()
    }

    /// The kernel gives up a queue: because of what is in it, or because its interface is gone.
    fn failed(&mut self) -> bool {
        self.fault.clear();
        self.look();
        self.up
    }

    fn update(&mut self, sources: &mut Sources<'_, '_>) -> io::Result<()> {
        self.hand_over().map_err(io::Error::other)?;
        let listening = self.carried.is_none();
        match (self.listening, listening) {
            (false, true) => sources.add(KICK, self.tx.kick(), Interest::Read)?,
            (true, false) => sources.remove(KICK),
            _ => {}
        }
        self.listening = listening;
        Ok(())
    }

    fn serve(&mut self, token: Token) -> Result<(), QueueFault> {
        match token {
            KICK => return self.drop_sent(),
            WAKE => {
                self.shared.wake(self.index).map(Event::clear);
            }
            TIMER => {
                let _ = self.timer.arm(LOOK_EVERY);
                self.look();
            }
            call => {
                let queues = [&self.rx, &self.tx];
                let called = CALLS.iter().position(|&one| one == call);
                let parts = called.and_then(|at| Some((self.calls.get(at)?, queues.get(at)?)));
                if let Some((event, queue)) = parts {
                    event.clear();
                    count(&self.shared.counters.calls);
                    queue.interrupt().raise();
                }
            }
        }
        Ok(())
    }
}

impl Handler for KernelPair {
    fn attach(&mut self, sources: &mut Sources<'_, '_>) -> io::Result<()> {
        for (token, event) in CALLS.into_iter().zip(&self.calls) {
            sources.add(token, event, Interest::Read)?;
        }
        sources.add(FAULT, &self.fault, Interest::Read)?;
        sources.add(TIMER, &self.timer, Interest::Read)?;
        if let Some(wake) = self.shared.wake(self.index) {
            sources.add(WAKE, wake, Interest::Read)?;
        }
        self.timer.arm(LOOK_EVERY)?;
        self.update(sources)
    }

    fn handle(&mut self, token: Token, sources: &mut Sources<'_, '_>) -> Flow {
        if token == FAULT && self.failed() {
            self.shared.guest_fault(&"stopped: the kernel refuses its rings");
            self.take_back();
            self.notifier.needs_reset();
            return Flow::Finished;
        }
        if let Err(fault) = self.serve(token) {
            self.shared.guest_fault(&format_args!("stopped: {fault}"));
            self.notifier.needs_reset();
            return Flow::Finished;
        }
        if let Err(error) = self.update(sources) {
            self.notifier.gives_up("network card", error);
            return Flow::Finished;
        }
        Flow::Continue
    }
}
