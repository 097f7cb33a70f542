//! Moves the bytes of an attached stream between its connection and the process.

use crate::process::Process;
use crate::terminal;
use crate::watch::{self, CLOSED, Events, GONE, READABLE, WRITABLE};
use guest_protocol::Stream;
use nix::sys::signal::Signal;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// A quarter of a pipe, and a packet of vsock. From 32 KiB on Linux splits the payload of a packet
/// over several descriptors, which not every VMM takes; and it is memory of the guest.
const BUFFER: usize = 16 << 10;

/// How a stream came to its end.
enum End {
    /// The side that sends has ended it.
    Ended,
    /// The process has exited, and what still holds its output has been silent for long enough.
    Lingered,
    /// The host is gone.
    Lost,
}

/// Moves bytes until the stream ends. `end` is the agent's end, taken from `process`.
pub fn run(process: &Process, stream: Stream, end: OwnedFd, mut connection: UnixStream) {
    let mut file = File::from(end);
    if stream == Stream::Stdin {
        let lost = input(process, &mut file, &mut connection).is_err();
        let back = (lost && process.keep_streams).then(|| file.into());
        process.give_back(stream, back);
        return;
    }
    match output(process, &mut file, &mut connection) {
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
        End::Lost if process.keep_streams => process.give_back(stream, Some(file.into())),
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
fn output(process: &Process, source: &mut File, connection: &mut UnixStream) -> End {
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
        ];
        let Ok([readable, gone, exited]) = watch::wait(watched, timeout) else { return End::Lost };
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

/// Host to process. An error says that the host is gone and not that it has ended the stream.
fn input(process: &Process, sink: &mut File, connection: &mut UnixStream) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER];
    let mut last = None;
    loop {
        if !ready(process, connection.as_fd(), READABLE, sink)? {
            return Ok(());
        }
        match connection.read(&mut buffer) {
            Ok(0) => break,
            Ok(read) => {
                if !deliver(process, sink, &buffer[..read])? {
                    return Ok(());
                }
                last = Some(buffer[read - 1]);
            }
            Err(error) if again(&error) => {}
            Err(error) => return Err(error),
        }
    }
    if let Some(master) = &process.terminal {
        let end = terminal::end_of_input(master.as_fd(), last);
        deliver(process, sink, &end)?;
    }
    Ok(())
}

/// Writes all of `bytes`; false if the process reads no more.
fn deliver(process: &Process, sink: &mut File, mut bytes: &[u8]) -> io::Result<bool> {
    while !bytes.is_empty() {
        if !ready(process, sink.as_fd(), WRITABLE, sink)? {
            return Ok(false);
        }
        match sink.write(bytes) {
            Ok(written) => bytes = &bytes[written..],
            Err(error) if again(&error) => {}
            Err(_) => return Ok(false),
        }
    }
    Ok(true)
}

/// Waits until `fd` is ready; false if the process has exited or reads no more.
fn ready(
    process: &Process,
    fd: std::os::fd::BorrowedFd<'_>,
    event: Events,
    sink: &File,
) -> io::Result<bool> {
    let watched =
        [(Some(fd), event), (Some(sink.as_fd()), CLOSED), (Some(process.pidfd.as_fd()), READABLE)];
    let [_, closed, exited] = watch::wait(watched, None)?;
    Ok(closed & CLOSED == 0 && exited == 0)
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
