//! Checkpoints, and the sandboxes that go on from them, each as a machine of its own.

use std::collections::BTreeSet;
use std::io::Read;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use harness::artifacts::Artifact;
use harness::containerd::{CUBE, Containerd, processes};
use harness::{eventually, image, oci_image};
use libtest_mimic::Trial;

use crate::sleep::{assert_counts_from, counts, numbers};

pub fn trials() -> Vec<Trial> {
    harness::trials![
        copies_of_a_sandbox_go_on_as_machines_of_their_own,
        an_action_pauses_to_a_snapshot_that_others_go_on_from,
    ]
}

/// How many copies there are.
fn copies() -> u8 {
    std::env::var("CUBE_SHIM_COPIES").map_or(2, |text| text.parse().unwrap())
}

/// The network of one pod: as `battery::Pod`, with a number.
struct Pod(u8);

impl Pod {
    fn make(number: u8) -> Self {
        for line in [
            "netns add cube-copy-N",
            "link add cube-copy-vN type veth peer name eth0 netns cube-copy-N",
            "addr add 10.95.N.1/24 dev cube-copy-vN",
            "link set cube-copy-vN up",
            "-n cube-copy-N addr add 10.95.N.2/24 dev eth0",
            "-n cube-copy-N link set eth0 up",
            "-n cube-copy-N route add default via 10.95.N.1",
        ] {
            let line = line.replace('N', &number.to_string());
            image::host("ip", &line.split(' ').collect::<Vec<_>>());
        }
        Self(number)
    }

    fn namespace(&self) -> String {
        format!("network:/var/run/netns/cube-copy-{}", self.0)
    }

    fn answer(&self) -> std::io::Result<String> {
        let mut text = String::new();
        TcpStream::connect(format!("10.95.{}.2:8080", self.0))?.read_to_string(&mut text)?;
        Ok(text)
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        image::host("ip", &["netns", "delete", &format!("cube-copy-{}", self.0)]);
    }
}

/// Starts a container in the background, with these words for `ctr run`.
fn detach(containerd: &Containerd, id: &str, more: &[&str], script: &str) -> String {
    let words = ["run", "-d", "--runtime", CUBE].into_iter().chain(more.iter().copied());
    let said = containerd.ctr(words.chain([oci_image::NAME, id, "sh", "-c", script]));
    if said.code == 0 { String::new() } else { said.stderr.replace('\\', "") }
}

/// Asks the shim for a checkpoint.
fn checkpoint(containerd: &Containerd, id: &str) -> PathBuf {
    let folder = containerd.folder("checkpoints").join(id);
    let said = Command::new(Artifact::Shim.arg())
        .args(["-namespace", "default", "-id", id, "-address"])
        .arg(containerd.folder(".").canonicalize().unwrap().join("containerd.sock"))
        .arg("checkpoint")
        .arg(&folder)
        .output()
        .unwrap();
    assert!(said.status.success(), "{said:?}\n{}", containerd.log());
    folder
}

/// Asks the shim for an action.
fn update(containerd: &Containerd, id: &str, annotations: &[&str]) -> Output {
    Command::new(Artifact::Shim.arg())
        .args(["-namespace", "default", "-id", id, "-address"])
        .arg(containerd.folder(".").canonicalize().unwrap().join("containerd.sock"))
        .arg("update")
        .args(annotations)
        .output()
        .unwrap()
}

const ACTION: &str = "cube.shimapi.update.action=PauseToSnapshot";

fn destination(folder: &Path) -> String {
    let url = folder.display();
    format!(r#"cube.shimapi.update.pause.snapshot_config={{"destination_url":"file://{url}"}}"#)
}

fn an_action_pauses_to_a_snapshot_that_others_go_on_from() {
    let containerd = Containerd::start();
    let out = containerd.folder("out");
    let log = |id: &str| format!("file://{}", out.join(id).display());
    let script = "n=0; while sleep 0.1; do echo $((n+=1)); done";
    assert_eq!(detach(&containerd, "old", &["--log-uri", &log("old")], script), "");
    eventually("it counts", || out.join("old").exists() && numbers(&out.join("old")).len() > 3);
    let folder = containerd.folder("checkpoints").join("old");
    let to = destination(&folder);

    for (annotations, datum) in [
        (vec!["cube.shimapi.update.action=Explode"], "Explode"),
        (vec![ACTION], "snapshot_config"),
        (vec![ACTION, "cube.shimapi.update.pause.snapshot_config={"], "EOF"),
        (vec![ACTION, &destination(Path::new("/etc/old"))], "/etc"),
        (vec![ACTION, &to, "cube.shimapi.update.snapshot.id=x"], "snapshot.id"),
    ] {
        let refused = update(&containerd, "old", &annotations);
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && said.contains(datum), "{annotations:?}: {said}");
        assert!(said.contains("INVALID_ARGUMENT"), "{said}");
        assert_eq!(containerd.state("old").as_deref(), Some("RUNNING"));
        assert!(!folder.exists());
    }
    counts(&out.join("old"));

    let done = update(&containerd, "old", &[ACTION, &to]);
    assert!(done.status.success(), "{done:?}\n{}", containerd.log());
    assert_eq!(containerd.state("old").as_deref(), Some("PAUSED"));
    assert_eq!(processes(&["cube-vmm", "cube-fsd"]), Vec::<String>::new());
    let again = update(&containerd, "old", &[ACTION, &to]);
    let said = String::from_utf8_lossy(&again.stderr).into_owned();
    assert!(said.contains("FAILED_PRECONDITION") && said.contains("not running"), "{said}");
    containerd.ctr(["tasks", "resume", "old"]).output(0);
    counts(&out.join("old"));
    let taken = update(&containerd, "old", &[ACTION, &to]);
    let said = String::from_utf8_lossy(&taken.stderr).into_owned();
    assert!(said.contains("ALREADY_EXISTS"), "{said}");
    assert_eq!(containerd.state("old").as_deref(), Some("RUNNING"));
    counts(&out.join("old"));
    containerd.remove("old");
    assert_eq!(assert_counts_from(&out.join("old")), 1);

    // The folder outlives the sandbox, and another one goes on from it.
    let from = format!("cube.restore.from={}", folder.display());
    let words = ["--annotation", &from, "--log-uri", &log("new")];
    assert_eq!(detach(&containerd, "new", &words, "not run"), "");
    counts(&out.join("new"));
    containerd.remove("new");
    assert!(assert_counts_from(&out.join("new")) > 1, "it goes on");
}

fn copies_of_a_sandbox_go_on_as_machines_of_their_own() {
    let containerd = Containerd::start();
    let out = containerd.folder("out");
    let log = |id: &str| format!("file://{}", out.join(id).display());
    let pod = Pod::make(100);
    let script = "nc -ll -p 8080 -e /bin/hostname & n=0; while sleep 0.1; do echo $((n+=1)); done";
    let ready = ["--annotation", "cube.ready=tcp:8080"];
    let (namespace, uri) = (pod.namespace(), log("origin"));
    let own = ["--with-ns", &namespace, "--log-uri", &uri, "--env", "WHO=origin"];
    let words: Vec<&str> = ready.into_iter().chain(own).collect();
    assert_eq!(detach(&containerd, "origin", &words, script), "");
    eventually("it counts", || {
        out.join("origin").exists() && numbers(&out.join("origin")).len() > 3
    });
    let folder = checkpoint(&containerd, "origin");
    counts(&out.join("origin"));
    let from = format!("cube.restore.from={}", folder.display());
    let mut seen = BTreeSet::new();
    let mut pods = Vec::new();
    for number in 1..=copies() {
        let (id, pod) = (format!("copy-{number}"), Pod::make(number));
        let (namespace, uri, who) = (pod.namespace(), log(&id), format!("WHO={id}"));
        let own = ["--with-ns", &namespace, "--log-uri", &uri, "--env", &who];
        let words = ready.into_iter().chain(["--annotation", &from]).chain(own);
        assert_eq!(detach(&containerd, &id, &words.collect::<Vec<_>>(), "not run"), "");
        // At the first try: whoever creates it has waited.
        assert_eq!(pod.answer().unwrap(), format!("{id}\n"));
        let restored = || containerd.ladders(&id).iter().any(|(name, _)| name == "restore");
        eventually("its restore is told", restored);
        let look = "echo $WHO; hostname; cat /sys/class/net/eth0/address; \
                    cat /proc/sys/kernel/random/uuid; ip -4 -o addr show eth0";
        let said = containerd.exec(&id, "look", &["sh", "-c", look]);
        let lines: Vec<&str> = said.output(0).lines().collect();
        assert_eq!(lines[..2], [id.as_str(), id.as_str()]);
        assert!(lines[4].contains(&format!("inet 10.95.{number}.2/24")), "{said:?}");
        seen.extend(lines[2..4].iter().map(|&line| line.to_owned()));
        pods.push(pod);
    }
    assert_eq!(seen.len(), 2 * usize::from(copies()), "{seen:?}");
    for number in 1..=copies() {
        let id = format!("copy-{number}");
        counts(&out.join(&id));
        containerd.remove(&id);
        assert!(assert_counts_from(&out.join(&id)) > 1, "it goes on");
    }
    containerd.remove("origin");
    assert_eq!(assert_counts_from(&out.join("origin")), 1);
}
