//! Framing: a length (u32, little-endian) and so many bytes of JSON. A reader never takes a byte
//! beyond the frame, so raw bytes may follow; it never allocates more than the limit it is given.

use crate::{Hello, MAX_FRAME, MAX_HELLO, PROTOCOL_VERSION};
use serde::{Serialize, de::DeserializeOwned};
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// Why a frame could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// The peer closed the connection between two frames.
    #[error("connection closed by the peer")]
    Closed,
    /// The connection failed, or was closed inside a frame.
    #[error("connection failed")]
    Io(#[source] io::Error),
    /// The peer did not answer in time.
    #[error("no answer in time")]
    Timeout,
    /// Longer than the limit.
    #[error("frame of {length} bytes is over the limit of {limit}")]
    TooLong {
        /// The frame's length.
        length: usize,
        /// What is allowed.
        limit: usize,
    },
    /// Not the JSON that was expected.
    #[error("malformed message")]
    Malformed(#[source] serde_json::Error),
    /// The agent speaks a protocol that this side does not know.
    #[error("agent speaks protocol version {0}, this side {PROTOCOL_VERSION}")]
    Version(u32),
}

impl From<io::Error> for FrameError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Self::Timeout,
            _ => Self::Io(error),
        }
    }
}

/// Reads one frame of at most `limit` bytes, without looking inside.
///
/// # Errors
/// [`FrameError::Closed`] if the stream ends before the frame's first byte.
pub fn read_bytes(reader: &mut impl Read, limit: usize) -> Result<Vec<u8>, FrameError> {
    let mut header = [0; 4];
    let mut filled = 0;
    while filled < header.len() {
        match reader.read(&mut header[filled..]) {
            Ok(0) if filled == 0 => return Err(FrameError::Closed),
            Ok(0) => return Err(FrameError::Io(io::ErrorKind::UnexpectedEof.into())),
            Ok(read) => filled += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // A reset is how some transports tell that the peer is gone.
            Err(error) if filled == 0 && error.kind() == io::ErrorKind::ConnectionReset => {
                return Err(FrameError::Closed);
            }
            Err(error) => return Err(error.into()),
        }
    }
    let length = u32::from_le_bytes(header) as usize;
    if length > limit {
        return Err(FrameError::TooLong { length, limit });
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    Ok(body)
}

/// Reads one message of at most `limit` bytes.
///
/// # Errors
/// As [`read_bytes`], and [`FrameError::Malformed`].
pub fn read<T: DeserializeOwned>(reader: &mut impl Read, limit: usize) -> Result<T, FrameError> {
    serde_json::from_slice(&read_bytes(reader, limit)?).map_err(FrameError::Malformed)
}

/// Writes one message, in a single write.
///
/// # Errors
/// [`FrameError::TooLong`] if it does not fit [`MAX_FRAME`]; nothing has been written then.
pub fn write<T: Serialize>(writer: &mut impl Write, message: &T) -> Result<(), FrameError> {
    let mut bytes = vec![0; 4];
    serde_json::to_writer(&mut bytes, message).map_err(FrameError::Malformed)?;
    let length = bytes.len() - 4;
    let header = u32::try_from(length).ok().filter(|_| length <= MAX_FRAME);
    let header = header.ok_or(FrameError::TooLong { length, limit: MAX_FRAME })?;
    bytes[..4].copy_from_slice(&header.to_le_bytes());
    Ok(writer.write_all(&bytes)?)
}

/// Reads the agent's hello from a connection to [`READY_PORT`](crate::READY_PORT). The guest is
/// not trusted: it gets `timeout` for all of it, and little memory.
///
/// # Errors
/// As [`read`], and [`FrameError::Version`] for a protocol that this side does not speak.
pub fn read_hello(stream: &UnixStream, timeout: Duration) -> Result<Hello, FrameError> {
    let hello: Hello = read(&mut Deadline::new(stream, Some(timeout)), MAX_HELLO)?;
    match hello.protocol_version {
        PROTOCOL_VERSION => Ok(hello),
        other => Err(FrameError::Version(other)),
    }
}

/// A stream all of whose reads and writes together must end in time.
pub(crate) struct Deadline<'a> {
    stream: &'a UnixStream,
    end: Option<Instant>,
}

impl<'a> Deadline<'a> {
    /// `None` waits forever.
    pub(crate) fn new(stream: &'a UnixStream, timeout: Option<Duration>) -> Self {
        Self { stream, end: timeout.map(|timeout| Instant::now() + timeout) }
    }

    fn left(&self) -> io::Result<Option<Duration>> {
        let Some(end) = self.end else { return Ok(None) };
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(Some(left)) }
    }
}

impl Read for Deadline<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(self.left()?)?;
        self.stream.read(buffer)
    }
}

impl Write for Deadline<'_> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(self.left()?)?;
        self.stream.write(buffer)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ErrorKind, Request, Response, Spawn};

    fn framed(json: &str) -> Vec<u8> {
        let mut bytes = u32::try_from(json.len()).unwrap().to_le_bytes().to_vec();
        bytes.extend_from_slice(json.as_bytes());
        bytes
    }

    #[test]
    fn a_message_survives_the_way_and_nothing_behind_it_is_read() {
        let request = Request::Spawn(Spawn::new(["echo", "ü"]).env("A", "b"));
        let mut bytes = Vec::new();
        write(&mut bytes, &request).unwrap();
        bytes.extend_from_slice(b"raw");
        let mut reader = bytes.as_slice();
        assert_eq!(read::<Request>(&mut reader, MAX_FRAME).unwrap(), request);
        assert_eq!(reader, b"raw");
    }

    #[test]
    fn unknown_words_and_fields_are_tolerated() {
        let bytes = framed(r#"{"type":"frobnicate","x":[1,{}]}"#);
        assert_eq!(read::<Request>(&mut bytes.as_slice(), 99).unwrap(), Request::Unknown);
        let bytes = framed(r#"{"type":"ping","since":3}"#);
        assert_eq!(read::<Request>(&mut bytes.as_slice(), 99).unwrap(), Request::Ping);
        let bytes = framed(r#"{"type":"error","kind":"too_hot","message":"m"}"#);
        let expected = Response::Error { kind: ErrorKind::Unknown, message: "m".into() };
        assert_eq!(read::<Response>(&mut bytes.as_slice(), 99).unwrap(), expected);
    }

    #[test]
    fn a_short_spawn_gets_the_defaults() {
        let bytes = framed(r#"{"type":"spawn","argv":["true"]}"#);
        let expected = Request::Spawn(Spawn::new(["true"]));
        assert_eq!(read::<Request>(&mut bytes.as_slice(), 99).unwrap(), expected);
    }

    #[test]
    fn bad_frames_are_told_apart() {
        let read = |bytes: &[u8]| read::<Request>(&mut &*bytes, 99).unwrap_err();
        assert!(matches!(read(b""), FrameError::Closed));
        assert!(matches!(read(b"\x01\0"), FrameError::Io(_)));
        assert!(matches!(read(b"\x09\0\0\0{"), FrameError::Io(_)));
        assert!(matches!(read(b"\x64\0\0\0"), FrameError::TooLong { length: 100, limit: 99 }));
        assert!(matches!(read(&framed("{")), FrameError::Malformed(_)));
        assert!(matches!(read(&framed("{}")), FrameError::Malformed(_)));
        assert!(matches!(read(&framed(&"[".repeat(99))), FrameError::Malformed(_)));
    }

    #[test]
    fn too_long_a_message_is_not_sent() {
        let mut bytes = Vec::new();
        let spawn = Request::Spawn(Spawn::new(["x".repeat(MAX_FRAME)]));
        assert!(matches!(write(&mut bytes, &spawn), Err(FrameError::TooLong { .. })));
        assert!(bytes.is_empty());
    }

    #[test]
    fn a_hello_must_come_in_time_and_in_a_known_version() {
        let (host, mut guest) = UnixStream::pair().unwrap();
        let timeout = Duration::from_millis(50);
        guest.write_all(b"\x10\0\0").unwrap();
        assert!(matches!(read_hello(&host, timeout), Err(FrameError::Timeout)));

        let (host, mut guest) = UnixStream::pair().unwrap();
        write(&mut guest, &Hello { protocol_version: 7, ..Hello::default() }).unwrap();
        assert!(matches!(read_hello(&host, timeout), Err(FrameError::Version(7))));
    }
}
