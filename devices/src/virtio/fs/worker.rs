//! Carries messages from the guest's queues to the server, and answers back.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::message::{Data, Head, OUT_HEADER, destroy, error};
use super::shadow::{MAX_REPLY, MAX_REQUEST};
use super::{Counters, Serving, Session};
use crate::executor::{Flow, Handler, Interest, Sources};
use crate::ids::Token;
use crate::memory::Memory;
use crate::metrics::LOGGED_FAULTS;
use crate::virtio::queue::{ActiveQueue, QueueFault};
use crate::virtio::throttle::Admission;
use crate::virtio::{Chain, Notifier};

/// Messages taken from a queue before other devices get their turn.
const BUDGET: usize = 64;

/// Bytes that are moved at once before other devices get their turn.
const BYTES: u64 = 8 << 20;

/// How long a server that has hung up is waited for, so that it can be told how it has ended.
const MOMENT: Duration = Duration::from_millis(20);

/// Answers have come.
const CALL: Token = Token(u32::MAX);
/// The server is gone.
const PEER: Token = Token(u32::MAX - 1);
/// Another one is there, or never will be.
const RESTARTED: Token = Token(u32::MAX - 2);
/// The host allows or forbids the share.
const PERMIT: Token = Token(u32::MAX - 4);
/// The server has lent files.
const LENT: Token = Token(u32::MAX - 5);
/// The rate limit lets something through again.
const TIMER: Token = Token(u32::MAX - 3);

/// What is remembered of a message on its way.
pub(super) struct Owner {
    head: Head,
    since: Instant,
    /// Where its answer goes: the queue, and the chain. `None`: nobody waits for it any more.
    place: Option<(usize, Chain)>,
}

/// The worker of a device that is live.
pub(super) struct Worker {
    pub session: Session,
    pub memory: Memory,
    /// In order of their index.
    pub queues: Vec<ActiveQueue>,
    pub notifier: Notifier,
    pub counters: Arc<Counters>,
    pub tag: String,
}

impl Session {
    /// The guest has let go of the device: nobody waits for answers, and all that it knew is to be
    /// forgotten.
    pub(super) fn forget_guest(&mut self) {
        for owner in self.shadow.owners_mut() {
            owner.place = None;
        }
        if let Serving::Live(server) = &mut self.serving {
            server.lent.clear();
        }
        let owner = Owner { head: Head::default(), since: Instant::now(), place: None };
        // Without room for that, the next mount makes it forget.
        if self.shadow.send_bytes(&destroy(), 0, owner).is_some() {
            self.kick();
        }
    }

    fn kick(&mut self) {
        if let Serving::Live(server) = &self.serving
            && self.shadow.wants_kick(server.by_index)
        {
            server.kick.signal();
        }
    }

    /// Why nobody serves.
    fn reason(&self) -> i32 {
        if let Serving::Forbidden = self.serving { libc::EACCES } else { libc::EIO }
    }

    /// What a guest waits for: how much, and the oldest of it in words.
    pub(super) fn waiting(&self) -> Option<String> {
        let waiting = self.shadow.owners().filter(|owner| owner.place.is_some());
        let oldest = waiting.min_by_key(|owner| owner.since)?;
        Some(format!(
            "{} of node {} has been on its way for {:.1} s",
            oldest.head.name(),
            oldest.head.node,
            oldest.since.elapsed().as_secs_f32()
        ))
    }
}

impl Worker {
    /// Takes what the guest asks, as far as there is room.
    fn serve(&mut self) -> Result<(), QueueFault> {
        let mut sent = false;
        for index in 0..self.queues.len() {
            sent |= self.serve_queue(index)?;
        }
        if sent {
            self.session.kick();
        }
        Ok(())
    }

    fn serve_queue(&mut self, index: usize) -> Result<bool, QueueFault> {
        let mut sent = false;
        if let Serving::Restarting(_) = self.session.serving {
            return Ok(sent);
        }
        let mut moved = 0;
        for _ in 0..BUDGET {
            if moved > BYTES {
                break;
            }
            let Some(queue) = self.queues.get_mut(index) else { return Ok(sent) };
            let Some(chain) = queue.pop()? else {
                queue.notify()?;
                if queue.enable_notification()? {
                    continue;
                }
                return Ok(sent);
            };
            let (request, room) = (chain.readable_len(), chain.writable_len().min(MAX_REPLY));
            let head = Head::read(&self.memory, &chain);
            let pays = head.is_none_or(|head| !head.is_silent());
            if pays && self.is_throttled() {
                self.put_back(index)?;
                return Ok(sent);
            }
            let answer = self.refuse(head, request, room);
            if let Some(answer) = answer {
                self.counters.failures.one();
                self.complete(index, &chain, &answer)?;
                continue;
            }
            if let Some(len) = head.and_then(|head| self.answer_at_once(head, &chain)) {
                self.complete_at_once(index, &chain, len)?;
                moved += request + room;
                continue;
            }
            if !self.session.shadow.fits(request, room) {
                // Tried again with the next answer.
                self.put_back(index)?;
                return Ok(sent);
            }
            let head = head.unwrap_or_default();
            let since = Instant::now();
            let keep = |chain| Owner { head, since, place: Some((index, chain)) };
            // Cannot fail: it fits, and the chain was checked.
            if self.session.shadow.send_chain(&self.memory, chain, keep).is_none() {
                return Ok(sent);
            }
            self.counters.written_bytes.add(request);
            if let (Some(throttle), true) = (&mut self.session.throttle, pays) {
                throttle.charge(request + room);
            }
            sent = true;
        }
        if let Some(queue) = self.queues.get_mut(index) {
            queue.notify()?;
            queue.kick().signal();
        }
        Ok(sent)
    }

    /// The error that a message is answered with whose server cannot answer it.
    fn refuse(&self, head: Option<Head>, request: u64, room: u64) -> Option<Vec<u8>> {
        match (self.session.server(), head) {
            (_, None) => Some(Vec::new()),
            (_, Some(head)) if !head.is_silent() && room < OUT_HEADER => Some(Vec::new()),
            (_, Some(head)) if request > MAX_REQUEST => refusal(head, libc::E2BIG),
            (None, Some(head)) => refusal(head, self.session.reason()),
            (Some(_), Some(_)) => None,
        }
    }

    /// Answers what takes neither the server nor waiting; the length of the answer.
    fn answer_at_once(&mut self, head: Head, chain: &Chain) -> Option<u32> {
        let Serving::Live(server) = &mut self.session.serving else { return None };
        if head.is_data() {
            let data = Data::read(&self.memory, chain);
            let answer = data.and_then(|data| server.lent.answer(&self.memory, chain, &data));
            if answer.is_none() {
                server.lent.passed_on();
            }
            return answer;
        }
        if head.ends_all() {
            server.lent.clear();
        } else if let Some(handle) = head.closes(&self.memory, chain) {
            server.lent.give_back((head.node, handle));
        }
        None
    }

    fn complete_at_once(
        &mut self,
        index: usize,
        chain: &Chain,
        len: u32,
    ) -> Result<(), QueueFault> {
        let request = chain.readable_len();
        self.counters.requests.one();
        self.counters.direct.one();
        self.counters.written_bytes.add(request);
        self.counters.read_bytes.add(u64::from(len));
        if let Some(throttle) = &mut self.session.throttle {
            throttle.charge(request + chain.writable_len().min(MAX_REPLY));
        }
        match self.queues.get_mut(index) {
            Some(queue) => queue.complete(chain, len),
            None => Ok(()),
        }
    }

    /// Whether requests have to wait. Forgets do not, unless what they stand behind does: they make
    /// room.
    fn is_throttled(&mut self) -> bool {
        let Some(throttle) = &mut self.session.throttle else { return false };
        let admission = throttle.admit(Instant::now());
        if admission == Admission::Closed {
            self.counters.throttled.one();
        }
        admission != Admission::Now
    }

    /// Leaves the message that was taken last for later. What was answered so far is not held back.
    fn put_back(&mut self, index: usize) -> Result<(), QueueFault> {
        if let Some(queue) = self.queues.get_mut(index) {
            queue.undo_pop();
        }
        self.queues.iter_mut().try_for_each(ActiveQueue::notify)
    }

    /// Gives a chain back with an answer of ours.
    fn complete(&mut self, index: usize, chain: &Chain, answer: &[u8]) -> Result<(), QueueFault> {
        let mut writer = chain.writer(&self.memory);
        // What was checked when it was popped can be written.
        let _ = io::Write::write_all(&mut writer, answer);
        let written = writer.written();
        self.counters.requests.one();
        match self.queues.get_mut(index) {
            Some(queue) => queue.complete(chain, written),
            None => Ok(()),
        }
    }

    /// Gives the guest the answers that have come.
    pub(super) fn reap(&mut self) -> Result<(), QueueFault> {
        while self.session.server().is_some() {
            match self.session.shadow.answer() {
                Ok(Some(answer)) => {
                    let Some((index, chain)) = &answer.owner.place else {
                        self.session.shadow.drop_answer(answer);
                        continue;
                    };
                    let (index, into) = (*index, chain.writable().to_vec());
                    let (owner, len) = self.session.shadow.take(answer, &self.memory, &into);
                    self.counters.requests.one();
                    self.counters.read_bytes.add(u64::from(len));
                    if let (Some((_, chain)), Some(queue)) =
                        (owner.place, self.queues.get_mut(index))
                    {
                        queue.complete(&chain, len)?;
                    }
                }
                Ok(None) => break,
                Err(fault) => {
                    tracing::error!(tag = self.tag, %fault, "the file server is not to be trusted");
                    return self.lose();
                }
            }
        }
        self.queues.iter_mut().try_for_each(ActiveQueue::notify)
    }

    /// The server has ended, or shall: whoever waits for it gets an error, and another one is started
    /// in its place, unless too many have ended.
    fn lose(&mut self) -> Result<(), QueueFault> {
        let Serving::Live(mut server) = std::mem::replace(&mut self.session.serving, Serving::Gone)
        else {
            return Ok(());
        };
        self.counters.losses.one();
        let answered = self.abandon();
        let end = server.end(MOMENT);
        drop(server);
        let session = &mut self.session;
        let again = session.may_restart();
        tracing::error!(
            tag = self.tag,
            end,
            again,
            "the file server has ended; what was on its way has failed"
        );
        if again {
            session.restart(&self.tag);
        }
        answered
    }

    /// What is on its way has failed.
    pub(super) fn abandon(&mut self) -> Result<(), QueueFault> {
        for owner in self.session.shadow.abandon() {
            let Some((index, chain)) = owner.place else { continue };
            self.counters.failures.one();
            let answer = refusal(owner.head, libc::EIO).unwrap_or_default();
            self.complete(index, &chain, &answer)?;
        }
        self.queues.iter_mut().try_for_each(ActiveQueue::notify)
    }

    /// Takes up the server that was started in the place of another, if it is there.
    fn take_up(&mut self) {
        let Serving::Restarting(restart) = &self.session.serving else { return };
        let Some(begun) = restart.take() else { return };
        let begun = begun.and_then(|(mut server, shadow)| {
            let taken = server.take_over(&self.session.control);
            taken.map_err(|source| super::FsError::Host { what: "control", source })?;
            Ok((server, shadow))
        });
        match begun {
            // It ends before it has seen anything of the guest's.
            Ok(_) if !self.session.permit.is_given() => self.session.serving = Serving::Forbidden,
            Ok((server, shadow)) => {
                (self.session.serving, self.session.shadow) = (Serving::Live(server), shadow);
                self.counters.restarts.one();
                tracing::warn!(tag = self.tag, "another file server goes on in its place");
            }
            Err(error) => {
                self.session.serving = Serving::Gone;
                let error: &dyn std::error::Error = &error;
                tracing::error!(
                    tag = self.tag,
                    error,
                    "no file server goes on in its place; the guest gets I/O errors"
                );
            }
        }
    }

    /// Waits until nothing is on its way, or `patience` is over. For a worker that is not running.
    pub fn drain(&mut self, patience: Duration) {
        let end = Instant::now() + patience;
        loop {
            // A fault of the driver's was told already, or is with the next start.
            let _ = self.reap();
            if let Serving::Restarting(restart) = &self.session.serving {
                restart.wait(end);
                return self.take_up();
            }
            let Some(server) = self.session.server() else { return };
            if !server.is_alive() {
                let _ = self.lose();
                continue;
            }
            if self.session.waiting().is_none() {
                return;
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            if server.wait(left) {
                let _ = self.reap();
                let _ = self.lose();
            }
        }
    }

    /// Watches who serves.
    fn watch(&self, sources: &mut Sources<'_, '_>) -> io::Result<()> {
        match &self.session.serving {
            Serving::Live(server) => {
                sources.add_signal(CALL, &server.call)?;
                sources.add(LENT, &server.lent, Interest::Read)?;
                sources.add(PEER, server, Interest::Hangup)
            }
            Serving::Restarting(restart) => {
                sources.remove(CALL);
                sources.remove(LENT);
                sources.remove(PEER);
                sources.add(RESTARTED, &restart.done, Interest::Read)
            }
            Serving::Forbidden | Serving::Gone => {
                sources.remove(CALL);
                sources.remove(LENT);
                sources.remove(PEER);
                Ok(())
            }
        }
    }

    fn react(&mut self, token: Token) -> Result<(), QueueFault> {
        match token {
            PEER => {
                // What it has answered before, counts.
                self.reap()?;
                self.lose()
            }
            CALL => self.reap(),
            RESTARTED => {
                self.take_up();
                Ok(())
            }
            LENT => {
                if let Serving::Live(server) = &mut self.session.serving {
                    server.lent.take_in();
                }
                Ok(())
            }
            PERMIT => self.heed(),
            TIMER => {
                if let Some(throttle) = &mut self.session.throttle {
                    throttle.time_has_come();
                }
                Ok(())
            }
            // The guest's, who is served in any case.
            _ => Ok(()),
        }
    }
}

/// The error that a message is answered with; nothing for what gets no answer.
fn refusal(head: Head, errno: i32) -> Option<Vec<u8>> {
    Some(if head.is_silent() { Vec::new() } else { error(head.unique, errno).to_vec() })
}

impl Handler for Worker {
    fn attach(&mut self, sources: &mut Sources<'_, '_>) -> io::Result<()> {
        for (token, queue) in (0..).map(Token).zip(&self.queues) {
            sources.add_signal(token, queue.kick())?;
        }
        if let Some(throttle) = &self.session.throttle {
            sources.add(TIMER, throttle, Interest::Read)?;
        }
        sources.add(PERMIT, &self.session.permit.changed, Interest::Read)?;
        self.watch(sources)
    }

    fn handle(&mut self, token: Token, sources: &mut Sources<'_, '_>) -> Flow {
        let before = std::mem::discriminant(&self.session.serving);
        if token == RESTARTED {
            sources.remove(RESTARTED);
        }
        let done = self.react(token).and_then(|()| self.serve());
        if std::mem::discriminant(&self.session.serving) != before
            && let Err(error) = self.watch(sources)
        {
            tracing::error!(tag = self.tag, %error, "the file server cannot be watched");
            self.notifier.needs_reset();
            return Flow::Finished;
        }
        match done {
            Ok(()) => Flow::Continue,
            Err(fault) => {
                if self.counters.guest_faults.one() < LOGGED_FAULTS {
                    tracing::warn!(%fault, tag = self.tag, "file system device stopped");
                }
                self.notifier.needs_reset();
                Flow::Finished
            }
        }
    }
}
