//! Decides about one field that farrier sets and that other writers may set too. farrier does not repeat a write that another
//! writer reverts, and does not set a value again that did not work.
//!
//! | state of the record | field holds | desired value | decision |
//! |---|---|---|---|
//! | none | another value | any | set the desired value |
//! | set | recorded value | recorded value | pods ready: record `good` once; pods failed: restore the previous value; registry does not answer: restart the deadline |
//! | set, good | recorded value | another value | set the desired value |
//! | set, good | another value | any | another writer reverted it: set it again; leave the field after a second revert within an hour |
//! | failed, rolled back | any | recorded value | leave the field until the desired value changes |
//! | conflict | any | recorded value | leave the field |
//! | conflict | any | another value | set the desired value, once an hour has passed |
//! | set, good, by another instance | recorded value | another value | leave the field |
//!
//! Whatever the state of the record, a field that already holds the desired value is not written.

use jiff::Timestamp;
use serde_json::Value;

use super::{
    HoldReason,
    record::{FieldRecord, RecordState},
    watch::Progress,
};
use crate::plan::Instance;

/// Number of reverts by another writer after which farrier leaves the field.
const MAX_REVERTS: u32 = 2;

/// Decision about one field.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum FieldDecision {
    /// Keep the field: it holds the desired value.
    Keep,
    /// Keep the value and update the record.
    UpdateRecord(FieldRecord),
    /// Set the field to the record's `set`.
    Set(FieldRecord),
    /// Restore the record's `replaced`, and hold the rollout.
    Restore(FieldRecord, HoldReason),
    /// Hold the rollout without a write to the field; update the record where one is given.
    Hold(Option<FieldRecord>, HoldReason),
}

/// One field with its desired and its current value.
pub(super) struct Field<'a> {
    /// Record of the field, if any.
    pub(super) record: Option<&'a FieldRecord>,
    /// Current value.
    pub(super) current: &'a Value,
    /// Desired value.
    pub(super) desired: &'a Value,
    /// Time of the plan.
    pub(super) now: Timestamp,
    /// This farrier.
    pub(super) instance: &'a Instance,
}

/// Decides about a field. `progress` returns the progress of the pods with the recorded value; it is called only where
/// the decision depends on the pods.
pub(super) fn decide(field: &Field<'_>, progress: impl FnOnce(&FieldRecord) -> Progress) -> FieldDecision {
    let Field { record, current, desired, now, instance } = *field;
    let new_record = |changed_back, replaced: &Value| FieldRecord {
        set: desired.clone(),
        replaced: replaced.clone(),
        at: now,
        state: RecordState::Set,
        changed_back,
        why: None,
        by: instance.to_string(),
        earlier: record.map(|record| record.history(desired)).unwrap_or_default(),
    };
    let Some(record) = record else {
        return if current == desired {
            FieldDecision::Keep
        } else {
            FieldDecision::Set(new_record(0, current))
        };
    };
    let is_desired = current == desired;
    let current = if record.holds(current) { &record.set } else { current };
    let desired = if is_desired { current } else { desired };
    // Otherwise, two instances would overwrite each other forever.
    let is_from_other = !record.by.is_empty() && record.by != instance.to_string();
    let is_in_place = matches!(record.state, RecordState::Set | RecordState::Good) && *current == record.set;
    if is_from_other && is_in_place && current != desired {
        return FieldDecision::Hold(None, HoldReason::OtherInstance { name: record.by.clone() });
    }
    let reverts = if record.is_quiet(now) { 0 } else { record.changed_back };
    match record.state {
        RecordState::Set if *current == record.set => match progress(record) {
            Progress::Failed { node, messages } if current == desired => restore(record, &node, &messages),
            Progress::Good if current == desired => {
                FieldDecision::UpdateRecord(FieldRecord { state: RecordState::Good, ..record.clone() })
            }
            Progress::Good => FieldDecision::Set(new_record(reverts, current)),
            Progress::Stalled if current == desired => {
                FieldDecision::UpdateRecord(FieldRecord { at: now, ..record.clone() })
            }
            // The recorded value never worked, so keep the previous value as the one to restore.
            Progress::Waiting | Progress::Stalled | Progress::Failed { .. } if current != desired => {
                FieldDecision::Set(new_record(reverts, &record.replaced))
            }
            Progress::Waiting | Progress::Stalled | Progress::Failed { .. } => FieldDecision::Keep,
        },
        _ if current == desired => FieldDecision::Keep,
        RecordState::Good if *current == record.set => FieldDecision::Set(new_record(reverts, current)),
        RecordState::Set | RecordState::Good if reverts + 1 < MAX_REVERTS => {
            FieldDecision::Set(new_record(reverts + 1, current))
        }
        RecordState::Set | RecordState::Good => {
            let times = reverts + 1;
            let conflict = FieldRecord { state: RecordState::Conflict, ..new_record(times, current) };
            FieldDecision::Hold(Some(conflict), HoldReason::ChangedBack { times })
        }
        RecordState::Conflict if *desired == record.set || !record.is_quiet(now) => {
            FieldDecision::Hold(None, HoldReason::ChangedBack { times: record.changed_back })
        }
        RecordState::Conflict | RecordState::Failed | RecordState::RolledBack => {
            let refused = record.refused().filter(|_| *desired == record.set);
            refused.map_or_else(
                || FieldDecision::Set(new_record(reverts, current)),
                |why| FieldDecision::Hold(None, why),
            )
        }
    }
}

fn restore(record: &FieldRecord, node: &str, messages: &[String]) -> FieldDecision {
    let detail = if messages.is_empty() {
        "its pod is not ready, and its containers give no reason; check the node".to_owned()
    } else {
        messages.join("; ")
    };
    let why = format!("on node {node}: {}", shortened(&detail));
    let failed = FieldRecord { state: RecordState::Failed, why: Some(why.clone()), ..record.clone() };
    let reason = HoldReason::RolloutFailed { at: record.at, why };
    // Without a previous value there is nothing to restore.
    let has_no_previous = match &record.replaced {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        _ => false,
    };
    if has_no_previous { FieldDecision::Hold(None, reason) } else { FieldDecision::Restore(failed, reason) }
}

/// Limits the length of container messages, because annotations have a size limit.
fn shortened(text: &str) -> String {
    const MAX_LENGTH: usize = 1000;
    let mut short: String = text.chars().take(MAX_LENGTH).collect();
    if short.len() < text.len() {
        short.push_str("...");
    }
    short
}
