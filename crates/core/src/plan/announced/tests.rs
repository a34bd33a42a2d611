use super::{
    super::{
        SkipReason,
        fixtures::{K47, K48, World, image, name, resolved},
        table,
    },
    *,
};

fn announce(world: &mut World, node: usize, text: &str) {
    world.snapshot.nodes[node].annotations.insert(NEXT_KERNEL_ANNOTATION.to_owned(), text.to_owned());
}

fn with_second_image(mut world: World) -> World {
    let mut second = image("ofed");
    second.spec.nodes.match_labels = [("rdma".parse().unwrap(), "yes".parse().unwrap())].into();
    world.definitions.images.insert(name("ofed"), second);
    world.resolved.images.insert(name("ofed"), Ok(resolved()));
    world
}

fn cells(world: &World) -> Vec<String> {
    let about = |cell: &std::sync::Arc<super::super::Cell>| {
        let by: Vec<String> = cell.announced_by.iter().map(ToString::to_string).collect();
        format!("{}, nodes {:?}, announced by {by:?}", cell.subject(), cell.nodes)
    };
    world.cells().iter().map(about).collect()
}

#[test]
fn a_node_announces_for_the_images_that_it_calls_for() {
    let mut world = with_second_image(World::new(&[K47, K47]));
    announce(&mut world, 1, K48);
    assert_eq!(
        cells(&world),
        [
            r#"mft for 6.1.0-47-amd64, nodes ["n0", "n1"], announced by []"#,
            r#"mft for 6.1.0-48-amd64, nodes [], announced by ["node n1"]"#,
        ]
    );
    assert!(table(&world.plan()).contains("announced by node n1"));
}

/// A node without rights in the cluster announces by a label, which NFD sets.
#[test]
fn a_label_announces_like_the_annotation() {
    let mut world = World::new(&[K47]);
    let node = &mut world.snapshot.nodes[0];
    node.labels.insert(NEXT_KERNEL_LABEL.to_owned(), "6.1.176-acme.plus".to_owned());
    assert_eq!(node.announced_release().as_deref(), Some("6.1.176-acme+"));
    node.labels.insert(NEXT_KERNEL_LABEL.to_owned(), "6.12.90.plus.deb12-amd64".to_owned());
    assert_eq!(
        cells(&world)[1..],
        [r#"mft for 6.12.90+deb12-amd64, nodes [], announced by ["node n0"]"#.to_owned()]
    );
    announce(&mut world, 0, K48);
    assert_eq!(
        cells(&world)[1..],
        [r#"mft for 6.1.0-48-amd64, nodes [], announced by ["node n0"]"#.to_owned()],
        "the annotation counts first"
    );
}

#[test]
fn the_configuration_announces_for_every_image() {
    let mut world = with_second_image(World::new(&[K47]));
    world.announce(K48);
    announce(&mut world, 0, K48);
    assert_eq!(
        cells(&world),
        [
            r#"mft for 6.1.0-47-amd64, nodes ["n0"], announced by []"#,
            r#"mft for 6.1.0-48-amd64, nodes [], announced by ["configuration next", "node n0"]"#,
            r#"ofed for 6.1.0-48-amd64, nodes [], announced by ["configuration next", "node n0"]"#,
        ]
    );
}

#[test]
fn a_tracked_kernel_is_for_the_images_of_its_platform() {
    let mut world = with_second_image(World::new(&[K47]));
    let tracked = |os: &str| TrackedKernel {
        target: KernelTarget {
            os: os.parse().unwrap(),
            os_version: "12".parse().unwrap(),
            release: K48.parse().unwrap(),
            arch: Architecture::Amd64,
        },
        family: name("debian-12"),
        flavor: "amd64".to_owned(),
    };
    world.tracked = [tracked("debian"), tracked("devuan")].into();
    assert_eq!(
        cells(&world),
        [
            r#"mft for 6.1.0-47-amd64, nodes ["n0"], announced by []"#,
            r#"mft for 6.1.0-48-amd64, nodes [], announced by ["tracked family debian-12"]"#,
        ]
    );
}

#[test]
fn hostile_announcements_are_told_and_not_used() {
    let mut world = World::new(&[K47; 6]);
    for (node, text) in
        ["", "../../etc", "6.1.0$(reboot)", "6.1.0\n\u{1b}[2J", &"6.1".repeat(50)].iter().enumerate()
    {
        announce(&mut world, node, text);
    }
    announce(&mut world, 5, K48);
    world.snapshot.nodes[5].labels.remove(OS_ID_LABEL);
    assert_eq!(world.cells().len(), 1);
    let unused = world.announcements().unused;
    assert_eq!(unused.len(), 6);
    let text = table(&world.plan());
    assert!(text.contains("UNUSED ANNOUNCEMENTS") && !text.contains('\u{1b}'), "{text}");
    insta::assert_snapshot!(unused[5].why, @"its operating system or architecture is not known from its labels");
}

#[test]
fn a_node_whose_kernel_label_lags_behind_still_announces() {
    let mut world = World::new(&[K47]);
    announce(&mut world, 0, K48);
    world.snapshot.nodes[0].labels.insert(super::super::KERNEL_LABEL.to_owned(), "6.1.0-1-amd64".to_owned());
    assert_eq!(cells(&world), [r#"mft for 6.1.0-48-amd64, nodes [], announced by ["node n0"]"#]);
}

#[test]
fn nodes_cannot_announce_without_end() {
    let mut world = World::new(&[K47; 41]);
    for node in 0..40 {
        announce(&mut world, node, &format!("6.1.0-{node}00-amd64"));
    }
    announce(&mut world, 40, "6.1.0-3900-amd64");
    let cells = world.cells();
    assert_eq!(cells.len(), 1 + MAX_ANNOUNCED_BY_NODES);
    assert_eq!(world.announcements().unused.len(), 40 - MAX_ANNOUNCED_BY_NODES);
    assert!(cells.iter().any(|cell| cell.target.release.as_str() == "6.1.0-3900-amd64"));
}

/// The two releases share a label, and therefore a tag.
#[test]
fn an_announced_kernel_gives_way_to_one_that_runs() {
    let mut world = World::new(&["6.1.0-acme+"]);
    world.announce("6.1.0-acme~");
    let (cells, skipped) = (world.cells(), world.skipped());
    assert_eq!(cells.len(), 1);
    assert_eq!(cells[0].nodes, ["n0"]);
    assert!(matches!(skipped[0].1, SkipReason::TagCollision { .. }));
    assert_eq!(skipped[0].0.target.release.as_str(), "6.1.0-acme~");
}

#[test]
fn the_newest_release_of_a_flavor_is_found_as_versions_go() {
    let world = World::new(&[]);
    let platform = Platform {
        os: "debian".parse().unwrap(),
        os_version: "12".parse().unwrap(),
        arch: Architecture::Amd64,
    };
    let releases = [
        "6.1.0-9-amd64",
        "6.1.0-47-amd64",
        "6.1.0-49-cloud-amd64",
        "6.1.0-50-common",
        "6.1.0-48-rt-amd64",
        "6.12.9+bpo-amd64",
    ];
    let newest = |flavor, releases: &[&str]| {
        let releases = releases.iter().map(|release| release.parse().unwrap());
        let compare = crate::kernel::debian_version::compare;
        newest_tracked(&world.definitions, &name("debian-12"), &platform, flavor, releases, compare)
            .map(|found| found.target.release.to_string())
    };
    assert_eq!(newest("amd64", &releases[..5]).as_deref(), Some("6.1.0-47-amd64"));
    assert_eq!(newest("amd64", &releases).as_deref(), Some("6.12.9+bpo-amd64"));
    assert_eq!(newest("cloud-amd64", &releases).as_deref(), Some("6.1.0-49-cloud-amd64"));
    assert_eq!(newest("arm64", &releases), None);
}

/// Custom kernels have no architecture in their release. If each version counted as a flavor, all versions would be
/// announced.
#[test]
fn versions_are_no_flavors() {
    for (release, flavor) in [
        ("5.14.0-503.11.1.el9_5.x86_64", "x86_64"),
        ("5.14.0-570.el9.x86_64+rt", "x86_64+rt"),
        ("6.4.0-150600.23.60-default", "default"),
        ("6.6.57.1-2.azl3", "azl3"),
        ("6.12.90", ""),
        ("6.12.0-rc3", ""),
        ("6.12.0-rc3-acme", "acme"),
        ("5.10.0-acme.3", "acme"),
        ("5.10.0-acme-4", "acme"),
    ] {
        assert_eq!(rpm_flavor(&release.parse().unwrap()), flavor, "{release}");
    }
    let mut world = World::new(&["5.10.0-acme.3"]);
    let platform = Platform::of(&world.snapshot.nodes[0]).unwrap();
    let releases = ["5.10.0-acme.3", "5.10.0-acme.12", "6.12.90"].map(|release| release.parse().unwrap());
    let compare = crate::kernel::rpm_version::compare;
    let found = newest_tracked(&world.definitions, &name("debian-12"), &platform, "acme", releases, compare);
    assert_eq!(found.as_ref().unwrap().target.release.as_str(), "5.10.0-acme.12");
    world.tracked.extend(found);
    let next = world.announcements().next_kernel_of(&world.snapshot.nodes[0]);
    assert_eq!(next.unwrap().release.as_str(), "5.10.0-acme.12");
}
