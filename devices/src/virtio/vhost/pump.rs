//! Turns what a backend signals into what the guest hears.
//!
//! A backend calls through an eventfd. Our interrupts are more than that (a status register to set, a
//! vector that the guest chose and may have masked), so a handler of the VMM stands in between.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::event::Event;
use crate::executor::{Flow, Handler, Interest, Sources};
use crate::ids::Token;
use crate::irq::Interrupt;
use crate::metrics::Count;
use crate::virtio::Notifier;

/// The backend says that the rings are not as they should be.
const FAULT: Token = Token(u32::MAX);
/// The backend is gone.
const PEER: Token = Token(u32::MAX - 1);

/// What is done when a backend goes.
pub(in crate::virtio) type OnLoss = Arc<dyn Fn() + Send + Sync>;

/// What a backend's signals are counted as.
#[derive(Debug, Default)]
pub(super) struct Signals {
    /// Interrupts.
    pub calls: Count,
    /// Rings that the backend did not like.
    pub guest_faults: Count,
    /// Ends of the backend.
    pub losses: Count,
}

/// A queue's way from the backend to the guest.
pub(super) struct Call {
    /// Signalled by the backend.
    pub event: Event,
    /// Raised for it.
    pub interrupt: Interrupt,
}

/// The handler.
pub(super) struct Pump {
    /// For the log.
    pub device: &'static str,
    /// One per queue in use.
    pub calls: Vec<Call>,
    /// Signalled by the backend.
    pub fault: Event,
    /// Whose hang-up is the end of the backend.
    pub peer: Option<OwnedFd>,
    /// To the driver.
    pub notifier: Notifier,
    /// What is counted.
    pub signals: Arc<Signals>,
    /// Called when the backend is gone.
    pub on_loss: Option<OnLoss>,
    /// Set when the backend cannot be expected to finish what it has begun.
    pub broken: Arc<AtomicBool>,
}

impl Pump {
    fn give_up(&self, count: &Count, reason: &str) -> Flow {
        self.broken.store(true, Ordering::Release);
        count.one();
        self.notifier.gives_up(self.device, reason);
        Flow::Finished
    }
}

impl Handler for Pump {
    fn attach(&mut self, sources: &mut Sources<'_, '_>) -> io::Result<()> {
        for (token, call) in (0..).map(Token).zip(&self.calls) {
            sources.add(token, &call.event, Interest::Read)?;
        }
        if let Some(peer) = &self.peer {
            sources.add(PEER, peer, Interest::Hangup)?;
        }
        sources.add(FAULT, &self.fault, Interest::Read)
    }

    fn handle(&mut self, token: Token, _sources: &mut Sources<'_, '_>) -> Flow {
        match token {
            FAULT => {
                self.fault.clear();
                self.give_up(&self.signals.guest_faults, "the backend refuses its rings")
            }
            PEER => {
                if let Some(tell) = &self.on_loss {
                    tell();
                }
                self.give_up(&self.signals.losses, "its backend has gone away")
            }
            Token(index) => {
                if let Some(call) = self.calls.get(index as usize) {
                    call.event.clear();
                    self.signals.calls.one();
                    call.interrupt.raise();
                }
                Flow::Continue
            }
        }
    }
}
