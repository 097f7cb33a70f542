//! Another containerd takes the place of the one that has started a container, as an upgrade does.
//!
//! Only where another one is given (`CUBE_CONTAINERD`), since no distribution has two.

use harness::containerd::{CUBE, Containerd, other};
use harness::{eventually, oci_image};
use libtest_mimic::Trial;

pub fn trials() -> Vec<Trial> {
    match other() {
        Some(_) => harness::trials![a_container_outlives_the_upgrade_of_containerd],
        None => Vec::new(),
    }
}

fn version(containerd: &Containerd) -> String {
    let said = containerd.ctr(["version"]);
    let server = said.output(0).split_once("Server:").unwrap().1;
    let line = server.lines().find(|line| line.contains("Version:")).unwrap();
    line.split_whitespace().last().unwrap().to_owned()
}

/// The work of a container that is there all the time: it counts.
const COUNT: &str = "i=0; while :; do i=$((i+1)); echo $i >/new; mv /new /count; \
                     usleep 100000; done";

fn count(containerd: &Containerd, exec: &str) -> u64 {
    containerd.exec("old", exec, &["cat", "/count"]).output(0).trim().parse().unwrap()
}

fn a_container_outlives_the_upgrade_of_containerd() {
    let mut containerd = Containerd::start();
    let before = version(&containerd);
    containerd.detach("old", &["sh", "-c", COUNT]);
    containerd.detach("ends", &["sh", "-c", "while [ ! -e /end ]; do usleep 100000; done; exit 7"]);
    eventually("it counts", || {
        containerd.exec("old", "first", &["test", "-e", "/count"]).code == 0
    });
    let counted = count(&containerd, "before");
    containerd.stop_daemon();
    containerd.start_other(other().unwrap());
    assert_ne!(version(&containerd), before, "it is the same containerd");

    // What was there is there, and can be asked, added to, stopped for a while and ended.
    assert_eq!(containerd.state("old").as_deref(), Some("RUNNING"));
    assert!(count(&containerd, "after") > counted);
    containerd.ctr(["tasks", "pause", "old"]).output(0);
    assert_eq!(containerd.state("old").as_deref(), Some("PAUSED"));
    containerd.ctr(["tasks", "resume", "old"]).output(0);
    containerd.exec("ends", "end", &["touch", "/end"]).output(0);
    eventually("it ends", || containerd.state("ends").as_deref() == Some("STOPPED"));
    let gone = containerd.ctr(["tasks", "rm", "ends"]);
    assert!(gone.stderr.contains("exit code 7"), "{gone:?}");
    containerd.ctr(["containers", "rm", "ends"]).output(0);
    containerd.remove("old");

    // And what comes after is as ever.
    let said =
        containerd.ctr(["run", "--rm", "--runtime", CUBE, oci_image::NAME, "new", "echo", "here"]);
    assert_eq!(said.output(0), "here\n");
}
