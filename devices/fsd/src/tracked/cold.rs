//! Cold nodes: known by their names, held by nobody. They are looked up when the guest needs them.
//!
//! A restore of many nodes leaves them cold, and a guest that knows more files than there are
//! descriptors has those of them chilled that it needed longest ago. Either way a node that is warmed
//! again must be the file that it was; if not, it is a tombstone from then on.

use std::io;

use super::{Core, Inside, Tracked, errno};
use crate::restore::{Found, MAX_STALE, Stale};
use crate::table::{Place, ROOT};

/// Part of the descriptors that is kept free, for what comes between two looks.
const SPARE: usize = 8;

impl<F: Core> Tracked<F> {
    /// The library's number of a node, which is looked up if it is cold. A tombstone, and what nobody
    /// knows, is stale: the guest can look again.
    pub(crate) fn hold(&self, inside: &mut Inside, id: u64) -> io::Result<u64> {
        match inside.table.node(id).map(|node| node.place) {
            Some(Place::Held(inner)) => {
                inside.table.touch(id);
                Ok(inner)
            }
            Some(Place::Cold) => self.warm(inside, id),
            Some(Place::Tombstone) | None => Err(errno(libc::ESTALE)),
        }
    }

    /// Looks up a node, and before it the directories that lead to it.
    fn warm(&self, inside: &mut Inside, id: u64) -> io::Result<u64> {
        let mut way = vec![id];
        let mut at = id;
        while let Some((parent, _)) = inside.table.node(at).and_then(|node| node.names.first()) {
            if inside.table.node(*parent).map(|node| node.place) != Some(Place::Cold) {
                break;
            }
            at = *parent;
            way.push(at);
        }
        let mut inner = Err(errno(libc::ESTALE));
        for node in way.into_iter().rev() {
            inner = self.warm_one(inside, node);
            if inner.is_err() {
                break;
            }
        }
        match inner {
            Ok(inner) if inside.table.by_inner(inner) == Some(id) => {
                self.make_room(inside, id);
                Ok(inner)
            }
            Ok(_) => Err(errno(libc::ESTALE)),
            Err(error) => Err(error),
        }
    }

    /// Looks up a cold node by the names of it whose directories are held.
    fn warm_one(&self, inside: &mut Inside, id: u64) -> io::Result<u64> {
        let names = inside.table.node(id).map(|node| node.names.clone()).unwrap_or_default();
        let mut reason = "its directory is gone";
        for (parent, name) in names {
            let place = inside.table.node(parent).map(|node| node.place);
            if !matches!(place, Some(Place::Held(_))) {
                continue;
            }
            match self.find(inside, parent, &name, id)? {
                Found::It(inner) => {
                    inside.table.place(id, inner);
                    return Ok(inner);
                }
                Found::Not(why) => reason = why,
            }
        }
        let path = inside.table.path(id);
        if inside.stale.len() < MAX_STALE {
            inside.stale.push(Stale { id, path, reason: reason.to_owned() });
        }
        inside.table.bury(id);
        Err(errno(libc::ESTALE))
    }

    /// Chills what was needed longest ago, if there are too many descriptors; not `needed`, nor the
    /// directories that are in use.
    pub(crate) fn make_room(&self, inside: &mut Inside, needed: u64) {
        let open = inside.table.held() + inside.table.handles().count().min(inside.most);
        if open + SPARE < inside.most {
            return;
        }
        self.leave_directory(inside);
        // A quarter at once: looking for them takes a while.
        let chilled: Vec<u64> = inside.table.idle();
        let many = (chilled.len() / 4).max(1);
        for id in chilled.into_iter().filter(|id| *id != needed && *id != ROOT).take(many) {
            if let Some(inner) = inside.table.chill(id) {
                self.core().forget(super::ourselves(), inner, 1);
            }
        }
    }

    /// Has all cold nodes looked up in time, by [`Tracked::verify`].
    pub(crate) fn verify_later(&self, inside: &mut Inside) {
        inside.unverified = inside.table.cold().collect();
        // Directories come before what is in them, mostly.
        inside.unverified.sort_unstable_by(|one, other| other.cmp(one));
    }

    /// Looks up some of the nodes that were left cold; what has turned out to be stale since the last
    /// call, and whether there is more.
    pub fn verify(&self, some: usize) -> (Vec<Stale>, bool) {
        let mut inside = self.inside();
        for _ in 0..some {
            let Some(id) = inside.unverified.pop() else { break };
            // Without room for it, it stays cold: who needs it makes room.
            let room = inside.table.held() + SPARE < inside.most / 2;
            if room && inside.table.node(id).is_some_and(|node| node.place == Place::Cold) {
                let _ = self.hold(&mut inside, id);
            }
        }
        if inside.unverified.is_empty() {
            self.leave_directory(&mut inside);
        }
        let more = !inside.unverified.is_empty();
        (std::mem::take(&mut inside.stale), more)
    }
}
