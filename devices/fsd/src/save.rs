//! From what the guest knows to its saved form: a walk through memory. Only files that are open and
//! have no name any more are read.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use virtiofsd::soft_idmap::Id;

use crate::share::Settings;
use crate::state::gate::{MAX_ORPHAN, MAX_ORPHANS, OPEN_FLAGS};
use crate::state::{Mount, Orphan, SavedHandle, SavedNode, ShareIdentity, State};
use crate::table::{Identity, Init, Node, Place, ROOT, Table};
use crate::tracked::{Core, Inside, Tracked, ourselves};

/// Most bytes that are read at once.
const PIECE: usize = 1 << 20;

impl<F: Core> Tracked<F> {
    /// What has to be kept. Nothing may be in progress.
    pub fn save(&self, share: &ShareIdentity, settings: Settings) -> io::Result<State> {
        let mut inside = self.inside();
        let orphans = self.orphans(&mut inside);
        Ok(state_of(&inside, orphans, share, settings))
    }

    /// What has to be kept of the table alone: files without a name go with this process.
    pub fn save_table(&self, share: &ShareIdentity, settings: Settings) -> State {
        state_of(&self.inside(), Vec::new(), share, settings)
    }

    /// The files that are open and have no name. What cannot be read, or is too large, is left out: it
    /// will be stale.
    fn orphans(&self, inside: &mut Inside) -> Vec<Orphan> {
        let nameless = |node: &Node| node.names.is_empty() && node.kind == libc::S_IFREG;
        let mut found: Vec<(u64, u64)> = inside
            .table
            .nodes()
            .filter(|(id, node)| *id != ROOT && nameless(node) && node.handles > 0)
            .filter_map(|(id, node)| match node.place {
                Place::Held(inner) => Some((id, inner)),
                Place::Cold | Place::Tombstone => None,
            })
            .collect();
        found.sort_unstable();
        let mut left = MAX_ORPHANS;
        let mut orphans = Vec::new();
        for (id, inner) in found {
            if let Ok(Some(orphan)) = self.orphan(id, inner, left.min(MAX_ORPHAN)) {
                left -= orphan.data.iter().map(|(_, data)| data.len() as u64).sum::<u64>();
                orphans.push(orphan);
            }
        }
        orphans
    }

    /// `None`: it has a name that we do not know, or more than `most` bytes.
    fn orphan(&self, id: u64, inner: u64, most: u64) -> io::Result<Option<Orphan>> {
        let (attr, _) = self.core().getattr(ourselves(), inner, None)?;
        if attr.nlink > 0 {
            return Ok(None);
        }
        let (handle, file) = self.descriptor(inner, libc::O_RDONLY)?;
        let data = content(&file, attr.size, most);
        self.close(inner, handle);
        Ok(data?.map(|data| Orphan {
            node: id,
            mode: attr.mode & 0o7777,
            uid: attr.uid.into_inner(),
            gid: attr.gid.into_inner(),
            changed: (attr.mtime, attr.mtimensec),
            size: attr.size,
            data,
        }))
    }
}

fn state_of(
    inside: &Inside,
    orphans: Vec<Orphan>,
    share: &ShareIdentity,
    settings: Settings,
) -> State {
    let Some(mount) = mount_of(&inside.table, orphans) else {
        return State { share: share.clone(), settings, mount: None };
    };
    let Identity { ino, btime } = inside.root.identity;
    State { share: ShareIdentity { ino, btime, ..share.clone() }, settings, mount: Some(mount) }
}

/// The saved form of a table, if something is mounted.
pub(crate) fn mount_of(table: &Table, orphans: Vec<Orphan>) -> Option<Mount> {
    let Init { request, reply } = table.init.clone()?;
    let (next_node, next_handle) = table.next();
    let mut nodes: Vec<_> = table.nodes().collect();
    nodes.sort_unstable_by_key(|(id, _)| *id);
    let nodes = nodes.into_iter().map(|(id, node)| saved_node(id, node)).collect();
    let handles = table.handles().map(|(id, handle)| SavedHandle {
        id,
        node: handle.node,
        directory: handle.directory,
        flags: handle.flags & OPEN_FLAGS,
    });
    let mut handles: Vec<_> = handles.collect();
    handles.sort_unstable_by_key(|handle| handle.id);
    Some(Mount { request, reply, next_node, next_handle, nodes, handles, orphans })
}

fn saved_node(id: u64, node: &Node) -> SavedNode {
    SavedNode {
        id,
        lookups: node.lookups,
        kind: node.kind,
        ino: node.identity.ino,
        btime: node.identity.btime,
        tombstone: node.place == Place::Tombstone,
        names: node.names.clone(),
    }
}

/// Offset and bytes of each.
type Pieces = Vec<(u64, Vec<u8>)>;

/// What of a file is not a hole, if that is not more than `most` bytes.
fn content(file: &File, size: u64, most: u64) -> io::Result<Option<Pieces>> {
    let (mut pieces, mut total, mut at) = (Vec::new(), 0, 0);
    while at < size {
        let Some(start) = seek(file, at, libc::SEEK_DATA)? else { break };
        let end = seek(file, start, libc::SEEK_HOLE)?.unwrap_or(size).min(size);
        let mut from = start;
        while from < end {
            let len = usize::try_from(end - from).unwrap_or(PIECE).min(PIECE);
            total += len as u64;
            if total > most {
                return Ok(None);
            }
            let mut piece = vec![0; len];
            file.read_exact_at(&mut piece, from)?;
            pieces.push((from, piece));
            from += len as u64;
        }
        at = end.max(start + 1);
    }
    Ok(Some(pieces))
}

/// Where the next data or the next hole begins; `None`: there is no more.
fn seek(file: &File, from: u64, whence: i32) -> io::Result<Option<u64>> {
    let from = i64::try_from(from).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: an open descriptor and two numbers.
    let at = unsafe { libc::lseek(file.as_raw_fd(), from, whence) };
    match u64::try_from(at) {
        Ok(at) => Ok(Some(at)),
        Err(_) => match io::Error::last_os_error() {
            error if error.raw_os_error() == Some(libc::ENXIO) => Ok(None),
            error => Err(error),
        },
    }
}
