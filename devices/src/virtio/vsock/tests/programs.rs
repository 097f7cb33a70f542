//! What no host program should do at the listening socket (H-43).

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

use super::super::host::MAX_GREETINGS;
use super::super::packet::Op;
use super::{Fixture, SOON};

fn program(fixture: &Fixture) -> UnixStream {
    let program = UnixStream::connect(fixture.socket()).unwrap();
    program.set_read_timeout(Some(SOON)).unwrap();
    program
}

/// True if the device ends the connection.
fn is_closed(mut program: UnixStream) -> bool {
    !matches!(program.read(&mut [0; 64]), Ok(len) if len > 0)
}

/// True if a program reaches port 1024 of the guest.
fn works(fixture: &mut Fixture) -> bool {
    fixture.guest.listening.insert(1024);
    let before = fixture.guest.streams.len();
    let mut program = program(fixture);
    program.write_all(b"CONNECT 1024\n").unwrap();
    fixture.guest.until(|guest| guest.streams.len() > before);
    let mut answer = [0; 3];
    program.read_exact(&mut answer).unwrap();
    &answer == b"OK "
}

#[test]
fn h43_nonsense_ends_the_connection() {
    let mut fixture = Fixture::new();
    for nonsense in ["\n", "HELO\n", "CONNECT x\n", "CONNECT 99999999999\n", "\0\0\0\0\n"] {
        let mut program = program(&fixture);
        program.write_all(nonsense.as_bytes()).unwrap();
        assert!(is_closed(program), "{nonsense:?}");
    }
    assert!(works(&mut fixture));
}

#[test]
fn h43_a_megabyte_without_a_newline_ends_the_connection() {
    let mut fixture = Fixture::new();
    let mut program = program(&fixture);
    // Fails in the middle, once the device has closed.
    let _ = program.write_all(&vec![b'C'; 1 << 20]);
    assert!(is_closed(program));
    assert!(works(&mut fixture));
}

#[test]
fn h43_programs_that_leave_in_the_middle_are_forgotten() {
    let mut fixture = Fixture::new();
    for len in 0..13 {
        for _ in 0..20 {
            let mut program = program(&fixture);
            program.write_all(&b"CONNECT 1024\n"[..len]).unwrap();
        }
    }
    assert!(works(&mut fixture));
    assert!(fixture.guest.stray_resets.is_empty());
}

#[test]
fn h43_programs_that_say_nothing_delay_others_only_a_little() {
    let mut fixture = Fixture::new();
    let silent: Vec<_> = (0..MAX_GREETINGS)
        .map(|number| {
            let mut program = program(&fixture);
            program.write_all(&b"CONNECT"[..number % 7]).unwrap();
            program
        })
        .collect();
    let begin = Instant::now();
    assert!(works(&mut fixture));
    assert!(begin.elapsed() < SOON / 2);
    assert!(silent.into_iter().all(is_closed));
}

#[test]
fn h43_a_slow_program_is_still_understood() {
    let mut fixture = Fixture::new();
    fixture.guest.listening.insert(1024);
    let mut program = program(&fixture);
    let typist = thread::spawn(move || {
        for &byte in b"CONNECT 1024\n" {
            program.write_all(&[byte]).unwrap();
            thread::sleep(Duration::from_millis(10));
        }
        program.read_exact(&mut [0; 3]).unwrap();
    });
    fixture.guest.until(|guest| guest.streams.len() == 1);
    typist.join().unwrap();
}

#[test]
fn h43_a_thousand_at_once_are_all_answered() {
    let mut fixture = Fixture::new();
    fixture.guest.listening.insert(1024);
    let socket = fixture.socket();
    let crowd: Vec<_> = (0..20)
        .map(|_| {
            let socket = socket.clone();
            thread::spawn(move || {
                let connect = |_| {
                    let mut program = UnixStream::connect(&socket).unwrap();
                    program.set_read_timeout(Some(SOON)).unwrap();
                    program.write_all(b"CONNECT 1024\n").unwrap();
                    program
                };
                let programs: Vec<_> = (0..50).map(connect).collect();
                let answers = programs.into_iter().filter_map(|mut program| {
                    let mut answer = [0; 3];
                    program.read_exact(&mut answer).ok().filter(|()| &answer == b"OK ")
                });
                answers.count()
            })
        })
        .collect();
    while !crowd.iter().all(thread::JoinHandle::is_finished) {
        fixture.guest.idle(Duration::from_millis(10));
    }
    let answered: usize = crowd.into_iter().map(|part| part.join().unwrap()).sum();
    assert_eq!(answered, 1000);
}

#[test]
fn h43_requests_that_the_guest_does_not_answer_time_out() {
    let mut fixture = Fixture::new();
    let mut program = program(&fixture);
    program.write_all(b"CONNECT 5\n").unwrap();
    assert_eq!(fixture.guest.receive(SOON).unwrap().header.op, Op::Request as u16);
    let begin = Instant::now();
    assert!(is_closed(program));
    assert!(begin.elapsed() > Duration::from_secs(5));
    assert_eq!(fixture.guest.receive(SOON).unwrap().header.op, Op::Reset as u16);
    assert!(works(&mut fixture));
}
