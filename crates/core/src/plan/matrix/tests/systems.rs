//! Tests for kernels of image-based systems, such as OpenShift's.
use super::*;

const FIRST: &str = "416.94.202410151600-0";
const NEXT: &str = "416.94.202412170927-0";

/// Returns a world whose family takes headers and toolchain from images that the nodes' system names.
fn coreos() -> World {
    let mut world = World::new(&[K47]);
    let spec = &mut world.definitions.families[0].spec;
    spec.headers =
        serde_json::from_value(serde_json::json!({"oci": {"image": "r.test/toolkit@{{digest}}"}})).unwrap();
    spec.toolchain = Toolchain::Image("r.test/toolkit@{{digest}}".parse().unwrap());
    spec.image_stream = Some("openshift/driver-toolkit".parse().unwrap());
    world.image("mft").spec.tags.push("{{version}}-{{ostree_version}}".to_owned());
    world
}

/// Gives the nodes these systems and the ImageStream these tags, and resolves the images that they name.
fn systems(world: &mut World, versions: &[&str], tags: &[(&str, u8)]) {
    let like = world.snapshot.nodes[0].clone();
    let node = |(number, version): (usize, &&str)| {
        let mut node = like.clone();
        node.name = format!("n{number}");
        node.labels.insert(OSTREE_VERSION_LABEL.to_owned(), (*version).to_owned());
        node
    };
    world.snapshot.nodes = versions.iter().enumerate().map(node).collect();
    let digest = |number: &u8| -> ImageDigest { format!("sha256:{number:064}").parse().unwrap() };
    let tags = tags.iter().map(|(tag, number)| ((*tag).to_owned(), digest(number))).collect();
    let (image, family) = (&world.definitions.images[&name("mft")], &world.definitions.families[0]);
    world.snapshot.image_streams = [(family.spec.image_stream.clone().unwrap(), Ok(tags))].into();
    world.resolved.systems = node_systems(&world.snapshot, &world.definitions.families);
    let Toolchain::Image(pattern) = &family.spec.toolchain else { panic!("packages") };
    for (target, system) in &world.resolved.systems {
        let named = family.spec.image_for(pattern, target, system);
        let digest = named.clone().ok().map(|image| image.version.to_string());
        world.resolved.headers.insert(target.clone(), Ok(digest));
        let key = toolchain_key(image, family, target, system);
        world.resolved.toolchains.insert(key, named.map(|image| image.to_string()));
    }
}

#[test]
fn the_next_system_with_the_same_kernel_builds_nothing_anew() {
    let missing_tags = |world: &World| match &world.plan().cells[..] {
        [PlannedCell { outcome: Outcome::UpToDate { missing_tags, .. }, .. }] => {
            missing_tags.iter().map(|reference| reference.version.to_string()).collect::<Vec<_>>()
        }
        other => panic!("{other:?}"),
    };
    let mut world = coreos();
    systems(&mut world, &[FIRST], &[(FIRST, 1)]);
    let first = world.cells()[0].clone();
    assert_eq!(first.toolchain, format!("r.test/toolkit@sha256:{:064}", 1));
    world.publish(Verdict::Loads);
    assert_eq!(missing_tags(&world), [""; 0]);

    // In the middle of the upgrade.
    systems(&mut world, &[FIRST, NEXT], &[(FIRST, 1), (NEXT, 2)]);
    let next = world.cells()[0].clone();
    assert_eq!(next.toolchain, format!("r.test/toolkit@sha256:{:064}", 2));
    assert_ne!((next.input_hash, &next.base_name), (first.input_hash, &first.base_name));
    assert_eq!(missing_tags(&world), [format!(":4.33.0-{NEXT}")]);
    // The ImageStream has lost the tag that the image was built with.
    systems(&mut world, &[FIRST], &[(NEXT, 2)]);
    assert_eq!(missing_tags(&world), [""; 0]);

    world.observed.published.clear();
    insta::assert_snapshot!(world.skipped()[0].1, @"its kernel family has no image digest for 6.1.0-47-amd64 in `digests`, and ImageStream openshift/driver-toolkit has no tag 416.94.202410151600-0");
    // Imported headers and a family's own toolchain need no ImageStream.
    let target = first.target.clone();
    world.definitions.families[0].spec.toolchain = Toolchain::Image("registry.test/gcc:1".parse().unwrap());
    world.resolved.toolchains = [((name("debian-12"), vec![], None), Ok("toolchain-1".to_owned()))].into();
    assert!(matches!(world.skipped()[0].1, SkipReason::UnknownSystem { .. }));
    world.resolved.headers.insert(target, Ok(Some("1".to_owned())));
    assert_eq!(world.plan().builds().count(), 1);
}

#[test]
fn a_label_that_is_missing_is_told() {
    let mut world = coreos();
    world.image("mft").spec.tags.pop();
    insta::assert_snapshot!(world.skipped()[0].1, @"its kernel family has no image digest for 6.1.0-47-amd64 in `digests`, and no node that runs 6.1.0-47-amd64 has the label feature.node.kubernetes.io/system-os_release.OSTREE_VERSION");
    let spec = &mut world.definitions.families[0].spec;
    spec.toolchain = Toolchain::Image("r.test/gcc:{{rhel_version}}".parse().unwrap());
    insta::assert_snapshot!(world.skipped()[0].1, @"no node that runs 6.1.0-47-amd64 has the label feature.node.kubernetes.io/system-os_release.RHEL_VERSION");
}
