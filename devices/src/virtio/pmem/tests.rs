use super::*;
use crate::executor::Executor;
use crate::testing::{Conformance, snapshot_roundtrip};

const START: PmemConfig = PmemConfig { start: GuestAddress(1 << 32) };

fn backing(len: u64, read_only: bool) -> PmemBacking {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(len).unwrap();
    PmemBacking::open(file.path(), read_only).unwrap()
}

fn device(executor: ExecutorHandle, backing: &PmemBacking) -> Pmem {
    Pmem::new(executor, backing.clone(), START).unwrap()
}

#[test]
fn conforms() {
    let backing = backing(5000, true);
    Conformance::new(|executor| Box::new(device(executor, &backing))).answers(&[0]).run();
}

#[test]
fn a_record_comes_back() {
    let executor = Executor::spawn("pmem").unwrap();
    let backing = backing(ALIGNMENT, false);
    snapshot_roundtrip(|| device(executor.handle(), &backing), |_| {});
}
