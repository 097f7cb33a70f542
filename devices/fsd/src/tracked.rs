//! The library's file system, with numbers of ours in front of it.
//!
//! [`Tracked`] is what the FUSE server talks to. It checks names, translates node and handle numbers,
//! keeps the [`Table`], and answers ESTALE for tombstones. Of each node that is held the library counts
//! exactly one lookup, ours: how often the guest has looked is counted in the table.
//!
//! It is meant for one thread. The lock is there because the trait asks for it.

mod cold;
pub mod lend;
mod operations;

use std::collections::BTreeMap;
use std::ffi::{CStr, CString};
use std::fs::File;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use virtiofsd::filesystem::{Context, Entry, FileSystem};
use virtiofsd::read_dir::ReadDir;
use virtiofsd::soft_idmap::{GuestGid, GuestUid};

use self::lend::Lender;
use crate::identity::{Descriptor, Seen, look};
use crate::names;
use crate::restore::Stale;
use crate::state::Orphan;
use crate::table::{Identity, Node, Place, ROOT, Table};

/// What can be tracked: the library's file system and its read-only variant.
pub trait Core:
    FileSystem<Inode = u64, Handle = u64, DirIter = ReadDir<Vec<u8>>> + Send + Sync
{
}

impl<F> Core for F where
    F: FileSystem<Inode = u64, Handle = u64, DirIter = ReadDir<Vec<u8>>> + Send + Sync
{
}

/// A file system whose nodes and handles can be saved. Clones are the same one.
pub struct Tracked<F> {
    shared: Arc<Shared<F>>,
}

struct Shared<F> {
    core: F,
    inside: Mutex<Inside>,
}

/// What changes.
pub(crate) struct Inside {
    pub table: Table,
    /// Nodes that the guest has and nobody on the host can name, as far as they were saved.
    pub orphans: BTreeMap<u64, Orphan>,
    /// The directory that was asked about last: its node, the library's handle, its descriptor.
    directory: Option<(u64, u64, File)>,
    /// The share itself, as it was when the guest mounted it.
    pub root: Seen,
    /// Most descriptors that nodes and handles may take.
    most: usize,
    /// Cold nodes that have to be looked up for the sake of the report.
    unverified: Vec<u64>,
    /// What was found to be stale since it was last taken.
    stale: Vec<Stale>,
    /// To whom files are lent.
    lender: Option<Lender>,
}

impl Default for Inside {
    fn default() -> Self {
        Self {
            table: Table::default(),
            orphans: BTreeMap::new(),
            directory: None,
            root: Seen::default(),
            most: usize::MAX,
            unverified: Vec::new(),
            stale: Vec::new(),
            lender: None,
        }
    }
}

impl Inside {
    /// A handle of a node is used; whether its file is to be lent now.
    fn is_due(&mut self, node: u64, handle: u64) -> bool {
        let plain = self.table.node(node).is_some_and(|node| node.kind == libc::S_IFREG);
        plain && self.lender.as_mut().is_some_and(|lender| lender.is_due(handle))
    }
}

impl<F> Clone for Tracked<F> {
    fn clone(&self) -> Self {
        Self { shared: self.shared.clone() }
    }
}

/// An error of that number.
pub(crate) fn errno(number: i32) -> io::Error {
    io::Error::from_raw_os_error(number)
}

/// Who we are when nobody has asked.
pub(crate) fn ourselves() -> Context {
    Context { uid: GuestUid::from(0), gid: GuestGid::from(0), pid: 0 }
}

impl<F: Core> Tracked<F> {
    /// Nothing is known of yet.
    pub fn new(core: F) -> Self {
        Self { shared: Arc::new(Shared { core, inside: Mutex::default() }) }
    }

    /// The same, which takes no more than `most` descriptors for what the guest knows.
    pub fn limited(core: F, most: u64) -> Self {
        let this = Self::new(core);
        this.inside().most = usize::try_from(most).unwrap_or(usize::MAX);
        this
    }

    /// Lends files to `lender`'s VMM from now on.
    pub fn lend_to(&self, lender: Lender) {
        self.inside().lender = Some(lender);
    }

    /// Lends the file of a handle.
    fn lend(&self, node: u64, handle: u64, file: &File) {
        if let Some(lender) = &self.inside().lender {
            lender.lend(node, handle, file);
        }
    }

    pub(crate) fn core(&self) -> &F {
        &self.shared.core
    }

    pub(crate) fn inside(&self) -> MutexGuard<'_, Inside> {
        // A panic ends the process.
        self.shared.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The descriptor of what the library holds as `inner`, for looking at it.
    pub(crate) fn descriptor(&self, inner: u64, flags: i32) -> io::Result<(u64, File)> {
        let (handle, _) = self.core().open(ourselves(), inner, false, flags as u32)?;
        let handle = handle.ok_or_else(|| errno(libc::EBADF))?;
        let mut descriptor = Descriptor::default();
        let read = self.core().read(ourselves(), inner, handle, &mut descriptor, 0, 0, None, 0);
        match (read, descriptor.file) {
            (Ok(_), Some(file)) => Ok((handle, file)),
            (read, _) => {
                self.close(inner, handle);
                Err(read.err().unwrap_or_else(|| errno(libc::EBADF)))
            }
        }
    }

    /// Closes one of the library's handles.
    pub(crate) fn close(&self, inner: u64, handle: u64) {
        // Fails only for a handle that does not exist.
        let _ = self.core().release(ourselves(), inner, 0, handle, false, false, None);
    }

    /// Which file `name` in `parent` is.
    pub(crate) fn look_in(
        &self,
        inside: &mut Inside,
        parent: u64,
        name: &CStr,
    ) -> io::Result<Seen> {
        if let Some((node, _, file)) = &inside.directory
            && *node == parent
        {
            return look(file, name);
        }
        self.leave_directory(inside);
        let inner = self.hold(inside, parent)?;
        let (handle, file) = self.descriptor(inner, libc::O_PATH | libc::O_DIRECTORY)?;
        let seen = look(&file, name);
        inside.directory = Some((parent, handle, file));
        seen
    }

    /// Lets the directory go that was asked about last.
    pub(crate) fn leave_directory(&self, inside: &mut Inside) {
        if let Some((node, handle, _)) = inside.directory.take()
            && let Ok(inner) = held(&inside.table, node)
        {
            self.close(inner, handle);
        }
    }

    /// Makes of what the library has found as `parent`/`name` what the guest is told.
    pub(crate) fn adopt(
        &self,
        inside: &mut Inside,
        parent: u64,
        name: &CStr,
        entry: Entry,
    ) -> io::Result<Entry> {
        let inner = entry.inode;
        let id = match inside.table.by_inner(inner) {
            Some(id) => {
                // It is held already.
                self.core().forget(ourselves(), inner, 1);
                id
            }
            None => {
                let seen = self.look_in(inside, parent, name).unwrap_or_default();
                let kind = entry.attr.mode & libc::S_IFMT;
                // Something else may be there by now: then all that is sure is its number.
                let same = seen.identity.ino == entry.attr.ino && seen.kind == kind;
                let mut identity = seen.identity;
                if !same {
                    (identity.ino, identity.btime) = (entry.attr.ino, 0);
                }
                match cold(&inside.table, parent, name, identity).filter(|_| same) {
                    Some(id) if inside.table.node(id).is_some_and(|node| node.kind == kind) => {
                        inside.table.place(id, inner);
                        id
                    }
                    _ => inside.table.add(Node::new(Place::Held(inner), kind, identity)),
                }
            }
        };
        self.make_room(inside, id);
        inside.table.looked_up(id);
        let released = inside.table.name(parent, name.to_bytes(), id);
        self.let_go(inside, released);
        Ok(Entry { inode: id, generation: 0, ..entry })
    }

    /// Tells the library to forget what the table has released.
    pub(crate) fn let_go(&self, inside: &mut Inside, released: Vec<u64>) {
        if released.is_empty() {
            return;
        }
        if let Some((node, _, _)) = &inside.directory
            && inside.table.node(*node).is_none()
            && let Some((_, handle, _)) = inside.directory.take()
        {
            // The library finds a handle by its number and its inode, and this is one of them.
            for inner in &released {
                self.close(*inner, handle);
            }
        }
        for inner in released {
            self.core().forget(ourselves(), inner, 1);
        }
    }

    /// Forgets all that a guest has known.
    pub(crate) fn clear(&self, inside: &mut Inside) {
        self.leave_directory(inside);
        inside.table.clear();
        inside.orphans.clear();
        inside.unverified.clear();
        inside.stale.clear();
        if let Some(lender) = &mut inside.lender {
            lender.clear();
        }
    }

    /// Starts with the root alone, after the library has started.
    pub(crate) fn begin(&self, inside: &mut Inside) -> io::Result<()> {
        let (handle, file) = self.descriptor(ROOT, libc::O_PATH)?;
        let seen = look(&file, c"");
        self.close(ROOT, handle);
        inside.root = seen?;
        inside.table.begin(ROOT, inside.root.kind, inside.root.identity);
        Ok(())
    }

    /// How many nodes, handles and tombstones there are.
    pub fn count(&self) -> Count {
        let inside = self.inside();
        let tombstones =
            inside.table.nodes().filter(|(_, node)| node.place == Place::Tombstone).count();
        Count {
            held: inside.table.held(),
            nodes: inside.table.nodes().count(),
            handles: inside.table.handles().count(),
            tombstones,
        }
    }
}

/// What a guest has of a share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Count {
    /// Nodes that it knows, the root and tombstones among them.
    pub nodes: usize,
    /// Those of them that a descriptor is open for.
    pub held: usize,
    /// Handles that are open.
    pub handles: usize,
    /// Nodes that are gone, and that it still knows.
    pub tombstones: usize,
}

/// The cold node that this is: by its name, or, where the time of birth is known, by any name.
fn cold(table: &Table, parent: u64, name: &CStr, identity: Identity) -> Option<u64> {
    let named = table.child(parent, name.to_bytes()).filter(|id| {
        let node = table.node(*id);
        node.is_some_and(|node| node.place == Place::Cold && node.identity == identity)
    });
    // Without it, files of two file systems cannot be told apart.
    let known = (identity.btime != 0).then(|| table.cold_by_identity(identity));
    named.or(known.flatten())
}

/// The library's number of a node that is held.
pub(crate) fn held(table: &Table, id: u64) -> io::Result<u64> {
    match table.node(id).map(|node| node.place) {
        Some(Place::Held(inner)) => Ok(inner),
        // What nobody knows is what was forgotten: the guest can look again.
        Some(Place::Cold | Place::Tombstone) | None => Err(errno(libc::ESTALE)),
    }
}

/// A name as C has it. There is no NUL in what was checked.
pub(crate) fn c_name(name: &[u8]) -> io::Result<CString> {
    CString::new(name).map_err(|_| errno(libc::EINVAL))
}

/// Checks a name; see [`names::check`].
pub(crate) fn legal(name: &CStr) -> io::Result<&[u8]> {
    names::check(name)
}
