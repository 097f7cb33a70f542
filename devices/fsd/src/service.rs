//! A share and its FUSE server: messages in, messages out, and the state.
//!
//! The library's server refuses some messages by failing, where a guest needs an answer, and panics
//! over a buffer without room for one. So every message passes here first.

use std::mem::size_of;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use vhost_user_backend::bitmap::BitmapMmapRegion;
use virtio_queue::desc::split::Descriptor;
use virtio_queue::{DescriptorChain, Queue, QueueT};
use virtiofsd::descriptor_utils::{Reader, Writer};
use virtiofsd::fuse::{InHeader, OutHeader};
use virtiofsd::server::Server;
use vm_memory::{ByteValued, Bytes, GuestAddress, GuestMemoryMmap};

use crate::journal::Journal;
use crate::restore::{MAX_STALE, Report, RestoreError, check_share};
use crate::share::{Policy, Settings};
use crate::state::{ShareIdentity, State};
use crate::table::{Changes, Init};
use crate::tracked::{Core, Count, Tracked};

/// The memory that messages are in.
pub type Memory = GuestMemoryMmap<BitmapMmapRegion>;

/// The opcode of FUSE_INIT.
pub const INIT: u32 = 26;
const FORGET: u32 = 2;
const INTERRUPT: u32 = 36;
const DESTROY: u32 = 38;
const BATCH_FORGET: u32 = 42;

/// Room for a mount and its answer.
const INIT_ROOM: usize = 4096;

/// What a share tells about itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// The share.
    pub tag: String,
    /// What its guest has.
    pub count: Count,
    /// Messages so far.
    pub messages: u64,
    /// Those of them that were not understood.
    pub malformed: u64,
    /// What a restore has come to.
    pub restored: Option<Report>,
    /// Why the last save or restore has failed.
    pub error: Option<String>,
    /// How long the last save took.
    pub save_micros: u64,
    /// How long the last restore took.
    pub restore_micros: u64,
}

/// A share that is served.
pub struct Service<F: Core> {
    server: Server<Tracked<F>>,
    tracked: Tracked<F>,
    share: ShareIdentity,
    settings: Settings,
    policy: Policy,
    status: Status,
    /// There are nodes to be looked up when there is time.
    verifies: bool,
    /// Where it is kept for who comes after us.
    journal: Option<Journal>,
}

impl<F: Core> Service<F> {
    /// Serves `core`, which is the directory that `share` describes.
    pub fn new(core: F, share: ShareIdentity, settings: Settings, policy: Policy) -> Self {
        Self::of(Tracked::new(core), share, settings, policy)
    }

    /// Serves what is tracked already.
    pub fn of(
        tracked: Tracked<F>,
        share: ShareIdentity,
        settings: Settings,
        policy: Policy,
    ) -> Self {
        let status = Status { tag: share.tag.clone(), ..Status::default() };
        let server = Server::new(tracked.clone());
        let journal = None;
        Self { server, tracked, share, settings, policy, status, verifies: false, journal }
    }

    /// The file system behind it.
    pub fn tracked(&self) -> &Tracked<F> {
        &self.tracked
    }

    /// What there is to be told.
    pub fn status(&self) -> Status {
        Status { count: self.tracked.count(), ..self.status.clone() }
    }

    /// Answers one message; how many bytes the answer has. What it tells the guest is noted first.
    pub fn answer(&mut self, memory: &Memory, chain: DescriptorChain<&Memory>) -> usize {
        let len = self.respond(memory, chain);
        self.note_changes();
        len
    }

    fn respond(&mut self, memory: &Memory, chain: DescriptorChain<&Memory>) -> usize {
        self.status.messages = self.status.messages.wrapping_add(1);
        let ends = (Reader::new(memory, chain.clone()), Writer::new(memory, chain.clone()));
        let (Ok(request), Ok(reply)) = ends else { return self.malformed() };
        let Ok(header) = request.clone().read_obj::<InHeader>() else { return self.malformed() };
        let silent = matches!(header.opcode, FORGET | BATCH_FORGET | INTERRUPT | DESTROY);
        let room = reply.available_bytes();
        if !silent && room < size_of::<OutHeader>() {
            return self.malformed();
        }
        let (error_reply, init_request) = (reply.clone(), request.clone());
        let len = header.len as usize;
        let complete = (size_of::<InHeader>()..=request.available_bytes()).contains(&len);
        let answered = match complete {
            true => self.server.handle_message(request, reply, None::<&mut ()>).ok(),
            false => None,
        };
        match answered {
            Some(written) => {
                let written = written.min(room);
                if header.opcode == INIT {
                    self.note_init(init_request, len, read_back(memory, chain, written));
                }
                written
            }
            None => {
                self.malformed();
                if silent { 0 } else { refuse(header.unique, error_reply) }
            }
        }
    }

    fn malformed(&mut self) -> usize {
        self.status.malformed = self.status.malformed.wrapping_add(1);
        0
    }

    /// Keeps a mount's message and its answer, if it was one.
    fn note_init(&self, mut request: Reader<'_>, len: usize, reply: Vec<u8>) {
        let mut inside = self.tracked.inside();
        if inside.table.node(crate::table::ROOT).is_none() {
            return;
        }
        let mut bytes = vec![0; len.min(INIT_ROOM)];
        if std::io::Read::read_exact(&mut request, &mut bytes).is_ok() {
            inside.table.init = Some(Init { request: bytes, reply });
        }
    }

    /// Answers a message that is given as bytes, with `room` for the answer.
    pub fn ask(&mut self, request: &[u8], room: usize) -> Vec<u8> {
        let asked = Scratch::new(request, room);
        let Some((scratch, mut queue)) = asked else { return Vec::new() };
        let memory = &scratch.memory;
        let Some(chain) = queue.pop_descriptor_chain(memory) else { return Vec::new() };
        let len = self.answer(memory, chain);
        let mut reply = vec![0; len];
        match memory.read_slice(&mut reply, scratch.reply) {
            Ok(()) => reply,
            Err(_) => Vec::new(),
        }
    }

    /// True if there is something to be done when nothing is asked.
    pub fn is_busy(&self) -> bool {
        self.verifies
    }

    /// Does some of that.
    pub fn verify(&mut self) {
        const SOME: usize = 64;
        let (stale, more) = self.tracked.verify(SOME);
        self.verifies = more;
        let Some(report) = &mut self.status.restored else { return };
        report.unverified = if more { report.unverified.saturating_sub(SOME) } else { 0 };
        report.restored = report.restored.saturating_sub(stale.len());
        report.stale_total += stale.len();
        let room = MAX_STALE.saturating_sub(report.stale.len());
        report.stale.extend(stale.into_iter().take(room));
        self.note_changes();
    }

    /// From now on keeps in `journal` what the guest knows. What another server of the share has left in
    /// it, is gone on from first.
    pub fn keep(&mut self, journal: Journal) -> Result<(), RestoreError> {
        let left = journal.read()?;
        self.journal = Some(journal);
        match left {
            Some(state) => self.go_on(None, |this| this.take_up(state, Policy::Tolerant)),
            None => {
                self.tracked.inside().table.changes.wanted = true;
                Ok(())
            }
        }
    }

    fn note_changes(&mut self) {
        let Some(journal) = &mut self.journal else { return };
        let (whole, bytes) = {
            let changes = &mut self.tracked.inside().table.changes;
            (std::mem::take(&mut changes.whole), std::mem::take(&mut changes.bytes))
        };
        if !whole && bytes.is_empty() {
            return;
        }
        let noted = match whole || !journal.has_room() {
            true => match self.tracked.save_table(&self.share, self.settings).to_bytes() {
                Ok(state) => journal.begin(&state),
                Err(error) => Err(std::io::Error::other(error)),
            },
            false => journal.append(&bytes),
        };
        if noted.is_err() {
            // Half of it would be worse than nothing: without it nobody comes after us.
            journal.give_up();
            self.journal = None;
            self.tracked.inside().table.changes = Changes::default();
        }
    }

    /// The saved form. Nothing may be in progress.
    pub fn save(&mut self) -> Result<Vec<u8>, RestoreError> {
        let start = Instant::now();
        let saved = self.tracked.save(&self.share, self.settings);
        let path = self.share.path.clone();
        let saved = saved.map_err(|source| RestoreError::Host { path, source });
        let bytes = saved.and_then(|state| Ok(state.to_bytes()?));
        self.status.save_micros = micros(start);
        self.status.error = bytes.as_ref().err().map(ToString::to_string);
        bytes
    }

    /// Goes on from bytes that nobody vouches for. After a failure nothing is left to be served.
    pub fn load(&mut self, bytes: &[u8]) -> Result<(), RestoreError> {
        // The next server would find the same by it, unless this one looks for other files.
        let as_it_is = matches!(self.policy, Policy::Strict | Policy::Tolerant);
        self.go_on(as_it_is.then_some(bytes), |this| {
            this.take_up(State::parse(bytes)?, this.policy)
        })
    }

    /// Goes on by `act`, and notes what has come of it: `known`, or all of it.
    fn go_on(
        &mut self,
        known: Option<&[u8]>,
        act: impl FnOnce(&mut Self) -> Result<Option<Report>, RestoreError>,
    ) -> Result<(), RestoreError> {
        let start = Instant::now();
        let mut journal = self.journal.take();
        let loaded = act(self);
        self.status.restore_micros = micros(start);
        if let Some(journal) = &mut journal {
            let changes = &mut self.tracked.inside().table.changes;
            *changes = Changes { wanted: true, ..Changes::default() };
            match (known, &loaded) {
                (Some(known), Ok(Some(_))) if journal.begin(known).is_ok() => {}
                _ => changes.all(),
            }
        }
        self.journal = journal;
        let ended = self.note_end(loaded);
        self.note_changes();
        ended
    }

    fn note_end(
        &mut self,
        loaded: Result<Option<Report>, RestoreError>,
    ) -> Result<(), RestoreError> {
        match loaded {
            Ok(report) => {
                self.verifies = report.as_ref().is_some_and(|report| report.unverified > 0);
                self.status.restored = report;
                self.status.error = None;
                Ok(())
            }
            Err(error) => {
                self.server.destroy();
                self.status.error = Some(error.to_string());
                Err(error)
            }
        }
    }

    fn take_up(&mut self, state: State, policy: Policy) -> Result<Option<Report>, RestoreError> {
        let State { share, settings, mount } = state;
        if share.tag != self.share.tag {
            return Err(RestoreError::Tag { was: share.tag });
        }
        if let Some(difference) = settings.difference(&self.settings) {
            return Err(RestoreError::Setting(difference));
        }
        let Some(mount) = mount else { return Ok(None) };
        check_share(&share, &self.share, policy)?;
        let reply = self.ask(&mount.request, INIT_ROOM);
        let answered = reply.get(4..8) == Some(&[0; 4]);
        if !answered || self.tracked.inside().table.init.is_none() {
            return Err(RestoreError::Init);
        }
        if reply != mount.reply {
            return Err(RestoreError::Init);
        }
        let tag = self.share.tag.clone();
        self.tracked.restore(mount, policy, &tag).map(Some)
    }
}

fn micros(start: Instant) -> u64 {
    u64::try_from(start.elapsed().as_micros()).unwrap_or(u64::MAX)
}

/// The answer to what was not understood.
fn refuse(unique: u64, mut reply: Writer<'_>) -> usize {
    let len = size_of::<OutHeader>();
    let header = OutHeader { len: len as u32, error: -libc::EINVAL, unique };
    match std::io::Write::write_all(&mut reply, header.as_slice()) {
        Ok(()) => len,
        Err(_) => 0,
    }
}

/// The answer that was written into a chain, if it is as short as that of a mount.
fn read_back(memory: &Memory, chain: DescriptorChain<&Memory>, len: usize) -> Vec<u8> {
    let mut reply = vec![0; len.min(INIT_ROOM)];
    let mut at = 0;
    for descriptor in chain.writable() {
        let end = at + (descriptor.len() as usize).min(reply.len() - at);
        let piece = reply.get_mut(at..end).unwrap_or_default();
        if memory.read_slice(piece, descriptor.addr()).is_err() {
            return Vec::new();
        }
        at = end;
    }
    reply
}

/// A message of our own, in memory as a guest would have it.
struct Scratch {
    memory: Memory,
    reply: GuestAddress,
}

impl Scratch {
    fn new(request: &[u8], room: usize) -> Option<(Self, Queue)> {
        const RINGS: u64 = 4096;
        let reply = GuestAddress((RINGS + request.len() as u64).next_multiple_of(4096));
        let all = usize::try_from(reply.0).ok()?.checked_add(room.max(1))?;
        let memory = Memory::from_ranges(&[(GuestAddress(0), all.next_multiple_of(4096))]).ok()?;
        memory.write_slice(request, GuestAddress(RINGS)).ok()?;
        const NEXT: u16 = 1;
        const WRITE: u16 = 2;
        let flags = if room > 0 { NEXT } else { 0 };
        let first = Descriptor::new(RINGS, request.len() as u32, flags, 1);
        let second = Descriptor::new(reply.0, room as u32, WRITE, 0);
        memory.write_obj(first, GuestAddress(0)).ok()?;
        memory.write_obj(second, GuestAddress(16)).ok()?;
        // The available ring: no flags, one chain, which begins with the first descriptor.
        memory.write_obj([0_u16, 1, 0, 0], GuestAddress(1024)).ok()?;
        let mut queue = Queue::new(2).ok()?;
        queue.set_desc_table_address(Some(0), Some(0));
        queue.set_avail_ring_address(Some(1024), Some(0));
        queue.set_used_ring_address(Some(2048), Some(0));
        queue.set_ready(true);
        Some((Self { memory, reply }, queue))
    }
}
