//! Drivers that `farrier-host` loads on hosts from system extensions, as the labels of the nodes report them.

use std::collections::{BTreeMap, HashMap};

use super::{ClusterSnapshot, NextKernel, NodeFacts, Plan, Readiness, labels::HOST_DRIVER_PREFIX};
use crate::image::{Definitions, ImageName};

/// Groups the nodes whose hosts load drivers by a description of the loaded drivers and the images for the next kernel.
pub fn host_drivers<'a>(
    definitions: &Definitions,
    snapshot: &'a ClusterSnapshot,
    plan: &Plan,
) -> BTreeMap<String, Vec<&'a str>> {
    let next: HashMap<&str, &NextKernel> =
        plan.nodes.iter().filter_map(|node| Some((node.node.as_str(), node.next.as_deref()?))).collect();
    let mut groups: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for node in &snapshot.nodes {
        let next = next.get(node.name.as_str()).copied();
        if let Some(description) = host_drivers_of(node, definitions, next) {
            groups.entry(description).or_default().push(&node.name);
        }
    }
    groups
}

/// Describes the drivers that the node's host loads, and the images for its next kernel; `None` for other nodes.
pub(super) fn host_drivers_of(
    node: &NodeFacts,
    definitions: &Definitions,
    next: Option<&NextKernel>,
) -> Option<String> {
    let loaded = definitions.images.keys().filter_map(|image| {
        let digest = node.labels.get(&host_driver_label(image))?;
        Some(format!("{image} (system extension sha256:{digest}...)"))
    });
    let loaded: Vec<String> = loaded.collect();
    if loaded.is_empty() {
        return None;
    }
    let next = next.map_or_else(String::new, |next| format!("; next kernel {}", describe(next)));
    Some(format!("loads {} on {}{next}", loaded.join(", "), node.kernel_version))
}

/// Returns the label with the digest of an image's system extension.
pub(super) fn host_driver_label(image: &ImageName) -> String {
    format!("{HOST_DRIVER_PREFIX}{image}")
}

fn describe(next: &NextKernel) -> String {
    let needs = next.needs.iter().map(|required| {
        let image =
            required.reference.as_ref().map_or_else(|| required.image.to_string(), ToString::to_string);
        match &required.state {
            Readiness::Ready { .. } => format!("{image} (published)"),
            Readiness::Missing { message } | Readiness::Unknown { message } => format!("{image} ({message})"),
        }
    });
    let needs: Vec<String> = needs.collect();
    let needs = if needs.is_empty() { "no image needed".to_owned() } else { needs.join(", ") };
    format!("{}: {needs}", next.kernel.release)
}
