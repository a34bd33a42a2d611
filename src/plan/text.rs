//! Pure: how checked types and reasons are written in the JSON form.

use std::{fmt::Display, sync::Arc};

use serde::{Serialize, Serializer, ser::SerializeStruct};

use crate::kernel::KernelTarget;

/// A value by its text.
pub(super) fn one<S: Serializer>(value: &impl Display, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(value)
}

/// A value by its text, or null.
#[expect(clippy::ref_option, reason = "serde hands over the field as it is")]
pub(super) fn optional<S: Serializer>(
    value: &Option<impl Display>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    match value {
        Some(value) => serializer.collect_str(value),
        None => serializer.serialize_none(),
    }
}

/// A shared value, written out.
pub(super) fn shared<S: Serializer>(value: &Arc<impl Serialize>, serializer: S) -> Result<S::Ok, S::Error> {
    value.as_ref().serialize(serializer)
}

/// A list of values by their texts.
pub(super) fn many<S: Serializer>(values: &[impl Display], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(values.iter().map(ToString::to_string))
}

/// `{"os", "osVersion", "release", "arch"}`.
pub(super) fn target<S: Serializer>(target: &KernelTarget, serializer: S) -> Result<S::Ok, S::Error> {
    let KernelTarget { os, os_version, release, arch } = target;
    let mut fields = serializer.serialize_struct("KernelTarget", 4)?;
    fields.serialize_field("os", os.as_str())?;
    fields.serialize_field("osVersion", os_version.as_str())?;
    fields.serialize_field("release", release.as_str())?;
    fields.serialize_field("arch", arch.as_str())?;
    fields.end()
}

/// A reason's own fields, and the sentence for people as `message`.
pub(super) fn explained<R: Serialize + Display, S: Serializer>(
    reason: &R,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    #[derive(Serialize)]
    struct Explained<'a, R> {
        #[serde(flatten)]
        reason: &'a R,
        message: String,
    }
    Explained { reason, message: reason.to_string() }.serialize(serializer)
}
