//! Shares, from a guest's side: messages to a server in this process ([`local`]), and through the
//! virtio-fs device to the real one in its jail ([`device`]).
//!
//! The names of the tests begin with those of the scenarios in the crate's README.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::too_many_arguments)]
#![allow(missing_docs, reason = "tests")]

mod changes;
mod cold;
mod device;
mod guest;
mod hostile;
mod journal;
mod local;
mod survival;
