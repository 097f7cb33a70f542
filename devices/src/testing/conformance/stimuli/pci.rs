//! The function's configuration registers, its window and its messages.

use super::super::hostile::Random;
use super::{Expect, Row, Stage};
use crate::bus::AccessError;
use crate::pci::msix::ENTRY_SIZE;
use crate::testing::driver::GuestDriver;

type Done = Result<(), AccessError>;

/// Parts of the window.
const STATUS: u64 = 0x14;
const ISR: u64 = 0x2000;
const NOTIFY: u64 = 0x6000;
const TABLE: u64 = 0x8000;
const PENDING: u64 = 0xc000;

#[rustfmt::skip]
pub(super) const ROWS: &[Row] = &[
    ("own", "a status of two bytes", Stage::Live, Expect::Refused, |d| d.window_write(STATUS, &[0; 2])),
    ("own", "a status of four bytes", Stage::Live, Expect::Refused, |d| d.window_write(STATUS, &[0; 4])),
    ("own", "an address of eight bytes", Stage::Live, Expect::Refused, |d| d.window_write(0x20, &[0; 8])),
    ("own", "the number of queues overwritten", Stage::Live, Expect::Refused, |d| d.window_write(0x12, &[1, 0])),
    ("own", "the generation overwritten", Stage::Live, Expect::Refused, |d| d.window_write(0x15, &[1])),
    ("own", "the notification offset overwritten", Stage::Live, Expect::Refused, |d| d.window_write(0x1e, &[9, 0])),
    ("H-21", "a live queue disabled", Stage::Live, Expect::Refused, |d| d.window_write(0x1c, &[0, 0])),
    ("H-21", "a queue enabled with 2", Stage::Ready, Expect::Refused, |d| d.window_write(0x1c, &[2, 0])),
    ("own", "a queue reset that is not offered", Stage::Live, Expect::Refused, |d| d.window_write(0x3a, &[1, 0])),
    ("own", "a register behind the last", Stage::Live, Expect::Refused, |d| d.window_write(0x3c, &[1, 0])),
    ("own", "the far end of the common registers", Stage::Live, Expect::Refused, |d| d.window_write(0x1ffe, &[1, 0])),
    ("own", "the interrupt status written", Stage::Live, Expect::Refused, |d| d.window_write(ISR, &[3])),
    ("own", "four bytes of interrupt status read", Stage::Live, Expect::Refused, |d| d.window_read(ISR, &mut [0; 4])),
    ("own", "the interrupt status behind its byte", Stage::Live, Expect::Refused, |d| d.window_read(ISR + 1, &mut [0])),
    ("H-14", "every place of the notifications", Stage::Live, Expect::Nothing, |d| {
        (NOTIFY..TABLE).try_for_each(|at| d.window_write(at, &[0xff; 2]))
    }),
    ("H-14", "every place of the notifications before DRIVER_OK", Stage::Ready, Expect::Nothing, |d| {
        (NOTIFY..TABLE).step_by(4).try_for_each(|at| d.window_write(at, &[0xff; 4]))
    }),
    ("own", "the configuration space far beyond its end", Stage::Live, Expect::Refused, |d| d.window_write(0x5ff8, &[0; 8])),
    ("own", "a message table written in bytes", Stage::Live, Expect::Refused, |d| d.window_write(TABLE, &[1])),
    ("own", "a message table written crookedly", Stage::Live, Expect::Refused, |d| d.window_write(TABLE + 2, &[1; 4])),
    ("own", "a message table full of ones", Stage::Live, Expect::Nothing, |d| fill_table(d, 0xff)),
    ("own", "a message table full of zeroes", Stage::Live, Expect::Nothing, |d| fill_table(d, 0)),
    ("own", "messages beyond the last vector", Stage::Live, Expect::Nothing, |d| {
        (0..0x4000).step_by(8).try_for_each(|at| d.window_write(TABLE + at, &[0xa5; 8]))
    }),
    ("own", "pending bits written", Stage::Live, Expect::Refused, |d| d.window_write(PENDING, &[0xff; 8])),
    ("own", "pending bits of all vectors there could be", Stage::Live, Expect::Nothing, |d| {
        (0..0x4000).step_by(8).try_for_each(|at| d.window_read(PENDING + at, &mut [0; 8]))
    }),
    ("own", "a vector that does not exist", Stage::Agreed, Expect::Nothing, |d| vectors(d, &[64, 0x7fff, 0xfffe])),
    ("own", "vectors changed while live", Stage::Live, Expect::Nothing, |d| vectors(d, &[0, 0xffff])),
    ("own", "all registers of the function full of ones", Stage::Live, Expect::Alive, |d| fill_function(d, 0xff)),
    ("own", "all registers of the function full of zeroes", Stage::Live, Expect::Alive, |d| fill_function(d, 0)),
    ("own", "messages switched off and on ten thousand times", Stage::Live, Expect::Nothing, message_switch),
    ("own", "the window at every odd place", Stage::Live, Expect::Nothing, move_window),
    ("own", "memory accesses switched off and on", Stage::Live, Expect::Nothing, memory_switch),
    ("own", "accesses through the function that fit nowhere", Stage::Live, Expect::Nothing, crooked_access),
    ("own", "a reset through the function", Stage::Live, Expect::Status(0), reset_by_access),
    ("own", "every offset of the window read in every size", Stage::Live, Expect::Nothing, read_everything),
    ("own", "every common register but the status written", Stage::Live, Expect::Alive, write_everything),
    ("own", "every common register written before there is a driver", Stage::Fresh, Expect::Alive, write_everything),
    ("own", "every common register written once features are agreed on", Stage::Agreed, Expect::Alive, write_everything),
    ("own", "five thousand random accesses to the window", Stage::Live, Expect::Alive, random_accesses),
];

fn fill_table(driver: &mut GuestDriver, byte: u8) -> Done {
    let vectors = u64::from(driver.queue_count()) + 1;
    let places = || (0..vectors * ENTRY_SIZE).step_by(4);
    let mut before = Vec::new();
    for at in places() {
        let mut word = [0; 4];
        driver.window_read(TABLE + at, &mut word)?;
        before.push(word);
    }
    places().try_for_each(|at| driver.window_write(TABLE + at, &[byte; 4]))?;
    // The device interrupts, wherever that goes; then it gets its messages back.
    driver.lifecycle(|life| life.notifier().config_changed());
    places().zip(before).try_for_each(|(at, word)| driver.window_write(TABLE + at, &word))
}

fn vectors(driver: &mut GuestDriver, numbers: &[u16]) -> Done {
    let count = driver.queue_count() + 1;
    for queue in 0..driver.queue_count() {
        driver.window_write(0x16, &queue.to_le_bytes())?;
        let mut before = [0; 2];
        driver.window_read(0x1a, &mut before)?;
        for &number in numbers {
            driver.window_write(0x1a, &number.to_le_bytes())?;
            let mut taken = [0; 2];
            driver.window_read(0x1a, &mut taken)?;
            let expected = if number < count { number } else { 0xffff };
            assert_eq!(u16::from_le_bytes(taken), expected);
        }
        driver.window_write(0x1a, &before)?;
    }
    Ok(())
}

/// Everything, and then the registers as they were.
fn fill_function(driver: &mut GuestDriver, byte: u8) -> Done {
    let mut before = [[0; 4]; 64];
    for (word, at) in before.iter_mut().zip((0..256).step_by(4)) {
        driver.function().read_config(at, word);
    }
    for size in [1, 2, 4_usize] {
        for at in (0..4096).step_by(size) {
            driver.function().write_config(at, &[byte; 4][..size]);
            driver.function().read_config(at, &mut [0; 4][..size]);
            let _ = driver.function().window();
        }
    }
    for (word, at) in before.iter().zip((0..256).step_by(4)) {
        driver.function().write_config(at, word);
    }
    Ok(())
}

/// Where the function has the capability `id`, of which virtio 1.3 says that it is `kind`.
fn capability(driver: &mut GuestDriver, id: u8, kind: u8) -> u16 {
    let function = driver.function();
    let mut at = [0x34];
    function.read_config(0x34, &mut at);
    loop {
        assert_ne!(at[0], 0, "no capability {id:#x}");
        let place = u16::from(at[0]);
        let mut header = [0; 4];
        function.read_config(place, &mut header);
        if header[0] == id && (kind == 0 || header[3] == kind) {
            return place;
        }
        at[0] = header[1];
    }
}

fn message_switch(driver: &mut GuestDriver) -> Done {
    let at = capability(driver, 0x11, 0) + 2;
    for round in 0..10_000 {
        let control: [u8; 2] = [[0xff, 0xff], [0, 0x40], [0, 0], [0xff, 0xbf]][round % 4];
        driver.function().write_config(at, &control);
        if round % 100 == 0 {
            driver.lifecycle(|life| life.notifier().config_changed());
        }
    }
    driver.function().write_config(at, &[0, 0x80]);
    Ok(())
}

fn move_window(driver: &mut GuestDriver) -> Done {
    let places = [0, 1, 0xffff, 0x10_0000, 0xfee0_0000, u64::MAX, 1 << 63, !0xffff, 0x1_0000_0000];
    for place in places {
        for (at, half) in [(0x10, place as u32), (0x14, (place >> 32) as u32)] {
            driver.function().write_config(at, &half.to_le_bytes());
            if let Some(window) = driver.function().window() {
                assert!(window.base.is_multiple_of(window.len), "{:#x}", window.base);
                assert!(window.base.checked_add(window.len).is_some(), "{:#x}", window.base);
            }
        }
    }
    Ok(())
}

fn memory_switch(driver: &mut GuestDriver) -> Done {
    for round in 0..1000_u16 {
        driver.function().write_config(4, &round.to_le_bytes());
        assert_eq!(driver.function().window().is_some(), round & 2 != 0);
    }
    driver.function().write_config(4, &[6, 0]);
    Ok(())
}

/// Sets up an access of `len` bytes at `offset` of bar `bar`, and makes it.
fn through_function(driver: &mut GuestDriver, bar: u8, offset: u32, len: u32, value: u32) {
    let at = capability(driver, 9, 5);
    let function = driver.function();
    function.write_config(at + 4, &[bar]);
    function.write_config(at + 8, &offset.to_le_bytes());
    function.write_config(at + 12, &len.to_le_bytes());
    function.write_config(at + 16, &value.to_le_bytes());
    function.read_config(at + 16, &mut [0; 4]);
}

fn crooked_access(driver: &mut GuestDriver) -> Done {
    for bar in [1, 5, 0xff] {
        through_function(driver, bar, STATUS as u32, 1, 0);
    }
    for len in [0, 3, 5, 8, u32::MAX] {
        through_function(driver, 0, STATUS as u32, len, 0);
    }
    for offset in [1, 0xffff, 0x1_0000, u32::MAX, u32::MAX - 1] {
        through_function(driver, 0, offset, 4, u32::MAX);
    }
    through_function(driver, 0, ISR as u32, 4, u32::MAX);
    Ok(())
}

fn reset_by_access(driver: &mut GuestDriver) -> Done {
    through_function(driver, 0, STATUS as u32, 1, 0);
    Ok(())
}

fn read_everything(driver: &mut GuestDriver) -> Done {
    for offset in (0..driver.window()).filter(|offset| *offset < 0x80 || offset % 61 == 0) {
        for size in [1, 2, 4, 8] {
            let _ = driver.window_read(offset, &mut [0; 8][..size]);
        }
    }
    Ok(())
}

fn write_everything(driver: &mut GuestDriver) -> Done {
    for offset in (0..0x80).filter(|&offset| offset != STATUS) {
        for size in [1, 2, 4, 8] {
            for byte in [0xff, 0x80, 0x01, 0] {
                let _ = driver.window_write(offset, &[byte; 8][..size]);
            }
        }
    }
    Ok(())
}

fn random_accesses(driver: &mut GuestDriver) -> Done {
    let mut random = Random(11);
    for _ in 0..5000 {
        let part = random.pick(&[0, 0, 0, 0, ISR, 0x4000, NOTIFY, TABLE, PENDING]);
        let offset = part + u64::from(random.below(0x50));
        let size = random.pick(&[1, 2, 4, 8]);
        let value = random.next() >> random.pick(&[0, 32, 48, 56, 60]);
        if random.below(2) == 0 {
            let _ = driver.window_write(offset, &value.to_le_bytes()[..size]);
        } else {
            let _ = driver.window_read(offset, &mut [0; 8][..size]);
        }
    }
    Ok(())
}
