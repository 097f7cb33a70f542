//! What a device tells of its backend. What the backend does with requests, only it knows.

use std::sync::Arc;

use super::super::pump::Signals;
use crate::metrics::{Count, GUEST_FAULTS, Metered, Metric};

/// Counted over all resets and backends.
#[derive(Debug, Default)]
pub struct VhostUserCounts {
    /// Connections that were made.
    pub(super) connections: Count,
    /// Times that a backend could not be started.
    pub(super) failures: Count,
    pub(super) signals: Arc<Signals>,
}

impl Metered for VhostUserCounts {
    fn metrics(&self) -> Vec<Metric> {
        let counter = |name, help, count: &Count| Metric::counter(name, help, count.get());
        vec![
            counter(
                "vhost_user_connections_total",
                "Connections made to the backend",
                &self.connections,
            ),
            counter(
                "vhost_user_failures_total",
                "Times that the backend could not be started",
                &self.failures,
            ),
            counter(
                "vhost_user_losses_total",
                "Times that the backend went away or could not be stopped",
                &self.signals.losses,
            ),
            counter(
                "vhost_user_calls_total",
                "Interrupts passed on from the backend",
                &self.signals.calls,
            ),
            counter("vhost_user_guest_faults_total", GUEST_FAULTS, &self.signals.guest_faults),
        ]
    }
}
