//! Connects doorbells in the kernel, behind the guest's back.
//!
//! `KVM_IOEVENTFD` can take milliseconds, and nobody needs to wait for it: a notification that is
//! not connected arrives as an exit and has the same effect. So a thread works through the devices
//! whose windows have changed, in order, while the guest runs. It brings each to where its window is
//! by then: a guest that moves windows faster than that makes no more work than one that does not.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};

use devices::ids::DeviceId;
use devices::virtio::transport::Doorbell;

use crate::kvm::VmHandle;

/// The doorbells of a VM, and where each device's window is.
#[derive(Clone, Default)]
pub struct Doorbells(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    devices: HashMap<DeviceId, Connection>,
    /// Devices that the thread has not looked at since they came, went or moved; each once.
    changed: VecDeque<DeviceId>,
    /// What is connected, as far as the thread has got.
    connected: HashMap<DeviceId, Connection>,
    /// Number of the next device.
    next: u64,
    /// Wakes the thread; set once the guest runs.
    worker: Option<SyncSender<()>>,
}

/// Doorbells at a place.
#[derive(Clone)]
struct Connection {
    /// Tells a device from an earlier one of the same name.
    number: u64,
    base: Option<u64>,
    doorbells: Vec<Doorbell>,
}

/// One thing to do.
struct Change {
    base: u64,
    connect: bool,
    doorbells: Vec<Doorbell>,
}

impl State {
    fn has_changed(&mut self, id: &DeviceId) {
        if !self.changed.contains(id) {
            self.changed.push_back(id.clone());
        }
        if let Some(worker) = &self.worker {
            // Full: it is awake already. Gone: notifications arrive as exits.
            let _ = worker.try_send(());
        }
    }

    /// What is to be done for the next device that has changed.
    fn take_changes(&mut self) -> Option<Vec<Change>> {
        let id = self.changed.pop_front()?;
        let place = |connection: &&Connection| Some((connection.number, connection.base?));
        let (from, to) = (self.connected.get(&id), self.devices.get(&id));
        let mut changes = Vec::new();
        if from.as_ref().and_then(place) != to.as_ref().and_then(place) {
            for (connection, connect) in [(from, false), (to, true)] {
                if let Some((connection, base)) = connection.and_then(|it| Some((it, it.base?))) {
                    let doorbells = connection.doorbells.clone();
                    changes.push(Change { base, connect, doorbells });
                }
            }
        }
        match to.cloned() {
            Some(connection) => self.connected.insert(id, connection),
            None => self.connected.remove(&id),
        };
        Some(changes)
    }
}

impl Doorbells {
    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the doorbells of a device known. Its window may come later.
    pub fn add_device(&self, id: DeviceId, doorbells: Vec<Doorbell>) {
        let mut state = self.state();
        let number = state.next;
        state.next = number.wrapping_add(1);
        state.devices.insert(id, Connection { number, base: None, doorbells });
    }

    /// Forgets a device.
    pub fn remove_device(&self, id: &DeviceId) {
        let mut state = self.state();
        state.devices.remove(id);
        state.has_changed(id);
    }

    /// The window of a device is there now, or nowhere. Does not wait for KVM.
    pub fn place(&self, id: &DeviceId, base: Option<u64>) {
        let mut state = self.state();
        let Some(device) = state.devices.get_mut(id) else { return };
        if std::mem::replace(&mut device.base, base) != base {
            state.has_changed(id);
        }
    }

    /// Starts connecting: what has a window now, and later what gets one. Once is enough.
    pub fn start(&self, handle: Arc<VmHandle>) -> io::Result<()> {
        if self.state().worker.is_some() {
            return Ok(());
        }
        let (sender, receiver) = sync_channel::<()>(1);
        let state = Arc::downgrade(&self.0);
        let thread = std::thread::Builder::new().name("doorbells".to_owned());
        thread.stack_size(64 * 1024).spawn(move || {
            while let (Ok(()), Some(state)) = (receiver.recv(), state.upgrade()) {
                let doorbells = Self(state);
                // Not under the lock: a vCPU may be waiting for it.
                let next = || doorbells.state().take_changes();
                while let Some(changes) = next() {
                    changes.iter().for_each(|change| carry_out(&handle, change));
                }
            }
        })?;
        let mut state = self.state();
        // What there is by now waits for this.
        let _ = sender.try_send(());
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

#[cfg(test)]
mod tests {
    use devices::event::Event;
    use devices::ids::QueueIndex;

    use super::*;

    fn bells(value: u32) -> Vec<Doorbell> {
        let event = Event::new().unwrap();
        vec![Doorbell { queue: QueueIndex(0), offset: 0x50, value: Some(value), event }]
    }

    /// Bases and directions of all that is to be done.
    fn taken(doorbells: &Doorbells) -> Vec<(u64, bool)> {
        let mut all = Vec::new();
        while let Some(changes) = doorbells.state().take_changes() {
            all.extend(changes.iter().map(|change| (change.base, change.connect)));
        }
        all
    }

    #[test]
    fn windows_are_connected_moved_and_left() {
        let (doorbells, id) = (Doorbells::default(), DeviceId::new("a"));
        doorbells.add_device(id.clone(), bells(0));
        assert_eq!(taken(&doorbells), []);
        doorbells.place(&id, Some(0x1000));
        assert_eq!(taken(&doorbells), [(0x1000, true)]);
        doorbells.place(&id, Some(0x1000));
        assert_eq!(taken(&doorbells), []);
        doorbells.place(&id, Some(0x2000));
        assert_eq!(taken(&doorbells), [(0x1000, false), (0x2000, true)]);
        doorbells.remove_device(&id);
        assert_eq!(taken(&doorbells), [(0x2000, false)]);
        doorbells.place(&id, Some(0x3000));
        assert_eq!(taken(&doorbells), []);
    }

    #[test]
    fn windows_that_move_without_end_make_no_work_without_end() {
        let doorbells = Doorbells::default();
        let ids: Vec<_> = (0..3).map(|n| DeviceId::new(format!("d{n}"))).collect();
        ids.iter().for_each(|id| doorbells.add_device(id.clone(), bells(0)));
        for round in 0..100_000_u64 {
            let base = (round % 3 != 0).then_some(round << 16);
            doorbells.place(&ids[(round % 7 % 3) as usize], base);
        }
        assert!(doorbells.state().changed.len() <= 3);
        assert!(taken(&doorbells).len() <= 3);
    }

    #[test]
    fn a_device_in_the_place_of_another_is_connected_anew() {
        let (doorbells, id) = (Doorbells::default(), DeviceId::new("a"));
        doorbells.add_device(id.clone(), bells(0));
        doorbells.place(&id, Some(0x1000));
        taken(&doorbells);
        doorbells.remove_device(&id);
        doorbells.add_device(id.clone(), bells(1));
        doorbells.place(&id, Some(0x1000));
        let changes = doorbells.state().take_changes().unwrap();
        assert_eq!(changes.iter().map(|it| it.connect).collect::<Vec<_>>(), [false, true]);
        assert_eq!(changes[1].doorbells[0].value, Some(1));
    }
}
