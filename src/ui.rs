//! `farrier ui`: serves the page of `farrier run` on a loopback port until it is stopped.

use std::{net::Ipv4Addr, process::Stdio, sync::Arc};

use clap::Args;
use farrier_builder::{builds_elsewhere, services::BuildServices};
use farrier_cluster::Cluster;
use farrier_controller::{
    Planned,
    live::ReconcileView,
    observe_and_plan,
    runtime::{Health, HttpServer, Metrics},
    without_cluster::{NoCluster, definitions_of_registry},
};
use farrier_core::plan::{SnapshotScope, WriteNamespaces};
use jiff::Timestamp;
use oci::error_chain;
use serde_json::json;
use tokio::sync::Notify;

use super::{
    CliError, Exit, Result,
    args::{EngineArg, PageArgs, RegistryArg},
    env_vars, output,
    page::{ServedPage, serve_page},
    plan::until_due,
    session::Session,
};

#[derive(Debug, Args)]
pub struct UiArgs {
    #[command(flatten)]
    pub registry: RegistryArg,
    /// Cluster with the nodes and rollout targets: kube or kube:CONTEXT for a live cluster, dir:PATH for a
    /// directory of manifests; without it, the page shows the contents of the registry
    #[arg(long, env = env_vars::FARRIER_CLUSTER, value_name = "CLUSTER", hide_env_values = true)]
    pub cluster: Option<String>,
    /// Namespaces in which DaemonSets are written and pods evicted
    #[arg(long, env = env_vars::FARRIER_WRITE_NAMESPACES, value_name = "NAMESPACES", hide_env_values = true)]
    pub write_namespaces: Option<WriteNamespaces>,
    #[command(flatten)]
    pub page: PageArgs,
    #[command(flatten)]
    pub engine: EngineArg,
    /// Print the address without opening a browser
    #[arg(long)]
    pub no_browser: bool,
}

/// Serves the page until stopped. Changes nothing, except what users do on the page with `--page-actions`.
pub async fn ui(session: &Session, args: UiArgs) -> Result<Exit> {
    let UiArgs { registry, cluster, write_namespaces, page, engine, no_browser } = args;
    let mut services = session.publisher(&registry, engine.engine)?;
    let cluster: Arc<dyn Cluster> = if let Some(cluster) = cluster {
        let (writable, scope) =
            (write_namespaces.unwrap_or_default(), SnapshotScope::of(&services.definitions));
        session.connect(&cluster, writable, scope).await?.cluster
    } else {
        services.definitions = definitions_of_registry(&services).await?;
        Arc::new(NoCluster)
    };
    let reconcile_request = Arc::<Notify>::default();
    let any_port = (Ipv4Addr::LOCALHOST, 0).into();
    let page = serve_page(&page, any_port, &services, &cluster, None, &reconcile_request);
    let exit = tokio::select! {
        biased;
        () = session.stop.cancel.cancelled() => Ok(Exit::Interrupted),
        result = show(session, &services, cluster.as_ref(), &page, &reconcile_request, no_browser) => result,
    };
    // Wait for a running build, which stops and cleans up.
    if let Some(actions) = page.actions {
        actions.finish().await;
    }
    exit
}

/// Plans repeatedly and shows the newest plan. Returns only if the first plan fails.
async fn show(
    session: &Session,
    services: &BuildServices,
    cluster: &dyn Cluster,
    page: &ServedPage,
    reconcile_request: &Notify,
    no_browser: bool,
) -> Result<Exit> {
    let definitions = Arc::new(services.definitions.clone());
    let mut address = None;
    loop {
        match observe_and_plan(services, cluster).await {
            Ok(Planned { plan, snapshot, .. }) => {
                let (plan, snapshot, definitions) =
                    (Arc::new(plan), Arc::new(snapshot), Arc::clone(&definitions));
                let activity = builds_elsewhere(services, &plan).await;
                let view = ReconcileView {
                    live: activity.clone().into(),
                    plan,
                    snapshot,
                    definitions,
                    activity,
                    rollouts: Vec::new(),
                    configuration_error: None,
                    now: Timestamp::now(),
                };
                page.sink.reconciled(&view).await;
            }
            Err(error) if address.is_none() => return Err(error.into()),
            Err(error) => {
                page.sink.failed(&error_chain(&error));
                output::message(&CliError::from(error).render());
            }
        }
        if address.is_none() {
            let url = serve(session, page).await?;
            session.show(&json!({"address": url}), |_| url.clone())?;
            if !no_browser && env_vars::has_display() {
                open_browser(&url);
            }
            address = Some(url);
        }
        tokio::select! {
            () = until_due(cluster) => {}
            () = reconcile_request.notified() => {}
        }
    }
}

/// Serves the page on a free loopback port and returns the address.
async fn serve(session: &Session, page: &ServedPage) -> Result<String> {
    let (health, metrics) = (Arc::new(Health::default()), Arc::new(Metrics::default()));
    let any_port = (Ipv4Addr::LOCALHOST, 0).into();
    let server = HttpServer::bind(any_port, health, metrics, page.router.clone()).await?;
    let port = server.address().map(|address| address.port()).unwrap_or_default();
    tokio::spawn(server.serve(session.stop.cancel.clone()));
    Ok(format!("http://{}:{port}/", Ipv4Addr::LOCALHOST))
}

fn open_browser(address: &str) {
    let mut browser = tokio::process::Command::new("xdg-open");
    let browser = browser.arg(address).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    if let Err(error) = browser.spawn() {
        output::message(&format!("no browser was opened: start xdg-open: {error}"));
    }
}
