//! The history of images that DaemonSets got, from the records on the DaemonSets and on their nodes.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::Serialize;

use super::{
    DaemonSetFacts, Earlier, FieldRecord, HoldReason, RecordState, RewriteRecord, record::value_text,
};
use crate::plan::{ClusterSnapshot, Table, UpgradeNote, table::table};

/// Past rewrite of a DaemonSet's image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PastUpgrade {
    /// DaemonSet, as `namespace/name`.
    pub object: String,
    /// Name of the container.
    pub container: String,
    /// Time at which the image was set.
    pub at: Timestamp,
    /// Previous image; empty where an earlier version of farrier did not record it.
    pub from: String,
    /// New image.
    pub to: String,
    /// Result of the rewrite.
    pub outcome: RecordState,
    /// Number of nodes by upgrade state, where the image was rolled out by an upgrade. Each node counts with its last
    /// upgrade.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub nodes: BTreeMap<&'static str, usize>,
    /// Reason for the failure.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// Returns the history of one DaemonSet or of all, newest first for each.
///
/// # Errors
/// There is no such DaemonSet, or its record cannot be read.
pub fn past_upgrades(
    snapshot: &ClusterSnapshot,
    object: Option<&str>,
) -> Result<Vec<PastUpgrade>, HoldReason> {
    let name = |facts: &DaemonSetFacts| format!("{}/{}", facts.namespace, facts.name);
    let live = snapshot.daemon_sets.iter().filter_map(|facts| Some((name(facts), facts.live.as_ref()?)));
    let mut selected = live.filter(|(name, _)| object.is_none_or(|object| object == name)).peekable();
    if selected.peek().is_none() && object.is_some() {
        return Err(HoldReason::NOT_FOUND);
    }
    let notes: Vec<UpgradeNote> = snapshot.nodes.iter().flat_map(|node| UpgradeNote::all(node)).collect();
    let mut past = Vec::new();
    for (object, live) in selected {
        for (container, record) in RewriteRecord::of(&live.annotations)?.0 {
            past.extend(history(&object, &container, &record, &notes));
        }
    }
    Ok(past)
}

fn history(object: &str, container: &str, record: &FieldRecord, notes: &[UpgradeNote]) -> Vec<PastUpgrade> {
    let FieldRecord { set, replaced, at, state, changed_back: _, why, by: _, earlier } = record;
    let mut counts: BTreeMap<&'static str, usize> = BTreeMap::new();
    for note in notes.iter().filter(|note| note.rollout == object && set.as_str() == Some(note.to.as_str())) {
        *counts.entry(note.state.into()).or_default() += 1;
    }
    let (object, container) = (object.to_owned(), container.to_owned());
    let newest = PastUpgrade {
        object,
        container,
        at: *at,
        from: value_text(replaced),
        to: value_text(set),
        outcome: *state,
        nodes: counts,
        why: why.clone(),
    };
    let older = earlier.iter().map(|Earlier { set, replaced, at, state, why }| PastUpgrade {
        at: *at,
        from: replaced.clone(),
        to: set.clone(),
        outcome: *state,
        nodes: BTreeMap::new(),
        why: why.clone(),
        ..newest.clone()
    });
    let older: Vec<PastUpgrade> = older.collect();
    std::iter::once(newest).chain(older).collect()
}

/// Returns a table with one row per rewrite.
pub fn past_table(past: &[PastUpgrade]) -> Table {
    let rows = past.iter().map(|upgrade| {
        let PastUpgrade { object, container, at, from, to, outcome, nodes, why } = upgrade;
        let outcome = match outcome {
            RecordState::Set => "in progress",
            RecordState::Good => "done",
            RecordState::Failed => "failed, restored",
            RecordState::RolledBack => "rolled back",
            RecordState::Conflict => "changed by another writer",
        };
        let nodes = nodes.iter().map(|(state, count)| format!("{count} {state}"));
        let why = nodes.chain(why.clone()).collect::<Vec<_>>().join("; ");
        let subject = format!("{object}, {container}");
        vec![subject, format!("{at:.0}"), from.clone(), to.clone(), outcome.to_owned(), why]
    });
    table(&["OBJECT", "SET AT", "FROM", "TO", "OUTCOME", "NODES AND WHY"], rows)
}
