//! The file server process of a share: its start, what is agreed on with it, its state, its end.
//!
//! It speaks vhost-user on one socket, and answers questions on another. Every exchange has a time
//! limit; whatever goes wrong, the process is at fault, and is ended.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use vhost::vhost_user::message::{
    VhostTransferStateDirection as Direction, VhostTransferStatePhase as Phase,
    VhostUserHeaderFlag, VhostUserProtocolFeatures as Protocol, VhostUserVirtioFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vm_memory::GuestMemoryBackend;

use super::lent::Lent;
use super::shadow::{RING, ShadowQueue};
use super::{Cache, FsConfig, FsError, Policy};
use crate::event::Event;
use crate::memory::shareable_file;
use crate::virtio::feature;
use crate::virtio::vhost::user::deadline::Watchdog;

/// How long the server may take for one thing.
pub const PATIENCE: Duration = Duration::from_secs(10);
/// How long it may take to say how it is.
const ANSWERS: Duration = Duration::from_secs(1);
/// How long a process that was killed is waited for.
const END: Duration = Duration::from_secs(1);
/// Most bytes of a state that is taken.
const MAX_STATE: u64 = 64 << 20;
/// Most bytes of an answer on the control socket.
const MAX_STATUS: u64 = 4 << 20;

/// Descriptors of the child, as its options say.
const VHOST_FD: i32 = 3;
const CONTROL_FD: i32 = 4;
const JOURNAL_FD: i32 = 5;
const LENT_FD: i32 = 6;

/// Bytes of the file in which a server keeps what the next one has to know. Only what is written of it
/// takes memory.
const JOURNAL: u64 = 160 << 20;

/// The way to ask a server about its share. All clones are the same one.
#[derive(Clone)]
pub(super) struct Control(Arc<Mutex<UnixStream>>);

impl Control {
    fn new(socket: UnixStream) -> io::Result<Self> {
        socket.set_read_timeout(Some(ANSWERS))?;
        Ok(Self(Arc::new(Mutex::new(socket))))
    }

    fn socket(&self) -> MutexGuard<'_, UnixStream> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on asks the one that `other` asks.
    pub fn replace(&self, other: &Self) -> io::Result<()> {
        let socket = other.socket().try_clone()?;
        *self.socket() = socket;
        Ok(())
    }

    /// What it says about its share: one line of JSON. Waits a second at most.
    pub fn status(&self) -> io::Result<String> {
        let mut socket = self.socket();
        socket.write_all(b"status\n")?;
        line(&socket)
    }

    /// What it says unasked, before it ends.
    fn last_words(&self) -> io::Result<String> {
        line(&self.socket())
    }
}

fn line(socket: &UnixStream) -> io::Result<String> {
    let mut line = String::new();
    BufReader::new(socket.take(MAX_STATUS)).read_line(&mut line)?;
    match line.ends_with('\n') {
        true => Ok(line),
        false => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

/// A server that runs.
pub(super) struct Server {
    frontend: Frontend,
    socket: UnixStream,
    watchdog: Watchdog,
    control: Control,
    child: Child,
    tag: String,
    /// Signalled for messages that were sent.
    pub kick: Event,
    /// Signalled for answers that have come.
    pub call: Event,
    /// It says with which message it wants to be signalled, and is told with which answer.
    pub by_index: bool,
    /// Files that it has lent.
    pub lent: Lent,
}

impl AsFd for Server {
    /// Its hang-up is the end of the server.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// What a server is given of ours: the sockets, and the journal.
struct Given {
    vhost: OwnedFd,
    control: OwnedFd,
    journal: OwnedFd,
    lent: OwnedFd,
}

/// A file for [`Server::start`].
pub(super) fn journal() -> io::Result<OwnedFd> {
    shareable_file(JOURNAL).map(OwnedFd::from)
}

fn spawn(config: &FsConfig, given: &Given) -> io::Result<Child> {
    let mut command = Command::new(&config.program);
    command.arg("--path").arg(&config.path).args(["--tag", &config.tag]);
    command.args(["--vhost", &VHOST_FD.to_string(), "--control", &CONTROL_FD.to_string()]);
    command.args(["--journal", &JOURNAL_FD.to_string(), "--lend", &LENT_FD.to_string()]);
    let flags = [
        (config.read_only, "--read-only"),
        (config.writeback, "--writeback"),
        (config.xattr, "--xattr"),
        (config.acl, "--acl"),
        (config.unjailed, "--no-jail"),
    ];
    command.args(flags.iter().filter(|(set, _)| *set).map(|(_, flag)| flag));
    for (option, map) in [("--uid-map", config.uid_map), ("--gid-map", config.gid_map)] {
        command.args(map.map(|map| format!("{option}={map}")));
    }
    command.args(["--cache", config.cache.name(), "--policy", config.policy.name()]);
    // Nothing of ours is told to it by its environment, nor by its folder.
    command.env_clear().current_dir("/").stdin(Stdio::null()).stdout(Stdio::null());
    let given = [&given.vhost, &given.control, &given.journal, &given.lent];
    let given = given.map(AsRawFd::as_raw_fd);
    let place = move || {
        // Above what they are moved to, so that none is overwritten by the other.
        // SAFETY: descriptors that are open in this process and its copy.
        let high = unsafe {
            // Not in the process group of a terminal, whose interrupt is for the VMM to hear.
            libc::setsid();
            given.map(|fd| libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, LENT_FD + 1))
        };
        for (from, to) in high.into_iter().zip([VHOST_FD, CONTROL_FD, JOURNAL_FD, LENT_FD]) {
            // SAFETY: takes numbers only, and checks them.
            if from < 0 || unsafe { libc::dup2(from, to) } < 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(())
    };
    // SAFETY: the closure makes system calls only, and neither allocates nor takes locks.
    unsafe { command.pre_exec(place) };
    command.spawn()
}

/// In a namespace of processes of its own, where that is allowed: the thread that asks for it cannot
/// go back, so it is one that does nothing else.
fn spawn_alone(config: &FsConfig, given: &Given) -> io::Result<Child> {
    std::thread::scope(|scope| {
        let spawner = scope.spawn(|| {
            // SAFETY: takes flags only. Fails without privileges, and then there is none.
            unsafe { libc::unshare(libc::CLONE_NEWPID) };
            spawn(config, given)
        });
        spawner.join().unwrap_or_else(|_| Err(io::ErrorKind::Other.into()))
    })
}

impl Server {
    /// Starts it, and hears that it serves. It goes on from what another one has left in `journal`.
    pub fn start<T>(
        config: &FsConfig,
        shadow: &ShadowQueue<T>,
        journal: &OwnedFd,
    ) -> Result<Self, FsError> {
        let host = |what| move |source| FsError::Host { what, source };
        let sockets = || Ok::<_, io::Error>((UnixStream::pair()?, UnixStream::pair()?));
        let ((vhost, their_vhost), (control, their_control)) =
            sockets().map_err(host("sockets"))?;
        let events = || Ok::<_, io::Error>((Event::new()?, Event::new()?));
        let (kick, call) = events().map_err(host("eventfds"))?;
        let journal = journal.try_clone().map_err(host("journal"))?;
        let (lent, their_lent) = Lent::pair().map_err(host("sockets"))?;
        let (vhost_end, control_end) = (their_vhost.into(), their_control.into());
        let given =
            Given { vhost: vhost_end, control: control_end, journal, lent: their_lent.into() };
        let child = spawn_alone(config, &given);
        drop(given);
        let child =
            child.map_err(|source| FsError::Spawn { program: config.program.clone(), source })?;
        let parts = || Ok::<_, io::Error>((vhost.try_clone()?, Watchdog::new(&vhost)?));
        let (socket, watchdog) = parts().map_err(host("watchdog"))?;
        let control = Control::new(control).map_err(host("sockets"))?;
        let frontend = Frontend::from_stream(vhost, 2);
        let tag = config.tag.clone();
        let by_index = false;
        let mut this =
            Self { frontend, socket, watchdog, control, child, tag, kick, call, by_index, lent };
        match this.in_time("starting", |this| this.greet(shadow)) {
            Ok(()) => Ok(this),
            // It may have said why, before it ended.
            Err(error) => Err(match (this.reason(), error) {
                (Some(reason), _) => this.refused(reason),
                // It ends because it was cut off.
                (None, silent @ FsError::Silent { .. }) => silent,
                (None, error) => this.ended("its start").unwrap_or(error),
            }),
        }
    }

    fn refused(&self, reason: String) -> FsError {
        FsError::Refused { tag: self.tag.clone(), reason }
    }

    /// That it has ended, if it has.
    fn ended(&mut self, what: &'static str) -> Option<FsError> {
        let end = (!self.is_alive()).then(|| self.end(PATIENCE))?;
        Some(FsError::Ended { tag: self.tag.clone(), what, end })
    }

    fn failed(&self, what: &'static str) -> impl Fn(vhost::Error) -> FsError + use<> {
        let tag = self.tag.clone();
        move |source| FsError::Server { tag: tag.clone(), what, source }
    }

    /// Does `act` in the time that there is.
    fn in_time<R>(
        &mut self,
        what: &'static str,
        act: impl FnOnce(&mut Self) -> Result<R, FsError>,
    ) -> Result<R, FsError> {
        self.watchdog.arm(PATIENCE);
        let done = act(self);
        match (self.watchdog.disarm(), done) {
            (true, Err(_)) => Err(FsError::Silent { tag: self.tag.clone(), what }),
            (_, done) => done,
        }
    }

    fn greet<T>(&mut self, shadow: &ShadowQueue<T>) -> Result<(), FsError> {
        let failed = self.failed("starting");
        let rings = shadow.rings().ok_or(FsError::Shadow)?;
        let [desc_table_addr, avail_ring_addr, used_ring_addr] = rings;
        let ask = &mut self.frontend;
        ask.set_owner().map_err(&failed)?;
        let offered = ask.get_features().map_err(&failed)?;
        let protocol = ask.get_protocol_features().map_err(&failed)?;
        let useful = protocol & (Protocol::REPLY_ACK | Protocol::MQ | Protocol::DEVICE_STATE);
        ask.set_protocol_features(useful).map_err(&failed)?;
        let by_index = offered & feature::RING_EVENT_IDX;
        let needed = feature::VERSION_1 | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();
        ask.set_features(needed | by_index).map_err(&failed)?;
        self.by_index = by_index != 0;
        let regions: Result<Vec<_>, _> =
            shadow.memory().iter().map(VhostUserMemoryRegionInfo::from_guest_region).collect();
        ask.set_mem_table(&regions.map_err(&failed)?).map_err(&failed)?;
        let addresses = VringConfigData {
            queue_max_size: RING,
            queue_size: RING,
            flags: 0,
            desc_table_addr,
            used_ring_addr,
            avail_ring_addr,
            log_addr: None,
        };
        ask.set_vring_num(0, RING).map_err(&failed)?;
        ask.set_vring_addr(0, &addresses).map_err(&failed)?;
        ask.set_vring_base(0, 0).map_err(&failed)?;
        ask.set_vring_call(0, self.call.eventfd()).map_err(&failed)?;
        ask.set_vring_kick(0, self.kick.eventfd()).map_err(&failed)?;
        ask.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        let enabled = ask.set_vring_enable(0, true);
        ask.set_hdr_flags(VhostUserHeaderFlag::empty());
        enabled.map_err(failed)
    }

    /// How it has ended, for people. For one that has hung up: it is waited for so long at most.
    pub fn end(&mut self, patience: Duration) -> String {
        let end = Instant::now() + patience;
        while Instant::now() < end {
            if let Ok(Some(status)) = self.child.try_wait() {
                return status.to_string();
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        "it still runs".to_owned()
    }

    /// Waits for answers; true if it has hung up instead.
    pub fn wait(&self, patience: Duration) -> bool {
        let (call, peer) = (self.call.as_raw_fd(), self.socket.as_raw_fd());
        let mut polls = [
            libc::pollfd { fd: call, events: libc::POLLIN, revents: 0 },
            libc::pollfd { fd: peer, events: libc::POLLRDHUP, revents: 0 },
        ];
        let millis = i32::try_from(patience.as_millis()).unwrap_or(i32::MAX).max(1);
        // SAFETY: two pollfds that outlive the call, with open descriptors.
        unsafe { libc::poll(polls.as_mut_ptr(), 2, millis) };
        self.call.clear();
        polls[1].revents != 0 && polls[0].revents == 0
    }

    /// False if it has hung up.
    pub fn is_alive(&self) -> bool {
        let fd = self.socket.as_raw_fd();
        let mut poll = libc::pollfd { fd, events: libc::POLLRDHUP, revents: 0 };
        // SAFETY: one pollfd that outlives the call, with a descriptor that self owns.
        unsafe { libc::poll(&mut poll, 1, 0) == 0 }
    }

    /// The way to ask it, which others may keep.
    pub fn control(&self) -> Control {
        self.control.clone()
    }

    /// Who has kept the way to ask another server, asks this one.
    pub fn take_over(&mut self, control: &Control) -> io::Result<()> {
        control.replace(&self.control)?;
        self.control = control.clone();
        Ok(())
    }

    /// Why it has failed, in its own words.
    fn reason(&self) -> Option<String> {
        // A server that has ended has said so before, unasked.
        let said = match self.is_alive() {
            true => self.control.status(),
            false => self.control.last_words(),
        };
        let line = said.ok()?;
        let status: serde_json::Value = serde_json::from_str(&line).ok()?;
        Some(status.get("error")?.as_str()?.to_owned())
    }

    /// What it knows of its guest, to be kept. Nothing may be on its way.
    pub fn save(&self) -> Result<Vec<u8>, FsError> {
        let failed = self.failed("saving");
        let pipe = || io::pipe().map_err(|source| FsError::Host { what: "pipe", source });
        self.transfer(|this| {
            let (reader, writer) = pipe()?;
            let (save, stopped) = (Direction::SAVE, Phase::STOPPED);
            let writer = OwnedFd::from(writer);
            this.frontend.set_device_state_fd(save, stopped, writer).map_err(&failed)?;
            let mut bytes = Vec::new();
            let read = read_until(reader, &mut bytes, Instant::now() + PATIENCE);
            read.map_err(|source| FsError::Host { what: "state", source })?;
            Ok(bytes)
        })
    }

    /// Gives it what another one knew.
    pub fn load(&self, bytes: &[u8]) -> Result<(), FsError> {
        let failed = self.failed("restoring");
        let pipe = || io::pipe().map_err(|source| FsError::Host { what: "pipe", source });
        self.transfer(|this| {
            let (reader, mut writer) = pipe()?;
            let (load, stopped) = (Direction::LOAD, Phase::STOPPED);
            this.frontend.set_device_state_fd(load, stopped, reader.into()).map_err(&failed)?;
            // A server that does not read to the end is cut off by the watchdog.
            let written = writer.write_all(bytes);
            written.map_err(|source| FsError::Host { what: "state", source })
        })
    }

    fn transfer<R>(&self, act: impl FnOnce(&Self) -> Result<R, FsError>) -> Result<R, FsError> {
        self.watchdog.arm(PATIENCE);
        let done = act(self).and_then(|done| {
            let checked = self.frontend.check_device_state();
            checked.map(|()| done).map_err(self.failed("checking its state"))
        });
        match (self.watchdog.disarm(), done) {
            (_, Ok(done)) => Ok(done),
            (true, Err(_)) => Err(FsError::Silent { tag: self.tag.clone(), what: "its state" }),
            (false, Err(error)) => Err(self.reason().map_or(error, |reason| self.refused(reason))),
        }
    }
}

/// Reads to the end, which has to come in time.
fn read_until(mut pipe: io::PipeReader, bytes: &mut Vec<u8>, end: Instant) -> io::Result<()> {
    let mut piece = vec![0; 256 * 1024];
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let fd = pipe.as_raw_fd();
        let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        let millis = i32::try_from(left.as_millis()).unwrap_or(i32::MAX);
        // SAFETY: one pollfd that outlives the call, with an open descriptor.
        if unsafe { libc::poll(&mut poll, 1, millis) } <= 0 {
            return Err(io::ErrorKind::TimedOut.into());
        }
        match pipe.read(&mut piece)? {
            0 => return Ok(()),
            read => bytes.extend_from_slice(piece.get(..read).unwrap_or_default()),
        }
        if bytes.len() as u64 > MAX_STATE {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.socket.shutdown(Shutdown::Both);
        // Fails if it has ended already.
        let _ = self.child.kill();
        let end = Instant::now() + END;
        while let Ok(None) = self.child.try_wait() {
            if Instant::now() > end {
                // It waits for storage, and ends when that answers.
                tracing::warn!(tag = self.tag, "the file server does not end");
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Cache {
    fn name(self) -> &'static str {
        match self {
            Cache::None => "none",
            Cache::Auto => "auto",
            Cache::Always => "always",
        }
    }
}

impl Policy {
    fn name(self) -> &'static str {
        match self {
            Policy::Strict => "strict",
            Policy::Tolerant => "tolerant",
            Policy::Remap => "remap",
            Policy::Copy => "copy",
        }
    }
}

/// Where the server of a share is told to be: nothing to be found out of the environment.
pub(super) fn check(program: &Path) -> Result<(), FsError> {
    match program.is_file() {
        true => Ok(()),
        false => Err(FsError::NoProgram(program.to_owned())),
    }
}
