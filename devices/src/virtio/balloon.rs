//! The balloon (virtio 1.3, section 5.5): memory that the guest does not need goes back to the
//! host.
//!
//! Pages come in two ways: the driver inflates the balloon to the size that
//! [`BalloonHandle::set_target`] asks for, and, unasked, reports free pages. Both really leave the
//! process ([`reclaim`] says how), and come back, zeroed, when the guest touches them. Nothing is
//! done on deflating. The unit of page numbers is always 4 KiB; free page hinting, which is only of
//! use to live migration, is not offered.
//!
//! In the folder: `handle` for the host, `request` for what the guest says, `reclaim` for the
//! memory, `worker` for the queues.

mod handle;
mod reclaim;
mod request;
mod worker;

use std::sync::Arc;

use serde::{Deserialize, Serialize};

pub use self::handle::{BalloonCounters, BalloonHandle};
use self::handle::{Line, Shared};
use self::reclaim::Reclaimer;
pub use self::request::{PAGE_SIZE, Stats};
use self::worker::{Role, Worker};
use super::queue::ActiveQueue;
use super::{Activation, DeviceType, Identity, StartError, VirtioDevice};
use crate::executor::{ExecutorHandle, Running};
use crate::metrics::Meter;
use crate::snapshot::{RestoreError, SaveError, Schema, Snapshot};

// --- configuration -----------------------------------------------------------------------------

/// Feature bits (virtio 1.3, section 5.5.3).
pub mod feature {
    /// There is a queue for statistics.
    pub const STATS_VQ: u64 = 1 << 1;
    /// The guest takes pages out of the balloon rather than run out of memory.
    pub const DEFLATE_ON_OOM: u64 = 1 << 2;
    /// The driver says what free pages are filled with. A guest that clears pages when they are
    /// freed does not report any without this bit.
    pub const PAGE_POISON: u64 = 1 << 4;
    /// There is a queue for reports of free pages.
    pub const PAGE_REPORTING: u64 = 1 << 5;
}

/// Inflate, deflate, statistics, hints, reports (virtio 1.3, section 5.5.2). Some of these exist
/// only with their feature; a driver counts the ones that exist, as Linux does, or uses the numbers
/// of the specification, and both find a queue here. Linux needs room for 32 reports.
const QUEUE_SIZES: &[u16] = &[128; 5];

/// Bytes of the configuration space: target, actual, hint command, poison.
const CONFIG_LEN: u64 = 16;
const TARGET: u64 = 0;
const ACTUAL: u64 = 4;
const POISON: u64 = 12;

/// What the balloon offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BalloonConfig {
    /// The guest may take pages back when it runs out of memory.
    pub deflate_on_oom: bool,
    /// [`BalloonHandle::statistics`] works.
    pub statistics: bool,
    /// The guest gives free pages back unasked.
    pub free_page_reporting: bool,
}

impl Default for BalloonConfig {
    fn default() -> Self {
        Self { deflate_on_oom: true, statistics: true, free_page_reporting: true }
    }
}

impl BalloonConfig {
    fn features(self) -> u64 {
        let mut features = 0;
        if self.deflate_on_oom {
            features |= feature::DEFLATE_ON_OOM;
        }
        if self.statistics {
            features |= feature::STATS_VQ;
        }
        if self.free_page_reporting {
            features |= feature::PAGE_REPORTING | feature::PAGE_POISON;
        }
        features
    }
}

// --- device ------------------------------------------------------------------------------------

/// The device as the transport holds it.
pub struct Balloon {
    executor: ExecutorHandle,
    config: BalloonConfig,
    shared: Arc<Shared>,
    /// Here while stopped, with the worker while live.
    reclaimer: Reclaimer,
    worker: Option<Running<Worker>>,
}

impl Balloon {
    /// A device whose worker runs on `executor`, and the host's side of it. The balloon is empty.
    pub fn new(executor: ExecutorHandle, config: BalloonConfig) -> (Self, BalloonHandle) {
        let shared = Arc::new(Shared::default());
        let handle = BalloonHandle::new(shared.clone());
        let reclaimer = Reclaimer::new();
        (Self { executor, config, shared, reclaimer, worker: None }, handle)
    }
}

impl VirtioDevice for Balloon {
    fn identity(&self) -> Identity {
        Identity {
            device_type: DeviceType::Balloon,
            features: self.config.features(),
            queue_sizes: QUEUE_SIZES,
            config_len: CONFIG_LEN,
        }
    }

    fn meter(&self) -> Option<Meter> {
        Some(Arc::new(BalloonHandle::new(self.shared.clone())))
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        for (byte, at) in data.iter_mut().zip(offset..) {
            let (field, value) = match at {
                ACTUAL.. if at < ACTUAL + 4 => (ACTUAL, self.shared.actual()),
                POISON.. => (POISON, self.shared.poison()),
                TARGET.. if at < TARGET + 4 => (TARGET, self.shared.target()),
                _ => (at, 0),
            };
            *byte = value.to_le_bytes().get((at - field) as usize).copied().unwrap_or(0);
        }
    }

    fn write_config(&mut self, offset: u64, data: &[u8]) {
        let merged = |field: u64, value: u32| {
            let mut bytes = value.to_le_bytes();
            for (byte, at) in data.iter().zip(offset..) {
                let place = at.checked_sub(field).and_then(|place| bytes.get_mut(place as usize));
                if let Some(place) = place {
                    *place = *byte;
                }
            }
            u32::from_le_bytes(bytes)
        };
        self.shared.set_actual(merged(ACTUAL, self.shared.actual()));
        self.shared.set_poison(merged(POISON, self.shared.poison()));
    }

    fn start(&mut self, activation: Activation) -> Result<(), StartError> {
        let has = |index| activation.queues.iter().any(|queue| queue.index().0 == index);
        for index in [0, 1] {
            if !has(index) {
                return Err(StartError::MissingQueue(index));
            }
        }
        let roles = Role::all(activation.features, has);
        let mut queues = activation.queues;
        queues.sort_by_key(ActiveQueue::index);
        let stats = queues.iter().find(|queue| roles.of(queue.index()) == Role::Statistics);
        let notifier = activation.notifier;
        let ram = worker::ram_size(&activation.memory);
        let line = Line {
            notifier: notifier.clone(),
            statistics: stats.map(|queue| queue.kick().clone()),
        };
        let poisoned = activation.features & feature::PAGE_POISON != 0;
        let worker = Worker::new(queues, roles, self.shared.clone(), notifier.clone()).with_memory(
            ram,
            std::mem::take(&mut self.reclaimer),
            poisoned,
        );
        self.shared.connect(line, ram);
        match self.executor.run(worker) {
            Ok(running) => {
                self.worker = Some(running);
                if self.shared.target() != self.shared.actual() {
                    // It may have been set while the guest could not hear of it.
                    notifier.config_changed();
                }
                Ok(())
            }
            Err(refused) => {
                self.shared.disconnect();
                self.reclaimer = refused.handler.map(|worker| worker.reclaimer).unwrap_or_default();
                Err(StartError::Executor(refused.error))
            }
        }
    }

    fn stop(&mut self) -> Vec<ActiveQueue> {
        let Some(worker) = self.worker.take().and_then(Running::stop) else {
            return Vec::new();
        };
        self.shared.disconnect();
        let (queues, reclaimer) = worker.into_parts();
        self.reclaimer = reclaimer;
        queues
    }

    /// The target stays: it is the host's.
    fn reset(&mut self) {
        self.shared.set_actual(0);
        self.shared.set_poison(0);
    }
}

// --- state -------------------------------------------------------------------------------------

/// The saved form: the configuration space. The pages in the balloon are known to the driver alone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BalloonState {
    /// Pages that the host wants in the balloon.
    pub target: u32,
    /// Pages that the driver says are in it.
    pub actual: u32,
    /// What the driver fills free pages with.
    pub poison: u32,
}

impl Schema for BalloonState {
    const KIND: &'static str = "virtio-balloon";
    const VERSION: u32 = 1;
}

impl Snapshot for Balloon {
    type State = BalloonState;

    fn save(&self) -> Result<BalloonState, SaveError> {
        if self.worker.is_some() {
            return Err(SaveError::Running("virtio-balloon"));
        }
        let shared = &self.shared;
        Ok(BalloonState {
            target: shared.target(),
            actual: shared.actual(),
            poison: shared.poison(),
        })
    }

    /// Any number may stand in these fields, since the guest may write any.
    fn restore(&mut self, state: BalloonState) -> Result<(), RestoreError> {
        if self.worker.is_some() {
            return Err(RestoreError::Running("virtio-balloon"));
        }
        self.shared.set_target(state.target);
        self.shared.set_actual(state.actual);
        self.shared.set_poison(state.poison);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
