//! Where the vCPUs stand in a guest that does not answer: the first thing to know of a boot that
//! hangs.

use std::time::Duration;

use kvm_bindings::{
    KVM_MP_STATE_HALTED, KVM_MP_STATE_RUNNABLE, Msrs, kvm_msr_entry, kvm_regs, kvm_sregs,
};
use kvm_ioctls::VcpuFd;

use crate::vcpu::Vcpu;
use crate::vm::Vm;

/// How long a vCPU may take to leave the guest. One that takes longer is in a device.
const PATIENCE: Duration = Duration::from_secs(1);
/// vCPUs that are told of.
const TOLD: usize = 8;

impl Vm {
    /// Takes the vCPUs out of the guest and tells in words where each was. Only before the VM ends:
    /// a vCPU that is stuck in a device does not come out, and cannot be used any more.
    #[must_use]
    pub fn positions(&self) -> String {
        for vcpu in &self.vcpus {
            // One that has ended is told of below.
            let _ = vcpu.ask_to_park();
        }
        let told = self.vcpus.iter().take(TOLD).map(position);
        told.collect::<Vec<_>>().join(", ")
    }
}

fn position(vcpu: &Vcpu) -> String {
    let id = vcpu.id();
    if !vcpu.wait_for(PATIENCE) {
        return format!("vCPU {id} does not leave a device or the kernel");
    }
    let stands = vcpu.with(move |fd| {
        if tracing::enabled!(tracing::Level::DEBUG) {
            tell_timer(id, fd);
        }
        stands(fd)
    });
    match stands {
        Ok(Ok(stands)) => format!("vCPU {id} {stands}"),
        Ok(Err(error)) => format!("vCPU {id} stands at an unknown place: {error}"),
        Err(_) => format!("vCPU {id} has ended"),
    }
}

fn stands(fd: &VcpuFd) -> Result<String, kvm_ioctls::Error> {
    let kvm_regs { rip, rflags, .. } = fd.get_regs()?;
    let kvm_sregs { cr0, .. } = fd.get_sregs()?;
    /// Interrupts are taken (SDM 3.4.3.3), pages are on (SDM 2.5).
    const INTERRUPTS: u64 = 1 << 9;
    const PAGING: u64 = 1 << 31;
    let does = match fd.get_mp_state()?.mp_state {
        KVM_MP_STATE_RUNNABLE => "runs at",
        KVM_MP_STATE_HALTED => "is halted at",
        _ => "has not been started, at",
    };
    let deaf = if rflags & INTERRUPTS == 0 { " without interrupts" } else { "" };
    let early = if cr0 & PAGING == 0 { " before it uses pages" } else { "" };
    Ok(format!("{does} {rip:#x}{deaf}{early}"))
}

/// What could wake it: the local APIC (registers of SDM table 11-1) and the time.
fn tell_timer(id: u32, fd: &VcpuFd) {
    const IA32_TSC: u32 = 0x10;
    const IA32_TSC_DEADLINE: u32 = 0x6e0;
    let Ok(lapic) = fd.get_lapic() else { return };
    let register = |offset: usize| {
        let bytes = lapic.regs.get(offset..offset + 4).unwrap_or_default();
        bytes.iter().rev().fold(0_u32, |value, byte| value << 8 | u32::from(byte.cast_unsigned()))
    };
    let pages = |first: usize| (0..8).map(|n| register(first + n * 16)).collect::<Vec<_>>();
    let ask = [IA32_TSC, IA32_TSC_DEADLINE]
        .map(|index| kvm_msr_entry { index, ..kvm_msr_entry::default() });
    let times = Msrs::from_entries(&ask).ok().and_then(|mut msrs| {
        fd.get_msrs(&mut msrs).ok()?;
        Some(msrs.as_slice().iter().map(|msr| msr.data).collect::<Vec<_>>())
    });
    tracing::debug!(
        vcpu = id,
        timer = format!("{:#x}", register(0x320)),
        initial_count = register(0x380),
        count = register(0x390),
        priority = format!("{:#x}", register(0x80)),
        requested = format!("{:x?}", pages(0x200)),
        in_service = format!("{:x?}", pages(0x100)),
        tsc_and_deadline = format!("{times:?}"),
        "stands"
    );
}
