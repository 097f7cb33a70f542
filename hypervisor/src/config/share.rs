//! Directories of the host that the guest mounts.

use std::path::PathBuf;
use std::str::FromStr;

use devices::rate_limiter::RateLimit;
use devices::virtio::fs::{Cache, FsConfig, IdError, IdRange, MAX_TAG, Policy};
use serde::{Deserialize, Serialize};

use super::ConfigError;
use super::storage::checked_id;

/// A directory of the host, which the guest mounts by its tag.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShareConfig {
    /// By what name the guest mounts it.
    pub tag: String,
    /// The directory.
    pub path: PathBuf,
    /// The device's name. Empty: chosen by position.
    #[serde(default)]
    pub id: String,
    /// Nothing can be changed.
    #[serde(default)]
    pub read_only: bool,
    /// How long the guest may believe what it was told.
    #[serde(default)]
    pub cache: Cache,
    /// The guest may keep what is written for a while.
    #[serde(default)]
    pub writeback: bool,
    /// Extended attributes.
    #[serde(default)]
    pub xattr: bool,
    /// POSIX access control lists.
    #[serde(default)]
    pub acl: bool,
    /// Users of the guest that are others on the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid_map: Option<IdRange>,
    /// Groups of the guest that are others on the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gid_map: Option<IdRange>,
    /// How much may go through it.
    #[serde(default, skip_serializing_if = "RateLimit::is_none")]
    pub rate: RateLimit,
    /// What a restore does about files that have changed. Of that restore alone, not kept.
    #[serde(skip)]
    pub policy: Policy,
}

/// A share that makes no sense.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "each says what it is")]
pub enum ShareError {
    #[error(
        "share option {0:?} is not known; use tag=TAG,path=DIR[,id=NAME][,ro]\
         [,cache=none|auto|always][,writeback][,xattr][,acl]\
         [,uid_map=GUEST:HOST:COUNT][,gid_map=GUEST:HOST:COUNT]\
         [,rate_bytes=RATE][,rate_ops=RATE]"
    )]
    Option(String),
    #[error("share option {0:?} is given twice; leave one out")]
    Twice(String),
    #[error("share {0:?} needs both tag=TAG and path=DIR")]
    Incomplete(String),
    #[error("share tag {0:?} is not usable; take 1 to {MAX_TAG} bytes without control characters")]
    Tag(String),
    #[error("two shares have the tag {0:?}; give each its own")]
    DuplicateTag(String),
    #[error("share {tag:?}: {path:?} is in none of the directories of --fs-allow")]
    NotAllowed { tag: String, path: PathBuf },
    #[error("cache {0:?} is not known; use none, auto or always")]
    Cache(String),
    #[error(transparent)]
    Ids(#[from] IdError),
    #[error("policy {0:?} is not known; use strict, tolerant, remap or copy")]
    Policy(String),
}

fn cache(text: &str) -> Result<Cache, ShareError> {
    Ok(match text {
        "none" => Cache::None,
        "auto" => Cache::Auto,
        "always" => Cache::Always,
        _ => return Err(ShareError::Cache(text.to_owned())),
    })
}

fn ids(text: &str) -> Result<IdRange, ShareError> {
    Ok(text.parse()?)
}

/// Reads one of the policies of a restore.
pub fn policy(text: &str) -> Result<Policy, ShareError> {
    Ok(match text {
        "strict" => Policy::Strict,
        "tolerant" => Policy::Tolerant,
        "remap" => Policy::Remap,
        "copy" => Policy::Copy,
        _ => return Err(ShareError::Policy(text.to_owned())),
    })
}

impl ShareConfig {
    /// Checks what text and JSON both can say.
    pub(super) fn validate(&self) -> Result<(), ShareError> {
        let tag = &self.tag;
        match tag.is_empty() || tag.len() > MAX_TAG || tag.chars().any(char::is_control) {
            true => Err(ShareError::Tag(tag.clone())),
            false => Ok(()),
        }
    }

    /// The directory without links and detours, if it is in one of those that are allowed, or there is
    /// no such list. What is not there is left to whoever opens it.
    pub fn allowed_path(&self, allowed: &[PathBuf]) -> Result<PathBuf, ShareError> {
        let Ok(path) = self.path.canonicalize() else { return Ok(self.path.clone()) };
        let within = |list: &PathBuf| list.canonicalize().is_ok_and(|list| path.starts_with(list));
        match allowed.is_empty() || allowed.iter().any(within) {
            true => Ok(path),
            false => Err(ShareError::NotAllowed { tag: self.tag.clone(), path }),
        }
    }

    /// For the device.
    pub fn device(&self, program: PathBuf, path: PathBuf) -> FsConfig {
        FsConfig {
            read_only: self.read_only,
            cache: self.cache,
            writeback: self.writeback,
            xattr: self.xattr,
            acl: self.acl,
            uid_map: self.uid_map,
            gid_map: self.gid_map,
            rate: self.rate,
            policy: self.policy,
            ..FsConfig::new(program, &self.tag, path)
        }
    }
}

impl FromStr for ShareConfig {
    type Err = ConfigError;

    /// Reads `tag=TAG,path=DIR` and the options, in any order.
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let mut share = Self {
            tag: String::new(),
            path: PathBuf::new(),
            id: String::new(),
            read_only: false,
            cache: Cache::default(),
            writeback: false,
            xattr: false,
            acl: false,
            uid_map: None,
            gid_map: None,
            rate: RateLimit::default(),
            policy: Policy::default(),
        };
        let mut seen = Vec::new();
        for option in text.split(',') {
            let (key, value) = option.split_once('=').unwrap_or((option, ""));
            if seen.contains(&key) {
                return Err(ShareError::Twice(option.to_owned()).into());
            }
            seen.push(key);
            match (key, value.is_empty()) {
                ("tag", false) => share.tag = value.to_owned(),
                ("path", false) => share.path = value.into(),
                ("id", _) => share.id = checked_id(value)?,
                ("cache", _) => share.cache = cache(value)?,
                ("uid_map", _) => share.uid_map = Some(ids(value)?),
                ("rate_bytes", _) => share.rate.bytes = Some(value.parse()?),
                ("rate_ops", _) => share.rate.operations = Some(value.parse()?),
                ("gid_map", _) => share.gid_map = Some(ids(value)?),
                _ if option == "ro" => share.read_only = true,
                _ if option == "writeback" => share.writeback = true,
                _ if option == "xattr" => share.xattr = true,
                _ if option == "acl" => share.acl = true,
                _ => return Err(ShareError::Option(option.to_owned()).into()),
            }
        }
        if share.tag.is_empty() || share.path.as_os_str().is_empty() {
            return Err(ShareError::Incomplete(text.to_owned()).into());
        }
        share.validate()?;
        Ok(share)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_read_from_options() {
        let share: ShareConfig =
            "tag=work,path=/a,ro,cache=always,id=w,xattr,gid_map=0:5:1".parse().unwrap();
        assert_eq!((share.tag.as_str(), share.id.as_str()), ("work", "w"));
        assert!(share.read_only && share.xattr && !share.acl && !share.writeback);
        assert_eq!((share.path.to_str(), share.cache), (Some("/a"), Cache::Always));
        let json = serde_json::to_string(&share).unwrap();
        assert_eq!(serde_json::from_str::<ShareConfig>(&json).unwrap(), share);
    }

    #[test]
    fn a_list_of_directories_keeps_shares_within_it_whatever_leads_there() {
        let host = tempfile::tempdir().unwrap();
        let at = |name: &str| host.path().join(name);
        for name in ["allowed/a", "allowed-too", "secret"] {
            std::fs::create_dir_all(at(name)).unwrap();
        }
        std::os::unix::fs::symlink(at("secret"), at("allowed/link")).unwrap();
        let share = |path: &str| {
            let text = format!("tag=t,path={}", at(path).display());
            text.parse::<ShareConfig>().unwrap()
        };
        let list = [at("allowed")];
        assert_eq!(share("allowed/a").allowed_path(&list), Ok(at("allowed/a")));
        assert!(share("allowed").allowed_path(&list).is_ok());
        for path in ["secret", "allowed-too", "allowed/../secret", "allowed/link", "."] {
            let refused = share(path).allowed_path(&list).unwrap_err().to_string();
            assert!(refused.contains("--fs-allow"), "{path}: {refused}");
        }
        assert_eq!(share("allowed/../secret").allowed_path(&[]), Ok(at("secret")));
    }

    #[test]
    fn bad_share_options_are_refused() {
        let long = format!("tag={},path=/a", "x".repeat(MAX_TAG + 1));
        for (text, words) in [
            ("", "is not known"),
            ("tag=a", "needs both"),
            ("path=/a", "needs both"),
            ("tag=,path=/a", "is not known"),
            ("tag=a,path=/a,ro=1", "\"ro=1\" is not known"),
            ("tag=a,path=/a,tag=b", "given twice"),
            ("tag=a,path=/a,cache=fast", "none, auto or always"),
            ("tag=a,path=/a,rate_ops=0/s", "at least 1"),
            ("tag=a,path=/a,uid_map=1:2", "GUEST:HOST:COUNT"),
            ("tag=a,path=/a,id=b/c", "1 to 20 letters"),
            ("tag=a\tb,path=/a", "is not usable"),
            (&long, "is not usable"),
        ] {
            let error = text.parse::<ShareConfig>().unwrap_err().to_string();
            assert!(error.contains(words) && !error.contains('\n'), "{text}: {error}");
        }
    }
}
