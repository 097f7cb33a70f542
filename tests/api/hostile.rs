//! Peers of the two sockets that do not behave. The VM is none the worse for them.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use guest_protocol::{Client, HybridSocket};
use harness::{TestVm, census, eventually, image};
use libtest_mimic::Trial;

pub fn trials() -> Vec<Trial> {
    harness::trials![
        what_is_no_request_is_answered_as_such,
        requests_in_one_go_are_answered_in_order,
        a_request_in_pieces_is_one_request,
        a_thousand_connections_to_the_control_socket,
        connections_that_say_nothing_do_not_shut_out_others_for_good,
        garbage_on_the_vsock_socket,
        hundreds_of_connections_to_the_vsock_socket,
    ]
}

/// The VM does what it should, and holds no descriptor that it did not hold before.
#[track_caller]
fn assert_unharmed(vm: &TestVm, descriptors: usize) {
    assert_eq!(vm.exec(["echo", "unharmed"]).text(), "unharmed");
    assert!(vm.info().ready);
    census::assert_descriptors(&process(vm), descriptors);
}

fn process(vm: &TestVm) -> PathBuf {
    vm.pid().to_string().into()
}

/// Descriptors of a VM that has served somebody on each socket already.
fn descriptors(vm: &TestVm) -> usize {
    vm.exec(["true"]);
    census::settled_descriptors(&process(vm))
}

fn what_is_no_request_is_answered_as_such() {
    let vm = TestVm::boot();
    let before = descriptors(&vm);
    let long = vec![b'x'; 100_000];
    let lines: [&[u8]; 9] = [
        b"\n",
        b"GET / HTTP/1.1\r\n",
        b"{}\n",
        b"[]\n",
        b"{\"request\":\"nosuch\"}\n",
        b"{\"request\":\"stop\",\"how\":\"sideways\"}\n",
        b"{\"request\":\"stop\",\"timeout_ms\":-1}\n",
        b"\xff\xfe\x00\n",
        &long,
    ];
    for line in lines {
        let answers = vm.converse(line, 1);
        let shown = line[..line.len().min(40)].escape_ascii();
        assert_eq!(answers.len(), 1, "{shown}");
        assert!(answers[0].contains("\"invalid\""), "{shown}: {answers:?}");
    }
    assert_unharmed(&vm, before);
}

fn requests_in_one_go_are_answered_in_order() {
    let vm = TestVm::boot();
    let requests = b"{\"request\":\"pause\"}\n{\"request\":\"pause\"}\n{\"request\":\"resume\"}\n";
    let answers = vm.converse(requests, 3);
    assert_eq!(answers.len(), 3, "{answers:?}");
    assert!(answers[0].contains("done"), "{answers:?}");
    assert!(answers[1].contains("illegal"), "{answers:?}");
    assert!(answers[2].contains("done"), "{answers:?}");
}

fn a_request_in_pieces_is_one_request() {
    let vm = TestVm::boot();
    let mut stream = UnixStream::connect(vm.api_socket()).unwrap();
    for piece in [&b"{\"requ"[..], b"est\":\"in", b"fo\"}", b"\n"] {
        stream.write_all(piece).unwrap();
        std::thread::sleep(Duration::from_millis(100));
    }
    let mut answer = [0; 15];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"{\"reply\":\"info\"");
}

/// Opens so many connections that each say `hello` and hang around until all have been made.
fn crowd(path: &Path, count: usize, hello: &[u8]) -> usize {
    let visit = |_| {
        let mut stream = UnixStream::connect(path).ok()?;
        stream.write_all(hello).ok()?;
        Some(stream)
    };
    let visitors: Vec<_> = (0..count).filter_map(visit).collect();
    visitors.len()
}

fn a_thousand_connections_to_the_control_socket() {
    let vm = TestVm::boot();
    let before = descriptors(&vm);
    for _ in 0..10 {
        crowd(vm.api_socket(), 100, b"{\"request\":");
    }
    assert_unharmed(&vm, before);
}

fn connections_that_say_nothing_do_not_shut_out_others_for_good() {
    let vm = TestVm::boot();
    let before = descriptors(&vm);
    let silent: Vec<_> =
        (0..64).filter_map(|_| UnixStream::connect(vm.api_socket()).ok()).collect();
    assert!(silent.len() > 16, "{} connections", silent.len());
    drop(silent);
    assert_unharmed(&vm, before);
}

fn garbage_on_the_vsock_socket() {
    let vm = TestVm::boot();
    let before = descriptors(&vm);
    let noise = image::noise(1 << 20, 59);
    let greetings: [&[u8]; 9] = [
        b"\n",
        b"HELLO\n",
        b"CONNECT\n",
        b"CONNECT \n",
        b"CONNECT -1\n",
        b"CONNECT 99999999999\n",
        b"CONNECT 1024",
        b"CONNECT 1024\n\xff\xff\xff\xff{}",
        &noise,
    ];
    for greeting in greetings {
        let mut stream = UnixStream::connect(vm.vsock()).unwrap();
        // The other side may close before all is written.
        let _ = stream.write_all(greeting);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        let mut answer = Vec::new();
        let ended = stream.read_to_end(&mut answer);
        let shown = greeting[..greeting.len().min(40)].escape_ascii();
        assert!(ended.is_ok() || answer.is_empty(), "{shown}: {ended:?}");
    }
    assert_unharmed(&vm, before);
}

fn hundreds_of_connections_to_the_vsock_socket() {
    let vm = TestVm::boot();
    let before = descriptors(&vm);
    for hello in [&b""[..], b"CONN", b"CONNECT 1024\n", b"CONNECT 4321\n"] {
        crowd(vm.vsock(), 200, hello);
    }
    // Those that are gone are still in the guest's queue of new ones, which is full for a moment.
    let answers = || Client::connect(HybridSocket::new(vm.vsock())).and_then(|mut it| it.ping());
    eventually("the agent answers again", || answers().is_ok());
    assert_unharmed(&vm, before);
}
