//! Shares that their host forbids while a guest uses them, and allows again.

use std::fs;

use devices::testing::{PATIENCE, eventually, metric};
use tempfile::tempdir;

use super::succession::signal;
use super::{config, mounted, server_of};
use crate::guest::{BOTH, ROOT};

#[test]
fn k7_a_share_that_is_forbidden_is_served_by_nobody_and_goes_on_when_it_is_allowed() {
    let share = tempdir().unwrap();
    let mut guest = mounted(config(share.path()));
    let (node, handle) = guest.create(ROOT, "f", BOTH).unwrap();
    guest.write(node, handle, 0, b"before").unwrap();
    let permit = guest.server.handle.clone();
    for round in 0..3 {
        permit.allow(false);
        assert!(eventually(PATIENCE, || server_of(share.path()).is_none()));
        assert_eq!(guest.read(node, handle, 0, 16), Err(libc::EACCES));
        assert_eq!(guest.write(node, handle, 0, b"never"), Err(libc::EACCES));
        assert_eq!(guest.lookup(ROOT, "f").map(|_| ()), Err(libc::EACCES));
        assert!(!permit.is_allowed() && permit.status().is_none());
        permit.allow(true);
        assert!(eventually(PATIENCE, || server_of(share.path()).is_some()));
        assert_eq!(guest.read(node, handle, 0, 16).unwrap(), b"before", "round {round}");
    }
    assert_eq!(fs::read(share.path().join("f")).unwrap(), b"before");
    assert_eq!(metric(&*guest.server.meter, "fs_server_losses_total"), 0);
    assert!(!guest.server.driver.needs_reset());
}

#[test]
fn k7_what_is_on_its_way_when_a_share_is_forbidden_fails_at_once() {
    let share = tempdir().unwrap();
    let mut guest = mounted(config(share.path()));
    let pid = server_of(share.path()).unwrap();
    signal(pid, libc::SIGSTOP);
    let message = guest.message(3, ROOT, &[0; 16]);
    guest.server.send(&message, 128);
    guest.server.handle.allow(false);
    assert_eq!(guest.server.driver.wait_used(1).len, 16);
    assert_eq!(guest.server.reply(8)[4..], (-libc::EIO).to_le_bytes());
    // A stopped process is ended too.
    assert!(eventually(PATIENCE, || server_of(share.path()).is_none()));
}

#[test]
fn k7_a_server_that_was_on_its_way_does_not_serve_what_is_forbidden_by_then() {
    let share = tempdir().unwrap();
    let mut guest = mounted(config(share.path()));
    let permit = guest.server.handle.clone();
    for _ in 0..10 {
        let pid = server_of(share.path()).unwrap();
        signal(pid, libc::SIGKILL);
        permit.allow(false);
        assert!(eventually(PATIENCE, || guest.getattr(ROOT).map(|_| ()) == Err(libc::EACCES)));
        assert!(eventually(PATIENCE, || server_of(share.path()).is_none()));
        permit.allow(true);
        assert!(eventually(PATIENCE, || guest.getattr(ROOT).is_ok()));
        // More deaths than that within a minute are taken for a fault of the directory.
        if metric(&*guest.server.meter, "fs_server_losses_total") > 3 {
            break;
        }
    }
}

#[test]
fn k7_a_share_that_is_forbidden_is_not_saved_and_says_so() {
    let share = tempdir().unwrap();
    let mut guest = mounted(config(share.path()));
    let permit = guest.server.handle.clone();
    permit.allow(false);
    assert!(eventually(PATIENCE, || server_of(share.path()).is_none()));
    guest.server.driver.pause();
    let refused = guest.server.driver.try_save().unwrap_err().to_string();
    assert!(refused.contains("\"work\"") && refused.contains("not allowed"), "{refused}");
    // What was said while nothing ran is heeded when it runs again.
    permit.allow(true);
    guest.server.driver.resume();
    assert!(eventually(PATIENCE, || guest.getattr(ROOT).is_ok()));
}
