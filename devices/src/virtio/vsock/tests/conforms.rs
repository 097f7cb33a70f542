//! What every device must stand, and that this one then still answers.

use std::time::Duration;

use super::super::packet::{HEADER_LEN, HOST_CID, Header, Op, STREAM};
use super::super::{Vsock, VsockConfig};
use super::CID;
use crate::testing::{Buffer, Conformance, GuestDriver, eventually};

const LEN: u32 = HEADER_LEN as u32;

/// Sends data on a connection that does not exist, and is told so.
fn refusal(driver: &mut GuestDriver) {
    let question = Header {
        src_cid: CID,
        dst_cid: HOST_CID,
        src_port: 1,
        dst_port: 2,
        socket_type: STREAM,
        op: Op::Data as u16,
        ..Header::default()
    };
    let question = driver.alloc_with(&question.encode());
    let answer = driver.alloc(HEADER_LEN);
    driver.add(0, &[Buffer::writable(answer, LEN)]);
    driver.kick(0);
    assert_eq!(driver.exchange(1, &[Buffer::readable(question, LEN)]), 0);
    // A device that was restored answers only once it could say so on the event queue.
    let answered = |driver: &mut GuestDriver| {
        eventually(Duration::from_millis(50), || driver.used(0).is_some())
    };
    let mut waited = 0;
    while !answered(driver) {
        let event = driver.alloc(4);
        driver.add(2, &[Buffer::writable(event, 4)]);
        driver.kick(2);
        waited += 1;
        assert!(waited < 8, "no answer");
    }
    while driver.used(2).is_some() {}
    let answer: [u8; HEADER_LEN] = driver.bytes(answer, HEADER_LEN).try_into().unwrap();
    let answer = Header::decode(&answer);
    assert_eq!((answer.op, answer.src_port, answer.dst_port), (Op::Reset as u16, 2, 1));
}

#[test]
fn conforms() {
    let device = |executor| Vsock::new(executor, VsockConfig::default()).unwrap().0;
    Conformance::new(|executor| Box::new(device(executor))).exercise(refusal).answers(&[1]).run();
}
