//! The KVM capabilities that CubeVMM uses, each with what for and since which kernel.

use kvm_bindings as kvm_abi;
use kvm_ioctls::Kvm;

use super::check::Check;

struct Capability {
    name: &'static str,
    /// All of these `KVM_CAP_` numbers must be there.
    numbers: &'static [u32],
    required: bool,
    meaning: &'static str,
    cure: &'static str,
}

const CAPABILITIES: &[Capability] = &[
    Capability {
        name: "kvm-user-memory",
        numbers: &[kvm_abi::KVM_CAP_USER_MEMORY],
        required: true,
        meaning: "guest memory is memory of the VMM process",
        cure: "run a host kernel of version 2.6.25 or later",
    },
    Capability {
        name: "kvm-irqchip",
        numbers: &[kvm_abi::KVM_CAP_IRQCHIP],
        required: true,
        meaning: "interrupt controllers are emulated in the kernel",
        cure: "use a KVM module that emulates them (kvm_intel, kvm_amd)",
    },
    Capability {
        name: "kvm-irqfd",
        numbers: &[kvm_abi::KVM_CAP_IRQFD],
        required: true,
        meaning: "devices raise interrupts without entering the vCPU thread",
        cure: "run a host kernel built with CONFIG_HAVE_KVM_IRQCHIP (2.6.32 or later)",
    },
    Capability {
        name: "kvm-ioeventfd",
        numbers: &[kvm_abi::KVM_CAP_IOEVENTFD],
        required: true,
        meaning: "a guest's queue kick wakes the device without leaving the kernel",
        cure: "run a host kernel built with CONFIG_EVENTFD (2.6.32 or later)",
    },
    Capability {
        name: "kvm-signal-msi",
        numbers: &[kvm_abi::KVM_CAP_SIGNAL_MSI],
        required: false,
        meaning: "message-signalled interrupts of virtio over PCI",
        cure: "run a host kernel of version 3.5 or later",
    },
    Capability {
        name: "kvm-immediate-exit",
        numbers: &[kvm_abi::KVM_CAP_IMMEDIATE_EXIT],
        required: true,
        meaning: "a vCPU can be stopped without losing the race against its next entry",
        cure: "run a host kernel of version 4.11 or later",
    },
    Capability {
        name: "kvm-vcpu-state",
        numbers: &[
            kvm_abi::KVM_CAP_MP_STATE,
            kvm_abi::KVM_CAP_VCPU_EVENTS,
            kvm_abi::KVM_CAP_DEBUGREGS,
            kvm_abi::KVM_CAP_XSAVE,
        ],
        required: true,
        meaning: "a vCPU's whole state can be saved and restored",
        cure: "run a host kernel of version 2.6.36 or later",
    },
    Capability {
        name: "kvm-xcrs",
        numbers: &[kvm_abi::KVM_CAP_XCRS],
        required: false,
        meaning: "guests have XSAVE, and with it AVX",
        cure: "use a processor with XSAVE, or stop hiding it from this virtual machine",
    },
    Capability {
        name: "kvm-xsave2",
        numbers: &[kvm_abi::KVM_CAP_XSAVE2],
        required: false,
        meaning: "bytes of extended processor state; without it, state beyond 4 KiB (AMX) is lost",
        cure: "run a host kernel of version 5.17 or later",
    },
    Capability {
        name: "kvm-tsc-deadline",
        numbers: &[kvm_abi::KVM_CAP_TSC_DEADLINE_TIMER],
        required: false,
        meaning: "guests program their timer with one MSR write and need no PIT",
        cure: "run a host kernel of version 3.2 or later",
    },
    Capability {
        name: "kvm-get-tsc-khz",
        numbers: &[kvm_abi::KVM_CAP_GET_TSC_KHZ],
        required: false,
        meaning: "a snapshot can tell the frequency its guest's clock ran at",
        cure: "run a host kernel of version 3.0 or later whose TSC is stable",
    },
    Capability {
        name: "kvm-tsc-control",
        numbers: &[kvm_abi::KVM_CAP_TSC_CONTROL],
        required: false,
        meaning: "a snapshot can be restored on a host with another TSC frequency",
        cure: "use a processor with TSC scaling, or restore on hosts of the same frequency",
    },
    Capability {
        name: "kvm-clock",
        numbers: &[kvm_abi::KVM_CAP_ADJUST_CLOCK, kvm_abi::KVM_CAP_KVMCLOCK_CTRL],
        required: false,
        meaning: "a paused or restored guest's clock goes on where it stood",
        cure: "run a host kernel of version 3.5 or later",
    },
    Capability {
        name: "kvm-x2apic-api",
        numbers: &[kvm_abi::KVM_CAP_X2APIC_API],
        required: false,
        meaning: "more than 254 vCPUs",
        cure: "run a host kernel of version 4.8 or later",
    },
    Capability {
        name: "kvm-readonly-memory",
        numbers: &[kvm_abi::KVM_CAP_READONLY_MEM],
        required: false,
        meaning: "memory that a guest may only read, such as a read-only pmem disk",
        cure: "run a host kernel of version 3.7 or later",
    },
    Capability {
        name: "kvm-manual-dirty-log",
        numbers: &[kvm_abi::KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2],
        required: false,
        meaning: "the dirty log of large guests is read and cleared in pieces",
        cure: "run a host kernel of version 5.2 or later",
    },
    Capability {
        name: "kvm-dirty-ring",
        numbers: &[kvm_abi::KVM_CAP_DIRTY_LOG_RING],
        required: false,
        meaning: "bytes of the largest ring of dirtied pages; the bitmap serves without it",
        cure: "run a host kernel of version 5.11 or later",
    },
    Capability {
        name: "kvm-guest-memfd",
        numbers: &[kvm_abi::KVM_CAP_GUEST_MEMFD],
        required: false,
        meaning: "guest memory that the host cannot map; CubeVMM does not use it yet",
        cure: "run a host kernel of version 6.8 or later with a VM type that has private memory",
    },
    Capability {
        name: "kvm-max-vcpus",
        numbers: &[kvm_abi::KVM_CAP_MAX_VCPUS],
        required: false,
        meaning: "vCPUs per guest",
        cure: "run a host kernel of version 3.2 or later",
    },
    Capability {
        name: "kvm-memory-slots",
        numbers: &[kvm_abi::KVM_CAP_NR_MEMSLOTS],
        required: false,
        meaning: "memory regions per guest",
        cure: "run a host kernel of version 2.6.25 or later",
    },
];

/// Asks `kvm` for every capability of the table.
pub(super) fn examine(kvm: &Kvm) -> Vec<Check> {
    let ask = |number: u32| kvm.check_extension_raw(number.into());
    CAPABILITIES.iter().map(|capability| capability.judge(ask)).collect()
}

impl Capability {
    fn judge(&self, ask: impl Fn(u32) -> i32) -> Check {
        // The weakest answer counts: an error is negative, 0 is "no", some answer with a size.
        let answer = self.numbers.iter().map(|number| ask(*number)).min().unwrap_or_default();
        let check = match answer {
            1.. => Check::ok(self.name, answer.to_string(), self.meaning),
            _ => Check::missing(self.name, answer.to_string(), self.meaning, self.cure),
        };
        Check { required: self.required, ..check }
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::Status;
    use super::*;

    fn capability(name: &str) -> &'static Capability {
        CAPABILITIES.iter().find(|capability| capability.name == name).unwrap()
    }

    #[test]
    fn one_missing_part_makes_the_whole_missing() {
        let check = capability("kvm-vcpu-state")
            .judge(|number| i32::from(number != kvm_abi::KVM_CAP_DEBUGREGS));
        assert_eq!((check.status, check.required), (Status::Missing, true));
        assert!(check.cure.is_some());
    }

    #[test]
    fn a_size_is_a_yes_and_is_told() {
        let check = capability("kvm-dirty-ring").judge(|_| 65536);
        assert_eq!((check.status, check.value.as_str()), (Status::Ok, "65536"));
        assert_eq!(check.cure, None);
    }

    #[test]
    fn an_error_is_a_no() {
        assert_eq!(capability("kvm-irqfd").judge(|_| -1).status, Status::Missing);
    }
}
