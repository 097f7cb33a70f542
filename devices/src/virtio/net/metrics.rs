//! What a card tells of what it has done. Received and sent are meant as the guest sees it.

use std::sync::Arc;

use super::path::{DataPath, Path};
use super::{Net, NetCounters, NetHandle};
use crate::metrics::{Meter, Metered, Metric};

/// Counts of a card, as far as it knows them.
pub(super) struct CardMeter {
    card: NetHandle,
    path: DataPath,
    backend: Option<Meter>,
}

impl Net {
    /// What the card counts, with what its backend does.
    pub(super) fn counts(&self) -> CardMeter {
        let backend = match &self.path {
            Path::Backend(backend) => Some(backend.counts().clone() as Arc<_>),
            Path::Own | Path::Kernel(_) => None,
        };
        CardMeter { card: self.handle(), path: self.path.name(), backend }
    }
}

impl Metered for NetHandle {
    /// Those of a card that moves its frames itself.
    fn metrics(&self) -> Vec<Metric> {
        let done = self.counters();
        [losses(&done), frames(&done)].concat()
    }
}

impl Metered for CardMeter {
    fn metrics(&self) -> Vec<Metric> {
        let mut done = self.card.counters();
        let theirs = self.backend.as_ref().map(|backend| backend.metrics()).unwrap_or_default();
        // Rings that it did not like are faults like those of the control queue, which is ours.
        let (faults, theirs): (Vec<_>, Vec<_>) =
            theirs.into_iter().partition(|metric| metric.name.ends_with("_guest_faults_total"));
        done.guest_faults += faults.iter().map(|metric| metric.value).sum::<u64>();
        let mut metrics = losses(&done);
        match self.path {
            DataPath::Tap => return self.card.metrics(),
            // Frames are counted by the interface, on the host. Those that found no link are ours.
            DataPath::Kernel => metrics.extend([
                dropped(&done),
                Metric::counter(
                    "net_calls_total",
                    "Interrupts passed on from the kernel",
                    done.calls,
                ),
            ]),
            DataPath::Backend => metrics.extend(theirs),
        }
        metrics
    }
}

fn dropped(done: &NetCounters) -> Metric {
    Metric::counter(
        "net_sent_dropped_total",
        "Frames of the guest that the host did not get: no link, refused, or faulty",
        done.tx_dropped,
    )
}

fn losses(done: &NetCounters) -> Vec<Metric> {
    let counter = Metric::counter;
    vec![
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

fn frames(done: &NetCounters) -> Vec<Metric> {
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
        dropped(done),
        counter("net_sent_blocked_total", "Times that the interface was full", done.tx_blocked),
        counter(
            "net_sent_throttled_total",
            "Times that frames of the guest had to wait for the rate limit",
            done.tx_throttled,
        ),
    ]
}
