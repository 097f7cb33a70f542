//! Token buckets that keep a device within a rate: bytes, operations, or both.
//!
//! A device asks [`RateLimiter::admit`] before each operation and pays with [`RateLimiter::charge`]
//! when it knows what the operation cost. So the first operation beyond the limit still goes
//! through, its cost becomes a debt, and the next one waits until that is paid: the rate holds in
//! the long run for operations of any size, even of those larger than a bucket, and one whose size
//! is only known afterwards (a frame that arrives) needs no guess.
//!
//! Nothing here reads a clock: `now` is passed in. A device that has to wait arms a
//! [`RefillTimer`], and leaves its work where it is meanwhile.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::str::FromStr;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use vmm_sys_util::timerfd::TimerFd;

// --- configuration -----------------------------------------------------------------------------

/// Largest amount of tokens of a bucket, and of its burst.
pub const MAX_AMOUNT: u64 = 1 << 50;

/// Longest time in which a bucket fills.
pub const MAX_PERIOD: Duration = Duration::from_secs(3600);

/// How fast one thing may go: `amount` tokens per `period`, which is also what may be used at once
/// after a rest, and `burst` tokens on top, once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Rate {
    amount: u64,
    period: Duration,
    burst: u64,
}

/// Why a rate makes no sense.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RateError {
    /// Not of the form.
    #[error(
        "rate {0:?} is not AMOUNT/PERIOD or AMOUNT/PERIOD+BURST; write for example 10M/s, \
         1000/100ms or 10M/s+64M (K, M, G: powers of 1024)"
    )]
    Format(String),
    /// Nothing would ever pass.
    #[error("rate {0:?} lets nothing pass; give an amount of at least 1")]
    Zero(String),
    /// An amount that is beyond [`MAX_AMOUNT`].
    #[error("rate {0:?} has an amount above 2^50; leave the limit out")]
    TooLarge(String),
    /// A period that is zero or beyond [`MAX_PERIOD`].
    #[error("rate {0:?} has a period that is not between 1ms and 3600s; choose one that is")]
    Period(String),
}

impl Rate {
    /// `amount` tokens per `period` (in whole milliseconds), and `burst` more, once.
    pub fn new(amount: u64, period: Duration, burst: u64) -> Result<Self, RateError> {
        let period = Duration::new(period.as_secs(), period.subsec_millis() * 1_000_000);
        let rate = Self { amount, period, burst };
        if amount == 0 {
            return Err(RateError::Zero(rate.to_string()));
        }
        if amount > MAX_AMOUNT || burst > MAX_AMOUNT {
            return Err(RateError::TooLarge(rate.to_string()));
        }
        if period < Duration::from_millis(1) || period > MAX_PERIOD {
            return Err(RateError::Period(rate.to_string()));
        }
        Ok(rate)
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.period.subsec_nanos() {
            0 => write!(f, "{}/{}s", self.amount, self.period.as_secs())?,
            _ => write!(f, "{}/{}ms", self.amount, self.period.as_millis())?,
        }
        if self.burst > 0 { write!(f, "+{}", self.burst) } else { Ok(()) }
    }
}

impl FromStr for Rate {
    type Err = RateError;

    /// Reads `AMOUNT/PERIOD[+BURST]`, where a period is `s`, `ms`, or one of these after a number.
    fn from_str(text: &str) -> Result<Self, RateError> {
        let format = || RateError::Format(text.to_owned());
        let (rate, burst) = text.split_once('+').unwrap_or((text, "0"));
        let (amount, period) = rate.split_once('/').ok_or_else(format)?;
        let digits = period.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let count: u64 =
            if digits.is_empty() { 1 } else { digits.parse().map_err(|_| format())? };
        let period = match period.get(digits.len()..) {
            Some("s") => Duration::from_secs(count),
            Some("ms") => Duration::from_millis(count),
            _ => return Err(format()),
        };
        let amount = tokens(amount).ok_or_else(format)?;
        let burst = tokens(burst).ok_or_else(format)?;
        // Said with the text as it was given.
        Self::new(amount, period, burst).map_err(|error| match error {
            RateError::Format(_) => format(),
            RateError::Zero(_) => RateError::Zero(text.to_owned()),
            RateError::TooLarge(_) => RateError::TooLarge(text.to_owned()),
            RateError::Period(_) => RateError::Period(text.to_owned()),
        })
    }
}

/// A number with K, M, G or T; saturates.
fn tokens(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let number: u64 = digits.parse().ok()?;
    let shift = match text.get(digits.len()..)?.to_ascii_uppercase().as_str() {
        "" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        "T" => 40,
        _ => return None,
    };
    Some(number.saturating_mul(1 << shift))
}

impl TryFrom<String> for Rate {
    type Error = RateError;
    fn try_from(text: String) -> Result<Self, RateError> {
        text.parse()
    }
}

impl From<Rate> for String {
    fn from(rate: Rate) -> String {
        rate.to_string()
    }
}

/// The limits of one direction of one device. None by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RateLimit {
    /// Bytes moved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<Rate>,
    /// Operations begun: requests, frames.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub operations: Option<Rate>,
}

impl RateLimit {
    /// True if there is no limit at all.
    pub fn is_none(&self) -> bool {
        self.bytes.is_none() && self.operations.is_none()
    }
}

// --- buckets -----------------------------------------------------------------------------------

/// A bucket. Counts in tokens times nanoseconds of its period, so that nothing is lost by rounding,
/// however often it is looked at.
#[derive(Clone, Debug)]
struct TokenBucket {
    amount: i128,
    period: i128,
    burst: u64,
    /// Negative: a debt.
    credit: i128,
    refilled: Instant,
}

impl TokenBucket {
    /// A full one.
    fn new(rate: Rate, now: Instant) -> Self {
        let period = rate.period.as_nanos() as i128;
        let amount = i128::from(rate.amount);
        Self { amount, period, burst: rate.burst, credit: amount * period, refilled: now }
    }

    fn refill(&mut self, now: Instant) {
        // A clock that goes back gives nothing.
        let elapsed = now.saturating_duration_since(self.refilled).as_nanos();
        self.refilled = self.refilled.max(now);
        // 2^50 tokens and 2^64 ns at most: far from 2^127.
        let elapsed = i128::from(u64::try_from(elapsed).unwrap_or(u64::MAX));
        let full = self.amount * self.period;
        self.credit = self.credit.saturating_add(elapsed * self.amount).min(full);
    }

    /// How long until there is something in it.
    fn wait(&self) -> Option<Duration> {
        if self.burst > 0 || self.credit > 0 {
            return None;
        }
        let nanoseconds = self.credit.saturating_neg() / self.amount + 1;
        Some(Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX)))
    }

    fn charge(&mut self, tokens: u64) {
        let from_burst = tokens.min(self.burst);
        self.burst -= from_burst;
        let cost = i128::from(tokens - from_burst).saturating_mul(self.period);
        self.credit = self.credit.saturating_sub(cost);
    }
}

/// The buckets of a [`RateLimit`].
#[derive(Clone, Debug)]
pub struct RateLimiter {
    bytes: Option<TokenBucket>,
    operations: Option<TokenBucket>,
}

impl RateLimiter {
    /// Full buckets.
    pub fn new(limit: RateLimit, now: Instant) -> Self {
        let bucket = |rate: Option<Rate>| rate.map(|rate| TokenBucket::new(rate, now));
        Self { bytes: bucket(limit.bytes), operations: bucket(limit.operations) }
    }

    /// Whether an operation may begin: at once, or after the time that is returned.
    pub fn admit(&mut self, now: Instant) -> Result<(), Duration> {
        let buckets = [&mut self.bytes, &mut self.operations];
        let waits = buckets.into_iter().flatten().filter_map(|bucket| {
            bucket.refill(now);
            bucket.wait()
        });
        waits.max().map_or(Ok(()), Err)
    }

    /// Pays for one operation that has moved `bytes` bytes.
    pub fn charge(&mut self, bytes: u64) {
        if let Some(bucket) = &mut self.bytes {
            bucket.charge(bytes);
        }
        if let Some(bucket) = &mut self.operations {
            bucket.charge(1);
        }
    }
}

// --- timer -------------------------------------------------------------------------------------

/// Shortest time that a timer is set to, so that a low rate does not become a wake-up per token.
const TICK: Duration = Duration::from_micros(100);

/// Wakes a handler when there should be tokens again.
pub struct RefillTimer(TimerFd);

impl RefillTimer {
    /// A timer that is not set. Fails when the process is out of descriptors.
    pub fn new() -> io::Result<Self> {
        Ok(Self(TimerFd::new()?))
    }

    /// Readable after `wait`, unless set anew before.
    pub fn arm(&mut self, wait: Duration) -> io::Result<()> {
        Ok(self.0.reset(wait.max(TICK), None)?)
    }

    /// Not readable until set again.
    pub fn disarm(&mut self) -> io::Result<()> {
        Ok(self.0.clear()?)
    }
}

impl fmt::Debug for RefillTimer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RefillTimer")
    }
}

impl AsFd for RefillTimer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is owned by the TimerFd, which outlives the borrow of self.
        unsafe { BorrowedFd::borrow_raw(self.0.as_raw_fd()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limiter(bytes: Option<&str>, operations: Option<&str>, now: Instant) -> RateLimiter {
        let rate = |text: Option<&str>| text.map(|text| text.parse().unwrap());
        RateLimiter::new(RateLimit { bytes: rate(bytes), operations: rate(operations) }, now)
    }

    /// Operations of `size` bytes that pass within `time`, tried as early as the limiter allows.
    fn passed(limiter: &mut RateLimiter, start: Instant, time: Duration, size: u64) -> u64 {
        let (mut now, mut count) = (start, 0);
        while now < start + time {
            match limiter.admit(now) {
                Ok(()) => {
                    limiter.charge(size);
                    count += 1;
                }
                Err(wait) => now += wait,
            }
        }
        count
    }

    #[test]
    fn the_rate_holds_in_the_long_run_for_small_and_large_operations() {
        for size in [1, 60, 1514, 65_550, 5_000_000] {
            let start = Instant::now();
            let mut limiter = limiter(Some("10000/10ms"), None, start);
            // A token per microsecond.
            let tokens = 10_000 * size;
            let time = Duration::from_micros(tokens);
            let bytes = size * passed(&mut limiter, start, time, size);
            // What was in the bucket at first, and one operation too much.
            assert!((tokens..=tokens + 10_000 + size).contains(&bytes), "{size}: {bytes}");
        }
    }

    #[test]
    fn operations_are_counted_whatever_their_size() {
        let start = Instant::now();
        let mut limiter = limiter(None, Some("100/100ms"), start);
        let count = passed(&mut limiter, start, Duration::from_secs(10), 9000);
        assert!((10_000..=10_101).contains(&count), "{count}");
    }

    #[test]
    fn the_tighter_of_two_limits_decides() {
        let start = Instant::now();
        let mut limiter = limiter(Some("1M/s"), Some("10/s"), start);
        let count = passed(&mut limiter, start, Duration::from_secs(100), 100);
        assert!((1000..=1011).contains(&count), "{count}");
    }

    #[test]
    fn a_burst_is_used_once_and_first() {
        let start = Instant::now();
        let mut limiter = limiter(None, Some("10/s+50"), start);
        let mut at_once = 0;
        while limiter.admit(start).is_ok() {
            limiter.charge(1);
            at_once += 1;
        }
        assert_eq!(at_once, 60);
        let later = start + Duration::from_secs(3600);
        let mut again = 0;
        while limiter.admit(later).is_ok() {
            limiter.charge(1);
            again += 1;
        }
        assert_eq!(again, 10);
    }

    #[test]
    fn a_debt_is_waited_for_exactly() {
        let start = Instant::now();
        let mut limiter = limiter(Some("1000/s"), None, start);
        limiter.charge(3000);
        assert_eq!(limiter.admit(start), Err(Duration::from_nanos(2_000_000_001)));
        assert!(limiter.admit(start + Duration::from_nanos(2_000_000_000)).is_err());
        assert_eq!(limiter.admit(start + Duration::from_nanos(2_000_000_001)), Ok(()));
    }

    #[test]
    fn a_clock_that_goes_back_gives_and_takes_nothing() {
        let start = Instant::now() + Duration::from_secs(10);
        let mut limiter = limiter(None, Some("1/s"), start);
        limiter.charge(0);
        assert!(limiter.admit(start - Duration::from_secs(5)).is_err());
        assert!(limiter.admit(start).is_err());
        assert_eq!(limiter.admit(start + Duration::from_millis(1001)), Ok(()));
    }

    #[test]
    fn the_largest_figures_do_not_overflow() {
        let start = Instant::now();
        let mut limiter = limiter(Some("1024T/3600s+1024T"), None, start);
        for _ in 0..10 {
            limiter.charge(u64::MAX);
        }
        assert!(limiter.admit(start).is_err());
        assert!(limiter.admit(start + Duration::from_secs(1 << 30)).is_ok());
    }

    #[test]
    fn no_limit_lets_all_pass() {
        let start = Instant::now();
        let mut limiter = limiter(None, None, start);
        limiter.charge(u64::MAX);
        assert_eq!(limiter.admit(start), Ok(()));
        assert!(RateLimit::default().is_none());
    }

    #[test]
    fn rates_are_read_and_written() {
        for (text, written) in [
            ("10M/s", "10485760/1s"),
            ("5/ms", "5/1ms"),
            ("1000/100ms", "1000/100ms"),
            ("1k/2s+3g", "1024/2s+3221225472"),
        ] {
            let rate: Rate = text.parse().unwrap();
            assert_eq!(rate.to_string(), written);
            assert_eq!(written.parse(), Ok(rate));
        }
    }

    #[test]
    fn bad_rates_name_the_value_and_the_cure() {
        for (text, cure) in [
            ("", "write for example"),
            ("10M", "write for example"),
            ("10/h", "write for example"),
            ("x/s", "write for example"),
            ("10X/s", "write for example"),
            ("-1/s", "write for example"),
            ("10/s+", "write for example"),
            ("10/\u{e9}s", "write for example"),
            ("0/s", "at least 1"),
            ("1/0s", "between 1ms and 3600s"),
            ("1/3601s", "between 1ms and 3600s"),
            ("2000T/s", "leave the limit out"),
            ("99999999999999T/s", "leave the limit out"),
            ("1/s+2000T", "leave the limit out"),
        ] {
            let error = text.parse::<Rate>().unwrap_err().to_string();
            assert!(error.contains(cure), "{text}: {error}");
            assert!(error.contains(&format!("{text:?}")), "{text}: {error}");
        }
    }

    #[test]
    fn the_timer_wakes_and_can_be_silenced() {
        let mut timer = RefillTimer::new().unwrap();
        let readable = |timer: &RefillTimer, patience: i32| {
            let fd = timer.as_fd().as_raw_fd();
            let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
            // SAFETY: one pollfd that outlives the call.
            (unsafe { libc::poll(&mut poll, 1, patience) }) == 1
        };
        assert!(!readable(&timer, 0));
        timer.arm(Duration::ZERO).unwrap();
        assert!(readable(&timer, 5000));
        timer.disarm().unwrap();
        assert!(!readable(&timer, 1));
    }
}
