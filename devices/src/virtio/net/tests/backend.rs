//! A card whose frames are moved by another process: here our own card, on the other side of the
//! protocol of vhost-user.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use tempfile::TempDir;

use super::bench::{Peer, RX, TX, config, frame, packet};
use crate::executor::{Executor, ExecutorHandle};
use crate::testing::{
    Buffer, Conformance, GuestDriver, PATIENCE, VhostUserBackend, eventually, metric, shared_ram,
};
use crate::virtio::VirtioDevice;
use crate::virtio::net::{DataPath, Net, feature};
use crate::virtio::vhost::user::VhostUserConfig;

/// A backend at a socket, and the wires of the cards that it makes: one for each connection.
struct Service {
    backend: Option<VhostUserBackend>,
    wires: Arc<Mutex<Vec<Peer>>>,
    folder: TempDir,
    pairs: u16,
}

impl Service {
    fn start(pairs: u16) -> Self {
        let folder = TempDir::new().unwrap();
        let mut this = Self { backend: None, wires: Arc::default(), folder, pairs };
        this.come_back();
        this
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    fn come_back(&mut self) {
        let (wires, pairs) = (self.wires.clone(), self.pairs);
        let make = Arc::new(move |executor: ExecutorHandle| -> Box<dyn VirtioDevice> {
            let (taps, peers): (Vec<_>, Vec<_>) = (0..pairs).map(|_| Peer::new()).unzip();
            let mut wires = wires.lock().unwrap();
            wires.retain(|wire: &Peer| !wire.is_gone());
            wires.extend(peers);
            Box::new(Net::new(executor, taps, config()).unwrap())
        });
        self.backend = Some(VhostUserBackend::listen(&self.socket(), make).unwrap());
    }

    fn card(&self, executor: ExecutorHandle) -> Box<Net> {
        let (socket, queues) = (self.socket(), self.pairs);
        let options = VhostUserConfig { socket, queues, patience: PATIENCE };
        Box::new(Net::with_backend(executor, options, config()).unwrap())
    }

    /// One frame each way, of which the one that is sent may be lost.
    fn exchanges(&self, driver: &mut GuestDriver) {
        let wires = self.wires.lock().unwrap();
        for wire in &*wires {
            wire.drain();
        }
        let sent = driver.alloc_with(&packet(60, 1));
        assert_eq!(driver.exchange(TX, &[Buffer::readable(sent, 72)]), 0);
        receives(driver, &wires);
    }

    /// One frame each way.
    fn both_ways(&self, driver: &mut GuestDriver) {
        let wires = self.wires.lock().unwrap();
        for wire in &*wires {
            wire.drain();
        }
        let sent = driver.alloc_with(&packet(60, 1));
        assert_eq!(driver.exchange(TX, &[Buffer::readable(sent, 72)]), 0);
        let arrived = || wires.iter().find_map(Peer::receive);
        let mut came = None;
        assert!(eventually(PATIENCE, || {
            came = arrived();
            came.is_some()
        }));
        assert_eq!(came.unwrap()[12..], frame(60, 1));
        receives(driver, &wires);
    }
}

/// Receives a frame from whichever of `wires` is that of the card.
fn receives(driver: &mut GuestDriver, wires: &[Peer]) {
    let buffer = driver.alloc(2048);
    driver.add(RX, &[Buffer::writable(buffer, 2048)]);
    driver.kick(RX);
    for wire in wires {
        wire.send(&frame(60, 2));
    }
    assert_eq!(driver.wait_used(RX).len, 72);
    assert_eq!(driver.bytes(buffer, 72)[12..], frame(60, 2));
}

#[test]
fn conforms() {
    let service = Service::start(1);
    Conformance::new(|executor| service.card(executor))
        .in_memory(shared_ram)
        .exercise(|driver| service.exchanges(driver))
        .answers(&[TX, 2])
        .thinned(11)
        .run();
}

#[test]
fn the_way_of_the_frames_is_told() {
    let (service, executor) = (Service::start(2), Executor::spawn("card").unwrap());
    let card = service.card(executor.handle());
    assert_eq!(card.data_path(), DataPath::Backend);
    assert!(!card.writes_are_logged());
    let identity = card.identity();
    assert_eq!(identity.queue_sizes.len(), 5);
    let expected = feature::MRG_RXBUF | feature::MQ | feature::CSUM | feature::HOST_TSO4;
    assert_eq!(identity.features & expected, expected);
    assert_eq!(identity.features & feature::CTRL_GUEST_OFFLOADS, 0);
}

/// Asks for a number of pairs.
fn ask_for_pairs(driver: &mut GuestDriver, control: u16, pairs: u16) -> u8 {
    let command = driver.alloc_with(&[&[4, 0][..], &pairs.to_le_bytes()].concat());
    let answer = driver.alloc_with(&[0xee]);
    let chain = [Buffer::readable(command, 4), Buffer::writable(answer, 1)];
    assert_eq!(driver.exchange(control, &chain), 1);
    driver.bytes(answer, 1)[0]
}

#[test]
fn rings_of_pairs_that_the_guest_does_not_use_are_left_alone() {
    let (service, executor) = (Service::start(2), Executor::spawn("card").unwrap());
    let mut driver = GuestDriver::with_memory(service.card(executor.handle()), shared_ram());
    driver.initialize();
    service.both_ways(&mut driver);
    let second = driver.alloc_with(&packet(60, 3));
    driver.add(3, &[Buffer::readable(second, 72)]);
    driver.kick(3);
    std::thread::sleep(std::time::Duration::from_millis(50));
    assert_eq!(driver.used(3), None);
    assert_eq!(ask_for_pairs(&mut driver, 4, 2), 0);
    driver.wait_used(3);
    assert_eq!(ask_for_pairs(&mut driver, 4, 3), 1);
    assert_eq!(ask_for_pairs(&mut driver, 4, 1), 0);
    service.both_ways(&mut driver);
}

#[test]
fn a_pause_and_a_restore_lose_no_buffer() {
    let (service, executor) = (Service::start(1), Executor::spawn("card").unwrap());
    let mut driver = GuestDriver::with_memory(service.card(executor.handle()), shared_ram());
    driver.initialize();
    for round in 0..20 {
        let buffers: Vec<_> = (0..4).map(|_| driver.alloc(2048)).collect();
        for &buffer in &buffers {
            driver.add(RX, &[Buffer::writable(buffer, 2048)]);
        }
        driver.kick(RX);
        driver.pause();
        if round % 5 == 0 {
            let record = driver.save();
            driver.replace(service.card(executor.handle()), record).unwrap();
        }
        driver.resume();
        for (number, &buffer) in buffers.iter().enumerate() {
            for wire in &*service.wires.lock().unwrap() {
                wire.send(&frame(60, number as u8));
            }
            assert_eq!(driver.wait_used(RX).len, 72);
            assert_eq!(driver.bytes(buffer, 72)[12..], frame(60, number as u8));
        }
        driver.reset();
        driver.initialize();
    }
}

#[test]
fn h61_a_backend_that_goes_costs_the_link_and_a_reset() {
    let (mut service, executor) = (Service::start(1), Executor::spawn("card").unwrap());
    let card = service.card(executor.handle());
    let meter = card.meter().unwrap();
    let mut driver = GuestDriver::with_memory(card, shared_ram());
    driver.initialize();
    for round in 1..=3 {
        service.both_ways(&mut driver);
        assert_eq!(driver.config(6, 2)[0] & 1, 1);
        drop(service.backend.take());
        assert!(eventually(PATIENCE, || driver.needs_reset()));
        assert_eq!(driver.config(6, 2)[0] & 1, 0);
        assert_eq!(metric(&*meter, "vhost_user_losses_total"), round);
        assert_eq!(metric(&*meter, "net_link_losses_total"), round);
        service.come_back();
        driver.reset();
        driver.initialize();
    }
    service.both_ways(&mut driver);
}

#[test]
fn without_a_link_the_backend_moves_nothing() {
    let (service, executor) = (Service::start(1), Executor::spawn("card").unwrap());
    let card = service.card(executor.handle());
    let handle = card.handle();
    let mut driver = GuestDriver::with_memory(card, shared_ram());
    driver.initialize();
    for _ in 0..3 {
        handle.set_link(false);
        assert_eq!(driver.config(6, 2)[0] & 1, 0);
        service.wires.lock().unwrap().iter().for_each(|wire| {
            wire.drain();
        });
        let sent = driver.alloc_with(&packet(60, 9));
        driver.add(TX, &[Buffer::readable(sent, 72)]);
        driver.kick(TX);
        std::thread::sleep(std::time::Duration::from_millis(50));
        assert!(service.wires.lock().unwrap().iter().all(|wire| wire.receive().is_none()));
        handle.set_link(true);
        driver.wait_used(TX);
        service.both_ways(&mut driver);
    }
}
