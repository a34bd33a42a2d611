use farrier_core::plan::{
    Activity, BuildActivity, ExceededLimit, KERNEL_LABEL, Plan, PlannedNodeUpgrade, PlannedUpgrade, Stage,
    UpgradeForecast, UpgradeStage, testing::Fleet,
};
use kmod::Verdict;

use super::*;
use crate::RolloutReport;

const K47: &str = "6.1.0-47-amd64";
const K48: &str = "6.1.0-48-amd64";

/// Derives the Events of a sequence of plans, which are one minute apart.
struct EventSequence {
    history: Option<EventHistory>,
    now: Timestamp,
    activity: Activity,
}

impl EventSequence {
    fn new() -> Self {
        Self { history: None, now: Timestamp::UNIX_EPOCH, activity: Activity::new() }
    }

    fn next(&mut self, plan: &Plan, rollouts: &[RolloutReport]) -> (Vec<StatusEvent>, usize) {
        let view = ReconcileView {
            plan: plan.clone().into(),
            snapshot: std::sync::Arc::default(),
            definitions: std::sync::Arc::default(),
            activity: self.activity.clone(),
            live: self.activity.clone().into(),
            rollouts: rollouts.to_vec(),
            configuration_error: None,
            now: self.now,
        };
        let (events, more, history) = events(self.history.as_ref(), &view);
        self.history = Some(history);
        self.now += SignedDuration::from_mins(1);
        (events, more)
    }

    fn lines(&mut self, plan: &Plan) -> String {
        let line = |event: &StatusEvent| format!("{} {}: {}", event.reason, event.regarding, event.note);
        self.next(plan, &[]).0.iter().map(line).collect::<Vec<_>>().join("\n")
    }
}

#[test]
fn events_report_a_build_from_its_start_to_its_loss() {
    let mut fleet = Fleet::new(&[K47]);
    let mut sequence = EventSequence::new();
    let plan = fleet.plan();
    assert_eq!(sequence.lines(&plan), "");
    let cell = &plan.cells[0];
    let key = (cell.image.clone(), cell.target.clone());
    let stage = BuildActivity { stage: Some(Stage::Compile), ..BuildActivity::default() };
    sequence.activity.insert(key.clone(), stage);
    insta::assert_snapshot!(sequence.lines(&plan), @"BuildStarted DriverBuild mft-6.1.0-47-amd64-21016d0b: mft for 6.1.0-47-amd64 (debian 12, amd64): compiling");
    assert_eq!(sequence.lines(&plan), "");

    let failed = BuildActivity {
        attempts: 1,
        next_retry: Some(Timestamp::UNIX_EPOCH),
        error: Some("push: 503".to_owned()),
        ..BuildActivity::default()
    };
    sequence.activity.insert(key.clone(), failed);
    insta::assert_snapshot!(sequence.lines(&plan), @"BuildFailed DriverBuild mft-6.1.0-47-amd64-21016d0b: mft for 6.1.0-47-amd64 (debian 12, amd64): push: 503");
    assert_eq!(sequence.lines(&plan), "");

    sequence.activity.clear();
    fleet.publish(Verdict::Loads);
    let lines = sequence.lines(&fleet.plan());
    assert!(
        lines.starts_with("Published DriverBuild mft-6.1.0-47-amd64-21016d0b: registry.test/drivers/mft:"),
        "{lines}"
    );
    fleet.lose();
    let lines = sequence.lines(&fleet.plan());
    assert!(lines.starts_with("PublicationLost"), "{lines}");
}

#[test]
fn missing_headers_have_one_event() {
    let (mut fleet, mut sequence) = (Fleet::new(&[K47]), EventSequence::new());
    assert_eq!(sequence.lines(&fleet.plan()), "");
    fleet.without_headers("package linux-headers-6.1.0-47-amd64 in bookworm");
    let lines = sequence.lines(&fleet.plan());
    let lines =
        lines.lines().find(|line| line.starts_with("NotBuildable DriverBuild mft-6.1.0-47-amd64")).unwrap();
    assert!(lines.contains(": no headers for 6.1.0-47-amd64: there is no "), "{lines}");
    assert_eq!(sequence.lines(&fleet.plan()), "");
}

#[test]
fn nodes_have_events_when_they_become_ready_and_unready() {
    let mut fleet = Fleet::new(&[K47]);
    fleet.announce(0, K48);
    let mut sequence = EventSequence::new();
    assert_eq!(sequence.lines(&fleet.plan()), "");
    fleet.publish(Verdict::Loads);
    let lines = sequence.lines(&fleet.plan());
    assert!(
        lines.contains("ReadyForKernel node n0: every image that the node needs for 6.1.0-48-amd64"),
        "{lines}"
    );
    assert_eq!(sequence.lines(&fleet.plan()), "");
    fleet.announce(0, "../x");
    let lines = sequence.lines(&fleet.plan());
    assert!(
        lines.contains("NotReadyForKernel node n0") && lines.contains("AnnouncementNotUsed node n0"),
        "{lines}"
    );
}

#[test]
fn a_flapping_node_has_one_event() {
    let mut fleet = Fleet::new(&[K47]);
    let mut sequence = EventSequence::new();
    let mut all = Vec::new();
    for round in 0..100 {
        let label = if round % 2 == 0 { K48 } else { K47 };
        fleet.node(0).labels.insert(KERNEL_LABEL.to_owned(), label.to_owned());
        all.extend(sequence.next(&fleet.plan(), &[]).0);
        sequence.now -= SignedDuration::from_millis(59_400);
    }
    let waits = all.iter().filter(|event| event.reason == EventReason::NodeLabelsContradict).count();
    assert_eq!((waits, all.len()), (1, 1), "{all:?}");
}

#[test]
fn a_rejected_claim_has_an_event() {
    let (mut fleet, mut sequence) = (Fleet::new(&[K47, K48]), EventSequence::new());
    sequence.next(&fleet.plan(), &[]);
    fleet.node(1).rejected_claims.kernel = Some(ExceededLimit::Distinct(1));
    let lines = sequence.lines(&fleet.plan());
    let wanted = "NodeClaimRejected node n1: nodes run more than 1 kernels";
    assert!(lines.contains(wanted) && lines.contains("kernelLimits.distinct"), "{lines}");
}

#[test]
fn the_number_of_events_per_reconcile_is_bounded() {
    let mut fleet = Fleet::new(&[K47; 200]);
    let mut sequence = EventSequence::new();
    sequence.next(&fleet.plan(), &[]);
    for node in 0..200 {
        fleet.node(node).labels.insert(KERNEL_LABEL.to_owned(), K48.to_owned());
    }
    let (events, more) = sequence.next(&fleet.plan(), &[]);
    assert_eq!((events.len(), more), (MAX_EVENTS, 200 - MAX_EVENTS));
}

#[test]
fn a_rewrite_has_an_event_with_its_outcome() {
    let mut fleet = Fleet::new(&[K47]);
    fleet.publish(Verdict::Loads);
    let plan = fleet.plan();
    for (error, reason) in
        [(None, EventReason::Rewritten), (Some("409".to_owned()), EventReason::RewriteFailed)]
    {
        let report = RolloutReport { planned: plan.rollouts[0].clone(), error };
        let (events, _) = EventSequence::new().next(&plan, &[report]);
        assert_eq!(events.len(), 1);
        assert_eq!(events[0].reason, reason);
        assert_eq!(events[0].regarding.to_string(), "DaemonSet kube-system/mft");
        assert!(events[0].note.starts_with("mft: "), "{}", events[0].note);
    }
}

/// The rollouts' order in the plan must not hide the Event of the first driver.
#[test]
fn each_driver_of_a_node_has_an_event_when_its_upgrade_ends() {
    let mut fleet = Fleet::new(&[K47]);
    fleet.publish(Verdict::Loads);
    let plan = |gpu: i64, ofed: i64| {
        let mut plan = fleet.plan();
        let rollout = plan.rollouts[0].clone();
        plan.rollouts = [("gpu", gpu), ("ofed", ofed)]
            .map(|(name, ended)| {
                let since = Timestamp::from_second(ended).unwrap();
                let written = serde_json::json!({
                    "rollout": name, "state": "uncordoned", "since": since, "began": since, "to": format!("image-{ended}"),
                });
                let node_upgrade = PlannedNodeUpgrade {
                    node: "n0".to_owned(),
                    to: String::new(),
                    stage: UpgradeStage::Done,
                    note: Some(serde_json::from_value(written).unwrap()),
                    waits: None,
                    changes: Vec::new(),
                };
                let forecast = UpgradeForecast {
                    done: 1,
                    in_progress: 0,
                    waiting: 0,
                    skipped: 0,
                    failed: 0,
                    seconds_per_node: None,
                    ends: None,
                };
                let upgrade = PlannedUpgrade { rollout: name.to_owned(), nodes: vec![node_upgrade], forecast };
                PlannedRollout { upgrade: Some(upgrade), ..rollout.clone() }
            })
            .into();
        plan
    };
    let mut sequence = EventSequence::new();
    sequence.next(&plan(1, 2), &[]);
    assert_eq!(sequence.lines(&plan(3, 2)), "Upgraded node n0: gpu, image-3");
}

#[test]
fn a_hold_has_one_event() {
    let mut fleet = Fleet::new(&[K47, K48]);
    fleet.publish(Verdict::Loads);
    let mut sequence = EventSequence::new();
    sequence.next(&Plan::default(), &[]);
    let lines = sequence.lines(&fleet.plan());
    assert!(lines.contains("RolloutHeld DaemonSet kube-system/mft: mft: "), "{lines}");
    assert_eq!(sequence.lines(&fleet.plan()), "");
}

/// The note is the only source of a pod's messages once the pod is gone. The API rejects a note longer than 1024 bytes.
#[test]
fn a_note_has_room_for_the_messages_of_a_pod() {
    let note = |text: &str| event(EventReason::RolloutRestored, Regarding::Node("n".to_owned()), text).note;
    let image = format!("registry.example/drivers/driver@sha256:{}", "0".repeat(64));
    let said = format!(
        "mft: {image} was taken back to {image}: the pod on node n0 was not ready within 10m: no such device"
    );
    assert!(said.len() > 250 && note(&said) == said, "{}", note(&said));
    for text in ["a".repeat(5000), "\u{10348}".repeat(5000)] {
        assert!((200..1024).contains(&note(&text).len()), "{}", note(&text).len());
    }
}
