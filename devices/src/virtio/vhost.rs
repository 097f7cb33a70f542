//! Devices whose queues are worked on by somebody else, who reads and writes guest RAM himself: a
//! process of its own ([`user`], the vhost-user protocol).
//!
//! ```text
//!  guest ── registers ──► Lifecycle ──► VhostUser ── Unix socket ──► backend
//!    │                                     │  features, guest RAM (memfd), rings, start and stop
//!    ├── rings, data ── guest RAM ◄────────┼────────────────────────► backend's mapping
//!    ├── kick ──────── eventfd ────────────┼────────────────────────► backend
//!    └◄─ interrupt ◄── Pump ◄──────────────┴── call: eventfd ◄─────── backend
//! ```
//!
//! The backend is trusted with guest RAM, which is all it can harm: every answer is checked and has a
//! time limit, and one that goes away costs the guest this device until its driver resets it.

mod pump;
pub mod user;
