//! What a disk tells of what it has done, over all resets.

use super::disk::DiskOp;
use crate::metrics::{Count, GUEST_FAULTS, Metered, Metric};

/// Requests are counted when they have succeeded, bytes are those of their data.
#[derive(Debug, Default)]
pub struct BlockCounts {
    /// Read requests.
    pub reads: Count,
    /// Bytes that they gave to the guest.
    pub read_bytes: Count,
    /// Write requests.
    pub writes: Count,
    /// Bytes that they wrote.
    pub written_bytes: Count,
    /// Flush requests.
    pub flushes: Count,
    /// Discard requests.
    pub discards: Count,
    /// Write-zeroes requests.
    pub zeroes: Count,
    /// Requests that the host's storage failed.
    pub errors: Count,
    /// Requests that the host's storage cannot do.
    pub unsupported: Count,
    /// Requests that make no sense, or are not allowed.
    pub refused: Count,
    /// Times that requests had to wait for the rate limit.
    pub throttled: Count,
    /// See [`GUEST_FAULTS`].
    pub guest_faults: Count,
}

/// What is counted apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Read,
    Write,
    Flush,
    Discard,
    WriteZeroes,
}

impl Kind {
    pub fn of(op: &DiskOp) -> Self {
        match op {
            DiskOp::Read { .. } => Kind::Read,
            DiskOp::Write { .. } => Kind::Write,
            DiskOp::Flush => Kind::Flush,
            DiskOp::Discard { .. } => Kind::Discard,
            DiskOp::WriteZeroes { .. } => Kind::WriteZeroes,
        }
    }
}

impl BlockCounts {
    /// A request has succeeded that moved `bytes` bytes.
    pub(super) fn done(&self, kind: Kind, bytes: u64) {
        match kind {
            Kind::Read => {
                self.reads.one();
                self.read_bytes.add(bytes);
            }
            Kind::Write => {
                self.writes.one();
                self.written_bytes.add(bytes);
            }
            Kind::Flush => drop(self.flushes.one()),
            Kind::Discard => drop(self.discards.one()),
            Kind::WriteZeroes => drop(self.zeroes.one()),
        }
    }
}

impl Metered for BlockCounts {
    fn metrics(&self) -> Vec<Metric> {
        let counter = |name, help, count: &Count| Metric::counter(name, help, count.get());
        vec![
            counter("block_reads_total", "Read requests done", &self.reads),
            counter("block_read_bytes_total", "Bytes given to the guest by them", &self.read_bytes),
            counter("block_writes_total", "Write requests done", &self.writes),
            counter("block_written_bytes_total", "Bytes written by them", &self.written_bytes),
            counter("block_flushes_total", "Flush requests done", &self.flushes),
            counter("block_discards_total", "Discard requests done", &self.discards),
            counter("block_zeroes_total", "Write-zeroes requests done", &self.zeroes),
            counter("block_errors_total", "Requests that the host's storage failed", &self.errors),
            counter(
                "block_unsupported_total",
                "Requests that the host's storage cannot do",
                &self.unsupported,
            ),
            counter(
                "block_refused_total",
                "Requests of the guest that make no sense or are not allowed",
                &self.refused,
            ),
            counter(
                "block_throttled_total",
                "Times that requests had to wait for the rate limit",
                &self.throttled,
            ),
            counter("block_guest_faults_total", GUEST_FAULTS, &self.guest_faults),
        ]
    }
}
