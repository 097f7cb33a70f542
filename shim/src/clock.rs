//! Times, as protobuf has them.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use containerd_shim_protos::protobuf::well_known_types::timestamp::Timestamp;

/// A time in the form of the protocol.
pub fn timestamp(time: SystemTime) -> Timestamp {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    Timestamp {
        seconds: i64::try_from(since.as_secs()).unwrap_or(i64::MAX),
        nanos: i32::try_from(since.subsec_nanos()).unwrap_or_default(),
        ..Default::default()
    }
}

/// Nanoseconds since 1970.
pub fn nanos(time: SystemTime) -> u128 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos()
}

/// The other way round.
pub fn from_nanos(nanos: u128) -> SystemTime {
    UNIX_EPOCH + Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}
