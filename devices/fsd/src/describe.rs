//! What a saved state holds, for people.
//!
//! `cube-fsd --describe` reads one on its standard input, and prints this as JSON. It was written by who
//! knows whom: before it is read, all system calls are given up but those of a server.

use std::io::{self, Read, Write};

use serde::Serialize;

use crate::jail::{self, JailError};
use crate::journal::table_of;
use crate::share::Settings;
use crate::state::{MAX_BYTES, ShareIdentity, State, StateError};

/// Most entries of [`Content::open`].
const MOST: usize = 100;

/// What is in a state.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Content {
    /// The tag.
    pub tag: String,
    /// Where the directory was on the host.
    pub path: String,
    /// What the guest was told that it can do.
    pub settings: Settings,
    /// Bytes of the state.
    pub bytes: usize,
    /// The guest has mounted it.
    pub mounted: bool,
    /// Files and directories that the guest knows, the root among them.
    pub nodes: usize,
    /// Those of them that had been found to be gone.
    pub stale: usize,
    /// What it has open.
    pub handles: usize,
    /// Files that are open and have no name, with their content.
    pub orphans: usize,
    /// Bytes of their content.
    pub orphan_bytes: u64,
    /// Paths of what is open, the first of them, each once.
    pub open: Vec<String>,
}

/// Tells what is in `bytes`, if it is a state that a restore would take.
pub fn describe(bytes: &[u8]) -> Result<Content, StateError> {
    let State { share: ShareIdentity { tag, path, .. }, settings, mount } = State::parse(bytes)?;
    let content = Content { tag, path, settings, bytes: bytes.len(), ..Content::default() };
    let Some(mut mount) = mount else { return Ok(content) };
    let orphans = std::mem::take(&mut mount.orphans);
    let (handles, nodes) = (mount.handles.len(), mount.nodes.len());
    let stale = mount.nodes.iter().filter(|node| node.tombstone).count();
    let mut open: Vec<u64> = mount.handles.iter().map(|handle| handle.node).collect();
    open.sort_unstable();
    open.dedup();
    let table = table_of(mount);
    Ok(Content {
        mounted: true,
        nodes,
        stale,
        handles,
        orphans: orphans.len(),
        orphan_bytes: orphans
            .iter()
            .flat_map(|one| &one.data)
            .map(|(_, data)| data.len() as u64)
            .sum(),
        open: open.into_iter().take(MOST).map(|node| table.path(node)).collect(),
        ..content
    })
}

/// Why nothing is told.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "each says what it is")]
pub enum DescribeError {
    #[error("the state cannot be read: {0}")]
    Read(io::Error),
    #[error("the state cannot be used: {0}")]
    State(#[from] StateError),
    #[error(transparent)]
    Jail(#[from] JailError),
    #[error("what it holds cannot be written: {0}")]
    Write(io::Error),
}

/// Does what `--describe` asks for.
pub fn run() -> Result<(), DescribeError> {
    let mut bytes = Vec::new();
    let most = MAX_BYTES as u64 + 1;
    io::stdin().take(most).read_to_end(&mut bytes).map_err(DescribeError::Read)?;
    jail::restrict_calls()?;
    let content = describe(&bytes)?;
    let text =
        serde_json::to_string(&content).map_err(|error| DescribeError::Write(error.into()))?;
    io::stdout().write_all(text.as_bytes()).map_err(DescribeError::Write)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::tests::example;

    #[test]
    fn what_is_in_a_state_is_told() {
        let state = example();
        let mount = state.mount.clone().unwrap();
        let content = describe(&state.to_bytes().unwrap()).unwrap();
        assert_eq!((content.mounted, content.tag.as_str()), (true, state.share.tag.as_str()));
        assert_eq!(content.nodes, mount.nodes.len());
        assert_eq!((content.handles, content.orphans), (mount.handles.len(), mount.orphans.len()));
        assert!(!content.open.is_empty() && content.open.len() <= mount.handles.len());
        let unmounted = State { mount: None, ..state };
        assert!(!describe(&unmounted.to_bytes().unwrap()).unwrap().mounted);
        assert!(describe(b"none").is_err());
    }
}
