//! How to get a byte stream to a port of the guest.

use crate::frame::Deadline;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Opens connections to the guest's vsock ports.
pub trait Connect: Send + Sync {
    /// Connects to `port` of the guest. The stream is blocking and has no timeouts.
    ///
    /// # Errors
    /// Whatever hinders; `ConnectionRefused` when nobody listens there.
    fn connect(&self, port: u32) -> io::Result<UnixStream>;
}

impl<C: Connect + ?Sized> Connect for Arc<C> {
    fn connect(&self, port: u32) -> io::Result<UnixStream> {
        (**self).connect(port)
    }
}

/// The VMM's unix socket for vsock, which takes `CONNECT <port>\n` and answers `OK <n>\n`.
#[derive(Clone, Debug)]
pub struct HybridSocket {
    path: PathBuf,
    timeout: Duration,
}

impl HybridSocket {
    /// The longest answer to `CONNECT`: `OK` and a u32.
    const MAX_ANSWER: usize = 32;

    /// The socket at `path`.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), timeout: Duration::from_secs(5) }
    }

    /// How long the guest may take to accept; 5 s by default.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }
}

impl Connect for HybridSocket {
    fn connect(&self, port: u32) -> io::Result<UnixStream> {
        let stream = UnixStream::connect(&self.path)?;
        let mut timed = Deadline::new(&stream, Some(self.timeout));
        timed.write_all(format!("CONNECT {port}\n").as_bytes())?;
        let answer = read_line(&mut timed, Self::MAX_ANSWER)?;
        if !answer.starts_with(b"OK ") {
            let answer = answer.escape_ascii();
            let message = format!("answer to CONNECT {port} is not OK but '{answer}'");
            return Err(io::Error::new(io::ErrorKind::InvalidData, message));
        }
        stream.set_read_timeout(None)?;
        stream.set_write_timeout(None)?;
        Ok(stream)
    }
}

/// Reads to the end of line, byte by byte because the stream's own bytes follow.
fn read_line(reader: &mut impl Read, limit: usize) -> io::Result<Vec<u8>> {
    let mut line = Vec::with_capacity(limit);
    let mut byte = [0];
    while line.len() < limit {
        match reader.read(&mut byte) {
            // The VMM closes the connection if nobody listens on the port.
            Ok(0) => return Err(io::ErrorKind::ConnectionRefused.into()),
            Ok(_) if byte[0] == b'\n' => return Ok(line),
            Ok(_) => line.push(byte[0]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return Err(io::ErrorKind::TimedOut.into());
            }
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::new(io::ErrorKind::InvalidData, "answer to CONNECT has no end"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;
    use std::thread;

    /// Serves one connection: reads the request line, sends `answer`.
    fn connect_to(answer: &'static [u8]) -> (io::Result<UnixStream>, Vec<u8>) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vsock");
        let listener = UnixListener::bind(&path).unwrap();
        let server = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let line = read_line(&mut stream, 99).unwrap();
            stream.write_all(answer).unwrap();
            line
        });
        let socket = HybridSocket::new(path).timeout(Duration::from_millis(200));
        (socket.connect(52), server.join().unwrap())
    }

    #[test]
    fn the_bytes_after_the_answer_belong_to_the_stream() {
        let (stream, line) = connect_to(b"OK 1073741824\nhello");
        let mut text = String::new();
        stream.unwrap().read_to_string(&mut text).unwrap();
        assert_eq!((line.as_slice(), text.as_str()), (b"CONNECT 52".as_slice(), "hello"));
    }

    #[test]
    fn a_closed_connection_is_a_refused_one() {
        assert_eq!(connect_to(b"").0.unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
    }

    #[test]
    fn an_answer_other_than_ok_is_an_error() {
        assert_eq!(connect_to(b"NO\n").0.unwrap_err().kind(), io::ErrorKind::InvalidData);
        let endless = connect_to(&[b'x'; 100]).0.unwrap_err();
        assert_eq!(endless.kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn silence_ends_in_a_timeout() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vsock");
        let _listener = UnixListener::bind(&path).unwrap();
        let socket = HybridSocket::new(path).timeout(Duration::from_millis(50));
        assert_eq!(socket.connect(52).unwrap_err().kind(), io::ErrorKind::TimedOut);
    }
}
