//! What a VM and its devices count, as a scraper and a person read it.

use harness::{TestVm, eventually, sh};
use hypervisor::api::{MetricsFormat, Reply, Request};
use hypervisor::metrics::Family;
use libtest_mimic::Trial;

pub fn trials() -> Vec<Trial> {
    harness::trials![
        devices_count_what_the_guest_does,
        disks_count_requests_and_bytes,
        counts_survive_a_pause,
        the_text_is_what_prometheus_reads,
    ]
}

fn families(vm: &TestVm) -> Vec<Family> {
    match vm.request(&Request::Metrics { format: MetricsFormat::Json }) {
        Reply::Metrics { families } => families,
        reply => panic!("metrics were answered with {reply:?}"),
    }
}

fn value(families: &[Family], name: &str, label: &str) -> u64 {
    let family = families.iter().find(|family| family.name == name);
    let samples = &family.unwrap_or_else(|| panic!("no {name} in {families:?}")).samples;
    let sample = samples.iter().find(|sample| sample.labels.values().any(|value| value == label));
    sample.unwrap_or_else(|| panic!("no {label} in {samples:?}")).value
}

fn devices_count_what_the_guest_does() {
    let vm = TestVm::builder().cpus(2).boot();
    let before = families(&vm);
    let text = vm.exec(sh("head -c 1000 /dev/hwrng | wc -c; echo to the log >/dev/ttyS0")).text();
    assert_eq!(text, "1000");
    let after = families(&vm);
    let grown = |name: &str, label: &str| value(&after, name, label) - value(&before, name, label);
    assert!(grown("cubevmm_rng_bytes_total", "rng") >= 1000, "{after:?}");
    assert!(grown("cubevmm_rng_requests_total", "rng") >= 1, "{after:?}");
    assert!(grown("cubevmm_serial_printed_bytes_total", "serial") >= 11, "{after:?}");
    assert!(grown("cubevmm_vsock_connections_opened_total", "vsock") >= 1, "{after:?}");
    assert!(grown("cubevmm_vsock_received_bytes_total", "vsock") >= 50, "{after:?}");
    assert!(grown("cubevmm_vsock_sent_bytes_total", "vsock") >= 5, "{after:?}");
    let exits = ["0", "1"].map(|vcpu| grown("cubevmm_vcpu_port_exits_total", vcpu));
    assert!(exits.iter().sum::<u64>() >= 11, "{after:?}");
    assert_eq!(value(&after, "cubevmm_rng_guest_faults_total", "rng"), 0);
    assert_eq!(value(&after, "cubevmm_balloon_guest_faults_total", "balloon"), 0);
    // Nobody asks for memory in this test.
    assert_eq!(value(&after, "cubevmm_balloon_target_bytes", "balloon"), 0);
}

fn disks_count_requests_and_bytes() {
    let builder = TestVm::builder();
    let path = builder.place().given("disk", vec![0; 1 << 20]);
    let vm = builder.disk(format!("path={path},id=data")).boot();
    let before = families(&vm);
    let drop = "echo 3 >/proc/sys/vm/drop_caches";
    vm.exec(sh(&format!("dd if=/dev/zero of=/dev/vda bs=4096 count=3 conv=fsync; {drop}")));
    vm.exec(sh("dd if=/dev/vda of=/dev/null bs=4096 count=5 skip=10"));
    let after = families(&vm);
    let grown = |name: &str| value(&after, name, "data") - value(&before, name, "data");
    assert!(grown("cubevmm_block_written_bytes_total") >= 3 * 4096, "{after:?}");
    assert!(grown("cubevmm_block_writes_total") >= 1, "{after:?}");
    assert!(grown("cubevmm_block_read_bytes_total") >= 5 * 4096, "{after:?}");
    assert!(grown("cubevmm_block_reads_total") >= 1, "{after:?}");
    assert!(grown("cubevmm_block_flushes_total") >= 1, "{after:?}");
    assert_eq!(value(&after, "cubevmm_block_errors_total", "data"), 0);
    assert_eq!(value(&after, "cubevmm_block_guest_faults_total", "data"), 0);
}

fn counts_survive_a_pause() {
    let vm = TestVm::boot();
    vm.exec(["head", "-c", "100", "/dev/hwrng"]);
    let bytes = |vm: &TestVm| value(&families(vm), "cubevmm_rng_bytes_total", "rng");
    let before = bytes(&vm);
    assert!(before >= 100);
    vm.ask(&Request::Pause {});
    assert!(bytes(&vm) >= before);
    vm.ask(&Request::Resume {});
    eventually("the guest asks for more", || {
        vm.exec(["head", "-c", "100", "/dev/hwrng"]);
        bytes(&vm) > before
    });
}

fn the_text_is_what_prometheus_reads() {
    let vm = TestVm::boot();
    let text = vm.cli("metrics", &[]).end().output(0);
    let asked = vm.request(&Request::Metrics { format: MetricsFormat::Prometheus });
    assert!(matches!(&asked, Reply::MetricsText { text } if text.starts_with("# HELP cubevmm_")));
    let mut family = "";
    for line in text.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        match words[..] {
            ["#", "HELP", name, ..] => family = name,
            ["#", "TYPE", name, kind] => {
                assert_eq!(name, family, "{text}");
                assert_eq!(kind == "counter", name.ends_with("_total"), "{text}");
            }
            [sample, value] => {
                assert!(sample.starts_with(&format!("{family}{{")), "{sample} in {family}");
                assert!(sample.ends_with("\"}"), "{sample}");
                value.parse::<u64>().unwrap();
            }
            _ => panic!("{line}"),
        }
    }
    assert!(text.contains("\ncubevmm_vsock_connections{device=\"vsock\"} "), "{text}");
    let json = vm.cli("metrics", &["--format", "json"]).end().output(0);
    let list: Vec<Family> = serde_json::from_str(&json).unwrap();
    assert_eq!(text.matches("# HELP").count(), list.len());
}
