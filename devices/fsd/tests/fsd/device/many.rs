//! What many nodes cost the real server.

use std::fs;
use std::time::Instant;

use super::*;
use crate::cold::tree;
use crate::guest::{BOTH, ROOT};
use tempfile::tempdir;

/// Kilobytes of a process: a line of its status.
fn kilobytes(pid: i32, line: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|text| text.strip_prefix(line)).unwrap();
    line.trim_matches(|c: char| !c.is_ascii_digit()).parse().unwrap()
}

#[test]
fn g8_a_server_that_goes_on_with_many_nodes_takes_little_for_each() {
    let nodes = std::env::var("CUBE_INODES").ok().and_then(|text| text.parse().ok());
    let nodes: u64 = nodes.unwrap_or(5000);
    let share = tempdir().unwrap();
    let mut guest = mounted(config(share.path()));
    let fresh = kilobytes(server_of(share.path()).unwrap(), "VmRSS:");
    let known = tree(&mut guest, nodes.div_ceil(100), 100);
    let (node, handle) = guest.create(ROOT, "open", BOTH).unwrap();
    let mut server = guest.server;
    server.driver.pause();
    let start = Instant::now();
    let record = of_device(&server.driver.save());
    let saved = start.elapsed();
    drop(server);
    let (driven, restored) = Driven::restored(config(share.path()), record);
    let most = kilobytes(server_of(share.path()).unwrap(), "VmHWM:");
    println!(
        "{} nodes: saved in {saved:?}, restored in {restored:?}; the server has {fresh} KiB when \
         fresh, and at most {most} KiB while it was restored",
        known.len()
    );
    let mut guest = Guest::new(driven);
    guest.write(node, handle, 0, b"x").unwrap();
    assert!(most * 1024 <= fresh * 1024 + 600 * nodes + (2 << 20), "{fresh} KiB, then {most} KiB");
}
