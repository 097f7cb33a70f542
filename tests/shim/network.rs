//! Networks that are made when the VM is already there.

use std::fs;
use std::process::Command;

use harness::artifacts::text;
use harness::containerd::{CUBE, Containerd, Said};
use harness::{cri, oci_image};
use libtest_mimic::Trial;

pub fn trials() -> Vec<Trial> {
    harness::trials![ctr_makes_the_network_of_a_task_that_is_there_and_another_has_none]
}

/// What `ctr --cni` takes from fixed places is put there for it alone.
const PLACES: &str = "set -e; mount -t tmpfs tmpfs /opt; mkdir /opt/cni; ln -s $1 /opt/cni/bin; \
     mkdir -p $2/upper/cni/net.d $2/work; cp $2/cni/* $2/upper/cni/net.d; \
     mount -t overlay -o lowerdir=/etc,upperdir=$2/upper,workdir=$2/work overlay /etc; \
     shift 2; exec \"$@\"";

fn ctr_with_plugins(containerd: &Containerd, words: &[&str]) -> Said {
    let folder = containerd.folder("plugins");
    cri::write_network(&folder);
    let ctr = containerd.command(words.iter().copied());
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", PLACES, "sh", cri::PLUGINS, &text(&folder)]);
    command.arg(ctr.get_program()).args(ctr.get_args());
    Said::of(command, b"")
}

/// The host's ends of cards that plugins have made.
fn host_ends() -> Vec<String> {
    let entries = fs::read_dir("/sys/class/net").unwrap().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| name.starts_with("veth")).collect()
}

fn ctr_makes_the_network_of_a_task_that_is_there_and_another_has_none() {
    let containerd = Containerd::start();
    let before = host_ends();
    let script = "ip addr show eth0; ip route; ping -c 2 10.95.0.1";
    let words =
        ["run", "--rm", "--cni", "--runtime", CUBE, oci_image::NAME, "cni", "sh", "-c", script];
    let said = ctr_with_plugins(&containerd, &words);
    cri::remove_bridge();
    for expected in ["inet 10.95.0.", "default via 10.95.0.1", "2 packets received"] {
        assert!(said.output(0).contains(expected), "{expected} is not in {said:?}");
    }
    assert_eq!(host_ends(), before, "left behind");

    let said = containerd.run(CUBE, "none", &["sh", "-c", "ip addr; ip route"]);
    assert!(said.output(0).contains("127.0.0.1"), "{said:?}");
    let addresses = said.stdout.lines().filter(|line| line.trim().starts_with("inet"));
    assert!(
        addresses.clone().all(|line| line.ends_with("lo") || line.contains("::1/128")),
        "{said:?}"
    );
    assert!(!said.stdout.contains("default"), "{said:?}");
}
