//! A connection to a backend: what is agreed on with it, and how it is started and stopped.
//!
//! The messages are those of the `vhost` crate, which checks the form of every answer. Here is their
//! order, what they may say, and how long they may take. After any failure nobody knows what the
//! backend has understood, so the connection is dropped by its owner.

use std::io;
use std::mem::{size_of, zeroed};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use vhost::vhost_user::message::{
    VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserProtocolFeatures as Protocol,
    VhostUserVirtioFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vm_memory::GuestMemoryBackend;

use super::VhostUserError;
use super::deadline::Watchdog;
use crate::event::Event;
use crate::memory::{GuestAddress, Memory, is_shared};
use crate::virtio::queue::ActiveQueue;
use crate::virtio::{QueueRecord, feature};

/// The bit of virtio's features that stands for those of the protocol.
const PROTOCOL_FEATURES: u64 = VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();

/// What a device needs of its backend.
#[derive(Clone, Copy, Debug)]
pub(in crate::virtio) struct Needs {
    /// Feature bits that it cannot do without.
    pub features: u64,
    /// Bytes of the configuration space that the backend tells; 0: none.
    pub config_len: usize,
    /// Where the number of queues is in it, which shall be ours and not the backend's.
    pub queues_at: Option<usize>,
    /// What it must have at least of what it says to GET_QUEUE_NUM, which for a network card are pairs.
    pub queues: u16,
    /// All that the driver puts into the rings is completed in time, and so can be waited for. The
    /// buffers of a network card's receive queues are not.
    pub drains: bool,
}

/// A connection on which both sides have said what they can.
pub(super) struct Connection {
    frontend: Frontend,
    /// The same socket, for its end.
    socket: UnixStream,
    watchdog: Watchdog,
    /// The backend can be asked to confirm what has no answer.
    confirms: bool,
    patience: Duration,
    /// What the backend offers, its protocol's bit not among it.
    features: u64,
    config: Vec<u8>,
}

/// The eventfds that a backend gets for one queue, beside its kick.
pub(super) struct Wires<'a> {
    /// Signalled for completed chains.
    pub call: &'a Event,
    /// Signalled for rings that make no sense.
    pub fault: &'a Event,
}

impl Connection {
    /// Connects to the socket at `path`, and hears what is there. Takes twice `patience` at most.
    pub fn open(path: &Path, needs: Needs, patience: Duration) -> Result<Self, VhostUserError> {
        let connected = connect(path, patience).and_then(|one| {
            let watchdog = Watchdog::new(&one)?;
            Ok((one.try_clone()?, watchdog, one))
        });
        let (socket, watchdog, stream) = connected
            .map_err(|source| VhostUserError::Connect { path: path.to_owned(), source })?;
        // The limit on queues is ours: what a backend says of its own is not always of queues.
        let frontend = Frontend::from_stream(stream, u64::from(u8::MAX));
        let mut this = Self {
            frontend,
            socket,
            watchdog,
            confirms: false,
            patience,
            features: 0,
            config: Vec::new(),
        };
        this.in_time(|this| this.greet(needs))?;
        Ok(this)
    }

    /// What the backend offers.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// What it tells of its configuration space.
    pub fn config(&self) -> &[u8] {
        &self.config
    }

    /// Its socket, to hear of its end.
    pub fn peer(&self) -> io::Result<OwnedFd> {
        Ok(self.socket.try_clone()?.into())
    }

    /// False if the backend has hung up.
    pub fn is_alive(&self) -> bool {
        let fd = self.socket.as_raw_fd();
        let mut poll = libc::pollfd { fd, events: libc::POLLRDHUP, revents: 0 };
        // SAFETY: one pollfd that outlives the call, with a descriptor that self owns.
        let found = unsafe { libc::poll(&mut poll, 1, 0) };
        found == 0
    }

    /// Does `act` in the time that there is.
    fn in_time<T>(
        &mut self,
        act: impl FnOnce(&mut Self) -> Result<T, VhostUserError>,
    ) -> Result<T, VhostUserError> {
        self.watchdog.arm(self.patience);
        let done = act(self);
        match (self.watchdog.disarm(), done) {
            (true, Err(VhostUserError::Answer { what, .. })) => {
                Err(VhostUserError::Silent { what, patience: self.patience })
            }
            (_, done) => done,
        }
    }

    fn greet(&mut self, needs: Needs) -> Result<(), VhostUserError> {
        let ask = &mut self.frontend;
        ask.set_owner().map_err(answer("SET_OWNER"))?;
        let offered = ask.get_features().map_err(answer("GET_FEATURES"))?;
        has(offered, PROTOCOL_FEATURES | feature::VERSION_1 | needs.features)?;
        let protocol = ask.get_protocol_features().map_err(answer("GET_PROTOCOL_FEATURES"))?;
        let useful = protocol & (Protocol::REPLY_ACK | Protocol::MQ | Protocol::CONFIG);
        ask.set_protocol_features(useful).map_err(answer("SET_PROTOCOL_FEATURES"))?;
        self.confirms = useful.contains(Protocol::REPLY_ACK);
        let has = match useful.contains(Protocol::MQ) {
            true => ask.get_queue_num().map_err(answer("GET_QUEUE_NUM"))?,
            false => 1,
        };
        if has < u64::from(needs.queues) {
            return Err(VhostUserError::Queues { asked: needs.queues, has });
        }
        if needs.config_len > 0 {
            if !useful.contains(Protocol::CONFIG) {
                return Err(VhostUserError::NoConfig);
            }
            let (len, room) = (needs.config_len as u32, vec![0; needs.config_len]);
            let flags = VhostUserConfigFlags::empty();
            let told = ask.get_config(0, len, flags, &room).map_err(answer("GET_CONFIG"))?;
            self.config = told.1;
            let at = needs.queues_at.unwrap_or(usize::MAX);
            for (to, from) in self.config.iter_mut().skip(at).zip(needs.queues.to_le_bytes()) {
                *to = from;
            }
        }
        self.features = offered & !PROTOCOL_FEATURES;
        Ok(())
    }

    /// Gives the backend guest RAM and the queues. On those below `enabled` it works from now on.
    pub fn start(
        &mut self,
        memory: &Memory,
        features: u64,
        queues: &[(&ActiveQueue, Wires<'_>)],
        enabled: u16,
    ) -> Result<(), VhostUserError> {
        if !is_shared(memory) {
            return Err(VhostUserError::PrivateMemory);
        }
        let rings: Vec<u16> = queues.iter().map(|(queue, _)| queue.index().0).collect();
        self.in_time(|this| {
            this.set_up(memory, features, queues)?;
            this.enable(&rings, enabled)
        })
    }

    /// Says on which of its `rings` the backend works: those below `count`.
    pub fn enable_below(&mut self, rings: &[u16], count: u16) -> Result<(), VhostUserError> {
        self.in_time(|this| this.enable(rings, count))
    }

    fn enable(&mut self, rings: &[u16], count: u16) -> Result<(), VhostUserError> {
        let ask = &mut self.frontend;
        // Requests are carried out in order, so that one confirmation is that of all.
        let last = rings.len().saturating_sub(1);
        for (position, &ring) in rings.iter().enumerate() {
            if self.confirms && position == last {
                ask.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
            }
            let enabled = ask.set_vring_enable(usize::from(ring), ring < count);
            ask.set_hdr_flags(VhostUserHeaderFlag::empty());
            enabled.map_err(answer("SET_VRING_ENABLE"))?;
        }
        Ok(())
    }

    fn set_up(
        &mut self,
        memory: &Memory,
        features: u64,
        queues: &[(&ActiveQueue, Wires<'_>)],
    ) -> Result<(), VhostUserError> {
        let ask = &mut self.frontend;
        // A backend that was replaced by another may have less to offer.
        has(self.features, features)?;
        ask.set_features(features | PROTOCOL_FEATURES).map_err(answer("SET_FEATURES"))?;
        let regions: Result<Vec<_>, _> =
            memory.iter().map(VhostUserMemoryRegionInfo::from_guest_region).collect();
        let regions = regions.map_err(answer("listing guest memory"))?;
        ask.set_mem_table(&regions).map_err(answer("SET_MEM_TABLE"))?;
        for (queue, wires) in queues {
            let (index, ring) = (usize::from(queue.index().0), queue.record());
            let addresses = addresses(memory, &ring)?;
            ask.set_vring_num(index, ring.size).map_err(answer("SET_VRING_NUM"))?;
            ask.set_vring_addr(index, &addresses).map_err(answer("SET_VRING_ADDR"))?;
            ask.set_vring_base(index, ring.next_avail).map_err(answer("SET_VRING_BASE"))?;
            let call = wires.call.eventfd();
            ask.set_vring_call(index, call).map_err(answer("SET_VRING_CALL"))?;
            let fault = wires.fault.eventfd();
            ask.set_vring_err(index, fault).map_err(answer("SET_VRING_ERR"))?;
            let kick = queue.kick().eventfd();
            ask.set_vring_kick(index, kick).map_err(answer("SET_VRING_KICK"))?;
        }
        Ok(())
    }

    /// Takes the queues back. Where `drains`, waits until the backend has completed all that it has
    /// taken, or `broken` says that it will not.
    pub fn stop(
        &mut self,
        queues: &mut [ActiveQueue],
        drains: bool,
        broken: impl Fn() -> bool,
    ) -> Result<(), VhostUserError> {
        if drains {
            self.finish(queues, &broken)?;
        }
        let bases = self.in_time(|this| this.take_bases(queues))?;
        let end = Instant::now() + self.patience;
        for (queue, base) in queues.iter_mut().zip(bases) {
            while drains && !broken() && queue.used_index().is_ok_and(|used| used != base) {
                if Instant::now() > end {
                    return Err(VhostUserError::Busy(self.patience));
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            // Fails only for rings that are outside of guest RAM, and was none when it started.
            let _ = queue.take_over(Some(base));
        }
        Ok(())
    }

    /// Waits until the backend has completed what is in the rings now, while it may still signal.
    ///
    /// By the protocol ("Suspended device state") a device whose rings are stopped writes nothing and
    /// signals nothing, so a backend should finish before it answers GET_VRING_BASE. QEMU's does not:
    /// it answers at once, forgets its call descriptor, and takes the failure to signal a request
    /// that is completed later for its own end.
    fn finish(
        &self,
        queues: &[ActiveQueue],
        broken: &impl Fn() -> bool,
    ) -> Result<(), VhostUserError> {
        let end = Instant::now() + self.patience;
        for queue in queues {
            // The driver may have been stopped between adding a request and telling of it.
            queue.kick().signal();
        }
        for queue in queues {
            // A driver that still runs gets no more time for what it adds meanwhile.
            let Ok(goal) = queue.avail_index() else { continue };
            let behind = |used: u16| goal.wrapping_sub(used) <= queue.size() && used != goal;
            while !broken() && queue.used_index().is_ok_and(behind) {
                if Instant::now() > end {
                    return Err(VhostUserError::Busy(self.patience));
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        Ok(())
    }

    fn take_bases(&mut self, queues: &[ActiveQueue]) -> Result<Vec<u16>, VhostUserError> {
        let ask = &mut self.frontend;
        let mut bases = Vec::with_capacity(queues.len());
        for queue in queues {
            let index = usize::from(queue.index().0);
            let base = ask.get_vring_base(index).map_err(answer("GET_VRING_BASE"))?;
            bases.push(u16::try_from(base).map_err(|_| VhostUserError::Base(base))?);
        }
        for queue in queues {
            let index = usize::from(queue.index().0);
            ask.set_vring_enable(index, false).map_err(answer("SET_VRING_ENABLE"))?;
        }
        Ok(bases)
    }
}

fn answer(what: &'static str) -> impl Fn(vhost::Error) -> VhostUserError {
    move |source| VhostUserError::Answer { what, source }
}

/// Checks that all of `needed` is among `offered`.
fn has(offered: u64, needed: u64) -> Result<(), VhostUserError> {
    match needed & !offered {
        0 => Ok(()),
        missing => Err(VhostUserError::Features(missing)),
    }
}

/// Where the rings are in this process, which is how the backend is told.
fn addresses(memory: &Memory, ring: &QueueRecord) -> Result<VringConfigData, VhostUserError> {
    let host = |address| {
        let place = memory.get_host_address(GuestAddress(address));
        place.map(|place| place as u64).map_err(|_| VhostUserError::Rings)
    };
    Ok(VringConfigData {
        queue_max_size: ring.size,
        queue_size: ring.size,
        flags: 0,
        desc_table_addr: host(ring.desc_table)?,
        used_ring_addr: host(ring.used_ring)?,
        avail_ring_addr: host(ring.avail_ring)?,
        log_addr: None,
    })
}

/// Connects, and waits `patience` at most for a listener that is busy.
fn connect(path: &Path, patience: Duration) -> io::Result<UnixStream> {
    // SAFETY: all-zero is a valid address without a name.
    let mut address: libc::sockaddr_un = unsafe { zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    let bytes = path.as_os_str().as_bytes();
    // The last byte stays zero.
    if bytes.len() >= address.sun_path.len() || bytes.contains(&0) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "its path is too long"));
    }
    for (to, from) in address.sun_path.iter_mut().zip(bytes) {
        *to = *from as libc::c_char;
    }
    // SAFETY: takes no pointer.
    let fd = unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just made, and is owned by nobody else.
    let socket = unsafe { UnixStream::from_raw_fd(fd) };
    socket.set_write_timeout(Some(patience))?;
    let (start, len) = (&raw const address, size_of::<libc::sockaddr_un>() as libc::socklen_t);
    // SAFETY: an address of that length that outlives the call, and an open descriptor.
    if unsafe { libc::connect(socket.as_raw_fd(), start.cast(), len) } != 0 {
        return Err(io::Error::last_os_error());
    }
    socket.set_write_timeout(None)?;
    Ok(socket)
}
