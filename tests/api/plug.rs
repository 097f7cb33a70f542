//! Disks and network cards that come and go while the guest runs.

use harness::{TestVm, eventually, sh, wire};
use hypervisor::api::{ErrorKind, Reply, Request};
use libtest_mimic::Trial;

pub fn trials() -> Vec<Trial> {
    harness::trials![
        a_disk_comes_and_goes,
        a_network_card_comes_and_goes,
        what_cannot_be_plugged_or_unplugged_is_told,
        without_pci_there_are_no_slots,
    ]
}

/// The names of the guest's disks, in order.
fn disks(vm: &TestVm) -> String {
    vm.exec(sh("ls /sys/block | grep vd | sort | tr '\\n' ' '")).text()
}

fn a_disk_comes_and_goes() {
    let builder = TestVm::builder().pci();
    let path = builder.place().given("disk", vec![0; 1 << 20]);
    let vm = builder.boot();
    assert_eq!(disks(&vm), "");
    for _ in 0..3 {
        vm.cli("plug", &["--disk", &format!("path={path},id=data")]).end().output(0);
        eventually("the guest finds the disk", || disks(&vm) == "vda");
        vm.exec(sh("echo written >/dev/vda"));
        vm.cli("unplug", &["data"]).end().output(0);
        eventually("the guest lets go of the disk", || disks(&vm).is_empty());
        assert!(std::fs::read(&path).unwrap().starts_with(b"written\n"));
    }
    let families = match vm.request(&Request::Metrics { format: Default::default() }) {
        Reply::Metrics { families } => families,
        reply => panic!("metrics were answered with {reply:?}"),
    };
    let labels = families.iter().flat_map(|family| &family.samples).flat_map(|s| s.labels.values());
    assert!(labels.clone().any(|label| label == "rng") && !labels.clone().any(|l| l == "data"));
}

fn a_network_card_comes_and_goes() {
    wire::in_a_network(|| {
        let vm = TestVm::builder().pci().boot();
        let cards = || vm.exec(["ls", "/sys/class/net"]).text();
        let before = cards();
        for _ in 0..2 {
            let card = format!("tap={},id=lan", wire::TAP);
            vm.cli("plug", &["--net", &card]).end().output(0);
            eventually("the guest finds the card", || cards().contains("eth0"));
            wire::configure(&vm);
            let ping = ["ping", "-c", "1", "-W", "2", &wire::HOST.to_string()];
            eventually("the host answers", || vm.exec(ping).status.success());
            vm.cli("unplug", &["lan"]).end().output(0);
            eventually("the guest lets go of the card", || cards() == before);
        }
    });
}

fn what_cannot_be_plugged_or_unplugged_is_told() {
    let vm = TestVm::builder().pci().boot();
    let unplug = vm.cli("unplug", &["vsock"]).end();
    unplug.assert_refused(&["\"vsock\"", "neither a disk nor a network card"]);
    vm.cli("plug", &["--net", "fd=7,id=x"]).end().assert_refused(&["fd=[7]", "use tap=NAME"]);
    let [disk, net] =
        [r#""add_disk","disk":{"path":"/a"}"#, r#""add_net","net":{"source":{"tap":"t"}}"#];
    for request in [disk, net] {
        let answer = vm.converse(format!("{{\"request\":{request}}}\n").as_bytes(), 1);
        assert!(answer[0].contains("needs a name; add id=NAME"), "{request}: {answer:?}");
    }
    let taken = vm.cli("plug", &["--net", "tap=tap9,id=rng"]).end();
    taken.assert_refused(&["rng"]);
    assert_eq!(vm.exec(["echo", "on"]).text(), "on");
}

fn without_pci_there_are_no_slots() {
    let vm = TestVm::boot();
    let request = Request::RemoveDevice { id: "rng".to_owned() };
    let Reply::Error { kind, message } = vm.request(&request) else { panic!("not refused") };
    assert_eq!(kind, ErrorKind::Failed);
    assert!(message.contains("--transport pci"), "{message}");
}
