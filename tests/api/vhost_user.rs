//! Disks that another process serves, here QEMU's storage daemon: an implementation that is not
//! ours.

use std::fs;
use std::path::Path;
use std::process::{Child, Command};

use guest_protocol::Spawn;
use harness::guest::GuestProcess;
use harness::{Place, TestVm, eventually, image, sh, tools};
use hypervisor::api::{ErrorKind, Reply, Request};
use hypervisor::config::DiskConfig;
use hypervisor::disks::DiskEngine;
use libtest_mimic::Trial;

const MIB: usize = 1 << 20;

pub fn trials() -> Vec<Trial> {
    harness::trials![
        a_backend_serves_a_disk_on_both_transports,
        pauses_with_requests_in_flight_lose_none,
        a_backend_that_dies_leaves_the_guest_alive,
        a_disk_of_a_backend_is_plugged_where_memory_is_shared,
    ]
}

/// The daemon, until it is dropped.
struct Backend {
    child: Child,
    socket: String,
}

impl Backend {
    /// Serves `file` at a socket of the place.
    fn start(place: &Place, name: &str, file: &str) -> Self {
        Self::export(place, name, file, "disk")
    }

    /// The same with storage so slow that there is always something in flight under load.
    fn start_slow(place: &Place, name: &str, file: &str) -> Self {
        Self::export(place, name, file, "slow")
    }

    fn export(place: &Place, name: &str, file: &str, node: &str) -> Self {
        let socket = harness::artifacts::text(&place.given_path(name));
        let child = Command::new("qemu-storage-daemon")
            .args(["--object", "throttle-group,id=limit,limits.iops-total=100"])
            .args(["--blockdev", &format!("driver=file,node-name=disk,filename={file}")])
            .args(["--blockdev", "driver=throttle,node-name=slow,throttle-group=limit,file=disk"])
            .args([
                "--export",
                &format!(
                    "type=vhost-user-blk,id=x,node-name={node},writable=on,num-queues=2,\
                     addr.type=unix,addr.path={socket}"
                ),
            ])
            .spawn();
        let child = child.unwrap_or_else(|error| {
            panic!("qemu-storage-daemon, of the package qemu-system-common: {error}")
        });
        let this = Self { child, socket };
        eventually("the backend listens", || Path::new(&this.socket).exists());
        this
    }

    fn disk(&self, id: &str) -> String {
        format!("vhost-user={},id={id}", self.socket)
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

fn a_backend_serves_a_disk_on_both_transports() {
    for pci in [false, true] {
        let builder = TestVm::builder().cpus(2);
        let content = image::noise(8 * MIB, 31);
        let file = builder.place().given("disk", &content);
        let backend = Backend::start(builder.place(), "socket", &file);
        let builder = if pci { builder.pci() } else { builder };
        let vm = builder.disk(format!("{},queues=2", backend.disk("far"))).boot();
        let [disk] = &vm.info().disks[..] else { panic!("{:?}", vm.info().disks) };
        assert_eq!((disk.id.as_str(), disk.engine, disk.queues), ("far", DiskEngine::VhostUser, 2));
        // The second half is copied over the first, past the guest's cache.
        let copy = "dd if=/dev/vda of=/dev/vda bs=16k skip=256 count=256 iflag=direct \
                    oflag=direct conv=notrunc,fsync 2>/dev/null && echo copied";
        assert_eq!(vm.exec(sh(copy)).text().trim(), "copied");
        let expected = [&content[4 * MIB..], &content[4 * MIB..]].concat();
        assert!(fs::read(&file).unwrap() == expected, "pci {pci}: the file differs");
        vm.exec(sh("echo 3 >/proc/sys/vm/drop_caches"));
        let halves = "dd if=/dev/vda bs=1M count=4 2>/dev/null | md5sum; \
                      dd if=/dev/vda bs=1M skip=4 2>/dev/null | md5sum";
        let sums = vm.exec(sh(halves)).text();
        let sums: Vec<_> = sums.lines().collect();
        assert!(sums.len() == 2 && sums[0] == sums[1], "{sums:?}");
        drop(vm);
    }
}

/// Writes and verifies with many requests at once, pass after pass, until there is `/tmp/stop`.
fn load() -> String {
    let fio = tools::start("fio");
    let pass = format!(
        "{fio} --name=load --filename=/dev/vda --direct=1 --ioengine=io_uring --iodepth=32 \
         --thread --rw=randrw --bs=4k --size=512k --verify=crc32c --verify_fatal=1 \
         --do_verify=1"
    );
    let mount = tools::MOUNT;
    format!("{mount} && cd /tmp && until test -e stop; do {pass} >log 2>&1 || exit 1; done")
}

/// How often a guest under load is paused.
fn pauses() -> u32 {
    let asked = std::env::var("CUBE_PAUSES").ok().map(|text| text.parse().unwrap());
    asked.unwrap_or(20)
}

/// A guest on slow storage that is under load, and its load.
fn loaded(place: Place, backend: &Backend) -> (TestVm, GuestProcess) {
    let tools = tools::programs(&place, &["/usr/bin/fio"]);
    let builder = TestVm::builder_in(place).option("--pmem", format!("path={tools},ro"));
    let vm = builder.disk(backend.disk("far")).boot();
    let load = vm.start(Spawn::new(sh(&load())));
    eventually("the load begins", || vm.count("vhost_user_calls_total", "far") > 20);
    (vm, load)
}

fn pauses_with_requests_in_flight_lose_none() {
    let place = Place::new();
    let file = place.given("disk", vec![0; MIB]);
    let backend = Backend::start_slow(&place, "socket", &file);
    let (vm, load) = loaded(place, &backend);
    for _ in 0..pauses() {
        let calls = vm.count("vhost_user_calls_total", "far");
        vm.ask(&Request::Pause {});
        vm.ask(&Request::Resume {});
        let more = || vm.count("vhost_user_calls_total", "far") > calls + 1;
        eventually("the backend goes on", more);
    }
    assert!(vm.exec(["touch", "/tmp/stop"]).status.success());
    let ended = load.end();
    assert!(ended.status.success(), "{ended:?}, {}", vm.exec(["cat", "/tmp/log"]).text());
    assert_eq!(vm.count("vhost_user_losses_total", "far"), 0);
    assert_eq!(vm.count("vhost_user_connections_total", "far"), 1);
}

fn a_backend_that_dies_leaves_the_guest_alive() {
    let builder = TestVm::builder();
    let file = builder.place().given("disk", vec![7; MIB]);
    let backend = Backend::start(builder.place(), "socket", &file);
    let vm = builder.disk(backend.disk("far")).boot();
    assert_eq!(
        vm.exec(sh("dd if=/dev/vda bs=512 count=1 2>/dev/null | wc -c")).text().trim(),
        "512"
    );
    drop(backend);
    let lost = || {
        let families = match vm.request(&Request::Metrics { format: Default::default() }) {
            Reply::Metrics { families } => families,
            reply => panic!("metrics were answered with {reply:?}"),
        };
        let family =
            families.iter().find(|family| family.name.ends_with("vhost_user_losses_total"));
        family.unwrap().samples[0].value == 1
    };
    eventually("the loss is counted", lost);
    assert_eq!(vm.exec(sh("echo alive")).text().trim(), "alive");
}

fn a_disk_of_a_backend_is_plugged_where_memory_is_shared() {
    let builder = TestVm::builder().pci();
    let [one, two] = ["one", "two"].map(|name| builder.place().given(name, vec![7; MIB]));
    let first = Backend::start(builder.place(), "socket-one", &one);
    let second = Backend::start(builder.place(), "socket-two", &two);
    let vm = builder.disk(first.disk("first")).boot();
    vm.cli("plug", &["--disk", &second.disk("second")]).end().output(0);
    let disks = || vm.exec(sh("ls /sys/block | grep vd | sort | tr '\\n' ' '")).text();
    eventually("the guest finds the disk", || disks().trim() == "vda vdb");
    vm.exec(sh("echo written | dd of=/dev/vdb conv=fsync 2>/dev/null"));
    assert!(fs::read(&two).unwrap().starts_with(b"written\n"));
    vm.cli("unplug", &["second"]).end().output(0);
    eventually("the guest lets go of the disk", || disks().trim() == "vda");

    let plain = TestVm::builder().pci().boot();
    let disk: DiskConfig = second.disk("late").parse().unwrap();
    let Reply::Error { kind, message } = plain.request(&Request::AddDisk { disk }) else {
        panic!("not refused")
    };
    assert_eq!(kind, ErrorKind::Failed);
    assert!(message.contains("memory is not shared"), "{message}");
}
