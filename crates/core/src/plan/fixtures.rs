//! Small fleets and definitions for the tests of this module.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use super::{
    Announcements, Cell, CellInputs, Change, ClusterSnapshot, Container, CowArc, DaemonSetChange,
    DaemonSetFacts, HeaderState, ImageLocation, Instance, KERNEL_LABEL, LiveDaemonSet, Manifests, Matrix,
    NodeFacts, OS_ID_LABEL, OS_VERSION_LABEL, ObjectVersion, Observed, Outcome, OwnedFields, Placement, Plan,
    PlanInputs, PlannedCell, PodCount, PodFacts, Published, Resolved, ResolvedImage, ResourceChange,
    ResourceFacts, SkipReason, TrackedKernel, UpdateStrategy,
};
use crate::{
    image::{
        Definitions, Digest, DriverImage, ImageName, ImageReference, InputHash, Need, OperatorResource,
        UnknownPolicy,
    },
    kernel::{Architecture, KernelFamily, KernelLabel, KernelTarget},
    kmod::Verdict,
};

pub(super) const K47: &str = "6.1.0-47-amd64";
pub(super) const K48: &str = "6.1.0-48-amd64";

/// All inputs of a plan, owned.
#[derive(Clone, Debug)]
pub(super) struct World {
    pub(super) definitions: Definitions,
    pub(super) resolved: Resolved,
    pub(super) location: ImageLocation,
    pub(super) snapshot: ClusterSnapshot,
    pub(super) tracked: BTreeSet<TrackedKernel>,
    pub(super) observed: Observed,
    pub(super) manifests: Manifests,
    pub(super) instance: Instance,
    pub(super) machine: Option<Architecture>,
    pub(super) has_daemon: bool,
    pub(super) now: jiff::Timestamp,
}

/// Lookups of each round.
pub(super) struct Rounds {
    pub(super) images: BTreeSet<ImageReference>,
    pub(super) conflicts: BTreeSet<ImageReference>,
    pub(super) failures: BTreeSet<InputHash>,
    pub(super) headers: BTreeSet<KernelTarget>,
    pub(super) signatures: BTreeSet<ImageReference>,
    pub(super) unions: BTreeSet<ImageReference>,
    pub(super) union_signatures: BTreeSet<ImageReference>,
}

impl Observed {
    /// Adds names that the registry does not have, unless they are known.
    pub(super) fn assume_absent(&mut self, images: &BTreeSet<ImageReference>) {
        let unknown: Vec<_> = images.iter().filter(|image| !self.knows(image)).cloned().collect();
        self.absent.extend(unknown);
    }
}

impl World {
    /// Creates one image `mft` for nodes with `pci=yes`, rolled out to DaemonSet `kube-system/mft`, and nodes `n0`,
    /// `n1`... with these kernels.
    pub(super) fn new(releases: &[&str]) -> Self {
        let nodes = releases.iter().enumerate().map(|(n, release)| node(&format!("n{n}"), release)).collect();
        Self {
            definitions: Definitions {
                images: [image("mft")].map(|image| (image.metadata.name.clone(), image)).into(),
                families: vec![family()],
                templates: [("mft".to_owned(), TEMPLATE.to_owned())].into(),
                ..Definitions::default()
            },
            resolved: Resolved {
                images: [(name("mft"), Ok(resolved()))].into(),
                toolchains: [((name("debian-12"), vec![], None), Ok("toolchain-1".to_owned()))].into(),
                ..Resolved::default()
            },
            location: ImageLocation { prefix: "registry.test/drivers".to_owned(), pullable: true },
            snapshot: ClusterSnapshot {
                nodes,
                daemon_sets: vec![daemon_set("mft")],
                ..ClusterSnapshot::default()
            },
            tracked: BTreeSet::new(),
            observed: Observed::default(),
            manifests: Manifests::new(),
            instance: Instance::default(),
            machine: None,
            has_daemon: true,
            now: jiff::Timestamp::UNIX_EPOCH,
        }
    }

    /// Creates [`World::new`] with a chain in addition to `mft`: `peer` is compiled against `mofed` and `gpu`.
    pub(super) fn chain(releases: &[&str]) -> Self {
        let mut world = Self::new(releases);
        for (image, needs) in [("mofed", &[][..]), ("gpu", &[]), ("peer", &["mofed", "gpu"])] {
            world.add(image, needs);
        }
        world
    }

    /// Adds an image for the same nodes as `mft`, with exposed headers and a DaemonSet.
    pub(super) fn add(&mut self, new: &str, needs: &[&str]) {
        let mut added = image(new);
        added.spec.needs = needs.iter().map(|need| Need::Image(name(need))).collect();
        added.spec.exposes = vec![format!("/usr/src/{new}").parse().unwrap()];
        self.definitions.images.insert(name(new), added);
        self.resolved.images.insert(name(new), Ok(resolved()));
        self.snapshot.daemon_sets.push(daemon_set(new));
    }

    pub(super) fn cell_inputs(&self) -> CellInputs<'_> {
        CellInputs { definitions: &self.definitions, resolved: &self.resolved, location: &self.location }
    }

    pub(super) fn announcements(&self) -> Announcements {
        Announcements::of(&self.definitions, &self.snapshot, self.tracked.clone())
    }

    /// Calls a function with the inputs of the plan.
    pub(super) fn with_inputs<T>(&self, call: impl FnOnce(&PlanInputs<'_>) -> T) -> T {
        call(&PlanInputs {
            cells: self.cell_inputs(),
            snapshot: &self.snapshot,
            announced: &self.announcements(),
            manifests: &self.manifests,
            instance: &self.instance,
            machine: self.machine,
            has_daemon: self.has_daemon,
            now: self.now,
        })
    }

    /// Runs all rounds. Images that the world does not contain are absent, failures did not happen, and headers exist.
    /// Signatures that the world does not contain stay without an answer. Returns the plan and the lookups of each round.
    pub(super) fn rounds(&self) -> (Plan, Rounds) {
        let mut observed = self.observed.clone();
        self.with_inputs(|inputs| {
            let matrix = Matrix::of(inputs);
            let images = matrix.images_to_look_up();
            observed.assume_absent(&images);
            let compared = matrix.compare(&observed);
            let conflicts = compared.conflicts_to_look_up(&observed);
            let failures = compared.failures_to_look_up();
            let headers = compared.headers_to_look_up();
            let signatures = compared.signatures_to_look_up();
            for inputs in &failures {
                observed.failures.entry(*inputs).or_insert(None);
            }
            for kernel in &headers {
                observed.headers.entry(kernel.clone()).or_insert(HeaderState::Available(None));
            }
            let decided = compared.decide(&observed);
            let unions = decided.unions_to_look_up();
            observed.assume_absent(&unions);
            let union_signatures = decided.union_signatures_to_look_up(&observed);
            let rounds =
                Rounds { images, conflicts, failures, headers, signatures, unions, union_signatures };
            (decided.plan(&observed), rounds)
        })
    }

    pub(super) fn plan(&self) -> Plan {
        self.rounds().0
    }

    /// Returns the cells of the plan whose inputs are known.
    pub(super) fn cells(&self) -> Vec<Arc<Cell>> {
        self.plan().cells.iter().filter_map(|planned| planned.outcome.cell().cloned()).collect()
    }

    /// Returns the images that are called for and cannot be built, with the reasons.
    pub(super) fn skipped(&self) -> Vec<(PlannedCell, SkipReason)> {
        let skipped = |planned: PlannedCell| match planned.outcome.clone() {
            Outcome::Skipped { why } => Some((planned, why)),
            _ => None,
        };
        self.plan().cells.into_iter().filter_map(skipped).collect()
    }

    /// Announces a kernel of Debian 12 for amd64 in the configuration.
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
        for cell in self.cells() {
            self.publish_cell(&cell, verdict);
        }
    }

    /// Publishes a cell as it would be built now. Its exposed headers depend only on its version and kernel.
    pub(super) fn publish_cell(&mut self, cell: &Cell, verdict: Verdict) {
        let Cell { image, version, target, .. } = cell;
        let exposes = !self.definitions.images[image].spec.exposes.is_empty();
        let published = Published {
            digest: Digest::of(cell.input_hash.to_string().as_bytes()),
            input_hash: Some(cell.input_hash),
            declared_hash: (cell.declared_hash != cell.input_hash).then_some(cell.declared_hash),
            exposed: exposes.then(|| Digest::of(format!("{image} {version} {target}").as_bytes())),
            verdict: Some(verdict),
            kernel_release: Some(target.release.to_string()),
            platforms: BTreeMap::new(),
        };
        for reference in cell.references() {
            self.observed.published.insert(reference.clone(), published.clone());
        }
    }
}

impl World {
    /// Creates [`World::new`] with the DaemonSet in a live cluster.
    pub(super) fn live(releases: &[&str]) -> Self {
        let mut world = Self::new(releases);
        world.snapshot.daemon_sets = vec![live_daemon_set("mft")];
        world
    }

    /// Returns the image of a container of the first DaemonSet.
    pub(super) fn image_of(&self, container: &str) -> &str {
        let found = self.snapshot.daemon_sets[0].containers.iter().find(|found| found.name == container);
        &found.unwrap().image
    }

    /// Sets the image of the first DaemonSet's first container, as another writer would.
    pub(super) fn set_by_another(&mut self, image: &str) {
        let daemon_set = &mut self.snapshot.daemon_sets[0];
        image.clone_into(&mut daemon_set.containers[0].image);
        let live = daemon_set.live.as_mut().unwrap();
        live.owned.images.remove(&daemon_set.containers[0].name);
        touch(&mut live.version);
    }

    /// Applies changes of DaemonSets and resources as an API server would; `Err` where the object differs from the
    /// state that the change was decided from. Fields that a change omits are given up, but stay: the adapter's tests
    /// cover their removal.
    pub(super) fn apply(&mut self, change: &Change) -> Result<(), String> {
        match change {
            Change::DaemonSet(change) => self.apply_to_daemon_set(change),
            Change::Resource(change) => self.apply_to_resource(change),
            other => panic!("not simulated: {other:?}"),
        }
    }

    fn apply_to_daemon_set(&mut self, change: &DaemonSetChange) -> Result<(), String> {
        let found = self.snapshot.daemon_sets.iter_mut().find(|found| found.name == change.name);
        let found = found.ok_or("gone")?;
        let live = found.live.as_mut().ok_or("not live")?;
        if change.version.as_ref() != Some(&live.version) {
            return Err("another version".to_owned());
        }
        for container in &mut found.containers {
            if let Some(expected) = change.expected.get(&container.name) {
                assert_eq!(*expected, container.image, "a plan expects the value that it saw");
            }
            if let Some(image) = change.images.get(&container.name) {
                container.image.clone_from(image);
            }
        }
        live.annotations.clone_from(&change.annotations);
        let images = change.images.keys().cloned().collect();
        live.owned = OwnedFields { images, affinity: change.affinity.is_some() };
        touch(&mut live.version);
        Ok(())
    }

    fn apply_to_resource(&mut self, change: &ResourceChange) -> Result<(), String> {
        let same = |found: &&mut ResourceFacts| found.kind == change.kind && found.name == change.name;
        let found = self.snapshot.resources.iter_mut().find(same).ok_or("gone")?;
        if change.version != found.version {
            return Err("another version".to_owned());
        }
        let mut spec = (*found.spec).clone();
        merge(&mut spec, &change.spec);
        found.spec = spec.into();
        let path = change.kind.driver_path().iter();
        let fields = path.fold(&change.spec, |fields, key| &fields[*key]).as_object();
        found.owned = fields.into_iter().flatten().map(|(key, _)| key.clone()).collect();
        found.annotations.clone_from(&change.annotations);
        found.version.as_mut().map(touch);
        Ok(())
    }

    /// Gives the node a new pod of the first DaemonSet, with the DaemonSet's current image.
    pub(super) fn run_pod(&mut self, node: &str, ready: bool) {
        let mut pod = pod(&self.snapshot.daemon_sets[0], node, ready);
        pod.created = Some(self.now);
        self.snapshot.pods.retain(|found| found.node != node);
        self.snapshot.pods.push(pod);
    }
}

fn touch(version: &mut ObjectVersion) {
    let number: u64 = version.resource_version.parse().unwrap();
    version.resource_version = (number + 1).to_string();
}

fn merge(into: &mut serde_json::Value, from: &serde_json::Value) {
    match (into, from) {
        (serde_json::Value::Object(into), serde_json::Value::Object(from)) => {
            for (key, value) in from {
                merge(into.entry(key.clone()).or_insert(serde_json::Value::Null), value);
            }
        }
        (into, from) => *into = from.clone(),
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

pub(super) fn node(name: &str, release: &str) -> CowArc<NodeFacts> {
    let label = release.parse().ok().and_then(|release| KernelLabel::of(&release));
    let label = label.map(|label| label.to_string()).unwrap_or_default();
    let node = NodeFacts {
        name: name.to_owned(),
        labels: [(OS_ID_LABEL, "debian"), (OS_VERSION_LABEL, "12"), (KERNEL_LABEL, &label), ("pci", "yes")]
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .into(),
        kernel_version: release.to_owned(),
        architecture: "amd64".to_owned(),
        has_hardware_labels: true,
        ..NodeFacts::default()
    };
    node.into()
}

pub(super) fn daemon_set(name: &str) -> DaemonSetFacts {
    DaemonSetFacts {
        namespace: "kube-system".to_owned(),
        name: name.to_owned(),
        containers: vec![Container {
            name: "driver".to_owned(),
            image: "registry.test/old:1".to_owned(),
            why_not_editable: None,
            tagged: false,
        }],
        placement: Placement {
            node_selector: [("pci".to_owned(), "yes".to_owned())].into(),
            ..Placement::default()
        },
        owner: None,
        paused: false,
        live: None,
    }
}

/// Returns [`daemon_set`] in a live cluster.
pub(super) fn live_daemon_set(name: &str) -> DaemonSetFacts {
    let live = LiveDaemonSet {
        version: ObjectVersion { uid: format!("uid-of-{name}"), resource_version: "1".to_owned() },
        annotations: BTreeMap::new(),
        labels: BTreeMap::new(),
        match_labels: [("app".to_owned(), name.to_owned())].into(),
        update: UpdateStrategy::RollingUpdate,
        max_unavailable: PodCount::Number(1),
        desired: 0,
        deleting: false,
        owned: OwnedFields::default(),
        manifest: serde_json::json!({}).into(),
    };
    DaemonSetFacts { live: Some(live), ..daemon_set(name) }
}

/// Returns a pod of a live DaemonSet, with the DaemonSet's images.
pub(super) fn pod(daemon_set: &DaemonSetFacts, node: &str, ready: bool) -> PodFacts {
    let images = daemon_set.containers.iter().map(|found| (found.name.clone(), found.image.clone()));
    PodFacts {
        namespace: daemon_set.namespace.clone(),
        name: format!("{}-{node}", daemon_set.name),
        version: ObjectVersion { uid: format!("uid-of-{node}"), resource_version: "1".to_owned() },
        daemon_set: daemon_set.live.as_ref().unwrap().version.uid.clone(),
        node: node.to_owned(),
        bound: true,
        probed: Vec::new(),
        pull_secrets: 0,
        images: images.collect(),
        ready,
        stable_since: ready.then_some(jiff::Timestamp::MIN),
        created: None,
        deleting: false,
        messages: if ready {
            Vec::new()
        } else {
            vec!["driver: CrashLoopBackOff: no such device".to_owned()]
        },
        pull_failure: None,
    }
}

/// Returns an operator's resource.
pub(super) fn resource(kind: OperatorResource, name: &str, spec: serde_json::Value) -> ResourceFacts {
    ResourceFacts {
        kind,
        name: name.to_owned(),
        version: Some(ObjectVersion { uid: format!("uid-of-{name}"), resource_version: "1".to_owned() }),
        why_not_editable: BTreeMap::new(),
        annotations: BTreeMap::new(),
        owned: BTreeSet::new(),
        created: None,
        operator_error: None,
        spec: spec.into(),
    }
}
