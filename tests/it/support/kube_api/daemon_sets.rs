//! A DaemonSet controller, a scheduler and kubelets, as far as they affect driver pods.

use std::{
    collections::{BTreeMap, BTreeSet},
    hash::{DefaultHasher, Hash as _, Hasher as _},
    sync::Arc,
};

use serde_json::{Value, json};

use super::{
    pod_fate::{Clock, Fate, Start},
    selectors,
    store::{Object, State},
};

type Decide = dyn Fn(&Start) -> Fate + Send;

/// The simulation, which advances in steps.
pub struct Kubelets {
    decide: Box<Decide>,
    /// Whether the simulation advances after each write and while containers crash.
    pub automatic: bool,
    /// Whether crashing containers change pods over time.
    pub crashing: bool,
    clock: Clock,
    pods: u64,
}

impl Kubelets {
    pub fn new(automatic: bool, decide: impl Fn(&Start) -> Fate + Send + 'static) -> Self {
        Self { decide: Box::new(decide), automatic, crashing: false, clock: Clock::default(), pods: 0 }
    }
}

/// A pod of a DaemonSet.
struct Pod {
    object: Arc<Object>,
    value: Value,
    /// The node that the pod is for, whether bound or not.
    node: String,
}

impl Pod {
    fn read(object: &Arc<Object>) -> Self {
        let value = object.value();
        let required =
            &value["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"];
        let meant = &required["nodeSelectorTerms"][0]["matchFields"][0]["values"][0];
        let node = match object.node_name.as_str() {
            "" => meant.as_str().unwrap_or_default().to_owned(),
            bound => bound.to_owned(),
        };
        Self { object: Arc::clone(object), node, value }
    }

    fn is_owned_by(&self, uid: &str) -> bool {
        let owners = self.value["metadata"]["ownerReferences"].as_array().into_iter().flatten();
        owners.into_iter().any(|owner| owner["uid"] == uid && owner["controller"] == true)
    }

    fn is_ready(&self) -> bool {
        is_ready(&self.value)
    }

    fn hash(&self) -> &str {
        self.object.labels.get("controller-revision-hash").map_or("", String::as_str)
    }
}

pub fn is_ready(pod: &Value) -> bool {
    let conditions = pod["status"]["conditions"].as_array().into_iter().flatten();
    conditions.into_iter().any(|condition| condition["type"] == "Ready" && condition["status"] == "True")
}

impl State {
    /// Steps until nothing changes.
    pub fn settle(&mut self) {
        for _ in 0..1000 {
            if !self.step() {
                return;
            }
        }
        panic!("the fake API server's DaemonSet controller does not settle");
    }

    /// Advances all controllers by one step. Returns whether something changed.
    pub fn step(&mut self) -> bool {
        let Some(mut kubelets) = self.kubelets.take() else { return false };
        let before = self.revision;
        let daemon_sets = self.resource("daemonsets.apps");
        let all: Vec<Arc<Object>> = self.list(&daemon_sets, "").cloned().collect();
        for daemon_set in &all {
            self.manage(daemon_set, &mut kubelets);
        }
        self.schedule();
        self.run(&mut kubelets);
        for daemon_set in &all {
            self.report(daemon_set);
        }
        self.kubelets = Some(kubelets);
        self.revision != before
    }

    fn pods_of(&self, uid: &str) -> Vec<Pod> {
        let pods = self.resource("pods");
        self.list(&pods, "").map(Pod::read).filter(|pod| pod.is_owned_by(uid)).collect()
    }

    fn eligible_nodes(&self, daemon_set: &Value) -> BTreeSet<String> {
        let nodes = self.resource("nodes");
        let pod = &daemon_set["spec"]["template"]["spec"];
        self.list(&nodes, "")
            .filter(|node| selectors::node_allowed(pod, &node.name, &node.labels))
            .filter(|node| selectors::taints_tolerated(pod, &node.value()["spec"]["taints"]))
            .map(|node| node.name.clone())
            .collect()
    }

    /// Ensures one pod per eligible node, and replaces outdated pods as the update strategy allows.
    fn manage(&mut self, daemon_set: &Arc<Object>, kubelets: &mut Kubelets) {
        let value = daemon_set.value();
        let nodes = self.eligible_nodes(&value);
        let pods_kind = self.resource("pods");
        let mut by_node: BTreeMap<String, Pod> = BTreeMap::new();
        for pod in self.pods_of(&daemon_set.uid) {
            // Of two pods on one node the older one stays, as with the real controller.
            if !nodes.contains(&pod.node) || by_node.contains_key(&pod.node) {
                self.remove(&pods_kind, &pod.object);
            } else {
                by_node.insert(pod.node.clone(), pod);
            }
        }
        let hash = template_hash(&value);
        for node in nodes.iter().filter(|node| !by_node.contains_key(*node)) {
            kubelets.pods += 1;
            let pod = new_pod(&value, node, &hash, kubelets.pods);
            self.insert(&pods_kind, pod);
        }
        if value["spec"]["updateStrategy"]["type"] == "RollingUpdate" {
            let allowed = &value["spec"]["updateStrategy"]["rollingUpdate"]["maxUnavailable"];
            let allowed = count(allowed, nodes.len()).max(1);
            self.replace_old(&pods_kind, &by_node, &hash, allowed, nodes.len());
        }
    }

    fn replace_old(
        &mut self,
        kind: &super::kinds::Kind,
        pods: &BTreeMap<String, Pod>,
        hash: &str,
        allowed: usize,
        wanted: usize,
    ) {
        let missing = wanted - pods.len();
        let mut unavailable = missing + pods.values().filter(|pod| !pod.is_ready()).count();
        for pod in pods.values().filter(|pod| pod.hash() != hash) {
            if !pod.is_ready() {
                // The pod is already unavailable, so deleting it does not exceed the limit.
                self.remove(kind, &pod.object);
            } else if unavailable < allowed {
                unavailable += 1;
                self.remove(kind, &pod.object);
            }
        }
    }

    /// Binds pods to their nodes unless a required pod anti-affinity prevents that.
    fn schedule(&mut self) {
        let kind = self.resource("pods");
        let mut pods: Vec<Pod> = self.list(&kind, "").map(Pod::read).collect();
        for at in 0..pods.len() {
            let pod = &pods[at];
            let in_question = pod.object.node_name.is_empty() && !pod.node.is_empty();
            let neighbours = || {
                let bound = |other: &&Pod| other.object.node_name == pod.node;
                pods.iter().filter(bound)
            };
            if !in_question || neighbours().any(|other| repels(pod, other) || repels(other, pod)) {
                continue;
            }
            let mut value = pod.value.clone();
            value["spec"]["nodeName"] = json!(pod.node);
            let object = self.replace(&kind, &pods[at].object, value);
            pods[at] = Pod::read(&object);
        }
    }

    /// Updates the status of bound pods; a pod's fate may change with its node.
    fn run(&mut self, kubelets: &mut Kubelets) {
        let kind = self.resource("pods");
        let nodes = self.resource("nodes");
        let bound = |object: &&Arc<Object>| {
            !object.node_name.is_empty() && object.labels.contains_key("controller-revision-hash")
        };
        let pods: Vec<Pod> = self.list(&kind, "").filter(bound).map(Pod::read).collect();
        kubelets.crashing = false;
        for pod in pods {
            let node = self.get(&nodes, "", &pod.node).map(|node| node.value()).unwrap_or_default();
            let kernel = node["status"]["nodeInfo"]["kernelVersion"].as_str().unwrap_or_default();
            let start = Start {
                daemon_set: pod.value["metadata"]["ownerReferences"][0]["name"].as_str().unwrap().to_owned(),
                images: images(&pod.value),
                node: pod.node.clone(),
                kernel: kernel.to_owned(),
            };
            let fate = (kubelets.decide)(&start);
            kubelets.crashing |= matches!(fate, Fate::Crashes(_));
            let status = kubelets.clock.status(&pod.value, &fate);
            if pod.value["status"] != status {
                let mut value = pod.value.clone();
                value["status"] = status;
                self.replace(&kind, &pod.object, value);
            }
        }
    }

    fn report(&mut self, daemon_set: &Arc<Object>) {
        let kind = self.resource("daemonsets.apps");
        let Some(object) = self.get(&kind, &daemon_set.namespace, &daemon_set.name) else { return };
        let mut value = object.value();
        let pods = self.pods_of(&object.uid);
        let hash = template_hash(&value);
        let wanted = self.eligible_nodes(&value).len();
        let ready = pods.iter().filter(|pod| pod.is_ready()).count();
        let status = json!({
            "currentNumberScheduled": pods.iter().filter(|pod| !pod.object.node_name.is_empty()).count(),
            "desiredNumberScheduled": wanted,
            "numberMisscheduled": 0,
            "numberReady": ready,
            "numberAvailable": ready,
            "numberUnavailable": wanted.saturating_sub(ready),
            "updatedNumberScheduled": pods.iter().filter(|pod| pod.hash() == hash).count(),
            "observedGeneration": value["metadata"]["generation"],
        });
        if value["status"] != status {
            value["status"] = status;
            self.replace(&kind, &object, value);
        }
    }
}

/// Parses a number, or a percentage of `of` rounded up.
pub fn count(value: &Value, of: usize) -> usize {
    match value.as_str().and_then(|text| text.strip_suffix('%')?.parse::<usize>().ok()) {
        Some(percent) => (of * percent).div_ceil(100),
        None => value.as_u64().and_then(|number| usize::try_from(number).ok()).unwrap_or(1),
    }
}

fn template_hash(daemon_set: &Value) -> String {
    let mut hasher = DefaultHasher::new();
    daemon_set["spec"]["template"].to_string().hash(&mut hasher);
    format!("{:010x}", hasher.finish() & 0xff_ffff_ffff)
}

fn new_pod(daemon_set: &Value, node: &str, hash: &str, number: u64) -> Value {
    let metadata = &daemon_set["metadata"];
    let template = &daemon_set["spec"]["template"];
    let name = format!("{}-{number:05}", metadata["name"].as_str().unwrap());
    let mut labels = template["metadata"]["labels"].clone();
    labels["controller-revision-hash"] = json!(hash);
    let mut spec = template["spec"].clone();
    // Like the real controller, replace the template's node selector terms.
    spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"] = json!({
        "nodeSelectorTerms": [{"matchFields": [
            {"key": "metadata.name", "operator": "In", "values": [node]},
        ]}],
    });
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": name, "generateName": format!("{}-", metadata["name"].as_str().unwrap()),
            "namespace": metadata["namespace"], "labels": labels,
            "ownerReferences": [{
                "apiVersion": "apps/v1", "kind": "DaemonSet", "name": metadata["name"], "uid": metadata["uid"],
                "controller": true, "blockOwnerDeletion": true,
            }],
        },
        "spec": spec,
        "status": {"phase": "Pending"},
    })
}

/// Returns whether the anti-affinity of `pod` excludes `other` from its node.
fn repels(pod: &Pod, other: &Pod) -> bool {
    if pod.object.uid == other.object.uid {
        return false;
    }
    let required =
        &pod.value["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"];
    required.as_array().into_iter().flatten().any(|term| {
        let listed = term["namespaces"].as_array().filter(|namespaces| !namespaces.is_empty());
        let in_scope = match listed {
            Some(namespaces) => namespaces.iter().any(|name| *name == other.object.namespace.as_str()),
            None => term["namespaceSelector"].is_object() || pod.object.namespace == other.object.namespace,
        };
        in_scope
            && term["topologyKey"] == "kubernetes.io/hostname"
            && selectors::label_selector(&term["labelSelector"], &other.object.labels)
    })
}

fn images(pod: &Value) -> Vec<String> {
    ["initContainers", "containers"]
        .iter()
        .flat_map(|list| pod["spec"][list].as_array().cloned().unwrap_or_default())
        .map(|container| container["image"].as_str().unwrap_or_default().to_owned())
        .collect()
}
