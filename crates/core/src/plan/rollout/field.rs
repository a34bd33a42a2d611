//! Pure: what becomes of one field that farrier sets and others may write too: never a fight, never back to
//! something that did not work.
//!
//! | the record says | the field holds | the wish | then |
//! |---|---|---|---|
//! | nothing | another value | | it is set |
//! | set | what was set | the same | the pods decide: good (noted once), or what was before is put back |
//! | set, good | what was set | another | the other is set |
//! | set, good | another value | any | changed back: set once more; the second time without an hour's peace, left |
//! | failed, rolled back | | the same | it is left until the wish changes |
//! | conflict | | the same | it is left |
//! | conflict | | another | it is set, once an hour has gone by |
//!
//! Whatever the record says, a field that holds what is wished for is not written.

use jiff::Timestamp;
use serde_json::Value;

use super::{
    HoldReason,
    record::{FieldRecord, RecordState},
    watch::Progress,
};

/// Times that a value is changed back before it is left.
const PATIENCE: u32 = 2;

/// What is done with one field.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Step {
    /// Nothing: it holds what is wished for.
    Keep,
    /// Its value stays, and this is noted.
    Note(FieldRecord),
    /// It gets the record's `set`.
    Set(FieldRecord),
    /// It gets the record's `replaced` back, and the wish is held.
    PutBack(FieldRecord, HoldReason),
    /// It is left; where there is a record, this is noted.
    Leave(Option<FieldRecord>, HoldReason),
}

/// One field: what is wished for and what is found.
pub(super) struct Field<'a> {
    /// What the record says, if there is one.
    pub(super) record: Option<&'a FieldRecord>,
    /// What it holds.
    pub(super) current: &'a Value,
    /// What it is to hold.
    pub(super) wished: &'a Value,
    /// The time of the plan.
    pub(super) now: Timestamp,
}

/// Decides. `progress` tells how the pods with the recorded value do; it is asked only where that matters.
pub(super) fn decide(field: &Field<'_>, progress: impl FnOnce(&FieldRecord) -> Progress) -> Step {
    let Field { record, current, wished, now } = *field;
    let fresh = |changed_back, replaced: &Value| FieldRecord {
        set: wished.clone(),
        replaced: replaced.clone(),
        at: now,
        state: RecordState::Set,
        changed_back,
        why: None,
        earlier: record.map(|record| record.history(wished)).unwrap_or_default(),
    };
    let Some(record) = record else {
        return if current == wished { Step::Keep } else { Step::Set(fresh(0, current)) };
    };
    let count = if record.at_peace(now) { 0 } else { record.changed_back };
    match record.state {
        RecordState::Set if *current == record.set => match progress(record) {
            Progress::Failed { node, messages } if current == wished => put_back(record, &node, &messages),
            Progress::Good if current == wished => {
                Step::Note(FieldRecord { state: RecordState::Good, ..record.clone() })
            }
            Progress::Good => Step::Set(fresh(count, current)),
            // It has not come up, so it is nothing to go back to.
            Progress::Waiting | Progress::Failed { .. } if current != wished => {
                Step::Set(fresh(count, &record.replaced))
            }
            Progress::Waiting | Progress::Failed { .. } => Step::Keep,
        },
        _ if current == wished => Step::Keep,
        RecordState::Good if *current == record.set => Step::Set(fresh(count, current)),
        RecordState::Set | RecordState::Good if count + 1 < PATIENCE => Step::Set(fresh(count + 1, current)),
        RecordState::Set | RecordState::Good => {
            let times = count + 1;
            let left =
                FieldRecord { state: RecordState::Conflict, changed_back: times, ..fresh(times, current) };
            Step::Leave(Some(left), HoldReason::ChangedBack { times })
        }
        RecordState::Conflict if *wished == record.set || !record.at_peace(now) => {
            Step::Leave(None, HoldReason::ChangedBack { times: record.changed_back })
        }
        RecordState::Conflict | RecordState::Failed | RecordState::RolledBack => {
            let refused = record.refused().filter(|_| *wished == record.set);
            refused.map_or_else(|| Step::Set(fresh(count, current)), |why| Step::Leave(None, why))
        }
    }
}

fn put_back(record: &FieldRecord, node: &str, messages: &[String]) -> Step {
    let said =
        if messages.is_empty() { "its containers say nothing".to_owned() } else { messages.join("; ") };
    let why = format!("on node {node}: {}", shortened(&said));
    let failed = FieldRecord { state: RecordState::Failed, why: Some(why.clone()), ..record.clone() };
    let reason = HoldReason::RolloutFailed { at: record.at, why };
    // Where nothing was before, there is nothing to go back to.
    let nothing = match &record.replaced {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        _ => false,
    };
    if nothing { Step::Leave(None, reason) } else { Step::PutBack(failed, reason) }
}

/// Annotations have a limit, and what containers say has none.
fn shortened(text: &str) -> String {
    const LONGEST: usize = 1000;
    let mut short: String = text.chars().take(LONGEST).collect();
    if short.len() < text.len() {
        short.push_str("...");
    }
    short
}
