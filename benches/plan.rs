//! Measures the plan of a large fleet: 10,000 nodes, 40 kernels and 8 images, all of them published and rolled out with
//! several strategies. With the argument `placed`, nodes have taints, and DaemonSets have tolerations and affinities. Prints the
//! milliseconds of each run, one per line; `ci/bench` turns them into table rows.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)]

use std::{
    collections::{BTreeMap, BTreeSet},
    hint::black_box,
    time::Instant,
};

use farrier_core::{
    image::{Definitions, Digest, DriverImage, ImageReference},
    kernel::{KernelFamily, KernelLabel, KernelRelease},
    plan::{
        ARCH_LABEL, Announcements, CellInputs, ClusterSnapshot, Container, DaemonSetFacts, HeaderState,
        ImageLocation, Instance, KERNEL_LABEL, LiveDaemonSet, Manifests, Matrix, NodeFacts, OS_ID_LABEL,
        OS_VERSION_LABEL, ObjectVersion, Observed, OwnedFields, Phase, Placement, Plan, PlanInputs, PodCount,
        Published, Resolved, ResolvedImage, RolloutDecision, Taint, UpdateStrategy,
    },
};
use kmod::Verdict;
use serde_json::json;

const NODES: usize = 10_000;
const KERNELS: usize = 40;
const IMAGES: usize = 8;
const RUNS: usize = 21;

fn main() {
    let mut fleet = Fleet::new();
    if std::env::args().any(|argument| argument == "placed") {
        fleet.place();
    }
    let mut observed = Observed::default();
    let first = plan_with_answers(&fleet, &mut observed);
    assert_eq!(first.count(Phase::Missing), IMAGES * KERNELS);
    for cell in first.builds() {
        let published = Published {
            digest: Digest::of(cell.input_hash.to_string().as_bytes()),
            input_hash: Some(cell.input_hash),
            declared_hash: None,
            exposed: None,
            verdict: Some(Verdict::Loads),
            kernel_release: Some(cell.target.release.to_string()),
            platforms: BTreeMap::new(),
        };
        observed.published.insert(cell.reference.clone(), published);
    }
    // Looks up the union images: their names are known only after the images for single kernels are published.
    plan_with_answers(&fleet, &mut observed);
    for _ in 0..RUNS {
        let start = Instant::now();
        let plan = black_box(fleet.with_inputs(|inputs| {
            let observed = black_box(&observed);
            Matrix::of(inputs).compare(observed).decide(observed).plan(observed)
        }));
        println!("{:.3}", start.elapsed().as_secs_f64() * 1000.0);
        assert_eq!((plan.count(Phase::Missing), plan.count(Phase::Published)), (0, IMAGES * KERNELS));
        assert_eq!(plan.rollouts.len(), IMAGES);
        let held = |decision: &RolloutDecision| matches!(decision, RolloutDecision::Hold(_));
        // With mixed kernels the strategy `image` is on hold; the other strategies are not.
        assert!(plan.rollouts.iter().any(|rollout| !held(&rollout.decision)));
    }
}

/// Plans, answering every lookup that has no answer with "not found" and assuming that headers exist.
fn plan_with_answers(fleet: &Fleet, observed: &mut Observed) -> Plan {
    fleet.with_inputs(|inputs| {
        let matrix = Matrix::of(inputs);
        assume_absent(observed, matrix.images_to_look_up());
        let compared = matrix.compare(observed);
        observed.failures.extend(compared.failures_to_look_up().into_iter().map(|inputs| (inputs, None)));
        let headers = compared.headers_to_look_up().into_iter();
        observed.headers.extend(headers.map(|kernel| (kernel, HeaderState::Available(None))));
        let decided = compared.decide(observed);
        assume_absent(observed, decided.unions_to_look_up());
        decided.plan(observed)
    })
}

fn assume_absent(observed: &mut Observed, mut images: BTreeSet<ImageReference>) {
    images.retain(|image| !observed.knows(image));
    observed.absent.extend(images);
}

struct Fleet {
    definitions: Definitions,
    resolved: Resolved,
    location: ImageLocation,
    snapshot: ClusterSnapshot,
}

impl Fleet {
    fn new() -> Self {
        let images: Vec<DriverImage> = (0..IMAGES).map(image).collect();
        let names = images.iter().map(|image| image.metadata.name.clone());
        let resolved = ResolvedImage { version: "25.10-1".to_owned(), ..ResolvedImage::default() };
        let images_resolved = names.map(|name| (name, Ok(resolved.clone()))).collect();
        let family: KernelFamily = serde_json::from_value(json!({
            "apiVersion": "farrier.dev/v1alpha1",
            "kind": "KernelFamily",
            "metadata": {"name": "debian-12"},
            "spec": {
                "match": {"os": ["debian"]},
                "headers": {"tarball": {"path": "headers/{{release}}.tar"}},
                "toolchain": {"image": format!("registry.test/toolchain@sha256:{:0>64}", 0)},
            },
        }))
        .unwrap();
        Self {
            resolved: Resolved {
                images: images_resolved,
                toolchains: [(
                    (family.metadata.name.clone(), Vec::new(), None),
                    Ok("toolchain-1".to_owned()),
                )]
                .into(),
                ..Resolved::default()
            },
            definitions: Definitions {
                images: images.into_iter().map(|image| (image.metadata.name.clone(), image)).collect(),
                families: vec![family],
                templates: [("driver".to_owned(), TEMPLATE.to_owned())].into(),
                ..Definitions::default()
            },
            location: ImageLocation { prefix: "registry.test/drivers".to_owned(), pullable: true },
            snapshot: ClusterSnapshot {
                nodes: (0..NODES).map(|number| node(number).into()).collect(),
                daemon_sets: (0..IMAGES).map(daemon_set).collect(),
                ..ClusterSnapshot::default()
            },
        }
    }

    /// Adds taints to every third node, and tolerations and affinities to all DaemonSets. Each DaemonSet still reaches all kernels.
    fn place(&mut self) {
        let taint =
            |key: &str, value: String| Taint { key: key.to_owned(), value, effect: "NoSchedule".to_owned() };
        for (number, node) in self.snapshot.nodes.iter_mut().enumerate().filter(|(number, _)| number % 3 == 0)
        {
            node.taints.push(taint("dedicated", format!("team-{}", number % 5)));
            if number % 30 == 0 {
                node.taints.push(taint("node-role.kubernetes.io/control-plane", String::new()));
            }
        }
        for (number, daemon_set) in self.snapshot.daemon_sets.iter_mut().enumerate() {
            let requirement =
                |key: &str, values: [&str; 2]| json!({"key": key, "operator": "NotIn", "values": values});
            let zones = requirement("topology.kubernetes.io/zone", ["zone-3", "zone-4"]);
            let names = requirement("metadata.name", ["node-00001", "node-00002"]);
            let fields = if number % 2 == 0 { vec![names] } else { Vec::new() };
            let terms = json!([{"matchExpressions": [zones], "matchFields": fields}]);
            daemon_set.placement = Placement::of_pod(&json!({
                "nodeSelector": daemon_set.placement.node_selector,
                "affinity": {"nodeAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}},
                "tolerations": [{"key": "dedicated", "operator": "Equal", "value": "team-1"}],
            }));
        }
    }

    fn with_inputs<T>(&self, call: impl FnOnce(&PlanInputs<'_>) -> T) -> T {
        call(&PlanInputs {
            cells: CellInputs {
                definitions: &self.definitions,
                resolved: &self.resolved,
                location: &self.location,
            },
            snapshot: &self.snapshot,
            announced: &Announcements::default(),
            manifests: &Manifests::new(),
            instance: &Instance::default(),
            machine: None,
            has_daemon: true,
            now: jiff::Timestamp::UNIX_EPOCH,
        })
    }
}

const TEMPLATE: &str = "FROM {{toolchain}} AS modules\n\
    RUN make -C /lib/modules/{{kernel.release}}/build\n\
    FROM scratch\n\
    COPY --from=modules /out /\n";

fn image(number: usize) -> DriverImage {
    let name = format!("driver-{number}");
    let target = json!({"namespace": "drivers", "daemonSet": name, "container": "driver"});
    let mut rollout = target.as_object().unwrap().clone();
    rollout.insert("strategy".to_owned(), ["image", "per-kernel", "union", "per-kernel"][number % 4].into());
    serde_json::from_value(json!({
        "apiVersion": "farrier.dev/v1alpha1",
        "kind": "DriverImage",
        "metadata": {"name": name},
        "spec": {
            "version": "25.10-1",
            "template": "driver",
            "nodes": {"matchLabels": {"feature.node.kubernetes.io/pci-15b3.present": "true"}},
            "rollout": [rollout],
        },
    }))
    .unwrap()
}

fn node(number: usize) -> NodeFacts {
    let release: KernelRelease = format!("6.1.0-{}-amd64", number % KERNELS).parse().unwrap();
    let labels = [
        (OS_ID_LABEL, "debian".to_owned()),
        (OS_VERSION_LABEL, "12".to_owned()),
        (KERNEL_LABEL, KernelLabel::of(&release).unwrap().to_string()),
        (ARCH_LABEL, "amd64".to_owned()),
        ("feature.node.kubernetes.io/pci-15b3.present", "true".to_owned()),
        ("topology.kubernetes.io/zone", format!("zone-{}", number % 3)),
    ];
    NodeFacts {
        name: format!("node-{number:05}"),
        labels: labels.map(|(key, value)| (key.to_owned(), value)).into(),
        kernel_version: release.to_string(),
        architecture: "amd64".to_owned(),
        ..NodeFacts::default()
    }
}

fn daemon_set(number: usize) -> DaemonSetFacts {
    let name = format!("driver-{number}");
    let selector = [("feature.node.kubernetes.io/pci-15b3.present".to_owned(), "true".to_owned())];
    let labels: BTreeMap<String, String> = [("app".to_owned(), name.clone())].into();
    let container = json!({"name": "driver", "image": "registry.test/old:1"});
    DaemonSetFacts {
        namespace: "drivers".to_owned(),
        name: name.clone(),
        containers: vec![Container {
            name: "driver".to_owned(),
            image: "registry.test/old:1".to_owned(),
            why_not_editable: None,
            tagged: false,
        }],
        placement: Placement { node_selector: selector.clone().into(), ..Placement::default() },
        owner: None,
        paused: false,
        live: Some(LiveDaemonSet {
            version: ObjectVersion { uid: format!("uid-{number}"), resource_version: "1".to_owned() },
            annotations: BTreeMap::new(),
            labels: labels.clone(),
            match_labels: labels.clone(),
            update: UpdateStrategy::OnDelete,
            max_unavailable: PodCount::Number(1),
            desired: 0,
            deleting: false,
            owned: OwnedFields::default(),
            manifest: std::sync::Arc::new(json!({
                "apiVersion": "apps/v1",
                "kind": "DaemonSet",
                "metadata": {"name": name, "namespace": "drivers", "uid": format!("uid-{number}")},
                "spec": {
                    "selector": {"matchLabels": labels},
                    "updateStrategy": {"type": "OnDelete"},
                    "template": {
                        "metadata": {"labels": labels},
                        "spec": {"nodeSelector": BTreeMap::from(selector), "containers": [container]},
                    },
                },
            })),
        }),
    }
}
