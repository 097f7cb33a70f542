//! The control queue.

use super::bench::{Bench, Peer, config, frame, packet};
use crate::testing::{Buffer, GuestDriver};
use crate::virtio::net::tap::Offloads;
use crate::virtio::net::{Net, feature};

const OK: u8 = 0;
const ERROR: u8 = 1;

/// Sends a command; the answer.
fn command(driver: &mut GuestDriver, queue: u16, bytes: &[u8]) -> u8 {
    let (request, answer) = (driver.alloc_with(bytes), driver.alloc_with(&[0x55; 4]));
    let chain = [Buffer::readable(request, bytes.len() as u32), Buffer::writable(answer, 4)];
    assert_eq!(driver.exchange(queue, &chain), 1);
    assert_eq!(driver.bytes(answer, 4)[1..], [0x55; 3], "more than the answer was written");
    driver.bytes(answer, 1)[0]
}

#[test]
fn the_guest_changes_its_address() {
    let mut bench = Bench::new();
    assert_eq!(command(&mut bench.driver, 2, &[1, 1, 2, 3, 4, 5, 6, 7]), OK);
    assert_eq!(bench.driver.config(0, 6), [2, 3, 4, 5, 6, 7]);
    assert_eq!(bench.handle.mac(), [2, 3, 4, 5, 6, 7]);
    assert_eq!(command(&mut bench.driver, 2, &[1, 1, 1, 3, 4, 5, 6, 7]), ERROR);
    assert_eq!(bench.handle.mac(), [2, 3, 4, 5, 6, 7]);
    bench.driver.reset();
    assert_ne!(bench.handle.mac(), [2, 3, 4, 5, 6, 7]);
}

#[test]
fn commands_in_pieces_are_understood() {
    let mut bench = Bench::new();
    let bytes = [1, 1, 2, 3, 4, 5, 6, 7];
    let mut chain: Vec<_> =
        bytes.iter().map(|&byte| Buffer::readable(bench.driver.alloc_with(&[byte]), 1)).collect();
    let answer = bench.driver.alloc_with(&[9]);
    chain.push(Buffer::writable(answer, 0));
    chain.push(Buffer::writable(answer, 1));
    assert_eq!(bench.driver.exchange(2, &chain), 1);
    assert_eq!(bench.driver.bytes(answer, 1), [OK]);
    assert_eq!(bench.handle.mac(), [2, 3, 4, 5, 6, 7]);
}

#[test]
fn a_command_without_room_for_an_answer_is_not_carried_out() {
    let mut bench = Bench::new();
    let mac = bench.handle.mac();
    let request = bench.driver.alloc_with(&[1, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(bench.driver.exchange(2, &[Buffer::readable(request, 8)]), 0);
    assert_eq!(bench.handle.mac(), mac);
    assert_eq!(bench.handle.counters().guest_faults, 1);
}

#[test]
fn commands_that_were_not_negotiated_are_refused() {
    let unwanted = feature::CTRL_MAC_ADDR | feature::GUEST_ANNOUNCE | feature::CTRL_GUEST_OFFLOADS;
    let mut bench = Bench::without(unwanted);
    for bytes in [
        &[1, 1, 2, 3, 4, 5, 6, 7][..],
        &[3, 0],
        &[4, 0, 1, 0],
        &[5, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        &[0, 0, 1],
        &[],
    ] {
        assert_eq!(command(&mut bench.driver, 2, bytes), ERROR, "{bytes:?}");
    }
}

#[test]
fn the_host_is_asked_for_what_the_guest_takes() {
    let executor = crate::executor::Executor::spawn("net").unwrap();
    let (tap, _peer) = Peer::new();
    let net = Net::new(executor.handle(), vec![tap], config()).unwrap();
    let shared = net.shared.clone();
    let asked = || shared.taps[0].asked();
    let mut driver = GuestDriver::new(Box::new(net));
    driver.initialize_without(feature::GUEST_UFO);
    let all = Offloads::CSUM.and(Offloads::TSO4).and(Offloads::TSO6).and(Offloads::ECN);
    assert_eq!(asked(), all);
    let set = |bits: u64| [&[5, 0][..], &bits.to_le_bytes()].concat();
    assert_eq!(command(&mut driver, 2, &set(feature::GUEST_CSUM)), OK);
    assert_eq!(asked(), Offloads::CSUM);
    // Only of what was negotiated.
    assert_eq!(command(&mut driver, 2, &set(feature::GUEST_UFO)), ERROR);
    assert_eq!(command(&mut driver, 2, &set(1 << 63)), ERROR);
    assert_eq!(asked(), Offloads::CSUM);
    // It stays so over a pause, and not over a reset.
    driver.pause();
    driver.resume();
    assert_eq!(asked(), Offloads::CSUM);
    driver.reset();
    driver.initialize_without(feature::GUEST_UFO);
    assert_eq!(asked(), all);
    driver.reset();
    driver.initialize_without(feature::GUEST_CSUM);
    assert_eq!(asked(), Offloads::none());
}

#[test]
fn frames_for_offloads_that_were_switched_off_meanwhile_are_dropped() {
    let mut bench = Bench::new();
    let buffer = bench.offer(2048);
    assert_eq!(command(&mut bench.driver, 2, &[5, 0, 0, 0, 0, 0, 0, 0, 0, 0]), OK);
    let late = [vec![1, 1, 54, 0, 0xe8, 3, 34, 0, 16, 0, 0, 0], frame(1400, 1)].concat();
    assert!(bench.peer().send_raw(&late));
    bench.counts(|counters| counters.rx_dropped, 1);
    assert!(bench.peer().send(&frame(1400, 2)));
    assert_eq!(bench.arrived(&[(buffer, 2048)])[12..], frame(1400, 2));
}

// --- several pairs ---

/// One frame from the guest on pair `pair`.
fn transmit_on(bench: &mut Bench, pair: u16, seed: u8) {
    let buffer = bench.driver.alloc_with(&packet(60, seed));
    bench.driver.exchange(2 * pair + 1, &[Buffer::readable(buffer, 72)]);
    assert_eq!(bench.peers[usize::from(pair)].wait(), packet(60, seed));
}

fn offer_on(bench: &mut Bench, pair: u16) {
    let buffer = bench.driver.alloc(2048);
    bench.driver.add(2 * pair, &[Buffer::writable(buffer, 2048)]);
    bench.driver.kick(2 * pair);
}

#[test]
fn pairs_are_used_when_the_guest_says_so() {
    let mut bench = Bench::with(3, 0, config());
    for pair in 0..3 {
        offer_on(&mut bench, pair);
        assert!(bench.peers[usize::from(pair)].send(&frame(60, 1)));
    }
    bench.driver.wait_used(0);
    // Only the first one until then.
    assert_eq!((bench.driver.used_index(2), bench.driver.used_index(4)), (0, 0));
    assert_eq!(command(&mut bench.driver, 6, &[4, 0, 2, 0]), OK);
    bench.driver.wait_used(2);
    assert_eq!(bench.driver.used_index(4), 0);
    assert_eq!(command(&mut bench.driver, 6, &[4, 0, 3, 0]), OK);
    bench.driver.wait_used(4);
    for pair in 0..3 {
        transmit_on(&mut bench, pair, 7);
    }
    assert_eq!(command(&mut bench.driver, 6, &[4, 0, 1, 0]), OK);
    offer_on(&mut bench, 1);
    assert!(bench.peers[1].send(&frame(60, 2)));
    offer_on(&mut bench, 0);
    assert!(bench.peers[0].send(&frame(60, 3)));
    bench.driver.wait_used(0);
    assert_eq!(bench.driver.used_index(2), 1);
}

#[test]
fn numbers_of_pairs_that_cannot_be_are_refused() {
    let mut bench = Bench::with(3, 0, config());
    for pairs in [0_u16, 4, 0x100, 0x8000, u16::MAX] {
        let [low, high] = pairs.to_le_bytes();
        assert_eq!(command(&mut bench.driver, 6, &[4, 0, low, high]), ERROR);
    }
}

#[test]
fn pairs_in_use_outlive_a_pause_and_a_restore_and_end_with_a_reset() {
    let mut bench = Bench::with(2, 0, config());
    assert_eq!(command(&mut bench.driver, 4, &[4, 0, 2, 0]), OK);
    bench.driver.pause();
    let record = bench.driver.save();
    let executor = crate::executor::Executor::spawn("net").unwrap();
    let (taps, peers): (Vec<_>, Vec<_>) = (0..2).map(|_| Peer::new()).unzip();
    let net = Net::new(executor.handle(), taps, config()).unwrap();
    let shared = net.shared.clone();
    bench.driver.replace(Box::new(net), record).unwrap();
    bench.peers = peers;
    bench.driver.resume();
    offer_on(&mut bench, 1);
    assert!(bench.peers[1].send(&frame(60, 2)));
    bench.driver.wait_used(2);
    bench.driver.reset();
    assert_eq!(shared.pairs(), 1);
}

#[test]
fn without_several_pairs_the_third_queue_is_the_control_queue() {
    let mut bench = Bench::with(3, feature::MQ, config());
    assert_eq!(command(&mut bench.driver, 2, &[1, 1, 2, 3, 4, 5, 6, 7]), OK);
    assert_eq!(command(&mut bench.driver, 2, &[4, 0, 1, 0]), ERROR);
    transmit_on(&mut bench, 0, 1);
    bench.driver.pause();
    bench.driver.resume();
    transmit_on(&mut bench, 0, 2);
}

#[test]
fn random_commands_change_nothing_that_they_may_not() {
    let mut bench = Bench::with(2, 0, config());
    let mut state = 1_u64;
    let mut random = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
        (state >> 33) as u8
    };
    for round in 0..3000 {
        let len = usize::from(random() % 14);
        let mut bytes: Vec<u8> = (0..len).map(|_| random()).collect();
        if let [class, number, ..] = bytes.as_mut_slice() {
            (*class, *number) = (*class % 7, *number % 3);
        }
        let answer = command(&mut bench.driver, 4, &bytes);
        assert!(answer == OK || answer == ERROR);
        assert_eq!(bench.handle.mac()[0] & 1, 0, "{bytes:?}");
        if round % 500 == 499 {
            bench.driver.reset();
            bench.driver.initialize();
        }
    }
    assert_eq!(bench.handle.counters().tx_dropped, 0);
    transmit_on(&mut bench, 0, 1);
}
