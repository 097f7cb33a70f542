//! What a guest has open goes on when its server is replaced, on a directory that has not changed.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;

use cube_fsd::share::{Policy, Settings};
use tempfile::tempdir;

use crate::guest::{BOTH, Guest, READ, ROOT, WRITE};
use crate::local::{Local, mounted, moved, restored};

#[test]
fn a1_a_mount_without_any_lookup_survives() {
    let share = tempdir().unwrap();
    fs::write(share.path().join("f"), "x").unwrap();
    let mut guest = mounted(share.path());
    let before = guest.getattr(ROOT).unwrap();
    assert!(guest.server.save().len() <= 512);
    let (mut guest, report) = restored(guest, share.path());
    assert_eq!((report.restored, report.handles, report.stale_total), (1, 0, 0));
    assert_eq!(guest.getattr(ROOT).unwrap(), before);
    assert_eq!(before.ino, fs::metadata(share.path()).unwrap().ino());
    assert!(guest.list(ROOT).unwrap().contains_key("f"));
}

#[test]
fn a2_a_share_that_is_not_mounted_survives_and_can_be_mounted() {
    let share = tempdir().unwrap();
    let server = Local::new(share.path(), Settings::default(), Policy::Tolerant);
    let (mut guest, _) = restored(Guest::new(server), share.path());
    guest.mount();
    assert_eq!(guest.list(ROOT).unwrap().len(), 2);
}

#[test]
fn a3_the_state_is_complete_without_any_preparation() {
    let share = tempdir().unwrap();
    fs::create_dir(share.path().join("d")).unwrap();
    let mut guest = mounted(share.path());
    let node = guest.lookup(ROOT, "d").unwrap().node;
    let (mut guest, report) = restored(guest, share.path());
    assert_eq!((report.restored, report.stale_total), (2, 0));
    assert!(guest.getattr(node).is_ok());
}

#[test]
fn b1_nodes_that_were_looked_up_are_the_same_files() {
    let share = tempdir().unwrap();
    fs::create_dir_all(share.path().join("a/b/c")).unwrap();
    fs::write(share.path().join("a/b/c/f"), "x").unwrap();
    let mut guest = mounted(share.path());
    let paths = ["a", "a/b", "a/b/c", "a/b/c/f"];
    let found = paths.map(|path| guest.walk(path).unwrap());
    let (mut guest, report) = restored(guest, share.path());
    assert_eq!((report.restored, report.stale_total), (5, 0));
    for (path, before) in paths.into_iter().zip(found) {
        assert_eq!(guest.getattr(before.node).unwrap(), before.attr, "{path}");
        assert_eq!(guest.walk(path).unwrap().node, before.node, "{path}");
    }
}

#[test]
fn b2_an_open_file_is_written_on() {
    let share = tempdir().unwrap();
    let mut guest = mounted(share.path());
    let (node, handle) = guest.create(ROOT, "f", BOTH).unwrap();
    guest.write(node, handle, 0, &[1; 4096]).unwrap();
    let (mut guest, report) = restored(guest, share.path());
    assert_eq!(report.handles, 1);
    guest.write(node, handle, 4096, &[2; 4096]).unwrap();
    assert_eq!(guest.read(node, handle, 4090, 10).unwrap(), [1, 1, 1, 1, 1, 1, 2, 2, 2, 2]);
    let expected = [[1; 4096], [2; 4096]].concat();
    assert_eq!(fs::read(share.path().join("f")).unwrap(), expected);
    guest.release(node, handle).unwrap();
    assert_eq!(guest.read(node, handle, 0, 1), Err(libc::EBADF));
}

#[test]
fn b3_new_nodes_and_handles_get_numbers_of_their_own() {
    let share = tempdir().unwrap();
    let mut guest = mounted(share.path());
    let (node, handle) = guest.create(ROOT, "f", BOTH).unwrap();
    let (mut guest, _) = restored(guest, share.path());
    let (other, other_handle) = guest.create(ROOT, "g", BOTH).unwrap();
    assert!(other > node && other_handle > handle);
}

#[test]
fn b4_a_file_that_has_grown_is_read_to_its_new_end() {
    let share = tempdir().unwrap();
    fs::write(share.path().join("f"), "old").unwrap();
    let mut guest = mounted(share.path());
    let node = guest.lookup(ROOT, "f").unwrap().node;
    let handle = guest.open(node, READ).unwrap();
    let (mut guest, _) = {
        let state = guest;
        fs::write(share.path().join("f"), "old and new").unwrap();
        restored(state, share.path())
    };
    assert_eq!(guest.read(node, handle, 0, 100).unwrap(), b"old and new");
}

/// A guest with an open file of a mebibyte that has no name any more.
fn with_orphan(share: &std::path::Path) -> (Guest<Local>, u64, u64, Vec<u8>) {
    let mut guest = mounted(share);
    let (node, handle) = guest.create(ROOT, "gone", BOTH).unwrap();
    let data: Vec<u8> = (0..1 << 20).map(|n: u32| (n * 7 % 251) as u8).collect();
    for (index, piece) in data.chunks(128 << 10).enumerate() {
        guest.write(node, handle, (index as u64) << 17, piece).unwrap();
    }
    guest.unlink(ROOT, "gone").unwrap();
    (guest, node, handle, data)
}

fn whole(guest: &mut Guest<Local>, node: u64, handle: u64) -> Vec<u8> {
    let piece = |at: u64| guest.read(node, handle, at << 17, 128 << 10).unwrap();
    (0..9).flat_map(piece).collect()
}

#[test]
fn c1_an_open_file_without_a_name_keeps_its_content() {
    let share = tempdir().unwrap();
    let (guest, node, handle, data) = with_orphan(share.path());
    let (mut guest, report) = restored(guest, share.path());
    assert_eq!((report.orphans_restored, report.stale_total), (1, 0));
    assert_eq!(whole(&mut guest, node, handle), data);
    let attr = guest.getattr(node).unwrap();
    assert_eq!((attr.nlink, attr.size, attr.mode & 0o7777), (0, 1 << 20, 0o644));
    guest.write(node, handle, 5, b"again").unwrap();
    assert_eq!(guest.read(node, handle, 4, 7).unwrap()[1..6], *b"again");
    assert_eq!(fs::read_dir(share.path()).unwrap().count(), 0, "a name is left");
}

#[test]
fn c2_two_copies_have_two_files_of_one_without_a_name() {
    let share = tempdir().unwrap();
    let (mut guest, node, handle, data) = with_orphan(share.path());
    let state = guest.server.save();
    let [mut one, mut two] = [(); 2].map(|()| {
        let mut server = Local::new(share.path(), Settings::default(), Policy::Tolerant);
        server.load(&state).unwrap();
        Guest::new(server)
    });
    one.write(node, handle, 0, b"one").unwrap();
    assert_eq!(whole(&mut two, node, handle), data);
    assert_eq!(one.read(node, handle, 0, 3).unwrap(), b"one");
}

#[test]
fn c3_a_file_without_a_name_that_is_too_large_is_stale_and_the_rest_is_not() {
    let share = tempdir().unwrap();
    let mut guest = mounted(share.path());
    let (node, handle) = guest.create(ROOT, "gone", BOTH).unwrap();
    let (other, other_handle) = guest.create(ROOT, "kept", BOTH).unwrap();
    let piece = vec![1; 1 << 20];
    for at in 0..=16 {
        guest.write(node, handle, at << 20, &piece).unwrap();
    }
    guest.unlink(ROOT, "gone").unwrap();
    let (mut guest, report) = restored(guest, share.path());
    assert_eq!((report.orphans_restored, report.stale_total), (0, 1));
    assert!(report.stale[0].reason.contains("not saved"), "{report:?}");
    assert_eq!(guest.read(node, handle, 0, 1), Err(libc::ESTALE));
    guest.write(other, other_handle, 0, b"x").unwrap();
}

#[test]
fn c4_a_sparse_file_without_a_name_is_saved_without_its_holes() {
    let share = tempdir().unwrap();
    let mut guest = mounted(share.path());
    let (node, handle) = guest.create(ROOT, "gone", BOTH).unwrap();
    guest.write(node, handle, 1 << 30, b"end").unwrap();
    guest.unlink(ROOT, "gone").unwrap();
    assert!(guest.server.save().len() < 100_000);
    let (mut guest, _) = restored(guest, share.path());
    assert_eq!(guest.read(node, handle, 1 << 30, 9).unwrap(), b"end");
    assert_eq!(guest.read(node, handle, 4096, 4).unwrap(), [0; 4]);
}

#[test]
fn e1_a_hard_link_is_found_by_its_other_name() {
    let share = tempdir().unwrap();
    fs::write(share.path().join("h1"), "x").unwrap();
    fs::hard_link(share.path().join("h1"), share.path().join("h2")).unwrap();
    let mut guest = mounted(share.path());
    let node = guest.lookup(ROOT, "h1").unwrap().node;
    assert_eq!(guest.lookup(ROOT, "h2").unwrap().node, node);
    let handle = guest.open(node, READ).unwrap();
    fs::remove_file(share.path().join("h1")).unwrap();
    let (mut guest, report) = restored(guest, share.path());
    assert_eq!(report.stale_total, 0);
    assert_eq!(guest.lookup(ROOT, "h2").unwrap().node, node);
    assert_eq!(guest.getattr(node).unwrap().nlink, 1);
    assert_eq!(guest.read(node, handle, 0, 9).unwrap(), b"x");
    assert_eq!(guest.lookup(ROOT, "h1"), Err(libc::ENOENT));
}

#[test]
fn e2_symbolic_links_are_links_and_nothing_is_followed() {
    let share = tempdir().unwrap();
    let mut guest = mounted(share.path());
    let links = [("in", "f"), ("dangling", "nowhere"), ("out", "/etc/hostname")];
    let nodes = links.map(|(name, to)| guest.symlink(ROOT, name, to).unwrap().node);
    let (mut guest, report) = restored(guest, share.path());
    assert_eq!(report.stale_total, 0);
    for (node, (_, to)) in nodes.into_iter().zip(links) {
        assert_eq!(guest.readlink(node).unwrap(), to.as_bytes());
        assert_eq!(guest.getattr(node).unwrap().mode & libc::S_IFMT, libc::S_IFLNK);
    }
}

#[test]
fn e3_sockets_and_fifos_survive_and_are_never_opened() {
    let share = tempdir().unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(share.path().join("socket")).unwrap();
    let mut guest = mounted(share.path());
    let fifo = guest.mknod(ROOT, "fifo", libc::S_IFIFO | 0o644, 0).unwrap().node;
    let socket = guest.lookup(ROOT, "socket").unwrap().node;
    let (mut guest, report) = restored(guest, share.path());
    assert_eq!(report.stale_total, 0);
    for (node, kind) in [(fifo, libc::S_IFIFO), (socket, libc::S_IFSOCK)] {
        assert_eq!(guest.getattr(node).unwrap().mode & libc::S_IFMT, kind);
        assert!(guest.open(node, READ).is_err());
    }
}

#[test]
fn e4_any_name_that_a_file_can_have_survives() {
    let share = tempdir().unwrap();
    let long = "x".repeat(255);
    let names: [&[u8]; 5] = [b"\xff\xfe", b"new\nline", b"x (deleted)", b" ", long.as_bytes()];
    let mut guest = mounted(share.path());
    let nodes = names.map(|name| guest.mkdir(ROOT, name).unwrap().node);
    let (mut guest, report) = restored(guest, share.path());
    assert_eq!((report.restored, report.stale_total), (6, 0));
    for (node, name) in nodes.into_iter().zip(names) {
        assert_eq!(guest.lookup(ROOT, name).unwrap().node, node);
    }
}

#[test]
fn f1_a_directory_that_is_half_read_is_read_on() {
    let share = tempdir().unwrap();
    for n in 0..500 {
        fs::write(share.path().join(format!("file-{n}")), "").unwrap();
    }
    let mut guest = mounted(share.path());
    let handle = guest.opendir(ROOT).unwrap();
    let first = guest.readdir(ROOT, handle, 0, 4096).unwrap();
    assert!(first.len() > 50 && first.len() < 250);
    let mut names: Vec<_> = first.iter().map(|(name, _)| name.clone()).collect();
    let mut at = first.last().unwrap().1;
    let (mut guest, _) = restored(guest, share.path());
    loop {
        let more = guest.readdir(ROOT, handle, at, 4096).unwrap();
        let Some((_, last)) = more.last() else { break };
        at = *last;
        names.extend(more.into_iter().map(|(name, _)| name));
    }
    let unique: BTreeSet<_> = names.iter().collect();
    assert_eq!((names.len(), unique.len()), (502, 502));
}

#[test]
fn h1_a_read_only_share_stays_so() {
    let share = tempdir().unwrap();
    fs::write(share.path().join("f"), "x").unwrap();
    let settings = Settings { read_only: true, ..Settings::default() };
    let mut guest = Guest::new(Local::new(share.path(), settings, Policy::Tolerant));
    guest.mount();
    let node = guest.lookup(ROOT, "f").unwrap().node;
    let handle = guest.open(node, READ).unwrap();
    let refused = |guest: &mut Guest<Local>| {
        assert_eq!(guest.mkdir(ROOT, "d"), Err(libc::EROFS));
        assert_eq!(guest.open(node, WRITE), Err(libc::EROFS));
        assert_eq!(guest.truncate(node, 0), Err(libc::EROFS));
        assert_eq!(guest.create(ROOT, "new", BOTH), Err(libc::EROFS));
        assert_eq!(guest.unlink(ROOT, "f"), Err(libc::EROFS));
    };
    refused(&mut guest);
    let (mut guest, _) = moved(guest, share.path(), settings, Policy::Tolerant).unwrap();
    refused(&mut guest);
    assert_eq!(guest.read(node, handle, 0, 9).unwrap(), b"x");
}

#[test]
fn m1_a_write_only_file_is_read_for_the_sake_of_a_write_back() {
    let share = tempdir().unwrap();
    fs::write(share.path().join("f"), "0123456789").unwrap();
    let settings = Settings { writeback: true, ..Settings::default() };
    let mut guest = Guest::new(Local::new(share.path(), settings, Policy::Tolerant));
    assert_ne!(guest.mount() & 1 << 16, 0, "no write-back");
    let node = guest.lookup(ROOT, "f").unwrap().node;
    let handle = guest.open(node, WRITE).unwrap();
    let (mut guest, _) = moved(guest, share.path(), settings, Policy::Tolerant).unwrap();
    assert_eq!(guest.read(node, handle, 0, 4).unwrap(), b"0123");
    guest.write_as(node, handle, 2, b"xx", 1, WRITE).unwrap();
    assert_eq!(fs::read(share.path().join("f")).unwrap(), b"01xx456789");
}

#[test]
fn m6_a_file_that_can_neither_be_read_nor_written_stays_open() {
    let share = tempdir().unwrap();
    let mut guest = mounted(share.path());
    let (node, made) = guest.create(ROOT, "f", BOTH).unwrap();
    guest.release(node, made).unwrap();
    // What Linux opens with both bits of the mode set is for ioctl alone.
    let handle = guest.open(node, libc::O_ACCMODE).unwrap();
    let (mut guest, report) = restored(guest, share.path());
    assert_eq!((report.handles, guest.read(node, handle, 0, 1)), (1, Err(libc::EBADF)));
    assert_eq!(guest.release(node, handle), Ok(()));
}

#[test]
fn m2_a_delayed_write_to_a_file_for_appending_lands_where_it_belongs() {
    let share = tempdir().unwrap();
    let settings = Settings { writeback: true, ..Settings::default() };
    let mut guest = Guest::new(Local::new(share.path(), settings, Policy::Tolerant));
    guest.mount();
    let flags = WRITE | libc::O_APPEND | libc::O_CREAT;
    let (node, handle) = guest.create(ROOT, "f", flags).unwrap();
    guest.write_as(node, handle, 0, b"BBAAAAAA", 1, flags).unwrap();
    let (mut guest, _) = moved(guest, share.path(), settings, Policy::Tolerant).unwrap();
    guest.write_as(node, handle, 0, b"CC", 1, flags).unwrap();
    assert_eq!(fs::read(share.path().join("f")).unwrap(), b"CCAAAAAA");
}

#[test]
fn m3_a_file_that_was_opened_to_be_cut_off_is_not_cut_off_again() {
    let share = tempdir().unwrap();
    fs::write(share.path().join("f"), "old").unwrap();
    let mut guest = mounted(share.path());
    let node = guest.lookup(ROOT, "f").unwrap().node;
    let handle = guest.open(node, BOTH | libc::O_TRUNC).unwrap();
    guest.write(node, handle, 0, b"kept").unwrap();
    let (mut guest, _) = restored(guest, share.path());
    assert_eq!(guest.read(node, handle, 0, 9).unwrap(), b"kept");
}

#[test]
fn m4_what_was_agreed_on_at_the_mount_still_holds() {
    let share = tempdir().unwrap();
    let settings = Settings { acl: true, ..Settings::default() };
    let mut guest = Guest::new(Local::new(share.path(), settings, Policy::Tolerant));
    let agreed = guest.mount();
    assert_ne!(agreed & 1 << 29, 0, "no long form of SETXATTR");
    let node = guest.mkdir(ROOT, "d").unwrap().node;
    guest.setxattr(node, "user.before", b"1", true).unwrap();
    let (mut guest, _) = moved(guest, share.path(), settings, Policy::Tolerant).unwrap();
    guest.setxattr(node, "user.after", b"2", true).unwrap();
    assert_eq!(guest.getxattr(node, "user.before").unwrap(), b"1");
    assert_eq!(guest.getxattr(node, "user.after").unwrap(), b"2");
}

#[test]
fn o1_a_chain_of_five_generations_does_not_grow() {
    let share = tempdir().unwrap();
    fs::write(share.path().join("lost"), "x").unwrap();
    let mut guest = mounted(share.path());
    let lost = guest.lookup(ROOT, "lost").unwrap().node;
    let (node, handle) = guest.create(ROOT, "f", BOTH).unwrap();
    fs::remove_file(share.path().join("lost")).unwrap();
    let (next, _) = restored(guest, share.path());
    guest = next;
    let size = guest.server.save().len();
    for generation in 0..5_u8 {
        let (next, report) = restored(guest, share.path());
        guest = next;
        assert_eq!((report.stale_total, report.stale.len()), (1, 0));
        assert_eq!(guest.getattr(lost), Err(libc::ESTALE));
        guest.write(node, handle, generation.into(), &[generation]).unwrap();
        assert!(guest.server.save().len().abs_diff(size) <= 64);
    }
    assert_eq!(fs::read(share.path().join("f")).unwrap(), [0, 1, 2, 3, 4]);
}

#[test]
fn o2_two_saves_without_anything_between_are_equal() {
    let share = tempdir().unwrap();
    let (mut guest, ..) = with_orphan(share.path());
    for n in 0..50 {
        guest.mkdir(ROOT, format!("d{n}")).unwrap();
    }
    assert_eq!(guest.server.save(), guest.server.save());
}

#[test]
fn t1_a_guest_that_mounts_anew_starts_with_nothing() {
    let share = tempdir().unwrap();
    let mut guest = mounted(share.path());
    let (node, handle) = guest.create(ROOT, "f", BOTH).unwrap();
    let (mut guest, _) = restored(guest, share.path());
    guest.mount();
    assert_eq!(guest.getattr(node), Err(libc::ESTALE));
    assert_eq!(guest.read(node, handle, 0, 1), Err(libc::EBADF));
    assert!(guest.lookup(ROOT, "f").unwrap().node > node);
}

#[test]
fn what_is_forgotten_is_not_kept() {
    let share = tempdir().unwrap();
    let mut guest = mounted(share.path());
    let node = guest.mkdir(ROOT, "d").unwrap().node;
    let inside = guest.mkdir(node, "e").unwrap().node;
    let size = guest.server.save().len();
    guest.lookup(ROOT, "d").unwrap();
    guest.forget(node, 2);
    assert!(guest.getattr(node).is_ok(), "its child holds it");
    guest.forget(inside, 1);
    assert_eq!(guest.getattr(node), Err(libc::ESTALE));
    assert!(guest.server.save().len() < size);
}

#[test]
fn b5_a_chain_of_four_thousand_directories_survives() {
    let share = tempdir().unwrap();
    let mut guest = mounted(share.path());
    let mut at = ROOT;
    for _ in 0..4000 {
        at = guest.mkdir(at, "d").unwrap().node;
    }
    let (node, handle) = guest.create(at, "f", BOTH).unwrap();
    let (mut guest, report) = restored(guest, share.path());
    assert_eq!((report.restored, report.stale_total), (4002, 0));
    guest.write(node, handle, 0, b"deep").unwrap();
    // Deeper than a path can be, for those who would remove it by its path.
    let mut nodes = vec![(ROOT, guest.lookup(ROOT, "d").unwrap().node)];
    for _ in 1..4000 {
        let (_, parent) = *nodes.last().unwrap();
        nodes.push((parent, guest.lookup(parent, "d").unwrap().node));
    }
    guest.unlink(at, "f").unwrap();
    for (parent, _) in nodes.into_iter().rev() {
        guest.rmdir(parent, "d").unwrap();
    }
}
