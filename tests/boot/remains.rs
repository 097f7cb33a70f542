//! What a VMM takes while it runs, and leaves when it has ended.

use harness::census::{Census, private_memory};
use harness::{Place, TestVm};
use libtest_mimic::Trial;

pub fn trials() -> Vec<Trial> {
    harness::trials![runs_leave_nothing_behind, the_vmm_itself_takes_little_memory]
}

/// `CUBE_SOAK_RUNS`, 3 by default: how many runs in a row.
fn soak_runs() -> usize {
    std::env::var("CUBE_SOAK_RUNS").map_or(3, |count| count.parse().unwrap())
}

fn runs_leave_nothing_behind() {
    let place = Place::new();
    let disk = format!("path={}", place.given("disk", vec![0; 1 << 20]));
    let before = Census::take();
    for run in 0..soak_runs() {
        let word = run.to_string();
        let call = place.run(&["--memory", "128M", "--disk", &disk], ["echo", &word]);
        assert_eq!(call.end().output(0).trim(), word);
        assert_eq!(place.leftovers(), [""; 0]);
    }
    assert_eq!(Census::take(), before);
}

fn the_vmm_itself_takes_little_memory() {
    let vm = TestVm::builder().cpus(1).memory("128M").boot();
    assert_eq!(vm.exec(["echo", "used"]).text(), "used");
    let own = private_memory(vm.pid(), 128 << 20);
    println!("memory of the VMM beside its guest's: {} KiB", own >> 10);
    assert!(own <= 4 << 20, "{own} bytes");
}
