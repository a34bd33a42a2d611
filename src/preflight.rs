//! `farrier preflight`: checks whether nodes may boot a kernel. Exits with 0 if nothing blocks them: all
//! images that they will need are published, or they need no image. The report distinguishes these two
//! cases.

use std::{collections::BTreeMap, sync::Arc};

use clap::Args;
use farrier_cluster::{Cluster, ClusterError};
use farrier_controller::observe_and_plan;
use farrier_core::{
    kernel::KernelRelease,
    plan::{
        BootReadiness, Change, ClusterSnapshot, CowArc, NextKernel, NodeFacts, Plan, PlannedNode, Platform,
    },
    site::ignore_nodes,
};
use jiff::Timestamp;

use super::{
    CliError, Exit, Result,
    output::preflight::{self, NodeReadiness, PreflightReport},
    plan::PlanArgs,
    session::Session,
    settings,
};

#[derive(Debug, Args)]
pub struct PreflightArgs {
    /// Kernel release, exactly as `uname -r` will print it
    #[arg(long, value_name = "RELEASE")]
    pub kernel: String,
    /// Check this node (repeatable) [default: all]
    #[arg(long, value_name = "NAME")]
    pub node: Vec<String>,
    /// Check nodes with this operating system id [default: any]
    #[arg(long, value_name = "ID")]
    pub os: Option<String>,
    /// Check nodes with this operating system version [default: any]
    #[arg(long, value_name = "VERSION")]
    pub os_version: Option<String>,
    /// Check nodes of this architecture, amd64 or arm64 [default: any]
    #[arg(long, value_name = "ARCH")]
    pub arch: Option<String>,
    #[command(flatten)]
    pub plan: PlanArgs,
}

/// Prints the answer and changes nothing.
pub async fn preflight(session: &Session, args: PreflightArgs) -> Result<Exit> {
    let kernel: KernelRelease = settings::parse("--kernel", &args.kernel)?;
    let (services, cluster) = session.services_and_cluster(&args.plan).await?;
    let mut snapshot = cluster.snapshot().await?;
    ignore_nodes(&mut snapshot, &services.definitions.site.ignore_nodes, Timestamp::now());
    let selected: Vec<String> = selected_nodes(&args, &snapshot)?;
    let cluster = AnnouncingCluster { cluster, snapshot, selected: selected.clone(), kernel: kernel.clone() };
    let planned = observe_and_plan(&services, &cluster).await?;
    let report = report(&planned.plan, &selected, &kernel);
    session.show(&report, preflight::text)?;
    Ok(match (report.may_boot.is_free(), planned.unreachable) {
        (true, _) => Exit::Done,
        (false, true) => Exit::Unreachable,
        (false, false) => Exit::Failed,
    })
}

/// Returns the names of the selected nodes.
fn selected_nodes(args: &PreflightArgs, snapshot: &ClusterSnapshot) -> Result<Vec<String>> {
    for name in &args.node {
        let node = snapshot.nodes.iter().find(|node| node.name == *name);
        let node =
            node.ok_or_else(|| CliError::usage(format!("--node: the cluster has no node {name:?}")))?;
        if let Some(rule) = node.ignored_by {
            let message = format!("--node: ignoreNodes[{rule}] in site.yaml ignores node {name:?}");
            return Err(CliError::usage(message));
        }
    }
    let is_match = |node: &&CowArc<NodeFacts>| {
        let platform = Platform::of(node);
        let matches = |given: &Option<String>, value: fn(&Platform) -> String| {
            given.as_ref().is_none_or(|given| platform.as_ref().map(value).as_ref() == Some(given))
        };
        node.ignored_by.is_none()
            && (args.node.is_empty() || args.node.contains(&node.name))
            && matches(&args.os, |platform| platform.os.to_string())
            && matches(&args.os_version, |platform| platform.os_version.to_string())
            && matches(&args.arch, |platform| platform.arch.to_string())
    };
    let names: Vec<String> = snapshot.nodes.iter().filter(is_match).map(|node| node.name.clone()).collect();
    if names.is_empty() {
        return Err(CliError::usage("no node of the cluster matches the given flags"));
    }
    Ok(names)
}

/// A cluster in which the selected nodes, and no others, announce the kernel. So the plan has the readiness that the
/// controller would write to the nodes.
struct AnnouncingCluster {
    cluster: Arc<dyn Cluster>,
    snapshot: ClusterSnapshot,
    selected: Vec<String>,
    kernel: KernelRelease,
}

#[async_trait::async_trait]
impl Cluster for AnnouncingCluster {
    fn describe(&self) -> String {
        self.cluster.describe()
    }

    async fn snapshot(&self) -> Result<ClusterSnapshot, ClusterError> {
        let mut snapshot = self.snapshot.clone();
        for node in &mut snapshot.nodes {
            let is_selected = self.selected.contains(&node.name);
            node.announce(is_selected.then_some(&self.kernel));
        }
        Ok(snapshot)
    }

    async fn apply(&self, change: &Change) -> Result<(), ClusterError> {
        Err(ClusterError::Refused {
            object: change.object(),
            reason: "preflight only reads and changes nothing".to_owned(),
        })
    }
}

fn report<'a>(plan: &'a Plan, selected: &'a [String], kernel: &KernelRelease) -> PreflightReport<'a> {
    let planned: BTreeMap<&str, &PlannedNode> =
        plan.nodes.iter().map(|planned| (planned.node.as_str(), planned)).collect();
    let unused = plan.unused_announcements.iter();
    let unused: BTreeMap<&str, String> =
        unused.map(|unused| (unused.node.as_str(), unused.why.to_string())).collect();
    let nodes: Vec<NodeReadiness<'a>> = selected
        .iter()
        .map(|node| {
            let next = planned.get(node.as_str()).and_then(|planned| planned.next.as_deref());
            let message = next.is_none().then(|| {
                let why = unused.get(node.as_str()).cloned();
                why.unwrap_or_else(|| "the images that it will need are unknown".to_owned())
            });
            let may_boot = next.map_or(BootReadiness::Wait, NextKernel::may_boot);
            NodeReadiness { node, ready: may_boot == BootReadiness::Ready, may_boot, next, message }
        })
        .collect();
    let may_boot = nodes.iter().map(|node| node.may_boot).max().unwrap_or(BootReadiness::Wait);
    PreflightReport { ready: may_boot == BootReadiness::Ready, may_boot, kernel: kernel.to_string(), nodes }
}
