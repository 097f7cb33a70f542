//! Backends that mean harm, or are broken (H-61): whatever they answer, the frontend has a reason in
//! a bounded time, and lives.

use std::io::Read;
use std::os::unix::net::{UnixListener, UnixStream};

use super::*;
use crate::testing::PATIENCE as TEST_PATIENCE;

const GET_FEATURES: u32 = 1;
const SET_OWNER: u32 = 3;
const SET_MEM_TABLE: u32 = 5;
const GET_VRING_BASE: u32 = 11;
const GET_PROTOCOL_FEATURES: u32 = 15;
const SET_PROTOCOL_FEATURES: u32 = 16;
const GET_QUEUE_NUM: u32 = 17;
const GET_CONFIG: u32 = 24;

const PROTOCOL: u64 = 1 << 30;
const MQ_CONFIG_ACK: u64 = 1 | 1 << 3 | 1 << 9;

/// Patience with peers that do answer, before the request that they do not.
const SHORT: Duration = Duration::from_secs(1);

/// What a peer does with a request.
enum Act {
    /// As a backend should.
    Right,
    /// Nothing, and waits.
    Nothing,
    /// Closes the connection.
    Close,
    /// Sends these bytes.
    Send(Vec<u8>),
    /// Sends these, one after the other, with pauses.
    Drip(Vec<u8>),
}

type Plot = fn(u32) -> Act;

/// A message of the protocol, with its header.
fn message(code: u32, flags: u32, body: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for word in [code, flags, body.len() as u32] {
        bytes.extend(word.to_le_bytes());
    }
    bytes.extend(body);
    bytes
}

/// A reply with a number.
fn number(code: u32, value: u64) -> Vec<u8> {
    message(code, 5, &value.to_le_bytes())
}

/// The answer of a backend that does as it should; none for what has none.
fn right(code: u32, wants_reply: bool, body: &[u8]) -> Vec<u8> {
    match code {
        GET_FEATURES => number(code, PROTOCOL | feature::COMMON | blk::FLUSH | blk::MQ),
        GET_PROTOCOL_FEATURES => number(code, MQ_CONFIG_ACK),
        GET_QUEUE_NUM => number(code, 16),
        GET_VRING_BASE | GET_CONFIG => message(code, 5, body),
        _ if wants_reply => number(code, 0),
        _ => Vec::new(),
    }
}

/// Serves one connection after the other by the plot, until the folder is gone.
fn peer(plot: Plot) -> (TempDir, VhostUserConfig) {
    let folder = TempDir::new().unwrap();
    let socket = folder.path().join("socket");
    let listener = UnixListener::bind(&socket).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            std::thread::spawn(move || act(stream, plot));
        }
    });
    (folder, VhostUserConfig { socket, queues: 2, patience: TEST_PATIENCE })
}

fn act(mut stream: UnixStream, plot: Plot) -> Option<()> {
    loop {
        let mut head = [0; 12];
        // Descriptors that come along are closed by the kernel.
        stream.read_exact(&mut head).ok()?;
        let word = |at: usize| u32::from_le_bytes(head[at..at + 4].try_into().unwrap());
        let mut body = vec![0; word(8) as usize];
        stream.read_exact(&mut body).ok()?;
        match plot(word(0)) {
            Act::Right => {
                stream.write_all(&right(word(0), word(4) & 8 != 0, &body)).ok()?;
            }
            Act::Nothing => {}
            Act::Close => return None,
            Act::Send(bytes) => stream.write_all(&bytes).ok()?,
            Act::Drip(bytes) => {
                for byte in bytes {
                    stream.write_all(&[byte]).ok()?;
                    std::thread::sleep(Duration::from_millis(100));
                }
            }
        }
    }
}

/// The reason for which a device on such a backend is not made.
fn refusal(plot: Plot) -> String {
    refusal_within(plot, TEST_PATIENCE)
}

fn refusal_within(plot: Plot, patience: Duration) -> String {
    let executor = Executor::spawn("vhost").unwrap();
    let (_folder, options) = peer(plot);
    let options = VhostUserConfig { patience, ..options };
    let error = VhostUser::block(executor.handle(), options).err().expect("was accepted");
    let error = error.to_string();
    assert!(!error.contains('\n') && error.len() < 300, "{error}");
    error
}

macro_rules! at {
    ($code:pat => $act:expr) => {
        |code| match code {
            $code => $act,
            _ => Act::Right,
        }
    };
}

#[test]
fn the_peer_of_these_tests_is_accepted_if_it_does_nothing_wrong() {
    let executor = Executor::spawn("vhost").unwrap();
    let (_folder, options) = peer(|_| Act::Right);
    let device = VhostUser::block(executor.handle(), options).unwrap();
    assert_eq!(device.identity().features, blk::FLUSH | blk::MQ);
}

#[test]
fn h61_wrong_feature_bits_are_refused() {
    for (plot, words) in [
        (at!(GET_FEATURES => Act::Send(number(1, 0))) as Plot, "does not offer the features"),
        (at!(GET_FEATURES => Act::Send(number(1, PROTOCOL))), "does not offer the features"),
        (at!(GET_FEATURES => Act::Send(number(1, feature::COMMON))), "features 0x40001000"),
        (at!(GET_FEATURES => Act::Send(number(1, PROTOCOL | feature::COMMON))), "0x1000"),
        (at!(GET_PROTOCOL_FEATURES => Act::Send(number(15, 0))), "has 1 queues"),
        (at!(GET_PROTOCOL_FEATURES => Act::Send(number(15, 1))), "configuration space"),
        (at!(GET_QUEUE_NUM => Act::Send(number(17, 1))), "has 1 queues and 2 are asked for"),
        (at!(GET_QUEUE_NUM => Act::Send(number(17, u64::MAX))), "GET_QUEUE_NUM"),
    ] {
        let error = refusal(plot);
        assert!(error.contains(words), "{words}: {error}");
    }
    // All bits at once are more than there are; none is taken that we do not know.
    let executor = Executor::spawn("vhost").unwrap();
    let (_folder, options) = peer(at!(GET_FEATURES => Act::Send(number(1, u64::MAX))));
    let device = VhostUser::block(executor.handle(), options).unwrap();
    assert_eq!(device.identity().features, BLOCK_FEATURES | blk::MQ);
    assert_eq!(device.ring_features(), feature::COMMON);
}

#[test]
fn h61_silence_and_answers_byte_by_byte_have_an_end() {
    for plot in [
        at!(GET_FEATURES => Act::Nothing) as Plot,
        at!(GET_PROTOCOL_FEATURES => Act::Nothing),
        at!(GET_QUEUE_NUM => Act::Nothing),
        at!(GET_CONFIG => Act::Nothing),
        at!(GET_FEATURES => Act::Drip(number(1, u64::MAX))),
    ] {
        let error = refusal_within(plot, Duration::from_millis(300));
        assert!(error.contains("did not answer to GET_"), "{error}");
    }
}

#[test]
fn h61_ends_in_the_middle_are_errors() {
    for plot in [
        at!(SET_OWNER => Act::Close) as Plot,
        at!(GET_FEATURES => Act::Close),
        at!(SET_PROTOCOL_FEATURES => Act::Close),
        at!(GET_CONFIG => Act::Close),
    ] {
        let error = refusal(plot);
        assert!(error.contains("it failed at "), "{error}");
    }
}

#[test]
fn h61_answers_of_a_wrong_form_are_errors() {
    for plot in [
        // To another request, not a reply, of a wrong version, of a wrong length.
        at!(GET_FEATURES => Act::Send(number(2, u64::MAX))) as Plot,
        at!(GET_FEATURES => Act::Send(message(1, 1, &[0xff; 8]))),
        at!(GET_FEATURES => Act::Send(message(1, 6, &[0xff; 8]))),
        at!(GET_FEATURES => Act::Send(message(99, 5, &[0xff; 8]))),
        at!(GET_FEATURES => Act::Send(vec![0xff; 4096])),
        // A configuration space of none, of more, and of far more than was asked for.
        at!(GET_CONFIG => Act::Send(message(24, 5, &[0; 12]))),
        at!(GET_CONFIG => Act::Send(config(0, 60))),
        at!(GET_CONFIG => Act::Send(config(61, 61))),
        at!(GET_CONFIG => Act::Send(config(60, 4000))),
        at!(GET_CONFIG => Act::Send(config(u32::MAX, 60))),
    ] {
        let error = refusal_within(plot, SHORT);
        // One that is too short is waited for, as long as there is patience.
        let reasons = ["it failed at GET_", "did not answer to GET_"];
        assert!(reasons.iter().any(|words| error.contains(words)), "{error}");
    }
}

/// A configuration space of `len` bytes that says it has `size`.
fn config(size: u32, len: usize) -> Vec<u8> {
    let mut body = vec![0; 12 + len];
    body[4..8].copy_from_slice(&size.to_le_bytes());
    message(GET_CONFIG, 5, &body)
}

/// A driver of a device on such a backend, and its executor.
fn driver(plot: Plot) -> (GuestDriver, Executor, TempDir) {
    let executor = Executor::spawn("vhost").unwrap();
    let (folder, options) = peer(plot);
    let options = VhostUserConfig { patience: SHORT, ..options };
    let device = Box::new(VhostUser::block(executor.handle(), options).unwrap());
    (GuestDriver::with_memory(device, shared_ram()), executor, folder)
}

#[test]
fn h61_a_backend_that_does_not_start_costs_a_reset_each_time() {
    for plot in [
        at!(18 => Act::Nothing) as Plot,
        at!(SET_MEM_TABLE => Act::Close),
        at!(SET_MEM_TABLE => Act::Send(number(5, 1))),
        at!(8..=14 => Act::Send(number(8, 1))),
        at!(18 => Act::Send(vec![0; 3])),
    ] {
        let (mut driver, _executor, _folder) = driver(plot);
        for _ in 0..2 {
            let features = driver.offered();
            assert!(driver.negotiate(features));
            driver.set_up_queues();
            driver.driver_ok();
            assert!(driver.needs_reset());
            driver.reset();
        }
    }
}

#[test]
fn h61_a_backend_that_does_not_stop_is_let_go() {
    for plot in [
        at!(GET_VRING_BASE => Act::Nothing) as Plot,
        at!(GET_VRING_BASE => Act::Close),
        at!(GET_VRING_BASE => Act::Send(message(11, 5, &[0xff; 8]))),
        // A position that no chain was completed up to.
        at!(GET_VRING_BASE => Act::Send(message(11, 5, &[0, 0, 0, 0, 9, 0, 0, 0]))),
    ] {
        let (mut driver, _executor, _folder) = driver(plot);
        driver.initialize();
        driver.pause();
        assert!(driver.needs_reset());
        assert!(driver.try_save().is_ok());
        driver.resume();
        driver.reset();
        driver.initialize();
    }
}

#[test]
fn h61_what_nobody_asked_for_is_not_read() {
    let flood = at!(18 => Act::Send([number(18, 0), vec![0x55; 1 << 16]].concat()));
    let (mut driver, _executor, _folder) = driver(flood);
    driver.initialize();
    // The next request finds the flood instead of its answer.
    driver.pause();
    assert!(driver.needs_reset());
    driver.resume();
    driver.reset();
}
