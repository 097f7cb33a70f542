//! Disks of the same instant as memory, and clones that never see each other's writes.

use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt};

use harness::counter::{Counter, follows, goes_on, may_skip};
use harness::filesystem::{Filesystem, share_blocks};

use crate::guest::{Guests, text};

/// Bytes of a disk.
const DISK: usize = 8 << 20;

/// The file that a VM has as its disk, which may have no name.
fn own_disk(guests: &Guests, api: &str, pid: u32) -> fs::File {
    let info = guests.ask(&["info", api]).output(0);
    let info: serde_json::Value = serde_json::from_str(&info).unwrap();
    let path = info["config"]["disks"][0]["path"].as_str().unwrap();
    let path = path.replace("/proc/self", &format!("/proc/{pid}"));
    fs::File::options().read(true).write(true).open(path).unwrap()
}

fn first_byte(file: &fs::File) -> u8 {
    let mut byte = [0];
    file.read_exact_at(&mut byte, 0).unwrap();
    byte[0]
}

#[test]
fn clones_share_blocks_and_never_see_each_others_writes() {
    if may_skip() {
        return;
    }
    let guests = Guests::new();
    let xfs = Filesystem::xfs(&guests.place, "xfs");
    let (disk, base) = (xfs.join("disk.img"), xfs.join("base"));
    fs::write(&disk, vec![7; DISK]).unwrap();
    let original = guests.start(&["--disk", &format!("path={},id=data", text(&disk))]);
    let report = guests.save("api", &base, &[]);
    assert!(report.disks[0].shared, "{report:?}");
    let copy = base.join("disk-data");
    assert!(share_blocks(&disk, &copy));
    // The instant is over: what the original writes now is not in it.
    fs::File::options().write(true).open(&disk).unwrap().write_all_at(&[8], 0).unwrap();

    let own = xfs.join("own");
    fs::create_dir(&own).unwrap();
    let unnamed = ["one", "two"].map(|api| guests.restore(&base, api, &["--resume"]));
    let named = guests.restore(&base, "three", &["--resume", "--disk-dir", text(&own)]);
    assert!(share_blocks(&copy, &own.join("disk-data")));
    let [one, two] = &unnamed;
    let apis = [("one", one.pid()), ("two", two.pid()), ("three", named.pid())];
    let files = apis.map(|(api, pid)| own_disk(&guests, api, pid));
    for (file, pattern) in files.iter().zip(10_u8..) {
        assert_eq!(first_byte(file), 7);
        file.write_all_at(&vec![pattern; DISK], 0).unwrap();
    }
    for (file, pattern) in files.iter().zip(10_u8..) {
        assert_eq!(first_byte(file), pattern);
    }
    assert_eq!(fs::read(&copy).unwrap(), vec![7; DISK]);
    for running in unnamed.iter().chain([&named, &original]) {
        goes_on(running);
    }
    let again = guests.place.call(["restore", text(&base), "--api-socket", "four"]);
    again.arguments(["--disk-dir", text(&own)]).end().assert_refused(&["disk-data", "exists"]);
    for (api, running) in ["one", "two"].into_iter().zip(unnamed) {
        guests.end(api, running);
    }
    guests.end("three", named);
    guests.end("api", original);
    // Only that of the VM that wanted one stays.
    assert_eq!(fs::read(own.join("disk-data")).unwrap()[0], 12);
    assert_eq!(fs::read_dir(&base).unwrap().count(), 5);
}

#[test]
fn without_shared_blocks_a_disk_is_copied_without_its_holes_and_that_is_told() {
    if may_skip() {
        return;
    }
    let guests = Guests::new();
    let xfs = Filesystem::xfs(&guests.place, "xfs");
    let disk = guests.place.given("disk.img", "");
    let file = fs::File::options().write(true).open(&disk).unwrap();
    file.set_len(2 << 30).unwrap();
    file.write_all_at(&vec![7; DISK], 1 << 30).unwrap();
    let original = guests.start(&["--disk", &format!("path={disk},id=data")]);
    let base = xfs.join("base");
    let told = guests.ask(&["snapshot", "api", text(&base)]).output(0);
    assert!(told.contains("disk data") && told.contains("was copied"), "{told}");
    let copy = fs::File::open(base.join("disk-data")).unwrap();
    let metadata = copy.metadata().unwrap();
    assert_eq!(metadata.len(), 2 << 30);
    assert!(metadata.blocks() * 512 < 2 * DISK as u64, "{} blocks", metadata.blocks());
    let mut read = vec![0; DISK];
    copy.read_exact_at(&mut read, 1 << 30).unwrap();
    assert!(read == vec![7; DISK]);
    guests.end("api", original);
}

#[test]
fn a_copy_goes_where_it_is_told_or_nowhere() {
    if may_skip() {
        return;
    }
    let guests = Guests::new();
    let disks = ["a", "b", "c"].map(|name| guests.place.given(name, vec![7; DISK]));
    let options = disks.each_ref().map(|disk| {
        let ro = if disk.ends_with('c') { ",ro" } else { "" };
        format!("path={disk},id={}{ro}", &disk[disk.len() - 1..])
    });
    let [a, b, c] = options.each_ref().map(String::as_str);
    let original = guests.start(&["--disk", a, "--disk", b, "--disk", c]);
    let (base, elsewhere) = (guests.dir("base"), guests.dir("elsewhere"));
    let place = format!("a={}", text(&elsewhere));
    let report = guests.save("api", &base, &["--disk-clone", &place, "--disk-clone", "b=none"]);
    let copied: Vec<_> = report.disks.iter().map(|disk| disk.path.clone()).collect();
    assert_eq!(copied, std::slice::from_ref(&elsewhere));
    assert_eq!(fs::read(&elsewhere).unwrap(), vec![7; DISK]);
    assert!(!base.join("disk-b").exists());

    // What fails afterwards takes the copies with it.
    let more = guests.dir("more");
    let place = format!("a={}", text(&more));
    let taken = format!("b={}", text(&elsewhere));
    let two = guests.dir("two");
    let words = ["snapshot", "api", text(&two), "--disk-clone", &place];
    let refused = |words: &[&str], why: &[&str]| {
        guests.ask(words).assert_refused(why);
        assert!(!more.exists() && !two.exists());
        goes_on(&original);
    };
    refused(&[&words[..], &["--disk-clone", &taken]].concat(), &["exists"]);
    refused(&[&words[..], &["--disk-clone", "none=none"]].concat(), &["no disk called \"none\""]);
    refused(&[&words[..], &["--disk-clone", "b"]].concat(), &["ID=FILE"]);
    guests.end("api", original);
}

#[test]
fn a_disk_in_the_place_of_a_copied_one_has_its_size() {
    if may_skip() {
        return;
    }
    let counter = Counter::new();
    let original = counter.start("mmio");
    counter.ask(&["snapshot", "api", counter.dir(), "--keep-paused"]).output(0);
    let last = follows('a', &counter.end("api", original));
    for (name, bytes) in [("smaller", 4096), ("larger", (1 << 20) + 512)] {
        let other = format!("disk:data={}", counter.place.given(name, vec![7; bytes]));
        let refused = counter.restore("copy", &["--override", &other]).end();
        let found = format!("has {bytes} bytes");
        refused.assert_refused(&["\"data\"", name, &found, "had 1048576"]);
    }
    let other = format!("disk:data={}", counter.place.given("other", vec![7; 1 << 20]));
    let copy = counter.restore("copy", &["--resume", "--override", &other]);
    goes_on(&copy);
    follows(last, &counter.end("copy", copy));
}
