//! Bytes: none lost, none too many, nobody waits for what never comes.

use crate::harness::{Agent, alive, eventually, sh};
use guest_protocol::{ExitStatus, Spawn, Stream};
use std::fs::File;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::thread;
use std::time::{Duration, Instant};

#[test]
fn the_end_of_stdin_reaches_the_command() {
    let agent = Agent::start();
    assert_eq!(agent.run_with(Spawn::new(["wc", "-l"]), b"a\nb\nc\n".to_vec()).text(), "3\n");
    let null = File::open("/dev/null").unwrap();
    let running = agent.start_session(Spawn::new(["cat"]), Some(null.into())).unwrap();
    assert_eq!(running.finish().status, ExitStatus::Code(0));
}

#[test]
fn twenty_megabytes_come_back_as_they_went() {
    let agent = Agent::start();
    let bytes: Vec<u8> =
        (0_u32..5 << 20).flat_map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
    let outcome = agent.run_with(Spawn::new(["cat"]), bytes.clone());
    assert!(outcome.status.success());
    assert!(outcome.stdout == bytes, "{} of {} bytes", outcome.stdout.len(), bytes.len());
}

#[test]
fn stdout_and_stderr_stay_apart() {
    let agent = Agent::start();
    let outcome = agent.shell("echo out; echo err >&2");
    assert_eq!((outcome.text(), outcome.stderr.as_slice()), ("out\n", b"err\n".as_slice()));
}

#[test]
fn the_output_of_a_fast_command_is_never_lost() {
    let agent = Agent::start();
    for number in 0..200 {
        let outcome = agent.run(Spawn::new(["/bin/echo", &number.to_string()]));
        assert_eq!(outcome.text(), format!("{number}\n"));
    }
}

#[test]
fn output_waits_until_it_is_attached() {
    let agent = Agent::start();
    let mut client = agent.client();
    let spawn = Spawn { stdout: true, ..sh("seq 1000") };
    let process = client.spawn(spawn).unwrap().process;
    assert_eq!(client.wait(process).unwrap(), ExitStatus::Code(0));
    let mut text = String::new();
    client.attach(process, Stream::Stdout).unwrap().read_to_string(&mut text).unwrap();
    assert_eq!(text.lines().count(), 1000);
}

#[test]
fn input_that_nobody_reads_does_not_hold_up_the_end() {
    let agent = Agent::start();
    // Never written, never closed.
    let (stdin, _feed) = io::pipe().unwrap();
    let running = agent.start_session(sh("exit 5"), Some(stdin.into())).unwrap();
    assert_eq!(running.finish().status, ExitStatus::Code(5));
    // More than all buffers hold.
    let outcome = agent.run_with(sh("exit 6"), vec![0; 8 << 20]);
    assert_eq!(outcome.status, ExitStatus::Code(6));
}

#[test]
fn input_after_the_command_is_left_unread() {
    let agent = Agent::start();
    let (stdin, mut feed) = io::pipe().unwrap();
    let mut rest = stdin.try_clone().unwrap();
    let running = agent.start_session(sh("exit 0"), Some(stdin.into())).unwrap();
    running.finish();
    feed.write_all(b"for the next").unwrap();
    drop(feed);
    let mut text = String::new();
    rest.read_to_string(&mut text).unwrap();
    assert_eq!(text, "for the next");
}

#[test]
fn a_background_child_gets_its_grace_and_no_more() {
    let agent = Agent::start();
    let start = Instant::now();
    let outcome = agent.shell("(sleep 0.3; echo late; sleep 1000) & echo $!");
    let lines: Vec<&str> = outcome.text().lines().collect();
    assert_eq!(lines[1..], ["late"]);
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    let child: i32 = lines[0].parse().unwrap();
    assert!(alive(child), "what was put into the background lives on");
    nix::sys::signal::killpg(
        nix::unistd::getpgid(Some(nix::unistd::Pid::from_raw(child))).unwrap(),
        nix::sys::signal::Signal::SIGKILL,
    )
    .unwrap();
}

#[test]
fn a_background_child_that_goes_on_writing_is_neither_blocked_nor_killed() {
    let agent = Agent::start();
    let done = tempfile::NamedTempFile::new().unwrap();
    let path = done.path().display();
    let line = format!("(sleep 0.4; yes | head -c 1000000; echo done >{path}) & exit 0");
    let running = agent.start_session(Spawn { linger_ms: Some(100), ..sh(&line) }, None).unwrap();
    assert_eq!(running.finish().stdout, b"");
    eventually("it has written all", || std::fs::read(done.path()).unwrap() == b"done\n");
}

#[test]
fn with_no_limit_to_the_grace_output_is_waited_for() {
    let agent = Agent::start();
    let spawn = Spawn { linger_ms: None, ..sh("(sleep 1.5; echo late) & exit 0") };
    assert_eq!(agent.run(spawn).text(), "late\n");
}

#[test]
fn a_reader_that_goes_away_is_a_broken_pipe_for_the_command() {
    let agent = Agent::start();
    let mut client = agent.client();
    let process = client.spawn(Spawn { stdout: true, ..Spawn::new(["yes"]) }).unwrap().process;
    let mut stream = client.attach(process, Stream::Stdout).unwrap();
    stream.read_exact(&mut [0; 100]).unwrap();
    drop(stream);
    assert_eq!(client.wait(process).unwrap(), ExitStatus::Signal(13));
}

#[test]
fn a_kept_stream_can_be_attached_anew() {
    let agent = Agent::start();
    let mut client = agent.client();
    let spawn =
        Spawn { stdin: true, stdout: true, keep_streams: true, ..sh("echo one; read x; echo two") };
    let process = client.spawn(spawn).unwrap().process;
    let mut stream = client.attach(process, Stream::Stdout).unwrap();
    stream.read_exact(&mut [0; 4]).unwrap();
    assert!(client.attach(process, Stream::Stdout).is_err(), "it is attached");
    drop(stream);
    let mut text = String::new();
    let mut again = None;
    eventually("it is free again", || {
        again = client.attach(process, Stream::Stdout).ok();
        again.is_some()
    });
    client.attach(process, Stream::Stdin).unwrap().write_all(b"x\n").unwrap();
    again.unwrap().read_to_string(&mut text).unwrap();
    assert_eq!(text, "two\n");
}

#[test]
fn a_stream_that_is_not_there_cannot_be_attached() {
    let agent = Agent::start();
    let mut client = agent.client();
    let process = client.spawn(Spawn::new(["true"])).unwrap().process;
    let error = client.attach(process, Stream::Stdin).unwrap_err();
    assert!(error.to_string().contains("stdin"), "{error}");
}

#[test]
fn a_command_can_close_its_stdin_early() {
    let agent = Agent::start();
    let mut client = agent.client();
    let spawn = Spawn { stdin: true, ..sh("exec 0<&-; exec sleep 1000") };
    let process = client.spawn(spawn).unwrap().process;
    let mut stream = client.attach(process, Stream::Stdin).unwrap();
    assert_eq!(stream.read(&mut [0]).unwrap(), 0, "the agent closes the connection");
    client.signal(process, 9).unwrap();
    client.wait(process).unwrap();
}

#[test]
fn a_half_closed_stdin_does_not_end_the_output() {
    let agent = Agent::start();
    let mut client = agent.client();
    let spawn = Spawn { stdin: true, stdout: true, ..sh("cat; sleep 0.2; echo end") };
    let process = client.spawn(spawn).unwrap().process;
    let mut stdin = client.attach(process, Stream::Stdin).unwrap();
    let mut stdout = client.attach(process, Stream::Stdout).unwrap();
    let reading = thread::spawn(move || {
        let mut text = String::new();
        stdout.read_to_string(&mut text).unwrap();
        text
    });
    stdin.write_all(b"start\n").unwrap();
    stdin.shutdown(Shutdown::Write).unwrap();
    assert_eq!(reading.join().unwrap(), "start\nend\n");
}

/// Lets go of a stream of a process, as the host does before it saves a guest.
fn detach(agent: &Agent, process: guest_protocol::ProcessId, stream: Stream) {
    agent.client().detach(process, stream).unwrap();
}

#[test]
fn detached_output_is_whole_and_goes_on_with_the_next_connection() {
    let agent = Agent::start();
    let mut client = agent.client();
    let spawn = Spawn { stdout: true, ..Spawn::new(["seq", "200000"]) };
    let process = client.spawn(spawn).unwrap().process;
    let mut all = String::new();
    let mut connections = 0;
    // Until the stream has ended, and cannot be attached.
    while let Ok(mut stream) = client.attach(process, Stream::Stdout) {
        connections += 1;
        let mut some = [0; 1000];
        let read = stream.read(&mut some).unwrap();
        all.push_str(std::str::from_utf8(&some[..read]).unwrap());
        if connections <= 20 {
            detach(&agent, process, Stream::Stdout);
        }
        stream.read_to_string(&mut all).unwrap();
    }
    assert!(connections > 1, "{connections}");
    let lines: Vec<u32> = all.lines().map(|line| line.parse().unwrap()).collect();
    assert_eq!(lines, (1..=200_000).collect::<Vec<u32>>());
    assert_eq!(client.wait(process).unwrap(), ExitStatus::Code(0));
}

#[test]
fn a_detached_stream_is_no_broken_pipe() {
    let agent = Agent::start();
    let mut client = agent.client();
    let process = client.spawn(Spawn { stdout: true, ..Spawn::new(["yes"]) }).unwrap().process;
    let mut stream = client.attach(process, Stream::Stdout).unwrap();
    detach(&agent, process, Stream::Stdout);
    stream.read_to_end(&mut Vec::new()).unwrap();
    // Again, and it is no error.
    detach(&agent, process, Stream::Stdout);
    let mut stream = client.attach(process, Stream::Stdout).unwrap();
    stream.read_exact(&mut [0; 100_000]).unwrap();
    client.signal(process, 9).unwrap();
    assert_eq!(client.wait(process).unwrap(), ExitStatus::Signal(9));
}

#[test]
fn detached_input_waits_for_a_process_that_does_not_read() {
    let agent = Agent::start();
    let mut client = agent.client();
    let spawn = Spawn { stdin: true, stdout: true, ..sh("kill -STOP $$; wc -c") };
    let process = client.spawn(spawn).unwrap().process;
    let stream = client.attach(process, Stream::Stdin).unwrap();
    let mut writer = stream.try_clone().unwrap();
    // More than the pipe to the process holds.
    let feed = thread::spawn(move || writer.write_all(&[b'x'; 150_000]).map(|()| writer));
    thread::sleep(Duration::from_millis(100));
    detach(&agent, process, Stream::Stdin);
    let writer = feed.join().unwrap().unwrap();
    writer.shutdown(Shutdown::Write).unwrap();
    let mut stream = stream;
    assert_eq!(stream.read(&mut [0]).unwrap(), 0, "the agent has all of it");
    let mut again = client.attach(process, Stream::Stdin).unwrap();
    client.signal(process, 18).unwrap();
    again.write_all(b"and more").unwrap();
    again.shutdown(Shutdown::Write).unwrap();
    let mut text = String::new();
    client.attach(process, Stream::Stdout).unwrap().read_to_string(&mut text).unwrap();
    assert_eq!(text, "150008\n");
}
