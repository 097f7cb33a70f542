//! Processes of this program that nobody has written down: a `start` that is stopped before it has
//! answered, a shim that is stopped before it has made its record. Neither ends by itself, and the first may hold
//! the lock that all starts wait for.

use std::fs;
use std::path::Path;

use crate::record::Identity;

/// How the names of this program begin.
const NAME: &str = "containerd-shim-cube";
/// Options that have a value (containerd's, `start -h`).
const VALUED: [&str; 6] =
    ["-namespace", "-id", "-address", "-publish-binary", "-bundle", "-socket"];

/// Of which container or sandbox they are.
#[derive(Clone, Copy, Debug)]
pub struct Of<'a> {
    /// The containerd namespace.
    pub namespace: &'a str,
    /// The socket of the containerd that has started them.
    pub address: &'a str,
    /// The names that they may have.
    pub ids: &'a [&'a str],
}

impl Of<'_> {
    /// All that are stopped, but for the process that asks.
    pub fn find(&self) -> Vec<Identity> {
        let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
        let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        let ours = pids.filter(|pid| *pid != std::process::id());
        ours.filter(|pid| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            self.is_one(&String::from_utf8_lossy(&line))
        })
        .filter_map(Identity::of)
        .filter(Identity::is_stopped)
        .collect()
    }

    /// Whether a command line, whose words end with NULs, is one of theirs: of a shim, or of `start`.
    fn is_one(&self, line: &str) -> bool {
        let mut words = line.split_terminator('\0');
        let program = words.next().and_then(|program| Path::new(program).file_name());
        if !program.is_some_and(|name| name.to_string_lossy().starts_with(NAME)) {
            return false;
        }
        let (mut namespace, mut address, mut id) = ("", "", "");
        while let Some(word) = words.next() {
            let value = if VALUED.contains(&word) { words.next() } else { None };
            match (word, value.unwrap_or_default()) {
                ("-namespace", value) => namespace = value,
                ("-address", value) => address = value,
                ("-id", value) => id = value,
                // Whoever ends or saves one is not it.
                (action, _) if !action.starts_with('-') && action != "start" => return false,
                _ => {}
            }
        }
        namespace == self.namespace && address == self.address && self.ids.contains(&id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(words: &str) -> String {
        words.split(' ').flat_map(|word| [word, "\0"]).collect()
    }

    #[test]
    fn a_start_and_a_shim_are_known_by_what_they_were_told() {
        let of = Of { namespace: "k8s.io", address: "/run/c.sock", ids: &["web", "delete"] };
        for ours in [
            "/bin/containerd-shim-cube-v2 -namespace k8s.io -address /run/c.sock -publish-binary /x -id web start",
            "containerd-shim-cube-rs -namespace k8s.io -id web -address /run/c.sock -debug",
            "containerd-shim-cube-v2 -namespace k8s.io -id delete -address /run/c.sock",
        ] {
            assert!(of.is_one(&line(ours)), "{ours}");
        }
        for other in [
            "",
            "containerd-shim-cube-v2",
            "containerd-shim-cube-v2 -namespace k8s.io -id",
            "containerd-shim-runc-v2 -namespace k8s.io -address /run/c.sock -id web start",
            "containerd-shim-cube-v2 -namespace k8s.io -address /run/c.sock -id web2 start",
            "containerd-shim-cube-v2 -namespace default -address /run/c.sock -id web start",
            "containerd-shim-cube-v2 -namespace k8s.io -address /run/other.sock -id web start",
            "containerd-shim-cube-v2 -namespace k8s.io -address /run/c.sock -id web -bundle /b delete",
            "containerd-shim-cube-v2 -namespace k8s.io -id web -address /run/c.sock checkpoint /dir",
        ] {
            assert!(!of.is_one(&line(other)), "{other}");
        }
    }

    #[test]
    fn the_process_that_asks_is_none() {
        assert!(Of { namespace: "", address: "", ids: &[""] }.find().is_empty());
    }
}
