//! Signals to `cube-vmm run` end the command, the guest and the VMM.

use std::time::Duration;

use harness::{Place, Running, image, sh};
use libtest_mimic::Trial;
use nix::sys::signal::Signal;

/// The most that an end by a signal may take, on a slow and busy machine.
const SOON: Duration = Duration::from_secs(30);

pub fn trials() -> Vec<Trial> {
    harness::trials![
        sigterm_ends_command_and_guest,
        sigint_ends_command_and_guest,
        sighup_ends_command_and_guest,
        the_command_may_answer_a_signal,
        a_command_that_ignores_signals_is_not_waited_for,
        a_second_signal_does_not_wait,
        a_signal_during_the_boot_ends_it,
        a_signal_to_a_guest_without_an_agent_ends_it,
        a_killed_vmm_leaves_its_disk_free,
    ]
}

/// A command in a guest, that has said that it is ready.
fn started(place: &Place, line: &str) -> Running {
    let running = place.run(&[], sh(line)).start();
    running.stdout.wait_for("ready");
    running
}

fn assert_ends(signal: Signal, code: i32) {
    let place = Place::new();
    let running = started(&place, "echo ready; exec sleep 100000");
    running.signal(signal);
    running.end_within(SOON).output(code);
}

fn sigterm_ends_command_and_guest() {
    assert_ends(Signal::SIGTERM, 143);
}

fn sigint_ends_command_and_guest() {
    assert_ends(Signal::SIGINT, 130);
}

fn sighup_ends_command_and_guest() {
    assert_ends(Signal::SIGHUP, 129);
}

fn the_command_may_answer_a_signal() {
    let place = Place::new();
    let line = "trap 'echo bye; exit 5' TERM; echo ready; while :; do sleep 0.1; done";
    let running = started(&place, line);
    running.signal(Signal::SIGTERM);
    assert_eq!(running.end_within(SOON).output(5), "ready\nbye\n");
}

fn a_command_that_ignores_signals_is_not_waited_for() {
    let place = Place::new();
    let running = started(&place, "trap '' TERM; echo ready; while :; do sleep 0.1; done");
    running.signal(Signal::SIGTERM);
    running.end_within(SOON).output(143);
}

fn a_second_signal_does_not_wait() {
    let place = Place::new();
    let running = started(&place, "trap '' TERM INT; echo ready; while :; do sleep 0.1; done");
    running.signal(Signal::SIGTERM);
    std::thread::sleep(Duration::from_millis(300));
    running.signal(Signal::SIGINT);
    running.end_within(SOON).output(130);
}

fn a_signal_during_the_boot_ends_it() {
    let place = Place::new();
    let running = place.run(&["--console", "serial"], ["true"]).start();
    running.stderr.wait_for("Linux version");
    running.signal(Signal::SIGTERM);
    running.end_within(SOON).output(143);
}

fn a_signal_to_a_guest_without_an_agent_ends_it() {
    let place = Place::new();
    // mov dx, 0x3f8; mov al, 'x'; out dx, al; hlt; jmp hlt
    let code = b"\x66\xba\xf8\x03\xb0x\xee\xf4\xeb\xfd";
    let kernel = place.given("kernel", image::kernel(code));
    let options = ["run", "--no-agent", "--console", "serial", "--kernel", &kernel];
    let running = place.call(options).start();
    running.stderr.wait_for("x");
    running.signal(Signal::SIGTERM);
    running.end_within(SOON).output(143);
}

fn a_killed_vmm_leaves_its_disk_free() {
    let place = Place::new();
    let disk = format!("path={}", place.given("disk", [0; 4096]));
    let call = place.run(&["--disk", &disk], sh("echo ready; exec sleep 100000"));
    let running = call.start();
    running.stdout.wait_for("ready");
    running.signal(Signal::SIGKILL);
    running.end_within(SOON).output(137);
    // Powers off at once; another VM could not have the disk while the first one holds it.
    let kernel = place.given("kernel", image::kernel(b"\x66\xba\x00\x06\xb0\x34\xee\xf4"));
    let call = place.call(["run", "--no-agent", "--kernel", &kernel, "--disk", &disk]);
    call.end().output(0);
}
