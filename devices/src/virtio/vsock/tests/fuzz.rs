//! Mutated packets of the guest, with a table of connections behind them.

use std::sync::Arc;
use std::time::Duration;

use super::super::handle::{Shared, VsockHandle};
use super::super::host::Endpoints;
use super::super::muxer::{MAX_CONNECTIONS, Muxer};
use super::super::packet::{HOST_CID, Header, Op, STREAM, room};
use super::CID;
use crate::testing::{FuzzRing, fuzz};

fn packet(op: Op, len: u32) -> Vec<u8> {
    let header = Header {
        src_cid: CID,
        dst_cid: HOST_CID,
        src_port: 1000,
        dst_port: 52,
        len,
        socket_type: STREAM,
        op: op as u16,
        flags: 0,
        buf_alloc: 65536,
        fwd_cnt: 0,
    };
    [&header.encode()[..], &vec![0x55; len as usize]].concat()
}

#[test]
fn fuzz_vsock_packet() {
    let operations =
        [Op::Request, Op::Response, Op::Reset, Op::Shutdown, Op::Data, Op::CreditUpdate];
    let corpus: Vec<_> = operations
        .into_iter()
        .flat_map(|op| FuzzRing::seeds(&packet(op, if op == Op::Data { 20 } else { 0 })))
        .collect();
    let ring = FuzzRing::new();
    let shared = Arc::new(Shared::new().unwrap());
    let listener = VsockHandle::new(shared.clone()).listen(52).unwrap();
    let mut muxer = Muxer::new(CID, Endpoints { shared, prefix: None });
    fuzz("vsock packet", &corpus, |input| {
        let Some(chain) = ring.chain(input) else { return 1000 };
        if !muxer.can_receive() {
            muxer.clear(std::io::ErrorKind::ConnectionReset);
        }
        muxer.receive(&chain, ring.memory());
        let room: u64 = room(&chain, ring.memory(), 300).iter().map(|at| u64::from(at.len)).sum();
        assert!(room <= 300);
        let produced = muxer.produce(&chain, ring.memory());
        assert!(u64::from(produced.unwrap_or(0)) <= chain.writable_len());
        muxer.take_touched();
        assert!(muxer.longest_list() <= MAX_CONNECTIONS);
        while listener.accept_timeout(Duration::ZERO).is_ok() {}
        Header::read(&chain, ring.memory()).map_or(0, |header| header.op.min(20))
            + 32 * u16::from(produced.is_some())
    });
}
