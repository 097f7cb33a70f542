//! Disks under `fio`, which knows of every block what it wrote there.

use harness::{Place, TestVm, sh, tools};
use libtest_mimic::Trial;

pub fn trials() -> Vec<Trial> {
    harness::trials![
        every_block_is_what_was_written_with_both_engines_over_mmio,
        every_block_is_what_was_written_with_both_engines_over_pci,
    ]
}

const MIB: usize = 1 << 20;
const ENGINES: [&str; 2] = ["io_uring", "sync"];

/// Mixed reads and writes, many at once from two threads per disk, each of its own half and checked
/// while others are under way, and all once more at the end.
const JOBS: &str = "--direct=1 --ioengine=io_uring --iodepth=32 --rw=randrw --bsrange=4k-64k \
                    --size=8M --offset_increment=8M --numjobs=2 --thread --verify=crc32c \
                    --verify_fatal=1 --verify_backlog=64 --do_verify=1 \
                    --output-format=json --output=report \
                    --name=io_uring --filename=/dev/vda --name=sync --filename=/dev/vdb";

/// A guest with a disk of each engine, by its name, and programs of the host.
fn guest(transport: &str) -> TestVm {
    let place = Place::new();
    let tools = tools::programs(&place, &["/usr/bin/fio"]);
    let disks = ENGINES.map(|engine| {
        let file = place.given(engine, vec![0; 16 * MIB]);
        format!("path={file},id={engine},engine={engine},queues=2")
    });
    let builder = TestVm::builder_in(place).option("--pmem", format!("path={tools},ro"));
    let builder = disks.into_iter().fold(builder, harness::vm::Builder::disk);
    builder.cpus(2).transport(transport).boot()
}

fn assert_verifies(transport: &str) {
    let vm = guest(transport);
    let fio = tools::start("fio");
    // Above the report it warns of writers in each other's way, which have a half each.
    let report = "sed -n '/^{/,$p' report";
    let line = format!("{} && cd /tmp && {fio} {JOBS} >&2 && {report}", tools::MOUNT);
    let output = vm.exec(sh(&line));
    assert!(output.status.success(), "{output:?}");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let jobs = report["jobs"].as_array().unwrap();
    assert_eq!(jobs.len(), 4, "{report:#}");
    for job in jobs {
        assert_eq!(job["error"], 0, "{job:#}");
        // Half of what was asked for, more or less, is written.
        assert!(job["write"]["io_bytes"].as_u64().unwrap() > 2 << 20, "{job:#}");
    }
    for engine in ENGINES {
        assert!(vm.count("block_written_bytes_total", engine) > 4 << 20);
        assert_eq!(vm.count("block_errors_total", engine), 0);
        assert_eq!(vm.count("block_guest_faults_total", engine), 0);
    }
}

fn every_block_is_what_was_written_with_both_engines_over_mmio() {
    assert_verifies("mmio");
}

fn every_block_is_what_was_written_with_both_engines_over_pci() {
    assert_verifies("pci");
}
