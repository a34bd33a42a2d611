//! A simulated cluster, small enough to play through every step of a rollout: nodes, DaemonSets with their controller,
//! pods.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use crate::{
    kmod::Verdict,
    plan::{
        ARCH_LABEL, Change, Container, DaemonSetFacts, ImageContents, LiveDaemonSet, NodeAffinity, NodeFacts,
        NodeReach, ObjectVersion, OwnedFields, Placement, PlannedRollout, PlannedUpgrade, PodCount, PodFacts,
        PullFailure, Requirement, SelectorTerm, UpdateStrategy,
        fixtures::{World, node},
    },
};

pub(super) const OLD: &str = "registry.test/old:1";

/// Simulated cluster, with the world that plans for it.
pub(super) struct Cluster {
    pub(super) world: World,
    objects: BTreeMap<String, Value>,
    pods: BTreeMap<(String, String), PodFacts>,
    /// Kernels that each image has modules for.
    pub(super) modules: BTreeMap<String, BTreeSet<String>>,
    /// Images whose pods never become ready, whatever their content.
    pub(super) broken: BTreeSet<String>,
    /// Failure to pull the image of each pod that is not ready.
    pub(super) pull_failure: Option<PullFailure>,
    /// Registry that a webhook writes into the images of new and changed copies.
    pub(super) mirror: Option<&'static str>,
    /// Nodes with a taint that no DaemonSet tolerates.
    pub(super) tainted: BTreeSet<String>,
    /// Number of nodes on which the original reports that its pods should run.
    pub(super) desired: usize,
    counter: u64,
    pub(super) writes: usize,
}

impl Cluster {
    /// Creates DaemonSet `kube-system/mft` over nodes with these kernels. Its old image has modules for `old`.
    pub(super) fn new(releases: &[&str], old: &[&str]) -> Self {
        let mut world = World::new(releases);
        world.image("mft").spec.rollout = vec![
            serde_json::from_value(json!({
                "strategy": "per-kernel", "namespace": "kube-system", "daemonSet": "mft", "container": "driver",
                "deadline": "10m", "retireAfter": "1d",
            }))
            .unwrap(),
        ];
        for node in &mut world.snapshot.nodes {
            node.labels.insert(ARCH_LABEL.to_owned(), "amd64".to_owned());
        }
        let mut cluster = Self {
            world,
            objects: BTreeMap::new(),
            pods: BTreeMap::new(),
            modules: [(OLD.to_owned(), old.iter().map(|k| (*k).to_owned()).collect())].into(),
            broken: BTreeSet::new(),
            pull_failure: None,
            mirror: None,
            tainted: BTreeSet::new(),
            desired: 0,
            counter: 0,
            writes: 0,
        };
        let original = json!({
            "apiVersion": "apps/v1", "kind": "DaemonSet",
            "metadata": {"namespace": "kube-system", "name": "mft", "uid": "original", "annotations": {}},
            "spec": {
                "selector": {"matchLabels": {"app": "mft"}},
                "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1, "maxSurge": 0}},
                "template": {
                    "metadata": {"labels": {"app": "mft"}, "creationTimestamp": null},
                    "spec": {
                        "nodeSelector": {"pci": "yes"},
                        "containers": [{"name": "driver", "image": OLD}],
                    },
                },
            },
        });
        cluster.objects.insert("mft".to_owned(), original);
        cluster.settle();
        cluster
    }

    /// Creates the same cluster with an upgrade, so that its nodes get their driver in order.
    pub(super) fn in_order(releases: &[&str], old: &[&str], upgrade: &Value) -> Self {
        let mut cluster = Self::new(releases, old);
        cluster.world.now = "2026-07-01T12:00:00Z".parse().unwrap();
        let rollout = &mut cluster.world.image("mft").spec.rollout[0];
        let mut spec = serde_json::to_value(&*rollout).unwrap();
        spec["upgrade"] = upgrade.clone();
        *rollout = serde_json::from_value(spec).unwrap();
        cluster.object("mft").unwrap()["spec"]["updateStrategy"] = json!({"type": "OnDelete"});
        cluster
    }

    /// Plans and applies all changes until nothing is left to do. Asserts that at most one node is cordoned at a time.
    pub(super) fn upgrade(&mut self) -> PlannedRollout {
        let mut quiet = 0;
        for _ in 0..2000 {
            let planned = self.plan();
            let steps = planned.upgrade.iter().flat_map(PlannedUpgrade::changes);
            let changes: Vec<Change> = planned.changes.iter().chain(steps).cloned().collect();
            quiet = if changes.is_empty() { quiet + 1 } else { 0 };
            if quiet == 100 {
                return planned;
            }
            for change in &changes {
                self.apply(change);
            }
            self.settle();
            self.pass_time(10);
            let taken = self.world.snapshot.nodes.iter().filter(|node| node.unschedulable);
            assert!(taken.count() <= 1, "{:?}", planned.upgrade);
        }
        panic!("no end of changes: {:?}", self.plan());
    }

    /// Returns the image of each node's pod.
    pub(super) fn running(&self) -> BTreeMap<&str, &str> {
        self.pods.values().map(|pod| (pod.node.as_str(), pod.images["driver"].as_str())).collect()
    }

    /// Gives a node another kernel, or adds a new node.
    pub(super) fn set_kernel(&mut self, name: &str, release: &str) {
        let mut fresh = node(name, release);
        fresh.labels.insert(ARCH_LABEL.to_owned(), "amd64".to_owned());
        match self.world.snapshot.nodes.iter_mut().find(|node| node.name == name) {
            Some(old) => {
                let mine = |key: &String| key.starts_with("farrier.dev/");
                fresh.labels.extend(old.labels.clone().into_iter().filter(|(key, _)| mine(key)));
                *old = fresh;
            }
            None => self.world.snapshot.nodes.push(fresh),
        }
    }

    pub(super) fn object(&mut self, name: &str) -> Option<&mut Value> {
        self.objects.get_mut(name)
    }

    pub(super) fn copies(&self) -> Vec<&str> {
        self.objects.keys().map(String::as_str).filter(|name| *name != "mft").collect()
    }

    /// Publishes every image, and records its modules.
    pub(super) fn publish(&mut self) {
        self.refresh();
        self.world.publish(Verdict::Loads);
        for (reference, published) in &self.world.observed.published {
            let kernel = published.kernel_release.clone().unwrap();
            let pinned = format!("{}@{}", reference.repository, published.digest);
            self.modules.entry(pinned).or_default().insert(kernel);
        }
    }

    /// Updates the snapshot to what the API server would return now.
    fn refresh(&mut self) {
        self.world.snapshot.daemon_sets = self.objects.values().map(facts).collect();
        let mut sets = self.world.snapshot.daemon_sets.iter_mut();
        let original = sets.find(|set| set.name == "mft").and_then(|set| set.live.as_mut());
        original.unwrap().desired = self.desired;
        self.world.snapshot.pods = self.pods.values().cloned().collect();
        self.world.observed.contents = self
            .modules
            .iter()
            .map(|(image, kernels)| {
                (image.clone(), ImageContents { kernels: kernels.clone(), ..ImageContents::default() })
            })
            .collect();
    }

    pub(super) fn plan(&mut self) -> PlannedRollout {
        self.refresh();
        self.world.plan().rollouts.swap_remove(0)
    }

    /// Returns the images of the DaemonSets that select a node.
    pub(super) fn selected(&self, node: &NodeFacts) -> Vec<String> {
        let sets = self.objects.values().map(facts);
        sets.filter(|set| set.placement.reach(node, false) == NodeReach::Reached)
            .map(|set| set.containers[0].image.clone())
            .collect()
    }

    pub(super) fn all_selected(&self) -> BTreeMap<String, Vec<String>> {
        self.world.snapshot.nodes.iter().map(|node| (node.name.clone(), self.selected(node))).collect()
    }

    pub(super) fn has_modules(&self, image: &str, node: &str) -> bool {
        let found = self.world.snapshot.nodes.iter().find(|found| found.name == node).unwrap();
        self.modules.get(image).is_some_and(|kernels| kernels.contains(&found.kernel_version))
    }

    /// Applies one change, as the API server would.
    pub(super) fn apply(&mut self, change: &Change) {
        self.counter += 1;
        self.writes += 1;
        match change {
            Change::DaemonSet(change) => {
                assert!(change.images.is_empty(), "the original keeps its image");
                let object = self.objects.get_mut(&change.name).unwrap();
                object["metadata"]["annotations"] = json!(change.annotations);
                let pod = &mut object["spec"]["template"]["spec"];
                match &change.affinity {
                    None | Some(NodeAffinity::Any) => drop(pod.as_object_mut().unwrap().remove("affinity")),
                    Some(affinity) => pod["affinity"] = affinity_json(affinity),
                }
            }
            Change::Copy(copy) => {
                assert_eq!(copy.version.is_some(), self.objects.contains_key(&copy.name), "{}", copy.name);
                let mut object = (*copy.manifest).clone();
                let uid = self.objects.get(&copy.name).map(|old| old["metadata"]["uid"].clone());
                object["metadata"]["uid"] = uid.unwrap_or_else(|| format!("uid-{}", self.counter).into());
                if let Some(mirror) = self.mirror {
                    let image = &mut object["spec"]["template"]["spec"]["containers"][0]["image"];
                    *image = image.as_str().unwrap().replace("registry.test", mirror).into();
                }
                self.objects.insert(copy.name.clone(), object);
            }
            Change::Retire(retirement) => drop(self.objects.remove(&retirement.name).unwrap()),
            Change::Node(change) => {
                let nodes = &mut self.world.snapshot.nodes;
                let node = nodes.iter_mut().find(|node| node.name == change.name).unwrap();
                node.unschedulable = change.cordon.unwrap_or(node.unschedulable);
                let node = &mut **node;
                for (changes, found) in
                    [(&change.labels, &mut node.labels), (&change.annotations, &mut node.annotations)]
                {
                    for (key, value) in changes {
                        match value {
                            Some(value) => drop(found.insert(key.clone(), value.clone())),
                            None => drop(found.remove(key)),
                        }
                    }
                }
            }
            Change::Restart(restart) => self.pods.retain(|_, pod| pod.version.uid != restart.uid),
            Change::Resource(_) | Change::Check(_) => {
                panic!("not a change of this strategy: {change:?}")
            }
        }
    }

    /// Lets the DaemonSet controller and the kubelets catch up.
    pub(super) fn settle(&mut self) {
        let sets: Vec<DaemonSetFacts> = self.objects.values().map(facts).collect();
        let mut pods = BTreeMap::new();
        for node in self.world.snapshot.nodes.iter().filter(|node| !self.tainted.contains(&node.name)) {
            for set in sets.iter().filter(|set| set.placement.reach(node, false) == NodeReach::Reached) {
                let LiveDaemonSet { version: ObjectVersion { uid, .. }, update, .. } =
                    set.live.as_ref().unwrap();
                let key = (uid.clone(), node.name.clone());
                let kept = self.pods.get(&key).filter(|_| *update == UpdateStrategy::OnDelete);
                let own = || set.containers.iter().map(|found| (found.name.clone(), found.image.clone()));
                let images = kept.map_or_else(|| own().collect(), |kept| kept.images.clone());
                let has_modules = |image: &String| {
                    self.modules.get(image).is_some_and(|kernels| kernels.contains(&node.kernel_version))
                };
                let works = !node.not_ready
                    && images.values().all(|image| !self.broken.contains(image) && has_modules(image));
                let old = self.pods.get(&key).filter(|old| old.images == images);
                let pod = PodFacts {
                    namespace: "kube-system".to_owned(),
                    name: format!("{}-{}", set.name, node.name),
                    version: ObjectVersion {
                        uid: format!("{uid}-{}", node.name),
                        resource_version: String::new(),
                    },
                    daemon_set: uid.clone(),
                    node: node.name.clone(),
                    bound: true,
                    probed: Vec::new(),
                    pull_secrets: 0,
                    ready: works,
                    stable_since: works.then_some(jiff::Timestamp::MIN),
                    created: Some(old.and_then(|old| old.created).unwrap_or(self.world.now)),
                    images,
                    deleting: false,
                    messages: if works { Vec::new() } else { vec!["driver: Error: exit code 1".to_owned()] },
                    pull_failure: self.pull_failure.filter(|_| !works),
                };
                pods.insert(key, pod);
            }
        }
        self.pods = pods;
    }

    pub(super) fn pass_time(&mut self, seconds: i64) {
        self.world.now += jiff::SignedDuration::from_secs(seconds);
    }

    /// Plans and applies all changes until there are none; returns the last plan. Panics if the changes do not end.
    pub(super) fn converge(&mut self) -> PlannedRollout {
        for _ in 0..200 {
            let planned = self.plan();
            if planned.changes.is_empty() {
                return planned;
            }
            for change in &planned.changes {
                self.apply(change);
            }
            self.settle();
            self.pass_time(1);
        }
        panic!("no end of changes: {:?}", self.plan().decision);
    }
}

/// Reads the facts from a simulated object.
fn facts(object: &Value) -> DaemonSetFacts {
    let strings = |value: &Value| -> BTreeMap<String, String> {
        let map = value.as_object().into_iter().flatten();
        map.map(|(key, value)| (key.clone(), value.as_str().unwrap().to_owned())).collect()
    };
    let (metadata, pod) = (&object["metadata"], &object["spec"]["template"]["spec"]);
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let container = |found: &Value| Container {
        name: text(&found["name"]),
        image: text(&found["image"]),
        why_not_editable: None,
        tagged: false,
    };
    DaemonSetFacts {
        namespace: text(&metadata["namespace"]),
        name: text(&metadata["name"]),
        containers: pod["containers"].as_array().into_iter().flatten().map(container).collect(),
        placement: Placement::of_pod(pod),
        owner: None,
        paused: false,
        live: Some(LiveDaemonSet {
            version: ObjectVersion { uid: text(&metadata["uid"]), resource_version: String::new() },
            annotations: strings(&metadata["annotations"]),
            labels: strings(&metadata["labels"]),
            match_labels: strings(&object["spec"]["selector"]["matchLabels"]),
            update: match object["spec"]["updateStrategy"]["type"].as_str() {
                Some("OnDelete") => UpdateStrategy::OnDelete,
                _ => UpdateStrategy::RollingUpdate,
            },
            max_unavailable: PodCount::Number(1),
            desired: 0,
            deleting: metadata["deletionTimestamp"].is_string(),
            owned: OwnedFields { affinity: pod["affinity"].is_object(), ..OwnedFields::default() },
            manifest: std::sync::Arc::new(object.clone()),
        }),
    }
}

fn affinity_json(affinity: &NodeAffinity) -> Value {
    let NodeAffinity::Terms(terms) = affinity else { panic!("{affinity:?}") };
    let requirement = |found: &Requirement| {
        let values = if found.values.is_empty() { Value::Null } else { json!(found.values) };
        json!({"key": found.key, "operator": format!("{:?}", found.operator), "values": values})
    };
    let term = |term: &SelectorTerm| {
        let list = |found: &[Requirement]| found.iter().map(requirement).collect::<Vec<_>>();
        json!({"matchExpressions": list(&term.expressions), "matchFields": list(&term.fields)})
    };
    let terms: Vec<Value> = terms.iter().map(term).collect();
    json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}})
}
