//! One thread per vCPU: runs the guest, serves its exits, parks on command.
//!
//! A vCPU starts parked. [`Vcpu::command`] takes it out of the guest with a signal and KVM's
//! `immediate_exit`, which leave no gap: the flag is looked at on each entry.
//!
//! A parked vCPU has no access of its own under way: it parks only on what an entry with
//! `immediate_exit` returns, and that entry has completed the access before it looked at the flag.
//! So its registers are those of an instruction boundary, and can be saved.

use std::io;
use std::os::unix::thread::JoinHandleExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use devices::bus::Bus;
use devices::metrics::{Count, Meter, Metered, Metric};
use kvm_bindings::{KVM_EXIT_IO_OUT, KVM_SYSTEM_EVENT_CRASH, KVM_SYSTEM_EVENT_RESET};
use kvm_ioctls::{VcpuExit, VcpuFd};
use vmm_sys_util::signal::{SIGRTMIN, register_signal_handler};

use crate::event::Events;
use crate::outcome::Outcome;
use crate::trace::{Ladder, step};

/// Why a vCPU thread cannot be made or does not answer.
#[derive(Debug, thiserror::Error)]
pub enum VcpuError {
    /// No thread.
    #[error("thread of vCPU {id} cannot be started: {source}")]
    Spawn {
        /// The vCPU.
        id: u32,
        /// The reason.
        source: io::Error,
    },
    /// The kick signal cannot be handled.
    #[error("signal handler cannot be installed: {0}")]
    Signal(vmm_sys_util::errno::Error),
    /// The thread has ended.
    #[error("vCPU {0} has ended")]
    Gone(u32),
}

/// What a vCPU thread is told. It acknowledges each when it is done.
enum Command {
    Run,
    Park,
    End,
    /// Something to be done on the vCPU's own thread while it is parked.
    Work(Box<dyn FnOnce(&mut VcpuFd) + Send>),
}

/// The address spaces that a vCPU's exits go to, and who hears of its end.
#[derive(Clone)]
pub struct Machine {
    /// Port I/O.
    pub pio: Arc<Bus>,
    /// Memory-mapped I/O.
    pub mmio: Arc<Bus>,
    /// Ends are reported here.
    pub events: Events,
    /// The first entry is marked here.
    pub ladder: Ladder,
}

/// How often a vCPU left the guest.
#[derive(Default)]
struct Exits {
    ports: Count,
    memory: Count,
    other: Count,
}

impl Metered for Exits {
    fn metrics(&self) -> Vec<Metric> {
        let counter = |name, help, count: &Count| Metric::counter(name, help, count.get());
        vec![
            counter("vcpu_port_exits_total", "Exits for port I/O", &self.ports),
            counter("vcpu_memory_exits_total", "Exits for memory-mapped I/O", &self.memory),
            counter("vcpu_other_exits_total", "Exits for anything else", &self.other),
        ]
    }
}

/// A vCPU thread, as the control thread holds it.
pub struct Vcpu {
    id: u32,
    commands: Sender<Command>,
    acknowledged: Receiver<()>,
    wanted: Arc<AtomicBool>,
    gate: Arc<Mutex<Gate>>,
    exits: Arc<Exits>,
    thread: Option<JoinHandle<()>>,
}

/// KVM's `immediate_exit` flag of a vCPU, as long as its mapping exists.
struct Gate(Option<*mut u8>);

// SAFETY: the pointer is only used under the mutex, for single-byte volatile writes, and is taken
// away by the vCPU thread before the mapping goes.
unsafe impl Send for Gate {}

fn kick_signal() -> i32 {
    SIGRTMIN()
}

extern "C" fn ignore_kick(_: i32, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}

/// Once per process, before the first vCPU.
pub fn install_kick_signal() -> Result<(), VcpuError> {
    register_signal_handler(kick_signal(), ignore_kick).map_err(VcpuError::Signal)
}

impl Vcpu {
    /// Starts the thread of a vCPU that is set up, parked.
    pub fn spawn(id: u32, mut fd: VcpuFd, machine: Machine) -> Result<Self, VcpuError> {
        let (commands, receiver) = channel();
        let (acknowledge, acknowledged) = channel();
        let wanted = Arc::new(AtomicBool::new(false));
        let flag = &raw mut fd.get_kvm_run().immediate_exit;
        let gate = Arc::new(Mutex::new(Gate(Some(flag))));
        let exits = Arc::new(Exits::default());
        let worker = Worker {
            id,
            fd,
            machine,
            wanted: wanted.clone(),
            commands: receiver,
            acknowledge,
            gate: gate.clone(),
            exits: exits.clone(),
        };
        let thread = std::thread::Builder::new()
            .name(format!("vcpu-{id}"))
            .stack_size(128 * 1024)
            .spawn(move || worker.serve())
            .map_err(|source| VcpuError::Spawn { id, source })?;
        Ok(Self { id, commands, acknowledged, wanted, gate, exits, thread: Some(thread) })
    }

    /// Its number.
    pub fn id(&self) -> u32 {
        self.id
    }

    /// How often it left the guest.
    pub fn meter(&self) -> Meter {
        self.exits.clone()
    }

    /// Lets the guest run on this vCPU.
    pub fn run(&self) -> Result<(), VcpuError> {
        self.send(Command::Run)?;
        self.wait()
    }

    /// Asks the vCPU to leave the guest; [`Vcpu::wait`] tells when it has. In two steps so that
    /// all vCPUs can be asked before the first is waited for.
    pub fn ask_to_park(&self) -> Result<(), VcpuError> {
        self.send(Command::Park)
    }

    /// Waits until the last command has been carried out.
    pub fn wait(&self) -> Result<(), VcpuError> {
        self.acknowledged.recv().map_err(|_| VcpuError::Gone(self.id))
    }

    /// As [`Vcpu::wait`], but no longer than `limit`. A vCPU for which this was false can only be
    /// ended.
    pub fn wait_for(&self, limit: Duration) -> bool {
        self.acknowledged.recv_timeout(limit).is_ok()
    }

    /// Runs `work` on the vCPU's thread and gives what it gives. Only while the vCPU is parked;
    /// otherwise it waits until somebody else parks it.
    pub fn with<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut VcpuFd) -> T + Send + 'static,
    ) -> Result<T, VcpuError> {
        let (sender, receiver) = channel();
        self.send(Command::Work(Box::new(move |fd: &mut VcpuFd| {
            // The receiver below waits for this.
            let _ = sender.send(work(fd));
        })))?;
        self.wait()?;
        receiver.recv().map_err(|_| VcpuError::Gone(self.id))
    }

    fn send(&self, command: Command) -> Result<(), VcpuError> {
        let leave = matches!(command, Command::Park | Command::End);
        if leave {
            // Before the command, so that the thread, which takes it down when it handles the
            // command, cannot be left with it.
            self.wanted.store(true, Ordering::SeqCst);
        }
        self.commands.send(command).map_err(|_| VcpuError::Gone(self.id))?;
        if leave {
            self.kick();
        }
        Ok(())
    }

    fn kick(&self) {
        let gate = self.gate.lock().unwrap_or_else(PoisonError::into_inner);
        let (Gate(Some(flag)), Some(thread)) = (&*gate, &self.thread) else {
            return;
        };
        // SAFETY: the mapping exists, since the gate is open and held; the kernel reads the byte
        // atomically.
        unsafe { flag.write_volatile(1) };
        // SAFETY: the thread has not ended, since its gate is open, and is not joined before drop.
        unsafe { libc::pthread_kill(thread.as_pthread_t(), kick_signal()) };
    }
}

impl Drop for Vcpu {
    fn drop(&mut self) {
        if self.send(Command::End).is_ok()
            && let Some(thread) = self.thread.take()
        {
            let _ = thread.join();
        }
    }
}

/// What the vCPU does after an exit.
enum Next {
    Enter,
    Park,
    Stop(Outcome),
}

struct Worker {
    id: u32,
    fd: VcpuFd,
    machine: Machine,
    wanted: Arc<AtomicBool>,
    commands: Receiver<Command>,
    acknowledge: Sender<()>,
    gate: Arc<Mutex<Gate>>,
    exits: Arc<Exits>,
}

impl Worker {
    fn serve(mut self) {
        let mut first = self.id == 0;
        while let Ok(command) = self.commands.recv() {
            let _ = self.acknowledge.send(());
            match command {
                Command::Run => {
                    if std::mem::take(&mut first) {
                        self.machine.ladder.mark(step::FIRST_RUN);
                    }
                    self.run();
                }
                Command::Park => self.wanted.store(false, Ordering::SeqCst),
                Command::End => break,
                Command::Work(work) => work(&mut self.fd),
            }
        }
        // After this nobody touches the mapping or signals the thread.
        self.gate.lock().unwrap_or_else(PoisonError::into_inner).0 = None;
    }

    /// Runs the guest until a command comes or the guest ends.
    fn run(&mut self) {
        loop {
            match self.enter() {
                Next::Enter => {}
                Next::Park => return,
                Next::Stop(outcome) => {
                    self.machine.events.end(outcome);
                    return;
                }
            }
        }
    }

    fn enter(&mut self) -> Next {
        match self.fd.run() {
            Ok(VcpuExit::IoIn(..) | VcpuExit::IoOut(..)) => {
                self.exits.ports.one();
                self.port_io()
            }
            Ok(VcpuExit::MmioRead(address, data)) => {
                self.exits.memory.one();
                self.machine.mmio.read(address, data);
                Next::Enter
            }
            Ok(VcpuExit::MmioWrite(address, data)) => {
                self.exits.memory.one();
                self.machine.mmio.write(address, data);
                Next::Enter
            }
            Ok(VcpuExit::Intr | VcpuExit::Hlt | VcpuExit::IrqWindowOpen) => self.interrupted(),
            Ok(VcpuExit::Shutdown) => Next::Stop(Outcome::TripleFault),
            Ok(VcpuExit::SystemEvent(kind, _)) => Next::Stop(match kind {
                KVM_SYSTEM_EVENT_RESET => Outcome::Reset,
                KVM_SYSTEM_EVENT_CRASH => Outcome::Panic,
                _ => Outcome::PowerOff,
            }),
            Ok(VcpuExit::FailEntry(reason, _)) => Next::Stop(Outcome::EntryFailed { reason }),
            Ok(VcpuExit::InternalError) => Next::Stop(self.internal_error()),
            Ok(other) => {
                let detail = format!("vCPU {} left the guest with {other:?}", self.id);
                Next::Stop(Outcome::VcpuFailed { detail })
            }
            Err(error) => match error.errno() {
                libc::EINTR | libc::EAGAIN => self.interrupted(),
                _ => {
                    let detail = format!("KVM_RUN of vCPU {}: {error}", self.id);
                    Next::Stop(Outcome::VcpuFailed { detail })
                }
            },
        }
    }

    fn interrupted(&mut self) -> Next {
        self.exits.other.one();
        self.fd.set_kvm_immediate_exit(0);
        if self.wanted.swap(false, Ordering::SeqCst) { Next::Park } else { Next::Enter }
    }

    /// One I/O exit can carry many accesses to the same port (REP INS/OUTS): each is its own.
    fn port_io(&mut self) -> Next {
        let run = self.fd.get_kvm_run();
        // SAFETY: the exit reason was KVM_EXIT_IO, which fills this member of the union.
        let io = unsafe { run.__bindgen_anon_1.io };
        let size = usize::from(io.size).max(1);
        let len = size * io.count as usize;
        let base: *mut u8 = std::ptr::from_mut(run).cast();
        // SAFETY: KVM places the data inside the mapping of kvm_run at this offset, `count` items
        // of `size` bytes; nobody else has a reference to it while the vCPU is outside the guest.
        let data =
            unsafe { std::slice::from_raw_parts_mut(base.add(io.data_offset as usize), len) };
        for item in data.chunks_exact_mut(size) {
            if u32::from(io.direction) == KVM_EXIT_IO_OUT {
                self.machine.pio.write(u64::from(io.port), item);
            } else {
                self.machine.pio.read(u64::from(io.port), item);
            }
        }
        Next::Enter
    }

    fn internal_error(&mut self) -> Outcome {
        let rip = self.fd.get_regs().map(|regs| regs.rip).unwrap_or_default();
        let run = self.fd.get_kvm_run();
        // SAFETY: the exit reason was KVM_EXIT_INTERNAL_ERROR, which fills this member.
        let internal = unsafe { run.__bindgen_anon_1.internal };
        let meaning = match internal.suberror {
            kvm_bindings::KVM_INTERNAL_ERROR_EMULATION => "an instruction it cannot emulate",
            kvm_bindings::KVM_INTERNAL_ERROR_SIMUL_EX => "a fault during the delivery of another",
            kvm_bindings::KVM_INTERNAL_ERROR_DELIVERY_EV => "an exit during event delivery",
            kvm_bindings::KVM_INTERNAL_ERROR_UNEXPECTED_EXIT_REASON => "an exit it does not know",
            _ => "an unknown reason",
        };
        let detail = format!(
            "suberror {} ({meaning}) on vCPU {} at {rip:#x}; `cube-vmm doctor` tells what this \
             host can run",
            internal.suberror, self.id
        );
        Outcome::InternalError { detail }
    }
}
