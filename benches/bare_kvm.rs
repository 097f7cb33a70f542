//! The floor: the least that any VMM has to do to reach a guest's first instruction, and no more.
//!
//! It runs in a process of its own, the same program started again, so that the cost of starting a
//! process is in it as it is in a VMM's.

use anyhow::{Context, ensure};
use kvm_bindings::{kvm_regs, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuExit};
use serde::{Deserialize, Serialize};
use vm_memory::{Bytes, MmapRegion, VolatileMemory};

use crate::process::monotonic_ns;
use crate::tiny_guest::{CODE, DEBUG_PORT, STAMP};

/// The argument that makes `floor` run [`run`] instead of measuring, with the memory of the next one.
pub const ARGUMENT: &str = "--bare-kvm";

/// Memory of every guest here, in MiB.
pub const MEMORY_MIB: usize = 128;

/// The guest's code starts here, in real mode.
const ENTRY: u64 = 0x1000;

/// When each step was done, in nanoseconds of CLOCK_MONOTONIC.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Steps {
    /// `main` was entered.
    pub main: u64,
    /// KVM_CREATE_VM returned.
    pub vm: u64,
    /// The memory slot is set.
    pub memory: u64,
    /// KVM_CREATE_IRQCHIP returned.
    pub irqchip: u64,
    /// The vCPU exists and has its registers.
    pub vcpu: u64,
    /// The guest's first instruction that exits has exited.
    pub first_exit: u64,
}

/// Does what the command line says, which has [`ARGUMENT`] and the MiB; prints the steps.
pub fn be_the_floor(main: u64) -> anyhow::Result<()> {
    let mib = std::env::args().nth(2).and_then(|mib| mib.parse().ok()).unwrap_or(MEMORY_MIB);
    println!("{}", serde_json::to_string(&run(main, mib)?)?);
    Ok(())
}

/// Runs a guest with so many MiB to its first exit. `main` is when the process entered its `main`.
pub fn run(main: u64, mib: usize) -> anyhow::Result<Steps> {
    let kvm = Kvm::new().context("/dev/kvm")?;
    let vm = kvm.create_vm().context("KVM_CREATE_VM")?;
    let vm_created = monotonic_ns();
    // The slot first: after the interrupt controllers it waits for a grace period.
    let memory: MmapRegion<()> = MmapRegion::new(mib << 20).context("guest memory")?;
    memory.as_volatile_slice().write_slice(CODE, ENTRY as usize).context("guest memory")?;
    let region = kvm_userspace_memory_region {
        slot: 0,
        flags: 0,
        guest_phys_addr: 0,
        memory_size: memory.size() as u64,
        userspace_addr: memory.as_ptr() as u64,
    };
    // SAFETY: the region is the whole of `memory`, which is dropped after the vCPU has run.
    unsafe { vm.set_user_memory_region(region) }.context("KVM_SET_USER_MEMORY_REGION")?;
    let memory_mapped = monotonic_ns();
    vm.set_tss_address(0xfffb_d000).context("KVM_SET_TSS_ADDR")?;
    vm.create_irq_chip().context("KVM_CREATE_IRQCHIP")?;
    let irqchip = monotonic_ns();
    let mut vcpu = vm.create_vcpu(0).context("KVM_CREATE_VCPU")?;
    let mut sregs = vcpu.get_sregs().context("KVM_GET_SREGS")?;
    (sregs.cs.base, sregs.cs.selector) = (0, 0);
    vcpu.set_sregs(&sregs).context("KVM_SET_SREGS")?;
    let regs = kvm_regs { rip: ENTRY, rflags: 2, ..Default::default() };
    vcpu.set_regs(&regs).context("KVM_SET_REGS")?;
    let vcpu_ready = monotonic_ns();
    let exit = vcpu.run().context("KVM_RUN")?;
    let first_exit = monotonic_ns();
    let stamped = matches!(&exit, VcpuExit::IoOut(port, [STAMP]) if *port == u16::from(DEBUG_PORT));
    ensure!(stamped, "the first exit is {exit:?}, not the guest's stamp");
    Ok(Steps { main, vm: vm_created, memory: memory_mapped, irqchip, vcpu: vcpu_ready, first_exit })
}
