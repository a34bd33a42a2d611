use jiff::civil::date;
use proptest::prelude::*;

use super::*;
use crate::{
    image::FieldHasher,
    kernel::KernelRelease,
    oci::{Descriptor, ImageFacts, ImageIndex, ImageManifest, annotations, media_type},
    plan::{NEXT_KERNEL_ANNOTATION, NEXT_KERNEL_LABEL, fixtures},
};

const TODAY: Date = date(2026, 11, 21);
const REPOSITORY: &str = "registry.test/drivers/mft";

/// Returns an image with the shared layer `base` and its own layer of 100 bytes.
fn held(tag: &str, facts: ImageFacts, base: Option<&Digest>) -> RegistryImage {
    let facts = ImageFacts { input_hash: Some(FieldHasher::new(tag).finish()), ..facts };
    let mut annotations = facts.to_annotations();
    annotations.extend(base.map(|base| (annotations::BASE_DIGEST.to_owned(), base.to_string())));
    let layer =
        |name: &str, size| Descriptor::new(media_type::OCI_LAYER_GZIP, Digest::of(name.as_bytes()), size);
    let bytes = ImageManifest {
        schema_version: 2,
        media_type: Some(media_type::OCI_MANIFEST.to_owned()),
        artifact_type: None,
        config: Descriptor::new(media_type::OCI_CONFIG, Digest::of(format!("config {tag}").as_bytes()), 0),
        layers: vec![layer("base", 1000), layer(tag, 100)],
        subject: None,
        annotations,
    }
    .to_bytes()
    .unwrap();
    let mut image = RegistryImage::new(
        REPOSITORY.parse().unwrap(),
        Digest::of(&bytes),
        [tag.parse().unwrap()].into(),
        &bytes,
    );
    // Manifests normally count; exclude this one to keep the numbers round.
    image.blobs.insert(image.digest.clone(), 0);
    image
}

fn release(text: &str) -> KernelRelease {
    text.parse().unwrap()
}

fn image(kernel: &str) -> RegistryImage {
    let facts = ImageFacts { kernel_release: Some(release(kernel)), ..ImageFacts::default() };
    held(&format!("1.0-{kernel}"), facts, None)
}

fn union_of(tag: &str, members: &[&RegistryImage]) -> RegistryImage {
    let member = |image: &&RegistryImage| (release(image.kernels.first().unwrap()), image.digest.clone());
    let members = members.iter().map(member).collect();
    held(tag, ImageFacts { members, ..ImageFacts::default() }, None)
}

#[derive(Debug, Default)]
struct World {
    images: Vec<RegistryImage>,
    mentioned: BTreeSet<String>,
    live: LiveKernels,
    record: KernelRecord,
}

impl World {
    fn runs(mut self, kernel: &str) -> Self {
        self.live.0.insert(kernel.to_owned(), KeepReason::Runs { kernel: kernel.to_owned() });
        self
    }

    fn seen(mut self, kernel: &str, day: Date) -> Self {
        self.record = self.record.noticed(&[kernel.to_owned()], day);
        self
    }

    fn plan(&self) -> GcPlan {
        gc_plan(&GcInputs {
            images: &self.images,
            mentioned: &self.mentioned,
            live: &self.live,
            record: &self.record,
            keep_days: 30,
            today: TODAY,
        })
    }
}

fn going(plan: &GcPlan) -> Vec<&str> {
    plan.going.iter().flat_map(|image| image.tags.iter().map(Tag::as_str)).collect()
}

#[test]
fn an_image_goes_when_its_kernel_was_gone_for_so_many_days() {
    let images = ["6.1.1", "6.1.2", "6.1.3", "6.1.4"].map(image).to_vec();
    let world = World { images, ..World::default() }
        .runs("6.1.1")
        .seen("6.1.1", date(2020, 1, 1))
        .seen("6.1.2", date(2026, 10, 22))
        .seen("6.1.3", date(2026, 10, 23));
    let plan = world.plan();
    assert_eq!(going(&plan), ["1.0-6.1.2"]);
    assert_eq!(plan.going[0].gone, [("6.1.2".to_owned(), date(2026, 10, 22))].into());
    // The base layer is still used by the other images.
    assert_eq!((plan.going[0].bytes, plan.bytes), (100, 100));
    insta::assert_snapshot!(serde_json::to_string_pretty(&plan.kept).unwrap(), @r#"
    [
      {
        "image": "registry.test/drivers/mft:1.0-6.1.1",
        "why": "runs",
        "kernel": "6.1.1"
      },
      {
        "image": "registry.test/drivers/mft:1.0-6.1.3",
        "why": "recent",
        "kernel": "6.1.3",
        "seen": "2026-10-23"
      },
      {
        "image": "registry.test/drivers/mft:1.0-6.1.4",
        "why": "recent",
        "kernel": "6.1.4",
        "seen": "2026-11-21"
      }
    ]
    "#);
}

#[test]
fn shared_layers_are_counted_once() {
    let images = ["6.1.1", "6.1.2"].map(image).to_vec();
    let old = date(2020, 1, 1);
    let plan = World { images, ..World::default() }.seen("6.1.1", old).seen("6.1.2", old).plan();
    assert_eq!(plan.going.iter().map(|image| image.bytes).collect::<Vec<_>>(), [1100, 1100]);
    assert_eq!(plan.bytes, 1200);
}

#[test]
fn what_a_named_union_is_made_from_stays_and_an_unnamed_one_goes_first() {
    let (a, b) = (image("6.1.1"), image("6.1.2"));
    let union = union_of("1.0-union-1", &[&a, &b]);
    let old = date(2020, 1, 1);
    let mut world =
        World { images: vec![a, b, union.clone()], ..World::default() }.runs("6.1.2").seen("6.1.1", old);
    assert_eq!(going(&world.plan()), ["1.0-union-1", "1.0-6.1.1"]);
    world.mentioned.insert(format!("{REPOSITORY}@{}", union.digest));
    let plan = world.plan();
    assert_eq!(going(&plan), [""; 0]);
    assert_eq!(plan.kept[0].why, KeepReason::PartOf { image: format!("{REPOSITORY}:1.0-union-1") });
}

/// The index has fewer members than one of its unions.
#[test]
fn an_index_goes_before_the_unions_that_it_leads_to() {
    let singles = ["6.1.1", "6.1.2", "6.1.3"].map(image);
    let [a, b, c] = &singles;
    let unions = [union_of("1.0-union-amd64", &[a]), union_of("1.0-union-arm64", &[a, b, c])];
    let mut index = ImageIndex::empty();
    index.manifests =
        unions.iter().map(|one| Descriptor::new(media_type::OCI_MANIFEST, one.digest.clone(), 1)).collect();
    let bytes = index.to_bytes().unwrap();
    let tags = ["1.0-union-both".parse().unwrap()].into();
    let mut index = RegistryImage::new(REPOSITORY.parse().unwrap(), Digest::of(&bytes), tags, &bytes);
    index.add_kernels_of(&unions);
    let images = singles.into_iter().chain(unions).chain([index.clone()]).collect();
    let old = date(2020, 1, 1);
    let mut world =
        World { images, ..World::default() }.seen("6.1.1", old).seen("6.1.2", old).seen("6.1.3", old);
    let plan = world.plan();
    assert_eq!(going(&plan)[..3], ["1.0-union-both", "1.0-union-arm64", "1.0-union-amd64"]);
    assert_eq!(going(&plan).len(), 6);
    world.mentioned.insert(format!("{REPOSITORY}@{}", index.digest));
    assert_eq!(going(&world.plan()), [""; 0], "everything that the index is made from stays");
}

#[test]
fn unions_keep_the_kernels_of_their_grace_time() {
    let mut fleet = fixtures::World::live(&["6.1.2"]);
    let left = r#"{"6.1.1":"2026-01-02T00:00:00Z"}"#;
    let live = fleet.snapshot.daemon_sets[0].live.as_mut().unwrap();
    live.annotations.insert("farrier.dev/union-left".to_owned(), left.to_owned());
    let (a, b) = (image("6.1.1"), image("6.1.2"));
    let union = union_of("1.0-union-1", &[&a, &b]);
    let world = World {
        images: vec![a, b, union],
        live: LiveKernels::of(&fleet.snapshot, &Announcements::default()),
        ..World::default()
    };
    let plan = world.seen("6.1.1", date(2026, 1, 2)).plan();
    assert_eq!(going(&plan), [""; 0]);
    assert_eq!(plan.kept[0].why, KeepReason::Left { kernel: "6.1.1".to_owned() });
}

#[test]
fn an_unused_announcement_keeps_its_image_as_annotation_and_as_label() {
    let mut fleet = fixtures::World::live(&["6.1.3", "6.1.3"]);
    let [first, second] = &mut fleet.snapshot.nodes[..] else { panic!("two nodes") };
    first.annotations.insert(NEXT_KERNEL_ANNOTATION.to_owned(), "6.1.1".to_owned());
    second.labels.insert(NEXT_KERNEL_LABEL.to_owned(), "6.1.2".to_owned());
    let world = World {
        images: ["6.1.1", "6.1.2"].map(image).to_vec(),
        live: LiveKernels::of(&fleet.snapshot, &Announcements::default()),
        ..World::default()
    };
    let old = date(2020, 1, 1);
    assert_eq!(going(&world.seen("6.1.1", old).seen("6.1.2", old).plan()), [""; 0]);
}

#[test]
fn bases_of_what_stays_stay_and_what_is_not_ours_is_left_alone() {
    let base = image("6.1.1");
    let facts = ImageFacts { kernel_release: Some(release("6.1.2")), ..ImageFacts::default() };
    let above = held("2.0-6.1.2", facts, Some(&base.digest));
    let foreign = RegistryImage::new(
        REPOSITORY.parse().unwrap(),
        Digest::of(b"{}"),
        ["x".parse().unwrap()].into(),
        b"{}",
    );
    let world = World { images: vec![base, above, foreign], ..World::default() };
    let plan = world.runs("6.1.2").seen("6.1.1", date(2020, 1, 1)).plan();
    assert_eq!(going(&plan), [""; 0]);
    let why = |name: &str| plan.kept.iter().find(|kept| kept.image.ends_with(name)).unwrap().why.clone();
    assert_eq!(why(":1.0-6.1.1"), KeepReason::BaseOf { image: format!("{REPOSITORY}:2.0-6.1.2") });
    assert_eq!(why(":x"), KeepReason::NotOurs);
}

#[test]
fn manifests_that_lie_about_sizes_do_not_overflow() {
    let mut images = ["6.1.1", "6.1.2"].map(image).to_vec();
    for image in &mut images {
        image.blobs.values_mut().for_each(|size| *size = u64::MAX);
    }
    let old = date(2020, 1, 1);
    let plan = World { images, ..World::default() }.seen("6.1.1", old).seen("6.1.2", old).plan();
    assert_eq!(plan.bytes, u64::MAX);
}

prop_compose! {
    /// Four images for one kernel each and up to three unions of them. Up to three words that name an image are
    /// mentioned.
    fn worlds()(
        unions in proptest::collection::vec(proptest::collection::btree_set(0_usize..4, 1..4), 0..4),
        named in proptest::collection::btree_set((0_usize..8, 0_usize..4), 0..4),
        live in proptest::collection::btree_set(0_usize..4, 0..3),
        ages in proptest::collection::vec(0_i64..60, 4),
    ) -> World {
        let mut images: Vec<RegistryImage> = (0..4).map(|n| image(&format!("6.1.{n}"))).collect();
        for (number, members) in unions.iter().enumerate() {
            let members: Vec<&RegistryImage> = members.iter().map(|place| &images[*place]).collect();
            let union = union_of(&format!("1.0-union-{number}"), &members);
            images.push(union);
        }
        let words = |place: usize, form| Candidates::of_image(&images[place % images.len()]).nth(form);
        let mentioned = named.into_iter().filter_map(|(place, form)| words(place, form)).collect();
        let mut world = World { mentioned, ..World::default() };
        world.images = images;
        for kernel in live {
            world = world.runs(&format!("6.1.{kernel}"));
        }
        for (kernel, age) in ages.into_iter().enumerate() {
            world = world.seen(&format!("6.1.{kernel}"), TODAY.saturating_sub(age.days()));
        }
        world
    }
}

proptest! {
    #[test]
    fn nothing_goes_that_something_speaks_for(world in worlds()) {
        let plan = world.plan();
        let find = |going: &PrunedImage| world.images.iter().find(|image| image.digest == going.digest).unwrap();
        for going in &plan.going {
            let image = find(going);
            prop_assert!(Candidates::of_image(image).all(|word| !world.mentioned.contains(&word)));
            prop_assert!(!image.kernels.iter().all(|kernel| world.live.0.contains_key(kernel)));
            let recent = |kernel: &String| world.record.seen(kernel).unwrap() > TODAY.saturating_sub(30.days());
            prop_assert!(!image.kernels.iter().all(recent));
            for kept in world.images.iter().filter(|image| plan.going.iter().all(|g| g.digest != image.digest)) {
                prop_assert!(!kept.members.contains(&image.digest));
                prop_assert!(!kept.blobs.contains_key(&image.digest));
            }
        }
        prop_assert_eq!(plan.going.len() + plan.kept.len(), world.images.len());
        // An image is deleted before its parts.
        for (place, going) in plan.going.iter().enumerate() {
            let later = &plan.going[place..];
            prop_assert!(!later.iter().any(|later| find(later).members.contains(&going.digest)));
        }
    }
}
