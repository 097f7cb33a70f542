//! The control queue (virtio 1.3, section 5.1.6.5): what the guest wants changed.
//!
//! A command is a class, a number, some data, and a byte for the answer. One that is not known, was
//! not negotiated or makes no sense is answered with an error and changes nothing.

use std::io::{self, Read, Write};
use std::sync::Arc;

use super::config::MacAddress;
use super::feature;
use super::handle::Shared;
use crate::executor::{Flow, Handler, Interest, Sources};
use crate::ids::Token;
use crate::virtio::queue::{ActiveQueue, QueueFault};
use crate::virtio::{Chain, Notifier};

/// Commands per wake-up, before other devices get their turn.
const BUDGET: usize = 32;

/// Bytes of the longest command that is known, and one more.
const LONGEST: u64 = 2 + 8 + 1;

/// Answers.
const OK: u8 = 0;
const ERROR: u8 = 1;

// --- handler -----------------------------------------------------------------------------------

const QUEUE: Token = Token(0);

/// The handler of the control queue.
pub struct Control {
    queue: ActiveQueue,
    /// Queue pairs that the driver has set up.
    usable: u16,
    chosen_offloads: Option<u64>,
    notifier: Notifier,
    shared: Arc<Shared>,
}

impl Control {
    /// Serves `queue` of a card with `usable` queue pairs.
    pub fn new(queue: ActiveQueue, usable: u16, notifier: Notifier, shared: Arc<Shared>) -> Self {
        Self { queue, usable, chosen_offloads: None, notifier, shared }
    }

    /// The queue, with nothing in flight.
    pub fn into_queue(self) -> ActiveQueue {
        self.queue
    }

    /// What the guest has chosen of its offloads, if it has.
    pub fn chosen_offloads(&self) -> Option<u64> {
        self.chosen_offloads
    }

    /// Carries out up to [`BUDGET`] commands; true if there may be more.
    fn serve(&mut self) -> Result<bool, QueueFault> {
        for _ in 0..BUDGET {
            let Some(chain) = self.queue.pop()? else {
                self.queue.notify()?;
                return self.queue.enable_notification();
            };
            let written = self.answer(&chain);
            self.queue.complete(&chain, written)?;
        }
        self.queue.notify()?;
        Ok(true)
    }

    /// Carries out one command; how many bytes it wrote.
    fn answer(&mut self, chain: &Chain) -> u32 {
        let memory = self.queue.memory().clone();
        let mut writer = chain.writer(&memory);
        if writer.remaining() == 0 {
            // There is no place for an answer, so nothing is done.
            self.shared.guest_fault(&"control command without room for an answer");
            return 0;
        }
        let mut bytes = Vec::new();
        // Bounded; and the chain was checked to lie in guest RAM.
        let _ = chain.reader(&memory).take(LONGEST).read_to_end(&mut bytes);
        let done = Command::parse(&bytes).map(|command| self.apply(command));
        let answer = match done {
            Some(true) => OK,
            Some(false) | None => {
                self.shared.guest_fault(&"control command that is not possible");
                ERROR
            }
        };
        let _ = writer.write_all(&[answer]);
        writer.written()
    }

    /// Carries out `command`; false if it is not possible here.
    fn apply(&mut self, command: Command) -> bool {
        let shared = &self.shared;
        match command {
            Command::SetMac(mac) if shared.has(feature::CTRL_MAC_ADDR) => {
                shared.set_mac(mac);
                true
            }
            Command::Announced if shared.has(feature::GUEST_ANNOUNCE) => {
                shared.announced();
                true
            }
            Command::SetPairs(pairs) if shared.has(feature::MQ) => {
                (1..=self.usable).contains(&pairs) && self.host(shared.set_pairs(pairs))
            }
            Command::SetOffloads(offloads) if shared.has(feature::CTRL_GUEST_OFFLOADS) => {
                let negotiated = shared.features() & feature::GUEST_OFFLOADS;
                let done = offloads & !negotiated == 0 && self.host(shared.set_offloads(offloads));
                if done {
                    self.chosen_offloads = Some(offloads);
                }
                done
            }
            _ => false,
        }
    }

    /// Whether the host has done it.
    fn host(&self, result: io::Result<()>) -> bool {
        if let Err(error) = &result
            && self.notifier.may_complain()
        {
            tracing::warn!(%error, "network card: the interface refuses what the guest wants");
        }
        result.is_ok()
    }
}

impl Handler for Control {
    fn attach(&mut self, sources: &mut Sources<'_, '_>) -> io::Result<()> {
        sources.add(QUEUE, self.queue.kick(), Interest::Read)
    }

    fn handle(&mut self, _token: Token, _sources: &mut Sources<'_, '_>) -> Flow {
        self.queue.kick().clear();
        match self.serve() {
            Ok(more) => {
                if more {
                    self.queue.kick().signal();
                }
                Flow::Continue
            }
            Err(fault) => {
                self.shared.guest_fault(&format_args!("stopped: {fault}"));
                self.notifier.needs_reset();
                Flow::Finished
            }
        }
    }
}

// --- commands ----------------------------------------------------------------------------------

/// A command that is well-formed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Command {
    /// Another address.
    SetMac(MacAddress),
    /// The guest has announced itself.
    Announced,
    /// So many queue pairs.
    SetPairs(u16),
    /// Only these of the `GUEST_…` features.
    SetOffloads(u64),
}

impl Command {
    /// Reads a command: class, number, and data of exactly the length that it has.
    fn parse(bytes: &[u8]) -> Option<Self> {
        match *bytes {
            // VIRTIO_NET_CTRL_MAC, ADDR_SET
            [1, 1, a, b, c, d, e, f] => MacAddress::new([a, b, c, d, e, f]).ok().map(Self::SetMac),
            // VIRTIO_NET_CTRL_ANNOUNCE, ACK
            [3, 0] => Some(Self::Announced),
            // VIRTIO_NET_CTRL_MQ, VQ_PAIRS_SET
            [4, 0, low, high] => Some(Self::SetPairs(u16::from_le_bytes([low, high]))),
            // VIRTIO_NET_CTRL_GUEST_OFFLOADS, SET
            [5, 0, a, b, c, d, e, f, g, h] => {
                Some(Self::SetOffloads(u64::from_le_bytes([a, b, c, d, e, f, g, h])))
            }
            _ => None,
        }
    }
}

#[cfg(test)]
#[path = "tests/parse.rs"]
mod tests;
