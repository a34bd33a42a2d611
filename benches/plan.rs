//! How long the plan of a large fleet takes: 10,000 nodes, 40 kernels, 8 images, all of them published and rolled out
//! in every way. Prints the milliseconds of each run, one a line; `ci/bench` makes the row of them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout, missing_docs)]

use std::{collections::BTreeMap, hint::black_box, time::Instant};

use farrier::{
    image::{Definitions, Digest, DriverImage, ImageName},
    kernel::{KernelFamily, KernelLabel, KernelRelease},
    kmod::Verdict,
    plan::{
        ARCH_LABEL, CellInputs, ClusterSnapshot, Container, DaemonSetFacts, ImageLocation, KERNEL_LABEL,
        LiveDaemonSet, Manifests, MatrixInputs, NodeAffinity, NodeFacts, OS_ID_LABEL, OS_VERSION_LABEL,
        ObjectVersion, Observed, Plan, PlanInputs, PodCount, Published, ResolvedImage, RolloutDecision,
        UpdateStrategy, matrix, plan,
    },
};
use serde_json::json;

const NODES: usize = 10_000;
const KERNELS: usize = 40;
const IMAGES: usize = 8;
const RUNS: usize = 21;

fn main() {
    let fleet = Fleet::new();
    let mut observed = Observed::default();
    let first = fleet.plan(&observed);
    assert_eq!(first.builds.len(), IMAGES * KERNELS);
    for build in &first.builds {
        let published = Published {
            digest: Digest::of(build.cell.input_hash.to_string().as_bytes()),
            input_hash: Some(build.cell.input_hash),
            exposed: None,
            verdict: Some(Verdict::Loads),
            kernel_release: Some(build.cell.target.release.to_string()),
        };
        observed.published.insert(build.cell.reference.clone(), published);
    }
    for _ in 0..RUNS {
        let start = Instant::now();
        let plan = black_box(fleet.plan(black_box(&observed)));
        println!("{:.3}", start.elapsed().as_secs_f64() * 1000.0);
        assert_eq!((plan.builds.len(), plan.up_to_date.len()), (0, IMAGES * KERNELS));
        assert_eq!(plan.rollouts.len(), IMAGES);
        let held = |decision: &RolloutDecision| matches!(decision, RolloutDecision::Hold(_));
        // Mixed kernels: the strategies `image` hold, the others do not.
        assert!(plan.rollouts.iter().any(|rollout| !held(&rollout.decision)));
    }
}

struct Fleet {
    definitions: Definitions,
    resolved: BTreeMap<ImageName, Result<ResolvedImage, String>>,
    toolchains: BTreeMap<ImageName, Result<String, String>>,
    location: ImageLocation,
    snapshot: ClusterSnapshot,
}

impl Fleet {
    fn new() -> Self {
        let images: Vec<DriverImage> = (0..IMAGES).map(image).collect();
        let names = images.iter().map(|image| image.metadata.name.clone());
        let resolved = ResolvedImage { version: "25.10-1".to_owned(), ..ResolvedImage::default() };
        let resolved = names.map(|name| (name, Ok(resolved.clone()))).collect();
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
            toolchains: [(family.metadata.name.clone(), Ok("toolchain-1".to_owned()))].into(),
            definitions: Definitions {
                images: images.into_iter().map(|image| (image.metadata.name.clone(), image)).collect(),
                families: vec![family],
                templates: [("driver".to_owned(), TEMPLATE.to_owned())].into(),
                ..Definitions::default()
            },
            resolved,
            location: ImageLocation { prefix: "registry.test/drivers".to_owned(), pullable: true },
            snapshot: ClusterSnapshot {
                nodes: (0..NODES).map(node).collect(),
                daemon_sets: (0..IMAGES).map(daemon_set).collect(),
                ..ClusterSnapshot::default()
            },
        }
    }

    /// Both phases, as in a pass.
    fn plan(&self, observed: &Observed) -> Plan {
        let matrix = matrix(&MatrixInputs {
            cells: CellInputs {
                definitions: &self.definitions,
                resolved: &self.resolved,
                toolchains: &self.toolchains,
                headers: &BTreeMap::new(),
                published: &BTreeMap::new(),
                trees: &BTreeMap::new(),
                location: &self.location,
            },
            snapshot: &self.snapshot,
            #[allow(clippy::default_trait_access, reason = "what announces is of no matter here")]
            announced: &farrier::plan::Announcements::default(),
        });
        plan(&PlanInputs {
            definitions: &self.definitions,
            matrix: &matrix,
            observed,
            snapshot: &self.snapshot,
            manifests: &Manifests::new(),
            pullable: true,
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
            fixed: None,
        }],
        node_selector: selector.clone().into(),
        affinity: NodeAffinity::Any,
        owner: None,
        live: Some(LiveDaemonSet {
            version: ObjectVersion { uid: format!("uid-{number}"), resource_version: "1".to_owned() },
            annotations: BTreeMap::new(),
            labels: labels.clone(),
            match_labels: labels.clone(),
            update: UpdateStrategy::OnDelete,
            max_unavailable: PodCount::Number(1),
            deleting: false,
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
