//! The state of one vCPU: read from KVM and set in it, in the order that KVM's registers depend on
//! each other.

use ciborium::Value;
use kvm_bindings::{
    CpuId, Msrs, Xsave, kvm_cpuid_entry2, kvm_debugregs, kvm_lapic_state, kvm_mp_state,
    kvm_msr_entry, kvm_regs, kvm_sregs, kvm_vcpu_events, kvm_xcrs, kvm_xsave,
};
use kvm_ioctls::VcpuFd;
use serde::{Deserialize, Serialize};

use super::features;
use crate::kvm::KvmError;

/// The time stamp counter.
const IA32_TSC: u32 = 0x10;
/// When the local APIC's timer fires, in units of the time stamp counter.
const IA32_TSC_DEADLINE: u32 = 0x6e0;

/// What a time stamp counter may run at, in kHz.
const TSC_KHZ: std::ops::RangeInclusive<u32> = 100_000..=20_000_000;

/// Bytes of the extended state before there were larger ones.
const XSAVE_SIZE: usize = size_of::<kvm_xsave>();

/// The state of a vCPU.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VcpuState {
    cpuid: Vec<kvm_cpuid_entry2>,
    /// Thousands of ticks per second of the time stamp counter; 0: the host did not say.
    tsc_khz: u32,
    mp_state: kvm_mp_state,
    regs: kvm_regs,
    sregs: kvm_sregs,
    /// As bytes, since its length is the host's.
    xsave: Value,
    xcrs: kvm_xcrs,
    debugregs: kvm_debugregs,
    lapic: kvm_lapic_state,
    msrs: Vec<kvm_msr_entry>,
    events: kvm_vcpu_events,
}

impl Default for VcpuState {
    fn default() -> Self {
        Self {
            cpuid: Vec::new(),
            tsc_khz: 0,
            mp_state: kvm_mp_state::default(),
            regs: kvm_regs::default(),
            sregs: kvm_sregs::default(),
            xsave: Value::Bytes(Vec::new()),
            xcrs: kvm_xcrs::default(),
            debugregs: kvm_debugregs::default(),
            lapic: kvm_lapic_state::default(),
            msrs: Vec::new(),
            events: kvm_vcpu_events::default(),
        }
    }
}

/// Why a vCPU does not take a state.
#[derive(Debug, thiserror::Error)]
pub enum VcpuStateError {
    /// KVM refused.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// The processor lacks something.
    #[error("this host's processor lacks features that the guest has found: {0}")]
    Features(String),
    /// A register of which the host knows nothing, or another value.
    #[error("model-specific register {index:#x} cannot be set to {value:#x} on this host")]
    Msr {
        /// Its number.
        index: u32,
        /// The saved value.
        value: u64,
    },
    /// Another maker's processor.
    #[error("the guest runs on processors of {saved:?}, this host's is of {here:?}")]
    Vendor {
        /// Where it was saved.
        saved: String,
        /// Here.
        here: String,
    },
    /// A counter that no processor has.
    #[error("the guest's time stamp counter cannot have run at {0} kHz")]
    ImpossibleTsc(u32),
    /// The clocks differ.
    #[error(
        "the guest's time stamp counter runs at {saved} kHz, this host's at {here} kHz and cannot \
         be scaled"
    )]
    Tsc {
        /// Where it was saved.
        saved: u32,
        /// Here.
        here: u32,
    },
    /// More registers than there are.
    #[error("{what} of the saved vCPU has the impossible size {size}")]
    Size {
        /// Which part.
        what: &'static str,
        /// What stands there.
        size: usize,
    },
}

fn refused(what: &'static str) -> impl Fn(kvm_ioctls::Error) -> KvmError {
    move |source| KvmError::Call { what, source }
}

impl VcpuState {
    /// Reads the state of a parked vCPU. `cpuid` is what it was given, `msrs` are the registers that
    /// make it up, `xsave_size` the bytes of its extended state.
    pub fn save(
        fd: &VcpuFd,
        cpuid: Vec<kvm_cpuid_entry2>,
        msrs: &[u32],
        xsave_size: usize,
    ) -> Result<Self, KvmError> {
        // First, since it may deliver events to the local APIC; and the events last, since what
        // else is read may change them.
        let mp_state = fd.get_mp_state().map_err(refused("read the run state"))?;
        Ok(Self {
            cpuid,
            tsc_khz: fd.get_tsc_khz().unwrap_or(0),
            mp_state,
            regs: fd.get_regs().map_err(refused("read registers"))?,
            sregs: fd.get_sregs().map_err(refused("read system registers"))?,
            xsave: read_xsave(fd, xsave_size)?,
            xcrs: fd.get_xcrs().map_err(refused("read extended control registers"))?,
            debugregs: fd.get_debug_regs().map_err(refused("read debug registers"))?,
            lapic: fd.get_lapic().map_err(refused("read the local APIC"))?,
            msrs: read_msrs(fd, msrs)?,
            events: fd.get_vcpu_events().map_err(refused("read pending events"))?,
        })
    }

    /// The features that its guest has found.
    pub fn cpuid(&self) -> &[kvm_cpuid_entry2] {
        &self.cpuid
    }

    /// Refuses what this host, whose KVM can give `supported`, has no features for.
    pub fn check_features(&self, supported: &CpuId) -> Result<(), VcpuStateError> {
        let lacking = features::lacking(&self.cpuid, supported.as_slice());
        if lacking.is_empty() { Ok(()) } else { Err(VcpuStateError::Features(lacking.join(", "))) }
    }

    /// Refuses what can be told not to run here without asking KVM.
    pub fn check_processor(&self) -> Result<(), VcpuStateError> {
        if let Some((saved, here)) = features::other_vendor(&self.cpuid) {
            return Err(VcpuStateError::Vendor { saved, here });
        }
        let lacking = features::lacking_here(&self.cpuid);
        if !lacking.is_empty() {
            return Err(VcpuStateError::Features(lacking.join(", ")));
        }
        if self.tsc_khz != 0 && !TSC_KHZ.contains(&self.tsc_khz) {
            return Err(VcpuStateError::ImpossibleTsc(self.tsc_khz));
        }
        Ok(())
    }

    /// Sets the state of a vCPU that has never run.
    pub fn apply(&self, fd: &VcpuFd, xsave_size: usize) -> Result<(), VcpuStateError> {
        // What registers may hold depends on the features.
        let size = self.cpuid.len();
        let cpuid = CpuId::from_entries(&self.cpuid)
            .map_err(|_| VcpuStateError::Size { what: "CPUID", size })?;
        fd.set_cpuid2(&cpuid).map_err(refused("set CPU features"))?;
        self.set_tsc_frequency(fd)?;
        fd.set_mp_state(self.mp_state).map_err(refused("set the run state"))?;
        fd.set_regs(&self.regs).map_err(refused("set registers"))?;
        // They say in which mode the local APIC is, before its registers.
        fd.set_sregs(&self.sregs).map_err(refused("set system registers"))?;
        self.write_xsave(fd, xsave_size)?;
        // A processor without XSAVE has none, and takes none.
        if self.xcrs.nr_xcrs > 0 {
            fd.set_xcrs(&self.xcrs).map_err(refused("set extended control registers"))?;
        }
        fd.set_debug_regs(&self.debugregs).map_err(refused("set debug registers"))?;
        // It says in which mode its timer is, before the deadline.
        fd.set_lapic(&self.lapic).map_err(refused("set the local APIC"))?;
        write_msrs(fd, &self.msrs)?;
        fd.set_vcpu_events(&self.events).map_err(refused("set pending events"))?;
        Ok(())
    }

    /// A counter of another pace would make every timer of the guest wrong.
    fn set_tsc_frequency(&self, fd: &VcpuFd) -> Result<(), VcpuStateError> {
        let (saved, here) = (self.tsc_khz, fd.get_tsc_khz().unwrap_or(0));
        if saved == 0 || saved == here || fd.set_tsc_khz(saved).is_ok() {
            return Ok(());
        }
        Err(VcpuStateError::Tsc { saved, here })
    }

    fn write_xsave(&self, fd: &VcpuFd, size: usize) -> Result<(), VcpuStateError> {
        let saved = self.xsave.as_bytes().map_or(&[][..], Vec::as_slice);
        let mut area = xsave_area(size)?;
        let (fixed, more) = saved.split_at_checked(XSAVE_SIZE).unwrap_or_default();
        let words = |bytes: &[u8]| -> Vec<u32> {
            let chunks = bytes.chunks_exact(4);
            chunks.map(|it| it.try_into().map_or(0, u32::from_ne_bytes)).collect()
        };
        let (fixed, more) = (words(fixed), words(more));
        // SAFETY: the length of the flexible part is not changed through this reference.
        let inside = unsafe { area.as_mut_fam_struct() };
        if fixed.len() != inside.xsave.region.len() || more.len() != area.as_slice().len() {
            return Err(VcpuStateError::Size { what: "extended state", size: saved.len() });
        }
        // SAFETY: as above.
        let inside = unsafe { area.as_mut_fam_struct() };
        inside.xsave.region.copy_from_slice(&fixed);
        area.as_mut_slice().copy_from_slice(&more);
        // SAFETY: the area has the size that KVM told for this VM, which is what it reads.
        unsafe { fd.set_xsave2(&area) }.map_err(refused("set the extended state"))?;
        Ok(())
    }
}

/// An area for `size` bytes of extended state, as `KVM_CAP_XSAVE2` tells them: 0 where there is no
/// such capability, and then the size is fixed.
fn xsave_area(size: usize) -> Result<Xsave, KvmError> {
    let words = size.saturating_sub(XSAVE_SIZE).div_ceil(4);
    Xsave::new(words).map_err(|_| KvmError::Call {
        what: "hold the extended state",
        source: kvm_ioctls::Error::new(libc::ENOMEM),
    })
}

fn read_xsave(fd: &VcpuFd, size: usize) -> Result<Value, KvmError> {
    let failed = refused("read the extended state");
    let mut area = xsave_area(size)?;
    if size > XSAVE_SIZE {
        // SAFETY: the area has the size that KVM told for this VM, which is what it writes.
        unsafe { fd.get_xsave2(&mut area) }.map_err(failed)?;
    } else {
        let fixed = fd.get_xsave().map_err(failed)?;
        // SAFETY: the length of the flexible part is not changed through this reference.
        unsafe { area.as_mut_fam_struct() }.xsave.region = fixed.region;
    }
    let fixed = area.as_fam_struct_ref().xsave.region.iter();
    let words = fixed.chain(area.as_slice());
    Ok(Value::Bytes(words.flat_map(|word| word.to_ne_bytes()).collect()))
}

/// Reads the registers of the list. Some of it a host may list and not know.
fn read_msrs(fd: &VcpuFd, list: &[u32]) -> Result<Vec<kvm_msr_entry>, KvmError> {
    let failed = refused("read model-specific registers");
    let mut read = Vec::with_capacity(list.len());
    let mut left = list;
    while !left.is_empty() {
        let entry = |&index: &u32| kvm_msr_entry { index, ..Default::default() };
        let entries: Vec<_> = left.iter().take(MSRS_AT_ONCE).map(entry).collect();
        let mut msrs = from_entries(&entries)?;
        // KVM stops at the first that it does not know.
        let count = fd.get_msrs(&mut msrs).map_err(&failed)?.min(entries.len());
        read.extend(msrs.as_slice().iter().take(count));
        let skip = if count < entries.len() { count + 1 } else { count };
        left = left.get(skip..).unwrap_or_default();
    }
    Ok(read)
}

/// Fewer than KVM takes in one call.
const MSRS_AT_ONCE: usize = 200;
/// More than any host lists.
const MAX_MSRS: usize = 4096;

fn from_entries(entries: &[kvm_msr_entry]) -> Result<Msrs, KvmError> {
    Msrs::from_entries(entries).map_err(|_| KvmError::Call {
        what: "take so many model-specific registers",
        source: kvm_ioctls::Error::new(libc::E2BIG),
    })
}

/// Sets the registers: the counter first, and the deadline that is measured by it last.
fn write_msrs(fd: &VcpuFd, saved: &[kvm_msr_entry]) -> Result<(), VcpuStateError> {
    if saved.len() > MAX_MSRS {
        return Err(VcpuStateError::Size { what: "MSR list", size: saved.len() });
    }
    let mut sorted = saved.to_vec();
    sorted.sort_by_key(|msr| match msr.index {
        IA32_TSC => 0,
        IA32_TSC_DEADLINE => 2,
        _ => 1,
    });
    let mut left = &sorted[..];
    while let Some(first) = left.first() {
        let batch = left.get(..MSRS_AT_ONCE).unwrap_or(left);
        let count = fd.set_msrs(&from_entries(batch)?).map_err(refused("set registers"))?;
        if count == 0 {
            // One that cannot be written is no loss if it has that value.
            if value_of(fd, first.index)? != Some(first.data) {
                return Err(VcpuStateError::Msr { index: first.index, value: first.data });
            }
            tracing::debug!(msr = first.index, "register cannot be set, and is as it was");
        }
        left = left.get(count.max(1)..).unwrap_or_default();
    }
    Ok(())
}

fn value_of(fd: &VcpuFd, index: u32) -> Result<Option<u64>, KvmError> {
    Ok(read_msrs(fd, &[index])?.first().map(|msr| msr.data))
}

#[cfg(test)]
mod tests {
    use std::arch::x86_64::__cpuid;

    use super::*;

    /// A vCPU with the leaf that names the maker of this processor, and another one.
    fn state(other: kvm_cpuid_entry2) -> VcpuState {
        let maker = __cpuid(0);
        let maker = kvm_cpuid_entry2 {
            eax: maker.eax,
            ebx: maker.ebx,
            ecx: maker.ecx,
            edx: maker.edx,
            ..Default::default()
        };
        VcpuState { cpuid: vec![maker, other], tsc_khz: 2_000_000, ..VcpuState::default() }
    }

    #[test]
    fn what_cannot_run_here_is_told_without_kvm() {
        let fine = state(kvm_cpuid_entry2::default());
        fine.check_processor().unwrap();
        // All of AVX-512, AMX and what else there is: no processor has it.
        let all = kvm_cpuid_entry2 { function: 7, index: 1, eax: !0, ..Default::default() };
        let lacking = state(all).check_processor().unwrap_err();
        assert!(lacking.to_string().contains("(CPUID 0x7.1 eax bit"), "{lacking}");
        let slow = VcpuState { tsc_khz: 5, ..state(kvm_cpuid_entry2::default()) };
        assert!(matches!(slow.check_processor(), Err(VcpuStateError::ImpossibleTsc(5))));
        let foreign = VcpuState { cpuid: Vec::new(), ..fine };
        assert!(matches!(foreign.check_processor(), Err(VcpuStateError::Vendor { .. })));
    }
}
