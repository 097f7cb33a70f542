//! The ends of a guest that stays.

use std::fs;

use harness::{TestVm, eventually, sh};
use libtest_mimic::Trial;
use nix::sys::signal::Signal;

pub fn trials() -> Vec<Trial> {
    harness::trials![
        stop_powers_the_guest_off,
        stop_writes_disks_back,
        a_guest_that_cannot_power_off_is_ended_by_force,
        the_power_button_is_followed_by_force,
        kill_does_not_ask,
        sigterm_powers_the_guest_off,
        a_second_signal_does_not_wait_for_the_guest,
        a_guest_may_power_itself_off,
        a_guest_may_reset_itself,
        a_panic_is_told_with_the_console,
        commands_end_with_the_vm,
    ]
}

fn stop_powers_the_guest_off() {
    let vm = TestVm::boot();
    let ended = vm.cli("stop", &[]).end();
    assert_eq!((ended.output(0).as_str(), ended.stderr.as_str()), ("", ""));
    assert_eq!(vm.end().output(0), "");
}

fn stop_writes_disks_back() {
    let builder = TestVm::builder();
    let disk = builder.place().given("disk", vec![0; 1 << 20]);
    let vm = builder.disk(format!("path={disk}")).boot();
    vm.exec(sh("echo written >/dev/vda"));
    vm.cli("stop", &["--timeout", "60"]).end().output(0);
    let (ended, _place) = vm.end_keeping_place();
    ended.output(0);
    assert!(fs::read(&disk).unwrap().starts_with(b"written\n"));
}

fn a_guest_that_cannot_power_off_is_ended_by_force() {
    let vm = TestVm::boot();
    // An agent that is stopped answers nobody.
    vm.leave(sh("kill -STOP -1"));
    eventually("the agent is silent", || !vm.agent_answers());
    vm.cli("stop", &["--timeout", "1"]).end().output(0);
    vm.end().output(0);
}

fn the_power_button_is_followed_by_force() {
    let vm = TestVm::boot();
    // Nobody in this guest acts on the button.
    vm.cli("stop", &["--how", "power-button", "--timeout", "1"]).end().output(0);
    vm.end().output(0);
}

fn kill_does_not_ask() {
    let vm = TestVm::boot();
    vm.cli("stop", &["--how", "kill"]).end().output(0);
    vm.end().output(0);
}

fn sigterm_powers_the_guest_off() {
    let builder = TestVm::builder();
    let disk = builder.place().given("disk", vec![0; 1 << 20]);
    let vm = builder.disk(format!("path={disk}")).boot();
    vm.exec(sh("echo written >/dev/vda"));
    vm.running().signal(Signal::SIGTERM);
    let (ended, _place) = vm.end_keeping_place();
    ended.output(0);
    assert!(fs::read(&disk).unwrap().starts_with(b"written\n"));
}

fn a_second_signal_does_not_wait_for_the_guest() {
    let vm = TestVm::boot();
    vm.running().signal(Signal::SIGTERM);
    vm.running().signal(Signal::SIGINT);
    vm.end().output(0);
}

fn a_guest_may_power_itself_off() {
    let vm = TestVm::boot();
    vm.leave(sh("sleep 0.5; poweroff -f"));
    vm.end().output(0);
}

fn a_guest_may_reset_itself() {
    let vm = TestVm::boot();
    vm.leave(sh("sleep 0.5; reboot -f"));
    vm.end().output(111);
}

fn a_panic_is_told_with_the_console() {
    let vm = TestVm::boot();
    vm.leave(sh("sleep 0.5; echo c >/proc/sysrq-trigger"));
    let ended = vm.end();
    ended.output(112);
    assert!(ended.stderr.contains("the guest's kernel panicked"), "{ended:?}");
    assert!(ended.stderr.contains("  | ") && ended.stderr.contains("sysrq"), "{ended:?}");
}

fn commands_end_with_the_vm() {
    let vm = TestVm::boot();
    let sleeping = vm.cli("exec", &["--"]).arguments(sh("echo ready; sleep 100000")).start();
    sleeping.stdout.wait_for("ready");
    vm.cli("stop", &["--how", "kill"]).end().output(0);
    let ended = sleeping.end();
    assert_eq!(ended.output(125), "ready\n");
    assert_eq!(ended.stderr.lines().count(), 1, "{ended:?}");
    vm.end().output(0);
}
