//! Accesses to the page of MMIO registers that are none: of other sizes, crooked, beyond the end.

use super::super::hostile::Random;
use super::{Expect, Row, Stage};
use crate::bus::AccessError;
use crate::testing::driver::{GuestDriver, register};

type Done = Result<(), AccessError>;

#[rustfmt::skip]
pub(super) const ROWS: &[Row] = &[
    ("own", "a status of one byte", Stage::Live, Expect::Refused, |d| d.window_write(register::STATUS, &[0])),
    ("own", "a status of two bytes", Stage::Live, Expect::Refused, |d| d.window_write(register::STATUS, &[0; 2])),
    ("own", "a status of eight bytes", Stage::Live, Expect::Refused, |d| d.window_write(register::STATUS, &[0; 8])),
    ("own", "a status at an odd address", Stage::Live, Expect::Refused, |d| d.window_write(0x71, &[0; 4])),
    ("own", "a notification of one byte", Stage::Live, Expect::Refused, |d| d.window_write(0x50, &[0])),
    ("own", "the magic number overwritten", Stage::Live, Expect::Refused, |d| d.window_write(0, &[0; 4])),
    ("own", "the version overwritten", Stage::Live, Expect::Refused, |d| d.window_write(4, &[1, 0, 0, 0])),
    ("own", "an address register of the legacy layout", Stage::Live, Expect::Refused, |d| d.window_write(0x40, &[1; 4])),
    ("own", "the page size of the legacy layout", Stage::Live, Expect::Refused, |d| d.window_write(0x28, &[0; 4])),
    ("own", "the last byte of the page", Stage::Live, Expect::Refused, |d| d.window_write(0xfff, &[0xff])),
    ("own", "over the end of the page", Stage::Live, Expect::Refused, |d| d.window_write(0xffc, &[0xff; 8])),
    ("own", "every offset read in every size", Stage::Live, Expect::Nothing, read_everything),
    ("own", "every register but the status written in every size", Stage::Live, Expect::Alive, write_everything),
    ("own", "every register written before there is a driver", Stage::Fresh, Expect::Alive, write_everything),
    ("own", "every register written once features are agreed on", Stage::Agreed, Expect::Alive, write_everything),
    ("own", "every register written when the queues are ready", Stage::Ready, Expect::Alive, write_everything),
    ("own", "every register written after giving up", Stage::Failed, Expect::Alive, write_everything),
    ("own", "five thousand random accesses", Stage::Live, Expect::Alive, random_accesses),
];

fn read_everything(driver: &mut GuestDriver) -> Done {
    for offset in 0..driver.window() {
        for size in [1, 2, 4, 8] {
            let _ = driver.window_read(offset, &mut [0; 8][..size]);
        }
    }
    Ok(())
}

/// All but the status, so that one reset does not make all the rest harmless.
fn write_everything(driver: &mut GuestDriver) -> Done {
    for offset in (0..0x200).filter(|offset| !(0x70..0x74).contains(offset)) {
        for size in [1, 2, 4, 8] {
            for byte in [0xff, 0x80, 0x01, 0] {
                let _ = driver.window_write(offset, &[byte; 8][..size]);
            }
        }
    }
    Ok(())
}

fn random_accesses(driver: &mut GuestDriver) -> Done {
    let mut random = Random(7);
    for _ in 0..5000 {
        let offset = u64::from(random.below(0x120));
        let size = random.pick(&[1, 2, 4, 4, 4, 8]);
        let value = random.next() >> random.pick(&[0, 32, 48, 56, 60]);
        if random.below(2) == 0 {
            let _ = driver.window_write(offset & !3, &value.to_le_bytes()[..size]);
        } else {
            let _ = driver.window_read(offset, &mut [0; 8][..size]);
        }
    }
    Ok(())
}
