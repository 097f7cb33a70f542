//! The card with a fake driver on one side and, on the other, a socket in the place of a TAP, or
//! the kernel itself behind a real one.

mod backend;
mod bench;
mod conformance;
mod control;
mod fuzz;
mod host;
mod kernel;
mod link;
mod opening;
mod receive;
mod transmit;
