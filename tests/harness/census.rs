//! Processes, files and memory, as `/proc` has them.

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::place::MARK;

/// How long descriptors of connections that are gone may take to be closed.
const SETTLES: Duration = Duration::from_secs(20);

/// The processes that were started from the place with this root, in words. Whoever they were
/// orphaned to: the environment tells.
pub fn marked(root: &Path) -> Vec<String> {
    let mark = format!("{MARK}={}\0", root.display());
    let is_marked = |process: &PathBuf| {
        let environment = fs::read(process.join("environ")).unwrap_or_default();
        environment.windows(mark.len()).any(|window| window == mark.as_bytes())
    };
    processes().into_iter().filter(is_marked).map(|process| describe(&process)).collect()
}

fn processes() -> Vec<PathBuf> {
    let is_process = |path: &PathBuf| {
        path.file_name().is_some_and(|name| name.as_encoded_bytes().iter().all(u8::is_ascii_digit))
    };
    let entries = fs::read_dir("/proc").unwrap();
    entries.filter_map(|entry| Some(entry.ok()?.path())).filter(is_process).collect()
}

fn describe(process: &Path) -> String {
    let line = fs::read(process.join("cmdline")).unwrap_or_default();
    let words = String::from_utf8_lossy(&line).replace('\0', " ");
    format!("process {} {}", process.display(), words.trim_end())
}

/// What the places where programs put temporary things hold of ours, and how many processes run
/// `cube-vmm`. To be compared with an earlier one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Census {
    /// `cube-vmm` processes, by command line.
    pub processes: Vec<String>,
    /// Entries of temporary folders whose name is of ours. Those of running tests do not count.
    pub files: Vec<PathBuf>,
    /// Descriptors of this process.
    pub descriptors: usize,
}

impl Census {
    /// Looks now.
    pub fn take() -> Self {
        let runs_vmm = |process: &PathBuf| {
            let name = fs::read_to_string(process.join("comm")).unwrap_or_default();
            name.trim_end() == "cube-vmm"
        };
        let mut vmms: Vec<_> = processes().into_iter().filter(runs_vmm).collect();
        vmms.sort();
        let mut files: Vec<_> = ["/tmp", "/var/tmp", "/run", "/dev/shm"]
            .into_iter()
            .flat_map(|folder| fs::read_dir(folder).into_iter().flatten())
            .filter_map(|entry| Some(entry.ok()?.path()))
            .filter(|path| is_of_ours(path))
            .collect();
        files.sort();
        let processes = vmms.iter().map(|process| describe(process)).collect();
        Self { processes, files, descriptors: descriptors("self".as_ref()).len() }
    }
}

fn is_of_ours(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
    let ours = ["cube", "vmm", "vsock", "kvm"].iter().any(|word| name.contains(word));
    ours && !name.starts_with("cube-test-") && !name.starts_with("cubevmm-lab")
}

/// What each descriptor of a process is.
pub fn descriptors(process: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(Path::new("/proc").join(process).join("fd")) else {
        return Vec::new();
    };
    // The one that reads the folder has no target any more.
    entries.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok()).collect()
}

/// Waits until a process holds no more descriptors than `most`.
///
/// # Panics
/// If it keeps more.
#[track_caller]
pub fn assert_descriptors(process: &Path, most: usize) {
    let deadline = Instant::now() + SETTLES;
    loop {
        let held = descriptors(process);
        if held.len() <= most {
            return;
        }
        assert!(Instant::now() < deadline, "{} descriptors, not {most}: {held:#?}", held.len());
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// How many descriptors a process holds once that has not changed for a while.
pub fn settled_descriptors(process: &Path) -> usize {
    let deadline = Instant::now() + SETTLES;
    let (mut count, mut since) = (descriptors(process).len(), Instant::now());
    while since.elapsed() < Duration::from_secs(1) && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(20));
        let now = descriptors(process).len();
        if now != count {
            (count, since) = (now, Instant::now());
        }
    }
    count
}

/// Bytes of memory that a process has for itself (its proportional set size), without guest RAM:
/// private anonymous mappings of at least `guest_ram` bytes.
pub fn private_memory(process: u32, guest_ram: u64) -> u64 {
    let smaps = fs::read_to_string(format!("/proc/{process}/smaps")).unwrap();
    let mut in_guest_ram = false;
    let mut sum = 0;
    for line in smaps.lines() {
        let (head, rest) = line.split_once([' ', ':']).unwrap_or((line, ""));
        if let Some((start, end)) = head.split_once('-') {
            let at = |text| u64::from_str_radix(text, 16).unwrap();
            in_guest_ram = at(end) - at(start) >= guest_ram;
        } else if head == "Pss" && !in_guest_ram {
            let kib: u64 =
                rest.trim_start_matches([':', ' ']).split(' ').next().unwrap().parse().unwrap();
            sum += kib << 10;
        }
    }
    sum
}

/// Bytes of memory of a process, those that it shares in proportion.
pub fn proportional_set_size(process: u32) -> u64 {
    let rollup = fs::read_to_string(format!("/proc/{process}/smaps_rollup")).unwrap();
    let line = rollup.lines().find_map(|line| line.strip_prefix("Pss:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

/// What of a file is in a process's memory, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileMapping {
    /// All of it.
    pub resident: u64,
    /// Its share of what others have in memory, too.
    pub proportional: u64,
    /// What differs from the file.
    pub private_dirty: u64,
}

/// Looks at the mappings of a file in a process.
///
/// # Panics
/// If it has none.
#[track_caller]
pub fn file_mapping(process: u32, file: &str) -> FileMapping {
    let smaps = fs::read_to_string(format!("/proc/{process}/smaps")).unwrap();
    let mut sum = None;
    let mut is_of_file = false;
    for line in smaps.lines() {
        let mut words = line.split_whitespace();
        let (Some(name), Some(value)) = (words.next(), words.next()) else { continue };
        if !name.ends_with(':') {
            is_of_file = line.ends_with(file);
            continue;
        }
        if !is_of_file {
            continue;
        }
        let mapping: &mut FileMapping = sum.get_or_insert_default();
        let bytes = || value.parse::<u64>().unwrap() << 10;
        match name {
            "Rss:" => mapping.resident += bytes(),
            "Pss:" => mapping.proportional += bytes(),
            "Private_Dirty:" => mapping.private_dirty += bytes(),
            _ => {}
        }
    }
    sum.unwrap_or_else(|| panic!("no mapping of {file} in:\n{smaps}"))
}

/// Kills the process of that name which has `path` among its arguments, and waits until it is gone.
///
/// # Panics
/// If there is none.
#[track_caller]
pub fn kill(name: &str, path: &Path) {
    let is_it = |process: &PathBuf| {
        let called = fs::read_to_string(process.join("comm")).unwrap_or_default();
        let arguments = fs::read(process.join("cmdline")).unwrap_or_default();
        let mut words = arguments.split(|byte| *byte == 0);
        called.trim() == name && words.any(|word| word == path.as_os_str().as_bytes())
    };
    let processes = fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().path());
    let process = processes.into_iter().find(is_it).expect("such a process");
    let pid = process.file_name().unwrap().to_str().unwrap().parse().unwrap();
    // SAFETY: a signal to a process that was just found to be of ours.
    assert_eq!(unsafe { libc::kill(pid, libc::SIGKILL) }, 0);
    crate::eventually("it ends", || !is_it(&process));
}
