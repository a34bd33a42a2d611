//! `farrier run`: reconciles once, or runs the control loop.

use std::sync::Arc;

use clap::Args;
use farrier_builder::services::BuildServices;
use farrier_cluster::Cluster;
use farrier_controller::live::{NodeTask, once::run_once};
use farrier_core::plan::SnapshotScope;

use super::{
    CliError, Exit, Result,
    args::{ClusterArg, LimitArgs},
    output,
    plan::{self, PlanArgs},
    serve::{self, ServiceArgs},
    session::{self, Session, kube_options},
};

#[derive(Debug, Args)]
pub struct RunArgs {
    #[command(flatten)]
    pub plan: PlanArgs,
    /// Reconcile once, then exit
    #[arg(long)]
    pub once: bool,
    /// Print what the run would do, and change nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Maximum seconds between two resyncs [default: 30 with dir:PATH, 60 with
    /// kube]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..), conflicts_with = "once")]
    pub interval: Option<u64>,
    #[command(flatten)]
    pub limits: LimitArgs,
    #[command(flatten)]
    pub service: ServiceArgs,
}

/// Reconciles once, or runs the loop until a signal arrives.
pub async fn run(session: &Session, args: RunArgs) -> Result<Exit> {
    let PlanArgs { registry, cluster: cluster_arg, engine } = &args.plan;
    let ClusterArg { cluster, write_namespaces } = cluster_arg;
    if kube_options(cluster).is_some() && write_namespaces.is_none() {
        return Err(CliError::usage(
            "--write-namespaces is missing: list the namespaces in which farrier may write DaemonSets and evict pods, such as \
             drivers,gpu, or \
             `*` for all (FARRIER_WRITE_NAMESPACES; with the chart, rbac.writeNamespaces)"
                .to_owned(),
        ));
    }
    let mut services = session.publisher(registry, engine.engine)?;
    services.tools.limits = session::limits(&args.limits, engine.engine, &services.definitions.site.builds);
    let scope = SnapshotScope::of(&services.definitions);
    let connection = session.connect(cluster, cluster_arg.writable(), scope).await?;
    let cluster = Arc::clone(&connection.cluster);
    if args.dry_run {
        return plan::show(session, &services, cluster.as_ref()).await;
    }
    services.make_room().await;
    if !args.once {
        return Box::pin(serve::serve(session, &args.service, args.interval, services, connection)).await;
    }
    let outcome = Box::pin(once(session, services, cluster)).await;
    if session.stop.cancel.is_cancelled() { Ok(Exit::Interrupted) } else { outcome }
}

/// Returns the features that write to nodes in each reconcile.
pub fn node_tasks() -> Vec<Arc<dyn NodeTask>> {
    vec![
        #[cfg(feature = "startup-taint")]
        Arc::<farrier_startup_taint::StartupTaint>::default(),
    ]
}

async fn once(session: &Session, services: BuildServices, cluster: Arc<dyn Cluster>) -> Result<Exit> {
    let report = run_once(services, cluster, node_tasks()).await?;
    session.show(&report, output::reconcile)?;
    Ok(match (report.unreachable, report.failed()) {
        (true, _) => Exit::Unreachable,
        (false, true) => Exit::Failed,
        (false, false) => Exit::Done,
    })
}
