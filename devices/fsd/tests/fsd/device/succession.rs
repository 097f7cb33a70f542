//! Servers that die, and those that go on in their place.

use std::fs;
use std::path::Path;

use devices::metrics::Meter;
use devices::testing::{PATIENCE, eventually, metric};
use devices::virtio::fs::FsConfig;
use tempfile::tempdir;

use super::{Driven, config, mounted, server_of};
use crate::guest::{BOTH, Guest, READ, ROOT};

pub fn signal(pid: i32, signal: i32) {
    // SAFETY: a signal to a process that this one has started.
    assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
}

fn restarts(meter: &Meter) -> u64 {
    metric(&**meter, "fs_server_restarts_total")
}

/// Ends the server, and waits for the next one.
fn succeed(guest: &Guest<Driven>, share: &Path) {
    let (meter, before) = (&guest.server.meter, restarts(&guest.server.meter));
    signal(server_of(share).unwrap(), libc::SIGKILL);
    assert!(eventually(PATIENCE, || restarts(meter) == before + 1));
}

#[test]
fn k2_what_is_on_its_way_to_a_server_that_dies_fails_and_all_else_goes_on() {
    let share = tempdir().unwrap();
    let mut guest = mounted(config(share.path()));
    let (node, handle) = guest.create(ROOT, "f", BOTH).unwrap();
    guest.write(node, handle, 0, b"before").unwrap();
    let d = guest.mkdir(ROOT, "d").unwrap().node;
    guest.rename((ROOT, "f"), (d, "moved"), 0).unwrap();
    let directory = guest.opendir(d).unwrap();
    let meter = guest.server.meter.clone();
    let pid = server_of(share.path()).unwrap();
    signal(pid, libc::SIGSTOP);
    let message = guest.message(3, ROOT, &[0; 16]);
    guest.server.send(&message, 128);
    signal(pid, libc::SIGKILL);
    assert_eq!(guest.server.driver.wait_used(1).len, 16);
    assert_eq!(guest.server.reply(8)[4..], (-libc::EIO).to_le_bytes());
    // The next one is waited for, by whoever asks.
    assert_eq!(guest.getattr(node).unwrap().size, 6);
    assert_eq!(guest.read(node, handle, 0, 16).unwrap(), b"before");
    guest.write(node, handle, 6, b" and after").unwrap();
    assert_eq!(fs::read(share.path().join("d/moved")).unwrap(), b"before and after");
    assert!(guest.readdir(d, directory, 0, 4096).unwrap().iter().any(|(name, _)| name == "moved"));
    assert_eq!(guest.lookup(d, "moved").unwrap().node, node);
    assert_ne!(server_of(share.path()), Some(pid));
    assert_eq!((metric(&*meter, "fs_server_losses_total"), restarts(&meter)), (1, 1));
    assert!(!guest.server.driver.needs_reset());
}

#[test]
fn k2_files_without_a_name_go_with_their_server_and_numbers_are_not_given_twice() {
    let share = tempdir().unwrap();
    let mut guest = mounted(config(share.path()));
    let (node, handle) = guest.create(ROOT, "gone", BOTH).unwrap();
    guest.unlink(ROOT, "gone").unwrap();
    let (forgotten, closed) = guest.create(ROOT, "brief", BOTH).unwrap();
    guest.release(forgotten, closed).unwrap();
    guest.unlink(ROOT, "brief").unwrap();
    guest.forget(forgotten, 1);
    succeed(&guest, share.path());
    assert_eq!(guest.read(node, handle, 0, 16), Err(libc::ESTALE));
    let (fresh, open) = guest.create(ROOT, "gone", BOTH).unwrap();
    assert!(fresh > forgotten && open > closed, "{fresh} {open}");
    assert_eq!(guest.read(node, handle, 0, 16), Err(libc::ESTALE));
    assert_eq!(guest.release(node, handle), Ok(()));
}

#[test]
fn k2_a_guest_goes_on_through_deaths_and_snapshots() {
    let share = tempdir().unwrap();
    let mut guest = mounted(config(share.path()));
    let (node, handle) = guest.create(ROOT, "f", BOTH).unwrap();
    for round in 0..3_u8 {
        guest.write(node, handle, u64::from(round) * 2, &[round]).unwrap();
        succeed(&guest, share.path());
        guest = super::moved(guest, config(share.path())).unwrap();
        guest.write(node, handle, u64::from(round) * 2 + 1, &[round]).unwrap();
        // After a restore its state is there from the first moment on.
        succeed(&guest, share.path());
    }
    assert_eq!(fs::read(share.path().join("f")).unwrap(), [0, 0, 1, 1, 2, 2]);
}

#[test]
fn k3_a_pause_waits_for_the_server_that_is_on_its_way() {
    let share = tempdir().unwrap();
    let mut guest = mounted(config(share.path()));
    let node = guest.mkdir(ROOT, "d").unwrap().node;
    for _ in 0..3 {
        let meter = guest.server.meter.clone();
        signal(server_of(share.path()).unwrap(), libc::SIGKILL);
        assert!(eventually(PATIENCE, || metric(&*meter, "fs_server_losses_total") == 1));
        guest = super::moved(guest, config(share.path())).unwrap();
        assert_eq!(guest.lookup(ROOT, "d").unwrap().node, node);
    }
}

#[test]
fn k4_a_directory_that_is_another_one_by_then_is_not_served() {
    let host = tempdir().unwrap();
    let share = host.path().join("share");
    fs::create_dir(&share).unwrap();
    let mut guest = mounted(config(&share));
    guest.mkdir(ROOT, "d").unwrap();
    fs::rename(&share, host.path().join("moved")).unwrap();
    fs::create_dir(&share).unwrap();
    signal(server_of(&share).unwrap(), libc::SIGKILL);
    let meter = guest.server.meter.clone();
    assert!(eventually(PATIENCE, || metric(&*meter, "fs_server_losses_total") == 1));
    assert_eq!(guest.getattr(ROOT), Err(libc::EIO));
    assert_eq!(guest.lookup(ROOT, "d").map(|_| ()), Err(libc::EIO));
    assert_eq!(restarts(&meter), 0);
    assert!(!guest.server.driver.needs_reset());
}

#[test]
fn k5_servers_that_keep_dying_are_given_up_and_the_device_is_not() {
    let share = tempdir().unwrap();
    let brief = FsConfig { read_only: true, ..config(share.path()) };
    let mut guest = mounted(brief);
    for _ in 0..5 {
        succeed(&guest, share.path());
        assert!(guest.opendir(ROOT).is_ok());
    }
    signal(server_of(share.path()).unwrap(), libc::SIGKILL);
    let meter = guest.server.meter.clone();
    assert!(eventually(PATIENCE, || metric(&*meter, "fs_server_losses_total") == 6));
    assert_eq!(guest.open(ROOT, READ), Err(libc::EIO));
    assert_eq!(guest.getattr(ROOT), Err(libc::EIO));
    assert_eq!(restarts(&meter), 5);
    guest.server.driver.pause();
    let refused = guest.server.driver.try_save().unwrap_err().to_string();
    assert!(refused.contains("has ended"), "{refused}");
    guest.server.driver.resume();
    assert_eq!(guest.getattr(ROOT), Err(libc::EIO));
    assert!(!guest.server.driver.needs_reset());
}
