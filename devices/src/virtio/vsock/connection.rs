//! One connection: a host socket on one side, credit and SHUTDOWN flags on the other.
//!
//! Knows neither rings nor epoll. The [`super::muxer`] calls it and looks at what it then wants:
//! packets to the guest ([`Connection::next_packet`]), readiness of the socket
//! ([`Connection::interest`]), or to be forgotten ([`Connection::is_over`]).

use std::collections::VecDeque;
use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::Instant;

use super::credit::Credit;
use super::greeting::Answer;
use super::packet::{Header, MAX_PAYLOAD, NO_MORE, NO_RECEIVE, NO_SEND, Op, Payload, room};
use super::stream;
use crate::executor::Interest;
use crate::memory::{Bytes, Memory};
use crate::virtio::Chain;

/// How far the connection is.
pub enum Stage {
    /// REQUEST was or will be sent; the guest has to answer before the deadline.
    Connecting {
        /// When to give up.
        deadline: Instant,
        /// Whom to tell.
        answer: Answer,
    },
    /// Both sides agreed.
    Open,
    /// The guest has forgotten it in good order; what it sent still goes to the host program.
    Draining,
    /// Over; the guest is to hear RST.
    Reset,
}

/// Packets that are due, one of each kind at most, so that they need no queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Due {
    request: bool,
    response: bool,
    reset: bool,
    update: bool,
    ask_credit: bool,
}

/// The guest broke the rules of the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Violation(pub &'static str);

/// What became of a receive buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filled {
    /// That many bytes of payload.
    Data(u32),
    /// Nothing to send now.
    Nothing,
    /// The buffer has no room for payload.
    TooSmall,
}

/// A connection.
pub struct Connection {
    stage: Stage,
    host_port: u32,
    socket: Option<UnixStream>,
    credit: Credit,
    /// From the guest, not yet taken by the host program: never more than BUF_ALLOC.
    outgoing: VecDeque<u8>,
    due: Due,
    credit_asked: bool,
    /// NO_RECEIVE and NO_SEND, as the guest has announced.
    guest_done: u32,
    /// The same for the host program, and how much of it the guest knows.
    host_done: u32,
    host_done_told: u32,
    /// There may be something to read.
    readable: bool,
    /// The host program has closed its end altogether.
    hung_up: bool,
    /// What the socket is watched for.
    pub armed: Option<Interest>,
    /// It stands in the muxer's list of those with packets due.
    pub in_control: bool,
    /// It stands in the muxer's list of those with data.
    pub in_ready: bool,
}

impl Connection {
    fn new(stage: Stage, host_port: u32, socket: Option<UnixStream>) -> Self {
        Self {
            stage,
            host_port,
            socket,
            credit: Credit::default(),
            outgoing: VecDeque::new(),
            due: Due::default(),
            credit_asked: false,
            guest_done: 0,
            host_done: 0,
            host_done_told: 0,
            readable: false,
            hung_up: false,
            armed: None,
            in_control: false,
            in_ready: false,
        }
    }

    /// One that the host asks for.
    pub fn to_guest(port: u32, socket: UnixStream, answer: Answer, deadline: Instant) -> Self {
        let stage = Stage::Connecting { deadline, answer };
        let due = Due { request: true, ..Due::default() };
        Self { due, ..Self::new(stage, port, Some(socket)) }
    }

    /// One that the guest asked for, and got.
    pub fn to_host(port: u32, socket: UnixStream, request: &Header) -> Self {
        let due = Due { response: true, ..Due::default() };
        let mut connection = Self { due, ..Self::new(Stage::Open, port, Some(socket)) };
        connection.credit.learn(request);
        connection
    }

    /// One that did not survive, of which the guest has to hear.
    pub fn lost(port: u32) -> Self {
        let due = Due { reset: true, ..Due::default() };
        Self { due, ..Self::new(Stage::Reset, port, None) }
    }

    /// How far it is.
    pub fn stage(&self) -> &Stage {
        &self.stage
    }

    /// The socket, to be watched.
    pub fn socket(&self) -> Option<&UnixStream> {
        self.socket.as_ref()
    }

    /// True if nothing is left to do.
    pub fn is_over(&self) -> bool {
        match self.stage {
            Stage::Reset => !self.due.reset,
            Stage::Draining => self.outgoing.is_empty(),
            Stage::Connecting { .. } | Stage::Open => false,
        }
    }

    /// True if the guest may believe that it exists.
    pub fn is_known_to_guest(&self) -> bool {
        match self.stage {
            Stage::Connecting { .. } => !self.due.request,
            Stage::Open | Stage::Reset => true,
            Stage::Draining => false,
        }
    }

    /// True if only somebody's slowness keeps it: it may be dropped to make room for a new one.
    pub fn is_lingering(&self) -> bool {
        match self.stage {
            Stage::Draining => true,
            Stage::Open => self.host_done_told == NO_MORE,
            Stage::Connecting { .. } | Stage::Reset => false,
        }
    }

    /// True if one side has said that it is done, so that the end is in order.
    pub fn is_ending(&self) -> bool {
        self.guest_done & NO_SEND != 0 || self.host_done_told == NO_MORE
    }

    // --- host side -----------------------------------------------------------------------------

    /// What the socket should be watched for. `None` for nothing: a socket that was hung up would
    /// report just that without end.
    pub fn interest(&self) -> Option<Interest> {
        let writable = !self.outgoing.is_empty();
        match self.stage {
            _ if self.socket.is_none() || self.hung_up => None,
            Stage::Connecting { .. } => Some(Interest::Hangup),
            Stage::Draining => Some(Interest::Write),
            Stage::Reset => None,
            Stage::Open => Some(match (self.takes_data() && !self.readable, writable) {
                (true, true) => Interest::ReadWrite,
                (true, false) => Interest::Read,
                (false, true) => Interest::Write,
                (false, false) => Interest::Hangup,
            }),
        }
    }

    /// True while data may still flow from host to guest.
    fn takes_data(&self) -> bool {
        self.host_done & NO_SEND == 0 && self.guest_done & NO_RECEIVE == 0
    }

    /// True if data could be moved to the guest now.
    pub fn is_ready(&self) -> bool {
        let open = matches!(self.stage, Stage::Open);
        open && self.takes_data() && self.readable && self.credit.room() > 0
    }

    /// Reacts to the socket's readiness for what it was watched for.
    pub fn socket_event(&mut self) {
        match self.armed {
            Some(Interest::Read) => self.readable = true,
            Some(Interest::Write) => self.flush(),
            Some(Interest::ReadWrite) => {
                self.readable = true;
                self.flush();
            }
            // Nothing else was asked for.
            Some(Interest::Hangup) => self.hang_up(),
            None => {}
        }
    }

    fn hang_up(&mut self) {
        self.hung_up = true;
        if matches!(self.stage, Stage::Connecting { .. }) {
            self.reset(io::ErrorKind::ConnectionAborted);
            return;
        }
        // What the host program sent before is still read; that never blocks now.
        self.readable = true;
        self.host_is_deaf();
    }

    /// The host program takes no more data: the guest's is dropped, and the guest told so.
    fn host_is_deaf(&mut self) {
        let dropped = self.outgoing.len() as u32;
        self.outgoing = VecDeque::new();
        self.credit.forward(dropped);
        self.host_done |= NO_RECEIVE;
        if self.guest_done == NO_MORE {
            self.finish();
        }
    }

    /// Sends what the guest's data has left over to the host program, as much as it takes.
    fn flush(&mut self) {
        while !self.outgoing.is_empty()
            && let Some(socket) = &self.socket
        {
            let (first, second) = self.outgoing.as_slices();
            match stream::send(socket, [first, second]) {
                Ok(sent) => {
                    self.outgoing.drain(..sent.min(self.outgoing.len()));
                    self.credit.forward(sent as u32);
                }
                Err(error) if stream::is_transient(&error) => return,
                Err(_) => return self.host_is_deaf(),
            }
        }
        self.outgoing = VecDeque::new();
        self.guest_sends_no_more();
    }

    /// Once all data is through, passes the guest's end on.
    fn guest_sends_no_more(&mut self) {
        if !self.outgoing.is_empty() {
            return;
        }
        if self.guest_done == NO_MORE {
            self.finish();
        } else if self.guest_done & NO_SEND != 0 {
            self.shut(Shutdown::Write);
        }
    }

    fn shut(&self, how: Shutdown) {
        if let Some(socket) = &self.socket {
            // Fails only if the peer is gone, of which we learn otherwise.
            let _ = socket.shutdown(how);
        }
    }

    /// Moves data from the socket into a receive buffer, behind the place of the header.
    pub fn fill(&mut self, chain: &Chain, memory: &Memory) -> Filled {
        let Some(socket) = self.socket.as_ref().filter(|_| self.is_ready()) else {
            return Filled::Nothing;
        };
        let segments = room(chain, memory, self.credit.room().min(MAX_PAYLOAD));
        let space: u64 = segments.iter().map(|segment| u64::from(segment.len)).sum();
        if space == 0 {
            return Filled::TooSmall;
        }
        match stream::receive_into(socket, memory, &segments) {
            Ok(0) => self.host_ended(),
            Ok(received) => {
                // Less than there was space for: the socket is empty. It is watched again.
                self.readable = self.hung_up || received as u64 == space;
                self.credit.send(received as u32);
                return Filled::Data(received as u32);
            }
            Err(error) if stream::is_transient(&error) && !self.hung_up => self.readable = false,
            Err(error) if stream::is_transient(&error) => self.host_ended(),
            Err(_) => {
                self.host_ended();
                self.host_is_deaf();
            }
        }
        Filled::Nothing
    }

    fn host_ended(&mut self) {
        self.readable = false;
        self.host_done |= NO_SEND;
    }

    // --- guest side ----------------------------------------------------------------------------

    /// Takes a packet of the guest, other than REQUEST and RST.
    pub fn receive(
        &mut self,
        op: Op,
        header: &Header,
        payload: &Payload<'_>,
    ) -> Result<(), Violation> {
        if let Stage::Reset | Stage::Draining = self.stage {
            // It has yet to hear of the end.
            return Ok(());
        }
        self.credit.learn(header);
        if self.credit.room() > 0 {
            self.credit_asked = false;
            self.due.ask_credit = false;
        }
        let connecting = matches!(self.stage, Stage::Connecting { .. });
        match op {
            Op::Response if connecting && !self.due.request => self.accepted(),
            Op::Data if !connecting => return self.data(header.len, payload),
            Op::Shutdown if !connecting => self.guest_shutdown(header.flags),
            Op::CreditRequest => self.due.update = true,
            Op::CreditUpdate => {}
            _ => return Err(Violation("packet does not fit the state of the connection")),
        }
        Ok(())
    }

    fn accepted(&mut self) {
        let stage = std::mem::replace(&mut self.stage, Stage::Open);
        if let (Stage::Connecting { answer, .. }, Some(socket)) = (stage, &self.socket)
            && answer.accepted(socket, self.host_port).is_err()
        {
            // The program went away before it could hear the answer.
            self.reset(io::ErrorKind::ConnectionAborted);
        }
    }

    fn data(&mut self, len: u32, payload: &Payload<'_>) -> Result<(), Violation> {
        if self.guest_done & NO_SEND != 0 {
            return Err(Violation("data after the end of data"));
        }
        if !self.credit.receive(len) {
            return Err(Violation("more data than there was credit for"));
        }
        if self.host_done & NO_RECEIVE != 0 {
            self.credit.forward(len);
            return Ok(());
        }
        let sent = if self.outgoing.is_empty() { self.send(payload) } else { 0 };
        self.credit.forward(sent);
        if self.host_done & NO_RECEIVE != 0 {
            self.credit.forward(len.saturating_sub(sent));
        } else if sent < len {
            self.keep(payload, sent);
        }
        Ok(())
    }

    /// Sends payload to the socket; how many bytes it took.
    fn send(&mut self, payload: &Payload<'_>) -> u32 {
        let Some(socket) = &self.socket else {
            return 0;
        };
        match stream::send_from(socket, payload.memory, &payload.segments(0)) {
            Ok(sent) => sent as u32,
            Err(error) if stream::is_transient(&error) => 0,
            Err(_) => {
                self.host_is_deaf();
                0
            }
        }
    }

    /// Keeps payload from byte `skip` on until the socket takes it. Bounded by the credit.
    fn keep(&mut self, payload: &Payload<'_>, skip: u32) {
        for segment in payload.segments(skip as usize) {
            let mut bytes = vec![0; segment.len as usize];
            // The chain was checked to lie in guest RAM.
            let _ = payload.memory.read_slice(&mut bytes, segment.address);
            self.outgoing.extend(bytes);
        }
    }

    fn guest_shutdown(&mut self, flags: u32) {
        self.guest_done |= flags & NO_MORE;
        if self.guest_done & NO_RECEIVE != 0 {
            self.shut(Shutdown::Read);
        }
        self.guest_sends_no_more();
    }

    /// Both of the guest's directions are done and its data is delivered: the answer is RST
    /// (section 5.10.6.5), and the host program sees the end.
    fn finish(&mut self) {
        if let Stage::Draining = self.stage {
            self.close();
        } else {
            self.reset(io::ErrorKind::ConnectionReset);
        }
    }

    /// The guest sent RST. True if the connection has to live on for the data that came before.
    pub fn guest_reset(&mut self) -> bool {
        let orderly = self.guest_done & NO_SEND != 0 && !self.outgoing.is_empty();
        match std::mem::replace(&mut self.stage, Stage::Reset) {
            Stage::Open if orderly => {
                self.stage = Stage::Draining;
                self.due = Due::default();
                return true;
            }
            Stage::Connecting { answer, .. } => answer.refused(io::ErrorKind::ConnectionRefused),
            Stage::Open | Stage::Draining | Stage::Reset => {}
        }
        self.due = Due::default();
        self.close();
        false
    }

    /// Ends the connection on both sides. `kind` is for one who still waits for it to begin.
    pub fn reset(&mut self, kind: io::ErrorKind) {
        let reset = self.is_known_to_guest();
        let stage = std::mem::replace(&mut self.stage, Stage::Reset);
        if let Stage::Connecting { answer, .. } = stage {
            answer.refused(kind);
        }
        self.due = Due { reset, ..Due::default() };
        self.close();
    }

    fn close(&mut self) {
        // The event loop holds a duplicate for a moment longer; the peer shall not wait for that.
        self.shut(Shutdown::Both);
        self.socket = None;
        self.outgoing = VecDeque::new();
    }

    /// True if [`Connection::next_packet`] has something.
    pub fn has_packet(&mut self) -> bool {
        if let Stage::Open = self.stage {
            let starved = self.takes_data() && self.readable && self.credit.room() == 0;
            if starved && !self.credit_asked && !self.due.response {
                self.credit_asked = true;
                self.due.ask_credit = true;
            }
            self.due.update |= self.guest_done & NO_SEND == 0 && self.credit.update_is_due();
        }
        self.due != Due::default() || self.shutdown_due()
    }

    fn shutdown_due(&self) -> bool {
        matches!(self.stage, Stage::Open) && self.host_done != self.host_done_told
    }

    /// The next packet without payload that the guest should get, and its flags.
    pub fn next_packet(&mut self) -> Option<(Op, u32)> {
        let due = &mut self.due;
        let op = if std::mem::take(&mut due.reset) {
            Op::Reset
        } else if std::mem::take(&mut due.request) {
            Op::Request
        } else if std::mem::take(&mut due.response) {
            Op::Response
        } else if self.shutdown_due() {
            self.host_done_told = self.host_done;
            if self.host_done == NO_MORE {
                // Nothing can flow any more; what is left is the guest's consent.
                self.close();
            }
            return Some((Op::Shutdown, self.host_done));
        } else if std::mem::take(&mut self.due.ask_credit) {
            Op::CreditRequest
        } else if std::mem::take(&mut self.due.update) {
            Op::CreditUpdate
        } else {
            return None;
        };
        Some((op, 0))
    }

    /// `fwd_cnt` for the next packet, which makes an update needless.
    pub fn tell_credit(&mut self) -> u32 {
        self.due.update = false;
        self.credit.tell()
    }
}
