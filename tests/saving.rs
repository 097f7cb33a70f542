//! Snapshots as they are written, with guests that need no Linux: differences, copies of disks, and
//! all that can go wrong meanwhile.
//!
//! The guest of [`guest`] writes to pages on both sides of the gap below 4 GiB. A snapshot is right if
//! memory in it is what memory was, byte for byte: two are taken of the same instant, one whole and
//! one as a difference, and must become the same.

#![allow(clippy::unwrap_used, clippy::panic, missing_docs, reason = "tests fail by panics")]

#[path = "saving/ahead.rs"]
mod ahead;
#[path = "saving/differences.rs"]
mod differences;
#[path = "saving/disks.rs"]
mod disks;
#[path = "saving/failures.rs"]
mod failures;
#[path = "saving/guest.rs"]
mod guest;
#[path = "saving/hot.rs"]
mod hot;
#[path = "saving/swapped.rs"]
mod swapped;
