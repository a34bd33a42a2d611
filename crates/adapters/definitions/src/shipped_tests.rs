//! Tests of the built-in definitions: the Dockerfile and the first tag of each image.

use std::collections::BTreeMap;

use farrier_core::{
    image::{Definitions, DriverImage, TagInputs, render_tags},
    kernel::{
        Architecture, HeaderSource, KernelFamilySpec, KernelLabel, KernelTarget, NodeSystem, Toolchain,
        UNKNOWN_SYSTEM, match_family,
    },
    plan::{
        Announcements, CellInputs, ClusterSnapshot, Explain, FetchedInputs, HeaderState, ImageLocation,
        Instance, KERNEL_LABEL, Manifests, Matrix, NodeFacts, OS_ID_LABEL, OS_VERSION_LABEL, Observed,
        PlanInputs, Resolved, ResolvedImage, toolchain_key,
    },
    template::{self, Templates},
};

use super::{builtin, load};

fn target() -> KernelTarget {
    KernelTarget {
        os: "ubuntu".parse().unwrap(),
        os_version: "22.04".parse().unwrap(),
        release: "5.15.0-91-generic".parse().unwrap(),
        arch: Architecture::Amd64,
    }
}

fn image<'a>(definitions: &'a Definitions, name: &str) -> &'a DriverImage {
    &definitions.images[name]
}

/// Returns the Dockerfile as `farrier render` prints it, for a source of version `535.261.03`.
fn dockerfile(name: &str) -> String {
    dockerfile_for(name, Architecture::Amd64)
}

fn dockerfile_for(name: &str, arch: Architecture) -> String {
    let definitions = load(None).unwrap();
    let image = image(&definitions, name);
    let target = KernelTarget { arch, ..target() };
    let context = image.template_context("localhost/toolchain", "535.261.03", &target);
    let template = image.spec.template.as_str();
    template::render(template, &definitions.templates[template], &context).unwrap()
}

#[test]
fn ofed_is_configured_compiled_and_exposed() {
    insta::assert_snapshot!(dockerfile("mofed"));
}

#[test]
fn the_gpu_driver_exposes_what_peer_memory_looks_for() {
    insta::assert_snapshot!(dockerfile("nvidia-gpu"));
}

/// NVIDIA's makefiles use the machine's architecture unless another one is set.
#[test]
fn the_whole_tree_of_the_gpu_driver_is_told_that_it_is_for_arm64() {
    let arm64 = dockerfile_for("nvidia-gpu", Architecture::Arm64);
    let told = r#"DATE="date --date=@0" TARGET_ARCH=aarch64; \"#;
    assert!(arm64.contains(told), "{arm64}");
    assert_eq!(arm64.replace(" TARGET_ARCH=aarch64", ""), dockerfile("nvidia-gpu"));
}

#[test]
fn nvidia_peermem_is_compiled_against_both() {
    insta::assert_snapshot!(dockerfile("nvidia-peermem"));
}

#[test]
fn nv_peer_mem_is_compiled_against_both() {
    insta::assert_snapshot!(dockerfile("nv-peer-mem"));
}

#[test]
fn storage_and_copies_are_compiled_against_the_gpu_driver() {
    insta::assert_snapshot!(dockerfile("nvidia-fs"));
    let line =
        |text: String| text.lines().find(|line| line.contains("NVIDIA_IS_OPENSOURCE")).map(str::to_owned);
    let wanted =
        "        KBUILD_EXTRA_SYMBOLS=\"$nvidia/Module.symvers\" \"$@\" NVIDIA_IS_OPENSOURCE=y build; \\";
    assert_eq!(line(dockerfile("gdrdrv")).as_deref(), Some(wanted));
}

#[test]
fn any_dkms_module_is_compiled_as_its_conf_says() {
    insta::assert_snapshot!(dockerfile("generic"));
}

/// Each file of images/community has one definition that validates and renders, and a row in docs/community.md.
#[test]
fn community_definitions_validate_and_render() {
    let files = builtin::IMAGES.get_dir("community").unwrap().files();
    let page = include_str!("../../../../docs/community.md");
    let directory = tempfile::tempdir().unwrap();
    let images = directory.path().join("images");
    fs_err::create_dir(&images).unwrap();
    for file in files {
        let name = file.path().file_name().unwrap();
        let place = images.join(name);
        fs_err::write(&place, file.contents()).unwrap();
        let definitions = load(Some(directory.path())).unwrap_or_else(|errors| panic!("{errors}"));
        let found: Vec<&DriverImage> = definitions.images.values().collect();
        let [image] = found[..] else { panic!("{name:?} has {} definitions", found.len()) };
        let name = image.metadata.name.as_str();
        assert_eq!(place.file_stem().unwrap(), name);
        let context = image.template_context("localhost/toolchain", "1.0", &target());
        let template = image.spec.template.as_str();
        template::render(template, &definitions.templates[template], &context).unwrap();
        assert!(page.contains(&format!("| `{name}` | ")), "docs/community.md lacks {name}");
        assert!(
            load(None).unwrap().images.keys().all(|shipped| *shipped != name),
            "{name} is built for every site"
        );
        fs_err::remove_file(&place).unwrap();
    }
}

/// The complete definitions in docs/dkms.md and docs/public-trees.md.
#[test]
fn images_of_the_documentation_are_read() {
    let directory = tempfile::tempdir().unwrap();
    let images = directory.path().join("images");
    fs_err::create_dir(&images).unwrap();
    let pages =
        [include_str!("../../../../docs/dkms.md"), include_str!("../../../../docs/public-trees.md")].concat();
    let blocks = pages.split("```yaml\n").skip(1);
    for (number, block) in blocks.filter(|block| block.starts_with("apiVersion: ")).enumerate() {
        fs_err::write(images.join(format!("{number}.yaml")), block.split("```").next().unwrap()).unwrap();
    }
    let definitions = load(Some(directory.path())).unwrap_or_else(|errors| panic!("{errors}"));
    let names: Vec<String> = definitions.images.keys().map(ToString::to_string).collect();
    let trees = ["efa", "ena", "gasket", "hailo", "i40e", "kvmfr", "pf-ring", "r8125", "tt-kmd"];
    let mut wanted = [&["acpi-call", "drbd", "zfs"][..], &trees].concat();
    wanted.sort_unstable();
    assert_eq!(names, wanted);
}

/// The families in docs/distributions.md for distributions without packages.
#[test]
fn families_of_the_documentation_are_read() {
    let text =
        include_str!("../../../../docs/distributions.md").replace("sha256:...", &format!("sha256:{:064}", 1));
    let blocks = text.split("```yaml\n").skip(1).filter_map(|block| block.split("```").next());
    let families: Vec<KernelFamilySpec> = blocks
        .filter(|block| block.contains("  match: "))
        .map(|block| {
            let mut family: BTreeMap<String, KernelFamilySpec> = serde_saphyr::from_str(block).unwrap();
            family.remove("spec").unwrap()
        })
        .collect();
    let forms =
        |count: fn(&HeaderSource) -> bool| families.iter().filter(|family| count(&family.headers)).count();
    assert_eq!(forms(|headers| matches!(headers, HeaderSource::Oci(_))), 3);
    assert_eq!(forms(|headers| matches!(headers, HeaderSource::Url(_))), 2);
    for family in &families {
        let target = KernelTarget {
            os: "acme".parse().unwrap(),
            os_version: "1.2.3".parse().unwrap(),
            release: "5.14.0-427.50.1.el9_4.x86_64".parse().unwrap(),
            arch: Architecture::Amd64,
        };
        let Toolchain::Image(toolchain) = &family.toolchain else { panic!("packages") };
        let mut system = NodeSystem::default();
        system.add_labels(Some("416.94.202412170927-0"), None);
        if let Some(stream) = &family.image_stream {
            let digest = format!("sha256:{:064}", 2).parse().unwrap();
            let tags = BTreeMap::from([("416.94.202412170927-0".to_owned(), digest)]);
            system.look_up_digest(stream, &BTreeMap::from([(stream.clone(), Ok(tags))]));
        }
        family.image_for(toolchain, &target, &system).unwrap();
    }
}

/// The operators' tag forms, see `docs/operators.md`.
#[test]
fn the_first_tags_are_those_that_the_operators_compute() {
    let definitions = load(None).unwrap();
    let target = target();
    let first_tag = |name: &str, version: &str| {
        let needs = [("mofed", "25.10"), ("nvidia-gpu", version)].into();
        let inputs = TagInputs {
            version,
            target: &target,
            system: &UNKNOWN_SYSTEM,
            needs,
            commits: BTreeMap::new(),
            signer: None,
        };
        render_tags(&mut Templates::default(), &image(&definitions, name).spec.tags, &inputs).unwrap()[0]
            .to_string()
    };
    assert_eq!(first_tag("mofed", "25.10-1.2.8.0-0"), "25.10-1.2.8.0-0-5.15.0-91-generic-ubuntu22.04-amd64");
    let base = |name: &str| image(&definitions, name).spec.runtime.base.clone();
    assert_eq!(base("nvidia-gpu"), base("nvidia-gpu-proprietary"));
    for gpu in ["nvidia-gpu", "nvidia-gpu-graphics", "nvidia-gpu-proprietary"] {
        assert_eq!(first_tag(gpu, "535.261.03"), "535.261.03-5.15.0-91-generic-ubuntu22.04", "{gpu}");
    }
    // In this mode, the operator's version is 2.26.6-535.261.03-5.15.0-91-generic or similar, and it adds no kernel.
    for (name, version) in [("nvidia-fs", "2.26.6"), ("gdrdrv", "2.5.1")] {
        let needs = [("nvidia-gpu", "535.261.03")].into();
        let inputs = TagInputs {
            version,
            target: &target,
            system: &UNKNOWN_SYSTEM,
            needs,
            commits: BTreeMap::new(),
            signer: None,
        };
        let tags = render_tags(&mut Templates::default(), &image(&definitions, name).spec.tags, &inputs);
        let wanted = format!("{version}-535.261.03-5.15.0-91-generic-ubuntu22.04");
        assert_eq!(tags.unwrap()[0].to_string(), wanted);
    }
    // The operator's version is 535.261.03-25.10 in this mode.
    assert_eq!(first_tag("nvidia-peermem", "535.261.03"), "535.261.03-25.10-5.15.0-91-generic-ubuntu22.04");
}

#[test]
fn what_a_shipped_image_needs_is_exposed_by_a_shipped_image() {
    let definitions = load(None).unwrap();
    let needs = |name: &str| -> Vec<String> {
        image(&definitions, name).spec.needs.iter().map(|need| need.name().to_string()).collect()
    };
    for dependent in ["nvidia-peermem", "nv-peer-mem"] {
        assert_eq!(needs(dependent), ["mofed", "nvidia-gpu"], "{dependent}");
    }
    assert_eq!(image(&definitions, "mofed").spec.exposes, ["/usr/src/ofa_kernel"]);
    assert_eq!(image(&definitions, "nvidia-gpu").spec.exposes, ["/usr/src/nvidia-*"]);
}

/// The table in docs/distributions.md contains every family once, and each family marked as proven has a test.
#[test]
fn the_table_of_distributions_is_of_these_families() {
    let text = include_str!("../../../../docs/distributions.md");
    let tests = include_str!("../../../../tests/it/families.rs");
    let rows =
        text.lines().filter_map(|line| Some(line.strip_prefix("| ")?.split(" | ").collect::<Vec<_>>()));
    let mut named = Vec::new();
    for row in rows.filter(|row| row.len() == 5 && !row[0].starts_with("---") && row[0] != "family") {
        let quoted =
            |cell: &str| -> Vec<String> { cell.split('`').skip(1).step_by(2).map(str::to_owned).collect() };
        named.extend(quoted(row[0]));
        let how_far = row[4].trim_end_matches(" |");
        if how_far.starts_with("proven") {
            let shown_by = quoted(how_far);
            assert!(!shown_by.is_empty(), "{how_far}");
            for test in shown_by {
                assert!(tests.contains(&format!("async fn {test}()")), "{test} of {}", row[0]);
            }
        }
    }
    named.sort();
    let mut shipped: Vec<String> =
        load(None).unwrap().families.iter().map(|family| family.metadata.name.to_string()).collect();
    shipped.sort();
    assert_eq!(named, shipped);
}

/// Result of looking up a kernel's headers and toolchain in archives, repositories and the store.
#[derive(Clone, Copy)]
enum Seen {
    Available,
    /// Headers were imported.
    Brought,
    Missing(&'static str),
    Refused(&'static str),
    Unknown,
    /// Headers were imported, and the toolchain's packages are not available.
    NoToolchain(&'static str),
}

/// Nodes with available headers and toolchains.
const NODES: &[(&str, &str, &str)] = &[
    ("debian", "11", "5.10.0-46-amd64"),
    ("debian", "11", "6.1.0-0.deb11.52-cloud-amd64"),
    ("debian", "12", "6.1.0-56-rt-amd64"),
    ("debian", "12", "6.12.117+deb12-amd64"),
    ("debian", "12", "6.10.11+bpo-amd64"),
    ("debian", "12", "6.1.176-Acme+"),
    ("debian", "13", "6.12.115+deb13.1-amd64"),
    ("debian", "13", "7.3.4+deb13-cloud-amd64"),
    ("debian", "sid", "7.2.13+deb14-amd64"),
    ("debian", "forky", "7.2.12+deb14-cloud-amd64"),
    ("debian", "testing", "7.3-rt-amd64"),
    ("debian", "13", "6.12.118+deb13-arm64-16k"),
    ("scos", "4.16", "5.14.0-531.el9.x86_64"),
    ("debian", "15", "8.1.1+deb15-amd64"),
    ("ubuntu", "20.04", "5.4.0-216-generic"),
    ("ubuntu", "22.04", "5.15.0-1081-azure"),
    ("ubuntu", "24.04", "6.8.0-1012-nvidia-64k"),
    ("ubuntu", "26.04", "7.0.0-14-generic"),
    ("rhel", "8.10", "4.18.0-553.el8_10.x86_64"),
    ("rocky", "9.5", "5.14.0-503.11.1.el9_5.x86_64"),
    ("almalinux", "10.0", "6.12.0-55.9.1.el10_0.x86_64"),
    ("ol", "9.5", "5.15.0-209.161.7.2.el9uek.x86_64"),
    ("ol", "8.10", "5.15.0-209.161.7.2.el8uek.x86_64"),
    ("centos", "9", "5.14.0-570.el9.x86_64+rt"),
    ("ol", "10.0", "6.12.0-100.28.2.el10uek.x86_64"),
    ("fedora", "42", "6.14.0-63.fc42.x86_64"),
    ("rhcos", "4.18", "5.14.0-427.50.1.el9_4.x86_64"),
    ("rhcos", "4.12", "4.18.0-372.76.1.el8_6.x86_64"),
    ("sles", "15.6", "6.4.0-150600.23.60-default"),
    ("sles", "16.0", "6.12.0-160000.5-default"),
    ("opensuse-leap", "15.6", "6.4.0-150600.23.60-default"),
    ("opensuse-leap", "16.0", "6.12.0-160000.5-azure"),
    ("openEuler", "24.03", "6.6.0-72.0.0.76.oe2403sp1.x86_64"),
    ("amzn", "2023", "6.1.112-122.189.amzn2023.x86_64"),
    ("azurelinux", "3.0", "6.6.57.1-2.azl3"),
    ("flatcar", "3815.2.0", "6.1.77-flatcar"),
    ("talos", "v1.9.0", "6.12.6-talos"),
];

/// Nodes for which something is not available, or that have another architecture than the machine.
const FURTHER_NODES: &[(&str, &str, &str, Seen)] = &[
    (
        "ubuntu",
        "24.04",
        "6.8.0-45-generic",
        Seen::Refused(
            "cannot fetch the package lists of noble, noble-updates, noble-security: The repository 'http://mirror.test/debian noble Release' \
             does not have a Release file. (the mirror does not have this suite: check `suites`, or set `mirror` and `signedBy` beside it)",
        ),
    ),
    (
        "debian",
        "12",
        "6.1.0-99-amd64",
        Seen::Missing(
            "package linux-headers-6.1.0-99-amd64, without http://mirror.test/debian-security bookworm-security (missing) (amd64) in \
             bookworm, bookworm-security",
        ),
    ),
    (
        "rhel",
        "9.4",
        "5.14.0-427.99.1.el9_4.x86_64",
        Seen::Missing(
            "package kernel-devel or kernel-rt-devel, without https://mirror.test/rhel/eus/repodata/repomd.xml (403) (amd64) for this \
             kernel in the repositories",
        ),
    ),
    (
        "rocky",
        "9.4",
        "5.14.0-427.13.1.el9_4.x86_64",
        Seen::Refused(
            "cannot verify the signature of the metadata of https://mirror.test/rocky/ with the keys in keys/rocky.asc: no good signature (nothing \
             of it was used: look where it came from)",
        ),
    ),
    (
        "rhel",
        "9.5",
        "5.14.0-503.40.1.el9_5.x86_64",
        Seen::NoToolchain(
            "cannot make a toolchain of https://rhel.invalid/content/dist/rhel9/9/x86_64/baseos/os/: there is no file keys/rhel.asc with the keys \
             of the distribution (put the distribution's keys there)",
        ),
    ),
    ("debian", "12", "6.1.0-57-amd64", Seen::Unknown),
    ("debian", "12", "6.1.0-56-arm64", Seen::Available),
    ("debian", "12", "6.1.0-55-arm64", Seen::Brought),
    ("ubuntu", "22.04", "5.15.0-1081-raspi", Seen::Available),
    ("rhel", "9.5", "5.14.0-503.11.1.el9_5.aarch64", Seen::Available),
    ("fedora", "42", "6.14.0-63.fc42.x86_64+debug", Seen::Brought),
];

fn planned_target((os, os_version, release): (&str, &str, &str)) -> KernelTarget {
    let is_arm = ["-arm64", ".aarch64", "-raspi"].iter().any(|part| release.contains(part));
    KernelTarget {
        os: os.parse().unwrap(),
        os_version: os_version.parse().unwrap(),
        release: release.parse().unwrap(),
        arch: if is_arm { Architecture::Arm64 } else { Architecture::Amd64 },
    }
}

fn planned_node(target: &KernelTarget) -> NodeFacts {
    let label = KernelLabel::of(&target.release).unwrap().to_string();
    let labels = [
        (OS_ID_LABEL, target.os.to_string()),
        (OS_VERSION_LABEL, target.os_version.to_string()),
        (KERNEL_LABEL, label),
        ("feature.node.kubernetes.io/pci-15b3.present", "true".to_owned()),
    ];
    NodeFacts {
        name: format!("{}-{}-{}", target.os, target.os_version, target.release),
        labels: labels.map(|(key, value)| (key.to_owned(), value)).into(),
        kernel_version: target.release.to_string(),
        architecture: target.arch.to_string(),
        ..NodeFacts::default()
    }
}

/// The plan on an amd64 machine: each node's family, the origin of its headers and toolchain, and whether there is a build or why
/// not.
#[test]
fn the_plan_for_nodes_of_many_distributions() {
    let mut definitions = load(None).unwrap();
    definitions.images.retain(|name, _| name.as_str() == "mstflint");
    let image = image(&definitions, "mstflint").clone();
    let usual = NODES.iter().map(|node| (planned_target(*node), Seen::Available));
    let further = FURTHER_NODES
        .iter()
        .map(|(os, version, release, seen)| (planned_target((os, version, release)), *seen));
    let nodes: Vec<(KernelTarget, Seen)> = usual.chain(further).collect();

    let (mut resolved, mut observed) = (Resolved::default(), Observed::default());
    let found = ResolvedImage {
        version: "4.26.0".to_owned(),
        sources: [("mstflint".to_owned(), "mstflint-dkms=4.26.0".to_owned())].into(),
        base_identity: Some("packages of bookworm".to_owned()),
        ..ResolvedImage::default()
    };
    resolved.images.insert(image.metadata.name.clone(), Ok(found));
    for (target, seen) in &nodes {
        let family = match_family(&definitions.families, target).unwrap();
        let identity = format!("of {}", family.metadata.name);
        let key = toolchain_key(&image, family, target, &UNKNOWN_SYSTEM);
        resolved.toolchains.insert(key, Ok(identity.clone()));
        if let HeaderSource::Tarball(file) = &family.spec.headers {
            resolved.without_headers.insert(target.clone(), target.fill(&file.path));
        }
        if matches!(seen, Seen::Brought | Seen::NoToolchain(_)) {
            resolved.headers.insert(target.clone(), Ok(Some("0123abcd".to_owned())));
        }
        let state = match *seen {
            Seen::Available | Seen::Brought => HeaderState::Available(None),
            Seen::Missing(looked_for) => HeaderState::Missing(looked_for.to_owned()),
            Seen::Refused(why) => HeaderState::Refused(why.to_owned()),
            Seen::Unknown => HeaderState::Unknown,
            Seen::NoToolchain(why) => {
                let key = (FetchedInputs::TOOLCHAIN, identity, target.arch);
                resolved.unbuildable_root_fs.insert(key, why.to_owned());
                HeaderState::Available(None)
            }
        };
        observed.headers.insert(target.clone(), state);
    }
    let snapshot = ClusterSnapshot {
        nodes: nodes.iter().map(|(target, _)| planned_node(target).into()).collect(),
        ..ClusterSnapshot::default()
    };
    let location = ImageLocation { prefix: "registry.test".to_owned(), pullable: true };
    let (announced, manifests, instance) = (Announcements::default(), Manifests::new(), Instance::default());
    let matrix = Matrix::of(&PlanInputs {
        cells: CellInputs { definitions: &definitions, resolved: &resolved, location: &location },
        snapshot: &snapshot,
        announced: &announced,
        manifests: &manifests,
        instance: &instance,
        machine: Some(Architecture::Amd64),
        has_daemon: false,
        now: jiff::Timestamp::UNIX_EPOCH,
    });
    observed.absent.extend(matrix.images_to_look_up());
    let compared = matrix.compare(&observed);
    observed.failures.extend(compared.failures_to_look_up().into_iter().map(|inputs| (inputs, None)));
    let mut headers = compared.headers_to_look_up();
    headers.retain(|target| !observed.headers.contains_key(target));
    assert!(headers.is_empty(), "{headers:?}");
    let plan = compared.decide(&observed).plan(&observed);
    let explain = Explain { snapshot: &snapshot, definitions: &definitions, plan: &plan };
    let told = nodes.iter().map(|(target, _)| {
        let found = explain.image(&image, &target.release);
        let found = found.iter().find(|found| found.subject.ends_with(&target.to_string()));
        let Some(found) = found else { panic!("{target} is not planned: {:?}", plan.skipped_nodes) };
        let links = found.chain.iter().filter(|link| ["family", "state"].contains(&link.about.as_str()));
        let told = links.map(|link| format!("\n  {}: {}", link.about, link.says));
        format!("{target}{}", told.collect::<String>())
    });
    insta::assert_snapshot!(told.collect::<Vec<_>>().join("\n"));
}
