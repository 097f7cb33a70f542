//! Frames through a real TAP, with the kernel's own network stack at its other end.

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::time::Duration;

use super::bench::{Bench, RX, TX, config, expect_idle, frame, packet};
use super::host::{self, Frames, in_namespace};
use crate::ids::DeviceId;
use crate::memory::GuestAddress;
use crate::testing::{Buffer, PATIENCE, eventually};
use crate::virtio::net::handle::status::LINK_UP;
use crate::virtio::net::{NetConfig, Tap, feature};

const HOST: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);
const GUEST: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);
const CONFIG_CHANGE: u32 = 2;

/// A guest with a hand-made network stack: it can do what the tests need.
struct Guest {
    bench: Bench,
    mac: [u8; 6],
    buffers: std::collections::VecDeque<(GuestAddress, usize)>,
}

impl Guest {
    /// On a new interface `name` with an address for the host.
    fn new(name: &str, unwanted: u64) -> Self {
        Self::with(Tap::open_named(name, 1, None).unwrap(), unwanted, config())
    }

    fn with(taps: Vec<Tap>, unwanted: u64, config: NetConfig) -> Self {
        host::set_address(taps[0].name(), HOST);
        let bench = Bench::on(taps, Vec::new(), unwanted, config);
        let mac = bench.handle.mac();
        let mut guest = Self { bench, mac, buffers: Default::default() };
        for _ in 0..128 {
            let buffer = guest.bench.offer(2048);
            guest.buffers.push_back((buffer, 2048));
        }
        guest
    }

    /// The next packet (header and frame) for which `wanted` holds; others are passed over.
    fn wait(&mut self, wanted: impl Fn(&[u8]) -> bool) -> Vec<u8> {
        loop {
            let buffers: Vec<_> = self.buffers.iter().copied().collect();
            let packet = self.bench.arrived(&buffers);
            for _ in 0..packet[10] {
                let (buffer, len) = self.buffers.pop_front().unwrap();
                self.bench.driver.add(RX, &[Buffer::writable(buffer, len as u32)]);
                self.buffers.push_back((buffer, len));
            }
            self.bench.driver.kick(RX);
            if wanted(&packet[12..]) {
                return packet;
            }
        }
    }

    /// Sends a frame with a header for offloads.
    fn send(&mut self, header: [u8; 12], frame: &[u8]) {
        self.bench.transmit(&[&header, frame].concat());
    }

    /// Asks for the host's address, and returns it; the host learns ours.
    fn resolve(&mut self) -> [u8; 6] {
        let mut request = ethernet([0xff; 6], self.mac, 0x0806);
        request.extend([0, 1, 8, 0, 6, 4, 0, 1]);
        request.extend(self.mac);
        request.extend(GUEST.octets());
        request.extend([0; 6]);
        request.extend(HOST.octets());
        self.send([0; 12], &request);
        let answer = self.wait(|frame| frame[12..14] == [8, 6] && frame[20..22] == [0, 2]);
        answer[12 + 22..12 + 28].try_into().unwrap()
    }

    /// Answers the host's question for our address.
    fn be_resolved(&mut self) -> [u8; 6] {
        let question = self.wait(|frame| frame[12..14] == [8, 6] && frame[20..22] == [0, 1]);
        let host: [u8; 6] = question[12 + 22..12 + 28].try_into().unwrap();
        let mut answer = ethernet(host, self.mac, 0x0806);
        answer.extend([0, 1, 8, 0, 6, 4, 0, 2]);
        answer.extend(self.mac);
        answer.extend(GUEST.octets());
        answer.extend(host);
        answer.extend(HOST.octets());
        self.send([0; 12], &answer);
        host
    }
}

fn ethernet(to: [u8; 6], from: [u8; 6], kind: u16) -> Vec<u8> {
    [&to[..], &from, &kind.to_be_bytes()].concat()
}

/// The sum of RFC 1071, not yet inverted.
fn sum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks(2).map(|pair| match *pair {
        [high, low] => u32::from(u16::from_be_bytes([high, low])),
        [high] => u32::from(high) << 8,
        _ => 0,
    });
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

/// An IPv4 header before `payload` of protocol `protocol`.
fn ipv4(from: Ipv4Addr, to: Ipv4Addr, protocol: u8, payload: &[u8]) -> Vec<u8> {
    let mut header = vec![0x45, 0];
    header.extend((20 + payload.len() as u16).to_be_bytes());
    header.extend([0, 1, 0, 0, 64, protocol, 0, 0]);
    header.extend(from.octets());
    header.extend(to.octets());
    let checksum = !sum(&header);
    header[10..12].copy_from_slice(&checksum.to_be_bytes());
    [header, payload.to_vec()].concat()
}

/// The sum over the addresses that the sender has to begin with when the sum is to be finished.
fn pseudo(from: Ipv4Addr, to: Ipv4Addr, protocol: u8, len: usize) -> u16 {
    let mut bytes = [from.octets(), to.octets()].concat();
    bytes.extend([0, protocol]);
    bytes.extend((len as u16).to_be_bytes());
    sum(&bytes)
}

fn echo(kind: u8, payload: &[u8]) -> Vec<u8> {
    let mut message = vec![kind, 0, 0, 0, 0x12, 0x34, 0, 1];
    message.extend(payload);
    let checksum = !sum(&message);
    message[2..4].copy_from_slice(&checksum.to_be_bytes());
    message
}

/// A large TCP segment: Ethernet, IPv4, TCP and `len` bytes.
fn tcp(to: [u8; 6], from: [u8; 6], addresses: (Ipv4Addr, Ipv4Addr), len: usize) -> Vec<u8> {
    let (source, destination) = addresses;
    let mut segment = vec![0x30, 0x39, 0x10, 0x92, 0, 0, 0, 1, 0, 0, 0, 1, 0x50, 0x10, 0xff, 0xff];
    segment.extend(pseudo(source, destination, 6, 20 + len).to_be_bytes());
    segment.extend([0, 0]);
    segment.extend(frame(len, 7));
    let mut bytes = ethernet(to, from, 0x0800);
    bytes.extend(ipv4(source, destination, 6, &segment));
    bytes
}

/// The header for such a segment: flags, kind, 54 bytes of headers, 1448 bytes per packet.
const TSO: [u8; 12] = [1, 1, 54, 0, 0xa8, 5, 34, 0, 16, 0, 0, 0];

fn is_tcp(frame: &[u8]) -> bool {
    frame[12..14] == [8, 0] && frame[23] == 6
}

#[test]
fn the_host_answers_the_guests_echo() {
    in_namespace(|| {
        let mut guest = Guest::new("cube0", 0);
        let host = guest.resolve();
        for len in [0, 56, 1400] {
            let message = echo(8, &frame(len, 1));
            let mut request = ethernet(host, guest.mac, 0x0800);
            request.extend(ipv4(GUEST, HOST, 1, &message));
            guest.send([0; 12], &request);
            let answer = guest.wait(|frame| frame[12..14] == [8, 0] && frame[34] == 0);
            assert_eq!(answer[12 + 34..][..8 + len], echo(0, &frame(len, 1)));
        }
    });
}

#[test]
fn the_guest_answers_the_hosts_datagrams() {
    in_namespace(|| {
        let mut guest = Guest::new("cube0", 0);
        let socket = UdpSocket::bind((HOST, 5000)).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        socket.send_to(b"who is there", (GUEST, 7)).unwrap();
        let host = guest.be_resolved();
        let question = guest.wait(|frame| frame[12..14] == [8, 0] && frame[23] == 17);
        assert_eq!(&question[12 + 42..][..12], b"who is there");
        // With a sum that is left to the host: only the addresses are in it.
        let text = b"nobody but us";
        let len = 8 + text.len();
        let mut datagram = vec![0, 7, 0x13, 0x88];
        datagram.extend((len as u16).to_be_bytes());
        datagram.extend(pseudo(GUEST, HOST, 17, len).to_be_bytes());
        datagram.extend(text);
        let mut answer = ethernet(host, guest.mac, 0x0800);
        answer.extend(ipv4(GUEST, HOST, 17, &datagram));
        guest.send([1, 0, 0, 0, 0, 0, 34, 0, 6, 0, 0, 0], &answer);
        let mut received = [0; 64];
        let (count, from) = socket.recv_from(&mut received).unwrap();
        assert_eq!((&received[..count], from), (&text[..], SocketAddr::from((GUEST, 7))));
    });
}

#[test]
fn a_large_segment_of_the_host_arrives_in_one_piece() {
    in_namespace(|| {
        let mut guest = Guest::new("cube0", 0);
        let frames = Frames::on("cube0");
        let large = tcp(guest.mac, [2, 0, 0, 0, 0, 1], (HOST, GUEST), 60_000);
        frames.send(TSO[..10].try_into().unwrap(), &large).unwrap();
        let packet = guest.wait(is_tcp);
        assert_eq!(packet[..2], [1, 1]);
        assert_eq!(packet[4..10], TSO[4..10]);
        assert_eq!(usize::from(packet[10]), (60_000 + 54 + 12_usize).div_ceil(2048));
        assert!(packet[12..] == large, "the segment has changed");
    });
}

#[test]
fn a_guest_without_segmentation_gets_packets() {
    in_namespace(|| {
        let unwanted = feature::GUEST_TSO4 | feature::GUEST_TSO6;
        let mut guest = Guest::new("cube0", unwanted);
        let frames = Frames::on("cube0");
        let large = tcp(guest.mac, [2, 0, 0, 0, 0, 1], (HOST, GUEST), 60_000);
        frames.send(TSO[..10].try_into().unwrap(), &large).unwrap();
        let mut data: Vec<u8> = Vec::new();
        while data.len() < 60_000 {
            let packet = guest.wait(is_tcp);
            assert!(packet[1] == 0 && packet.len() <= 12 + 14 + 1500);
            data.extend(&packet[12 + 54..]);
        }
        assert!(data == frame(60_000, 7));
    });
}

#[test]
fn a_large_segment_of_the_guest_reaches_the_host_in_one_piece() {
    in_namespace(|| {
        let mut guest = Guest::new("cube0", 0);
        let frames = Frames::on("cube0");
        let host = guest.resolve();
        let large = tcp(host, guest.mac, (GUEST, HOST), 60_000);
        guest.send(TSO, &large);
        let mut got = None;
        let came = eventually(PATIENCE, || {
            got = frames.receive().filter(|packet| is_tcp(&packet[10..]));
            got.is_some()
        });
        assert!(came);
        let got = got.unwrap();
        assert_eq!(got[..2], [1, 1]);
        assert!(got[10..] == large);
    });
}

#[test]
fn the_kernel_gets_nothing_that_it_would_refuse() {
    in_namespace(|| {
        let mut guest = Guest::new("cube0", 0);
        let host = guest.resolve();
        let before = guest.bench.handle.counters();
        let large = tcp(host, guest.mac, (GUEST, HOST), 3000);
        for header in [
            [1, 1, 54, 0, 0xa8, 5, 0xff, 0xff, 16, 0, 0, 0],
            [1, 1, 0xff, 0xff, 0xa8, 5, 34, 0, 16, 0, 0, 0],
            [1, 9, 54, 0, 0xa8, 5, 34, 0, 16, 0, 0, 0],
            [1, 1, 54, 0, 0, 0, 34, 0, 16, 0, 0, 0],
        ] {
            guest.send(header, &large);
        }
        let after = guest.bench.handle.counters();
        assert_eq!(after.tx_dropped - before.tx_dropped, 4);
        assert_eq!(after.guest_faults - before.guest_faults, 4);
        guest.resolve();
    });
}

#[test]
fn a_deleted_interface_takes_the_link_down_and_not_the_guest() {
    in_namespace(|| {
        let mut config = config();
        config.id = DeviceId::new("net-deleted");
        let taps = Tap::open_named("cube0", 1, None).unwrap();
        let mut guest = Guest::with(taps, 0, config);
        guest.resolve();
        host::delete("cube0");
        guest.bench.driver.wait_interrupt(CONFIG_CHANGE);
        assert_eq!(guest.bench.status(), 0);
        expect_idle("net-deleted");
        let dropped = guest.bench.handle.counters().tx_dropped;
        guest.bench.transmit(&packet(60, 1));
        guest.bench.counts(|counters| counters.tx_dropped, dropped + 1);
        guest.bench.driver.pause();
        guest.bench.driver.resume();
        guest.bench.driver.reset();
        guest.bench.driver.initialize();
        assert_eq!(guest.bench.status(), 0);
        guest.bench.transmit(&packet(60, 1));
    });
}

#[test]
fn an_interface_that_is_down_for_a_while_takes_the_link_down_for_a_while() {
    in_namespace(|| {
        let mut config = config();
        config.id = DeviceId::new("net-down");
        let taps = Tap::open_named("cube0", 1, None).unwrap();
        let mut guest = Guest::with(taps, 0, config);
        guest.resolve();
        for round in 0..3 {
            host::set_up("cube0", false);
            guest.bench.transmit(&packet(60, 1));
            guest.bench.driver.wait_interrupt(CONFIG_CHANGE);
            assert_eq!(guest.bench.status(), 0);
            expect_idle("net-down");
            host::set_up("cube0", true);
            guest.bench.driver.wait_interrupt(CONFIG_CHANGE);
            assert_eq!(guest.bench.status(), LINK_UP);
            host::set_address("cube0", HOST);
            guest.resolve();
            assert_eq!(guest.bench.handle.counters().link_losses, round + 1);
        }
    });
}

#[test]
fn a_link_over_an_interface_that_is_not_up_yet_comes_with_it() {
    in_namespace(|| {
        let taps = Tap::open_named("cube0", 1, None).unwrap();
        host::set_up("cube0", false);
        let mut bench = Bench::on(taps, Vec::new(), 0, config());
        assert_eq!(bench.status(), 0);
        bench.driver.pause();
        bench.driver.resume();
        assert_eq!(bench.status(), 0);
        host::set_up("cube0", true);
        assert!(eventually(PATIENCE, || bench.handle.link_is_up()));
        assert_eq!(bench.status(), LINK_UP);
        bench.driver.wait_interrupt(CONFIG_CHANGE);
    });
}

#[test]
fn a_flood_of_the_host_without_buffers_costs_nothing_and_ends() {
    in_namespace(|| {
        let mut config = config();
        config.id = DeviceId::new("net-kflood");
        let taps = Tap::open_named("cube0", 1, None).unwrap();
        host::set_address("cube0", HOST);
        let mut bench = Bench::on(taps, Vec::new(), 0, config);
        let frames = Frames::on("cube0");
        let filler = [ethernet(bench.handle.mac(), [2, 0, 0, 0, 0, 1], 0x88b5), frame(500, 3)];
        // More than the interface keeps.
        for _ in 0..3000 {
            let _ = frames.send([0; 10], &filler.concat());
        }
        bench.counts(|counters| counters.rx_stalled, 1);
        expect_idle("net-kflood");
        for _ in 0..100 {
            let buffer = bench.offer(2048);
            assert_eq!(bench.arrived(&[(buffer, 2048)])[12..], filler.concat());
        }
        let sent = [ethernet([0xff; 6], bench.handle.mac(), 0x88b5), frame(60, 4)].concat();
        bench.transmit(&[vec![0; 12], sent.clone()].concat());
        let heard = |packet: Vec<u8>| packet[10..] == sent;
        assert!(eventually(PATIENCE, || frames.receive().is_some_and(heard)));
    });
}

#[test]
fn the_host_uses_as_many_queues_as_the_guest() {
    in_namespace(|| {
        let taps = Tap::open_named("cube0", 3, None).unwrap();
        let mut bench = Bench::on(taps, Vec::new(), 0, config());
        let frames = Frames::on("cube0");
        for pair in 0..3 {
            for _ in 0..100 {
                let buffer = bench.driver.alloc(2048);
                bench.driver.add(2 * pair, &[Buffer::writable(buffer, 2048)]);
            }
            bench.driver.kick(2 * pair);
        }
        // Frames of many flows, which the host spreads by their ports.
        let flood = |bench: &Bench, count: u16| {
            for port in 0..count {
                let mut datagram = [0x1000 + 17 * port, 7, 108, 0].map(u16::to_be_bytes).concat();
                datagram.extend([0; 100]);
                let mut bytes = ethernet(bench.handle.mac(), [2, 0, 0, 0, 0, 1], 0x0800);
                bytes.extend(ipv4(HOST, GUEST, 17, &datagram));
                frames.send([0; 10], &bytes).unwrap();
            }
        };
        flood(&bench, 50);
        assert!(eventually(PATIENCE, || bench.driver.used_index(0) == 50));
        let command = bench.driver.alloc_with(&[4, 0, 3, 0]);
        let answer = bench.driver.alloc_with(&[9]);
        let chain = [Buffer::readable(command, 4), Buffer::writable(answer, 1)];
        assert_eq!(bench.driver.exchange(6, &chain), 1);
        assert_eq!(bench.driver.bytes(answer, 1), [0]);
        flood(&bench, 50);
        let used = |bench: &Bench| [0, 2, 4].map(|queue| bench.driver.used_index(queue));
        assert!(
            eventually(PATIENCE, || used(&bench).iter().sum::<u16>() == 100),
            "{:?}",
            used(&bench)
        );
        assert!(used(&bench)[1..].iter().any(|&count| count > 0), "{:?}", used(&bench));
    });
}

#[test]
fn resets_during_traffic_leak_nothing_and_lose_nothing_but_frames() {
    in_namespace(|| {
        let mut guest = Guest::new("cube0", 0);
        let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
        let before = open();
        let filler = [ethernet([0xff; 6], guest.mac, 0x88b5), frame(500, 3)].concat();
        let frames = Frames::on("cube0");
        for _ in 0..500 {
            for _ in 0..4 {
                let _ = frames.send([0; 10], &filler);
                let buffer = guest.bench.driver.alloc_with(&[vec![0; 12], filler.clone()].concat());
                guest.bench.driver.add(TX, &[Buffer::readable(buffer, 12 + 514)]);
                guest.bench.offer(2048);
            }
            guest.bench.driver.kick(TX);
            guest.bench.driver.reset();
            guest.bench.driver.initialize();
        }
        // Others of this process open files too; a leak would be one per reset.
        assert!(open().saturating_sub(before) < 250);
        let buffer = guest.bench.offer(2048);
        frames.send([0; 10], &filler).unwrap();
        assert_eq!(guest.bench.arrived(&[(buffer, 2048)])[12..], filler);
    });
}

#[test]
fn the_network_learns_where_the_guest_is() {
    in_namespace(|| {
        let guest = Guest::new("cube0", 0);
        let frames = Frames::on("cube0");
        guest.bench.handle.announce();
        let is_announcement = |packet: &Vec<u8>| packet[10 + 12..10 + 14] == [0x80, 0x35];
        let mut got = None;
        eventually(Duration::from_secs(5), || {
            got = frames.receive().filter(is_announcement);
            got.is_some()
        });
        assert_eq!(got.unwrap()[10 + 6..10 + 12], guest.mac);
    });
}
