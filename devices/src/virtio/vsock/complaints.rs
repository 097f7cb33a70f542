//! Log lines that guests and programs can bring about, of which there are only so many.

use std::fmt;

/// Lines per place and device; what comes after is only counted.
const LOGGED: u64 = 8;

/// What one place of the device had to complain about.
#[derive(Debug, Default)]
pub struct Complaints(u64);

impl Complaints {
    /// Says what is wrong, the first few times.
    pub fn log(&mut self, what: impl fmt::Display) {
        self.0 = self.0.saturating_add(1);
        if self.0 <= LOGGED {
            tracing::warn!("vsock: {what}");
        }
    }
}
