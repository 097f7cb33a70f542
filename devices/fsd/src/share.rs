//! What a share is: its directory, and what its guest may do there.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use virtiofsd::passthrough::{CachePolicy, Config, InodeFileHandlesMode, NegotiationMode};
use virtiofsd::soft_idmap::cmdline::IdMap;

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

/// Ids of the guest that are others on the host: so many from there on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdRange {
    /// The first one of the guest.
    pub guest: u32,
    /// What that one is on the host.
    pub host: u32,
    /// How many there are.
    pub count: u32,
}

impl fmt::Display for IdRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.guest, self.host, self.count)
    }
}

impl FromStr for IdRange {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts: Result<Vec<u32>, _> = text.split(':').map(str::parse).collect();
        let Ok(&[guest, host, count]) = parts.as_deref() else {
            return Err(format!("{text:?} is not GUEST:HOST:COUNT"));
        };
        let fits = |first: u32| first.checked_add(count).is_some();
        match count > 0 && fits(guest) && fits(host) {
            true => Ok(Self { guest, host, count }),
            false => Err(format!("{text:?} is not a range of ids below 2^32")),
        }
    }
}

impl IdRange {
    /// Whom the guest sees as the owner of what none of its ids owns.
    const NOBODY: u32 = 65_534;

    /// For the library, which passes on as it is whatever it is not told of: so it is told of all.
    fn map(self) -> Vec<IdMap> {
        let Self { guest, host, count } = self;
        let rest = |first: u32| {
            let after = first.saturating_add(count);
            let ranges = [(0, first), (after, u32::MAX - after)];
            ranges.into_iter().filter(|(_, count)| *count > 0)
        };
        let forbidden = |(from_guest, count)| IdMap::ForbidGuest { from_guest, count };
        let foreign =
            |(from_host, count)| IdMap::SquashHost { from_host, to_guest: Self::NOBODY, count };
        let all = [IdMap::Bidirectional { guest, host, count }];
        all.into_iter().chain(rest(guest).map(forbidden)).chain(rest(host).map(foreign)).collect()
    }
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
    /// Users. `None`: they are the same.
    pub uid_map: Option<IdRange>,
    /// Groups. `None`: they are the same.
    pub gid_map: Option<IdRange>,
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
            .or_else(|| differs("uid_map", shown(self.uid_map), shown(other.uid_map)))
            .or_else(|| differs("gid_map", shown(self.gid_map), shown(other.gid_map)))
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
            uid_map: self.uid_map.map(IdRange::map),
            gid_map: self.gid_map.map(IdRange::map),
            ..Config::default()
        }
    }
}

fn shown(map: Option<IdRange>) -> String {
    map.map_or_else(|| "none".to_owned(), |map| map.to_string())
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
        let other = Settings { uid_map: "0:1000:1".parse().ok(), ..one };
        assert_eq!(one.difference(&other).unwrap(), "uid_map was none and is 0:1000:1");
    }

    #[test]
    fn ranges_of_ids_are_read_and_what_is_none_is_refused() {
        let range: IdRange = "1:100000:65535".parse().unwrap();
        assert_eq!(range, IdRange { guest: 1, host: 100_000, count: 65_535 });
        for text in
            ["", "1", "1:2", "1:2:0", "-1:2:3", "4294967295:0:2", "0:4294967295:2", "1:2:3:4"]
        {
            assert!(text.parse::<IdRange>().unwrap_err().contains(text), "{text}");
        }
    }
}
