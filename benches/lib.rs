//! What the measuring programs of this directory share. `README.md` tells what they measure.

pub mod agent;
pub mod bare_kvm;
pub mod fio;
pub mod guests;
pub mod host;
pub mod ladder;
pub mod peer;
pub mod prefetched;
pub mod process;
pub mod report;
pub mod rounds;
pub mod saved;
pub mod sharing;
pub mod tiny_guest;
pub mod vmm;
pub mod workload;
