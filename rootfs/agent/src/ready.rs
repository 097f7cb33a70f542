//! Tells the host that the guest is ready.

use crate::log::Log;
use guest_protocol::{Hello, READY_PORT, frame};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, VsockAddr, connect, socket};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

/// How long the host may take to listen. Who listens does so before the guest boots.
const PATIENCE: Duration = Duration::from_secs(10);

/// Says `hello` to the host, once. The guest serves all the same if nobody listens.
pub fn announce(hello: &Hello, log: Log) {
    let start = Instant::now();
    let mut pause = Duration::from_millis(1);
    loop {
        match say(hello) {
            Ok(()) => return,
            Err(error) if start.elapsed() > PATIENCE => {
                let port = READY_PORT;
                log.info(format_args!("nobody on the host listens on vsock port {port}: {error}"));
                return;
            }
            Err(_) => thread::sleep(pause),
        }
        pause = (pause * 2).min(Duration::from_millis(100));
    }
}

fn say(hello: &Hello) -> io::Result<()> {
    let flags = SockFlag::SOCK_CLOEXEC;
    let fd = socket(AddressFamily::Vsock, SockType::Stream, flags, None)?;
    connect(fd.as_raw_fd(), &VsockAddr::new(libc::VMADDR_CID_HOST, READY_PORT))?;
    frame::write(&mut UnixStream::from(fd), hello).map_err(io::Error::other)
}
