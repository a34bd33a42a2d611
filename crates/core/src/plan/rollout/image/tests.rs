mod nodes;

use std::collections::BTreeSet;

use jiff::{SignedDuration, Timestamp};
use proptest::{
    prelude::{Just, ProptestConfig, Strategy, any, prop, prop_assert, prop_assert_eq, prop_oneof, proptest},
    test_runner::TestCaseError,
};

use super::*;
use crate::{
    image::Digest,
    kmod::Verdict,
    plan::{
        Container, Phase, PullFailure, RECORD_ANNOTATION, Taint,
        fixtures::{self, K47, K48, World, name, pod},
        rollout::RecordState,
        with_short_digests,
    },
};

const OLD: &str = "registry.test/old:1";
const FOREIGN: &str = "registry.test/foreign:1";

/// Publishes another version, and makes the definition ask for it.
fn wish(world: &mut World, version: &str) {
    version.clone_into(&mut world.resolved.images.get_mut(&name("mft")).unwrap().as_mut().unwrap().version);
    world.publish(Verdict::Loads);
}

/// Returns a live world whose definition asks for version 1.
fn world() -> World {
    let mut world = World::live(&[K47, K47, K47]);
    world.now = "2026-07-01T12:00:00Z".parse().unwrap();
    wish(&mut world, "1");
    world
}

/// Reconciles once; returns the decision, and whether anything was written.
fn reconcile(world: &mut World) -> (RolloutDecision, bool) {
    let planned = world.plan().rollouts.swap_remove(0);
    for change in &planned.changes {
        world.apply(change).unwrap();
    }
    (planned.decision, !planned.changes.is_empty())
}

/// Reconciles once, asserts a rewrite, and returns the new image.
fn rewrites(world: &mut World) -> String {
    match reconcile(world) {
        (RolloutDecision::Rewrite { to, .. }, true) => {
            assert_eq!(world.image_of("driver"), to.to_string());
            to.to_string()
        }
        other => panic!("no rewrite: {other:?}"),
    }
}

fn held(world: &mut World) -> (HoldReason, bool) {
    match reconcile(world) {
        (RolloutDecision::Hold(why), wrote) => (why, wrote),
        other => panic!("not held: {other:?}"),
    }
}

fn is_quiet(world: &mut World) {
    let (decision, wrote) = reconcile(world);
    assert!(!wrote, "{decision:?}");
}

fn later(world: &mut World, minutes: i64) {
    world.now += SignedDuration::from_mins(minutes);
}

fn recorded(world: &World) -> FieldRecord {
    let annotations = &world.snapshot.daemon_sets[0].live.as_ref().unwrap().annotations;
    RewriteRecord::of(annotations).unwrap().0.remove("driver").unwrap()
}

#[test]
fn a_rewrite_is_recorded_and_its_success_noted_once() {
    let mut world = world();
    let one = rewrites(&mut world);
    let FieldRecord { set, replaced, at, state, changed_back, why, by, earlier } = recorded(&world);
    assert_eq!(by, "farrier");
    assert_eq!((set, replaced), (one.into(), OLD.into()));
    assert_eq!((at, state, changed_back, why), (world.now, RecordState::Set, 0, None));
    assert_eq!(earlier, []);
    is_quiet(&mut world);
    world.run_pod("n0", false);
    is_quiet(&mut world);
    world.run_pod("n0", true);
    assert!(matches!(reconcile(&mut world), (RolloutDecision::AlreadySet { .. }, true)));
    assert_eq!(recorded(&world).state, RecordState::Good);
    is_quiet(&mut world);
    // Months later the node breaks, and the image stays.
    later(&mut world, 100_000);
    world.snapshot.pods[0].ready = false;
    is_quiet(&mut world);
}

#[test]
fn a_value_that_is_changed_back_twice_is_left() {
    let mut world = world();
    let one = rewrites(&mut world);
    later(&mut world, 5);
    world.set_by_another(FOREIGN);
    assert_eq!(rewrites(&mut world), one);
    assert_eq!(recorded(&world).changed_back, 1);
    assert_eq!(recorded(&world).replaced, FOREIGN, "another writer's value is the one to restore");
    later(&mut world, 5);
    world.set_by_another(OLD);
    assert_eq!(held(&mut world), (HoldReason::ChangedBack { times: 2 }, true));
    assert_eq!((world.image_of("driver"), recorded(&world).state), (OLD, RecordState::Conflict));
    assert!(world.plan().has_failures());
    for minutes in [0, 5, 10_000] {
        later(&mut world, minutes);
        assert_eq!(held(&mut world), (HoldReason::ChangedBack { times: 2 }, false));
    }
    wish(&mut world, "2");
    rewrites(&mut world);
}

/// A webhook writes the registry of a mirror into the DaemonSet.
#[test]
fn the_registry_of_a_mirror_is_not_fought() {
    let mut world = world();
    let mirror = |world: &mut World, image: &str, ready| {
        world.set_by_another(&image.replace("registry.test", "mirror.test"));
        world.run_pod("n0", ready);
    };
    let one = rewrites(&mut world);
    mirror(&mut world, &one, true);
    assert!(matches!(reconcile(&mut world), (RolloutDecision::AlreadySet { .. }, true)));
    assert_eq!(recorded(&world).state, RecordState::Good);
    is_quiet(&mut world);
    wish(&mut world, "2");
    let two = rewrites(&mut world);
    mirror(&mut world, &two, false);
    later(&mut world, 60);
    // The image is restored also while the rollout waits for another reason.
    let mut waiting = world.clone();
    waiting.snapshot.nodes.push(fixtures::node("n3", K48));
    for mut world in [world, waiting] {
        let (why, wrote) = held(&mut world);
        assert!(matches!(why, HoldReason::RolloutFailed { .. }) && wrote, "{why}");
        assert_eq!(world.image_of("driver"), one);
    }
}

#[test]
fn a_conflict_outlasts_a_new_wish_for_an_hour() {
    let mut world = world();
    rewrites(&mut world);
    world.set_by_another(FOREIGN);
    rewrites(&mut world);
    world.set_by_another(FOREIGN);
    held(&mut world);
    wish(&mut world, "2");
    assert_eq!(held(&mut world), (HoldReason::ChangedBack { times: 2 }, false));
    later(&mut world, 60);
    rewrites(&mut world);
}

#[test]
fn an_hour_of_peace_forgets_what_was_changed_back() {
    let mut world = world();
    for _ in 0..4 {
        rewrites(&mut world);
        assert!(recorded(&world).changed_back <= 1);
        later(&mut world, 60);
        world.set_by_another(FOREIGN);
    }
    // Another desired version in between does not reset the count.
    rewrites(&mut world);
    later(&mut world, 10);
    wish(&mut world, "2");
    rewrites(&mut world);
    later(&mut world, 10);
    world.set_by_another(FOREIGN);
    assert!(matches!(held(&mut world).0, HoldReason::ChangedBack { times: 2 }));
}

#[test]
fn a_failed_image_gives_way_to_the_last_that_was_good() {
    let mut world = world();
    let one = rewrites(&mut world);
    world.run_pod("n0", true);
    reconcile(&mut world);
    wish(&mut world, "2");
    let two = rewrites(&mut world);
    world.run_pod("n0", false);
    later(&mut world, 11);
    let (HoldReason::RolloutFailed { why, .. }, true) = held(&mut world) else { panic!("not failed") };
    insta::assert_snapshot!(why, @"on node n0: driver: CrashLoopBackOff: no such device");
    assert_eq!(world.image_of("driver"), one);
    assert_eq!((recorded(&world).set, recorded(&world).state), (two.clone().into(), RecordState::Failed));
    assert!(world.plan().has_failures());
    assert!(!held(&mut world).1, "the image is not tried again");
    // The rollout continues with the next image, or with the same image if the record is removed.
    let mut anew = world.clone();
    anew.snapshot.daemon_sets[0].live.as_mut().unwrap().annotations.clear();
    rewrites(&mut anew);
    wish(&mut world, "3");
    rewrites(&mut world);
    let FieldRecord { replaced, earlier, .. } = recorded(&world);
    assert_eq!(replaced, one);
    let states: Vec<_> = earlier.iter().map(|it| (it.set.clone(), it.state)).collect();
    let [one, two] = [one, two].map(|image| with_short_digests(&image));
    assert_eq!(states, [(two, RecordState::Failed), (one, RecordState::Good)]);
    assert!(earlier[0].why.as_ref().unwrap().contains("no such device"), "{earlier:?}");
}

/// A registry that does not answer says nothing about the image.
#[test]
fn an_outage_of_the_registry_fails_no_image() {
    let mut world = world();
    let one = rewrites(&mut world);
    world.run_pod("n0", false);
    world.snapshot.pods[0].pull_failure = Some(PullFailure::Unanswered);
    for _ in 0..20 {
        later(&mut world, 3);
        assert!(matches!(reconcile(&mut world).0, RolloutDecision::AlreadySet { .. }));
    }
    // farrier itself gets no answer, so what the registry answers to a node does not count.
    let mut down = world.clone();
    let published = std::mem::take(&mut down.observed.published).into_keys();
    down.observed.unreachable =
        published.map(|reference| (reference, "connection refused".to_owned())).collect();
    down.observed.is_registry_down = true;
    down.snapshot.pods[0].pull_failure = Some(PullFailure::Refused);
    // The rollout is on hold for another reason.
    let mut mixed = world.clone();
    mixed.snapshot.nodes.push(fixtures::node("n3", K48));
    for mut world in [down, mixed] {
        for _ in 0..3 {
            later(&mut world, 8);
            let (why, wrote) = held(&mut world);
            assert!(wrote && !why.is_failure(), "{why}");
            assert_eq!(recorded(&world).at, world.now);
        }
        assert_eq!(world.image_of("driver"), one);
    }

    world.snapshot.pods[0].pull_failure = None;
    later(&mut world, 4);
    is_quiet(&mut world);
    later(&mut world, 11);
    assert!(matches!(held(&mut world), (HoldReason::RolloutFailed { .. }, true)), "it had time to start");
}

#[test]
fn a_registry_that_refuses_a_node_or_is_down_for_too_long_fails_the_image() {
    for (failure, minutes) in [(PullFailure::Refused, 11), (PullFailure::Unanswered, 721)] {
        let mut world = world();
        rewrites(&mut world);
        world.run_pod("n0", false);
        world.snapshot.pods[0].pull_failure = Some(failure);
        later(&mut world, minutes);
        assert!(matches!(held(&mut world), (HoldReason::RolloutFailed { .. }, true)), "{failure:?}");
    }
}

#[test]
fn an_image_that_did_not_come_up_is_never_gone_back_to() {
    let mut world = world();
    rewrites(&mut world);
    wish(&mut world, "2");
    rewrites(&mut world);
    assert_eq!(recorded(&world).replaced, OLD);
    // A late image is not put back when another one replaces it anyway.
    world.run_pod("n0", false);
    later(&mut world, 30);
    wish(&mut world, "3");
    rewrites(&mut world);
    assert_eq!(recorded(&world).replaced, OLD);
}

#[test]
fn an_image_that_is_there_by_somebody_elses_hand_is_fine() {
    let mut world = world();
    let one = rewrites(&mut world);
    world.run_pod("n0", false);
    later(&mut world, 30);
    held(&mut world);
    world.set_by_another(&one);
    assert!(matches!(reconcile(&mut world), (RolloutDecision::AlreadySet { .. }, false)));
}

#[test]
fn what_is_farriers_in_other_containers_stays_named() {
    let mut world = world();
    let one = rewrites(&mut world);
    // A second container of the DaemonSet, managed by another driver image.
    let mut second = crate::plan::fixtures::image("second");
    second.spec.rollout = world.image("mft").spec.rollout.clone();
    let crate::image::RolloutSpec::Image { target, .. } = &mut second.spec.rollout[0] else { panic!() };
    target.container = "init".parse().unwrap();
    world.definitions.images.insert(name("second"), second);
    world.resolved.images.insert(name("second"), Ok(crate::plan::fixtures::resolved()));
    let container =
        Container { name: "init".to_owned(), image: OLD.to_owned(), why_not_editable: None, tagged: false };
    world.snapshot.daemon_sets[0].containers.push(container);
    world.publish(Verdict::Loads);
    let change = |world: &World| {
        let rollouts = world.plan().rollouts;
        let Change::DaemonSet(change) = rollouts.last().unwrap().changes[0].clone() else { panic!() };
        change
    };
    let both = change(&world);
    assert_eq!(both.images.keys().collect::<Vec<_>>(), ["driver", "init"]);
    assert_eq!((&both.images["driver"], &both.expected["driver"]), (&one, &one));
    assert_eq!(both.image_changes().len(), 1, "only one image changes");
    assert_eq!(both.required_images.len(), 1);
    let record = RewriteRecord::of(&both.annotations).unwrap();
    assert_eq!(record.0.keys().collect::<Vec<_>>(), ["driver", "init"]);
    // A value that another writer has set since then belongs to that writer, and is not named.
    world.set_by_another(FOREIGN);
    world.image("mft").spec.rollout.clear();
    assert_eq!(change(&world).images.keys().collect::<Vec<_>>(), ["init"]);
}

#[test]
fn what_is_left_to_others_is_not_named() {
    let mut world = world();
    rewrites(&mut world);
    world.set_by_another(FOREIGN);
    rewrites(&mut world);
    world.set_by_another(FOREIGN);
    let Change::DaemonSet(change) = &world.plan().rollouts[0].changes[0] else { panic!("no DaemonSet") };
    assert!(change.images.is_empty() && change.required_images.is_empty());
    assert!(change.annotations[RECORD_ANNOTATION].contains(r#""state":"conflict""#));
}

#[test]
fn only_an_image_that_is_set_needs_proof() {
    let mut world = world();
    let required_images = |world: &World| world.plan().rollouts[0].changes[0].required_images().len();
    assert_eq!(required_images(&world), 1);
    rewrites(&mut world);
    let mut good = world.clone();
    good.run_pod("n0", true);
    assert_eq!(required_images(&good), 0);
    world.run_pod("n0", false);
    later(&mut world, 30);
    assert_eq!(required_images(&world), 0, "the previous image is restored although it may be gone");
}

#[test]
fn other_annotations_of_farriers_stay_named() {
    let mut world = world();
    let annotations = &mut world.snapshot.daemon_sets[0].live.as_mut().unwrap().annotations;
    annotations.insert("farrier.dev/other".to_owned(), "x".to_owned());
    let Change::DaemonSet(change) = &world.plan().rollouts[0].changes[0] else { panic!("no DaemonSet") };
    assert_eq!(change.annotations["farrier.dev/other"], "x");
}

#[test]
fn what_cannot_be_known_holds() {
    let mut deleting = world();
    deleting.snapshot.daemon_sets[0].live.as_mut().unwrap().deleting = true;
    let mut unreadable = world();
    let annotations = &mut unreadable.snapshot.daemon_sets[0].live.as_mut().unwrap().annotations;
    annotations.insert(RECORD_ANNOTATION.to_owned(), "\u{1b}{".to_owned());
    let mut unseen = world();
    let detail = "daemonsets.apps is forbidden".to_owned();
    unseen.snapshot.unseen.insert(ObservedKind::DaemonSets, detail);
    let reasons = [&mut deleting, &mut unreadable, &mut unseen].map(|world| {
        let (why, wrote) = held(world);
        assert!(!wrote);
        why.to_string()
    });
    insta::assert_snapshot!(reasons.join("\n"), @r"
    it is being deleted
    its annotation farrier.dev/record cannot be read: expected value at line 1 column 1; remove the annotation to reset it
    DaemonSets cannot be seen: daemonsets.apps is forbidden
    ");
}

/// Guarantee 1 also holds for a restore: after a kernel upgrade the previous image is for the previous kernel.
#[test]
fn an_image_for_another_kernel_is_not_restored() {
    let mut world = world();
    let one = rewrites(&mut world);
    world.run_pod("n0", true);
    reconcile(&mut world);
    for index in 0..3 {
        world.snapshot.nodes[index] = fixtures::node(&format!("n{index}"), K48);
    }
    world.publish(Verdict::Loads);
    let two = rewrites(&mut world);
    world.run_pod("n0", false);
    later(&mut world, 11);
    let in_use = crate::plan::images_in_use(&world.snapshot, &world.definitions);
    assert!(in_use.contains(&one), "its contents are looked up");
    let with_modules_for = |kernels: &[&str]| {
        let mut world = world.clone();
        let kernels = kernels.iter().map(|kernel| (*kernel).to_owned()).collect();
        let contents = crate::plan::ImageContents { kernels, ..Default::default() };
        world.observed.contents.insert(one.clone(), contents);
        world
    };
    let mut lacking = with_modules_for(&[K47]);
    for _ in 0..2 {
        let (why, wrote) = held(&mut lacking);
        assert!(!wrote && why.is_failure(), "{why}");
        insta::allow_duplicates! { insta::assert_snapshot!(why, @"the pods did not become ready with the image set at 2026-07-01T12:00:00Z: on node n0: driver: CrashLoopBackOff: no such device; the previous image was not restored, because it has no modules for 6.1.0-48-amd64 (debian 12, amd64); correct the cause, or publish another image"); }
        assert_eq!(lacking.image_of("driver"), two);
    }
    // The pods work after all.
    lacking.run_pod("n0", true);
    assert!(matches!(reconcile(&mut lacking).0, RolloutDecision::AlreadySet { .. }));
    assert_eq!(recorded(&lacking).state, RecordState::Good);
    // Another node of a kernel that neither image serves is no reason to keep the failed image.
    let mut mixed = with_modules_for(&[K48]);
    mixed.observed.contents.insert(two.clone(), mixed.observed.contents[&one].clone());
    mixed.snapshot.nodes.push(fixtures::node("n3", K47));
    for mut world in [with_modules_for(&[K47, K48]), world.clone(), mixed] {
        assert!(matches!(held(&mut world), (HoldReason::RolloutFailed { .. }, true)));
        assert_eq!(world.image_of("driver"), one);
    }
}

#[test]
fn pods_that_cannot_be_seen_condemn_nothing() {
    let mut world = world();
    rewrites(&mut world);
    world.run_pod("n0", false);
    later(&mut world, 30);
    world.snapshot.unseen.insert(ObservedKind::Pods, "forbidden".to_owned());
    is_quiet(&mut world);
}

#[test]
fn a_record_from_the_future_breaks_nothing() {
    let mut world = world();
    later(&mut world, 1_000_000);
    let one = rewrites(&mut world);
    later(&mut world, -1_000_000);
    is_quiet(&mut world);
    world.set_by_another(FOREIGN);
    assert_eq!(rewrites(&mut world), one);
    wish(&mut world, "2");
    rewrites(&mut world);
    world.run_pod("n0", false);
    later(&mut world, 11);
    assert!(matches!(held(&mut world), (HoldReason::RolloutFailed { .. }, true)));
    // Records with timestamps that no clock of this world has produced.
    for at in ["-009999-01-02T01:59:59Z", "9999-12-30T22:00:00Z"] {
        let annotations = &mut world.snapshot.daemon_sets[0].live.as_mut().unwrap().annotations;
        let record = annotations.get_mut(RECORD_ANNOTATION).unwrap();
        let mut json: Value = serde_json::from_str(record).unwrap();
        json["driver"]["at"] = at.into();
        json["driver"]["state"] = "set".into();
        *record = json.to_string();
        world.plan();
    }
}

/// Event between two reconciles.
#[derive(Clone, Debug)]
enum Event {
    Wish(u8),
    Another(u8),
    Pods(bool),
    Become(bool),
    Clock(i64),
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        (0..3u8).prop_map(Event::Wish),
        (0..3u8).prop_map(Event::Another),
        any::<bool>().prop_map(Event::Pods),
        any::<bool>().prop_map(Event::Become),
        prop_oneof![Just(1), Just(11), Just(59), Just(61), Just(-30), Just(-100_000)].prop_map(Event::Clock),
    ]
}

/// Log of farrier's writes, independent of the record.
#[derive(Default)]
struct Witness {
    /// Images of other writers, and images with which a pod was ready.
    worked: BTreeSet<String>,
    /// Last value that farrier wrote.
    written: Option<String>,
    /// Time at which a value was last set or given up.
    touched_at: Option<Timestamp>,
    /// How often each value was set over another writer's, with less than an hour in between.
    over: BTreeMap<String, u32>,
}

impl Witness {
    fn see(&mut self, world: &World, before: &str, decision: &RolloutDecision) -> Result<(), TestCaseError> {
        let after = world.image_of("driver").to_owned();
        let restored = matches!(decision, RolloutDecision::Hold(_)) && before != after;
        if restored {
            prop_assert!(self.worked.contains(&after), "{after} is restored and never worked");
            self.written = Some(after);
            return Ok(());
        }
        if matches!(decision, RolloutDecision::Hold(HoldReason::ChangedBack { .. })) {
            // farrier writes nothing from now on, whatever the time of the last write.
            self.touched_at = Some(world.now);
        }
        let RolloutDecision::Rewrite { .. } = decision else { return Ok(()) };
        prop_assert!(before != after, "a write that changes nothing");
        let hour = SignedDuration::from_hours(1);
        if self.touched_at.is_some_and(|at| world.now.duration_since(at) >= hour) {
            self.over.clear();
        }
        if self.written.as_ref().is_some_and(|written| written != before) {
            let times = self.over.entry(after.clone()).or_default();
            *times += 1;
            prop_assert!(*times <= 2, "{after} is set {times} times against another writer");
        }
        self.written = Some(after);
        self.touched_at = Some(world.now);
        Ok(())
    }
}

proptest! {
    // Each event causes two or three plans.
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever happens, farrier stops writing after a few writes, does not fight another writer, and never restores a
    /// value that failed.
    #[test]
    fn rewrites_end_never_fight_and_never_go_back_to_what_failed(
        events in prop::collection::vec(event(), 1..25),
    ) {
        let mut world = world();
        let mut witness = Witness::default();
        witness.worked.extend([OLD.to_owned(), FOREIGN.to_owned()]);
        for (number, event) in events.into_iter().enumerate() {
            let first = number == 0;
            match &event {
                Event::Wish(version) => wish(&mut world, &version.to_string()),
                Event::Another(0) => world.set_by_another(OLD),
                Event::Another(1) => world.set_by_another(FOREIGN),
                // Another writer sets the value that farrier itself would restore. This needs the record from the first
                // reconcile.
                Event::Another(_) if first => {}
                Event::Another(_) => {
                    let replaced = recorded(&world).replaced;
                    world.set_by_another(replaced.as_str().unwrap());
                }
                Event::Pods(ready) => (0..3).for_each(|n| world.run_pod(&format!("n{n}"), *ready)),
                Event::Become(ready) => world.snapshot.pods.iter_mut().for_each(|pod| pod.ready = *ready),
                Event::Clock(minutes) => later(&mut world, *minutes),
            }
            let ready = world.snapshot.pods.iter().filter(|pod| pod.ready);
            witness.worked.extend(ready.map(|pod| pod.images["driver"].clone()));
            for number in 0.. {
                let before = world.image_of("driver").to_owned();
                let (decision, wrote) = reconcile(&mut world);
                if !wrote {
                    prop_assert_eq!(&before, world.image_of("driver"));
                    break;
                }
                witness.see(&world, &before, &decision)?;
                prop_assert!(number < 2, "no end after {event:?}: {decision:?}");
            }
        }
    }
}

/// Regression: the tag beside a digest was lost, and with it what people read.
#[test]
fn a_tag_beside_the_digest_stays_and_is_the_new_images() {
    let mut world = world();
    let old = format!("registry.test/old:1@sha256:{:0>64}", 0);
    world.set_by_another(&old);
    let planned = world.plan().rollouts.swap_remove(0);
    let RolloutDecision::Rewrite { to, .. } = &planned.decision else { panic!("{planned:?}") };
    let (repository, digest) = (to.repository.to_string(), to.version.to_string());
    reconcile(&mut world);
    let tag = world
        .image_of("driver")
        .strip_prefix(&format!("{repository}:"))
        .unwrap()
        .strip_suffix(&digest)
        .unwrap();
    assert!(!tag.is_empty(), "{}", world.image_of("driver"));
    is_quiet(&mut world);
    // The same image under another tag is also right.
    world.set_by_another(&format!("{repository}:stable{digest}"));
    world.snapshot.daemon_sets[0].live.as_mut().unwrap().annotations.clear();
    is_quiet(&mut world);
}

/// Regression: two farriers of one cluster overwrote each other's image in each reconcile.
#[test]
fn another_instance_is_named_instead_of_fought() {
    let mut world = world();
    rewrites(&mut world);
    let gpu: crate::plan::Instance = "gpu".parse().unwrap();
    let mut record = recorded(&world);
    record.by = gpu.to_string();
    let annotations = RewriteRecord([("driver".to_owned(), record)].into()).annotations(&BTreeMap::default());
    world.snapshot.daemon_sets[0].live.as_mut().unwrap().annotations = annotations;
    // The same value is no conflict.
    is_quiet(&mut world);
    wish(&mut world, "2");
    let (why, wrote) = held(&mut world);
    assert_eq!((&why, wrote), (&HoldReason::OtherInstance { name: "farrier-gpu".to_owned() }, false));
    assert!(
        why.is_failure()
            && why.to_string().contains("remove the rollout from the definitions of one instance")
    );
    // A person takes it over.
    world.snapshot.daemon_sets[0].live.as_mut().unwrap().annotations.clear();
    rewrites(&mut world);
}

/// Regression: `already set`, although no pod runs the image.
#[test]
fn pods_that_keep_a_foreign_image_are_named() {
    let mut world = world();
    let image = rewrites(&mut world);
    world.snapshot.daemon_sets[0].live.as_mut().unwrap().update = crate::plan::UpdateStrategy::OnDelete;
    world.run_pod("n0", true);
    world.run_pod("n1", true);
    for pod in &mut world.snapshot.pods {
        pod.images.insert("driver".to_owned(), FOREIGN.to_owned());
    }
    world.observed.contents.remove(FOREIGN);
    let (decision, wrote) = reconcile(&mut world);
    let RolloutDecision::Settled { how } = &decision else { panic!("{decision:?}") };
    let name = &world.snapshot.pods[0].name;
    assert!(how.starts_with(&format!("pod {name} of node n0 and 1 more still runs another image")), "{how}");
    assert!(!wrote);
    for pod in &mut world.snapshot.pods {
        pod.images.insert("driver".to_owned(), image.clone());
    }
    assert!(!matches!(reconcile(&mut world).0, RolloutDecision::Settled { .. }));
}
