//! Memory that a guest gives back, as the host sees it.

use harness::census::proportional_set_size;
use harness::{TestVm, eventually, sh};
use hypervisor::api::{BalloonInfo, Request};
use libtest_mimic::Trial;

pub fn trials() -> Vec<Trial> {
    harness::trials![
        a_balloon_of_half_the_memory_gives_it_to_the_host,
        a_balloon_that_is_let_out_gives_the_memory_back_to_the_guest,
        a_guest_that_needs_memory_takes_it_out_of_the_balloon,
        what_the_guest_frees_goes_back_to_the_host_unasked,
    ]
}

const MIB: u64 = 1 << 20;
/// That of the guests here.
const MEMORY: u64 = 256 * MIB;

fn resident(vm: &TestVm) -> u64 {
    proportional_set_size(vm.pid())
}

fn balloon(vm: &TestVm) -> BalloonInfo {
    vm.info().balloon.unwrap()
}

/// Sets a balloon's size, and waits until it is that large.
#[track_caller]
fn resize(vm: &TestVm, bytes: u64) {
    vm.ask(&Request::SetBalloon { bytes });
    eventually("the balloon has its size", || balloon(vm).actual_bytes == bytes);
}

/// Has the guest hold so many bytes of memory, in a file of its own.
fn hold(vm: &TestVm, bytes: u64) {
    let count = bytes / MIB;
    let line = format!(
        "mount -t tmpfs -o size=100% none /mnt && \
         dd if=/dev/zero of=/mnt/held bs=1M count={count} 2>/dev/null && sync && wc -c </mnt/held"
    );
    assert_eq!(vm.exec(sh(&line)).number(), bytes);
}

fn a_balloon_of_half_the_memory_gives_it_to_the_host() {
    let builder = TestVm::builder();
    let disk = builder.place().given("disk", "");
    std::fs::File::options().write(true).open(&disk).unwrap().set_len(2 * MEMORY).unwrap();
    let vm = builder.memory("256M").pci().disk(format!("path={disk},ro")).boot();
    // In its page cache, which it does not report as free, and may be taken from it.
    vm.exec(["dd", "if=/dev/vda", "of=/dev/null", "bs=1M"]);
    let before = resident(&vm);
    assert!(before >= MEMORY * 85 / 100, "the guest has touched only {} MiB", before / MIB);
    resize(&vm, MEMORY / 2);
    let wanted = MEMORY * 45 / 100;
    let told = || (before / MIB, resident(&vm) / MIB);
    let fallen = || before.saturating_sub(resident(&vm));
    eventually("the host has 45 % of the guest's memory", || fallen() >= wanted);
    assert_eq!(vm.exec(["echo", "here"]).text(), "here");
    assert!(fallen() >= wanted, "MiB before and after: {:?}", told());
    tell("balloon", fallen(), MEMORY / 2);
}

/// What came of it, where figures are told.
fn tell(what: &str, returned: u64, of: u64) {
    if std::env::var_os("CUBE_TEST_TIMES").is_some() {
        let share = returned as f64 / of as f64 * 100.0;
        eprintln!("{what}: {} of {} MiB returned, {share:.1} %", returned / MIB, of / MIB);
    }
}

fn a_balloon_that_is_let_out_gives_the_memory_back_to_the_guest() {
    let vm = TestVm::builder().memory("256M").boot();
    let available =
        || vm.exec(sh("awk '/MemAvailable/ { print $2 }' /proc/meminfo")).number() << 10;
    let before = available();
    resize(&vm, MEMORY / 2);
    assert!(available() <= before - MEMORY * 45 / 100);
    resize(&vm, 0);
    eventually("the guest has its memory", || available() >= before - MEMORY * 5 / 100);
    // More than there was beside the balloon.
    hold(&vm, 150 * MIB);
    assert_eq!(balloon(&vm).actual_bytes, 0);
}

fn a_guest_that_needs_memory_takes_it_out_of_the_balloon() {
    let vm = TestVm::builder().memory("256M").boot();
    let asked = 160 * MIB;
    resize(&vm, asked);
    // Some 70 MiB are left.
    hold(&vm, 120 * MIB);
    assert!(balloon(&vm).actual_bytes < asked, "{:?}", balloon(&vm));
    assert_eq!(vm.exec(sh("dmesg | grep -c 'Killed process' || true")).text(), "0");
}

fn what_the_guest_frees_goes_back_to_the_host_unasked() {
    let vm = TestVm::builder().memory("256M").boot();
    let held = 160 * MIB;
    hold(&vm, held);
    let before = resident(&vm);
    assert!(before >= held);
    vm.exec(["rm", "/mnt/held"]);
    let fallen = || before.saturating_sub(resident(&vm));
    eventually("the host has 80 % of what was freed", || fallen() >= held * 80 / 100);
    assert_eq!(balloon(&vm).target_bytes, 0, "somebody asked");
    tell("reported as free", fallen(), held);
}
