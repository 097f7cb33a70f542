//! What no guest should do. Each must cost it the connection or the packet, and nobody else anything.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

use super::super::muxer::{MAX_CONNECTIONS, MAX_STRAYS};
use super::super::packet::{HEADER_LEN, Header, NO_MORE, NO_SEND, Op};
use super::driver::{Driver, Packet, Piece};
use super::stack::Ports;
use super::{Fixture, SOON};

const PORTS: Ports = (52, 5000);

/// A device with a connection of the guest to a program.
fn connected(driver: Driver) -> (Fixture, UnixListener, UnixStream) {
    let mut fixture = Fixture::with(driver);
    let listener = UnixListener::bind(fixture.service(52)).unwrap();
    assert!(fixture.guest.connect(PORTS));
    let program = listener.accept().unwrap().0;
    program.set_read_timeout(Some(SOON)).unwrap();
    (fixture, listener, program)
}

fn usual() -> Driver {
    Driver::new(64, 4096)
}

/// True if the device still connects and moves data.
fn works(fixture: &mut Fixture) -> bool {
    let _ = std::fs::remove_file(fixture.service(77));
    let listener = UnixListener::bind(fixture.service(77)).unwrap();
    let connected = fixture.guest.connect((77, 77));
    let mut program = listener.accept().unwrap().0;
    program.set_read_timeout(Some(SOON)).unwrap();
    fixture.guest.write((77, 77), b"fine");
    let mut data = [0; 4];
    program.read_exact(&mut data).unwrap();
    fixture.guest.close((77, 77));
    connected && &data == b"fine" && !fixture.guest.driver.notifier.wants_reset()
}

fn next(fixture: &mut Fixture) -> Option<Header> {
    fixture.guest.receive(Duration::from_millis(100)).map(|Packet { header, .. }| header)
}

#[test]
fn h40_a_packet_shorter_than_a_header_is_dropped() {
    let mut fixture = Fixture::new();
    let header = fixture.guest.header(PORTS, Op::Request).encode();
    for len in [0, 1, HEADER_LEN - 1] {
        fixture.guest.driver.send_pieces(&[&header[..len]], &[]);
    }
    // Only device-writable room.
    fixture.guest.driver.send_pieces(&[], &[100]);
    assert_eq!(next(&mut fixture), None);
    assert!(works(&mut fixture));
}

#[test]
fn h40_a_false_length_ends_the_connection() {
    for (len, payload) in [(5, 4), (4, 5), (0, 1), (1, 0), (u32::MAX, 4), (65_537, 65_537)] {
        let (mut fixture, _listener, mut program) = connected(usual());
        let header = Header { len, ..fixture.guest.header(PORTS, Op::Data) };
        fixture.guest.driver.send(&header, &vec![1; payload]);
        fixture.guest.until(|guest| guest.streams[&PORTS].reset);
        assert_eq!(program.read(&mut [0; 8]).unwrap(), 0, "length {len}, payload {payload}");
        assert!(works(&mut fixture));
    }
}

#[test]
fn h40_unknown_operations_end_the_connection() {
    for op in [0, 8, u16::MAX] {
        let (mut fixture, _listener, mut program) = connected(usual());
        let header = Header { op, ..fixture.guest.header(PORTS, Op::Data) };
        fixture.guest.driver.send(&header, &[]);
        fixture.guest.until(|guest| guest.streams[&PORTS].reset);
        assert_eq!(program.read(&mut [0; 8]).unwrap(), 0);
        assert!(works(&mut fixture));
    }
}

#[test]
fn h40_unknown_types_and_foreign_addresses_are_refused() {
    let (mut fixture, _listener, _program) = connected(usual());
    let header = fixture.guest.header(PORTS, Op::Request);
    for bad in [
        Header { socket_type: 2, ..header },
        Header { socket_type: 0, ..header },
        Header { dst_cid: 1, ..header },
        Header { dst_cid: u64::MAX, ..header },
        Header { dst_cid: 1 << 32 | 2, ..header },
    ] {
        fixture.guest.driver.send(&bad, &[]);
        let answer = next(&mut fixture).unwrap();
        let expected = Header {
            src_cid: bad.dst_cid,
            dst_cid: bad.src_cid,
            src_port: bad.dst_port,
            dst_port: bad.src_port,
            socket_type: bad.socket_type,
            op: Op::Reset as u16,
            ..Header::default()
        };
        assert_eq!(answer, expected);
    }
    assert!(!fixture.guest.streams[&PORTS].reset);
    assert!(works(&mut fixture));
}

#[test]
fn h40_a_false_sender_is_not_answered() {
    let (mut fixture, _listener, mut program) = connected(usual());
    for src_cid in [0, 1, 2, 4, 1 << 32 | 3, u64::MAX] {
        let header = Header { src_cid, len: 1, ..fixture.guest.header(PORTS, Op::Data) };
        fixture.guest.driver.send(&header, b"x");
    }
    assert_eq!(next(&mut fixture), None);
    fixture.guest.write(PORTS, b"y");
    let mut data = [0];
    program.read_exact(&mut data).unwrap();
    assert_eq!(&data, b"y");
}

#[test]
fn h40_packets_for_no_connection_are_refused_but_resets_are_not_answered() {
    let mut fixture = Fixture::new();
    for op in [Op::Response, Op::Shutdown, Op::Data, Op::CreditUpdate, Op::CreditRequest] {
        fixture.guest.send((1, 2), op);
        assert_eq!(next(&mut fixture).unwrap().op, Op::Reset as u16);
    }
    fixture.guest.send((1, 2), Op::Reset);
    assert_eq!(next(&mut fixture), None);
    assert!(works(&mut fixture));
}

#[test]
fn h40_operations_out_of_turn_end_the_connection() {
    for op in [Op::Request, Op::Response] {
        let (mut fixture, _listener, mut program) = connected(usual());
        fixture.guest.send(PORTS, op);
        fixture.guest.until(|guest| guest.streams[&PORTS].reset);
        assert_eq!(program.read(&mut [0; 8]).unwrap(), 0);
        assert!(works(&mut fixture));
    }
}

#[test]
fn h40_data_before_the_answer_is_refused() {
    for op in [Op::Data, Op::Shutdown] {
        let mut fixture = Fixture::new();
        let mut program = UnixStream::connect(fixture.socket()).unwrap();
        program.write_all(b"CONNECT 5\n").unwrap();
        let request = fixture.guest.receive(SOON).unwrap().header;
        fixture.guest.send((request.src_port, request.dst_port), op);
        assert_eq!(next(&mut fixture).unwrap().op, Op::Reset as u16);
        assert_eq!(program.read(&mut [0; 8]).unwrap(), 0);
    }
}

#[test]
fn h40_more_than_the_credit_ends_the_connection() {
    let (mut fixture, _listener, program) = connected(usual());
    fixture.guest.stuff(PORTS);
    assert_eq!(fixture.guest.streams[&PORTS].room(), 0);
    fixture.guest.send_data(PORTS, b"x");
    fixture.guest.until(|guest| guest.streams[&PORTS].reset);
    assert!(works(&mut fixture));
    drop(program);
}

#[test]
fn h40_data_after_the_end_of_data_ends_the_connection() {
    let (mut fixture, _listener, program) = connected(usual());
    fixture.guest.send_flags(PORTS, Op::Shutdown, NO_SEND);
    fixture.guest.send_data(PORTS, b"x");
    fixture.guest.until(|guest| guest.streams[&PORTS].reset);
    assert!(works(&mut fixture));
    drop(program);
}

#[test]
fn h40_false_credit_hurts_only_its_guest() {
    let (mut fixture, _listener, mut program) = connected(usual());
    let honest = fixture.guest.header(PORTS, Op::CreditUpdate);
    for (buf_alloc, fwd_cnt) in [(0, 0), (0, u32::MAX), (1000, 1), (u32::MAX, u32::MAX)] {
        fixture.guest.driver.send(&Header { buf_alloc, fwd_cnt, ..honest }, &[]);
    }
    program.write_all(&[1; 100]).unwrap();
    fixture.guest.driver.send(&honest, &[]);
    fixture.guest.until(|guest| guest.streams[&PORTS].data.len() == 100);
    // Storms of requests for ours.
    for _ in 0..2000 {
        fixture.guest.driver.send(&Header { op: Op::CreditRequest as u16, ..honest }, &[]);
    }
    assert!(works(&mut fixture));
}

#[test]
fn h40_strange_shutdown_flags_do_nothing() {
    let (mut fixture, _listener, _program) = connected(usual());
    fixture.guest.send_flags(PORTS, Op::Shutdown, 0);
    fixture.guest.send_flags(PORTS, Op::Shutdown, !NO_MORE);
    assert_eq!(next(&mut fixture), None);
    fixture.guest.close(PORTS);
}

#[test]
fn h11_a_transmit_chain_with_writable_parts_ends_the_connection() {
    let (mut fixture, _listener, mut program) = connected(usual());
    let header = Header { len: 4, ..fixture.guest.header(PORTS, Op::Data) };
    fixture.guest.driver.send_pieces(&[&header.encode(), b"data"], &[16]);
    fixture.guest.until(|guest| guest.streams[&PORTS].reset);
    assert_eq!(program.read(&mut [0; 8]).unwrap(), 0);
    assert!(works(&mut fixture));
}

#[test]
fn h11_packets_may_be_cut_into_single_bytes_both_ways() {
    let mut fixture = Fixture::with(Driver::new(0, 4096));
    let listener = UnixListener::bind(fixture.service(52)).unwrap();
    let mut bytes = fixture.guest.header(PORTS, Op::Request).encode().to_vec();
    fixture.guest.driver.send_chain(&cut(&fixture, &bytes));
    let mut program = listener.accept().unwrap().0;
    bytes = Header { len: 4, ..fixture.guest.header(PORTS, Op::Data) }.encode().to_vec();
    bytes.extend(b"data");
    fixture.guest.driver.send_chain(&cut(&fixture, &bytes));
    let mut data = [0; 4];
    program.read_exact(&mut data).unwrap();
    assert_eq!(&data, b"data");

    program.write_all(b"answer").unwrap();
    let room: Vec<_> =
        (0..50).map(|at| Piece { address: 0x100_0000 + at, len: 1, writable: true }).collect();
    fixture.guest.driver.rx.offer(0, &room);
    fixture.guest.driver.wait(|driver| driver.rx.used() == Some((0, 44)));
    fixture.guest.driver.rx.offer(0, &room);
    fixture.guest.driver.wait(|driver| driver.rx.used() == Some((0, 50)));
    let mut answer = [0; 6];
    let address = crate::memory::GuestAddress(0x100_0000 + 44);
    crate::memory::Bytes::read_slice(&fixture.guest.driver.memory, &mut answer, address).unwrap();
    assert_eq!(&answer, b"answer");
}

/// `bytes` in guest memory as a chain of single bytes.
fn cut(fixture: &Fixture, bytes: &[u8]) -> Vec<Piece> {
    let start = 0x300_0000;
    let address = crate::memory::GuestAddress(start);
    crate::memory::Bytes::write_slice(&fixture.guest.driver.memory, bytes, address).unwrap();
    let piece = |at| Piece { address: start + at as u64, len: 1, writable: false };
    (0..bytes.len()).map(piece).collect()
}

#[test]
fn receive_buffers_that_are_none_come_back_empty() {
    for len in [0, 1, HEADER_LEN as u32 - 1] {
        let (mut fixture, _listener, mut program) = connected(Driver::new(1, 4096));
        // The usual buffer is taken out of the game first.
        program.write_all(b"1").unwrap();
        fixture.guest.driver.wait(|driver| driver.received().is_some());
        program.write_all(b"2").unwrap();
        let small = Piece { address: 0x100_0000, len, writable: true };
        fixture.guest.driver.rx.offer(5, &[small]);
        fixture.guest.driver.wait(|driver| driver.rx.used() == Some((5, 0)));
        let readable = Piece { address: 0x100_0000, len: 4096, writable: false };
        fixture.guest.driver.rx.offer(6, &[readable]);
        fixture.guest.driver.wait(|driver| driver.rx.used() == Some((6, 0)));
        fixture.guest.driver.give_rx(0);
        fixture.guest.until(|guest| guest.streams[&PORTS].data == b"2");
    }
}

#[test]
fn receive_buffers_of_just_a_header_still_take_answers() {
    let (mut fixture, _listener, mut program) = connected(Driver::new(4, HEADER_LEN as u32));
    program.write_all(b"never fits").unwrap();
    fixture.guest.until(|guest| guest.empty_buffers > 10);
    fixture.guest.close(PORTS);
}

#[test]
fn h42_a_storm_of_refused_requests_is_answered_one_by_one() {
    let mut fixture = Fixture::new();
    let mut resets = 0;
    for port in 0..65_536 {
        let header = fixture.guest.header((9, port), Op::Request);
        fixture.guest.driver.send(&header, &[]);
        while let Some((buffer, packet)) = fixture.guest.driver.received() {
            resets += u32::from(packet.unwrap().header.op == Op::Reset as u16);
            fixture.guest.driver.give_rx(buffer);
        }
    }
    while resets < 65_536 {
        assert_eq!(fixture.guest.receive(SOON).unwrap().header.op, Op::Reset as u16);
        resets += 1;
    }
    assert!(works(&mut fixture));
}

#[test]
fn h42_a_guest_that_takes_no_answers_is_not_served_further() {
    let mut fixture = Fixture::with(Driver::new(0, 4096));
    let mut sent = 0;
    let stuck = |driver: &mut Driver| !driver.wait_for(Duration::from_secs(1), |d| d.can_send());
    while !stuck(&mut fixture.guest.driver) {
        fixture.guest.send((9, sent), Op::Request);
        sent += 1;
    }
    assert!(sent as usize >= MAX_STRAYS && sent as usize <= MAX_STRAYS + 32);
    // As many as there are buffers for, to the last.
    for buffer in 0..10 {
        fixture.guest.driver.give_rx(buffer);
        fixture.guest.driver.wait(|driver| driver.received().is_some());
    }
    fixture.guest.driver.wait(|driver| driver.can_send() && driver.tx_free == 10);
    (0..64).for_each(|buffer| fixture.guest.driver.give_rx(buffer));
    for _ in 10..sent {
        assert_eq!(fixture.guest.receive(SOON).unwrap().header.op, Op::Reset as u16);
    }
    assert!(works(&mut fixture));
}

#[test]
fn h42_the_table_is_bounded_and_the_connections_in_it_stay() {
    let mut fixture = Fixture::new();
    // All of one listener would be refused at its backlog.
    let listeners: Vec<_> =
        (0..16).map(|port| fixture.handle.listen(100 + port).unwrap()).collect();
    let mut accepted = Vec::new();
    let mut streams = Vec::new();
    for port in 0..1500 {
        let ports = (100 + port % 16, port);
        if fixture.guest.connect(ports) {
            accepted.push(ports);
            streams.push(listeners[port as usize % 16].accept_timeout(SOON).unwrap());
        }
    }
    assert_eq!(accepted.len(), MAX_CONNECTIONS);
    assert_eq!(
        fixture.handle.connect(1).unwrap_err().kind(),
        std::io::ErrorKind::ConnectionRefused
    );
    fixture.guest.write(accepted[1000], b"alive");
    let mut data = [0; 5];
    streams[1000].read_exact(&mut data).unwrap();
    assert_eq!(&data, b"alive");

    // One that the host has closed makes room, though the guest has not consented yet.
    drop(streams.remove(7));
    fixture.guest.until(|guest| guest.streams[&accepted[7]].host_done == NO_MORE);
    assert!(fixture.guest.connect((100, 9999)));
    fixture.guest.until(|guest| guest.streams[&accepted[7]].reset);
    assert!(!fixture.guest.connect((100, 9998)));
}

#[test]
fn h42_a_storm_of_resets_changes_nothing() {
    let (mut fixture, _listener, _program) = connected(usual());
    for port in 0..20_000 {
        let header = fixture.guest.header((52, 10_000 + port), Op::Reset);
        fixture.guest.driver.send(&header, &[]);
    }
    assert_eq!(next(&mut fixture), None);
    assert!(works(&mut fixture));
}

#[test]
fn h42_requests_taken_back_at_once_leave_nothing_behind() {
    let mut fixture = Fixture::with(Driver::new(0, 4096));
    let listener = fixture.handle.listen(52).unwrap();
    for port in 0..5000 {
        fixture.guest.driver.send(&fixture.guest.header((52, port), Op::Request), &[]);
        fixture.guest.driver.send(&fixture.guest.header((52, port), Op::Reset), &[]);
        let mut stream = listener.accept_timeout(SOON).unwrap();
        assert_eq!(stream.read(&mut [0; 8]).unwrap(), 0);
    }
    assert!(fixture.vsock.look(|worker| worker.muxer.longest_list()).unwrap() < 32);
    (0..64).for_each(|buffer| fixture.guest.driver.give_rx(buffer));
    assert_eq!(next(&mut fixture), None);
    assert!(works(&mut fixture));
}

#[test]
fn h42_the_same_ports_can_be_used_again_and_again() {
    let mut fixture = Fixture::new();
    let listener = fixture.handle.listen(52).unwrap();
    for round in 0_u32..2000 {
        assert!(fixture.guest.connect(PORTS), "round {round}");
        fixture.guest.write(PORTS, &round.to_le_bytes());
        let mut stream = listener.accept_timeout(SOON).unwrap();
        let mut data = [0; 4];
        stream.read_exact(&mut data).unwrap();
        assert_eq!(u32::from_le_bytes(data), round);
        fixture.guest.close(PORTS);
    }
    assert!(fixture.guest.stray_resets.is_empty());
}

#[test]
fn a_looped_chain_stops_the_device() {
    let mut fixture = Fixture::new();
    let memory = fixture.guest.driver.memory.clone();
    // Descriptor 9 of the transmit queue continues at itself.
    let entry = crate::memory::GuestAddress(0x1_0000 + 16 * 9);
    let descriptor: [u16; 8] = [0, 0x100, 0, 0, 8, 0, 1, 9];
    crate::memory::Bytes::write_obj(&memory, descriptor, entry).unwrap();
    fixture.guest.driver.tx.offer_head(9);
    fixture.guest.driver.wait(|driver| driver.notifier.wants_reset());
}

/// Header fields and shapes that are wrong as often as right.
fn any_packet(random: &mut impl FnMut(u32) -> u32) -> (Vec<u8>, Vec<u32>) {
    let payload = vec![7; random(3) as usize * random(3000) as usize];
    let header = Header {
        src_cid: u64::from(3 + random(20) / 19),
        dst_cid: u64::from(2 + random(20) / 19),
        src_port: 5000 + random(4),
        dst_port: 52 + random(3),
        len: payload.len() as u32 + random(20) / 19,
        socket_type: 1 + (random(20) / 19) as u16,
        op: random(9) as u16,
        flags: random(5),
        buf_alloc: random(3) * 4000,
        fwd_cnt: random(2) * random(9000),
    };
    let mut bytes = header.encode().to_vec();
    bytes.extend(payload);
    bytes.truncate(if random(30) == 0 { random(50) as usize } else { usize::MAX });
    (bytes, (0..random(20) / 19).collect())
}

#[test]
fn any_packets_leave_the_device_alive() {
    let mut fixture = Fixture::new();
    let listener = fixture.handle.listen(52).unwrap();
    let mut state = 1_u32;
    let mut random = |below: u32| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) % below.max(1)
    };
    let mut programs = Vec::new();
    for _ in 0..30_000 {
        let (bytes, room) = any_packet(&mut random);
        let (first, second) = bytes.split_at(random(bytes.len() as u32 + 1) as usize);
        fixture.guest.driver.send_pieces(&[first, second], &room);
        while let Some((buffer, _)) = fixture.guest.driver.received() {
            fixture.guest.driver.give_rx(buffer);
        }
        if let Ok(program) = listener.accept_timeout(Duration::ZERO) {
            program.set_nonblocking(true).unwrap();
            programs.push(program);
        }
        if let Some(mut program) = programs.pop_if(|_| random(2) == 0) {
            let _ = program.write(&[1; 3000]);
            let _ = program.read(&mut [0; 3000]);
            if random(3) == 0 {
                programs.insert(0, program);
            }
        }
    }
    while next(&mut fixture).is_some() {}
    assert!(works(&mut fixture));
}
