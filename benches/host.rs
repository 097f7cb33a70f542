//! What has to be said of the host beside every figure.

use std::fmt;
use std::fs;
use std::path::Path;
use std::thread;

use serde::Serialize;

/// Facts that figures depend on.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Host {
    /// Kernel release.
    pub kernel: String,
    /// Processor model.
    pub cpu: String,
    /// Processors this process may use.
    pub cpus: usize,
    /// Whether the host is itself a virtual machine, which multiplies the cost of every exit.
    pub virtualized: bool,
    /// The module behind `/dev/kvm`.
    pub kvm_module: String,
    /// Mode of transparent huge pages.
    pub transparent_hugepages: String,
    /// 2 or 1.
    pub cgroup_version: u8,
    /// Load average of the last minute, before the measurement.
    pub load: String,
    /// State of the page cache: every program here runs its rounds after unmeasured ones.
    pub page_cache: &'static str,
}

impl Host {
    /// Looks at this host.
    pub fn examine() -> Self {
        let cpuinfo = read("/proc/cpuinfo");
        let field = |name: &str| {
            let line = cpuinfo.lines().find(|line| line.starts_with(name)).unwrap_or_default();
            line.split_once(':').map_or("", |(_, value)| value.trim()).to_owned()
        };
        let pages = read("/sys/kernel/mm/transparent_hugepage/enabled");
        let second = Path::new("/sys/fs/cgroup/cgroup.controllers").exists();
        Self {
            kernel: read("/proc/sys/kernel/osrelease"),
            cpu: field("model name"),
            cpus: thread::available_parallelism().map_or(1, Into::into),
            virtualized: field("flags").split(' ').any(|flag| flag == "hypervisor"),
            kvm_module: kvm_module().unwrap_or_else(|| "none".to_owned()),
            transparent_hugepages: in_brackets(&pages).unwrap_or("none").to_owned(),
            cgroup_version: if second { 2 } else { 1 },
            load: read("/proc/loadavg").split(' ').next().unwrap_or_default().to_owned(),
            page_cache: "warm",
        }
    }
}

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

fn kvm_module() -> Option<String> {
    let entries = fs::read_dir("/sys/module").ok()?;
    entries
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .find(|name| name.starts_with("kvm_"))
}

fn in_brackets(line: &str) -> Option<&str> {
    line.split_once('[')?.1.split_once(']').map(|(word, _)| word)
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let nested = if self.virtualized { "itself a virtual machine" } else { "bare metal" };
        write!(
            f,
            "Linux {}, {} x {}, {nested}, {}, huge pages {}, cgroup v{}, load {}, page cache {}",
            self.kernel,
            self.cpus,
            self.cpu,
            self.kvm_module,
            self.transparent_hugepages,
            self.cgroup_version,
            self.load,
            self.page_cache,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fact_is_told() {
        let text = Host::examine().to_string();
        assert!(text.starts_with("Linux ") && text.contains("page cache warm"), "{text}");
        assert!(!text.contains("  ") && !text.contains(" ,"), "{text}");
    }

    #[test]
    fn the_chosen_word_is_in_brackets() {
        assert_eq!(in_brackets("always [madvise] never"), Some("madvise"));
        assert_eq!(in_brackets("always"), None);
    }
}
