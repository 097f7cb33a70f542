//! The subcommands of `cube-vmm`, one file each.

pub mod background;
pub mod client;
pub mod guest_command;
pub mod hot;
pub mod options;
pub mod overrides;
pub mod restore;
pub mod run;
pub mod snapshot;
pub mod start;
