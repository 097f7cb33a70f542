//! What the device counts.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};

use super::super::packet::{NO_MORE, Op};
use super::{Fixture, SOON};
use crate::metrics::Meter;
use crate::testing::{PATIENCE, eventually, metric};
use crate::virtio::VirtioDevice;

fn meter(fixture: &Fixture) -> Meter {
    fixture.vsock.meter().unwrap()
}

/// Open, and since the device was made: opened, refused, reset.
fn connections(meter: &Meter) -> [u64; 4] {
    [
        "vsock_connections",
        "vsock_connections_opened_total",
        "vsock_connections_refused_total",
        "vsock_connections_reset_total",
    ]
    .map(|name| metric(&**meter, name))
}

/// The worker may not have come to it yet.
fn assert_becomes(meter: &Meter, expected: [u64; 4]) {
    let is = eventually(PATIENCE, || connections(meter) == expected);
    assert!(is, "{:?}, not {expected:?}", connections(meter));
}

#[test]
fn connections_and_bytes_of_both_directions() {
    let mut fixture = Fixture::new();
    let meter = meter(&fixture);
    let listener = UnixListener::bind(fixture.service(52)).unwrap();
    let ports = (52, 5000);
    assert!(fixture.guest.connect(ports));
    assert_eq!(connections(&meter), [1, 1, 0, 0]);
    let mut program = listener.accept().unwrap().0;
    fixture.guest.write(ports, b"hello");
    program.read_exact(&mut [0; 5]).unwrap();
    program.write_all(b"you").unwrap();
    fixture.guest.until(|guest| guest.streams[&ports].data == b"you");
    assert_eq!(metric(&*meter, "vsock_sent_bytes_total"), 5);
    assert_eq!(metric(&*meter, "vsock_received_bytes_total"), 3);
    // In order: the guest says that it is done, and hears the end.
    fixture.guest.send_flags(ports, Op::Shutdown, NO_MORE);
    fixture.guest.until(|guest| guest.streams[&ports].reset);
    assert_becomes(&meter, [0, 1, 0, 0]);
    assert_eq!(metric(&*meter, "vsock_dropped_packets_total"), 0);
}

#[test]
fn connections_from_the_host_count_when_the_guest_accepts() {
    let mut fixture = Fixture::new();
    let meter = meter(&fixture);
    let connect = |port: u32| {
        let mut program = UnixStream::connect(fixture.socket()).unwrap();
        program.set_read_timeout(Some(SOON)).unwrap();
        program.write_all(format!("CONNECT {port}\n").as_bytes()).unwrap();
        program
    };
    let (mut refused, mut accepted) = (connect(1), connect(1024));
    fixture.guest.listening.insert(1024);
    fixture.guest.until(|guest| guest.streams.len() == 1);
    assert_eq!(refused.read(&mut [0; 8]).unwrap(), 0);
    assert_eq!(accepted.read(&mut [0; 1]).unwrap(), 1);
    assert_becomes(&meter, [1, 1, 1, 0]);
}

#[test]
fn refusals_resets_and_packets_to_nobody() {
    let mut fixture = Fixture::new();
    let meter = meter(&fixture);
    assert!(!fixture.guest.connect((52, 5000)));
    assert_eq!(connections(&meter), [0, 0, 1, 0]);
    let _listener = UnixListener::bind(fixture.service(53)).unwrap();
    assert!(fixture.guest.connect((53, 5000)));
    fixture.guest.send((53, 5000), Op::Reset);
    assert_becomes(&meter, [0, 1, 1, 1]);
    fixture.guest.send((54, 5000), Op::CreditUpdate);
    fixture.guest.until(|guest| guest.stray_resets == [(54, 5000)]);
    assert_eq!(metric(&*meter, "vsock_dropped_packets_total"), 1);
}

#[test]
fn a_reset_of_the_device_forgets_connections_and_no_counts() {
    let mut fixture = Fixture::new();
    let meter = meter(&fixture);
    let _listener = UnixListener::bind(fixture.service(52)).unwrap();
    assert!(fixture.guest.connect((52, 5000)));
    fixture.vsock.stop();
    assert_eq!(connections(&meter), [1, 1, 0, 0]);
    fixture.vsock.reset();
    assert_eq!(connections(&meter), [0, 1, 0, 1]);
}
