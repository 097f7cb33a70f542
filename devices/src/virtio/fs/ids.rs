//! Users and groups of a guest that are others on the host.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// `GUEST:HOST:COUNT`: so many ids from `GUEST` on are those from `HOST` on. The guest can use no others,
/// and sees what others own as nobody's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct IdRange {
    guest: u32,
    host: u32,
    count: u32,
}

/// A text that is no such range.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "ids {0:?} are not GUEST:HOST:COUNT, three numbers whose sums are below 2^32; write for example 0:100000:65536"
)]
pub struct IdError(String);

impl fmt::Display for IdRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.guest, self.host, self.count)
    }
}

impl FromStr for IdRange {
    type Err = IdError;

    fn from_str(text: &str) -> Result<Self, IdError> {
        let parts: Result<Vec<u32>, _> = text.split(':').map(str::parse).collect();
        match parts.as_deref() {
            Ok(&[guest, host, count])
                if count > 0
                    && guest.checked_add(count).is_some()
                    && host.checked_add(count).is_some() =>
            {
                Ok(Self { guest, host, count })
            }
            _ => Err(IdError(text.to_owned())),
        }
    }
}

impl TryFrom<String> for IdRange {
    type Error = IdError;
    fn try_from(text: String) -> Result<Self, IdError> {
        text.parse()
    }
}

impl From<IdRange> for String {
    fn from(range: IdRange) -> Self {
        range.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_read_as_they_are_written() {
        let range: IdRange = "0:100000:65536".parse().unwrap();
        assert_eq!(String::from(range), "0:100000:65536");
        for text in ["", "0:1", "0:1:0", "0:1:2:3", "a:1:2", "4294967295:0:1", "0:4294967295:1"] {
            let refused = text.parse::<IdRange>().unwrap_err().to_string();
            assert!(refused.contains(&format!("{text:?}")), "{refused}");
        }
    }
}
