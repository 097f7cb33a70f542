//! Settings of the host kernel and limits of this process, as files and limits tell them.

use std::fs;
use std::path::Path;

use super::check::Check;

/// Reads the settings below `root`, which is `/` except in tests, and this process's limits.
pub(super) fn examine(root: &Path) -> Vec<Check> {
    vec![
        nested(root),
        cgroup(root),
        transparent_hugepages(root),
        hugepages(root),
        open_files(soft_limit(libc::RLIMIT_NOFILE)),
        locked_memory(soft_limit(libc::RLIMIT_MEMLOCK)),
    ]
}

/// The loaded module that implements `/dev/kvm`, such as `kvm_amd`.
pub(super) fn kvm_module(root: &Path) -> Option<String> {
    let entries = fs::read_dir(root.join("sys/module")).ok()?;
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| name.starts_with("kvm_"))
        .collect();
    names.sort();
    names.into_iter().next()
}

/// The trimmed text of a small file.
pub(super) fn read(root: &Path, path: &str) -> Option<String> {
    fs::read_to_string(root.join(path)).ok().map(|text| text.trim().to_owned())
}

fn nested(root: &Path) -> Check {
    const NAME: &str = "nested";
    const MEANING: &str = "guests can run guests of their own";
    let value = |module: &str| read(root, &format!("sys/module/{module}/parameters/nested"));
    let found = ["kvm_intel", "kvm_amd"]
        .into_iter()
        .find_map(|module| value(module).map(|value| (module, value)));
    match found {
        Some((module, value)) if value == "1" || value == "Y" => {
            Check::ok(NAME, format!("{module}.nested={value}"), MEANING)
        }
        Some((module, value)) => Check::missing(
            NAME,
            format!("{module}.nested={value}"),
            MEANING,
            format!("modprobe -r {module} && modprobe {module} nested=1"),
        ),
        None => Check::missing(
            NAME,
            "neither kvm_intel nor kvm_amd is loaded",
            MEANING,
            "use a host whose processor's virtualization is visible",
        ),
    }
}

fn cgroup(root: &Path) -> Check {
    const NAME: &str = "cgroup";
    const MEANING: &str = "limits of a sandbox's processes";
    const CURE: &str = "boot with systemd.unified_cgroup_hierarchy=1";
    if let Some(controllers) = read(root, "sys/fs/cgroup/cgroup.controllers") {
        return Check::ok(NAME, format!("v2: {controllers}"), MEANING);
    }
    let first = |name: &str| root.join("sys/fs/cgroup").join(name).is_dir();
    match (first("memory") || first("cpu"), first("unified")) {
        (true, true) => Check::limited(NAME, "v1, v2 without controllers", MEANING, CURE),
        (true, false) => Check::limited(NAME, "v1", MEANING, CURE),
        _ => Check::missing(NAME, "none", MEANING, "mount -t cgroup2 cgroup2 /sys/fs/cgroup"),
    }
}

fn transparent_hugepages(root: &Path) -> Check {
    const NAME: &str = "transparent-hugepages";
    const PATH: &str = "sys/kernel/mm/transparent_hugepage/enabled";
    const MEANING: &str = "fewer faults and TLB misses in guest memory";
    const CURE: &str = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled";
    let Some(text) = read(root, PATH) else {
        let cure = "run a host kernel built with CONFIG_TRANSPARENT_HUGEPAGE";
        return Check::missing(NAME, "not in this kernel", MEANING, cure);
    };
    match chosen(&text) {
        Some(mode @ ("always" | "madvise")) => Check::ok(NAME, mode, MEANING),
        Some(mode) => Check::limited(NAME, mode, "guest memory is of 4 KiB pages only", CURE),
        None => Check::limited(NAME, text, MEANING, CURE),
    }
}

/// The word in brackets of a line such as `always [madvise] never`.
fn chosen(line: &str) -> Option<&str> {
    line.split_once('[')?.1.split_once(']').map(|(word, _)| word)
}

fn hugepages(root: &Path) -> Check {
    const NAME: &str = "hugepages-2m";
    const MEANING: &str = "reserved 2 MiB pages for guests that are configured to use them";
    const CURE: &str = "sysctl vm.nr_hugepages=N";
    let number = |name: &str| {
        let path = format!("sys/kernel/mm/hugepages/hugepages-2048kB/{name}");
        read(root, &path)?.parse::<u64>().ok()
    };
    match (number("free_hugepages"), number("nr_hugepages")) {
        (Some(0), Some(0)) => Check::missing(NAME, "none reserved", MEANING, CURE),
        (Some(free), Some(all)) if free > 0 => {
            Check::ok(NAME, format!("{free} free of {all}"), MEANING)
        }
        (Some(free), Some(all)) => {
            Check::limited(NAME, format!("{free} free of {all}"), MEANING, CURE)
        }
        _ => {
            let cure = "run a host kernel built with CONFIG_HUGETLBFS";
            Check::missing(NAME, "not in this kernel", MEANING, cure)
        }
    }
}

/// A soft limit; `None` when there is no limit.
fn soft_limit(resource: libc::__rlimit_resource_t) -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel writes one rlimit into a live local. A failure, which these resources
    // do not have, would leave zero.
    unsafe { libc::getrlimit(resource, &mut limit) };
    (limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

fn describe_limit(limit: Option<u64>, unit: &str) -> String {
    limit.map_or_else(|| "unlimited".to_owned(), |limit| format!("{limit}{unit}"))
}

fn open_files(limit: Option<u64>) -> Check {
    const NAME: &str = "open-files";
    // A guest of 32 vCPUs with 16 queues on each of 8 devices has fewer descriptors than this.
    const ENOUGH: u64 = 1024;
    let value = describe_limit(limit, "");
    match limit {
        Some(..ENOUGH) => Check::limited(
            NAME,
            value,
            "guests with many vCPUs, queues or shared files may not start",
            "ulimit -n 65536 (LimitNOFILE= in a service)",
        ),
        _ => Check::ok(NAME, value, "descriptors for vCPUs, queues and shared files"),
    }
}

fn locked_memory(limit: Option<u64>) -> Check {
    const NAME: &str = "locked-memory";
    // What eight io_uring instances of 256 entries lock on kernels that count them (before 5.12).
    const ENOUGH: u64 = 1 << 20;
    let value = describe_limit(limit, " bytes");
    match limit {
        Some(..ENOUGH) => Check::limited(
            NAME,
            value,
            "io_uring disks may not start on kernels before 5.12",
            "ulimit -l 8192 (LimitMEMLOCK= in a service)",
        ),
        _ => Check::ok(NAME, value, "memory for io_uring rings on kernels before 5.12"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::Status;
    use super::*;
    use vmm_sys_util::tempdir::TempDir;

    /// A root file system with these files.
    fn root(files: &[(&str, &str)]) -> TempDir {
        let directory = TempDir::new().unwrap();
        for (path, text) in files {
            let path = directory.as_path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        directory
    }

    #[test]
    fn nesting_is_read_from_the_module_that_is_loaded() {
        let amd = root(&[("sys/module/kvm_amd/parameters/nested", "1\n")]);
        let intel = root(&[("sys/module/kvm_intel/parameters/nested", "N\n")]);
        let neither = root(&[("sys/module/kvm_pvm/version", "1\n")]);
        assert_eq!(nested(amd.as_path()).value, "kvm_amd.nested=1");
        assert_eq!(nested(intel.as_path()).status, Status::Missing);
        assert_eq!(nested(neither.as_path()).value, "neither kvm_intel nor kvm_amd is loaded");
    }

    #[test]
    fn the_module_is_the_one_below_kvm() {
        let pvm = root(&[("sys/module/kvm/x", ""), ("sys/module/kvm_pvm/x", "")]);
        assert_eq!(kvm_module(pvm.as_path()).as_deref(), Some("kvm_pvm"));
        assert_eq!(kvm_module(root(&[]).as_path()), None);
    }

    #[test]
    fn cgroup_versions_are_told_apart() {
        let second = root(&[("sys/fs/cgroup/cgroup.controllers", "cpu memory\n")]);
        let first = root(&[("sys/fs/cgroup/memory/tasks", "")]);
        let both = root(&[("sys/fs/cgroup/cpu/x", ""), ("sys/fs/cgroup/unified/x", "")]);
        assert_eq!(cgroup(second.as_path()).value, "v2: cpu memory");
        assert_eq!(cgroup(first.as_path()).value, "v1");
        assert_eq!(cgroup(both.as_path()).value, "v1, v2 without controllers");
        assert_eq!(cgroup(root(&[]).as_path()).status, Status::Missing);
    }

    #[test]
    fn the_bracketed_page_mode_counts() {
        let with = |text| root(&[("sys/kernel/mm/transparent_hugepage/enabled", text)]);
        let check = transparent_hugepages(with("always [madvise] never\n").as_path());
        assert_eq!((check.status, check.value.as_str()), (Status::Ok, "madvise"));
        let check = transparent_hugepages(with("always madvise [never]\n").as_path());
        assert_eq!((check.status, check.value.as_str()), (Status::Limited, "never"));
        assert_eq!(transparent_hugepages(root(&[]).as_path()).status, Status::Missing);
    }

    #[test]
    fn hugepages_count_when_some_are_free() {
        let with = |free, all| {
            root(&[
                ("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", free),
                ("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", all),
            ])
        };
        assert_eq!(hugepages(with("0\n", "0\n").as_path()).value, "none reserved");
        assert_eq!(hugepages(with("0\n", "8\n").as_path()).status, Status::Limited);
        assert_eq!(hugepages(with("3\n", "8\n").as_path()).value, "3 free of 8");
    }

    #[test]
    fn limits_are_judged_by_their_soft_value() {
        assert_eq!(open_files(Some(256)).status, Status::Limited);
        assert_eq!(open_files(Some(1024)).status, Status::Ok);
        assert_eq!(open_files(None).value, "unlimited");
        assert_eq!(locked_memory(Some(65536)).status, Status::Limited);
        assert_eq!(locked_memory(Some(8 << 20)).value, "8388608 bytes");
    }
}
