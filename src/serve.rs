//! `farrier run` without `--once`: runs the loop with its lease, probes, metrics and definitions.

use std::{
    hash::{BuildHasher, RandomState},
    net::SocketAddr,
    sync::Arc,
    time::Duration,
};

use axum::Router;
use clap::Args;
use farrier_builder::services::{BuildServices, Reporter, Stage};
use farrier_cluster::{Fence, KubeCluster};
use farrier_controller::{
    live::{Live, LiveContext, StatusSink},
    runtime::{
        Configuration, Health, HttpServer, Metrics,
        lease::{self, LeaseOptions, LeaseTask, LeaseTiming},
        watch_configuration,
    },
    status::{KubeStatus, StatusDestination},
};
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

#[cfg(feature = "header-collection")]
use super::headers::header_routes;
use super::{
    CliError, Exit, Result, env_vars as vars,
    run::node_tasks,
    session::{Connection, Session},
};
#[cfg(feature = "dashboard")]
use super::{args::PageArgs, page::serve_page};

/// Options of a run without --once.
#[derive(Debug, Args)]
pub struct ServiceArgs {
    /// Elect a leader: of several farriers with the same lease, only one builds and writes [default: true in
    /// a pod with --cluster kube]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub leader_elect: Option<bool>,
    /// Name of the lease [default: farrier, or farrier-NAME with --instance NAME]
    #[arg(long, value_name = "NAME")]
    pub lease_name: Option<String>,
    /// Namespace of the lease [default: farrier's own]
    #[arg(long, value_name = "NAMESPACE")]
    pub lease_namespace: Option<String>,
    /// Address that answers /metrics, /healthz and /readyz and shows the fleet at /, or `off` [default: port
    /// 8080 of all addresses in a pod with --cluster kube, else off]
    #[arg(long, env = vars::FARRIER_LISTEN, value_name = "ADDRESS", hide_env_values = true)]
    pub listen: Option<String>,
    /// Accept header sets that nodes send to the --listen address (`farrier headers collect --to`); the
    /// directory holds a key for each kernel, in a file with the name of its label
    #[cfg(feature = "header-collection")]
    #[arg(long, env = vars::FARRIER_COLLECT_KEYS, value_name = "DIR", hide_env_values = true)]
    pub collect_keys: Option<std::path::PathBuf>,
    #[cfg(feature = "dashboard")]
    #[command(flatten)]
    pub page: PageArgs,
}

/// Interval at which the definitions on disk are compared with the ones in use.
const DEFINITIONS_INTERVAL: Duration = Duration::from_secs(3);
/// Default address of the HTTP server in a pod: IPv4 and IPv6.
const LISTEN_IN_POD: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V6(std::net::Ipv6Addr::UNSPECIFIED), 8080);

/// Runs the loop until a signal arrives. Returns [`Exit::Done`] after SIGTERM, the signal that stops a service.
pub async fn serve(
    session: &Session,
    args: &ServiceArgs,
    interval: Option<u64>,
    mut services: BuildServices,
    connection: Connection,
) -> Result<Exit> {
    let Connection { cluster, kube } = connection;
    let (metrics, health) = (Arc::new(Metrics::default()), Arc::new(Health::default()));
    if let Some(kube) = &kube {
        metrics.add_api(kube.stats());
    }
    metrics.certificates(services.certificate_expiries());
    let resync = Duration::from_secs(interval.unwrap_or(if kube.is_some() { 60 } else { 30 }));
    services.process.reporter = Arc::new(Logs);
    let identity = identity();
    let (leads, lease) = leadership(args, &mut services, kube.as_deref(), &identity)?;
    let (stop_server, reconcile_request) = (CancellationToken::new(), Arc::<Notify>::default());
    #[cfg(feature = "dashboard")]
    let mut page = None;
    if let Some(address) = listen(args, kube.is_some())? {
        let routes = Router::new();
        #[cfg(feature = "header-collection")]
        let routes = routes.merge(header_routes(&services, args.collect_keys.as_ref()));
        #[cfg(feature = "dashboard")]
        let routes = {
            let served =
                serve_page(&args.page, address, &services, &cluster, kube.as_ref(), &reconcile_request);
            let routes = routes.merge(served.router.clone());
            page = Some(served);
            routes
        };
        let server = HttpServer::bind(address, Arc::clone(&health), Arc::clone(&metrics), routes).await?;
        tracing::info!(%address, "serving /, /metrics, /healthz and /readyz");
        tokio::spawn(server.serve(stop_server.clone()));
    }
    let configuration = definitions(session, &services, &stop_server);
    let status = kube.as_deref().map(|kube| status_sink(kube, &services, identity));
    tracing::info!(cluster = cluster.describe(), "watching");
    #[cfg(feature = "dashboard")]
    let sink = page.as_ref().map(|page| Arc::clone(&page.sink));
    #[cfg(not(feature = "dashboard"))]
    let sink = None;
    let context = LiveContext {
        resync,
        cluster,
        configuration,
        leads,
        status,
        page: sink,
        node_tasks: node_tasks(),
        reconcile_request,
        metrics,
        health,
    };
    Live::new(services, context).run().await;
    #[cfg(feature = "dashboard")]
    if let Some(actions) = page.and_then(|page| page.actions) {
        actions.finish().await;
    }
    // Release the lease last, because a write may have been in flight until here.
    if let Some(lease) = lease {
        lease.release().await;
    }
    stop_server.cancel();
    Ok(if session.stop.is_termination() { Exit::Done } else { Exit::Interrupted })
}

/// Returns the writer of farrier's status objects in a live cluster.
fn status_sink(kube: &KubeCluster, services: &BuildServices, instance: String) -> Arc<dyn StatusSink> {
    let (namespace, manager) = (kube.namespace().to_owned(), services.process.instance.to_string());
    let destination = StatusDestination { namespace, manager, instance };
    Arc::new(KubeStatus::new(kube.client(), destination, services.process.fence.clone()))
}

/// Returns the definitions in use. Changes to the files of `--definitions` are loaded while farrier runs.
fn definitions(
    session: &Session,
    services: &BuildServices,
    stop_server: &CancellationToken,
) -> watch::Receiver<Configuration> {
    let definitions = Arc::new(services.definitions.clone());
    let (sender, receiver) = watch::channel(Configuration { definitions, error: None });
    if session.global.definitions.is_some() {
        let directory = services.definitions.root.clone();
        tokio::spawn(watch_configuration(directory, DEFINITIONS_INTERVAL, sender, stop_server.clone()));
    }
    receiver
}

/// Campaigns for the lease if leader election is on. Otherwise this farrier leads from the start.
fn leadership(
    args: &ServiceArgs,
    services: &mut BuildServices,
    kube: Option<&KubeCluster>,
    identity: &str,
) -> Result<(watch::Receiver<bool>, Option<LeaseTask>)> {
    if !args.leader_elect.unwrap_or_else(|| kube.is_some() && vars::in_pod()) {
        return Ok((watch::channel(true).1, None));
    }
    let kube = kube.ok_or_else(|| CliError::usage("--leader-elect: requires --cluster kube"))?;
    let options = LeaseOptions {
        namespace: args.lease_namespace.clone().unwrap_or_else(|| kube.namespace().to_owned()),
        name: args.lease_name.clone().unwrap_or_else(|| services.process.instance.to_string()),
        identity: identity.to_owned(),
        timing: LeaseTiming::default(),
    };
    let (leadership, task) = lease::campaign(kube.client(), options);
    let leads = leadership.watch();
    let fence: Arc<dyn Fence> = Arc::new(leadership);
    services.process.fence = Some(Arc::clone(&fence));
    kube.set_fence(fence);
    Ok((leads, Some(task)))
}

/// Returns this process's identity as a candidate for the lease. A random number distinguishes it from earlier processes
/// on the same machine.
fn identity() -> String {
    let number = RandomState::new().hash_one(std::process::id());
    format!("{}_{number:016x}", vars::host_name())
}

/// Returns the address of `--listen`, or the default.
fn listen(args: &ServiceArgs, is_live: bool) -> Result<Option<SocketAddr>> {
    match args.listen.as_deref() {
        None => Ok((is_live && vars::in_pod()).then_some(LISTEN_IN_POD)),
        Some("off") => Ok(None),
        Some(text) => text.parse().map(Some).map_err(|_| {
            let forms = "write IP:PORT, such as 127.0.0.1:8080, or off";
            CliError::usage(format!("--listen: {text:?} is not an address: {forms}"))
        }),
    }
}

/// Reports builds in log lines, because a service has no progress bar.
struct Logs;

impl Reporter for Logs {
    fn stage(&self, subject: &str, stage: Stage) {
        tracing::debug!(subject, %stage, "stage");
    }

    fn output(&self, subject: &str, line: &str) {
        tracing::trace!(subject, line, "build output");
    }

    fn note(&self, subject: &str, text: &str) {
        tracing::info!(subject, text, "note");
    }

    fn finished(&self, subject: &str, outcome: &str) {
        tracing::info!(subject, outcome, "finished");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(listen: Option<&str>) -> ServiceArgs {
        ServiceArgs {
            leader_elect: None,
            lease_name: None,
            lease_namespace: None,
            listen: listen.map(str::to_owned),
            #[cfg(feature = "header-collection")]
            collect_keys: None,
            #[cfg(feature = "dashboard")]
            page: PageArgs { page_actions: false },
        }
    }

    #[test]
    fn listen_accepts_off_and_an_address() {
        assert_eq!(listen(&args(Some("off")), true).unwrap(), None);
        assert_eq!(listen(&args(Some("127.0.0.1:9")), false).unwrap(), Some(([127, 0, 0, 1], 9).into()));
        let wrong = listen(&args(Some("8080")), true).unwrap_err().render();
        assert!(wrong.contains("--listen: \"8080\" is not an address: write IP:PORT, such as"), "{wrong}");
    }

    #[test]
    fn no_two_candidates_have_one_identity() {
        assert_ne!(identity(), identity());
    }
}
