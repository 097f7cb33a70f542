//! Who has an interface open, for the message that it is in use.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// The process that has the TAP `name` open, as far as this one may see; for people.
pub(super) fn describe(name: &str) -> String {
    // Interfaces of other namespaces may have the same name: those come last.
    let holders = holders(name);
    let near = holders.iter().find(|holder| holder.here).or(holders.first());
    near.map(|holder| holder.who.clone())
        .unwrap_or_else(|| "a process that this one may not look into".to_owned())
}

/// The same, only if it is in the network namespace of this thread.
pub(super) fn here(name: &str) -> Option<String> {
    holders(name).into_iter().find(|holder| holder.here).map(|holder| holder.who)
}

struct Holder {
    who: String,
    /// In the network namespace of this thread.
    here: bool,
}

fn holders(name: &str) -> Vec<Holder> {
    let ours = namespace(Path::new("/proc/thread-self/ns/net"));
    let mut holders = Vec::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let process = entry.path();
        let pid = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok());
        if let Some(pid) = pid.filter(|_| holds(&process, name)) {
            // Our own threads may be in several namespaces; descriptors are everywhere.
            let own = pid == std::process::id();
            let here = own || ours.is_some() && namespace(&process.join("ns/net")) == ours;
            holders.push(Holder { who: holder(pid, &process), here });
        }
    }
    holders
}

fn holder(pid: u32, process: &Path) -> String {
    let command = fs::read_to_string(process.join("comm")).unwrap_or_default();
    match pid == std::process::id() {
        true => "another network card of this process".to_owned(),
        false => format!("process {pid} ({})", command.trim()),
    }
}

fn namespace(path: &Path) -> Option<(u64, u64)> {
    fs::metadata(path).ok().map(|metadata| (metadata.dev(), metadata.ino()))
}

fn holds(process: &Path, name: &str) -> bool {
    let descriptors = fs::read_dir(process.join("fdinfo")).into_iter().flatten().flatten();
    descriptors
        .filter_map(|entry| fs::read_to_string(entry.path()).ok())
        .any(|info| interface(&info) == Some(name))
}

/// The interface that a descriptor's information speaks of.
fn interface(info: &str) -> Option<&str> {
    info.lines().find_map(|line| line.strip_prefix("iff:")).map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_interface_is_found_in_the_information() {
        let info = "pos:\t0\nflags:\t0104002\nmnt_id:\t7\nino:\t99\niff:\ttap0\n";
        assert_eq!(interface(info), Some("tap0"));
        assert_eq!(interface("pos:\t0\nflags:\t02\n"), None);
        assert_eq!(interface(""), None);
    }

    #[test]
    fn nobody_is_said_to_hold_what_nobody_holds() {
        assert!(describe("no-such-name-0").contains("may not look into"));
        assert_eq!(here("no-such-name-0"), None);
    }
}
