//! From the wire into the guest.

use std::time::{Duration, Instant};

use super::bench::{Bench, Peer, RX, config, expect_idle, frame, packet};
use crate::ids::DeviceId;
use crate::memory::GuestAddress;
use crate::testing::{Buffer, HIGH_RAM};
use crate::virtio::net::feature;

/// Bytes of a buffer as Linux makes them for small frames.
const BUFFER: usize = 1536;

fn offer_many(bench: &mut Bench, count: usize, len: usize) -> Vec<(GuestAddress, usize)> {
    (0..count).map(|_| (bench.offer(len), len)).collect()
}

#[test]
fn a_frame_arrives_as_it_was_sent() {
    let mut bench = Bench::new();
    for (seed, len) in [14, 60, 1514, 1524].into_iter().enumerate() {
        let buffer = bench.offer(BUFFER);
        assert!(bench.peer().send(&frame(len, seed as u8)));
        let got = bench.arrived(&[(buffer, BUFFER)]);
        assert_eq!(got[..12], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0]);
        assert_eq!(got[12..], frame(len, seed as u8));
    }
    let counters = bench.handle.counters();
    assert_eq!((counters.rx_frames, counters.rx_bytes), (4, 14 + 60 + 1514 + 1524));
    assert_eq!(counters.rx_dropped, 0);
}

#[test]
fn a_large_frame_is_spread_over_buffers_and_says_over_how_many() {
    for len in [1525, 3059, 3060, 3061, 60_000, 65_550] {
        let mut bench = Bench::new();
        let buffers = offer_many(&mut bench, 60, BUFFER);
        assert!(bench.peer().send(&frame(len, 3)));
        let got = bench.arrived(&buffers);
        assert_eq!(usize::from(got[10]), (len + 12).div_ceil(BUFFER));
        assert!(got[12..] == frame(len, 3), "the frame of {len} bytes has changed");
    }
}

#[test]
fn large_and_small_frames_in_turn_arrive_whole() {
    let mut bench = Bench::new();
    let mut buffers = offer_many(&mut bench, 250, BUFFER);
    let lens = [60, 60_000, 60, 1514, 65_550, 2000, 60, 9000, 40_000];
    for (seed, len) in lens.into_iter().enumerate() {
        assert!(bench.peer().send(&frame(len, seed as u8)));
        let got = bench.arrived(&buffers);
        assert!(got[12..] == frame(len, seed as u8), "frame {seed} of {len} bytes has changed");
        buffers.drain(..usize::from(got[10]));
    }
    assert_eq!(bench.handle.counters().rx_dropped, 0);
}

#[test]
fn many_frames_keep_their_order() {
    let mut bench = Bench::new();
    let mut buffers = offer_many(&mut bench, 200, BUFFER);
    for seed in 0..200 {
        while !bench.peer().send(&frame(100, seed)) {
            std::thread::yield_now();
        }
    }
    for seed in 0..200 {
        assert_eq!(bench.arrived(&buffers)[12..], frame(100, seed));
        buffers.remove(0);
    }
}

#[test]
fn buffers_of_many_pieces_and_of_both_memories_are_filled() {
    let mut bench = Bench::new();
    let places: Vec<u64> = (0..200).map(|at| bench.driver.alloc(7).0 + (at % 3)).collect();
    let mut pieces: Vec<_> =
        places.iter().map(|&at| Buffer::writable(GuestAddress(at), 1)).collect();
    pieces.push(Buffer::writable(GuestAddress(0), 0));
    pieces.push(Buffer::writable(HIGH_RAM, 5000));
    bench.driver.add_indirect(RX, &pieces);
    bench.driver.kick(RX);
    assert!(bench.peer().send(&frame(3000, 9)));
    assert_eq!(bench.driver.wait_used(RX).len, 3012);
    let mut got: Vec<u8> =
        places.iter().flat_map(|&at| bench.driver.bytes(GuestAddress(at), 1)).collect();
    got.extend(bench.driver.bytes(HIGH_RAM, 3012 - 200));
    assert!(got[12..] == frame(3000, 9));
}

#[test]
fn more_pieces_than_the_kernel_takes_at_once_are_filled_all_the_same() {
    let mut bench = Bench::new();
    let memory = bench.driver.alloc(250 * 256);
    for buffer in 0..10_u64 {
        let start = memory.0 + buffer * 250;
        let pieces: Vec<_> =
            (0..250).map(|at| Buffer::writable(GuestAddress(start + at), 1)).collect();
        bench.driver.add_indirect(RX, &pieces);
    }
    bench.driver.kick(RX);
    assert!(bench.peer().send(&frame(2300, 5)));
    for _ in 0..9 {
        assert_eq!(bench.driver.wait_used(RX).len, 250);
    }
    assert_eq!(bench.driver.wait_used(RX).len, 2312 - 9 * 250);
    assert!(bench.driver.bytes(memory, 2312)[12..] == frame(2300, 5));
}

#[test]
fn without_merging_a_frame_takes_one_buffer_or_none() {
    let mut bench = Bench::without(feature::MRG_RXBUF);
    let buffer = bench.offer(BUFFER);
    assert!(bench.peer().send(&frame(1525, 1)));
    bench.counts(|counters| counters.rx_dropped, 1);
    assert!(bench.peer().send(&frame(1524, 2)));
    let got = bench.arrived(&[(buffer, BUFFER)]);
    assert_eq!(got, [vec![0; 10], vec![1, 0], frame(1524, 2)].concat());
    // One buffer is as large as the driver has made it.
    let (head, tail) = (bench.driver.alloc(12), bench.driver.alloc(65_550));
    bench.driver.add(RX, &[Buffer::writable(head, 12), Buffer::writable(tail, 65_550)]);
    bench.driver.kick(RX);
    assert!(bench.peer().send(&frame(65_550, 4)));
    assert_eq!(bench.driver.wait_used(RX).len, 65_562);
    assert!(bench.driver.bytes(tail, 65_550) == frame(65_550, 4));
}

#[test]
fn a_frame_larger_than_any_is_dropped_and_the_next_arrives() {
    let mut bench = Bench::new();
    let buffers = offer_many(&mut bench, 4, BUFFER);
    assert!(bench.peer().send(&frame(100_000, 1)));
    bench.counts(|counters| counters.rx_dropped, 1);
    assert!(bench.peer().send(&frame(60, 2)));
    assert_eq!(bench.arrived(&buffers)[12..], frame(60, 2));
}

#[test]
fn packets_that_are_no_frames_are_dropped() {
    let mut bench = Bench::new();
    let buffer = bench.offer(BUFFER);
    for len in [1, 11, 12, 25] {
        assert!(bench.peer().send_raw(&vec![0; len]));
    }
    bench.counts(|counters| counters.rx_dropped, 4);
    assert!(bench.peer().send(&frame(14, 2)));
    assert_eq!(bench.arrived(&[(buffer, BUFFER)])[12..], frame(14, 2));
}

// --- H-46: no buffers, and too few ---

#[test]
fn a_flood_without_buffers_costs_nothing_and_ends_with_the_first_buffer() {
    let (tap, peer) = Peer::new();
    let mut config = config();
    config.id = DeviceId::new("net-flood");
    let mut bench = Bench::on(vec![tap], vec![peer], 0, config);
    let mut sent = 0;
    // Both sides full: the wire and, with no buffers at all, the queue.
    while bench.peer().send(&frame(1000, sent as u8)) {
        sent += 1;
    }
    assert!(sent > 10);
    bench.counts(|counters| counters.rx_stalled, 1);
    expect_idle("net-flood");
    for seed in 0..sent {
        let buffer = bench.offer(BUFFER);
        assert_eq!(bench.arrived(&[(buffer, BUFFER)])[12..], frame(1000, seed as u8));
    }
    assert_eq!(bench.handle.counters().rx_dropped, 0);
    bench.transmit(&packet(60, 7));
    assert_eq!(bench.peer().wait(), packet(60, 7));
}

#[test]
fn the_same_without_event_indices() {
    let mut bench = Bench::without(crate::virtio::feature::RING_EVENT_IDX);
    for round in 0..50 {
        for seed in 0..5 {
            assert!(bench.peer().send(&frame(1000, round + seed)));
        }
        for seed in 0..5 {
            let buffer = bench.offer(BUFFER);
            assert_eq!(bench.arrived(&[(buffer, BUFFER)])[12..], frame(1000, round + seed));
        }
    }
}

#[test]
fn a_frame_waits_for_the_buffers_that_it_still_needs() {
    let mut bench = Bench::new();
    let mut buffers = offer_many(&mut bench, 3, BUFFER);
    assert!(bench.peer().send(&frame(60_000, 1)));
    bench.counts(|counters| counters.rx_stalled, 1);
    assert_eq!(bench.driver.used_index(RX), 0, "a part of a frame was given to the guest");
    // In several steps, as a guest that is short of memory would.
    for _ in 0..4 {
        buffers.extend(offer_many(&mut bench, 10, BUFFER));
    }
    assert!(bench.arrived(&buffers)[12..] == frame(60_000, 1));
    assert_eq!(bench.handle.counters().rx_dropped, 0);
}

#[test]
fn a_frame_for_which_no_buffers_come_is_dropped_and_smaller_ones_arrive() {
    let mut bench = Bench::new();
    let buffers = offer_many(&mut bench, 3, BUFFER);
    let start = Instant::now();
    assert!(bench.peer().send(&frame(60_000, 1)));
    assert!(bench.peer().send(&frame(60, 2)));
    assert_eq!(bench.arrived(&buffers)[12..], frame(60, 2));
    assert!(start.elapsed() > Duration::from_millis(900), "the guest got no time");
    assert_eq!(bench.handle.counters().rx_dropped, 1);
}

#[test]
fn a_frame_larger_than_all_buffers_of_the_queue_does_not_wait() {
    let mut bench = Bench::new();
    let buffers = offer_many(&mut bench, 256, 100);
    assert!(bench.peer().send(&frame(60_000, 1)));
    assert!(bench.peer().send(&frame(200, 2)));
    assert_eq!(bench.arrived(&buffers)[12..], frame(200, 2));
    assert_eq!(bench.handle.counters().rx_stalled, 0);
}

#[test]
fn a_held_frame_ends_with_a_pause_and_its_buffers_are_used_again() {
    let mut bench = Bench::new();
    let buffers = offer_many(&mut bench, 3, BUFFER);
    assert!(bench.peer().send(&frame(60_000, 1)));
    bench.counts(|counters| counters.rx_stalled, 1);
    bench.driver.pause();
    assert_eq!(bench.handle.counters().rx_dropped, 1);
    bench.driver.resume();
    assert!(bench.peer().send(&frame(3000, 2)));
    assert!(bench.arrived(&buffers)[12..] == frame(3000, 2));
}

#[test]
fn buffers_taken_early_are_put_back_by_a_pause() {
    let mut bench = Bench::new();
    let mut buffers = offer_many(&mut bench, 100, BUFFER);
    for seed in 0..20 {
        assert!(bench.peer().send(&frame(2000, seed)));
        let got = bench.arrived(&buffers);
        assert!(got[12..] == frame(2000, seed));
        buffers.drain(..usize::from(got[10]));
        bench.driver.pause();
        bench.driver.resume();
    }
}

// --- hostile buffers ---

#[test]
fn buffers_without_room_for_a_header_are_given_back_empty() {
    let mut bench = Bench::new();
    let small = bench.driver.alloc(64);
    for len in [0, 1, 11] {
        assert_eq!(bench.driver.exchange(RX, &[Buffer::writable(small, len)]), 0);
    }
    assert_eq!(bench.driver.exchange(RX, &[Buffer::readable(small, 64)]), 0);
    assert_eq!(bench.handle.counters().guest_faults, 4);
    // Behind one that is good it waits for its turn.
    let good = bench.offer(BUFFER);
    bench.offer(4);
    assert!(bench.peer().send(&frame(60_000, 1)));
    assert!(bench.peer().send(&frame(60, 2)));
    assert_eq!(bench.arrived(&[(good, BUFFER)])[12..], frame(60, 2));
    assert_eq!(bench.driver.wait_used(RX).len, 0);
    assert!(!bench.driver.needs_reset());
}

#[test]
fn buffers_without_end_that_are_of_no_use_do_not_hold_up_the_other_direction() {
    let mut bench = Bench::new();
    let small = bench.driver.alloc(4);
    for _ in 0..256 {
        bench.driver.add(RX, &[Buffer::writable(small, 4)]);
    }
    bench.driver.kick(RX);
    bench.transmit(&packet(60, 1));
    for _ in 0..256 {
        assert_eq!(bench.driver.wait_used(RX).len, 0);
    }
    let buffer = bench.offer(BUFFER);
    assert!(bench.peer().send(&frame(60, 2)));
    assert_eq!(bench.arrived(&[(buffer, BUFFER)])[12..], frame(60, 2));
}

#[test]
fn what_the_guest_gets_is_marked_as_written() {
    use vm_memory::bitmap::Bitmap;
    use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};
    let mut bench = Bench::new();
    // Where nothing was written yet.
    bench.driver.add(RX, &[Buffer::writable(HIGH_RAM, 15 << 12)]);
    bench.driver.kick(RX);
    assert!(bench.peer().send(&frame(5 << 12, 1)));
    bench.driver.wait_used(RX);
    let region = bench.driver.memory().find_region(HIGH_RAM).unwrap();
    let dirty: Vec<bool> = (0..8).map(|page| region.bitmap().dirty_at(page << 12)).collect();
    assert_eq!(dirty, [true, true, true, true, true, true, false, false]);
}

// --- headers ---

/// A header of the host: flags, kind, segment size.
fn header(flags: u8, kind: u8, size: u16) -> Vec<u8> {
    let [s0, s1] = size.to_le_bytes();
    vec![flags, kind, 54, 0, s0, s1, 34, 0, 16, 0, 0xaa, 0xaa]
}

#[test]
fn offloads_reach_a_guest_that_has_them() {
    let mut bench = Bench::new();
    let buffers = offer_many(&mut bench, 60, BUFFER);
    let packet = [header(1, 1, 1448), frame(60_000, 1)].concat();
    assert!(bench.peer().send_raw(&packet));
    let got = bench.arrived(&buffers);
    assert_eq!(got[..10], packet[..10]);
    assert!(got[12..] == packet[12..]);
}

#[test]
fn frames_with_offloads_that_the_guest_lacks_are_dropped() {
    let mut bench = Bench::without(feature::GUEST_CSUM | feature::GUEST_TSO4);
    let buffers = offer_many(&mut bench, 4, BUFFER);
    assert!(bench.peer().send_raw(&[header(1, 1, 1448), frame(3000, 1)].concat()));
    assert!(bench.peer().send_raw(&[header(1, 0, 0), frame(300, 1)].concat()));
    bench.counts(|counters| counters.rx_dropped, 2);
    assert!(bench.peer().send_raw(&[header(2, 0, 0), frame(300, 3)].concat()));
    let got = bench.arrived(&buffers);
    assert_eq!((got[0], &got[12..]), (0, &frame(300, 3)[..]));
}
