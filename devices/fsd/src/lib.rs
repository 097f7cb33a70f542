//! `cube-fsd`: one directory of the host, served to one guest, in a jail of its own.
//!
//! ```text
//!   VMM ── vhost-user ──► session ──► service ──► virtiofsd's Server
//!      ── questions ────►    │                        │ FileSystem
//!                            │ save, load             ▼
//!                          state ◄──────────────── tracked ──► virtiofsd's PassthroughFs
//!                      (gate, restore)          (table, names)
//! ```
//!
//! The guest holds numbers of nodes and handles that [`table`] gives out. A snapshot keeps the table;
//! a restore looks every name up again and opens every handle again ([`restore`]), so that the guest's
//! open files, current directories and mounts go on, and what is not there any more is stale (ESTALE)
//! rather than broken, or, worse, another file.

pub mod describe;
pub mod identity;
pub mod jail;
pub mod journal;
pub mod names;
pub mod restore;
pub mod save;
pub mod service;
pub mod session;
pub mod share;
pub mod state;
pub mod table;
pub mod tracked;
