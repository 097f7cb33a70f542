//! Hot pages: recorded after a restore, prefetched by the next ones.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

use harness::counter::{COUNT, goes_on, may_skip};
use harness::{Running, eventually, image};
use hypervisor::api::Info;
use hypervisor::api::MemoryMethod::Mapping;
use hypervisor::snapshot::HOT_PAGES;
use hypervisor::snapshot::hot::HotSet;
use hypervisor::snapshot::load;
use hypervisor::snapshot::pages::PageSet;
use hypervisor::snapshot::prefetch::{PrefetchInfo, PrefetchState};

use crate::guest::{Guests, MEMORY, differing_pages, text};

const PAGE: u64 = 4096;

/// Writes to each page of 4 MiB at 16 MiB, then counts and never comes back to them.
#[rustfmt::skip]
const FILL: &[u8] = &[
    0xbf, 0x00, 0x00, 0x00, 0x01,       // mov edi,0x1000000
    // next:
    0x89, 0x3f,                         // mov DWORD PTR [rdi],edi
    0x81, 0xc7, 0x00, 0x10, 0x00, 0x00, // add edi,0x1000
    0x81, 0xff, 0x00, 0x00, 0x40, 0x01, // cmp edi,0x1400000
    0x72, 0xf0,                         // jb next
];

/// The pages that the guest has filled.
const FILLED: std::ops::Range<u64> = 4096..5120;
/// The page that it counts in, and the one with the id of the generation.
const ITS_OWN: [u64; 2] = [0x20_0000, 0xf_f000];

/// A snapshot of a guest that has filled pages.
fn filled(guests: &Guests, memory: &str) -> std::path::PathBuf {
    let original = guests.start_of(&[FILL, COUNT].concat(), memory, &[]);
    let dir = guests.dir("filled");
    guests.save("api", &dir, &[]);
    guests.end("api", original);
    dir
}

/// Makes these pages the hot ones of a snapshot.
fn make_hot(dir: &Path, pages: std::ops::Range<u64>) {
    let manifest = load::manifest(dir).unwrap();
    let mut set = PageSet::none(manifest.memory_bytes);
    set.insert(pages);
    HotSet::of(manifest.id, manifest.memory_bytes, &set).write(&dir.join(HOT_PAGES)).unwrap();
}

fn info(guests: &Guests, api: &str) -> PrefetchInfo {
    let info: Info = serde_json::from_str(&guests.ask(&["info", api]).output(0)).unwrap();
    info.prefetch.unwrap()
}

/// Waits until all is prefetched; what is told of it then.
fn over(guests: &Guests, api: &str) -> PrefetchInfo {
    eventually("all is prefetched", || info(guests, api).state == PrefetchState::Over);
    info(guests, api)
}

/// Entries of the page map of a VM for pages of its memory, all of which is one mapping of 64 MiB.
fn page_map(running: &Running, pages: std::ops::Range<u64>) -> Vec<u64> {
    let process = format!("/proc/{}", running.pid());
    let maps = fs::read_to_string(format!("{process}/maps")).unwrap();
    // Heaps of threads are as large, before they may be written to.
    let ranges = maps.lines().filter(|line| line.contains(" rw-p ")).map(|line| {
        let (start, end) = line.split(' ').next().unwrap().split_once('-').unwrap();
        [start, end].map(|address| u64::from_str_radix(address, 16).unwrap())
    });
    let [start, _] = ranges.into_iter().find(|[start, end]| end - start == 64 << 20).unwrap();
    let map = File::open(format!("{process}/pagemap")).unwrap();
    let entry = |page: u64| {
        let mut entry = [0; 8];
        map.read_exact_at(&mut entry, (start / PAGE + page) * 8).unwrap();
        u64::from_le_bytes(entry)
    };
    pages.map(entry).collect()
}

const PRESENT: u64 = 1 << 63;
const OF_FILE: u64 = 1 << 61;

#[test]
fn the_pages_that_a_guest_has_touched_are_recorded_and_few_others() {
    if may_skip() {
        return;
    }
    let guests = Guests::new();
    let original = guests.start(&[]);
    let dir = guests.dir("base");
    guests.save("api", &dir, &[]);
    guests.end("api", original);
    for mode in ["private", "uffd"] {
        let copy = guests.restore(&dir, "copy", &["--resume", "--memory-mode", mode]);
        // By then it has been at each of its pages.
        eventually("it counts on", || copy.stderr.so_far().len() > 600);
        let told = guests.place.call(["snapshot", "hot", "--api-socket", "copy"]).end().output(0);
        assert!(told.contains("hot pages") && told.contains("base/hot-pages"), "{told}");
        let manifest = load::manifest(&dir).unwrap();
        let set = HotSet::in_folder(&dir, &manifest).unwrap().unwrap();
        let has = |page: u64| set.runs.iter().any(|run| run.contains(&page));
        // At 4 MiB, and at 4 GiB, which is 3 GiB of RAM.
        let above = (3 << 30) / PAGE;
        let written = (1024..1536).chain(above..above + 512).chain([512]);
        assert!(written.clone().all(has), "{mode}: {:x?}", set.runs);
        let others = set.pages() - written.count() as u64;
        assert!(others < 32 * 16, "{mode}: {others} others, {:x?}", set.runs);
        guests.end("copy", copy);
    }
    assert_eq!(MEMORY, "3200M", "most of which is not hot");
}

#[test]
fn hot_pages_are_there_although_the_guest_does_not_touch_them() {
    if may_skip() {
        return;
    }
    let guests = Guests::new();
    let dir = filled(&guests, "64M");
    make_hot(&dir, FILLED);
    for (mode, of_file) in [("private", OF_FILE), ("uffd", 0)] {
        let without = guests.restore(&dir, "copy", &["--resume", "--memory-mode", mode]);
        goes_on(&without);
        assert!(page_map(&without, FILLED).iter().all(|entry| entry & PRESENT == 0));
        guests.end("copy", without);
        let options = ["--resume", "--memory-mode", mode, "--prefetch"];
        let copy = guests.restore(&dir, "copy", &options);
        let told = over(&guests, "copy");
        assert_eq!(
            (told.pages, told.planned_pages, told.left_out_pages),
            (1024, 1024, 0),
            "{mode}"
        );
        // In a mapping they are still the file's.
        let there = PRESENT | of_file;
        let entries = page_map(&copy, FILLED);
        assert!(entries.iter().all(|entry| entry & (PRESENT | OF_FILE) == there), "{mode}");
        goes_on(&copy);
        let metrics = guests.ask(&["metrics", "copy"]).output(0);
        assert!(
            metrics.contains("cubevmm_prefetch_pages_total{memory=\"prefetch\"} 1024"),
            "{metrics}"
        );
        guests.end("copy", copy);
    }
}

#[test]
fn memory_is_the_same_and_differences_are_small_after_a_prefetch() {
    if may_skip() {
        return;
    }
    let guests = Guests::new();
    let dir = filled(&guests, "64M");
    make_hot(&dir, 0..(64 << 20) / PAGE);
    for mode in ["private", "uffd"] {
        let options = ["--resume", "--memory-mode", mode, "--prefetch"];
        let copy = guests.restore(&dir, "copy", &options);
        over(&guests, "copy");
        let [difference, whole] = ["difference", "whole"].map(|name| format!("{mode}.{name}"));
        let [difference, whole] = [difference, whole].map(|name| guests.dir(&name));
        if mode == "private" {
            // Only what was written to is the VM's own.
            guests.save_difference("copy", &difference, &dir, Mapping);
            let pages = fs::metadata(difference.join("pages")).unwrap().len() / PAGE;
            assert!((1..16).contains(&pages), "{pages} pages");
        }
        guests.save("copy", &whole, &["--keep-paused"]);
        let differing = differing_pages(&dir, &whole);
        assert!(differing.iter().all(|page| ITS_OWN.contains(page)), "{mode}: {differing:x?}");
        assert!(!whole.join(HOT_PAGES).exists());
        guests.end("copy", copy);
    }
}

#[test]
fn a_limit_is_kept() {
    if may_skip() {
        return;
    }
    let guests = Guests::new();
    let dir = filled(&guests, "64M");
    make_hot(&dir, FILLED);
    for mode in ["private", "uffd"] {
        let limit = ["--prefetch-limit", "1M", "--prefetch", "--resume"];
        let options = [&["--memory-mode", mode], &limit[..]].concat();
        let copy = guests.restore(&dir, "copy", &options);
        let told = over(&guests, "copy");
        assert_eq!(
            (told.pages, told.planned_pages, told.left_out_pages),
            (256, 256, 768),
            "{mode}"
        );
        let there = page_map(&copy, FILLED).iter().filter(|entry| *entry & PRESENT != 0).count();
        // The kernel may map some that it has read.
        assert!((256..300).contains(&there), "{mode}: {there}");
        guests.end("copy", copy);
    }
}

#[test]
fn nothing_comes_in_before_the_guest_runs_nor_after_a_snapshot() {
    if may_skip() {
        return;
    }
    let guests = Guests::new();
    let dir = filled(&guests, "64M");
    make_hot(&dir, FILLED);
    for mode in ["private", "uffd"] {
        let copy = guests.restore(&dir, "copy", &["--memory-mode", mode, "--prefetch"]);
        assert_eq!(info(&guests, "copy").state, PrefetchState::Waiting);
        assert!(page_map(&copy, FILLED).iter().all(|entry| entry & PRESENT == 0), "{mode}");
        guests.save("copy", &guests.dir(mode), &[]);
        guests.ask(&["resume", "copy"]).output(0);
        goes_on(&copy);
        let told = info(&guests, "copy");
        assert_eq!((told.state, told.pages), (PrefetchState::Cancelled, 0), "{mode}");
        guests.end("copy", copy);
    }
}

/// Its pages are all zeros, so that it needs no memory; there are so many that it takes a while.
#[test]
fn a_prefetch_ends_with_its_vm_and_when_the_host_wants_memory() {
    if may_skip() {
        return;
    }
    let guests = Guests::new();
    let dir = filled(&guests, "16G");
    make_hot(&dir, 0..(16 << 30) / PAGE);
    let options = ["--resume", "--memory-mode", "uffd", "--prefetch", "--prefetch-limit", "16G"];
    let copy = guests.restore(&dir, "copy", &options);
    guests.ask(&["balloon", "copy", "32M"]).output(0);
    let told = info(&guests, "copy");
    assert_eq!(told.state, PrefetchState::Cancelled, "{told:?}");
    assert!(told.pages < told.planned_pages, "{told:?}");
    goes_on(&copy);
    // The most that may have been under way is there by now.
    let told = info(&guests, "copy");
    goes_on(&copy);
    assert_eq!(info(&guests, "copy"), told);
    guests.end("copy", copy);
    let copy = guests.restore(&dir, "copy", &options);
    assert_eq!(info(&guests, "copy").state, PrefetchState::Running);
    guests.end("copy", copy);
}

#[test]
fn who_cannot_tell_what_was_touched_says_so() {
    if may_skip() {
        return;
    }
    let guests = Guests::new();
    let original = guests.start_of(&[FILL, COUNT].concat(), "64M", &[]);
    let dir = guests.dir("filled");
    let refused = |api: &str, words: &[&str]| {
        guests.place.call(["snapshot", "hot", "--api-socket", api]).end().assert_refused(words);
    };
    refused("api", &["booted, not restored", "take one, restore it"]);
    guests.save("api", &dir, &[]);
    guests.end("api", original);
    make_hot(&dir, FILLED);
    for (options, words) in [
        (&["--memory-mode", "prefault"][..], ["--memory-mode prefault", "restore with private"]),
        (&["--prefetch"], ["--prefetch", "restore without"]),
    ] {
        let copy = guests.restore(&dir, "copy", options);
        refused("copy", &words);
        guests.end("copy", copy);
    }
    let copy = guests.restore(&dir, "copy", &[]);
    guests.save("copy", &guests.dir("again"), &[]);
    refused("copy", &["memory has been read for a snapshot", "restore again"]);
    guests.end("copy", copy);
    let copy = guests.restore(&dir, "copy", &["--resume"]);
    goes_on(&copy);
    fs::rename(&dir, guests.dir("elsewhere")).unwrap();
    refused("copy", &["is gone", "--to FILE"]);
    fs::rename(guests.dir("again"), &dir).unwrap();
    refused("copy", &["another snapshot", "--to FILE"]);
    let file = guests.dir("set");
    let words = ["snapshot", "hot", "--api-socket", "copy", "--json", "--to", text(&file)];
    let told = guests.place.call(words).end().output(0);
    let told: serde_json::Value = serde_json::from_str(&told).unwrap();
    assert_eq!(told["path"], text(&file));
    guests.end("copy", copy);
    let given = format!("--prefetch={}", text(&file));
    guests
        .place
        .call(["restore", text(&dir), "--api-socket", "copy", &given])
        .end()
        .assert_refused(&["has the hot pages of snapshot", "record its own"]);
    let copy = guests.restore(&guests.dir("elsewhere"), "copy", &[&given, "--resume"]);
    assert!((1..=told["pages"].as_u64().unwrap()).contains(&over(&guests, "copy").pages));
    guests.end("copy", copy);
}

#[test]
fn files_that_are_no_hot_pages_are_refused_before_kvm_is_opened() {
    if may_skip() {
        return;
    }
    let guests = Guests::new();
    let dir = filled(&guests, "64M");
    let no_kvm = guests.place.given_folder("dev");
    let refused = |options: &[&str], words: &[&str]| {
        let call = guests.place.call(["restore", text(&dir), "--api-socket", "copy"]);
        call.arguments(options).with_dev(&no_kvm, None).end().assert_refused(words);
    };
    let file = dir.join(HOT_PAGES);
    let path = text(&file);
    refused(&["--prefetch"], &[path, "does not exist", "cube-vmm snapshot hot --api-socket S"]);
    make_hot(&dir, FILLED);
    let good = fs::read(&file).unwrap();
    let uffd = ["--prefetch", "--memory-mode", "uffd", "--uffd-socket", "/nobody"];
    refused(&["--prefetch", "--memory-mode", "prefault"], &["prefault", "leave one of them out"]);
    refused(&uffd, &["--uffd-socket", "leave one of them out"]);
    for (content, why) in [
        (&good[..good.len() - 1], "damaged"),
        (&[&good[..70], b"x", &good[71..]].concat(), "damaged"),
        (b"", "not a list of hot pages"),
        (&vec![0; 1 << 20], "at most"),
    ] {
        fs::write(&file, content).unwrap();
        refused(&["--prefetch"], &[path, why]);
    }
    let told = guests.snapshot(&["info", text(&dir)]).output(0);
    assert!(told.contains("hot       cannot be used: "), "{told}");
    guests.snapshot(&["verify", text(&dir)]).assert_refused(&[path, "at most"]);
    fs::remove_file(&file).unwrap();
    image::host("mkfifo", &[path]);
    refused(&["--prefetch"], &[path, "not a regular file"]);
    fs::remove_file(&file).unwrap();
    std::os::unix::fs::symlink(dir.join("memory"), &file).unwrap();
    refused(&["--prefetch"], &[path, "not a regular file"]);
    fs::remove_file(&file).unwrap();
    fs::write(&file, good).unwrap();
    for bad in ["0M", "1", "many"] {
        let words = ["restore", "x", "--api-socket", "copy", "--prefetch", "--prefetch-limit", bad];
        guests.place.call(words).end().assert_usage(&["--prefetch-limit", "64M"]);
    }
    guests
        .place
        .call(["restore", "x", "--api-socket", "a", "--prefetch-limit", "1M"])
        .end()
        .assert_usage(&["--prefetch"]);
}

#[test]
fn a_snapshot_tells_of_its_hot_pages_and_does_not_pass_them_on() {
    if may_skip() {
        return;
    }
    let guests = Guests::new();
    let dir = filled(&guests, "64M");
    let info = |words: &[&str]| guests.snapshot(&[&["info", text(&dir)], words].concat()).output(0);
    assert!(!info(&[]).contains("\nhot ") && !info(&["--json"]).contains("\"hot\""));
    make_hot(&dir, FILLED);
    assert!(info(&[]).contains("\nhot       1024 pages, 4.0 MiB, for restore --prefetch\n"));
    let told: serde_json::Value = serde_json::from_str(&info(&["--json"])).unwrap();
    assert_eq!((&told["hot"]["pages"], &told["hot"]["bytes"]), (&1024.into(), &(4 << 20).into()));
    guests.snapshot(&["verify", text(&dir)]).output(0);
    let copy = guests.restore(&dir, "copy", &["--resume"]);
    let [difference, out] = ["difference", "out"].map(|name| guests.dir(name));
    guests.save("copy", &difference, &["--diff-of", text(&dir)]);
    guests.end("copy", copy);
    guests.snapshot(&["merge", text(&dir), text(&difference), text(&out)]).output(0);
    assert!(dir.join(HOT_PAGES).exists());
    assert!(!difference.join(HOT_PAGES).exists() && !out.join(HOT_PAGES).exists());
}
