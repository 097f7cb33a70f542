//! Frames that somebody else moves: the host's kernel (vhost-net), or another process (vhost-user).

use std::cell::RefCell;
use std::sync::Arc;
use std::thread;

use devices::executor::ExecutorHandle;
use devices::ids::DeviceId;
use devices::testing::VhostUserBackend;
use devices::virtio::VirtioDevice;
use devices::virtio::net::{DataPath, Net, NetConfig, Tap};
use harness::{Place, TestVm, eventually, image, sh, wire};
use hypervisor::api::Request;
use libtest_mimic::Trial;

pub fn trials() -> Vec<Trial> {
    harness::trials![
        the_kernel_moves_frames_over_mmio,
        the_kernel_moves_frames_over_pci,
        the_kernel_moves_the_frames_of_several_pairs,
        a_link_of_the_kernels_goes_and_comes_back,
        a_card_of_the_kernels_is_saved_and_goes_on,
        a_backend_moves_frames_over_mmio,
        a_backend_moves_frames_over_pci,
        a_backend_that_dies_costs_the_link_and_nothing_else,
    ]
}

/// Bytes of a stream that pauses interrupt.
const STREAM: u64 = 4 << 20;

/// Our own card behind the protocol of vhost-user, on the TAP of this network; what is given to a
/// guest to reach it.
fn backend(place: &Place) -> (VhostUserBackend, String) {
    let socket = place.given_path("net.sock");
    let make = |executor: ExecutorHandle| -> Box<dyn VirtioDevice> {
        let taps = RefCell::new(None);
        eventually("the card of the connection before has let go of the TAP", || {
            *taps.borrow_mut() = Tap::open_named(wire::TAP, 1, None).ok();
            taps.borrow().is_some()
        });
        let config = NetConfig::new(DeviceId::new("far"));
        Box::new(Net::new(executor, taps.into_inner().unwrap(), config).unwrap())
    };
    let backend = VhostUserBackend::listen(&socket, Arc::new(make)).unwrap();
    (backend, format!("vhost-user={},id=net", socket.display()))
}

/// A guest with this card whose network is up.
fn guest(place: Place, transport: &str, net: &str) -> TestVm {
    let disk = place.given("disk", vec![0; 1 << 20]);
    let builder = TestVm::builder_in(place).transport(transport).option("--net", net);
    let vm = builder.disk(format!("path={disk}")).boot();
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

/// All but the network.
fn assert_well(vm: &TestVm) {
    let line = "echo written >/dev/vda && sync && head -c 7 /dev/vda";
    assert_eq!(vm.exec(sh(line)).text(), "written");
    assert_eq!(vm.count("net_guest_faults_total", "net"), 0);
}

/// Streams both ways, with pauses in between, that lose nothing.
fn assert_moves(vm: &TestVm, path: DataPath) {
    let [card] = &vm.info().net[..] else { panic!("{:?}", vm.info().net) };
    assert_eq!((card.id.as_str(), card.path), ("net", path));
    let program = wire::install(vm);
    for (way, serve) in
        [("send", wire::expect_noise as fn(&_, _, _)), ("receive", wire::send_noise)]
    {
        let (listener, port) = wire::listen();
        let serving = thread::spawn(move || serve(&wire::accept(&listener), STREAM, 91));
        let (address, size) = (wire::HOST.to_string(), STREAM.to_string());
        let words = [program.as_str(), &address, &port, way, &size, "91"];
        let moving = vm.start(guest_protocol::Spawn::new(words));
        for _ in 0..3 {
            vm.ask(&Request::Pause {});
            vm.ask(&Request::Resume {});
        }
        let output = moving.end();
        assert!(output.status.success(), "{way}: {output:?}");
        serving.join().unwrap();
    }
    assert_eq!(carrier(vm), "1");
    assert_well(vm);
}

fn kernel() -> String {
    format!("tap={},id=net,vhost=on", wire::TAP)
}

fn assert_kernel_moves(transport: &str) {
    let vm = guest(Place::new(), transport, &kernel());
    assert_moves(&vm, DataPath::Kernel);
    assert!(vm.count("net_calls_total", "net") > 10);
}

fn the_kernel_moves_frames_over_mmio() {
    wire::in_a_network(|| assert_kernel_moves("mmio"));
}

fn the_kernel_moves_frames_over_pci() {
    wire::in_a_network(|| assert_kernel_moves("pci"));
}

fn the_kernel_moves_the_frames_of_several_pairs() {
    wire::in_a_network(|| {
        image::host("ip", &["link", "del", wire::TAP]);
        image::host("ip", &["tuntap", "add", wire::TAP, "mode", "tap", "multi_queue"]);
        image::host("ip", &["addr", "add", &format!("{}/24", wire::HOST), "dev", wire::TAP]);
        wire::set_link("up");
        let net = format!("{},queues=2", kernel());
        let vm = TestVm::builder().cpus(2).option("--net", net).boot();
        wire::configure(&vm);
        eventually("the host answers", || pings(&vm));
        assert_eq!(vm.exec(sh("ls -d /sys/class/net/eth0/queues/rx-* | wc -l")).number(), 2);
        vm.ask(&Request::Pause {});
        vm.ask(&Request::Resume {});
        eventually("the host answers again", || pings(&vm));
        assert_eq!(vm.info().net[0].queues, 2);
        assert_eq!(vm.count("net_guest_faults_total", "net"), 0);
    });
}

fn a_link_of_the_kernels_goes_and_comes_back() {
    wire::in_a_network(|| {
        let vm = guest(Place::new(), "mmio", &kernel());
        for _ in 0..2 {
            wire::set_link("down");
            eventually("the guest's link is down", || carrier(&vm) == "0");
            assert_well(&vm);
            wire::set_link("up");
            eventually("the guest's link is up", || carrier(&vm) == "1");
            eventually("the host answers again", || pings(&vm));
        }
        image::host("ip", &["link", "del", wire::TAP]);
        eventually("the guest's link is gone", || carrier(&vm) == "0");
        assert!(!pings(&vm));
        assert_well(&vm);
        assert_eq!(vm.count("net_link_losses_total", "net"), 3);
    });
}

fn a_card_of_the_kernels_is_saved_and_goes_on() {
    wire::in_a_network(|| {
        let store = Place::new();
        let disk = store.given("disk", vec![0; 1 << 20]);
        let builder = TestVm::builder().option("--net", kernel());
        let vm = builder.disk(format!("path={disk}")).boot();
        wire::configure(&vm);
        eventually("the host answers", || pings(&vm));
        let dir = store.given_path("snapshot");
        vm.save(&dir);
        drop(vm);
        let vm = TestVm::restore(&dir, &["--trust-paths"]);
        eventually("the host answers again", || pings(&vm));
        assert_moves(&vm, DataPath::Kernel);
    });
}

fn assert_backend_moves(transport: &str) {
    let place = Place::new();
    let (_backend, net) = backend(&place);
    let vm = guest(place, transport, &net);
    assert_moves(&vm, DataPath::Backend);
    assert_eq!(vm.count("vhost_user_connections_total", "net"), 1);
}

fn a_backend_moves_frames_over_mmio() {
    wire::in_a_network(|| assert_backend_moves("mmio"));
}

fn a_backend_moves_frames_over_pci() {
    wire::in_a_network(|| assert_backend_moves("pci"));
}

fn a_backend_that_dies_costs_the_link_and_nothing_else() {
    wire::in_a_network(|| {
        let place = Place::new();
        let (backend, net) = backend(&place);
        let vm = guest(place, "mmio", &net);
        drop(backend);
        eventually("the guest's link is gone", || carrier(&vm) == "0");
        assert_eq!(vm.count("vhost_user_losses_total", "net"), 1);
        assert_well(&vm);
    });
}
