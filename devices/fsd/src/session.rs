//! The conversation with the VMM: vhost-user on one socket, questions about the share on another.
//!
//! One thread does it all, one thing after the other. So nothing is ever in progress when the state is
//! saved, and no message needs a lock.

mod vhost_user;
mod watch;

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};

use vhost::vhost_user::message::VhostTransferStateDirection;
use vhost::vhost_user::{BackendReqHandler, Error as VhostError};
use virtio_queue::{Queue, QueueT};
use vm_memory::GuestAddress;
use vmm_sys_util::eventfd::EventFd;

use self::watch::Watch;
use crate::service::{Memory, Service};
use crate::state::MAX_BYTES;
use crate::tracked::Core;

/// Messages that are answered before the sockets are looked at again.
const BUDGET: usize = 256;

/// Longest question on the control socket, in bytes.
const MAX_QUESTION: u64 = 4096;

/// One ring, as far as it was set up.
#[derive(Default)]
struct Ring {
    size: u16,
    /// Descriptors, available, used, as addresses of the VMM.
    addresses: [u64; 3],
    base: u16,
    kick: Option<EventFd>,
    call: Option<EventFd>,
    enabled: bool,
    /// Once it can be worked on.
    queue: Option<Queue>,
}

/// A piece of the VMM's memory that is ours as well.
struct Mapping {
    user: u64,
    guest: u64,
    len: u64,
}

/// What a state transfer waits for.
struct Transfer {
    direction: VhostTransferStateDirection,
    pipe: File,
}

/// All of a conversation.
struct Session<F: Core> {
    service: Service<F>,
    memory: Option<Memory>,
    mappings: Vec<Mapping>,
    rings: Vec<Ring>,
    /// Each side says with which entry of a ring it wants to be signalled.
    by_index: bool,
    transfer: Option<Transfer>,
    /// The last transfer went well.
    transferred: bool,
}

/// Serves until the VMM hangs up. An error is the VMM's doing: it does not speak the protocol.
pub fn serve<F: Core>(
    service: Service<F>,
    vhost: UnixStream,
    control: &UnixStream,
) -> io::Result<()> {
    let rings = (0..2).map(|_| Ring::default()).collect();
    let session = Session {
        service,
        memory: None,
        mappings: Vec::new(),
        rings,
        by_index: false,
        transfer: None,
        transferred: true,
    };
    let session = Arc::new(Mutex::new(session));
    let mut watch = Watch::new(&vhost, control)?;
    let mut requests = BackendReqHandler::from_stream(vhost, session.clone());
    let mut questions = BufReader::new(control);
    loop {
        let busy = lock(&session).service.is_busy();
        // With something to do, nobody is waited for.
        let ready = watch.wait(if busy { 0 } else { -1 })?;
        if ready.vhost {
            match requests.handle_request() {
                Ok(()) => {}
                Err(VhostError::Disconnected | VhostError::SocketBroken(_)) => return Ok(()),
                Err(error) => return Err(io::Error::other(error)),
            }
            let mut session = lock(&session);
            session.transfer();
            watch.follow(session.kicks())?;
        }
        if ready.control && !answer(&session, &mut questions, control) {
            return Ok(());
        }
        if ready.kicked {
            lock(&session).work();
        } else if busy && !ready.vhost && !ready.control {
            lock(&session).service.verify();
        }
    }
}

fn lock<F: Core>(session: &Arc<Mutex<Session<F>>>) -> std::sync::MutexGuard<'_, Session<F>> {
    session.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Answers one question with one line; false at the end.
fn answer<F: Core>(
    session: &Arc<Mutex<Session<F>>>,
    questions: &mut BufReader<&UnixStream>,
    mut control: &UnixStream,
) -> bool {
    let mut question = String::new();
    match questions.by_ref().take(MAX_QUESTION).read_line(&mut question) {
        Ok(len) if len > 0 && question.ends_with('\n') => {}
        _ => return false,
    }
    // There is one question so far, so its text does not matter.
    let status = lock(session).service.status();
    let Ok(mut line) = serde_json::to_string(&status) else { return false };
    line.push('\n');
    control.write_all(line.as_bytes()).is_ok()
}

impl<F: Core> Session<F> {
    fn kicks(&self) -> impl Iterator<Item = &EventFd> {
        let working = self.rings.iter().filter(|ring| ring.queue.is_some());
        working.filter_map(|ring| ring.kick.as_ref())
    }

    /// Takes up the work on rings that have become ready.
    fn set_up(&mut self) -> Option<()> {
        let memory = self.memory.as_ref()?;
        for ring in &mut self.rings {
            if !ring.enabled || ring.kick.is_none() || ring.queue.is_some() {
                continue;
            }
            let mut queue = Queue::new(ring.size).ok()?;
            let place = |user: u64| {
                let inside =
                    |map: &&Mapping| user.checked_sub(map.user).is_some_and(|at| at < map.len);
                let map = self.mappings.iter().find(inside)?;
                user.checked_sub(map.user)?.checked_add(map.guest).map(GuestAddress)
            };
            let [descriptors, available, used] = ring.addresses;
            queue.try_set_desc_table_address(place(descriptors)?).ok()?;
            queue.try_set_avail_ring_address(place(available)?).ok()?;
            queue.try_set_used_ring_address(place(used)?).ok()?;
            queue.set_ready(true);
            queue.set_next_avail(ring.base);
            queue.set_event_idx(self.by_index);
            let next = queue.used_idx(memory, std::sync::atomic::Ordering::Acquire).ok()?;
            queue.set_next_used(next.0);
            queue.is_valid(memory).then_some(())?;
            ring.queue = Some(queue);
        }
        Some(())
    }

    /// Answers what there is on all rings.
    fn work(&mut self) {
        let Some(memory) = &self.memory else { return };
        for ring in &mut self.rings {
            let (Some(queue), Some(kick)) = (&mut ring.queue, &ring.kick) else { continue };
            let mut answered = 0;
            loop {
                let Some(chain) = queue.pop_descriptor_chain(memory) else {
                    // Fails for rings outside of memory, which it was not at the start.
                    if queue.enable_notification(memory).unwrap_or(false) {
                        continue;
                    }
                    break;
                };
                let head = chain.head_index();
                let len = self.service.answer(memory, chain);
                let used = queue.add_used(memory, head, u32::try_from(len).unwrap_or(0));
                // Fails as little as the answer itself.
                let wanted = used.is_ok() && queue.needs_notification(memory).unwrap_or(true);
                if let (true, Some(call)) = (wanted, &ring.call) {
                    let _ = call.write(1);
                }
                answered += 1;
                if answered == BUDGET {
                    let _ = kick.write(1);
                    break;
                }
            }
        }
    }

    /// Carries out the state transfer that was asked for, after it was answered that it will be.
    fn transfer(&mut self) {
        let Some(Transfer { direction, mut pipe }) = self.transfer.take() else { return };
        // What was sent before belongs to the state.
        self.work();
        let done = match direction {
            VhostTransferStateDirection::SAVE => match self.service.save() {
                Ok(bytes) => pipe.write_all(&bytes).is_ok(),
                Err(_) => false,
            },
            VhostTransferStateDirection::LOAD => {
                let mut bytes = Vec::new();
                let most = MAX_BYTES as u64 + 1;
                let read = pipe.take(most).read_to_end(&mut bytes);
                read.is_ok() && self.service.load(&bytes).is_ok()
            }
        };
        self.transferred = done;
    }
}
