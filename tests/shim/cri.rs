//! What Kubernetes does with a runtime: pods of several containers on a network of its own. A pod
//! and each call of `crictl` take seconds in the lab, so all of it is one test of two pods, whose
//! parts are functions here.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::time::Duration;

use harness::artifacts::{Artifact, may_skip, tell_skipped};
use harness::containerd::processes;
use harness::cri::{Cri, HOST, Pod};
use harness::eventually;
use libtest_mimic::Trial;
use serde_json::{Value, json};

/// Whether `crictl` may be missing, and is.
pub fn is_skipped() -> bool {
    let missing = Artifact::Crictl.find().err().filter(|_| may_skip("crictl"));
    if let Some(message) = &missing {
        tell_skipped("tests of CRI", message);
    }
    missing.is_some()
}

pub fn trials() -> Vec<Trial> {
    if is_skipped() {
        return Vec::new();
    }
    harness::trials![pods_are_as_kubernetes_wants_them]
}

const SLEEP: [&str; 2] = ["sleep", "100000"];

/// Says something, serves a page, and ends with a code of its own when it is asked to.
const SERVER: &str = "mkdir /www; echo served > /www/index.html; httpd -p 8080 -h /www; \
    trap 'exit 5' TERM; echo to stdout; echo to stderr >&2; while true; do sleep 1; done";

fn pods_are_as_kubernetes_wants_them() {
    let mut cri = Cri::start();
    a_pod_on_the_host_s_network_is_refused(&cri);
    let secret = cri.containerd.folder("secret");
    fs::write(secret.join("key"), "of the host").unwrap();
    let mounts = json!({"mounts": [
        {"host_path": cri.containerd.folder("data"), "container_path": "/data"},
        {"host_path": secret, "container_path": "/secret", "readonly": true},
        {"host_path": secret.join("key"), "container_path": "/etc/key", "readonly": true},
    ]});
    let pod = cri.pod("first");
    let server = cri.container_with(&pod, "server", &["sh", "-c", SERVER], &mounts);
    let other = cri.container_with(&pod, "other", &SLEEP, &mounts);
    let address = cri.address(&pod);

    containers_of_a_pod_are_in_one_vm_and_share_volumes(&cri, [&server, &other], &address);
    a_read_only_volume_stays_so(&cri, &other, &secret);
    commands_and_logs_come_through_cri(&cri, &server);
    a_program_that_does_not_exist_leaves_the_pod_as_it_was(&cri, &pod, &other);
    a_container_that_runs_out_of_memory_is_told_so(&cri, &pod);
    the_memory_of_a_hog_is_told_and_its_container_stopped(&cri, &pod);
    a_pod_outlives_a_restart_of_containerd(&mut cri, &server, &other);
    let (peer, client) = a_server_in_a_pod_is_reached_from_the_host_and_from_pods(&cri, &address);
    a_container_that_is_asked_to_end_tells_its_code(&cri, &server);
    cri.remove(&pod);
    a_pod_whose_vmm_is_killed_can_be_removed(&cri, &peer, &client);
}

fn a_pod_on_the_host_s_network_is_refused(cri: &Cri) {
    let config = cri.pod_config(
        "host",
        &json!({"linux": {"security_context": {"namespace_options": {"network": 2}}}}),
    );
    let refused = cri.try_pod(&config);
    assert_ne!(refused.code, 0);
    assert!(refused.stderr.contains("leave out hostNetwork"), "{refused:?}");
    assert_eq!(cri.ask(["pods", "--output", "json"])["items"], json!([]));
}

/// One kernel, name, network and shared memory; processes of their own.
fn containers_of_a_pod_are_in_one_vm_and_share_volumes(
    cri: &Cri,
    [server, other]: [&str; 2],
    address: &str,
) {
    assert_eq!(processes(&["cube-vmm"]).len(), 1);
    assert_eq!(processes(&["containerd-shim-cube"]).len(), 1);
    let script = "echo shared > /dev/shm/word; echo of one > /data/file; \
        cat /proc/sys/kernel/random/boot_id";
    let boot = cri.exec(server, &["sh", "-c", script]).output(0).trim().to_owned();
    let host = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    assert_ne!(boot, host.trim());

    let data = cri.containerd.folder("data");
    assert_eq!(fs::read_to_string(data.join("file")).unwrap(), "of one\n");
    fs::write(data.join("later"), "from outside\n").unwrap();
    let script = "cat /proc/sys/kernel/random/boot_id /dev/shm/word /data/file /data/later; \
        hostname; pidof httpd || echo no server here; ip -4 addr show eth0; cat /etc/resolv.conf";
    let said = cri.exec(other, &["sh", "-c", script]);
    let said = said.output(0);
    let first: Vec<_> = said.lines().take(6).collect();
    let expected = [&boot, "shared", "of one", "from outside", "first", "no server here"];
    assert_eq!(first, expected, "{said}");
    assert!(said.contains(&format!("inet {address}/24")), "{address} is not in {said}");
    for line in ["search pods.test", &format!("nameserver {HOST}"), "options ndots:3"] {
        assert!(said.lines().any(|each| each == line), "{line} is not in {said}");
    }
}

fn a_read_only_volume_stays_so(cri: &Cri, container: &str, secret: &Path) {
    let script = "cat /secret/key /etc/key; echo; exec 2>&1; (echo x > /secret/key); \
        (echo x > /etc/key); rm /secret/key; mkdir /secret/d; true";
    let said = cri.exec(container, &["sh", "-c", script]);
    let said = said.output(0);
    assert!(said.starts_with("of the hostof the host\n"), "{said}");
    assert_eq!(said.matches("Read-only file system").count(), 4, "{said}");
    assert_eq!(fs::read_to_string(secret.join("key")).unwrap(), "of the host");
    assert_eq!(fs::read_dir(secret).unwrap().count(), 1);
}

fn commands_and_logs_come_through_cri(cri: &Cri, server: &str) {
    eventually("both lines are in the log", || {
        let said = cri.call(["logs", server]);
        said.stdout == "to stdout\n" && said.stderr.contains("to stderr\n")
    });
    let failed = cri.exec(server, &["sh", "-c", "echo err >&2; exit 3"]);
    assert!(failed.code != 0 && failed.stderr.contains("exited with 3: err"), "{failed:?}");
    let streamed = cri.call_with(b"through a stream\n", ["exec", "-i", server, "cat"]);
    assert_eq!(streamed.output(0), "through a stream\n");
    let late = cri.call(["exec", "--sync", "--timeout", "3", server, "sleep", "1000"]);
    assert!(late.code != 0 && late.stderr.contains("timeout"), "{late:?}");
}

fn a_program_that_does_not_exist_leaves_the_pod_as_it_was(cri: &Cri, pod: &Pod, other: &str) {
    let id = cri.try_container(pod, "nosuch", &["nosuch"], &json!({}));
    let id = id.output(0).trim();
    let refused = cri.call(["start", id]);
    assert_ne!(refused.code, 0);
    assert!(refused.stderr.contains("executable file not found"), "{refused:?}");
    let status = cri.status(id);
    assert_eq!(status["state"], "CONTAINER_EXITED", "{status}");
    cri.call(["rm", id]).output(0);
    let missing = cri.exec(other, &["nosuch"]);
    assert!(missing.stderr.contains("executable file not found"), "{missing:?}");
}

/// The one that is killed is not the container's first process, which ends because of that.
fn a_container_that_runs_out_of_memory_is_told_so(cri: &Cri, pod: &Pod) {
    let limit = json!({"linux": {"resources": {"memory_limit_in_bytes": 32 << 20}}});
    let script = "dd if=/dev/zero bs=100M count=1 of=/dev/null; exit 9";
    let id = cri.container_with(pod, "child", &["sh", "-c", script], &limit);
    let status = cri.ended(&id);
    assert_eq!(status["exitCode"], 9, "{status}");
    assert_eq!(status["reason"], "OOMKilled", "{status}");
}

const HOG: u64 = 200 << 20;

/// The hog does not listen to SIGTERM, so it is killed when its time is over.
fn the_memory_of_a_hog_is_told_and_its_container_stopped(cri: &Cri, pod: &Pod) {
    // Reads all of it into one buffer, and then waits for a reader that does not read.
    let script = "dd if=/dev/zero bs=200M count=1 2>/dev/null | sleep 100000";
    let id = cri.container(pod, "hog", &["sh", "-c", script]);
    let number = |value: &Value| match value.as_str() {
        Some(text) => text.parse::<u64>().unwrap(),
        None => value.as_u64().unwrap_or_default(),
    };
    let close = |told: u64| told > HOG / 10 * 9 && told < HOG / 10 * 11;
    eventually("the hog has its memory, and it is told", || {
        let answer = cri.ask(["stats", "--output", "json", "--id", &id]);
        let (memory, cpu) = (&answer["stats"][0]["memory"], &answer["stats"][0]["cpu"]);
        close(number(&memory["workingSetBytes"]["value"]))
            && close(number(&memory["usageBytes"]["value"]))
            && number(&cpu["usageCoreNanoSeconds"]["value"]) > 0
    });
    cri.call(["stop", "--timeout", "1", &id]).output(0);
    assert_eq!(cri.ended(&id)["exitCode"], 137);
    cri.call(["rm", &id]).output(0);
}

fn a_pod_outlives_a_restart_of_containerd(cri: &mut Cri, server: &str, other: &str) {
    cri.containerd.stop_daemon();
    cri.containerd.start_daemon();
    eventually("CRI serves again", || cri.call(["info"]).code == 0);
    assert_eq!(cri.status(server)["state"], "CONTAINER_RUNNING");
    cri.call(["update", "--memory", "67108864", other]).output(0);
    let limit = cri.exec(other, &["cat", "/sys/fs/cgroup/memory.max"]);
    assert_eq!(limit.output(0), "67108864\n");
}

/// Gives a second pod, and its container.
fn a_server_in_a_pod_is_reached_from_the_host_and_from_pods(
    cri: &Cri,
    address: &str,
) -> (Pod, String) {
    assert!(get(&format!("{address}:8080")).ends_with("served\n"));
    let peer = cri.pod("second");
    let client = cri.container(&peer, "client", &SLEEP);
    let script = format!(
        "ping -c 3 {address} && ping -c 1 {HOST} && wget -q -O - http://{address}:8080/index.html"
    );
    let said = cri.exec(&client, &["sh", "-c", &script]);
    let said = said.output(0);
    assert!(said.contains("3 packets received"), "{said}");
    assert!(said.contains("1 packets received"), "{said}");
    assert!(said.ends_with("served\n"), "{said}");
    (peer, client)
}

/// What a web server answers.
fn get(address: &str) -> String {
    let mut answer = String::new();
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream.write_all(b"GET /index.html HTTP/1.0\r\n\r\n").unwrap();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

fn a_container_that_is_asked_to_end_tells_its_code(cri: &Cri, server: &str) {
    cri.call(["stop", "--timeout", "100", server]).output(0);
    let status = cri.ended(server);
    assert_eq!(status["exitCode"], 5, "{status}");
}

fn a_pod_whose_vmm_is_killed_can_be_removed(cri: &Cri, pod: &Pod, container: &str) {
    crate::endings::kill("cube-vmm");
    let status = cri.ended(container);
    assert_eq!(status["exitCode"], 137, "{status}");
    eventually("the pod is not ready", || {
        cri.ask(["inspectp", &pod.id])["status"]["state"] == "SANDBOX_NOTREADY"
    });
    cri.remove(pod);
}
