//! Every way for a container to end leaves nothing behind.

use crate::bundle::{Guest, ended, spec};
use libtest_mimic::Trial;
use serde_json::json;

pub fn trials() -> Vec<Trial> {
    harness::trials![signals_pauses_and_deletions_do_what_they_say]
}

/// What is left of containers: records, control groups, processes, mounts, zombies.
const REMAINS: &str = "ls -A /run/cube/oci; ls -d /sys/fs/cgroup/cube/*/ 2>/dev/null; \
    ps -o comm,stat | grep -E 'cube-oci|sleep|Z'; grep /run/tree /proc/mounts; true";

fn signals_pauses_and_deletions_do_what_they_say() {
    let guest = Guest::boot();
    let status = |id: &str| guest.ask(&["state", id])["status"].clone();
    let refused = |words: &[&str]| guest.oci(words).status.to_exit_code();

    let line = "trap 'echo caught; exit 4' TERM; echo up; while :; do sleep 0.1; done";
    let keeper = guest.create("signals", &spec(line));
    assert_eq!(refused(&["pause", "signals"]), 4);
    assert_eq!(guest.oci(&["start", "signals"]).text(), "");
    keeper.stdout.wait_for("up");
    assert_eq!((refused(&["start", "signals"]), refused(&["delete", "signals"])), (4, 4));
    guest.oci(&["pause", "signals"]).text();
    assert_eq!(status("signals"), "paused");
    assert_eq!(
        (refused(&["pause", "signals"]), refused(&["exec", "--process", "/x", "signals", "e"])),
        (4, 125)
    );
    guest.oci(&["resume", "signals"]).text();
    assert_eq!(status("signals"), "running");
    guest.oci(&["kill", "signals", "TERM"]).text();
    let output = keeper.end();
    assert_eq!((output.status, output.stdout.as_slice()), (ended(4), b"up\ncaught\n".as_slice()));
    assert_eq!(refused(&["kill", "signals", "TERM"]), 3);
    guest.oci(&["delete", "signals"]).text();
    assert_eq!((refused(&["state", "signals"]), refused(&["kill", "signals", "9"])), (3, 3));

    // All of it, paused or not, and before it was started.
    let many = spec("for n in 1 2 3; do sleep 100000 & done; echo up; wait");
    let keeper = guest.start("all", &many);
    keeper.stdout.wait_for("up");
    guest.oci(&["pause", "all"]).text();
    guest.oci(&["kill", "--all", "all", "SIGKILL"]).text();
    assert_eq!(keeper.end().status, ended(137));
    guest.oci(&["delete", "all"]).text();
    let keeper = guest.create("unstarted", &many);
    guest.oci(&["kill", "unstarted", "TERM"]).text();
    assert_eq!(keeper.end().status, ended(137));
    guest.oci(&["delete", "unstarted"]).text();

    // The container dies with its keeper; another with its id is no trouble.
    let keeper = guest.start("orphan", &many);
    keeper.stdout.wait_for("up");
    keeper.remote().signal(9).unwrap();
    keeper.end();
    assert_eq!(status("orphan"), "stopped");
    let duplicate = guest.oci(&["create", "--bundle", "/run/bundles/orphan", "orphan"]);
    assert_eq!(duplicate.status, ended(125), "{duplicate:?}");
    guest.oci(&["delete", "--force", "orphan"]).text();
    guest.oci(&["delete", "--force", "orphan"]).text();

    // A pod whose processes are the guest's: those that it leaves behind go, too.
    let mut shared = spec("sleep 100000 & exit 6");
    shared["linux"]["namespaces"] = json!([{ "type": "mount" }]);
    shared.as_object_mut().unwrap().remove("hostname");
    assert_eq!(guest.run_container("shared", &shared).status, ended(6));
    assert_eq!(guest.run(REMAINS), "");
}
