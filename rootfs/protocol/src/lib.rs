//! What the host and `cube-agent`, PID 1 of the guest, say to each other.
//!
//! The crate knows no vsock: whoever uses it brings a [`Connect`], which opens a byte stream to a
//! port of the guest. The VMM has one in-process; [`HybridSocket`] is the one for its unix socket.
//!
//! ```no_run
//! use guest_protocol::{HybridSocket, Session, Spawn, Stdio};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let guest = HybridSocket::new("/run/vm/vsock.sock");
//! let spawn = Spawn::new(["/bin/echo", "hello"]).kill_on_disconnect(true);
//! let session = Session::start(guest, spawn, Stdio::inherit()?)?;
//! let remote = session.remote(); // signals and resizes, from any thread
//! let status = session.wait()?; // after all output has been written
//! std::process::exit(status.to_exit_code().into());
//! # }
//! ```
//!
//! | layer | items |
//! |---|---|
//! | a command with its stdio, pumped | [`Session`], [`Stdio`], [`Remote`] |
//! | single requests | [`Client`], one method for each [`Request`] |
//! | the words | [`Request`], [`Response`], [`Spawn`], [`ExitStatus`], [`Hello`], [`Info`] |
//! | bytes | [`frame`]: u32 little-endian length, then JSON |
//! | how to get there | [`Connect`], [`HybridSocket`] |
//!
//! An [`Error`] knows the [exit code](Error::exit_code) that a CLI should end with: 127 for a
//! command that was not found, 126 for one that cannot be executed, 125 for the rest.

mod client;
mod connect;
pub mod frame;
mod message;
mod pump;
mod session;

pub use client::{Client, Error};
pub use connect::{Connect, HybridSocket};
pub use frame::FrameError;
pub use message::{
    Address, Configure, ErrorKind, ExitStatus, Hello, Info, Interface, Neighbour, PowerOff,
    ProcessId, Renew, Request, Response, Spawn, Spawned, Stream, WindowSize,
};
pub use session::{Remote, Session, Stdio};

/// The version of this protocol, carried in [`Hello`] and [`Info`]. It grows only when an old peer
/// would misunderstand; a new field or request does not count, both sides tolerate those.
pub const PROTOCOL_VERSION: u32 = 1;

/// The vsock port that the agent listens on.
pub const AGENT_PORT: u32 = 1024;

/// The port of the host (CID 2) that the agent connects to once, when it is ready to serve, to
/// send one [`Hello`].
pub const READY_PORT: u32 = 1025;

/// No frame is longer than this, its header aside: enough for the largest argv and environment
/// that Linux takes by default.
pub const MAX_FRAME: usize = 4 << 20;

/// A [`Hello`] is shorter than this. The VMM reads it from an untrusted guest.
pub const MAX_HELLO: usize = 16 << 10;

/// The I/O port that takes boot stamps, one byte each, see [`boot_stamp`].
pub const DEBUG_PORT: u16 = 0xD4;

/// What the guest writes to [`DEBUG_PORT`], in this order.
pub mod boot_stamp {
    /// The first instruction of PID 1.
    pub const USERSPACE: u8 = 0x60;
    /// The agent listens on [`AGENT_PORT`](crate::AGENT_PORT).
    pub const AGENT_READY: u8 = 0x70;
    /// The first command has been started.
    pub const COMMAND_STARTED: u8 = 0x80;
}
