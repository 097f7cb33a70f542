//! The directory has changed while nobody served it: what is gone is stale, and never another file.

use std::fs;
use std::path::Path;

use cube_fsd::restore::Report;
use cube_fsd::share::{Cache, Policy, Settings};
use tempfile::tempdir;

use crate::guest::{BOTH, Guest, READ, ROOT};
use crate::local::{Local, mounted, moved, restored};

/// A guest with `d/f` open, which contains "old".
fn with_file(share: &Path) -> (Guest<Local>, u64, u64) {
    fs::create_dir_all(share.join("d")).unwrap();
    fs::write(share.join("d/f"), "old").unwrap();
    let mut guest = mounted(share);
    let node = guest.walk("d/f").unwrap().node;
    let handle = guest.open(node, READ).unwrap();
    (guest, node, handle)
}

fn stale(report: &Report) -> Vec<(&str, &str)> {
    report.stale.iter().map(|one| (one.path.as_str(), one.reason.as_str())).collect()
}

fn refusal(guest: Guest<Local>, path: &Path, policy: Policy) -> String {
    let refused = moved(guest, path, Settings::default(), policy);
    refused.err().expect("it is refused").to_string()
}

/// Old handle and node are stale, and can be given back.
fn is_stale(guest: &mut Guest<Local>, node: u64, handle: u64) {
    assert_eq!(guest.read(node, handle, 0, 9), Err(libc::ESTALE));
    assert_eq!(guest.getattr(node), Err(libc::ESTALE));
    assert_eq!(guest.open(node, READ), Err(libc::ESTALE));
    assert_eq!(guest.flush(node, handle), Ok(()));
    assert_eq!(guest.release(node, handle), Ok(()));
    guest.forget(node, 1);
}

#[test]
fn d1_a_file_that_the_guest_has_moved_is_found_by_its_new_name() {
    let share = tempdir().unwrap();
    let (mut guest, node, handle) = with_file(share.path());
    let other = guest.mkdir(ROOT, "e").unwrap().node;
    let parent = guest.lookup(ROOT, "d").unwrap().node;
    guest.rename((parent, "f"), (other, "g"), 0).unwrap();
    let (mut guest, report) = restored(guest, share.path());
    assert_eq!(report.stale_total, 0);
    assert_eq!(guest.read(node, handle, 0, 9).unwrap(), b"old");
    assert_eq!(guest.walk("e/g").unwrap().node, node);
}

#[test]
fn d2_a_file_that_is_gone_is_stale_and_strict_refuses() {
    let share = tempdir().unwrap();
    let (guest, node, handle) = with_file(share.path());
    fs::remove_file(share.path().join("d/f")).unwrap();
    let (mut guest, report) = restored(guest, share.path());
    assert_eq!(stale(&report), [("d/f", "missing")]);
    is_stale(&mut guest, node, handle);
    assert_eq!(guest.walk("d/f"), Err(libc::ENOENT));
    let (guest, ..) = with_file(share.path());
    fs::remove_file(share.path().join("d/f")).unwrap();
    let refused = refusal(guest, share.path(), Policy::Strict);
    assert!(refused.contains("\"d/f\" has changed (missing)"), "{refused}");
}

#[test]
fn d3_a_directory_that_was_moved_takes_all_that_is_in_it_along() {
    let share = tempdir().unwrap();
    let (mut guest, node, handle) = with_file(share.path());
    let sibling = guest.mkdir(ROOT, "sibling").unwrap().node;
    fs::rename(share.path().join("d"), share.path().join("moved")).unwrap();
    let (mut guest, report) = restored(guest, share.path());
    assert_eq!(stale(&report), [("d", "missing"), ("d/f", "its directory is gone")]);
    assert!(guest.getattr(sibling).is_ok());
    is_stale(&mut guest, node, handle);
    let fresh = guest.walk("moved/f").unwrap().node;
    let handle = guest.open(fresh, READ).unwrap();
    assert_eq!(guest.read(fresh, handle, 0, 9).unwrap(), b"old");
}

#[test]
fn d4_a_file_that_took_anothers_place_is_never_read_through_the_old_handle() {
    let share = tempdir().unwrap();
    let (guest, node, handle) = with_file(share.path());
    fs::write(share.path().join("new"), "new").unwrap();
    fs::rename(share.path().join("new"), share.path().join("d/f")).unwrap();
    let (mut guest, report) = restored(guest, share.path());
    assert_eq!(stale(&report), [("d/f", "replaced")]);
    is_stale(&mut guest, node, handle);
    let fresh = guest.walk("d/f").unwrap().node;
    assert_ne!(fresh, node);
    let handle = guest.open(fresh, READ).unwrap();
    assert_eq!(guest.read(fresh, handle, 0, 9).unwrap(), b"new");
    let (guest, ..) = with_file(share.path());
    fs::write(share.path().join("new"), "new").unwrap();
    fs::rename(share.path().join("new"), share.path().join("d/f")).unwrap();
    assert!(refusal(guest, share.path(), Policy::Strict).contains("replaced"));
}

#[test]
fn d5_a_directory_in_the_place_of_a_file_is_not_that_file() {
    let share = tempdir().unwrap();
    let (guest, node, handle) = with_file(share.path());
    fs::remove_file(share.path().join("d/f")).unwrap();
    fs::create_dir(share.path().join("d/f")).unwrap();
    let (mut guest, report) = restored(guest, share.path());
    assert_eq!(stale(&report), [("d/f", "of another kind")]);
    is_stale(&mut guest, node, handle);
}

#[test]
fn d6_content_that_was_changed_in_place_is_the_new_content() {
    let share = tempdir().unwrap();
    let (guest, node, handle) = with_file(share.path());
    fs::write(share.path().join("d/f"), "in place").unwrap();
    let (mut guest, report) = restored(guest, share.path());
    assert_eq!(report.stale_total, 0);
    assert_eq!(guest.read(node, handle, 0, 9).unwrap(), b"in place");
}

#[test]
fn d7_what_the_host_turns_over_while_it_is_served_can_still_be_saved() {
    let share = tempdir().unwrap();
    fs::create_dir_all(share.path().join("a/b")).unwrap();
    let mut guest = mounted(share.path());
    let (a, b) = (guest.walk("a").unwrap().node, guest.walk("a/b").unwrap().node);
    fs::rename(share.path().join("a/b"), share.path().join("b")).unwrap();
    fs::rename(share.path().join("a"), share.path().join("b/a")).unwrap();
    assert_eq!(guest.lookup(b, "a").unwrap().node, a);
    let (mut guest, _) = restored(guest, share.path());
    let found = guest.walk("b/a").unwrap();
    assert_eq!(found.attr.mode & libc::S_IFMT, libc::S_IFDIR);
    assert_eq!(guest.lookup(ROOT, "a"), Err(libc::ENOENT));
}

#[test]
fn d8_what_is_removed_in_a_directory_that_is_gone_stays_gone() {
    let share = tempdir().unwrap();
    let (guest, ..) = with_file(share.path());
    fs::remove_dir_all(share.path().join("d")).unwrap();
    let (mut guest, report) = restored(guest, share.path());
    assert_eq!(report.stale_total, 2);
    let fresh = guest.mkdir(ROOT, "d").unwrap().node;
    guest.create(fresh, "f", BOTH).unwrap();
    let (_, report) = restored(guest, share.path());
    assert_eq!((report.restored, report.stale_total, report.stale.len()), (3, 2, 0));
}

/// Two directories with `common`, and one file each that the other lacks.
fn two() -> (tempfile::TempDir, tempfile::TempDir) {
    let (a, b) = (tempdir().unwrap(), tempdir().unwrap());
    for (share, name) in [(&a, "a"), (&b, "b")] {
        fs::write(share.path().join("common"), format!("common of {name}")).unwrap();
        fs::write(share.path().join(format!("only_{name}")), format!("only {name}")).unwrap();
    }
    (a, b)
}

#[test]
fn i1_another_directory_takes_the_place_of_a_share() {
    let (a, b) = two();
    let mut guest = mounted(a.path());
    let common = guest.lookup(ROOT, "common").unwrap().node;
    let only = guest.lookup(ROOT, "only_a").unwrap().node;
    let handle = guest.open(only, READ).unwrap();
    let root = guest.opendir(ROOT).unwrap();
    let (mut guest, report) = moved(guest, b.path(), Settings::default(), Policy::Remap).unwrap();
    assert_eq!((report.restored, report.handles), (1, 1));
    is_stale(&mut guest, only, handle);
    assert_eq!(guest.getattr(common), Err(libc::ESTALE));
    assert_eq!(guest.lookup(ROOT, "only_a"), Err(libc::ENOENT));
    for (name, text) in [("common", "common of b"), ("only_b", "only b")] {
        let node = guest.lookup(ROOT, name).unwrap().node;
        assert!(node > only);
        let handle = guest.open(node, READ).unwrap();
        assert_eq!(guest.read(node, handle, 0, 99).unwrap(), text.as_bytes());
    }
    let names = guest.readdir(ROOT, root, 0, 4096).unwrap();
    assert!(names.iter().any(|(name, _)| name == "only_b"));
}

#[test]
fn i2_a_share_is_remapped_to_itself() {
    let (a, _) = two();
    let mut guest = mounted(a.path());
    let before = guest.lookup(ROOT, "common").unwrap().node;
    let (mut guest, _) = moved(guest, a.path(), Settings::default(), Policy::Remap).unwrap();
    assert_eq!(guest.getattr(before), Err(libc::ESTALE));
    assert!(guest.lookup(ROOT, "common").unwrap().node > before);
}

#[test]
fn i3_another_directory_is_refused_unless_that_is_asked_for() {
    let (a, b) = two();
    for policy in [Policy::Tolerant, Policy::Strict] {
        let refused = refusal(mounted(a.path()), b.path(), policy);
        assert!(refused.contains("different directory") && refused.contains("remap"), "{refused}");
    }
}

#[test]
fn i5_a_copy_of_a_directory_goes_on_by_names() {
    let (a, b) = two();
    for share in [&a, &b] {
        fs::create_dir(share.path().join("cwd")).unwrap();
    }
    fs::write(a.path().join("cwd/kind"), "a file").unwrap();
    fs::create_dir(b.path().join("cwd/kind")).unwrap();
    let mut guest = mounted(a.path());
    let common = guest.lookup(ROOT, "common").unwrap().node;
    let only = guest.lookup(ROOT, "only_a").unwrap().node;
    let cwd = guest.lookup(ROOT, "cwd").unwrap().node;
    let kind = guest.lookup(cwd, "kind").unwrap().node;
    let handle = guest.open(common, READ).unwrap();
    let (guest, report) = moved(guest, b.path(), Settings::default(), Policy::Copy).unwrap();
    assert_eq!((report.restored, report.stale_total, report.handles), (3, 2, 1), "{report:?}");
    // Once more, and now it is the same directory.
    let settings = Settings::default();
    let (mut guest, report) = moved(guest, b.path(), settings, Policy::Tolerant).unwrap();
    assert_eq!((report.restored, report.handles), (3, 1), "{report:?}");
    assert_eq!(guest.read(common, handle, 0, 99).unwrap(), b"common of b");
    assert_eq!(guest.lookup(ROOT, "cwd").unwrap().node, cwd);
    for gone in [only, kind] {
        assert_eq!(guest.getattr(gone), Err(libc::ESTALE));
    }
}

#[test]
fn i4_a_current_directory_in_a_share_that_is_replaced_is_stale() {
    let (a, b) = two();
    for share in [&a, &b] {
        fs::create_dir(share.path().join("cwd")).unwrap();
    }
    let mut guest = mounted(a.path());
    let cwd = guest.lookup(ROOT, "cwd").unwrap().node;
    let (mut guest, _) = moved(guest, b.path(), Settings::default(), Policy::Remap).unwrap();
    assert_eq!(guest.lookup(cwd, "x"), Err(libc::ESTALE));
    let fresh = guest.lookup(ROOT, "cwd").unwrap().node;
    assert!(guest.mkdir(fresh, "x").is_ok());
}

#[test]
fn h2_the_states_of_two_shares_cannot_be_swapped() {
    let (a, b) = two();
    let mut guest = mounted(a.path());
    let state = guest.server.save();
    let mut share = crate::local::identity(b.path());
    share.tag = "other".into();
    let config = Settings::default().config(b.path().to_str().unwrap(), u64::MAX);
    let core = virtiofsd::passthrough::PassthroughFs::new(config).unwrap();
    let settings = Settings::default();
    let mut other = cube_fsd::service::Service::new(core, share, settings, Policy::Remap);
    let refused = other.load(&state).unwrap_err().to_string();
    assert!(refused.contains("cannot be swapped"), "{refused}");
}

#[test]
fn s1_settings_that_the_guest_relies_on_must_be_the_same() {
    let share = tempdir().unwrap();
    let base = Settings::default();
    for (settings, words) in [
        (Settings { writeback: true, ..base }, "writeback was false and is true"),
        (Settings { xattr: true, ..base }, "xattr was false and is true"),
        (Settings { acl: true, ..base }, "acl was false and is true"),
        (Settings { read_only: true, ..base }, "ro was false and is true"),
        (Settings { cache: Cache::None, ..base }, "cache was auto and is none"),
    ] {
        let refused = moved(mounted(share.path()), share.path(), settings, Policy::Tolerant);
        let refused = refused.err().expect("it is refused").to_string();
        assert!(refused.contains(words), "{refused}");
    }
}
