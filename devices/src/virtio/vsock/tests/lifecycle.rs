//! Start, stop, reset, snapshots, and the time before the driver.

use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread;
use std::time::{Duration, Instant};

use super::super::packet::Op;
use super::super::{Vsock, VsockConfig, VsockError};
use super::driver::Driver;
use super::stack::Guest;
use super::{CID, Fixture, SOON};
use crate::executor::Executor;
use crate::memory::{Bytes, GuestAddress};
use crate::snapshot::{RestoreError, SaveError, Snapshot, Stateful};
use crate::virtio::queue::ActiveQueue;
use crate::virtio::{StartError, VirtioDevice};

fn driver() -> Driver {
    Driver::new(64, 4096)
}

/// A fixture with a connection of the guest to `listener`, and the program's end.
fn connected() -> (Fixture, UnixListener, UnixStream) {
    let mut fixture = Fixture::new();
    let listener = UnixListener::bind(fixture.service(52)).unwrap();
    assert!(fixture.guest.connect((52, 5000)));
    let program = listener.accept().unwrap().0;
    program.set_read_timeout(Some(SOON)).unwrap();
    (fixture, listener, program)
}

fn is_closed(program: &mut UnixStream) -> bool {
    // A close with data unread is reported as a reset.
    !matches!(program.read(&mut [0; 64]), Ok(len) if len > 0)
}

#[test]
fn reserved_addresses_are_refused() {
    let executor = Executor::spawn("test").unwrap();
    for guest_cid in [0, 1, 2, 0xffff_ffff, 1 << 32, u64::MAX] {
        let config = VsockConfig { guest_cid, socket: None };
        let refused = Vsock::new(executor.handle(), config).err().unwrap();
        assert!(matches!(refused, VsockError::Cid(cid) if cid == guest_cid));
    }
    assert_eq!(VsockConfig::default().guest_cid, 3);
}

#[test]
fn the_configuration_is_the_address() {
    let fixture = Fixture::idle(driver());
    let mut all = [0xff; 8];
    fixture.vsock.read_config(0, &mut all);
    assert_eq!(u64::from_le_bytes(all), CID);
    let mut high = [0xff; 4];
    fixture.vsock.read_config(4, &mut high);
    assert_eq!(high, [0; 4]);
    let mut beyond = [0xff; 4];
    fixture.vsock.read_config(u64::MAX, &mut beyond);
    assert_eq!(beyond, [0; 4]);
}

#[test]
fn without_a_driver_everyone_is_told_at_once() {
    let fixture = Fixture::idle(driver());
    let begin = Instant::now();
    assert!(!fixture.handle.is_driven());
    assert_eq!(fixture.handle.connect(7).unwrap_err().kind(), io::ErrorKind::NotConnected);
    for _ in 0..50 {
        let mut program = UnixStream::connect(fixture.socket()).unwrap();
        program.set_read_timeout(Some(SOON)).unwrap();
        let _ = program.write_all(b"CONNECT 7\n");
        assert!(is_closed(&mut program));
    }
    assert!(begin.elapsed() < SOON / 4);
}

#[test]
fn all_three_queues_are_needed() {
    for missing in 0..3 {
        let mut fixture = Fixture::idle(driver());
        let mut activation = fixture.guest.driver.activation();
        activation.queues.remove(missing);
        let refused = fixture.vsock.start(activation).unwrap_err();
        assert!(matches!(refused, StartError::MissingQueue(index) if index == missing as u16));
    }
}

#[test]
fn stop_gives_the_queues_back_in_order_and_once() {
    let mut fixture = Fixture::new();
    let queues = fixture.vsock.stop();
    let indices: Vec<_> = queues.iter().map(|queue| queue.index().0).collect();
    assert_eq!(indices, [0, 1, 2]);
    assert!(fixture.vsock.stop().is_empty());
}

#[test]
fn connections_outlive_a_pause_and_what_came_meanwhile_is_not_lost() {
    let (mut fixture, listener, mut program) = connected();
    fixture.guest.listening.insert(1024);
    for round in 1..=20 {
        let queues = fixture.vsock.stop();
        program.write_all(&[round; 1000]).unwrap();
        fixture.guest.send_data((52, 5000), &[round; 10]);
        fixture.guest.request((52, 6000 + u32::from(round)));
        let mut late = UnixStream::connect(fixture.socket()).unwrap();
        late.set_read_timeout(Some(SOON)).unwrap();
        late.write_all(b"CONNECT 1024\n").unwrap();
        let handle = fixture.handle.clone();
        let user = thread::spawn(move || handle.connect(1024).unwrap());
        thread::sleep(Duration::from_millis(5));
        let activation = fixture.guest.driver.activation_of(queues);
        fixture.vsock.start(activation).unwrap();

        let total = usize::from(round);
        fixture.guest.until(|guest| {
            guest.streams[&(52, 5000)].data.len() == 1000 * total
                && guest.streams.len() == 1 + 3 * total
                && guest.streams.values().all(|stream| stream.open)
        });
        let mut data = [0; 10];
        program.read_exact(&mut data).unwrap();
        assert_eq!(data, [round; 10]);
        late.read_exact(&mut [0; 4]).unwrap();
        user.join().unwrap();
        listener.accept().unwrap();
    }
}

#[test]
fn a_program_that_leaves_during_a_pause_is_noticed_after_it() {
    let (mut fixture, _listener, program) = connected();
    let queues = fixture.vsock.stop();
    drop(program);
    let activation = fixture.guest.driver.activation_of(queues);
    fixture.vsock.start(activation).unwrap();
    fixture.guest.until(|guest| guest.streams[&(52, 5000)].host_done == 3);
}

#[test]
fn a_reset_ends_all_and_the_next_driver_begins_anew() {
    let (mut fixture, _listener, mut program) = connected();
    let handle = fixture.handle.clone();
    let user = thread::spawn(move || handle.connect(9).unwrap_err().kind());
    assert_eq!(fixture.guest.receive(SOON).unwrap().header.op, Op::Request as u16);
    drop(fixture.vsock.stop());
    fixture.vsock.reset();
    assert!(is_closed(&mut program));
    assert_eq!(user.join().unwrap(), io::ErrorKind::ConnectionReset);
    assert_eq!(fixture.handle.connect(9).unwrap_err().kind(), io::ErrorKind::NotConnected);
    let mut refused = UnixStream::connect(fixture.socket()).unwrap();
    refused.set_read_timeout(Some(SOON)).unwrap();
    assert!(is_closed(&mut refused));

    fixture.guest = Guest::new(driver());
    let activation = fixture.guest.driver.activation();
    fixture.vsock.start(activation).unwrap();
    assert!(fixture.guest.connect((52, 5000)));
    assert!(fixture.guest.receive(Duration::from_millis(50)).is_none());
}

#[test]
fn a_device_that_goes_takes_its_file_and_tells_all() {
    let (fixture, _listener, mut program) = connected();
    let Fixture { vsock, handle, executor, dir, .. } = fixture;
    let listener = handle.listen(99).unwrap();
    drop(vsock);
    assert!(is_closed(&mut program));
    assert!(!dir.path().join("v.sock").exists());
    assert_eq!(handle.connect(1).unwrap_err().kind(), io::ErrorKind::NotConnected);
    assert_eq!(handle.listen(1).err().unwrap().kind(), io::ErrorKind::NotConnected);
    let error = listener.accept_timeout(SOON).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::NotConnected);
    drop(executor);
}

#[test]
fn a_running_device_cannot_be_saved() {
    let fixture = Fixture::new();
    assert!(matches!(fixture.vsock.save(), Err(SaveError::Running(_))));
}

/// Moves a connected guest to a new device, as a snapshot does. The queues are those of the old.
fn restored() -> (Fixture, Vec<ActiveQueue>) {
    let (mut old, _listener, _program) = connected();
    old.guest.request((52, 5001));
    old.guest.turn(SOON);
    let queues = old.vsock.stop();
    let record = old.vsock.save_record().unwrap();
    let mut new = Fixture::idle(driver());
    new.guest = old.guest;
    new.vsock.restore_record(record.clone()).unwrap();
    assert_eq!(new.vsock.save_record().unwrap(), record);
    assert_eq!(new.vsock.save().unwrap().connections.len(), 2);
    (new, queues)
}

#[test]
fn after_a_restore_the_guest_first_hears_that_its_connections_are_gone() {
    let (mut fixture, queues) = restored();
    let handle = fixture.handle.clone();
    // Comes before the guest goes on, and waits for it.
    let user = thread::spawn(move || handle.connect(1024).map(drop).map_err(|e| e.kind()));
    fixture.guest.listening.insert(1024);
    let activation = fixture.guest.driver.activation_of(queues);
    fixture.vsock.start(activation).unwrap();

    let mut event = None;
    fixture.guest.driver.wait(|driver| {
        event = driver.event.used();
        event.is_some()
    });
    assert_eq!(event, Some((0, 4)));
    let id: u32 = fixture.guest.driver.memory.read_obj(GuestAddress(0x8_0000)).unwrap();
    assert_eq!(id, 0);
    assert!(fixture.guest.receive(Duration::from_millis(200)).is_none());

    fixture.guest.driver.give_event(0);
    fixture
        .guest
        .until(|guest| guest.streams[&(52, 5000)].reset && guest.streams[&(52, 5001)].reset);
    fixture.guest.until(|guest| guest.streams.len() == 3);
    assert_eq!(user.join().unwrap(), Ok(()));
}

#[test]
fn after_a_restore_the_guest_may_use_its_ports_anew_at_once() {
    let (mut fixture, queues) = restored();
    let listener = UnixListener::bind(fixture.service(52)).unwrap();
    fixture.guest.request((52, 5000));
    let activation = fixture.guest.driver.activation_of(queues);
    fixture.vsock.start(activation).unwrap();
    fixture.guest.driver.wait(|driver| driver.event.used().is_some());
    fixture.guest.driver.give_event(0);
    fixture.guest.until(|guest| guest.streams[&(52, 5000)].open);
    assert!(listener.accept().is_ok());
}

#[test]
fn a_snapshot_before_the_guest_took_note_is_as_good() {
    let (mut fixture, queues) = restored();
    let activation = fixture.guest.driver.activation_of(queues);
    fixture.vsock.start(activation).unwrap();
    fixture.guest.driver.wait(|driver| driver.event.used().is_some());
    let queues = fixture.vsock.stop();
    let state = fixture.vsock.save().unwrap();
    assert!(state.driven);
    assert_eq!(state.connections.len(), 2);
    // In the same process, the guest's note is still waited for.
    let activation = fixture.guest.driver.activation_of(queues);
    fixture.vsock.start(activation).unwrap();
    assert!(fixture.guest.receive(Duration::from_millis(100)).is_none());
    fixture.guest.driver.give_event(0);
    fixture.guest.until(|guest| guest.streams.values().all(|stream| stream.reset));
}

#[test]
fn the_next_host_port_goes_on_after_a_restore() {
    let mut fixture = Fixture::new();
    let _ = fixture.handle.connect_timeout(1, Duration::from_millis(1));
    drop(fixture.vsock.stop());
    let record = fixture.vsock.save().unwrap();
    assert!(record.next_host_port >= 1 << 30);
    let mut new = Fixture::idle(driver());
    new.vsock.restore(record.clone()).unwrap();
    assert_eq!(new.vsock.save().unwrap().next_host_port, record.next_host_port);
}

#[test]
fn records_that_cannot_be_are_refused() {
    let mut fixture = Fixture::idle(driver());
    let good = fixture.vsock.save().unwrap();
    let connection = super::super::SavedConnection { host_port: 1, guest_port: 2 };
    let mut bad = vec![good.clone(); 5];
    bad[0].guest_cid = 2;
    bad[1].next_host_port = 5;
    bad[2].next_host_port = 1 << 31;
    bad[3].connections = vec![connection, connection];
    bad[4].connections = (0..1025)
        .map(|guest_port| super::super::SavedConnection { host_port: 1, guest_port })
        .collect();
    for state in bad {
        let refused = fixture.vsock.restore(state);
        assert!(matches!(refused, Err(RestoreError::Invalid { .. })));
    }
    assert_eq!(fixture.vsock.save().unwrap(), good);
}

#[test]
fn a_driver_that_breaks_its_ring_loses_the_device_until_reset() {
    let (mut fixture, _listener, mut program) = connected();
    fixture.guest.driver.tx.publish(0x7000);
    fixture.guest.driver.tx.kick();
    fixture.guest.driver.wait(|driver| driver.notifier.wants_reset());
    assert!(is_closed(&mut program));
    assert!(!fixture.handle.is_driven());
    let mut refused = UnixStream::connect(fixture.socket()).unwrap();
    refused.set_read_timeout(Some(SOON)).unwrap();
    assert!(is_closed(&mut refused));
    assert_eq!(fixture.vsock.stop().len(), 3);
    fixture.vsock.reset();
    fixture.guest = Guest::new(driver());
    let activation = fixture.guest.driver.activation();
    fixture.vsock.start(activation).unwrap();
    assert!(fixture.guest.connect((52, 5000)));
}
