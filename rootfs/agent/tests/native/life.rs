//! The life of a process in the agent's table.

use crate::harness::{Agent, alive, eventually, sh};
use guest_protocol::{Error, ErrorKind, ExitStatus, ProcessId, Spawn};
use std::fs;

fn kind<T>(result: Result<T, Error>) -> ErrorKind {
    match result.err().unwrap() {
        Error::Refused { kind, .. } => kind,
        other => panic!("not refused: {other}"),
    }
}

/// The children of the agent, zombies included.
fn children(agent: &Agent) -> String {
    let pid = agent.pid();
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let read = |task: fs::DirEntry| fs::read_to_string(task.path().join("children"));
    tasks.filter_map(|task| read(task.ok()?).ok()).collect()
}

#[test]
fn a_command_dies_with_its_connection_if_it_shall() {
    let agent = Agent::start();
    let mut client = agent.client();
    let line = "sleep 1000 & echo $! >&2; wait";
    let bound = client.spawn(sh(line).kill_on_disconnect(true)).unwrap();
    let free = client.spawn(sh(line)).unwrap();
    drop(client);
    eventually("it is killed", || !alive(bound.pid));
    assert!(alive(free.pid));
    let mut client = agent.client();
    assert_eq!(kind(client.wait(bound.process)), ErrorKind::NoSuchProcess);
    client.signal_group(free.process, 9).unwrap();
    assert_eq!(client.wait(free.process).unwrap(), ExitStatus::Signal(9));
}

#[test]
fn a_command_dies_with_a_connection_that_waits_for_it() {
    let agent = Agent::start();
    let spawn = sh("sleep 1000 & wait").kill_on_disconnect(true);
    let mut stream = guest_protocol::Connect::connect(&agent.socket(), 0).unwrap();
    let request = guest_protocol::Request::Spawn(spawn);
    guest_protocol::frame::write(&mut stream, &request).unwrap();
    let answer = guest_protocol::frame::read(&mut stream, 999).unwrap();
    let guest_protocol::Response::Spawned(spawned) = answer else { panic!("{answer:?}") };
    let request = guest_protocol::Request::Wait { process: spawned.process };
    guest_protocol::frame::write(&mut stream, &request).unwrap();
    drop(stream);
    eventually("it is killed", || !alive(spawned.pid));
}

#[test]
fn several_can_wait_for_one() {
    let agent = Agent::start();
    let process = agent.client().spawn(sh("sleep 0.2; exit 9")).unwrap().process;
    let waiters: Vec<_> = (0..3)
        .map(|_| {
            let mut client = agent.client();
            std::thread::spawn(move || client.wait(process).unwrap())
        })
        .collect();
    for waiter in waiters {
        assert_eq!(waiter.join().unwrap(), ExitStatus::Code(9));
    }
    assert_eq!(agent.client().wait(process).unwrap(), ExitStatus::Code(9), "late, too");
}

#[test]
fn what_is_released_is_forgotten_and_reaped() {
    let agent = Agent::start();
    let mut client = agent.client();
    let process = client.spawn(Spawn::new(["true"])).unwrap().process;
    client.wait(process).unwrap();
    client.release(process).unwrap();
    assert_eq!(kind(client.wait(process)), ErrorKind::NoSuchProcess);
    assert_eq!(kind(client.release(process)), ErrorKind::NoSuchProcess);
    let running = client.spawn(sh("sleep 0.1")).unwrap();
    client.release(running.process).unwrap();
    assert!(alive(running.pid), "released, not killed");
    eventually("no zombie is left", || children(&agent).is_empty());
}

#[test]
fn one_that_was_never_there_is_refused() {
    let agent = Agent::start();
    let mut client = agent.client();
    let nobody = ProcessId(77);
    assert_eq!(kind(client.wait(nobody)), ErrorKind::NoSuchProcess);
    assert_eq!(kind(client.signal(nobody, 9)), ErrorKind::NoSuchProcess);
    client.ping().unwrap();
}

#[test]
fn a_signal_that_does_not_exist_is_refused() {
    let agent = Agent::start();
    let mut client = agent.client();
    let process = client.spawn(Spawn::new(["true"])).unwrap().process;
    assert_eq!(kind(client.signal(process, 99)), ErrorKind::System);
    client.ping().unwrap();
}

#[test]
fn failed_starts_leave_nothing_behind() {
    let agent = Agent::start();
    let mut client = agent.client();
    client.ping().unwrap();
    let fds = || fs::read_dir(format!("/proc/{}/fd", agent.pid())).unwrap().count();
    let before = fds();
    for _ in 0..20 {
        client.spawn(Spawn { stdin: true, stdout: true, ..Spawn::new(["/nope"]) }).unwrap_err();
    }
    // Not exactly: a connection of the start may still be about to close.
    assert!(fds() <= before, "{} after {before}", fds());
    assert_eq!(children(&agent), "");
}

#[test]
fn sessions_leave_nothing_behind() {
    let agent = Agent::start();
    let fds = || fs::read_dir(format!("/proc/{}/fd", agent.pid())).unwrap().count();
    agent.shell("true");
    let before = fds();
    for _ in 0..20 {
        agent.run_with(Spawn::new(["cat"]), b"x".to_vec());
    }
    // The last connections close a moment after the last answer.
    eventually("all descriptors are closed", || fds() <= before);
    assert_eq!(children(&agent), "");
}
