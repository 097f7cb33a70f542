//! More files than are held: a guest that knows many of them, and a restore that leaves most for later.

use std::fs;
use std::path::Path;
use std::time::Instant;

use cube_fsd::restore::LAZY_FROM;
use cube_fsd::share::{Policy, Settings};
use tempfile::tempdir;

use crate::guest::{Answers, BOTH, Guest, READ, ROOT};
use crate::local::{Local, mounted, moved, restored};

/// A guest whose server has few descriptors.
fn cramped(share: &Path, most: u64) -> Guest<Local> {
    let server = Local::limited(share, Settings::default(), Policy::Tolerant, most);
    let mut guest = Guest::new(server);
    guest.mount();
    guest
}

/// `directories` with `files` each, all of them known to the guest: node and path.
pub fn tree<A: Answers>(guest: &mut Guest<A>, directories: u64, files: u64) -> Vec<(u64, String)> {
    let mut known = Vec::new();
    for d in 0..directories {
        let directory = guest.mkdir(ROOT, format!("d{d}")).unwrap().node;
        known.push((directory, format!("d{d}")));
        for f in 0..files {
            let node = guest.mknod(directory, &format!("f{f}"), libc::S_IFREG | 0o644, 0).unwrap();
            known.push((node.node, format!("d{d}/f{f}")));
        }
    }
    known
}

fn all_are_there(guest: &mut Guest<Local>, share: &Path, known: &[(u64, String)]) {
    use std::os::unix::fs::MetadataExt;
    for (node, path) in known {
        let ino = fs::metadata(share.join(path)).unwrap().ino();
        assert_eq!(guest.getattr(*node).map(|attr| attr.ino), Ok(ino), "{path}");
    }
}

#[test]
fn g2_a_guest_that_knows_more_files_than_there_are_descriptors_does_not_notice() {
    let share = tempdir().unwrap();
    let mut guest = cramped(share.path(), 64);
    let known = tree(&mut guest, 10, 50);
    let open: Vec<_> = (0..16)
        .map(|n| {
            let node = guest.walk(&format!("d{}/f{n}", n % 10)).unwrap().node;
            (node, guest.open(node, BOTH).unwrap())
        })
        .collect();
    assert!(guest.server.count().held <= 64);
    all_are_there(&mut guest, share.path(), &known);
    let mut backwards = known.clone();
    backwards.reverse();
    all_are_there(&mut guest, share.path(), &backwards);
    for (node, handle) in open {
        guest.write(node, handle, 0, b"x").unwrap();
    }
    for (node, path) in &known {
        assert_eq!(guest.walk(path).unwrap().node, *node, "{path}");
    }
    assert!(guest.server.count().held <= 64);
    assert_eq!(guest.server.count().nodes, 511);
}

#[test]
fn g3_a_file_that_was_replaced_while_nobody_held_it_is_stale() {
    let share = tempdir().unwrap();
    fs::write(share.path().join("f"), "old").unwrap();
    let mut guest = cramped(share.path(), 40);
    let node = guest.lookup(ROOT, "f").unwrap().node;
    tree(&mut guest, 2, 50);
    fs::write(share.path().join("new"), "new").unwrap();
    fs::rename(share.path().join("new"), share.path().join("f")).unwrap();
    assert_eq!(guest.getattr(node), Err(libc::ESTALE));
    let fresh = guest.lookup(ROOT, "f").unwrap().node;
    assert_ne!(fresh, node);
    let handle = guest.open(fresh, READ).unwrap();
    assert_eq!(guest.read(fresh, handle, 0, 9).unwrap(), b"new");
}

#[test]
fn g4_a_file_that_is_not_held_is_known_under_its_other_name() {
    let share = tempdir().unwrap();
    fs::write(share.path().join("h1"), "x").unwrap();
    fs::hard_link(share.path().join("h1"), share.path().join("h2")).unwrap();
    let mut guest = cramped(share.path(), 40);
    let node = guest.lookup(ROOT, "h1").unwrap().node;
    tree(&mut guest, 2, 50);
    assert_eq!(guest.lookup(ROOT, "h2").unwrap().node, node);
}

#[test]
fn g5_a_large_tree_is_looked_up_when_it_is_needed_and_in_time() {
    let share = tempdir().unwrap();
    let mut guest = mounted(share.path());
    let known = tree(&mut guest, 30, (LAZY_FROM as u64).div_ceil(30));
    let (node, path) = known.last().unwrap().clone();
    let handle = guest.open(node, BOTH).unwrap();
    let gone = known[5].clone();
    fs::remove_file(share.path().join(&gone.1)).unwrap();
    let (mut guest, report) = restored(guest, share.path());
    assert_eq!((report.handles, report.stale_total), (1, 0));
    assert!(report.unverified > LAZY_FROM / 2, "{report:?}");
    guest.write(node, handle, 0, b"x").unwrap();
    assert_eq!(fs::read(share.path().join(&path)).unwrap(), b"x");
    assert_eq!(guest.walk(&known[9].1).unwrap().node, known[9].0);
    let report = guest.server.verify_all();
    assert_eq!((report.unverified, report.stale_total), (0, 1));
    assert_eq!((report.stale[0].id, &report.stale[0].path), (gone.0, &gone.1));
    assert_eq!(guest.getattr(gone.0), Err(libc::ESTALE));
    let rest: Vec<_> = known.into_iter().filter(|one| *one != gone).collect();
    all_are_there(&mut guest, share.path(), &rest);
    // What was not looked up yet is saved as well.
    let (next, _) = restored(guest, share.path());
    let (mut next, _) = restored(next, share.path());
    all_are_there(&mut next, share.path(), &rest);
}

#[test]
fn g6_strict_looks_everything_up_at_once() {
    let share = tempdir().unwrap();
    let mut guest = mounted(share.path());
    let known = tree(&mut guest, 30, (LAZY_FROM as u64).div_ceil(30));
    let (guest, report) = moved(guest, share.path(), Settings::default(), Policy::Strict).unwrap();
    assert_eq!((report.restored, report.unverified), (known.len() + 1, 0));
    fs::remove_file(share.path().join("d7/f7")).unwrap();
    let refused = moved(guest, share.path(), Settings::default(), Policy::Strict);
    assert!(refused.err().unwrap().to_string().contains("d7/f7"));
}

#[test]
fn g7_strict_looks_up_more_than_there_are_descriptors() {
    let share = tempdir().unwrap();
    let mut guest = cramped(share.path(), 64);
    let known = tree(&mut guest, 10, 50);
    let state = guest.server.save();
    drop(guest);
    let mut server = Local::limited(share.path(), Settings::default(), Policy::Strict, 64);
    let report = server.load(&state).unwrap().unwrap();
    assert_eq!((report.restored, report.stale_total), (511, 0));
    all_are_there(&mut Guest::new(server), share.path(), &known);
}

/// `CUBE_INODES=100000 cargo test --release -p cube-fsd g1_ -- --nocapture` tells what it costs.
#[test]
fn g1_many_nodes_and_fifty_handles() {
    let nodes = std::env::var("CUBE_INODES").ok().and_then(|text| text.parse().ok());
    let nodes: u64 = nodes.unwrap_or(1000);
    let share = tempdir().unwrap();
    // As many as there are descriptors on most hosts, and fewer than on some.
    let mut guest = cramped(share.path(), 15_000);
    let known = tree(&mut guest, nodes.div_ceil(100), 100);
    let files = known.iter().filter(|(_, path)| path.contains('/'));
    let open: Vec<_> =
        files.take(50).map(|(node, _)| (*node, guest.open(*node, BOTH).unwrap())).collect();
    let start = Instant::now();
    let state = guest.server.save();
    let saved = start.elapsed();
    drop(guest);
    for policy in [Policy::Tolerant, Policy::Strict] {
        let mut server = Local::limited(share.path(), Settings::default(), policy, 15_000);
        let start = Instant::now();
        let report = server.load(&state).unwrap().unwrap();
        println!(
            "{} nodes, {policy:?}: saved in {saved:?}, {} bytes; restored in {:?}, {} later",
            known.len(),
            state.len(),
            start.elapsed(),
            report.unverified
        );
        assert_eq!((report.handles, report.stale_total), (50, 0));
        let mut guest = Guest::new(server);
        for (node, handle) in &open {
            guest.write(*node, *handle, 0, b"x").unwrap();
        }
    }
    assert!(state.len() as u64 <= 64 * nodes + 2048);
}
