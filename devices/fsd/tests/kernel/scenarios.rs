//! What a kernel and its programs notice of a restore.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, chown};

use cube_fsd::share::{Cache, Policy, Settings};

use crate::helper::{Helper, range};
use crate::mounted::Mounted;

const LOOKUP: u32 = 1;

type Test = (&'static str, fn());

pub fn all() -> Vec<Test> {
    vec![
        ("b1_what_the_kernel_knows_it_does_not_ask_again", b1_known),
        ("b2_an_open_file_goes_on_where_it_was", b2_open_file),
        ("d4_i1_a_kernel_heals_itself_and_never_sees_the_wrong_file", d4_i1_heals),
        ("f1_a_directory_that_is_half_read_is_read_to_its_end", f1_directory),
        ("k1_locks_are_held_until_their_file_is_closed", k1_locks),
        ("l1_l2_mappings_keep_what_was_read_and_fail_for_the_rest", l2_mappings),
        ("s3_ids_of_a_guest_are_others_on_the_host_before_and_after", s3_ids),
        ("m1_m5_what_was_not_written_yet_is_written_after_a_restore", m5_write_back),
    ]
}

fn b1_known() {
    let mounted = Mounted::new(Settings { cache: Cache::Always, ..Settings::default() });
    fs::create_dir_all(mounted.share().join("a/b/c")).unwrap();
    fs::write(mounted.share().join("a/b/c/f"), "f").unwrap();
    let paths = ["a", "a/b", "a/b/c", "a/b/c/f"].map(|path| mounted.at(path));
    let seen = || paths.clone().map(|path| fs::metadata(path).unwrap().ino());
    let before = seen();
    let report = mounted.restored(|| ());
    assert_eq!((report.restored, report.stale_total), (5, 0));
    let asked = mounted.asked(LOOKUP);
    assert_eq!((seen(), mounted.asked(LOOKUP)), (before, asked));
}

fn b2_open_file() {
    let mounted = Mounted::new(Settings::default());
    let mut file = OpenOptions::new().create_new(true).write(true).open(mounted.at("f")).unwrap();
    file.write_all(&[1; 4096]).unwrap();
    let mut gone = OpenOptions::new();
    let gone = gone.create_new(true).read(true).write(true).open(mounted.at("gone"));
    let mut gone = gone.unwrap();
    gone.write_all(b"content").unwrap();
    fs::remove_file(mounted.at("gone")).unwrap();
    let report = mounted.restored(|| assert!(!mounted.share().join("gone").exists()));
    assert_eq!((report.handles, report.orphans_restored), (2, 1));
    assert_eq!(file.stream_position().unwrap(), 4096);
    file.write_all(&[2; 4096]).unwrap();
    assert_eq!(fs::read(mounted.share().join("f")).unwrap(), [[1; 4096], [2; 4096]].concat());
    let mut content = String::new();
    gone.rewind().unwrap();
    gone.read_to_string(&mut content).unwrap();
    assert_eq!((content.as_str(), gone.metadata().unwrap().nlink()), ("content", 0));
}

fn d4_i1_heals() {
    let mounted = Mounted::new(Settings { cache: Cache::Always, ..Settings::default() });
    for (folder, text) in [(mounted.share(), "one"), (mounted.other(), "other")] {
        fs::write(folder.join("common"), text).unwrap();
        fs::write(folder.join("replaced"), text).unwrap();
    }
    let open = |name: &str| File::open(mounted.at(name)).unwrap();
    let (replaced, common) = (open("replaced"), open("common"));
    mounted.restored(|| {
        fs::write(mounted.share().join("new"), "new").unwrap();
        fs::rename(mounted.share().join("new"), mounted.share().join("replaced")).unwrap();
    });
    let stale = |file: &File| file.read_at(&mut [0; 8], 0).unwrap_err().raw_os_error();
    assert_eq!(stale(&replaced), Some(libc::ESTALE));
    assert_eq!(fs::read_to_string(mounted.at("replaced")).unwrap(), "new");
    mounted.restored_on(&mounted.other(), Policy::Remap, || ());
    assert_eq!(stale(&common), Some(libc::ESTALE));
    for name in ["common", "replaced"] {
        assert_eq!(fs::read_to_string(mounted.at(name)).unwrap(), "other");
    }
}

fn f1_directory() {
    let mounted = Mounted::new(Settings::default());
    for n in 0..500 {
        fs::write(mounted.share().join(n.to_string()), "").unwrap();
    }
    let mut listing = fs::read_dir(mounted.at("")).unwrap();
    let mut names: Vec<_> =
        listing.by_ref().take(128).map(|entry| entry.unwrap().file_name()).collect();
    mounted.restored(|| ());
    names.extend(listing.map(|entry| entry.unwrap().file_name()));
    names.sort();
    names.dedup();
    assert_eq!(names.len(), 500);
}

fn k1_locks() {
    let mounted = Mounted::new(Settings::default());
    fs::write(mounted.share().join("f"), [0; 100]).unwrap();
    let mut holder = Helper::start("lock", &mounted.at("f"));
    assert_eq!(holder.says(), "locked");
    let file = OpenOptions::new().read(true).write(true).open(mounted.at("f")).unwrap();
    let owner = || {
        let mut asked = range();
        // SAFETY: an open descriptor, and a description that outlives the call.
        assert_eq!(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETLK, &mut asked) }, 0);
        (asked.l_type != libc::F_UNLCK as i16).then_some((
            asked.l_pid as u32,
            asked.l_start,
            asked.l_len,
        ))
    };
    // SAFETY: an open descriptor.
    let taken = || unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } == 0;
    let held = Some((holder.pid(), 10, 10));
    assert_eq!((owner(), taken()), (held, false));
    mounted.restored(|| ());
    assert_eq!((owner(), taken()), (held, false));
    assert_eq!(holder.goes_on(), "closed");
    assert_eq!((owner(), taken()), (None, true));
}

fn l2_mappings() {
    let mounted = Mounted::new(Settings::default());
    for name in ["kept", "replaced"] {
        fs::write(mounted.share().join(name), [[7; 4096], [8; 4096]].concat()).unwrap();
    }
    let mut kept = Helper::start("map", &mounted.at("kept"));
    let mut replaced = Helper::start("map", &mounted.at("replaced"));
    assert_eq!((kept.says(), replaced.says()), ("7".into(), "7".into()));
    mounted.restored(|| {
        fs::write(mounted.share().join("new"), [[5; 4096], [6; 4096]].concat()).unwrap();
        fs::rename(mounted.share().join("new"), mounted.share().join("replaced")).unwrap();
    });
    assert_eq!((kept.goes_on(), replaced.goes_on()), ("7".into(), "7".into()));
    // The page that was not read: of the same file, or SIGBUS, and never the other's.
    assert_eq!((kept.goes_on(), replaced.goes_on()), ("8".into(), String::new()));
    assert_eq!(fs::read(mounted.at("replaced")).unwrap()[0], 5);
}

fn m5_write_back() {
    let writeback = Settings { writeback: true, cache: Cache::Always, ..Settings::default() };
    let mounted = Mounted::new(writeback);
    fs::write(mounted.share().join("f"), [b'.'; 8192]).unwrap();
    // Only for writing: the kernel reads the rest of the page for itself.
    let file = OpenOptions::new().write(true).open(mounted.at("f")).unwrap();
    file.write_at(b"early", 100).unwrap();
    let mut appending = OpenOptions::new();
    let appending = appending.create_new(true).append(true).open(mounted.at("log"));
    let mut appending = appending.unwrap();
    appending.write_all(b"one").unwrap();
    mounted.restored(|| {
        // It is still in the kernel's memory, and so in a guest's snapshot.
        assert_eq!(fs::read(mounted.share().join("f")).unwrap(), [b'.'; 8192]);
    });
    file.write_at(b"late", 5000).unwrap();
    appending.write_all(b" two").unwrap();
    file.sync_all().unwrap();
    appending.sync_all().unwrap();
    let mut expected = [b'.'; 8192];
    expected[100..105].copy_from_slice(b"early");
    expected[5000..5004].copy_from_slice(b"late");
    assert!(fs::read(mounted.share().join("f")).unwrap() == expected);
    assert_eq!(fs::read(mounted.share().join("log")).unwrap(), b"one two");
}

fn s3_ids() {
    let map = || "0:100000:1000".parse().ok();
    let settings = Settings { uid_map: map(), gid_map: map(), ..Settings::default() };
    let mounted = Mounted::new(settings);
    chown(mounted.share(), Some(100_000), Some(100_000)).unwrap();
    fs::write(mounted.share().join("foreign"), "").unwrap();
    fs::write(mounted.at("f"), "x").unwrap();
    chown(mounted.at("f"), Some(7), Some(8)).unwrap();
    fs::create_dir(mounted.at("d")).unwrap();
    let owner = |path: &std::path::Path| {
        let seen = fs::metadata(path).unwrap();
        (seen.uid(), seen.gid())
    };
    let all = || {
        let names = ["f", "d", "foreign"];
        names.map(|name| (owner(&mounted.at(name)), owner(&mounted.share().join(name))))
    };
    let nobody = (65_534, 65_534);
    let expected = [((7, 8), (100_007, 100_008)), ((0, 0), (100_000, 100_000)), (nobody, (0, 0))];
    assert_eq!(all(), expected);
    let refused = chown(mounted.at("f"), Some(1000), None).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::EPERM));
    mounted.restored(|| ());
    assert_eq!(all(), expected);
    chown(mounted.at("d"), Some(9), None).unwrap();
    assert_eq!(owner(&mounted.share().join("d")), (100_009, 100_000));
}
