//! Drivers that `farrier-host` loads on hosts from system extensions, as the labels of the nodes report them.

use std::{
    collections::{BTreeMap, HashMap},
    fmt,
    ops::Bound,
    sync::Arc,
};

use serde::Serialize;

use super::{CowArc, NextKernel, NodeFacts, PlannedNode, Readiness, labels::HOST_DRIVER_PREFIX};
use crate::image::{Definitions, ImageName};

/// Nodes whose hosts load the same drivers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct HostDrivers {
    /// Kernel release that the nodes run.
    pub kernel: String,
    /// The first hexadecimal digits of the loaded extensions' digests, by image.
    pub extensions: BTreeMap<ImageName, String>,
    /// Next kernel of the nodes, with the images for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next: Option<Arc<NextKernel>>,
    /// Names of the nodes.
    pub nodes: Vec<String>,
}

impl fmt::Display for HostDrivers {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        let loaded = self.extensions.iter();
        let loaded = loaded.map(|(image, digest)| format!("{image} (system extension sha256:{digest}...)"));
        write!(to, "loads {} on {}", loaded.collect::<Vec<_>>().join(", "), self.kernel)?;
        match &self.next {
            Some(next) => write!(to, "; next kernel {}", describe(next)),
            None => Ok(()),
        }
    }
}

/// Groups the nodes whose hosts load drivers by these drivers and the next kernel. `planned` are the nodes with a next kernel.
pub(super) fn host_drivers(
    definitions: &Definitions,
    nodes: &[CowArc<NodeFacts>],
    planned: &[PlannedNode],
) -> Vec<HostDrivers> {
    let next = planned.iter().filter_map(|node| Some((node.node.as_str(), node.next.as_ref()?)));
    let next: HashMap<&str, &Arc<NextKernel>> = next.collect();
    let mut groups: BTreeMap<String, HostDrivers> = BTreeMap::new();
    for node in nodes {
        let extensions = extensions(node, definitions);
        if extensions.is_empty() {
            continue;
        }
        let next = next.get(node.name.as_str()).copied().cloned();
        let drivers =
            HostDrivers { kernel: node.kernel_version.clone(), extensions, next, nodes: Vec::new() };
        groups.entry(drivers.to_string()).or_insert(drivers).nodes.push(node.name.clone());
    }
    groups.into_values().collect()
}

fn extensions(node: &NodeFacts, definitions: &Definitions) -> BTreeMap<ImageName, String> {
    let from_prefix = (Bound::Included(HOST_DRIVER_PREFIX), Bound::Unbounded);
    let labels = node.labels.range::<str, _>(from_prefix);
    let extensions = labels.map_while(|(key, digest)| Some((key.strip_prefix(HOST_DRIVER_PREFIX)?, digest)));
    let of_image = |(name, digest): (&str, &String)| {
        let (image, _) = definitions.images.get_key_value(name)?;
        Some((image.clone(), digest.clone()))
    };
    extensions.filter_map(of_image).collect()
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

#[cfg(test)]
mod tests {
    use crate::plan::{
        StatusItem,
        fixtures::{K47, K48, World},
        host_drivers as table, status,
    };

    #[test]
    fn nodes_with_the_same_drivers_are_one_row() {
        let mut world = World::new(&[K47, K47, K48, K48]);
        for (node, digest) in [(0, "0123456789ab"), (1, "0123456789ab"), (2, "ba9876543210")] {
            let labels = &mut world.snapshot.nodes[node].labels;
            labels.insert("feature.node.kubernetes.io/farrier-host.mft".to_owned(), digest.to_owned());
            // A driver without a definition is not farrier's.
            labels.insert("feature.node.kubernetes.io/farrier-host.other".to_owned(), digest.to_owned());
        }
        let plan = world.plan();
        let rows: Vec<String> = table(&plan).rows.iter().map(|row| row.join(": ")).collect();
        insta::assert_snapshot!(rows.join("\n"), @"
        n0, n1: farrier-host loads mft (system extension sha256:0123456789ab...) on 6.1.0-47-amd64
        n2: farrier-host loads mft (system extension sha256:ba9876543210...) on 6.1.0-48-amd64
        ");
        let json = serde_json::to_value(StatusItem::all(&status(&plan), &plan)).unwrap();
        let last = json.as_array().unwrap().last().unwrap();
        let expected = serde_json::json!({
            "kernel": K48, "extensions": {"mft": "ba9876543210"}, "nodes": ["n2"],
        });
        assert_eq!(last, &expected);
    }
}
