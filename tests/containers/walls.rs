//! What is between a container, its guest, and the other containers of the pod.

use crate::bundle::{Guest, process, spec};
use libtest_mimic::Trial;
use serde_json::json;

pub fn trials() -> Vec<Trial> {
    harness::trials![a_container_is_walled_in, a_sandbox_shares_what_it_is_asked_to]
}

/// Shell that tells the capabilities and the seccomp mode of itself.
const PRIVILEGES: &str = "grep -E '^(CapEff|CapBnd|NoNewPrivs|Seccomp):' /proc/self/status | \
    tr '\\t' ' ' | tr '\\n' ','";

fn a_container_is_walled_in() {
    let guest = Guest::boot();
    let mut walled = spec(
        "touch /x 2>&1; cat /proc/timer_list | wc -c; echo 1 2>&1 >/proc/sys/kernel/pid_max; \
         mknod /tmp/disk b 254 0 2>&1; echo x >/dev/null && echo null; \
         mkdir /run/d 2>&1; ls /sys/fs/cgroup/cgroup.procs; ls /proc/1/root/init 2>&1 || true",
    );
    walled["root"]["readonly"] = json!(true);
    let tmp = json!({ "destination": "/tmp", "type": "tmpfs", "source": "tmpfs" });
    walled["mounts"].as_array_mut().unwrap().push(tmp);
    // As in the profiles of container engines: a list of what may be done, and one other action.
    walled["linux"]["seccomp"] = json!({
        "defaultAction": "SCMP_ACT_ALLOW",
        "architectures": ["SCMP_ARCH_X86_64"],
        "syscalls": [
            { "names": ["mkdir", "mkdirat", "of_the_future"], "action": "SCMP_ACT_ERRNO", "errnoRet": 38 },
        ],
    });
    let said = guest.run_container("walled", &walled).text();
    let expected = [
        "touch: /x: Read-only file system",
        "0",
        "sh: can't create /proc/sys/kernel/pid_max: Read-only file system",
        "mknod: /tmp/disk: Operation not permitted",
        "null",
        "mkdir: can't create directory '/run/d': Function not implemented",
        "/sys/fs/cgroup/cgroup.procs",
        "ls: /proc/1/root/init: No such file or directory",
    ];
    assert_eq!(said.lines().collect::<Vec<_>>(), expected);

    // A container that runs the file that made it cannot write it.
    let mut own = spec("");
    own["process"]["args"] = json!(["/proc/self/exe", "state", "--wait-created", "1000", "nosuch"]);
    let keeper = guest.start("own", &own);
    let write = process("echo x >/proc/1/exe || echo refused");
    let written = guest.exec("own", "write", &write).end();
    assert_eq!(written.stdout, b"refused\n", "{written:?}");
    let error = String::from_utf8_lossy(&written.stderr).into_owned();
    assert!(error.contains("Read-only file system"), "{error}");
    guest.oci(&["delete", "--force", "own"]).text();
    keeper.end();

    // Who is added has no more than it is given, and is bound by the same filter.
    let mut main = spec(&format!("{PRIVILEGES}; echo up; sleep 100000"));
    main["linux"]["seccomp"] = walled["linux"]["seccomp"].clone();
    main["process"]["noNewPrivileges"] = json!(false);
    let keeper = guest.start("main", &main);
    keeper.stdout.wait_for("up");
    let mut added = process(&format!("{PRIVILEGES}; mkdir /tmp/d 2>&1"));
    added["capabilities"] = json!({ "bounding": ["CAP_KILL"], "effective": ["CAP_KILL"],
        "permitted": ["CAP_KILL"] });
    let added = String::from_utf8(guest.exec("main", "added", &added).end().stdout).unwrap();
    let expected = "CapEff: 0000000000000020,CapBnd: 0000000000000020,NoNewPrivs: 0,Seccomp: 2,\
        mkdir: can't create directory '/tmp/d': Function not implemented\n";
    assert_eq!(added, expected);
    guest.oci(&["delete", "--force", "main"]).text();
    let said = String::from_utf8(keeper.end().stdout).unwrap();
    let expected =
        "CapEff: 00000000080004a1,CapBnd: 00000000080004a1,NoNewPrivs: 0,Seccomp: 2,up\n";
    assert_eq!(said, expected);
}

fn a_sandbox_shares_what_it_is_asked_to() {
    let guest = Guest::boot();
    let sandbox = guest.start("sandbox", &spec("sleep 100000 & echo up; wait"));
    sandbox.stdout.wait_for("up");
    let mut member =
        spec("hostname; ps -o comm | grep -c sleep; echo $$ | grep -c '^1$'; ls /sys/class/net");
    member["hostname"] = json!("other");
    member["annotations"] = json!({ "io.kubernetes.cri.sandbox-id": "sandbox" });
    let host = |kind: &str| json!({ "type": kind, "path": format!("/proc/4711/ns/{kind}") });
    member["linux"]["namespaces"] = json!([host("pid"), host("ipc"), host("uts"), host("network")]);
    let output = guest.run_container("member", &member);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(said.starts_with("box\n1\n0\n") && said.contains("lo"), "{output:?}");
    // Its end is not the sandbox's.
    assert_eq!(guest.ask(&["state", "sandbox"])["status"], "running");
    member["annotations"] = json!({});
    let (keeper, state) = guest.try_create("lonely", &member);
    keeper.end();
    assert_eq!(state["error"]["kind"], "invalid", "{state}");
}
