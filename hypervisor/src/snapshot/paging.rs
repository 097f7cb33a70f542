//! Where the memory of a restored guest comes from, and when.

use std::fs::File;
use std::io::{self, BufRead, BufReader, IoSlice, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::Duration;

use devices::event::Event as Waker;
use devices::memory::Memory;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use serde::Serialize;
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};

use self::source::{Removed, Source};
use super::prefetch::{self, Feed, Plan, Prefetch};
use crate::memory::{self, MemoryError};
use crate::uffd::{PAGE, Uffd};

mod source;

/// How guest memory is brought in.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum MemoryMode {
    /// As a private mapping of the file: each page when the guest touches it.
    #[default]
    Private,
    /// The same, and all that the file has is mapped before the guest runs.
    Prefault,
    /// Each page when the guest touches it, read from the file by a thread of this process.
    Uffd,
    /// Each page when the guest touches it, by another process that listens on this socket.
    UffdBy(PathBuf),
}

/// Why a guest does not get its memory.
#[derive(Debug, thiserror::Error)]
pub enum PagingError {
    /// Not mapped.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The kernel does not give it all at once.
    #[error("memory cannot be mapped before the guest runs: {0}; use --memory-mode private")]
    Populate(io::Error),
    /// No userfaultfd.
    #[error(
        "page faults cannot be answered by a program here: {0}; give this user access to \
         /dev/userfaultfd, set the sysctl vm.unprivileged_userfaultfd to 1, or use --memory-mode \
         private"
    )]
    Uffd(io::Error),
    /// Nothing would be prefetched.
    #[error("--prefetch is of no use with {0}; leave one of them out")]
    NoPrefetch(&'static str),
    /// Nobody listens, or they do not answer.
    #[error("the page fault handler at {}: {source}", path.display())]
    Handler {
        /// Its socket.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// Out of descriptors.
    #[error("hot pages cannot be prefetched: {0}")]
    Prefetch(io::Error),
    /// No thread.
    #[error("the thread that answers page faults cannot be started: {0}")]
    Thread(io::Error),
}

/// Called when pages can no longer be brought in: the guest cannot go on, nor end in order, since its
/// vCPUs wait for memory. It does not return.
pub type Lost = Box<dyn FnOnce(&str) + Send>;

/// Guest memory that is there, or comes.
pub struct Loaded {
    /// It.
    pub memory: Memory,
    /// Who brings it in.
    pub pager: Option<Pager>,
    /// What brings some of it in sooner.
    pub prefetch: Option<Prefetch>,
}

impl MemoryMode {
    /// Refuses to prefetch where that would do nothing.
    pub fn check_prefetch(&self) -> Result<(), PagingError> {
        match self {
            Self::Private | Self::Uffd => Ok(()),
            Self::Prefault => Err(PagingError::NoPrefetch(
                "--memory-mode prefault, which maps all of memory before the guest runs",
            )),
            Self::UffdBy(_) => Err(PagingError::NoPrefetch(
                "--uffd-socket, since it is up to that process which pages it brings in, and when",
            )),
        }
    }
}

/// Maps `bytes` of guest memory with the content of the file `image`, of which `plan` tells what shall be
/// brought in sooner, once it is started.
pub fn load(
    mode: &MemoryMode,
    bytes: u64,
    image: File,
    plan: Option<Plan>,
    lost: Lost,
) -> Result<Loaded, PagingError> {
    if plan.is_some() {
        mode.check_prefetch()?;
    }
    match mode {
        MemoryMode::Private => {
            let file = image.try_clone().map_err(PagingError::Prefetch)?;
            let memory = memory::from_image(bytes, image)?;
            let prefetch =
                plan.map(|plan| Prefetch::by_mapping(plan, regions(&memory), file, memory.clone()));
            Ok(Loaded { memory, pager: None, prefetch })
        }
        MemoryMode::Prefault => {
            let file = image.try_clone().map_err(PagingError::Populate)?;
            let memory = memory::from_image(bytes, image)?;
            populate(&memory, &file).map_err(PagingError::Populate)?;
            Ok(Loaded { memory, pager: None, prefetch: None })
        }
        MemoryMode::Uffd => {
            let memory = memory::fresh(bytes)?;
            let (uffd, regions) = register(&memory).map_err(PagingError::Uffd)?;
            let ahead =
                plan.map(|plan| Prefetch::by_handler(plan, regions.clone(), image.try_clone()?));
            let (prefetch, feed) = ahead.transpose().map_err(PagingError::Prefetch)?.unzip();
            let pager = Pager::own(uffd, regions, image, feed, lost);
            Ok(Loaded { memory, pager: Some(pager.map_err(PagingError::Thread)?), prefetch })
        }
        MemoryMode::UffdBy(path) => {
            let memory = memory::fresh(bytes)?;
            let (uffd, regions) = register(&memory).map_err(PagingError::Uffd)?;
            let pager = Pager::external(path, uffd, &regions, &image, lost);
            let pager =
                pager.map_err(|source| PagingError::Handler { path: path.clone(), source })?;
            Ok(Loaded { memory, pager: Some(pager), prefetch: None })
        }
    }
}

/// A piece of guest memory, and where in the file its content is.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Region {
    guest_address: u64,
    pub(super) host_address: u64,
    pub(super) bytes: u64,
    pub(super) file_offset: u64,
}

impl Region {
    fn end(&self) -> u64 {
        self.host_address.saturating_add(self.bytes)
    }

    /// Where in the file the content of a page is, which must be of this region.
    fn offset(&self, page: u64) -> u64 {
        self.file_offset.saturating_add(page.saturating_sub(self.host_address))
    }
}

pub(super) fn regions(memory: &Memory) -> Vec<Region> {
    let mut file_offset = 0;
    let region = |region: &<Memory as GuestMemoryBackend>::R| {
        let bytes = region.len();
        let this = Region {
            guest_address: region.start_addr().0,
            host_address: region.as_ptr() as u64,
            bytes,
            file_offset,
        };
        file_offset += bytes;
        this
    };
    memory.iter().map(region).collect()
}

fn register(memory: &Memory) -> io::Result<(Uffd, Vec<Region>)> {
    let (uffd, regions) = (Uffd::new()?, regions(memory));
    for region in &regions {
        uffd.register(region.host_address, region.bytes)?;
    }
    Ok((uffd, regions))
}

/// Maps what the file has, not its holes, into the process; copies nothing.
fn populate(memory: &Memory, file: &File) -> io::Result<()> {
    for region in regions(memory) {
        let end = region.file_offset + region.bytes;
        let mut at = region.file_offset;
        while let Some((start, stop)) = next_data(file, at, end)? {
            let host = region.host_address + (start - region.file_offset);
            prefetch::populate(host, stop - start)?;
            at = stop;
        }
    }
    Ok(())
}

/// The next whole pages with content between `from` and `end`.
pub(super) fn next_data(file: &File, from: u64, end: u64) -> io::Result<Option<(u64, u64)>> {
    let seek = |at: u64, whence| {
        let at = libc::off_t::try_from(at).map_err(io::Error::other)?;
        // SAFETY: the call takes numbers; nobody else relies on this descriptor's position.
        match unsafe { libc::lseek(file.as_raw_fd(), at, whence) } {
            found if found >= 0 => Ok(found.unsigned_abs()),
            _ => Err(io::Error::last_os_error()),
        }
    };
    if from >= end {
        return Ok(None);
    }
    let start = match seek(from, libc::SEEK_DATA) {
        Ok(start) if start < end => (start / PAGE * PAGE).max(from),
        Ok(_) => return Ok(None),
        // Only holes to the end.
        Err(error) if error.raw_os_error() == Some(libc::ENXIO) => return Ok(None),
        Err(error) => return Err(error),
    };
    let stop = seek(start, libc::SEEK_HOLE)?.next_multiple_of(PAGE).min(end);
    Ok((stop > start).then_some((start, stop)))
}

/// Brings guest memory in until it is dropped, which must not be before the last access.
pub struct Pager {
    stop: Waker,
    thread: Option<JoinHandle<()>>,
    /// Faults are answered as long as anybody holds it.
    _uffd: Option<Uffd>,
}

/// How long a handler may take to say that it is ready.
const HANDLER_TIMEOUT: Duration = Duration::from_secs(10);

/// What a handler is told, as one line, together with two descriptors: the userfaultfd, and the file
/// with the content.
#[derive(Serialize)]
struct Handover<'a> {
    format: &'static str,
    version: u32,
    page_bytes: u64,
    regions: &'a [Region],
}

/// What it answers.
const READY: &str = "ready";

impl Pager {
    fn own(
        uffd: Uffd,
        regions: Vec<Region>,
        image: File,
        feed: Option<Feed>,
        lost: Lost,
    ) -> io::Result<Self> {
        let bytes: u64 = regions.iter().map(|region| region.bytes).sum();
        let source = Source { uffd, regions, image, removed: Removed::new(bytes), feed };
        Self::spawn(None, move |stop| source.serve(stop), lost)
    }

    fn external(
        path: &Path,
        uffd: Uffd,
        regions: &[Region],
        image: &File,
        lost: Lost,
    ) -> io::Result<Self> {
        let stream = UnixStream::connect(path)?;
        stream.set_read_timeout(Some(HANDLER_TIMEOUT))?;
        stream.set_write_timeout(Some(HANDLER_TIMEOUT))?;
        let handover = Handover { format: "cubevmm-uffd", version: 1, page_bytes: PAGE, regions };
        let line = serde_json::to_string(&handover).map_err(io::Error::other)? + "\n";
        let descriptors = [uffd.as_fd().as_raw_fd(), image.as_raw_fd()];
        let rights = [ControlMessage::ScmRights(&descriptors)];
        let part = [IoSlice::new(line.as_bytes())];
        let sent = sendmsg::<()>(stream.as_raw_fd(), &part, &rights, MsgFlags::MSG_NOSIGNAL, None)?;
        if sent < line.len() {
            return Err(io::Error::other("it does not take the list of regions"));
        }
        let mut answer = String::new();
        let mut reader = BufReader::new((&stream).take(64));
        reader.read_line(&mut answer).map_err(no_answer)?;
        if answer.trim_end() != READY {
            return Err(io::Error::other(format!("it answers {answer:?}, expected {READY:?}")));
        }
        stream.set_nonblocking(true)?;
        let watch = move |stop: &Waker| watch(&stream, stop);
        Self::spawn(Some(uffd), watch, lost)
    }

    fn spawn(
        uffd: Option<Uffd>,
        serve: impl FnOnce(&Waker) -> io::Result<()> + Send + 'static,
        lost: Lost,
    ) -> io::Result<Self> {
        let stop = Waker::new()?;
        let stopped = stop.clone();
        let run = move || {
            if let Err(error) = serve(&stopped) {
                lost(&format!("guest memory cannot be brought in: {error}"));
            }
        };
        let thread = std::thread::Builder::new().name("pager".to_owned());
        let thread = thread.stack_size(128 * 1024).spawn(run)?;
        Ok(Self { stop, thread: Some(thread), _uffd: uffd })
    }
}

impl Drop for Pager {
    fn drop(&mut self) {
        self.stop.signal();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Waits for the end of a handler, which has nothing more to say.
fn watch(mut handler: &UnixStream, stop: &Waker) -> io::Result<()> {
    let mut said = [0; 64];
    while wait(stop, &[handler.as_fd()], true)? {
        match handler.read(&mut said) {
            Ok(0) => return Err(io::Error::other("the page fault handler has gone")),
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

fn no_answer(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::WouldBlock => io::Error::other("it does not say that it is ready"),
        _ => error,
    }
}

/// False when it is time to stop. Otherwise something has happened at one of `fds`, unless it should
/// not wait for that.
fn wait(stop: &Waker, fds: &[BorrowedFd<'_>], blocks: bool) -> io::Result<bool> {
    let fds = [stop.as_fd()].into_iter().chain(fds.iter().copied());
    let mut fds: Vec<_> = fds.map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
    let timeout = if blocks { PollTimeout::NONE } else { PollTimeout::ZERO };
    loop {
        match poll(&mut fds, timeout) {
            Ok(_) => break,
            Err(nix::errno::Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    let stopped = fds.first().and_then(PollFd::revents).unwrap_or(PollFlags::empty());
    Ok(stopped.is_empty())
}

#[cfg(test)]
mod tests;
