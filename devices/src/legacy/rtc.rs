//! The CMOS clock of a PC (MC146818), as far as it tells the time.
//!
//! For software that knows no paravirtual clock. It shows the host's time in UTC, in binary-coded
//! decimals and 24 hours, and cannot be set: it has no alarm, no periodic interrupt, and no memory.
//! Reads of what it lacks give 0; writes but for the choice of a register vanish.
//!
//! For the last hundredth of each second it says that an update is under way, as a real clock does
//! for less. A driver that heeds that has time to read all registers before the second changes.

use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::{byte, byte_mut};
use crate::bus::{AccessError, BusDevice};
use crate::snapshot::{RestoreError, SaveError, Schema, Snapshot};

/// Where the ports stand: the choice of a register, and its value.
pub const PORT: u16 = 0x70;
/// Ports taken.
pub const LEN: u64 = 2;

/// Bit 7 of the choice masks NMIs, which there are none of.
const CHOICE: u8 = 0x7f;

const STATUS_A: u8 = 0x0a;
const STATUS_B: u8 = 0x0b;
const STATUS_D: u8 = 0x0d;
const CENTURY: u8 = 0x32;

/// An update is under way.
const UPDATING: u8 = 0x80;
/// The usual divider and rate.
const DIVIDER: u8 = 0x26;
/// Hours from 0 to 23; the bit for binary numbers is not set.
const HOURS_24: u8 = 0x02;
/// The battery is good.
const VALID: u8 = 0x80;

/// Nanoseconds of a second before which nothing is about to change.
const STEADY: u32 = 990_000_000;

/// What tells the time.
pub type Clock = Box<dyn Fn() -> SystemTime + Send>;

/// The clock.
pub struct Rtc {
    clock: Clock,
    chosen: u8,
}

impl Rtc {
    /// A clock that shows what `clock` says.
    pub fn new(clock: Clock) -> Self {
        Self { clock, chosen: 0 }
    }

    fn value(&self) -> u8 {
        let since_epoch = (self.clock)().duration_since(UNIX_EPOCH).unwrap_or_default();
        let seconds = since_epoch.as_secs();
        let (days, second) = (seconds / 86_400, seconds % 86_400);
        let date = Date::of(days);
        let number = match self.chosen {
            0x00 => second % 60,
            0x02 => second / 60 % 60,
            0x04 => second / 3600,
            // Sunday is 1; the first day was a Thursday.
            0x06 => (days + 4) % 7 + 1,
            0x07 => date.day,
            0x08 => date.month,
            0x09 => date.year % 100,
            CENTURY => date.year / 100,
            STATUS_A if since_epoch.subsec_nanos() >= STEADY => return DIVIDER | UPDATING,
            STATUS_A => return DIVIDER,
            STATUS_B => return HOURS_24,
            STATUS_D => return VALID,
            _ => return 0,
        };
        binary_coded(number)
    }
}

/// A day of the Gregorian calendar.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Date {
    year: u64,
    month: u64,
    day: u64,
}

impl Date {
    /// The day that is so many `days` after 1 January 1970. Years are counted from March here, so
    /// that the leap day is the last of one.
    fn of(days: u64) -> Self {
        // Days since 1 March of the year 0, of four centuries, of most centuries, of four years.
        const BEFORE: u64 = 719_468;
        const CYCLE: u64 = 146_097;
        const HUNDRED_YEARS: u64 = 36_524;
        const FOUR_YEARS: u64 = 1461;
        let days = days.saturating_add(BEFORE);
        let (cycles, rest) = (days / CYCLE, days % CYCLE);
        // The last century of a cycle is a day longer, and so is the last of four years.
        let centuries = (rest / HUNDRED_YEARS).min(3);
        let rest = rest - centuries * HUNDRED_YEARS;
        let (leaps, rest) = (rest / FOUR_YEARS, rest % FOUR_YEARS);
        let years = (rest / 365).min(3);
        let day = rest - years * 365;
        // Five months from March or August on have 153 days.
        let month = (5 * day + 2) / 153;
        let spring = 400 * cycles + 100 * centuries + 4 * leaps + years;
        Self {
            year: spring + u64::from(month >= 10),
            month: if month < 10 { month + 3 } else { month - 9 },
            day: day - (153 * month + 2) / 5 + 1,
        }
    }
}

/// The last two digits.
fn binary_coded(number: u64) -> u8 {
    let number = (number % 100) as u8;
    ((number / 10) << 4) | (number % 10)
}

impl BusDevice for Rtc {
    fn read(&mut self, offset: u64, data: &mut [u8]) -> Result<(), AccessError> {
        let value = byte_mut(offset, data)?;
        *value = match offset {
            // Cannot be read on a real one either.
            0 => 0xff,
            1 => self.value(),
            _ => return Err(AccessError::NoRegister(offset)),
        };
        Ok(())
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), AccessError> {
        let value = byte(offset, data)?;
        match offset {
            0 => self.chosen = value & CHOICE,
            1 => {}
            _ => return Err(AccessError::NoRegister(offset)),
        }
        Ok(())
    }
}

// --- state -------------------------------------------------------------------------------------

/// The saved register choice.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RtcState {
    chosen: u8,
}

impl Schema for RtcState {
    const KIND: &'static str = "rtc";
    const VERSION: u32 = 1;
}

impl Snapshot for Rtc {
    type State = RtcState;

    fn save(&self) -> Result<RtcState, SaveError> {
        Ok(RtcState { chosen: self.chosen })
    }

    fn restore(&mut self, state: RtcState) -> Result<(), RestoreError> {
        self.chosen = state.chosen & CHOICE;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::testing::snapshot_roundtrip;

    fn at(seconds: u64, nanos: u32) -> Rtc {
        Rtc::new(Box::new(move || UNIX_EPOCH + Duration::new(seconds, nanos)))
    }

    fn read(clock: &mut Rtc, register: u8) -> u8 {
        clock.write(0, &[register]).unwrap();
        let mut value = [0];
        clock.read(1, &mut value).unwrap();
        value[0]
    }

    /// Century, year, month, day of the month, day of the week, hours, minutes, seconds.
    fn date(seconds: u64) -> [u8; 8] {
        let mut clock = at(seconds, 0);
        [0x32, 0x09, 0x08, 0x07, 0x06, 0x04, 0x02, 0x00].map(|place| read(&mut clock, place))
    }

    #[test]
    fn it_shows_utc_in_decimal_digits() {
        assert_eq!(date(0), [0x19, 0x70, 0x01, 0x01, 5, 0, 0, 0]);
        // 29 February 2024, a Thursday, 23:59:58.
        assert_eq!(date(1_709_251_198), [0x20, 0x24, 0x02, 0x29, 5, 0x23, 0x59, 0x58]);
        // 1 January 2100, a Friday.
        assert_eq!(date(4_102_444_800), [0x21, 0x00, 0x01, 0x01, 6, 0, 0, 0]);
    }

    #[test]
    fn every_day_of_a_thousand_years_follows_the_one_before() {
        let leap = |year: u64| {
            year.is_multiple_of(4) && !year.is_multiple_of(100) || year.is_multiple_of(400)
        };
        let mut expected = Date { year: 1970, month: 1, day: 1 };
        for days in 0..365_250 {
            assert_eq!(Date::of(days), expected, "day {days}");
            let len = match expected.month {
                2 => 28 + u64::from(leap(expected.year)),
                4 | 6 | 9 | 11 => 30,
                _ => 31,
            };
            expected.day += 1;
            if expected.day > len {
                (expected.day, expected.month) = (1, expected.month + 1);
            }
            if expected.month > 12 {
                (expected.month, expected.year) = (1, expected.year + 1);
            }
        }
    }

    #[test]
    fn it_says_when_the_second_is_about_to_change() {
        assert_eq!(read(&mut at(5, 0), STATUS_A), DIVIDER);
        assert_eq!(read(&mut at(5, STEADY - 1), STATUS_A), DIVIDER);
        assert_eq!(read(&mut at(5, STEADY), STATUS_A), DIVIDER | UPDATING);
        assert_eq!(read(&mut at(5, 999_999_999), STATUS_A), DIVIDER | UPDATING);
    }

    #[test]
    fn it_says_how_its_numbers_are_meant() {
        let mut clock = at(0, 0);
        assert_eq!(read(&mut clock, STATUS_B), HOURS_24);
        assert_eq!(read(&mut clock, 0x0c), 0);
        assert_eq!(read(&mut clock, STATUS_D), VALID);
    }

    #[test]
    fn it_cannot_be_set_and_has_no_memory() {
        let mut clock = at(1_709_251_198, 0);
        for register in 0..=255 {
            let before = read(&mut clock, register);
            clock.write(1, &[0x11]).unwrap();
            clock.write(1, &[0xff]).unwrap();
            assert_eq!(read(&mut clock, register), before, "register {register:#x}");
        }
        assert_eq!(read(&mut clock, 0x0f), 0);
        // The bit that masks NMIs is none of the register's number.
        assert_eq!(read(&mut clock, 0x80), 0x58);
    }

    #[test]
    fn clocks_out_of_range_do_no_harm() {
        let mut early = Rtc::new(Box::new(|| UNIX_EPOCH - Duration::from_secs(1)));
        assert_eq!(read(&mut early, 0x09), 0x70);
        for seconds in [1 << 40, i64::MAX as u64, u64::MAX] {
            Date::of(seconds / 86_400);
        }
        assert_eq!(read(&mut at(1 << 40, 0), 0x00) & 0x0f, ((1_u64 << 40) % 10) as u8);
    }

    #[test]
    fn wide_accesses_and_third_ports_are_refused() {
        let mut clock = at(0, 0);
        let bad_size = Err(AccessError::BadSize { offset: 1, len: 2 });
        assert_eq!(clock.read(1, &mut [0; 2]), bad_size);
        assert_eq!(clock.write(1, &[0; 2]), bad_size);
        assert_eq!(clock.read(2, &mut [0]), Err(AccessError::NoRegister(2)));
        assert_eq!(clock.write(2, &[0]), Err(AccessError::NoRegister(2)));
    }

    #[test]
    fn the_chosen_register_survives() {
        snapshot_roundtrip(|| at(0, 0), |clock| clock.write(0, &[STATUS_D]).unwrap());
    }
}
