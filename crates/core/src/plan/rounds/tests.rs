use super::*;
use crate::{
    image::Digest,
    kmod::Verdict,
    plan::{
        HeaderState, HoldReason, ImageContents, Matrix, NeedReason, Phase, Published, RolloutDecision,
        SignatureState, SkipReason, UpdateStrategy,
        fixtures::{K47, K48, Rounds, World, name},
        table,
    },
    site::RequireSigned,
};

fn rounds(world: &World) -> Rounds {
    world.rounds().1
}

/// Plans with these answers alone.
fn plan_with(world: &World, observed: &Observed) -> Plan {
    world.with_inputs(|inputs| Matrix::of(inputs).compare(observed).decide(observed).plan(observed))
}

fn repositories(references: &BTreeSet<ImageReference>) -> Vec<&str> {
    let names = references.iter().map(|reference| reference.repository.as_str());
    names.map(|name| name.rsplit('/').next().unwrap()).collect()
}

fn require_signatures(world: &mut World) {
    world.definitions.site.policy.require_signed = RequireSigned::OneOf(vec!["pub.pem".parse().unwrap()]);
}

/// Answers every lookup of signatures: the images are signed.
fn sign(world: &mut World) {
    let all: Vec<Digest> = world.observed.published.values().map(|found| found.digest.clone()).collect();
    let signed = SignatureState { ours: true, refused: None };
    world.observed.signatures.extend(all.into_iter().map(|digest| (digest, signed.clone())));
}

/// Returns a world with a union rollout and published images.
fn union() -> World {
    let mut world = World::live(&[K47, K48]);
    world.image("mft").spec.rollout = vec![
        serde_json::from_value(serde_json::json!({
            "strategy": "union", "namespace": "kube-system", "daemonSet": "mft", "container": "driver",
        }))
        .unwrap(),
    ];
    world.publish(Verdict::Loads);
    world
}

fn publish_union(world: &mut World) -> ImageReference {
    let union = world.plan().unions.remove(0);
    let published = Published {
        digest: Digest::of(b"union"),
        input_hash: Some(union.input_hash),
        declared_hash: None,
        exposed: None,
        verdict: Some(Verdict::Loads),
        kernel_release: None,
        platforms: [].into(),
    };
    let pinned = published.pinned(&union.reference);
    world.observed.published.insert(union.reference, published);
    pinned
}

#[test]
fn the_first_round_lists_every_name_of_every_cell_once() {
    let mut world = World::chain(&[K47, K47]);
    world.image("mft").spec.tags.push("latest-{{arch}}".to_owned());
    let unpublished = rounds(&world).images;
    // The names of an image do not depend on what is published of its needs.
    assert_eq!(repositories(&unpublished), ["gpu", "mft", "mft", "mofed", "peer"]);
    world.publish(Verdict::Loads);
    world.publish(Verdict::Loads);
    assert_eq!(world.plan().count(Phase::Published), 4);
    assert_eq!(rounds(&world).images, unpublished);

    // Cells that no answer makes buildable have no names to look up.
    world.image("mofed").spec.kernels = Some("<6".parse().unwrap());
    assert_eq!(repositories(&rounds(&world).images), ["gpu", "mft", "mft"]);
    world.resolved.images.insert(name("gpu"), Err("no such package".to_owned()));
    assert_eq!(repositories(&rounds(&world).images), ["mft", "mft"]);
}

#[test]
fn the_second_round_lists_what_may_prevent_each_build() {
    let mut world = World::chain(&[K47, K48]);
    let hashes = |world: &World| -> BTreeSet<InputHash> {
        world.plan().builds().map(|cell| cell.input_hash).collect()
    };
    let Rounds { failures, headers, .. } = rounds(&world);
    assert_eq!((failures.len(), &failures), (6, &hashes(&world)), "an image that waits for others has none");
    assert_eq!(headers.iter().map(|kernel| kernel.release.as_str()).collect::<Vec<_>>(), [K47, K48]);

    world.publish(Verdict::Loads);
    let Rounds { failures, headers, signatures, .. } = rounds(&world);
    assert_eq!((failures.len(), &failures, headers.len()), (2, &hashes(&world), 2));
    assert_eq!(signatures, BTreeSet::new(), "the site requires none");

    world.publish(Verdict::Loads);
    require_signatures(&mut world);
    let Rounds { failures, headers, signatures, unions, .. } = rounds(&world);
    assert_eq!((failures.len(), headers.len(), unions.len()), (0, 0, 0));
    let pinned = world.plan().cells.iter().filter_map(published).map(|image| image.reference).collect();
    assert_eq!((signatures.len(), signatures), (8, pinned));
}

#[test]
fn unions_are_looked_up_in_the_third_round_and_their_signatures_in_the_fourth() {
    let mut world = union();
    require_signatures(&mut world);
    assert_eq!(rounds(&world).unions, BTreeSet::new(), "no member is known to be signed");
    sign(&mut world);
    let Rounds { unions, union_signatures, .. } = rounds(&world);
    let planned: BTreeSet<_> = world.plan().unions.into_iter().map(|union| union.reference).collect();
    assert_eq!((unions.len(), &unions, union_signatures.len()), (1, &planned, 0));

    let pinned = publish_union(&mut world);
    let Rounds { signatures, unions, union_signatures, .. } = rounds(&world);
    assert_eq!((unions, union_signatures), (planned, [pinned].into()));
    assert_eq!(signatures.len(), 2, "only the images for one kernel");
}

#[test]
fn unions_of_complete_chains_are_looked_up_in_the_same_round() {
    let mut world = union();
    world.add("peer", &["mft"]);
    world.image("mft").spec.exposes = vec!["/usr/src/mft".parse().unwrap()];
    world.observed.published.clear();
    world.publish(Verdict::Loads);
    world.publish(Verdict::Loads);
    // No node loses anything if its kernel has no modules in the next image.
    world.snapshot.daemon_sets[0].live.as_mut().unwrap().update = UpdateStrategy::OnDelete;
    world.observed.contents.insert("registry.test/old:1".to_owned(), ImageContents::default());
    let of_all = rounds(&world).unions;
    assert_eq!(of_all.len(), 1);

    let missing = world.cells().into_iter().find(|cell| cell.image == name("peer")).unwrap();
    world.observed.published.remove(&missing.reference);
    let both = rounds(&world).unions;
    assert_eq!((both.len(), both.is_superset(&of_all)), (2, true));
    let [union] = &world.plan().unions[..] else { panic!("{both:?}") };
    assert_eq!((union.members.len(), both.contains(&union.reference)), (1, true));
}

#[test]
fn a_plan_with_all_answers_needs_no_further_lookup() {
    let mut signed = union();
    require_signatures(&mut signed);
    sign(&mut signed);
    publish_union(&mut signed);
    sign(&mut signed);
    let mut chain = World::chain(&[K47, K48]);
    let mut worlds = vec![union(), signed, chain.clone()];
    for _ in 0..2 {
        chain.publish(Verdict::Loads);
        worlds.push(chain.clone());
    }
    for world in worlds {
        let plan = world.plan();
        assert_eq!(plan.count(Phase::Unknown), 0);
        let told = table(&plan);
        assert!(!told.contains("not looked up"), "{told}");
        assert!(!plan.has_failures());
    }
}

#[test]
fn a_missing_answer_gives_an_unknown_outcome() {
    let unknown = |world: &World, observed: &Observed| {
        let plan = plan_with(world, observed);
        let Outcome::Unknown { message, .. } = &plan.cells[0].outcome else { panic!("{plan:?}") };
        assert!(plan.builds().next().is_none() && plan.unions.is_empty() && plan.signatures.is_empty());
        assert!(matches!(plan.rollouts[0].decision, RolloutDecision::Hold(HoldReason::NoImage { .. })));
        message.clone()
    };
    let world = World::new(&[K47]);
    let mut observed = Observed::default();
    assert_eq!(unknown(&world, &observed), "it was not looked up");
    observed.assume_absent(&rounds(&world).images);
    assert_eq!(unknown(&world, &observed), "earlier failures of its build were not looked up");
    observed.failures.extend(rounds(&world).failures.into_iter().map(|inputs| (inputs, None)));
    assert_eq!(unknown(&world, &observed), "the kernel's headers were not looked up");
    let headers = rounds(&world).headers;
    observed.headers.extend(headers.into_iter().map(|kernel| (kernel, HeaderState::Unknown)));
    assert_eq!(plan_with(&world, &observed).builds().count(), 1);
}

#[test]
fn an_image_waits_for_a_need_that_is_unknown() {
    let world = World::chain(&[K47]);
    let plan = plan_with(&world, &Observed::default());
    assert_eq!((plan.count(Phase::Unknown), plan.count(Phase::Waiting)), (3, 1));
}

#[test]
fn a_need_that_cannot_be_built_is_a_reason_for_its_dependents() {
    let mut world = World::chain(&[K47]);
    let kernel = rounds(&world).headers.first().unwrap().clone();
    world.observed.headers.insert(kernel, HeaderState::Missing("a package".to_owned()));
    let skipped = world.skipped();
    let of_need = |why: &SkipReason| matches!(why, SkipReason::Need { why: NeedReason::Skipped { .. }, .. });
    assert_eq!(skipped.iter().filter(|(_, why)| of_need(why)).count(), 1, "{skipped:?}");
    assert_eq!(skipped.len(), 4);
}

#[test]
fn a_union_without_an_answer_is_neither_built_nor_set() {
    let mut world = union();
    let hold = |world: &World, observed: &Observed| {
        let plan = plan_with(world, observed);
        assert!(plan.unions.is_empty() && plan.rollouts[0].changes.is_empty());
        let RolloutDecision::Hold(why @ HoldReason::NoImage { .. }) = &plan.rollouts[0].decision else {
            panic!("{plan:?}")
        };
        why.to_string()
    };
    let name = rounds(&world).unions.first().unwrap().clone();
    let expected = |why: &str| format!("no image for 2 kernels: {name}: {why}");
    assert_eq!(hold(&world, &world.observed), expected("it was not looked up"));
    world.observed.unreachable.insert(name.clone(), "connection refused".to_owned());
    assert_eq!(hold(&world, &world.observed), expected("connection refused"));
}

#[test]
fn the_rounds_can_be_held_while_lookups_are_made_elsewhere() {
    fn is_send<T: Send>() {}
    is_send::<Matrix<'_>>();
    is_send::<ComparedMatrix<'_>>();
    is_send::<DecidedMatrix<'_>>();
}
