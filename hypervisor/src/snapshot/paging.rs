//! Where the memory of a restored guest comes from, and when.

use std::fs::File;
use std::io::{self, BufRead, BufReader, IoSlice, Read};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::FileExt;
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

use crate::memory::{self, MemoryError};
use crate::uffd::{Event, PAGE, Uffd};

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
    /// Nobody listens, or they do not answer.
    #[error("the page fault handler at {}: {source}", path.display())]
    Handler {
        /// Its socket.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
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
}

/// Maps `bytes` of guest memory with the content of the file `image`.
pub fn load(mode: &MemoryMode, bytes: u64, image: File, lost: Lost) -> Result<Loaded, PagingError> {
    match mode {
        MemoryMode::Private => {
            Ok(Loaded { memory: memory::from_image(bytes, image)?, pager: None })
        }
        MemoryMode::Prefault => {
            let file = image.try_clone().map_err(PagingError::Populate)?;
            let memory = memory::from_image(bytes, image)?;
            populate(&memory, &file).map_err(PagingError::Populate)?;
            Ok(Loaded { memory, pager: None })
        }
        MemoryMode::Uffd => {
            let memory = memory::fresh(bytes)?;
            let (uffd, regions) = register(&memory).map_err(PagingError::Uffd)?;
            let pager = Pager::own(uffd, regions, image, lost).map_err(PagingError::Thread)?;
            Ok(Loaded { memory, pager: Some(pager) })
        }
        MemoryMode::UffdBy(path) => {
            let memory = memory::fresh(bytes)?;
            let (uffd, regions) = register(&memory).map_err(PagingError::Uffd)?;
            let pager = Pager::external(path, uffd, &regions, &image, lost);
            let pager =
                pager.map_err(|source| PagingError::Handler { path: path.clone(), source })?;
            Ok(Loaded { memory, pager: Some(pager) })
        }
    }
}

/// A piece of guest memory, and where in the file its content is.
#[derive(Clone, Copy, Debug, Serialize)]
struct Region {
    guest_address: u64,
    host_address: u64,
    bytes: u64,
    file_offset: u64,
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

fn regions(memory: &Memory) -> Vec<Region> {
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
            let len = usize::try_from(stop - start).unwrap_or(usize::MAX);
            // SAFETY: whole pages inside a live private mapping, which this call does not change.
            let done = unsafe { libc::madvise(host as *mut _, len, libc::MADV_POPULATE_READ) };
            if done != 0 {
                return Err(io::Error::last_os_error());
            }
            at = stop;
        }
    }
    Ok(())
}

/// The next whole pages with content between `from` and `end`.
fn next_data(file: &File, from: u64, end: u64) -> io::Result<Option<(u64, u64)>> {
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
    fn own(uffd: Uffd, regions: Vec<Region>, image: File, lost: Lost) -> io::Result<Self> {
        let bytes: u64 = regions.iter().map(|region| region.bytes).sum();
        let source = Source { uffd, regions, image, removed: Removed::new(bytes) };
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
    while wait(stop, handler.as_fd(), PollFlags::POLLIN)? {
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

/// True when something has happened at `fd`, false when it is time to stop.
fn wait(stop: &Waker, fd: std::os::fd::BorrowedFd<'_>, what: PollFlags) -> io::Result<bool> {
    let ended = PollFlags::POLLERR | PollFlags::POLLHUP;
    loop {
        let stopped = PollFd::new(stop.as_fd(), PollFlags::POLLIN);
        let mut fds = [stopped, PollFd::new(fd, what)];
        match poll(&mut fds, PollTimeout::NONE) {
            Ok(_) => {}
            Err(nix::errno::Errno::EINTR) => continue,
            Err(error) => return Err(error.into()),
        }
        let [stopped, other] = fds.map(|fd| fd.revents().unwrap_or(PollFlags::empty()));
        if !stopped.is_empty() {
            return Ok(false);
        }
        if other.intersects(what | ended) {
            return Ok(true);
        }
    }
}

/// Pages that are brought in together when one of them is wanted.
const AROUND: u64 = 16 * PAGE;

/// The file, as memory.
struct Source {
    uffd: Uffd,
    regions: Vec<Region>,
    image: File,
    removed: Removed,
}

/// Pages that the guest has given back, which are zeros now. A bit each, by their place in the file.
struct Removed(Vec<u64>);

impl Removed {
    fn new(bytes: u64) -> Self {
        Self(vec![0; usize::try_from((bytes / PAGE).div_ceil(64)).unwrap_or(0)])
    }

    fn place(offset: u64) -> (usize, u64) {
        let page = offset / PAGE;
        (usize::try_from(page / 64).unwrap_or(usize::MAX), 1 << (page % 64))
    }

    fn add(&mut self, offset: u64) {
        let (word, bit) = Self::place(offset);
        if let Some(word) = self.0.get_mut(word) {
            *word |= bit;
        }
    }

    /// Whether one of the pages from the first to before the second is among them.
    fn any(&self, first: u64, last: u64) -> bool {
        (first..last).step_by(PAGE as usize).any(|offset| {
            let (word, bit) = Self::place(offset);
            self.0.get(word).is_some_and(|word| word & bit != 0)
        })
    }
}

impl Source {
    fn serve(mut self, stop: &Waker) -> io::Result<()> {
        let mut waiting: Vec<u64> = Vec::new();
        let mut buffer = vec![0; usize::try_from(AROUND).unwrap_or(0)];
        loop {
            if waiting.is_empty() && !wait(stop, self.uffd.as_fd(), PollFlags::POLLIN)? {
                return Ok(());
            }
            for event in self.uffd.events()? {
                match event {
                    Event::Fault(page) => waiting.push(page),
                    Event::Removed(start, end) => {
                        for page in (start..end).step_by(PAGE as usize) {
                            if let Some(region) = self.region(page) {
                                self.removed.add(region.offset(page));
                            }
                        }
                    }
                }
            }
            // What has to wait for an event of the kernel's is tried again after it.
            let pages = std::mem::take(&mut waiting);
            for page in pages {
                match self.bring(page, &mut buffer) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => waiting.push(page),
                    done => done?,
                }
            }
        }
    }

    fn region(&self, page: u64) -> Option<Region> {
        let inside = |region: &&Region| (region.host_address..region.end()).contains(&page);
        self.regions.iter().find(inside).copied()
    }

    fn bring(&self, page: u64, buffer: &mut [u8]) -> io::Result<()> {
        let Some(region) = self.region(page) else {
            return Err(io::Error::other(format!(
                "a fault at {page:#x}, which is not guest memory"
            )));
        };
        let (offset, next) = (region.offset(page), region.offset(page) + PAGE);
        if self.removed.any(offset, next) {
            return self.settle(page, self.uffd.fill_zeros(page, PAGE));
        }
        let first = (page / AROUND * AROUND).max(region.host_address);
        let last = (page / AROUND * AROUND + AROUND).min(region.end());
        if !self.removed.any(region.offset(first), region.offset(last))
            && self.copy(region, first, last, buffer).is_ok()
        {
            return Ok(());
        }
        // Some of them are there already.
        self.settle(page, self.copy(region, page, page + PAGE, buffer))
    }

    fn copy(&self, region: Region, first: u64, last: u64, buffer: &mut [u8]) -> io::Result<()> {
        let len = usize::try_from(last - first).unwrap_or(0);
        let piece = buffer.get_mut(..len).unwrap_or_default();
        self.image.read_exact_at(piece, region.offset(first)).map_err(|error| {
            match error.kind() {
                io::ErrorKind::UnexpectedEof => {
                    io::Error::other("the memory file has become shorter")
                }
                // Not to be taken for what the kernel says of a page.
                _ => io::Error::other(error),
            }
        })?;
        match piece.iter().all(|&byte| byte == 0) {
            true => self.uffd.fill_zeros(first, last - first),
            false => self.uffd.fill(first, piece),
        }
    }

    /// A page that is there already was another fault's: who waits for it looks again.
    fn settle(&self, page: u64, filled: io::Result<()>) -> io::Result<()> {
        match filled {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => self.uffd.wake(page),
            other => other,
        }
    }
}

#[cfg(test)]
mod tests;
