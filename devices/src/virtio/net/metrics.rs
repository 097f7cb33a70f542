//! What a card tells of what it has done. Received and sent are meant as the guest sees it.

use super::NetHandle;
use crate::metrics::{Metered, Metric};

impl Metered for NetHandle {
    fn metrics(&self) -> Vec<Metric> {
        let done = self.counters();
        let counter = Metric::counter;
        vec![
            counter("net_received_frames_total", "Frames given to the guest", done.rx_frames),
            counter("net_received_bytes_total", "Bytes of these frames", done.rx_bytes),
            counter(
                "net_received_dropped_total",
                "Frames that did not get to the guest: no link, too large, or not as it wants them",
                done.rx_dropped,
            ),
            counter(
                "net_received_stalled_total",
                "Times that the guest had no buffers for what was there",
                done.rx_stalled,
            ),
            counter(
                "net_received_throttled_total",
                "Times that frames for the guest had to wait for the rate limit",
                done.rx_throttled,
            ),
            counter("net_sent_frames_total", "Frames that the guest sent", done.tx_frames),
            counter("net_sent_bytes_total", "Bytes of these frames", done.tx_bytes),
            counter(
                "net_sent_dropped_total",
                "Frames of the guest that the host did not get: no link, refused, or faulty",
                done.tx_dropped,
            ),
            counter("net_sent_blocked_total", "Times that the interface was full", done.tx_blocked),
            counter(
                "net_sent_throttled_total",
                "Times that frames of the guest had to wait for the rate limit",
                done.tx_throttled,
            ),
            counter(
                "net_guest_faults_total",
                "Faulty frames, buffers, commands and rings of the guest",
                done.guest_faults,
            ),
            counter(
                "net_link_losses_total",
                "Times that the interface went down or away",
                done.link_losses,
            ),
        ]
    }
}
