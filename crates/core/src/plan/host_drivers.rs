//! Drivers that `farrier-host` loads on hosts from system extensions. Its labels tell which.

use std::collections::BTreeMap;

use super::{ClusterSnapshot, NextKernel, NodeFacts, Plan, Readiness, labels::HOST_DRIVER_PREFIX};
use crate::image::{Definitions, ImageName};

/// Returns the nodes with drivers of the host, grouped by what they load now and need next.
pub fn host_drivers<'a>(
    definitions: &Definitions,
    snapshot: &'a ClusterSnapshot,
    plan: &Plan,
) -> BTreeMap<String, Vec<&'a str>> {
    let mut groups: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for node in &snapshot.nodes {
        if let Some(says) = host_drivers_of(node, definitions, plan) {
            groups.entry(says).or_default().push(&node.name);
        }
    }
    groups
}

/// Describes the drivers that the node's host loads, and what it needs for its next kernel; `None` for other nodes.
pub(super) fn host_drivers_of(node: &NodeFacts, definitions: &Definitions, plan: &Plan) -> Option<String> {
    let loaded = definitions.images.keys().filter_map(|image| {
        let digest = node.labels.get(&host_driver_label(image))?;
        Some(format!("{image} (system extension sha256:{digest})"))
    });
    let loaded: Vec<String> = loaded.collect();
    if loaded.is_empty() {
        return None;
    }
    let mut says = format!("loads {} on {}", loaded.join(", "), node.kernel_version);
    let planned = plan.nodes.iter().find(|planned| planned.node == node.name);
    if let Some(next) = planned.and_then(|planned| planned.next.as_deref()) {
        says.push_str("; next is ");
        says.push_str(&describe(next));
    }
    Some(says)
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
            Readiness::Ready { .. } => format!("{image}, which is published"),
            Readiness::Missing { message } | Readiness::Unknown { message } => format!("{image}: {message}"),
        }
    });
    let needs: Vec<String> = needs.collect();
    if needs.is_empty() {
        format!("{}, which needs no image", next.kernel.release)
    } else {
        format!("{}, which needs {}", next.kernel.release, needs.join("; "))
    }
}
