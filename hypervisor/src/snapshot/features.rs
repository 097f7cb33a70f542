//! Names of processor features, and which of a guest's a host lacks.

use std::collections::BTreeMap;
use std::sync::{Mutex, OnceLock, PoisonError};

use kvm_bindings::kvm_cpuid_entry2;

/// A register of CPUID in which each bit is a feature: function, index, which of EAX to EDX, and
/// the names of its bits from 0 on, as Linux has them in `/proc/cpuinfo`.
struct Register {
    function: u32,
    index: u32,
    register: usize,
    names: &'static str,
}

const EAX: usize = 0;
const EBX: usize = 1;
const ECX: usize = 2;
const EDX: usize = 3;

const fn register(function: u32, index: u32, register: usize, names: &'static str) -> Register {
    Register { function, index, register, names }
}

/// A dash stands for a bit without a name.
const REGISTERS: [Register; 13] = [
    register(
        0x1,
        0,
        ECX,
        "sse3 pclmulqdq dtes64 monitor ds_cpl vmx smx est tm2 ssse3 cid sdbg fma cx16 xtpr pdcm - pcid \
         dca sse4_1 sse4_2 x2apic movbe popcnt tsc_deadline aes xsave osxsave avx f16c rdrand",
    ),
    register(
        0x1,
        0,
        EDX,
        "fpu vme de pse tsc msr pae mce cx8 apic - sep mtrr pge mca cmov pat pse36 pn clflush - dts \
         acpi mmx fxsr sse sse2 ss ht tm ia64 pbe",
    ),
    register(
        0x7,
        0,
        EBX,
        "fsgsbase tsc_adjust sgx bmi1 hle avx2 fdp_excptn smep bmi2 erms invpcid rtm cqm zero_fcs mpx \
         rdt_a avx512f avx512dq rdseed adx smap avx512ifma pcommit clflushopt clwb intel_pt avx512pf \
         avx512er avx512cd sha_ni avx512bw avx512vl",
    ),
    register(
        0x7,
        0,
        ECX,
        "prefetchwt1 avx512vbmi umip pku ospke waitpkg avx512_vbmi2 shstk gfni vaes vpclmulqdq \
         avx512_vnni avx512_bitalg tme avx512_vpopcntdq - la57 - - - - - rdpid - bus_lock cldemote - \
         movdiri movdir64b enqcmd sgx_lc pks",
    ),
    register(
        0x7,
        0,
        EDX,
        "- - avx512_4vnniw avx512_4fmaps fsrm uintr - - avx512_vp2intersect srbds_ctrl md_clear - - - \
         serialize - tsxldtrk - pconfig arch_lbr ibt - amx_bf16 avx512_fp16 amx_tile amx_int8 spec_ctrl \
         stibp flush_l1d arch_capabilities core_capabilities ssbd",
    ),
    register(
        0x7,
        1,
        EAX,
        "sha512 sm3 sm4 - avx_vnni avx512_bf16 lass cmpccxadd - - fzrm fsrs fsrcs - - - - - - wrmsrns \
         - amx_fp16 hreset avx_ifma - - lam",
    ),
    register(0x7, 1, EBX, ""),
    register(0x7, 1, ECX, ""),
    register(0x7, 1, EDX, "- - - - avx_vnni_int8 avx_ne_convert - - amx_complex"),
    register(0xd, 1, EAX, "xsaveopt xsavec xgetbv1 xsaves xfd"),
    register(
        0x8000_0001,
        0,
        ECX,
        "lahf_lm cmp_legacy svm extapic cr8_legacy abm sse4a misalignsse 3dnowprefetch osvw ibs xop \
         skinit wdt - lwp fma4 tce - nodeid_msr - tbm topoext perfctr_core perfctr_nb - bpext ptsc \
         perfctr_llc mwaitx",
    ),
    register(
        0x8000_0001,
        0,
        EDX,
        "- - - - - - - - - - - syscall - - - - - - - mp nx - mmxext - - fxsr_opt pdpe1gb rdtscp - lm \
         3dnowext 3dnow",
    ),
    register(
        0x8000_0008,
        0,
        EBX,
        "clzero irperf xsaveerptr - rdpru - - - mcommit wbnoinvd - - ibpb - ibrs amd_stibp - \
         stibp_always_on - - - - - ppin amd_ssbd virt_ssbd ssb_no cppc",
    ),
];

/// What KVM cannot give on a processor that does not have it: instructions, and registers that they
/// work on. So these can be told without asking KVM.
const OF_THE_PROCESSOR: &str = "sse3 pclmulqdq ssse3 fma cx16 sse4_1 sse4_2 popcnt aes xsave avx f16c \
    rdrand bmi1 hle avx2 bmi2 rtm avx512f avx512dq rdseed adx avx512ifma clflushopt clwb avx512pf \
    avx512er avx512cd sha_ni avx512bw avx512vl avx512vbmi pku avx512_vbmi2 shstk gfni vaes vpclmulqdq \
    avx512_vnni avx512_bitalg avx512_vpopcntdq la57 movdiri movdir64b avx512_4vnniw avx512_4fmaps \
    avx512_vp2intersect serialize amx_bf16 avx512_fp16 amx_tile amx_int8 sha512 sm3 sm4 avx_vnni \
    avx512_bf16 cmpccxadd amx_fp16 avx_ifma avx_vnni_int8 avx_ne_convert amx_complex xsaveopt xsavec \
    xgetbv1 xsaves abm sse4a misalignsse xop fma4 tbm mmxext clzero";

/// Bits that are ours to set: those of the hypervisor and of several processors.
const OURS: [&str; 2] = ["hypervisor", "ht"];

/// The features in `saved` that `host`, which is what its KVM can give, lacks.
pub fn lacking(saved: &[kvm_cpuid_entry2], host: &[kvm_cpuid_entry2]) -> Vec<String> {
    differing(saved, |function, index| of(host, function, index), |_| true)
}

/// The features in `saved` that this very processor lacks, as far as that can be told without KVM.
pub fn lacking_here(saved: &[kvm_cpuid_entry2]) -> Vec<String> {
    let known = |name: &str| OF_THE_PROCESSOR.split_whitespace().any(|other| other == name);
    // Where this host is itself a virtual machine, each look takes microseconds.
    static SEEN: Mutex<BTreeMap<(u32, u32), [u32; 4]>> = Mutex::new(BTreeMap::new());
    let mut seen = SEEN.lock().unwrap_or_else(PoisonError::into_inner);
    differing(saved, |f, index| *seen.entry((f, index)).or_insert_with(|| here(f, index)), known)
}

/// The maker's name in CPUID leaf 0, of `saved` and of this processor, if they differ.
pub fn other_vendor(saved: &[kvm_cpuid_entry2]) -> Option<(String, String)> {
    let name = |[_, ebx, ecx, edx]: [u32; 4]| {
        let bytes = [ebx, edx, ecx].map(u32::to_le_bytes).concat();
        String::from_utf8_lossy(&bytes).into_owned()
    };
    let (saved, here) = (name(of(saved, 0, 0)), name(here(0, 0)));
    (saved != here).then_some((saved, here))
}

fn of(leaves: &[kvm_cpuid_entry2], function: u32, index: u32) -> [u32; 4] {
    let leaf = leaves.iter().find(|leaf| leaf.function == function && leaf.index == index);
    leaf.map_or([0; 4], |leaf| [leaf.eax, leaf.ebx, leaf.ecx, leaf.edx])
}

/// Where the second range of leaves begins.
const EXTENDED: u32 = 0x8000_0000;
static LAST: OnceLock<u32> = OnceLock::new();
static LAST_EXTENDED: OnceLock<u32> = OnceLock::new();

fn here(function: u32, index: u32) -> [u32; 4] {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    // Beyond the last leaf an Intel processor repeats that one.
    let last =
        |range: &'static OnceLock<u32>| *range.get_or_init(|| __cpuid(function & EXTENDED).eax);
    if function > last(if function & EXTENDED == 0 { &LAST } else { &LAST_EXTENDED }) {
        return [0; 4];
    }
    let leaf = __cpuid_count(function, index);
    [leaf.eax, leaf.ebx, leaf.ecx, leaf.edx]
}

fn differing(
    saved: &[kvm_cpuid_entry2],
    mut host: impl FnMut(u32, u32) -> [u32; 4],
    counts: impl Fn(&str) -> bool,
) -> Vec<String> {
    let mut lacking = Vec::new();
    for Register { function, index, register, names } in REGISTERS {
        let value = |leaf: [u32; 4]| leaf.get(register).copied().unwrap_or(0);
        let used = value(of(saved, function, index));
        if used == 0 {
            continue;
        }
        let bits = used & !value(host(function, index));
        let names: Vec<_> = names.split_whitespace().collect();
        for bit in (0..32_usize).filter(|bit| bits >> bit & 1 == 1) {
            let name = names.get(bit).copied().unwrap_or("-");
            let name =
                if (function, register, bit) == (0x1, ECX, 31) { "hypervisor" } else { name };
            if OURS.contains(&name) || !counts(name) {
                continue;
            }
            let register = ["eax", "ebx", "ecx", "edx"].get(register).unwrap_or(&"");
            let place = format!("CPUID {function:#x}.{index} {register} bit {bit}");
            lacking.push(if name == "-" { place } else { format!("{name} ({place})") });
        }
    }
    lacking
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leaf(function: u32, ecx: u32) -> kvm_cpuid_entry2 {
        kvm_cpuid_entry2 { function, ecx, ..Default::default() }
    }

    #[test]
    fn features_that_the_host_lacks_are_named() {
        let host = [leaf(1, 0b0110), leaf(0x8000_0001, 1)];
        let saved = [leaf(1, 0b1010 | 1 << 31), leaf(0x8000_0001, 1 << 31)];
        assert_eq!(
            lacking(&saved, &host),
            ["monitor (CPUID 0x1.0 ecx bit 3)", "CPUID 0x80000001.0 ecx bit 31"]
        );
        assert!(lacking(&host, &host).is_empty());
    }

    #[test]
    fn this_processor_lacks_nothing_of_its_own() {
        let own = REGISTERS.map(|Register { function, index, .. }| {
            let [eax, ebx, ecx, edx] = here(function, index);
            kvm_cpuid_entry2 { function, index, eax, ebx, ecx, edx, ..Default::default() }
        });
        assert_eq!(lacking_here(&own), Vec::<String>::new());
    }

    #[test]
    fn what_only_the_processor_can_give_is_missed_without_kvm_and_nothing_else() {
        let all = kvm_cpuid_entry2 { function: 7, index: 1, eax: !0, ..Default::default() };
        let missed = lacking_here(&[all]);
        // No processor has both AMX for FP16 and the Chinese hashes, so something is missed.
        assert!(!missed.is_empty());
        assert!(missed.iter().all(|name| !name.starts_with("CPUID")), "{missed:?}");
        assert!(lacking_here(&[leaf(1, 1 << 21 | 1 << 24)]).is_empty());
    }

    #[test]
    fn another_maker_is_told() {
        let own = [here(0, 0)].map(|[eax, ebx, ecx, edx]| kvm_cpuid_entry2 {
            eax,
            ebx,
            ecx,
            edx,
            ..Default::default()
        });
        assert_eq!(other_vendor(&own), None);
        let (saved, here) = other_vendor(&[]).unwrap();
        assert_ne!(saved, here);
    }

    #[test]
    fn no_register_has_more_names_than_bits() {
        for register in REGISTERS {
            assert!(register.names.split_whitespace().count() <= 32);
        }
    }
}
