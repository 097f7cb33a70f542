//! Directories of the host in a guest, and through snapshots.

#[path = "shares/at_work.rs"]
mod at_work;
#[path = "shares/copies.rs"]
mod copies;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use harness::{Place, TestVm, eventually, sh};
use hypervisor::api::{Reply, Request};
use libtest_mimic::Trial;

pub fn trials() -> Vec<Trial> {
    harness::trials![
        two_directories_are_read_and_written_and_one_only_read,
        b2_c1_d4_open_files_directories_and_mounts_survive_a_snapshot,
        i1_another_directory_takes_the_place_of_a_share,
        a_restore_that_is_refused_says_why_and_leaves_nothing,
    ]
    .into_iter()
    .chain(at_work::trials())
    .chain(copies::trials())
    .collect()
}

/// A folder of the host to be shared.
fn folder(place: &Place, name: &str) -> PathBuf {
    let path = place.given_path(name);
    fs::create_dir(&path).unwrap();
    path
}

fn share(tag: &str, path: &Path, more: &str) -> String {
    format!("tag={tag},path={}{more}", path.display())
}

/// Runs a line in the guest that must succeed, and gives what it prints.
fn run(vm: &TestVm, line: &str) -> String {
    vm.exec(sh(line)).text()
}

/// What a line prints that fails, on its standard error.
fn failure(vm: &TestVm, line: &str) -> String {
    let output = vm.exec(sh(line));
    assert!(!output.status.success(), "{line}: {output:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn save(vm: &TestVm, dir: &Path) {
    vm.cli("snapshot", &[dir.to_str().unwrap(), "--keep-paused"]).end().output(0);
}

/// Goes on from a snapshot, with what it names.
fn restore(dir: &Path, options: &[&str]) -> TestVm {
    TestVm::restore(dir, &[&["--trust-paths"], options].concat())
}

fn two_directories_are_read_and_written_and_one_only_read() {
    let store = Place::new();
    let (work, data) = (folder(&store, "work"), folder(&store, "data"));
    fs::write(data.join("f"), "from the host\n").unwrap();
    for transport in ["mmio", "pci"] {
        let vm = TestVm::builder()
            .transport(transport)
            .option("--fs", share("work", &work, ""))
            .option("--fs", share("data", &data, ",ro,cache=always"))
            .boot();
        run(&vm, "mkdir /work /data; mount -t virtiofs work /work; mount -t virtiofs data /data");
        assert_eq!(run(&vm, "cat /data/f"), "from the host");
        let write = "cd /work && mkdir d && echo one >d/a && mv d/a d/b && ln d/b c && \
                     ln -s d/b s && echo two >>s && rm c && cat s && stat -c %i d/b";
        let told = run(&vm, write);
        assert_eq!(fs::read_to_string(work.join("d/b")).unwrap(), "one\ntwo\n");
        let ino = fs::metadata(work.join("d/b")).unwrap().ino();
        assert_eq!(told, format!("one\ntwo\n{ino}"));
        let large =
            "dd if=/dev/urandom of=/work/large bs=1M count=4 2>/dev/null; sha256sum </work/large";
        let sum = run(&vm, large);
        run(&vm, "umount /work && mount -t virtiofs work /work");
        assert_eq!(run(&vm, "sha256sum </work/large"), sum);
        for line in ["echo x >/data/f", "mkdir /data/d", "rm /data/f", "touch /data/new"] {
            assert!(failure(&vm, line).contains("Read-only"), "{line}");
        }
        run(&vm, "rm -r /work/*");
        assert_eq!(fs::read_dir(&work).unwrap().count(), 0);
        forbids_and_allows(&vm, &work, &data);
    }
}

/// The host takes one of two directories away, and gives it back: what is open in it goes on.
fn forbids_and_allows(vm: &TestVm, work: &Path, data: &Path) {
    vm.leave(sh("exec 3>>/work/log; while ! [ -e /tmp/go ]; do sleep 0.1; done; echo on >&3"));
    eventually("the log is open", || work.join("log").exists());
    let allow = |arguments: &[&str]| vm.cli("fs allow", arguments).end();
    let told = allow(&[data.to_str().unwrap()]).output(0);
    let told: Vec<serde_json::Value> = serde_json::from_str(&told).unwrap();
    let allowed: Vec<_> = told.iter().map(|share| &share["allowed"]).collect();
    assert_eq!(allowed, [false, true], "{told:#?}");
    assert!(failure(vm, "echo x >/work/new").contains("Permission denied"));
    assert_eq!(run(vm, "cat /data/f"), "from the host");
    let refused = allow(&["/nonexistent"]);
    refused.output(125);
    assert!(refused.stderr.contains("/nonexistent"), "{refused:?}");
    allow(&["--any"]).output(0);
    run(vm, "echo x >/work/new; touch /tmp/go");
    eventually("what was open goes on", || fs::read(work.join("log")).unwrap() == b"on\n");
    run(vm, "rm /work/*");
}

/// Holds files open, and does what it is told by a pipe.
const HOLDER: &str = r#"mkdir /work; mount -t virtiofs work /work; cd /work; mkdir cwd
echo kept >cwd/kept; echo old >replaced; echo gone >gone; mkfifo /tmp/line; cd cwd
exec 3>>log 4<../gone 5<../replaced; rm ../gone; touch /tmp/ready
while :; do read line </tmp/line; eval "$line" >/tmp/said 2>&1; touch /tmp/done; done"#;

/// Has the one who holds the files do something; what that prints.
fn tell(vm: &TestVm, line: &str) -> String {
    let tell = format!(
        "rm -f /tmp/done; echo '{line}' >/tmp/line; \
         while ! [ -e /tmp/done ]; do sleep 0.1; done; cat /tmp/said"
    );
    run(vm, &tell)
}

fn b2_c1_d4_open_files_directories_and_mounts_survive_a_snapshot() {
    let store = Place::new();
    let (work, dir) = (folder(&store, "work"), store.given_path("snapshot"));
    let vm = TestVm::builder().option("--fs", share("work", &work, ",id=work")).boot();
    vm.leave(sh(HOLDER));
    run(&vm, "while ! [ -e /tmp/ready ]; do sleep 0.1; done");
    tell(&vm, "echo one >&3");
    save(&vm, &dir);
    drop(vm);
    let told = store.call(["snapshot", "info"]).arguments([&dir]).end().output(0);
    assert!(told.contains("work: \"work\" is /") && told.contains("1 without a name"), "{told}");
    assert!(told.contains("open: \"cwd/log\""), "{told}");
    fs::write(work.join("new"), "new\n").unwrap();
    fs::rename(work.join("new"), work.join("replaced")).unwrap();
    let vm = restore(&dir, &[]);
    let Reply::Shares { shares } = vm.request(&Request::Shares {}) else { panic!("no shares") };
    let restored = &shares[0].status.as_ref().unwrap()["restored"];
    assert_eq!(restored["orphans_restored"], 1, "{restored}");
    assert_eq!(restored["stale"][0]["path"], "replaced", "{restored}");
    // The current directory, relative paths and the mount.
    assert_eq!(tell(&vm, "cat kept; pwd"), "kept\n/work/cwd");
    // A file that is open, one that is open and has no name, and one that another has replaced.
    tell(&vm, "echo two >&3");
    assert_eq!(fs::read_to_string(work.join("cwd/log")).unwrap(), "one\ntwo\n");
    assert_eq!(tell(&vm, "cat <&4"), "gone");
    assert!(tell(&vm, "cat <&5").to_lowercase().contains("stale"));
    assert_eq!(run(&vm, "cat /work/replaced"), "new");
    // Its file server dies, and nobody notices but for what was on its way.
    harness::census::kill("cube-fsd", &work);
    tell(&vm, "echo three >&3");
    assert_eq!(fs::read_to_string(work.join("cwd/log")).unwrap(), "one\ntwo\nthree\n");
    assert_eq!(tell(&vm, "cat kept; pwd"), "kept\n/work/cwd");
    let mut names: Vec<_> = fs::read_dir(&work).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["cwd", "replaced"]);
    run(&vm, "echo more >/work/more; rm /work/more");
    let Reply::Shares { shares } = vm.request(&Request::Shares {}) else { panic!("no shares") };
    assert_eq!((shares[0].server_losses, shares[0].server_restarts), (1, 1));
}

fn i1_another_directory_takes_the_place_of_a_share() {
    let store = Place::new();
    let (one, two) = (folder(&store, "one"), folder(&store, "two"));
    for (folder, text) in [(&one, "one\n"), (&two, "two\n")] {
        fs::write(folder.join("common"), text).unwrap();
    }
    fs::write(one.join("only"), "only one\n").unwrap();
    let dir = store.given_path("snapshot");
    let more = ",id=work,cache=always";
    let vm = TestVm::builder().option("--fs", share("work", &one, more)).boot();
    run(&vm, "mkdir /work; mount -t virtiofs work /work; cat /work/common /work/only; sync");
    save(&vm, &dir);
    drop(vm);
    let other = format!("fs:work=path={},policy=remap", two.display());
    let vm = restore(&dir, &["--override", &other]);
    assert_eq!(run(&vm, "cat /work/common"), "two");
    assert!(failure(&vm, "cat /work/only").contains("No such file"));
    run(&vm, "echo written >/work/new");
    assert_eq!(fs::read_to_string(two.join("new")).unwrap(), "written\n");
    assert!(!one.join("new").exists());
}

fn a_restore_that_is_refused_says_why_and_leaves_nothing() {
    let store = Place::new();
    let (one, two) = (folder(&store, "one"), folder(&store, "two"));
    fs::write(one.join("f"), "f").unwrap();
    let dir = store.given_path("snapshot");
    let vm = TestVm::builder().option("--fs", share("work", &one, ",id=work")).boot();
    run(&vm, "mkdir /work; mount -t virtiofs work /work; cat /work/f");
    save(&vm, &dir);
    drop(vm);
    let place = Place::new();
    let refused = |value: String| {
        let call = place.call(["restore", "--trust-paths", "--api-socket", "api", "--override"]);
        let ended = call.arguments([format!("fs:work={value}")]).arguments([&dir]).end();
        ended.output(125);
        ended.stderr
    };
    let other = refused(format!("path={}", two.display()));
    assert!(other.contains("different directory") && other.contains("remap"), "{other}");
    let missing = refused("path=/nonexistent".to_owned());
    assert!(missing.contains("\"work\"") && missing.contains("/nonexistent"), "{missing}");
    let elsewhere = ["--fs-allow", two.to_str().unwrap()];
    let call = place.call(["restore", "--trust-paths", "--api-socket", "api"]);
    let ended = call.arguments(elsewhere).arguments([&dir]).end();
    ended.output(125);
    assert!(ended.stderr.contains("--fs-allow"), "{ended:?}");
    let ended = place.call(["restore", "--api-socket", "api"]).arguments([&dir]).end();
    ended.output(125);
    assert!(ended.stderr.contains("\"work\" is ") && ended.stderr.contains("--trust-paths"));
    fs::remove_file(one.join("f")).unwrap();
    let strict = refused("policy=strict".to_owned());
    assert!(strict.contains("\"f\" has changed"), "{strict}");
}
