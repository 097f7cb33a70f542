//! What calls tell of how long they took: in containerd's log, and as numbers for Prometheus.

use std::fs;

use harness::containerd::{CUBE, Containerd};
use harness::{eventually, oci_image};
use libtest_mimic::Trial;
use serde_json::Value;

pub fn trials() -> Vec<Trial> {
    harness::trials![calls_tell_how_long_they_took]
}

/// The numbers of the only sandbox there is.
fn metrics() -> String {
    let folders = fs::read_dir("/run/cube").unwrap().map(|entry| entry.unwrap().path());
    let files = folders.map(|folder| folder.join("metrics.prom")).filter(|file| file.exists());
    let files: Vec<_> = files.collect();
    assert_eq!(files.len(), 1, "{files:?}");
    fs::read_to_string(&files[0]).unwrap()
}

/// The number of a sandbox's calls, as its metrics have it.
fn calls(operation: &str, outcome: &str) -> String {
    let labels = format!("namespace=\"default\",operation=\"{operation}\",outcome=\"{outcome}\"");
    format!("cubevmm_sandbox_operations_total{{{labels},sandbox=\"one\"}} 1")
}

fn detach(containerd: &Containerd, id: &str, annotation: &str) {
    let words = ["run", "-d", "--runtime", CUBE, "--annotation", annotation];
    let pod = ["--annotation", "io.kubernetes.cri.sandbox-id=one"];
    let rest = [oci_image::NAME, id, "sleep", "1000"];
    containerd.ctr(words.into_iter().chain(pod).chain(rest)).output(0);
}

fn stages(line: &Value) -> Vec<&str> {
    let stages = line["stages"].as_array().unwrap();
    stages.iter().map(|stage| stage["stage"].as_str().unwrap()).collect()
}

/// Makes sure that a call has told these stages, of which those that follow each other make up all
/// of its time but what the answer took.
#[track_caller]
fn assert_told(told: &[(String, Value)], operation: &str, expected: &[&str]) {
    let found = told.iter().find(|(name, line)| name == operation && line["outcome"] == "done");
    let (_, line) = found.unwrap_or_else(|| panic!("no {operation} in {told:#?}"));
    assert_eq!(stages(line), expected, "{line}");
    assert_eq!(
        (line["sandbox"].as_str(), line["namespace"].as_str()),
        (Some("one"), Some("default"))
    );
    let all = line["us"].as_u64().unwrap();
    for stage in line["stages"].as_array().unwrap() {
        let end = stage["at_us"].as_u64().unwrap() + stage["us"].as_u64().unwrap();
        // Each of the two may have lost a part of a microsecond.
        assert!(end <= all + 2, "{line}");
    }
}

fn calls_tell_how_long_they_took() {
    let containerd = Containerd::start();
    detach(&containerd, "one", "cube.pause.to=memory");
    containerd.ctr(["tasks", "pause", "one"]).output(0);
    containerd.ctr(["tasks", "resume", "one"]).output(0);
    let twice = containerd.ctr(["tasks", "resume", "one"]);
    assert_ne!(twice.code, 0);
    // The pod's later container has the last word: pauses go to the disk from here on.
    detach(&containerd, "two", "cube.pause.to=disk");
    containerd.ctr(["tasks", "pause", "one"]).output(0);
    assert!(metrics().lines().any(|line| line == calls("pause_to_disk", "done")), "{}", metrics());
    containerd.ctr(["tasks", "resume", "one"]).output(0);

    let told = || containerd.ladders("one");
    eventually("all is in the log", || told().iter().any(|(name, _)| name == "resume_from_disk"));
    let boot = ["spec", "network", "vmm", "agent", "set_up", "rest_of_files", "container"];
    let (_, create) = told().into_iter().find(|(name, _)| name == "create").unwrap();
    let one_by_one: Vec<_> = stages(&create).into_iter().filter(|name| *name != "files").collect();
    assert_eq!(one_by_one, boot, "{create}");
    assert_eq!(stages(&create).len(), boot.len() + 1, "files are beside them: {create}");
    assert_told(&told(), "pause", &["quiet", "stopped"]);
    assert_told(&told(), "resume", &["quiet", "running", "agent"]);
    assert_told(&told(), "pause_to_disk", &["quiet", "streams", "saved", "gone"]);
    let woken = ["quiet", "vmm", "agent", "ready", "streams", "cleared"];
    assert_told(&told(), "resume_from_disk", &woken);
    let failed = told().into_iter().find(|(_, line)| line["outcome"] == "failed");
    let (_, failed) = failed.unwrap();
    assert!(failed["error"].as_str().unwrap().contains("is not paused"), "{failed}");
    let add = containerd.ladders("two").into_iter().find(|(name, _)| name == "add");
    assert!(add.is_some(), "{:#?}", containerd.ladders("two"));

    let text = metrics();
    let expected = [
        calls("create", "done"),
        calls("add", "done"),
        calls("pause", "done"),
        calls("resume", "done"),
        calls("resume", "failed"),
        calls("resume_from_disk", "done"),
    ];
    for line in expected {
        assert!(text.lines().any(|told| told == line), "{line} in\n{text}");
    }
    assert!(text.contains("stage=\"saved\""), "{text}");
    containerd.remove("two");
    containerd.remove("one");
}
