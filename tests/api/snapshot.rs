//! Linux guests that are saved and go on, here and as others.

use std::fs;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use harness::{Place, TestVm, eventually, sh};
use hypervisor::api::{Reply, Request};
use hypervisor::snapshot::prefetch::PrefetchState;
use libtest_mimic::Trial;

pub fn trials() -> Vec<Trial> {
    harness::trials![
        a_guest_becomes_two_others,
        a_guest_on_pci_becomes_two_others,
        a_guest_that_is_saved_goes_on,
        a_guest_whose_hot_pages_are_prefetched_is_none_the_worse,
        plugged_devices_are_where_they_were,
    ]
}

/// What the disk begins with.
const WRITTEN: &str = "written before";

/// Counts in a file, for ever.
const COUNT: &str = "i=0; while :; do i=$((i+1)); echo $i >/tmp/new; mv /tmp/new /tmp/count; \
                     sleep 0.05; done";

fn count(vm: &TestVm) -> u64 {
    vm.exec(["cat", "/tmp/count"]).text().trim().parse().unwrap()
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()
}

/// A guest that counts, has a disk, and has lost the time.
fn counting(transport: &str) -> (TestVm, PathBuf) {
    let builder = TestVm::builder().transport(transport).cpus(2).memory("192M");
    let disk = builder.place().given("disk", vec![0; 4 << 20]);
    let vm = builder.disk(format!("path={disk},id=data")).boot();
    vm.leave(sh(COUNT));
    let write = format!("echo {WRITTEN} >/dev/vda && sync && date -s @1000000000");
    assert!(vm.exec(sh(&write)).status.success());
    eventually("it counts", || vm.exec(["test", "-s", "/tmp/count"]).status.success());
    (vm, disk.into())
}

fn check(vm: &TestVm, at_least: u64) -> String {
    let first = count(vm);
    assert!(first >= at_least, "{first} after {at_least}");
    eventually("it goes on counting", || count(vm) > first + 3);
    let time: u64 = vm.exec(["date", "+%s"]).text().trim().parse().unwrap();
    assert!(time.abs_diff(now()) < 120, "{time} is not {}", now());
    let read = vm.exec(sh("head -n 1 /dev/vda")).text();
    assert_eq!(read.trim(), WRITTEN);
    let write = "dd if=/dev/zero of=/dev/vda bs=64k seek=1 count=16 conv=fsync 2>&1";
    assert!(vm.exec(sh(write)).status.success());
    let said = vm.exec(["dmesg"]).text();
    assert_eq!(said.matches("reseeded due to virtual machine fork").count(), 1, "{said}");
    for bad in ["soft lockup", "rcu_sched detected", "rcu_preempt detected", "BUG:"] {
        assert!(!said.contains(bad), "{said}");
    }
    vm.exec(sh("cat /proc/sys/kernel/random/uuid; head -c 16 /dev/urandom | od -tx1")).text()
}

fn becomes_two(transport: &str) {
    let store = Place::new();
    let dir = store.given_path("snapshot");
    let (vm, disk) = counting(transport);
    let before = count(&vm);
    vm.save(&dir);
    let copies = ["one", "two"].map(|name| {
        let copy = store.given_path(name);
        fs::copy(&disk, &copy).unwrap();
        format!("disk:data={}", copy.display())
    });
    drop(vm);
    let vms = copies.map(|disk| TestVm::restore(&dir, &["--override", &disk]));
    let [one, two] = vms.each_ref().map(|vm| check(vm, before));
    assert_ne!(one, two);
}

fn a_guest_becomes_two_others() {
    becomes_two("mmio");
}

fn a_guest_on_pci_becomes_two_others() {
    becomes_two("pci");
}

fn a_guest_that_is_saved_goes_on() {
    let store = Place::new();
    let (vm, _) = counting("mmio");
    for round in 0..3 {
        let before = count(&vm);
        let dir = store.given_path(&format!("round{round}"));
        vm.cli("snapshot", &[dir.to_str().unwrap()]).end().output(0);
        eventually("it goes on counting", || count(&vm) > before + 3);
    }
    assert!(!vm.exec(["dmesg"]).text().contains("virtual machine fork"));
}

/// Takes memory, and lets it go.
const FILL: &str = "dd if=/dev/zero of=/tmp/fill bs=1M count=64 2>/dev/null; rm /tmp/fill";

fn a_guest_whose_hot_pages_are_prefetched_is_none_the_worse() {
    let store = Place::new();
    let dir = store.given_path("snapshot");
    let vm = TestVm::builder().memory("192M").boot();
    vm.save(&dir);
    drop(vm);
    let all = (192 << 20) / 4096;
    for mode in ["private", "uffd"] {
        let vm = TestVm::restore(&dir, &["--memory-mode", mode]);
        assert!(vm.exec(["uname"]).status.success());
        let reply = vm.request(&Request::RecordHotPages { file: None });
        let Reply::HotPages(report) = reply else { panic!("{mode}: {reply:?}") };
        assert!((200..all / 2).contains(&report.pages), "{mode}: {report:?}");
        drop(vm);
        let vm = TestVm::restore(&dir, &["--memory-mode", mode, "--prefetch"]);
        // It gives pages back meanwhile, and takes others.
        assert!(vm.exec(sh(FILL)).status.success());
        let told = || vm.info().prefetch.unwrap();
        eventually("all is prefetched", || told().state == PrefetchState::Over);
        let planned = told().planned_pages;
        assert!((100..=report.pages).contains(&planned), "{mode}: {report:?}, {:?}", told());
        assert!(vm.exec(sh(FILL)).status.success());
        let said = vm.exec(["dmesg"]).text();
        assert!(!said.contains("BUG:") && !said.contains("Oops"), "{mode}: {said}");
    }
}

fn plugged_devices_are_where_they_were() {
    let store = Place::new();
    let dir = store.given_path("snapshot");
    let vm = TestVm::builder().pci().boot();
    for (name, byte) in [("a", b'1'), ("b", b'2')] {
        let path = store.given(name, vec![byte; 1 << 20]);
        vm.cli("plug", &["--disk", &format!("path={path},id={name}")]).end().output(0);
        eventually("the guest finds it", || disks(&vm).contains(byte as char));
    }
    vm.cli("unplug", &["a"]).end().output(0);
    eventually("the guest lets go", || disks(&vm) == "2");
    vm.save(&dir);
    drop(vm);
    let vm = TestVm::restore(&dir, &["--trust-paths"]);
    assert_eq!(disks(&vm), "2");
    let path = store.given("c", vec![b'3'; 1 << 20]);
    vm.cli("plug", &["--disk", &format!("path={path},id=c")]).end().output(0);
    eventually("the guest finds it", || disks(&vm).contains('3'));
    vm.cli("unplug", &["b"]).end().output(0);
    eventually("the guest lets go", || disks(&vm) == "3");
}

/// The first byte of each disk.
fn disks(vm: &TestVm) -> String {
    let read = "for d in /dev/vd?; do if [ -b $d ]; then head -c 1 $d; fi; done";
    vm.exec(sh(read)).text()
}
