//! Flow control of one connection, both ways (virtio 1.3, section 5.10.6.3).
//!
//! Each side tells the size of its receive buffer and how many bytes have left it; the other side
//! never has more in flight. All counters are free-running modulo 2^32.

use super::packet::Header;

/// Our receive buffer per connection: bytes that the guest may have sent and the host program has
/// not taken. Two packets of the largest size, so that the guest fills the second while the first
/// is on its way; more buys nothing, since the socket has the kernel's buffer behind this one. It
/// also bounds what a guest can make us hold: 128 MiB with every connection stuck and full. The
/// memory is only taken while a host program lags behind.
pub const BUF_ALLOC: u32 = 128 * 1024;

/// The counters of one connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Credit {
    guest_alloc: u32,
    guest_forwarded: u32,
    sent: u32,
    received: u32,
    forwarded: u32,
    told: u32,
}

impl Credit {
    /// Takes the guest's side from one of its packets.
    pub fn learn(&mut self, header: &Header) {
        self.guest_alloc = header.buf_alloc;
        self.guest_forwarded = header.fwd_cnt;
    }

    /// Bytes that the guest can take now. A guest that shrinks its buffer below what is in flight,
    /// or claims to have forwarded what was never sent, has no room.
    pub fn room(&self) -> u32 {
        let in_flight = self.sent.wrapping_sub(self.guest_forwarded);
        self.guest_alloc.saturating_sub(in_flight)
    }

    /// `len` bytes were sent to the guest.
    pub fn send(&mut self, len: u32) {
        self.sent = self.sent.wrapping_add(len);
    }

    /// Bytes that came from the guest and are still held.
    pub fn held(&self) -> u32 {
        self.received.wrapping_sub(self.forwarded)
    }

    /// Takes `len` bytes from the guest; false if it had no credit for them.
    #[must_use]
    pub fn receive(&mut self, len: u32) -> bool {
        let fits = self.held().checked_add(len).is_some_and(|held| held <= BUF_ALLOC);
        if fits {
            self.received = self.received.wrapping_add(len);
        }
        fits
    }

    /// `len` bytes went on to the host program.
    pub fn forward(&mut self, len: u32) {
        self.forwarded = self.forwarded.wrapping_add(len);
    }

    /// `fwd_cnt` for a packet to the guest, which then knows.
    pub fn tell(&mut self) -> u32 {
        self.told = self.forwarded;
        self.forwarded
    }

    /// True if the guest believes that half of our buffer or less is free, and is wrong. Waiting
    /// longer could stall it; telling earlier costs a packet each time.
    pub fn update_is_due(&self) -> bool {
        let believed_used = self.received.wrapping_sub(self.told);
        self.told != self.forwarded && believed_used >= BUF_ALLOC / 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(buf_alloc: u32, fwd_cnt: u32) -> Header {
        Header { buf_alloc, fwd_cnt, ..Header::default() }
    }

    /// A connection that has moved `start` bytes each way.
    fn after(start: u32) -> Credit {
        let mut credit = Credit::default();
        credit.send(start);
        credit.learn(&told(1000, start));
        (credit.received, credit.forwarded, credit.told) = (start, start, start);
        credit
    }

    #[test]
    fn room_is_what_the_guest_has_not_been_sent() {
        for start in [0, 77, u32::MAX - 500] {
            let mut credit = after(start);
            assert_eq!(credit.room(), 1000);
            credit.send(900);
            assert_eq!(credit.room(), 100);
            credit.learn(&told(1000, start.wrapping_add(600)));
            assert_eq!(credit.room(), 700);
        }
    }

    #[test]
    fn a_guest_that_lies_about_its_buffer_has_no_room() {
        let mut credit = after(0);
        credit.send(900);
        credit.learn(&told(500, 0));
        assert_eq!(credit.room(), 0);
        credit.learn(&told(1000, 901));
        assert_eq!(credit.room(), 0);
    }

    #[test]
    fn no_more_is_taken_than_was_granted() {
        for start in [0, u32::MAX - 500] {
            let mut credit = after(start);
            assert!(credit.receive(BUF_ALLOC - 1));
            assert!(!credit.receive(2));
            assert!(!credit.receive(u32::MAX));
            assert!(credit.receive(1));
            assert_eq!(credit.held(), BUF_ALLOC);
            credit.forward(10);
            assert!(credit.receive(10));
        }
    }

    #[test]
    fn the_guest_is_told_when_it_believes_to_be_short() {
        let mut credit = after(0);
        assert!(credit.receive(BUF_ALLOC / 2));
        assert!(!credit.update_is_due());
        credit.forward(1);
        assert!(credit.update_is_due());
        assert_eq!(credit.tell(), 1);
        assert!(!credit.update_is_due());
    }
}
