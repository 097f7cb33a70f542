//! Brings a VM that is being built to the state of a snapshot.
//!
//! In KVM the order is that of who depends on whom: the interrupt controllers; the vCPUs, whose time
//! stamp counters the clock is measured by; the clock. Devices, which raise nothing, take their records
//! meanwhile. When both are done comes what the guest has to hear: interrupts that were on their way,
//! and that it is another machine.

use std::collections::BTreeMap;
use std::sync::PoisonError;

use devices::ids::DeviceId;
use devices::snapshot::{Record, RestoreError};
use kvm_bindings::{CpuId, kvm_irqchip};
use kvm_ioctls::VcpuFd;

use super::machine::MachineState;
use super::vcpu::{VcpuState, VcpuStateError};
use crate::generation::GenerationError;
use crate::kvm::{KvmError, VmHandle};
use crate::pci_slots::{PciSlots, PciState};
use crate::state::VmState;
use crate::vm::{SharedTransport, Vm, lock};
use crate::wiring::Legacy;

/// Why a VM does not take a state.
#[derive(Debug, thiserror::Error)]
pub enum ApplyError {
    /// A record is refused.
    #[error("the saved state of {device} does not fit: {source}")]
    Device {
        /// Its name.
        device: String,
        /// The reason.
        source: RestoreError,
    },
    /// Devices without records, or records without devices.
    #[error("the snapshot has no state of {0}")]
    Missing(String),
    /// A record of nothing.
    #[error("the snapshot has the state of {0}, which the machine does not have")]
    Unknown(String),
    /// A vCPU.
    #[error("vCPU {id}: {source}")]
    Vcpu {
        /// Which.
        id: u32,
        /// The reason.
        source: VcpuStateError,
    },
    /// KVM refuses.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// No new identity.
    #[error(transparent)]
    Generation(#[from] GenerationError),
}

impl MachineState {
    /// Refuses a host on which the vCPUs cannot run, as far as that can be told without KVM.
    pub fn check_processor(&self) -> Result<(), ApplyError> {
        (0..).zip(&self.vcpus).try_for_each(|(id, vcpu)| {
            vcpu.check_processor().map_err(|source| ApplyError::Vcpu { id, source })
        })
    }

    /// What KVM has to be told, and what devices have.
    pub(crate) fn divide(self) -> (KernelState, Records) {
        let Self { vcpus, irqchips, clock_nanos, legacy, devices, pci, hello: _ } = self;
        (KernelState { vcpus, irqchips, clock_nanos }, Records { legacy, devices, pci })
    }
}

/// The part of a state that is in the kernel.
pub(crate) struct KernelState {
    vcpus: Vec<VcpuState>,
    irqchips: Vec<kvm_irqchip>,
    clock_nanos: u64,
}

impl KernelState {
    /// Refuses a host whose processor, of which KVM can give `supported`, lacks what the guest uses.
    pub fn check_features(&self, supported: &CpuId) -> Result<(), ApplyError> {
        (0..).zip(&self.vcpus).try_for_each(|(id, vcpu)| {
            vcpu.check_features(supported).map_err(|source| ApplyError::Vcpu { id, source })
        })
    }

    /// Gives it to a VM that has just been made, with these vCPUs.
    pub fn apply(&self, handle: &VmHandle, vcpus: &[VcpuFd]) -> Result<(), ApplyError> {
        handle.set_irqchips(&self.irqchips)?;
        let size = handle.xsave_size();
        for ((id, fd), state) in (0..).zip(vcpus).zip(&self.vcpus) {
            state.apply(fd, size).map_err(|source| ApplyError::Vcpu { id, source })?;
        }
        handle.set_clock(self.clock_nanos)?;
        for (vcpu, fd) in vcpus.iter().enumerate() {
            // So that its watchdog knows that it stood still. Refused if it has no such clock.
            let told = fd.kvmclock_ctrl();
            tracing::debug!(vcpu, ?told, "the guest's clock");
        }
        Ok(())
    }
}

impl Vm {
    /// Completes a VM whose parts have the state of another one. Leaves it paused, as another machine
    /// than the one that was saved.
    pub(crate) fn restored(&mut self, state: &KernelState) -> Result<(), ApplyError> {
        self.cpuid = state.vcpus.iter().map(|vcpu| vcpu.cpuid().to_vec()).collect();
        self.legacy.serial.lock().unwrap_or_else(PoisonError::into_inner).resume();
        self.renew_generation()?;
        self.state = VmState::Paused;
        Ok(())
    }
}

/// The part of a state that KVM has nothing to do with.
pub(crate) struct Records {
    pub(crate) legacy: BTreeMap<String, Record>,
    pub(crate) devices: BTreeMap<String, Record>,
    pub(crate) pci: Option<PciState>,
}

impl Records {
    /// Gives devices that have just been made the state of others. There must be one for each.
    pub(crate) fn apply(
        mut self,
        legacy: &Legacy,
        transports: &[(DeviceId, SharedTransport)],
        slots: Option<&PciSlots>,
    ) -> Result<(), ApplyError> {
        for (name, part) in legacy.stateful() {
            let record = take(&mut self.legacy, name)?;
            let mut part = part.lock().unwrap_or_else(PoisonError::into_inner);
            part.restore_record(record).map_err(refused(name))?;
        }
        for (id, transport) in transports {
            let record = take(&mut self.devices, id.as_str())?;
            lock(transport).restore_record(record).map_err(refused(id.as_str()))?;
        }
        if let Some(name) = self.legacy.into_keys().chain(self.devices.into_keys()).next() {
            return Err(ApplyError::Unknown(name));
        }
        if let (Some(slots), Some(pci)) = (slots, self.pci) {
            slots.restore(pci).map_err(refused("pci"))?;
        }
        Ok(())
    }
}

fn take(records: &mut BTreeMap<String, Record>, name: &str) -> Result<Record, ApplyError> {
    records.remove(name).ok_or_else(|| ApplyError::Missing(name.to_owned()))
}

fn refused(name: &str) -> impl FnOnce(RestoreError) -> ApplyError {
    let device = name.to_owned();
    move |source| ApplyError::Device { device, source }
}
