//! Limits are kept, told, and changed.

use crate::bundle::{Guest, ended, spec};
use libtest_mimic::Trial;
use serde_json::json;

pub fn trials() -> Vec<Trial> {
    harness::trials![limits_are_kept_and_told]
}

fn limits_are_kept_and_told() {
    let guest = Guest::boot();
    let mut hog = spec("");
    hog["process"]["args"] = json!(["tail", "/dev/zero"]);
    hog["linux"]["resources"] =
        json!({ "memory": { "limit": 33_554_432, "swap": 33_554_432 }, "cpu": { "cpus": "0-63" } });
    let killed = guest.start("hog", &hog).end();
    assert_eq!(killed.status, ended(137), "{killed:?}");
    let state = guest.ask(&["state", "hog"]);
    assert_eq!((&state["oom_killed"], &state["exit_status"]), (&json!(true), &json!(137)));
    guest.oci(&["delete", "hog"]).text();

    let mut few = spec("(for n in 1 2 3 4 5 6; do sleep 1000 & done); echo up; sleep 2000");
    few["linux"]["resources"] =
        json!({ "pids": { "limit": 5 }, "memory": { "limit": 100_000_000 } });
    let keeper = guest.start("few", &few);
    keeper.stdout.wait_for("up");
    let stats = guest.ask(&["stats", "few"]);
    assert_eq!(stats["pids"]["limit"], 5);
    let processes = stats["pids"]["current"].as_u64().unwrap();
    assert!((4..=5).contains(&processes), "three of the six, and those that last: {stats}");
    assert_eq!(stats["memory"]["limit"], 99_999_744, "whole pages");
    let used = stats["memory"]["usage"].as_u64().unwrap();
    assert!((100_000..50_000_000).contains(&used), "{stats}");
    assert!(stats["cpu"]["usage_usec"].as_u64().unwrap() > 0, "{stats}");

    let other = json!({ "memory": { "limit": 134_217_728 }, "cpu": { "quota": 50_000, "period": 100_000 } });
    guest.write("/run/resources", &other);
    assert_eq!(
        guest.ask(&["update", "--resources", "/run/resources", "few"]),
        json!({ "warnings": [] })
    );
    assert_eq!(guest.ask(&["stats", "few"])["memory"]["limit"], 134_217_728);
    assert_eq!(guest.run("cat /sys/fs/cgroup/cube/few/cpu.max"), "50000 100000");
    guest.oci(&["delete", "--force", "few"]).text();
    assert_eq!(keeper.end().status, ended(137));
}
