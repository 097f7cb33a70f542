//! What a state may say, checked before any of it is used.
//!
//! Whoever writes a snapshot could otherwise name files outside of the share, have files cut off by
//! their opening, or make us loop. After this, names are single components, every parent is a directory
//! that is there, following parents comes to an end, and handles are opened with flags that change
//! nothing.

use foldhash::{HashMap, HashMapExt as _, HashSet, HashSetExt as _};

use super::{MAX_DEPTH, MAX_HANDLES, MAX_NODES, Mount, Orphan, SavedHandle, SavedNode, State};
use crate::names::{is_legal, shown};
use crate::table::ROOT;

/// Flags that a handle may be opened with again. None makes, cuts off or positions anything.
pub const OPEN_FLAGS: u32 = (libc::O_ACCMODE
    | libc::O_NONBLOCK
    | libc::O_DIRECT
    | libc::O_DIRECTORY
    | libc::O_NOFOLLOW
    | libc::O_NOATIME
    | libc::O_SYNC
    | libc::O_DSYNC
    | libc::O_LARGEFILE) as u32
    // What a 64-bit kernel calls O_LARGEFILE, and the C library does not.
    | 0o100_000;

/// Most bytes of one orphan's content.
pub const MAX_ORPHAN: u64 = 16 << 20;
/// Most bytes of the content of all orphans.
pub const MAX_ORPHANS: u64 = 32 << 20;

const MAX_LOOKUPS: u64 = 1 << 56;
const MAX_MESSAGE: usize = 4096;

/// The kind of each node.
type Kinds = HashMap<u64, u32>;

/// What is wrong with a state.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "each says what it is")]
pub enum GateError {
    #[error("{0} bytes follow its end")]
    Trailing(usize),
    #[error("its tag {0:?} is not usable")]
    Tag(String),
    #[error("it has {count} {what}, and the most is {max}")]
    Count { what: &'static str, count: usize, max: usize },
    #[error("its FUSE_INIT or the answer is not one")]
    Init,
    #[error("it has no root")]
    NoRoot,
    #[error("its root {0}")]
    Root(&'static str),
    #[error("node {0} is there twice, or out of order")]
    NodeOrder(u64),
    #[error("node {id} is not below the next number {next}")]
    NodeNumber { id: u64, next: u64 },
    #[error("node {0} is referred to by nothing")]
    Unneeded(u64),
    #[error("node {id} was looked up {lookups} times")]
    Lookups { id: u64, lookups: u64 },
    #[error("node {id} is of the kind {kind:#o}, which does not exist")]
    Kind { id: u64, kind: u32 },
    #[error("node {id} has the name {name:?}, which is no single component")]
    Name { id: u64, name: String },
    #[error("directory {0} has more than one name")]
    DirectoryNames(u64),
    #[error("node {id} is in {parent}, which is no directory that is there")]
    Parent { id: u64, parent: u64 },
    #[error("{name:?} in node {parent} is there twice")]
    SameName { parent: u64, name: String },
    #[error("node {0} is within itself, or too deep")]
    Loop(u64),
    #[error("handle {0} is there twice, or out of order")]
    HandleOrder(u64),
    #[error("handle {id} is not below the next number {next}")]
    HandleNumber { id: u64, next: u64 },
    #[error("handle {id} is of node {node}, which does not have the right kind")]
    HandleNode { id: u64, node: u64 },
    #[error("handle {id} has the flags {flags:#o}, of which some are not allowed")]
    Flags { id: u64, flags: u32 },
    #[error("handle {0} is for writing, on a share that is read-only")]
    ReadOnly(u64),
    #[error("orphan {0} is not a regular file without a name")]
    Orphan(u64),
    #[error("orphan {0} has pieces that overlap, or go beyond its end or the limit")]
    OrphanData(u64),
}

/// Checks all of it; `trailing` bytes came behind it.
pub fn check(state: &State, trailing: usize) -> Result<(), GateError> {
    if trailing != 0 {
        return Err(GateError::Trailing(trailing));
    }
    let tag = &state.share.tag;
    if tag.is_empty() || tag.len() > crate::share::MAX_TAG || tag.contains('\0') {
        return Err(GateError::Tag(tag.clone()));
    }
    match &state.mount {
        Some(mount) => check_mount(mount, state.settings.read_only),
        None => Ok(()),
    }
}

fn check_mount(mount: &Mount, read_only: bool) -> Result<(), GateError> {
    at_most("nodes", mount.nodes.len(), MAX_NODES)?;
    at_most("handles", mount.handles.len(), MAX_HANDLES)?;
    at_most("orphans", mount.orphans.len(), mount.nodes.len())?;
    let init = |message: &[u8]| (56..=MAX_MESSAGE).contains(&message.len());
    let opcode = mount.request.get(4..8) == Some(&crate::service::INIT.to_le_bytes());
    if !init(&mount.request) || !init(&mount.reply) || !opcode {
        return Err(GateError::Init);
    }
    check_nodes(mount)?;
    let mut kinds = Kinds::with_capacity(mount.nodes.len());
    kinds.extend(mount.nodes.iter().map(|node| (node.id, node.kind)));
    check_names(mount, &kinds)?;
    check_order(mount)?;
    check_handles(mount, &kinds, read_only)?;
    check_orphans(mount)
}

fn at_most(what: &'static str, count: usize, max: usize) -> Result<(), GateError> {
    if count > max { Err(GateError::Count { what, count, max }) } else { Ok(()) }
}

fn is_kind(kind: u32) -> bool {
    [
        libc::S_IFREG,
        libc::S_IFDIR,
        libc::S_IFLNK,
        libc::S_IFIFO,
        libc::S_IFSOCK,
        libc::S_IFCHR,
        libc::S_IFBLK,
    ]
    .contains(&kind)
}

fn check_nodes(mount: &Mount) -> Result<(), GateError> {
    let root = mount.nodes.first().filter(|node| node.id == ROOT).ok_or(GateError::NoRoot)?;
    if root.tombstone || !root.names.is_empty() {
        return Err(GateError::Root("is a tombstone or has a name"));
    }
    if root.lookups == 0 || root.kind != libc::S_IFDIR {
        return Err(GateError::Root("is not looked up, or no directory"));
    }
    let mut before = 0;
    for node in &mount.nodes {
        let id = node.id;
        if id <= before {
            return Err(GateError::NodeOrder(id));
        }
        before = id;
        if id >= mount.next_node {
            return Err(GateError::NodeNumber { id, next: mount.next_node });
        }
        if node.lookups >= MAX_LOOKUPS {
            return Err(GateError::Lookups { id, lookups: node.lookups });
        }
        if !is_kind(node.kind) {
            return Err(GateError::Kind { id, kind: node.kind });
        }
    }
    Ok(())
}

fn check_names(mount: &Mount, kinds: &Kinds) -> Result<(), GateError> {
    let mut seen = HashSet::with_capacity(mount.nodes.len());
    for node in &mount.nodes {
        at_most("names of one file", node.names.len(), MAX_DEPTH)?;
        if node.kind == libc::S_IFDIR && node.names.len() > 1 {
            return Err(GateError::DirectoryNames(node.id));
        }
        for (parent, name) in &node.names {
            if !is_legal(name) {
                return Err(GateError::Name { id: node.id, name: shown(name) });
            }
            if kinds.get(parent) != Some(&libc::S_IFDIR) {
                return Err(GateError::Parent { id: node.id, parent: *parent });
            }
            if !seen.insert((*parent, &**name)) {
                return Err(GateError::SameName { parent: *parent, name: shown(name) });
            }
        }
    }
    Ok(())
}

/// From every node the first names lead to one that has none, in so many steps at most.
fn check_order(mount: &Mount) -> Result<(), GateError> {
    let parents: HashMap<u64, u64> = mount
        .nodes
        .iter()
        .filter(|node| node.kind == libc::S_IFDIR)
        .filter_map(|node| Some((node.id, node.names.first()?.0)))
        .collect();
    // How deep each directory is that was looked at.
    let mut depths: HashMap<u64, usize> = HashMap::new();
    let mut way = Vec::new();
    for &start in parents.keys() {
        let mut at = start;
        way.clear();
        let mut depth = loop {
            if let Some(&known) = depths.get(&at) {
                break known;
            }
            way.push(at);
            match parents.get(&at) {
                _ if way.len() > MAX_DEPTH => return Err(GateError::Loop(start)),
                Some(&parent) => at = parent,
                None => break 0,
            }
        };
        for &passed in way.iter().rev() {
            depth += 1;
            if depth > MAX_DEPTH {
                return Err(GateError::Loop(start));
            }
            depths.insert(passed, depth);
        }
    }
    Ok(())
}

fn check_handles(mount: &Mount, kinds: &Kinds, read_only: bool) -> Result<(), GateError> {
    let mut before = None;
    for &SavedHandle { id, node, directory, flags } in &mount.handles {
        if before.is_some_and(|before| id <= before) {
            return Err(GateError::HandleOrder(id));
        }
        before = Some(id);
        if id >= mount.next_handle {
            return Err(GateError::HandleNumber { id, next: mount.next_handle });
        }
        let kind = if directory { libc::S_IFDIR } else { libc::S_IFREG };
        if kinds.get(&node) != Some(&kind) {
            return Err(GateError::HandleNode { id, node });
        }
        let mode = flags & libc::O_ACCMODE as u32;
        // Linux knows a fourth mode, which can be opened, and neither read nor written.
        if flags & !OPEN_FLAGS != 0 {
            return Err(GateError::Flags { id, flags });
        }
        if read_only && mode != libc::O_RDONLY as u32 {
            return Err(GateError::ReadOnly(id));
        }
    }
    check_needed(mount)
}

/// Each node has a reason to be there.
fn check_needed(mount: &Mount) -> Result<(), GateError> {
    let parents = mount.nodes.iter().flat_map(|node| node.names.iter().map(|(parent, _)| *parent));
    let needed: HashSet<u64> = parents.chain(mount.handles.iter().map(|one| one.node)).collect();
    let idle = |node: &&SavedNode| node.lookups == 0 && !needed.contains(&node.id);
    match mount.nodes.iter().find(idle) {
        Some(node) => Err(GateError::Unneeded(node.id)),
        None => Ok(()),
    }
}

fn check_orphans(mount: &Mount) -> Result<(), GateError> {
    let nodes = &mount.nodes;
    let mut seen = HashSet::new();
    let mut all = 0_u64;
    for orphan in &mount.orphans {
        let fits = |node: &&SavedNode| {
            node.kind == libc::S_IFREG && node.names.is_empty() && !node.tombstone
        };
        // They are in order by now.
        let at = nodes.binary_search_by_key(&orphan.node, |node| node.id);
        let node = at.ok().and_then(|at| nodes.get(at));
        if node.filter(fits).is_none() || !seen.insert(orphan.node) {
            return Err(GateError::Orphan(orphan.node));
        }
        all = all.saturating_add(content(orphan)?);
        if all > MAX_ORPHANS {
            return Err(GateError::OrphanData(orphan.node));
        }
    }
    Ok(())
}

/// Bytes of an orphan's content, whose pieces are in order.
fn content(orphan: &Orphan) -> Result<u64, GateError> {
    let wrong = || GateError::OrphanData(orphan.node);
    let (mut end, mut bytes) = (0_u64, 0_u64);
    for (offset, data) in &orphan.data {
        if *offset < end || data.is_empty() {
            return Err(wrong());
        }
        bytes += data.len() as u64;
        end = offset.checked_add(data.len() as u64).ok_or_else(wrong)?;
    }
    if end > orphan.size || bytes > MAX_ORPHAN || orphan.size > i64::MAX as u64 {
        return Err(wrong());
    }
    Ok(bytes)
}
