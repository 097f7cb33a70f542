//! A guest kernel's socket layer in small: enough to open, use and close streams by the rules.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use super::super::packet::{HOST_CID, Header, NO_MORE, Op, STREAM};
use super::driver::{Driver, Packet};
use super::{CID, SOON};

/// Host port and guest port.
pub type Ports = (u32, u32);

/// The guest's end of a connection.
#[derive(Debug, Default)]
pub struct Stream {
    /// Size of the receive buffer.
    pub alloc: u32,
    /// Nothing is taken out of the receive buffer.
    pub asleep: bool,
    /// What has come and was taken out.
    pub data: Vec<u8>,
    /// Both sides agreed.
    pub open: bool,
    /// RST has come.
    pub reset: bool,
    /// What the host has announced not to do any more.
    pub host_done: u32,
    /// CREDIT_REQUESTs that have come.
    pub credit_requests: u32,
    received: u32,
    forwarded: u32,
    told: u32,
    sent: u32,
    host_alloc: u32,
    host_forwarded: u32,
}

impl Stream {
    /// Bytes that the host can take.
    pub fn room(&self) -> u32 {
        self.host_alloc.saturating_sub(self.sent.wrapping_sub(self.host_forwarded))
    }
}

/// A guest with its streams.
pub struct Guest {
    pub driver: Driver,
    pub streams: HashMap<Ports, Stream>,
    /// Ports on which connections are accepted.
    pub listening: HashSet<u32>,
    /// Receive buffer of new streams.
    pub alloc: u32,
    /// New streams take nothing out of it.
    pub sleepy: bool,
    /// RSTs for what is no stream.
    pub stray_resets: Vec<Ports>,
    /// Receive buffers that came back without a packet.
    pub empty_buffers: u32,
}

impl Guest {
    pub fn new(driver: Driver) -> Self {
        Self {
            driver,
            streams: HashMap::new(),
            listening: HashSet::new(),
            alloc: 256 * 1024,
            sleepy: false,
            stray_resets: Vec::new(),
            empty_buffers: 0,
        }
    }

    /// A packet for `ports`, without payload, with the credit of its stream.
    pub fn header(&self, ports: Ports, op: Op) -> Header {
        let stream = self.streams.get(&ports);
        Header {
            src_cid: CID,
            dst_cid: HOST_CID,
            src_port: ports.1,
            dst_port: ports.0,
            socket_type: STREAM,
            op: op as u16,
            buf_alloc: stream.map_or(self.alloc, |stream| stream.alloc),
            fwd_cnt: stream.map_or(0, |stream| stream.forwarded),
            ..Header::default()
        }
    }

    pub fn send(&mut self, ports: Ports, op: Op) {
        self.send_flags(ports, op, 0);
    }

    pub fn send_flags(&mut self, ports: Ports, op: Op, flags: u32) {
        let header = Header { flags, ..self.header(ports, op) };
        if let Some(stream) = self.streams.get_mut(&ports) {
            stream.told = stream.forwarded;
        }
        self.driver.send(&header, &[]);
    }

    /// Sends data, whatever the credit.
    pub fn send_data(&mut self, ports: Ports, data: &[u8]) {
        let header = Header { len: data.len() as u32, ..self.header(ports, Op::Data) };
        if let Some(stream) = self.streams.get_mut(&ports) {
            stream.sent = stream.sent.wrapping_add(data.len() as u32);
            stream.told = stream.forwarded;
        }
        self.driver.send(&header, data);
    }

    /// Asks for a connection and waits for the answer; whether it was accepted.
    pub fn connect(&mut self, ports: Ports) -> bool {
        self.request(ports);
        self.until(|guest| {
            let stream = &guest.streams[&ports];
            stream.open || stream.reset
        });
        self.streams[&ports].open
    }

    /// Asks for a connection.
    pub fn request(&mut self, ports: Ports) {
        let (alloc, asleep) = (self.alloc, self.sleepy);
        self.streams.insert(ports, Stream { alloc, asleep, ..Stream::default() });
        self.send(ports, Op::Request);
    }

    /// Sends all of `data` as credit comes.
    pub fn write(&mut self, ports: Ports, mut data: &[u8]) {
        while !data.is_empty() {
            self.until(|guest| guest.streams[&ports].room() > 0 || guest.streams[&ports].reset);
            assert!(!self.streams[&ports].reset, "reset while writing");
            let len = (self.streams[&ports].room() as usize).min(65536).min(data.len());
            let (now, later) = data.split_at(len);
            self.send_data(ports, now);
            data = later;
        }
    }

    /// Sends until the program's socket is full and some is left in the device; how much.
    pub fn stuff(&mut self, ports: Ports) -> usize {
        let mut sent = 0;
        loop {
            let room = self.streams[&ports].room().min(50_000);
            if room > 0 {
                self.write(ports, &vec![1; room as usize]);
                sent += room as usize;
                continue;
            }
            // If room comes back once all is taken, it was not held.
            self.driver.wait(Driver::all_sent);
            self.idle(Duration::from_millis(200));
            if self.streams[&ports].room() == 0 {
                return sent;
            }
        }
    }

    /// Closes in good order, and waits for the host's consent.
    pub fn close(&mut self, ports: Ports) {
        self.send_flags(ports, Op::Shutdown, NO_MORE);
        self.until(|guest| guest.streams[&ports].reset);
        self.streams.remove(&ports);
    }

    /// Takes packets until `done`.
    pub fn until(&mut self, mut done: impl FnMut(&Self) -> bool) {
        let end = Instant::now() + SOON;
        while !done(self) {
            assert!(Instant::now() < end, "it did not happen");
            self.turn(Duration::from_millis(100));
        }
    }

    /// Takes what comes for a while.
    pub fn idle(&mut self, time: Duration) {
        let end = Instant::now() + time;
        while Instant::now() < end {
            self.turn(Duration::from_millis(5));
        }
    }

    /// Takes one packet, if one comes in time.
    pub fn turn(&mut self, timeout: Duration) -> Option<Header> {
        let packet = self.receive(timeout)?;
        self.take(&packet);
        Some(packet.header)
    }

    /// The next packet, not handled. Its buffer goes back.
    pub fn receive(&mut self, timeout: Duration) -> Option<Packet> {
        let mut received = None;
        self.driver.wait_for(timeout, |driver| {
            received = driver.received();
            received.is_some()
        });
        let (buffer, packet) = received?;
        self.driver.give_rx(buffer);
        self.empty_buffers += u32::from(packet.is_none());
        packet
    }

    fn take(&mut self, packet: &Packet) {
        let header = &packet.header;
        assert_eq!((header.src_cid, header.dst_cid), (HOST_CID, CID));
        assert_eq!(header.len as usize, packet.payload.len());
        let ports = (header.src_port, header.dst_port);
        let op = Op::from_number(header.op).unwrap();
        if op == Op::Request {
            return self.requested(ports, header);
        }
        let Some(stream) = self.streams.get_mut(&ports) else {
            assert_eq!(op, Op::Reset, "{header:?} for no stream");
            return self.stray_resets.push(ports);
        };
        stream.host_alloc = header.buf_alloc;
        stream.host_forwarded = header.fwd_cnt;
        match op {
            Op::Response => stream.open = true,
            Op::Reset => stream.reset = true,
            Op::Shutdown => stream.host_done |= header.flags,
            Op::CreditRequest => {
                stream.credit_requests += 1;
                self.send(ports, Op::CreditUpdate);
            }
            Op::Data => self.data(ports, &packet.payload),
            Op::CreditUpdate | Op::Request => {}
        }
    }

    fn requested(&mut self, ports: Ports, header: &Header) {
        if !self.listening.contains(&ports.1) {
            return self.send(ports, Op::Reset);
        }
        let stream = Stream {
            alloc: self.alloc,
            asleep: self.sleepy,
            open: true,
            host_alloc: header.buf_alloc,
            ..Stream::default()
        };
        assert!(self.streams.insert(ports, stream).is_none(), "ports {ports:?} used twice");
        self.send(ports, Op::Response);
    }

    fn data(&mut self, ports: Ports, payload: &[u8]) {
        let stream = self.streams.get_mut(&ports).unwrap();
        stream.data.extend_from_slice(payload);
        stream.received = stream.received.wrapping_add(payload.len() as u32);
        let held = stream.received.wrapping_sub(stream.forwarded);
        assert!(held <= stream.alloc, "the device overran the guest's buffer");
        if !stream.asleep {
            self.read(ports);
        }
    }

    /// Takes all out of the receive buffer, and tells the host if that matters to it.
    pub fn read(&mut self, ports: Ports) {
        let stream = self.streams.get_mut(&ports).unwrap();
        stream.forwarded = stream.received;
        if stream.forwarded.wrapping_sub(stream.told) >= stream.alloc / 4 {
            self.send(ports, Op::CreditUpdate);
        }
    }
}
