//! Pure: small fleets and definitions for the tests of this module.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    Announcements, CellInputs, ClusterSnapshot, Container, DaemonSetFacts, ImageLocation, KERNEL_LABEL,
    Manifests, Matrix, MatrixInputs, NodeAffinity, NodeFacts, OS_ID_LABEL, OS_VERSION_LABEL, Observed, Plan,
    PlanInputs, Published, ResolvedImage, TrackedKernel, matrix, plan,
};
use crate::{
    image::{Definitions, Digest, DriverImage, ImageName, UnknownPolicy},
    kernel::{KernelFamily, KernelLabel, KernelTarget},
    kmod::Verdict,
};

pub(super) const K47: &str = "6.1.0-47-amd64";
pub(super) const K48: &str = "6.1.0-48-amd64";

/// Everything that a plan is made from, owned.
#[derive(Clone, Debug)]
pub(super) struct World {
    pub(super) definitions: Definitions,
    pub(super) resolved: BTreeMap<ImageName, Result<ResolvedImage, String>>,
    pub(super) toolchains: BTreeMap<ImageName, Result<String, String>>,
    pub(super) headers: BTreeMap<KernelTarget, String>,
    pub(super) location: ImageLocation,
    pub(super) snapshot: ClusterSnapshot,
    pub(super) tracked: BTreeSet<TrackedKernel>,
    pub(super) observed: Observed,
    pub(super) manifests: Manifests,
    pub(super) now: jiff::Timestamp,
}

impl World {
    /// One image `mft` for nodes with `pci=yes`, rolled out to DaemonSet `kube-system/mft`, and these
    /// nodes, named `n0`, `n1`...
    pub(super) fn new(releases: &[&str]) -> Self {
        let nodes = releases.iter().enumerate().map(|(n, release)| node(&format!("n{n}"), release)).collect();
        Self {
            definitions: Definitions {
                images: [image("mft")].map(|image| (image.metadata.name.clone(), image)).into(),
                families: vec![family()],
                templates: [("mft".to_owned(), TEMPLATE.to_owned())].into(),
                ..Definitions::default()
            },
            resolved: [(name("mft"), Ok(resolved()))].into(),
            toolchains: [(name("debian-12"), Ok("toolchain-1".to_owned()))].into(),
            headers: BTreeMap::new(),
            location: ImageLocation { prefix: "registry.test/drivers".to_owned(), pullable: true },
            snapshot: ClusterSnapshot {
                nodes,
                daemon_sets: vec![daemon_set("mft")],
                ..ClusterSnapshot::default()
            },
            tracked: BTreeSet::new(),
            observed: Observed::default(),
            manifests: Manifests::new(),
            now: jiff::Timestamp::UNIX_EPOCH,
        }
    }

    pub(super) fn cell_inputs(&self) -> CellInputs<'_> {
        CellInputs {
            definitions: &self.definitions,
            resolved: &self.resolved,
            toolchains: &self.toolchains,
            headers: &self.headers,
            location: &self.location,
        }
    }

    pub(super) fn matrix(&self) -> Matrix {
        matrix(&MatrixInputs {
            cells: self.cell_inputs(),
            snapshot: &self.snapshot,
            announced: &Announcements::of(&self.definitions, &self.snapshot, self.tracked.clone()),
        })
    }

    pub(super) fn plan(&self) -> Plan {
        let matrix = self.matrix();
        plan(&PlanInputs {
            definitions: &self.definitions,
            matrix: &matrix,
            observed: &self.observed,
            snapshot: &self.snapshot,
            manifests: &self.manifests,
            pullable: self.location.pullable,
            now: self.now,
        })
    }

    /// Announces a kernel of debian 12 for amd64 in the configuration.
    pub(super) fn announce(&mut self, release: &str) {
        let list = serde_json::from_value(serde_json::json!({
            "apiVersion": "farrier.dev/v1alpha1",
            "kind": "AnnouncedKernels",
            "metadata": {"name": "next"},
            "spec": {"kernels": [{"os": "debian", "osVersion": "12", "release": release, "arch": "amd64"}]},
        }));
        self.definitions.announced.insert(name("next"), list.unwrap());
    }

    pub(super) fn image(&mut self, image: &str) -> &mut DriverImage {
        self.definitions.images.get_mut(&name(image)).unwrap()
    }

    pub(super) fn deny_unknown(&mut self) {
        self.image("mft").spec.check.unknown = UnknownPolicy::Deny;
    }

    /// Publishes every cell as it would be built now.
    pub(super) fn publish(&mut self, verdict: Verdict) {
        for cell in self.matrix().cells {
            let published = Published {
                digest: Digest::of(cell.input_hash.to_string().as_bytes()),
                input_hash: Some(cell.input_hash),
                verdict: Some(verdict),
                kernel_release: Some(cell.target.release.to_string()),
            };
            for reference in cell.references() {
                self.observed.published.insert(reference.clone(), published.clone());
            }
        }
    }
}

const TEMPLATE: &str = "FROM {{toolchain}} AS modules\n\
    RUN make -C /lib/modules/{{kernel.release}}/build\n\
    FROM scratch\n\
    COPY --from=modules /out /\n";

pub(super) fn name(text: &str) -> ImageName {
    text.parse().unwrap()
}

pub(super) fn image(name: &str) -> DriverImage {
    serde_json::from_value(serde_json::json!({
        "apiVersion": "farrier.dev/v1alpha1",
        "kind": "DriverImage",
        "metadata": {"name": name},
        "spec": {
            "version": {"source": "src"},
            "template": "mft",
            "sources": [{"name": "src", "from": {"path": {"path": "src"}}}],
            "nodes": {"matchLabels": {"pci": "yes"}},
            "modules": ["mod"],
            "rollout": [{
                "strategy": "image", "namespace": "kube-system", "daemonSet": name, "container": "driver",
            }],
        },
    }))
    .unwrap()
}

pub(super) fn resolved() -> ResolvedImage {
    ResolvedImage {
        version: "4.33.0".to_owned(),
        sources: [("src".to_owned(), "sha256:1".to_owned())].into(),
        ..ResolvedImage::default()
    }
}

fn family() -> KernelFamily {
    serde_json::from_value(serde_json::json!({
        "apiVersion": "farrier.dev/v1alpha1",
        "kind": "KernelFamily",
        "metadata": {"name": "debian-12"},
        "spec": {
            "match": {"os": ["debian"]},
            "headers": {"tarball": {"path": "headers/{{release}}.tar"}},
            "toolchain": {"image": format!("registry.test/toolchain@sha256:{:0>64}", 0)},
        },
    }))
    .unwrap()
}

pub(super) fn node(name: &str, release: &str) -> NodeFacts {
    let label = release.parse().ok().and_then(|release| KernelLabel::of(&release));
    let label = label.map(|label| label.to_string()).unwrap_or_default();
    NodeFacts {
        name: name.to_owned(),
        labels: [(OS_ID_LABEL, "debian"), (OS_VERSION_LABEL, "12"), (KERNEL_LABEL, &label), ("pci", "yes")]
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .into(),
        kernel_version: release.to_owned(),
        architecture: "amd64".to_owned(),
        ..NodeFacts::default()
    }
}

pub(super) fn daemon_set(name: &str) -> DaemonSetFacts {
    DaemonSetFacts {
        namespace: "kube-system".to_owned(),
        name: name.to_owned(),
        containers: vec![Container {
            name: "driver".to_owned(),
            image: "registry.test/old:1".to_owned(),
            fixed: None,
        }],
        node_selector: [("pci".to_owned(), "yes".to_owned())].into(),
        affinity: NodeAffinity::Any,
        owner: None,
        live: None,
    }
}
