//! Decides the next step on one node in progress.
//!
//! Every state ends, whatever happens to the node or its pods: the node enters the next state, or farrier gives up after
//! a timeout and uncordons the node.

use jiff::SignedDuration;

use super::{
    DriverPod, JobKind, JobState, Upgrade, UpgradeNode, UpgradeNote, UpgradeState, UpgradeWait,
    note::{hand_over, set_note, uncordon},
};
use crate::{
    image::{Period, WaitFor},
    plan::{Change, NodeCheck, PodRestart, WorkloadFacts, labels::operator_upgrade_in_progress},
};

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

impl Upgrade<'_> {
    /// Returns the next step.
    pub(super) fn next(&self, node: &UpgradeNode<'_>, note: &UpgradeNote) -> UpgradeStep {
        if note.since > self.now {
            // The note comes from a clock that jumped: restart the timeout of this state now.
            return set_note(node.facts, Some(&UpgradeNote { since: self.now, ..note.clone() }), None).into();
        }
        if note.cordoned && !node.facts.unschedulable {
            // Another actor removed farrier's cordon. A later cordon is not farrier's.
            return set_note(node.facts, Some(&UpgradeNote { cordoned: false, ..note.clone() }), None).into();
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
                let resumed = UpgradeNote { since: self.now, began: self.now, why: None, ..note.clone() };
                return set_note(node.facts, Some(&resumed), None).into();
            }
            None => {}
        }
        if node.fits == Some(false) {
            // The node booted another kernel, so its state is no evidence about the image: end its upgrade.
            return uncordon(node.facts, note, None).into();
        }
        let is_current = node.running_pod().is_some_and(|driver| driver.is_current);
        match note.state {
            UpgradeState::Cordoned | UpgradeState::Drained if is_current || self.lost_driver(node, note) => {
                self.enter(node, note, UpgradeState::DriverRestarted)
            }
            UpgradeState::Cordoned | UpgradeState::Drained if self.cannot_list_pods.is_some() => {
                let why = self.cannot_list_pods.map(|why| format!("its pods cannot be listed: {why}"));
                self.end(node, note, UpgradeState::NotDrained, why)
            }
            UpgradeState::Cordoned | UpgradeState::Drained if !node.users.is_empty() => {
                self.drain(node, note)
            }
            UpgradeState::Cordoned => self.enter(node, note, UpgradeState::Drained),
            UpgradeState::Drained => self.replace(node, note),
            UpgradeState::DriverRestarted => self.check(node, note),
            UpgradeState::Checked
            | UpgradeState::Uncordoned
            | UpgradeState::NotDrained
            | UpgradeState::Failed => self.end(node, note, UpgradeState::Uncordoned, None),
        }
    }

    fn drain(&self, node: &UpgradeNode<'_>, note: &UpgradeNote) -> UpgradeStep {
        let count = node.users.len();
        if self.is_late(note, self.spec.timeout.signed_duration()) {
            let why = format!("pods left on the node after {}: {count}", self.spec.timeout);
            return self.give_up(node, note, why);
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
                grace_seconds: self.spec.grace_seconds,
            })
        };
        UpgradeStep { changes: remaining.map(evict).collect(), waits: Some(UpgradeWait::Users { count }) }
    }

    /// Returns the step of the unload forecast; `None` where the old driver can be unloaded, or no forecast is configured. A
    /// driver that cannot be unloaded would leave the node without a working one.
    fn forecast_unload(&self, node: &UpgradeNode<'_>, note: &UpgradeNote) -> Option<UpgradeStep> {
        let template = self.spec.forecast.as_ref()?;
        let holders: Vec<&str> = node.holders.iter().map(|holder| holder.description.as_str()).collect();
        let holders = (!holders.is_empty()).then(|| holders.join("; "));
        let is_late = self.is_late(note, self.spec.timeout.signed_duration());
        match &node.unload_forecast {
            Some(JobState::Succeeded) => None,
            Some(JobState::Failed(why)) => {
                let why = format!("its driver cannot be unloaded: {}", holders.as_ref().unwrap_or(why));
                Some(self.give_up(node, note, why))
            }
            None | Some(JobState::Running) if is_late => {
                let detail = holders.map(|holders| format!(": {holders}")).unwrap_or_default();
                let timeout = self.spec.timeout;
                let why =
                    format!("the unload forecast found no way to unload the driver within {timeout}{detail}");
                Some(self.give_up(node, note, why))
            }
            None => {
                let driver_pod = node.running_pod().map(|driver| driver.pod.version.uid.clone());
                let change = self.job(node, note, template, JobKind::Forecast, driver_pod);
                Some(UpgradeStep {
                    changes: vec![change],
                    waits: Some(UpgradeWait::Forecast { holders: None }),
                })
            }
            Some(JobState::Running) => Some(UpgradeWait::Forecast { holders }.into()),
        }
    }

    fn job(
        &self,
        node: &UpgradeNode<'_>,
        note: &UpgradeNote,
        template: &str,
        kind: JobKind,
        driver_pod: Option<String>,
    ) -> Change {
        Change::Check(NodeCheck {
            node: node.facts.name.clone(),
            namespace: self.namespace.to_owned(),
            template: template.to_owned(),
            name: note.job_name(kind, &node.facts.name),
            driver_pod,
        })
    }

    /// Replaces the old driver pod by a new one.
    fn replace(&self, node: &UpgradeNode<'_>, note: &UpgradeNote) -> UpgradeStep {
        let is_new = |driver: &DriverPod<'_>| driver.pod.created > Some(note.since);
        // A webhook may write another image into pods. Another new pod would get the same image, so fail.
        if node.hand_over.is_none()
            && note.to == node.target
            && let Some(driver) = node.running_pod().filter(is_new)
        {
            let why = format!("its new pod has image {}, not {}", driver.image, node.target);
            return self.fail(node, note, why);
        }
        if let (Some(_), Some(next)) = (node.running_pod(), self.forecast_unload(node, note)) {
            return next;
        }
        if self.is_late(note, self.spec.timeout.signed_duration()) {
            let why = format!("its driver's pod was not replaced within {}", self.spec.timeout);
            return self.give_up(node, note, why);
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

    fn check(&self, node: &UpgradeNode<'_>, note: &UpgradeNote) -> UpgradeStep {
        let ready_by = self.deadline.saturating_add(self.stable_for);
        let checked_by = ready_by.saturating_add(self.spec.timeout.signed_duration());
        match node.running_pod() {
            // The DaemonSet has another image again, for example because the previous image was restored.
            Some(driver) if !driver.is_current => return self.enter(node, note, UpgradeState::Drained),
            Some(driver) if driver.pod.is_stable(self.stable_for, self.now) => {}
            driver if self.is_late(note, ready_by) => {
                let messages = driver.map(|driver| driver.pod.messages.join("; ")).unwrap_or_default();
                let within = format!("its new driver was not ready within {}", whole_seconds(ready_by));
                let why = if messages.is_empty() { within } else { format!("{within}: {messages}") };
                return self.fail(node, note, why);
            }
            _ => return UpgradeWait::Driver.into(),
        }
        let wait = match (&self.spec.wait_for, &node.check) {
            (WaitFor::PodsReady, _) | (WaitFor::Job(_), Some(JobState::Succeeded)) => {
                return self.enter(node, note, UpgradeState::Checked);
            }
            (WaitFor::Annotation, _) if node.is_confirmed() => {
                return self.enter(node, note, UpgradeState::Checked);
            }
            (WaitFor::Job(_), Some(JobState::Failed(why))) => {
                return self.fail(node, note, format!("its check failed: {why}"));
            }
            (WaitFor::Job(template), None) if !self.is_late(note, checked_by) => {
                let change = self.job(node, note, template, JobKind::Check, None);
                return UpgradeStep { changes: vec![change], waits: Some(UpgradeWait::Job) };
            }
            (WaitFor::Job(template), None) => {
                let why = format!("its check could not be run: see CronJob {template} of {}", self.namespace);
                return self.fail(node, &UpgradeNote { unchecked: true, ..note.clone() }, why);
            }
            (WaitFor::Job(_), Some(JobState::Running)) => UpgradeWait::Job,
            (WaitFor::Annotation, _) => UpgradeWait::Annotation,
        };
        if self.is_late(note, checked_by) {
            return self.fail(node, note, format!("it {wait}, and timed out"));
        }
        wait.into()
    }

    /// Whether the old driver is gone from a node whose upgrade would end without another driver. The upgrade then waits for
    /// the new driver and checks it.
    fn lost_driver(&self, node: &UpgradeNode<'_>, note: &UpgradeNote) -> bool {
        let is_gone = node.hand_over.is_none() && node.running_pod().is_none() && !node.facts.not_ready;
        let is_over =
            self.cannot_list_pods.is_some() || self.is_late(note, self.spec.timeout.signed_duration());
        note.state == UpgradeState::Drained && is_gone && is_over
    }

    fn is_late(&self, note: &UpgradeNote, limit: SignedDuration) -> bool {
        self.elapsed(note.since) > limit
    }

    /// Enters the next state.
    fn enter(&self, node: &UpgradeNode<'_>, note: &UpgradeNote, state: UpgradeState) -> UpgradeStep {
        set_note(node.facts, Some(&self.note_of(node, note, state, None)), None).into()
    }

    /// Ends the upgrade of the node and uncordons it.
    fn end(
        &self,
        node: &UpgradeNode<'_>,
        note: &UpgradeNote,
        state: UpgradeState,
        why: Option<String>,
    ) -> UpgradeStep {
        let ended = UpgradeNote { cordoned: false, ..self.note_of(node, note, state, why) };
        uncordon(node.facts, note, Some(&ended)).into()
    }

    /// Gives up before the node has another driver, because a timeout passed or the old driver cannot be unloaded. A node
    /// that is not Ready has failed; other nodes are retried.
    fn give_up(&self, node: &UpgradeNode<'_>, note: &UpgradeNote, why: String) -> UpgradeStep {
        if node.facts.not_ready {
            return self.fail(node, note, format!("the node is not Ready; {why}"));
        }
        self.end(node, note, UpgradeState::NotDrained, Some(why))
    }

    /// Records that the new driver does not work. Where the node's kernel is unknown, nothing is recorded.
    fn fail(&self, node: &UpgradeNode<'_>, note: &UpgradeNote, why: String) -> UpgradeStep {
        if node.fits.is_none() {
            return uncordon(node.facts, note, None).into();
        }
        self.end(node, note, UpgradeState::Failed, Some(why))
    }

    fn note_of(
        &self,
        node: &UpgradeNode<'_>,
        note: &UpgradeNote,
        state: UpgradeState,
        why: Option<String>,
    ) -> UpgradeNote {
        /// Maximum number of characters to keep: an annotation must be small, but a container message can be long.
        const MAX_LENGTH: usize = 300;
        UpgradeNote {
            state,
            since: self.now,
            to: node.target.to_owned(),
            why: why.map(|why| why.chars().take(MAX_LENGTH).collect()),
            ..note.clone()
        }
    }
}

fn whole_seconds(duration: SignedDuration) -> Period {
    Period::seconds(duration.unsigned_abs().as_secs())
}
