//! A guest at work that is saved, killed and restored, again and again, and notices nothing.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Instant;

use guest_protocol::Spawn;
use harness::{Place, TestVm, eventually, sh, tools, wire};
use hypervisor::api::Request;
use libtest_mimic::Trial;

pub fn trials() -> Vec<Trial> {
    harness::trials![
        a_guest_at_work_survives_being_saved_killed_and_restored,
        a_guest_at_work_survives_a_hundred_pauses,
    ]
}

/// How often it is saved and restored.
fn cycles() -> u64 {
    env::var("CUBE_CYCLES").ok().map_or(2, |text| text.parse().unwrap())
}

/// Memory of the guest. More than 3 GiB are in two slots.
fn memory() -> String {
    env::var("CUBE_CYCLE_MEMORY").unwrap_or_else(|_| "320M".to_owned())
}

const PAUSES: usize = 100;
const MIB: usize = 1 << 20;
const DISKS: [&str; 2] = ["one", "two"];
/// The image of programs.
const TOOLS: &str = "tools.erofs";
/// Bytes that go over the network for each cycle, at so many a second.
const STREAM: u64 = 4 << 20;
const RATE: &str = "1M/s";

/// Writes both disks and checks each block, until it is told to stop; counts the rounds.
const FIO: &str = "--direct=1 --ioengine=io_uring --iodepth=16 --rw=randrw --bsrange=4k-64k --size=4M \
                   --thread --verify=crc32c --verify_fatal=1 --verify_backlog=64 --do_verify=1 \
                   --name=one --filename=/dev/vda --name=two --filename=/dev/vdb";
/// Counts what a timer of a twentieth of a second wakes it for.
const TIMER: &str = "i=0; while :; do i=$((i+1)); echo $i >/tmp/new; mv /tmp/new /tmp/count; \
                     usleep 50000; done";
/// Words of the kernel that say that something stood still for it.
const COMPLAINTS: [&str; 4] = ["soft lockup", "rcu_sched detected", "rcu_preempt detected", "BUG:"];

/// A guest with two disks and a network card, at work on all of them.
fn at_work(stream: &str, port: &str, bytes: u64) -> TestVm {
    let place = Place::new();
    let fio = tools::programs(&place, &["/usr/bin/fio"]);
    let disks = DISKS.map(|name| {
        let file = place.given(name, vec![0; 4 * MIB]);
        format!("path={file},id={name}")
    });
    let net = format!("tap={},id=net,tx_bytes={RATE}", wire::TAP);
    let builder = TestVm::builder_in(place).option("--pmem", format!("path={fio},ro,id=tools"));
    let builder = disks.into_iter().fold(builder, harness::vm::Builder::disk);
    let vm = builder.option("--net", net).cpus(2).memory(&memory()).boot();
    wire::configure(&vm);
    let program = wire::install(&vm);
    assert!(vm.exec(sh(tools::MOUNT)).status.success());
    let fio = tools::start("fio");
    vm.leave(sh(&format!(
        "cd /tmp; while [ ! -e stop ]; do {fio} {FIO} >said 2>&1 || {{ cp said bad; break; }}; \
         echo >>rounds; done; touch done"
    )));
    vm.leave(sh(TIMER));
    let line = format!(
        "{program} {} {port} {stream} {bytes} 71 2>/tmp/sent.err; echo $? >/tmp/sent",
        wire::HOST
    );
    vm.agent().spawn(Spawn::new(sh(&line))).unwrap();
    eventually("it counts", || vm.exec(["test", "-s", "/tmp/count"]).status.success());
    vm
}

fn number(vm: &TestVm, line: &str) -> u64 {
    vm.exec(sh(line)).text().trim().parse().unwrap()
}

fn count(vm: &TestVm) -> u64 {
    number(vm, "cat /tmp/count")
}

fn assert_well(vm: &TestVm) {
    let said = vm.exec(["dmesg"]).text();
    for bad in COMPLAINTS {
        assert!(!said.contains(bad), "{said}");
    }
    let bad = vm.exec(sh("cat /tmp/bad 2>/dev/null; true")).text();
    assert_eq!(bad, "", "fio");
}

/// Ends the work and looks at what came of it.
fn finish(vm: &TestVm) {
    assert!(vm.exec(["touch", "/tmp/stop"]).status.success());
    eventually("fio ends", || vm.exec(["test", "-e", "/tmp/done"]).status.success());
    eventually("the stream ends", || vm.exec(["test", "-s", "/tmp/sent"]).status.success());
    assert_well(vm);
    assert_eq!(vm.exec(["cat", "/tmp/sent"]).text().trim(), "0");
    assert!(number(vm, "wc -l </tmp/rounds") > 0);
    for disk in DISKS {
        assert_eq!(vm.count("block_errors_total", disk), 0);
    }
}

/// Saves the guest into `store`, kills its VMM, and makes it go on with copies of its files in
/// `files`, which are put beside `store`.
fn next_generation(vm: TestVm, store: &Path, files: &Path) -> (TestVm, PathBuf) {
    vm.save(store);
    let kept = store.with_extension("files");
    fs::create_dir(&kept).unwrap();
    let copy = |name: &str| {
        fs::copy(files.join(name), kept.join(name)).unwrap();
        kept.join(name).display().to_string()
    };
    let [one, two] = DISKS.map(|name| format!("disk:{name}={}", copy(name)));
    let tools = format!("pmem:tools={}", copy(TOOLS));
    let net = format!("net:net=tap:{}", wire::TAP);
    let place = vm.murder();
    for socket in ["api", "vsock"] {
        fs::remove_file(place.path(socket)).unwrap();
    }
    let options: Vec<&str> =
        [&one, &two, &tools, &net].into_iter().flat_map(|what| ["--override", what]).collect();
    (TestVm::restore(store, &options), kept)
}

fn a_guest_at_work_survives_being_saved_killed_and_restored() {
    wire::in_a_network(|| {
        let (listener, port) = wire::listen();
        let bytes = (STREAM * cycles()).next_multiple_of(64 << 10);
        let serving = thread::spawn(move || {
            wire::expect_noise(&wire::accept(&listener), bytes, 71);
        });
        let mut vm = at_work("send", &port, bytes);
        let mut files = vm.place().given_path("");
        let store = Place::new();
        let started = Instant::now();
        for cycle in 0..cycles() {
            let before = count(&vm);
            let dir = store.given_path(&format!("cycle{cycle}"));
            let (next, next_files) = next_generation(vm, &dir, &files);
            // The first connection is made before anything else, and must not be lost.
            let after = count(&next);
            assert!(after >= before, "{after} after {before}");
            eventually("timers fire", || count(&next) > after + 2);
            assert_well(&next);
            vm = next;
            files = next_files;
            fs::remove_dir_all(&dir).unwrap();
        }
        if env::var_os("CUBE_TEST_TIMES").is_some() {
            let seconds = started.elapsed().as_secs_f64();
            eprintln!("{} cycles with {} in {seconds:.0} s", cycles(), memory());
        }
        finish(&vm);
        serving.join().unwrap();
    });
}

fn a_guest_at_work_survives_a_hundred_pauses() {
    wire::in_a_network(|| {
        let (listener, port) = wire::listen();
        let serving = thread::spawn(move || {
            wire::expect_noise(&wire::accept(&listener), STREAM, 71);
        });
        let vm = at_work("send", &port, STREAM);
        for _ in 0..PAUSES {
            vm.ask(&Request::Pause {});
            vm.ask(&Request::Resume {});
        }
        let after = count(&vm);
        eventually("timers fire", || count(&vm) > after + 2);
        finish(&vm);
        serving.join().unwrap();
    });
}
