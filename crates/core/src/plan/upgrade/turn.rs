//! Decides the next step on one node in progress.
//!
//! Every state ends, whatever happens to the node or its pods: the node enters the next state, or farrier gives up after
//! a timeout and uncordons the node. While the registry does not answer the node, the timeout starts again
//! ([`crate::plan::PodFacts::awaits_registry`]).

use jiff::SignedDuration;

use super::{
    DriverPod, JobKind, JobState, Upgrade, UpgradeNode, UpgradeNote, UpgradeState, UpgradeWait,
    note::{hand_over, set_note, uncordon},
};
use crate::{
    image::{Period, WaitFor},
    plan::{Change, NodeCheck, PodRestart, WorkloadFacts, labels::operator_upgrade_in_progress},
};

/// Largest difference between farrier's clock and the API server's that is tolerated.
const MAX_CLOCK_SKEW: SignedDuration = SignedDuration::from_mins(1);

/// Changes to make now, and the condition that the node waits for.
pub(super) struct UpgradeStep {
    pub(super) changes: Vec<Change>,
    pub(super) waits: Option<UpgradeWait>,
}

impl From<Change> for UpgradeStep {
    fn from(change: Change) -> Self {
        Self { changes: vec![change], waits: None }
    }
}

impl From<UpgradeWait> for UpgradeStep {
    fn from(wait: UpgradeWait) -> Self {
        Self { changes: Vec::new(), waits: Some(wait) }
    }
}

/// The upgrade of one node in progress.
pub(super) struct Turn<'a> {
    pub(super) upgrade: &'a Upgrade<'a>,
    pub(super) node: &'a UpgradeNode<'a>,
    pub(super) note: &'a UpgradeNote,
}

impl Turn<'_> {
    /// Returns the next step.
    pub(super) fn next(&self) -> UpgradeStep {
        let Self { upgrade, node, note } = *self;
        if note.since > upgrade.now {
            // The note comes from a clock that jumped: restart the timeout of this state now.
            return self.rewrite(&UpgradeNote { since: upgrade.now, ..note.clone() });
        }
        if note.cordoned && !node.facts.unschedulable {
            // Another actor removed farrier's cordon. A later cordon is not farrier's.
            return self.rewrite(&UpgradeNote { cordoned: false, ..note.clone() });
        }
        // The operator itself drains and uncordons the node. The timeout of this state restarts when the operator is
        // done.
        match operator_upgrade_in_progress(&node.facts.labels) {
            Some((label, state)) => {
                let why = Some("left to the operator's upgrade controller".to_owned());
                let skipped = UpgradeNote { why, ..note.clone() };
                let change = note.why.is_none().then(|| set_note(node.facts, Some(&skipped), None));
                return UpgradeStep {
                    changes: change.into_iter().collect(),
                    waits: Some(UpgradeWait::Operator { label, state: state.to_owned() }),
                };
            }
            None if note.why.is_some() => {
                // Earlier results of a check or an unload forecast no longer count.
                let now = upgrade.now;
                let resumed = UpgradeNote { since: now, began: now, why: None, ..note.clone() };
                return self.rewrite(&resumed);
            }
            None => {}
        }
        if node.fits == Some(false) {
            // The node booted another kernel, so its state is no evidence about the image: end its upgrade.
            return uncordon(node.facts, note, None).into();
        }
        let driver = node.running_pod();
        let is_current = driver.is_some_and(|driver| driver.is_current);
        if matches!(note.state, UpgradeState::Cordoned | UpgradeState::Drained)
            && !is_current
            && driver.is_some()
            && let Some(wait) = node.blocks_pods()
        {
            // The node would lose its driver and get no other: keep the old one.
            if self.is_late(upgrade.spec.timeout.signed_duration()) {
                return self.end(UpgradeState::NotDrained, Some(wait.to_string()));
            }
            return wait.into();
        }
        match note.state {
            UpgradeState::Cordoned | UpgradeState::Drained if is_current || self.lost_driver() => {
                self.enter(UpgradeState::DriverRestarted)
            }
            UpgradeState::Cordoned | UpgradeState::Drained if upgrade.cannot_list_pods.is_some() => {
                let why = upgrade.cannot_list_pods.map(|why| format!("its pods cannot be listed: {why}"));
                self.end(UpgradeState::NotDrained, why)
            }
            UpgradeState::Cordoned | UpgradeState::Drained if !node.users.is_empty() => self.drain(),
            UpgradeState::Cordoned => self.enter(UpgradeState::Drained),
            UpgradeState::Drained => self.replace(),
            UpgradeState::DriverRestarted => self.check(),
            UpgradeState::Checked
            | UpgradeState::Uncordoned
            | UpgradeState::NotDrained
            | UpgradeState::Failed => self.end(UpgradeState::Uncordoned, None),
        }
    }

    fn drain(&self) -> UpgradeStep {
        let (spec, node) = (self.upgrade.spec, self.node);
        let count = node.users.len();
        if self.is_timed_out() {
            return self.give_up(format!("pods left on the node after {}: {count}", spec.timeout));
        }
        let remaining = node.users.iter().filter(|user| !user.deleting);
        let why = format!("node {} gets another driver", node.facts.name);
        let evict = |user: &&WorkloadFacts| {
            Change::Restart(PodRestart {
                namespace: user.namespace.clone(),
                name: user.name.clone(),
                uid: user.uid.clone(),
                why: why.clone(),
                drained: true,
                grace_seconds: spec.grace_seconds,
            })
        };
        UpgradeStep { changes: remaining.map(evict).collect(), waits: Some(UpgradeWait::Users { count }) }
    }

    /// Returns the step of the unload forecast; `None` where the old driver can be unloaded, or no forecast is configured. A
    /// driver that cannot be unloaded would leave the node without a working one.
    fn forecast_unload(&self) -> Option<UpgradeStep> {
        let (spec, node) = (self.upgrade.spec, self.node);
        let template = spec.forecast.as_ref()?;
        let holders: Vec<&str> = node.holders.iter().map(|holder| holder.description.as_str()).collect();
        let holders = (!holders.is_empty()).then(|| holders.join("; "));
        Some(match &node.unload_forecast {
            Some(JobState::Succeeded) => return None,
            Some(JobState::Failed(why)) => {
                let why = holders.as_ref().unwrap_or(why);
                self.give_up(format!("its driver cannot be unloaded: {why}"))
            }
            None | Some(JobState::WithoutPod | JobState::Running) if self.is_timed_out() => {
                let detail = holders.map(|holders| format!(": {holders}")).unwrap_or_default();
                let timeout = spec.timeout;
                self.give_up(format!(
                    "the unload forecast found no way to unload the driver within {timeout}{detail}"
                ))
            }
            None => {
                let driver_pod = node.running_pod().map(|driver| driver.pod.version.uid.clone());
                let change = self.job(template, JobKind::Forecast, driver_pod);
                UpgradeStep { changes: vec![change], waits: Some(UpgradeWait::Forecast { holders: None }) }
            }
            Some(JobState::WithoutPod | JobState::Running) => UpgradeWait::Forecast { holders }.into(),
        })
    }

    fn job(&self, template: &str, kind: JobKind, driver_pod: Option<String>) -> Change {
        let node = &self.node.facts.name;
        Change::Check(NodeCheck {
            node: node.clone(),
            namespace: self.upgrade.namespace.to_owned(),
            template: template.to_owned(),
            name: self.note.job_name(kind, node),
            driver_pod,
        })
    }

    /// Replaces the old driver pod by a new one.
    fn replace(&self) -> UpgradeStep {
        let Self { upgrade, node, note } = *self;
        // The API server's clock sets the creation time, and may be ahead of farrier's.
        let evicted_by = note.since.checked_add(MAX_CLOCK_SKEW).unwrap_or(note.since);
        let is_new = |driver: &DriverPod<'_>| driver.pod.created > Some(evicted_by);
        // A webhook may write another image into pods. Another new pod would get the same image, so fail.
        if node.hand_over.is_none()
            && note.to == node.target
            && let Some(driver) = node.running_pod().filter(is_new)
        {
            return self.fail(format!("its new pod has image {}, not {}", driver.image, node.target));
        }
        if let (Some(_), Some(next)) = (node.running_pod(), self.forecast_unload()) {
            return next;
        }
        if self.is_timed_out() {
            let timeout = upgrade.spec.timeout;
            return self.give_up(format!("its driver's pod was not replaced within {timeout}"));
        }
        let change = match (node.hand_over, node.running_pod()) {
            (None, None) => return UpgradeWait::Driver.into(),
            // Keep the old driver until the node's kernel, which the new driver must fit, is known.
            _ if node.fits.is_none() => return UpgradeWait::KernelUnknown.into(),
            (Some(label), _) => hand_over(node.facts, label),
            (None, Some(DriverPod { pod, .. })) => Change::Restart(PodRestart {
                namespace: pod.namespace.clone(),
                name: pod.name.clone(),
                uid: pod.version.uid.clone(),
                why: format!("node {} gets {}", node.facts.name, node.target),
                ..PodRestart::default()
            }),
        };
        UpgradeStep { changes: vec![change], waits: Some(UpgradeWait::Driver) }
    }

    fn check(&self) -> UpgradeStep {
        let Self { upgrade, node, note } = *self;
        let ready_by = upgrade.deadline.saturating_add(upgrade.stable_for);
        let checked_by = ready_by.saturating_add(upgrade.spec.timeout.signed_duration());
        match node.running_pod() {
            // The DaemonSet has another image again, for example because the previous image was restored.
            Some(driver) if !driver.is_current => return self.enter(UpgradeState::Drained),
            Some(driver) if driver.pod.is_stable(upgrade.stable_for, upgrade.now) => {}
            Some(driver) if driver.pod.awaits_registry(upgrade.is_registry_down, upgrade.now) => {
                // The pod needs time when the registry answers.
                let restarted = UpgradeNote { since: upgrade.now, ..note.clone() };
                let is_half_over = self.is_late(ready_by / 2);
                return UpgradeStep {
                    changes: is_half_over
                        .then(|| set_note(node.facts, Some(&restarted), None))
                        .into_iter()
                        .collect(),
                    waits: Some(UpgradeWait::Registry { why: driver.pod.messages.join("; ") }),
                };
            }
            driver if self.is_late(ready_by) => {
                let taint = node.taint.filter(|_| driver.is_none());
                let messages = match (driver, taint) {
                    (Some(driver), _) => driver.pod.messages.join("; "),
                    (None, Some(taint)) => format!("taint {taint} keeps its pod off"),
                    (None, None) => String::new(),
                };
                let within = format!("its new driver was not ready within {}", whole_seconds(ready_by));
                let why = if messages.is_empty() { within } else { format!("{within}: {messages}") };
                // A taint is no evidence about the image.
                let unchecked = UpgradeNote { unchecked: note.unchecked || taint.is_some(), ..note.clone() };
                return Turn { upgrade, node, note: &unchecked }.fail(why);
            }
            _ => return UpgradeWait::Driver.into(),
        }
        let wait = match (&upgrade.spec.wait_for, &node.check) {
            (WaitFor::PodsReady, _) | (WaitFor::Job(_), Some(JobState::Succeeded)) => {
                return self.enter(UpgradeState::Checked);
            }
            (WaitFor::Annotation, _) if node.is_confirmed() => {
                return self.enter(UpgradeState::Checked);
            }
            (WaitFor::Job(_), Some(JobState::Failed(why))) => {
                return self.fail(format!("its check failed: {why}"));
            }
            (WaitFor::Job(template), None | Some(JobState::WithoutPod)) if self.is_late(checked_by) => {
                let namespace = upgrade.namespace;
                let why = if node.check.is_none() {
                    format!("see CronJob {template} of {namespace}")
                } else {
                    let job = note.job_name(JobKind::Check, &node.facts.name);
                    format!("Job {job} of {namespace} has no pod, see its Events")
                };
                let unchecked = UpgradeNote { unchecked: true, ..note.clone() };
                return Turn { upgrade, node, note: &unchecked }
                    .fail(format!("its check could not be run: {why}"));
            }
            (WaitFor::Job(template), None) => {
                let change = self.job(template, JobKind::Check, None);
                return UpgradeStep { changes: vec![change], waits: Some(UpgradeWait::Job) };
            }
            (WaitFor::Job(_), Some(JobState::WithoutPod | JobState::Running)) => UpgradeWait::Job,
            (WaitFor::Annotation, _) => UpgradeWait::Annotation,
        };
        if self.is_late(checked_by) {
            return self.fail(format!("it {wait}, and timed out"));
        }
        wait.into()
    }

    /// Whether the old driver is gone from a node whose upgrade would end without another driver. The upgrade then waits for
    /// the new driver and checks it.
    fn lost_driver(&self) -> bool {
        let Self { upgrade, node, note } = *self;
        let is_gone = node.hand_over.is_none() && node.running_pod().is_none() && !node.facts.not_ready;
        let is_over = upgrade.cannot_list_pods.is_some() || self.is_timed_out();
        note.state == UpgradeState::Drained && is_gone && is_over
    }

    fn is_timed_out(&self) -> bool {
        self.is_late(self.upgrade.spec.timeout.signed_duration())
    }

    fn is_late(&self, limit: SignedDuration) -> bool {
        self.upgrade.now.duration_since(self.note.since) > limit
    }

    fn rewrite(&self, note: &UpgradeNote) -> UpgradeStep {
        set_note(self.node.facts, Some(note), None).into()
    }

    /// Enters the next state.
    fn enter(&self, state: UpgradeState) -> UpgradeStep {
        self.rewrite(&self.note_of(state, None))
    }

    /// Ends the upgrade of the node and uncordons it.
    fn end(&self, state: UpgradeState, why: Option<String>) -> UpgradeStep {
        let ended = UpgradeNote { cordoned: false, ..self.note_of(state, why) };
        uncordon(self.node.facts, self.note, Some(&ended)).into()
    }

    /// Gives up before the node has another driver, because a timeout passed or the old driver cannot be unloaded. A node
    /// that is not Ready and has lost its old driver has failed; other nodes are retried.
    fn give_up(&self, why: String) -> UpgradeStep {
        if self.node.facts.not_ready && self.note.state == UpgradeState::Drained {
            return self.fail(format!("the node is not Ready; {why}"));
        }
        self.end(UpgradeState::NotDrained, Some(why))
    }

    /// Records that the new driver does not work. Where the node's kernel is unknown, nothing is recorded.
    fn fail(&self, why: String) -> UpgradeStep {
        if self.node.fits.is_none() {
            return uncordon(self.node.facts, self.note, None).into();
        }
        self.end(UpgradeState::Failed, Some(why))
    }

    fn note_of(&self, state: UpgradeState, why: Option<String>) -> UpgradeNote {
        /// Maximum number of characters to keep: an annotation must be small, but a container message can be long.
        const MAX_LENGTH: usize = 300;
        UpgradeNote {
            state,
            since: self.upgrade.now,
            to: self.node.target.to_owned(),
            why: why.map(|why| why.chars().take(MAX_LENGTH).collect()),
            ..self.note.clone()
        }
    }
}

fn whole_seconds(duration: SignedDuration) -> Period {
    Period::seconds(duration.unsigned_abs().as_secs())
}
