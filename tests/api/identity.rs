//! Restored Linux guests become others: clocks, names, addresses; and when they count as ready.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use harness::{Place, TestVm, eventually, sh, wire};
use libtest_mimic::Trial;

pub fn trials() -> Vec<Trial> {
    harness::trials![
        a_copy_has_names_and_addresses_of_its_own,
        clocks_advance_or_are_kept,
        who_waits_for_a_copy_finds_it_ready,
    ]
}

/// A store with the snapshot of a guest, which is gone.
fn saved(vm: TestVm) -> (Place, PathBuf) {
    let store = Place::new();
    let dir = store.given_path("snapshot");
    vm.save(&dir);
    drop(vm);
    (store, dir)
}

const MACHINE_ID: &str = "0123456789abcdef0123456789abcdef";
const NETWORK: &str = "eth0=192.0.2.7/24,2001:db8::7/64,gateway=192.0.2.1,\
                       neighbour=192.0.2.9@02:00:00:00:00:09";

fn a_copy_has_names_and_addresses_of_its_own() {
    wire::in_a_network(|| {
        // So that the host learns from announcements.
        fs::write("/proc/sys/net/ipv4/conf/tap0/arp_accept", "1").unwrap();
        let vm = TestVm::builder().option("--net", format!("tap={},id=net", wire::TAP)).boot();
        wire::configure(&vm);
        assert!(vm.exec(sh("ip route add default via 192.0.2.254")).status.success());
        let (_store, dir) = saved(vm);
        let tap = format!("net:net=tap:{}", wire::TAP);
        let options = ["--override", &tap, "--hostname", "two", "--machine-id", MACHINE_ID];
        let vm = TestVm::restore(&dir, &[&options[..], &["--network", NETWORK]].concat());
        assert_eq!(vm.exec(["hostname"]).text().trim(), "two");
        assert_eq!(vm.exec(["cat", "/etc/machine-id"]).text().trim(), MACHINE_ID);
        let addresses = vm.exec(sh("ip addr show dev eth0")).text();
        assert!(addresses.contains("192.0.2.7/24") && addresses.contains("2001:db8::7/64"));
        assert!(!addresses.contains("192.0.2.2/"), "{addresses}");
        let routes = vm.exec(sh("ip route")).text();
        assert!(routes.contains("default via 192.0.2.1 dev eth0"), "{routes}");
        assert!(!routes.contains("192.0.2.254"), "{routes}");
        let neighbours = vm.exec(sh("ip neigh")).text();
        assert!(neighbours.contains("192.0.2.9") && neighbours.contains("PERMANENT"));
        let known = Command::new("ip").args(["neigh", "show", "192.0.2.7"]).output().unwrap();
        let known = String::from_utf8_lossy(&known.stdout).into_owned();
        assert!(known.contains("lladdr"), "the host has heard nothing: {known:?}");
        let ping = vm.exec(["ping", "-c", "2", &wire::HOST.to_string()]).text();
        assert!(ping.contains("2 packets received"), "{ping}");
    });
}

/// Keeps the greatest step of the monotonic clock, in hundredths of a second.
const WATCH: &str = "last=; most=0; while :; do read now rest </proc/uptime; \
                     now=${now%.*}${now#*.}; if [ -n \"$last\" ] && [ $((now-last)) -gt $most ]; \
                     then most=$((now-last)); echo $most >/tmp/new; mv /tmp/new /tmp/most; fi; \
                     last=$now; usleep 10000; done";
/// How long the guest is nowhere.
const AWAY: Duration = Duration::from_secs(20);

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64()
}

fn time_of(vm: &TestVm) -> f64 {
    vm.exec(["date", "+%s"]).text().trim().parse().unwrap()
}

/// The greatest step of the guest's monotonic clock, in seconds.
fn greatest_step(vm: &TestVm) -> f64 {
    vm.exec(["cat", "/tmp/most"]).text().trim().parse::<f64>().unwrap() / 100.0
}

fn clocks_advance_or_are_kept() {
    let vm = TestVm::boot();
    vm.leave(sh(WATCH));
    eventually("it watches", || vm.exec(["test", "-s", "/tmp/most"]).status.success());
    let (_store, dir) = saved(vm);
    let saved_at = now();
    thread::sleep(AWAY);

    let kept = TestVm::restore(&dir, &["--clock", "keep"]);
    let away = now() - saved_at;
    let behind = now() - time_of(&kept);
    assert!(behind > AWAY.as_secs_f64() - 2.0, "{behind} s behind after {away} s");
    let step = greatest_step(&kept);
    assert!(step < away / 2.0, "a step of {step} s");
    drop(kept);

    let advanced = TestVm::restore(&dir, &["--clock", "advance"]);
    let before = now();
    let time = time_of(&advanced);
    // Whole seconds, rounded down.
    assert!((before - 2.0..now() + 1.0).contains(&time), "{time} is not between {before} and now");
    let advanced_step = greatest_step(&advanced);
    assert!(advanced_step < away / 2.0, "a step of {advanced_step} s");
    if std::env::var_os("CUBE_TEST_TIMES").is_some() {
        eprintln!(
            "greatest steps of the monotonic clock: {step} s kept, {advanced_step} s advanced"
        );
    }
}

fn who_waits_for_a_copy_finds_it_ready() {
    let (_store, dir) = saved(TestVm::boot());
    let place = Place::new();
    for mode in ["private", "uffd"] {
        let call = place.call(["restore", "--api-socket", "api", "--resume", "--wait-ready=300"]);
        call.arguments(["--memory-mode", mode]).arguments([&dir]).end().output(0);
        let command = ["exec", "--api-socket", "api", "--wait", "1", "--", "echo", "here"];
        let said = place.call(command).end();
        // Before anything can fail, since nobody else would end it.
        place.call(["stop", "--api-socket", "api", "--how", "kill"]).end().output(0);
        assert_eq!(said.output(0), "here\n");
        place.assert_clean();
    }
}
