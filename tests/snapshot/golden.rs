//! What earlier releases have written of devices, in a VM that goes on with it: `tests/golden` has a
//! machine with each kind of device, which a unit test cannot make without a TAP and a file server.

use std::fs;

use harness::artifacts::{self, repository};
use harness::counter::{COUNT, before, follows};
use harness::{Place, image};
use hypervisor::snapshot::checksum;
use hypervisor::snapshot::machine::MachineState;
use hypervisor::snapshot::manifest::Manifest;

/// Versions of the format of which there is a machine with all devices.
const VERSIONS: [u32; 1] = [3];

/// A network card needs root for its TAP.
fn may_skip() -> bool {
    let skip = !nix::unistd::geteuid().is_root() && artifacts::may_skip("net");
    if skip {
        artifacts::tell_skipped("devices of earlier releases", "no network card without root");
    }
    skip || harness::counter::may_skip()
}

/// What `start` is told for such a machine.
fn devices(place: &Place, transport: &str) -> Vec<String> {
    let disk = place.given("disk", vec![7; 2 << 20]);
    let pmem = place.given("pmem", vec![8; 2 << 20]);
    let share = place.given_folder("share");
    [
        ("--cpus", "2".to_owned()),
        ("--transport", transport.to_owned()),
        ("--console", "virtio".to_owned()),
        ("--disk", format!("path={disk},id=data")),
        ("--pmem", format!("path={pmem},ro")),
        ("--net", format!("tap=go{}{transport},id=net0", std::process::id())),
        ("--fs", format!("tag=share,path={share},id=fs0")),
    ]
    .into_iter()
    .flat_map(|(name, value)| [name.to_owned(), value])
    .collect()
}

/// Saves a counting guest with all devices, gives it the devices' records of an earlier release, and
/// lets it go on.
fn goes_on_with_records_of(version: u32, transport: &str) {
    let place = Place::new();
    let kernel = place.given("guest", image::kernel(COUNT));
    let call = place.call(["start", "--api-socket", "api", "--memory", "64M"]);
    let call = call.arguments(["--kernel", &kernel, "--initrd", &kernel]);
    let call = call.arguments(["--boot-protocol", "linux", "--boot-timeout", "1000000"]);
    let original = call.arguments(devices(&place, transport)).start();
    original.stderr.wait_for("abcdefghijklmnopabcdefghijklmnop");
    let dir = place.given_path("snapshot");
    let dir = dir.to_str().unwrap();
    let ask = |words: &[&str]| place.call(words.iter().copied()).end().output(0);
    ask(&["snapshot", "--api-socket", "api", dir, "--keep-paused"]);
    ask(&["stop", "--api-socket", "api", "--how", "kill"]);
    original.end();

    let golden = repository().join(format!("tests/golden/state-{version}-{transport}"));
    let golden = MachineState::parse(&fs::read(golden).unwrap()).unwrap();
    let path = format!("{dir}/state");
    let mut state = MachineState::parse(&fs::read(&path).unwrap()).unwrap();
    assert!(state.devices.keys().eq(golden.devices.keys()), "{:?}", golden.devices.keys());
    assert!(golden.devices.contains_key("net0") && golden.devices.contains_key("fs0"));
    (state.devices, state.legacy, state.pci) = (golden.devices, golden.legacy, golden.pci);
    let state = state.to_bytes().unwrap();
    fs::write(path, &state).unwrap();
    let path = format!("{dir}/manifest.json");
    let mut manifest = Manifest::parse(&fs::read(&path).unwrap()).unwrap();
    manifest.state_bytes = state.len() as u64;
    manifest.state_crc64 = checksum::of(&state);
    fs::write(path, manifest.to_bytes().unwrap()).unwrap();

    let words = ["restore", dir, "--api-socket", "api", "--trust-paths", "--resume"];
    let copy = place.call(words).start();
    copy.stderr.wait_for("abcdefghijklmnop");
    ask(&["stop", "--api-socket", "api", "--how", "kill"]);
    let printed = copy.end().stderr;
    follows(before(&printed), &printed);
}

#[test]
fn devices_of_earlier_releases_go_on_over_mmio() {
    if may_skip() {
        return;
    }
    VERSIONS.into_iter().for_each(|version| goes_on_with_records_of(version, "mmio"));
}

#[test]
fn devices_of_earlier_releases_go_on_over_pci() {
    if may_skip() {
        return;
    }
    VERSIONS.into_iter().for_each(|version| goes_on_with_records_of(version, "pci"));
}
