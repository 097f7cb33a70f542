//! What happens to a VM, on its way to the control thread.
//!
//! The senders are vCPU threads, device closures, the signal thread and api connections. The
//! channel is bounded, and the guest can put no more than one event into it: its first end counts.

use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use crate::api::{Reply, Request};
use crate::outcome::Outcome;

/// An api call on its way to the control thread.
#[derive(Debug)]
pub struct Call {
    /// What is asked.
    pub request: Request,
    /// Where the answer goes.
    pub reply: SyncSender<Reply>,
}

/// Something that the control thread acts on.
#[derive(Debug)]
pub enum Event {
    /// The guest has ended; see [`Events::outcome`].
    Ended,
    /// A signal has come for this process.
    Signal(i32),
    /// An api call.
    Call(Call),
    /// The agent has said hello.
    Ready(guest_protocol::Hello),
    /// The agent of a restored guest cannot be reached, or has refused, for this reason.
    NotReady(String),
    /// The guest has let go of PCI devices.
    Ejected,
    /// Something outside the VM that was waited for is over: the command of `run`.
    Finished,
}

/// The sending side. Clones share it.
#[derive(Clone, Debug)]
pub struct Events {
    sender: SyncSender<Event>,
    outcome: Arc<OnceLock<Outcome>>,
}

/// Events on their way; api connections are fewer.
const QUEUE: usize = 256;

impl Events {
    /// A channel to the control thread.
    pub fn channel() -> (Self, Receiver<Event>) {
        let (sender, receiver) = sync_channel(QUEUE);
        (Self { sender, outcome: Arc::default() }, receiver)
    }

    /// The guest has ended so. Only the first end counts.
    pub fn end(&self, outcome: Outcome) {
        if self.outcome.set(outcome).is_ok() {
            self.send(Event::Ended);
        }
    }

    /// How the guest ended, if it has.
    pub fn outcome(&self) -> Option<&Outcome> {
        self.outcome.get()
    }

    /// The guest has let go of PCI devices. Never waits, for vCPU threads: with a full queue the
    /// devices stay until the next one is let go.
    pub fn ejected(&self) {
        let _ = self.sender.try_send(Event::Ejected);
    }

    /// Sends an event; false when nobody controls the VM any more. Waits while the queue is full,
    /// so not for handlers.
    pub fn send(&self, event: Event) -> bool {
        self.sender.send(event).is_ok()
    }
}
