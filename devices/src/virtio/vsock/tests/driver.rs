//! The driver's side of the rings, by hand, so that it can also do what no driver should.

use std::os::fd::AsRawFd;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use virtio_queue::{Queue, QueueT};

use super::super::packet::{HEADER_LEN, Header};
use crate::event::Event;
use crate::ids::QueueIndex;
use crate::irq::Interrupt;
use crate::memory::{Bytes, GuestAddress, Memory};
use crate::virtio::queue::{ActiveQueue, QueueLines};
use crate::virtio::{Activation, Notifier, feature};

const SIZE: u16 = 256;
const RAM: usize = 64 << 20;
/// Rings of queue n are in the n-th of these.
const RING_SPACE: u64 = 0x1_0000;
const RX_BUFFERS: u64 = 0x100_0000;
const TX_BUFFERS: u64 = 0x200_0000;
/// Each transmit chain may use this many descriptors and bytes.
const TX_DESCRIPTORS: u16 = 8;
const TX_SPACE: u64 = 0x2_0000;
const NEXT: u16 = 1;
const WRITE: u16 = 2;

/// A piece of a chain.
pub struct Piece {
    pub address: u64,
    pub len: u32,
    pub writable: bool,
}

/// One queue.
pub struct Ring {
    index: u16,
    memory: Memory,
    lines: QueueLines,
    avail: u16,
    seen: u16,
}

impl Ring {
    fn new(index: u16, memory: &Memory, interrupt: &Event) -> Self {
        let interrupt = Interrupt::from_event(interrupt.clone());
        let lines = QueueLines { kick: Event::new().unwrap(), interrupt };
        Self { index, memory: memory.clone(), lines, avail: 0, seen: 0 }
    }

    fn base(&self) -> u64 {
        RING_SPACE * u64::from(self.index)
    }

    fn put<T: vm_memory::ByteValued>(&self, offset: u64, value: T) {
        self.memory.write_obj(value, GuestAddress(self.base() + offset)).unwrap();
    }

    fn get<T: vm_memory::ByteValued>(&self, offset: u64) -> T {
        self.memory.read_obj(GuestAddress(self.base() + offset)).unwrap()
    }

    fn activate(&self) -> ActiveQueue {
        let mut queue = Queue::new(SIZE).unwrap();
        queue.set_size(if self.index == 2 { 8 } else { SIZE });
        let low = |offset: u64| Some((self.base() + offset) as u32);
        queue.set_desc_table_address(low(0), Some(0));
        queue.set_avail_ring_address(low(0x4000), Some(0));
        queue.set_used_ring_address(low(0x8000), Some(0));
        queue.set_ready(true);
        let (memory, lines) = (self.memory.clone(), self.lines.clone());
        ActiveQueue::new(QueueIndex(self.index), queue, memory, lines, feature::COMMON).unwrap()
    }

    fn size(&self) -> u16 {
        if self.index == 2 { 8 } else { SIZE }
    }

    /// Makes a chain of `pieces` available, in the descriptors from `head` on.
    pub fn offer(&mut self, head: u16, pieces: &[Piece]) {
        for (at, piece) in (head..).zip(pieces) {
            let last = usize::from(at - head) + 1 == pieces.len();
            let flags = if last { 0 } else { NEXT } | if piece.writable { WRITE } else { 0 };
            let entry = 16 * u64::from(at);
            self.put(entry, piece.address);
            self.put(entry + 8, piece.len);
            self.put(entry + 12, flags);
            self.put(entry + 14, at + 1);
        }
        self.offer_head(head);
    }

    /// Makes the chain that starts at `head` available, whatever is there.
    pub fn offer_head(&mut self, head: u16) {
        self.put(0x4004 + 2 * u64::from(self.avail % self.size()), head);
        let before = self.avail;
        self.avail = self.avail.wrapping_add(1);
        self.publish(self.avail);
        fence(Ordering::SeqCst);
        // Only if the device asked for it at this chain (virtio 1.3, section 2.7.10).
        let asked: u16 = self.get(0x8004 + 8 * u64::from(self.size()));
        if asked == before {
            self.kick();
        }
    }

    /// Sets the available index.
    pub fn publish(&self, avail: u16) {
        let address = GuestAddress(self.base() + 0x4002);
        self.memory.store(avail, address, Ordering::Release).unwrap();
    }

    /// Notifies the device.
    pub fn kick(&self) {
        self.lines.kick.signal();
    }

    /// The next chain that the device has given back.
    pub fn used(&mut self) -> Option<(u16, u32)> {
        let address = GuestAddress(self.base() + 0x8002);
        let used: u16 = self.memory.load(address, Ordering::Acquire).unwrap();
        if used == self.seen {
            return None;
        }
        let entry = 0x8004 + 8 * u64::from(self.seen % self.size());
        let (head, len): (u32, u32) = (self.get(entry), self.get(entry + 4));
        self.seen = self.seen.wrapping_add(1);
        // Asks for an interrupt at the next one.
        self.put(0x4004 + 2 * u64::from(self.size()), self.seen);
        fence(Ordering::SeqCst);
        Some((head as u16, len))
    }
}

/// A packet as it was found in a receive buffer.
#[derive(Debug)]
pub struct Packet {
    pub header: Header,
    pub payload: Vec<u8>,
}

/// The three queues and their memory.
pub struct Driver {
    pub memory: Memory,
    pub rx: Ring,
    pub tx: Ring,
    pub event: Ring,
    pub notifier: Notifier,
    pub interrupt: Event,
    pub rx_size: u32,
    tx_next: u16,
    /// Packets that can be sent without waiting.
    pub tx_free: u16,
}

impl Driver {
    /// With `buffers` receive buffers of `rx_size` bytes.
    pub fn new(buffers: u16, rx_size: u32) -> Self {
        let memory = Memory::from_ranges(&[(GuestAddress(0), RAM)]).unwrap();
        let interrupt = Event::new().unwrap();
        let ring = |index| Ring::new(index, &memory, &interrupt);
        let (rx, tx, event) = (ring(0), ring(1), ring(2));
        let notifier = Notifier::new(Interrupt::none());
        let tx_free = SIZE / TX_DESCRIPTORS;
        let mut driver =
            Self { memory, rx, tx, event, notifier, interrupt, rx_size, tx_next: 0, tx_free };
        (0..buffers).for_each(|buffer| driver.give_rx(buffer));
        (0..8).for_each(|buffer| driver.give_event(buffer));
        driver
    }

    /// What the transport hands over at the first start.
    pub fn activation(&self) -> Activation {
        let queues = [&self.rx, &self.tx, &self.event].map(Ring::activate);
        self.activation_of(queues.into())
    }

    /// What it hands over at later ones, with the nudges.
    pub fn activation_of(&self, queues: Vec<ActiveQueue>) -> Activation {
        queues.iter().for_each(ActiveQueue::nudge);
        let (memory, notifier) = (self.memory.clone(), self.notifier.clone());
        Activation { memory, queues, features: feature::COMMON, notifier }
    }

    fn rx_address(&self, buffer: u16) -> u64 {
        RX_BUFFERS + u64::from(buffer) * u64::from(self.rx_size).next_multiple_of(4096)
    }

    /// Gives a receive buffer to the device.
    pub fn give_rx(&mut self, buffer: u16) {
        let address = self.rx_address(buffer);
        self.rx.offer(buffer, &[Piece { address, len: self.rx_size, writable: true }]);
    }

    /// Gives an event buffer to the device.
    pub fn give_event(&mut self, buffer: u16) {
        let address = 0x8_0000 + 16 * u64::from(buffer);
        self.event.offer(buffer, &[Piece { address, len: 4, writable: true }]);
    }

    /// A packet that has come, if there is one, with the buffer it was in.
    pub fn received(&mut self) -> Option<(u16, Option<Packet>)> {
        let (buffer, len) = self.rx.used()?;
        let mut bytes = vec![0; len as usize];
        self.memory.read_slice(&mut bytes, GuestAddress(self.rx_address(buffer))).unwrap();
        let packet = bytes.split_first_chunk::<HEADER_LEN>().map(|(header, payload)| Packet {
            header: Header::decode(header),
            payload: payload.to_vec(),
        });
        Some((buffer, packet))
    }

    /// Sends a packet the usual way: header and payload in a descriptor each.
    pub fn send(&mut self, header: &Header, payload: &[u8]) {
        let header = header.encode();
        if payload.is_empty() {
            self.send_pieces(&[&header], &[]);
        } else {
            self.send_pieces(&[&header, payload], &[]);
        }
    }

    /// Sends `pieces` as one chain, with `room` bytes of device-writable pieces after them.
    pub fn send_pieces(&mut self, pieces: &[&[u8]], room: &[u32]) {
        let slot = self.free_tx_slot();
        let mut address = TX_BUFFERS + TX_SPACE * u64::from(slot);
        let mut chain = Vec::new();
        for piece in pieces {
            self.memory.write_slice(piece, GuestAddress(address)).unwrap();
            chain.push(Piece { address, len: piece.len() as u32, writable: false });
            address += piece.len() as u64;
        }
        for &len in room {
            chain.push(Piece { address, len, writable: true });
            address += u64::from(len);
        }
        self.tx.offer(slot * TX_DESCRIPTORS, &chain);
    }

    /// Sends a chain of any length; the transmit ring must be otherwise unused.
    pub fn send_chain(&mut self, chain: &[Piece]) {
        self.tx.offer(0, chain);
        self.wait(|driver| driver.tx.used().is_some());
    }

    fn free_tx_slot(&mut self) -> u16 {
        self.wait(|driver| {
            while driver.tx.used().is_some() {
                driver.tx_free += 1;
            }
            driver.tx_free > 0
        });
        self.tx_free -= 1;
        let slot = self.tx_next;
        self.tx_next = (slot + 1) % (SIZE / TX_DESCRIPTORS);
        slot
    }

    /// True if a packet can be sent without waiting.
    pub fn can_send(&mut self) -> bool {
        while self.tx.used().is_some() {
            self.tx_free += 1;
        }
        self.tx_free > 0
    }

    /// True if the device has taken all that was sent.
    pub fn all_sent(&mut self) -> bool {
        self.can_send() && self.tx_free == SIZE / TX_DESCRIPTORS
    }

    /// Sleeps until `done`.
    pub fn wait(&mut self, mut done: impl FnMut(&mut Self) -> bool) {
        assert!(self.wait_for(super::SOON, &mut done), "the device did not do it");
    }

    /// Sleeps until `done`, or for `timeout`; whether it was done.
    pub fn wait_for(&mut self, timeout: Duration, mut done: impl FnMut(&mut Self) -> bool) -> bool {
        let end = Instant::now() + timeout;
        loop {
            if done(self) {
                return true;
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let fd = self.interrupt.as_raw_fd();
            let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
            // SAFETY: `poll` is one live pollfd.
            unsafe { libc::poll(&mut poll, 1, left.as_millis().clamp(1, 20) as i32) };
            self.interrupt.clear();
        }
    }
}
