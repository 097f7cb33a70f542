//! What is typed for the guest: a bounded queue between the host and the receive ring.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::event::Event;

/// Bytes that wait for the guest at most.
pub const MAX_INPUT: usize = 64 << 10;

#[derive(Default)]
struct Typed {
    waiting: VecDeque<u8>,
    /// Wakes the worker; none while there is no driver.
    kick: Option<Event>,
    /// Signalled when there is room again, if somebody was told that there is not.
    room: Option<Event>,
    full: bool,
    refused: u64,
}

impl Typed {
    /// Wakes a writer if half of the queue is free: fewer would wake it for every byte.
    fn tell(&mut self) {
        if self.waiting.len() <= MAX_INPUT / 2 {
            self.full = false;
            if let Some(room) = &self.room {
                room.signal();
            }
        }
    }
}

/// The input of a console. Clones share it. Bytes wait for a guest that is not there yet.
#[derive(Clone, Default)]
pub struct ConsoleInput(Arc<Mutex<Typed>>);

impl ConsoleInput {
    fn typed(&self) -> MutexGuard<'_, Typed> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues `bytes` for the guest; how many of them there was room for. The rest is for the
    /// caller to offer again; see [`ConsoleInput::when_room`]. Never blocks.
    pub fn write(&self, bytes: &[u8]) -> usize {
        let mut typed = self.typed();
        let room = MAX_INPUT.saturating_sub(typed.waiting.len());
        let accepted = bytes.get(..room).unwrap_or(bytes);
        typed.waiting.extend(accepted);
        if accepted.len() < bytes.len() {
            typed.full = true;
            typed.refused = typed.refused.saturating_add((bytes.len() - accepted.len()) as u64);
        }
        if let Some(kick) = typed.kick.as_ref().filter(|_| !accepted.is_empty()) {
            kick.signal();
        }
        accepted.len()
    }

    /// From now on `event` is signalled when there is room after a write that was not accepted as
    /// a whole, and once now if there is. One event; a later call replaces it.
    pub fn when_room(&self, event: Event) {
        let mut typed = self.typed();
        typed.room = Some(event);
        typed.tell();
    }

    /// Bytes that wait for the guest.
    pub fn waiting(&self) -> usize {
        self.typed().waiting.len()
    }

    /// Bytes that were offered and not accepted, each time anew.
    pub fn refused(&self) -> u64 {
        self.typed().refused
    }

    /// Takes the first bytes, for the worker.
    pub(super) fn take(&self, buffer: &mut [u8]) -> usize {
        let mut typed = self.typed();
        let count = typed.waiting.len().min(buffer.len());
        for (to, from) in buffer.iter_mut().zip(typed.waiting.drain(..count)) {
            *to = from;
        }
        if typed.full {
            typed.tell();
        }
        count
    }

    /// A driver is there, with a worker that `kick` wakes. What waits is for it.
    pub(super) fn connect(&self, kick: Event) {
        self.typed().kick = Some(kick.clone());
        kick.signal();
    }

    pub(super) fn disconnect(&self) {
        self.typed().kick = None;
    }

    /// A copy of all bytes that wait.
    pub(super) fn save(&self) -> Vec<u8> {
        self.typed().waiting.iter().copied().collect()
    }

    /// Puts `bytes` before those that were typed since.
    pub(super) fn restore(&self, bytes: &[u8]) {
        let mut typed = self.typed();
        let later = std::mem::take(&mut typed.waiting);
        typed.waiting.extend(bytes.iter().chain(&later).take(MAX_INPUT));
    }
}
