//! Mutated input for what the card parses of its guest and of its user.

use super::super::header::{self, ETHERNET_LEN, MAX_FRAME};
use super::super::{NetOption, feature};
use super::bench::{Peer, config};
use crate::executor::Executor;
use crate::snapshot::{Record, Stateful};
use crate::testing::fuzz;
use crate::virtio::net::Net;

/// The first bytes of an input as a header, the next as the length of the frame and the features.
fn parts(input: &[u8]) -> Option<(header::Header, u64, u64)> {
    let (header, rest) = input.split_first_chunk()?;
    let (len, rest) = rest.split_first_chunk()?;
    let features = rest.first_chunk()?;
    Some((*header, u64::from(u32::from_le_bytes(*len)), u64::from_le_bytes(*features)))
}

#[test]
fn fuzz_net_header() {
    let input = |flags: u8, kind: u8, size: u8| {
        let mut bytes = vec![flags, kind, 54, 0, size, 4, 34, 0, 16, 0, 1, 0];
        bytes.extend(1514_u32.to_le_bytes());
        bytes.extend([0xff; 8]);
        bytes
    };
    let corpus =
        [input(0, 0, 0), input(1, 0, 0), input(1, 1, 1), input(3, 0x84, 9), input(1, 3, 9)];
    fuzz("net header", &corpus, |input| {
        let Some((header, len, features)) = parts(input) else { return (9, 0) };
        let incoming = header::incoming(&header, 3, features);
        match header::outgoing(&header, len, features) {
            Ok(made) => {
                let word = |at: usize| u64::from(u16::from_le_bytes([made[at], made[at + 1]]));
                assert!((ETHERNET_LEN as u64..=MAX_FRAME as u64).contains(&len));
                assert!(made[0] & !1 == 0 && word(10) == 0, "{made:?}");
                if made[0] != 0 {
                    assert!(features & feature::CSUM != 0 && word(6) + word(8) + 2 <= len);
                }
                assert!(made[1] == 0 || (word(4) != 0 && word(2) <= len));
                (made[1], u8::from(incoming.is_some()))
            }
            Err(fault) => (16 + (fault.to_string().len() % 64) as u8, u8::from(incoming.is_some())),
        }
    });
}

#[test]
fn fuzz_net_option() {
    let corpus = [
        "tap=tap0,mac=02:00:00:00:00:01,mtu=1500,queues=2,id=net0",
        "fd=7,mtu=9000",
        "tap=a,rx_bytes=10M,rx_ops=5,tx_bytes=1G,tx_ops=7",
        "fd=3:4,queues=2",
    ];
    let corpus = corpus.map(|text| text.as_bytes().to_vec());
    fuzz("net option", &corpus, |input| {
        let text = String::from_utf8_lossy(input);
        match text.parse::<NetOption>() {
            Ok(option) => {
                // What is read is what can be used.
                option.validate().unwrap();
                1000 + u16::from(option.config(config().id).mtu.is_some())
            }
            Err(error) => (error.to_string().split(' ').count() % 64) as u16,
        }
    });
}

#[test]
fn fuzz_net_record() {
    let executor = Executor::spawn("records").unwrap();
    let (tap, _peer) = Peer::new();
    let mut card = Net::new(executor.handle(), vec![tap], config()).unwrap();
    let before = card.save_record().unwrap();
    let mut bytes = Vec::new();
    ciborium::into_writer(&before, &mut bytes).unwrap();
    fuzz("net record", &[bytes], |input| {
        let Ok(record) = ciborium::from_reader::<Record, _>(input) else { return 0 };
        if card.restore_record(record).is_err() {
            return 1;
        }
        card.save_record().unwrap();
        card.restore_record(before.clone()).unwrap();
        2
    });
}
