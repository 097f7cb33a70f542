//! `cube-vmm exec` and `info`, as a person types them.

use harness::{Place, TestVm, image, sh};
use libtest_mimic::Trial;

pub fn trials() -> Vec<Trial> {
    harness::trials![
        info_tells_what_the_vm_is,
        exec_is_a_command_in_the_guest,
        commands_share_one_guest,
        twenty_commands_at_once,
        exec_waits_for_a_guest_that_still_boots,
        a_second_vm_does_not_get_the_socket,
        a_vm_takes_over_what_a_dead_one_left,
    ]
}

fn info_tells_what_the_vm_is() {
    let vm = TestVm::builder().cpus(2).memory("192M").boot();
    let text = vm.cli("info", &[]).end().output(0);
    let info: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(info["state"], "running", "{text}");
    assert_eq!(info["ready"], true, "{text}");
    assert_eq!(info["pid"], vm.pid(), "{text}");
    assert_eq!(info["config"]["cpus"], 2, "{text}");
    assert_eq!(info["config"]["memory"], "192M", "{text}");
    let release = vm.exec(["uname", "-r"]).text();
    assert_eq!(info["hello"]["kernel_release"], release, "{text}");
}

fn exec_is_a_command_in_the_guest() {
    let vm = TestVm::boot();
    let line = sh("cat; echo error >&2; exit 7");
    let ended = vm.cli("exec", &["--"]).arguments(line).stdin("input\n").end();
    assert_eq!((ended.output(7).as_str(), ended.stderr.as_str()), ("input\n", "error\n"));
    let ended = vm.cli("exec", &["--", "nosuch"]).end();
    assert_eq!(ended.output(127), "");
    assert!(ended.stderr.contains("nosuch"), "{ended:?}");
    let options = ["-e", "A=b", "-w", "/tmp", "-u", "12:34", "--"];
    let ended = vm.cli("exec", &options).arguments(sh("echo $A $PWD $(id -u) $(id -g)")).end();
    assert_eq!(ended.output(0), "b /tmp 12 34\n");
}

fn commands_share_one_guest() {
    let vm = TestVm::boot();
    vm.cli("exec", &["--"]).arguments(sh("echo kept >/tmp/file")).end().output(0);
    assert_eq!(vm.cli("exec", &["--", "cat", "/tmp/file"]).end().output(0), "kept\n");
}

fn twenty_commands_at_once() {
    let vm = TestVm::boot();
    let start = |number: usize| {
        let line = format!("echo from {number}; sleep 0.2; exit {number}");
        vm.cli("exec", &["--"]).arguments(sh(&line)).start()
    };
    let running: Vec<_> = (0..20).map(start).collect();
    for (number, running) in running.into_iter().enumerate() {
        let code = i32::try_from(number).unwrap();
        assert_eq!(running.end().output(code), format!("from {number}\n"));
    }
}

fn exec_waits_for_a_guest_that_still_boots() {
    let place = Place::new();
    let vm = place.call(["start", "--api-socket", "api", "--console", "serial"]).start();
    vm.stderr.wait_for("Linux version");
    let ended = place.call(["exec", "--api-socket", "api", "--", "echo", "hello"]).end();
    assert_eq!(ended.output(0), "hello\n");
    place.call(["stop", "--api-socket", "api"]).end().output(0);
    vm.end().output(0);
}

fn a_second_vm_does_not_get_the_socket() {
    let vm = TestVm::boot();
    let kernel = vm.place().given("kernel", image::idle_kernel());
    let ended = vm.cli("start", &["--kernel", &kernel, "--initrd", &kernel]).end();
    ended.assert_refused(&["in use by a running VM", "choose another path"]);
    assert_eq!(vm.exec(["echo", "unharmed"]).text(), "unharmed");
}

fn a_vm_takes_over_what_a_dead_one_left() {
    let place = TestVm::boot().murder();
    let sockets = place.leftovers();
    assert_eq!(sockets.len(), 2, "{sockets:?}");
    let vm = TestVm::builder_in(place).boot();
    assert_eq!(vm.exec(["echo", "alive"]).text(), "alive");
}
