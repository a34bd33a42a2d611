//! Model of the page of all rollouts. The page shows the state of each rollout, the progress of its upgrade, and its rewrites
//! with their reasons.

use std::collections::BTreeSet;

use farrier_core::plan::{
    Change, Earlier, FieldRecord, PAUSED_ANNOTATION, PlannedNodeUpgrade, PlannedRollout, PlannedUpgrade,
    RecordState, RolloutDecision, UpgradeForecast, UpgradeStage, rollout_action, upgrade_table,
};
use jiff::Timestamp;
use serde::Serialize;

use super::{
    action::{ActionLink, ActionLinks},
    details::{Fact, MAX_NAMED_NODES, fact, text},
    facts::{Facts, natural_order},
    fleet::{Link, Listed, StateClass, ago, node_link},
    history::{Rewrite, record_state},
};

/// Model of the page of all rollouts.
#[derive(Debug, Serialize)]
pub struct RolloutsPage {
    pub rollouts: Vec<RolloutView>,
}

/// A rollout target.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct RolloutView {
    pub subject: String,
    pub state: &'static str,
    pub class: StateClass,
    pub why: String,
    pub facts: Vec<Fact>,
    pub actions: Vec<ActionLink>,
    pub upgrade: Option<UpgradeView>,
    pub fields: Vec<FieldView>,
    /// Rewrites that the loop made since its start, newest first.
    pub rewrites_made: Vec<Rewrite>,
}

/// Progress of an upgrade.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct UpgradeView {
    /// Number of nodes in all stages.
    pub total: usize,
    /// Numbers of nodes by stage.
    pub stages: Vec<Stage>,
    pub nodes: Listed<NodeUpgradeView>,
}

/// A segment of the progress bar, in numbers of nodes.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Stage {
    pub from: usize,
    pub count: usize,
    pub what: &'static str,
    pub class: StateClass,
}

/// State of a node in an upgrade.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct NodeUpgradeView {
    pub node: Link,
    pub stage: &'static str,
    pub class: StateClass,
    /// Columns of `farrier upgrade plan`: the state, since when, and the reason.
    pub columns: Vec<String>,
}

impl UpgradeView {
    fn of(upgrade: &PlannedUpgrade) -> Self {
        let UpgradeForecast { done, in_progress, waiting, skipped, failed, .. } = upgrade.forecast;
        let mut total = 0;
        let counts = [
            (done, "done", StateClass::Ok),
            (in_progress, "under way", StateClass::Run),
            (failed, "failed", StateClass::Bad),
            (waiting, "to come", StateClass::Wait),
            (skipped, "skipped", StateClass::Off),
        ];
        let stages = counts.into_iter().filter(|(count, ..)| *count > 0).map(|(count, what, class)| {
            total += count;
            Stage { from: total - count, count, what, class }
        });
        let stages = stages.collect();
        let mut rows: Vec<_> = upgrade.nodes.iter().zip(upgrade_table(upgrade).rows).collect();
        rows.sort_by(|(a, _), (b, _)| a.stage.cmp(&b.stage).then_with(|| natural_order(&a.node, &b.node)));
        let node_upgrade = |(node_upgrade, mut row): (&PlannedNodeUpgrade, Vec<String>)| {
            let class = match node_upgrade.stage {
                UpgradeStage::Failed => StateClass::Bad,
                UpgradeStage::UnderWay | UpgradeStage::Begins => StateClass::Run,
                UpgradeStage::Waits => StateClass::Wait,
                UpgradeStage::Skipped => StateClass::Warn,
                UpgradeStage::Done => StateClass::Ok,
            };
            NodeUpgradeView {
                node: node_link(&node_upgrade.node),
                stage: node_upgrade.stage.into(),
                class,
                columns: row.split_off(2),
            }
        };
        Self { total, stages, nodes: Listed::unfolded(rows, MAX_NAMED_NODES).map(node_upgrade) }
    }
}

/// Rewrite of a field, from the record in the object.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct FieldView {
    pub field: String,
    pub at: String,
    pub state: &'static str,
    pub class: StateClass,
    pub set: String,
    pub replaced: String,
    pub why: String,
}

impl RolloutsPage {
    pub fn of(facts: &Facts, actions: &ActionLinks, rewrites: &[Rewrite]) -> Self {
        let rollouts = facts.plan.rollouts.iter();
        Self {
            rollouts: rollouts.map(|rollout| RolloutView::of(rollout, facts, actions, rewrites)).collect(),
        }
    }
}

impl RolloutView {
    fn of(rollout: &PlannedRollout, facts: &Facts, actions: &ActionLinks, rewrites: &[Rewrite]) -> Self {
        let (state, class) = decision_state(&rollout.decision);
        let (_, why) = rollout_action(rollout);
        let mut details = vec![fact("Strategy", <&str>::from(rollout.target.strategy))];
        if let Some(upgrade) = &rollout.upgrade {
            details.extend(upgrade_details(upgrade, facts.now));
        }
        details.extend(rollout.warnings.iter().map(|warning| fact("Warning", warning)));
        let changes = rollout.changes.iter().map(Change::object);
        details.extend(changes.map(|object| fact("Changes", object)));
        let failed = facts.failed_rewrites.get(&rollout.target);
        details.extend(failed.map(|error| fact("The last rewrite failed", error)));
        let fields = match facts.record_of(&rollout.target) {
            None => Vec::new(),
            Some(Err(why)) => {
                details.push(fact("Record", why));
                Vec::new()
            }
            Some(Ok(record)) => {
                record.0.iter().flat_map(|(name, record)| field_rewrites(name, record)).collect()
            }
        };
        let object = rollout.target.object.name().filter(|_| rollout.target.location.is_none());
        if object.as_ref().is_some_and(|name| facts.paused_objects.get(name) == Some(&true)) {
            let note = format!("{PAUSED_ANNOTATION}: farrier writes nothing to the object");
            details.push(fact("Annotation", note));
        }
        let rewrites_made = rewrites.iter().filter(|rewrite| rewrite.target == rollout.target);
        Self {
            subject: format!("{}: {}", rollout.image, rollout.target),
            state,
            class,
            why,
            facts: details,
            actions: object.and_then(|name| actions.get(&name).cloned()).unwrap_or_default(),
            upgrade: rollout.upgrade.as_ref().map(UpgradeView::of),
            fields,
            rewrites_made: rewrites_made.cloned().collect(),
        }
    }
}

/// Returns the state of a rollout, and its class.
pub fn decision_state(decision: &RolloutDecision) -> (&'static str, StateClass) {
    match decision {
        RolloutDecision::Rewrite { .. } => ("rewrite", StateClass::Run),
        RolloutDecision::Steps { .. } => ("steps", StateClass::Run),
        RolloutDecision::Pending { .. } => ("pending", StateClass::Wait),
        RolloutDecision::AlreadySet { .. } => ("already-set", StateClass::Ok),
        RolloutDecision::Settled { .. } => ("settled", StateClass::Ok),
        RolloutDecision::Hold(why) if why.is_failure() => ("hold", StateClass::Bad),
        RolloutDecision::Hold(_) => ("hold", StateClass::Warn),
    }
}

/// Returns the images that the nodes of an upgrade get, and the time left.
fn upgrade_details(upgrade: &PlannedUpgrade, now: Timestamp) -> Vec<Fact> {
    let images: BTreeSet<&str> = upgrade.nodes.iter().map(|node| node.to.as_str()).collect();
    let images: Vec<&str> = images.into_iter().filter(|image| !image.is_empty()).collect();
    let mut details = vec![match images.as_slice() {
        [image] => fact("Gets", image),
        images => fact("Gets", format!("{} images", images.len())),
    }];
    let UpgradeForecast { ends, seconds_per_node, .. } = upgrade.forecast;
    if let Some(end) = ends {
        let precision = if seconds_per_node.is_some() { "about" } else { "at least" };
        details.push(fact("Time left", format!("{precision} {}, until {end:.0}", time_left(now, end))));
    }
    details
}

/// Returns the rewrites of one field, newest first.
fn field_rewrites(name: &str, record: &FieldRecord) -> Vec<FieldView> {
    let FieldRecord { set, replaced, at, state, changed_back, why, by: _, earlier } = record;
    let reverts = (*changed_back > 0)
        .then(|| format!("changed back {changed_back} time{}", if *changed_back == 1 { "" } else { "s" }));
    let why = reverts.into_iter().chain(why.clone()).collect::<Vec<_>>().join("; ");
    let view = |time: &Timestamp, state: &RecordState, set: String, replaced: String, why: String| {
        let (state, class) = record_state(*state);
        FieldView { field: name.to_owned(), at: format!("{time:.0}"), state, class, set, replaced, why }
    };
    let older = earlier.iter().map(|Earlier { set, replaced, at, state, why }| {
        view(at, state, set.clone(), replaced.clone(), why.clone().unwrap_or_default())
    });
    std::iter::once(view(at, state, text(set), text(replaced), why)).chain(older).collect()
}

/// Formats the time from `now` until `end`: `40 min`.
fn time_left(now: Timestamp, end: Timestamp) -> String {
    if end.duration_since(now).as_secs() < 60 { "a minute".to_owned() } else { ago(now, end) }
}
