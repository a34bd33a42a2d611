//! The page of the fleet: as files for `farrier status --html`, and on the address of `farrier run --listen`.

use std::{net::SocketAddr, path::Path, sync::Arc};

use axum::Router;
use farrier_builder::services::BuildServices;
use farrier_cluster::{Cluster, KubeCluster};
use farrier_controller::{Planned, live::StatusSink};
use farrier_core::plan::Activity;
use farrier_dashboard::{Actions, Facts, FilesError, LoggedBuilds, PageServer, write_files};
use jiff::Timestamp;
use tokio::sync::Notify;

use super::{Result, args::PageArgs, error::exit_codes, output};

exit_codes! {
    FilesError: |_| super::Exit::Failed, |_| None;
}

/// Writes the pages of a plan to a directory.
pub async fn write_pages(
    directory: &Path,
    planned: Planned,
    activity: Activity,
    services: &BuildServices,
    cluster: String,
    now: Timestamp,
) -> Result<()> {
    let Planned { plan, snapshot, .. } = planned;
    let facts = Facts {
        activity,
        builds: LoggedBuilds::of(&services.cache, &plan, now),
        cluster,
        registry: services.images.location.to_string(),
        ..Facts::of(Arc::new(plan), &snapshot, &services.definitions, now)
    };
    write_files(directory, &facts, services).await?;
    output::message(&format!("wrote the page to {}", directory.join("index.html").display()));
    Ok(())
}

/// Page of a service.
pub struct ServedPage {
    /// Receives each reconcile's result.
    pub sink: Arc<dyn StatusSink>,
    /// Routes of the HTTP server.
    pub router: Router,
    /// Actions of users on the page, if `--page-actions` allows them.
    pub actions: Option<Arc<Actions>>,
}

/// Makes the page of a service at `address`. `reconcile_request` is notified when an action calls for a reconcile.
pub fn serve_page(
    args: &PageArgs,
    address: SocketAddr,
    services: &BuildServices,
    cluster: &Arc<dyn Cluster>,
    kube: Option<&Arc<KubeCluster>>,
    reconcile_request: &Arc<Notify>,
) -> ServedPage {
    let local = address.ip().is_loopback();
    let actions = args.page_actions.then(|| {
        let (cluster, request) = (Arc::clone(cluster), Arc::clone(reconcile_request));
        Actions::new(services.clone(), cluster, kube.cloned(), local, request)
    });
    let page = PageServer::new(services.clone(), cluster.describe(), actions.clone());
    let router = page.router();
    ServedPage { sink: page, router, actions }
}
