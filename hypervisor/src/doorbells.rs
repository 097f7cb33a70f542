//! Connects doorbells in the kernel, behind the guest's back.
//!
//! `KVM_IOEVENTFD` can take milliseconds, and nobody needs to wait for it: a notification that is
//! not connected arrives as an exit and has the same effect. So a thread works through what is to
//! be connected, in order, while the guest runs.

use std::collections::HashMap;
use std::io;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};

use devices::ids::DeviceId;
use devices::virtio::transport::Doorbell;

use crate::kvm::VmHandle;

/// The doorbells of a VM, and where each device's window is.
#[derive(Clone, Default)]
pub struct Doorbells(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    devices: HashMap<DeviceId, Vec<Doorbell>>,
    windows: HashMap<DeviceId, u64>,
    /// Set once the guest runs.
    worker: Option<Sender<Change>>,
}

/// One thing to do.
struct Change {
    base: u64,
    connect: bool,
    doorbells: Vec<Doorbell>,
}

impl Doorbells {
    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the doorbells of a device known. Its window may come later.
    pub fn add_device(&self, id: DeviceId, doorbells: Vec<Doorbell>) {
        self.state().devices.insert(id, doorbells);
    }

    /// Forgets a device.
    pub fn remove_device(&self, id: &DeviceId) {
        self.place(id, None);
        self.state().devices.remove(id);
    }

    /// The window of a device is there now, or nowhere. Does not wait for KVM.
    pub fn place(&self, id: &DeviceId, base: Option<u64>) {
        let mut state = self.state();
        let before = match base {
            Some(base) => state.windows.insert(id.clone(), base),
            None => state.windows.remove(id),
        };
        if before == base {
            return;
        }
        let doorbells = state.devices.get(id).cloned().unwrap_or_default();
        if let Some(worker) = &state.worker {
            for (base, connect) in [(before, false), (base, true)] {
                if let Some(base) = base {
                    // Fails only if the thread is gone: notifications arrive as exits.
                    let _ = worker.send(Change { base, connect, doorbells: doorbells.clone() });
                }
            }
        }
    }

    /// Starts connecting: what has a window now, and later what gets one.
    pub fn start(&self, handle: Arc<VmHandle>) -> io::Result<()> {
        let (sender, receiver) = channel::<Change>();
        let thread = std::thread::Builder::new().name("doorbells".to_owned());
        thread.stack_size(64 * 1024).spawn(move || {
            while let Ok(change) = receiver.recv() {
                carry_out(&handle, &change);
            }
        })?;
        let mut state = self.state();
        for (id, &base) in &state.windows {
            let doorbells = state.devices.get(id).cloned().unwrap_or_default();
            let _ = sender.send(Change { base, connect: true, doorbells });
        }
        state.worker = Some(sender);
        Ok(())
    }
}

fn carry_out(handle: &VmHandle, change: &Change) {
    for doorbell in &change.doorbells {
        let done = if change.connect {
            handle.connect_doorbell(change.base, doorbell)
        } else {
            handle.disconnect_doorbell(change.base, doorbell)
        };
        if let Err(error) = done {
            tracing::debug!(%error, "doorbell works through exits");
        }
    }
}
