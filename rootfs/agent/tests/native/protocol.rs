//! What no well-behaved host sends.

use crate::harness::{Agent, eventually, sh};
use guest_protocol::{
    Connect, ErrorKind, MAX_FRAME, PROTOCOL_VERSION, PowerOff, ProcessId, Renew, Request, Response,
    Spawn, Stream, frame,
};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

fn connect(agent: &Agent) -> UnixStream {
    agent.socket().connect(0).unwrap()
}

fn answer(stream: &mut UnixStream) -> (ErrorKind, String) {
    match frame::read(stream, MAX_FRAME).unwrap() {
        Response::Error { kind, message } => (kind, message),
        other => panic!("not refused: {other:?}"),
    }
}

fn send(stream: &mut UnixStream, body: &[u8]) {
    stream.write_all(&u32::try_from(body.len()).unwrap().to_le_bytes()).unwrap();
    stream.write_all(body).unwrap();
}

fn is_closed(stream: &mut UnixStream) -> bool {
    stream.read(&mut [0]).unwrap_or(0) == 0
}

#[test]
fn an_unknown_request_is_refused_and_the_next_is_answered() {
    let agent = Agent::start();
    let mut stream = connect(&agent);
    send(&mut stream, br#"{"type":"frobnicate","deeply":{"nested":[1,2]}}"#);
    assert_eq!(answer(&mut stream).0, ErrorKind::UnknownRequest);
    send(&mut stream, br#"{"type":"ping","unknown":"field"}"#);
    assert_eq!(frame::read::<Response>(&mut stream, 99).unwrap(), Response::Done);
}

#[test]
fn a_malformed_request_is_refused_and_ends_the_connection() {
    let agent = Agent::start();
    let deep = [r#"{"type":"#, &"[".repeat(100_000)].concat();
    let wrong = r#"{"type":"spawn","argv":7}"#;
    for body in ["", "{", "no json", "[]", "null", wrong, "\u{0}", &deep] {
        let mut stream = connect(&agent);
        send(&mut stream, body.as_bytes());
        let (kind, message) = answer(&mut stream);
        assert_eq!(kind, ErrorKind::Invalid, "{message}");
        assert!(is_closed(&mut stream));
    }
    agent.client().ping().unwrap();
}

#[test]
fn nesting_up_to_the_parsers_limit_does_not_overflow_the_stack() {
    let agent = Agent::start();
    let mut stream = connect(&agent);
    let nested = format!(r#"{{"x":{}{},"type":"ping"}}"#, "[".repeat(120), "]".repeat(120));
    send(&mut stream, nested.as_bytes());
    assert_eq!(frame::read::<Response>(&mut stream, 99).unwrap(), Response::Done);
}

#[test]
fn a_huge_frame_is_refused_by_its_length() {
    let agent = Agent::start();
    for length in [u32::try_from(MAX_FRAME).unwrap() + 1, u32::MAX] {
        let mut stream = connect(&agent);
        stream.write_all(&length.to_le_bytes()).unwrap();
        let (kind, message) = answer(&mut stream);
        assert_eq!(kind, ErrorKind::Invalid);
        assert!(message.contains(&length.to_string()), "{message}");
        assert!(is_closed(&mut stream));
    }
}

#[test]
fn a_frame_that_never_ends_holds_up_nobody() {
    let agent = Agent::start();
    let mut stream = connect(&agent);
    stream.write_all(b"\x10\0\0\0{").unwrap();
    agent.client().ping().unwrap();
}

#[test]
fn as_many_arguments_as_a_frame_holds_are_passed_on() {
    let agent = Agent::start();
    let big = "x".repeat(100_000);
    let spawn = Spawn::new(["/bin/sh", "-c", "echo $#", "sh"].into_iter().chain([big.as_str(); 9]));
    assert_eq!(agent.run(spawn).text(), "9\n");
    let spawn = Spawn::new(["/bin/true"].into_iter().chain([big.as_str(); 35]));
    let error = agent.start_session(spawn, None).err().unwrap();
    assert!(error.to_string().contains("Argument list too long"), "{error}");
}

#[test]
fn attach_must_come_first() {
    let agent = Agent::start();
    let mut client = agent.client();
    client.ping().unwrap();
    let request = Request::Attach { process: ProcessId(1), stream: Stream::Stdin };
    assert!(client.call(&request).unwrap_err().to_string().contains("first"));
    client.ping().unwrap();
}

#[test]
fn a_host_is_neither_renewed_nor_powered_off() {
    let agent = Agent::start();
    let mut client = agent.client();
    client.power_off(PowerOff::Poweroff).unwrap_err();
    client.renew(Renew { hostname: Some("x".into()), ..Renew::default() }).unwrap_err();
    client.ping().unwrap();
}

#[test]
fn too_many_connections_are_refused_not_dropped() {
    let agent = Agent::start();
    let mut held = Vec::new();
    for _ in 0..1024 {
        held.push(connect(&agent));
    }
    let mut one_more = connect(&agent);
    assert_eq!(answer(&mut one_more).0, ErrorKind::TooMany);
    held.clear();
    eventually("there is room again", || {
        guest_protocol::Client::connect(agent.socket()).unwrap().ping().is_ok()
    });
}

#[test]
fn the_agent_tells_about_itself() {
    let agent = Agent::start();
    let mut client = agent.client();
    let process = client.spawn(sh("exec sleep 1000").kill_on_disconnect(true)).unwrap();
    let info = client.info().unwrap();
    assert_eq!(info.hello.protocol_version, PROTOCOL_VERSION);
    assert_eq!(info.hello.boot_id.len(), 36);
    assert!(info.memory_total_kib >= info.memory_available_kib);
    assert!(info.cpus >= 1 && info.uptime_ms > 0);
    assert_eq!(info.processes, 1, "{process:?}");
    client.signal_group(process.process, 9).unwrap();
    client.wait(process.process).unwrap();
}
