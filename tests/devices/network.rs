//! The network from the guest through a TAP to a server of the host.

use std::collections::HashSet;
use std::env;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

use harness::{TestVm, image, wire};
use libtest_mimic::Trial;
use nix::sys::resource::{Resource, getrlimit, setrlimit};

pub fn trials() -> Vec<Trial> {
    harness::trials![
        pings_streams_and_a_thousand_connections_do_not_mix_over_mmio,
        pings_streams_and_a_thousand_connections_do_not_mix_over_pci,
        a_limit_of_the_card_holds_for_its_direction,
    ]
}

/// A guest whose network is up.
fn guest(transport: &str) -> TestVm {
    let net = format!("tap={},id=net", wire::TAP);
    let vm = TestVm::builder().transport(transport).option("--net", net).boot();
    wire::configure(&vm);
    vm
}

fn assert_pings(vm: &TestVm) {
    let text = vm.exec(["ping", "-c", "5", "-s", "1400", &wire::HOST.to_string()]).text();
    assert!(text.contains("5 packets received"), "{text}");
    assert!(vm.count("net_received_frames_total", "net") >= 5);
    assert_eq!(vm.count("net_guest_faults_total", "net"), 0);
}

/// Bytes of a stream, a multiple of 64 KiB.
fn stream_bytes() -> u64 {
    let asked = env::var("CUBE_NET_BYTES").ok().map(|text| text.parse().unwrap());
    asked.unwrap_or(32_u64 << 20).next_multiple_of(64 << 10)
}

/// How fast something was, where times are told.
fn tell(what: &str, bytes: u64, started: Instant) {
    if env::var_os("CUBE_TEST_TIMES").is_some() {
        let seconds = started.elapsed().as_secs_f64();
        eprintln!("{what}: {bytes} bytes, {:.1} MB/s", bytes as f64 / seconds / 1e6);
    }
}

fn assert_streams(vm: &TestVm, program: &str, transport: &str) {
    let bytes = stream_bytes();
    let run = |way: &str, serve: fn(&TcpStream, u64, u64)| {
        let (listener, port) = wire::listen();
        let serving = thread::spawn(move || serve(&wire::accept(&listener), bytes, 71));
        let started = Instant::now();
        let (address, size) = (wire::HOST.to_string(), bytes.to_string());
        let output = vm.exec([program, &address, &port, way, &size, "71"]);
        assert!(output.status.success(), "{way}: {output:?}");
        serving.join().unwrap();
        tell(&format!("the guest's {way} over {transport}"), bytes, started);
    };
    run("send", wire::expect_noise);
    run("receive", wire::send_noise);
    assert!(vm.count("net_sent_bytes_total", "net") > bytes);
    assert!(vm.count("net_received_bytes_total", "net") > bytes);
    assert_eq!(vm.count("net_guest_faults_total", "net"), 0);
}

/// A limit is a least time, which no slow machine falls short of.
fn a_limit_of_the_card_holds_for_its_direction() {
    wire::in_a_network(|| {
        const BYTES: u64 = 384 << 10;
        let net = format!("tap={},id=net,tx_bytes=64K/s", wire::TAP);
        let vm = TestVm::builder().option("--net", net).boot();
        wire::configure(&vm);
        let program = wire::install(&vm);
        let run = |way: &str, serve: fn(&TcpStream, u64, u64)| {
            let (listener, port) = wire::listen();
            let serving = thread::spawn(move || serve(&wire::accept(&listener), BYTES, 71));
            let started = Instant::now();
            let (address, size) = (wire::HOST.to_string(), BYTES.to_string());
            let output = vm.exec([program.as_str(), &address, &port, way, &size, "71"]);
            assert!(output.status.success(), "{way}: {output:?}");
            serving.join().unwrap();
            started.elapsed()
        };
        // Of six seconds' worth one second's is there from the start, and the last frame, a second's
        // at most, is let through on debt.
        let sent = run("send", wire::expect_noise);
        assert!(sent >= Duration::from_secs(6 - 1 - 1), "{sent:?}");
        assert!(vm.count("net_sent_throttled_total", "net") >= 1);
        run("receive", wire::send_noise);
        assert_eq!(vm.count("net_received_throttled_total", "net"), 0);
    });
}

const CONNECTIONS: usize = 1000;
const MESSAGE: usize = 1024;

/// Takes all connections before it answers the first, with what it has said. Gives what all said.
fn echo(listener: &std::net::TcpListener) -> HashSet<Vec<u8>> {
    let streams: Vec<TcpStream> = (0..CONNECTIONS).map(|_| wire::accept(listener)).collect();
    let answer = |mut stream: &TcpStream| {
        let mut message = vec![0; MESSAGE];
        stream.read_exact(&mut message).unwrap();
        stream.write_all(&message).unwrap();
        message
    };
    streams.iter().map(answer).collect()
}

fn assert_connections(vm: &TestVm, program: &str) {
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, most, most).unwrap();
    let (listener, port) = wire::listen();
    let serving = thread::spawn(move || echo(&listener));
    let (address, count) = (wire::HOST.to_string(), CONNECTIONS.to_string());
    let output = vm.exec([program, &address, &port, "echo", &count]);
    assert!(output.status.success(), "{output:?}");
    // That of connection n is the noise of 2n + 1.
    let expected = (0..CONNECTIONS).map(|n| image::noise(MESSAGE, 2 * n as u64 + 1)).collect();
    assert!(serving.join().unwrap() == expected, "the host got other messages");
}

fn assert_all(transport: &str) {
    wire::in_a_network(|| {
        let vm = guest(transport);
        assert_pings(&vm);
        let program = wire::install(&vm);
        assert_streams(&vm, &program, transport);
        assert_connections(&vm, &program);
    });
}

fn pings_streams_and_a_thousand_connections_do_not_mix_over_mmio() {
    assert_all("mmio");
}

fn pings_streams_and_a_thousand_connections_do_not_mix_over_pci() {
    assert_all("pci");
}
