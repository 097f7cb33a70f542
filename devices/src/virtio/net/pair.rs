//! One queue pair at work: when frames move, and what is waited for in between.
//!
//! A pair reads from its TAP as long as the guest has buffers, and no longer: without buffers it
//! waits for the guest's notification and not for the TAP, so that a flood from outside costs
//! nothing, and the first new buffer gets things going again. Towards the host the same holds with
//! the roles exchanged.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::feature;
use super::handle::{Shared, count};
use super::receive::{Receive, Received};
use super::tap::Tap;
use super::transmit::{Sent, Transmit};
use crate::executor::{Flow, Handler, Interest, Sources};
use crate::ids::Token;
use crate::rate_limiter::RefillTimer;
use crate::virtio::queue::{ActiveQueue, QueueFault};
use crate::virtio::{Activation, Notifier, StartError};

/// Frames moved per direction and wake-up, before other devices get their turn.
const BUDGET: usize = 64;

const RX: Token = Token(0);
const TX: Token = Token(1);
const TAP: Token = Token(2);
const WAKE: Token = Token(3);
const TIMER: Token = Token(4);

/// Why a direction does not move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wait {
    /// It does.
    No,
    /// The guest has to notify first.
    Guest,
    /// The interface has to take frames again.
    Host,
    /// The rate limit has to allow more.
    Tokens(Instant),
    /// The guest has to notify first, or the time has to come.
    Held(Instant),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Interface {
    Up,
    /// It refused a frame because it is down.
    Down,
    /// It will not come back.
    Gone,
}

/// The handler of one queue pair.
pub struct Pair {
    index: usize,
    rx: Receive,
    tx: Transmit,
    rx_wait: Wait,
    tx_wait: Wait,
    /// There was a frame and no buffer, and no frame was received since.
    stalled: bool,
    interface: Interface,
    /// What the TAP is watched for, if it is.
    watched: Option<Interest>,
    timer: RefillTimer,
    alarm: Option<Instant>,
    shared: Arc<Shared>,
    notifier: Notifier,
}

impl Pair {
    /// The pair of place `index`.
    pub fn new(
        index: usize,
        rx: ActiveQueue,
        tx: ActiveQueue,
        activation: &Activation,
        shared: Arc<Shared>,
    ) -> Result<Self, StartError> {
        let timer = RefillTimer::new()
            .map_err(|source| StartError::Host { what: "a timer for the rate limit", source })?;
        let interface = match shared.taps.get(index) {
            Some(tap) if tap.is_gone() => Interface::Gone,
            // Or full, which is the same for what the guest has to know: it will be told.
            Some(tap) if !tap.is_writable() => Interface::Down,
            Some(_) => Interface::Up,
            None => Interface::Gone,
        };
        shared.set_lost(index, interface != Interface::Up);
        Ok(Self {
            index,
            rx: Receive::new(rx, activation.has(feature::MRG_RXBUF)),
            tx: Transmit::new(tx, activation.features),
            rx_wait: Wait::No,
            tx_wait: Wait::No,
            stalled: false,
            interface,
            watched: None,
            timer,
            alarm: None,
            shared,
            notifier: activation.notifier.clone(),
        })
    }

    /// Receive and transmit queue, with nothing in flight.
    pub fn into_queues(self) -> [ActiveQueue; 2] {
        [self.rx.into_queue(&self.shared), self.tx.into_queue()]
    }

    /// The guest uses this pair.
    fn is_used(&self) -> bool {
        self.index < usize::from(self.shared.pairs())
    }

    // --- frames --------------------------------------------------------------------------------

    fn receive(&mut self) -> Result<(), QueueFault> {
        let shared = self.shared.clone();
        let Some(tap) = shared.taps.get(self.index) else {
            return Ok(());
        };
        for _ in 0..BUDGET {
            if self.rx_wait != Wait::No || !self.is_used() || self.interface == Interface::Gone {
                break;
            }
            if let Err(wait) = shared.admit_rx() {
                if tap.has_frame() {
                    count(&shared.counters.rx_throttled);
                    self.rx_wait = Wait::Tokens(Instant::now() + wait);
                }
                break;
            }
            match self.rx.receive(tap, &shared)? {
                Received::One => self.stalled = false,
                Received::Empty => break,
                // A guest without buffers is only waited for when there is something for it.
                Received::NoBuffers if !tap.has_frame() => break,
                Received::NoBuffers => {
                    if !std::mem::replace(&mut self.stalled, true) {
                        count(&shared.counters.rx_stalled);
                    }
                    self.rx_wait = Wait::Guest;
                }
                Received::Held(until) => self.rx_wait = Wait::Held(until),
                Received::Gone => self.set_interface(Interface::Gone),
            }
        }
        self.rx.queue().notify()
    }

    fn transmit(&mut self) -> Result<(), QueueFault> {
        let shared = self.shared.clone();
        let mut budget = BUDGET;
        while self.tx_wait == Wait::No {
            if budget == 0 {
                self.tx.queue().kick().signal();
                break;
            }
            budget -= 1;
            if let Err(wait) = shared.admit_tx()
                && self.tx.queue().pending()? > 0
            {
                count(&shared.counters.tx_throttled);
                self.tx_wait = Wait::Tokens(Instant::now() + wait);
                break;
            }
            let up = self.interface == Interface::Up;
            let tap = shared.taps.get(self.index).filter(|_| up);
            match self.tx.send(tap, &shared)? {
                Sent::One => {}
                Sent::Empty => self.tx_wait = Wait::Guest,
                Sent::Full => self.tx_wait = Wait::Host,
                Sent::Down => self.set_interface(Interface::Down),
                Sent::Gone => self.set_interface(Interface::Gone),
            }
        }
        self.tx.queue().notify()
    }

    // --- the interface -------------------------------------------------------------------------

    fn set_interface(&mut self, interface: Interface) {
        if self.interface == interface || self.interface == Interface::Gone {
            return;
        }
        if self.interface == Interface::Up {
            count(&self.shared.counters.link_losses);
        }
        self.interface = interface;
        let name = self.shared.taps.get(self.index).map_or("", Tap::name);
        tracing::info!(interface = name, queue = self.index, state = ?interface, "network link");
        self.shared.set_lost(self.index, interface != Interface::Up);
    }

    /// Something is up with the TAP.
    fn tap_event(&mut self) {
        let shared = self.shared.clone();
        let Some(tap) = shared.taps.get(self.index) else {
            return;
        };
        if tap.is_gone() {
            self.set_interface(Interface::Gone);
        } else if tap.is_writable() {
            self.set_interface(Interface::Up);
            if self.tx_wait == Wait::Host {
                self.tx_wait = Wait::No;
            }
        }
    }

    // --- sources -------------------------------------------------------------------------------

    fn interest(&self) -> Option<Interest> {
        let read = self.rx_wait == Wait::No && self.is_used();
        let write = self.tx_wait == Wait::Host || self.interface == Interface::Down;
        match (self.interface, read, write) {
            // Its readiness for nothing would never end.
            (Interface::Gone, ..) => None,
            (_, true, true) => Some(Interest::ReadWrite),
            (_, true, false) => Some(Interest::Read),
            (_, false, true) => Some(Interest::Write),
            (_, false, false) => Some(Interest::Hangup),
        }
    }

    fn update_sources(&mut self, sources: &mut Sources<'_, '_>) -> io::Result<()> {
        let wanted = self.interest();
        match (self.watched, wanted) {
            (now, wanted) if now == wanted => {}
            (Some(_), Some(interest)) => sources.modify(TAP, interest)?,
            (None, Some(interest)) => match self.shared.taps.get(self.index) {
                Some(tap) => sources.add(TAP, tap, interest)?,
                None => return Ok(()),
            },
            (_, None) => sources.remove(TAP),
        }
        self.watched = wanted;
        let times = [self.rx_wait, self.tx_wait].into_iter().filter_map(|wait| match wait {
            Wait::Tokens(time) | Wait::Held(time) => Some(time),
            Wait::No | Wait::Guest | Wait::Host => None,
        });
        let next = times.min();
        if let Some(time) = next
            && self.alarm != next
        {
            self.timer.arm(time.saturating_duration_since(Instant::now()))?;
        }
        self.alarm = next;
        Ok(())
    }

    fn time_has_come(&mut self) {
        // Setting it anew, or not at all, also takes its readiness away; nothing is read.
        let _ = self.timer.disarm();
        self.alarm = None;
        // The timer is not finer than this.
        let now = Instant::now() + Duration::from_micros(50);
        for wait in [&mut self.rx_wait, &mut self.tx_wait] {
            if matches!(wait, Wait::Tokens(time) | Wait::Held(time) if *time <= now) {
                *wait = Wait::No;
            }
        }
    }

    fn serve(&mut self, token: Token) -> Result<(), QueueFault> {
        match token {
            RX => {
                self.rx.queue().kick().clear();
                if matches!(self.rx_wait, Wait::Guest | Wait::Held(_)) {
                    self.rx_wait = Wait::No;
                }
                self.receive()
            }
            TX => {
                self.tx.queue().kick().clear();
                if self.tx_wait == Wait::Guest {
                    self.tx_wait = Wait::No;
                }
                self.transmit()
            }
            TAP => {
                // While it is read, reading tells what is up.
                if !matches!(self.watched, Some(Interest::Read)) {
                    self.tap_event();
                    self.transmit()?;
                }
                self.receive()
            }
            TIMER => {
                self.time_has_come();
                self.receive()?;
                self.transmit()
            }
            // The link or the number of pairs has changed, and so whether it is worth waiting.
            _ => {
                self.shared.wake(self.index).map(crate::event::Event::clear);
                if !matches!(self.rx_wait, Wait::Tokens(_)) {
                    self.rx_wait = Wait::No;
                }
                if self.tx_wait == Wait::Host {
                    self.tx_wait = Wait::No;
                }
                self.receive()?;
                self.transmit()
            }
        }
    }
}

impl Handler for Pair {
    fn attach(&mut self, sources: &mut Sources<'_, '_>) -> io::Result<()> {
        sources.add(RX, self.rx.queue().kick(), Interest::Read)?;
        sources.add(TX, self.tx.queue().kick(), Interest::Read)?;
        sources.add(TIMER, &self.timer, Interest::Read)?;
        if let Some(wake) = self.shared.wake(self.index) {
            sources.add(WAKE, wake, Interest::Read)?;
        }
        // A driver need not notify of buffers that it has added before it was ready.
        self.rx.queue().kick().signal();
        self.tx.queue().kick().signal();
        self.update_sources(sources)
    }

    fn handle(&mut self, token: Token, sources: &mut Sources<'_, '_>) -> Flow {
        if let Err(fault) = self.serve(token) {
            self.shared.guest_fault(&format_args!("stopped: {fault}"));
            self.notifier.needs_reset();
            return Flow::Finished;
        }
        if let Err(error) = self.update_sources(sources) {
            // The TAP, a timer: without them this pair is deaf.
            self.notifier.gives_up("network card", error);
            return Flow::Finished;
        }
        Flow::Continue
    }
}
