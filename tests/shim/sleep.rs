//! Sandboxes that are paused to disk: the VM goes, and comes back with all that was in it.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::Stdio;
use std::time::{SystemTime, UNIX_EPOCH};

use harness::containerd::{CUBE, Containerd, processes};
use harness::{eventually, image, oci_image};
use libtest_mimic::Trial;

use crate::battery::Pod;

pub fn trials() -> Vec<Trial> {
    harness::trials![
        a_sandbox_goes_on_from_disk_with_all_it_had,
        input_goes_on_and_ends_after_a_pause_to_disk,
        what_is_paused_to_disk_can_be_killed,
        a_pod_of_two_sleeps_and_one_of_them_dies_meanwhile,
        a_resume_that_fails_leaves_the_sandbox_resumable,
        a_server_that_does_not_answer_well_fails_the_resume_until_it_does,
        a_pause_that_fails_leaves_the_sandbox_running,
        annotations_that_are_not_understood_are_refused,
    ]
}

const TO_DISK: [&str; 2] = ["--annotation", "cube.pause.to=disk"];

/// How often it sleeps.
fn cycles() -> u32 {
    std::env::var("CUBE_SLEEP_CYCLES").map_or(2, |text| text.parse().unwrap())
}

/// Starts a container that sleeps on disk, with these words for `ctr run` too.
pub fn detach(containerd: &Containerd, id: &str, more: &[&str], script: &str) {
    let words = ["run", "-d", "--runtime", CUBE].into_iter().chain(TO_DISK);
    let rest = [oci_image::NAME, id, "sh", "-c", script];
    containerd.ctr(words.chain(more.iter().copied()).chain(rest)).output(0);
}

fn pause(containerd: &Containerd, id: &str) {
    containerd.ctr(["tasks", "pause", id]).output(0);
    assert_eq!(containerd.state(id).as_deref(), Some("PAUSED"));
    assert_eq!(processes(&["cube-vmm", "cube-fsd"]), Vec::<String>::new());
    assert_eq!(containerd.asleep().len(), 1);
}

pub fn resume(containerd: &Containerd, id: &str) {
    containerd.ctr(["tasks", "resume", id]).output(0);
    assert_eq!(containerd.state(id).as_deref(), Some("RUNNING"));
    assert_eq!(containerd.asleep(), Vec::<String>::new());
}

/// The numbers in a file of lines, the last of which may be half written.
pub fn numbers(path: &Path) -> Vec<u32> {
    let text = fs::read_to_string(path).unwrap();
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    whole.lines().map(|line| line.parse().unwrap()).collect()
}

/// Waits until a counter has moved.
pub fn counts(path: &Path) {
    let before = numbers(path).len();
    eventually("it counts", || numbers(path).len() > before);
}

fn assert_whole(path: &Path) {
    assert_eq!(assert_counts_from(path), 1);
}

/// Makes sure that no number is missing or there twice, and tells the first.
pub fn assert_counts_from(path: &Path) -> u32 {
    let numbers = numbers(path);
    let first = numbers[0];
    let expected: Vec<u32> = (first..).take(numbers.len()).collect();
    let wrong = numbers.iter().zip(&expected).find(|(one, other)| one != other);
    assert_eq!(wrong, None, "in {} of {} numbers", path.display(), numbers.len());
    first
}

fn seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()
}

/// Counts in memory, into an open file of the host and to its output, and answers at a port.
const WORKLOAD: &str = "exec 3>>/data/log; nc -ll -p 8080 -e /bin/echo alive & n=0; \
                        while true; do n=$((n+1)); echo $n >&3; echo $n; sleep 0.05; done";

fn answer() -> std::io::Result<String> {
    let mut text = String::new();
    TcpStream::connect("10.94.0.2:8080")?.read_to_string(&mut text)?;
    Ok(text)
}

fn a_sandbox_goes_on_from_disk_with_all_it_had() {
    let containerd = Containerd::start();
    let _pod = Pod::make();
    let (data, out) = (containerd.folder("data"), containerd.folder("out").join("log"));
    let mount = format!("type=bind,src={},dst=/data,options=rbind:rw", data.display());
    let log = format!("file://{}", out.display());
    let more = ["--annotation", "cube.ready=tcp:8080", "--env", "GIVEN=at creation"];
    let more = more.into_iter().chain(["--with-ns", Pod::NAMESPACE, "--mount", &mount]);
    detach(&containerd, "sleeper", &more.chain(["--log-uri", &log]).collect::<Vec<_>>(), WORKLOAD);
    eventually("it serves", || answer().is_ok_and(|text| text == "alive\n"));
    counts(&data.join("log"));
    for cycle in 0..cycles() {
        fs::write(data.join("old"), cycle.to_string()).unwrap();
        containerd.exec("sleeper", "look", &["cat", "/data/old"]).output(0);
        pause(&containerd, "sleeper");
        let refused = containerd.exec("sleeper", "not", &["true"]);
        assert!(refused.stderr.contains("paused"), "{refused:?}");
        fs::rename(data.join("old"), data.join("new")).unwrap();
        fs::create_dir(data.join(format!("folder-{cycle}"))).unwrap();
        resume(&containerd, "sleeper");
        assert_eq!(answer().unwrap(), "alive\n", "cycle {cycle}");
        let look = "cat /data/new; ls /data/old 2>&1; date +%s; echo $GIVEN";
        let before = seconds();
        let said = containerd.exec("sleeper", "look", &["sh", "-c", look]);
        let lines: Vec<&str> = said.output(0).lines().collect();
        assert!(lines[0].starts_with(&cycle.to_string()), "{said:?}");
        assert!(said.stdout.contains("No such file"), "{said:?}");
        assert!(said.stdout.ends_with("at creation\n"), "{said:?}");
        let clock: u64 = lines[lines.len() - 2].parse().unwrap();
        assert!((before - 1..=seconds() + 1).contains(&clock), "{said:?}");
        counts(&data.join("log"));
        counts(&out);
    }
    containerd.remove("sleeper");
    assert_whole(&data.join("log"));
    assert_whole(&out);
}

fn input_goes_on_and_ends_after_a_pause_to_disk() {
    let containerd = Containerd::start();
    let words = ["run", "--runtime", CUBE].into_iter().chain(TO_DISK);
    let words = words.chain([oci_image::NAME, "cat", "sh", "-c", "cat; echo end; exit 3"]);
    let mut command = containerd.command(words);
    let mut ctr = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut input = ctr.stdin.take().unwrap();
    let mut output = BufReader::new(ctr.stdout.take().unwrap());
    let mut line = String::new();
    for word in ["before\n", "after\n", "later\n"] {
        input.write_all(word.as_bytes()).unwrap();
        line.clear();
        output.read_line(&mut line).unwrap();
        assert_eq!(line, word);
        containerd.ctr(["tasks", "pause", "cat"]).output(0);
        if word == "after\n" {
            // It arrives while nobody is there.
            input.write_all(b"meanwhile\n").unwrap();
        }
        resume(&containerd, "cat");
        if word == "after\n" {
            line.clear();
            output.read_line(&mut line).unwrap();
            assert_eq!(line, "meanwhile\n");
        }
    }
    drop(input);
    let mut rest = String::new();
    output.read_to_string(&mut rest).unwrap();
    assert_eq!(rest, "end\n");
    assert_eq!(ctr.wait().unwrap().code(), Some(3));
    containerd.ctr(["containers", "rm", "cat"]).output(0);
}

fn what_is_paused_to_disk_can_be_killed() {
    let containerd = Containerd::start();
    detach(&containerd, "killed", &[], "sleep 1000");
    pause(&containerd, "killed");
    let again = containerd.ctr(["tasks", "pause", "killed"]);
    assert!(again.stderr.contains("not running"), "{again:?}");
    let term = containerd.ctr(["tasks", "kill", "-s", "SIGTERM", "killed"]);
    assert!(term.stderr.contains("no signal but SIGKILL"), "{term:?}");
    assert!(containerd.ctr(["tasks", "metrics", "killed"]).code == 0);
    containerd.ctr(["tasks", "kill", "-s", "SIGKILL", "killed"]).output(0);
    eventually("it has ended", || containerd.state("killed").as_deref() == Some("STOPPED"));
    assert_eq!(containerd.asleep(), Vec::<String>::new());
    let removed = containerd.ctr(["tasks", "rm", "killed"]);
    assert!(removed.code == 137 || removed.stderr.contains("137"), "{removed:?}");
    containerd.ctr(["containers", "rm", "killed"]).output(0);
}

fn a_pod_of_two_sleeps_and_one_of_them_dies_meanwhile() {
    let containerd = Containerd::start();
    let data = containerd.folder("data");
    let mount = format!("type=bind,src={},dst=/data,options=rbind:rw", data.display());
    let more = ["--annotation", "io.kubernetes.cri.sandbox-id=one", "--mount", &mount];
    let script =
        |name: &str| format!("n=0; while sleep 0.1; do echo $((n+=1)) >> /data/{name}; done");
    for name in ["one", "two"] {
        detach(&containerd, name, &more, &script(name));
        eventually("it counts", || data.join(name).exists());
    }
    pause(&containerd, "two");
    assert_eq!(containerd.state("one").as_deref(), Some("PAUSED"));
    containerd.remove("two");
    assert_eq!(containerd.state("one").as_deref(), Some("PAUSED"));
    resume(&containerd, "one");
    counts(&data.join("one"));
    let dead = numbers(&data.join("two")).len();
    counts(&data.join("one"));
    counts(&data.join("one"));
    assert_eq!(numbers(&data.join("two")).len(), dead, "what was killed does not go on");
    assert_whole(&data.join("one"));
    containerd.remove("one");
}

fn a_resume_that_fails_leaves_the_sandbox_resumable() {
    let containerd = Containerd::start();
    detach(&containerd, "again", &[], "sleep 1000");
    pause(&containerd, "again");
    let memory = Path::new(&containerd.asleep()[0]).join("memory");
    let away = memory.with_extension("away");
    fs::rename(&memory, &away).unwrap();
    let failed = containerd.ctr(["tasks", "resume", "again"]);
    assert_ne!(failed.code, 0);
    assert!(failed.stderr.contains("memory"), "{failed:?}");
    assert_eq!(containerd.state("again").as_deref(), Some("PAUSED"));
    fs::rename(&away, &memory).unwrap();
    resume(&containerd, "again");
    assert_eq!(containerd.exec("again", "a", &["echo", "on"]).output(0), "on\n");
    containerd.remove("again");
}

fn a_server_that_does_not_answer_well_fails_the_resume_until_it_does() {
    let containerd = Containerd::start();
    let data = containerd.folder("data");
    let mount = format!("type=bind,src={},dst=/data,options=rbind:rw", data.display());
    let ready = ["--annotation", "cube.ready=tcp:8080,http:8080/health"];
    let soon = ["--annotation", "cube.ready.timeout=1", "--mount", &mount];
    let more: Vec<_> = ready.into_iter().chain(soon).collect();
    detach(&containerd, "ill", &more, "httpd -p 8080 -h /data; exec sleep 1000");
    pause(&containerd, "ill");
    let failed = containerd.ctr(["tasks", "resume", "ill"]);
    assert_ne!(failed.code, 0);
    assert!(failed.stderr.contains("port 8080 for /health within 1 s"), "{failed:?}");
    assert_eq!(containerd.state("ill").as_deref(), Some("PAUSED"));
    assert_eq!(containerd.asleep().len(), 1);
    fs::write(data.join("health"), "well").unwrap();
    eventually("it answers in time", || containerd.ctr(["tasks", "resume", "ill"]).code == 0);
    assert_eq!(containerd.state("ill").as_deref(), Some("RUNNING"));
    containerd.remove("ill");
}

fn a_pause_that_fails_leaves_the_sandbox_running() {
    let containerd = Containerd::start();
    let paused = containerd.folder("paused");
    let out = containerd.folder("out").join("log");
    let log = format!("file://{}", out.display());
    let script = "n=0; while sleep 0.05; do echo $((n+=1)); done";
    detach(&containerd, "awake", &["--log-uri", &log], script);
    let path = paused.to_str().unwrap();
    image::host("mount", &["-t", "tmpfs", "-o", "size=1m", "small", path]);
    let failed = containerd.ctr(["tasks", "pause", "awake"]);
    let left = containerd.asleep();
    image::host("umount", &[path]);
    assert_ne!(failed.code, 0);
    assert!(failed.stderr.contains("No space left"), "{failed:?}");
    assert_eq!(left, Vec::<String>::new());
    assert_eq!(containerd.state("awake").as_deref(), Some("RUNNING"));
    counts(&out);
    containerd.ctr(["tasks", "pause", "awake"]).output(0);
    resume(&containerd, "awake");
    counts(&out);
    containerd.remove("awake");
    assert_whole(&out);
}

fn annotations_that_are_not_understood_are_refused() {
    let containerd = Containerd::start();
    let words = ["run", "--rm", "--runtime", CUBE, "--annotation", "cube.pause.to=tape"];
    let said = containerd.ctr(words.into_iter().chain([oci_image::NAME, "tape", "true"]));
    assert_ne!(said.code, 0);
    let expected = "the annotation cube.pause.to is \"tape\", expected memory or disk";
    assert!(said.stderr.replace('\\', "").contains(expected), "{said:?}");
}
