use super::*;
use crate::{
    image::checked::LabelKey,
    kmod::Verdict,
    plan::{
        NEXT_KERNEL_ANNOTATION, NEXT_KERNEL_LABEL, Taint,
        fixtures::{K47, K48, World, name},
    },
};

fn text(explanations: &[Explanation]) -> String {
    let lines = |explanation: &Explanation| {
        let links = explanation.chain.iter().map(|ExplanationStep { about, says, hint }| {
            let hint = if hint.is_empty() { String::new() } else { format!(" -> {hint}") };
            format!("{about}: {says}{hint}\n")
        });
        format!("{}\n{}", explanation.subject, links.collect::<String>())
    };
    explanations.iter().map(lines).collect()
}

fn of_node(world: &World, node: &str) -> String {
    let plan = world.plan();
    let explain = Explain { snapshot: &world.snapshot, definitions: &world.definitions, plan: &plan };
    text(explain.node(node).as_slice())
}

fn of_image(world: &World, image: &str, release: &str) -> String {
    let plan = world.plan();
    let explain = Explain { snapshot: &world.snapshot, definitions: &world.definitions, plan: &plan };
    text(&explain.image(&world.definitions.images[&name(image)], &release.parse().unwrap()))
}

#[test]
fn a_node_is_followed_from_its_labels_to_the_field_and_to_its_next_kernel() {
    let mut world = World::new(&[K47, K48]);
    insta::assert_snapshot!(of_node(&world, "n0"), @"
    node n0
    kernel: it runs 6.1.0-47-amd64 (debian 12, amd64): status.nodeInfo says so, and the label feature.node.kubernetes.io/kernel-version.full agrees
    image mft: called for by pci=yes
    state: missing: not in the registry
    DaemonSet kube-system/mft, container driver: hold: its nodes run different kernels: 6.1.0-47-amd64 (debian 12, amd64) on 1, 6.1.0-48-amd64 (debian 12, amd64) on 1; use `strategy: per-kernel` or `union`, which need a running cluster, or one DaemonSet and rollout for each kernel; its image stays registry.test/old:1
    ");
    world.publish(Verdict::Loads);
    let announced = (NEXT_KERNEL_ANNOTATION.to_owned(), K48.to_owned());
    world.snapshot.nodes[0].annotations.extend([announced]);
    insta::assert_snapshot!(of_node(&world, "n0"), @"
    node n0
    kernel: it runs 6.1.0-47-amd64 (debian 12, amd64): status.nodeInfo says so, and the label feature.node.kubernetes.io/kernel-version.full agrees
    image mft: called for by pci=yes
    state: published: registry.test/drivers/mft:4.33.0-6.1.0-47-amd64-debian12-amd64@sha256:12c6ad962519bd618352d6dcdb3722137d666e063c3d9aca12655cb80adfaaba, check verdict: loads
    DaemonSet kube-system/mft, container driver: hold: its nodes run different kernels: 6.1.0-47-amd64 (debian 12, amd64) on 1, 6.1.0-48-amd64 (debian 12, amd64) on 1; use `strategy: per-kernel` or `union`, which need a running cluster, or one DaemonSet and rollout for each kernel; its image stays registry.test/old:1
    next kernel: the node may boot 6.1.0-48-amd64 (debian 12, amd64): every image that it will need is published
    ");
    assert_eq!(of_node(&world, "n7"), "");
}

#[test]
fn drivers_of_the_host_are_named_with_what_the_next_kernel_needs() {
    let mut world = World::new(&[K47, K48]);
    world.publish(Verdict::Loads);
    let labels = [(NEXT_KERNEL_LABEL, K48), ("feature.node.kubernetes.io/farrier-host.mft", "0123456789ab")];
    world.snapshot.nodes[0].labels.extend(labels.map(|(key, value)| (key.to_owned(), value.to_owned())));
    let says = of_node(&world, "n0");
    let expected = "host drivers: farrier-host loads mft (system extension sha256:0123456789ab...) on 6.1.0-47-amd64; next kernel \
                    6.1.0-48-amd64: registry.test/drivers/mft:4.33.0-6.1.0-48-amd64-debian12-amd64 (published)\n\
                    next kernel: the node may boot 6.1.0-48-amd64 (debian 12, amd64)";
    assert!(says.contains(expected), "{says}");
    let scope = crate::plan::SnapshotScope::of(&world.definitions);
    for (label, _) in labels {
        assert!(scope.labels.contains(label), "the snapshot of a live cluster lacks {label}");
    }
}

#[test]
fn what_a_node_does_not_call_for_names_the_label() {
    let mut world = World::new(&[K47; 2]);
    let pci: LabelKey = "feature.node.kubernetes.io/pci-15b3.present".parse().unwrap();
    let image = world.definitions.images.get_mut(&name("mft")).unwrap();
    image.spec.nodes.match_labels = [(pci.clone(), "true".parse().unwrap())].into();
    world.snapshot.nodes[0].has_hardware_labels = false;
    world.snapshot.nodes[1].labels.insert(pci.to_string(), "no\u{1b}[31m".to_owned());
    insta::assert_snapshot!(of_node(&world, "n0"), @"
    node n0
    kernel: it runs 6.1.0-47-amd64 (debian 12, amd64): status.nodeInfo says so, and the label feature.node.kubernetes.io/kernel-version.full agrees
    image mft: not called for: the definition requires the label feature.node.kubernetes.io/pci-15b3.present=true, and there is no such label -> no label describes the node's hardware: check that Node Feature Discovery runs on it
    ");
    insta::assert_snapshot!(of_image(&world, "mft", K47), @r#"
    mft for 6.1.0-47-amd64
    node n0: not called for: the definition requires the label feature.node.kubernetes.io/pci-15b3.present=true, and there is no such label -> no label describes the node's hardware: check that Node Feature Discovery runs on it
    node n1: not called for: the definition requires the label feature.node.kubernetes.io/pci-15b3.present=true, and its value is "no\u{1b}[31m"
    "#);

    let image = world.definitions.images.get_mut(&name("mft")).unwrap();
    image.spec.nodes.match_labels.clear();
    image.spec.nodes.unless_labels = serde_json::from_value(serde_json::json!({"pci": ["yes"]})).unwrap();
    insta::assert_snapshot!(of_node(&world, "n1"), @"
    node n1
    kernel: it runs 6.1.0-47-amd64 (debian 12, amd64): status.nodeInfo says so, and the label feature.node.kubernetes.io/kernel-version.full agrees
    image mft: not called for: the label pci=yes marks a node with its own driver
    ");
    world.snapshot.nodes[1].labels.remove(KERNEL_LABEL);
    insta::assert_snapshot!(of_node(&world, "n1"), @r#"
    node n1
    kernel: the node is skipped: label feature.node.kubernetes.io/kernel-version.full is missing -> Node Feature Discovery sets this within a minute; without it: `kubectl label --overwrite node n1 feature.node.kubernetes.io/kernel-version.full="$(kubectl get node n1 -o jsonpath={.status.nodeInfo.kernelVersion} | sed 's/[^-A-Za-z0-9_.]/_/g; s/[-_.]*$//')"`
    image mft: not called for: the label pci=yes marks a node with its own driver
    "#);
}

#[test]
fn a_rollout_that_does_not_reach_the_node_has_one_line() {
    let mut world = World::new(&[K47, K48]);
    world.snapshot.nodes[1].taints.push(Taint {
        key: "storage".to_owned(),
        value: "only".to_owned(),
        effect: "NoSchedule".to_owned(),
    });
    let text = of_node(&world, "n1");
    let lines: Vec<&str> = text.lines().filter(|line| line.contains("DaemonSet")).collect();
    let excluded = "DaemonSet kube-system/mft, container driver: does not reach the node: its taint storage=only:NoSchedule is not tolerated";
    assert_eq!(lines, [excluded]);
}

#[test]
fn an_image_without_a_state_has_one_line_for_each_rollout_that_does_not_reach_the_node() {
    let mut world = World::new(&[K47]);
    world.snapshot.nodes[0].taints.push(Taint {
        key: "storage".to_owned(),
        value: "only".to_owned(),
        effect: "NoSchedule".to_owned(),
    });
    let mut plan = world.plan();
    plan.cells.clear();
    let explain = Explain { snapshot: &world.snapshot, definitions: &world.definitions, plan: &plan };
    insta::assert_snapshot!(text(explain.node("n0").as_slice()), @"
    node n0
    kernel: it runs 6.1.0-47-amd64 (debian 12, amd64): status.nodeInfo says so, and the label feature.node.kubernetes.io/kernel-version.full agrees
    image mft: called for by pci=yes
    DaemonSet kube-system/mft, container driver: does not reach the node: its taint storage=only:NoSchedule is not tolerated
    ");
}

#[test]
fn an_image_is_followed_from_who_calls_for_it_through_its_inputs() {
    let mut world = World::chain(&[K47; 7]);
    world.snapshot.nodes[6].labels.remove("pci");
    world.announce(K48);
    insta::assert_snapshot!(of_image(&world, "peer", K47), @"
    peer for 6.1.0-47-amd64 (debian 12, amd64)
    nodes: n0, n1, n2, n3, n4 and 1 more: called for by pci=yes
    other nodes: n6: not called for: the definition requires the label pci=yes, and there is no such label
    family: debian-12: headers from headers/6.1.0-47-amd64.tar; toolchain from registry.test/toolchain@sha256:0000000000000000000000000000000000000000000000000000000000000000
    state: waiting: waits for mofed, gpu
    DaemonSet kube-system/peer, container driver: hold: no image for 6.1.0-47-amd64 (debian 12, amd64): it waits for mofed, gpu; its image stays registry.test/old:1
    ");
    insta::assert_snapshot!(of_image(&world, "mft", K48), @"
    mft for 6.1.0-48-amd64 (debian 12, amd64)
    announcement: configuration next announces the kernel
    family: debian-12: headers from headers/6.1.0-48-amd64.tar; toolchain from registry.test/toolchain@sha256:0000000000000000000000000000000000000000000000000000000000000000
    inputs: version 4.33.0, family debian-12, toolchain toolchain-1
    input hash b23c457a346a, tag registry.test/drivers/mft:4.33.0-6.1.0-48-amd64-debian12-amd64
    state: missing: not in the registry
    DaemonSet kube-system/mft, container driver: rewrite later: after registry.test/drivers/mft:4.33.0-6.1.0-47-amd64-debian12-amd64 is published
    ");
    world.resolved.images.insert(name("mft"), Err("404 for driver.tgz".to_owned()));
    insta::assert_snapshot!(of_image(&world, "mft", K47), @"
    mft for 6.1.0-47-amd64 (debian 12, amd64)
    nodes: n0, n1, n2, n3, n4 and 1 more: called for by pci=yes
    other nodes: n6: not called for: the definition requires the label pci=yes, and there is no such label
    family: debian-12: headers from headers/6.1.0-47-amd64.tar; toolchain from registry.test/toolchain@sha256:0000000000000000000000000000000000000000000000000000000000000000
    state: skipped: 404 for driver.tgz
    DaemonSet kube-system/mft, container driver: hold: no image for 6.1.0-47-amd64 (debian 12, amd64), for the reason above; its image stays registry.test/old:1
    ");
    insta::assert_snapshot!(of_image(&world, "mft", "5.10.0-1-amd64"), @"
    mft for 5.10.0-1-amd64
    kernel: no node runs 5.10.0-1-amd64, and none announces it -> `farrier prebuild --kernel 5.10.0-1-amd64` builds for a kernel before a node has it; mft is planned for 6.1.0-47-amd64, 6.1.0-48-amd64
    ");
}
