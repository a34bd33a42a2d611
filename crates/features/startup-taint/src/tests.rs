use std::sync::Arc;

use farrier_core::plan::{
    COPY_OF_LABEL, Container, LiveDaemonSet, ObjectVersion, OwnedFields, Placement, PodCount, Taint,
    UpdateStrategy, testing::Fleet,
};
use jiff::Timestamp;
use serde_json::{Value, json};

use super::*;

const K47: &str = "6.1.0-47-amd64";
const K48: &str = "6.1.0-48-amd64";

/// A node with the startup taint, the DaemonSet `kube-system/mft`, and its pod on the node.
#[derive(Clone)]
struct World {
    definitions: Definitions,
    snapshot: ClusterSnapshot,
    contents: BTreeMap<String, ImageContents>,
}

fn image(name: &str, digit: char) -> String {
    format!("registry.test/drivers/{name}@sha256:{}", digit.to_string().repeat(64))
}

type Edit = fn(&mut World);

fn time(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

fn daemon_set(name: &str, image: &str) -> DaemonSetFacts {
    DaemonSetFacts {
        namespace: "kube-system".to_owned(),
        name: name.to_owned(),
        containers: vec![Container {
            name: "driver".to_owned(),
            image: image.to_owned(),
            why_not_editable: None,
            tagged: false,
        }],
        placement: Placement::default(),
        owner: None,
        paused: false,
        live: Some(LiveDaemonSet {
            version: ObjectVersion { uid: format!("uid-of-{name}"), resource_version: "1".to_owned() },
            annotations: BTreeMap::new(),
            labels: BTreeMap::new(),
            match_labels: BTreeMap::new(),
            update: UpdateStrategy::RollingUpdate,
            max_unavailable: PodCount::Number(1),
            desired: 1,
            deleting: false,
            owned: OwnedFields::default(),
            manifest: Arc::new(Value::Null),
        }),
    }
}

fn pod(of: &DaemonSetFacts) -> PodFacts {
    PodFacts {
        namespace: of.namespace.clone(),
        name: format!("{}-1", of.name),
        version: ObjectVersion { uid: "p".to_owned(), resource_version: "1".to_owned() },
        daemon_set: of.live.as_ref().unwrap().version.uid.clone(),
        node: "n0".to_owned(),
        bound: true,
        images: [("driver".to_owned(), of.containers[0].image.clone())].into(),
        probed: vec!["driver".to_owned()],
        pull_secrets: 0,
        ready: true,
        stable_since: Some(time(300)),
        created: Some(time(200)),
        deleting: false,
        messages: Vec::new(),
        pull_failure: None,
    }
}

fn world() -> World {
    let mut fleet = Fleet::new(&[K47]);
    let node = fleet.node(0);
    node.created = Some(time(100));
    node.taints =
        vec![Taint { key: TAINTS[0].to_owned(), value: String::new(), effect: "NoSchedule".to_owned() }];
    let (snapshot, definitions) = fleet.made_from();
    let (mut snapshot, definitions) = (snapshot.clone(), definitions.clone());
    let found = daemon_set("mft", &image("mft", '1'));
    snapshot.pods = vec![pod(&found)];
    snapshot.daemon_sets = vec![found];
    let contents =
        BTreeMap::from([(image("mft", '1'), contents(&[K47])), (image("other", '1'), contents(&[K47]))]);
    World { definitions, snapshot, contents }
}

fn contents(kernels: &[&str]) -> ImageContents {
    ImageContents {
        kernels: kernels.iter().map(|&kernel| kernel.to_owned()).collect(),
        ..ImageContents::default()
    }
}

impl World {
    fn blocker(&self) -> Option<String> {
        let Self { definitions, snapshot, contents } = self;
        Evidence { definitions, snapshot, contents }.blocker(&snapshot.nodes[0])
    }

    fn with(&self, change: impl FnOnce(&mut Self)) -> Option<String> {
        let mut world = self.clone();
        change(&mut world);
        world.blocker()
    }

    fn set_image(&mut self, image: String) {
        self.snapshot.pods[0].images.insert("driver".to_owned(), image);
    }
}

#[test]
fn a_ready_pod_with_the_image_for_the_kernel_is_enough() {
    assert_eq!(world().blocker(), None);
    // A union image, and an index of several architectures.
    assert_eq!(
        world().with(|world| drop(world.contents.insert(image("mft", '1'), contents(&[K48, K47])))),
        None
    );
    let index = |arch: &str| {
        let platforms = [(arch.parse().unwrap(), contents(&[K47]))].into();
        ImageContents { platforms, ..ImageContents::default() }
    };
    assert_eq!(world().with(|world| drop(world.contents.insert(image("mft", '1'), index("amd64")))), None);
    assert!(world().with(|world| drop(world.contents.insert(image("mft", '1'), index("arm64")))).is_some());
}

#[test]
fn nothing_weaker_is_enough() {
    let cases: [(&str, Edit); 18] = [
        ("no pod", |world| world.snapshot.pods.clear()),
        ("a pod of another node", |world| "n1".clone_into(&mut world.snapshot.pods[0].node)),
        ("a pod that is not bound", |world| world.snapshot.pods[0].bound = false),
        ("a pod that ends", |world| world.snapshot.pods[0].deleting = true),
        ("a pod of an earlier node of this name", |world| world.snapshot.pods[0].created = Some(time(99))),
        ("a pod of another DaemonSet", |world| "uid-of-x".clone_into(&mut world.snapshot.pods[0].daemon_set)),
        ("a pod that is not ready", |world| world.snapshot.pods[0].ready = false),
        ("a node that is not ready", |world| world.snapshot.nodes[0].not_ready = true),
        ("an image for another kernel", |world| {
            drop(world.contents.insert(image("mft", '1'), contents(&[K48])));
        }),
        ("an image of unknown contents", |world| world.contents.clear()),
        ("an image of another definition", |world| world.set_image(image("other", '1'))),
        ("an image by its tag", |world| {
            world.set_image("registry.test/drivers/mft:1".to_owned());
            world.contents.insert("registry.test/drivers/mft:1".to_owned(), contents(&[K47]));
        }),
        ("a vendor's image", |world| world.set_image("vendor.example/mft:1".to_owned())),
        ("a node without its kernel's label", |world| {
            drop(world.snapshot.nodes[0].labels.remove(farrier_core::plan::KERNEL_LABEL));
        }),
        ("a node that needs no image", |world| drop(world.snapshot.nodes[0].labels.remove("pci"))),
        ("a pod without the container", |world| world.snapshot.pods[0].images.clear()),
        ("a pod without a probe of the container", |world| {
            world.snapshot.pods[0].probed = vec!["proxy".to_owned()];
        }),
        ("an image that is rolled out to no DaemonSet", |world| {
            world.definitions.images.values_mut().for_each(|image| image.spec.rollout.clear());
        }),
    ];
    let said: Vec<String> = cases
        .into_iter()
        .map(|(name, change)| format!("{name}: {}", world().with(change).unwrap_or_else(|| panic!("{name}"))))
        .collect();
    insta::assert_snapshot!(said.join("\n"), @r"
    no pod: image mft has no pod of its DaemonSet on the node; the DaemonSet must select the node and tolerate the taint
    a pod of another node: image mft has no pod of its DaemonSet on the node; the DaemonSet must select the node and tolerate the taint
    a pod that is not bound: image mft has no pod of its DaemonSet on the node; the DaemonSet must select the node and tolerate the taint
    a pod that ends: image mft has no pod of its DaemonSet on the node; the DaemonSet must select the node and tolerate the taint
    a pod of an earlier node of this name: image mft has no pod of its DaemonSet on the node; the DaemonSet must select the node and tolerate the taint
    a pod of another DaemonSet: image mft has no pod of its DaemonSet on the node; the DaemonSet must select the node and tolerate the taint
    a pod that is not ready: pod kube-system/mft-1 is not ready
    a node that is not ready: the node is not ready
    an image for another kernel: pod kube-system/mft-1 runs registry.test/drivers/mft@sha256:1111111111111111111111111111111111111111111111111111111111111111, which is not known to have the modules of image mft for 6.1.0-47-amd64 (debian 12, amd64)
    an image of unknown contents: pod kube-system/mft-1 runs registry.test/drivers/mft@sha256:1111111111111111111111111111111111111111111111111111111111111111, which is not known to have the modules of image mft for 6.1.0-47-amd64 (debian 12, amd64)
    an image of another definition: pod kube-system/mft-1 runs registry.test/drivers/other@sha256:1111111111111111111111111111111111111111111111111111111111111111, which is not known to have the modules of image mft for 6.1.0-47-amd64 (debian 12, amd64)
    an image by its tag: pod kube-system/mft-1 runs registry.test/drivers/mft:1, which is not known to have the modules of image mft for 6.1.0-47-amd64 (debian 12, amd64)
    a vendor's image: pod kube-system/mft-1 runs vendor.example/mft:1, which is not known to have the modules of image mft for 6.1.0-47-amd64 (debian 12, amd64)
    a node without its kernel's label: kernel unknown: label feature.node.kubernetes.io/kernel-version.full is missing
    a node that needs no image: no driver image is for this node and its kernel; set the taint only on nodes that need a driver
    a pod without the container: pod kube-system/mft-1 has no container driver
    a pod without a probe of the container: container driver of pod kube-system/mft-1 has no readinessProbe or startupProbe, so a ready pod does not prove that the driver is loaded
    an image that is rolled out to no DaemonSet: image mft has no pod of its DaemonSet on the node; the DaemonSet must select the node and tolerate the taint
    ");
}

#[test]
fn every_image_that_the_node_calls_for_counts() {
    let mut world = world();
    let mut second = world.definitions.images.values().next().unwrap().clone();
    second.metadata.name = "gpu".parse().unwrap();
    second.spec.rollout = vec![
        serde_json::from_value(json!({
            "strategy": "union", "namespace": "kube-system", "daemonSet": "gpu", "container": "driver",
        }))
        .unwrap(),
    ];
    world.definitions.images.insert("gpu".parse().unwrap(), second);
    assert!(world.blocker().unwrap().contains("image gpu has no pod"));
    let gpu = daemon_set("gpu", &image("gpu", '2'));
    world.contents.insert(image("gpu", '2'), contents(&[K47]));
    world.snapshot.pods.push(PodFacts { ready: false, ..pod(&gpu) });
    world.snapshot.daemon_sets.push(gpu);
    assert_eq!(world.blocker().unwrap(), "pod kube-system/gpu-1 is not ready");
    world.snapshot.pods[1].ready = true;
    assert_eq!(world.blocker(), None);
}

/// Two definitions for old and for new kernels select the same nodes.
#[test]
fn an_image_for_other_kernels_does_not_count() {
    let mut world = world();
    let mut second = world.definitions.images.values().next().unwrap().clone();
    second.metadata.name = "mft-next".parse().unwrap();
    second.spec.kernels = Some(">=6.2".parse().unwrap());
    world.definitions.images.insert("mft-next".parse().unwrap(), second.clone());
    assert_eq!(world.blocker(), None);
    second.spec.kernels = Some(">=6.1".parse().unwrap());
    world.definitions.images.insert("mft-next".parse().unwrap(), second);
    assert!(world.blocker().unwrap().contains("the modules of image mft-next"));
    for image in world.definitions.images.values_mut() {
        image.spec.kernels = Some(">=6.2".parse().unwrap());
    }
    assert!(world.blocker().unwrap().starts_with("no driver image is for this node"));
}

/// A new node first gets the original's pod, then a pod of its kernel's copy.
#[test]
fn the_pod_of_a_copy_counts_and_the_originals_does_not() {
    let mut world = world();
    world.set_image("vendor.example/mft:1".to_owned());
    assert!(world.blocker().unwrap().contains("runs vendor.example/mft:1"));
    let mut copy = daemon_set("mft-copy", &image("mft", '1'));
    copy.live.as_mut().unwrap().labels.insert(COPY_OF_LABEL.to_owned(), "mft".to_owned());
    world.snapshot.pods.push(pod(&copy));
    world.snapshot.daemon_sets.push(copy);
    assert!(world.blocker().is_some(), "the original's pod is still there");
    world.snapshot.pods.remove(0);
    assert_eq!(world.blocker(), None);
}

fn changes(task: &StartupTaint, World { definitions, snapshot, contents }: &World) -> Vec<Change> {
    task.decide(&Evidence { definitions, snapshot, contents })
}

#[test]
fn only_the_startup_taint_of_nodes_with_loaded_drivers_is_removed_and_only_where_asked_for() {
    let task = StartupTaint::default();
    let mut world = world();
    assert_eq!(changes(&task, &world), [], "off by default");
    world.definitions.site.startup_taint = true;
    for key in TAINTS {
        world.snapshot.nodes[0].taints[0].key = key.to_owned();
        let untaint = Untaint { key: key.to_owned(), created: Some(time(100)) };
        let change = NodeChange { name: "n0".to_owned(), untaint: Some(untaint), ..NodeChange::default() };
        assert_eq!(changes(&task, &world), [Change::Node(change)]);
    }
    let step = changes(&task, &world)[0].step();
    assert_eq!(step, "untainted node n0");
    for change in [
        |world: &mut World| world.snapshot.read_only_nodes = true,
        |world: &mut World| world.snapshot.nodes[0].taints.clear(),
        |world: &mut World| {
            "farrier.dev/driver-not-ready2".clone_into(&mut world.snapshot.nodes[0].taints[0].key);
        },
        |world: &mut World| world.snapshot.pods[0].ready = false,
    ] {
        let mut world = world.clone();
        change(&mut world);
        assert_eq!(changes(&task, &world), []);
    }
}
