//! Everything a CubeVMM guest can see.
//!
//! The VMM (`hypervisor/`) builds these devices, puts them on a [`bus::Bus`], and connects their
//! doorbells and interrupts to KVM. Nothing in this crate knows KVM: the tests run on any machine.
//!
//! Reading order: [`bus`], [`irq`], [`executor`], then [`virtio`] with the lifecycle picture, and
//! [`virtio::rng`], the device to copy when writing a new one.

pub mod bus;
pub mod event;
pub mod executor;
pub mod ids;
pub mod irq;
pub mod legacy;
pub mod memory;
pub mod metrics;
pub mod pci;
pub mod rate_limiter;
pub mod snapshot;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod virtio;
