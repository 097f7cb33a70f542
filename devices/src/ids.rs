//! Newtypes for everything that has a number or a name, so that they cannot be mixed up.

use std::fmt;

/// The name of a device within one VM, such as `rng` or `disk0`. Unique per VM; keys snapshot
/// records, metrics and log lines.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceId(String);

impl DeviceId {
    /// Names a device.
    pub fn new(name: impl Into<String>) -> Self {
        Self(name.into())
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The number of a virtqueue within its device (virtio 1.3, section 2.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct QueueIndex(pub u16);

impl fmt::Display for QueueIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "queue {}", self.0)
    }
}

/// A global system interrupt: the input pin of the interrupt controllers, as in ACPI and in
/// `KVM_IRQFD`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Gsi(pub u32);

/// What a [`crate::executor::Handler`] called one of its event sources. Chosen by the handler;
/// unique within it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Token(pub u32);
