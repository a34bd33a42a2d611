use super::{
    super::{
        BuildReason, Change, Failure, HoldReason, Published,
        fixtures::{K47, K48, World},
        table,
    },
    *,
};
use crate::{
    image::{HostOutput, OnConflict, Reuse, UnknownPolicy},
    kmod::Verdict,
};

fn published(plan: &Plan) -> &Published {
    let Outcome::UpToDate { published, .. } = &plan.cells[0].outcome else { panic!("{plan:?}") };
    published
}

fn build(plan: &Plan) -> (BuildReason, bool) {
    let Outcome::Build { why, may_reuse, .. } = &plan.cells[0].outcome else { panic!("{plan:?}") };
    (why.clone(), *may_reuse)
}

/// Changes the image that is published under the first cell's name.
fn republish(world: &mut World, change: impl FnOnce(&mut Published)) {
    let reference = world.cells()[0].reference.clone();
    change(world.observed.published.get_mut(&reference).unwrap());
}

fn fail(world: &mut World, permanent: bool) {
    let failure = Failure {
        at: "2026-07-01T12:00:00.123Z".parse().unwrap(),
        message: "nv-pci.c:12: too few arguments".to_owned(),
        permanent,
        under: None,
        under_site: None,
        memory: None,
        deadline: None,
    };
    let hash = world.cells()[0].input_hash;
    world.observed.failures.insert(hash, Some(failure));
}

#[test]
fn a_build_names_its_outputs() {
    let mut world = World::new(&[K47]);
    assert!(!table(&world.plan()).contains("publishes also"));
    world.image("mft").spec.outputs = [HostOutput::Deb, HostOutput::Sysext].into();
    let plan = world.plan();
    assert!(
        table(&plan).contains("not in the registry; publishes also deb and sysext\n"),
        "{}",
        table(&plan)
    );
    let json = serde_json::to_value(&plan).unwrap();
    assert_eq!(json["builds"][0]["cell"]["outputs"], serde_json::json!(["deb", "sysext"]));
    world.publish(Verdict::Loads);
    assert!(!table(&world.plan()).contains("publishes also"), "nothing is built");
}

#[test]
fn what_is_not_there_is_built_and_what_is_there_is_not() {
    let mut world = World::new(&[K47]);
    let plan = world.plan();
    assert_eq!(plan.count(Phase::Missing), 1);
    assert!(matches!(plan.rollouts[0].decision, RolloutDecision::Pending { .. }));
    assert!(!plan.is_idle() && !plan.has_failures());

    world.publish(Verdict::Loads);
    let plan = world.plan();
    assert_eq!((plan.count(Phase::Missing), plan.count(Phase::Published)), (0, 1));
    let [Change::DaemonSet(change)] = plan.rollouts[0].changes.as_slice() else { panic!("{plan:?}") };
    let [change] = change.image_changes().try_into().unwrap();
    assert_eq!(change.to, format!("registry.test/drivers/mft@{}", published(&plan).digest));

    world.snapshot.daemon_sets[0].containers[0].image = change.to;
    let plan = world.plan();
    assert!(plan.is_idle() && !plan.has_failures());
    assert!(!plan.needs_attention() && !plan.matrix_hides_reasons());
    insta::assert_snapshot!(super::super::summary(&plan), @"nothing to do: 1 up to date, 1 already set");
}

#[test]
fn a_tag_with_other_inputs_is_a_conflict_unless_it_may_be_overwritten() {
    for theirs in [None, Some("ab".repeat(32).parse().unwrap())] {
        let mut world = World::new(&[K47]);
        world.publish(Verdict::Loads);
        republish(&mut world, |published| published.input_hash = theirs);
        let plan = world.plan();
        assert_eq!((plan.count(Phase::Missing), plan.count(Phase::Conflict)), (0, 1));
        assert!(matches!(plan.rollouts[0].decision, RolloutDecision::Hold(HoldReason::NoImage { .. })));
        assert!(plan.has_failures() && plan.needs_attention() && plan.matrix_hides_reasons());

        world.image("mft").spec.on_conflict = OnConflict::Overwrite;
        let plan = world.plan();
        assert_eq!((plan.count(Phase::Missing), plan.count(Phase::Conflict)), (1, 0));
        assert_eq!(build(&plan).0, BuildReason::Overwrite { theirs });
    }
}

#[test]
fn permanent_failures_wait_for_an_input_to_change() {
    let mut world = World::new(&[K47]);
    fail(&mut world, true);
    let plan = world.plan();
    assert_eq!((plan.count(Phase::Missing), plan.count(Phase::Failed)), (0, 1));
    assert!(plan.has_failures());
    world.image("mft").spec.modules.push("another".parse().unwrap());
    assert_eq!(world.plan().count(Phase::Missing), 1);

    let mut world = World::new(&[K47]);
    fail(&mut world, false);
    assert!(matches!(build(&world.plan()).0, BuildReason::RetryAfterFailure { .. }));
}

/// The definition's check settings caused the failure. With other settings, the build is retried.
#[test]
fn a_failure_of_the_policy_ends_with_the_policy() {
    let mut world = World::new(&[K47]);
    world.deny_unknown();
    fail(&mut world, true);
    let denied = world.definitions.images.values().next().unwrap().spec.check;
    world.observed.failures.values_mut().flatten().for_each(|failure| failure.under = Some(denied));
    assert_eq!(world.plan().count(Phase::Failed), 1);
    world.image("mft").spec.check.unknown = UnknownPolicy::Allow;
    let plan = world.plan();
    assert_eq!((plan.count(Phase::Failed), plan.count(Phase::Missing)), (0, 1));
}

#[test]
fn a_plan_says_where_reuse_will_be_tried() {
    let mut world = World::new(&[K47]);
    assert!(!build(&world.plan()).1);
    let before = world.cells()[0].input_hash;
    world.image("mft").spec.reuse = Reuse::Compatible;
    let plan = world.plan();
    assert!(build(&plan).1);
    assert_eq!(plan.cells[0].outcome.cell().unwrap().input_hash, before, "`reuse` is not an input");
    assert!(table(&plan).contains("an image for another kernel is reused if the check allows"));
}

#[test]
fn a_recipe_is_what_kernels_have_in_common() {
    let mut world = World::new(&[K47, K48]);
    let recipes = |world: &World| world.cells().iter().map(|cell| cell.recipe).collect::<Vec<_>>();
    let first = recipes(&world);
    assert_eq!(first[0], first[1]);
    let cells = world.cells();
    assert_ne!(cells[0].input_hash, cells[1].input_hash);
    world.resolved.toolchains.values_mut().for_each(|toolchain| *toolchain = Ok("toolchain-2".to_owned()));
    assert_eq!(recipes(&world), first, "the toolchain depends on the kernel");

    // All other inputs of the payload count.
    let changes: [fn(&mut World); 4] = [
        |w| w.image("mft").spec.modules.push("another".parse().unwrap()),
        |w| w.image("mft").spec.runtime.entrypoint.push("/x".parse().unwrap()),
        |w| w.definitions.templates.values_mut().for_each(|text| text.push_str("LABEL a=b\n")),
        |w| w.resolved.images.values_mut().flatten().for_each(|r| r.version.push('1')),
    ];
    for change in changes {
        let mut other = world.clone();
        change(&mut other);
        assert_ne!(recipes(&other)[0], first[0]);
    }
    // A template with a different step for one kernel gives that kernel another recipe.
    let step = "{{#if (eq kernel.release \"6.1.0-48-amd64\")}}RUN true\n{{/if}}";
    world.definitions.templates.values_mut().for_each(|text| text.push_str(step));
    let recipes = recipes(&world);
    assert_ne!(recipes[0], recipes[1]);
}

#[test]
fn what_the_registry_does_not_tell_is_unknown() {
    let mut world = World::new(&[K47]);
    world.publish(Verdict::Loads);
    let reference = world.cells()[0].reference.clone();
    world.observed.unreachable.insert(reference, "connection refused".to_owned());
    let plan = world.plan();
    assert_eq!(
        (plan.count(Phase::Missing), plan.count(Phase::Published), plan.count(Phase::Unknown)),
        (0, 0, 1)
    );
    assert!(matches!(plan.rollouts[0].decision, RolloutDecision::Hold(HoldReason::NoImage { .. })));
}

#[test]
fn further_names_are_added_to_what_is_there() {
    let mut world = World::new(&[K47]);
    world.publish(Verdict::Loads);
    world.image("mft").spec.tags.push("latest-{{arch}}".to_owned());
    let plan = world.plan();
    assert_eq!((plan.count(Phase::Missing), plan.count(Phase::Published)), (0, 1));
    let Outcome::UpToDate { missing_tags, .. } = &plan.cells[0].outcome else { panic!("{plan:?}") };
    let names: Vec<_> = missing_tags.iter().map(ToString::to_string).collect();
    assert_eq!(names, ["registry.test/drivers/mft:latest-amd64"]);
}

#[test]
fn kernels_that_nobody_means_are_no_failure_and_broken_definitions_are() {
    let mut world = World::new(&[K47]);
    world.definitions.families.clear();
    assert!(!world.plan().has_failures());
    let mut world = World::new(&[K47]);
    world.definitions.templates.clear();
    assert!(world.plan().has_failures());
}

/// Returns a world with an example of most outcomes.
fn busy() -> World {
    let mut world = World::new(&[K47, K48, "6.1.0-49-amd64", "6.1.0-50-amd64", "5.10.0-1-amd64", K47, K48]);
    world.image("mft").spec.kernels = Some(">=6.1".parse().unwrap());
    world.publish(Verdict::Loads);
    let cells = world.cells();
    world.observed.published.remove(&cells[1].reference);
    world.observed.published.get_mut(&cells[2].reference).unwrap().input_hash = None;
    world.observed.published.remove(&cells[3].reference);
    let failure = Failure {
        at: "2026-07-01T12:00:00.123Z".parse().unwrap(),
        message: "nv-pci.c:12: too few arguments".to_owned(),
        permanent: true,
        under: None,
        under_site: None,
        memory: None,
        deadline: None,
    };
    world.observed.failures.insert(cells[3].input_hash, Some(failure));
    for node in [5, 6] {
        world.snapshot.nodes[node].labels.remove(super::super::OS_ID_LABEL);
        world.snapshot.nodes[node].name.push('\u{1b}');
    }
    world
}

#[test]
fn a_busy_plan_as_people_read_it() {
    // Hide the hashes: they change with the build format.
    let text = table(&busy().plan());
    let text = regex::Regex::new(r"\b([0-9a-f]{64}|[0-9a-f]{12})\b").unwrap().replace_all(&text, "HASH");
    insta::assert_snapshot!(text);
}

#[test]
fn the_json_form_is_stable() {
    let json = serde_json::to_string_pretty(&busy().plan()).unwrap();
    let json = regex::Regex::new("[0-9a-f]{64}").unwrap().replace_all(&json, "HASH");
    insta::assert_snapshot!(json);
}
