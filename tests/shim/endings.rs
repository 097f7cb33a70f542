//! However a container, its shim, its VMM or containerd end: the state is true, and nothing is left.

use std::fs;

use harness::containerd::{CUBE, Containerd, processes};
use harness::eventually;
use libtest_mimic::Trial;

pub fn trials() -> Vec<Trial> {
    harness::trials![
        a_command_that_does_not_exist_is_told_and_leaves_nothing,
        a_vmm_that_is_killed_ends_the_task,
        a_shim_that_is_killed_takes_its_vm_along,
        a_task_outlives_a_restart_of_containerd,
        a_shim_that_dies_while_containerd_is_down_is_cleared_at_its_start,
        a_vmm_that_cannot_be_started_is_told_with_its_cure,
        what_hangs_is_killed_when_its_container_is,
    ]
}

/// Kills the only process of that name.
pub fn kill(name: &str) {
    send(name, nix::sys::signal::Signal::SIGKILL);
}

/// Sends the only process of that name a signal.
fn send(name: &str, signal: nix::sys::signal::Signal) {
    let found = processes(&[name]);
    assert_eq!(found.len(), 1, "{found:?}");
    let pid = found[0].trim_start_matches("/proc/").split(' ').next().unwrap().parse().unwrap();
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), signal).unwrap();
}

fn a_command_that_does_not_exist_is_told_and_leaves_nothing() {
    let containerd = Containerd::start();
    let said = containerd.run(CUBE, "nosuch", &["nosuch"]);
    assert_ne!(said.code, 0);
    assert!(said.stderr.contains("executable file not found"), "{said:?}");
    containerd.ctr(["containers", "rm", "nosuch"]);
    containerd.assert_clean();
}

fn a_vmm_that_is_killed_ends_the_task() {
    let containerd = Containerd::start();
    containerd.detach("lost", &["sleep", "1000"]);
    kill("cube-vmm");
    eventually("the task has ended", || containerd.state("lost").as_deref() == Some("STOPPED"));
    let removed = containerd.ctr(["tasks", "rm", "lost"]);
    assert!(removed.code == 137 || removed.stderr.contains("137"), "{removed:?}");
    containerd.ctr(["containers", "rm", "lost"]).output(0);
    assert!(containerd.log().contains("the VM is gone"));
}

fn a_shim_that_is_killed_takes_its_vm_along() {
    let containerd = Containerd::start();
    containerd.detach("orphan", &["sleep", "1000"]);
    kill("containerd-shim-cube");
    eventually("the task is gone", || containerd.state("orphan").is_none());
    containerd.ctr(["containers", "rm", "orphan"]).output(0);
    containerd.assert_clean();
}

fn a_task_outlives_a_restart_of_containerd() {
    let mut containerd = Containerd::start();
    containerd.detach("outlives", &["sleep", "1000"]);
    containerd.stop_daemon();
    containerd.start_daemon();
    assert_eq!(containerd.state("outlives").as_deref(), Some("RUNNING"));
    assert_eq!(containerd.exec("outlives", "a", &["echo", "on"]).output(0), "on\n");
    containerd.remove("outlives");
}

fn a_shim_that_dies_while_containerd_is_down_is_cleared_at_its_start() {
    let mut containerd = Containerd::start();
    containerd.detach("unseen", &["sleep", "1000"]);
    containerd.stop_daemon();
    kill("containerd-shim-cube");
    containerd.start_daemon();
    eventually("the task is gone", || containerd.state("unseen").is_none());
    containerd.ctr(["containers", "rm", "unseen"]).output(0);
    containerd.assert_clean();
}

fn a_vmm_that_cannot_be_started_is_told_with_its_cure() {
    let containerd = Containerd::start();
    let settings = containerd.folder(".").join("cube.toml");
    let good = fs::read_to_string(&settings).unwrap();
    let bad = good.lines().map(|line| match line.starts_with("vmm =") {
        true => "vmm = \"/nonexistent/cube-vmm\"",
        false => line,
    });
    fs::write(&settings, bad.collect::<Vec<_>>().join("\n")).unwrap();
    let said = containerd.run(CUBE, "novmm", &["true"]);
    assert_ne!(said.code, 0);
    assert!(said.stderr.contains("/nonexistent/cube-vmm cannot be started"), "{said:?}");
    containerd.ctr(["containers", "rm", "novmm"]);
    fs::write(&settings, good).unwrap();
    assert_eq!(containerd.run(CUBE, "again", &["echo", "fine"]).output(0), "fine\n");
}

/// A VM that stands still.
fn what_hangs_is_killed_when_its_container_is() {
    let containerd = Containerd::start();
    containerd.detach("hangs", &["sleep", "100000"]);
    send("cube-vmm", nix::sys::signal::Signal::SIGSTOP);
    containerd.ctr(["tasks", "kill", "-s", "SIGKILL", "hangs"]).output(0);
    eventually("it has ended", || containerd.state("hangs").as_deref() == Some("STOPPED"));
    let removed = containerd.ctr(["tasks", "rm", "hangs"]);
    assert!(removed.code == 137 || removed.stderr.contains("137"), "{removed:?}");
    containerd.ctr(["containers", "rm", "hangs"]).output(0);
    containerd.assert_clean();
    assert!(containerd.log().contains("no answer from the guest: the VM is killed"));
}
