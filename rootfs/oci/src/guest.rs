//! What the guest has, as far as the adaptation of a spec asks for it.

use serde_json::Value;
use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

/// The kind and the numbers of a device file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device {
    /// `c` or `b`.
    pub kind: char,
    /// Its major number.
    pub major: i64,
    /// Its minor number.
    pub minor: i64,
}

/// Facts of the guest.
#[derive(Clone, Debug, Default)]
pub struct Guest {
    /// The processors that are online.
    pub cpus: BTreeSet<u32>,
    /// The highest limit of open files that the kernel grants.
    pub max_files: u64,
    /// Whether the kernel accounts for swap.
    pub swap: bool,
    /// The file systems that the kernel knows.
    pub filesystems: BTreeSet<String>,
    /// The sizes of huge pages, as in `2MB`.
    pub huge_pages: BTreeSet<String>,
    /// Device files.
    pub devices: HashMap<String, Device>,
}

impl Guest {
    /// This one, with the devices that `spec` names.
    pub fn look(spec: &Value) -> Self {
        let named = spec.pointer("/linux/devices").and_then(Value::as_array);
        let paths = named.into_iter().flatten().filter_map(|device| device["path"].as_str());
        let found = |path: &str| Some((path.to_owned(), device(Path::new(path))?));
        let controllers = read("/sys/fs/cgroup/cgroup.controllers");
        Self {
            cpus: parse_list(&read("/sys/devices/system/cpu/online")).unwrap_or_default(),
            max_files: read("/proc/sys/fs/nr_open").parse().unwrap_or(1 << 20),
            swap: controllers.split(' ').any(|name| name == "memory") && has_swap(),
            filesystems: read("/proc/filesystems")
                .lines()
                .filter_map(|line| line.split_whitespace().last().map(str::to_owned))
                .collect(),
            huge_pages: huge_pages(),
            devices: paths.filter_map(found).collect(),
        }
    }
}

/// `/proc/swaps` is there if, and only if, the kernel can swap at all.
fn has_swap() -> bool {
    Path::new("/proc/swaps").exists()
}

fn read(path: &str) -> String {
    fs::read_to_string(path).map(|text| text.trim().to_owned()).unwrap_or_default()
}

fn device(path: &Path) -> Option<Device> {
    let metadata = fs::metadata(path).ok()?;
    let kind = match metadata.file_type() {
        kind if kind.is_char_device() => 'c',
        kind if kind.is_block_device() => 'b',
        _ => return None,
    };
    let rdev = metadata.rdev();
    let (major, minor) = (libc::major(rdev), libc::minor(rdev));
    Some(Device { kind, major: i64::from(major), minor: i64::from(minor) })
}

fn huge_pages() -> BTreeSet<String> {
    let entries = fs::read_dir("/sys/kernel/mm/hugepages").into_iter().flatten().flatten();
    let size = |name: String| -> Option<String> {
        let kib: u64 = name.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok()?;
        Some(match kib {
            kib if kib.is_multiple_of(1 << 20) => format!("{}GB", kib >> 20),
            kib if kib.is_multiple_of(1 << 10) => format!("{}MB", kib >> 10),
            kib => format!("{kib}KB"),
        })
    };
    entries.filter_map(|entry| size(entry.file_name().into_string().ok()?)).collect()
}

/// A list as the kernel writes it, such as `0-3,8`; `None` if it is none.
pub fn parse_list(text: &str) -> Option<BTreeSet<u32>> {
    /// No kernel has more processors.
    const MOST: u32 = 8192;

    let mut all = BTreeSet::new();
    for part in text.trim().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u32, u32) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        if last >= MOST {
            return None;
        }
        all.extend(first..=last);
    }
    Some(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_numbers_and_ranges() {
        let list = |text| parse_list(text).map(|set| set.into_iter().collect::<Vec<_>>());
        assert_eq!(list("0-2,5\n"), Some(vec![0, 1, 2, 5]));
        assert_eq!(list(""), Some(vec![]));
        assert_eq!((list("a"), list("0-4000000000")), (None, None));
    }

    #[test]
    fn this_machine_has_processors_files_and_a_null_device() {
        let spec = serde_json::json!({ "linux": { "devices": [
            { "path": "/dev/null" }, { "path": "/dev/nosuch" }, { "path": "/etc" }
        ] } });
        let guest = Guest::look(&spec);
        assert!(guest.cpus.contains(&0) && guest.filesystems.contains("proc"));
        let null = Device { kind: 'c', major: 1, minor: 3 };
        assert_eq!(guest.devices, HashMap::from([("/dev/null".to_owned(), null)]));
    }
}
