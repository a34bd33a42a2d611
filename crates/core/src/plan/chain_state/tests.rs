use std::{collections::BTreeMap, sync::Arc};

use proptest::prelude::{any, prop, prop_assert, prop_assert_eq, proptest};

use super::*;
use crate::{
    image::{Digest, InputHash, Need, OnConflict, RuntimeBase, Version},
    kmod::Verdict,
    plan::{
        BootReadiness, Cell, Failure, HoldReason, NEXT_KERNEL_ANNOTATION, PAUSED_ANNOTATION, Phase,
        Published, Readiness, RolloutDecision, SkipReason,
        fixtures::{K47, K48, World, image, live_daemon_set, name},
        status, status_table, table, text as laid_out,
    },
};

/// Returns the images that the next reconcile builds.
fn built(world: &World) -> Vec<String> {
    world.plan().cells_in(Phase::Missing).map(PlannedCell::subject).collect()
}

fn waiting(world: &World) -> Vec<String> {
    let waits = |found: &PlannedCell| format!("{} {}", found.image, found.outcome.absence_reason());
    world.plan().cells_in(Phase::Waiting).map(waits).collect()
}

fn built_cells(world: &World) -> Vec<Arc<Cell>> {
    world.plan().cells_in(Phase::Missing).filter_map(|planned| planned.outcome.cell().cloned()).collect()
}

/// Reconciles until nothing is left to build, and returns what was built.
fn settle(world: &mut World) -> Vec<String> {
    let mut all = Vec::new();
    loop {
        let builds = built_cells(world);
        if builds.is_empty() {
            return all;
        }
        for cell in builds {
            world.publish_cell(&cell, Verdict::Loads);
            all.push(cell.subject());
        }
    }
}

fn decision(world: &World, image: &str) -> RolloutDecision {
    let mut found = world.plan().rollouts.into_iter().filter(|rollout| rollout.image == name(image));
    found.next().unwrap().decision
}

fn skipped(world: &World, image: &str) -> SkipReason {
    world.skipped().into_iter().find(|(skipped, _)| skipped.image == name(image)).unwrap().1
}

/// Applies every rewrite.
fn roll_out(world: &mut World) {
    for rollout in world.plan().rollouts {
        let RolloutDecision::Rewrite { to, .. } = rollout.decision else { continue };
        let all = &mut world.snapshot.daemon_sets;
        let found = all.iter_mut().find(|found| found.name == rollout.image.as_str()).unwrap();
        found.containers[0].image = to.to_string();
    }
}

fn set_version(world: &mut World, image: &str, version: &str) {
    let resolved = world.resolved.images.get_mut(&name(image)).unwrap().as_mut().unwrap();
    version.clone_into(&mut resolved.version);
}

fn readable(text: &str) -> String {
    let digest = regex::Regex::new("sha256:[0-9a-f]{12,64}").unwrap();
    digest.replace_all(text, "DIGEST").into_owned()
}

#[test]
fn a_chain_is_built_in_order_and_goes_out_together() {
    let mut world = World::chain(&[K47]);
    let first = world.plan();
    let mut text = table(&first);
    assert!(!first.is_idle() && !first.has_failures());
    for cell in built_cells(&world) {
        world.publish_cell(&cell, Verdict::Loads);
    }
    assert_eq!(built(&world), ["peer for 6.1.0-47-amd64"]);
    text += "\n";
    text += &table(&world.plan());
    assert!(
        matches!(decision(&world, "mft"), RolloutDecision::Rewrite { .. }),
        "mft is not part of the chain"
    );
    settle(&mut world);
    for image in ["mofed", "gpu", "peer"] {
        assert!(matches!(decision(&world, image), RolloutDecision::Rewrite { .. }), "{image}");
    }
    let plan = world.plan();
    let order: Vec<&str> = plan.rollouts.iter().map(|rollout| rollout.image.as_str()).collect();
    assert_eq!(order, ["gpu", "mofed", "peer", "mft"]);
    text += "\n";
    text += &laid_out(&status_table(&status(&plan)));
    insta::assert_snapshot!(readable(&text));
}

#[test]
fn a_change_rebuilds_what_was_compiled_against_it_and_nothing_else() {
    let mut world = World::chain(&[K47]);
    assert_eq!(settle(&mut world).len(), 4);
    set_version(&mut world, "mofed", "25.10");
    assert_eq!(waiting(&world), ["peer waits for mofed"]);
    assert!(matches!(decision(&world, "gpu"), RolloutDecision::Hold(HoldReason::NoImage { .. })));
    assert_eq!(built(&world), ["mofed for 6.1.0-47-amd64"]);
    // The tag points to an image that was compiled against the old version.
    world.image("peer").spec.on_conflict = OnConflict::Overwrite;
    assert_eq!(settle(&mut world), ["mofed for 6.1.0-47-amd64", "peer for 6.1.0-47-amd64"]);
}

#[test]
fn a_change_that_exposes_the_same_rebuilds_nothing_else() {
    let mut world = World::chain(&[K47]);
    settle(&mut world);
    let mofed = world.image("mofed");
    (mofed.spec.on_conflict, mofed.spec.modules) = (OnConflict::Overwrite, vec!["other".parse().unwrap()]);
    assert_eq!(settle(&mut world), ["mofed for 6.1.0-47-amd64"]);
    assert_eq!(world.plan().count(Phase::Published), 4);
}

/// An image based on a needed image is rebuilt with every change of it. If the tag contains the need's version, the new
/// image gets a new tag.
#[test]
fn an_image_on_a_needed_one_follows_it_under_tags_that_follow_too() {
    let mut world = World::chain(&[K47]);
    let peer = &mut world.image("peer").spec;
    peer.runtime.base = Some(RuntimeBase::Need(name("gpu")));
    peer.tags = vec!["{{version}}-{{needs.mofed}}-{{kernel_label}}".to_owned()];
    settle(&mut world);
    let tag = |world: &World| {
        let cells = world.cells();
        let cell = cells.iter().find(|cell| cell.image == name("peer")).unwrap();
        cell.reference.version.to_string()
    };
    assert!(tag(&world).ends_with(&format!("-4.33.0-{K47}")), "{}", tag(&world));
    let gpu = world.image("gpu");
    (gpu.spec.on_conflict, gpu.spec.modules) = (OnConflict::Overwrite, vec!["other".parse().unwrap()]);
    world.image("peer").spec.on_conflict = OnConflict::Overwrite;
    assert_eq!(settle(&mut world), ["gpu for 6.1.0-47-amd64", "peer for 6.1.0-47-amd64"]);
    world.image("peer").spec.on_conflict = OnConflict::Refuse;
    set_version(&mut world, "mofed", "25.10");
    assert_eq!(settle(&mut world), ["mofed for 6.1.0-47-amd64", "peer for 6.1.0-47-amd64"]);
    assert!(tag(&world).ends_with(&format!("-25.10-{K47}")), "{}", tag(&world));
}

#[test]
fn a_new_kernel_rebuilds_all_in_order() {
    let mut world = World::chain(&[K47]);
    settle(&mut world);
    world.announce(K48);
    let built = settle(&mut world);
    assert_eq!(built.len(), 4);
    assert!(built.iter().all(|subject| subject.ends_with(K48)), "{built:?}");
    assert_eq!(built[3], format!("peer for {K48}"));
}

#[test]
fn dependents_call_for_their_needs_where_no_node_does() {
    let mut world = World::chain(&[K47]);
    world.image("mofed").spec.nodes.match_labels = [("a".parse().unwrap(), "b".parse().unwrap())].into();
    let cells = world.cells();
    let mofed = cells.iter().find(|cell| cell.image == name("mofed")).unwrap();
    assert_eq!((mofed.nodes.len(), mofed.needed_by.as_slice()), (0, &[name("peer")][..]));
    assert_eq!(settle(&mut world).len(), 4);
    let mut world = World::chain(&[K47]);
    world.image("mofed").spec.nodes.match_labels = [("a".parse().unwrap(), "b".parse().unwrap())].into();
    world.image("peer").spec.kernels = Some(">=6.2".parse().unwrap());
    assert_eq!(settle(&mut world).len(), 2, "an image not meant for the kernel calls for nothing");
    assert!(matches!(decision(&world, "gpu"), RolloutDecision::Rewrite { .. }), "and blocks no other image");
}

#[test]
fn what_cannot_be_compiled_against_says_why() {
    let mut text = Vec::new();
    let mut tell = |change: &dyn Fn(&mut World)| {
        let mut world = World::chain(&[K47]);
        world.publish(Verdict::Loads);
        change(&mut world);
        let skipped = skipped(&world, "peer");
        assert!(!world.plan().cells_in(Phase::Missing).any(|build| build.image == name("peer")));
        assert!(
            !matches!(decision(&world, "gpu"), RolloutDecision::Rewrite { .. })
                || skipped.is_not_applicable()
        );
        text.push(skipped.to_string());
    };
    let of_mofed = |world: &mut World, change: &dyn Fn(&mut Published)| {
        let all = world.observed.published.iter_mut();
        all.filter(|(reference, _)| reference.to_string().contains("mofed"))
            .for_each(|(_, found)| change(found));
    };
    tell(&|world| world.image("mofed").spec.kernels = Some(">=6.2".parse().unwrap()));
    tell(&|world| {
        drop(world.resolved.images.insert(name("mofed"), Err("mofed.tgz: no such file".to_owned())));
    });
    tell(&|world| of_mofed(world, &|found| found.input_hash = None));
    tell(&|world| {
        of_mofed(world, &|found| found.input_hash = Some("0".repeat(64).parse::<InputHash>().unwrap()));
    });
    tell(&|world| of_mofed(world, &|found| found.exposed = None));
    tell(&|world| {
        world.observed.published.clear();
        let cells = world.cells();
        let mofed = cells.iter().find(|cell| cell.image == name("mofed")).unwrap();
        let at = jiff::Timestamp::UNIX_EPOCH;
        let message = "make: error 2".to_owned();
        world.observed.failures.insert(
            mofed.input_hash,
            Some(Failure {
                at,
                message,
                permanent: true,
                under: None,
                under_site: None,
                memory: None,
                deadline: None,
            }),
        );
    });
    tell(&|world| world.image("peer").spec.needs.push(Need::Image(name("nobody"))));
    tell(&|world| world.image("mofed").spec.needs.push(Need::Image(name("peer"))));
    tell(&|world| {
        let tree = "host".parse().unwrap();
        world.image("peer").spec.needs.push(Need::Tree { name: name("host"), tree });
        let target = world.cells()[0].target.clone();
        let why = "host: no such directory".to_owned();
        world.resolved.trees.insert((name("peer"), name("host"), target), Err(why));
    });
    insta::assert_snapshot!(readable(&text.join("\n")));
}

#[test]
fn a_tree_of_the_user_counts_in_the_input_hash() {
    let mut world = World::chain(&[K47]);
    world.image("peer").spec.needs = vec![Need::Tree { name: name("mofed"), tree: "host".parse().unwrap() }];
    let target = world.cells()[0].target.clone();
    let mut hash = |content: &str| {
        let key = (name("peer"), name("mofed"), target.clone());
        world.resolved.trees.insert(key, Ok(Digest::of(content.as_bytes())));
        world.cells().iter().find(|cell| cell.image == name("peer")).unwrap().input_hash
    };
    assert_ne!(hash("one"), hash("two"));
    assert_eq!(hash("one"), hash("one"));
}

#[test]
fn a_broken_rollout_holds_the_others_of_its_chain() {
    let mut world = World::chain(&[K47]);
    settle(&mut world);
    world.snapshot.daemon_sets.retain(|found| found.name != "gpu");
    let RolloutDecision::Hold(HoldReason::Chain { image, .. }) = decision(&world, "mofed") else {
        panic!("{:?}", decision(&world, "mofed"))
    };
    assert_eq!(image, name("gpu"));
    assert!(
        world
            .plan()
            .rollouts
            .iter()
            .all(|rollout| { rollout.changes.is_empty() || rollout.image == name("mft") })
    );
    let publish_only = serde_json::json!({"strategy": "publish-only"});
    world.image("gpu").spec.rollout = vec![serde_json::from_value(publish_only).unwrap()];
    assert!(
        matches!(decision(&world, "mofed"), RolloutDecision::Rewrite { .. }),
        "gpu is not rolled out at all"
    );
}

#[test]
fn a_paused_rollout_holds_the_others_of_its_chain() {
    let mut world = World::chain(&[K47]);
    settle(&mut world);
    let gpu = world.snapshot.daemon_sets.iter_mut().find(|found| found.name == "gpu").unwrap();
    gpu.live = live_daemon_set("gpu").live;
    let annotations = &mut gpu.live.as_mut().unwrap().annotations;
    annotations.insert(PAUSED_ANNOTATION.to_owned(), "true".to_owned());
    assert_eq!(decision(&world, "gpu"), RolloutDecision::Hold(HoldReason::Paused));
    assert!(matches!(decision(&world, "mofed"), RolloutDecision::Hold(HoldReason::Chain { .. })));
}

#[test]
fn what_is_set_stays_set_while_others_are_built() {
    let mut world = World::chain(&[K47]);
    settle(&mut world);
    roll_out(&mut world);
    world.add("top", &["peer"]);
    for image in ["mofed", "gpu", "peer"] {
        assert!(matches!(decision(&world, image), RolloutDecision::AlreadySet { .. }), "{image}");
    }
    assert!(matches!(decision(&world, "top"), RolloutDecision::Pending { .. }));
    settle(&mut world);
    assert!(matches!(decision(&world, "top"), RolloutDecision::Rewrite { .. }));
}

#[test]
fn a_silent_registry_takes_no_readiness_away() {
    let mut world = World::chain(&[K47]);
    let annotations = &mut world.snapshot.nodes[0].annotations;
    annotations.insert(NEXT_KERNEL_ANNOTATION.to_owned(), K48.to_owned());
    settle(&mut world);
    let next = |world: &World| world.plan().nodes[0].next.clone().unwrap();
    assert_eq!(next(&world).may_boot(), BootReadiness::Ready);
    let mofed = world.observed.published.keys().filter(|reference| reference.to_string().contains("mofed"));
    let mofed: Vec<_> = mofed.cloned().collect();
    let mut missing = world.clone();
    for reference in mofed {
        missing.observed.published.remove(&reference);
        world.observed.published.remove(&reference);
        world.observed.unreachable.insert(reference, "connection refused".to_owned());
    }
    let states = |world: &World| {
        let needs = next(world).needs.clone();
        needs.into_iter().map(|needed| (needed.image.to_string(), needed.state)).collect::<BTreeMap<_, _>>()
    };
    for (image, state) in states(&world) {
        assert_eq!(image != "mft", matches!(state, Readiness::Unknown { .. }), "{image}: {state:?}");
    }
    for (image, state) in states(&missing) {
        assert_eq!(image != "mft", matches!(state, Readiness::Missing { .. }), "{image}: {state:?}");
    }
}

/// State of one image for one kernel in the registry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Published,
    Refused,
    Absent,
    Foreign,
    Failed,
    Unreachable,
}

const FATES: [Fate; 8] = [
    Fate::Published,
    Fate::Published,
    Fate::Published,
    Fate::Refused,
    Fate::Absent,
    Fate::Foreign,
    Fate::Failed,
    Fate::Unreachable,
];

/// Applies the fates to every cell, including cells that appear only as a result.
fn meet_fates(
    world: &mut World,
    fates: &[usize],
    compiled: &mut BTreeMap<Digest, BTreeMap<ImageName, Digest>>,
) {
    for _ in 0..8 {
        for cell in world.cells() {
            let number =
                cell.image.as_str().bytes().chain(cell.version.bytes()).map(usize::from).sum::<usize>();
            let fate = FATES[fates[number % fates.len()] % FATES.len()];
            let reference = cell.reference.clone();
            if world.observed.published.contains_key(&reference) {
                continue;
            }
            match fate {
                Fate::Published | Fate::Refused => {
                    let verdict = if fate == Fate::Published { Verdict::Loads } else { Verdict::Refused };
                    world.publish_cell(&cell, verdict);
                    let digest = world.observed.published[&reference].digest.clone();
                    let needs = cell.needs.iter().map(|need| (need.name.clone(), need.exposed.clone()));
                    compiled.insert(digest, needs.collect());
                }
                Fate::Foreign => {
                    world.publish_cell(&cell, Verdict::Loads);
                    let found = world.observed.published.get_mut(&reference).unwrap();
                    (found.input_hash, found.exposed) = (None, None);
                }
                Fate::Failed => {
                    let (at, message) = (jiff::Timestamp::UNIX_EPOCH, "make: error 2".to_owned());
                    let failure = Failure {
                        at,
                        message,
                        permanent: true,
                        under: None,
                        under_site: None,
                        memory: None,
                        deadline: None,
                    };
                    world.observed.failures.insert(cell.input_hash, Some(failure));
                }
                Fate::Unreachable => {
                    world.observed.unreachable.insert(reference, "connection refused".to_owned());
                }
                Fate::Absent => {}
            }
        }
    }
}

proptest! {
    /// No rollout names an image whose dependents for that kernel are missing or were compiled against something else,
    /// whatever the chain, the registry and the DaemonSets contain.
    #[test]
    fn no_rollout_tears_a_chain(
        edges in prop::collection::vec(any::<bool>(), 10),
        fates in prop::collection::vec(0..64_usize, 7),
        bumped in prop::collection::vec(0..5_usize, 0..3),
        set_before in any::<bool>(),
        overwrite in any::<bool>(),
    ) {
        let names = ["e", "d", "c", "b", "a"];
        let mut world = World::new(&[K47]);
        let mut edge = edges.iter();
        for (index, image) in names.iter().enumerate() {
            let needs: Vec<&str> = names[..index].iter().copied().filter(|_| *edge.next().unwrap()).collect();
            world.add(image, &needs);
            if overwrite {
                world.image(image).spec.on_conflict = OnConflict::Overwrite;
            }
        }
        let mut compiled = BTreeMap::new();
        if set_before {
            meet_fates(&mut world, &[0], &mut compiled);
            roll_out(&mut world);
        }
        for index in bumped {
            set_version(&mut world, names[index], "99");
        }
        meet_fates(&mut world, &fates, &mut compiled);
        let plan = world.plan();
        for rollout in &plan.rollouts {
            let RolloutDecision::Rewrite { to, .. } = &rollout.decision else { continue };
            let Version::Digest(digest) = &to.version else { panic!("{to} is not by digest") };
            let set = world.observed.published.values().find(|found| found.digest == *digest).unwrap();
            for (dependent, image) in &world.definitions.images {
                if !image.spec.needs.iter().any(|need| *need.name() == rollout.image) {
                    continue;
                }
                let mut found = plan.cells_in(Phase::Published).filter(|found| found.image == *dependent);
                let found = found.find_map(|found| match &found.outcome {
                    Outcome::UpToDate { published, .. } => Some(published),
                    _ => None,
                });
                prop_assert!(found.is_some(), "{} goes out without {dependent}\n{}", rollout.image, table(&plan));
                let against = &compiled[&found.unwrap().digest][&rollout.image];
                prop_assert_eq!(Some(against), set.exposed.as_ref());
            }
        }
        // Every image has exactly one cell.
        prop_assert_eq!(plan.cells.len(), 6, "{}", table(&plan));
    }

    /// A new version of any image rebuilds that image and its direct dependents, and nothing else.
    #[test]
    fn nothing_is_rebuilt_that_does_not_depend_on_the_change(
        edges in prop::collection::vec(any::<bool>(), 10),
        bumped in 0..5_usize,
    ) {
        let names = ["e", "d", "c", "b", "a"];
        let mut world = World::new(&[K47]);
        let mut edge = edges.iter();
        let mut above = vec![names[bumped]];
        for (index, image) in names.iter().enumerate() {
            let needs: Vec<&str> = names[..index].iter().copied().filter(|_| *edge.next().unwrap()).collect();
            world.add(image, &needs);
            world.image(image).spec.on_conflict = OnConflict::Overwrite;
            if needs.contains(&names[bumped]) {
                above.push(image);
            }
        }
        settle(&mut world);
        set_version(&mut world, names[bumped], "99");
        // The exposed headers of a dependent depend only on its own version, which stays the same. The change therefore
        // ends with the direct dependents.
        let mut built: Vec<String> = settle(&mut world);
        built.sort();
        let mut expected: Vec<String> = above.iter().map(|image| format!("{image} for {K47}")).collect();
        expected.sort();
        prop_assert_eq!(built, expected);
        prop_assert!(!world.plan().has_failures());
    }
}

#[test]
fn an_image_that_needs_nothing_keeps_its_hash() {
    let world = World::new(&[K47]);
    let mut other = World::chain(&[K47]);
    other.definitions.images.insert(name("mft"), image("mft"));
    let hash =
        |world: &World| world.cells().iter().find(|cell| cell.image == name("mft")).unwrap().input_hash;
    assert_eq!(hash(&world), hash(&other));
}
