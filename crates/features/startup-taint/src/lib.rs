//! Removes the startup taint of a node once all drivers of the node are loaded.
//!
//! A driver counts as loaded if a ready pod on the node runs a farrier image of its definition with modules for exactly the node's
//! kernel. Otherwise the taint stays.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;

use farrier_controller::{Planned, live::NodeTask};
use farrier_core::{
    image::{Definitions, DriverImage, ImageName, ImageReference, Version},
    kernel::KernelTarget,
    plan::{
        Change, ClusterSnapshot, DaemonSetFacts, ExplanationStep, ImageContents, NodeChange, NodeFacts,
        PodFacts, Untaint, node_target,
    },
};
use parking_lot::Mutex;

/// Keys of the startup taint. Cluster Autoscaler recognizes the second one by its prefix.
pub const TAINTS: [&str; 2] = [
    "farrier.dev/driver-not-ready",
    "startup-taint.cluster-autoscaler.kubernetes.io/farrier-driver-not-ready",
];

/// Inputs of the decision.
#[derive(Clone, Copy, Debug)]
struct Evidence<'a> {
    definitions: &'a Definitions,
    snapshot: &'a ClusterSnapshot,
    /// Contents of the farrier images that DaemonSets and their pods use.
    contents: &'a BTreeMap<String, ImageContents>,
}

/// Returns the startup taint of a node.
fn startup_taint(node: &NodeFacts) -> Option<&str> {
    node.taints.iter().map(|taint| taint.key.as_str()).find(|key| TAINTS.contains(key))
}

impl<'a> Evidence<'a> {
    /// Returns the reason for keeping the startup taint of a node; `None` if all drivers of the node are loaded.
    fn blocker(&self, node: &NodeFacts) -> Option<String> {
        if node.not_ready {
            return Some("the node is not ready".to_owned());
        }
        let kernel = match node_target(node) {
            Ok(kernel) => kernel,
            Err(why) => return Some(format!("kernel unknown: {why}")),
        };
        let is_needed = |image: &&DriverImage| {
            node.is_selected_by(image) && image.spec.range_excluding(&kernel).is_none()
        };
        let mut needed_images = self.definitions.images.values().filter(is_needed).peekable();
        if needed_images.peek().is_none() {
            return Some(
                "no driver image is for this node and its kernel; set the taint only on nodes that need a driver"
                    .to_owned(),
            );
        }
        needed_images.find_map(|image| self.why_not_loaded(image, node, &kernel))
    }

    /// Returns the reason why an image's driver does not count as loaded on a node.
    fn why_not_loaded(&self, image: &DriverImage, node: &NodeFacts, kernel: &KernelTarget) -> Option<String> {
        let name = &image.metadata.name;
        let mut pods = Vec::new();
        for target in image.spec.rollout.iter().filter_map(|spec| spec.daemon_set()) {
            let container: &str = &target.container;
            let originals = self.snapshot.daemon_sets.iter().filter(|facts| facts.is_named(target));
            pods.extend(originals.flat_map(|original| self.pods(original, node)).map(|pod| (pod, container)));
        }
        if pods.is_empty() {
            return Some(format!(
                "image {name} has no pod of its DaemonSet on the node; the DaemonSet must select the node and tolerate the taint"
            ));
        }
        pods.into_iter().find_map(|(pod, container)| self.pod_blocker(pod, container, name, kernel))
    }

    /// Returns the reason why a pod does not show that an image's driver is loaded.
    fn pod_blocker(
        &self,
        pod: &PodFacts,
        container: &str,
        name: &ImageName,
        kernel: &KernelTarget,
    ) -> Option<String> {
        let id = format!("pod {}/{}", pod.namespace, pod.name);
        let Some(running) = pod.images.get(container) else {
            return Some(format!("{id} has no container {container}"));
        };
        if !self.has_modules(running, name, kernel) {
            return Some(format!(
                "{id} runs {running}, which is not known to have the modules of image {name} for {kernel}"
            ));
        }
        // A pod that is older than the DaemonSet's template may lack the template's probe.
        if !pod.probed.iter().any(|probed| probed == container) {
            return Some(format!(
                "container {container} of {id} has no readinessProbe or startupProbe, so a ready pod does not prove that the driver is loaded"
            ));
        }
        (!pod.ready).then(|| format!("{id} is not ready"))
    }

    /// Returns the pods of a DaemonSet and of its copies on a node, without pods of an earlier node of this name.
    fn pods(&self, original: &'a DaemonSetFacts, node: &NodeFacts) -> impl Iterator<Item = &'a PodFacts> {
        let (name, created) = (node.name.clone(), node.created);
        let is_on =
            move |pod: &&PodFacts| pod.bound && !pod.deleting && pod.node == name && pod.created >= created;
        let is_owned = move |pod: &&PodFacts| {
            self.snapshot.daemon_sets.iter().any(|facts| {
                facts.live.as_ref().is_some_and(|live| live.version.uid == pod.daemon_set)
                    && (facts == original || facts.is_copy_of(original))
            })
        };
        self.snapshot.pods.iter().filter(is_on).filter(is_owned)
    }

    /// Whether a pod's image reference names this definition's repository by digest, and the image has modules for a kernel.
    fn has_modules(&self, image: &str, name: &ImageName, kernel: &KernelTarget) -> bool {
        let is_of_definition = |reference: ImageReference| {
            let repository = reference.repository.to_string();
            matches!(reference.version, Version::Digest(_))
                && repository.rsplit('/').next() == Some(name.as_str())
        };
        let contents = self.contents.get(image);
        image.parse().is_ok_and(is_of_definition)
            && contents.is_some_and(|contents| contents.has(kernel.arch, kernel.release.as_str()))
    }
}

/// Removes startup taints, and logs why the others stay.
#[derive(Debug, Default)]
pub struct StartupTaint {
    /// Reason that was logged last, by node.
    logged: Mutex<BTreeMap<String, String>>,
}

impl NodeTask for StartupTaint {
    fn changes(&self, definitions: &Definitions, planned: &Planned) -> Vec<Change> {
        let Planned { snapshot, contents, .. } = planned;
        self.decide(&Evidence { definitions, snapshot, contents })
    }
}

impl StartupTaint {
    fn decide(&self, evidence: &Evidence<'_>) -> Vec<Change> {
        let Evidence { definitions, snapshot, .. } = evidence;
        if !definitions.site.startup_taint || snapshot.read_only_nodes {
            return Vec::new();
        }
        let (mut logged, mut changes) = (self.logged.lock(), Vec::new());
        let mut kept = BTreeMap::new();
        for (node, key) in snapshot.nodes.iter().filter_map(|node| Some((node, startup_taint(node)?))) {
            let Some(why) = evidence.blocker(node) else {
                let untaint = Some(Untaint { key: key.to_owned(), created: node.created });
                changes.push(Change::Node(NodeChange {
                    name: node.name.clone(),
                    untaint,
                    ..NodeChange::default()
                }));
                continue;
            };
            if logged.get(&node.name) != Some(&why) {
                tracing::info!(node = node.name, taint = key, why, "the startup taint stays");
            }
            kept.insert(node.name.clone(), why);
        }
        *logged = kept;
        changes
    }
}

/// Explains the startup taint of a node; `None` if the node has none.
pub fn explain(definitions: &Definitions, planned: &Planned, node: &str) -> Option<ExplanationStep> {
    let Planned { snapshot, contents, .. } = planned;
    let evidence = Evidence { definitions, snapshot, contents };
    let node = evidence.snapshot.nodes.iter().find(|facts| facts.name == node)?;
    let key = startup_taint(node)?;
    let (says, hint) = if !definitions.site.startup_taint {
        (format!("{key} stays"), "set startupTaint: true in site.yaml")
    } else if let Some(why) = evidence.blocker(node) {
        (format!("{key} stays: {why}"), "")
    } else {
        (format!("{key} is removed: the drivers are loaded"), "")
    };
    Some(ExplanationStep { about: "startup taint".to_owned(), says, hint: hint.to_owned() })
}

#[cfg(test)]
mod tests;
