//! A card, its driver, and the other end of its wires.

use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use crate::executor::Executor;
use crate::ids::DeviceId;
use crate::memory::GuestAddress;
use crate::testing::{Buffer, GuestDriver, PATIENCE, eventually};
use crate::virtio::net::tap::HEADER_LEN;
use crate::virtio::net::{Net, NetConfig, NetCounters, NetHandle, Tap};

/// Receive and transmit queue of the first pair.
pub const RX: u16 = 0;
pub const TX: u16 = 1;

/// Two sockets that keep packets apart, and refuse rather than wait.
fn sockets() -> (OwnedFd, OwnedFd) {
    let mut fds = [0; 2];
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: the kernel writes two descriptors.
    let result = unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, fds.as_mut_ptr()) };
    assert_eq!(result, 0);
    // SAFETY: the kernel has just made these descriptors, for us.
    fds.map(|fd| unsafe { std::os::fd::FromRawFd::from_raw_fd(fd) }).into()
}

/// The host's end of a wire: packets are a header and a frame.
pub struct Peer(UnixStream);

impl Peer {
    /// A TAP queue, and what is behind it.
    pub fn new() -> (Tap, Self) {
        let (ours, theirs) = sockets();
        // Reading and writing packets is the same as reading and writing a stream, for us.
        (Tap::stand_in(ours), Self(theirs.into()))
    }

    /// Sends a frame with an empty header; false if the wire is full.
    pub fn send(&self, frame: &[u8]) -> bool {
        self.send_raw(&[&[0; HEADER_LEN], frame].concat())
    }

    /// Sends header and frame.
    pub fn send_raw(&self, packet: &[u8]) -> bool {
        (&self.0).write(packet).is_ok_and(|len| len == packet.len())
    }

    /// The next packet, header and all; none if the other end is gone.
    pub fn receive(&self) -> Option<Vec<u8>> {
        let mut packet = vec![0; 1 << 17];
        let len = (&self.0).read(&mut packet).ok().filter(|&len| len > 0)?;
        packet.truncate(len);
        Some(packet)
    }

    /// Waits for the next packet.
    pub fn wait(&self) -> Vec<u8> {
        let mut packet = None;
        let came = eventually(PATIENCE, || {
            packet = self.receive();
            packet.is_some()
        });
        assert!(came, "no packet on the wire");
        packet.unwrap()
    }

    /// True without a card at the other end.
    pub fn is_gone(&self) -> bool {
        let mut poll = libc::pollfd { fd: self.0.as_raw_fd(), events: 0, revents: 0 };
        // SAFETY: one pollfd that outlives the call.
        (unsafe { libc::poll(&mut poll, 1, 0) }) == 1
    }

    /// Throws away what has come; how many packets.
    pub fn drain(&self) -> usize {
        std::iter::from_fn(|| self.receive()).count()
    }

    /// Makes the wire hold little, so that it is soon full.
    pub fn shorten(tap: &Tap) {
        let size: libc::c_int = 4096;
        // SAFETY: the descriptor is open, and the kernel reads one int.
        let result = unsafe {
            libc::setsockopt(
                tap.as_fd().as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_SNDBUF,
                std::ptr::from_ref(&size).cast(),
                size_of::<libc::c_int>() as libc::socklen_t,
            )
        };
        assert_eq!(result, 0);
    }
}

/// A card at work.
pub struct Bench {
    pub driver: GuestDriver,
    pub handle: NetHandle,
    pub peers: Vec<Peer>,
    _executor: Executor,
}

pub fn config() -> NetConfig {
    NetConfig::new(DeviceId::new("net0"))
}

impl Bench {
    /// One pair, all features.
    pub fn new() -> Self {
        Self::with(1, 0, config())
    }

    /// One pair, without the features of `unwanted`.
    pub fn without(unwanted: u64) -> Self {
        Self::with(1, unwanted, config())
    }

    pub fn with(pairs: usize, unwanted: u64, config: NetConfig) -> Self {
        let (taps, peers) = (0..pairs).map(|_| Peer::new()).unzip();
        Self::on(taps, peers, unwanted, config)
    }

    pub fn on(taps: Vec<Tap>, peers: Vec<Peer>, unwanted: u64, config: NetConfig) -> Self {
        // Of its own name, to be found again by it.
        let executor = Executor::spawn(config.id.as_str()).unwrap();
        let net = Net::new(executor.handle(), taps, config).unwrap();
        let handle = net.handle();
        let mut driver = GuestDriver::new(Box::new(net));
        driver.initialize_without(unwanted);
        Self { driver, handle, peers, _executor: executor }
    }

    pub fn peer(&self) -> &Peer {
        &self.peers[0]
    }

    /// Gives the guest's receive queue a buffer of `len` bytes.
    pub fn offer(&mut self, len: usize) -> GuestAddress {
        let buffer = self.driver.alloc(len);
        self.driver.add(RX, &[Buffer::writable(buffer, len as u32)]);
        self.driver.kick(RX);
        buffer
    }

    /// Sends `packet` (header and frame) in one buffer and waits until it was taken.
    pub fn transmit(&mut self, packet: &[u8]) {
        let buffer = self.driver.alloc_with(packet);
        let len = self.driver.exchange(TX, &[Buffer::readable(buffer, packet.len() as u32)]);
        assert_eq!(len, 0, "nothing is written into what is sent");
    }

    /// Waits for a frame in the buffers `offered`, each with its length, in order of their use;
    /// header and frame.
    pub fn arrived(&mut self, offered: &[(GuestAddress, usize)]) -> Vec<u8> {
        let mut packet = Vec::new();
        for (place, &(buffer, room)) in offered.iter().enumerate() {
            let used = self.driver.wait_used(RX).len as usize;
            packet.extend(self.driver.bytes(buffer, used));
            let buffers = u16::from_le_bytes([packet[10], packet[11]]);
            if place + 1 == usize::from(buffers) {
                return packet;
            }
            assert_eq!(used, room, "a buffer in the middle is not full");
        }
        panic!("the frame needs more buffers than were offered");
    }

    /// Waits until a counter is as it should be.
    pub fn counts(&self, counter: impl Fn(&NetCounters) -> u64, number: u64) {
        let there = eventually(PATIENCE, || counter(&self.handle.counters()) == number);
        assert!(there, "not {number}: {:?}", self.handle.counters());
    }

    /// The link that the guest sees.
    pub fn status(&mut self) -> u16 {
        u16::from_le_bytes(self.driver.config(6, 2).try_into().unwrap())
    }
}

/// A frame of `len` bytes that looks like no other.
pub fn frame(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|at| (at as u8).wrapping_mul(31).wrapping_add(seed)).collect()
}

/// The same behind an empty header.
pub fn packet(len: usize, seed: u8) -> Vec<u8> {
    [vec![0; HEADER_LEN], frame(len, seed)].concat()
}

/// Processor time that the thread `name` of this process has used.
pub fn processor_time(name: &str) -> Duration {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    for task in tasks.flatten().map(|task| task.path()) {
        let comm = std::fs::read_to_string(task.join("comm")).unwrap_or_default();
        if comm.trim() == name {
            let times = std::fs::read_to_string(task.join("schedstat")).unwrap();
            let nanoseconds = times.split(' ').next().unwrap().parse().unwrap();
            return Duration::from_nanos(nanoseconds);
        }
    }
    panic!("no thread {name}");
}

/// Expects the loop of the card `name` to do nothing.
pub fn expect_idle(name: &str) {
    let before = processor_time(name);
    std::thread::sleep(Duration::from_millis(200));
    let used = processor_time(name).saturating_sub(before);
    assert!(used < Duration::from_millis(20), "{used:?} of 200 ms were used for nothing");
}
