//! A VM that has been built: start, pause, resume, and its end when it is dropped.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use devices::executor::Executor;
use devices::ids::DeviceId;
use devices::irq::Interrupt;
use devices::memory::Memory;
use devices::virtio::transport::Transport;
use devices::virtio::vsock::VsockHandle;

use crate::config::VmConfig;
use crate::console::ConsoleLog;
use crate::doorbells::Doorbells;
use crate::kvm::VmHandle;
use crate::state::VmState;
use crate::vcpu::{Vcpu, VcpuError};

/// A device on the bus, shared with it.
pub type SharedTransport = Arc<Mutex<dyn Transport>>;

/// A VM. The fields are dropped in this order: first the vCPUs, so that nothing calls a device,
/// then the devices, then the loop that runs them, then the VM in the kernel and its memory.
pub struct Vm {
    pub(crate) vcpus: Vec<Vcpu>,
    pub(crate) transports: Vec<(DeviceId, SharedTransport)>,
    pub(crate) doorbells: Doorbells,
    /// Runs the devices; here only so that it outlives them.
    pub(crate) _executor: Executor,
    pub(crate) handle: Arc<VmHandle>,
    pub(crate) memory: Memory,
    pub(crate) config: VmConfig,
    pub(crate) console: ConsoleLog,
    pub(crate) power_button: Interrupt,
    pub(crate) vsock: VsockHandle,
    pub(crate) state: VmState,
}

impl Vm {
    /// Where it is in its life.
    pub fn state(&self) -> VmState {
        self.state
    }

    /// What it was made from.
    pub fn config(&self) -> &VmConfig {
        &self.config
    }

    /// Its serial console's output.
    pub fn console(&self) -> &ConsoleLog {
        &self.console
    }

    /// Connections to the guest.
    pub fn vsock(&self) -> &VsockHandle {
        &self.vsock
    }

    /// Guest RAM.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Presses the ACPI power button.
    pub fn press_power_button(&self) {
        self.power_button.raise();
    }

    /// Lets the guest run for the first time. Legal in [`VmState::Created`].
    pub fn start(&mut self) -> Result<(), VcpuError> {
        self.run_vcpus()?;
        self.state = VmState::Running;
        if let Err(error) = self.doorbells.start(self.handle.clone()) {
            tracing::warn!(%error, "doorbells work through exits");
        }
        Ok(())
    }

    fn run_vcpus(&self) -> Result<(), VcpuError> {
        self.vcpus.iter().try_for_each(Vcpu::run)
    }

    /// Stops everything: vCPUs first, so that no new work comes, then the devices, which finish
    /// what they have. Legal while running. Goes on when the result is dropped, unless kept.
    pub fn pause(&mut self) -> Result<Paused<'_>, VcpuError> {
        for vcpu in &self.vcpus {
            vcpu.ask_to_park()?;
        }
        for vcpu in &self.vcpus {
            vcpu.wait()?;
        }
        for (_, transport) in &self.transports {
            lock(transport).lifecycle().pause();
        }
        self.state = VmState::Paused;
        Ok(Paused { vm: Some(self) })
    }

    /// Goes on after a pause that was kept: devices before vCPUs, so that the first notification
    /// finds somebody. Legal while paused.
    pub fn resume(&mut self) -> Result<(), VcpuError> {
        for (_, transport) in &self.transports {
            lock(transport).lifecycle().resume();
        }
        self.run_vcpus()?;
        self.state = VmState::Running;
        Ok(())
    }

    /// The guest has ended: nothing of it moves from here on.
    pub fn end(&mut self) {
        self.vcpus.clear();
        for (_, transport) in &self.transports {
            lock(transport).lifecycle().pause();
        }
        self.state = VmState::Ended;
    }
}

fn lock(transport: &SharedTransport) -> MutexGuard<'_, dyn Transport + 'static> {
    transport.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A VM that stands still. Dropping it lets the VM go on.
pub struct Paused<'a> {
    vm: Option<&'a mut Vm>,
}

impl Paused<'_> {
    /// Leaves the VM paused.
    pub fn keep(mut self) {
        self.vm = None;
    }
}

impl Drop for Paused<'_> {
    fn drop(&mut self) {
        if let Some(vm) = self.vm.take()
            && let Err(error) = vm.resume()
        {
            tracing::error!(%error, "the VM does not go on after a pause");
        }
    }
}
