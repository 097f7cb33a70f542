//! How a node's names are written: as byte strings, not as lists of numbers. In postcard the two are the
//! same bytes, and these are read and written at once.

use std::fmt;

use serde::de::{self, Deserializer, Visitor};
use serde::{Deserialize, Serialize, Serializer};

use crate::names::Name;

/// For `#[serde(with)]`.
pub fn serialize<S: Serializer>(names: &[(u64, Name)], to: S) -> Result<S::Ok, S::Error> {
    to.collect_seq(names.iter().map(|(parent, name)| (parent, Bytes(name))))
}

/// For `#[serde(with)]`.
pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<(u64, Name)>, D::Error> {
    let names = Vec::<(u64, Component)>::deserialize(from)?;
    Ok(names.into_iter().map(|(parent, Component(name))| (parent, name)).collect())
}

struct Bytes<'a>(&'a [u8]);

impl Serialize for Bytes<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_bytes(self.0)
    }
}

struct Component(Name);

impl<'de> Deserialize<'de> for Component {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_bytes(Reader)
    }
}

struct Reader;

impl Visitor<'_> for Reader {
    type Value = Component;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the bytes of a name")
    }

    fn visit_bytes<E: de::Error>(self, bytes: &[u8]) -> Result<Component, E> {
        Ok(Component(bytes.into()))
    }
}
