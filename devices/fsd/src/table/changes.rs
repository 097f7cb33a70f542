//! What changes in a table, as it is noted for the server that comes after this one.
//!
//! Each change is one call; the same calls in the same order make the same table. What is noted was
//! written by a process that has died, perhaps not by accident: whatever does not fit is refused, and
//! the table that comes out of it goes through the gate like any other.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use super::{Handle, Identity, Node, Place, ROOT, Table};
use crate::names::is_legal;

/// One call that has changed a table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Change<'a> {
    /// A node: its number, kind, inode number and time of birth.
    Add(u64, u32, u64, u64),
    /// Which file a node is has become known.
    Know(u64, u64, u64),
    /// The guest was told of a node.
    LookedUp(u64),
    /// And has forgotten it so many times.
    Forget(u64, u64),
    /// A directory's name leads to a node.
    Name(u64, Cow<'a, [u8]>, u64),
    /// It leads to nothing.
    Unname(u64, Cow<'a, [u8]>),
    /// From where to where, and whether the two change places.
    Rename((u64, Cow<'a, [u8]>), (u64, Cow<'a, [u8]>), bool),
    /// A handle: its number, node, whether it is a directory, and flags.
    Open(u64, u64, bool, u32),
    /// A handle and its node.
    Close(u64, u64),
    /// A node's file is gone.
    Bury(u64),
}

/// What has changed since it was last taken.
#[derive(Debug, Default)]
pub struct Changes {
    /// Somebody wants to know.
    pub wanted: bool,
    /// So much that it is easier told as a whole.
    pub whole: bool,
    /// One after the other.
    pub bytes: Vec<u8>,
}

impl Changes {
    fn note(&mut self, change: &Change<'_>) {
        if !self.wanted || self.whole {
            return;
        }
        match postcard::to_extend(change, std::mem::take(&mut self.bytes)) {
            Ok(bytes) => self.bytes = bytes,
            // Cannot be: what is plain can be written.
            Err(_) => self.whole = true,
        }
    }

    /// From here on the table is another one.
    pub fn all(&mut self) {
        self.whole = self.wanted;
        self.bytes.clear();
    }
}

impl Table {
    /// Takes in a node under a number that is chosen here.
    pub fn add(&mut self, node: Node) -> u64 {
        let id = self.next_node;
        self.next_node += 1;
        let Identity { ino, btime } = node.identity;
        self.changes.note(&Change::Add(id, node.kind, ino, btime));
        self.insert(id, node);
        id
    }

    /// It has turned out which file a node is.
    pub fn know(&mut self, id: u64, identity: Identity) {
        if let Some(node) = self.nodes.get_mut(&id) {
            node.identity = identity;
            self.changes.note(&Change::Know(id, identity.ino, identity.btime));
        }
    }

    /// The guest was told of a node once more.
    pub fn looked_up(&mut self, id: u64) {
        if let Some(node) = self.nodes.get_mut(&id) {
            node.lookups = node.lookups.saturating_add(1);
            self.changes.note(&Change::LookedUp(id));
        }
    }

    /// The guest has forgotten a node `count` times. Returns what was released. The root stays.
    pub fn forget(&mut self, id: u64, count: u64) -> Vec<u64> {
        let Some(node) = self.nodes.get_mut(&id).filter(|_| id != ROOT) else {
            return Vec::new();
        };
        node.lookups = node.lookups.saturating_sub(count);
        self.changes.note(&Change::Forget(id, count));
        self.release(id)
    }

    /// From now on `parent`/`name` is `child`, and nothing else. What lost that name and with it its
    /// last reason to be is released: the library's numbers are returned.
    pub fn name(&mut self, parent: u64, name: &[u8], child: u64) -> Vec<u64> {
        if self.child(parent, name) == Some(child) {
            return Vec::new();
        }
        self.changes.note(&Change::Name(parent, name.into(), child));
        self.give_name(parent, name, child)
    }

    /// Nothing is `parent`/`name` any more. Returns what was released, as [`Table::name`] does.
    pub fn unname(&mut self, parent: u64, name: &[u8]) -> Vec<u64> {
        if self.child(parent, name).is_none() {
            return Vec::new();
        }
        self.changes.note(&Change::Unname(parent, name.into()));
        self.take_name(parent, name)
    }

    /// `from` is called `to` now, each a directory and a name. With `exchange` the two change places.
    pub fn rename(&mut self, from: (u64, &[u8]), to: (u64, &[u8]), exchange: bool) -> Vec<u64> {
        let places = ((from.0, from.1.into()), (to.0, to.1.into()));
        self.changes.note(&Change::Rename(places.0, places.1, exchange));
        self.change_names(from, to, exchange)
    }

    /// Takes in a handle; its number.
    pub fn open(&mut self, handle: Handle) -> u64 {
        let id = self.next_handle;
        self.next_handle += 1;
        let Handle { node, directory, flags, .. } = handle;
        self.changes.note(&Change::Open(id, node, directory, flags));
        self.insert_handle(id, handle);
        id
    }

    /// Closes a handle of `node`: the handle, and what was released of nodes. `None`: there is none.
    pub fn close(&mut self, id: u64, node: u64) -> Option<(Handle, Vec<u64>)> {
        self.handles.get(&id).filter(|handle| handle.node == node)?;
        let handle = self.handles.remove(&id)?;
        if let Some(node) = self.nodes.get_mut(&node) {
            node.handles = node.handles.saturating_sub(1);
        }
        self.changes.note(&Change::Close(id, node));
        let released = self.release(node);
        Some((handle, released))
    }

    /// A cold node was not found again.
    pub fn bury(&mut self, id: u64) {
        let Some(node) = self.nodes.get_mut(&id).filter(|node| node.place == Place::Cold) else {
            return;
        };
        node.place = Place::Tombstone;
        let identity = node.identity;
        self.changes.note(&Change::Bury(id));
        self.warmed(identity, id);
    }

    /// Does what was noted; `None` if that cannot have been.
    pub fn again(&mut self, change: Change<'_>) -> Option<()> {
        match change {
            Change::Add(id, kind, ino, btime) => {
                let fresh = id > ROOT && !self.nodes.contains_key(&id);
                self.next_node = self.next_node.max(fresh.then_some(id)?.checked_add(1)?);
                self.insert(id, Node::new(Place::Cold, kind, Identity { ino, btime }));
            }
            Change::Know(id, ino, btime) => self.know(id, Identity { ino, btime }),
            Change::LookedUp(id) => self.looked_up(id),
            Change::Forget(id, count) => drop(self.forget(id, count)),
            Change::Name(parent, name, child) => {
                self.can_name(parent, &name)?;
                self.nodes.contains_key(&child).then_some(())?;
                self.give_name(parent, &name, child);
            }
            Change::Unname(parent, name) => drop(self.take_name(parent, &name)),
            Change::Rename(from, to, exchange) => {
                self.can_name(from.0, &from.1)?;
                self.can_name(to.0, &to.1)?;
                self.change_names((from.0, &from.1), (to.0, &to.1), exchange);
            }
            Change::Open(id, node, directory, flags) => {
                let fresh = self.nodes.contains_key(&node) && !self.handles.contains_key(&id);
                self.next_handle = self.next_handle.max(fresh.then_some(id)?.checked_add(1)?);
                self.insert_handle(id, Handle { node, inner: None, directory, flags });
            }
            Change::Close(id, node) => drop(self.close(id, node)?),
            Change::Bury(id) => self.bury(id),
        }
        Some(())
    }

    /// Names are given in directories only, or following them might have no end.
    fn can_name(&self, parent: u64, name: &[u8]) -> Option<()> {
        let directory = self.nodes.get(&parent).is_some_and(|node| node.kind == libc::S_IFDIR);
        (directory && is_legal(name)).then_some(())
    }
}
