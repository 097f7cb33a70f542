//! Single things that a hostile driver does, each with what must come of it.
//!
//! `H-..` are the numbers of the project's list of hostile stimuli, `C-...` are our own. Every device
//! gets all of them, over both transports. A device must never do worse than ask for a reset, and
//! must work again after it.

mod chains;
mod pci;
mod registers;
mod window;

use super::{Conformance, GRACE};
use crate::bus::AccessError;
use crate::testing::driver::{GuestDriver, Kind};
use crate::testing::{PATIENCE, eventually};
use crate::virtio::feature;
use crate::virtio::lifecycle::status;

/// What must come of a stimulus.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expect {
    /// The access is refused, and the status stays as it was.
    Refused,
    /// It is taken and does nothing that can be seen: the status stays.
    Nothing,
    /// The status is this one.
    Status(u8),
    /// The device asks for a reset; of a chain, on the queues that it answers.
    Reset,
    /// The chain comes back, and the device goes on.
    Answer,
    /// An answer or the wish to be reset, as the device sees fit, but never silence.
    Either,
    /// Whatever it likes, as long as a reset helps.
    Alive,
}

/// How far the driver has got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// After reset.
    Fresh,
    /// ACKNOWLEDGE.
    Noticed,
    /// FEATURES_OK, no queue set up.
    Agreed,
    /// All queues ready, no DRIVER_OK.
    Ready,
    /// DRIVER_OK.
    Live,
    /// The device has asked for a reset.
    Broken,
    /// The driver has given up.
    Failed,
    /// Reset, after it was live.
    Again,
}

type Access = fn(&mut GuestDriver) -> Result<(), AccessError>;

/// An access, or some: number, name, when, what comes of it, what is done.
type Row = (&'static str, &'static str, Stage, Expect, Access);

/// A chain or a ring: number, name, what comes of it, what is put there for queue `u16`.
type Chain = (&'static str, &'static str, Expect, fn(&mut GuestDriver, u16));

/// Number and name of every stimulus.
#[cfg(test)]
fn all() -> Vec<(&'static str, &'static str)> {
    let rows = rows_of(Kind::Mmio).chain(pci::ROWS.iter());
    let rows = rows.map(|&(number, name, ..)| (number, name));
    rows.chain(chains::CHAINS.iter().map(|&(number, name, ..)| (number, name))).collect()
}

fn rows_of(kind: Kind) -> impl Iterator<Item = &'static Row> {
    let own: &[Row] = match kind {
        Kind::Mmio => window::ROWS,
        Kind::Pci => pci::ROWS,
    };
    registers::ROWS.iter().chain(own)
}

pub(super) fn check(conformance: &Conformance<'_>) {
    let wrong = rows_of(conformance.kind()).filter_map(|row| access(conformance, row));
    let wrong: Vec<_> = wrong.collect();
    assert!(wrong.is_empty(), "{:?}: {wrong:#?}", conformance.kind());
    for queue in 0..conformance.driver().queue_count() {
        let mut driver = conformance.live();
        for row in chains::CHAINS {
            chain(conformance, &mut driver, queue, row);
        }
    }
}

fn reach(conformance: &Conformance<'_>, stage: Stage) -> GuestDriver {
    let mut driver = conformance.driver();
    let bits = |driver: &mut GuestDriver, bits: u8| {
        let bits = driver.status() | bits;
        driver.write(crate::testing::register::STATUS, bits.into()).unwrap();
    };
    if stage == Stage::Noticed {
        bits(&mut driver, status::ACKNOWLEDGE);
    }
    if matches!(stage, Stage::Agreed | Stage::Ready) {
        assert!(driver.negotiate(feature::VERSION_1));
    }
    if stage == Stage::Ready {
        driver.set_up_queues();
    }
    if matches!(stage, Stage::Live | Stage::Broken | Stage::Failed | Stage::Again) {
        driver.initialize();
    }
    match stage {
        Stage::Broken => driver.lifecycle(|life| life.notifier().needs_reset()),
        Stage::Failed => bits(&mut driver, status::FAILED),
        Stage::Again => driver.reset(),
        _ => {}
    }
    driver
}

/// Does what the row says and gives what did not come of it as it must.
fn access(conformance: &Conformance<'_>, row: &Row) -> Option<String> {
    let &(number, name, stage, expect, act) = row;
    let mut driver = reach(conformance, stage);
    let before = driver.status();
    let done = act(&mut driver);
    let after = driver.status();
    let met = match expect {
        Expect::Refused => done.is_err() && after == before,
        Expect::Nothing => done.is_ok() && after == before,
        Expect::Status(status) => done.is_ok() && after == status,
        Expect::Reset => eventually(PATIENCE, || driver.needs_reset()),
        Expect::Answer | Expect::Either | Expect::Alive => true,
    };
    let harmless = matches!(expect, Expect::Refused | Expect::Nothing);
    if met && harmless && stage == Stage::Live {
        conformance.exercise_now(&mut driver);
    }
    conformance.recovers(&mut driver);
    let what =
        format!("{number}, {name}, {stage:?}: {expect:?} expected, got {done:?}, {after:#x}");
    (!met).then_some(what)
}

fn chain(conformance: &Conformance<'_>, driver: &mut GuestDriver, queue: u16, row: &Chain) {
    let &(number, name, expect, act) = row;
    act(driver, queue);
    let must = conformance.answers.contains(&queue);
    let before = driver.used_index(queue);
    driver.kick(queue);
    let time = if must { PATIENCE } else { GRACE };
    let settled = eventually(time, || {
        let answered = driver.used_index(queue) != before;
        match expect {
            Expect::Reset => driver.needs_reset(),
            Expect::Answer => answered,
            _ => answered || driver.needs_reset(),
        }
    });
    let optional = !must || expect == Expect::Alive;
    let what = format!("{number}, {name}, {:?}, queue {queue}", conformance.kind());
    assert!(settled || optional, "{what}: not {expect:?}");
    if must && expect == Expect::Answer {
        assert!(!driver.needs_reset(), "{what}: wants a reset");
    }
    conformance.recovers(driver);
}

#[cfg(test)]
mod tests;
