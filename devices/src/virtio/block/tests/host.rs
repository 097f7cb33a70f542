//! What this host offers to tests, and what is left out, loudly, where it does not.

use std::path::Path;

use super::super::disk::Disk;
use super::super::engine::{Engine, OpenDisk};
use super::super::uring;

/// Fails for want of `what`, unless `CUBE_ALLOW_SKIP` has the word `word`.
pub fn skip(word: &str, what: &str) {
    let allowed = std::env::var("CUBE_ALLOW_SKIP").unwrap_or_default();
    let skip = allowed.split([',', ' ']).any(|allowed| allowed == word);
    assert!(skip, "{what}, or set CUBE_ALLOW_SKIP={word} to do without these tests");
    eprintln!("\x1b[31mSKIPPED: {what}\x1b[0m");
}

/// The engines, each of which must pass a test of engines.
pub fn engines() -> Vec<Engine> {
    match uring::ring() {
        Ok(_) => vec![Engine::Sync, Engine::IoUring],
        Err(error) => {
            skip("io_uring", &format!("no io_uring ({error}): allow it on this host"));
            vec![Engine::Sync]
        }
    }
}

/// An open disk with exactly this engine.
pub fn open(engine: Engine, path: &Path, read_only: bool) -> Box<dyn Disk> {
    OpenDisk::open(path, read_only, engine).unwrap().disk
}
