//! CubeVMM's hypervisor: builds a microVM on KVM, runs it, and answers for it.
//!
//! `main.rs` is the command line, [`command`] its subcommands. A VM's life goes
//! [`config`] → [`builder`] → [`vm`] → [`control`].

pub mod agent;
pub mod api;
pub mod api_socket;
pub mod boot;
pub mod builder;
pub mod cards;
pub mod cold_code;
pub mod command;
pub mod config;
pub mod console;
pub mod control;
pub mod cpu;
pub mod disks;
pub mod doctor;
pub mod doorbells;
pub mod event;
pub mod generation;
pub mod identity;
pub mod kvm;
pub mod layout;
pub mod logs;
pub mod memory;
pub mod metrics;
pub mod outcome;
pub mod pci_slots;
pub mod plug;
pub mod position;
pub mod shares;
pub mod signals;
pub mod snapshot;
pub mod state;
pub mod terminal;
pub mod trace;
pub mod uffd;
pub mod vcpu;
pub mod vm;
pub mod wiring;
