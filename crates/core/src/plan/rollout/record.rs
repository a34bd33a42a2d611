//! Pure: the record that farrier keeps in an object that it rewrites: the replaced value, and how the rewrite went.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::super::{HoldReason, RECORD_ANNOTATION, with_short_digests};

/// Time for which a value must stay before farrier forgets earlier reverts of it.
pub(super) const PEACE: SignedDuration = SignedDuration::from_hours(1);

/// Number of older rewrites that the record of a field keeps.
const HISTORY: usize = 5;

/// State of a rewrite.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RecordState {
    /// The value is set, and the first pods are watched until the deadline.
    #[default]
    Set,
    /// The first pods became ready. The rollout ignores the pods from now on: a failure months later is not caused by
    /// the image, and must not restore an old one.
    Good,
    /// The pods did not become ready, and the previous value was restored. The value is not set again.
    Failed,
    /// `farrier rollback` restored the previous value. The value is not set again.
    RolledBack,
    /// Another writer reverted the value twice. farrier leaves the field.
    Conflict,
}

/// Record of one field: a container's name, or `spec` for an operator's resource.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FieldRecord {
    /// Value that farrier set.
    pub set: Value,
    /// Replaced value, which a rollback restores. Either another writer set it, or farrier set it and it worked; never
    /// a value of farrier that did not work.
    pub replaced: Value,
    /// Time of the rewrite.
    pub at: Timestamp,
    /// State of the rewrite.
    #[serde(default)]
    pub state: RecordState,
    /// Number of reverts by another writer, with less than an hour between them.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub changed_back: u32,
    /// Reason for the failure, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// Older rewrites, newest first. For display only.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub earlier: Vec<Earlier>,
}

/// Older rewrite, in words: a value that names an image would keep that image from being garbage-collected (`farrier
/// gc`).
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

/// Formats a value so that no word of it names an image.
pub(super) fn in_words(value: &Value) -> String {
    match value {
        Value::String(text) => with_short_digests(text),
        Value::Object(fields) => fields
            .iter()
            .map(|(name, value)| format!("{name}:{}", in_words(value)))
            .collect::<Vec<_>>()
            .join(" "),
        other => other.to_string(),
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(count: &u32) -> bool {
    *count == 0
}

impl FieldRecord {
    /// Returns the value that farrier wrote last; `None` where it left the field to another writer.
    pub fn written(&self) -> Option<&Value> {
        match self.state {
            RecordState::Set | RecordState::Good => Some(&self.set),
            RecordState::Failed | RecordState::RolledBack => Some(&self.replaced),
            RecordState::Conflict => None,
        }
    }

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

    /// Returns the history for the record of a rewrite to this value: the older rewrites and this one.
    pub(super) fn history(&self, wished: &Value) -> Vec<Earlier> {
        let Self { set, replaced, at, state, changed_back: _, why, earlier } = self;
        let this = (set != wished).then(|| Earlier {
            set: in_words(set),
            replaced: in_words(replaced),
            at: *at,
            state: *state,
            why: why.as_deref().map(with_short_digests),
        });
        this.into_iter().chain(earlier.iter().cloned()).take(HISTORY).collect()
    }

    /// Whether the value has stayed for an hour. A record from the future has not, because clocks can jump.
    pub(super) fn at_peace(&self, now: Timestamp) -> bool {
        now.duration_since(self.at) >= PEACE
    }
}

/// Records of all fields of one object, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Record(pub BTreeMap<String, FieldRecord>);

impl Record {
    /// Parses the record among an object's annotations; empty where there is none. A record that cannot be parsed is an
    /// error: its history must not be dropped.
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

    /// Returns farrier's annotations for an object that had `before`. All other farrier annotations are included,
    /// because an apply gives up what it omits.
    pub(super) fn annotations(&self, before: &BTreeMap<String, String>) -> BTreeMap<String, String> {
        let mut annotations = before.clone();
        if self.0.is_empty() {
            return annotations;
        }
        // Only strings, numbers and timestamps: the serialization cannot fail.
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
            earlier: Vec::new(),
        };
        let set =
            FieldRecord { state: RecordState::RolledBack, changed_back: 0, why: None, ..failed.clone() };
        let earlier = failed.history(&"another".into());
        assert_eq!((earlier.len(), failed.history(&failed.set)), (1, Vec::new()));
        let failed = FieldRecord { earlier, ..failed };
        let record = Record([("driver".to_owned(), failed), ("init".to_owned(), set)].into());
        let text = record.annotations(&BTreeMap::new()).remove(RECORD_ANNOTATION).unwrap();
        insta::assert_snapshot!(text, @r#"{"driver":{"set":"registry.test/drivers/mft@sha256:1","replaced":"registry.test/old:1","at":"1970-01-01T00:00:00Z","state":"failed","changedBack":1,"why":"driver: CrashLoopBackOff","earlier":[{"set":"registry.test/drivers/mft@sha256:1","replaced":"registry.test/old:1","at":"1970-01-01T00:00:00Z","state":"failed","why":"driver: CrashLoopBackOff"}]},"init":{"set":"registry.test/drivers/mft@sha256:1","replaced":"registry.test/old:1","at":"1970-01-01T00:00:00Z","state":"rolled-back"}}"#);
        let annotations = [(RECORD_ANNOTATION.to_owned(), text)].into();
        assert_eq!(Record::of(&annotations), Ok(record));
    }

    #[test]
    fn what_was_earlier_keeps_no_image_from_being_collected() {
        let digest = format!("sha256:{}", "0123456789abcdef".repeat(4));
        let value =
            serde_json::json!({"image": format!("r.test/mft@{digest}"), "version": "1.0-6.1.0-47-amd64"});
        assert_eq!(in_words(&value), "image:r.test/mft@sha256:0123456789ab version:1.0-6.1.0-47-amd64");
    }

    #[test]
    fn a_record_that_cannot_be_read_is_not_taken_for_none() {
        for text in ["", "{", "[]", r#"{"driver":{}}"#, r#"{"driver":{"set":1,"replaced":2,"at":"soon"}}"#] {
            let annotations = [(RECORD_ANNOTATION.to_owned(), text.to_owned())].into();
            assert!(matches!(Record::of(&annotations), Err(HoldReason::BadRecord { .. })), "{text:?}");
        }
        assert_eq!(Record::of(&BTreeMap::new()), Ok(Record::default()));
    }

    proptest::proptest! {
        #[test]
        fn no_annotation_panics(text in "\\PC{0,60}") {
            let _ = Record::of(&[(RECORD_ANNOTATION.to_owned(), text)].into());
        }
    }
}
