//! What a share is: its directory, and what its guest may do there.

use std::time::Duration;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use virtiofsd::passthrough::{CachePolicy, Config, InodeFileHandlesMode, NegotiationMode};

/// Longest tag, in bytes (virtio 1.3, section 5.11.4).
pub const MAX_TAG: usize = 36;

/// How long a guest may believe what it was told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Cache {
    /// Not at all: every access is asked for.
    None,
    /// A second; file content until the next opening.
    #[default]
    Auto,
    /// A day: nobody else changes the directory.
    Always,
}

/// What a guest is told that it can do. It holds on to that, so it must be the same after a restore.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    /// Nothing can be changed.
    pub read_only: bool,
    /// How long answers are valid.
    pub cache: Cache,
    /// The guest may keep what is written for a while.
    pub writeback: bool,
    /// Extended attributes.
    pub xattr: bool,
    /// POSIX access control lists.
    pub acl: bool,
}

impl Settings {
    /// Names the first setting that differs from `other`, with both values.
    pub fn difference(&self, other: &Self) -> Option<String> {
        let differs = |name: &str, one: String, two: String| {
            (one != two).then(|| format!("{name} was {one} and is {two}"))
        };
        let flag = |name, one: bool, two: bool| differs(name, one.to_string(), two.to_string());
        flag("ro", self.read_only, other.read_only)
            .or_else(|| {
                let (one, two) = (format!("{:?}", self.cache), format!("{:?}", other.cache));
                differs("cache", one.to_lowercase(), two.to_lowercase())
            })
            .or_else(|| flag("writeback", self.writeback, other.writeback))
            .or_else(|| flag("xattr", self.xattr, other.xattr))
            .or_else(|| flag("acl", self.acl, other.acl))
    }

    /// The library's configuration for the directory `root`. Inodes are held by `O_PATH` descriptors:
    /// file handles would need a privilege that reaches all of the file system.
    pub fn config(&self, root: &str, most_descriptors: u64) -> Config {
        let (cache_policy, seconds) = match self.cache {
            Cache::None => (CachePolicy::Never, 0),
            Cache::Auto => (CachePolicy::Auto, 1),
            Cache::Always => (CachePolicy::Always, 86_400),
        };
        Config {
            entry_timeout: Duration::from_secs(seconds),
            attr_timeout: Duration::from_secs(seconds),
            cache_policy,
            writeback: self.writeback,
            root_dir: root.to_owned(),
            xattr: self.xattr || self.acl,
            posix_acl: if self.acl { NegotiationMode::Auto } else { NegotiationMode::Never },
            inode_file_handles: InodeFileHandlesMode::Never,
            readdirplus: self.cache != Cache::None,
            announce_submounts: true,
            guest_fd_limit: most_descriptors,
            ..Config::default()
        }
    }
}

/// What is done about files that are not found again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Policy {
    /// Nothing may have changed.
    Strict,
    /// It must be the same directory; what is gone from it is stale.
    #[default]
    Tolerant,
    /// Another directory takes its place: all that was known is stale, and looked up anew.
    Remap,
    /// A copy of the directory takes its place: what has the same name and kind is the same.
    Copy,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_setting_that_differs_is_named() {
        let one = Settings::default();
        assert_eq!(one.difference(&one), None);
        let other = Settings { cache: Cache::Always, ..one };
        assert_eq!(one.difference(&other).unwrap(), "cache was auto and is always");
        let other = Settings { read_only: true, ..one };
        assert_eq!(one.difference(&other).unwrap(), "ro was false and is true");
    }
}
