//! A container's terminal: its pty is in the container, that of the agent is this process's own
//! standard streams, and bytes go between them as they are.

use crate::error::Error;
use nix::cmsg_space;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg};
use nix::sys::termios::{SetArg, cfmakeraw, tcgetattr, tcsetattr};
use std::io::{self, IoSliceMut, Read, Write};
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use std::{fs, thread};

/// At most so many bytes wait, each way.
const BUFFER: usize = 16 << 10;
/// How long output may wait for its reader after the program has ended.
const PATIENCE: Duration = Duration::from_secs(10);

/// Switches this process's terminal, if it has one, to passing on all bytes.
pub fn make_raw() {
    let stdin = io::stdin();
    if let Ok(mut settings) = tcgetattr(&stdin) {
        cfmakeraw(&mut settings);
        let _ = tcsetattr(&stdin, SetArg::TCSANOW, &settings);
    }
}

/// The size of this process's terminal, rows and columns, if it has one with a size.
pub fn size() -> Option<(u16, u16)> {
    let mut size = libc::winsize { ws_row: 0, ws_col: 0, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: the kernel only writes the structure.
    let got = unsafe { libc::ioctl(0, libc::TIOCGWINSZ, &raw mut size) };
    (got == 0 && size.ws_row > 0 && size.ws_col > 0).then_some((size.ws_row, size.ws_col))
}

/// Where libcontainer sends the master of the pty that it makes. The path is short, whatever the
/// ids are, since that of a socket must be.
pub struct ConsoleSocket {
    listener: UnixListener,
    path: PathBuf,
}

impl ConsoleSocket {
    /// A new one, this process's.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn new() -> Result<Self, Error> {
        let path = Path::new(crate::record::ROOT).join(format!(",console-{}", std::process::id()));
        let _ = fs::remove_file(&path);
        let listener = UnixListener::bind(&path).map_err(Error::file("listen on", &path))?;
        Ok(Self { listener, path })
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Takes the master, which has been sent.
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn take_master(self) -> Result<OwnedFd, Error> {
        let take = || -> io::Result<OwnedFd> {
            let (connection, _) = self.listener.accept()?;
            let mut name = [0; 64];
            let mut space = cmsg_space!([RawFd; 1]);
            let mut buffers = [IoSliceMut::new(&mut name)];
            let fd = connection.as_raw_fd();
            let flags = MsgFlags::MSG_CMSG_CLOEXEC;
            let message = recvmsg::<()>(fd, &mut buffers, Some(&mut space), flags)?;
            let received = message.cmsgs()?.find_map(|message| match message {
                ControlMessageOwned::ScmRights(fds) => fds.first().copied(),
                _ => None,
            });
            let fd = received.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))?;
            // SAFETY: the kernel has just made it for this process.
            Ok(unsafe { OwnedFd::from_raw_fd(fd) })
        };
        take().map_err(Error::system("take over the terminal"))
    }
}

impl Drop for ConsoleSocket {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// One direction.
#[derive(Default)]
struct Way {
    waiting: Vec<u8>,
    closed: bool,
}

impl Way {
    fn wants_more(&self) -> bool {
        !self.closed && self.waiting.is_empty()
    }

    fn fill(&mut self, source: &mut impl Read) {
        let mut bytes = [0; BUFFER];
        match source.read(&mut bytes) {
            Ok(0) => self.closed = true,
            Ok(count) => self.waiting.extend_from_slice(&bytes[..count]),
            Err(error) if is_for_later(&error) => {}
            // A terminal without its other side.
            Err(_) => self.closed = true,
        }
    }

    fn drain(&mut self, target: &mut impl Write) {
        match target.write(&self.waiting) {
            Ok(count) => drop(self.waiting.drain(..count)),
            Err(error) if is_for_later(&error) => {}
            Err(_) => {
                self.waiting.clear();
                self.closed = true;
            }
        }
    }
}

fn is_for_later(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// Between the program's terminal and this process's streams.
pub struct Pump {
    master: fs::File,
    input: ManuallyDrop<fs::File>,
    output: ManuallyDrop<fs::File>,
    to_program: Way,
    from_program: Way,
}

impl Pump {
    /// Between the master of a pty and the standard streams.
    ///
    /// # Errors
    /// The kernel's.
    pub fn new(master: OwnedFd) -> io::Result<Self> {
        // SAFETY: the standard streams are open as long as this process lives, and are not closed
        // by who does not drop them.
        let stream = |fd| ManuallyDrop::new(unsafe { fs::File::from_raw_fd(fd) });
        let (input, output) = (stream(0), stream(1));
        for fd in [master.as_raw_fd(), 0, 1] {
            // SAFETY: they are open.
            let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
            let flags = OFlag::from_bits_retain(fcntl(fd, FcntlArg::F_GETFL)?);
            fcntl(fd, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
        }
        let (to_program, from_program) = (Way::default(), Way::default());
        let pump = Self { master: master.into(), input, output, to_program, from_program };
        pump.resize();
        Ok(pump)
    }

    /// Gives the program's terminal the size of this process's.
    pub fn resize(&self) {
        let Some((rows, cols)) = size() else { return };
        let size = libc::winsize { ws_row: rows, ws_col: cols, ws_xpixel: 0, ws_ypixel: 0 };
        // SAFETY: the kernel only reads the structure.
        unsafe { libc::ioctl(self.master.as_raw_fd(), libc::TIOCSWINSZ, &raw const size) };
    }

    /// What to wait for: of the input, the program's terminal, and the output.
    pub fn wishes(&self) -> [libc::pollfd; 3] {
        let wish = |fd: RawFd, input: bool, output: bool| libc::pollfd {
            // One that is closed would wake who waits without an end.
            fd: if input || output { fd } else { -1 },
            events: if input { libc::POLLIN } else { 0 } | if output { libc::POLLOUT } else { 0 },
            revents: 0,
        };
        let (to, from) = (&self.to_program, &self.from_program);
        [
            wish(self.input.as_raw_fd(), to.wants_more() && !from.closed, false),
            wish(self.master.as_raw_fd(), from.wants_more(), !to.waiting.is_empty()),
            wish(self.output.as_raw_fd(), false, !from.waiting.is_empty()),
        ]
    }

    /// Moves what can be moved, after a wait for [`Pump::wishes`].
    pub fn turn(&mut self, polled: &[libc::pollfd]) {
        let ready = |at: usize| polled.get(at).is_some_and(|polled| polled.revents != 0);
        if ready(0) {
            self.to_program.fill(&mut *self.input);
        }
        if ready(1) && self.from_program.wants_more() {
            self.from_program.fill(&mut self.master);
        }
        if !self.to_program.waiting.is_empty() {
            self.to_program.drain(&mut self.master);
        }
        if !self.from_program.waiting.is_empty() {
            self.from_program.drain(&mut *self.output);
        }
    }

    /// Moves what the program has left behind.
    pub fn finish(&mut self) {
        let mut deadline = Instant::now() + PATIENCE;
        loop {
            let before = self.from_program.waiting.len();
            if self.from_program.wants_more() {
                self.from_program.fill(&mut self.master);
            }
            if self.from_program.waiting.is_empty() || Instant::now() > deadline {
                return;
            }
            self.from_program.drain(&mut *self.output);
            if self.from_program.waiting.len() == before {
                thread::sleep(Duration::from_millis(2));
            } else {
                deadline = Instant::now() + PATIENCE;
            }
        }
    }
}
