//! The table of connections: from a pair of ports to a [`Connection`], and whose turn it is.
//!
//! Everything here is bounded: connections by [`MAX_CONNECTIONS`]; packets that are due by one of
//! each kind per connection; refusals of what is no connection by [`MAX_STRAYS`], beyond which
//! the guest's packets stay on its ring.

mod to_guest;

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::unix::net::UnixStream;
use std::time::Instant;

use super::complaints::Complaints;
use super::connection::{Connection, Stage};
use super::counters::Counters;
use super::credit::BUF_ALLOC;
use super::greeting::Answer;
use super::host::Endpoints;
use super::packet::{HOST_CID, Header, MAX_PAYLOAD, Op, Payload, STREAM};
use crate::executor::Interest;
use crate::memory::Memory;
use crate::virtio::Chain;

/// Connections at a time. Each may cost two descriptors and [`BUF_ALLOC`] bytes.
pub const MAX_CONNECTIONS: usize = 1024;

/// Refusals that may wait for a receive buffer.
pub const MAX_STRAYS: usize = 256;

/// Host ports of connections that the host begins: those that no service would listen to.
pub const FIRST_HOST_PORT: u32 = 1 << 30;
/// The last of them.
pub const LAST_HOST_PORT: u32 = (1 << 31) - 1;

/// Names a connection; the addresses are always the guest's and the host's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    /// Port on the host's side.
    pub host: u32,
    /// Port on the guest's side.
    pub guest: u32,
}

struct Entry {
    /// `None` once the guest no longer knows it.
    key: Option<Key>,
    born: u64,
    connection: Connection,
}

/// All connections of a device.
pub struct Muxer {
    guest_cid: u64,
    endpoints: Endpoints,
    slots: Vec<Option<Entry>>,
    free: Vec<u32>,
    keys: HashMap<Key, u32>,
    next_host_port: u32,
    births: u64,
    has_deadlines: bool,
    /// Slots with packets due, and with data for the guest, each at most once.
    control: VecDeque<u32>,
    ready: VecDeque<u32>,
    /// Slots whose [`Connection::interest`] may have changed.
    touched: Vec<u32>,
    /// Refusals of what is no connection.
    strays: VecDeque<Header>,
    complaints: Complaints,
}

impl Muxer {
    /// An empty table.
    pub fn new(guest_cid: u64, endpoints: Endpoints) -> Self {
        Self {
            guest_cid,
            endpoints,
            slots: Vec::new(),
            free: Vec::new(),
            keys: HashMap::new(),
            next_host_port: FIRST_HOST_PORT,
            births: 0,
            has_deadlines: false,
            control: VecDeque::new(),
            ready: VecDeque::new(),
            touched: Vec::new(),
            strays: VecDeque::new(),
            complaints: Complaints::default(),
        }
    }

    fn counters(&self) -> &Counters {
        &self.endpoints.shared.counters
    }

    /// The host port to try first for the next connection.
    pub fn next_host_port(&self) -> u32 {
        self.next_host_port
    }

    /// The connections that the guest may believe to exist.
    pub fn known_to_guest(&self) -> Vec<Key> {
        let entries = self.slots.iter().flatten();
        entries
            .filter(|entry| entry.connection.is_known_to_guest())
            .filter_map(|entry| entry.key)
            .collect()
    }

    /// Goes on from a snapshot: the guest will hear that none of `lost` exists any more.
    pub fn restore(&mut self, next_host_port: u32, lost: &[Key]) {
        self.clear(io::ErrorKind::ConnectionReset);
        self.next_host_port = next_host_port;
        for &key in lost {
            self.insert(key, Connection::lost(key.host));
        }
    }

    /// Ends all connections without a word to the guest, which has forgotten them.
    pub fn clear(&mut self, kind: io::ErrorKind) {
        for slot in 0..self.slots.len() as u32 {
            self.remove(slot, kind);
        }
        self.strays.clear();
    }

    /// True while connections may run into their deadline.
    pub fn has_deadlines(&self) -> bool {
        self.has_deadlines
    }

    /// Gives up on connections that the guest has not answered in time.
    pub fn expire(&mut self, now: Instant) {
        self.has_deadlines = false;
        for slot in 0..self.slots.len() as u32 {
            let Some(entry) = self.entry(slot) else {
                continue;
            };
            match entry.connection.stage() {
                Stage::Connecting { deadline, .. } if *deadline <= now => {
                    self.break_off(slot, io::ErrorKind::TimedOut);
                }
                Stage::Connecting { .. } => self.has_deadlines = true,
                _ => {}
            }
        }
    }

    /// Length of the longest of the lists that must stay bounded.
    #[cfg(test)]
    pub fn longest_list(&self) -> usize {
        [self.control.len(), self.ready.len(), self.strays.len(), self.slots.len()]
            .into_iter()
            .fold(0, usize::max)
    }

    // --- table ---------------------------------------------------------------------------------

    fn entry(&mut self, slot: u32) -> Option<&mut Entry> {
        self.slots.get_mut(slot as usize)?.as_mut()
    }

    /// Puts a connection into the table. `None`, and it is dropped, if there is no room.
    fn insert(&mut self, key: Key, connection: Connection) -> Option<u32> {
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None if self.slots.len() < MAX_CONNECTIONS => {
                self.slots.push(None);
                self.slots.len() as u32 - 1
            }
            None => return None,
        };
        self.births += 1;
        let entry = Entry { key: Some(key), born: self.births, connection };
        *self.slots.get_mut(slot as usize)? = Some(entry);
        self.keys.insert(key, slot);
        self.count_connections();
        self.settle(slot);
        Some(slot)
    }

    /// Makes room for one more, if need be at the cost of the oldest that is as good as over.
    fn make_room(&mut self) -> bool {
        if !self.free.is_empty() || self.slots.len() < MAX_CONNECTIONS {
            return true;
        }
        let lingering = self.slots.iter().enumerate().filter_map(|(slot, entry)| {
            let entry = entry.as_ref().filter(|entry| entry.connection.is_lingering())?;
            Some((entry.born, slot as u32, entry.key))
        });
        let Some((_, slot, key)) = lingering.min_by_key(|&(born, ..)| born) else {
            return false;
        };
        if let Some(key) = key {
            if self.strays.len() >= MAX_STRAYS {
                return false;
            }
            self.strays.push_back(self.header(key, Op::Reset));
        }
        self.remove(slot, io::ErrorKind::ConnectionReset);
        true
    }

    fn remove(&mut self, slot: u32, kind: io::ErrorKind) {
        let Some(mut entry) = self.slots.get_mut(slot as usize).and_then(Option::take) else {
            return;
        };
        self.unlink(&mut entry);
        if entry.connection.in_control {
            self.control.retain(|&other| other != slot);
        }
        if entry.connection.in_ready {
            self.ready.retain(|&other| other != slot);
        }
        self.reset(&mut entry.connection, kind);
        self.touched.push(slot);
        self.free.push(slot);
        self.count_connections();
    }

    fn count_connections(&self) {
        let count = self.slots.len().saturating_sub(self.free.len());
        self.counters().connections.set(count as u64);
    }

    /// Ends a connection out of order.
    fn reset(&self, connection: &mut Connection, kind: io::ErrorKind) {
        self.count_break(connection);
        connection.reset(kind);
    }

    /// Counts that a connection ends out of order, if it does.
    fn count_break(&self, connection: &Connection) {
        match connection.stage() {
            Stage::Connecting { .. } => {
                self.counters().refused.one();
            }
            Stage::Open if !connection.is_ending() => {
                self.counters().reset.one();
            }
            Stage::Open | Stage::Draining | Stage::Reset => {}
        }
    }

    /// Ends the connection in `slot` out of order; both sides hear of it.
    fn break_off(&mut self, slot: u32, kind: io::ErrorKind) {
        let Some(mut entry) = self.slots.get_mut(slot as usize).and_then(Option::take) else {
            return;
        };
        self.reset(&mut entry.connection, kind);
        if let Some(place) = self.slots.get_mut(slot as usize) {
            *place = Some(entry);
        }
        self.settle(slot);
    }

    fn unlink(&mut self, entry: &mut Entry) {
        if let Some(key) = entry.key.take() {
            self.keys.remove(&key);
        }
    }

    /// Puts `slot` on the lists where it now belongs. After everything that happens to it.
    fn settle(&mut self, slot: u32) {
        let Some(Some(Entry { connection, .. })) = self.slots.get_mut(slot as usize) else {
            return;
        };
        if connection.is_over() {
            return self.remove(slot, io::ErrorKind::ConnectionReset);
        }
        if connection.has_packet() && !connection.in_control {
            connection.in_control = true;
            self.control.push_back(slot);
        }
        if connection.is_ready() && !connection.in_ready {
            connection.in_ready = true;
            self.ready.push_back(slot);
        }
        self.touched.push(slot);
    }

    fn new_host_port(&mut self) -> u32 {
        loop {
            let port = self.next_host_port;
            self.next_host_port = if port >= LAST_HOST_PORT { FIRST_HOST_PORT } else { port + 1 };
            // Ends, since far fewer ports are taken than there are.
            if !self.keys.keys().any(|key| key.host == port) {
                return port;
            }
        }
    }

    // --- host side -----------------------------------------------------------------------------

    /// Begins a connection to `port` of the guest.
    pub fn connect(&mut self, port: u32, socket: UnixStream, answer: Answer, deadline: Instant) {
        if !self.make_room() {
            self.counters().refused.one();
            return answer.refused(io::ErrorKind::ConnectionRefused);
        }
        let host = self.new_host_port();
        let connection = Connection::to_guest(host, socket, answer, deadline);
        self.insert(Key { host, guest: port }, connection);
        self.has_deadlines = true;
    }

    /// The socket of `slot` is ready for what it was watched for.
    pub fn socket_event(&mut self, slot: u32) {
        if let Some(entry) = self.entry(slot) {
            entry.connection.socket_event();
            self.settle(slot);
        }
    }

    /// The slots to look at with [`Muxer::watch`].
    pub fn take_touched(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.touched)
    }

    /// Touches every slot, none of which is watched any more.
    pub fn unwatch_all(&mut self) {
        self.touched.clear();
        for (slot, entry) in self.slots.iter_mut().enumerate() {
            if let Some(entry) = entry {
                entry.connection.armed = None;
                self.touched.push(slot as u32);
            }
        }
    }

    /// What `slot` is watched for, what it should be watched for, and its socket.
    pub fn watch(&self, slot: u32) -> (Option<Interest>, Option<(Interest, &UnixStream)>) {
        let Some(Some(Entry { connection, .. })) = self.slots.get(slot as usize) else {
            return (None, None);
        };
        (connection.armed, connection.interest().zip(connection.socket()))
    }

    /// `slot` is now watched for `interest`.
    pub fn watched(&mut self, slot: u32, interest: Option<Interest>) {
        if let Some(entry) = self.entry(slot) {
            entry.connection.armed = interest;
        }
    }

    /// `slot` cannot be watched: the host is out of resources.
    pub fn cannot_watch(&mut self, slot: u32) {
        self.break_off(slot, io::ErrorKind::OutOfMemory);
    }

    // --- from the guest ------------------------------------------------------------------------

    /// False while no further packet of the guest can be taken.
    pub fn can_receive(&self) -> bool {
        self.strays.len() < MAX_STRAYS
    }

    /// Takes one packet of the guest. Makes one stray at most.
    pub fn receive(&mut self, chain: &Chain, memory: &Memory) {
        let Some(header) = Header::read(chain, memory) else {
            return self.drop_packet("packet shorter than its header");
        };
        if header.src_cid != self.guest_cid {
            // An answer would not reach the sender, whoever that is.
            return self.drop_packet("packet from a foreign address");
        }
        if header.dst_cid != HOST_CID || header.socket_type != STREAM {
            self.drop_packet("packet to a foreign address or of an unknown type");
            return self.refuse(&header);
        }
        let payload = Payload { chain, memory };
        let whole = u64::from(header.len) == payload.len() && header.len <= MAX_PAYLOAD;
        let op = Op::from_number(header.op).filter(|_| whole && chain.writable().is_empty());
        let key = Key { host: header.dst_port, guest: header.src_port };
        match (op, self.keys.get(&key).copied()) {
            (Some(Op::Request), None) => self.request(key, &header),
            (_, None) => self.stray(&header),
            (Some(Op::Request), Some(slot)) => self.request_again(slot, key, &header),
            (Some(Op::Reset), Some(slot)) => self.guest_reset(slot),
            (Some(op), Some(slot)) => self.deliver(slot, op, &header, &payload),
            (None, Some(slot)) => {
                self.drop_packet("packet of unknown operation or false length");
                self.break_off(slot, io::ErrorKind::ConnectionReset);
            }
        }
    }

    fn drop_packet(&mut self, why: &'static str) {
        self.counters().dropped_packets.one();
        self.complaints.log(why);
    }

    /// A packet to no connection. One that says just that is in order.
    fn stray(&mut self, header: &Header) {
        if header.op != Op::Reset as u16 {
            self.counters().dropped_packets.one();
        }
        self.refuse(header);
    }

    fn refuse(&mut self, header: &Header) {
        // A reset is never answered, or both sides would do so forever.
        if header.op != Op::Reset as u16 {
            self.strays.push_back(Header {
                src_cid: header.dst_cid,
                dst_cid: header.src_cid,
                src_port: header.dst_port,
                dst_port: header.src_port,
                socket_type: header.socket_type,
                op: Op::Reset as u16,
                ..Header::default()
            });
        }
    }

    fn request(&mut self, key: Key, header: &Header) {
        let socket = self.endpoints.connect(key.host).ok();
        match socket.filter(|_| self.make_room()) {
            Some(socket) => {
                let connection = Connection::to_host(key.host, socket, header);
                self.insert(key, connection);
                self.counters().opened.one();
            }
            None => {
                self.counters().refused.one();
                self.refuse(header);
            }
        }
    }

    fn request_again(&mut self, slot: u32, key: Key, header: &Header) {
        let over =
            self.entry(slot).is_some_and(|entry| matches!(entry.connection.stage(), Stage::Reset));
        if over {
            // The guest uses the port anew without having heard of the end.
            self.remove(slot, io::ErrorKind::ConnectionReset);
            self.request(key, header);
        } else {
            self.drop_packet("request for a connection that exists");
            self.break_off(slot, io::ErrorKind::ConnectionReset);
        }
    }

    fn guest_reset(&mut self, slot: u32) {
        let Some(Some(mut entry)) = self.slots.get_mut(slot as usize).map(Option::take) else {
            return;
        };
        self.count_break(&entry.connection);
        if entry.connection.guest_reset() {
            // The guest may use the ports anew.
            self.unlink(&mut entry);
        }
        if let Some(place) = self.slots.get_mut(slot as usize) {
            *place = Some(entry);
        }
        self.settle(slot);
    }

    fn deliver(&mut self, slot: u32, op: Op, header: &Header, payload: &Payload<'_>) {
        let Some(entry) = self.entry(slot) else {
            return;
        };
        let before = matches!(entry.connection.stage(), Stage::Connecting { .. });
        let received = entry.connection.receive(op, header, payload);
        let opened = before && matches!(entry.connection.stage(), Stage::Open);
        match received {
            Ok(()) => {
                let counters = self.counters();
                if opened {
                    counters.opened.one();
                }
                if op == Op::Data {
                    counters.sent_bytes.add(u64::from(header.len));
                }
                self.settle(slot);
            }
            Err(violation) => {
                self.drop_packet(violation.0);
                self.break_off(slot, io::ErrorKind::ConnectionReset);
            }
        }
    }
}
