//! How a thing becomes a record and a record becomes a thing again.
//!
//! A type implements [`Snapshot`] with a plain [`Schema`] type that shares nothing with its runtime
//! types; [`Stateful`], the object-safe face, follows. Records are self-describing (CBOR) and
//! versioned: an older version goes through [`Schema::upgrade`], a newer one is refused naming both.
//! A record is untrusted input: `restore` checks everything before it changes anything.

use ciborium::Value;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// The saved state of one thing.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// [`Schema::KIND`] of what was saved.
    pub kind: String,
    /// [`Schema::VERSION`] it was saved with.
    pub version: u32,
    /// The schema's fields.
    pub state: Value,
}

impl Record {
    /// The record of that kind that is within this one, as that of a device is in its transport's.
    pub fn within(&self, kind: &str) -> Option<Self> {
        let mut waiting = vec![&self.state];
        while let Some(value) = waiting.pop() {
            match value.deserialized::<Self>() {
                Ok(found) if found.kind == kind => return Some(found),
                _ => waiting.extend(value.as_map().into_iter().flatten().map(|(_, value)| value)),
            }
        }
        None
    }
}

/// Why a thing could not be saved.
#[derive(Debug, thiserror::Error)]
pub enum SaveError {
    /// It still runs. Stop it first.
    #[error("{0} cannot be saved while it is running")]
    Running(&'static str),
    /// Whoever has the state does not give it.
    #[error("state of {kind} cannot be saved: {source}")]
    Refused {
        /// What was to be saved.
        kind: &'static str,
        /// The reason.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The state has no encoding.
    #[error("state of {kind} cannot be encoded")]
    Encode {
        /// What was to be saved.
        kind: &'static str,
        /// The encoder's reason.
        #[source]
        source: ciborium::value::Error,
    },
}

/// Why a record was refused. Nothing has been changed.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// The record is of something else.
    #[error("record is of kind {found:?}, expected {expected:?}")]
    Kind {
        /// What the record says.
        found: String,
        /// What it was to be restored into.
        expected: &'static str,
    },
    /// The record was written by a newer release.
    #[error("record of {kind} has version {found}, this release reads up to {supported}")]
    Newer {
        /// What was saved.
        kind: &'static str,
        /// The record's version.
        found: u32,
        /// The newest version that can be read.
        supported: u32,
    },
    /// An older version that this release no longer reads.
    #[error("record of {kind} has version {found}, which this release cannot upgrade")]
    NoUpgrade {
        /// What was saved.
        kind: &'static str,
        /// The record's version.
        found: u32,
    },
    /// The fields do not have the form of the schema.
    #[error("record of {kind} is malformed")]
    Decode {
        /// What was saved.
        kind: &'static str,
        /// The decoder's reason.
        #[source]
        source: ciborium::value::Error,
    },
    /// A field has a value that cannot be.
    #[error("record of {kind}: {field} has the invalid value {value}")]
    Invalid {
        /// What was saved.
        kind: &'static str,
        /// The field.
        field: &'static str,
        /// Its value.
        value: String,
    },
    /// Whoever shall have the state does not take it.
    #[error("state of {kind} cannot be restored: {source}")]
    Refused {
        /// What was saved.
        kind: &'static str,
        /// The reason.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// It runs. Only an idle thing can take a record.
    #[error("{0} cannot be restored while it is running")]
    Running(&'static str),
}

/// The form in which a thing is saved.
pub trait Schema: Serialize + DeserializeOwned {
    /// A name that never changes.
    const KIND: &'static str;
    /// Raised with each change of the fields.
    const VERSION: u32;

    /// Makes the current form from that of an older `version`.
    fn upgrade(version: u32, _old: Value) -> Result<Self, RestoreError> {
        Err(RestoreError::NoUpgrade { kind: Self::KIND, found: version })
    }
}

/// A thing that can be saved and restored.
pub trait Snapshot {
    /// Its saved form.
    type State: Schema;

    /// Takes the state. Only legal while stopped.
    fn save(&self) -> Result<Self::State, SaveError>;

    /// Applies `state` to an instance freshly built from the same configuration. Validates first,
    /// raises no interrupt.
    fn restore(&mut self, state: Self::State) -> Result<(), RestoreError>;
}

/// The object-safe face of [`Snapshot`].
pub trait Stateful {
    /// Saves into a record. Only legal while stopped.
    fn save_record(&self) -> Result<Record, SaveError>;
    /// Restores from a record, which is not trusted.
    fn restore_record(&mut self, record: Record) -> Result<(), RestoreError>;
}

impl<T: Snapshot> Stateful for T {
    fn save_record(&self) -> Result<Record, SaveError> {
        to_record(&self.save()?)
    }

    fn restore_record(&mut self, record: Record) -> Result<(), RestoreError> {
        self.restore(from_record(record)?)
    }
}

/// Encodes a state.
pub fn to_record<S: Schema>(state: &S) -> Result<Record, SaveError> {
    let state =
        Value::serialized(state).map_err(|source| SaveError::Encode { kind: S::KIND, source })?;
    Ok(Record { kind: S::KIND.to_owned(), version: S::VERSION, state })
}

/// Decodes a state, upgrading older versions.
pub fn from_record<S: Schema>(record: Record) -> Result<S, RestoreError> {
    if record.kind != S::KIND {
        return Err(RestoreError::Kind { found: record.kind, expected: S::KIND });
    }
    match record.version {
        version if version > S::VERSION => {
            Err(RestoreError::Newer { kind: S::KIND, found: version, supported: S::VERSION })
        }
        version if version < S::VERSION => S::upgrade(version, record.state),
        _ => record
            .state
            .deserialized()
            .map_err(|source| RestoreError::Decode { kind: S::KIND, source }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct State {
        value: u32,
    }

    impl Schema for State {
        const KIND: &'static str = "test";
        const VERSION: u32 = 2;

        fn upgrade(version: u32, old: Value) -> Result<Self, RestoreError> {
            match (version, old.as_integer()) {
                (1, Some(value)) => Ok(State { value: i128::from(value) as u32 }),
                _ => Err(RestoreError::NoUpgrade { kind: Self::KIND, found: version }),
            }
        }
    }

    #[test]
    fn a_record_comes_back_equal() {
        let record = to_record(&State { value: 5 }).unwrap();
        assert_eq!(from_record::<State>(record).unwrap(), State { value: 5 });
    }

    #[test]
    fn an_older_record_is_upgraded() {
        let old = Record { kind: "test".into(), version: 1, state: Value::from(9) };
        assert_eq!(from_record::<State>(old).unwrap(), State { value: 9 });
    }

    #[test]
    fn newer_foreign_and_malformed_records_are_refused() {
        let record = |kind: &str, version| Record {
            kind: kind.into(),
            version,
            state: Value::Text("x".into()),
        };
        let error = |r| from_record::<State>(r).unwrap_err().to_string();
        assert!(error(record("test", 3)).contains("version 3"));
        assert!(error(record("other", 2)).contains("\"other\""));
        assert!(error(record("test", 2)).contains("malformed"));
        assert!(error(record("test", 0)).contains("cannot upgrade"));
    }
}
