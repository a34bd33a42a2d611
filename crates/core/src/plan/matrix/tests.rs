use std::collections::BTreeMap;

use super::super::{
    Cell, CellInputs, FetchedInputs, HeaderState, Outcome, PlannedCell, SignedWith, SkipReason, cell_for,
    changed_inputs,
    fixtures::{K47, K48, World, image, name, resolved},
    node_systems, toolchain_key,
};
use crate::{
    definition::{NonEmpty, checked::ImageDigest},
    image::{Digest, Output, Reuse, RuntimeBase},
    kernel::{Architecture, Compiler, CompilerKind, KernelTarget, OSTREE_VERSION_LABEL, Toolchain},
    kmod::Verdict,
    site::Signed,
    template::Templates,
};

mod systems;

fn target(release: &str) -> KernelTarget {
    KernelTarget {
        os: "debian".parse().unwrap(),
        os_version: "12".parse().unwrap(),
        release: release.parse().unwrap(),
        arch: "amd64".parse().unwrap(),
    }
}

/// `ofed-driver-<version>:<arch>-<os><version>-kver<kernel>` is the reference that the Network Operator's first
/// generation pulls.
#[test]
fn a_version_can_be_a_part_of_the_repositorys_name() {
    const NAME: &str = "ofed-driver-5.0-2.1.8.0";
    let mut world = World::new(&[K47]);
    world.add(NAME, &[]);
    world.image(NAME).spec.tags = vec!["{{arch}}-{{os_id}}{{os_version}}-kver{{kernel_label}}".to_owned()];
    let cells = world.cells();
    let cell = cells.iter().find(|cell| cell.image == name(NAME)).unwrap();
    assert_eq!(
        cell.reference.to_string(),
        "registry.test/drivers/ofed-driver-5.0-2.1.8.0:amd64-debian12-kver6.1.0-47-amd64"
    );
    world.publish(Verdict::Loads);
    assert!(world.plan().cells.iter().all(|planned| matches!(planned.outcome, Outcome::UpToDate { .. })));
}

#[test]
fn one_cell_for_each_kernel() {
    let world = World::new(&[K47, K48, K47]);
    let cells = world.cells();
    let references: Vec<_> = cells.iter().map(|c| (c.reference.to_string(), c.nodes.join(" "))).collect();
    assert_eq!(
        references,
        [
            ("registry.test/drivers/mft:4.33.0-6.1.0-47-amd64-debian12-amd64".to_owned(), "n0 n2".to_owned()),
            ("registry.test/drivers/mft:4.33.0-6.1.0-48-amd64-debian12-amd64".to_owned(), "n1".to_owned()),
        ]
    );
    assert!(world.skipped().is_empty() && world.plan().skipped_nodes.is_empty());
    let cell = &cells[0];
    assert!(cell.dockerfile.contains(&format!("FROM {} AS modules", cell.base_name)), "{}", cell.dockerfile);
    assert!(cell.base_name.starts_with("localhost/farrier/base:"), "{}", cell.base_name);
}

#[test]
fn images_that_no_node_calls_for_have_no_cells() {
    let mut world = World::new(&[K47]);
    world.image("mft").spec.nodes.match_labels.insert("pci".parse().unwrap(), "no".parse().unwrap());
    assert!(world.cells().is_empty());
    world.announce(K48);
    let cells = world.cells();
    assert_eq!((cells.len(), cells[0].nodes.len()), (1, 0));
}

/// One node of each kind: without a driver, with the host's driver, and with its own driver on a kernel that no other
/// node runs.
#[test]
fn nodes_with_their_own_driver_are_left_alone() {
    let mut world = World::new(&[K47, K47, K48]);
    let key = "nvidia.com/gpu.deploy.driver";
    let values = ["pre-installed", "false"].map(|value| value.parse().unwrap()).to_vec();
    world.image("mft").spec.nodes.unless_labels =
        [(key.parse().unwrap(), NonEmpty::new(values).unwrap())].into();
    for (node, value) in [(0, "true"), (1, "pre-installed"), (2, "false")] {
        world.snapshot.nodes[node].labels.insert(key.to_owned(), value.to_owned());
    }
    let cells = world.cells();
    let cells: Vec<_> = cells.iter().map(|cell| (&cell.target, &cell.nodes[..])).collect();
    assert_eq!(cells, [(&target(K47), &["n0".to_owned()][..])]);
    let plan = world.plan();
    assert!(!plan.has_failures());
    insta::assert_snapshot!(super::super::table(&plan));
    insta::assert_snapshot!(super::super::text(&super::super::status_table(&super::super::status(&plan))));
    assert!(super::super::SnapshotScope::of(&world.definitions).labels.contains(key));
    // No one has to wait for an image that the node does not need.
    let skipped_nodes = world.snapshot.nodes[2].clone();
    assert!(!skipped_nodes.is_selected_by(world.image("mft")));
}

#[test]
fn nodes_of_unknown_kernel_are_left_alone() {
    let mut world = World::new(&[K47, "6.1.0$(reboot)", K48, K48]);
    world.snapshot.nodes[0].labels.remove(super::super::KERNEL_LABEL);
    world.snapshot.nodes[3].name = "n2".to_owned();
    assert!(world.cells().is_empty());
    let left: Vec<_> =
        world.plan().skipped_nodes.iter().map(|left| format!("{}: {}", left.node, left.why)).collect();
    insta::assert_snapshot!(left.join("\n"), @r#"
    n0: label feature.node.kubernetes.io/kernel-version.full is missing
    n1: kernel release "6.1.0$(reboot)" holds the character '$'; only letters, digits and `._+~-` are allowed
    n2: two nodes have this name
    n2: two nodes have this name
    "#);
}

#[test]
fn two_kernels_with_one_tag_block_each_other() {
    let world = World::new(&["6.1.0-acme+", "6.1.0-acme~", K47]);
    assert_eq!(world.cells().len(), 1);
    let reasons: Vec<_> = world.skipped().iter().map(|(_, why)| why.to_string()).collect();
    insta::assert_snapshot!(reasons.join("\n"), @r"
    tag collision: registry.test/drivers/mft:4.33.0-6.1.0-acme-debian12-amd64 is also the tag for 6.1.0-acme~ (debian 12, amd64); add a variable that distinguishes the kernels to `tags`
    tag collision: registry.test/drivers/mft:4.33.0-6.1.0-acme-debian12-amd64 is also the tag for 6.1.0-acme+ (debian 12, amd64); add a variable that distinguishes the kernels to `tags`
    ");
}

#[test]
fn what_cannot_be_built_has_a_reason() {
    let why = |change: fn(&mut World)| {
        let mut world = World::new(&[K47]);
        change(&mut world);
        let skipped = world.skipped();
        assert_eq!((world.cells().len(), skipped.len()), (0, 1));
        skipped[0].1.to_string()
    };
    let reasons = [
        why(|w| w.image("mft").spec.kernels = Some(">=6.2".parse().unwrap())),
        why(|w| w.definitions.families.clear()),
        why(|w| w.resolved.images = [(name("mft"), Err("no package foo in bookworm".to_owned()))].into()),
        why(|w| w.resolved.images.clear()),
        why(|w| {
            w.resolved.toolchains =
                [((name("debian-12"), vec![], None), Err("no such suite".to_owned()))].into();
        }),
        why(|w| w.resolved.toolchains.clear()),
        why(|w| {
            let target = w.cells()[0].target.clone();
            let detail = "the registry does not answer".to_owned();
            w.resolved.headers = [(target, Err(SkipReason::Headers { detail }))].into();
        }),
        why(|w| w.definitions.templates.clear()),
        why(|w| w.image("mft").spec.tags.clear()),
        why(|w| w.image("mft").spec.runtime.base = Some(RuntimeBase::Image("a/b:1".parse().unwrap()))),
    ];
    insta::assert_snapshot!(reasons.join("\n"), @r#"
    the image is for kernels >=6.2
    no kernel family matches
    no package foo in bookworm
    its sources were not looked up
    toolchain of family debian-12: no such suite
    toolchain of family debian-12: it was not looked up
    headers: the registry does not answer
    there is no template "mft"
    the image has no tags
    the runtime base was not looked up
    "#);
    let mut world = World::new(&[K47]);
    world.definitions.templates.insert("mft".to_owned(), "FROM {{toolchian}}".to_owned());
    assert!(matches!(world.skipped()[0].1, SkipReason::Template { .. }));
    let adding = "FROM {{toolchain}} AS modules\nADD https://x.example/y.tgz /src/\n";
    world.definitions.templates.insert("mft".to_owned(), adding.to_owned());
    insta::assert_snapshot!(world.skipped()[0].1, @"template mft gives a Dockerfile in whose line 2 ADD takes https://x.example/y.tgz, which is not a plain path in the build context: the engine would download it; add it to the image's `sources`, and COPY it");
    world.image("mft").spec.tags = vec!["{{verzion}}".to_owned()];
    world.definitions.templates.insert("mft".to_owned(), "FROM {{toolchain}}".to_owned());
    assert!(matches!(world.skipped()[0].1, SkipReason::Tag { .. }));
    world.image("mft").spec.tags = vec!["x".to_owned()];
    world.location.prefix = "registry.test/UPPER CASE".to_owned();
    assert!(matches!(world.skipped()[0].1, SkipReason::Repository { .. }));
}

#[test]
fn the_input_hash_moves_with_each_input_and_with_nothing_else() {
    fn cell(change: fn(&mut World)) -> Cell {
        let mut world = World::new(&[K47]);
        change(&mut world);
        Cell::clone(&world.cells()[0])
    }
    fn found(world: &mut World) -> &mut super::super::ResolvedImage {
        world.resolved.images.get_mut(&name("mft")).unwrap().as_mut().unwrap()
    }
    fn entrypoint(world: &mut World) {
        starts_with(world, "driver-entrypoint");
        found(world).entrypoints = [Architecture::Amd64].into();
    }
    let same = cell(|_| ());
    for change in [
        (|w| w.image("mft").spec.rollout.clear()) as fn(&mut World),
        |w| w.image("mft").spec.tags = vec!["other".to_owned()],
        |w| w.image("mft").spec.kernels = Some(">=6".parse().unwrap()),
        |w| w.location.prefix = "elsewhere.test".to_owned(),
        |w| w.snapshot.nodes[0].name = "other".to_owned(),
    ] {
        assert_eq!((cell(change).input_hash, cell(change).changed_since(&same)), (same.input_hash, None));
    }
    let different: Vec<Cell> = [
        (|w| found(w).version = "4.34.0".to_owned()) as fn(&mut World),
        |w| found(w).sources = [("src".to_owned(), "sha256:2".to_owned())].into(),
        |w| w.image("mft").spec.sources[0].unpack = Some("a.tar".parse().unwrap()),
        |w| w.image("mft").spec.sources[0].subdir = Some("a.tar".parse().unwrap()),
        |w| w.image("mft").spec.modules.push("another".parse().unwrap()),
        |w| w.image("mft").spec.output = Output::Image,
        |w| w.image("mft").spec.runtime.entrypoint.push("x".parse().unwrap()),
        |w| drop(w.image("mft").spec.runtime.env.insert("x".parse().unwrap(), "y".parse().unwrap())),
        |w| {
            w.image("mft").spec.runtime.base = Some(RuntimeBase::Image("a/b:1".parse().unwrap()));
            found(w).base_identity = Some("sha256:3".to_owned());
        },
        entrypoint,
        |w| {
            w.resolved.toolchains.insert((name("debian-12"), vec![], None), Ok("toolchain-2".to_owned()));
        },
        |w| {
            let packages = vec!["file".parse().unwrap()];
            w.image("mft").spec.build_packages = packages.clone();
            w.resolved.toolchains.insert((name("debian-12"), packages, None), Ok("toolchain-3".to_owned()));
        },
        |w| drop(w.definitions.templates.insert("mft".to_owned(), "FROM {{toolchain}}".to_owned())),
        |w| {
            let patch = serde_json::json!({"path": "patches/a b.patch", "kernels": ">=6.1"});
            w.image("mft").spec.patches.push(serde_json::from_value(patch).unwrap());
            found(w).patches.insert(0, "sha256:4".to_owned());
        },
        |w| w.image("mft").spec.exposes.push("/usr/src/mft".parse().unwrap()),
        |w| {
            let template = "FROM {{toolchain}}\nRUN {{vars.make}}".to_owned();
            w.definitions.templates.insert("mft".to_owned(), template);
            w.image("mft").spec.vars.insert("make".parse().unwrap(), "true".parse().unwrap());
        },
        |w| {
            let certificate = Digest::of(b"certificate");
            found(w).signed_with = Some(SignedWith { certificate, signed: Signed::Keep });
        },
        |w| drop(w.resolved.headers.insert(target(K47), Ok(Some(Digest::of(b"headers").to_string())))),
    ]
    .map(cell)
    .into();
    let all = different.iter().chain([&same]);
    let distinct: std::collections::BTreeSet<_> = all.map(|cell| cell.input_hash).collect();
    assert_eq!(distinct.len(), different.len() + 1);
    let changed = different.iter().map(|cell| changed_inputs(&same.inputs, cell).join("; ") + "\n");
    insta::assert_snapshot!(changed.collect::<String>(), @r#"
    version changed (4.33.0 -> 4.34.0)
    source src changed (sha256:1 -> sha256:2)
    unpack of source src changed (null -> "a.tar")
    subdir of source src changed (null -> "a.tar")
    modules changed (["mod"] -> ["mod","another"])
    output changed ("payload" -> "image")
    entrypoint changed ([] -> ["x"])
    env changed ({} -> {"x":"y"})
    base changed (none -> sha256:3)
    driver-entrypoint changed (none -> farrier.dev/entrypoint/1); entrypoint changed ([] -> ["driver-entrypoint","generic"])
    toolchain changed (toolchain-1 -> toolchain-2)
    toolchain changed (toolchain-1 -> toolchain-3)
    template mft changed (sha256:7d85bd81a8ee -> sha256:f1865f79a97c)
    patch 001-a_b.patch changed (none -> sha256:sha256:4)
    exposes changed (none -> ["/usr/src/mft"])
    template mft changed (sha256:7d85bd81a8ee -> sha256:4c9601829c33); vars.make changed (none -> true)
    certificate changed (none -> sha256:03d66dd08835); module-signing changed (none -> farrier.dev/signing/1); signed changed (none -> "keep")
    headers changed ({"tarball":{"path":"headers/{{release}}.tar"}} -> sha256:78c7f3736226)
    "#);
    let what: Vec<&str> = different.iter().map(|cell| cell.changed_since(&same).unwrap()).collect();
    insta::assert_snapshot!(what.join(", "), @"its definition, a source, its definition, its definition, its definition, its definition, its definition, its definition, the runtime base, its definition, the toolchain, the toolchain, its definition, a patch, its definition, its definition, the key that signs modules, the kernel's headers");
}

fn starts_with(world: &mut World, program: &str) {
    world.image("mft").spec.runtime.entrypoint = vec![program.parse().unwrap(), "generic".parse().unwrap()];
}

#[test]
fn an_image_that_starts_with_driver_entrypoint_needs_one_that_runs_there() {
    let why = |program: &str, entrypoints: &[Architecture]| {
        let mut world = World::new(&[K47]);
        starts_with(&mut world, program);
        world.resolved.images.get_mut(&name("mft")).unwrap().as_mut().unwrap().entrypoints =
            entrypoints.iter().copied().collect();
        let skipped = world.skipped();
        assert_eq!(world.cells().len() + skipped.len(), 1);
        skipped.first().map(|(_, why)| why.to_string())
    };
    assert_eq!(why("sleep", &[]), None);
    for program in ["driver-entrypoint", "nvidia-driver", "/usr/bin/nvidia-driver"] {
        assert_eq!(why(program, &[Architecture::Arm64, Architecture::Amd64]), None);
        assert!(why(program, &[]).unwrap().contains("was not looked up"));
        let other = why(program, &[Architecture::Arm64]).unwrap();
        assert!(other.contains("is for arm64, and the target is amd64 (build it with"), "{other}");
    }
}

#[test]
fn patches_apply_to_their_kernels_under_safe_names() {
    let mut world = World::new(&[]);
    let mut image = image("mft");
    image.spec.patches = ["{\"path\": \"p/$(x).patch\"}", "{\"path\": \"b.patch\", \"kernels\": \">=6.2\"}"]
        .map(|patch| serde_json::from_str(patch).unwrap())
        .into();
    let resolved = super::super::ResolvedImage {
        patches: [(0, "a".to_owned()), (1, "b".to_owned())].into(),
        ..resolved()
    };
    world.resolved.images.insert(name("mft"), Ok(resolved));
    let inputs: CellInputs<'_> = world.cell_inputs();
    let cell = |release: &str| {
        cell_for(&inputs, &BTreeMap::new(), &mut Templates::default(), &image, &target(release)).unwrap()
    };
    let names =
        |release: &str| -> Vec<String> { cell(release).patches.into_iter().map(|p| p.name).collect() };
    let written = serde_json::to_value(cell(K47)).unwrap();
    assert_eq!(written["patches"], serde_json::json!([{"name": "001-__x_.patch", "sha256": "a"}]));
    assert_eq!(names(K47), ["001-__x_.patch"]);
    assert_eq!(names("6.12.3"), ["001-__x_.patch", "002-b.patch"]);
}

#[test]
fn headers_choose_patches_and_variables() {
    let mut world = World::new(&[K47, K48]);
    let when = serde_json::json!({"header": "include/linux/pci.h", "matches": "bars"});
    let patch = serde_json::json!({"path": "a.patch", "when": when});
    world.image("mft").spec.patches = vec![serde_json::from_value(patch).unwrap()];
    let set = serde_json::json!({"set": {"flag": "-DBARS"}, "when": when});
    world.image("mft").spec.kernel_vars = vec![serde_json::from_value(set).unwrap()];
    let none = "-DNONE={{kernel.release}}".parse().unwrap();
    world.image("mft").spec.vars.insert("flag".parse().unwrap(), none);
    world
        .definitions
        .templates
        .insert("mft".to_owned(), "FROM {{toolchain}}\nRUN cc {{vars.flag}}\n".to_owned());
    world.resolved.images.get_mut(&name("mft")).unwrap().as_mut().unwrap().patches =
        [(0, "a".to_owned())].into();
    let why = world.skipped().remove(0).1.to_string();
    assert_eq!(why, "headers: they were not looked up", "without an answer nothing is built");

    let key = |release| (target(release), "include/linux/pci.h matches bars".to_owned());
    world.resolved.header_texts = [(key(K47), Ok(false)), (key(K48), Ok(true))].into();
    let chosen = |cell: &Cell| (cell.patches.len(), cell.dockerfile.contains("-DBARS"));
    let cells = world.cells();
    assert_eq!(cells.iter().map(|cell| chosen(cell)).collect::<Vec<_>>(), [(0, false), (1, true)]);
    assert!(cells[0].dockerfile.contains(&format!("cc -DNONE={K47}\n")), "{}", cells[0].dockerfile);
    assert!(crate::plan::tables(&world.plan())[0].rows[1][4].ends_with("; patched with 001-a.patch"));

    world.resolved.header_texts.insert(key(K48), Err("there is no package".to_owned()));
    assert_eq!(world.skipped().remove(0).1.to_string(), "headers: there is no package");
}

#[test]
fn what_cannot_be_built_is_a_reason_and_not_a_build() {
    let mut world = World::new(&[K47, K48]);
    world
        .observed
        .headers
        .insert(target(K47), HeaderState::Missing("package linux-headers-x in bookworm".to_owned()));
    let toolchain = serde_json::json!({"bootstrap": {"suite": "bookworm", "include": ["gcc-12", "make"]}});
    world.definitions.families[0].spec.toolchain = serde_json::from_value::<Toolchain>(toolchain).unwrap();
    let gcc = |major| HeaderState::Available(Some(Compiler { kind: CompilerKind::Gcc, major }));
    world.observed.headers.insert(target(K48), gcc(14));
    insta::assert_snapshot!(
        world.skipped().iter().map(|(_, why)| why.to_string()).collect::<Vec<_>>().join("\n")
    );
    assert!(world.plan().has_failures());
    world.observed.headers.insert(target(K48), gcc(12));
    assert_eq!(world.plan().builds().count(), 1);

    // Nothing is built either if the headers are permanently refused, or if the packages of the toolchain or the base
    // are not available.
    let why = |world: &World| world.skipped().iter().map(|(_, why)| why.to_string()).collect::<Vec<_>>();
    world
        .observed
        .headers
        .insert(target(K47), HeaderState::Refused("no such suite (name another)".to_owned()));
    assert_eq!(why(&world), ["headers: no such suite (name another)"]);
    world.observed.headers.insert(target(K47), HeaderState::Unknown);
    assert_eq!(world.plan().builds().count(), 2, "a transient fault is not a reason");
    let lacking = |what, identity: &str| (what, identity.to_owned(), Architecture::Amd64);
    let found = world.resolved.images.get_mut(&name("mft")).unwrap().as_mut().unwrap();
    found.base_identity = Some("base-1".to_owned());
    for (what, identity, told) in [
        (FetchedInputs::TOOLCHAIN, "toolchain-1", "toolchain of family debian-12: no keys"),
        (FetchedInputs::BASE, "base-1", "runtime base: no keys"),
    ] {
        world.resolved.unbuildable_root_fs = [(lacking(what, identity), "no keys".to_owned())].into();
        assert_eq!(why(&world), [told; 2]);
    }

    // A published image needs neither headers nor a toolchain.
    let unbuildable = std::mem::take(&mut world.resolved.unbuildable_root_fs);
    world.observed.headers.clear();
    world.publish(Verdict::Loads);
    world.resolved.unbuildable_root_fs = unbuildable;
    world.observed.headers.insert(target(K47), HeaderState::Missing("package".to_owned()));
    assert!(world.skipped().is_empty());

    // Headers that users provide are part of an image's inputs, even of a published image.
    world.resolved.without_headers.insert(target(K47), "headers/x.tar".to_owned());
    assert!(matches!(&world.skipped()[..], [(_, SkipReason::NoHeaders { .. })]));
}

#[test]
fn another_machine_s_kernels_are_compiled_here_or_the_plan_says_why_not() {
    let bootstrap = serde_json::json!({"bootstrap": {"suite": "bookworm", "include": ["gcc-12"]}});
    let apt = serde_json::json!({"apt": {"packages": ["linux-headers-{{release}}"], "suites": ["bookworm"]}});
    let mut world = World::new(&[K47]);
    world.machine = Some(Architecture::Arm64);
    let why = |world: &World| world.skipped().first().map(|(_, why)| why.to_string()).unwrap_or_default();
    insta::assert_snapshot!(why(&world), @"modules for amd64 cannot be compiled on this machine, which is arm64: its toolchain does not come from Debian's or Ubuntu's packages (build on a machine of that architecture, or in a cluster that has one (--engine kubernetes); Debian's kernels, with a toolchain of packages, can be cross-compiled)");
    world.definitions.families[0].spec.toolchain = serde_json::from_value(bootstrap).unwrap();
    assert!(why(&world).contains("the tools in its headers run on that architecture"), "headers from a file");
    world.definitions.families[0].spec.headers = serde_json::from_value(apt).unwrap();
    assert_eq!(why(&world), "", "Debian has cross compilers, and the tools for each machine");
    world.resolved.headers.insert(target(K47), Ok(Some("sha256:1".to_owned())));
    assert!(why(&world).contains("the tools in its headers run on that architecture"), "imported headers");
    for elsewhere in [None, Some(Architecture::Amd64)] {
        world.machine = elsewhere;
        assert_eq!(why(&world), "");
    }
    world.machine = Some(Architecture::Arm64);
    world.image("mft").spec.reuse = Reuse::Compatible;
    assert_eq!(why(&world), "", "another kernel's payload may be reusable");
    world.image("mft").spec.reuse = Reuse::Never;
    world.machine = None;
    world.publish(Verdict::Loads);
    world.machine = Some(Architecture::Arm64);
    assert_eq!(why(&world), "", "the image is published");
}

#[test]
fn a_whole_image_wants_a_daemon() {
    let mut world = World::new(&[K47]);
    world.image("mft").spec.output = Output::Image;
    assert!(world.skipped().is_empty());
    world.has_daemon = false;
    assert!(matches!(&world.skipped()[..], [(_, SkipReason::NoDaemon)]));
    world.image("mft").spec.output = Output::Payload;
    assert!(world.skipped().is_empty());
}

/// Returns a world whose image takes another image as its source for each kernel. `json` is added to the source, after
/// the reference.
fn prebuilt(json: &str) -> World {
    let mut world = World::new(&[K47, K48]);
    let from = format!(r#"{{"image": {{"reference": "r.test/acme:{{{{release}}}}"{json}}}}}"#);
    world.image("mft").spec.sources[0].from = serde_json::from_str(&from).unwrap();
    world.resolved.images.get_mut(&name("mft")).unwrap().as_mut().unwrap().sources.clear();
    for (release, found) in [(K47, Ok("r.test/acme sha256:1")), (K48, Err("no prebuilt image r.test/acme:x"))]
    {
        let found = found.map(str::to_owned).map_err(str::to_owned);
        world.resolved.kernel_sources.insert((name("mft"), name("src"), target(release)), found);
    }
    world
}

#[test]
fn what_others_built_counts_for_each_kernel_and_may_be_absent() {
    let mut world = prebuilt("");
    let cells = world.cells();
    assert_eq!(cells.len(), 1);
    assert_eq!(cells[0].fetched.sources["src"], "r.test/acme sha256:1");
    let [(planned, why)] = &world.skipped()[..] else { panic!("one kernel has none") };
    assert_eq!(planned.target, target(K48));
    assert_eq!(why.to_string(), "source src: no prebuilt image r.test/acme:x");
    let other = Ok("r.test/acme sha256:2".to_owned());
    world.resolved.kernel_sources.insert((name("mft"), name("src"), target(K47)), other);
    assert_eq!(world.cells()[0].changed_since(&cells[0]), Some("a source"));
}

#[test]
fn a_package_for_other_machines_counts_for_their_kernels() {
    let mut world = World::new(&[K47, K48]);
    let from = r#"{"apt": {"package": "acme-source", "suites": ["sid"]}}"#;
    world.image("mft").spec.sources[0].from = serde_json::from_str(from).unwrap();
    let own = world.cells();
    let found = Ok("acme-source=1 sha256:2".to_owned());
    world.resolved.kernel_sources.insert((name("mft"), name("src"), target(K47)), found);
    let cells = world.cells();
    assert_eq!(cells[0].fetched.sources["src"], "acme-source=1 sha256:2");
    assert_eq!(cells[0].changed_since(&own[0]), Some("a source"));
    assert_eq!((&cells[1].fetched, cells[1].input_hash), (&own[1].fetched, own[1].input_hash));
}

#[test]
fn a_site_that_signs_adopts_nothing_without_a_word() {
    let planned = |json: &str| {
        let mut world = prebuilt(json);
        let signing = serde_json::json!({"key": {"file": "images.pem"}});
        world.definitions.site.image_signing = Some(serde_json::from_value(signing).unwrap());
        (world.plan().builds().count(), world.skipped()[0].1.to_string())
    };
    let (builds, why) = planned("");
    assert_eq!(builds, 0);
    insta::assert_snapshot!(why, @"source src: this site signs modules, but those of a third party's image are untrusted: name its signer's key (`signedBy`), or let the site sign them anyway (`adoptUnsigned: true`)");
    for word in [r#", "adoptUnsigned": true"#, r#", "signedBy": ["keys/acme.pub"]"#] {
        assert_eq!(planned(word).0, 1, "{word}");
    }
}
