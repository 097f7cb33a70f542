//! One line of the doctor's report about something other than running guests.

use serde::Serialize;

/// How much of a thing is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// All of it.
    Ok,
    /// It works with the restriction that `meaning` names.
    Limited,
    /// Not there.
    Missing,
}

impl Status {
    /// The word used in both renderings.
    pub fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Limited => "limited",
            Self::Missing => "missing",
        }
    }
}

/// What was looked at, what was found, and what follows from it.
#[derive(Clone, Debug, Serialize)]
pub struct Check {
    /// Stable name, such as `userfaultfd` or `kvm-irqfd`.
    pub name: &'static str,
    /// How much of it is there.
    pub status: Status,
    /// Whether no guest can run without it.
    pub required: bool,
    /// The datum: a version, a number, a path, an error.
    pub value: String,
    /// What CubeVMM does with it, or what it cannot do without it.
    pub meaning: &'static str,
    /// One line that tells how to get the whole of it; absent when there is nothing to cure.
    pub cure: Option<String>,
}

impl Check {
    pub(super) fn ok(name: &'static str, value: impl Into<String>, meaning: &'static str) -> Self {
        let value = value.into();
        Self { name, status: Status::Ok, required: false, value, meaning, cure: None }
    }

    pub(super) fn limited(
        name: &'static str,
        value: impl Into<String>,
        meaning: &'static str,
        cure: impl Into<String>,
    ) -> Self {
        let cure = Some(cure.into());
        Self { status: Status::Limited, cure, ..Self::ok(name, value, meaning) }
    }

    pub(super) fn missing(
        name: &'static str,
        value: impl Into<String>,
        meaning: &'static str,
        cure: impl Into<String>,
    ) -> Self {
        Self { status: Status::Missing, ..Self::limited(name, value, meaning, cure) }
    }

    #[cfg(test)]
    pub(super) fn required(self) -> Self {
        Self { required: true, ..self }
    }
}
