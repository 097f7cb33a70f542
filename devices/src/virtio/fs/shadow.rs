//! The shadow queue: a ring in a small memory of its own, which is all that the file server sees.
//!
//! ```text
//!   0        4 KiB     8 KiB   16 KiB                       16 KiB + 8 MiB
//!   │ table  │ available │ used │ messages, in whole pages    │
//! ```
//!
//! A message is copied here from guest memory, and its answer from here into guest memory. The server
//! may write what it likes into it at any time: what is read back is checked, and used once.

use std::io;
use std::ops::Range;
use std::sync::atomic::{Ordering, fence};

use vm_memory::{FileOffset, GuestMemoryRegion};

use crate::memory::{Bytes, GuestAddress, GuestMemoryBackend, Memory, shareable_file};
use crate::virtio::{Chain, Segment};

/// Entries of the ring. A message takes two.
pub(super) const RING: u16 = 256;
const TABLE: u64 = 0;
const AVAILABLE: u64 = 4096;
const USED: u64 = 8192;
const ARENA: u64 = 16_384;
const PAGE: u64 = 4096;
const PAGES: usize = 2048;

/// Longest message that is passed on: a write of a mebibyte, and what comes before it.
pub(super) const MAX_REQUEST: u64 = (1 << 20) + PAGE;
/// Most room that an answer is given.
pub(super) const MAX_REPLY: u64 = (1 << 20) + PAGE;

const DESC_NEXT: u16 = 1;
const DESC_WRITE: u16 = 2;
const USED_NO_NOTIFY: u16 = 1;
/// Where each side says with which entry it wants to hear of the other (virtio 1.3, sections 2.7.7
/// and 2.7.10).
const USED_EVENT: u64 = AVAILABLE + 4 + 2 * RING as u64;
const AVAIL_EVENT: u64 = USED + 4 + 8 * RING as u64;

/// What the server did wrong with the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum ShadowFault {
    /// It claims to have answered more than there is.
    #[error("it says that it has answered {0} messages")]
    Index(u16),
    /// It has answered what it was not asked.
    #[error("it has answered message {0}, which does not exist")]
    Answer(u32),
    /// The memory is gone, which cannot be.
    #[error("its memory is not accessible")]
    Memory,
}

/// A message on its way, with what is to be known when it comes back.
struct Entry<T> {
    owner: T,
    pages: Range<usize>,
    reply: u64,
    room: u32,
}

/// An answer that has come back.
pub(super) struct Answer<T> {
    /// What was given with the message.
    pub owner: T,
    reply: u64,
    /// Its length in bytes, no more than there was room for.
    pub len: u32,
    pages: Range<usize>,
}

/// The ring and what is in it. `T` is what is remembered of each message.
pub(super) struct ShadowQueue<T> {
    memory: Memory,
    entries: Vec<Option<Entry<T>>>,
    /// Pages of the arena that are in use.
    taken: Vec<bool>,
    /// Where a search for free ones begins.
    hint: usize,
    avail: u16,
    /// Where that was when it was last decided whether to kick.
    told: u16,
    used: u16,
    /// With which answer the server shall signal.
    wanted: u16,
    live: usize,
}

impl<T> ShadowQueue<T> {
    /// An empty one. Fails when the process is out of memory or descriptors.
    pub fn new() -> io::Result<Self> {
        let size = ARENA + PAGES as u64 * PAGE;
        let file = FileOffset::new(shareable_file(size)?, 0);
        let range = (GuestAddress(0), size as usize, Some(file));
        let memory = Memory::from_ranges_with_files([range]).map_err(io::Error::other)?;
        let entries = (0..RING / 2).map(|_| None).collect();
        let taken = vec![false; PAGES];
        Ok(Self { memory, entries, taken, hint: 0, avail: 0, told: 0, used: 0, wanted: 0, live: 0 })
    }

    /// The memory, for the server.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Where table, available and used ring are, as addresses of this process.
    pub fn rings(&self) -> Option<[u64; 3]> {
        let host = |at| self.memory.get_host_address(GuestAddress(at)).ok().map(|at| at as u64);
        Some([host(TABLE)?, host(AVAILABLE)?, host(USED)?])
    }

    /// Messages on their way.
    #[cfg(test)]
    pub fn live(&self) -> usize {
        self.live
    }

    /// What is remembered of all that are on their way.
    pub fn owners(&self) -> impl Iterator<Item = &T> {
        self.entries.iter().flatten().map(|entry| &entry.owner)
    }

    /// The same, to change it.
    pub fn owners_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.entries.iter_mut().flatten().map(|entry| &mut entry.owner)
    }

    /// Takes back all that are on their way, from a server that is gone.
    pub fn abandon(&mut self) -> Vec<T> {
        self.taken.fill(false);
        self.live = 0;
        self.entries.iter_mut().filter_map(Option::take).map(|entry| entry.owner).collect()
    }

    /// True if a message of `request` bytes with `room` for its answer can be sent now. The lengths are
    /// no more than [`MAX_REQUEST`] and [`MAX_REPLY`].
    pub fn fits(&self, request: u64, room: u64) -> bool {
        self.live < self.entries.len() && self.find(pages(request) + pages(room)).is_some()
    }

    fn find(&self, count: usize) -> Option<usize> {
        let free_at = |start: usize| {
            let run = self.taken.get(start..start + count)?;
            run.iter().rposition(|taken| *taken)
        };
        let last = PAGES.checked_sub(count)?;
        for range in [self.hint..last + 1, 0..self.hint.min(last + 1)] {
            let mut at = range.start;
            while at < range.end {
                match free_at(at) {
                    Some(taken) => at += taken + 1,
                    None => return Some(at),
                }
            }
        }
        None
    }

    /// Sends what `fill` writes of a message; `None` if there is no room. `room`: bytes for the answer, 0
    /// for none. `keep` makes of the message what is remembered.
    fn send<M>(
        &mut self,
        [request, room]: [u64; 2],
        message: M,
        fill: impl FnOnce(&M, &Memory, u64) -> Option<()>,
        keep: impl FnOnce(M) -> T,
    ) -> Option<()> {
        let slot = self.entries.iter().position(Option::is_none)?;
        let first = self.find(pages(request) + pages(room))?;
        let pages = first..first + pages(request) + pages(room);
        let start = ARENA + first as u64 * PAGE;
        let reply = start + self::pages(request) as u64 * PAGE;
        fill(&message, &self.memory, start)?;
        let head = slot as u16 * 2;
        let next = if room > 0 { DESC_NEXT } else { 0 };
        // Lengths are below 4 GiB, by what `fits` demands.
        self.descriptor(head, start, request as u32, next, head + 1)?;
        self.descriptor(head + 1, reply, room as u32, DESC_WRITE, 0)?;
        let at = AVAILABLE + 4 + 2 * u64::from(self.avail % RING);
        self.memory.store(head.to_le(), GuestAddress(at), Ordering::Relaxed).ok()?;
        self.avail = self.avail.wrapping_add(1);
        let index = GuestAddress(AVAILABLE + 2);
        self.memory.store(self.avail.to_le(), index, Ordering::Release).ok()?;
        self.taken.get_mut(pages.clone())?.fill(true);
        self.hint = pages.end % PAGES;
        self.live += 1;
        let entry = Entry { owner: keep(message), pages, reply, room: room as u32 };
        *self.entries.get_mut(slot)? = Some(entry);
        Some(())
    }

    fn descriptor(&self, index: u16, at: u64, len: u32, flags: u16, next: u16) -> Option<()> {
        let place = GuestAddress(TABLE + 16 * u64::from(index));
        let [a, b, c, d] = len.to_le_bytes();
        let ([e, f], [g, h]) = (flags.to_le_bytes(), next.to_le_bytes());
        let rest = u64::from_le_bytes([a, b, c, d, e, f, g, h]);
        self.memory.write_obj([at.to_le(), rest.to_le()], place).ok()
    }

    /// Sends the readable part of `chain`, with room for the answer as it has. [`ShadowQueue::fits`]
    /// must have said that it can be.
    pub fn send_chain(
        &mut self,
        guest: &Memory,
        chain: Chain,
        keep: impl FnOnce(Chain) -> T,
    ) -> Option<()> {
        let lengths = [chain.readable_len(), chain.writable_len().min(MAX_REPLY)];
        let fill = |chain: &Chain, memory: &Memory, mut at: u64| {
            for segment in chain.readable() {
                copy(guest, segment.address.0, memory, at, u64::from(segment.len))?;
                at += u64::from(segment.len);
            }
            Some(())
        };
        self.send(lengths, chain, fill, keep)
    }

    /// Sends a message of our own.
    pub fn send_bytes(&mut self, bytes: &[u8], room: u64, owner: T) -> Option<()> {
        let fill = |_: &T, memory: &Memory, at| memory.write_slice(bytes, GuestAddress(at)).ok();
        self.send([bytes.len() as u64, room], owner, fill, |owner| owner)
    }

    /// False if the server has said that it is looking anyway. Call it after sending. `by_index`: it says
    /// so by the number of the message that it waits for.
    pub fn wants_kick(&mut self, by_index: bool) -> bool {
        // What was sent is written before the server's wish is read, as it does the opposite.
        fence(Ordering::SeqCst);
        let new = self.avail.wrapping_sub(std::mem::replace(&mut self.told, self.avail));
        if by_index {
            let event = self.memory.load::<u16>(GuestAddress(AVAIL_EVENT), Ordering::Relaxed);
            let since = |event| self.avail.wrapping_sub(u16::from_le(event)).wrapping_sub(1);
            return event.map_or(true, |event| since(event) < new);
        }
        let flags = self.memory.load::<u16>(GuestAddress(USED), Ordering::Relaxed);
        flags.map_or(true, |flags| u16::from_le(flags) & USED_NO_NOTIFY == 0)
    }

    /// How many answers there are that were not taken.
    fn ahead(&self) -> Result<u16, ShadowFault> {
        let index = self.memory.load::<u16>(GuestAddress(USED + 2), Ordering::Acquire);
        Ok(u16::from_le(index.map_err(|_| ShadowFault::Memory)?).wrapping_sub(self.used))
    }

    /// The next answer. If there is none, the server signals with the next one. After a fault nothing
    /// the server says can be believed.
    pub fn answer(&mut self) -> Result<Option<Answer<T>>, ShadowFault> {
        let mut ahead = self.ahead()?;
        if ahead == 0 && self.wanted != self.used {
            self.wanted = self.used;
            let wish = self.wanted.to_le();
            let told = self.memory.store(wish, GuestAddress(USED_EVENT), Ordering::Relaxed);
            told.map_err(|_| ShadowFault::Memory)?;
            // The wish is written before the answers are looked at once more, as the server does the
            // opposite.
            fence(Ordering::SeqCst);
            ahead = self.ahead()?;
        }
        if ahead == 0 {
            return Ok(None);
        }
        if usize::from(ahead) > self.live {
            return Err(ShadowFault::Index(ahead));
        }
        let at = GuestAddress(USED + 4 + 8 * u64::from(self.used % RING));
        let [id, len] = self.memory.read_obj::<[u32; 2]>(at).map_err(|_| ShadowFault::Memory)?;
        let (id, len) = (u32::from_le(id), u32::from_le(len));
        let slot = (id % 2 == 0).then(|| self.entries.get_mut(id as usize / 2)).flatten();
        let entry = slot.and_then(Option::take).ok_or(ShadowFault::Answer(id))?;
        self.used = self.used.wrapping_add(1);
        self.live -= 1;
        let Entry { owner, pages, reply, room } = entry;
        Ok(Some(Answer { owner, reply, len: len.min(room), pages }))
    }

    /// Copies an answer into the writable part of a chain, and forgets it; how many bytes that were.
    pub fn take(&mut self, answer: Answer<T>, guest: &Memory, into: &[Segment]) -> (T, u32) {
        let mut left = u64::from(answer.len);
        let mut at = answer.reply;
        for segment in into {
            let len = left.min(u64::from(segment.len));
            if len == 0 || copy(&self.memory, at, guest, segment.address.0, len).is_none() {
                break;
            }
            at += len;
            left -= len;
        }
        self.free(answer.pages);
        (answer.owner, answer.len - left as u32)
    }

    /// Forgets an answer that nobody waits for.
    pub fn drop_answer(&mut self, answer: Answer<T>) -> T {
        self.free(answer.pages);
        answer.owner
    }

    fn free(&mut self, pages: Range<usize>) {
        if let Some(pages) = self.taken.get_mut(pages) {
            pages.fill(false);
        }
    }
}

fn pages(bytes: u64) -> usize {
    // No more than MAX_REQUEST.
    bytes.div_ceil(PAGE) as usize
}

/// Copies between two memories, neither of which holds still.
fn copy(from: &Memory, at: u64, to: &Memory, into: u64, len: u64) -> Option<()> {
    let mut done = 0;
    while done < len {
        let left = usize::try_from(len - done).ok()?;
        let source = piece(from, at + done, left)?;
        let target = piece(to, into + done, source.len())?;
        let source = source.subslice(0, target.len()).ok()?;
        source.copy_to_volatile_slice(target);
        done += target.len() as u64;
    }
    Some(())
}

/// What is contiguous of `len` bytes at `at`.
fn piece(memory: &Memory, at: u64, len: usize) -> Option<crate::memory::MemorySlice<'_>> {
    let (region, offset) = GuestMemoryBackend::to_region_addr(memory, GuestAddress(at))?;
    let left = usize::try_from(region.len().checked_sub(offset.0)?).ok()?;
    region.get_slice(offset, len.min(left)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a server does: takes each message, answers with its bytes reversed.
    fn serve(queue: &ShadowQueue<u32>, from: &mut u16) {
        let load = |at| queue.memory.load::<u16>(GuestAddress(at), Ordering::Acquire).unwrap();
        while *from != load(AVAILABLE + 2) {
            let head = load(AVAILABLE + 4 + 2 * u64::from(*from % RING));
            let entry = |index: u16| -> [u64; 2] {
                queue.memory.read_obj(GuestAddress(16 * u64::from(index))).unwrap()
            };
            let ([request, len], [reply, room]) = (entry(head), entry(head + 1));
            let len = (len as u32).min(room as u32);
            let mut bytes = vec![0; len as usize];
            queue.memory.read_slice(&mut bytes, GuestAddress(request)).unwrap();
            bytes.reverse();
            queue.memory.write_slice(&bytes, GuestAddress(reply)).unwrap();
            let at = USED + 4 + 8 * u64::from(*from % RING);
            queue.memory.write_obj([u32::from(head), len], GuestAddress(at)).unwrap();
            *from = from.wrapping_add(1);
            queue.memory.store(*from, GuestAddress(USED + 2), Ordering::Release).unwrap();
        }
    }

    fn guest() -> Memory {
        Memory::from_ranges(&[(GuestAddress(0), 0x1000), (GuestAddress(0x1000), 0x1000)]).unwrap()
    }

    #[test]
    fn messages_go_and_answers_come_for_as_long_as_one_likes() {
        let (mut queue, guest, mut served) = (ShadowQueue::new().unwrap(), guest(), 0);
        for round in 0..1000_u32 {
            let message = format!("message {round}");
            let into = [Segment { address: GuestAddress(0xffc), len: 64 }];
            queue.send_bytes(message.as_bytes(), 64, round).unwrap();
            serve(&queue, &mut served);
            let answer = queue.answer().unwrap().unwrap();
            assert_eq!(queue.take(answer, &guest, &into), (round, message.len() as u32));
            let mut reply = vec![0; message.len()];
            guest.read_slice(&mut reply, GuestAddress(0xffc)).unwrap();
            reply.reverse();
            assert_eq!(reply, message.as_bytes());
        }
        assert_eq!((queue.live(), queue.taken.contains(&true)), (0, false));
    }

    #[test]
    fn each_side_signals_only_what_the_other_waits_for() {
        let (mut queue, mut served) = (ShadowQueue::new().unwrap(), 0);
        let wish = |queue: &ShadowQueue<u32>| {
            queue.memory.load::<u16>(GuestAddress(USED_EVENT), Ordering::Acquire).unwrap()
        };
        let send = |queue: &mut ShadowQueue<u32>, number| {
            queue.send_bytes(b"message", 16, number).unwrap();
            queue.wants_kick(true)
        };
        // The server waits for the first, and is busy with it from then on.
        assert_eq!([0, 1, 2].map(|number| send(&mut queue, number)), [true, false, false]);
        serve(&queue, &mut served);
        queue.memory.store(3_u16, GuestAddress(AVAIL_EVENT), Ordering::Release).unwrap();
        assert_eq!([3, 4].map(|number| send(&mut queue, number)), [true, false]);
        // We wait for the first, and for the next one once there are no more.
        for number in 0..3 {
            let answer = queue.answer().unwrap().unwrap();
            assert_eq!((queue.drop_answer(answer), wish(&queue)), (number, 0));
        }
        assert!(queue.answer().unwrap().is_none());
        assert_eq!(wish(&queue), 3);
    }

    #[test]
    fn what_does_not_fit_waits_until_something_has_come_back() {
        let (mut queue, mut served) = (ShadowQueue::new().unwrap(), 0);
        let big = vec![0; MAX_REQUEST as usize];
        let mut sent = 0;
        while queue.fits(MAX_REQUEST, MAX_REPLY) {
            queue.send_bytes(&big, MAX_REPLY, sent).unwrap();
            sent += 1;
        }
        assert_eq!(sent, 3);
        assert!(queue.fits(64, 64));
        serve(&queue, &mut served);
        let answer = queue.answer().unwrap().unwrap();
        queue.drop_answer(answer);
        assert!(queue.fits(MAX_REQUEST, MAX_REPLY));
    }

    #[test]
    fn there_are_as_many_messages_as_the_ring_has_room_for() {
        let mut queue = ShadowQueue::new().unwrap();
        let sent = (0..).take_while(|&n| queue.send_bytes(b"x", 16, n).is_some()).count();
        assert_eq!(sent, usize::from(RING / 2));
        assert_eq!(queue.abandon().len(), sent);
        assert!(queue.fits(1, 1));
    }

    #[test]
    fn a_server_that_makes_up_answers_is_found_out() {
        let used = |queue: &ShadowQueue<u32>, id: u32, len: u32, index: u16| {
            queue.memory.write_obj([id, len], GuestAddress(USED + 4)).unwrap();
            queue.memory.store(index, GuestAddress(USED + 2), Ordering::Release).unwrap();
        };
        for (id, index, fault) in [
            (0, 2, ShadowFault::Index(2)),
            (0, 0xffff, ShadowFault::Index(0xffff)),
            (1, 1, ShadowFault::Answer(1)),
            (2, 1, ShadowFault::Answer(2)),
            (u32::MAX, 1, ShadowFault::Answer(u32::MAX)),
        ] {
            let mut queue = ShadowQueue::new().unwrap();
            queue.send_bytes(b"question", 16, 0).unwrap();
            used(&queue, id, 8, index);
            assert_eq!(queue.answer().err(), Some(fault));
        }
        let mut queue = ShadowQueue::new().unwrap();
        queue.send_bytes(b"question", 16, 0).unwrap();
        used(&queue, 0, u32::MAX, 1);
        assert_eq!(queue.answer().unwrap().unwrap().len, 16);
    }
}
