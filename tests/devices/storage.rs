//! What the host has of a disk: written blocks, holes, and a limit.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

use harness::vm::Builder;
use harness::{TestVm, image, sh};
use libtest_mimic::Trial;

pub fn trials() -> Vec<Trial> {
    harness::trials![
        what_was_discarded_is_a_hole_in_the_file,
        what_was_synced_outlives_the_vmm,
        a_limit_of_bytes_holds_for_its_disk_only,
        a_limit_of_operations_holds_for_its_disk_only,
    ]
}

const MIB: usize = 1 << 20;

/// A guest with a disk of each engine, of this content; and their files.
fn guest(content: &[u8]) -> (TestVm, [String; 2]) {
    let mut builder = TestVm::builder();
    let files = ["sync", "io_uring"].map(|engine| builder.place().given(engine, content));
    for (file, engine) in files.iter().zip(["sync", "io_uring"]) {
        builder = builder.disk(format!("path={file},id={engine},engine={engine}"));
    }
    (builder.boot(), files)
}

fn what_was_discarded_is_a_hole_in_the_file() {
    let content = image::noise(16 * MIB, 73);
    let (vm, files) = guest(&content);
    let used = |file: &String| fs::metadata(file).unwrap().blocks() * 512;
    let before = files.each_ref().map(used);
    for disk in ["vda", "vdb"] {
        let line = format!("blkdiscard -o {} -l {} /dev/{disk} && sync", 4 * MIB, 8 * MIB);
        assert!(vm.exec(sh(&line)).status.success());
    }
    let mut expected = content;
    expected[4 * MIB..12 * MIB].fill(0);
    for (file, before) in files.iter().zip(before) {
        assert!(fs::read(file).unwrap() == expected, "{file}: not what is left");
        assert!(used(file) + 8 * MIB as u64 <= before, "{file}: {} of {before}", used(file));
    }
}

fn what_was_synced_outlives_the_vmm() {
    let (vm, files) = guest(&vec![0; 4 * MIB]);
    let sent = image::noise(4 * MIB, 79);
    for disk in ["vda", "vdb"] {
        // One process that does not close the disk before it is told to.
        let line = format!("dd of=/dev/{disk} bs=64k iflag=fullblock conv=fsync 2>/dev/null");
        assert!(vm.exec_with(sh(&line), &sent).status.success());
    }
    let place = vm.murder();
    for file in files {
        assert!(fs::read(&file).unwrap() == sent, "{file}: not what was synced");
    }
    // The sockets of a VMM that was killed.
    for socket in ["api", "vsock"] {
        let _ = fs::remove_file(place.path(socket));
    }
}

/// Two disks, the first of which has a limit.
fn limited(limit: &str) -> Builder {
    let builder = TestVm::builder();
    let [slow, fast] = ["slow", "fast"].map(|name| builder.place().given(name, vec![0; 8 * MIB]));
    builder.disk(format!("path={slow},id=slow,{limit}")).disk(format!("path={fast},id=fast"))
}

/// How long the guest takes to read so much past its page cache.
fn read(vm: &TestVm, disk: &str, size: &str, count: u32) -> Duration {
    let line = format!("dd if=/dev/{disk} of=/dev/null iflag=direct bs={size} count={count}");
    let started = Instant::now();
    assert!(vm.exec(sh(&line)).status.success());
    started.elapsed()
}

/// A limit is a least time, which no slow machine falls short of; without one the same is faster.
fn assert_limited(vm: &TestVm, size: &str, count: u32, least: Duration) {
    let slow = read(vm, "vda", size, count);
    let fast = read(vm, "vdb", size, count);
    assert!(slow >= least, "{slow:?}");
    assert!(slow > fast * 2, "{slow:?} with a limit, {fast:?} without");
    assert!(vm.count("block_throttled_total", "slow") >= 1);
    assert_eq!(vm.count("block_throttled_total", "fast"), 0);
}

fn a_limit_of_bytes_holds_for_its_disk_only() {
    let vm = limited("rate_bytes=512K/s").boot();
    // Of these twelve seconds' worth one second's is there from the start, or has been used for the
    // partition table, and the last request, an eighth of a second, is let through on debt.
    assert_limited(&vm, "64k", 96, Duration::from_millis(12_000 - 1000 - 125));
}

fn a_limit_of_operations_holds_for_its_disk_only() {
    let vm = limited("rate_ops=50/s").boot();
    // As above: twelve seconds, less one, less one operation.
    assert_limited(&vm, "4k", 600, Duration::from_millis(12_000 - 1000 - 20));
}
