//! Pure: what farrier writes down in an object that it rewrites: what was there before, and how it went.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// The annotation that holds the [`Record`], as JSON.
pub const RECORD_ANNOTATION: &str = "farrier.dev/record";

/// How a rewrite went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RecordState {
    /// The image is set, and the first pods are watched until the deadline.
    #[default]
    Set,
    /// The pods did not get ready, and the image before it was put back. It is not set again.
    Failed,
    /// `farrier rollback` put the image before it back. It is not set again.
    RolledBack,
    /// Somebody else changed the value back twice. It is left.
    Conflict,
}

/// What became of one field: a container's name, or `spec` for an operator's resource.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FieldRecord {
    /// What farrier set.
    pub set: serde_json::Value,
    /// What it replaced: the value to go back to. Not farrier's own last value where that never came up.
    pub replaced: serde_json::Value,
    /// When.
    pub at: Timestamp,
    /// How it went.
    #[serde(default)]
    pub state: RecordState,
    /// How often somebody else changed it back.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub changed_back: u32,
    /// Why it failed, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands over a reference")]
fn is_zero(count: &u32) -> bool {
    *count == 0
}

/// All fields of one object, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Record(pub BTreeMap<String, FieldRecord>);
