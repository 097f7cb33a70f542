//! Who moves the frames of a card: we do, the kernel, or another process. Control queue, link and
//! addresses are ours in any case.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::handle::Shared;
use super::kernel::{Kernel, KernelPair};
use super::pair::Pair;
use super::{Net, feature, no_executor};
use crate::executor::Running;
use crate::virtio::queue::ActiveQueue;
use crate::virtio::vhost::user::Backend;
use crate::virtio::{Activation, StartError, feature as ring};

/// By what way frames go, for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DataPath {
    /// Through this process, to a TAP.
    #[serde(rename = "tap")]
    Tap,
    /// Through the host's kernel, to a TAP.
    #[serde(rename = "vhost-net")]
    Kernel,
    /// Through another process.
    #[serde(rename = "vhost-user")]
    Backend,
}

impl fmt::Display for DataPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tap => "tap",
            Self::Kernel => "vhost-net",
            Self::Backend => "vhost-user",
        })
    }
}

/// The same with what it takes.
pub(super) enum Path {
    Own,
    /// One per queue pair.
    Kernel(Vec<Arc<Kernel>>),
    Backend(Box<Backend>),
}

/// A queue pair at work, if it has a handler of its own.
pub(super) enum Mover {
    Own(Running<Pair>),
    Kernel(Running<KernelPair>),
}

impl Mover {
    /// Its queues, with nothing in flight.
    pub fn stop(self) -> Option<[ActiveQueue; 2]> {
        match self {
            Self::Own(pair) => pair.stop().map(Pair::into_queues),
            Self::Kernel(pair) => pair.stop().map(KernelPair::into_queues),
        }
    }
}

impl Path {
    /// What people call it.
    pub fn name(&self) -> DataPath {
        match self {
            Self::Own => DataPath::Tap,
            Self::Kernel(_) => DataPath::Kernel,
            Self::Backend(_) => DataPath::Backend,
        }
    }

    /// What of the rings' features it can do.
    pub fn ring_features(&self) -> u64 {
        ring::COMMON & self.possible()
    }

    /// Whether a frame may be spread over several receive buffers.
    pub fn merges(&self) -> bool {
        feature::MRG_RXBUF & self.possible() != 0
    }

    fn possible(&self) -> u64 {
        match self {
            Self::Own => u64::MAX,
            Self::Kernel(pairs) => pairs.iter().fold(u64::MAX, |all, pair| all & pair.features()),
            Self::Backend(backend) => backend.offered(),
        }
    }

    /// The offloads that a backend can do; those of a TAP are the TAP's.
    pub fn backend_offloads(&self) -> u64 {
        match self {
            Self::Backend(backend) => backend.offered() & feature::OFFLOADS,
            Self::Own | Self::Kernel(_) => 0,
        }
    }
}

impl Net {
    /// Sets a pair to work that has a handler of its own.
    pub(super) fn run_pair(
        &self,
        index: u16,
        queues: [ActiveQueue; 2],
        activation: &Activation,
    ) -> Result<Mover, StartError> {
        let (place, shared): (usize, Arc<Shared>) = (usize::from(index), self.shared.clone());
        let executor = self.executors.iter().cycle().nth(place);
        let executor = executor.or(self.executors.first()).ok_or_else(no_executor)?;
        match &self.path {
            Path::Kernel(pairs) => {
                let kernel = pairs.get(place).ok_or_else(no_executor)?.clone();
                let pair = KernelPair::new(place, queues, activation, kernel, shared)?;
                let running = executor.run(pair).map_err(|no| StartError::Executor(no.error))?;
                Ok(Mover::Kernel(running))
            }
            Path::Own | Path::Backend(_) => {
                let [rx, tx] = queues;
                let pair = Pair::new(place, rx, tx, activation, shared)?;
                let running = executor.run(pair).map_err(|no| StartError::Executor(no.error))?;
                Ok(Mover::Own(running))
            }
        }
    }

    /// Hands the queues of all pairs to the backend.
    pub(super) fn run_backend(
        &mut self,
        queues: Vec<ActiveQueue>,
        activation: &Activation,
    ) -> Result<(), StartError> {
        let Path::Backend(backend) = &mut self.path else { return Ok(()) };
        let executor = self.executors.first().ok_or_else(no_executor)?;
        let rings = self.shared.rings();
        // The rest is between the driver and us.
        let features = activation.features & (backend.offered() | ring::COMMON);
        let (memory, notifier) = (activation.memory.clone(), activation.notifier.clone());
        let theirs = Activation { memory, queues, features, notifier };
        backend.start(executor, theirs, rings)?;
        // A backend that was away is back.
        self.shared.set_lost(0, false);
        Ok(())
    }
}
