//! A table from its saved form.

use super::{Identity, Node, Place, Table};
use crate::names::Name;
use crate::state::SavedNode;

/// What is told of a node after it was taken in.
#[derive(Clone, Copy, Debug)]
pub struct Taken {
    /// Its number.
    pub id: u64,
    /// It was gone when it was saved.
    pub was_gone: bool,
    /// It has a name.
    pub named: bool,
}

impl Table {
    /// Takes in nodes that went through the gate; `place` says where each is, and which file. One that is
    /// there already (the root) stays where it is.
    pub fn take_in(
        &mut self,
        nodes: Vec<SavedNode>,
        place: impl Fn(&SavedNode) -> (Place, Identity),
    ) -> Vec<Taken> {
        self.nodes.reserve(nodes.len());
        let mut taken = Vec::with_capacity(nodes.len());
        let mut names: Vec<(u64, Name, u64)> = Vec::with_capacity(nodes.len());
        for saved in nodes {
            let SavedNode { id, lookups, kind, tombstone, .. } = saved;
            let (place, identity) = place(&saved);
            taken.push(Taken { id, was_gone: tombstone, named: !saved.names.is_empty() });
            names.extend(saved.names.iter().map(|(parent, name)| (*parent, name.clone(), id)));
            match self.nodes.get_mut(&id) {
                Some(node) => node.lookups = lookups,
                None => {
                    let mut node = Node::new(place, kind, identity);
                    (node.lookups, node.names) = (lookups, saved.names);
                    self.insert(id, node);
                }
            }
        }
        // A directory may have a higher number than what is in it.
        for (parent, name, child) in names {
            if let Some(directory) = self.nodes.get_mut(&parent) {
                directory.children.insert(name, child);
            }
        }
        taken
    }
}
