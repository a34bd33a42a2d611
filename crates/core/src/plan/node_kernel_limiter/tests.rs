use std::{collections::BTreeSet, num::NonZeroU32};

use super::{
    super::{
        Plan, RolloutDecision,
        fixtures::{K47, K48, World, node},
    },
    *,
};
use crate::kmod::Verdict;

/// Fleet that changes over time.
struct Story {
    world: World,
    limiter: NodeKernelLimiter,
    now: Duration,
}

impl Story {
    fn new(releases: &[&str]) -> Self {
        Self {
            world: World::new(releases),
            limiter: NodeKernelLimiter::default(),
            now: Duration::from_secs(7),
        }
    }

    fn runs(&mut self, place: usize, release: &str) {
        let name = self.world.snapshot.nodes[place].name.clone();
        self.world.snapshot.nodes[place] = node(&name, release);
    }

    /// Advances the time and makes a plan.
    fn after(&mut self, time: Duration) -> Plan {
        self.now += time;
        self.limiter.limit(&mut self.world.snapshot, &self.world.definitions, self.now);
        self.world.plan()
    }

    fn minute(&mut self) -> Plan {
        self.after(Duration::from_mins(1))
    }
}

/// Returns the kernels that have cells.
fn kernels(plan: &Plan) -> BTreeSet<String> {
    plan.cells.iter().map(|planned| planned.target.release.to_string()).collect()
}

fn skipped_nodes(plan: &Plan) -> Vec<String> {
    plan.skipped_nodes.iter().map(|left| format!("{}: {}", left.node, left.why)).collect()
}

#[test]
fn a_node_that_cycles_through_kernels_has_few_of_them_built_and_blocks_no_other_node() {
    let mut story = Story::new(&[K47, K47]);
    let mut called_for = BTreeSet::new();
    for turn in 0..200 {
        story.runs(1, &format!("6.1.0-{}-amd64", 100 + turn));
        called_for.extend(kernels(&story.minute()));
    }
    assert_eq!(called_for.len(), 1 + 16, "{called_for:?}");

    story.world.publish(Verdict::Loads);
    let plan = story.minute();
    insta::assert_snapshot!(skipped_nodes(&plan).join("\n"), @"n1: it named more than 16 kernels within 1d, and no other node runs its current one: it is untrusted until those expire, and blocks no other nodes; find out who changes its kernel and its labels, or raise kernelLimits.perNode in site.yaml");
    assert!(matches!(plan.rollouts[0].decision, RolloutDecision::Rewrite { .. }), "{:?}", plan.rollouts);
    assert!(crate::plan::table(&plan).contains("kernelLimits.perNode"));

    // A kernel that trusted nodes run costs nothing more, so the node's claim to run it is accepted.
    story.runs(1, K47);
    assert_eq!(skipped_nodes(&story.minute()), [""; 0]);
    // The node's announcement is still rejected.
    story.world.snapshot.nodes[1]
        .annotations
        .insert(crate::plan::NEXT_KERNEL_ANNOTATION.to_owned(), "6.1.0-7-amd64".to_owned());
    let plan = story.minute();
    assert_eq!(kernels(&plan), [K47.to_owned()].into());
    assert!(plan.unused_announcements[0].why.to_string().contains("kernelLimits.perNode"));
    // After a day the limit starts over.
    let plan = story.after(Duration::from_hours(25));
    assert_eq!(kernels(&plan).len(), 2);
    assert!(plan.unused_announcements.is_empty());
}

#[test]
fn announcements_count_as_much_as_reboots() {
    let mut story = Story::new(&[K47, K47]);
    let mut called_for = BTreeSet::new();
    for turn in 0..200 {
        let next = format!("6.1.0-{}-amd64", 100 + turn);
        let annotations = &mut story.world.snapshot.nodes[1].annotations;
        annotations.insert(crate::plan::NEXT_KERNEL_ANNOTATION.to_owned(), next);
        called_for.extend(kernels(&story.minute()));
    }
    // The node's own kernel counts toward the limit.
    assert_eq!(called_for.len(), 16, "{called_for:?}");
}

#[test]
fn an_honest_node_is_believed_whatever_its_day_is_like() {
    let mut story = Story::new(&[K47]);
    // The node flaps between two kernels for a week, and boots a new one four times a day.
    for turn in 0..7 * 24 * 6_u32 {
        let newest = format!("6.1.0-{}-amd64", 50 + turn / 36);
        story.runs(0, if turn % 2 == 0 { &newest } else { K48 });
        assert_eq!(skipped_nodes(&story.after(Duration::from_mins(10))), [""; 0], "{turn}");
    }
}

#[test]
fn the_kernels_of_most_nodes_and_those_that_were_first_stay() {
    let mut story = Story::new(&["6.1.0-9-amd64", K47, K47, K48]);
    story.world.definitions.site.kernel_limits.distinct = NonZeroU32::new(3).unwrap();
    assert_eq!(kernels(&story.minute()).len(), 3);
    story.world.snapshot.nodes.push(node("n4", "6.1.0-1-amd64"));
    let plan = story.minute();
    assert!(!kernels(&plan).contains("6.1.0-1-amd64"), "the kernel that came last is rejected");
    insta::assert_snapshot!(skipped_nodes(&plan).join("\n"), @"n4: nodes run more than 3 kernels, and the other kernels run on more nodes or for longer: this node is skipped, and blocks no other nodes; retire kernels, or raise kernelLimits.distinct in site.yaml");
    story.world.snapshot.nodes.push(node("n5", "6.1.0-1-amd64"));
    let plan = story.minute();
    assert!(kernels(&plan).contains("6.1.0-1-amd64") && kernels(&plan).len() == 3);
    assert_eq!(plan.skipped_nodes.len(), 1);
}

#[test]
fn only_nodes_that_an_image_is_meant_for_count() {
    let mut story = Story::new(&[K47, K47, K48]);
    story.world.definitions.site.kernel_limits.distinct = NonZeroU32::MIN;
    for place in 0..2 {
        story.world.snapshot.nodes[place].labels.remove("pci");
    }
    let plan = story.minute();
    assert_eq!((kernels(&plan), skipped_nodes(&plan)), ([K48.to_owned()].into(), Vec::new()));
}

#[test]
fn what_is_remembered_is_bounded() {
    let mut story = Story::new(&[K47]);
    for turn in 0..1000 {
        story.world.snapshot.nodes[0] = node(&format!("n{}", turn % 3), &format!("6.1.0-{turn}-amd64"));
        story.minute();
    }
    assert!(story.limiter.nodes.values().all(|named| named.len() <= 17) && story.limiter.nodes.len() == 3);
    assert!(story.limiter.kernels.len() <= 3 * 16, "{}", story.limiter.kernels.len());
    story.world.snapshot.nodes.clear();
    story.after(Duration::from_hours(25));
    assert!(story.limiter.nodes.is_empty() && story.limiter.kernels.is_empty());
}
