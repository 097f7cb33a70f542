//! What is used again and again must not grow: the host is counted before and after.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use harness::artifacts::text;
use harness::census::settled_descriptors;
use harness::containerd::{CUBE, Containerd, RUNC};
use harness::cri::Cri;
use libtest_mimic::Trial;
use serde_json::json;

const CYCLES: &str = "CUBE_SHIM_CYCLES";
const PODS: &str = "CUBE_SHIM_PODS";

/// Each costs minutes, so it is there if its variable says how many.
pub fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    if number(CYCLES).is_some() {
        trials.extend(harness::trials![cycles_leave_nothing]);
    }
    if number(PODS).is_some() && !crate::cri::is_skipped() {
        trials.extend(harness::trials![pods_at_once_leave_nothing]);
    }
    trials
}

/// How often, or how many, if the variable says so.
fn number(variable: &str) -> Option<usize> {
    std::env::var(variable).ok().map(|text| text.parse().unwrap())
}

/// What there is on the host, by kind.
type Census = BTreeMap<&'static str, usize>;

fn census(containerd: &Containerd) -> Census {
    let lines = |path: &str| fs::read_to_string(path).unwrap_or_default().lines().count();
    let entries = |path: &str| fs::read_dir(path).into_iter().flatten().count();
    let processes = fs::read_dir("/proc").unwrap().flatten().filter(|entry| {
        let name = entry.file_name();
        let is_process = name.as_encoded_bytes().iter().all(u8::is_ascii_digit);
        // Threads of the kernel come and go.
        is_process && !fs::read(entry.path().join("cmdline")).unwrap_or_default().is_empty()
    });
    let zombies = fs::read_dir("/proc").unwrap().flatten().filter(|entry| {
        let stat = fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        stat.rsplit_once(')').is_some_and(|(_, rest)| rest.starts_with(" Z"))
    });
    Census::from([
        ("processes", processes.count()),
        ("zombies", zombies.count()),
        ("unix sockets", lines("/proc/net/unix")),
        ("mounts", lines("/proc/self/mountinfo")),
        ("interfaces", entries("/sys/class/net")),
        ("control groups", folders(Path::new("/sys/fs/cgroup"))),
        // Beside them is the lock of all starts, which stays.
        ("sandboxes", folders(Path::new("/run/cube"))),
        ("shims' sockets", entries("/run/containerd/s")),
        ("clients' FIFOs", entries("/run/containerd/fifo")),
        ("temporary files", entries("/tmp")),
        ("named network namespaces", entries("/var/run/netns")),
        ("containerd's descriptors", settled_descriptors(containerd.pid().to_string().as_ref())),
    ])
}

fn folders(path: &Path) -> usize {
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    let inner = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    1 + inner.map(|entry| folders(&entry.path())).sum::<usize>()
}

/// Waits until nothing is more than it was: ends are told before the last process is gone.
#[track_caller]
fn assert_grown_by_nothing(containerd: &Containerd, before: &Census) {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let after = census(containerd);
        let grown: Vec<_> = after
            .iter()
            .filter(|(kind, count)| **count > before[*kind])
            .map(|(kind, count)| format!("{kind}: {} before, {count} after", before[kind]))
            .collect();
        if grown.is_empty() {
            return;
        }
        assert!(Instant::now() < deadline, "{grown:#?}\n{}", containerd.log());
        std::thread::sleep(Duration::from_millis(200));
    }
}

/// A container from its making to its removal, with a further process.
fn cycle(containerd: &Containerd) {
    containerd.detach("cycle", &["sleep", "100000"]);
    assert_eq!(containerd.exec("cycle", "e", &["echo", "here"]).output(0), "here\n");
    containerd.remove("cycle");
}

/// How long `ctr run true` takes.
fn run(containerd: &Containerd, runtime: &str) -> Duration {
    let started = Instant::now();
    containerd.run(runtime, "true", &["true"]).output(0);
    started.elapsed()
}

fn cycles_leave_nothing() {
    let containerd = Containerd::start();
    let cycles = number(CYCLES).unwrap();
    // What is made once and stays is there after the first container, be it runc's.
    run(&containerd, RUNC);
    let before = census(&containerd);
    let mut took = BTreeMap::from([(CUBE, Vec::new()), (RUNC, Vec::new())]);
    for number in 1..=cycles {
        cycle(&containerd);
        for (runtime, took) in &mut took {
            took.push(run(&containerd, runtime));
        }
        if std::env::var_os("CUBE_TEST_TIMES").is_some() && number % 10 == 0 {
            eprintln!("{number} of {cycles} cycles");
        }
    }
    containerd.assert_clean();
    assert_grown_by_nothing(&containerd, &before);
    if std::env::var_os("CUBE_TEST_TIMES").is_some() {
        for (runtime, mut times) in took {
            times.sort();
            let (half, most) = (times[times.len() / 2], times[times.len() * 95 / 100]);
            eprintln!("`ctr run true` with {runtime}: p50 {half:.2?}, p95 {most:.2?} of {cycles}");
        }
    }
}

fn pods_at_once_leave_nothing() {
    let cri = Cri::start();
    let pods = number(PODS).unwrap();
    // What is made once and stays, as the bridge, is there after the first pod, be it runc's.
    let config = cri.pod_config("first", &json!({}));
    let said = cri.call(["runp", "--runtime", "runc", &text(&config)]);
    let first = said.output(0).trim();
    cri.call(["stopp", first]).output(0);
    cri.call(["rmp", first]).output(0);
    let before = census(&cri.containerd);
    let one = |name: &str| {
        let pod = cri.pod(name);
        let id = cri.container(&pod, name, &["sleep", "100000"]);
        assert_eq!(cri.exec(&id, &["hostname"]).output(0), format!("{name}\n"));
        cri.remove(&pod);
    };
    std::thread::scope(|scope| {
        let all: Vec<_> =
            (0..pods).map(|number| scope.spawn(move || one(&format!("pod{number}")))).collect();
        for pod in all {
            pod.join().unwrap();
        }
    });
    cri.containerd.assert_clean();
    assert_grown_by_nothing(&cri.containerd, &before);
}
