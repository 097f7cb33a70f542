//! What containerd and its clients rely on: order of events, names, refusals, streams that end. All
//! of it is shown with one container, since each costs a boot.

use std::fs;
use std::path::Path;
use std::process::Stdio;

use harness::artifacts::text;
use harness::containerd::{CUBE, Containerd};
use harness::events::Events;
use harness::{eventually, oci_image};
use libtest_mimic::Trial;

pub fn trials() -> Vec<Trial> {
    harness::trials![a_task_keeps_what_its_clients_rely_on]
}

const ID: &str = "task";
/// Waits for a word, says much, and ends with a code of its own.
const SCRIPT: &str = "while ! test -e /v/go; do sleep 0.1; done; \
    i=0; while test $i -lt 2000; do echo a line of much; i=$((i+1)); done; touch /v/done; exit 5";

fn a_task_keeps_what_its_clients_rely_on() {
    let mut containerd = Containerd::start();
    let events = Events::listen(&containerd);
    let volume = containerd.folder("volume");
    let mount = format!("type=bind,src={},dst=/v,options=rbind:rw", text(&volume));
    let words = ["run", "-d", "--runtime", CUBE, "--mount", &mount, oci_image::NAME, ID];
    containerd.ctr(words.into_iter().chain(["sh", "-c", SCRIPT])).output(0);

    events_come_in_the_order_of_what_they_tell(&containerd, &events);
    drop(events);
    what_runs_is_not_removed_and_has_processes(&containerd);
    names_of_processes_are_taken_until_they_end(&containerd);
    output_of_processes_at_once_arrives_whole(&containerd);
    a_process_without_input_goes_on_to_its_end(&containerd);
    an_end_while_containerd_is_down_is_told_later(&mut containerd, &volume);
    what_has_ended_is_not_found(&containerd);
}

fn events_come_in_the_order_of_what_they_tell(containerd: &Containerd, events: &Events) {
    assert_eq!(containerd.exec(ID, "a", &["echo", "here"]).output(0), "here\n");
    events.wait(ID, "exit a");
    let expected = ["create", "start", "exec-added a", "exec-started a", "exit a"];
    assert_eq!(events.of(ID), expected);
}

fn what_runs_is_not_removed_and_has_processes(containerd: &Containerd) {
    let refused = containerd.ctr(["tasks", "rm", ID]);
    assert!(refused.code != 0, "{refused:?}");
    let pids = containerd.ctr(["tasks", "ps", ID]);
    assert!(pids.output(0).lines().count() > 1, "a head and processes: {pids:?}");
    containerd.ctr(["tasks", "pause", ID]).output(0);
    let pids = containerd.ctr(["tasks", "ps", ID]);
    assert!(pids.output(0).lines().count() > 1, "also while paused: {pids:?}");
    let again = containerd.ctr(["tasks", "pause", ID]);
    assert!(again.code != 0 && again.stderr.contains("not running"), "{again:?}");
    containerd.ctr(["tasks", "resume", ID]).output(0);
}

fn names_of_processes_are_taken_until_they_end(containerd: &Containerd) {
    let waits = ["sh", "-c", "touch /v/first; while ! test -e /v/enough; do sleep 0.1; done"];
    let volume = containerd.folder("volume");
    std::thread::scope(|scope| {
        let first = scope.spawn(|| containerd.exec(ID, "same", &waits));
        eventually("the first runs", || volume.join("first").exists());
        let second = containerd.exec(ID, "same", &["true"]);
        fs::write(volume.join("enough"), "").unwrap();
        assert!(second.stderr.contains("already exists"), "{second:?}");
        first.join().unwrap().output(0);
    });
    containerd.exec(ID, "same", &["true"]).output(0);
}

fn output_of_processes_at_once_arrives_whole(containerd: &Containerd) {
    const BYTES: usize = 1 << 20;
    let script = format!("head -c {BYTES} /dev/zero | tr '\\0' $0");
    let letters = ["a", "b", "c", "d"];
    let all = std::thread::scope(|scope| {
        let script = &script;
        let call = |letter| containerd.exec(ID, letter, &["sh", "-c", script, letter]);
        let calls = letters.map(|letter| scope.spawn(move || call(letter)));
        calls.map(|call| call.join().unwrap())
    });
    for (said, letter) in all.iter().zip(letters) {
        assert!(said.output(0) == letter.repeat(BYTES), "{letter}: {} bytes", said.stdout.len());
    }
}

fn a_process_without_input_goes_on_to_its_end(containerd: &Containerd) {
    let script = "echo first; sleep 1; echo second; exit 4";
    let words = ["tasks", "exec", "--exec-id", "none", ID, "sh", "-c", script];
    let output = containerd.command(words).stdin(Stdio::null()).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "first\nsecond\n");
    assert_eq!(output.status.code(), Some(4));
}

/// It has much to say while nobody listens, which must not break it.
fn an_end_while_containerd_is_down_is_told_later(containerd: &mut Containerd, volume: &Path) {
    containerd.stop_daemon();
    fs::write(volume.join("go"), "").unwrap();
    eventually("it ends", || volume.join("done").exists());
    containerd.start_daemon();
    eventually("its end is known", || containerd.state(ID).as_deref() == Some("STOPPED"));
}

fn what_has_ended_is_not_found(containerd: &Containerd) {
    let killed = containerd.ctr(["tasks", "kill", "-s", "SIGKILL", ID]);
    assert!(killed.stderr.contains("not found"), "{killed:?}");
    let late = containerd.exec(ID, "late", &["true"]);
    assert!(late.stderr.contains("stopped"), "{late:?}");
    let removed = containerd.ctr(["tasks", "rm", ID]);
    assert!(removed.code == 5 || removed.stderr.contains("exit code 5"), "{removed:?}");
    let gone = containerd.ctr(["tasks", "rm", ID]);
    assert!(gone.stderr.contains("not found"), "{gone:?}");
    containerd.ctr(["containers", "rm", ID]).output(0);
}
