//! An eventfd with an owner: the one kind of wake-up signal between threads, KVM and devices.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;

use vmm_sys_util::eventfd::EventFd;

/// A counter that KVM (`KVM_IOEVENTFD`, `KVM_IRQFD`), threads and epoll understand. Clones share
/// it. Non-blocking and close-on-exec.
#[derive(Clone, Debug)]
pub struct Event(Arc<EventFd>);

impl Event {
    /// A new event, not signalled. Fails when the process is out of descriptors.
    pub fn new() -> io::Result<Self> {
        Ok(Self(Arc::new(EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?)))
    }

    /// Signals. Never blocks: a counter that is full is signalled already.
    pub fn signal(&self) {
        if let Err(error) = self.0.write(1)
            && error.kind() != io::ErrorKind::WouldBlock
        {
            tracing::error!(%error, "event not signalled");
        }
    }

    /// Takes the signals so far; how many there were.
    pub fn clear(&self) -> u64 {
        self.0.read().unwrap_or(0)
    }

    /// The eventfd, for the calls of kvm-ioctls.
    pub fn eventfd(&self) -> &EventFd {
        &self.0
    }
}

impl From<EventFd> for Event {
    /// An eventfd that somebody else has made.
    fn from(eventfd: EventFd) -> Self {
        Self(Arc::new(eventfd))
    }
}

impl AsFd for Event {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is owned by the EventFd, which outlives the borrow of self.
        unsafe { BorrowedFd::borrow_raw(self.0.as_raw_fd()) }
    }
}

impl AsRawFd for Event {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_are_counted_and_taken() {
        let event = Event::new().unwrap();
        event.signal();
        event.clone().signal();
        assert_eq!(event.clear(), 2);
        assert_eq!(event.clear(), 0);
    }

    #[test]
    fn a_full_counter_does_not_block() {
        let event = Event::new().unwrap();
        event.eventfd().write(u64::MAX - 1).unwrap();
        event.signal();
        assert_eq!(event.clear(), u64::MAX - 1);
    }
}
