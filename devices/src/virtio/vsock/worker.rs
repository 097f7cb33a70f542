//! The handler: brings together the rings, the table of connections, and the host's sockets.
//!
//! It is on the loop from the device's making to its end, except while the VM is paused. Without a
//! driver it turns programs away at once: they can try again when the guest is up, which is better
//! than to wait for a guest that may never have the driver. During a pause they wait in the kernel.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use vmm_sys_util::timerfd::TimerFd;

use super::VsockError;
use super::complaints::Complaints;
use super::greeting::{Answer, Greeting, Said};
use super::handle::{CONNECT_TIMEOUT, Phase, Shared};
use super::host::HostSocket;
use super::muxer::Muxer;
use super::rings::{Gate, Rings};
use crate::executor::{Flow, Handler, Interest, Sources};
use crate::ids::Token;
use crate::virtio::Notifier;
use crate::virtio::queue::QueueFault;

const RX: Token = Token(0);
const TX: Token = Token(1);
const EVENT: Token = Token(2);
const WAKE: Token = Token(3);
const LISTEN: Token = Token(4);
const TIMER: Token = Token(5);
const FIRST_GREETING: u32 = 0x100;
const FIRST_CONNECTION: u32 = 0x1000;

/// How often deadlines are looked at while there are any.
const TICK: Duration = Duration::from_millis(100);

/// Programs accepted, or turned away, per wake-up.
const ACCEPT_BUDGET: usize = 16;

/// What runs on the executor.
pub struct Worker {
    /// The connections.
    pub muxer: Muxer,
    /// The queues, while the device is started.
    pub rings: Option<Rings>,
    /// Whether the guest may get packets.
    pub gate: Gate,
    /// For faults, while the device is started.
    pub notifier: Option<Notifier>,
    shared: Arc<Shared>,
    host: Option<HostSocket>,
    timer: Timer,
    ticking: bool,
    /// The listening socket is watched.
    listening: bool,
    /// The driver broke the rules, and has not reset the device yet.
    broken: bool,
    complaints: Complaints,
}

struct Timer(TimerFd);

impl AsFd for Timer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is owned by the TimerFd, which outlives the borrow of self.
        unsafe { BorrowedFd::borrow_raw(self.0.as_raw_fd()) }
    }
}

impl Worker {
    /// One that has no driver yet.
    pub fn new(
        muxer: Muxer,
        shared: Arc<Shared>,
        host: Option<HostSocket>,
    ) -> Result<Self, VsockError> {
        let timer = TimerFd::new()
            .map_err(|error| VsockError::Host { what: "timer", source: error.into() })?;
        Ok(Self {
            muxer,
            rings: None,
            gate: Gate::Open,
            notifier: None,
            shared,
            host,
            timer: Timer(timer),
            ticking: false,
            listening: false,
            broken: false,
            complaints: Complaints::default(),
        })
    }

    /// Forgets what the driver had set up.
    pub fn reset(&mut self) {
        self.muxer.clear(io::ErrorKind::ConnectionReset);
        self.gate = Gate::Open;
        self.broken = false;
        if let Some(host) = &mut self.host {
            host.drop_greetings();
        }
    }

    fn is_serving(&self) -> bool {
        self.rings.is_some() && !self.broken
    }

    // --- host programs and users of the handle -------------------------------------------------

    /// Takes the requests of this process.
    fn take_requests(&mut self) {
        self.shared.wake().clear();
        if !self.is_serving() {
            return;
        }
        let now = Instant::now();
        for request in self.shared.take_requests() {
            let answer = Answer::Reply(request.reply);
            if request.deadline <= now {
                answer.refused(io::ErrorKind::TimedOut);
            } else {
                self.muxer.connect(request.port, request.socket, answer, request.deadline);
            }
        }
    }

    fn accept(&mut self, sources: &mut Sources<'_, '_>) {
        let serving = self.is_serving();
        for _ in 0..ACCEPT_BUDGET {
            let Some(host) = self.host.as_mut().filter(|host| host.has_room()) else {
                return;
            };
            let Some(mut greeting) = host.accept() else {
                return;
            };
            if !serving {
                continue;
            }
            match greeting.listen() {
                Said::Unfinished => self.keep(greeting, sources),
                said => self.greeted(said, greeting),
            }
        }
    }

    fn keep(&mut self, greeting: Greeting, sources: &mut Sources<'_, '_>) {
        let Some(host) = &mut self.host else {
            return;
        };
        if let Some(number) = host.keep(greeting, Instant::now())
            && let Some(greeting) = host.greeting(number)
            && sources.add(greeting_token(number), &greeting.socket, Interest::Read).is_err()
        {
            host.drop_greeting(number);
        }
    }

    fn greeted(&mut self, said: Said, greeting: Greeting) {
        if let Said::Port(port) = said {
            let deadline = Instant::now() + CONNECT_TIMEOUT;
            self.muxer.connect(port, greeting.socket, Answer::Line, deadline);
        }
    }

    fn greeting_event(&mut self, number: usize, sources: &mut Sources<'_, '_>) {
        let Some(host) = &mut self.host else {
            return;
        };
        match host.listen(number) {
            Some((said, greeting)) => {
                sources.remove(greeting_token(number));
                self.greeted(said, greeting);
            }
            None if host.greeting(number).is_none() => sources.remove(greeting_token(number)),
            None => {}
        }
    }

    fn tick(&mut self, sources: &mut Sources<'_, '_>) {
        // Setting the timer anew, or not at all, also takes its readiness away; nothing is read.
        let _ = self.timer.0.clear();
        self.ticking = false;
        let now = Instant::now();
        self.muxer.expire(now);
        if let Some(host) = &mut self.host {
            for number in host.overdue(now) {
                sources.remove(greeting_token(number));
                host.drop_greeting(number);
            }
        }
    }

    // --- packets -------------------------------------------------------------------------------

    /// Moves packets both ways; true if there is more to do.
    fn pump(&mut self) -> Result<bool, QueueFault> {
        let Some(rings) = self.rings.as_mut().filter(|_| !self.broken) else {
            return Ok(false);
        };
        if self.gate != Gate::Open {
            self.gate = rings.pass(self.gate, Instant::now())?;
        }
        let more_from_guest = rings.take(&mut self.muxer)?;
        let more_to_guest = self.gate == Gate::Open && rings.give(&mut self.muxer)?;
        let tx_can_go_on = rings.tx_waits && self.muxer.can_receive();
        Ok(more_from_guest || more_to_guest || tx_can_go_on)
    }

    fn fault(&mut self, fault: &QueueFault, sources: &mut Sources<'_, '_>) {
        self.complaints.log(format_args!("stopped: {fault}"));
        self.broken = true;
        self.shared.counters.guest_faults.one();
        self.muxer.clear(io::ErrorKind::ConnectionReset);
        self.shared.set_phase(Phase::Undriven);
        for token in [RX, TX, EVENT] {
            sources.remove(token);
        }
        if let Some(notifier) = &self.notifier {
            notifier.needs_reset();
        }
    }

    // --- sources -------------------------------------------------------------------------------

    /// Brings what is watched in line with what should be. After everything else of a call.
    fn update_sources(&mut self, sources: &mut Sources<'_, '_>) {
        let mut touched = self.muxer.take_touched();
        while let Some(slot) = touched.pop() {
            self.update_connection(slot, sources);
            if touched.is_empty() {
                // Those that could not be watched.
                touched = self.muxer.take_touched();
            }
        }
        self.update_listening(sources);
        let host_needs_tick = self.host.as_ref().is_some_and(HostSocket::needs_tick);
        let needs_tick = host_needs_tick || self.muxer.has_deadlines() || self.gate != Gate::Open;
        if needs_tick && !self.ticking {
            // Cannot fail: the timer exists and the time is valid.
            self.ticking = self.timer.0.reset(TICK, None).is_ok();
        }
    }

    fn update_listening(&mut self, sources: &mut Sources<'_, '_>) {
        let Some(host) = &mut self.host else {
            return;
        };
        match (self.listening, host.has_room()) {
            (false, true) => match sources.add(LISTEN, host, Interest::Read) {
                Ok(()) => self.listening = true,
                Err(_) => host.pause(),
            },
            (true, false) => {
                sources.remove(LISTEN);
                self.listening = false;
            }
            _ => {}
        }
    }

    fn update_connection(&mut self, slot: u32, sources: &mut Sources<'_, '_>) {
        let token = Token(FIRST_CONNECTION.saturating_add(slot));
        let (armed, wanted) = self.muxer.watch(slot);
        let result = match (armed, wanted) {
            (Some(armed), Some((interest, _))) if armed == interest => return,
            (Some(_), Some((interest, _))) => sources.modify(token, interest),
            (None, Some((interest, socket))) => sources.add(token, socket, interest),
            (_, None) => {
                sources.remove(token);
                Ok(())
            }
        };
        let interest = wanted.map(|(interest, _)| interest);
        match result {
            Ok(()) => self.muxer.watched(slot, interest),
            Err(error) => {
                self.complaints.log(format_args!("connection dropped: {error}"));
                self.muxer.cannot_watch(slot);
            }
        }
    }
}

fn greeting_token(number: usize) -> Token {
    Token(FIRST_GREETING.saturating_add(number as u32))
}

impl Handler for Worker {
    fn attach(&mut self, sources: &mut Sources<'_, '_>) -> io::Result<()> {
        sources.add(WAKE, self.shared.wake(), Interest::Read)?;
        sources.add(TIMER, &self.timer, Interest::Read)?;
        if let Some(rings) = self.rings.as_ref().filter(|_| !self.broken) {
            sources.add(RX, rings.rx.kick(), Interest::Read)?;
            sources.add(TX, rings.tx.kick(), Interest::Read)?;
            sources.add(EVENT, rings.event.kick(), Interest::Read)?;
        }
        if let Some(host) = &self.host {
            for (number, greeting) in host.greetings() {
                sources.add(greeting_token(number), &greeting.socket, Interest::Read)?;
            }
        }
        (self.listening, self.ticking) = (false, false);
        self.muxer.unwatch_all();
        self.update_sources(sources);
        // Whatever came in before is looked at now.
        self.shared.wake().signal();
        Ok(())
    }

    fn handle(&mut self, token: Token, sources: &mut Sources<'_, '_>) -> Flow {
        match (token, &self.rings) {
            (RX, Some(rings)) => drop(rings.rx.kick().clear()),
            (TX, Some(rings)) => drop(rings.tx.kick().clear()),
            (EVENT, Some(rings)) => drop(rings.event.kick().clear()),
            (WAKE, _) => self.take_requests(),
            (LISTEN, _) => self.accept(sources),
            (TIMER, _) => self.tick(sources),
            (Token(number), _) if number >= FIRST_CONNECTION => {
                self.muxer.socket_event(number - FIRST_CONNECTION);
            }
            (Token(number), _) => {
                // A kick after the queues have gone is none of these.
                if let Some(number) = number.checked_sub(FIRST_GREETING) {
                    self.greeting_event(number as usize, sources);
                }
            }
        }
        match self.pump() {
            Ok(true) => self.shared.wake().signal(),
            Ok(false) => {}
            Err(fault) => self.fault(&fault, sources),
        }
        self.update_sources(sources);
        Flow::Continue
    }
}
