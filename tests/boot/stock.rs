//! A distribution's kernel: a bzImage, with its virtio drivers as modules.

use harness::artifacts::{Artifact, may_skip, tell_skipped};
use harness::{Call, Place, sh};
use libtest_mimic::Trial;

pub fn trials() -> Vec<Trial> {
    if may_skip(Artifact::StockKernel.name()) {
        tell_skipped("tests of a distribution's kernel", "CUBE_ALLOW_SKIP says so");
        return Vec::new();
    }
    harness::trials![
        a_distributions_kernel_runs_a_command,
        a_distributions_kernel_has_its_devices,
        a_distributions_kernel_knows_the_time,
    ]
}

/// A call that boots it.
fn run<'a>(place: &'a Place, options: &[&str], line: &str) -> Call<'a> {
    let (kernel, initrd) = (Artifact::StockKernel.arg(), Artifact::StockInitrd.arg());
    let all = [&["--kernel", &kernel, "--initrd", &initrd], options].concat();
    place.run(&all, sh(line))
}

fn a_distributions_kernel_runs_a_command() {
    let place = Place::new();
    let ended = run(&place, &[], "uname -r; exit 7").end();
    assert!(ended.output(7).contains("cloud"), "{ended:?}");
}

/// From kvm-clock: its driver of the CMOS clock is told that there is nothing for it.
fn a_distributions_kernel_knows_the_time() {
    let place = Place::new();
    let now = || std::time::UNIX_EPOCH.elapsed().unwrap().as_secs();
    let before = now();
    let ended = run(&place, &[], "date +%s; dmesg | grep -c rtc_cmos; true").end();
    let after = now();
    let text = ended.output(0);
    let mut lines = text.lines();
    let told: u64 = lines.next().unwrap().parse().unwrap();
    // A second is lost to rounding.
    assert!((before - 1..=after + 1).contains(&told), "{told} is not in {before}..{after}");
    assert_eq!(lines.next(), Some("0"));
}

fn a_distributions_kernel_has_its_devices() {
    let place = Place::new();
    let disk = place.given("disk", vec![0; 1 << 20]);
    let line = "nproc; cat /sys/block/vda/size; echo written >/dev/vda";
    let ended = run(&place, &["--cpus", "2", "--disk", &format!("path={disk}")], line).end();
    assert_eq!(ended.output(0), "2\n2048\n");
    assert!(std::fs::read(disk).unwrap().starts_with(b"written\n"));
}
