use super::*;
use crate::executor::Executor;
use crate::testing::{Conformance, snapshot_roundtrip};

#[test]
fn conforms() {
    Conformance::new(|executor| Box::new(Balloon::new(executor, BalloonConfig::default()).0))
        .answers(&[0, 1, 4])
        .run();
}

#[test]
fn a_record_comes_back() {
    let executor = Executor::spawn("balloon").unwrap();
    let make = || Balloon::new(executor.handle(), BalloonConfig::default()).0;
    snapshot_roundtrip(make, |balloon| {
        balloon.shared.set_target(3);
        balloon.shared.set_actual(2);
        balloon.shared.set_poison(0xaa);
    });
}
