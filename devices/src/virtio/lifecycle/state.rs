//! The saved form of a [`Lifecycle`], and how it becomes one again.

use serde::{Deserialize, Serialize};
use virtio_queue::{Queue, QueueT};

use super::{Lifecycle, Phase, status};
use crate::snapshot::{Record, RestoreError, SaveError, Schema, to_record};
use crate::virtio::feature;
use crate::virtio::queue::{ActiveQueue, QueueRecord};

/// One queue in a snapshot.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SavedQueue {
    /// True if the driver made it ready.
    pub ready: bool,
    /// Its rings.
    pub ring: QueueRecord,
}

/// The saved form of a device with its lifecycle.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LifecycleState {
    /// The status register, less NEEDS_RESET.
    pub status: u8,
    /// The device had asked for a reset.
    pub needs_reset: bool,
    /// It was live when the VM was paused.
    pub parked: bool,
    /// Negotiated features.
    pub driver_features: u64,
    /// All queues, in order.
    pub queues: Vec<SavedQueue>,
    /// The device's own record.
    pub device: Record,
}

impl Schema for LifecycleState {
    const KIND: &'static str = "virtio-lifecycle";
    const VERSION: u32 = 1;
}

impl LifecycleState {
    /// As a record of its own.
    pub fn into_record(self) -> Result<Record, SaveError> {
        to_record(&self)
    }
}

impl Lifecycle {
    /// Takes the state. Only legal while not live.
    pub fn save(&self) -> Result<LifecycleState, SaveError> {
        let parked: &[ActiveQueue] = match &self.phase {
            Phase::Live => return Err(SaveError::Running("virtio device")),
            Phase::Parked(queues) => queues,
            Phase::Idle => &[],
        };
        let configured = self.queues.iter().enumerate().map(|(index, queue)| {
            let active = parked.iter().find(|active| usize::from(active.index().0) == index);
            SavedQueue {
                ready: queue.ready(),
                ring: active.map_or_else(|| idle_record(index, queue), ActiveQueue::record),
            }
        });
        Ok(LifecycleState {
            status: self.status,
            needs_reset: self.notifier.wants_reset(),
            parked: matches!(self.phase, Phase::Parked(_)),
            driver_features: self.driver_features,
            queues: configured.collect(),
            device: self.device.save_record()?,
        })
    }

    /// Applies a state, which is not trusted, to a fresh device. Raises no interrupt.
    pub fn restore(&mut self, state: LifecycleState) -> Result<(), RestoreError> {
        if !matches!(self.phase, Phase::Idle) {
            return Err(RestoreError::Running("virtio device"));
        }
        self.validate(&state)?;
        let mut queues = Vec::with_capacity(self.queues.len());
        for (saved, queue) in state.queues.iter().zip(&self.queues) {
            let mut restored = saved.ring.to_queue(queue.max_size())?;
            restored.set_ready(saved.ready);
            queues.push(restored);
        }
        let phase = if state.parked {
            let active = self.active_queues(&queues, state.driver_features);
            Phase::Parked(active.map_err(|fault| invalid("queues", fault.to_string()))?)
        } else {
            Phase::Idle
        };
        // The last that can be refused; from here on everything is applied.
        self.device.restore_record(state.device)?;
        self.queues = queues;
        self.status = state.status;
        self.driver_features = state.driver_features;
        self.phase = phase;
        self.notifier.restore(state.needs_reset);
        Ok(())
    }

    /// Refuses states that no sequence of register accesses leads to.
    fn validate(&self, state: &LifecycleState) -> Result<(), RestoreError> {
        let has = |bits| state.status & bits == bits;
        if state.driver_features & !self.offered() != 0 {
            return Err(invalid("driver_features", format!("{:#x}", state.driver_features)));
        }
        let agreed = state.driver_features & feature::VERSION_1 != 0;
        let started = has(status::DRIVER_OK) && !has(status::FAILED) && !state.needs_reset;
        let possible = state.status & !KNOWN_STATUS == 0
            && (!has(status::FEATURES_OK) || agreed && has(status::DRIVER))
            && (!has(status::DRIVER_OK) || has(status::FEATURES_OK))
            && (!started || state.parked);
        if !possible {
            return Err(invalid("status", format!("{:#x}", state.status)));
        }
        if state.parked && (!has(status::DRIVER_OK) || has(status::FAILED)) {
            return Err(invalid("parked", format!("true, with status {:#x}", state.status)));
        }
        if state.queues.len() != self.queues.len() {
            return Err(invalid("queues", state.queues.len().to_string()));
        }
        for (index, saved) in state.queues.iter().enumerate() {
            if usize::from(saved.ring.index) != index {
                return Err(invalid("queues.ring.index", saved.ring.index.to_string()));
            }
        }
        Ok(())
    }
}

const KNOWN_STATUS: u8 =
    status::ACKNOWLEDGE | status::DRIVER | status::DRIVER_OK | status::FEATURES_OK | status::FAILED;

fn invalid(field: &'static str, value: String) -> RestoreError {
    RestoreError::Invalid { kind: LifecycleState::KIND, field, value }
}

fn idle_record(index: usize, queue: &Queue) -> QueueRecord {
    QueueRecord {
        index: index as u16,
        size: queue.size(),
        desc_table: queue.desc_table(),
        avail_ring: queue.avail_ring(),
        used_ring: queue.used_ring(),
        next_avail: queue.next_avail(),
        next_used: queue.next_used(),
    }
}
