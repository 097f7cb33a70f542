//! Brings a VM that has just been built to the state of a snapshot.
//!
//! The order is that of who depends on whom: devices, which raise nothing; the interrupt
//! controllers; the vCPUs, whose time stamp counters the clock is measured by; the clock. Then comes
//! what the guest has to hear: interrupts that were on their way, and that it is another machine.

use std::collections::BTreeMap;
use std::sync::PoisonError;

use devices::ids::DeviceId;
use devices::snapshot::{Record, RestoreError};
use kvm_bindings::CpuId;

use super::machine::MachineState;
use super::vcpu::VcpuStateError;
use crate::generation::GenerationError;
use crate::kvm::KvmError;
use crate::pci_slots::{PciSlots, PciState};
use crate::state::VmState;
use crate::vcpu::VcpuError;
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
    /// A vCPU is gone.
    #[error(transparent)]
    Gone(#[from] VcpuError),
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

    /// Refuses a host whose processor, of which KVM can give `supported`, lacks what the guest uses.
    pub fn check_features(&self, supported: &CpuId) -> Result<(), ApplyError> {
        (0..).zip(&self.vcpus).try_for_each(|(id, vcpu)| {
            vcpu.check_features(supported).map_err(|source| ApplyError::Vcpu { id, source })
        })
    }
}

impl Vm {
    /// Gives a VM that has just been built the state of another one. Leaves it paused, as another
    /// machine than the one that was saved.
    pub fn restore(&mut self, state: MachineState) -> Result<(), ApplyError> {
        let MachineState { vcpus, irqchips, clock_nanos, legacy, devices, pci, hello: _ } = state;
        let records = Records { legacy, devices, pci };
        records.apply(&self.legacy, &self.transports, self.pci.as_ref())?;
        self.handle.set_irqchips(&irqchips)?;
        let size = self.handle.xsave_size();
        self.cpuid = vcpus.iter().map(|vcpu| vcpu.cpuid().to_vec()).collect();
        for (vcpu, state) in self.vcpus.iter().zip(vcpus) {
            let id = vcpu.id();
            let applied = vcpu.with(move |fd| state.apply(fd, size))?;
            applied.map_err(|source| ApplyError::Vcpu { id, source })?;
        }
        self.handle.set_clock(clock_nanos)?;
        for vcpu in &self.vcpus {
            // So that its watchdog knows that it stood still. Refused if it has no such clock.
            let told = vcpu.with(|fd| fd.kvmclock_ctrl())?;
            tracing::debug!(vcpu = vcpu.id(), ?told, "the guest's clock");
        }
        self.legacy.serial.lock().unwrap_or_else(PoisonError::into_inner).resume();
        self.renew_generation()?;
        self.connect_doorbells();
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
