//! All devices at once: each has its driver, and each does its work.

use harness::artifacts::{Artifact, may_skip, tell_skipped};
use harness::vm::Builder;
use harness::{TestVm, eventually, sh, wire};
use hypervisor::api::Request;
use libtest_mimic::Trial;

pub fn trials() -> Vec<Trial> {
    let mut all = harness::trials![all_devices_work_over_mmio, all_devices_work_over_pci];
    if may_skip(Artifact::StockKernel.name()) {
        tell_skipped("all devices with a distribution's kernel", "CUBE_ALLOW_SKIP says so");
        return all;
    }
    all.extend(harness::trials![all_devices_work_with_a_distributions_kernel]);
    all
}

/// Everything there is.
fn builder() -> Builder {
    let builder = TestVm::builder();
    let disk = builder.place().given("disk", vec![0; 1 << 20]);
    let memory = builder.place().given("memory", b"persistent".repeat(1000));
    builder
        .disk(format!("path={disk}"))
        .option("--net", format!("tap={}", wire::TAP))
        .option("--pmem", format!("path={memory},ro"))
        .option("--console", "virtio")
}

/// The drivers of the guest's virtio devices, in order; `none` of one that has none.
fn drivers(vm: &TestVm) -> String {
    let line = "for device in /sys/bus/virtio/devices/*; do \
                basename $(readlink $device/driver || echo none); done | sort";
    vm.exec(sh(line)).text()
}

fn assert_work(vm: &TestVm) {
    // That it can be asked at all is the work of vsock.
    let expected = "virtio_balloon virtio_blk virtio_console virtio_net virtio_pmem virtio_rng \
                    vmw_vsock_virtio_transport";
    assert_eq!(drivers(vm), expected.replace(' ', "\n"));
    let line = "echo written >/dev/vda && sync && head -c 7 /dev/vda";
    assert_eq!(vm.exec(sh(line)).text(), "written");
    let disk = vm.place().given_path("disk");
    assert!(std::fs::read(disk).unwrap().starts_with(b"written\n"));
    wire::configure(vm);
    let ping = ["ping", "-c", "1", "-W", "2", &wire::HOST.to_string()];
    eventually("the host answers", || vm.exec(ping).status.success());
    assert_eq!(vm.exec(["head", "-c", "10", "/dev/pmem0"]).text(), "persistent");
    assert_eq!(vm.exec(sh("head -c 1000 /dev/hwrng | wc -c")).number(), 1000);
    vm.exec(sh("echo on the console >/dev/hvc0"));
    vm.running().stderr.wait_for("on the console");
    let balloon = || vm.info().balloon.unwrap().actual_bytes;
    vm.ask(&Request::SetBalloon { bytes: 16 << 20 });
    eventually("the balloon grows", || balloon() == 16 << 20);
}

fn all_devices_work_over_mmio() {
    wire::in_a_network(|| assert_work(&builder().boot()));
}

fn assert_on_bus(vm: &TestVm) {
    // Those of the vendor that all virtio devices have.
    let line = "for device in /sys/bus/pci/devices/*; do \
                [ $(cat $device/vendor) = 0x1af4 ] && basename $(readlink $device/driver); \
                done | sort | uniq -c";
    let text = vm.exec(sh(line)).text();
    assert_eq!(text.split_whitespace().collect::<Vec<_>>(), ["7", "virtio-pci"]);
}

fn all_devices_work_over_pci() {
    wire::in_a_network(|| {
        let vm = builder().pci().boot();
        assert_on_bus(&vm);
        assert_work(&vm);
    });
}

fn all_devices_work_with_a_distributions_kernel() {
    let [kernel, initrd] = [Artifact::StockKernel, Artifact::StockInitrd].map(Artifact::arg);
    let builder = || builder().pci().option("--kernel", &kernel).option("--initrd", &initrd);
    wire::in_a_network(|| {
        let vm = builder().boot();
        assert!(vm.exec(["uname", "-r"]).text().contains("cloud"));
        assert_on_bus(&vm);
        assert_work(&vm);
    });
}
