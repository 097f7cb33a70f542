//! A guest that is at work on shares all the time, saved, killed and restored again and again.

use std::fs;
use std::path::Path;
use std::time::Instant;

use harness::{Place, TestVm, eventually, image, sh, tools};
use libtest_mimic::Trial;

use super::{folder, restore, run, save, share};

pub fn trials() -> Vec<Trial> {
    harness::trials![n1_work_goes_on_through_snapshots_while_the_host_changes_things]
}

/// Works on both shares in every way that keeps something open or depends on order: a log, a file that is
/// open and has no name, a tree that is made and removed as git does, locks that exclude, a current
/// directory deep down, pages that are mapped (see `mapped.c`), and files that the host changes. What must not be goes to /tmp/bad, what may be to /tmp/seen; rounds are counted.
const WORK: &str = r#"mkdir /work /other; mount -t virtiofs work /work; mount -t virtiofs other /other
: >/tmp/seen
(exec 3>>/work/log; i=0; while :; do i=$((i+1)); echo $i >&3 || echo log $i >>/tmp/bad; sleep 0.05; done) &
(exec 3>/work/gone 4</work/gone; rm /work/gone; i=0
while :; do
    i=$((i+1)); echo $i >&3; read back <&4; [ "$back" = $i ] || echo gone $i $back >>/tmp/bad
    sleep 0.1
done) 2>>/tmp/bad &
(while :; do
    mkdir -p /work/t/a && echo x >/work/t/a/new && ln /work/t/a/new /work/t/a/link &&
    mv /work/t/a/new /work/t/a/obj && [ "$(cat /work/t/a/link)" = x ] && rm -r /work/t || echo tree >>/tmp/bad
    echo >>/tmp/trees; sleep 1
done) 2>>/tmp/bad &
for one in a b; do
    (while :; do
        $FLOCK /work/lock sh -c 'mkdir /work/held && rmdir /work/held' || echo lock >>/tmp/bad
        echo >>/tmp/locks; sleep 2
    done) 2>>/tmp/bad &
done
(deep=/work/deep; i=0; while [ $i -lt 60 ]; do i=$((i+1)); deep=$deep/d; done
mkdir -p $deep && cd $deep && echo leaf >leaf
while :; do [ "$(cat leaf ../d/leaf)" = "leaf
leaf" ] || echo deep >>/tmp/bad; echo >>/tmp/deeps; sleep 1; done) 2>>/tmp/bad &
$MAPPED /work/mapped >>/tmp/maps 2>>/tmp/bad &
(while :; do cat /other/* >/dev/null 2>>/tmp/seen; sleep 1; done) &
wait"#;

/// What counts its rounds.
const COUNTED: [&str; 4] = ["trees", "locks", "deeps", "maps"];

fn cycles() -> u32 {
    let cycles = std::env::var("CUBE_SHARE_CYCLES").ok();
    cycles.map_or(2, |text| text.parse().unwrap())
}

/// Makes the program that maps.
fn mapped(place: &Place) -> String {
    let program = place.given_path("mapped").to_str().unwrap().to_owned();
    let source = harness::artifacts::repository().join("tests/devices/shares/mapped.c");
    image::host("cc", &["-O1", "-Wall", "-Werror", "-o", &program, source.to_str().unwrap()]);
    program
}

fn n1_work_goes_on_through_snapshots_while_the_host_changes_things() {
    let store = Place::new();
    let (work, other) = (folder(&store, "work"), folder(&store, "other"));
    let programs = tools::programs(&store, &[&mapped(&store), "/usr/bin/flock"]);
    let mut vm = TestVm::builder()
        .option("--fs", share("work", &work, ",id=work"))
        .option("--fs", share("other", &other, ",ro,id=other"))
        .option("--pmem", format!("path={programs},ro,id=tools"))
        .boot();
    let [mapped, flock] = ["mapped", "flock"].map(tools::start);
    vm.leave(sh(&format!("{}; MAPPED='{mapped}' FLOCK='{flock}'\n{WORK}", tools::MOUNT)));
    eventually("the guest has mounted both", || work.join("log").exists());
    for cycle in 0..cycles() {
        turn_over(&other, cycle);
        run(&vm, &format!("cat /other/*-{cycle} >/dev/null"));
        let dir = store.given_path(&format!("cycle{cycle}"));
        let started = Instant::now();
        goes_on(&work);
        let went_on = started.elapsed();
        save(&vm, &dir);
        drop(vm);
        let saved = started.elapsed();
        vm = match cycle % 2 {
            0 => only_more(&dir, &other, cycle),
            _ => with_changes(&store, &dir, &other, cycle),
        };
        println!(
            "cycle {cycle}: wrote by {went_on:?}, saved by {saved:?}, {:?}",
            started.elapsed()
        );
        fs::remove_dir_all(&dir).unwrap();
    }
    goes_on(&work);
    for what in COUNTED {
        let before = rounds(&vm, what);
        eventually(what, || rounds(&vm, what) > before || !is_empty(&vm, "/tmp/bad"));
        assert_eq!(run(&vm, "cat /tmp/bad 2>/dev/null; true"), "", "{what}");
    }
    let seen = run(&vm, "cat /tmp/seen");
    assert!(!seen.contains("put/output"), "an I/O error: {seen}");
    let mut there: Vec<_> = fs::read_dir(&other).unwrap().map(|e| e.unwrap().path()).collect();
    there.sort();
    let texts = there.iter().map(|path| {
        let name = path.file_name().unwrap().to_str().unwrap();
        format!("{name}:{}", fs::read_to_string(path).unwrap())
    });
    assert_eq!(run(&vm, "cd /other; grep -H '' *"), texts.collect::<String>().trim_end());
    run(&vm, "sync");
    drop(vm);
    let log = fs::read_to_string(work.join("log")).unwrap();
    let numbers: Vec<usize> = log.lines().map(|line| line.parse().unwrap()).collect();
    assert_eq!(numbers, (1..=numbers.len()).collect::<Vec<_>>());
    assert!(!work.join("gone").exists());
}

/// Files of the host come, and before a restore that may find changes old ones go, while the guest reads.
fn turn_over(other: &Path, cycle: u32) {
    if cycle % 2 == 1 {
        for entry in fs::read_dir(other).unwrap() {
            let path = entry.unwrap().path();
            if !path.to_str().unwrap().ends_with(&format!("-{}", cycle - 1)) {
                fs::remove_file(path).unwrap();
            }
        }
    }
    for name in ["kept", "moved", "doomed"] {
        fs::write(other.join(format!("{name}-{cycle}")), format!("{name} {cycle}\n")).unwrap();
    }
}

/// Waits for the guest to write more.
fn goes_on(work: &Path) {
    let written = || fs::read_to_string(work.join("log")).unwrap_or_default().lines().count();
    let before = written();
    eventually("it goes on writing", || written() > before + 5);
}

fn is_empty(vm: &TestVm, path: &str) -> bool {
    run(vm, &format!("[ -s {path} ] || echo empty")) == "empty"
}

fn rounds(vm: &TestVm, what: &str) -> usize {
    run(vm, &format!("cat /tmp/{what} 2>/dev/null | wc -l")).parse().unwrap()
}

/// The host adds a file while nobody looks: nothing that the guest knew is another, and `strict` goes on.
fn only_more(dir: &Path, other: &Path, cycle: u32) -> TestVm {
    fs::write(other.join(format!("more-{cycle}")), "more\n").unwrap();
    let strict = ["fs:work=policy=strict", "fs:other=policy=strict"];
    restore(dir, &["--override", strict[0], "--override", strict[1]])
}

/// The host moves a file that the guest knows, and removes one: `strict` refuses, and names
/// one of those that were moved or removed since the guest has looked.
fn with_changes(store: &Place, dir: &Path, other: &Path, cycle: u32) -> TestVm {
    let named = |name: &str| other.join(format!("{name}-{cycle}"));
    fs::rename(named("moved"), named("elsewhere")).unwrap();
    fs::remove_file(named("doomed")).unwrap();
    let call = store.call(["restore", "--trust-paths", "--api-socket"]);
    let call = call.arguments([store.given_path("api")]).arguments(["--override"]);
    let ended = call.arguments(["fs:other=policy=strict"]).arguments([dir]).end();
    ended.output(125);
    let named = ended.stderr.contains("share \"other\"") && ended.stderr.contains("\" has changed");
    assert!(named, "{ended:?}");
    restore(dir, &[])
}
