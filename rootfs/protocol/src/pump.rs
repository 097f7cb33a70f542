//! Moves bytes between the host's descriptors and the streams of a process. Runs in threads of its
//! own, one for each direction, so that none can hold up another.

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::fs::File;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

/// As much as a pipe holds.
const BUFFER: usize = 64 << 10;

/// Copies from the guest until the agent ends the stream. If nobody reads `output` any more the
/// stream is closed, which the process sees as a closed pipe.
pub(crate) fn to_host(mut stream: UnixStream, output: OwnedFd) -> io::Result<()> {
    let mut output = File::from(output);
    let mut buffer = vec![0; BUFFER];
    loop {
        let read = match stream.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        match write_all(&mut output, &buffer[..read]) {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(()),
            written => written?,
        }
    }
}

/// Like `write_all`, but waits on a descriptor that whoever shares it made non-blocking.
fn write_all(output: &mut File, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match output.write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => bytes = &bytes[written..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                wait(&mut [PollFd::new(output.as_fd(), PollFlags::POLLOUT)])?;
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Copies to the guest until `input` ends, the process reads no more, or `stop` is closed: it
/// never waits for input that nobody wants.
pub(crate) fn to_guest(input: OwnedFd, mut stream: UnixStream, stop: UnixStream) -> io::Result<()> {
    stream.set_nonblocking(true)?;
    let mut input = File::from(input);
    let mut buffer = vec![0; BUFFER];
    while ready(input.as_fd(), PollFlags::POLLIN, stream.as_fd(), stop.as_fd())? {
        let read = match input.read(&mut buffer) {
            Ok(0) => break,
            Ok(read) => read,
            Err(error) if retry(&error) => continue,
            Err(error) => {
                // The process must see an end, whatever this side sees.
                let _ = stream.shutdown(Shutdown::Write);
                return Err(error);
            }
        };
        let mut bytes = &buffer[..read];
        while !bytes.is_empty() {
            if !ready(stream.as_fd(), PollFlags::POLLOUT, stream.as_fd(), stop.as_fd())? {
                return Ok(());
            }
            match stream.write(bytes) {
                Ok(written) => bytes = &bytes[written..],
                Err(error) if retry(&error) => {}
                // The process, or the guest, is gone. Its exit status tells the story.
                Err(_) => return Ok(()),
            }
        }
    }
    let _ = stream.shutdown(Shutdown::Write);
    // Closing the connection now could overtake the bytes on the way: the agent closes first.
    while ready(stream.as_fd(), PollFlags::POLLIN, stream.as_fd(), stop.as_fd())? {
        match stream.read(&mut buffer) {
            Ok(0) => break,
            Ok(_) => {}
            Err(error) if retry(&error) => {}
            Err(_) => break,
        }
    }
    Ok(())
}

fn retry(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock)
}

/// Waits until `fd` is ready; false if `peer` hung up or `stop` was closed before.
fn ready(
    fd: BorrowedFd<'_>,
    event: PollFlags,
    peer: BorrowedFd<'_>,
    stop: BorrowedFd<'_>,
) -> io::Result<bool> {
    let gone = PollFlags::POLLHUP | PollFlags::POLLERR | PollFlags::POLLNVAL;
    let mut fds = [
        PollFd::new(fd, event),
        PollFd::new(peer, PollFlags::empty()),
        PollFd::new(stop, PollFlags::POLLIN),
    ];
    wait(&mut fds)?;
    let seen = |index: usize| fds[index].revents().unwrap_or(gone);
    Ok(!seen(1).intersects(gone) && seen(2).is_empty())
}

fn wait(fds: &mut [PollFd<'_>]) -> io::Result<()> {
    loop {
        match poll(fds, PollTimeout::NONE) {
            Err(Errno::EINTR) => {}
            result => return Ok(result.map(drop)?),
        }
    }
}
