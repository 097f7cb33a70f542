//! Moves the bytes of an attached stream between its connection and the process.

use crate::process::{Process, Taken, Waiting};
use crate::terminal;
use crate::watch::{self, CLOSED, Events, GONE, READABLE, WRITABLE};
use guest_protocol::Stream;
use nix::sys::eventfd::EventFd;
use nix::sys::signal::Signal;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// A quarter of a pipe, and a packet of vsock. From 32 KiB on Linux splits the payload of a packet
/// over several descriptors, which not every VMM takes; and it is memory of the guest.
const BUFFER: usize = 16 << 10;

/// The most of a detached stdin that waits here: more than the buffers of a connection hold.
const MAX_REST: u64 = 8 << 20;

/// How a stream came to its end.
enum End {
    /// The side that sends has ended it.
    Ended,
    /// The process has exited, and what still holds its output has been silent for long enough.
    Lingered,
    /// The host is gone.
    Lost,
    /// The host wants the stream to wait for its next connection.
    Detached,
}

/// What has become of input.
enum Input {
    /// It has ended, or nobody reads it any more.
    Ended,
    /// It goes on with the next connection, after these bytes.
    Detached(Vec<u8>),
}

/// Moves bytes until the stream ends, or is detached. What is moved was taken from `process`.
pub fn run(process: &Process, stream: Stream, taken: Taken, mut connection: UnixStream) {
    let Taken { end: Waiting { fd, rest }, let_go } = taken;
    let mut file = File::from(fd);
    if stream == Stream::Stdin {
        let lost =
            |_| if process.keep_streams { Input::Detached(Vec::new()) } else { Input::Ended };
        let done = input(process, &mut file, &mut connection, &let_go, rest).unwrap_or_else(lost);
        let back = match done {
            Input::Ended => None,
            Input::Detached(rest) => Some(Waiting { fd: file.into(), rest }),
        };
        process.give_back(stream, back);
        return;
    }
    match output(process, &mut file, &mut connection, &let_go) {
        End::Ended => {
            drop(file);
            process.give_back(stream, None);
            // Closed as a whole: all has been sent, in order, and some VMMs do not pass half a
            // close on.
            drop(connection);
        }
        End::Lingered => {
            process.give_back(stream, None);
            drop(connection);
            discard(&mut file);
        }
        End::Detached => process.give_back(stream, Some(Waiting::from(OwnedFd::from(file)))),
        End::Lost if process.keep_streams => {
            process.give_back(stream, Some(Waiting::from(OwnedFd::from(file))));
        }
        End::Lost => {
            process.give_back(stream, None);
            if process.terminal.is_some() {
                // The line has been cut.
                let _ = process.signal(Signal::SIGHUP as i32, true);
                let _ = process.signal(Signal::SIGCONT as i32, true);
                discard(&mut file);
            }
        }
    }
}

/// Process to host.
fn output(
    process: &Process,
    source: &mut File,
    connection: &mut UnixStream,
    let_go: &EventFd,
) -> End {
    let linger = process.linger_ms.map(|ms| Duration::from_millis(ms.into()));
    let mut buffer = vec![0; BUFFER];
    // Since when there has been nothing to read, once the process has exited.
    let mut silent: Option<Instant> = None;
    loop {
        let timeout = silent.zip(linger).map(|(since, linger)| {
            // Rounded up, or the last millisecond would be spent polling.
            linger.saturating_sub(since.elapsed()) + Duration::from_millis(1)
        });
        let exit = silent.is_none().then(|| process.pidfd.as_fd());
        let watched = [
            (Some(source.as_fd()), READABLE),
            (Some(connection.as_fd()), GONE),
            // News only once.
            (exit, READABLE),
            (Some(let_go.as_fd()), READABLE),
        ];
        let Ok([readable, gone, exited, detached]) = watch::wait(watched, timeout) else {
            return End::Lost;
        };
        if detached != 0 {
            return End::Detached;
        }
        if gone != 0 {
            return End::Lost;
        }
        if readable != 0 {
            match source.read(&mut buffer) {
                Ok(0) => return End::Ended,
                Ok(read) if connection.write_all(&buffer[..read]).is_err() => return End::Lost,
                Ok(_) => {}
                Err(error) if again(&error) => {}
                // A terminal that no process has open any more.
                Err(_) => return End::Ended,
            }
            silent = silent.map(|_| Instant::now());
            continue;
        }
        match (silent, linger) {
            (None, _) if exited != 0 => silent = Some(Instant::now()),
            (Some(since), Some(linger)) if since.elapsed() >= linger => return End::Lingered,
            _ => {}
        }
    }
}

/// Host to process, `rest` first. An error says that the host is gone and not that it has ended the
/// stream.
fn input(
    process: &Process,
    sink: &mut File,
    connection: &mut UnixStream,
    let_go: &EventFd,
    rest: Vec<u8>,
) -> io::Result<Input> {
    let mut pending = rest;
    let mut buffer = vec![0; BUFFER];
    let mut last = None;
    loop {
        match deliver(process, sink, let_go, &mut pending)? {
            Delivery::Done => {}
            Delivery::Unread => return Ok(Input::Ended),
            Delivery::LetGo => return collect(connection, pending),
        }
        match ready(process, connection.as_fd(), READABLE, sink, let_go)? {
            Delivery::Done => {}
            Delivery::Unread => return Ok(Input::Ended),
            Delivery::LetGo => return collect(connection, pending),
        }
        match connection.read(&mut buffer) {
            Ok(0) => break,
            Ok(read) => {
                pending.extend_from_slice(&buffer[..read]);
                last = Some(buffer[read - 1]);
            }
            Err(error) if again(&error) => {}
            Err(error) => return Err(error),
        }
    }
    if let Some(master) = &process.terminal {
        pending = terminal::end_of_input(master.as_fd(), last);
        deliver(process, sink, let_go, &mut pending)?;
    }
    Ok(Input::Ended)
}

/// Takes in what the host has sent before it knew that the stream is detached.
fn collect(connection: &mut UnixStream, mut pending: Vec<u8>) -> io::Result<Input> {
    connection.take(MAX_REST).read_to_end(&mut pending)?;
    Ok(Input::Detached(pending))
}

/// How far input has come.
enum Delivery {
    /// It is delivered, or can be.
    Done,
    /// The process has exited or reads no more.
    Unread,
    /// The stream shall be let go of.
    LetGo,
}

/// Writes all of `bytes`, and takes away what it has written.
fn deliver(
    process: &Process,
    sink: &mut File,
    let_go: &EventFd,
    bytes: &mut Vec<u8>,
) -> io::Result<Delivery> {
    while !bytes.is_empty() {
        match ready(process, sink.as_fd(), WRITABLE, sink, let_go)? {
            Delivery::Done => {}
            other => return Ok(other),
        }
        match sink.write(bytes) {
            Ok(written) => drop(bytes.drain(..written)),
            Err(error) if again(&error) => {}
            Err(_) => return Ok(Delivery::Unread),
        }
    }
    Ok(Delivery::Done)
}

/// Waits until `fd` is ready, or there is a reason not to.
fn ready(
    process: &Process,
    fd: BorrowedFd<'_>,
    event: Events,
    sink: &File,
    let_go: &EventFd,
) -> io::Result<Delivery> {
    let watched = [
        (Some(fd), event),
        (Some(sink.as_fd()), CLOSED),
        (Some(process.pidfd.as_fd()), READABLE),
        (Some(let_go.as_fd()), READABLE),
    ];
    let [_, closed, exited, detached] = watch::wait(watched, None)?;
    Ok(if closed & CLOSED != 0 || exited != 0 {
        Delivery::Unread
    } else if detached != 0 {
        Delivery::LetGo
    } else {
        Delivery::Done
    })
}

/// Reads and forgets, so that whoever writes is neither blocked nor killed.
fn discard(source: &mut File) {
    let mut buffer = [0; 4096];
    loop {
        if watch::wait([(Some(source.as_fd()), READABLE)], None).is_err() {
            return;
        }
        match source.read(&mut buffer) {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) if again(&error) => {}
            Err(_) => return,
        }
    }
}

fn again(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock)
}
