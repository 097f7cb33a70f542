//! The machine that the guest sees.

use harness::{Place, sh};
use hypervisor::trace::step;
use libtest_mimic::Trial;

pub fn trials() -> Vec<Trial> {
    harness::trials![
        four_cpus_and_memory_beyond_the_hole,
        one_cpu,
        many_cpus,
        little_memory,
        the_pvh_entry,
        the_64_bit_entry,
        parameters_reach_the_kernel,
        devices_on_pci,
        the_serial_console_is_shown,
        the_virtio_console_is_shown,
        the_console_is_silent_by_default,
        the_clock_is_the_hosts,
        the_cmos_clock_tells_the_same_time,
        nothing_waits_for_a_cmos_clock,
        entropy_comes_from_the_host,
        the_ladder_has_all_its_steps_in_order,
        the_ladder_is_printed,
    ]
}

fn four_cpus_and_memory_beyond_the_hole() {
    let place = Place::new();
    let call = place
        .run(&["--cpus", "4", "--memory", "4G"], sh("nproc; grep MemTotal /proc/meminfo; exit 7"));
    let ended = call.end();
    let text = ended.output(7);
    let mut words = text.split_whitespace();
    assert_eq!(words.next(), Some("4"), "{text}");
    let kib: u64 = words.nth(1).unwrap().parse().unwrap();
    assert!(kib >= 3_800_000, "{text}");
}

fn assert_cpus(count: &str) {
    let place = Place::new();
    let line = "nproc; grep -c ^processor /proc/cpuinfo; cat /sys/devices/system/cpu/present";
    let ended = place.run(&["--cpus", count], sh(line)).end();
    let text = ended.output(0);
    let mut lines = text.lines();
    assert_eq!(lines.next(), Some(count), "{text}");
    assert_eq!(lines.next(), Some(count), "{text}");
    let last = count.parse::<u32>().unwrap() - 1;
    assert!(lines.next().unwrap().ends_with(&last.to_string()), "{text}");
}

fn one_cpu() {
    assert_cpus("1");
}

/// `CUBE_CPUS`, 8 by default: how many processors a guest has that has many.
fn many_cpus() {
    assert_cpus(&std::env::var("CUBE_CPUS").unwrap_or_else(|_| "8".to_owned()));
}

fn little_memory() {
    let place = Place::new();
    let call = place.run(&["--memory", "96M"], ["cat", "/proc/meminfo"]);
    assert!(call.end().output(0).contains("MemTotal"));
}

fn assert_protocol(protocol: &str) {
    let place = Place::new();
    let ended = place.run(&["--boot-protocol", protocol], ["uname", "-s"]).end();
    assert_eq!(ended.output(0), "Linux\n");
}

fn the_pvh_entry() {
    assert_protocol("pvh");
}

fn the_64_bit_entry() {
    assert_protocol("linux");
}

fn parameters_reach_the_kernel() {
    let place = Place::new();
    let call = place.run(&["--cmdline-append", "cube.test=\"a b\" x=y"], ["cat", "/proc/cmdline"]);
    let ended = call.end();
    assert!(ended.output(0).trim().ends_with("cube.test=\"a b\" x=y"), "{ended:?}");
}

fn the_serial_console_is_shown() {
    let place = Place::new();
    let ended = place.run(&["--console", "serial"], ["echo", "out"]).end();
    assert_eq!(ended.output(0), "out\n");
    assert!(ended.stderr.contains("Linux version"), "{ended:?}");
}

fn the_virtio_console_is_shown() {
    let place = Place::new();
    let ended = place.run(&["--console", "virtio"], sh("echo from the guest >/dev/console")).end();
    ended.output(0);
    assert!(ended.stderr.contains("from the guest"), "{ended:?}");
}

fn devices_on_pci() {
    let place = Place::new();
    let disk = place.given("disk", vec![0; 1 << 20]);
    let options = ["--transport", "pci", "--disk", &format!("path={disk}")];
    let line = "echo written >/dev/vda; cat /sys/block/vda/size; ls /sys/bus/pci/devices | wc -l";
    let text = place.run(&options, sh(line)).end().output(0);
    let numbers: Vec<u32> = text.lines().map(|line| line.parse().unwrap()).collect();
    assert_eq!(numbers[0], 2048);
    assert!(numbers[1] >= 3, "{text}");
    assert!(std::fs::read(disk).unwrap().starts_with(b"written\n"));
}

fn the_console_is_silent_by_default() {
    let place = Place::new();
    let line = "echo '<6>hello from the kernel log' >/dev/kmsg; dmesg | grep -c hello";
    let ended = place.run(&[], sh(line)).end();
    assert_eq!((ended.output(0).as_str(), ended.stderr.as_str()), ("1\n", ""));
}

fn the_clock_is_the_hosts() {
    let place = Place::new();
    let now = || std::time::UNIX_EPOCH.elapsed().unwrap().as_secs();
    let before = now();
    let ended = place.run(&[], ["date", "+%s"]).end();
    let after = now();
    let told: u64 = ended.output(0).trim().parse().unwrap();
    // A second is lost to rounding.
    assert!((before - 1..=after + 1).contains(&told), "{told} is not in {before}..{after}");
}

/// Shell that prints the registers of the CMOS clock with these numbers, one after the other.
fn cmos(registers: &str) -> String {
    format!(
        "for r in {registers}; do \
             printf \"\\\\$(printf %o $r)\" | dd of=/dev/port bs=1 seek=112 conv=notrunc 2>/dev/null; \
             dd if=/dev/port bs=1 skip=113 count=1 2>/dev/null | hexdump -e '1/1 \"%02x\"'; \
         done"
    )
}

fn the_cmos_clock_tells_the_same_time() {
    let place = Place::new();
    // Century, year, month, day, hour: what may change while it is read is left out.
    let clock = cmos("50 9 8 7 4");
    let line = format!("date -u +%Y%m%d%H; {clock}; echo; date -u +%Y%m%d%H");
    let text = place.run(&[], sh(&line)).end().output(0);
    let times: Vec<&str> = text.lines().collect();
    assert_eq!(times.len(), 3, "{text}");
    assert!(times.is_sorted() && times[1].len() == 10, "{text}");
}

fn nothing_waits_for_a_cmos_clock() {
    let place = Place::new();
    let line = "dmesg | grep -i -e rtc -e cmos; ls /sys/class | grep rtc; true";
    assert_eq!(place.run(&[], sh(line)).end().output(0), "");
}

fn entropy_comes_from_the_host() {
    let place = Place::new();
    let line = "cat /sys/class/misc/hw_random/rng_current; head -c 16 /dev/hwrng | wc -c";
    let ended = place.run(&[], sh(line)).end();
    assert_eq!(ended.output(0), "virtio_rng.0\n16\n");
}

fn the_ladder_has_all_its_steps_in_order() {
    let place = Place::new();
    place.run(&["--trace", "ladder.json"], ["true"]).end().output(0);
    let ladder: serde_json::Value = serde_json::from_slice(&place.take("ladder.json")).unwrap();
    let stamps = ladder["stamps"].as_array().unwrap();
    let at = |name: &str| {
        let stamp = stamps.iter().find(|stamp| stamp["name"] == name);
        stamp.unwrap_or_else(|| panic!("no {name} in {ladder:#}"))["ns"].as_u64().unwrap()
    };
    // T1 is reached beside T2 and T3, and all of them before the guest runs.
    let ways = [
        vec![step::EXEC, step::VM_CREATED, step::FIRST_RUN],
        vec![step::EXEC, step::MEMORY_MAPPED, step::KERNEL_LOADED, step::FIRST_RUN],
        vec![step::FIRST_RUN, step::KERNEL_ENTRY, step::USERSPACE],
        vec![step::USERSPACE, step::AGENT_READY, step::COMMAND_STARTED],
    ];
    for way in ways {
        let times: Vec<u64> = way.iter().map(|name| at(name)).collect();
        assert!(times.is_sorted(), "{way:?}: {ladder:#}");
    }
    assert_eq!(at(step::EXEC), 0);
}

fn the_ladder_is_printed() {
    let place = Place::new();
    let ended = place.run(&["--trace", "-"], ["echo", "out"]).end();
    assert_eq!(ended.output(0), "out\n");
    assert!(ended.stderr.contains(step::COMMAND_STARTED), "{ended:?}");
}
