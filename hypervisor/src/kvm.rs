//! The KVM API, as far as a VM as a whole is concerned. With [`crate::vcpu`] and
//! [`crate::snapshot::vcpu`] the only place that issues KVM ioctls.

use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use devices::event::Event;
use devices::ids::Gsi;
use devices::memory::Memory;
use devices::pci::msix::Message;
use devices::virtio::transport::Doorbell;
use kvm_bindings::{
    KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, KVM_MEM_LOG_DIRTY_PAGES,
    KVM_MEM_READONLY, kvm_clock_data, kvm_irqchip, kvm_msi, kvm_userspace_memory_region,
};
use kvm_ioctls::{Cap, IoEventAddress, Kvm, NoDatamatch, VcpuFd, VmFd};
use vm_memory::bitmap::AtomicBitmap;
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion, GuestRegionMmap};

use crate::layout;
use crate::wiring::PlacedPmem;

/// Where the kernel offers KVM.
pub const DEVICE: &str = "/dev/kvm";

/// The only version of the KVM API there has been since 2007.
const API_VERSION: i32 = 12;

/// Why there is no VM.
#[derive(Debug, thiserror::Error)]
pub enum KvmError {
    /// The device does not exist.
    #[error(
        "/dev/kvm does not exist: this machine offers no KVM; load kvm_intel or kvm_amd, or enable nested virtualization (see `cube-vmm doctor`)"
    )]
    Missing,
    /// The device exists and this user may not use it.
    #[error("/dev/kvm may not be opened by this user; add the user to group kvm or run as root")]
    Permission,
    /// Opening failed otherwise.
    #[error("/dev/kvm cannot be opened: {0}")]
    Open(std::io::Error),
    /// Not the KVM that everybody has.
    #[error("/dev/kvm speaks API version {0}, expected 12; see `cube-vmm doctor`")]
    ApiVersion(i32),
    /// The kernel's KVM is too old, or a variant.
    #[error("this kernel's KVM lacks {0}; use a newer kernel")]
    Capability(&'static str),
    /// A call failed.
    #[error("KVM refused to {what}: {source}")]
    Call {
        /// What was tried.
        what: &'static str,
        /// The reason.
        source: kvm_ioctls::Error,
    },
}

fn refused(what: &'static str) -> impl Fn(kvm_ioctls::Error) -> KvmError {
    move |source| KvmError::Call { what, source }
}

/// An open `/dev/kvm` that has what a VM needs.
#[derive(Debug)]
pub struct Host {
    kvm: Kvm,
}

impl Host {
    /// Opens [`DEVICE`].
    pub fn open() -> Result<Self, KvmError> {
        Self::open_at(Path::new(DEVICE))
    }

    fn open_at(path: &Path) -> Result<Self, KvmError> {
        use std::io::ErrorKind;
        use std::os::fd::{FromRawFd, IntoRawFd};
        let file = std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_CLOEXEC)
            .open(path)
            .map_err(|error| match error.kind() {
                ErrorKind::NotFound => KvmError::Missing,
                ErrorKind::PermissionDenied => KvmError::Permission,
                _ => KvmError::Open(error),
            })?;
        // SAFETY: the descriptor was just opened, is owned by nobody else, and is the KVM device
        // as far as a path can tell; on any other file the ioctl below fails.
        let kvm = unsafe { Kvm::from_raw_fd(file.into_raw_fd()) };
        match kvm.get_api_version() {
            API_VERSION => Ok(Self { kvm }),
            version => Err(KvmError::ApiVersion(version)),
        }
    }

    /// The device, for questions about the host.
    pub fn kvm(&self) -> &Kvm {
        &self.kvm
    }

    /// Checks the capabilities that a VM cannot do without.
    pub fn check_capabilities(&self) -> Result<(), KvmError> {
        for (capability, name) in [
            (Cap::Irqchip, "KVM_CAP_IRQCHIP"),
            (Cap::Irqfd, "KVM_CAP_IRQFD"),
            (Cap::Ioeventfd, "KVM_CAP_IOEVENTFD"),
            (Cap::UserMemory, "KVM_CAP_USER_MEMORY"),
            (Cap::ImmediateExit, "KVM_CAP_IMMEDIATE_EXIT"),
            (Cap::SetTssAddr, "KVM_CAP_SET_TSS_ADDR"),
            (Cap::ExtCpuid, "KVM_CAP_EXT_CPUID"),
        ] {
            if !self.kvm.check_extension(capability) {
                return Err(KvmError::Capability(name));
            }
        }
        Ok(())
    }

    /// Makes an empty VM.
    pub fn create_vm(&self) -> Result<VmHandle, KvmError> {
        let vm = self.kvm.create_vm().map_err(refused("create a VM"))?;
        let list = self.kvm.get_msr_index_list();
        let msrs = list.map_err(refused("list model-specific registers"))?.as_slice().to_vec();
        Ok(VmHandle { vm, msrs })
    }
}

/// A VM in the kernel.
#[derive(Debug)]
pub struct VmHandle {
    vm: VmFd,
    /// The model-specific registers that make up a vCPU's state on this host.
    msrs: Vec<u32>,
}

/// The interrupt controllers of a VM that have state apart from its vCPUs.
const IRQCHIPS: [u32; 3] = [KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, KVM_IRQCHIP_IOAPIC];

impl VmHandle {
    /// Makes the interrupt controllers in the kernel. Before the first vCPU. There is no PIT: a
    /// guest of ours has the local APIC timer and the paravirtual clock.
    pub fn create_irqchip(&self) -> Result<(), KvmError> {
        self.vm
            .set_identity_map_address(layout::KVM_IDENTITY_MAP)
            .map_err(refused("place the identity map"))?;
        let tss = layout::KVM_TSS as usize;
        self.vm.set_tss_address(tss).map_err(refused("place the TSS"))?;
        self.vm.create_irq_chip().map_err(refused("create the interrupt controllers"))
    }

    /// Gives the guest its RAM; how many slots that takes.
    pub fn map_memory(&self, memory: &Memory) -> Result<u32, KvmError> {
        self.set_memory(memory, 0)
    }

    /// Starts the log of the pages of RAM that the guest writes to, from none on: every page costs
    /// the guest an exit when it is first written to after the log was taken. While all vCPUs are
    /// parked.
    pub fn log_dirty(&self, memory: &Memory) -> Result<(), KvmError> {
        self.set_memory(memory, KVM_MEM_LOG_DIRTY_PAGES).map(drop)
    }

    /// The pages that have been written to since the log was started or last taken, as a bitmap for
    /// each region of RAM. While all vCPUs are parked.
    pub fn take_dirty_log(&self, memory: &Memory) -> Result<Vec<Vec<u64>>, KvmError> {
        let take = |(slot, region): (usize, &GuestRegionMmap<AtomicBitmap>)| {
            let len = usize::try_from(region.len()).unwrap_or(usize::MAX);
            self.vm.get_dirty_log(slot as u32, len).map_err(refused("tell which pages are dirty"))
        };
        memory.iter().enumerate().map(take).collect()
    }

    fn set_memory(&self, memory: &Memory, flags: u32) -> Result<u32, KvmError> {
        for (slot, region) in memory.iter().enumerate() {
            let mapping = kvm_userspace_memory_region {
                slot: slot as u32,
                flags,
                guest_phys_addr: region.start_addr().0,
                memory_size: region.len(),
                userspace_addr: region.as_ptr() as u64,
            };
            // SAFETY: the range is a live mapping of that length, the VM owner keeps a clone of
            // `memory` for as long as vCPUs can run, and a slot is always the same range.
            unsafe { self.vm.set_user_memory_region(mapping) }
                .map_err(refused("map guest memory"))?;
        }
        Ok(memory.num_regions() as u32)
    }

    /// Gives the guest persistent memory at `start`, in a slot after those of RAM.
    pub fn map_pmem(&self, slot: u32, pmem: &PlacedPmem) -> Result<(), KvmError> {
        let flags = if pmem.backing.read_only() { KVM_MEM_READONLY } else { 0 };
        let mapping = kvm_userspace_memory_region {
            slot,
            flags,
            guest_phys_addr: pmem.start,
            memory_size: pmem.backing.len(),
            userspace_addr: pmem.backing.host_address().as_ptr() as u64,
        };
        // SAFETY: the range is a live mapping of that length, whose owner keeps it for as long as
        // vCPUs can run; a read-only mapping is in a read-only slot.
        unsafe { self.vm.set_user_memory_region(mapping) }.map_err(refused("map persistent memory"))
    }

    /// Makes `event` raise an edge on line `gsi`. After [`VmHandle::create_irqchip`].
    pub fn connect_interrupt(&self, gsi: Gsi, event: &Event) -> Result<(), KvmError> {
        self.vm.register_irqfd(event.eventfd(), gsi.0).map_err(refused("connect an interrupt"))
    }

    /// Makes the guest's writes to a doorbell of the device at `base` signal its event, in the
    /// kernel.
    pub fn connect_doorbell(&self, base: u64, doorbell: &Doorbell) -> Result<(), KvmError> {
        let address = IoEventAddress::Mmio(base + doorbell.offset);
        let event = doorbell.event.eventfd();
        match doorbell.value {
            Some(value) => self.vm.register_ioevent(event, &address, value),
            None => self.vm.register_ioevent(event, &address, NoDatamatch),
        }
        .map_err(refused("connect a doorbell"))
    }

    /// Undoes [`VmHandle::connect_doorbell`].
    pub fn disconnect_doorbell(&self, base: u64, doorbell: &Doorbell) -> Result<(), KvmError> {
        let address = IoEventAddress::Mmio(base + doorbell.offset);
        let event = doorbell.event.eventfd();
        match doorbell.value {
            Some(value) => self.vm.unregister_ioevent(event, &address, value),
            None => self.vm.unregister_ioevent(event, &address, NoDatamatch),
        }
        .map_err(refused("disconnect a doorbell"))
    }

    /// Delivers a message-signalled interrupt.
    pub fn signal_msi(&self, message: Message) -> Result<(), KvmError> {
        let msi = kvm_msi {
            address_lo: message.address as u32,
            address_hi: (message.address >> 32) as u32,
            data: message.data,
            ..Default::default()
        };
        self.vm.signal_msi(msi).map(drop).map_err(refused("deliver an interrupt"))
    }

    /// The model-specific registers that make up a vCPU's state on this host.
    pub fn msrs(&self) -> &[u32] {
        &self.msrs
    }

    /// Bytes of a vCPU's extended state.
    pub fn xsave_size(&self) -> usize {
        usize::try_from(self.vm.check_extension_int(Cap::Xsave2)).unwrap_or(0)
    }

    /// The state of the interrupt controllers. While all vCPUs are parked.
    pub fn irqchips(&self) -> Result<Vec<kvm_irqchip>, KvmError> {
        let get = |chip_id| {
            let mut chip = kvm_irqchip { chip_id, ..Default::default() };
            self.vm.get_irqchip(&mut chip).map_err(refused("read an interrupt controller"))?;
            Ok(chip)
        };
        IRQCHIPS.into_iter().map(get).collect()
    }

    /// Sets what [`VmHandle::irqchips`] gave. Before the first vCPU runs.
    pub fn set_irqchips(&self, chips: &[kvm_irqchip]) -> Result<(), KvmError> {
        let set = |chip| self.vm.set_irqchip(chip).map_err(refused("set an interrupt controller"));
        chips.iter().try_for_each(set)
    }

    /// The guest's paravirtual clock. While all vCPUs are parked.
    pub fn clock(&self) -> Result<kvm_clock_data, KvmError> {
        self.vm.get_clock().map_err(refused("read the clock"))
    }

    /// Makes the guest's paravirtual clock go on from `nanos`. After the vCPUs have their TSCs, and
    /// before the first runs.
    pub fn set_clock(&self, nanos: u64) -> Result<(), KvmError> {
        let clock = kvm_clock_data { clock: nanos, ..Default::default() };
        self.vm.set_clock(&clock).map_err(refused("set the clock"))
    }

    /// Makes a vCPU.
    pub fn create_vcpu(&self, id: u32) -> Result<VcpuFd, KvmError> {
        self.vm.create_vcpu(u64::from(id)).map_err(refused("create a vCPU"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_device_and_one_that_is_none_are_told_apart() {
        let missing = Host::open_at(Path::new("/nonexistent/kvm")).unwrap_err();
        assert!(matches!(missing, KvmError::Missing));
        assert!(missing.to_string().contains("doctor"));
        let other = Host::open_at(Path::new("/dev/null")).unwrap_err();
        assert!(matches!(other, KvmError::ApiVersion(_)));
    }
}
