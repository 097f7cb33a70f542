//! What tests of devices are made of: a driver without a guest, and checks for every device.
//!
//! Not part of the VMM: only built for tests and with the feature `testing`. Everything here panics
//! when the device under test does not do as it should.
//!
//! A device's own tests start with one line, which runs a few hundred checks of its registers, its
//! rings and its life:
//!
//! ```
//! use devices::testing::conformance;
//! use devices::virtio::rng::{Rng, host_entropy};
//!
//! conformance(|executor| Box::new(Rng::new(executor, host_entropy)));
//! ```
//!
//! With an exchange that must succeed after each ordeal, and the queues on which the device answers
//! every chain at once, the checks are sharper:
//!
//! ```
//! use devices::testing::{Buffer, Conformance};
//! use devices::virtio::rng::{Rng, host_entropy};
//!
//! Conformance::new(|executor| Box::new(Rng::new(executor, host_entropy)))
//!     .exercise(|driver| {
//!         let buffer = driver.alloc(16);
//!         assert_eq!(driver.exchange(0, &[Buffer::writable(buffer, 16)]), 16);
//!     })
//!     .answers(&[0])
//!     .run();
//! ```
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod conformance;
mod driver;
mod fuzz;
#[cfg(test)]
mod readme;
mod stub;
mod vhost_user;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

pub use self::conformance::{Conformance, conformance};
pub use self::driver::{Buffer, Descriptor, GuestDriver, Kind, Used, flags, register};
pub use self::fuzz::{FuzzRing, fuzz};
pub use self::stub::{
    Call, STUB_CONFIG_LEN, STUB_FEATURES, STUB_QUEUES, Stub, StubDesk, StubState,
};
pub use self::vhost_user::{MakeDevice, VhostUserBackend};
use vm_memory::FileOffset;

use crate::irq::Interrupt;
use crate::memory::{GuestAddress, Memory, shareable_file};
use crate::metrics::Metered;
use crate::snapshot::{RestoreError, Stateful};

/// How long a device may take for what it must do.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// Bytes of each of the two pieces of RAM of [`ram`].
pub const RAM_SIZE: u64 = 8 << 20;
/// First address of the hole between them, as large as they are.
pub const HOLE: GuestAddress = GuestAddress(RAM_SIZE);
/// First address of the second piece.
pub const HIGH_RAM: GuestAddress = GuestAddress(2 * RAM_SIZE);

/// Guest RAM with a hole in the middle: 8 MiB, nothing, 8 MiB.
pub fn ram() -> Memory {
    let size = RAM_SIZE as usize;
    Memory::from_ranges(&[(GuestAddress(0), size), (HIGH_RAM, size)]).unwrap()
}

/// The same in memory that another process could map.
pub fn shared_ram() -> Memory {
    let size = RAM_SIZE as usize;
    let piece = |start| {
        let file = shareable_file(RAM_SIZE).unwrap();
        (start, size, Some(FileOffset::new(file, 0)))
    };
    Memory::from_ranges_with_files([piece(GuestAddress(0)), piece(HIGH_RAM)]).unwrap()
}

/// Counts the edges of an interrupt line.
#[derive(Clone, Debug, Default)]
pub struct IrqLog(Arc<AtomicU32>);

impl IrqLog {
    /// A log without edges.
    pub fn new() -> Self {
        Self::default()
    }

    /// The line that is counted.
    pub fn interrupt(&self) -> Interrupt {
        let count = self.0.clone();
        Interrupt::from_fn(move || {
            count.fetch_add(1, Ordering::AcqRel);
        })
    }

    /// Edges so far.
    pub fn count(&self) -> u32 {
        self.0.load(Ordering::Acquire)
    }

    /// Edges since the last call.
    pub fn take(&self) -> u32 {
        self.0.swap(0, Ordering::AcqRel)
    }
}

/// Waits until `condition` holds; false if it does not within `time`.
pub fn eventually(time: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + time;
    loop {
        if condition() {
            return true;
        }
        if Instant::now() > end {
            return false;
        }
        std::thread::sleep(Duration::from_micros(50));
    }
}

/// What `meter` tells as `name`.
pub fn metric(meter: &dyn Metered, name: &str) -> u64 {
    let metrics = meter.metrics();
    let found = metrics.iter().find(|metric| metric.name == name);
    found.unwrap_or_else(|| panic!("no {name} in {metrics:?}")).value
}

/// Saves a thing that `mutate` has brought into some state, restores the record into a fresh one
/// and expects the same record from that; expects records of another kind or a newer version to be
/// refused without a change.
pub fn snapshot_roundtrip<T: Stateful>(make: impl Fn() -> T, mutate: impl FnOnce(&mut T)) {
    let mut original = make();
    mutate(&mut original);
    let record = original.save_record().unwrap();

    let mut copy = make();
    copy.restore_record(record.clone()).unwrap();
    assert_eq!(copy.save_record().unwrap(), record, "the copy differs from the original");

    let mut foreign = record.clone();
    foreign.kind.push('x');
    assert!(matches!(copy.restore_record(foreign), Err(RestoreError::Kind { .. })));
    let mut newer = record.clone();
    newer.version += 1;
    assert!(matches!(copy.restore_record(newer), Err(RestoreError::Newer { .. })));
    assert_eq!(copy.save_record().unwrap(), record, "a refused record has changed something");
}
