//! `TinyVm`: a virtual machine for guests of twenty bytes, on kvm-ioctls and nothing else.
//!
//! It has 512 KiB of memory at 0 and starts its vCPUs in real mode, with all segments at 0, so that
//! guests are written in plain 16-bit instructions. Those run on every KVM, be it one that
//! interprets its guests. What lies between 512 KiB and 1 MiB is nobody's, so accesses exit.
//!
//! Included by path; it needs nothing else of the harness.

use std::env;
use std::io::{self, Write};
use std::mem::offset_of;
use std::os::fd::AsRawFd;
use std::ptr;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use kvm_bindings::{
    KVM_MEM_LOG_DIRTY_PAGES, kvm_regs, kvm_run, kvm_segment, kvm_userspace_memory_region,
};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use vm_memory::{Bytes, MmapRegion, VolatileMemory};
use vmm_sys_util::signal::{SIGRTMIN, register_signal_handler};

/// Size of guest memory.
pub const MEMORY_SIZE: usize = 0x8_0000;
/// Where a guest's code starts.
pub const CODE: u16 = 0x8000;
/// Initial stack pointer.
pub const STACK: u16 = 0x7000;
/// The only memory slot.
pub const SLOT: u32 = 0;

/// A guest that has not ended by then hangs. Generous: the host may be emulated and busy.
const HANGS_AFTER: Duration = Duration::from_secs(60);

/// What a virtual machine is made of.
pub struct Shape {
    /// Interrupt controllers in the kernel. Without them, `hlt` exits.
    pub irqchip: bool,
    /// Log of the pages that the guest writes.
    pub dirty_log: bool,
    /// Number of vCPUs.
    pub vcpus: u64,
}

impl Default for Shape {
    fn default() -> Self {
        Self { irqchip: false, dirty_log: false, vcpus: 1 }
    }
}

/// One exit, with its data copied out.
#[derive(Debug, PartialEq, Eq)]
pub enum Exit {
    Out(u16, Vec<u8>),
    In(u16, usize),
    MmioWrite(u64, Vec<u8>),
    MmioRead(u64, usize),
    Halt,
    Shutdown,
    /// `KVM_RUN` failed with this errno.
    Failed(i32),
    Other(String),
}

/// See the file's head. Fields are dropped in this order: memory goes last.
pub struct TinyVm {
    pub vcpus: Vec<VcpuFd>,
    pub vm: VmFd,
    memory: MmapRegion<()>,
}

impl TinyVm {
    /// A machine of this shape whose vCPUs all start at [`CODE`], where `code` is.
    pub fn new(kvm: &Kvm, shape: &Shape, code: &[u8]) -> Self {
        let vm = kvm.create_vm().unwrap();
        // Some Intel processors need a place for the TSS of real mode.
        vm.set_tss_address(0xfffb_d000).unwrap();
        if shape.irqchip {
            vm.create_irq_chip().unwrap();
        }
        let memory = MmapRegion::new(MEMORY_SIZE).unwrap();
        let region = kvm_userspace_memory_region {
            slot: SLOT,
            flags: if shape.dirty_log { KVM_MEM_LOG_DIRTY_PAGES } else { 0 },
            guest_phys_addr: 0,
            memory_size: MEMORY_SIZE as u64,
            userspace_addr: memory.as_ptr() as u64,
        };
        // SAFETY: the region is the whole of `memory`, which outlives the VM (see the fields).
        unsafe { vm.set_user_memory_region(region) }.unwrap();
        let vcpus = (0..shape.vcpus).map(|id| vm.create_vcpu(id).unwrap()).collect();
        let machine = Self { vcpus, vm, memory };
        machine.load(CODE, code);
        machine.vcpus.iter().for_each(|vcpu| start_at(vcpu, CODE));
        machine
    }

    /// Writes guest memory.
    pub fn load(&self, address: u16, bytes: &[u8]) {
        self.memory.as_volatile_slice().write_slice(bytes, address.into()).unwrap();
    }

    /// Reads one byte of guest memory.
    pub fn byte(&self, address: u16) -> u8 {
        self.memory.as_volatile_slice().read_obj(address.into()).unwrap()
    }

    /// Makes `handler` the one of this interrupt vector.
    pub fn set_vector(&self, vector: u8, handler: u16) {
        // Offset and segment (Intel SDM vol. 3, 21.1.4).
        let [low, high] = handler.to_le_bytes();
        self.load(4 * u16::from(vector), &[low, high, 0, 0]);
    }

    /// Runs the first vCPU to its next exit.
    pub fn run(&mut self) -> Exit {
        self.run_with(&[])
    }

    /// Runs the first vCPU to its next exit; if that is a read, `reply` is what the guest gets.
    pub fn run_with(&mut self, reply: &[u8]) -> Exit {
        next_exit(&mut self.vcpus[0], reply)
    }

    /// Indices of the pages that the guest has written since the last call.
    pub fn dirty_pages(&self) -> Vec<usize> {
        let words = self.vm.get_dirty_log(SLOT, MEMORY_SIZE).unwrap();
        (0..64 * words.len()).filter(|page| words[page / 64] >> (page % 64) & 1 == 1).collect()
    }
}

/// Sets a vCPU to real mode at this address, with an empty stack at [`STACK`].
pub fn start_at(vcpu: &VcpuFd, address: u16) {
    let mut sregs = vcpu.get_sregs().unwrap();
    (sregs.cs.base, sregs.cs.selector) = (0, 0);
    vcpu.set_sregs(&sregs).unwrap();
    let regs = kvm_regs { rip: address.into(), rsp: STACK.into(), rflags: 2, ..Default::default() };
    vcpu.set_regs(&regs).unwrap();
}

/// Sets a vCPU to flat 32-bit protected mode without any interrupt descriptor, where it already is.
pub fn without_descriptors(vcpu: &VcpuFd) {
    let mut sregs = vcpu.get_sregs().unwrap();
    let flat = |type_| kvm_segment {
        limit: 0xffff_ffff,
        selector: 8,
        type_,
        present: 1,
        db: 1,
        s: 1,
        g: 1,
        ..Default::default()
    };
    sregs.cs = flat(0xb);
    (sregs.ds, sregs.es, sregs.ss) = (flat(3), flat(3), flat(3));
    sregs.idt.limit = 0;
    sregs.cr0 |= 1;
    vcpu.set_sregs(&sregs).unwrap();
}

/// Runs a vCPU to its next exit; if that is a read, `reply` is what the guest gets.
pub fn next_exit(vcpu: &mut VcpuFd, reply: &[u8]) -> Exit {
    match vcpu.run() {
        Ok(VcpuExit::IoOut(port, data)) => Exit::Out(port, data.to_vec()),
        Ok(VcpuExit::IoIn(port, data)) => Exit::In(port, answer(data, reply)),
        Ok(VcpuExit::MmioWrite(address, data)) => Exit::MmioWrite(address, data.to_vec()),
        Ok(VcpuExit::MmioRead(address, data)) => Exit::MmioRead(address, answer(data, reply)),
        Ok(VcpuExit::Hlt) => Exit::Halt,
        Ok(VcpuExit::Shutdown) => Exit::Shutdown,
        Ok(other) => Exit::Other(format!("{other:?}")),
        Err(error) => Exit::Failed(error.errno()),
    }
}

fn answer(data: &mut [u8], reply: &[u8]) -> usize {
    data.iter_mut().zip(reply).for_each(|(byte, reply)| *byte = *reply);
    data.len()
}

/// Stops a vCPU that another thread runs. It has its own mapping of the vCPU's `kvm_run`.
pub struct Kick {
    run: *mut libc::c_void,
    size: usize,
}

// SAFETY: the mapping belongs to the process, not to a thread, and the one field that is
// accessed through it is atomic.
unsafe impl Sync for Kick {}

impl Kick {
    /// For this vCPU of that machine.
    pub fn new(machine: &TinyVm, vcpu: usize) -> Self {
        register_signal_handler(SIGRTMIN(), ignore_signal).unwrap();
        let (size, protection) = (machine.vm.run_size(), libc::PROT_READ | libc::PROT_WRITE);
        let fd = machine.vcpus[vcpu].as_raw_fd();
        // SAFETY: a new shared mapping at an address of the kernel's choice.
        let run = unsafe { libc::mmap(ptr::null_mut(), size, protection, libc::MAP_SHARED, fd, 0) };
        assert_ne!(run, libc::MAP_FAILED, "{}", io::Error::last_os_error());
        Self { run, size }
    }

    /// Sets or clears `immediate_exit`.
    pub fn set_immediate_exit(&self, value: u8) {
        let offset = offset_of!(kvm_run, immediate_exit);
        // SAFETY: one byte inside the mapping, which lives as long as `self`, and which user
        // space may write at any time.
        let flag = unsafe { AtomicU8::from_ptr(self.run.cast::<u8>().add(offset)) };
        flag.store(value, Ordering::Release);
    }

    /// Makes `thread`, which runs the vCPU, return from `KVM_RUN`, be it in the guest or about to
    /// enter it.
    pub fn stop(&self, thread: libc::pthread_t) {
        self.set_immediate_exit(1);
        // SAFETY: the caller has the thread waiting for this kick, so it exists.
        assert_eq!(unsafe { libc::pthread_kill(thread, SIGRTMIN()) }, 0);
    }
}

impl Drop for Kick {
    fn drop(&mut self) {
        // SAFETY: the mapping of `new`; nothing refers to it any more.
        unsafe { libc::munmap(self.run, self.size) };
    }
}

/// The calling thread, as [`Kick::stop`] wants it.
pub fn this_thread() -> libc::pthread_t {
    // SAFETY: it has no preconditions.
    unsafe { libc::pthread_self() }
}

extern "C" fn ignore_signal(_: i32, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}

/// Runs a test that needs `/dev/kvm`, and fails it when there is none, or when it hangs.
///
/// Where `CUBE_ALLOW_SKIP` has the word `kvm`, a missing `/dev/kvm` is a loud line instead.
pub fn on_kvm(test: impl FnOnce(Kvm) + Send + 'static) {
    let allowed = env::var("CUBE_ALLOW_SKIP").unwrap_or_default();
    let skip = allowed.split([',', ' ']).any(|word| word == "kvm");
    match (Kvm::new(), skip) {
        (Ok(kvm), _) => until_done(move || test(kvm)),
        (Err(error), true) => tell_skipped(&format!("/dev/kvm: {error}")),
        (Err(error), false) => panic!(
            "/dev/kvm: {error} (see cube-vmm doctor; CUBE_ALLOW_SKIP=kvm to do without these tests)"
        ),
    }
}

fn until_done(test: impl FnOnce() + Send + 'static) {
    let (sender, done) = mpsc::channel();
    let name = thread::current().name().unwrap_or("guest").to_owned();
    let run = move || {
        test();
        let _ = sender.send(());
    };
    let thread = thread::Builder::new().name(name).spawn(run).unwrap();
    match done.recv_timeout(HANGS_AFTER) {
        // A thread that panicked has dropped its sender; its panic becomes that of the test.
        Ok(()) | Err(RecvTimeoutError::Disconnected) => {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        }
        Err(RecvTimeoutError::Timeout) => panic!("the guest hangs"),
    }
}

/// Written to the stream itself: the test harness would swallow it from `eprintln`.
fn tell_skipped(why: &str) {
    let test = thread::current().name().unwrap_or("test").to_owned();
    let _ = writeln!(io::stderr(), "\x1b[1;31mSKIPPED {test}: {why}\x1b[0m");
}
