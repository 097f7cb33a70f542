use std::cell::RefCell;

use super::bench::{Peer, RX, TX, config, frame, packet};
use crate::testing::{Buffer, Conformance, GuestDriver};
use crate::virtio::net::Net;

/// One frame each way, over whichever of `wires` is that of the device.
fn both_ways(driver: &mut GuestDriver, wires: &[Peer]) {
    for wire in wires {
        wire.drain();
    }
    let sent = driver.alloc_with(&packet(60, 1));
    assert_eq!(driver.exchange(TX, &[Buffer::readable(sent, 72)]), 0);
    let buffer = driver.alloc(2048);
    driver.add(RX, &[Buffer::writable(buffer, 2048)]);
    driver.kick(RX);
    // Those that are full have enough in them.
    for wire in wires {
        wire.send(&frame(60, 2));
    }
    assert_eq!(driver.wait_used(RX).len, 72);
    assert_eq!(driver.bytes(buffer, 72)[12..], frame(60, 2));
}

fn check(pairs: usize, answers: &[u16]) {
    let wires = RefCell::new(Vec::new());
    let make = |executor| {
        let (taps, peers): (Vec<_>, Vec<_>) = (0..pairs).map(|_| Peer::new()).unzip();
        let mut wires = wires.borrow_mut();
        wires.retain(|wire: &Peer| !wire.is_gone());
        wires.extend(peers);
        Box::new(Net::new(executor, taps, config()).unwrap()) as Box<_>
    };
    Conformance::new(make)
        .exercise(|driver| both_ways(driver, &wires.borrow()))
        .answers(answers)
        .run();
}

#[test]
fn conforms() {
    check(1, &[TX, 2]);
}

#[test]
fn conforms_with_several_pairs() {
    check(2, &[TX, 3, 4]);
}
