//! What every runtime has to do.

use harness::containerd::{CUBE, Containerd, RUNC};
use harness::{eventually, image, oci_image};
use libtest_mimic::Trial;

pub fn trials() -> Vec<Trial> {
    harness::trials![
        a_container_has_the_kernel_of_a_guest,
        streams_and_exit_code_are_those_of_the_command,
        input_ends_when_the_client_ends_it,
        much_output_arrives_whole,
        the_environment_arrives_in_every_process,
        further_processes_run_in_a_container,
        a_container_is_paused_and_goes_on,
        volumes_arrive_and_read_only_ones_stay_so,
        what_a_container_writes_is_on_the_host_s_snapshot,
        a_container_has_the_network_of_its_pod,
        the_host_s_network_is_refused,
    ]
}

fn a_container_has_the_kernel_of_a_guest() {
    let containerd = Containerd::start();
    let guest = containerd.run(CUBE, "guest", &["uname", "-r"]);
    assert!(guest.output(0).contains("cubevmm"), "{guest:?}");
    let host = containerd.run(RUNC, "host", &["uname", "-r"]);
    assert_ne!(host.output(0), guest.output(0));
}

fn streams_and_exit_code_are_those_of_the_command() {
    let containerd = Containerd::start();
    let command = ["sh", "-c", "echo to stdout; echo to stderr >&2; exit 7"];
    for runtime in [CUBE, RUNC] {
        let said = containerd.run(runtime, "streams", &command);
        assert_eq!((said.code, said.stdout.as_str()), (7, "to stdout\n"), "{runtime} {said:?}");
        assert!(said.stderr.contains("to stderr"), "{runtime} {said:?}");
    }
}

fn input_ends_when_the_client_ends_it() {
    let containerd = Containerd::start();
    let words = ["run", "--rm", "--runtime", CUBE, oci_image::NAME, "cat", "cat"];
    let said = containerd.ctr_with(b"some input\n", words);
    assert_eq!(said.output(0), "some input\n");
}

fn much_output_arrives_whole() {
    let containerd = Containerd::start();
    let command = ["sh", "-c", "dd if=/dev/zero bs=64k count=320 2>/dev/null | tr '\\0' x"];
    let said = containerd.run(CUBE, "much", &command);
    assert_eq!(said.output(0).len(), 20 << 20);
    assert!(said.stdout.bytes().all(|byte| byte == b'x'));
}

fn the_environment_arrives_in_every_process() {
    let containerd = Containerd::start();
    let words = ["run", "-d", "--env", "GIVEN=at creation", "--runtime", CUBE];
    let rest = [oci_image::NAME, "env", "sleep", "1000"];
    containerd.ctr(words.into_iter().chain(rest)).output(0);
    let first = containerd.exec("env", "first", &["cat", "/proc/1/environ"]);
    assert!(first.output(0).contains("GIVEN=at creation"), "{first:?}");
    let added = containerd.exec("env", "added", &["env"]);
    assert!(added.output(0).contains("GIVEN=at creation\n"), "{added:?}");
    assert!(added.output(0).contains("IMAGE=busybox\n"), "{added:?}");
    containerd.remove("env");
}

fn further_processes_run_in_a_container() {
    let containerd = Containerd::start();
    containerd.detach("more", &["sleep", "1000"]);
    let said = containerd.exec("more", "a", &["sh", "-c", "echo here; exit 3"]);
    assert_eq!(said.output(3), "here\n");
    // The name is free again.
    assert_eq!(containerd.exec("more", "a", &["echo", "again"]).output(0), "again\n");
    let missing = containerd.exec("more", "b", &["nosuch"]);
    assert_ne!(missing.code, 0);
    assert!(missing.stderr.contains("not found"), "{missing:?}");
    containerd.remove("more");
}

fn a_container_is_paused_and_goes_on() {
    let containerd = Containerd::start();
    containerd.detach("pause", &["sh", "-c", "while true; do date +%s; sleep 1; done"]);
    containerd.ctr(["tasks", "pause", "pause"]).output(0);
    assert_eq!(containerd.state("pause").as_deref(), Some("PAUSED"));
    let refused = containerd.exec("pause", "a", &["true"]);
    assert!(refused.stderr.contains("paused"), "{refused:?}");
    containerd.ctr(["tasks", "resume", "pause"]).output(0);
    assert_eq!(containerd.state("pause").as_deref(), Some("RUNNING"));
    assert_eq!(containerd.exec("pause", "b", &["echo", "on"]).output(0), "on\n");
    containerd.ctr(["tasks", "pause", "pause"]).output(0);
    // Paused, it can be killed and removed all the same.
    containerd.remove("pause");
}

fn volumes_arrive_and_read_only_ones_stay_so() {
    let containerd = Containerd::start();
    let (rw, ro) = (containerd.folder("rw"), containerd.folder("ro"));
    std::fs::write(ro.join("file"), "of the host").unwrap();
    let mount = |source: &std::path::Path, destination: &str, mode: &str| {
        format!("type=bind,src={},dst={destination},options=rbind:{mode}", source.display())
    };
    let (first, second) = (mount(&rw, "/rw", "rw"), mount(&ro, "/ro", "ro"));
    let words = ["run", "--rm", "--runtime", CUBE, "--mount", &first, "--mount", &second];
    let script = "cat /ro/file; echo of the guest > /rw/file; echo no > /ro/file || echo refused";
    let rest = [oci_image::NAME, "volumes", "sh", "-c", script];
    let said = containerd.ctr(words.into_iter().chain(rest));
    assert_eq!(said.output(0), "of the hostrefused\n");
    assert_eq!(std::fs::read_to_string(rw.join("file")).unwrap(), "of the guest\n");
    assert_eq!(std::fs::read_to_string(ro.join("file")).unwrap(), "of the host");
}

fn what_a_container_writes_is_on_the_host_s_snapshot() {
    let containerd = Containerd::start();
    containerd.detach("writes", &["sh", "-c", "echo kept > /kept; sleep 1000"]);
    eventually("the file is there", || {
        containerd.exec("writes", "look", &["cat", "/kept"]).stdout == "kept\n"
    });
    let usage = containerd.ctr(["snapshots", "usage", "writes"]);
    assert!(usage.output(0).contains("writes"), "{usage:?}");
    containerd.remove("writes");
}

/// A network namespace as a plugin leaves it, with the host at the other end.
pub struct Pod;

impl Pod {
    pub const NAMESPACE: &str = "network:/var/run/netns/cube-test-pod";

    pub fn make() -> Self {
        for line in [
            "netns add cube-test-pod",
            "link add cube-test-v0 type veth peer name eth0 netns cube-test-pod",
            "addr add 10.94.0.1/24 dev cube-test-v0",
            "link set cube-test-v0 up",
            "-n cube-test-pod addr add 10.94.0.2/24 dev eth0",
            "-n cube-test-pod link set eth0 mtu 1400 up",
            "-n cube-test-pod route add default via 10.94.0.1",
        ] {
            image::host("ip", &line.split(' ').collect::<Vec<_>>());
        }
        Self
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        // The other end goes with it.
        image::host("ip", &["netns", "delete", "cube-test-pod"]);
    }
}

fn a_container_has_the_network_of_its_pod() {
    let containerd = Containerd::start();
    let _pod = Pod::make();
    let words = ["run", "--rm", "--runtime", CUBE, "--with-ns", Pod::NAMESPACE, oci_image::NAME];
    let script = "ip addr show eth0; ip route; ping -c 2 10.94.0.1";
    for id in ["first", "second"] {
        let said = containerd.ctr(words.into_iter().chain([id, "sh", "-c", script]));
        for expected in
            ["mtu 1400", "inet 10.94.0.2/24", "default via 10.94.0.1", "2 packets received"]
        {
            assert!(said.output(0).contains(expected), "{expected} is not in {said:?}");
        }
    }
}

fn the_host_s_network_is_refused() {
    let containerd = Containerd::start();
    let words = ["run", "--rm", "--net-host", "--runtime", CUBE, oci_image::NAME, "host", "true"];
    let said = containerd.ctr(words);
    assert_ne!(said.code, 0);
    assert!(said.stderr.contains("leave out hostNetwork (--net-host)"), "{said:?}");
}
