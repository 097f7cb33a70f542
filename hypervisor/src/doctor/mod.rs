//! `cube-vmm doctor`: finds out, by running small guests, what this host can do.
//!
//! That `/dev/kvm` opens proves nothing: KVM may interpret guests (PVM), or refuse to enter them.
//! So the doctor executes what an unmodified Linux kernel needs before it says that one boots.
//! It takes less than two seconds, changes nothing, needs no file, and never hangs.
//!
//! Called by the command line; tests and benches run the command and read `.kvm.verdict`.
//!
//! # JSON
//!
//! ```text
//! {
//!   "schema": 1,
//!   "host": {
//!     "kernel": "6.1.0-57-amd64",        uname release
//!     "cpu": "AMD EPYC",                 model name; null if unknown
//!     "cpus": 2,                         processors this process may use
//!     "virtualized": true                the host is itself a guest
//!   },
//!   "kvm": {
//!     "verdict": "hardware" | "interpreting" | "none",
//!     "reason": "...",                   absent with "hardware"
//!     "module": "kvm_amd",               null if unknown
//!     "api_version": 12,                 null if /dev/kvm cannot be used
//!     "probes": [{
//!       "name": "int3",                  real-mode long-mode int3 xsave cmpxchg16b vex loop
//!       "ran": "yes" | "no" | "not_offered" | "not_tried",
//!       "decisive": true,                an unmodified Linux kernel cannot do without it
//!       "detail": "..."                  how it ended; null if it ran
//!     }],
//!     "speed": {                         null if the loop could not be timed
//!       "instructions": 10000000, "cpu_ns": 2900000,
//!       "instructions_per_second": 3500000000      of the fastest tenth
//!     }
//!   },
//!   "checks": [{
//!     "name": "kvm-irqfd",               KVM capabilities begin with "kvm-"
//!     "status": "ok" | "limited" | "missing",
//!     "required": true,                  no guest runs without it
//!     "value": "1",                      the datum
//!     "meaning": "...",                  what it is good for, or what is lost
//!     "cure": "..."                      one line; null if there is nothing to cure
//!   }]
//! }
//! ```
//!
//! Fields are added, never renamed or removed, within one `schema`.

mod capabilities;
mod check;
mod host;
mod machine;
mod open;
mod probe;
mod programs;
mod render;
mod settings;

use std::fs;
use std::path::Path;
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use serde::Serialize;

pub use check::{Check, Status};
pub use open::{KVM_DEVICE, KvmProblem, quick_kvm_check};
pub use probe::{Probe, Ran, Speed, Verdict};

/// Everything the doctor found. The module's documentation describes its JSON.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Version of the JSON's fields.
    pub schema: u32,
    /// The machine this ran on.
    pub host: Host,
    /// What `/dev/kvm` does with guests.
    pub kvm: KvmReport,
    /// KVM capabilities, devices, system calls, settings and limits.
    pub checks: Vec<Check>,
}

/// The machine the doctor ran on.
#[derive(Clone, Debug, Serialize)]
pub struct Host {
    /// Release of the kernel.
    pub kernel: String,
    /// Model name of the processor.
    pub cpu: Option<String>,
    /// Processors that this process may use.
    pub cpus: usize,
    /// Whether the processor says that it is a virtual one.
    pub virtualized: bool,
}

/// What `/dev/kvm` does with guests.
#[derive(Clone, Debug, Serialize)]
pub struct KvmReport {
    /// The conclusion.
    #[serde(flatten)]
    pub verdict: Verdict,
    /// The kernel module behind the device.
    pub module: Option<String>,
    /// The version that the device reported.
    pub api_version: Option<i32>,
    /// The guests that were run.
    pub probes: Vec<Probe>,
    /// How fast the last of them was.
    pub speed: Option<Speed>,
}

impl Report {
    /// Exit code of `cube-vmm doctor`: 0 when Linux guests can run here on hardware KVM, with
    /// everything that they require; 3 when only the lab can run them.
    pub fn exit_code(&self) -> u8 {
        if self.runs_linux() { 0 } else { 3 }
    }

    /// Whether an unmodified Linux guest can run on this host's own KVM.
    pub fn runs_linux(&self) -> bool {
        self.kvm.verdict == Verdict::Hardware && self.lacking().next().is_none()
    }

    /// The required checks that did not pass.
    fn lacking(&self) -> impl Iterator<Item = &Check> {
        self.checks.iter().filter(|check| check.required && check.status != Status::Ok)
    }

    /// The report for people; one line per finding, and the cure below what is not whole.
    pub fn render(&self) -> String {
        render::report(self)
    }
}

/// How long the host's checks may take: opening a device can load a module, and a cache directory
/// can be on a file system whose server is gone.
const HOST_BUDGET: Duration = Duration::from_millis(1700);

/// Runs all probes and checks. Never fails, never panics, and ends within two seconds.
pub fn examine() -> Report {
    let root = Path::new("/");
    let deadline = Instant::now() + HOST_BUDGET;
    let host_checks = start_host_checks();
    let (kvm, mut checks) = examine_kvm(Path::new(KVM_DEVICE), root);
    checks.extend(settings::examine(root));
    checks.extend(collect_until(deadline, &host_checks));
    Report { schema: 1, host: examine_host(root), kvm, checks }
}

/// The host's checks run beside the guests, on a thread that may be left behind.
fn start_host_checks() -> Receiver<Check> {
    let (sender, receiver) = mpsc::channel();
    // If no thread can be had, the sender is dropped, and the receiver says so at once.
    let _ = thread::Builder::new().name("doctor-host".to_owned()).spawn(move || {
        for check in host::CHECKS {
            // Nobody listens any more when this took too long.
            let _ = sender.send(check());
        }
    });
    receiver
}

/// The checks that arrive in time, and one more that tells if some did not.
fn collect_until(deadline: Instant, arriving: &Receiver<Check>) -> Vec<Check> {
    let mut checks = Vec::new();
    let left = || deadline.saturating_duration_since(Instant::now());
    while let Ok(check) = arriving.recv_timeout(left()) {
        checks.push(check);
    }
    if checks.len() < host::CHECKS.len() {
        checks.push(Check::limited(
            "host-checks",
            format!("{} of {} done in time", checks.len(), host::CHECKS.len()),
            "the others wait for a kernel module, or for a file system that does not answer",
            "run it again; if it persists, look for the process that waits (ps -eLo stat,comm)",
        ));
    }
    checks
}

fn examine_kvm(device: &Path, root: &Path) -> (KvmReport, Vec<Check>) {
    let module = settings::kvm_module(root);
    let kvm = match open::open_kvm(device) {
        Ok(kvm) => kvm,
        Err(problem) => {
            let verdict = Verdict::None { reason: problem.one_line() };
            let report =
                KvmReport { verdict, module, api_version: None, probes: Vec::new(), speed: None };
            return (report, Vec::new());
        }
    };
    let api_version = Some(kvm.get_api_version());
    let (probes, speed) = probe::examine(&kvm);
    let verdict = probe::verdict(&probes, speed);
    (KvmReport { verdict, module, api_version, probes, speed }, capabilities::examine(&kvm))
}

fn examine_host(root: &Path) -> Host {
    let cpuinfo = fs::read_to_string(root.join("proc/cpuinfo")).unwrap_or_default();
    let field = |name: &str| {
        let line = cpuinfo.lines().find(|line| line.starts_with(name))?;
        line.split_once(':').map(|(_, value)| value.trim().to_owned())
    };
    let flags = field("flags").unwrap_or_default();
    Host {
        kernel: settings::read(root, "proc/sys/kernel/osrelease").unwrap_or_default(),
        cpu: field("model name"),
        cpus: thread::available_parallelism().map_or(1, Into::into),
        virtualized: flags.split(' ').any(|flag| flag == "hypervisor"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(verdict: Verdict, checks: Vec<Check>) -> Report {
        let kvm = KvmReport {
            verdict,
            module: Some("kvm_amd".to_owned()),
            api_version: Some(12),
            probes: Vec::new(),
            speed: None,
        };
        Report { schema: 1, host: examine_host(Path::new("/")), kvm, checks }
    }

    #[test]
    fn only_hardware_with_all_it_requires_exits_with_0() {
        let interpreting = Verdict::Interpreting { reason: "x".to_owned() };
        let none = Verdict::None { reason: "x".to_owned() };
        let lacking = Check::missing("kvm-irqfd", "0", "x", "y").required();
        let optional = Check::missing("vhost-net", "0", "x", "y");
        assert_eq!(report(Verdict::Hardware, vec![optional]).exit_code(), 0);
        assert_eq!(report(Verdict::Hardware, vec![lacking]).exit_code(), 3);
        assert_eq!(report(interpreting, Vec::new()).exit_code(), 3);
        assert_eq!(report(none, Vec::new()).exit_code(), 3);
    }

    #[test]
    fn the_verdict_is_where_tests_look_for_it() {
        let interpreting = Verdict::Interpreting { reason: "int3: x".to_owned() };
        let json = serde_json::to_value(report(interpreting, Vec::new())).unwrap();
        assert_eq!(json["kvm"]["verdict"], "interpreting");
        assert_eq!(json["kvm"]["reason"], "int3: x");
        assert_eq!(json["kvm"]["api_version"], 12);
    }

    #[test]
    fn a_check_has_all_its_fields_in_json() {
        let checks = vec![Check::limited("open-files", "256", "few", "ulimit -n 65536")];
        let json = serde_json::to_value(report(Verdict::Hardware, checks)).unwrap();
        let wanted = serde_json::json!({
            "name": "open-files", "status": "limited", "required": false,
            "value": "256", "meaning": "few", "cure": "ulimit -n 65536",
        });
        assert_eq!(json["checks"][0], wanted);
    }

    #[test]
    fn no_device_is_a_verdict_with_its_cure() {
        let (kvm, checks) = examine_kvm(Path::new("/nowhere/kvm"), Path::new("/"));
        assert!(matches!(kvm.verdict, Verdict::None { ref reason } if reason.contains("modprobe")));
        assert!(checks.is_empty() && kvm.probes.is_empty());
    }

    #[test]
    fn checks_that_do_not_arrive_are_counted() {
        let (sender, receiver) = mpsc::channel();
        sender.send(Check::ok("tun", "x", "y")).unwrap();
        let checks = collect_until(Instant::now(), &receiver);
        let names: Vec<_> = checks.iter().map(|check| check.name).collect();
        assert_eq!(names, ["tun", "host-checks"]);
        assert_eq!(checks[1].value, format!("1 of {} done in time", host::CHECKS.len()));
    }

    #[test]
    fn an_examination_ends_with_a_verdict_that_its_rendering_tells() {
        let report = examine();
        let text = report.render();
        assert!(text.contains("open-files") && text.contains("verdict"), "{text}");
    }
}
