//! Connections made, refused and ended, from both sides.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread;
use std::time::{Duration, Instant};

use super::super::packet::{NO_MORE, NO_RECEIVE, NO_SEND, Op};
use super::stack::Ports;
use super::{Fixture, SOON};

/// A program that connects to port 1024 of the guest, and what it was told.
fn program(fixture: &Fixture) -> UnixStream {
    let mut program = UnixStream::connect(fixture.socket()).unwrap();
    program.set_read_timeout(Some(SOON)).unwrap();
    program.write_all(b"CONNECT 1024\n").unwrap();
    program
}

fn line(program: &mut UnixStream) -> String {
    let mut line = Vec::new();
    let mut byte = [0];
    while !line.ends_with(b"\n") && program.read(&mut byte).unwrap() == 1 {
        line.push(byte[0]);
    }
    String::from_utf8(line).unwrap()
}

/// An open connection from the guest to a program.
fn from_guest(fixture: &mut Fixture) -> (Ports, UnixStream) {
    let listener = UnixListener::bind(fixture.service(52)).unwrap();
    assert!(fixture.guest.connect((52, 5000)));
    let program = listener.accept().unwrap().0;
    program.set_read_timeout(Some(SOON)).unwrap();
    ((52, 5000), program)
}

#[test]
fn a_program_reaches_the_guest() {
    let mut fixture = Fixture::new();
    fixture.guest.listening.insert(1024);
    let mut program = program(&fixture);
    program.write_all(b"early").unwrap();
    fixture.guest.until(|guest| guest.streams.len() == 1);
    let ports = *fixture.guest.streams.keys().next().unwrap();
    assert_eq!(line(&mut program), format!("OK {}\n", ports.0));
    assert!(ports.0 >= 1 << 30);
    fixture.guest.until(|guest| guest.streams[&ports].data == b"early");
    fixture.guest.write(ports, b"answer");
    let mut answer = [0; 6];
    program.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"answer");
}

#[test]
fn a_program_that_the_guest_refuses_sees_the_end() {
    let mut fixture = Fixture::new();
    let mut program = program(&fixture);
    let reader = thread::spawn(move || program.read(&mut [0; 8]).unwrap());
    fixture.guest.turn(SOON);
    assert_eq!(reader.join().unwrap(), 0);
}

#[test]
fn the_handle_reaches_the_guest() {
    let mut fixture = Fixture::new();
    fixture.guest.listening.insert(7);
    let handle = fixture.handle.clone();
    let user = thread::spawn(move || {
        let mut stream = handle.connect(7).unwrap();
        stream.write_all(b"ping").unwrap();
        let mut answer = [0; 4];
        stream.read_exact(&mut answer).unwrap();
        answer
    });
    fixture.guest.until(|guest| guest.streams.values().any(|stream| stream.data == b"ping"));
    let ports = *fixture.guest.streams.keys().next().unwrap();
    fixture.guest.write(ports, b"pong");
    assert_eq!(&user.join().unwrap(), b"pong");
}

#[test]
fn the_handle_hears_a_refusal() {
    let mut fixture = Fixture::new();
    let handle = fixture.handle.clone();
    let user = thread::spawn(move || handle.connect(7).unwrap_err().kind());
    fixture.guest.turn(SOON);
    assert_eq!(user.join().unwrap(), io::ErrorKind::ConnectionRefused);
}

#[test]
fn the_handle_does_not_wait_for_ever_and_the_guest_hears_of_it() {
    let mut fixture = Fixture::new();
    let timeout = Duration::from_millis(200);
    let begin = Instant::now();
    let error = fixture.handle.connect_timeout(7, timeout).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    assert!(begin.elapsed() < SOON / 4);
    let mut ops = Vec::new();
    while ops.last() != Some(&(Op::Reset as u16)) {
        ops.push(fixture.guest.receive(SOON).unwrap().header.op);
    }
    assert_eq!(ops, [Op::Request as u16, Op::Reset as u16]);
}

#[test]
fn a_late_answer_is_refused() {
    let mut fixture = Fixture::new();
    let _ = fixture.handle.connect_timeout(7, Duration::from_millis(50));
    let request = fixture.guest.receive(SOON).unwrap().header;
    let ports = (request.src_port, request.dst_port);
    assert_eq!(fixture.guest.receive(SOON).unwrap().header.op, Op::Reset as u16);
    fixture.guest.send(ports, Op::Response);
    fixture.guest.until(|guest| guest.stray_resets == [ports]);
}

#[test]
fn a_program_that_gives_up_is_taken_back() {
    let mut fixture = Fixture::new();
    let program = program(&fixture);
    assert_eq!(fixture.guest.receive(SOON).unwrap().header.op, Op::Request as u16);
    drop(program);
    assert_eq!(fixture.guest.receive(SOON).unwrap().header.op, Op::Reset as u16);
}

#[test]
fn the_guest_reaches_a_program() {
    let mut fixture = Fixture::new();
    let (ports, mut program) = from_guest(&mut fixture);
    fixture.guest.write(ports, b"hello");
    let mut hello = [0; 5];
    program.read_exact(&mut hello).unwrap();
    assert_eq!(&hello, b"hello");
    program.write_all(b"you").unwrap();
    fixture.guest.until(|guest| guest.streams[&ports].data == b"you");
}

#[test]
fn the_guest_reaches_a_listener_of_this_process_first() {
    let mut fixture = Fixture::new();
    let _file = UnixListener::bind(fixture.service(52)).unwrap();
    let listener = fixture.handle.listen(52).unwrap();
    assert_eq!(listener.port(), 52);
    let taken = fixture.handle.listen(52).err().unwrap();
    assert_eq!(taken.kind(), io::ErrorKind::AddrInUse);
    assert!(fixture.guest.connect((52, 5000)));
    let mut stream = listener.accept_timeout(SOON).unwrap();
    fixture.guest.write((52, 5000), b"x");
    assert_eq!(stream.read(&mut [0; 8]).unwrap(), 1);
    let error = listener.accept_timeout(Duration::from_millis(1)).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::TimedOut);
}

#[test]
fn a_listener_that_is_dropped_is_gone() {
    let mut fixture = Fixture::new();
    drop(fixture.handle.listen(52).unwrap());
    assert!(!fixture.guest.connect((52, 5000)));
    assert!(fixture.handle.listen(52).is_ok());
}

#[test]
fn a_listener_that_nobody_serves_refuses_in_the_end() {
    let mut fixture = Fixture::new();
    let _listener = fixture.handle.listen(52).unwrap();
    let accepted = (0..200).filter(|port| fixture.guest.connect((52, 5000 + port))).count();
    assert_eq!(accepted, 128);
}

#[test]
fn the_guest_is_refused_where_nobody_listens() {
    let mut fixture = Fixture::new();
    assert!(!fixture.guest.connect((52, 5000)));
    drop(UnixListener::bind(fixture.service(53)).unwrap());
    assert!(!fixture.guest.connect((53, 5000)));
}

#[test]
fn a_program_may_end_its_data_and_still_receive() {
    let mut fixture = Fixture::new();
    let (ports, mut program) = from_guest(&mut fixture);
    program.write_all(b"question").unwrap();
    program.shutdown(Shutdown::Write).unwrap();
    fixture.guest.until(|guest| guest.streams[&ports].host_done == NO_SEND);
    assert_eq!(fixture.guest.streams[&ports].data, b"question");
    fixture.guest.write(ports, b"answer");
    fixture.guest.close(ports);
    let mut answer = String::new();
    program.read_to_string(&mut answer).unwrap();
    assert_eq!(answer, "answer");
}

#[test]
fn the_guest_may_end_its_data_and_still_receive() {
    let mut fixture = Fixture::new();
    let (ports, mut program) = from_guest(&mut fixture);
    fixture.guest.write(ports, b"question");
    fixture.guest.send_flags(ports, Op::Shutdown, NO_SEND);
    let mut question = String::new();
    program.read_to_string(&mut question).unwrap();
    assert_eq!(question, "question");
    program.write_all(b"answer").unwrap();
    fixture.guest.until(|guest| guest.streams[&ports].data == b"answer");
    drop(program);
    fixture.guest.until(|guest| guest.streams[&ports].host_done == NO_MORE);
}

#[test]
fn a_guest_that_receives_no_more_stops_the_program() {
    let mut fixture = Fixture::new();
    let (ports, mut program) = from_guest(&mut fixture);
    fixture.guest.send_flags(ports, Op::Shutdown, NO_RECEIVE);
    fixture.guest.write(ports, b"still sending");
    let mut data = [0; 13];
    program.read_exact(&mut data).unwrap();
    assert_eq!(program.write(b"x").unwrap_err().kind(), io::ErrorKind::BrokenPipe);
}

#[test]
fn a_program_that_receives_no_more_stops_the_guest() {
    let mut fixture = Fixture::new();
    let (ports, mut program) = from_guest(&mut fixture);
    program.shutdown(Shutdown::Read).unwrap();
    fixture.guest.write(ports, b"lost");
    fixture.guest.until(|guest| guest.streams[&ports].host_done == NO_RECEIVE);
    program.write_all(b"still sending").unwrap();
    fixture.guest.until(|guest| guest.streams[&ports].data == b"still sending");
}

#[test]
fn what_a_program_sent_before_it_left_arrives() {
    let mut fixture = Fixture::new();
    fixture.guest.alloc = 4096;
    fixture.guest.sleepy = true;
    let (ports, mut program) = from_guest(&mut fixture);
    program.write_all(&[7; 20_000]).unwrap();
    drop(program);
    fixture.guest.until(|guest| guest.streams[&ports].credit_requests == 1);
    fixture.guest.idle(Duration::from_millis(100));
    assert_eq!(fixture.guest.streams[&ports].data.len(), 4096);
    fixture.guest.streams.get_mut(&ports).unwrap().asleep = false;
    fixture.guest.read(ports);
    fixture.guest.until(|guest| guest.streams[&ports].host_done == NO_MORE);
    assert_eq!(fixture.guest.streams[&ports].data, [7; 20_000]);
}

#[test]
fn a_close_of_the_guest_waits_for_its_data_to_arrive() {
    let mut fixture = Fixture::new();
    let (ports, mut program) = from_guest(&mut fixture);
    let sent = fixture.guest.stuff(ports);
    fixture.guest.send_flags(ports, Op::Shutdown, NO_MORE);
    fixture.guest.idle(Duration::from_millis(100));
    assert!(!fixture.guest.streams[&ports].reset);
    let reader = thread::spawn(move || {
        let mut data = Vec::new();
        program.read_to_end(&mut data).unwrap();
        data.len()
    });
    fixture.guest.until(|guest| guest.streams[&ports].reset);
    assert_eq!(reader.join().unwrap(), sent);
}

#[test]
fn data_of_a_guest_that_has_closed_and_left_still_arrives() {
    let mut fixture = Fixture::new();
    let (ports, mut program) = from_guest(&mut fixture);
    let sent = fixture.guest.stuff(ports);
    fixture.guest.send_flags(ports, Op::Shutdown, NO_MORE);
    fixture.guest.send(ports, Op::Reset);
    // The ports can be used anew meanwhile.
    std::fs::remove_file(fixture.service(52)).unwrap();
    let listener = UnixListener::bind(fixture.service(52)).unwrap();
    assert!(fixture.guest.connect(ports));
    let mut data = Vec::new();
    program.read_to_end(&mut data).unwrap();
    assert_eq!(data.len(), sent);
    fixture.guest.write(ports, b"new");
    let mut new = [0; 3];
    listener.accept().unwrap().0.read_exact(&mut new).unwrap();
    assert_eq!(&new, b"new");
}

#[test]
fn a_reset_of_the_guest_ends_the_programs_connection() {
    let mut fixture = Fixture::new();
    let (ports, mut program) = from_guest(&mut fixture);
    fixture.guest.write(ports, b"last words");
    fixture.guest.send(ports, Op::Reset);
    let mut words = String::new();
    program.read_to_string(&mut words).unwrap();
    assert_eq!(words, "last words");
}
