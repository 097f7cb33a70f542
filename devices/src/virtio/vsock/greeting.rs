//! The words that a host program and the device exchange before data flows.
//!
//! The program writes `CONNECT <port>\n`, and reads `OK <host port>\n` once the guest has accepted;
//! everything else ends the connection, and so does a refusal.

use std::io;
use std::os::unix::net::UnixStream;

use super::handle::Reply;
use super::stream;

/// Bytes of a request at most; `CONNECT 4294967295\r\n` has 20.
const MAX_LINE: usize = 32;

/// What a program has said so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Said {
    /// It wants this port of the guest.
    Port(u32),
    /// Nothing complete yet.
    Unfinished,
    /// Nothing that makes sense, or it went away.
    Nonsense,
}

/// A program whose request is not complete.
pub struct Greeting {
    /// Its connection, not blocking.
    pub socket: UnixStream,
    line: [u8; MAX_LINE],
    len: usize,
}

impl Greeting {
    /// Listens to a program that has just come.
    pub fn new(socket: UnixStream) -> Self {
        Self { socket, line: [0; MAX_LINE], len: 0 }
    }

    /// Reads on. What follows the line stays in the socket, since it is the guest's.
    pub fn listen(&mut self) -> Said {
        let rest = self.line.get_mut(self.len..).unwrap_or_default();
        let seen = match stream::receive(&self.socket, rest, true) {
            Ok(0) => return Said::Nonsense,
            Ok(seen) => seen,
            Err(error) if stream::is_transient(&error) => return Said::Unfinished,
            Err(_) => return Said::Nonsense,
        };
        let end = rest.iter().take(seen).position(|&byte| byte == b'\n');
        // The bytes that were seen are taken now, up to the end of the line and no further.
        let take = end.map_or(seen, |end| end + 1);
        let taken = stream::receive(&self.socket, rest.get_mut(..take).unwrap_or_default(), false);
        if !matches!(taken, Ok(taken) if taken == take) {
            return Said::Nonsense;
        }
        self.len += take;
        match end {
            Some(_) => self.line.get(..self.len).and_then(parse).map_or(Said::Nonsense, Said::Port),
            None if self.len == MAX_LINE => Said::Nonsense,
            None => Said::Unfinished,
        }
    }
}

/// The port of a request line.
fn parse(line: &[u8]) -> Option<u32> {
    let line = line.strip_suffix(b"\n")?;
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    let (word, port) = std::str::from_utf8(line).ok()?.split_once(' ')?;
    let digits = !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
    if digits && word.eq_ignore_ascii_case("connect") { port.parse().ok() } else { None }
}

/// Who waits for the guest to accept.
pub enum Answer {
    /// A program, for its `OK` line.
    Line,
    /// A user of the handle.
    Reply(Reply),
}

impl Answer {
    /// Tells that the guest has accepted. Fails if nobody is there to hear it.
    pub fn accepted(self, socket: &UnixStream, host_port: u32) -> io::Result<()> {
        match self {
            Answer::Reply(reply) => {
                reply.send(Ok(()));
                Ok(())
            }
            Answer::Line => {
                let line = format!("OK {host_port}\n");
                // Nothing was sent on this socket before: the line fits, or the program is gone.
                let sent = stream::send(socket, [line.as_bytes(), &[]])?;
                if sent == line.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
            }
        }
    }

    /// Tells that there will be no connection. A program learns it from the end of its own.
    pub fn refused(self, kind: io::ErrorKind) {
        if let Answer::Reply(reply) = self {
            reply.send(Err(kind.into()));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::*;

    fn greeting() -> (UnixStream, Greeting) {
        let (program, device) = UnixStream::pair().unwrap();
        (program, Greeting::new(device))
    }

    #[test]
    fn requests_are_understood() {
        for (line, port) in [
            ("CONNECT 0\n", 0),
            ("CONNECT 1024\n", 1024),
            ("connect 52\r\n", 52),
            ("CONNECT 4294967295\n", u32::MAX),
        ] {
            let (mut program, mut greeting) = greeting();
            program.write_all(line.as_bytes()).unwrap();
            assert_eq!(greeting.listen(), Said::Port(port), "{line:?}");
        }
    }

    #[test]
    fn h43_nonsense_is_refused() {
        for line in [
            "\n",
            "CONNECT\n",
            "CONNECT \n",
            "CONNECT +5\n",
            "CONNECT -5\n",
            "CONNECT 5 \n",
            "CONNECT  5\n",
            "CONNECT 4294967296\n",
            "CONNECT 0x10\n",
            "GET / HTTP/1.1\r\n",
            "\u{0}\u{0}\n",
            "CONNECT 00000000000000000000000000000005\n",
        ] {
            let (mut program, mut greeting) = greeting();
            program.write_all(line.as_bytes()).unwrap();
            assert_eq!(greeting.listen(), Said::Nonsense, "{line:?}");
        }
        let (mut program, mut greeting) = greeting();
        program.write_all(b"CONNECT \xff\xfe\n").unwrap();
        assert_eq!(greeting.listen(), Said::Nonsense);
    }

    #[test]
    fn a_request_may_come_byte_by_byte_and_what_follows_is_left() {
        let (mut program, mut greeting) = greeting();
        greeting.socket.set_nonblocking(true).unwrap();
        for &byte in b"CONNECT 7" {
            assert_eq!(greeting.listen(), Said::Unfinished);
            program.write_all(&[byte]).unwrap();
        }
        assert_eq!(greeting.listen(), Said::Unfinished);
        program.write_all(b"\nhello").unwrap();
        assert_eq!(greeting.listen(), Said::Port(7));
        let mut rest = [0; 5];
        greeting.socket.set_nonblocking(false).unwrap();
        greeting.socket.read_exact(&mut rest).unwrap();
        assert_eq!(&rest, b"hello");
    }

    #[test]
    fn h43_a_line_without_end_is_cut_off() {
        let (mut program, mut greeting) = greeting();
        program.write_all(&[b'a'; 4096]).unwrap();
        assert_eq!(greeting.listen(), Said::Nonsense);
    }

    #[test]
    fn h43_a_program_that_leaves_is_noticed() {
        let (mut program, mut greeting) = greeting();
        program.write_all(b"CONN").unwrap();
        drop(program);
        assert_eq!(greeting.listen(), Said::Unfinished);
        assert_eq!(greeting.listen(), Said::Nonsense);
    }

    #[test]
    fn fuzz_vsock_greeting() {
        let corpus: [&[u8]; 3] = [b"CONNECT 1024\n", b"connect 4294967295\r\n", b"CONNECT \xff\n"];
        let corpus = corpus.map(<[u8]>::to_vec);
        crate::testing::fuzz("vsock greeting", &corpus, |input| match parse(input) {
            Some(port) => {
                let text = String::from_utf8_lossy(input).to_lowercase();
                let words: Vec<&str> = text.trim_end().split(' ').collect();
                assert_eq!((words.len(), words[0]), (2, "connect"));
                assert_eq!(words[1].trim_start_matches('0').parse::<u32>().unwrap_or(0), port);
                1000 + input.len().min(40)
            }
            None => input.len().min(40),
        });
    }
}
