//! Hosts without KVM, without permission for it, or short of something else.

use crate::run;
use harness::Place;

#[test]
fn no_kvm() {
    let place = Place::new();
    let dev = place.given_folder("dev");
    let ended = run(&place, &[]).with_dev(&dev, None).end();
    ended.assert_refused(&["/dev/kvm does not exist", "kvm_intel or kvm_amd", "cube-vmm doctor"]);
}

#[test]
fn no_permission_for_kvm() {
    let place = Place::new();
    let dev = place.given_folder("dev");
    place.given("dev/kvm", "");
    // Only root may open that, wherever it is seen.
    let ended = run(&place, &[]).as_nobody().with_dev(&dev, Some("/etc/shadow")).end();
    ended.assert_refused(&["/dev/kvm may not be opened", "group kvm"]);
}

#[test]
fn kvm_that_is_something_else() {
    let place = Place::new();
    let dev = place.given_folder("dev");
    place.given("dev/kvm", "");
    let ended = run(&place, &[]).with_dev(&dev, None).end();
    ended.assert_refused(&["/dev/kvm", "cube-vmm doctor"]);
}

#[test]
fn no_kvm_for_a_vm_that_would_stay() {
    let place = Place::new();
    let dev = place.given_folder("dev");
    let kernel = place.given("kernel", harness::image::idle_kernel());
    let initrd = place.given("initrd", "x");
    let call = place.call(["start", "--api-socket", "api", "--kernel", &kernel]);
    // Its two sockets have been made by then.
    let ended = call.arguments(["--initrd", &initrd]).with_dev(&dev, None).end();
    ended.assert_refused(&["/dev/kvm does not exist"]);
}

#[test]
fn no_more_open_files() {
    let place = Place::new();
    run(&place, &[]).limited("--nofile=9").end().assert_refused(&["Too many open files"]);
}

#[test]
fn no_more_threads() {
    let place = Place::new();
    let ended = run(&place, &[]).limited("--nproc=1").as_nobody().end();
    ended.assert_refused(&["thread", "Resource temporarily unavailable"]);
}
