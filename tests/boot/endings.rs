//! The ends of a guest that nobody asked for, each with a code and words of its own.

use harness::artifacts::Artifact;
use harness::{Place, image, sh};
use libtest_mimic::Trial;

pub fn trials() -> Vec<Trial> {
    harness::trials![
        a_reset_by_the_guest,
        a_power_off_before_the_command_has_ended,
        a_kernel_panic,
        a_kernel_that_finds_no_root,
        an_initrd_that_is_cut_off,
        an_agent_that_does_not_answer,
        a_triple_fault,
        an_instruction_that_kvm_cannot_run,
        a_guest_without_an_agent_that_powers_off,
        a_guest_without_an_agent_that_resets,
    ]
}

/// The words that the guest's console ended with stand below the message, marked.
#[track_caller]
fn assert_console(stderr: &str, wanted: &str) {
    let shown = stderr.lines().any(|line| line.starts_with("  | ") && line.contains(wanted));
    assert!(shown, "no {wanted:?} among the console's last lines:\n{stderr}");
}

fn a_reset_by_the_guest() {
    let place = Place::new();
    let ended = place.run(&[], sh("reboot -f; sleep 100")).end();
    ended.output(111);
    assert!(ended.stderr.contains("the guest reset itself"), "{ended:?}");
}

fn a_power_off_before_the_command_has_ended() {
    let place = Place::new();
    let line = "echo before; sleep 1; poweroff -f; sleep 100";
    let ended = place.run(&[], sh(line)).end();
    assert_eq!(ended.output(110), "before\n");
    assert!(ended.stderr.contains("powered off before the command had ended"), "{ended:?}");
}

fn a_kernel_panic() {
    let place = Place::new();
    let line = "echo c >/proc/sysrq-trigger; sleep 100";
    let ended = place.run(&[], sh(line)).end();
    ended.output(112);
    assert!(ended.stderr.contains("the guest's kernel panicked"), "{ended:?}");
    assert_console(&ended.stderr, "sysrq triggered crash");
}

fn a_kernel_that_finds_no_root() {
    let place = Place::new();
    let initrd = place.given("initrd", image::noise(1 << 20, 37));
    let ended = place.run(&["--initrd", &initrd], ["true"]).end();
    ended.output(112);
    assert_console(&ended.stderr, "Kernel panic - not syncing");
}

fn an_initrd_that_is_cut_off() {
    let place = Place::new();
    let whole = std::fs::read(Artifact::Initrd.path()).unwrap();
    let initrd = place.given("initrd", &whole[..whole.len() / 4]);
    let ended = place.run(&["--initrd", &initrd], ["true"]).end();
    ended.output(112);
    assert_console(&ended.stderr, "Kernel panic - not syncing");
}

fn an_agent_that_does_not_answer() {
    let place = Place::new();
    // mov dx, 0x3f8; then for each byte: mov al, byte; out dx, al; then hlt; jmp hlt
    let mut code = b"\x66\xba\xf8\x03".to_vec();
    b"still\nwaiting\n".iter().for_each(|byte| code.extend([0xb0, *byte, 0xee]));
    code.extend([0xf4, 0xeb, 0xfd]);
    let kernel = place.given("kernel", image::kernel(&code));
    let call = place.call(["run", "--kernel", &kernel, "--boot-timeout", "1", "--", "true"]);
    let ended = call.end();
    ended.output(117);
    assert!(ended.stderr.contains("did not answer within 1 s"), "{ended:?}");
    assert!(ended.stderr.contains("vCPU 0 "), "{ended:?}");
    assert!(ended.stderr.contains("raise --boot-timeout"), "{ended:?}");
    assert!(ended.stderr.ends_with("console ended with:\n  | still\n  | waiting\n"), "{ended:?}");
}

/// How a guest ends that is nothing but this code.
fn run_code(place: &Place, code: &[u8]) -> harness::Ended {
    let kernel = place.given("kernel", image::kernel(code));
    place.call(["run", "--no-agent", "--kernel", &kernel]).end()
}

fn a_triple_fault() {
    let place = Place::new();
    // ud2, with no handler for that, nor for the lack of one.
    let ended = run_code(&place, b"\x0f\x0b");
    ended.output(113);
    assert!(ended.stderr.contains("the guest triple-faulted"), "{ended:?}");
}

fn an_instruction_that_kvm_cannot_run() {
    let place = Place::new();
    // mov eax, 0xd8000000; jmp rax: to an address where no memory is.
    let ended = run_code(&place, b"\xb8\x00\x00\x00\xd8\xff\xe0");
    ended.output(114);
    assert!(ended.stderr.contains("KVM internal error"), "{ended:?}");
    assert!(ended.stderr.contains("0xd8000000"), "{ended:?}");
}

fn a_guest_without_an_agent_that_powers_off() {
    let place = Place::new();
    // mov dx, 0x600; mov al, S5 | enable; out dx, al; hlt
    let ended = run_code(&place, b"\x66\xba\x00\x06\xb0\x34\xee\xf4");
    assert_eq!(ended.output(0), "");
    assert_eq!(ended.stderr, "");
}

fn a_guest_without_an_agent_that_resets() {
    let place = Place::new();
    // mov al, 0xfe; out 0x64, al; hlt
    let ended = run_code(&place, b"\xb0\xfe\xe6\x64\xf4");
    ended.output(111);
    assert!(ended.stderr.contains("the guest reset itself"), "{ended:?}");
}
