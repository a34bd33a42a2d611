//! Output of `farrier preflight`.

use std::{cmp::Reverse, collections::BTreeMap};

use farrier_core::{
    plan::{BootReadiness, NextKernel, readiness_table},
    text::some_of,
};
use serde::Serialize;

use super::plan::table_text;

/// JSON output of `farrier preflight`.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PreflightReport<'a> {
    /// Whether all nodes may boot the kernel, and images were checked for that.
    pub ready: bool,
    /// Verdict of the node with the most obstacles. It distinguishes cases that `ready` does not.
    pub may_boot: BootReadiness,
    pub kernel: String,
    /// The selected nodes.
    pub nodes: Vec<NodeReadiness<'a>>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeReadiness<'a> {
    pub node: &'a str,
    pub ready: bool,
    pub may_boot: BootReadiness,
    #[serde(flatten)]
    pub next: Option<&'a NextKernel>,
    /// Reason why the images that the node will need are unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// Formats one table for each platform and set of needs, with its nodes. Blocked nodes come first.
pub fn text(report: &PreflightReport<'_>) -> String {
    let mut groups: BTreeMap<(Reverse<BootReadiness>, String, String), Vec<&str>> = BTreeMap::new();
    for NodeReadiness { node, ready: _, may_boot, next, message } in &report.nodes {
        let (kernel, reason) = match (next, message) {
            (Some(next), _) => (next.kernel.to_string(), reasons(next)),
            (None, reason) => (report.kernel.clone(), format!("{}\n", reason.as_deref().unwrap_or_default())),
        };
        groups.entry((Reverse(*may_boot), kernel, reason)).or_default().push(node);
    }
    let mut texts = Vec::new();
    for ((Reverse(may_boot), kernel, reason), nodes) in groups {
        let verdict = match may_boot {
            BootReadiness::Ready => "ready",
            BootReadiness::NoDriver => "no driver image needed",
            BootReadiness::Wait | BootReadiness::Unknown => "not ready",
        };
        texts.push(format!("{}: {verdict} for {kernel}\n{reason}", some_of(&nodes, 5)));
    }
    texts.join("\n")
}

/// Formats the images that are needed, or why there are none.
fn reasons(next: &NextKernel) -> String {
    match &next.blocker {
        Some(blocker) => format!("{blocker}\n"),
        None if next.needs.is_empty() => {
            "no driver image is for nodes with these labels, so nothing was checked\n".to_owned()
        }
        None => table_text(&readiness_table(next)),
    }
}

#[cfg(test)]
mod tests {
    use farrier_core::plan::testing::Fleet;

    use super::*;

    const NEXT: &str = "6.1.0-48-amd64";

    /// Formats the answer for both nodes of a fleet, the first of which calls for an image.
    fn told(fleet: &mut Fleet) -> String {
        fleet.announce(0, NEXT);
        fleet.announce(1, NEXT);
        let plan = fleet.plan();
        let nodes = plan.nodes.iter().map(|planned| NodeReadiness {
            node: &planned.node,
            ready: planned.ready,
            may_boot: planned.may_boot,
            next: planned.next.as_deref(),
            message: None,
        });
        text(&PreflightReport {
            ready: false,
            may_boot: BootReadiness::Wait,
            kernel: NEXT.to_owned(),
            nodes: nodes.collect(),
        })
    }

    #[test]
    fn a_node_without_images_is_not_called_ready() {
        let mut fleet = Fleet::new(&["6.1.0-47-amd64"; 2]);
        fleet.node(1).labels.remove("pci");
        insta::assert_snapshot!(told(&mut fleet), @r"
        n0: not ready for 6.1.0-48-amd64 (debian 12, amd64)
        IMAGE  VERDICT  WHY
        mft    missing  it is not built yet

        n1: no driver image needed for 6.1.0-48-amd64 (debian 12, amd64)
        no driver image is for nodes with these labels, so nothing was checked
        ");
        fleet.node(1).has_hardware_labels = false;
        let told = told(&mut fleet);
        assert!(told.contains("n1: not ready") && told.contains("no hardware label"), "{told}");
    }
}
