//! Streams through vsock, in both directions and from both sides.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

use guest_protocol::{ExitStatus, Spawn};
use harness::{TestVm, image, sh};
use libtest_mimic::Trial;

pub fn trials() -> Vec<Trial> {
    harness::trials![
        megabytes_come_back_as_they_went,
        many_streams_do_not_mix,
        output_that_is_not_read_holds_up_nobody_else,
        a_command_goes_with_whoever_asked_for_it,
        a_signal_reaches_a_command,
        the_guest_connects_to_the_host,
        the_guest_is_refused_where_the_host_does_not_listen,
        the_host_is_refused_where_the_guest_does_not_listen,
    ]
}

fn megabytes_come_back_as_they_went() {
    let vm = TestVm::boot();
    let sent = image::noise(20_000_000, 43);
    let output = vm.exec_with(["cat"], &sent);
    assert!(output.status.success());
    assert!(output.stdout == sent, "{} bytes came back", output.stdout.len());
}

fn many_streams_do_not_mix() {
    let vm = TestVm::builder().cpus(2).boot();
    let echo = |seed: u64| {
        let sent = image::noise(1_000_000, seed);
        vm.exec_with(["cat"], &sent).stdout == sent
    };
    let all: Vec<bool> = std::thread::scope(|scope| {
        let echo = &echo;
        let threads: Vec<_> = (0..8).map(|seed| scope.spawn(move || echo(100 + seed))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(all, [true; 8]);
}

fn output_that_is_not_read_holds_up_nobody_else() {
    let vm = TestVm::boot();
    let mut agent = vm.agent();
    let mut spawn = Spawn::new(["cat", "/dev/zero"]).kill_on_disconnect(true);
    spawn.stdout = true;
    let spawned = agent.spawn(spawn).unwrap();
    let unread = agent.attach(spawned.process, guest_protocol::Stream::Stdout).unwrap();
    std::thread::sleep(Duration::from_millis(500));
    let sent = image::noise(1_000_000, 47);
    assert!(vm.exec_with(["cat"], &sent).stdout == sent, "the bytes differ");
    drop(unread);
}

fn a_command_goes_with_whoever_asked_for_it() {
    let vm = TestVm::boot();
    let running = vm.cli("exec", &["--"]).arguments(sh("echo ready; exec sleep 54321")).start();
    running.stdout.wait_for("ready");
    running.signal(nix::sys::signal::Signal::SIGKILL);
    running.end().output(137);
    let line = "for i in $(seq 300); do pgrep -f 'sleep 5432[1]' >/dev/null || exit 0; \
                sleep 0.1; done; exit 1";
    assert_eq!(vm.exec(sh(line)).status, ExitStatus::Code(0));
}

fn a_signal_reaches_a_command() {
    let vm = TestVm::boot();
    let running = vm.cli("exec", &["--"]).arguments(sh("echo ready; exec sleep 100000")).start();
    running.stdout.wait_for("ready");
    running.signal(nix::sys::signal::Signal::SIGTERM);
    running.end().output(143);
    assert_eq!(vm.exec(["echo", "here"]).text(), "here");
}

/// The socket on which the host listens to a port of the guest.
fn host_port(vm: &TestVm, port: u32) -> std::path::PathBuf {
    format!("{}_{port}", vm.vsock().display()).into()
}

fn the_guest_connects_to_the_host() {
    let vm = TestVm::boot();
    let client = vm.install("vsock", &image::static_program(vm.place(), "vsock"));
    let path = host_port(&vm, 5000);
    let listener = UnixListener::bind(&path).unwrap();
    let serving = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut received = Vec::new();
        stream.read_to_end(&mut received).unwrap();
        stream.write_all(b"got ").unwrap();
        stream.write_all(&received).unwrap();
    });
    let sent = image::noise(1_000_000, 53);
    let output = vm.exec_with([client.as_str(), "5000"], &sent);
    serving.join().unwrap();
    std::fs::remove_file(path).unwrap();
    assert!(output.status.success(), "{:?}", output.status);
    assert!(output.stdout == [b"got ", sent.as_slice()].concat(), "{}", output.stdout.len());
}

fn the_guest_is_refused_where_the_host_does_not_listen() {
    let vm = TestVm::boot();
    let client = vm.install("vsock", &image::static_program(vm.place(), "vsock"));
    let output = vm.exec([client.as_str(), "5001"]);
    assert_eq!(output.status, ExitStatus::Code(1), "{output:?}");
    let reason = String::from_utf8_lossy(&output.stderr).to_lowercase();
    assert!(reason.contains("reset") || reason.contains("refused"), "{reason}");
}

fn the_host_is_refused_where_the_guest_does_not_listen() {
    let vm = TestVm::boot();
    let mut stream = UnixStream::connect(vm.vsock()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    stream.write_all(b"CONNECT 4321\n").unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    assert_eq!(answer, b"", "it is closed without an OK");
    assert_eq!(vm.exec(["echo", "here"]).text(), "here");
}
