//! A vhost-user backend: any device of this crate, served over a Unix socket to another VMM, or to
//! the frontend in this one. Each connection gets a device of its own.
//!
//! It does what a backend has to do and no more: it starts when each ring that was set up has been
//! enabled or disabled, begins anew when that changes, and any stop stops all.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight,
    VhostUserLog, VhostUserMemoryRegion, VhostUserProtocolFeatures as Protocol,
    VhostUserShMemConfig, VhostUserSharedMsg, VhostUserSingleMemoryRegion, VhostUserVirtioFeatures,
    VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{
    BackendReqHandler, Error, GpuBackend, Result, VhostUserBackendReqHandlerMut,
};
use vm_memory::FileOffset;
use vmm_sys_util::eventfd::EventFd;

use crate::event::Event;
use crate::executor::{Executor, ExecutorHandle};
use crate::ids::QueueIndex;
use crate::irq::Interrupt;
use crate::memory::{GuestAddress, Memory};
use crate::virtio::queue::QueueLines;
use crate::virtio::{
    Activation, ActiveQueue, Notifier, QueueRecord, StartError, VirtioDevice, feature,
};

/// Makes the device of a connection.
pub type MakeDevice = Arc<dyn Fn(ExecutorHandle) -> Box<dyn VirtioDevice> + Send + Sync>;

/// A backend at a socket, until it is dropped.
pub struct VhostUserBackend {
    path: PathBuf,
    listener: UnixListener,
    sessions: Arc<Mutex<Vec<UnixStream>>>,
    thread: Option<JoinHandle<()>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl VhostUserBackend {
    /// Listens at `path`, where nothing may be yet.
    pub fn listen(path: &Path, make: MakeDevice) -> io::Result<Self> {
        let listener = UnixListener::bind(path)?;
        let sessions = Arc::<Mutex<Vec<_>>>::default();
        let (theirs, open) = (listener.try_clone()?, sessions.clone());
        let thread = std::thread::spawn(move || {
            let mut threads = Vec::new();
            for stream in theirs.incoming().map_while(io::Result::ok) {
                threads.retain(|thread: &JoinHandle<()>| !thread.is_finished());
                let mut open = lock(&open);
                // What its peer has left is of no use to anybody.
                open.retain(is_open);
                open.push(stream.try_clone().unwrap());
                let make = make.clone();
                threads.push(std::thread::spawn(move || serve(stream, &make)));
            }
            threads.into_iter().for_each(|thread| thread.join().unwrap());
        });
        Ok(Self { path: path.to_owned(), listener, sessions, thread: Some(thread) })
    }

    /// Ends all connections, in the middle of whatever they do. New ones are accepted.
    pub fn hang_up(&self) {
        for session in lock(&self.sessions).drain(..) {
            let _ = session.shutdown(std::net::Shutdown::Both);
        }
    }

    /// Serves until the process ends.
    pub fn join(mut self) {
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

impl Drop for VhostUserBackend {
    fn drop(&mut self) {
        // Ends the thread's wait for connections, also if nobody finds the socket any more.
        // SAFETY: takes no pointer; the descriptor is open.
        unsafe { libc::shutdown(self.listener.as_raw_fd(), libc::SHUT_RDWR) };
        let _ = std::fs::remove_file(&self.path);
        self.hang_up();
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            assert!(ended.is_ok() || std::thread::panicking(), "the backend has panicked");
        }
    }
}

fn is_open(stream: &UnixStream) -> bool {
    let _ = stream.set_nonblocking(false);
    let mut poll = libc::pollfd { fd: stream.as_raw_fd(), events: libc::POLLRDHUP, revents: 0 };
    // SAFETY: one pollfd that outlives the call, with an open descriptor.
    unsafe { libc::poll(&mut poll, 1, 0) == 0 }
}

fn serve(stream: UnixStream, make: &MakeDevice) {
    let executor = Executor::spawn("vhost-backend").unwrap();
    let session = Session::new(make(executor.handle()));
    let session = Arc::new(Mutex::new(session));
    let mut requests = BackendReqHandler::from_stream(stream, session.clone());
    while requests.handle_request().is_ok() {}
    drop(lock(&session).device.stop());
}

/// One ring as it is being set up.
#[derive(Default)]
struct Ring {
    size: u16,
    /// Descriptors, available, used, as addresses of the frontend.
    addresses: [u64; 3],
    base: u16,
    kick: Option<Event>,
    call: Option<Event>,
    fault: Option<Event>,
    /// Unless nobody has said yet.
    enabled: Option<bool>,
}

/// Guest RAM as the frontend has it.
struct Mapping {
    user: u64,
    guest: u64,
    len: u64,
}

struct Session {
    device: Box<dyn VirtioDevice>,
    features: u64,
    memory: Option<Memory>,
    mappings: Vec<Mapping>,
    rings: Vec<Ring>,
    /// Of the live device; here, so that it does not hold itself.
    notifier: Arc<Mutex<Option<Notifier>>>,
}

impl Session {
    fn new(device: Box<dyn VirtioDevice>) -> Self {
        let rings = device.identity().queue_sizes.iter().map(|_| Ring::default()).collect();
        let notifier = Arc::default();
        Self { device, features: 0, memory: None, mappings: Vec::new(), rings, notifier }
    }

    fn ring(&mut self, index: u32) -> Result<&mut Ring> {
        self.rings.get_mut(index as usize).ok_or(Error::InvalidParam)
    }

    fn guest_address(&self, user: u64) -> Result<u64> {
        let inside = |map: &&Mapping| user.checked_sub(map.user).is_some_and(|at| at < map.len);
        let map = self.mappings.iter().find(inside).ok_or(Error::InvalidParam)?;
        Ok(user - map.user + map.guest)
    }

    fn queue(&self, index: u16, ring: &Ring, memory: &Memory) -> Result<ActiveQueue> {
        let [desc_table, avail_ring, used_ring] = ring.addresses;
        let mut record = QueueRecord {
            index,
            size: ring.size,
            desc_table: self.guest_address(desc_table)?,
            avail_ring: self.guest_address(avail_ring)?,
            used_ring: self.guest_address(used_ring)?,
            next_avail: ring.base,
            next_used: 0,
        };
        let refused = || Error::InvalidParam;
        let lines = QueueLines {
            kick: ring.kick.clone().ok_or_else(refused)?,
            interrupt: ring.call.clone().map_or(Interrupt::none(), Interrupt::from_event),
        };
        let make = |record: &QueueRecord| {
            let queue = record.to_queue(record.size).map_err(|_| refused())?;
            let (memory, lines) = (memory.clone(), lines.clone());
            ActiveQueue::new(QueueIndex(index), queue, memory, lines, self.features)
                .map_err(|_| refused())
        };
        record.next_used = make(&record)?.used_index().map_err(|_| refused())?;
        make(&record)
    }

    /// A notifier that signals `fault` when the device gives up, and not when it has merely changed.
    fn notifier(&self, fault: Option<Event>) -> Notifier {
        let told = self.notifier.clone();
        let raise = move || {
            let gives_up = lock(&told).as_ref().is_some_and(Notifier::wants_reset);
            fault.iter().filter(|_| gives_up).for_each(Event::signal);
        };
        let notifier = Notifier::new(Interrupt::from_fn(raise));
        *lock(&self.notifier) = Some(notifier.clone());
        notifier
    }

    /// Stops the device, and remembers where its rings are.
    fn stop(&mut self) {
        *lock(&self.notifier) = None;
        for queue in self.device.stop() {
            let record = queue.record();
            if let Some(ring) = self.rings.get_mut(usize::from(record.index)) {
                ring.base = record.next_avail;
            }
        }
    }

    /// Starts it with all rings that are ready, if there are any.
    fn start(&mut self) -> Result<()> {
        self.stop();
        let ready = |ring: &&Ring| ring.enabled == Some(true) && ring.kick.is_some();
        if !self.rings.iter().any(|ring| ready(&ring)) {
            return Ok(());
        }
        let memory = self.memory.clone().ok_or(Error::InvalidParam)?;
        let ready = (0..).zip(&self.rings).filter(|(_, ring)| ready(ring));
        let queues: Result<Vec<_>> =
            ready.clone().map(|(index, ring)| self.queue(index, ring, &memory)).collect();
        let fault = ready.clone().find_map(|(_, ring)| ring.fault.clone());
        let features = self.features;
        let notifier = self.notifier(fault);
        let activation = Activation { memory, queues: queues?, features, notifier };
        let partly = self.rings.iter().any(|ring| ring.enabled == Some(false));
        match self.device.start(activation) {
            // It can do nothing with these alone.
            Err(StartError::MissingQueue(_)) if partly => Ok(()),
            started => started.map_err(|_| Error::BackendInternalError),
        }
    }
}

fn event(file: Option<File>) -> Option<Event> {
    // SAFETY: the descriptor is owned by the file, which gives it away. One that is no eventfd is
    // one that can be neither read nor written as such.
    file.map(|file| Event::from(unsafe { EventFd::from_raw_fd(file.into_raw_fd()) }))
}

impl VhostUserBackendReqHandlerMut for Session {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_device(&mut self) -> Result<()> {
        self.stop();
        Ok(())
    }

    fn get_features(&mut self) -> Result<u64> {
        let own = self.device.identity().features;
        Ok(own | feature::COMMON | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits())
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        self.features = features;
        Ok(())
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy: Option<bool>,
    ) -> Result<Option<Vec<u64>>> {
        self.stop();
        let mut ranges = Vec::new();
        self.mappings.clear();
        for (region, file) in regions.iter().zip(files) {
            let (guest, len) = (region.guest_phys_addr, region.memory_size);
            self.mappings.push(Mapping { user: region.user_addr, guest, len });
            let file = FileOffset::new(file, region.mmap_offset);
            ranges.push((GuestAddress(guest), len as usize, Some(file)));
        }
        let memory = Memory::from_ranges_with_files(ranges);
        self.memory = Some(memory.map_err(|_| Error::InvalidParam)?);
        Ok(None)
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        self.ring(index)?.size = u16::try_from(num).map_err(|_| Error::InvalidParam)?;
        Ok(())
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        _flags: VhostUserVringAddrFlags,
        descriptor: u64,
        used: u64,
        available: u64,
        _log: u64,
    ) -> Result<()> {
        self.ring(index)?.addresses = [descriptor, available, used];
        Ok(())
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        self.ring(index)?.base = u16::try_from(base).map_err(|_| Error::InvalidParam)?;
        Ok(())
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        self.stop();
        let ring = self.ring(index)?;
        (ring.kick, ring.enabled) = (None, None);
        Ok(VhostUserVringState::new(index, u32::from(ring.base)))
    }

    fn set_vring_kick(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let ring = self.ring(index.into())?;
        (ring.kick, ring.enabled) = (event(fd), None);
        Ok(())
    }

    fn set_vring_call(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        self.ring(index.into())?.call = event(fd);
        Ok(())
    }

    fn set_vring_err(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        self.ring(index.into())?.fault = event(fd);
        Ok(())
    }

    fn get_protocol_features(&mut self) -> Result<Protocol> {
        Ok(Protocol::MQ | Protocol::CONFIG | Protocol::REPLY_ACK)
    }

    fn set_protocol_features(&mut self, _features: u64) -> Result<()> {
        Ok(())
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(self.rings.len() as u64)
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        self.ring(index)?.enabled = Some(enable);
        let undecided = |ring: &Ring| ring.kick.is_some() && ring.enabled.is_none();
        // The last of those that were set up.
        if self.rings.iter().any(undecided) { Ok(()) } else { self.start() }
    }

    fn get_config(&mut self, offset: u32, size: u32, _: VhostUserConfigFlags) -> Result<Vec<u8>> {
        let mut config = vec![0; size as usize];
        self.device.read_config(offset.into(), &mut config);
        Ok(config)
    }

    fn set_config(&mut self, _: u32, _: &[u8], _: VhostUserConfigFlags) -> Result<()> {
        Err(unasked())
    }

    fn set_gpu_socket(&mut self, _: GpuBackend) -> Result<()> {
        Err(unasked())
    }

    fn get_shared_object(&mut self, _: VhostUserSharedMsg) -> Result<File> {
        Err(unasked())
    }

    fn get_inflight_fd(&mut self, _: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        Err(unasked())
    }

    fn set_inflight_fd(&mut self, _: &VhostUserInflight, _: File) -> Result<()> {
        Err(unasked())
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Err(unasked())
    }

    fn add_mem_region(
        &mut self,
        _: &VhostUserSingleMemoryRegion,
        _: File,
        _: Option<bool>,
    ) -> Result<Option<u64>> {
        Err(unasked())
    }

    fn remove_mem_region(&mut self, _: &VhostUserSingleMemoryRegion) -> Result<()> {
        Err(unasked())
    }

    fn set_device_state_fd(
        &mut self,
        _: VhostTransferStateDirection,
        _: VhostTransferStatePhase,
        _: File,
    ) -> Result<Option<File>> {
        Err(unasked())
    }

    fn check_device_state(&mut self) -> Result<()> {
        Err(unasked())
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        Err(unasked())
    }

    fn set_log_base(&mut self, _: &VhostUserLog, _: File) -> Result<()> {
        Err(unasked())
    }
}

/// What needs a feature that was not offered.
fn unasked() -> Error {
    Error::InvalidParam
}
