//! Commands with a terminal.

use crate::harness::{Agent, alive, eventually, sh};
use guest_protocol::{ExitStatus, Spawn, Stream, WindowSize};
use std::io::{self, Read, Write};

const SIZE: WindowSize = WindowSize { rows: 30, cols: 100 };

#[test]
fn a_terminal_has_the_size_it_was_given() {
    let agent = Agent::start();
    let outcome = agent.run(Spawn::new(["stty", "size"]).tty(SIZE));
    assert_eq!(outcome.text(), "30 100\r\n");
}

#[test]
fn it_is_the_controlling_terminal_of_all_three_streams() {
    let agent = Agent::start();
    let outcome = agent.run(sh("test -t 0 -a -t 1 -a -t 2 && echo $TERM >/dev/tty").tty(SIZE));
    assert_eq!(outcome.text(), "xterm\r\n");
}

#[test]
fn a_resize_is_a_signal_and_a_new_size() {
    let agent = Agent::start();
    let line = "trap 'stty size; exit' WINCH; echo ready; while :; do sleep 0.01; done";
    let running = agent.start_session(sh(line).tty(SIZE), None).unwrap();
    running.wait_for("ready");
    running.remote().resize(WindowSize { rows: 7, cols: 8 }).unwrap();
    assert_eq!(running.finish().text(), "ready\r\n7 8\r\n");
}

#[test]
fn only_a_terminal_can_be_resized() {
    let agent = Agent::start();
    let running = agent.start_session(sh("sleep 0.2"), None).unwrap();
    assert!(running.remote().resize(SIZE).is_err());
    running.finish();
}

#[test]
fn control_c_interrupts_the_foreground() {
    let agent = Agent::start();
    let (stdin, mut keyboard) = io::pipe().unwrap();
    let running = agent
        .start_session(sh("echo ready; exec sleep 1000").tty(SIZE), Some(stdin.into()))
        .unwrap();
    running.wait_for("ready");
    keyboard.write_all(b"\x03").unwrap();
    assert_eq!(running.finish().status, ExitStatus::Signal(2));
}

#[test]
fn the_end_of_input_is_control_d() {
    let agent = Agent::start();
    let spawn = Spawn::new(["cat"]).tty(SIZE);
    let outcome = agent.run_with(spawn.clone(), b"line\n".to_vec());
    assert_eq!((outcome.status, outcome.text()), (ExitStatus::Code(0), "line\r\nline\r\n"));
    let outcome = agent.run_with(spawn, b"unfinished".to_vec());
    assert_eq!(outcome.status, ExitStatus::Code(0));
    assert!(outcome.text().ends_with("unfinished"), "{outcome:?}");
}

#[test]
fn much_output_on_a_terminal_comes_whole() {
    let agent = Agent::start();
    for _ in 0..10 {
        let outcome = agent.run(sh("stty -opost; seq 20000").tty(SIZE));
        assert_eq!(outcome.text().lines().count(), 20000);
    }
}

#[test]
fn a_cut_line_is_a_hangup() {
    let agent = Agent::start();
    let mut client = agent.client();
    let spawn = Spawn { stdout: true, ..sh("echo; sleep 1000 & wait").tty(SIZE) };
    let spawned = client.spawn(spawn).unwrap();
    let mut stream = client.attach(spawned.process, Stream::Stdout).unwrap();
    stream.read_exact(&mut [0; 2]).unwrap();
    drop(stream);
    assert_eq!(client.wait(spawned.process).unwrap(), ExitStatus::Signal(1));
    eventually("it is gone", || !alive(spawned.pid));
}
