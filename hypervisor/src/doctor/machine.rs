//! A machine with one vCPU and 128 KiB that runs [`Program`]s to their end, whatever that end is.
//!
//! Called by the doctor's examination only: it emulates no device and knows no kernel. It never
//! hangs: the vCPU runs on its own thread and is kicked out of `KVM_RUN` when its time is over. A
//! thread that does not even come back then is left behind, and reported.
//!
//! Making a VM is what takes the time, so one serves for all programs. A VM whose guest has ended in
//! an odd way is not trusted with the next program: that gets a new one.

use std::io;
use std::mem::offset_of;
use std::os::fd::AsRawFd;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use kvm_bindings::{
    CpuId, KVM_MAX_CPUID_ENTRIES, kvm_regs, kvm_run, kvm_segment, kvm_sregs,
    kvm_userspace_memory_region,
};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use vm_memory::{Bytes, MmapRegion, VolatileMemory};
use vmm_sys_util::signal::{Killable, SIGRTMIN, register_signal_handler};

use super::programs::{
    self, CODE, FAULT, Feature, GREETING, HANDLER_SIZE, HANDLERS, Mode, PORT, Program, RESULT,
    RESULTS_END, VECTORS,
};

const MEMORY_SIZE: usize = 0x2_0000;
const GDT: u64 = 0x1000;
const IDT: u64 = 0x2000;
const PML4: u64 = 0x3000;
const PDPT: u64 = 0x4000;
const PAGE_DIRECTORY: u64 = 0x5000;
const STACK_TOP: u64 = 0x1_0000;
/// Where Intel processors without unrestricted guests keep the TSS of real mode.
const TSS_ADDRESS: usize = 0xfffb_d000;

const CODE_SELECTOR: u16 = 8;
const DATA_SELECTOR: u16 = 16;

/// How long a kicked vCPU may take to come back before it is given up.
const GRACE: Duration = Duration::from_millis(150);
/// No program leaves the guest more often than this.
const MAX_EXITS: usize = 16;

/// How a guest's run ended.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum End {
    /// `hlt`, as every program should.
    Halted,
    /// The guest took an exception with this vector that it did not want.
    Fault(u8),
    /// `KVM_EXIT_SHUTDOWN`: a triple fault.
    Shutdown,
    /// `KVM_EXIT_INTERNAL_ERROR`: KVM could not go on, mostly for want of an emulated instruction.
    InternalError(u32),
    /// `KVM_EXIT_FAIL_ENTRY`: the processor refused the guest's state.
    FailEntry(u64),
    /// Another exit that no program asks for.
    Unexpected(String),
    /// `KVM_RUN` itself failed with this errno.
    RunFailed(i32),
    /// Kicked when its time was over.
    OutOfTime,
    /// Kicked, and still inside `KVM_RUN`.
    Stuck,
    /// The machine could not be made: the step and its errno.
    NotSetUp(&'static str, i32),
}

/// What is known after a run.
#[derive(Debug)]
pub(super) struct Outcome {
    pub(super) end: End,
    /// Registers at the end, if they could be read. After a fault, RIP is where it happened.
    pub(super) regs: Option<kvm_regs>,
    /// Whether memory and port output are what the program promises.
    pub(super) as_expected: bool,
    /// Processor time of the vCPU thread, in the guest and in KVM, at each greeting and at the end.
    pub(super) times: Vec<Duration>,
}

impl Outcome {
    fn bare(end: End) -> Self {
        Self { end, regs: None, as_expected: false, times: Vec::new() }
    }
}

/// Runs programs one after the other.
pub(super) struct Machine<'a> {
    kvm: &'a Kvm,
    guest: Option<Guest>,
}

impl<'a> Machine<'a> {
    pub(super) fn new(kvm: &'a Kvm) -> Self {
        Self { kvm, guest: None }
    }

    /// Runs `program` for at most `budget` (and [`GRACE`] more if it does not answer the kick).
    pub(super) fn run(&mut self, program: &'static Program, budget: Duration) -> Outcome {
        let (outcome, guest) = match self.try_run(program, budget) {
            Ok(run) => run,
            Err(NotSetUp { step, errno }) => (Outcome::bare(End::NotSetUp(step, errno)), None),
        };
        let trusted = matches!(outcome.end, End::Halted | End::Fault(_));
        self.guest = guest.filter(|_| trusted);
        outcome
    }

    fn try_run(
        &mut self,
        program: &'static Program,
        budget: Duration,
    ) -> Result<(Outcome, Option<Guest>), NotSetUp> {
        let guest = match self.guest.take() {
            Some(guest) => guest,
            None => Guest::new(self.kvm)?,
        };
        guest.prepare(program)?;
        guest.run(program, budget)
    }
}

struct NotSetUp {
    step: &'static str,
    errno: i32,
}

/// Names the step whose system call failed.
trait Step<T> {
    fn step(self, step: &'static str) -> Result<T, NotSetUp>;
}

impl<T, E: Into<io::Error>> Step<T> for Result<T, E> {
    fn step(self, step: &'static str) -> Result<T, NotSetUp> {
        self.map_err(|error| NotSetUp { step, errno: error.into().raw_os_error().unwrap_or(0) })
    }
}

/// Fields are dropped in this order: the memory is unmapped only when the VM that uses it is gone.
struct Guest {
    vcpu: VcpuFd,
    vm: VmFd,
    memory: MmapRegion<()>,
    /// System registers of the vCPU when it was new.
    reset: kvm_sregs,
    leaf1_ecx: u32,
}

impl Guest {
    fn new(kvm: &Kvm) -> Result<Self, NotSetUp> {
        let vm = kvm.create_vm().step("KVM_CREATE_VM")?;
        // Needed on some Intel processors, unknown to everything else: not worth failing for.
        let _ = vm.set_tss_address(TSS_ADDRESS);
        let memory = MmapRegion::new(MEMORY_SIZE).map_err(io::Error::other).step("mmap")?;
        let region = kvm_userspace_memory_region {
            slot: 0,
            flags: 0,
            guest_phys_addr: 0,
            memory_size: MEMORY_SIZE as u64,
            userspace_addr: memory.as_ptr() as u64,
        };
        // SAFETY: the region is the whole of `memory`, which `Guest` keeps mapped until after
        // the VM is closed.
        unsafe { vm.set_user_memory_region(region) }.step("KVM_SET_USER_MEMORY_REGION")?;
        let vcpu = vm.create_vcpu(0).step("KVM_CREATE_VCPU")?;
        let cpuid =
            kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).step("KVM_GET_SUPPORTED_CPUID")?;
        vcpu.set_cpuid2(&cpuid).step("KVM_SET_CPUID2")?;
        let reset = vcpu.get_sregs().step("KVM_GET_SREGS")?;
        Ok(Self { vcpu, vm, memory, reset, leaf1_ecx: leaf1_ecx(&cpuid) })
    }

    /// Puts the program into memory and the vCPU in front of it.
    fn prepare(&self, program: &Program) -> Result<(), NotSetUp> {
        load(&self.memory, program).map_err(io::Error::other).step("writing guest memory")?;
        let mut sregs = self.reset;
        set_mode(&mut sregs, program.mode, self.leaf1_ecx);
        self.vcpu.set_sregs(&sregs).step("KVM_SET_SREGS")?;
        let regs = kvm_regs { rip: CODE, rsp: STACK_TOP, rflags: 2, ..Default::default() };
        self.vcpu.set_regs(&regs).step("KVM_SET_REGS")
    }

    /// Runs it on a thread, which hands the guest back at the end.
    fn run(
        self,
        program: &'static Program,
        budget: Duration,
    ) -> Result<(Outcome, Option<Self>), NotSetUp> {
        let kick = Kick::new(&self.vcpu, self.vm.run_size())?;
        let late = Arc::clone(&kick.late);
        let (sender, ended) = mpsc::channel();
        let run = move || {
            let mut guest = self;
            let outcome = guest.run_to_end(program, &late);
            // The receiver is gone when it gave up on us; then nobody wants to know.
            let _ = sender.send((outcome, Some(guest)));
        };
        let thread = thread::Builder::new().name("doctor-vcpu".to_owned()).spawn(run);
        let thread = thread.step("starting a thread")?;
        if let Ok(run) = ended.recv_timeout(budget) {
            return Ok(run);
        }
        kick.request_exit();
        // Fails only when the thread has just ended, and then the outcome is already in the channel.
        let _ = thread.kill(kick_signal());
        Ok(ended.recv_timeout(GRACE).unwrap_or_else(|_| (Outcome::bare(End::Stuck), None)))
    }

    fn run_to_end(&mut self, program: &Program, late: &AtomicBool) -> Outcome {
        let mut greetings = Vec::new();
        let before = thread_cpu_time();
        let end = self.run_until_end(late, &mut greetings);
        let at_end = thread_cpu_time();
        let memory_holds = program.expected.iter().all(|(address, bytes)| {
            let mut found = vec![0; bytes.len()];
            self.read_memory(*address, &mut found) && found == *bytes
        });
        let as_expected = memory_holds && greetings.len() == program.greetings;
        let times = greetings.into_iter().chain([at_end]);
        let times = times.map(|time| time.saturating_sub(before)).collect();
        self.name_fault(Outcome { end, regs: self.vcpu.get_regs().ok(), as_expected, times })
    }

    /// If an exception handler halted the guest, tells which, and where the exception was raised.
    fn name_fault(&self, outcome: Outcome) -> Outcome {
        let mut fault = [0];
        let halted = outcome.end == End::Halted && self.read_memory(FAULT, &mut fault);
        let (true, Some(vector)) = (halted, fault[0].checked_sub(1)) else {
            return outcome;
        };
        let regs = outcome.regs.map(|regs| {
            let mut rip = [0; 8];
            let frame = regs.rsp + if programs::has_error_code(vector) { 8 } else { 0 };
            self.read_memory(frame, &mut rip);
            kvm_regs { rip: u64::from_le_bytes(rip), ..regs }
        });
        Outcome { end: End::Fault(vector), regs, ..outcome }
    }

    /// Notes the time of each greeting.
    fn run_until_end(&mut self, late: &AtomicBool, greetings: &mut Vec<Duration>) -> End {
        for _ in 0..MAX_EXITS {
            match self.vcpu.run() {
                Ok(VcpuExit::IoOut(PORT, [GREETING])) => greetings.push(thread_cpu_time()),
                Ok(VcpuExit::Hlt) => return End::Halted,
                Ok(VcpuExit::Shutdown) => return End::Shutdown,
                Ok(VcpuExit::FailEntry(reason, _)) => return End::FailEntry(reason),
                Ok(VcpuExit::InternalError) => {
                    // SAFETY: the exit reason says that `internal` is the union's live field.
                    let internal = unsafe { self.vcpu.get_kvm_run().__bindgen_anon_1.internal };
                    return End::InternalError(internal.suberror);
                }
                Ok(other) => return End::Unexpected(format!("{other:?}")),
                Err(error) if is_interruption(error.errno()) => {
                    if late.load(Ordering::Acquire) {
                        return End::OutOfTime;
                    }
                }
                Err(error) => return End::RunFailed(error.errno()),
            }
        }
        End::Unexpected(format!("{MAX_EXITS} exits"))
    }

    fn read_memory(&self, address: u64, into: &mut [u8]) -> bool {
        self.memory.as_volatile_slice().read_slice(into, address as usize).is_ok()
    }
}

fn is_interruption(errno: i32) -> bool {
    errno == libc::EINTR || errno == libc::EAGAIN
}

/// ECX of CPUID leaf 1.
pub(super) fn leaf1_ecx(cpuid: &CpuId) -> u32 {
    cpuid.as_slice().iter().find(|entry| entry.function == 1).map_or(0, |entry| entry.ecx)
}

/// The kick's half that another thread holds: its own mapping of the vCPU's `kvm_run` page, so
/// that it stays valid when the vCPU is closed first.
struct Kick {
    page: *mut libc::c_void,
    size: usize,
    late: Arc<AtomicBool>,
}

impl Kick {
    fn new(vcpu: &VcpuFd, size: usize) -> Result<Self, NotSetUp> {
        register_signal_handler(kick_signal(), ignore_signal).step("sigaction")?;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new shared mapping at an address of the kernel's choice, of a descriptor
        // that is open during the call.
        let page = unsafe {
            libc::mmap(ptr::null_mut(), size, protection, libc::MAP_SHARED, vcpu.as_raw_fd(), 0)
        };
        if page == libc::MAP_FAILED {
            return Err(io::Error::last_os_error()).step("mapping kvm_run");
        }
        Ok(Self { page, size, late: Arc::default() })
    }

    /// Makes the current or the next `KVM_RUN` return with `EINTR`; the signal that has to follow
    /// interrupts one that is inside the guest.
    fn request_exit(&self) {
        self.late.store(true, Ordering::Release);
        // SAFETY: `page` maps a `kvm_run`, whose `immediate_exit` is one byte that user space
        // may write at any time; this mapping lives as long as `self`.
        let flag = unsafe {
            AtomicU8::from_ptr(self.page.cast::<u8>().add(offset_of!(kvm_run, immediate_exit)))
        };
        flag.store(1, Ordering::Release);
    }
}

impl Drop for Kick {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping that `new` made, which nothing refers to any more.
        unsafe { libc::munmap(self.page, self.size) };
    }
}

fn kick_signal() -> i32 {
    // Not the first one: that is what VMMs commonly use for their own vCPUs.
    SIGRTMIN() + 7
}

extern "C" fn ignore_signal(_: i32, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}

fn thread_cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes one timespec into a live local. The clock always exists, and a
    // failure would leave zero.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Puts code, descriptor tables and page tables into memory.
fn load(memory: &MmapRegion<()>, program: &Program) -> Result<(), vm_memory::VolatileMemoryError> {
    let slice = memory.as_volatile_slice();
    let at = |address: u64| address as usize;
    // What the program before has left.
    slice.write_slice(&[0; (RESULTS_END - RESULT) as usize], at(RESULT))?;
    slice.write_slice(&program.code(), at(CODE))?;
    // Flat 64-bit code and flat data (Intel SDM vol. 3, 3.4.5), each accessed, present, ring 0.
    slice.write_obj(0x00af_9b00_0000_ffff_u64, at(GDT) + usize::from(CODE_SELECTOR))?;
    slice.write_obj(0x00cf_9300_0000_ffff_u64, at(GDT) + usize::from(DATA_SELECTOR))?;
    for vector in 0..VECTORS {
        let handler = HANDLERS + HANDLER_SIZE * u64::from(vector);
        slice.write_slice(&programs::handler(vector), at(handler))?;
        // A present interrupt gate (vol. 3, 6.14.1): offset in two halves around the selector.
        let gate = handler | u64::from(CODE_SELECTOR) << 16 | 0x8e00 << 32;
        slice.write_obj(gate, at(IDT + 16 * u64::from(vector)))?;
    }
    // Identity map of the first 2 MiB: present and writable, the last level a large page.
    slice.write_obj(PDPT | 0b11, at(PML4))?;
    slice.write_obj(PAGE_DIRECTORY | 0b11, at(PDPT))?;
    slice.write_obj(0b1000_0011_u64, at(PAGE_DIRECTORY))
}

fn set_mode(sregs: &mut kvm_sregs, mode: Mode, leaf1_ecx: u32) {
    match mode {
        Mode::Real => {
            sregs.cs.base = 0;
            sregs.cs.selector = 0;
        }
        Mode::Long => set_long_mode(sregs, leaf1_ecx),
    }
}

fn set_long_mode(sregs: &mut kvm_sregs, leaf1_ecx: u32) {
    const CR0_PE_MP_ET_NE_WP_PG: u64 = 1 | 1 << 1 | 1 << 4 | 1 << 5 | 1 << 16 | 1 << 31;
    const CR4_PAE_OSFXSR_OSXMMEXCPT: u64 = 1 << 5 | 1 << 9 | 1 << 10;
    const CR4_OSXSAVE: u64 = 1 << 18;
    const EFER_LME_LMA: u64 = 1 << 8 | 1 << 10;
    let code = kvm_segment {
        limit: 0xffff_ffff,
        selector: CODE_SELECTOR,
        type_: 0xb,
        present: 1,
        s: 1,
        l: 1,
        g: 1,
        ..Default::default()
    };
    let data = kvm_segment { selector: DATA_SELECTOR, type_: 3, l: 0, db: 1, ..code };
    sregs.cs = code;
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    (sregs.gdt.base, sregs.gdt.limit) = (GDT, DATA_SELECTOR + 7);
    (sregs.idt.base, sregs.idt.limit) = (IDT, 16 * u16::from(VECTORS) - 1);
    sregs.cr0 = CR0_PE_MP_ET_NE_WP_PG;
    sregs.cr3 = PML4;
    sregs.cr4 = CR4_PAE_OSFXSR_OSXMMEXCPT;
    if Feature::Xsave.offered_by(leaf1_ecx) {
        sregs.cr4 |= CR4_OSXSAVE;
    }
    sregs.efer = EFER_LME_LMA;
}
