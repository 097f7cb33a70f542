//! A guest at work that is saved, killed and restored, again and again, and notices nothing.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use guest_protocol::Spawn;
use harness::{Place, TestVm, eventually, image, sh, tools, wire};
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
/// A third disk has a file system.
const FILES: &str = "files";
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
/// Makes, changes, links, renames and removes files and directories, some of them brought to the disk.
const FILER: &str = "cd /mnt; i=0; while [ ! -e /tmp/stop ]; do i=$((i+1)); d=d$((i%16)); \
                     { rm -rf $d && mkdir $d && head -c $((i%8*9000+100)) /dev/urandom >$d/a && \
                     cp $d/a $d/b && ln $d/b $d/c && mv $d/a $d/d && echo $i >>log; } 2>>/tmp/bad; \
                     [ $((i%5)) != 0 ] || sync; usleep 200000; done; cd /; umount /mnt; touch /tmp/filed";
/// What both clocks of the guest say: `/proc/uptime`, then seconds and microseconds of the time of day.
const CLOCKS: &str = "cat /proc/uptime; adjtimex | sed -n 's/^ *time.tv_u*sec: *//p'";
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
    let files = place.given(FILES, vec![0; 32 * MIB]);
    image::host("mkfs.ext4", &["-q", &files]);
    let net = format!("tap={},id=net,tx_bytes={RATE}", wire::TAP);
    let builder = TestVm::builder_in(place).option("--pmem", format!("path={fio},ro,id=tools"));
    let builder = disks.into_iter().fold(builder, harness::vm::Builder::disk);
    let builder = builder.disk(format!("path={files},id={FILES}"));
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
    assert!(vm.exec(["mount", "-t", "ext4", "/dev/vdc", "/mnt"]).status.success());
    vm.leave(sh(FILER));
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
    assert_eq!(bad, "", "fio, or who makes files");
}

/// Ends the work and looks at what came of it.
fn finish(vm: &TestVm) {
    assert!(vm.exec(["touch", "/tmp/stop"]).status.success());
    for ended in ["/tmp/done", "/tmp/filed"] {
        eventually(ended, || vm.exec(["test", "-e", ended]).status.success());
    }
    eventually("the stream ends", || vm.exec(["test", "-s", "/tmp/sent"]).status.success());
    assert_well(vm);
    assert_eq!(vm.exec(["cat", "/tmp/sent"]).text().trim(), "0");
    assert!(number(vm, "wc -l </tmp/rounds") > 0);
    for disk in DISKS {
        assert_eq!(vm.count("block_errors_total", disk), 0);
    }
}

/// What clocks have shown, in seconds.
struct Clocks {
    /// The host's, before the guest was asked and after it has answered.
    host: [f64; 2],
    monotonic: f64,
    time_of_day: f64,
}

impl Clocks {
    fn read(vm: &TestVm) -> Self {
        let before = now();
        let said = vm.exec(sh(CLOCKS)).text();
        let mut words = said.split_whitespace().map(|word| word.parse::<f64>().unwrap());
        // Beside the time since the boot stands that for which processors were idle.
        let (monotonic, _idle) = (words.next().unwrap(), words.next().unwrap());
        let time_of_day = words.next().unwrap() + words.next().unwrap() / 1e6;
        Self { host: [before, now()], monotonic, time_of_day }
    }

    /// Checks those of a guest that showed `before`, was paused by `paused`, went on as a copy at
    /// `resumed`, and kept its time of day or took the host's.
    fn assert_follow(&self, before: &Self, [paused, resumed]: [f64; 2], keep: bool) {
        let went = self.monotonic - before.monotonic;
        let ran = paused - before.host[0] + self.host[1] - resumed;
        assert!((0.0..ran + TOLERANCE).contains(&went), "{went} s went by in {ran} s");
        if keep {
            let difference = self.time_of_day - before.time_of_day - went;
            assert!(difference.abs() < TOLERANCE, "the time of day went {difference} s further");
        } else {
            let expected = self.host[0] - TOLERANCE..self.host[1] + TOLERANCE;
            assert!(expected.contains(&self.time_of_day), "{} of {expected:?}", self.time_of_day);
        }
    }
}

/// Seconds by which clocks may be wrong.
const TOLERANCE: f64 = 1.0;

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64()
}

/// Looks at a copy of the file system that a snapshot has: what it needs is its journal, nothing else.
fn check_files(store: &Path, copy: &Path) {
    fs::copy(store.join(format!("disk-{FILES}")), copy).unwrap();
    let copy = copy.to_str().unwrap();
    image::host("e2fsck", &["-y", "-E", "journal_only", copy]);
    image::host("e2fsck", &["-fn", copy]);
    fs::remove_file(copy).unwrap();
}

/// A guest that was saved, killed and goes on, with its clocks at both times.
struct Generation {
    vm: TestVm,
    /// Its files, but for its file system's, of which it has a copy without a name.
    files: PathBuf,
}

/// Saves the guest into `store`, kills its VMM, and makes it go on with copies of its files, which are
/// put beside `store`.
fn next_generation(last: Generation, store: &Path, keep: bool) -> Generation {
    let Generation { vm, files } = last;
    let before = Clocks::read(&vm);
    vm.ask(&Request::Pause {});
    let paused = now();
    vm.save(store);
    let kept = store.with_extension("files");
    fs::create_dir(&kept).unwrap();
    check_files(store, &kept.join("check"));
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
    let overrides = [&one, &two, &tools, &net].into_iter().flat_map(|what| ["--override", what]);
    let clock = ["--clock", if keep { "keep" } else { "advance" }];
    let options: Vec<&str> = overrides.chain(clock).collect();
    let mut vm = TestVm::restore_paused(store, &options);
    let resumed = now();
    vm.resume();
    // The first connection is made before anything else, and must not be lost.
    Clocks::read(&vm).assert_follow(&before, [paused, resumed], keep);
    Generation { vm, files: kept }
}

fn a_guest_at_work_survives_being_saved_killed_and_restored() {
    wire::in_a_network(|| {
        let (listener, port) = wire::listen();
        let bytes = (STREAM * cycles()).next_multiple_of(64 << 10);
        let serving = thread::spawn(move || {
            wire::expect_noise(&wire::accept(&listener), bytes, 71);
        });
        let vm = at_work("send", &port, bytes);
        let mut generation = Generation { files: vm.place().given_path(""), vm };
        let store = Place::new();
        let started = Instant::now();
        for cycle in 0..cycles() {
            let before = count(&generation.vm);
            let dir = store.given_path(&format!("cycle{cycle}"));
            generation = next_generation(generation, &dir, cycle.is_multiple_of(2));
            let vm = &generation.vm;
            let after = count(vm);
            assert!(after >= before, "{after} after {before}");
            eventually("timers fire", || count(vm) > after + 2);
            assert_well(vm);
            fs::remove_dir_all(&dir).unwrap();
            // Its files are copies, and it is gone.
            if let Some(last) = cycle.checked_sub(1) {
                fs::remove_dir_all(store.given_path(&format!("cycle{last}.files"))).unwrap();
            }
        }
        if env::var_os("CUBE_TEST_TIMES").is_some() {
            let seconds = started.elapsed().as_secs_f64();
            eprintln!("{} cycles with {} in {seconds:.0} s", cycles(), memory());
        }
        finish(&generation.vm);
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
