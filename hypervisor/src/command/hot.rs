//! Hot pages: `cube-vmm snapshot hot`, and what `restore` is told of them.

use std::path::{Path, PathBuf};

use clap::Args;
use serde::Serialize;

use super::client::print;
use super::snapshot::size;
use crate::api::{Reply, Request};
use crate::api_socket::request;
use crate::config::number_with_unit;
use crate::snapshot::HOT_PAGES;
use crate::snapshot::hot::{HotError, HotSet};
use crate::snapshot::manifest::Manifest;
use crate::snapshot::paging::MemoryMode;
use crate::snapshot::prefetch::Plan;

/// Bytes that are prefetched at most, unless something else is asked for.
const DEFAULT_LIMIT: &str = "256M";

/// Options of `snapshot hot`.
#[derive(Args, Clone, Debug)]
pub struct HotOptions {
    /// The control socket of a VM that was restored
    #[arg(long, value_name = "PATH")]
    pub api_socket: PathBuf,

    /// The file to write, in the place of an older one [default: hot-pages in the folder that the VM was
    /// restored from]
    #[arg(long, value_name = "FILE")]
    pub to: Option<PathBuf>,

    /// Print what was recorded as JSON
    #[arg(long)]
    pub json: bool,
}

/// Has a VM write which pages its guest has touched since it was restored.
pub fn hot(options: &HotOptions) -> anyhow::Result<u8> {
    // The VM may have been started elsewhere.
    let file = options.to.as_ref().map(std::path::absolute).transpose()?;
    match request(&options.api_socket, &Request::RecordHotPages { file })? {
        Reply::HotPages(report) if options.json => {
            print(&(serde_json::to_string_pretty(&report)? + "\n"))
        }
        Reply::HotPages(report) => {
            let (pages, bytes) = (report.pages, size(report.bytes));
            print(&format!("{pages} hot pages ({bytes}) in {}\n", report.path.display()))
        }
        Reply::Error { message, .. } => anyhow::bail!("{message}"),
        other => anyhow::bail!("the VM answered record_hot_pages with {other:?}"),
    }
}

/// Options of `restore` about hot pages.
#[derive(Args, Clone, Debug)]
pub struct PrefetchOptions {
    /// Bring in, while the guest runs already, the pages that an earlier copy has touched, as
    /// `cube-vmm snapshot hot` has written them [default: hot-pages in DIR]
    #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true)]
    pub prefetch: Option<Option<PathBuf>>,

    /// Most memory that is prefetched: a number with a unit
    #[arg(long, value_name = "SIZE", default_value = DEFAULT_LIMIT, requires = "prefetch",
          value_parser = limit)]
    pub prefetch_limit: u64,
}

impl PrefetchOptions {
    /// What shall be prefetched of the snapshot in `dir`. Everything about it that can be wrong is found.
    pub fn plan(
        &self,
        dir: &Path,
        manifest: &Manifest,
        mode: &MemoryMode,
    ) -> anyhow::Result<Option<Plan>> {
        let Some(file) = &self.prefetch else { return Ok(None) };
        mode.check_prefetch()?;
        let file = file.clone().unwrap_or_else(|| dir.join(HOT_PAGES));
        let set = HotSet::read(&file, manifest)?;
        Ok(Some(Plan { set, limit: self.prefetch_limit }))
    }
}

/// Reads a number of bytes with a unit: whole pages.
fn limit(text: &str) -> Result<u64, String> {
    let read = number_with_unit(text);
    match read.and_then(|(number, shift)| number.checked_mul(1 << shift?)) {
        Some(bytes) if bytes > 0 && bytes % 4096 == 0 => Ok(bytes),
        Some(_) => Err("it is no number of whole pages of 4K; write for example 64M".to_owned()),
        None => Err("it is no number with a unit; write for example 64M".to_owned()),
    }
}

/// What `snapshot info --json` tells of a snapshot's hot pages.
#[derive(Debug, Default, Serialize)]
pub struct HotInfo {
    /// How many.
    #[serde(skip_serializing_if = "Option::is_none")]
    pages: Option<u64>,
    /// The same in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes: Option<u64>,
    /// Why they cannot be used.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

impl HotInfo {
    /// Nothing if there are none.
    pub fn of(set: Result<Option<HotSet>, HotError>) -> Option<Self> {
        Some(match set {
            Ok(set) => {
                let pages = set?.pages();
                Self { pages: Some(pages), bytes: Some(pages * 4096), error: None }
            }
            Err(error) => Self { error: Some(error.to_string()), ..Self::default() },
        })
    }
}

/// The same for people.
pub fn describe(set: Result<Option<HotSet>, HotError>) -> String {
    let text = match set {
        Ok(None) => return String::new(),
        Ok(Some(set)) => {
            let pages = set.pages();
            format!("{pages} pages, {}, for restore --prefetch", size(pages * 4096))
        }
        Err(error) => format!("cannot be used: {error}"),
    };
    format!("{:<10}{text}\n", "hot")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_have_units_and_are_whole_pages() {
        assert_eq!(limit("64M"), Ok(64 << 20));
        assert_eq!(limit("4K"), Ok(4096));
        assert_eq!(limit("1gib"), Ok(1 << 30));
        for bad in ["", "0M", "64", "M", "-1M", "1K", "99999999999T", "64MX", "6 4M", "ä"] {
            assert!(limit(bad).is_err(), "{bad:?}");
        }
    }
}
