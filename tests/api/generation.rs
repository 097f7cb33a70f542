//! The machine's generation id: the guest hears of a new one, and draws fresh randomness.

use harness::{TestVm, eventually};
use hypervisor::api::{Reply, Request};
use libtest_mimic::Trial;

pub fn trials() -> Vec<Trial> {
    harness::trials![
        a_new_generation_reseeds_the_guest,
        a_new_generation_reseeds_a_guest_on_pci,
        a_paused_guest_hears_of_its_new_generation_when_it_goes_on,
    ]
}

/// How often the guest has reseeded because of a new id. The kernel says so when the id in its
/// memory differs from the one before, and only then.
fn reseedings(vm: &TestVm) -> usize {
    vm.exec(["dmesg"]).text().matches("reseeded due to virtual machine fork").count()
}

fn assert_reseeds(vm: &TestVm) {
    assert_eq!(reseedings(vm), 0);
    for times in 1..=3 {
        vm.ask(&Request::NewGeneration {});
        eventually("the guest reseeds", || reseedings(vm) == times);
    }
}

fn a_new_generation_reseeds_the_guest() {
    assert_reseeds(&TestVm::boot());
}

fn a_new_generation_reseeds_a_guest_on_pci() {
    assert_reseeds(&TestVm::builder().pci().boot());
}

fn a_paused_guest_hears_of_its_new_generation_when_it_goes_on() {
    let vm = TestVm::boot();
    vm.ask(&Request::Pause {});
    assert!(matches!(vm.request(&Request::NewGeneration {}), Reply::Done));
    vm.ask(&Request::Resume {});
    eventually("the guest reseeds", || reseedings(&vm) == 1);
}
