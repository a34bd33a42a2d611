use super::{
    super::{
        fixtures::{K47, K48, World},
        table,
    },
    *,
};

/// Changes what is published under the first cell's name.
fn republish(world: &mut World, change: impl FnOnce(&mut Published)) {
    let reference = world.matrix().cells[0].reference.clone();
    change(world.observed.published.get_mut(&reference).unwrap());
}

fn fail(world: &mut World, permanent: bool) {
    let failure = Failure {
        at: "2026-07-01T12:00:00.123Z".parse().unwrap(),
        message: "nv-pci.c:12: too few arguments".to_owned(),
        permanent,
    };
    let hash = world.matrix().cells[0].input_hash;
    world.observed.failures.insert(hash, failure);
}

#[test]
fn what_is_not_there_is_built_and_what_is_there_is_not() {
    let mut world = World::new(&[K47]);
    let plan = world.plan();
    assert_eq!(plan.builds.len(), 1);
    assert!(matches!(plan.rollouts[0].decision, RolloutDecision::Pending { .. }));
    assert!(!plan.is_idle() && !plan.has_failures());

    world.publish(Verdict::Loads);
    let plan = world.plan();
    assert_eq!((plan.builds.len(), plan.up_to_date.len()), (0, 1));
    let change = plan.rollouts[0].change().unwrap();
    assert_eq!(change.to.to_string(), format!("registry.test/drivers/mft@{}", plan.up_to_date[0].digest));

    world.snapshot.daemon_sets[0].containers[0].image = change.to.to_string();
    let plan = world.plan();
    assert!(plan.is_idle() && !plan.has_failures());
    insta::assert_snapshot!(super::super::summary(&plan), @"nothing to do: 1 up to date, 1 already set");
}

#[test]
fn a_tag_with_other_inputs_is_a_conflict_unless_it_may_be_overwritten() {
    for theirs in [None, Some("ab".repeat(32).parse().unwrap())] {
        let mut world = World::new(&[K47]);
        world.publish(Verdict::Loads);
        republish(&mut world, |published| published.input_hash = theirs);
        let plan = world.plan();
        assert_eq!((plan.builds.len(), plan.conflicts.len()), (0, 1));
        assert!(matches!(plan.rollouts[0].decision, RolloutDecision::Hold(HoldReason::NoImage { .. })));
        assert!(plan.has_failures());

        world.image("mft").spec.on_conflict = OnConflict::Overwrite;
        let plan = world.plan();
        assert_eq!((plan.builds.len(), plan.conflicts.len()), (1, 0));
        assert_eq!(plan.builds[0].why, BuildReason::Overwrite { theirs });
    }
}

#[test]
fn permanent_failures_wait_for_an_input_to_change() {
    let mut world = World::new(&[K47]);
    fail(&mut world, true);
    let plan = world.plan();
    assert_eq!((plan.builds.len(), plan.held_back.len()), (0, 1));
    assert!(plan.has_failures());
    world.image("mft").spec.modules.push("another".to_owned());
    assert_eq!(world.plan().builds.len(), 1);

    let mut world = World::new(&[K47]);
    fail(&mut world, false);
    assert!(matches!(world.plan().builds[0].why, BuildReason::RetryAfterFailure { .. }));
}

#[test]
fn what_the_registry_does_not_tell_is_unknown() {
    let mut world = World::new(&[K47]);
    world.publish(Verdict::Loads);
    let reference = world.matrix().cells[0].reference.clone();
    world.observed.unreachable.insert(reference, "connection refused".to_owned());
    let plan = world.plan();
    assert_eq!((plan.builds.len(), plan.up_to_date.len(), plan.unknown.len()), (0, 0, 1));
    assert!(matches!(plan.rollouts[0].decision, RolloutDecision::Hold(HoldReason::NoImage { .. })));
}

#[test]
fn further_names_are_added_to_what_is_there() {
    let mut world = World::new(&[K47]);
    world.publish(Verdict::Loads);
    world.image("mft").spec.tags.push("latest-{{arch}}".to_owned());
    let plan = world.plan();
    assert_eq!((plan.builds.len(), plan.tags.len(), plan.up_to_date.len()), (0, 1, 1));
    let names: Vec<_> = plan.tags[0].references.iter().map(ToString::to_string).collect();
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

/// A world in which a bit of everything happens.
fn busy() -> World {
    let mut world = World::new(&[K47, K48, "6.1.0-49-amd64", "6.1.0-50-amd64", "5.10.0-1-amd64", K47, K48]);
    world.image("mft").spec.kernels = Some(">=6.1".parse().unwrap());
    world.publish(Verdict::Loads);
    let cells = world.matrix().cells;
    world.observed.published.remove(&cells[1].reference);
    world.observed.published.get_mut(&cells[2].reference).unwrap().input_hash = None;
    world.observed.published.remove(&cells[3].reference);
    let failure = Failure {
        at: "2026-07-01T12:00:00.123Z".parse().unwrap(),
        message: "nv-pci.c:12: too few arguments".to_owned(),
        permanent: true,
    };
    world.observed.failures.insert(cells[3].input_hash, failure);
    for node in [5, 6] {
        world.snapshot.nodes[node].labels.remove(super::super::OS_ID_LABEL);
        world.snapshot.nodes[node].name.push('\u{1b}');
    }
    world
}

#[test]
fn a_busy_plan_as_people_read_it() {
    // Hashes are left out: they move with the build format.
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
