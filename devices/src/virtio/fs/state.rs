//! The saved form: the share's name, and what its server knows of the guest.

use std::fmt;

use serde::de::{Error as _, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::{Fs, FsError, MAX_TAG, Serving};
use crate::snapshot::{RestoreError, SaveError, Schema, Snapshot};

/// Bytes, which are written as such and not one by one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Blob(Vec<u8>);

impl Serialize for Blob {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&self.0)
    }
}

impl<'de> Deserialize<'de> for Blob {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Bytes;
        impl<'de> Visitor<'de> for Bytes {
            type Value = Blob;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("bytes")
            }
            fn visit_bytes<E>(self, bytes: &[u8]) -> Result<Blob, E> {
                Ok(Blob(bytes.to_vec()))
            }
            fn visit_byte_buf<E>(self, bytes: Vec<u8>) -> Result<Blob, E> {
                Ok(Blob(bytes))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, _: A) -> Result<Blob, A::Error> {
                Err(A::Error::custom("a list in the place of bytes"))
            }
        }
        deserializer.deserialize_byte_buf(Bytes)
    }
}

/// The saved form of an [`Fs`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FsState {
    tag: String,
    /// In the server's own format, which checks itself.
    share: Blob,
}

impl FsState {
    /// What the file server has saved, in its own format: `cube-fsd --describe` reads it.
    pub fn share(&self) -> &[u8] {
        &self.share.0
    }
}

impl Schema for FsState {
    const KIND: &'static str = "virtio-fs";
    const VERSION: u32 = 1;
}

impl Snapshot for Fs {
    type State = FsState;

    fn save(&self) -> Result<FsState, SaveError> {
        let refused =
            |error: FsError| SaveError::Refused { kind: FsState::KIND, source: Box::new(error) };
        let session = self.session.as_ref().ok_or(SaveError::Running("virtio-fs"))?;
        let tag = self.config.tag.clone();
        if let Some(what) = session.waiting() {
            return Err(refused(FsError::Busy { tag, what }));
        }
        if let Serving::Restarting(_) = session.serving {
            let what = "its file server has ended, and is being started again".to_owned();
            return Err(refused(FsError::Busy { tag, what }));
        }
        if let Serving::Forbidden = session.serving {
            return Err(refused(FsError::Forbidden { tag }));
        }
        let server = session.server().ok_or_else(|| refused(self.gone()))?;
        let share = Blob(server.save().map_err(refused)?);
        Ok(FsState { tag, share })
    }

    fn restore(&mut self, state: FsState) -> Result<(), RestoreError> {
        let refused =
            |error: FsError| RestoreError::Refused { kind: FsState::KIND, source: Box::new(error) };
        let FsState { tag, share } = state;
        if tag != self.config.tag {
            let shown: String = tag.chars().take(MAX_TAG).collect();
            let value = format!("{shown:?}, the share is {:?}", self.config.tag);
            return Err(RestoreError::Invalid { kind: FsState::KIND, field: "tag", value });
        }
        let session = self.session.as_ref().ok_or(RestoreError::Running("virtio-fs"))?;
        let server = session.server().ok_or_else(|| refused(self.gone()))?;
        server.load(&share.0).map_err(refused)
    }
}
