//! From the saved form to what the guest knows: every name is looked up again, every handle opened
//! again, through the same calls that a guest would make.
//!
//! What is found must be the file that it was: the same kind, inode number and time of birth. A file
//! that is gone, or that another one has taken the place of, becomes a tombstone, which answers ESTALE;
//! the guest's kernel then looks the path up anew. What fails for other reasons, too many open files
//! for instance, fails the restore as a whole: it says nothing about the file.
//!
//! In a copy of the directory (the policy `copy`) only name and kind must be the same.

use std::collections::VecDeque;
use std::io;

use serde::{Deserialize, Serialize};
use virtiofsd::filesystem::{Extensions, SetattrValid, ZeroCopyReader};
use virtiofsd::fuse::SetattrIn;
use virtiofsd::oslib::WritevFlags;

use crate::identity::Seen;
use crate::names::Name;
use crate::share::Policy;
use crate::state::{Mount, Orphan, SavedHandle, SavedNode, ShareIdentity, StateError};
use crate::table::{Handle, Identity, Node, Place, ROOT, Taken, UNKNOWN};
use crate::tracked::{Core, Inside, Tracked, c_name, ourselves};

/// From so many nodes on they are looked up when they are needed, or when there is time.
pub const LAZY_FROM: usize = 2000;

/// Most entries of [`Report::stale`].
pub const MAX_STALE: usize = 1000;

/// What has become of what a guest knew.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// The share.
    pub tag: String,
    /// What was asked for.
    pub policy: Policy,
    /// Nodes that are as they were.
    pub restored: usize,
    /// Nodes among them that are looked up later.
    pub unverified: usize,
    /// Handles that are open again.
    pub handles: usize,
    /// Files without a name that have their content again.
    pub orphans_restored: usize,
    /// Nodes that are gone, also those that were gone before.
    pub stale_total: usize,
    /// The first of those that were not gone before.
    pub stale: Vec<Stale>,
}

/// A file that is gone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stale {
    /// Its node.
    pub id: u64,
    /// Where it was.
    pub path: String,
    /// What was found instead.
    pub reason: String,
}

/// Why a share is not restored.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "each says what it is")]
pub enum RestoreError {
    #[error("its state cannot be used: {0}")]
    State(#[from] StateError),
    #[error("it is the state of share {was:?}; shares cannot be swapped")]
    Tag { was: String },
    #[error("its setting {0}; a guest that knows the share keeps its settings")]
    Setting(String),
    #[error(
        "{path:?} is a different directory than the one that was saved; use the policy remap, or copy if it is a copy"
    )]
    OtherDirectory { path: String },
    #[error("its mount is not answered as it was; the release of the file server differs too much")]
    Init,
    #[error(transparent)]
    Journal(#[from] crate::journal::JournalError),
    #[error("{path:?} has changed ({reason}), and the policy is strict")]
    Changed { path: String, reason: String },
    #[error("{path:?} cannot be restored: {source}")]
    Host { path: String, source: io::Error },
}

/// How one name ended.
pub(crate) enum Found {
    It(u64),
    Not(&'static str),
}

/// True for what says that the file is gone, and not that we lack something.
fn is_gone(error: &io::Error) -> bool {
    let gone = [libc::ENOENT, libc::ENOTDIR, libc::ELOOP, libc::ESTALE, libc::ENAMETOOLONG];
    error.raw_os_error().is_some_and(|number| gone.contains(&number))
}

/// Refuses another directory, unless that is what is wanted.
pub fn check_share(
    was: &ShareIdentity,
    is: &ShareIdentity,
    policy: Policy,
) -> Result<(), RestoreError> {
    if was.tag != is.tag {
        return Err(RestoreError::Tag { was: was.tag.clone() });
    }
    let known = was.fsid != 0 && is.fsid != 0;
    let same = (was.ino, was.btime) == (is.ino, is.btime) && (!known || was.fsid == is.fsid);
    match policy {
        Policy::Strict | Policy::Tolerant if !same => {
            Err(RestoreError::OtherDirectory { path: is.path.clone() })
        }
        _ => Ok(()),
    }
}

impl<F: Core> Tracked<F> {
    /// Goes on from `mount`, on a share whose mount was just answered again.
    pub fn restore(&self, mount: Mount, policy: Policy, tag: &str) -> Result<Report, RestoreError> {
        let mut inside = self.inside();
        let mut report = Report { tag: tag.to_owned(), policy, ..Report::default() };
        let lazy = policy == Policy::Tolerant && mount.nodes.len() >= LAZY_FROM;
        let nodes = take_in(&mut inside, mount.nodes, policy, lazy);
        let failed = match policy {
            Policy::Remap => Vec::new(),
            Policy::Tolerant if lazy => Vec::new(),
            Policy::Strict | Policy::Tolerant | Policy::Copy => {
                self.find_all(&mut inside, &nodes)?
            }
        };
        if policy != Policy::Remap {
            self.remake_orphans(&mut inside, &mount.orphans, &mut report)?;
        }
        note_stale(&inside, &nodes, &failed, &mut report);
        if let (Policy::Strict, Some(first)) = (policy, report.stale.first()) {
            let Stale { path, reason, .. } = first.clone();
            return Err(RestoreError::Changed { path, reason });
        }
        for (parent, name, _) in failed {
            // Only what was found under another name has lost this one.
            let child = inside.table.child(parent, &name);
            let node = child.and_then(|child| inside.table.node(child));
            if node.is_some_and(|node| node.place != Place::Tombstone) {
                let released = inside.table.unname(parent, &name);
                self.let_go(&mut inside, released);
            }
        }
        self.handles(&mut inside, &mount.handles, policy, &mut report)?;
        inside.table.set_next(mount.next_node, mount.next_handle);
        self.leave_directory(&mut inside);
        if lazy {
            self.verify_later(&mut inside);
            report.unverified = inside.table.cold().count();
        }
        Ok(report)
    }

    /// Looks up all names, from the root down. Those that led to nothing, with the reason.
    fn find_all(
        &self,
        inside: &mut Inside,
        nodes: &[Taken],
    ) -> Result<Vec<(u64, Name, &'static str)>, RestoreError> {
        let mut failed = Vec::new();
        let was_gone: std::collections::HashSet<u64> =
            nodes.iter().filter(|node| node.was_gone).map(|node| node.id).collect();
        let mut directories = VecDeque::from([ROOT]);
        while let Some(parent) = directories.pop_front() {
            let children = inside.table.node(parent).map(|node| node.children.clone());
            for (name, child) in children.unwrap_or_default() {
                let waits =
                    inside.table.node(child).is_some_and(|node| node.place == Place::Tombstone);
                if !waits || was_gone.contains(&child) {
                    continue;
                }
                match self.find(inside, parent, &name, child) {
                    Ok(Found::It(inner)) => {
                        inside.table.place(child, inner);
                        directories.push_back(child);
                        // There may be more nodes than descriptors.
                        self.make_room(inside, child);
                    }
                    Ok(Found::Not(reason)) => failed.push((parent, name, reason)),
                    Err(source) => {
                        let path = inside.table.path(child);
                        return Err(RestoreError::Host { path, source });
                    }
                }
            }
        }
        Ok(failed)
    }

    /// Looks up one name, and whether it leads to the node that it has led to.
    pub(crate) fn find(
        &self,
        inside: &mut Inside,
        parent: u64,
        name: &Name,
        child: u64,
    ) -> io::Result<Found> {
        let (inner, c_name) = (self.hold(inside, parent)?, c_name(name)?);
        let entry = match self.core().lookup(ourselves(), inner, &c_name) {
            Ok(entry) => entry,
            Err(error) if is_gone(&error) => return Ok(Found::Not("missing")),
            Err(error) => return Err(error),
        };
        let seen = self.look_in(inside, parent, &c_name).unwrap_or_default();
        let Some(node) = inside.table.node(child) else { return Ok(Found::Not("missing")) };
        let kind = entry.attr.mode & libc::S_IFMT;
        let reason = if kind != node.kind {
            Some("of another kind")
        } else if !node.is_unknown() && !is_same(node.identity, entry.attr.ino, seen) {
            Some("replaced")
        } else if inside.table.by_inner(entry.inode).is_some() {
            Some("another node's file")
        } else {
            None
        };
        match reason {
            None => {
                let identity = Identity { ino: entry.attr.ino, btime: seen.identity.btime };
                if inside.table.node(child).is_some_and(Node::is_unknown) {
                    inside.table.know(child, identity);
                }
                Ok(Found::It(entry.inode))
            }
            Some(reason) => {
                self.core().forget(ourselves(), entry.inode, 1);
                Ok(Found::Not(reason))
            }
        }
    }

    fn handles(
        &self,
        inside: &mut Inside,
        handles: &[SavedHandle],
        policy: Policy,
        report: &mut Report,
    ) -> Result<(), RestoreError> {
        for saved in handles {
            // A node that was left cold is looked up now.
            let inner = match self.hold(inside, saved.node) {
                Ok(inner) => Some(inner),
                Err(error) if is_gone(&error) => None,
                Err(source) => {
                    let path = inside.table.path(saved.node);
                    return Err(RestoreError::Host { path, source });
                }
            };
            let opened = inner.map(|inner| self.reopen(inner, saved)).transpose();
            let (inner, reason) = match opened {
                Ok(opened) => (opened.flatten(), None),
                Err(source) => match source.raw_os_error() {
                    Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM | libc::EIO) | None => {
                        let path = inside.table.path(saved.node);
                        return Err(RestoreError::Host { path, source });
                    }
                    Some(_) => (None, Some(format!("cannot be opened again: {source}"))),
                },
            };
            if let Some(reason) = reason {
                let path = inside.table.path(saved.node);
                if policy == Policy::Strict {
                    return Err(RestoreError::Changed { path, reason });
                }
                report.stale_total += 1;
                if report.stale.len() < MAX_STALE {
                    report.stale.push(Stale { id: saved.node, path, reason });
                }
            }
            report.handles += usize::from(inner.is_some());
            let SavedHandle { node, directory, flags, .. } = *saved;
            inside.table.insert_handle(saved.id, Handle { node, inner, directory, flags });
        }
        Ok(())
    }

    fn reopen(&self, inner: u64, saved: &SavedHandle) -> io::Result<Option<u64>> {
        let opened = match saved.directory {
            true => self.core().opendir(ourselves(), inner, saved.flags),
            false => self.core().open(ourselves(), inner, false, saved.flags),
        };
        opened.map(|(handle, _)| handle)
    }

    /// Makes the files again that had no name: under one that nobody guesses, for a moment.
    fn remake_orphans(
        &self,
        inside: &mut Inside,
        orphans: &[Orphan],
        report: &mut Report,
    ) -> Result<(), RestoreError> {
        for orphan in orphans {
            match self.orphan_again(orphan) {
                Ok(inner) => {
                    inside.table.place(orphan.node, inner);
                    report.orphans_restored += 1;
                }
                // A share that has become read-only or full: that file is gone.
                Err(error)
                    if matches!(
                        error.raw_os_error(),
                        Some(
                            libc::EROFS | libc::ENOSPC | libc::EDQUOT | libc::EACCES | libc::EPERM
                        )
                    ) => {}
                Err(source) => {
                    let path = format!("(open file {} without a name)", orphan.node);
                    return Err(RestoreError::Host { path, source });
                }
            }
        }
        Ok(())
    }

    fn orphan_again(&self, orphan: &Orphan) -> io::Result<u64> {
        let (core, us) = (self.core(), ourselves());
        let name = c_name(format!(".cube-orphan-{:016x}", random()?).as_bytes())?;
        let flags = (libc::O_RDWR | libc::O_EXCL) as u32;
        let extensions = Extensions::default();
        let (entry, handle, _) =
            core.create(us, ROOT, &name, 0o600, false, flags, 0, extensions)?;
        let inner = entry.inode;
        let filled = handle.map(|handle| {
            let filled = self.fill(orphan, inner, handle);
            self.close(inner, handle);
            filled
        });
        let unlinked = core.unlink(us, ROOT, &name);
        match filled.unwrap_or(Ok(())).and(unlinked) {
            Ok(()) => Ok(inner),
            Err(error) => {
                core.forget(us, inner, 1);
                Err(error)
            }
        }
    }

    fn fill(&self, orphan: &Orphan, inner: u64, handle: u64) -> io::Result<()> {
        let (core, us) = (self.core(), ourselves());
        for (offset, data) in &orphan.data {
            let mut done = 0;
            while let Some(left) = data.get(done..).filter(|left| !left.is_empty()) {
                let at = offset + done as u64;
                let size = left.len() as u32;
                let bytes = Bytes(left);
                let wrote =
                    core.write(us, inner, handle, bytes, size, at, None, false, false, 0)?;
                if wrote == 0 {
                    return Err(io::ErrorKind::WriteZero.into());
                }
                done += wrote;
            }
        }
        let (mtime, mtimensec) = orphan.changed;
        let attributes = SetattrIn {
            size: orphan.size,
            mode: libc::S_IFREG | orphan.mode,
            uid: orphan.uid.into(),
            gid: orphan.gid.into(),
            atime: mtime,
            mtime,
            atimensec: mtimensec,
            mtimensec,
            ..SetattrIn::default()
        };
        // Ownership before permissions: a change of it takes set-user-id away.
        for valid in [
            SetattrValid::SIZE,
            SetattrValid::UID | SetattrValid::GID,
            SetattrValid::MODE,
            SetattrValid::ATIME | SetattrValid::MTIME,
        ] {
            core.setattr(us, inner, attributes, Some(handle), valid)?;
        }
        Ok(())
    }
}

/// All nodes, none of them found yet but the root. With `lazy` those that have a name, and were not gone,
/// are cold: they can be looked up at any time.
fn take_in(inside: &mut Inside, nodes: Vec<SavedNode>, policy: Policy, lazy: bool) -> Vec<Taken> {
    inside.table.take_in(nodes, |saved| {
        let identity = match policy {
            Policy::Copy => UNKNOWN,
            _ => Identity { ino: saved.ino, btime: saved.btime },
        };
        let cold = lazy && !saved.tombstone && !saved.names.is_empty();
        (if cold { Place::Cold } else { Place::Tombstone }, identity)
    })
}

/// The same file. Where one side does not know when it was made, the number has to do.
fn is_same(was: Identity, ino: u64, seen: Seen) -> bool {
    let born = was.btime == 0 || seen.identity.btime == 0 || was.btime == seen.identity.btime;
    was.ino == ino && seen.identity.ino == ino && born
}

fn note_stale(
    inside: &Inside,
    nodes: &[Taken],
    failed: &[(u64, Name, &'static str)],
    report: &mut Report,
) {
    let reasons: std::collections::HashMap<u64, &str> = failed
        .iter()
        .filter_map(|(parent, name, reason)| Some((inside.table.child(*parent, name)?, *reason)))
        .collect();
    for node in nodes {
        let place = inside.table.node(node.id).map(|node| node.place);
        if place.is_some_and(|place| place != Place::Tombstone) {
            report.restored += 1;
            continue;
        }
        report.stale_total += 1;
        if node.was_gone || report.stale.len() >= MAX_STALE || report.policy == Policy::Remap {
            continue;
        }
        let reason = match reasons.get(&node.id) {
            Some(reason) => reason,
            None if !node.named => "without a name, and its content was not saved",
            None => "its directory is gone",
        };
        let path = inside.table.path(node.id);
        report.stale.push(Stale { id: node.id, path, reason: reason.to_owned() });
    }
}

/// A number that nobody guesses.
fn random() -> io::Result<u64> {
    let mut bytes = [0; 8];
    // SAFETY: a buffer of that length that outlives the call.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    if got == 8 { Ok(u64::from_le_bytes(bytes)) } else { Err(io::Error::last_os_error()) }
}

/// Bytes, as the library wants to be given them.
struct Bytes<'a>(&'a [u8]);

impl ZeroCopyReader for Bytes<'_> {
    fn write_to_file_at(
        &mut self,
        file: &std::fs::File,
        count: usize,
        offset: u64,
        _flags: Option<WritevFlags>,
    ) -> io::Result<usize> {
        let bytes = self.0.get(..count).unwrap_or(self.0);
        std::os::unix::fs::FileExt::write_at(file, bytes, offset)
    }
}
