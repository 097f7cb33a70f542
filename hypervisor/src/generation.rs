//! The id of the machine's generation: 128 random bits in guest memory that become others when the
//! machine goes on as a copy of what it was ("Virtual Machine Generation ID", Microsoft 2012).
//!
//! A guest that hears of a new id knows that others may have its memory, and draws fresh randomness:
//! Linux' `vmgenid` driver reseeds its generator. The page is the guest's own memory and nothing here
//! reads it, so what the guest writes there concerns nobody else.

use std::io;

use devices::irq::Interrupt;
use devices::memory::{Bytes, GuestAddress, Memory};
use devices::virtio::rng::host_entropy;

use crate::layout;

/// Bytes of the id.
pub const LEN: usize = 16;

/// Why there is no new id.
#[derive(Debug, thiserror::Error)]
pub enum GenerationError {
    /// The host gives no randomness.
    #[error("the host's random number generator failed: {0}")]
    Entropy(#[source] io::Error),
    /// Guest memory is not there.
    #[error("the generation id cannot be written to guest memory: {0}")]
    Memory(#[source] vm_memory::GuestMemoryError),
}

/// The id, from the host's side.
pub struct Generation {
    memory: Memory,
    changed: Interrupt,
}

impl Generation {
    /// Gives the machine its first id. `changed` is the line that tells the guest of later ones.
    pub fn new(memory: &Memory, changed: Interrupt) -> Result<Self, GenerationError> {
        let this = Self { memory: memory.clone(), changed };
        this.write()?;
        Ok(this)
    }

    /// Gives it another one, and tells the guest.
    pub fn renew(&self) -> Result<(), GenerationError> {
        self.write()?;
        self.changed.raise();
        Ok(())
    }

    fn write(&self) -> Result<(), GenerationError> {
        let mut id = [0; LEN];
        host_entropy(&mut id).map_err(GenerationError::Entropy)?;
        let place = GuestAddress(layout::GENERATION);
        self.memory.write_slice(&id, place).map_err(GenerationError::Memory)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    fn id(memory: &Memory) -> [u8; LEN] {
        let mut id = [0; LEN];
        memory.read_slice(&mut id, GuestAddress(layout::GENERATION)).unwrap();
        id
    }

    #[test]
    fn a_new_id_is_told_and_the_first_is_not() {
        let memory = crate::memory::fresh(32 << 20).unwrap();
        let raised = Arc::new(AtomicU32::new(0));
        let count = raised.clone();
        let line = Interrupt::from_fn(move || {
            count.fetch_add(1, Ordering::Relaxed);
        });
        let generation = Generation::new(&memory, line).unwrap();
        let first = id(&memory);
        assert_ne!(first, [0; LEN]);
        assert_eq!(raised.load(Ordering::Relaxed), 0);
        generation.renew().unwrap();
        let second = id(&memory);
        assert!(second != first && second != [0; LEN]);
        assert_eq!(raised.load(Ordering::Relaxed), 1);
    }

    /// H-29: what the guest writes over its id is gone with the next one, and changes nothing else.
    #[test]
    fn what_the_guest_writes_there_does_not_matter() {
        let memory = crate::memory::fresh(32 << 20).unwrap();
        let generation = Generation::new(&memory, Interrupt::from_fn(|| {})).unwrap();
        let page = [0xff; 4096];
        memory.write_slice(&page, GuestAddress(layout::GENERATION)).unwrap();
        generation.renew().unwrap();
        assert_ne!(id(&memory), [0xff; LEN]);
        let mut after = [0; 4096 - LEN];
        let behind = GuestAddress(layout::GENERATION + LEN as u64);
        memory.read_slice(&mut after, behind).unwrap();
        assert_eq!(after, [0xff; 4096 - LEN]);
    }
}
