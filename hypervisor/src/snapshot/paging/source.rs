//! Page faults answered from the file, by a thread of this process.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::sync::mpsc::TryRecvError;

use devices::event::Event as Waker;

use super::super::prefetch::{Feed, Pages};
use super::super::sums::is_zero;
use super::{Region, wait};
use crate::uffd::{Event, PAGE, Uffd};

/// Pages that are brought in together when one of them is wanted.
const AROUND: u64 = 16 * PAGE;

/// The file, as memory.
pub(super) struct Source {
    pub(super) uffd: Uffd,
    pub(super) regions: Vec<Region>,
    pub(super) image: File,
    pub(super) removed: Removed,
    /// Pages that are brought in before anybody wants them.
    pub(super) feed: Option<Feed>,
}

/// Pages that the guest has given back, which are zeros now. A bit each, by their place in the file.
pub(super) struct Removed(Vec<u64>);

impl Removed {
    pub(super) fn new(bytes: u64) -> Self {
        Self(vec![0; usize::try_from((bytes / PAGE).div_ceil(64)).unwrap_or(0)])
    }

    fn place(offset: u64) -> (usize, u64) {
        let page = offset / PAGE;
        (usize::try_from(page / 64).unwrap_or(usize::MAX), 1 << (page % 64))
    }

    pub(super) fn add(&mut self, offset: u64) {
        let (word, bit) = Self::place(offset);
        if let Some(word) = self.0.get_mut(word) {
            *word |= bit;
        }
    }

    /// Whether one of the pages from the first to before the second is among them.
    pub(super) fn any(&self, first: u64, last: u64) -> bool {
        (first..last).step_by(PAGE as usize).any(|offset| {
            let (word, bit) = Self::place(offset);
            self.0.get(word).is_some_and(|word| word & bit != 0)
        })
    }
}

/// What is done about some pages.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Filling {
    /// They were given back, and are zeros when somebody wants them.
    None,
    Zeros,
    Content,
}

impl Source {
    pub(super) fn serve(mut self, stop: &Waker) -> io::Result<()> {
        let mut waiting: Vec<u64> = Vec::new();
        let mut buffer = vec![0; usize::try_from(AROUND).unwrap_or(0)];
        let mut more = false;
        loop {
            let ready = self.feed.as_ref().map(|feed| feed.ready.as_fd());
            let fds: Vec<BorrowedFd<'_>> = [self.uffd.as_fd()].into_iter().chain(ready).collect();
            if !wait(stop, &fds, waiting.is_empty() && !more)? {
                return Ok(());
            }
            self.take_events(&mut waiting)?;
            // What has to wait for an event of the kernel's is tried again after it.
            let pages = std::mem::take(&mut waiting);
            for page in pages {
                match self.bring(page, &mut buffer) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => waiting.push(page),
                    done => done?,
                }
            }
            // Those that somebody waits for come first.
            if waiting.is_empty() {
                more = self.feed();
            }
        }
    }

    fn take_events(&mut self, waiting: &mut Vec<u64>) -> io::Result<()> {
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
        Ok(())
    }

    /// Fills one piece of those that nobody waits for; whether there is more.
    ///
    /// All that was given back before has been told by now, or the kernel has us wait: so nothing of
    /// that comes back.
    fn feed(&mut self) -> bool {
        let Some(mut feed) = self.feed.take().filter(|feed| !feed.progress.has_ended()) else {
            return false;
        };
        let (pages, from) = match feed.held.take() {
            Some(held) => held,
            None => {
                // Before it is looked: what comes later is told again.
                feed.ready.clear();
                match feed.pieces.try_recv() {
                    Ok(Some(pages)) => (pages, 0),
                    Ok(None) => {
                        feed.progress.finish();
                        return false;
                    }
                    Err(TryRecvError::Disconnected) => return false,
                    Err(TryRecvError::Empty) => {
                        self.feed = Some(feed);
                        return false;
                    }
                }
            }
        };
        match self.fill(&pages, from, &feed) {
            Ok(end) if end < pages.content.len() => feed.held = Some((pages, end)),
            Ok(_) => {}
            Err(error) => {
                feed.progress.fail(&error);
                return false;
            }
        }
        self.feed = Some(feed);
        true
    }

    /// Fills in what is not there yet, from the byte `from` on; up to where.
    fn fill(&self, pages: &Pages, from: usize, feed: &Feed) -> io::Result<usize> {
        let mut at = from;
        while let Some((filling, content)) = self.next_filling(pages, at) {
            let page = pages.host_address + at as u64;
            let filled = match filling {
                Filling::None => Ok(content.len()),
                Filling::Zeros => self.uffd.fill_zeros_some(page, content.len()),
                Filling::Content => self.uffd.fill_some(page, content),
            };
            match filled {
                Ok(bytes) => {
                    feed.progress.add(if filling == Filling::None { 0 } else { bytes as u64 });
                    at += bytes;
                }
                // Somebody was faster.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => at += PAGE as usize,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        Ok(at)
    }

    /// The longest part from the byte `at` on that is dealt with in one way; nothing at the end.
    fn next_filling<'a>(&self, pages: &'a Pages, at: usize) -> Option<(Filling, &'a [u8])> {
        let rest = pages.content.get(at..)?;
        let region = self.region(pages.host_address)?;
        let filling = |offset: usize, page: &[u8]| {
            let place = region.offset(pages.host_address + (at + offset) as u64);
            match is_zero(page) {
                _ if self.removed.any(place, place + PAGE) => Filling::None,
                true => Filling::Zeros,
                false => Filling::Content,
            }
        };
        let mut each = rest.chunks(PAGE as usize).enumerate();
        let mut each = each.by_ref().map(|(index, page)| filling(index * PAGE as usize, page));
        let first = each.next()?;
        let more = each.take_while(|other| *other == first).count();
        Some((first, rest.get(..(1 + more) * PAGE as usize)?))
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
