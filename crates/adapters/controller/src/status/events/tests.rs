use farrier_core::plan::{Activity, BuildActivity, ExceededLimit, KERNEL_LABEL, Plan, Stage, testing::Fleet};
use kmod::Verdict;

use super::*;
use crate::RolloutReport;

const K47: &str = "6.1.0-47-amd64";
const K48: &str = "6.1.0-48-amd64";

/// A sequence of plans, one minute apart, with the Events that they cause.
struct Story {
    told: Option<EventHistory>,
    now: Timestamp,
    activity: Activity,
}

impl Story {
    fn new() -> Self {
        Self { told: None, now: Timestamp::UNIX_EPOCH, activity: Activity::new() }
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
        let (events, more, told) = events(self.told.as_ref(), &view);
        self.told = Some(told);
        self.now += SignedDuration::from_mins(1);
        (events, more)
    }

    fn lines(&mut self, plan: &Plan) -> String {
        let line = |event: &StatusEvent| format!("{} {}: {}", event.reason, event.regarding, event.note);
        self.next(plan, &[]).0.iter().map(line).collect::<Vec<_>>().join("\n")
    }
}

#[test]
fn a_build_is_told_from_its_start_to_its_loss() {
    let mut fleet = Fleet::new(&[K47]);
    let mut story = Story::new();
    let plan = fleet.plan();
    assert_eq!(story.lines(&plan), "");
    let cell = &plan.cells[0];
    let key = (cell.image.clone(), cell.target.clone());
    let stage = BuildActivity { stage: Some(Stage::Compile), ..BuildActivity::default() };
    story.activity.insert(key.clone(), stage);
    insta::assert_snapshot!(story.lines(&plan), @"BuildStarted DriverBuild mft-6.1.0-47-amd64-21016d0b: mft for 6.1.0-47-amd64 (debian 12, amd64): compiling");
    assert_eq!(story.lines(&plan), "");

    let failed = BuildActivity {
        attempts: 1,
        next_retry: Some(Timestamp::UNIX_EPOCH),
        error: Some("push: 503".to_owned()),
        ..BuildActivity::default()
    };
    story.activity.insert(key.clone(), failed);
    insta::assert_snapshot!(story.lines(&plan), @"BuildFailed DriverBuild mft-6.1.0-47-amd64-21016d0b: mft for 6.1.0-47-amd64 (debian 12, amd64): push: 503");
    assert_eq!(story.lines(&plan), "");

    story.activity.clear();
    fleet.publish(Verdict::Loads);
    let told = story.lines(&fleet.plan());
    assert!(
        told.starts_with("Published DriverBuild mft-6.1.0-47-amd64-21016d0b: registry.test/drivers/mft:"),
        "{told}"
    );
    fleet.lose();
    let told = story.lines(&fleet.plan());
    assert!(told.starts_with("PublicationLost"), "{told}");
}

#[test]
fn a_kernel_without_headers_is_told_once() {
    let (mut fleet, mut story) = (Fleet::new(&[K47]), Story::new());
    assert_eq!(story.lines(&fleet.plan()), "");
    fleet.without_headers("package linux-headers-6.1.0-47-amd64 in bookworm");
    let told = story.lines(&fleet.plan());
    let told =
        told.lines().find(|line| line.starts_with("NotBuildable DriverBuild mft-6.1.0-47-amd64")).unwrap();
    assert!(told.contains(": no headers for 6.1.0-47-amd64: import or collect them"), "{told}");
    assert_eq!(story.lines(&fleet.plan()), "");
}

#[test]
fn nodes_are_told_when_they_may_boot_and_when_not() {
    let mut fleet = Fleet::new(&[K47]);
    fleet.announce(0, K48);
    let mut story = Story::new();
    assert_eq!(story.lines(&fleet.plan()), "");
    fleet.publish(Verdict::Loads);
    let told = story.lines(&fleet.plan());
    assert!(
        told.contains("ReadyForKernel node n0: every image that the node needs for 6.1.0-48-amd64"),
        "{told}"
    );
    assert_eq!(story.lines(&fleet.plan()), "");
    fleet.announce(0, "../x");
    let told = story.lines(&fleet.plan());
    assert!(
        told.contains("NotReadyForKernel node n0") && told.contains("AnnouncementNotUsed node n0"),
        "{told}"
    );
}

#[test]
fn a_flapping_node_is_told_once() {
    let mut fleet = Fleet::new(&[K47]);
    let mut story = Story::new();
    let mut all = Vec::new();
    for round in 0..100 {
        let label = if round % 2 == 0 { K48 } else { K47 };
        fleet.node(0).labels.insert(KERNEL_LABEL.to_owned(), label.to_owned());
        all.extend(story.next(&fleet.plan(), &[]).0);
        story.now -= SignedDuration::from_millis(59_400);
    }
    let waits = all.iter().filter(|event| event.reason == EventReason::NodeLabelsContradict).count();
    assert_eq!((waits, all.len()), (1, 1), "{all:?}");
}

#[test]
fn a_node_that_is_not_believed_is_told() {
    let (mut fleet, mut story) = (Fleet::new(&[K47, K48]), Story::new());
    story.next(&fleet.plan(), &[]);
    fleet.node(1).rejected_claims.kernel = Some(ExceededLimit::Distinct(1));
    let told = story.lines(&fleet.plan());
    let wanted = "NodeClaimRejected node n1: nodes run more than 1 kernels";
    assert!(told.contains(wanted) && told.contains("kernelLimits.distinct"), "{told}");
}

#[test]
fn a_reboot_of_many_nodes_is_bounded() {
    let mut fleet = Fleet::new(&[K47; 200]);
    let mut story = Story::new();
    story.next(&fleet.plan(), &[]);
    for node in 0..200 {
        fleet.node(node).labels.insert(KERNEL_LABEL.to_owned(), K48.to_owned());
    }
    let (events, more) = story.next(&fleet.plan(), &[]);
    assert_eq!((events.len(), more), (MOST, 200 - MOST));
}

#[test]
fn a_rewrite_is_told_with_its_outcome() {
    let mut fleet = Fleet::new(&[K47]);
    fleet.publish(Verdict::Loads);
    let plan = fleet.plan();
    for (error, reason) in
        [(None, EventReason::Rewritten), (Some("409".to_owned()), EventReason::RewriteFailed)]
    {
        let report = RolloutReport { planned: plan.rollouts[0].clone(), error };
        let (events, _) = Story::new().next(&plan, &[report]);
        assert_eq!(events.len(), 1);
        assert_eq!(events[0].reason, reason);
        assert_eq!(events[0].regarding.to_string(), "DaemonSet kube-system/mft");
        assert!(events[0].note.starts_with("mft: "), "{}", events[0].note);
    }
}

#[test]
fn a_hold_is_told_once() {
    let mut fleet = Fleet::new(&[K47, K48]);
    fleet.publish(Verdict::Loads);
    let mut story = Story::new();
    story.next(&Plan::default(), &[]);
    let told = story.lines(&fleet.plan());
    assert!(told.contains("RolloutHeld DaemonSet kube-system/mft: mft: "), "{told}");
    assert_eq!(story.lines(&fleet.plan()), "");
}

/// Pod messages are read from the note when the pod is gone. The API refuses a note longer than 1024 bytes.
#[test]
fn a_note_has_room_for_a_pods_last_words() {
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
