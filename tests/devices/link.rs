//! A link that goes, on the host's side, while the guest uses it.

use harness::{TestVm, eventually, sh, wire};
use libtest_mimic::Trial;

pub fn trials() -> Vec<Trial> {
    harness::trials![
        a_link_that_goes_down_comes_up_again_until_its_tap_is_deleted_over_mmio,
        a_link_that_goes_down_comes_up_again_until_its_tap_is_deleted_over_pci,
    ]
}

/// A guest with a network and a disk, which is `/dev/vda`.
fn guest(transport: &str) -> TestVm {
    let builder = TestVm::builder();
    let disk = builder.place().given("disk", vec![0; 1 << 20]);
    let net = format!("tap={},id=net", wire::TAP);
    let builder = builder.disk(format!("path={disk}")).option("--net", net);
    let vm = builder.transport(transport).boot();
    wire::configure(&vm);
    eventually("the host answers", || pings(&vm));
    vm
}

fn pings(vm: &TestVm) -> bool {
    vm.exec(["ping", "-c", "1", "-W", "2", &wire::HOST.to_string()]).status.success()
}

fn carrier(vm: &TestVm) -> String {
    vm.exec(["cat", "/sys/class/net/eth0/carrier"]).text()
}

/// Waits until the guest knows that its link is gone: the host is asked when something is sent.
fn wait_for_loss(vm: &TestVm) {
    eventually("the guest's link is down", || !pings(vm) && carrier(vm) == "0");
    eventually("the loss is counted", || vm.count("net_link_losses_total", "net") >= 1);
}

/// All but the network.
fn assert_well(vm: &TestVm) {
    let line = "echo written >/dev/vda && sync && head -c 7 /dev/vda";
    assert_eq!(vm.exec(sh(line)).text(), "written");
    assert_eq!(vm.count("net_guest_faults_total", "net"), 0);
}

fn assert_comes_back(vm: &TestVm) {
    assert_eq!(carrier(vm), "1");
    for _ in 0..2 {
        wire::set_link("down");
        wait_for_loss(vm);
        assert_well(vm);
        wire::set_link("up");
        eventually("the guest's link is up", || carrier(vm) == "1");
        eventually("the host answers again", || pings(vm));
    }
}

fn assert_survives_deletion(vm: &TestVm) {
    harness::image::host("ip", &["link", "del", wire::TAP]);
    wait_for_loss(vm);
    assert_well(vm);
    // A TAP of the same name is another one.
    harness::image::host("ip", &["tuntap", "add", wire::TAP, "mode", "tap"]);
    wire::set_link("up");
    assert!(!pings(vm));
    assert_eq!(carrier(vm), "0");
    assert_well(vm);
}

fn assert_survives(transport: &str) {
    wire::in_a_network(|| {
        let vm = guest(transport);
        assert_comes_back(&vm);
        assert_survives_deletion(&vm);
    });
}

fn a_link_that_goes_down_comes_up_again_until_its_tap_is_deleted_over_mmio() {
    assert_survives("mmio");
}

fn a_link_that_goes_down_comes_up_again_until_its_tap_is_deleted_over_pci() {
    assert_survives("pci");
}
