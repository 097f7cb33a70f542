//! The saved form of a share, version 2. Version 1 had no maps of ids.
//!
//! ```text
//! "CUBEVFS\0" | version u32 | payload length u64 | payload | SHA-256 of all before it
//! ```
//!
//! Numbers are little-endian; the payload is [`State`] in postcard. It is self-contained: nothing of
//! the library's is in it. The checksum tells damage, not forgery: what it says is not trusted, and goes
//! through [`gate`] before any of it becomes a system call.

pub mod gate;
mod name_list;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::names::Name;
use crate::share::{Cache, Settings};

const MAGIC: &[u8; 8] = b"CUBEVFS\0";
const VERSION: u32 = 2;
/// The oldest one that can be read.
const FIRST: u32 = 1;
const HEAD: usize = 8 + 4 + 8;
const SUM: usize = 32;

/// Most bytes of a state.
pub const MAX_BYTES: usize = 64 << 20;
/// Most nodes.
pub const MAX_NODES: usize = 4 << 20;
/// Most handles.
pub const MAX_HANDLES: usize = 1 << 20;
/// Most names of one file, and most directories above one.
pub const MAX_DEPTH: usize = 65_536;

/// All that is needed to go on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// Which directory this was.
    pub share: ShareIdentity,
    /// What the guest has been told that it can do.
    pub settings: Settings,
    /// The mount; without it there is nothing else.
    pub mount: Option<Mount>,
}

/// What version 1 had of it.
#[derive(Debug, Serialize, Deserialize)]
struct StateV1 {
    share: ShareIdentity,
    settings: SettingsV1,
    mount: Option<Mount>,
}

#[derive(Debug, Serialize, Deserialize)]
struct SettingsV1 {
    read_only: bool,
    cache: Cache,
    writeback: bool,
    xattr: bool,
    acl: bool,
}

impl From<StateV1> for State {
    fn from(StateV1 { share, settings, mount }: StateV1) -> Self {
        let SettingsV1 { read_only, cache, writeback, xattr, acl } = settings;
        let settings = Settings { read_only, cache, writeback, xattr, acl, ..Settings::default() };
        Self { share, settings, mount }
    }
}

/// Which directory a share is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShareIdentity {
    /// The name under which the guest mounts it.
    pub tag: String,
    /// Where it was on the host. For people only.
    pub path: String,
    /// The inode's number.
    pub ino: u64,
    /// When it was made; see [`crate::table::Identity`].
    pub btime: u64,
    /// The file system's own number; 0 where it has none.
    pub fsid: u64,
}

/// A mount of the guest's.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mount {
    /// Its FUSE_INIT.
    pub request: Vec<u8>,
    /// The answer.
    pub reply: Vec<u8>,
    /// The number of the next node.
    pub next_node: u64,
    /// The number of the next handle.
    pub next_handle: u64,
    /// All nodes, by number.
    pub nodes: Vec<SavedNode>,
    /// All handles, by number.
    pub handles: Vec<SavedHandle>,
    /// The content of files without a name.
    pub orphans: Vec<Orphan>,
}

/// See [`crate::table::Node`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedNode {
    /// Its number.
    pub id: u64,
    /// The guest's lookups.
    pub lookups: u64,
    /// `S_IFMT` of its mode.
    pub kind: u32,
    /// The inode's number.
    pub ino: u64,
    /// When it was made.
    pub btime: u64,
    /// It was gone by then.
    pub tombstone: bool,
    /// Parent and component.
    #[serde(with = "name_list")]
    pub names: Vec<(u64, Name)>,
}

/// See [`crate::table::Handle`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedHandle {
    /// Its number.
    pub id: u64,
    /// Of which node.
    pub node: u64,
    /// Opened as a directory.
    pub directory: bool,
    /// Those of its flags that are used to open it again.
    pub flags: u32,
}

/// A regular file that is open and has no name any more.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Orphan {
    /// The node.
    pub node: u64,
    /// Permissions.
    pub mode: u32,
    /// Owner, as the guest sees it.
    pub uid: u32,
    /// Group, as the guest sees it.
    pub gid: u32,
    /// Seconds and nanoseconds of its last change. That of the last access is the save's.
    pub changed: (u64, u32),
    /// Its length.
    pub size: u64,
    /// What is not a hole: offset and bytes.
    pub data: Vec<(u64, Vec<u8>)>,
}

/// Why bytes are no state.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "each says what it is")]
pub enum StateError {
    #[error("it has {0} bytes, which is too few for a state of a share")]
    Short(usize),
    #[error("it has {0} bytes, and the most is {MAX_BYTES}")]
    Long(usize),
    #[error("it is not a state of a share")]
    Magic,
    #[error(
        "it has version {0} of the format, and this release reads versions {FIRST} to {VERSION}"
    )]
    Version(u32),
    #[error("it says that it has {said} bytes, and has {has}")]
    Length { said: u64, has: usize },
    #[error("it does not have its checksum; it is damaged")]
    Damaged,
    #[error("it cannot be encoded or decoded: {0}")]
    Form(#[from] postcard::Error),
    #[error(transparent)]
    Gate(#[from] gate::GateError),
}

impl State {
    /// The bytes of the saved form.
    pub fn to_bytes(&self) -> Result<Vec<u8>, StateError> {
        let mut bytes = Vec::with_capacity(HEAD + SUM);
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&[0; 8]);
        let mut bytes = postcard::to_extend(self, bytes)?;
        let payload = (bytes.len() - HEAD) as u64;
        if let Some(length) = bytes.get_mut(HEAD - 8..HEAD) {
            length.copy_from_slice(&payload.to_le_bytes());
        }
        let sum = Sha256::digest(&bytes);
        bytes.extend_from_slice(&sum);
        match bytes.len() {
            len if len > MAX_BYTES => Err(StateError::Long(len)),
            _ => Ok(bytes),
        }
    }

    /// Reads bytes that nobody vouches for, and lets them through the gate.
    pub fn parse(bytes: &[u8]) -> Result<Self, StateError> {
        let len = bytes.len();
        if len > MAX_BYTES {
            return Err(StateError::Long(len));
        }
        let short = || StateError::Short(len);
        let (head, rest) = bytes.split_at_checked(HEAD).ok_or_else(short)?;
        let (magic, numbers) = head.split_at_checked(MAGIC.len()).ok_or_else(short)?;
        if magic != MAGIC {
            return Err(StateError::Magic);
        }
        let (version, said) = numbers.split_first_chunk().ok_or_else(short)?;
        let version = u32::from_le_bytes(*version);
        if !(FIRST..=VERSION).contains(&version) {
            return Err(StateError::Version(version));
        }
        let said = u64::from_le_bytes(*said.first_chunk().ok_or_else(short)?);
        let has = rest.len().checked_sub(SUM).ok_or_else(short)?;
        if said != has as u64 {
            return Err(StateError::Length { said, has });
        }
        let (summed, sum) = bytes.split_at_checked(HEAD + has).ok_or_else(short)?;
        if Sha256::digest(summed).as_slice() != sum {
            return Err(StateError::Damaged);
        }
        let payload = rest.get(..has).unwrap_or_default();
        let (state, left): (Self, _) = match version {
            FIRST => {
                let (state, left) = postcard::take_from_bytes::<StateV1>(payload)?;
                (state.into(), left)
            }
            _ => postcard::take_from_bytes(payload)?,
        };
        gate::check(&state, left.len())?;
        Ok(state)
    }

    /// The same, if the gate lets it through.
    pub fn checked(self) -> Result<Self, StateError> {
        gate::check(&self, 0)?;
        Ok(self)
    }
}

#[cfg(test)]
pub(crate) mod tests;
