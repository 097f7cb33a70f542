//! What the device tells of what it has done. Received and sent are meant as the guest sees it.

use crate::metrics::{Count, GUEST_FAULTS, Metered, Metric};

/// The counts of a device, from its making to its end.
#[derive(Debug, Default)]
pub struct Counters {
    /// Connections there are, those included that are about to begin or end.
    pub connections: Count,
    /// Connections that both sides agreed to.
    pub opened: Count,
    /// Connections that one side wanted and did not get.
    pub refused: Count,
    /// Connections that broke off while both sides could still send.
    pub reset: Count,
    /// Bytes of streams to the guest.
    pub received_bytes: Count,
    /// Bytes of streams from the guest.
    pub sent_bytes: Count,
    /// Packets of the guest that make no sense or belong to no connection.
    pub dropped_packets: Count,
    /// Times the driver broke the rules of its rings.
    pub guest_faults: Count,
}

impl Metered for Counters {
    fn metrics(&self) -> Vec<Metric> {
        let counter = |name, help, count: &Count| Metric::counter(name, help, count.get());
        vec![
            Metric::gauge(
                "vsock_connections",
                "Connections there are, those included that are about to begin or end",
                self.connections.get(),
            ),
            counter(
                "vsock_connections_opened_total",
                "Connections that both sides agreed to",
                &self.opened,
            ),
            counter(
                "vsock_connections_refused_total",
                "Connections that one side wanted and did not get",
                &self.refused,
            ),
            counter(
                "vsock_connections_reset_total",
                "Connections that broke off while both sides could still send",
                &self.reset,
            ),
            counter(
                "vsock_received_bytes_total",
                "Bytes of streams given to the guest",
                &self.received_bytes,
            ),
            counter(
                "vsock_sent_bytes_total",
                "Bytes of streams that the guest sent",
                &self.sent_bytes,
            ),
            counter(
                "vsock_dropped_packets_total",
                "Packets of the guest that make no sense or belong to no connection",
                &self.dropped_packets,
            ),
            counter("vsock_guest_faults_total", GUEST_FAULTS, &self.guest_faults),
        ]
    }
}
