use super::*;
use crate::executor::Executor;
use crate::testing::{Conformance, snapshot_roundtrip};

fn device(executor: ExecutorHandle) -> (Console, ConsoleHandle) {
    Console::new(executor, ConsoleConfig::default(), ConsoleOutput::default())
}

#[test]
fn conforms() {
    Conformance::new(|executor| Box::new(device(executor).0)).answers(&[1]).run();
}

#[test]
fn a_record_comes_back() {
    let executor = Executor::spawn("console").unwrap();
    snapshot_roundtrip(
        || device(executor.handle()).0,
        |console| {
            console.input.write(b"ls\n");
            console.shared.size.store(7, Ordering::Release);
        },
    );
}
