//! The link, the announcement, the saved state, the rates.

use std::time::{Duration, Instant};

use super::bench::{Bench, Peer, RX, TX, config, frame, packet};
use crate::executor::Executor;
use crate::snapshot::{RestoreError, Snapshot, Stateful};
use crate::testing::{Buffer, PATIENCE, eventually, snapshot_roundtrip};
use crate::virtio::VirtioDevice;
use crate::virtio::net::handle::status::{ANNOUNCE, LINK_UP};
use crate::virtio::net::{MacAddress, Net, NetError, NetState, Tap, feature};

const CONFIG_CHANGE: u32 = 2;

#[test]
fn the_configuration_space_says_what_the_card_is() {
    let mut config = config();
    config.mac = Some("02:11:22:33:44:55".parse().unwrap());
    config.mtu = Some(9000);
    let mut bench = Bench::with(3, 0, config);
    assert_eq!(bench.driver.config(0, 6), [2, 0x11, 0x22, 0x33, 0x44, 0x55]);
    assert_eq!(bench.driver.config(6, 6), [1, 0, 3, 0, 0x28, 0x23]);
    assert!(bench.driver.offered() & (feature::MTU | feature::MQ) != 0);
    assert_eq!(bench.handle.mac(), [2, 0x11, 0x22, 0x33, 0x44, 0x55]);
    let mut plain = Bench::new();
    assert_eq!(plain.driver.offered() & (feature::MTU | feature::MQ), 0);
    assert_eq!(plain.driver.config(8, 4), [1, 0, 0, 0]);
}

#[test]
fn cards_that_cannot_be_are_refused() {
    let executor = Executor::spawn("net").unwrap();
    let taps = |count: usize| (0..count).map(|_| Peer::new().0).collect::<Vec<Tap>>();
    for count in [0, 9] {
        let error = Net::new(executor.handle(), taps(count), config()).err().unwrap();
        assert!(matches!(error, NetError::Queues { queues, .. } if queues == count));
    }
    let mut small = config();
    small.mtu = Some(67);
    let error = Net::new(executor.handle(), taps(1), small).err().unwrap().to_string();
    assert!(error.contains("net0 has an MTU of 67 bytes; use 68 or more"), "{error}");
}

#[test]
fn the_guest_is_told_of_a_link_that_goes_and_comes() {
    let mut bench = Bench::new();
    assert_eq!(bench.status(), LINK_UP);
    let generation = bench.driver.read(crate::testing::register::CONFIG_GENERATION);
    bench.handle.set_link(false);
    bench.driver.wait_interrupt(CONFIG_CHANGE);
    assert_eq!(bench.status(), 0);
    assert_ne!(bench.driver.read(crate::testing::register::CONFIG_GENERATION), generation);
    assert!(!bench.handle.link_is_up());

    let buffer = bench.offer(2048);
    assert!(bench.peer().send(&frame(60, 1)));
    bench.counts(|counters| counters.rx_dropped, 1);
    bench.transmit(&packet(60, 2));
    bench.counts(|counters| counters.tx_dropped, 1);
    assert_eq!(bench.peer().receive(), None);

    bench.handle.set_link(true);
    bench.driver.wait_interrupt(CONFIG_CHANGE);
    assert_eq!(bench.status(), LINK_UP);
    assert!(bench.peer().send(&frame(60, 3)));
    assert_eq!(bench.arrived(&[(buffer, 2048)])[12..], frame(60, 3));
    bench.transmit(&packet(60, 4));
    assert_eq!(bench.peer().wait(), packet(60, 4));
}

#[test]
fn frames_of_the_time_without_a_link_do_not_come_afterwards() {
    let mut bench = Bench::new();
    // Some wait for buffers already, and the wire is full of what the guest has sent.
    assert!(bench.peer().send(&frame(60, 1)));
    bench.counts(|counters| counters.rx_stalled, 1);
    let mut sent = 0;
    while bench.handle.counters().tx_blocked == 0 {
        let buffer = bench.driver.alloc_with(&packet(8000, 2));
        bench.driver.add(TX, &[Buffer::readable(buffer, 8012)]);
        bench.driver.kick(TX);
        sent += 1;
        let settled = |bench: &Bench| {
            let counters = bench.handle.counters();
            counters.tx_frames == sent || counters.tx_blocked > 0
        };
        assert!(eventually(PATIENCE, || settled(&bench)));
    }
    bench.handle.set_link(false);
    bench.counts(|counters| counters.rx_dropped, 1);
    bench.counts(|counters| counters.tx_dropped, 1);
    bench.peer().drain();
    bench.handle.set_link(true);
    let buffer = bench.offer(2048);
    assert!(bench.peer().send(&frame(60, 3)));
    assert_eq!(bench.arrived(&[(buffer, 2048)])[12..], frame(60, 3));
    assert_eq!(bench.peer().receive(), None);
}

#[test]
fn a_link_that_stays_as_it_is_is_no_news() {
    let mut bench = Bench::new();
    bench.handle.set_link(true);
    assert_eq!(bench.driver.read(crate::testing::register::INTERRUPT_STATUS) & CONFIG_CHANGE, 0);
}

#[test]
fn an_interface_that_goes_away_takes_the_link_down_and_not_the_guest() {
    let mut bench = Bench::new();
    bench.offer(2048);
    bench.peers.clear();
    bench.driver.wait_interrupt(CONFIG_CHANGE);
    assert_eq!(bench.status(), 0);
    for seed in 0..10 {
        bench.transmit(&packet(60, seed));
    }
    bench.counts(|counters| counters.tx_dropped, 10);
    bench.counts(|counters| counters.link_losses, 1);
    assert!(!bench.driver.needs_reset());
    // It stays away, whatever is wished and whoever drives.
    bench.handle.set_link(true);
    bench.driver.reset();
    bench.driver.initialize();
    assert_eq!(bench.status(), 0);
    bench.transmit(&packet(60, 1));
    bench.driver.pause();
    bench.driver.resume();
    bench.transmit(&packet(60, 1));
}

#[test]
fn an_interface_that_goes_away_is_noticed_without_buffers_too() {
    let mut bench = Bench::new();
    assert!(bench.peer().send(&frame(60, 1)));
    bench.counts(|counters| counters.rx_stalled, 1);
    bench.peers.clear();
    bench.driver.wait_interrupt(CONFIG_CHANGE);
    assert_eq!(bench.status(), 0);
}

#[test]
fn a_guest_that_is_asked_to_announce_itself_says_when_it_has() {
    let mut bench = Bench::new();
    bench.handle.announce();
    bench.driver.wait_interrupt(CONFIG_CHANGE);
    assert_eq!(bench.status(), LINK_UP | ANNOUNCE);
    let told = bench.peer().wait();
    assert_eq!(told.len(), 12 + 60);
    assert_eq!((&told[12..18], &told[18..24]), (&[0xff; 6][..], &bench.handle.mac()[..]));
    let command = bench.driver.alloc_with(&[3, 0]);
    let answer = bench.driver.alloc_with(&[0xff]);
    let chain = [Buffer::readable(command, 2), Buffer::writable(answer, 1)];
    assert_eq!(bench.driver.exchange(2, &chain), 1);
    assert_eq!(bench.driver.bytes(answer, 1), [0]);
    assert_eq!(bench.status(), LINK_UP);
}

#[test]
fn a_guest_that_cannot_announce_itself_is_announced_all_the_same() {
    let mut bench = Bench::without(feature::GUEST_ANNOUNCE);
    bench.handle.announce();
    assert_eq!(bench.peer().wait()[24..26], [0x80, 0x35]);
    assert_eq!(bench.status(), LINK_UP);
    assert_eq!(bench.driver.read(crate::testing::register::INTERRUPT_STATUS) & CONFIG_CHANGE, 0);
}

// --- saved state ---

fn fresh(executor: &Executor) -> (Net, Vec<Peer>) {
    let (taps, peers): (Vec<_>, Vec<_>) = (0..2).map(|_| Peer::new()).unzip();
    (Net::new(executor.handle(), taps, config()).unwrap(), peers)
}

fn state() -> NetState {
    NetState {
        mac: [2, 0, 0, 0, 0, 9],
        mtu: None,
        max_pairs: 2,
        pairs: 2,
        offloads: Some(feature::GUEST_CSUM),
        status: ANNOUNCE,
        announce: true,
    }
}

#[test]
fn a_record_comes_back() {
    let executor = Executor::spawn("net").unwrap();
    snapshot_roundtrip(|| fresh(&executor).0, |_| {});
    snapshot_roundtrip(|| fresh(&executor).0, |net| net.restore(state()).unwrap());
}

#[test]
fn states_that_cannot_be_are_refused_and_change_nothing() {
    let executor = Executor::spawn("net").unwrap();
    let (mut net, _peers) = fresh(&executor);
    let before = net.save_record().unwrap();
    for bad in [
        NetState { mac: [1, 0, 0, 0, 0, 9], ..state() },
        NetState { mac: [0; 6], ..state() },
        NetState { mtu: Some(9000), ..state() },
        NetState { max_pairs: 1, ..state() },
        NetState { pairs: 0, ..state() },
        NetState { pairs: 3, ..state() },
        NetState { offloads: Some(feature::CTRL_VQ), ..state() },
        NetState { status: 4, ..state() },
    ] {
        assert!(matches!(net.restore(bad), Err(RestoreError::Invalid { .. })));
    }
    assert_eq!(net.save_record().unwrap(), before);
}

#[test]
fn a_restored_guest_has_its_address_and_is_told_of_another_link() {
    let mut bench = Bench::new();
    let command = bench.driver.alloc_with(&[1, 1, 2, 9, 9, 9, 9, 9]);
    let answer = bench.driver.alloc(1);
    bench.driver.exchange(2, &[Buffer::readable(command, 8), Buffer::writable(answer, 1)]);
    bench.handle.set_link(false);
    bench.driver.wait_interrupt(CONFIG_CHANGE);
    bench.driver.pause();
    let record = bench.driver.save();

    let executor = Executor::spawn("net").unwrap();
    let (tap, peer) = Peer::new();
    let net = Net::new(executor.handle(), vec![tap], config()).unwrap();
    let handle = net.handle();
    bench.driver.replace(Box::new(net), record).unwrap();
    handle.announce();
    assert_eq!(bench.driver.read(crate::testing::register::INTERRUPT_STATUS) & CONFIG_CHANGE, 0);
    bench.driver.resume();
    bench.driver.wait_interrupt(CONFIG_CHANGE);
    assert_eq!(bench.driver.config(0, 6), [2, 9, 9, 9, 9, 9]);
    assert_eq!(bench.status(), LINK_UP | ANNOUNCE);
    assert_eq!(peer.wait()[18..24], [2, 9, 9, 9, 9, 9]);
    bench.transmit(&packet(60, 1));
    assert_eq!(peer.wait(), packet(60, 1));
}

#[test]
fn a_live_card_takes_no_record() {
    let executor = Executor::spawn("net").unwrap();
    let (mut net, _peers) = fresh(&executor);
    assert!(net.restore(state()).is_ok());
    assert_eq!(net.handle().mac(), state().mac);
    net.reset();
    assert_ne!(net.handle().mac(), state().mac);
    assert_eq!(MacAddress::new(net.handle().mac()).unwrap().bytes()[0] & 3, 2);
}

// --- rates ---

#[test]
fn sending_keeps_to_its_rate() {
    let mut limited = config();
    limited.tx.operations = Some("20/100ms".parse().unwrap());
    let mut bench = Bench::with(1, 0, limited);
    let start = Instant::now();
    for seed in 0..100 {
        let buffer = bench.driver.alloc_with(&packet(60, seed));
        bench.driver.add(TX, &[Buffer::readable(buffer, 72)]);
    }
    bench.driver.kick(TX);
    for seed in 0..100 {
        assert_eq!(bench.peer().wait(), packet(60, seed));
    }
    // 20 at once and 80 at 200 a second.
    assert!(start.elapsed() > Duration::from_millis(390), "{:?}", start.elapsed());
    assert!(bench.handle.counters().tx_throttled > 0);
    assert_eq!(bench.handle.counters().tx_dropped, 0);
}

#[test]
fn receiving_keeps_to_its_rate_and_sending_to_none() {
    let mut limited = config();
    limited.rx.bytes = Some("10000/100ms".parse().unwrap());
    let mut bench = Bench::with(1, 0, limited);
    let buffers: Vec<_> = (0..50).map(|_| (bench.offer(2048), 2048)).collect();
    let start = Instant::now();
    for seed in 0..50 {
        assert!(bench.peer().send(&frame(1000, seed)));
    }
    bench.transmit(&packet(60, 1));
    for seed in 0..50 {
        let place = usize::from(seed);
        assert_eq!(bench.arrived(&buffers[place..])[12..], frame(1000, seed));
    }
    // 10 at once and 39 of the others at 100 a second.
    assert!(start.elapsed() > Duration::from_millis(380), "{:?}", start.elapsed());
    assert!(bench.handle.counters().rx_throttled > 0);
    assert_eq!(bench.driver.used_index(RX), 50);
}
