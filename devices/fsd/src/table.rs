//! What the guest knows: its nodes, their names, and its handles.
//!
//! The guest holds numbers that are ours, so that they can outlive the library's. A node lives as long
//! as somebody refers to it: the guest (lookups), a handle, or a child. It knows every name under which
//! the guest has found it, which is what it can be found by again.
//!
//! ```text
//!   node 1 (root) ──"a"──► node 2 ──"f"──► node 3      names: parent and component
//!                                └──"g"──► node 3      a hard link has several
//! ```
//!
//! Nothing in here makes a system call.

mod changes;
mod saved;

use std::collections::BTreeMap;

use foldhash::HashMap;

pub use self::changes::{Change, Changes};
pub use self::saved::Taken;
use crate::names::Name;

/// The root, whose number FUSE has fixed.
pub const ROOT: u64 = 1;

/// What makes a file that file, within its file system.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Identity {
    /// The inode's number.
    pub ino: u64,
    /// When it was made, in nanoseconds; 0 where the file system does not say.
    pub btime: u64,
}

/// That of a file whose name is all that is known of it. No file has it.
pub const UNKNOWN: Identity = Identity { ino: 0, btime: u64::MAX };

/// Where a node's file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In the library, under this number.
    Held(u64),
    /// Where its name says; to be looked up when it is needed, and to be checked then.
    Cold,
    /// Nowhere: it was not found again after a restore, and never will be. ESTALE.
    Tombstone,
}

/// A file, directory or whatever else has an inode.
#[derive(Debug)]
pub struct Node {
    /// Its file.
    pub place: Place,
    /// How many times the guest was told of it, less what it has forgotten.
    pub lookups: u64,
    /// `S_IFMT` of its mode.
    pub kind: u32,
    /// Which file it is.
    pub identity: Identity,
    /// Its names: parent and component.
    pub names: Vec<(u64, Name)>,
    /// What of a directory is known.
    pub children: BTreeMap<Name, u64>,
    /// Open handles on it.
    pub handles: u32,
    /// When it was last needed, in the time of the table.
    pub used: u64,
}

impl Node {
    /// A node that nobody refers to yet.
    pub fn new(place: Place, kind: u32, identity: Identity) -> Self {
        let (names, children) = (Vec::new(), BTreeMap::new());
        Self { place, lookups: 0, kind, identity, names, children, handles: 0, used: 0 }
    }

    /// Whether its name is all that is known of its file.
    pub fn is_unknown(&self) -> bool {
        self.identity == UNKNOWN
    }

    fn is_needed(&self) -> bool {
        self.lookups > 0 || self.handles > 0 || !self.children.is_empty()
    }
}

/// An open file or directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Handle {
    /// Of which node.
    pub node: u64,
    /// The library's number; `None`: it could not be opened again. ESTALE.
    pub inner: Option<u64>,
    /// Opened as a directory.
    pub directory: bool,
    /// The flags of its opening.
    pub flags: u32,
}

/// How the guest has introduced itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Init {
    /// Its FUSE_INIT, byte for byte.
    pub request: Vec<u8>,
    /// The answer.
    pub reply: Vec<u8>,
}

/// All of it.
#[derive(Debug, Default)]
pub struct Table {
    nodes: HashMap<u64, Node>,
    /// The library's number → ours.
    by_inner: HashMap<u64, u64>,
    /// Which cold node is which file: whoever comes across it under another name knows it.
    by_identity: HashMap<Identity, u64>,
    /// Counts what was needed.
    clock: u64,
    handles: HashMap<u64, Handle>,
    next_node: u64,
    next_handle: u64,
    /// Of the mount that is live, if there is one.
    pub init: Option<Init>,
    /// For who comes after us.
    pub changes: Changes,
}

impl Table {
    /// Forgets all, and starts with a root that is held as `inner`. Numbers are not used again.
    pub fn begin(&mut self, inner: u64, kind: u32, identity: Identity) {
        self.clear();
        self.next_node = self.next_node.max(ROOT + 1);
        let mut root = Node::new(Place::Held(inner), kind, identity);
        root.lookups = 1;
        self.nodes.insert(ROOT, root);
        self.by_inner.insert(inner, ROOT);
    }

    /// Forgets all.
    pub fn clear(&mut self) {
        self.nodes.clear();
        self.by_inner.clear();
        self.by_identity.clear();
        self.handles.clear();
        self.init = None;
        self.changes.all();
    }

    /// A node by its number.
    pub fn node(&self, id: u64) -> Option<&Node> {
        self.nodes.get(&id)
    }

    /// The same, to change it.
    pub fn node_mut(&mut self, id: u64) -> Option<&mut Node> {
        self.nodes.get_mut(&id)
    }

    /// All nodes, in no order.
    pub fn nodes(&self) -> impl Iterator<Item = (u64, &Node)> {
        self.nodes.iter().map(|(&id, node)| (id, node))
    }

    /// All handles, in no order.
    pub fn handles(&self) -> impl Iterator<Item = (u64, &Handle)> {
        self.handles.iter().map(|(&id, handle)| (id, handle))
    }

    /// A handle by its number.
    pub fn handle(&self, id: u64) -> Option<&Handle> {
        self.handles.get(&id)
    }

    /// The numbers that come next: of nodes, of handles.
    pub fn next(&self) -> (u64, u64) {
        (self.next_node, self.next_handle)
    }

    /// Continues with these numbers.
    pub fn set_next(&mut self, node: u64, handle: u64) {
        (self.next_node, self.next_handle) = (node, handle);
    }

    /// Which node the library's `inner` is.
    pub fn by_inner(&self, inner: u64) -> Option<u64> {
        self.by_inner.get(&inner).copied()
    }

    /// Which node is known as `name` in `parent`.
    pub fn child(&self, parent: u64, name: &[u8]) -> Option<u64> {
        self.nodes.get(&parent)?.children.get(name).copied()
    }

    /// Takes in a node under a number that it had before.
    pub fn insert(&mut self, id: u64, mut node: Node) {
        self.clock += 1;
        node.used = self.clock;
        match node.place {
            Place::Held(inner) => drop(self.by_inner.insert(inner, id)),
            Place::Cold => drop(self.by_identity.insert(node.identity, id)),
            Place::Tombstone => {}
        }
        self.nodes.insert(id, node);
    }

    /// A node is needed now.
    pub fn touch(&mut self, id: u64) {
        self.clock += 1;
        if let Some(node) = self.nodes.get_mut(&id) {
            node.used = self.clock;
        }
    }

    /// How many nodes the library holds.
    pub fn held(&self) -> usize {
        self.by_inner.len()
    }

    /// Nodes that are held, have a name and no handle: they can be found again. The one needed longest
    /// ago comes first.
    pub fn idle(&self) -> Vec<u64> {
        let mut idle: Vec<(u64, u64)> = self
            .by_inner
            .values()
            .filter_map(|id| Some((self.nodes.get(id)?, *id)))
            .filter(|(node, id)| *id != ROOT && node.handles == 0 && !node.names.is_empty())
            .map(|(node, id)| (node.used, id))
            .collect();
        idle.sort_unstable();
        idle.into_iter().map(|(_, id)| id).collect()
    }

    /// Nodes that have not been looked up.
    pub fn cold(&self) -> impl Iterator<Item = u64> {
        self.by_identity.values().copied()
    }

    /// The cold node that is this file.
    pub fn cold_by_identity(&self, identity: Identity) -> Option<u64> {
        self.by_identity.get(&identity).copied()
    }

    /// A node that is held becomes a cold one; the library's number.
    pub fn chill(&mut self, id: u64) -> Option<u64> {
        let node = self.nodes.get_mut(&id)?;
        let Place::Held(inner) = node.place else { return None };
        node.place = Place::Cold;
        self.by_inner.remove(&inner);
        self.by_identity.insert(node.identity, id);
        Some(inner)
    }

    /// A node is no longer cold.
    fn warmed(&mut self, identity: Identity, id: u64) {
        if self.by_identity.get(&identity) == Some(&id) {
            self.by_identity.remove(&identity);
        }
    }

    /// A node is where the library holds `inner`.
    pub fn place(&mut self, id: u64, inner: u64) {
        self.clock += 1;
        if let Some(node) = self.nodes.get_mut(&id) {
            node.place = Place::Held(inner);
            node.used = self.clock;
            let identity = node.identity;
            self.warmed(identity, id);
            self.by_inner.insert(inner, id);
        }
    }

    /// See [`Table::name`].
    fn give_name(&mut self, parent: u64, name: &[u8], child: u64) -> Vec<u64> {
        if self.child(parent, name) == Some(child) {
            return Vec::new();
        }
        let mut released = self.take_name(parent, name);
        let directory = self.nodes.get(&child).is_some_and(|node| node.kind == libc::S_IFDIR);
        if directory {
            // It has one name; one that differs is from before the host has moved it.
            released.extend(self.unname_all(child));
            released.extend(self.break_loop(child, parent));
        }
        let name = Name::from(name);
        if let Some(directory) = self.nodes.get_mut(&parent) {
            directory.children.insert(name.clone(), child);
        }
        if let Some(node) = self.nodes.get_mut(&child) {
            node.names.push((parent, name));
        }
        released
    }

    fn unname_all(&mut self, id: u64) -> Vec<u64> {
        let names = self.nodes.get(&id).map(|node| node.names.clone()).unwrap_or_default();
        // Not released through this: it is just being named.
        self.hold([id, ROOT], 1);
        let gone = names.iter().flat_map(|(parent, name)| self.take_name(*parent, name)).collect();
        self.hold([id, ROOT], -1);
        gone
    }

    /// Where `parent` is thought to be below `child`, the host has moved it away unseen: that name goes.
    fn break_loop(&mut self, child: u64, parent: u64) -> Vec<u64> {
        let mut at = parent;
        while let Some((above, name)) = self.nodes.get(&at).and_then(|node| node.names.first()) {
            if *above == child {
                let (above, name) = (*above, name.clone());
                return self.take_name(above, &name);
            }
            at = *above;
        }
        Vec::new()
    }

    /// See [`Table::unname`].
    fn take_name(&mut self, parent: u64, name: &[u8]) -> Vec<u64> {
        let directory = self.nodes.get_mut(&parent);
        let Some(child) = directory.and_then(|node| node.children.remove(name)) else {
            return Vec::new();
        };
        if let Some(node) = self.nodes.get_mut(&child) {
            node.names.retain(|(of, known)| *of != parent || **known != *name);
        }
        self.release(parent)
    }

    /// See [`Table::rename`].
    fn change_names(&mut self, from: (u64, &[u8]), to: (u64, &[u8]), exchange: bool) -> Vec<u64> {
        let (moved, met) = (self.child(from.0, from.1), self.child(to.0, to.1));
        if moved.is_some() && moved == met {
            // Two names of one file: the kernel does nothing.
            return Vec::new();
        }
        // Directories live on through what is taken out of them and put in again.
        let mut released = Vec::new();
        let kept = [from.0, to.0];
        self.hold(kept, 1);
        released.extend(self.take_name(from.0, from.1));
        released.extend(self.take_name(to.0, to.1));
        if let Some(moved) = moved {
            released.extend(self.give_name(to.0, to.1, moved));
        }
        if let (Some(met), true) = (met, exchange) {
            released.extend(self.give_name(from.0, from.1, met));
        }
        self.hold(kept, -1);
        released.extend(kept.into_iter().flat_map(|id| self.release(id)).collect::<Vec<_>>());
        released
    }

    fn hold(&mut self, nodes: [u64; 2], by: i64) {
        for id in nodes {
            if let Some(node) = self.nodes.get_mut(&id) {
                node.lookups = node.lookups.saturating_add_signed(by);
            }
        }
    }

    /// Takes in a handle under a number that it had before.
    pub fn insert_handle(&mut self, id: u64, handle: Handle) {
        if let Some(node) = self.nodes.get_mut(&handle.node) {
            node.handles = node.handles.saturating_add(1);
        }
        self.handles.insert(id, handle);
    }

    /// Drops a node that nothing refers to, and the directories that lived through it alone.
    fn release(&mut self, id: u64) -> Vec<u64> {
        let mut released = Vec::new();
        let mut waiting = vec![id];
        while let Some(id) = waiting.pop() {
            if id == ROOT || self.nodes.get(&id).is_none_or(Node::is_needed) {
                continue;
            }
            let Some(node) = self.nodes.remove(&id) else { continue };
            if let Place::Held(inner) = node.place {
                self.by_inner.remove(&inner);
                released.push(inner);
            }
            self.warmed(node.identity, id);
            for (parent, name) in node.names {
                if let Some(directory) = self.nodes.get_mut(&parent) {
                    directory.children.remove(&name);
                    waiting.push(parent);
                }
            }
        }
        released
    }

    /// The path of a node for people to read, by its first name at each step.
    pub fn path(&self, id: u64) -> String {
        let mut parts: Vec<String> = Vec::new();
        let mut at = id;
        // A restored tree is no deeper than that, and a loop cannot be excluded by looking at one node.
        for _ in 0..crate::state::MAX_DEPTH {
            match self.nodes.get(&at).and_then(|node| node.names.first()) {
                Some((parent, name)) => {
                    parts.push(crate::names::shown(name));
                    at = *parent;
                }
                None => break,
            }
        }
        if at != ROOT {
            parts.push(format!("(node {at})"));
        }
        parts.reverse();
        parts.join("/")
    }
}

#[cfg(test)]
mod tests;
