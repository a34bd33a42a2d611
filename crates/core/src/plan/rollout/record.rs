//! Pure: what farrier writes down in an object that it rewrites: what was there before, and how it went.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::super::{HoldReason, RECORD_ANNOTATION, with_short_digests};

/// A value that has stood for so long is undisputed: earlier changes back are forgotten.
pub(super) const PEACE: SignedDuration = SignedDuration::from_hours(1);

/// Rewrites of a field that are remembered beside the last one.
const HISTORY: usize = 5;

/// How a rewrite went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RecordState {
    /// The value is set, and the first pods are watched until the deadline.
    #[default]
    Set,
    /// The first pods got ready. The rollout does not look at them any more: what happens to a node
    /// months later is not the image's doing, and must not put an old one back.
    Good,
    /// The pods did not get ready, and the value before it was put back. It is not set again.
    Failed,
    /// `farrier rollback` put the value before it back. It is not set again.
    RolledBack,
    /// Another writer changed the value back twice. It is left.
    Conflict,
}

/// What became of one field: a container's name, or `spec` for an operator's resource.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FieldRecord {
    /// What farrier set.
    pub set: Value,
    /// What it replaced: the value to go back to. A value that another writer had put there, or a value of farrier's that
    /// came up; never one of farrier's that did not.
    pub replaced: Value,
    /// When it was set.
    pub at: Timestamp,
    /// How it went.
    #[serde(default)]
    pub state: RecordState,
    /// How often another writer changed it back without an hour's peace.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub changed_back: u32,
    /// Why it failed, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// What became of the rewrites before, the newest first. Nothing is decided from it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub earlier: Vec<Earlier>,
}

/// A rewrite that another one followed, in words: what names an image would keep it from being collected (`farrier gc`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Earlier {
    /// What farrier set.
    pub set: String,
    /// What it replaced; empty in records of farriers that did not keep it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub replaced: String,
    /// When.
    pub at: Timestamp,
    /// How it went.
    #[serde(default)]
    pub state: RecordState,
    /// Why it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// A value that no word of names an image.
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

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands over a reference")]
fn is_zero(count: &u32) -> bool {
    *count == 0
}

impl FieldRecord {
    /// The value that farrier wrote last; `None` where it left the field to another writer.
    pub fn written(&self) -> Option<&Value> {
        match self.state {
            RecordState::Set | RecordState::Good => Some(&self.set),
            RecordState::Failed | RecordState::RolledBack => Some(&self.replaced),
            RecordState::Conflict => None,
        }
    }

    /// Why the value is not set again, where it was taken back.
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

    /// The rewrites up to this one, for the record of one that sets this value.
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

    /// Has it stood for an hour? A record from the future has not: clocks jump.
    pub(super) fn at_peace(&self, now: Timestamp) -> bool {
        now.duration_since(self.at) >= PEACE
    }
}

/// All fields of one object, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Record(pub BTreeMap<String, FieldRecord>);

impl Record {
    /// The record among an object's annotations; an empty one where there is none. A record that cannot be read is
    /// no reason to forget what it may say.
    pub fn of(annotations: &BTreeMap<String, String>) -> Result<Self, HoldReason> {
        let Some(text) = annotations.get(RECORD_ANNOTATION) else { return Ok(Self::default()) };
        serde_json::from_str(text).map_err(|error| HoldReason::BadRecord { detail: error.to_string() })
    }

    /// The record with one field's entry replaced.
    pub(super) fn with(&self, field: &str, record: FieldRecord) -> Self {
        let mut fields = self.0.clone();
        fields.insert(field.to_owned(), record);
        Self(fields)
    }

    /// farrier's annotations on an object that had these: the others of its own stay named, because an apply gives
    /// up what it does not name.
    pub(super) fn annotations(&self, before: &BTreeMap<String, String>) -> BTreeMap<String, String> {
        let mut annotations = before.clone();
        if self.0.is_empty() {
            return annotations;
        }
        // Strings, numbers and timestamps: there is nothing in it that JSON cannot hold.
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
