//! A network namespace with a TAP in it: the host's end of a guest's network.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::OnceLock;
use std::time::Duration;

use nix::sched::{CloneFlags, unshare};
use nix::unistd::geteuid;

use crate::artifacts::{may_skip, tell_skipped};
use crate::image::{Noise, host, static_program};
use crate::place::Place;
use crate::vm::TestVm;

/// The TAP's name.
pub const TAP: &str = "tap0";
/// The host's address.
pub const HOST: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
/// The piece in which streams are made and compared, that of `net.c`.
const PIECE: usize = 64 << 10;
/// A stream on which nothing comes for so long is stuck.
const STUCK_AFTER: Duration = Duration::from_secs(300);

/// Runs a test whose thread, with all that it starts, is in a network namespace with a TAP. That
/// needs root; who does without it names `net` in `CUBE_ALLOW_SKIP`.
///
/// # Panics
/// If the test does, or there can be no such namespace.
pub fn in_a_network(test: impl FnOnce() + Send) {
    if !geteuid().is_root() && may_skip("net") {
        tell_skipped("a test of the network", "it needs root");
        return;
    }
    let all = || {
        unshare(CloneFlags::CLONE_NEWNET)
            .unwrap_or_else(|error| panic!("no network of its own: {error}; run as root"));
        host("ip", &["tuntap", "add", TAP, "mode", "tap"]);
        host("ip", &["addr", "add", &format!("{HOST}/24"), "dev", TAP]);
        set_link("up");
        test();
    };
    let ended = std::thread::scope(|scope| scope.spawn(all).join());
    ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
}

/// Takes the TAP `up` or `down`.
///
/// # Panics
/// If it cannot be.
#[track_caller]
pub fn set_link(state: &str) {
    host("ip", &["link", "set", TAP, state]);
}

/// Gives the guest its address.
///
/// # Panics
/// If it has no network card.
#[track_caller]
pub fn configure(vm: &TestVm) {
    let line = "ip link set eth0 up && ip addr add 192.0.2.2/24 dev eth0";
    assert!(vm.exec(crate::sh(line)).status.success(), "no network in the guest");
}

/// Puts `net.c` into the guest, and gives its path there.
///
/// # Panics
/// If it cannot be compiled.
#[track_caller]
pub fn install(vm: &TestVm) -> String {
    static PROGRAM: OnceLock<Vec<u8>> = OnceLock::new();
    let compile = || {
        let place = Place::new();
        static_program(&place, "net")
    };
    vm.install("net", PROGRAM.get_or_init(compile))
}

/// A listening socket of the host, and its port.
///
/// # Panics
/// If there is none.
pub fn listen() -> (TcpListener, String) {
    let listener = TcpListener::bind((HOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    (listener, port)
}

/// The next connection of the guest.
///
/// # Panics
/// If it fails.
pub fn accept(listener: &TcpListener) -> TcpStream {
    let (stream, _) = listener.accept().unwrap();
    stream.set_read_timeout(Some(STUCK_AFTER)).unwrap();
    stream.set_write_timeout(Some(STUCK_AFTER)).unwrap();
    stream
}

/// Sends so many bytes of noise, and the end.
///
/// # Panics
/// If the guest does not take them.
pub fn send_noise(mut stream: &TcpStream, bytes: u64, seed: u64) {
    let mut noise = Noise::new(seed);
    let mut piece = vec![0; PIECE];
    for _ in 0..bytes / PIECE as u64 {
        noise.fill(&mut piece);
        stream.write_all(&piece).unwrap();
    }
    stream.shutdown(std::net::Shutdown::Write).unwrap();
}

/// Reads so many bytes of noise, and the end behind them.
///
/// # Panics
/// If something else comes.
#[track_caller]
pub fn expect_noise(mut stream: &TcpStream, bytes: u64, seed: u64) {
    let mut noise = Noise::new(seed);
    let (mut piece, mut expected) = (vec![0; PIECE], vec![0; PIECE]);
    for index in 0..bytes / PIECE as u64 {
        noise.fill(&mut expected);
        stream.read_exact(&mut piece).unwrap();
        assert!(piece == expected, "wrong bytes in piece {index}");
    }
    assert_eq!(stream.read(&mut piece).unwrap(), 0, "more than was sent");
}
