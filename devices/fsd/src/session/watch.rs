//! What a server waits for: its two sockets, and signals that there are messages.

use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;

use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::EventFd;

const VHOST: u64 = 0;
const CONTROL: u64 = 1;
const KICK: u64 = 2;

/// All of it.
pub(super) struct Watch {
    epoll: Epoll,
    /// Our own descriptors of what is signalled, which are open for as long as they are watched.
    kicks: Vec<EventFd>,
}

/// What there is to do.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Ready {
    pub vhost: bool,
    pub control: bool,
    pub kicked: bool,
}

impl Watch {
    /// Watches the sockets.
    pub fn new(vhost: &UnixStream, control: &UnixStream) -> io::Result<Self> {
        let epoll = Epoll::new()?;
        for (socket, what) in [(vhost, VHOST), (control, CONTROL)] {
            let event = EpollEvent::new(EventSet::IN, what);
            epoll.ctl(ControlOperation::Add, socket.as_raw_fd(), event)?;
        }
        Ok(Self { epoll, kicks: Vec::new() })
    }

    /// Watches these signals and no others. Each is told once, so nobody has to take it: that is a
    /// system call less for each message.
    pub fn follow<'a>(&mut self, kicks: impl Iterator<Item = &'a EventFd>) -> io::Result<()> {
        for kick in self.kicks.drain(..) {
            self.epoll.ctl(ControlOperation::Delete, kick.as_raw_fd(), EpollEvent::default())?;
        }
        for kick in kicks {
            let kick = kick.try_clone()?;
            let event = EpollEvent::new(EventSet::IN | EventSet::EDGE_TRIGGERED, KICK);
            self.epoll.ctl(ControlOperation::Add, kick.as_raw_fd(), event)?;
            self.kicks.push(kick);
        }
        Ok(())
    }

    /// Waits for something to do; for so many milliseconds at most, or -1 for ever.
    pub fn wait(&self, millis: i32) -> io::Result<Ready> {
        let mut events = [EpollEvent::default(); 4];
        let found = loop {
            match self.epoll.wait(millis, &mut events) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                found => break found?,
            }
        };
        let mut ready = Ready::default();
        for event in events.iter().take(found) {
            match event.data() {
                VHOST => ready.vhost = true,
                CONTROL => ready.control = true,
                _ => ready.kicked = true,
            }
        }
        Ok(ready)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn a_signal_is_told_once_and_the_next_one_again() {
        let ((vhost, _one), (control, mut other)) =
            (UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
        let mut watch = Watch::new(&vhost, &control).unwrap();
        let kick = EventFd::new(libc::EFD_NONBLOCK).unwrap();
        kick.write(1).unwrap();
        let (nothing, kicked) = (Ready::default(), Ready { kicked: true, ..Ready::default() });
        assert_eq!(watch.wait(0).unwrap(), nothing);
        // What was signalled before counts.
        watch.follow([&kick].into_iter()).unwrap();
        assert_eq!(watch.wait(0).unwrap(), kicked);
        assert_eq!(watch.wait(0).unwrap(), nothing);
        kick.write(1).unwrap();
        kick.write(1).unwrap();
        assert_eq!(watch.wait(-1).unwrap(), kicked);
        assert_eq!(watch.wait(0).unwrap(), nothing);
        // What a socket has to say is told until it is read.
        other.write_all(b"?").unwrap();
        for _ in 0..2 {
            assert_eq!(watch.wait(-1).unwrap(), Ready { control: true, ..Ready::default() });
        }
    }

    #[test]
    fn what_is_not_followed_any_more_is_not_heard() {
        let ((vhost, _one), (control, _other)) =
            (UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
        let mut watch = Watch::new(&vhost, &control).unwrap();
        let [first, second] = [(); 2].map(|()| EventFd::new(libc::EFD_NONBLOCK).unwrap());
        watch.follow([&first].into_iter()).unwrap();
        watch.follow([&second].into_iter()).unwrap();
        first.write(1).unwrap();
        assert_eq!(watch.wait(0).unwrap(), Ready::default());
        second.write(1).unwrap();
        assert!(watch.wait(0).unwrap().kicked);
    }
}
