//! Record of farrier's rewrites of a cluster object, kept in an annotation of the object: the values before and after, and the
//! outcome.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{
    super::{HoldReason, RECORD_ANNOTATION, with_short_digests},
    watch::is_same_image,
};
use crate::definition::is_default;

/// Time without a change after which farrier no longer counts earlier reverts of a field.
pub(super) const QUIET_PERIOD: SignedDuration = SignedDuration::from_hours(1);

/// Maximum number of older rewrites in the record of a field.
const HISTORY_LIMIT: usize = 5;

/// State of a rewrite.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RecordState {
    /// farrier set the value, and watches the first pods until the deadline.
    #[default]
    Set,
    /// The first pods became ready. From now on, the rollout ignores pod failures: the image does not cause a failure
    /// months later, so a failure must not restore an old image.
    Good,
    /// The pods did not become ready, and the previous value was restored. The value is not set again.
    Failed,
    /// `farrier rollback` restored the previous value. The value is not set again.
    RolledBack,
    /// Another writer reverted the value twice. farrier leaves the field to that writer.
    Conflict,
}

/// Record of one field, which is a container's image or the `spec` of an operator's resource.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FieldRecord {
    /// Value that farrier set.
    pub set: Value,
    /// Replaced value, which a rollback restores. Another writer set the value, or farrier set it and its pods became
    /// ready. A failed value is never recorded here.
    pub replaced: Value,
    /// Time of the rewrite. While nodes get no answer from the registry, the time of a later reconcile.
    pub at: Timestamp,
    /// State of the rewrite.
    #[serde(default)]
    pub state: RecordState,
    /// Number of successive reverts by another writer, each less than an hour after the previous one.
    #[serde(default, skip_serializing_if = "is_default")]
    pub changed_back: u32,
    /// Reason for the failure, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// Name of the farrier that set the value; empty in records of older versions.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub by: String,
    /// Older rewrites, newest first. For display only.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub earlier: Vec<Earlier>,
}

/// Older rewrite. Its values are text with shortened digests: a complete image reference would protect that image from
/// garbage collection (`farrier gc`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Earlier {
    /// Value that farrier set.
    pub set: String,
    /// Replaced value; empty in records of older versions of farrier.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub replaced: String,
    /// Time of the rewrite.
    pub at: Timestamp,
    /// State of the rewrite.
    #[serde(default)]
    pub state: RecordState,
    /// Reason for the failure.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// Formats a value as text with shortened digests, so that the text references no image.
pub(super) fn value_text(value: &Value) -> String {
    match value {
        Value::String(text) => with_short_digests(text),
        Value::Object(fields) => fields
            .iter()
            .map(|(name, value)| format!("{name}:{}", value_text(value)))
            .collect::<Vec<_>>()
            .join(" "),
        other => other.to_string(),
    }
}

impl FieldRecord {
    /// Returns the reason for not setting the value again, if it failed or was rolled back.
    pub(super) fn refused(&self) -> Option<HoldReason> {
        match self.state {
            RecordState::Failed => {
                let why = self.why.clone().unwrap_or_default();
                Some(HoldReason::RolloutFailed { at: self.at, why })
            }
            RecordState::RolledBack => Some(HoldReason::RolledBack { at: self.at }),
            RecordState::Set | RecordState::Good | RecordState::Conflict => None,
        }
    }

    /// Whether a field's value is the recorded one. A webhook may write another registry into an image: the digest decides.
    pub(super) fn holds(&self, current: &Value) -> bool {
        match (current, &self.set) {
            (Value::String(current), Value::String(set)) => is_same_image(current, set),
            (current, set) => current == set,
        }
    }

    /// Returns the history for the next record, which sets `desired`: this rewrite, unless it set the same value, and the
    /// older rewrites.
    pub(super) fn history(&self, desired: &Value) -> Vec<Earlier> {
        let Self { set, replaced, at, state, changed_back: _, why, by: _, earlier } = self;
        let current = (set != desired).then(|| Earlier {
            set: value_text(set),
            replaced: value_text(replaced),
            at: *at,
            state: *state,
            why: why.as_deref().map(with_short_digests),
        });
        current.into_iter().chain(earlier.iter().cloned()).take(HISTORY_LIMIT).collect()
    }

    /// Whether the record is at least an hour old. A record from the future, which a clock jump can cause, counts as younger.
    pub(super) fn is_quiet(&self, now: Timestamp) -> bool {
        now.duration_since(self.at) >= QUIET_PERIOD
    }
}

/// Records of all fields of one object. The key is a container's name, or `spec` for an operator's resource.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RewriteRecord(pub BTreeMap<String, FieldRecord>);

impl RewriteRecord {
    /// Parses the record in an object's annotations; empty without the annotation. An unparsable record is an error,
    /// because the next write would overwrite its history.
    pub fn of(annotations: &BTreeMap<String, String>) -> Result<Self, HoldReason> {
        let Some(text) = annotations.get(RECORD_ANNOTATION) else { return Ok(Self::default()) };
        serde_json::from_str(text).map_err(|error| HoldReason::BadRecord { detail: error.to_string() })
    }

    /// Returns the record with one field's entry replaced.
    pub(super) fn with(&self, field: &str, record: FieldRecord) -> Self {
        let mut fields = self.0.clone();
        fields.insert(field.to_owned(), record);
        Self(fields)
    }

    /// Returns farrier's annotations for an object: the annotations in `before`, and this record. A server-side apply removes
    /// annotations that it omits, so the result includes all of farrier's annotations.
    pub(super) fn annotations(&self, before: &BTreeMap<String, String>) -> BTreeMap<String, String> {
        let mut annotations = before.clone();
        if self.0.is_empty() {
            return annotations;
        }
        // The record contains only strings, numbers and timestamps, so its serialization cannot fail.
        let text = serde_json::to_string(self).unwrap_or_default();
        annotations.insert(RECORD_ANNOTATION.to_owned(), text);
        annotations
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_json_form_is_stable() {
        let failed = FieldRecord {
            set: "registry.test/drivers/mft@sha256:1".into(),
            replaced: "registry.test/old:1".into(),
            at: Timestamp::UNIX_EPOCH,
            state: RecordState::Failed,
            changed_back: 1,
            why: Some("driver: CrashLoopBackOff".to_owned()),
            by: String::new(),
            earlier: Vec::new(),
        };
        let set =
            FieldRecord { state: RecordState::RolledBack, changed_back: 0, why: None, ..failed.clone() };
        let earlier = failed.history(&"another".into());
        assert_eq!((earlier.len(), failed.history(&failed.set)), (1, Vec::new()));
        let failed = FieldRecord { earlier, ..failed };
        let record = RewriteRecord([("driver".to_owned(), failed), ("init".to_owned(), set)].into());
        let text = record.annotations(&BTreeMap::new()).remove(RECORD_ANNOTATION).unwrap();
        insta::assert_snapshot!(text, @r#"{"driver":{"set":"registry.test/drivers/mft@sha256:1","replaced":"registry.test/old:1","at":"1970-01-01T00:00:00Z","state":"failed","changedBack":1,"why":"driver: CrashLoopBackOff","earlier":[{"set":"registry.test/drivers/mft@sha256:1","replaced":"registry.test/old:1","at":"1970-01-01T00:00:00Z","state":"failed","why":"driver: CrashLoopBackOff"}]},"init":{"set":"registry.test/drivers/mft@sha256:1","replaced":"registry.test/old:1","at":"1970-01-01T00:00:00Z","state":"rolled-back"}}"#);
        let annotations = [(RECORD_ANNOTATION.to_owned(), text)].into();
        assert_eq!(RewriteRecord::of(&annotations), Ok(record));
    }

    #[test]
    fn the_history_protects_no_image_from_garbage_collection() {
        let digest = format!("sha256:{}", "0123456789abcdef".repeat(4));
        let value =
            serde_json::json!({"image": format!("r.test/mft@{digest}"), "version": "1.0-6.1.0-47-amd64"});
        assert_eq!(value_text(&value), "image:r.test/mft@sha256:0123456789ab version:1.0-6.1.0-47-amd64");
    }

    #[test]
    fn an_unparsable_record_is_an_error() {
        for text in ["", "{", "[]", r#"{"driver":{}}"#, r#"{"driver":{"set":1,"replaced":2,"at":"soon"}}"#] {
            let annotations = [(RECORD_ANNOTATION.to_owned(), text.to_owned())].into();
            assert!(matches!(RewriteRecord::of(&annotations), Err(HoldReason::BadRecord { .. })), "{text:?}");
        }
        assert_eq!(RewriteRecord::of(&BTreeMap::new()), Ok(RewriteRecord::default()));
    }

    proptest::proptest! {
        #[test]
        fn no_annotation_panics(text in "\\PC{0,60}") {
            let _ = RewriteRecord::of(&[(RECORD_ANNOTATION.to_owned(), text)].into());
        }
    }
}
