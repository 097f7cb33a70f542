//! Whose turn it is: packets from the table of connections to the guest.

use super::super::connection::Filled;
use super::super::packet::{HEADER_LEN, HOST_CID, Header, Op, STREAM};
use super::{BUF_ALLOC, Key, Muxer};
use crate::memory::Memory;
use crate::virtio::Chain;

impl Muxer {
    /// True if a receive buffer could be used.
    pub fn has_packets(&self) -> bool {
        !(self.strays.is_empty() && self.control.is_empty() && self.ready.is_empty())
    }

    /// Fills one receive buffer; with how many bytes. `None` if there was nothing to send after
    /// all.
    pub fn produce(&mut self, chain: &Chain, memory: &Memory) -> Option<u32> {
        if let Some(header) = self.next_control() {
            return Some(if header.write(chain, memory) { HEADER_LEN as u32 } else { 0 });
        }
        // Ends: a connection that gives nothing leaves the list.
        while let Some(slot) = self.ready.pop_front() {
            let Some(entry) = self.entry(slot) else {
                continue;
            };
            entry.connection.in_ready = false;
            let (filled, key) = (entry.connection.fill(chain, memory), entry.key);
            let header = match (filled, key) {
                (Filled::Data(len), Some(key)) => {
                    let fwd_cnt = entry.connection.tell_credit();
                    Some(Header { len, fwd_cnt, ..self.header(key, Op::Data) })
                }
                _ => None,
            };
            // To the end of the list if there is more, for the others' sake.
            self.settle(slot);
            match header {
                Some(header) if header.write(chain, memory) => {
                    self.counters().received_bytes.add(u64::from(header.len));
                    return Some((HEADER_LEN as u32).saturating_add(header.len));
                }
                None if filled == Filled::Nothing => {}
                _ => return Some(0),
            }
        }
        None
    }

    fn next_control(&mut self) -> Option<Header> {
        if let Some(stray) = self.strays.pop_front() {
            return Some(stray);
        }
        while let Some(slot) = self.control.pop_front() {
            let Some(entry) = self.entry(slot) else {
                continue;
            };
            entry.connection.in_control = false;
            let header = match (entry.connection.next_packet(), entry.key) {
                (Some((op, flags)), Some(key)) => {
                    let fwd_cnt = entry.connection.tell_credit();
                    Some(Header { flags, fwd_cnt, ..self.header(key, op) })
                }
                _ => None,
            };
            self.settle(slot);
            if header.is_some() {
                return header;
            }
        }
        None
    }

    pub(super) fn header(&self, key: Key, op: Op) -> Header {
        Header {
            src_cid: HOST_CID,
            dst_cid: self.guest_cid,
            src_port: key.host,
            dst_port: key.guest,
            socket_type: STREAM,
            op: op as u16,
            buf_alloc: BUF_ALLOC,
            ..Header::default()
        }
    }
}
