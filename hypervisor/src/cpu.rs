//! The processor that the guest sees: CPUID leaves made from what KVM supports, per vCPU.

use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES, kvm_cpuid_entry2};
use kvm_ioctls::{Cap, Kvm};

use crate::kvm::KvmError;

/// Leaf 1 ECX: the timer whose deadline is a TSC value.
const TSC_DEADLINE: u32 = 1 << 24;
/// Leaf 1 ECX: a hypervisor is present.
const HYPERVISOR: u32 = 1 << 31;
/// Leaf 1 EDX: EBX 23:16 is valid.
const HTT: u32 = 1 << 28;

/// All that KVM can give on this host.
pub fn supported(kvm: &Kvm) -> Result<CpuId, KvmError> {
    let mut cpuid = kvm
        .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
        .map_err(|source| KvmError::Call { what: "list CPU features", source })?;
    // KVM emulates this timer, and leaves it out of the list for historical reasons.
    if kvm.check_extension(Cap::TscDeadlineTimer)
        && let Some(leaf) = cpuid.as_mut_slice().iter_mut().find(|leaf| leaf.function == 1)
    {
        leaf.ecx |= TSC_DEADLINE;
    }
    Ok(cpuid)
}

/// The leaves of vCPU `id` out of `cpus`: the host's, with our topology of one package, one thread
/// per core.
pub fn leaves(supported: &CpuId, id: u32, cpus: u32) -> CpuId {
    let mut cpuid = supported.clone();
    for leaf in cpuid.as_mut_slice() {
        adapt(leaf, id, cpus);
    }
    cpuid
}

fn adapt(leaf: &mut kvm_cpuid_entry2, id: u32, cpus: u32) {
    match leaf.function {
        0x1 => {
            // Initial APIC id, logical processors, CLFLUSH line of 64 bytes.
            leaf.ebx = (id << 24) | (cpus << 16) | (8 << 8) | (leaf.ebx & 0xff);
            leaf.ecx |= HYPERVISOR;
            leaf.edx = if cpus > 1 { leaf.edx | HTT } else { leaf.edx & !HTT };
        }
        // Cache sharing and core count: every vCPU has caches of its own, save the last level.
        0x4 if leaf.eax & 0x1f != 0 => {
            let level = (leaf.eax >> 5) & 7;
            let sharing = if level >= 3 { cpus - 1 } else { 0 };
            leaf.eax = (leaf.eax & 0x3fff) | (sharing << 14) | ((cpus - 1).min(63) << 26);
        }
        0xb | 0x1f => extended_topology(leaf, id, cpus),
        // AMD: core count, and the width of the APIC id.
        0x8000_0008 => leaf.ecx = (width(cpus) << 12) | (cpus - 1),
        // AMD: extended APIC id, core id with one thread per core, one node.
        0x8000_001e => {
            leaf.eax = id;
            leaf.ebx = id;
            leaf.ecx = 0;
        }
        _ => {}
    }
}

/// Leaves 0xb and 0x1f (Intel SDM volume 2, CPUID): level 0 is the thread, level 1 the core.
fn extended_topology(leaf: &mut kvm_cpuid_entry2, id: u32, cpus: u32) {
    const THREAD: u32 = 1;
    const CORE: u32 = 2;
    let (shift, count, kind) = match leaf.index {
        0 => (0, 1, THREAD),
        1 => (width(cpus), cpus, CORE),
        _ => (0, 0, 0),
    };
    leaf.eax = shift;
    leaf.ebx = count;
    leaf.ecx = (leaf.index & 0xff) | (kind << 8);
    leaf.edx = id;
}

/// Bits that hold the numbers below `cpus`.
fn width(cpus: u32) -> u32 {
    u32::BITS - cpus.saturating_sub(1).leading_zeros()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn adapted(function: u32, index: u32, id: u32, cpus: u32) -> kvm_cpuid_entry2 {
        let mut leaf = kvm_cpuid_entry2 { function, index, ..Default::default() };
        adapt(&mut leaf, id, cpus);
        leaf
    }

    #[test]
    fn each_processor_has_its_own_apic_id() {
        assert_eq!(adapted(1, 0, 3, 4).ebx >> 24, 3);
        assert_eq!(adapted(0xb, 0, 3, 4).edx, 3);
        assert_eq!(adapted(0x8000_001e, 0, 3, 4).eax, 3);
    }

    #[test]
    fn the_topology_is_one_package_of_single_threaded_cores() {
        let (thread, core, end) =
            (adapted(0xb, 0, 0, 6), adapted(0xb, 1, 0, 6), adapted(0xb, 2, 0, 6));
        assert_eq!((thread.eax, thread.ebx, thread.ecx >> 8), (0, 1, 1));
        assert_eq!((core.eax, core.ebx, core.ecx >> 8), (3, 6, 2));
        assert_eq!((end.ebx, end.ecx >> 8), (0, 0));
    }

    #[test]
    fn widths_hold_the_largest_id() {
        assert_eq!([1, 2, 3, 4, 5, 32].map(width), [0, 1, 2, 2, 3, 5]);
    }

    #[test]
    fn a_hypervisor_is_announced() {
        assert_ne!(adapted(1, 0, 0, 1).ecx & HYPERVISOR, 0);
    }
}
