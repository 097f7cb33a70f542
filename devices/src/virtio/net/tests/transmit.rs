//! From the guest onto the wire.

use std::sync::atomic::{AtomicBool, Ordering};

use super::bench::{Bench, Peer, TX, config, expect_idle, frame, packet};
use crate::ids::DeviceId;
use crate::memory::{Bytes, GuestAddress};
use crate::testing::{Buffer, HIGH_RAM, HOLE, metric};
use crate::virtio::net::feature;

#[test]
fn a_frame_is_sent_as_it_is() {
    let mut bench = Bench::new();
    for (seed, len) in [14, 60, 1514, 9014, 65_550].into_iter().enumerate() {
        bench.transmit(&packet(len, seed as u8));
        assert!(bench.peer().wait() == packet(len, seed as u8), "{len} bytes have changed");
    }
    let counters = bench.handle.counters();
    assert_eq!((counters.tx_frames, counters.tx_dropped), (5, 0));
    assert_eq!(counters.tx_bytes, 14 + 60 + 1514 + 9014 + 65_550);
    assert_eq!(metric(&bench.handle, "net_sent_frames_total"), 5);
    assert_eq!(metric(&bench.handle, "net_sent_bytes_total"), counters.tx_bytes);
    assert_eq!(metric(&bench.handle, "net_received_frames_total"), 0);
}

/// H-11: header and frame in pieces of any size, and both memories.
#[test]
fn h11_a_frame_in_pieces_is_sent_as_one() {
    let mut bench = Bench::new();
    let whole = packet(200, 5);
    for size in [1, 2, 5, 11, 12, 13, 211] {
        let pieces: Vec<_> = whole
            .chunks(size)
            .map(|piece| Buffer::readable(bench.driver.alloc_with(piece), piece.len() as u32))
            .collect();
        assert_eq!(bench.driver.exchange(TX, &pieces), 0);
        assert_eq!(bench.peer().wait(), whole);
        let head = bench.driver.add_indirect(TX, &pieces);
        bench.driver.kick(TX);
        assert_eq!(bench.driver.wait_used(TX).head, head);
        assert_eq!(bench.peer().wait(), whole);
    }
    bench.driver.memory().write_slice(&whole[100..], HIGH_RAM).unwrap();
    let low = bench.driver.alloc_with(&whole[..100]);
    let room = bench.driver.alloc(64);
    let pieces = [
        Buffer::readable(low, 100),
        Buffer::readable(GuestAddress(0), 0),
        Buffer::readable(HIGH_RAM, 112),
        // Not for us, and left alone.
        Buffer::writable(room, 64),
    ];
    assert_eq!(bench.driver.exchange(TX, &pieces), 0);
    assert_eq!(bench.peer().wait(), whole);
    assert_eq!(bench.driver.bytes(room, 64), [0; 64]);
}

#[test]
fn many_frames_keep_their_order() {
    let mut bench = Bench::new();
    let frames: Vec<_> = (0..200).map(|seed| packet(100, seed)).collect();
    for packet in &frames {
        let buffer = bench.driver.alloc_with(packet);
        bench.driver.add(TX, &[Buffer::readable(buffer, packet.len() as u32)]);
    }
    bench.driver.kick(TX);
    for packet in &frames {
        assert_eq!(bench.peer().wait(), *packet);
    }
    for _ in &frames {
        assert_eq!(bench.driver.wait_used(TX).len, 0);
    }
}

#[test]
fn a_full_wire_is_waited_for_without_effort_and_nothing_is_lost_or_doubled() {
    let (tap, peer) = Peer::new();
    Peer::shorten(&tap);
    let mut config = config();
    config.id = DeviceId::new("net-full");
    let mut bench = Bench::on(vec![tap], vec![peer], 0, config);
    for seed in 0..250 {
        let buffer = bench.driver.alloc_with(&packet(1000, seed));
        bench.driver.add(TX, &[Buffer::readable(buffer, 1012)]);
    }
    bench.driver.kick(TX);
    bench.counts(|counters| counters.tx_blocked, 1);
    expect_idle("net-full");
    for seed in 0..250 {
        assert_eq!(bench.peer().wait(), packet(1000, seed));
    }
    for _ in 0..250 {
        bench.driver.wait_used(TX);
    }
    assert_eq!(bench.handle.counters().tx_frames, 250);
    assert_eq!(bench.handle.counters().tx_dropped, 0);
}

#[test]
fn a_reset_while_the_wire_is_full_is_possible() {
    let (tap, peer) = Peer::new();
    Peer::shorten(&tap);
    let mut bench = Bench::on(vec![tap], vec![peer], 0, config());
    for _ in 0..20 {
        for seed in 0..100 {
            let buffer = bench.driver.alloc_with(&packet(1000, seed));
            bench.driver.add(TX, &[Buffer::readable(buffer, 1012)]);
        }
        bench.driver.kick(TX);
        bench.driver.reset();
        bench.driver.initialize();
    }
    bench.peer().drain();
    bench.transmit(&packet(60, 1));
}

// --- H-44, H-45: what the guest says about a frame ---

/// Sends `packet`, expects it to be dropped, and the next one to arrive.
fn is_dropped(bench: &mut Bench, name: &str, packet_bytes: &[u8]) {
    let before = bench.handle.counters();
    bench.transmit(packet_bytes);
    let after = bench.handle.counters();
    assert_eq!(after.tx_dropped, before.tx_dropped + 1, "{name}: not counted");
    assert_eq!(after.guest_faults, before.guest_faults + 1, "{name}: not counted as a fault");
    bench.transmit(&packet(60, 1));
    assert_eq!(bench.peer().wait(), packet(60, 1), "{name}: something else was sent");
    assert!(!bench.driver.needs_reset(), "{name}");
}

/// A header: flags, kind, then length of headers, segment size, start and place of the sum.
fn with_header(flags: u8, kind: u8, words: [u16; 4], len: usize) -> Vec<u8> {
    let mut bytes = vec![flags, kind];
    bytes.extend(words.iter().flat_map(|word| word.to_le_bytes()));
    bytes.extend([0, 0]);
    bytes.extend(frame(len, 9));
    bytes
}

#[test]
fn h44_headers_that_point_outside_of_the_frame_are_dropped() {
    let mut bench = Bench::new();
    let tcp = [54, 1448, 34, 16];
    for (name, packet) in [
        ("sum starts at the end", with_header(1, 0, [0, 0, 60, 0], 60)),
        ("sum ends behind the end", with_header(1, 0, [0, 0, 34, 25], 60)),
        ("sum far behind the end", with_header(1, 0, [0, 0, u16::MAX, u16::MAX], 60)),
        ("sum in the Ethernet header", with_header(1, 0, [0, 0, 0, 0], 60)),
        ("kind that does not exist", with_header(1, 2, tcp, 3000)),
        ("kind of all ones", with_header(1, 0xff, tcp, 3000)),
        ("congestion notification of nothing", with_header(1, 0x80, tcp, 3000)),
        ("segments of no bytes", with_header(1, 1, [54, 0, 34, 16], 3000)),
        ("segments without a sum", with_header(0, 1, tcp, 3000)),
        ("headers longer than the frame", with_header(1, 1, [3001, 1448, 34, 16], 3000)),
        ("segments with a sum outside", with_header(1, 1, [54, 1448, 2999, 16], 3000)),
    ] {
        is_dropped(&mut bench, name, &packet);
    }
}

#[test]
fn h45_frames_that_are_none_are_dropped() {
    let mut bench = Bench::new();
    for (name, packet) in [
        ("one byte", vec![0; 1]),
        ("less than a header", vec![0; 11]),
        ("header only", vec![0; 12]),
        ("less than an Ethernet header", packet(13, 1)),
        ("larger than any packet", packet(65_551, 1)),
        ("much larger", packet(1 << 20, 1)),
    ] {
        is_dropped(&mut bench, name, &packet);
    }
    let room = bench.driver.alloc(64);
    assert_eq!(bench.driver.exchange(TX, &[Buffer::writable(room, 64)]), 0);
    assert_eq!(bench.driver.exchange(TX, &[Buffer::readable(room, 0)]), 0);
    bench.counts(|counters| counters.tx_dropped, 8);
}

#[test]
fn offloads_that_were_not_negotiated_are_dropped() {
    let unwanted = feature::CSUM
        | feature::HOST_TSO4
        | feature::HOST_TSO6
        | feature::HOST_ECN
        | feature::HOST_UFO;
    let mut bench = Bench::without(unwanted);
    is_dropped(&mut bench, "a sum", &with_header(1, 0, [0, 0, 34, 16], 60));
    for kind in [1, 3, 4, 0x81] {
        let packet = with_header(1, kind, [54, 1448, 34, 16], 3000);
        is_dropped(&mut bench, "segments", &packet);
    }
}

#[test]
fn the_host_gets_no_more_of_the_header_than_has_a_meaning() {
    let mut bench = Bench::new();
    let large = with_header(1, 1, [54, 1448, 34, 16], 30_000);
    bench.transmit(&large);
    assert!(bench.peer().wait() == large);
    // Flags of receiving, hints without segmentation, a number of buffers: all without a meaning.
    let mut odd = with_header(0xfe, 0, [7, 7, 7, 7], 60);
    odd[10..12].copy_from_slice(&[9, 9]);
    bench.transmit(&odd);
    assert_eq!(bench.peer().wait(), with_header(0, 0, [0; 4], 60));
}

/// H-10: what is checked is what is sent, whatever another vCPU writes meanwhile.
#[test]
fn h10_a_header_that_changes_meanwhile_is_sent_as_it_was_checked() {
    let mut bench = Bench::new();
    let good = with_header(1, 0, [0, 0, 34, 16], 60);
    let bad = with_header(0xff, 0xff, [0xffff; 4], 60);
    let buffer = bench.driver.alloc_with(&good);
    let memory = bench.driver.memory().clone();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                memory.write_slice(&bad[..12], buffer).unwrap();
                memory.write_slice(&good[..12], buffer).unwrap();
            }
        });
        for _ in 0..2000 {
            bench.driver.exchange(TX, &[Buffer::readable(buffer, 72)]);
            if let Some(sent) = bench.peer().receive() {
                let (start, place) = ([sent[6], sent[7]], [sent[8], sent[9]]);
                let end = u16::from_le_bytes(start) + u16::from_le_bytes(place) + 2;
                assert!(sent[0] <= 1 && sent[1] == 0 && end <= 60, "{:?}", &sent[..12]);
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert!(!bench.driver.needs_reset());
}

/// H-12: one bad piece among many, and nothing is sent.
#[test]
fn h12_a_chain_with_a_bad_piece_sends_nothing() {
    let mut bench = Bench::new();
    let buffer = bench.driver.alloc(4096);
    let mut pieces: Vec<_> =
        (0..200).map(|at| Buffer::readable(GuestAddress(buffer.0 + at), 8)).collect();
    pieces[100] = Buffer::readable(HOLE, 8);
    bench.driver.add(TX, &pieces);
    bench.driver.kick(TX);
    bench.driver.wait_interrupt(2);
    assert!(bench.driver.needs_reset());
    assert_eq!(bench.peer().receive(), None);
    bench.driver.reset();
    bench.driver.initialize();
    bench.transmit(&packet(60, 1));
    assert_eq!(bench.peer().wait(), packet(60, 1));
}
