//! Connects to a cluster, and finds farrier's user name there.

use std::{path::PathBuf, sync::Arc, time::Duration};

use farrier_core::plan::{Instance, WriteNamespaces};
use k8s_openapi::api::authentication::v1::SelfSubjectReview;
use kube::{
    Api, Client, Config,
    api::PostParams,
    client::ClientBuilder,
    config::{KubeConfigOptions, Kubeconfig, KubeconfigError},
};

use super::{
    super::error::{ApiError, ClusterError, MissingRight, Scope},
    call::Caller,
    errors::causes,
    stats::{KubeStats, StatsLayer},
};

/// Selects the cluster and the identity in it.
#[derive(Clone, Debug)]
pub struct KubeOptions {
    /// The kubeconfig. Default: the file in `KUBECONFIG`, else `~/.kube/config`, else the pod's service account.
    pub kubeconfig: Option<PathBuf>,
    /// The kubeconfig's context. Default: the current one.
    pub context: Option<String>,
    /// farrier's own namespace. Default: the pod's, the context's, or `farrier`.
    pub namespace: Option<String>,
    /// The pod in that namespace in which farrier runs.
    pub pod: Option<String>,
    /// Interval at which farrier checks whether the API serves an operator's kind that it did not serve before.
    pub discovery_interval: Duration,
    /// The instance of farrier, which is the field manager in `managedFields`.
    pub instance: Instance,
    /// The namespaces that farrier may write to.
    pub writable: WriteNamespaces,
}

impl Default for KubeOptions {
    fn default() -> Self {
        Self {
            kubeconfig: None,
            context: None,
            namespace: None,
            pod: None,
            discovery_interval: Duration::from_secs(30),
            instance: Instance::default(),
            writable: WriteNamespaces::All,
        }
    }
}

/// Connects to the API server for reads beyond the fleet, such as Secrets.
pub async fn client(options: &KubeOptions) -> Result<Client, ClusterError> {
    Ok(connect(options).await?.client)
}

/// A client and its connection settings.
pub(super) struct Connection {
    pub(super) client: Client,
    pub(super) stats: Arc<KubeStats>,
    pub(super) address: String,
    pub(super) namespace: String,
}

/// Default namespace.
const NAMESPACE: &str = "farrier";

pub(super) async fn connect(options: &KubeOptions) -> Result<Connection, ClusterError> {
    let mut config = config(options).await?;
    // farrier implements the retries itself, so that a write is not retried after the fence has closed.
    config.default_retry = false;
    let address = config.cluster_url.to_string().trim_end_matches('/').to_owned();
    // kube reports `default` for a context without a namespace; farrier is never installed there.
    let found = Some(config.default_namespace.clone()).filter(|name| name != "default");
    let namespace = options.namespace.clone().or(found).unwrap_or_else(|| NAMESPACE.to_owned());
    let stats = Arc::new(KubeStats::default());
    let builder =
        ClientBuilder::try_from(config).map_err(|error| ClusterError::Configuration(causes(&error)))?;
    let client = builder.with_layer(&StatsLayer(stats.clone())).build();
    Ok(Connection { client, stats, address, namespace })
}

/// Reads the kubeconfig if one exists, else the pod's service account, like kubectl.
async fn config(options: &KubeOptions) -> Result<Config, ClusterError> {
    let KubeOptions { kubeconfig, context, .. } = options;
    let wanted = KubeConfigOptions { context: context.clone(), ..KubeConfigOptions::default() };
    let config = match kubeconfig {
        Some(path) => match Kubeconfig::read_from(path) {
            Ok(kubeconfig) => Config::from_custom_kubeconfig(kubeconfig, &wanted).await,
            Err(error) => Err(error),
        },
        None => Config::from_kubeconfig(&wanted).await,
    };
    let error = match config {
        Ok(config) => return Ok(config),
        Err(error) => error,
    };
    let none_there = match &error {
        KubeconfigError::FindPath => true,
        KubeconfigError::ReadConfig(error, _) => error.kind() == std::io::ErrorKind::NotFound,
        // `KUBECONFIG` is empty, or names an empty file.
        KubeconfigError::CurrentContextNotSet => context.is_none(),
        _ => false,
    };
    let may_be_a_pod = none_there && kubeconfig.is_none() && context.is_none();
    if may_be_a_pod && let Ok(config) = Config::incluster() {
        return Ok(config);
    }
    let what = match context {
        Some(context) => format!("context {context:?} of the kubeconfig"),
        None => "kubeconfig".to_owned(),
    };
    let also = if may_be_a_pod { "; and farrier does not run in a pod with a service account" } else { "" };
    Err(ClusterError::Configuration(format!("{what}: {}{also}", causes(&error))))
}

/// Returns farrier's user name at the API server, for messages about missing permissions. Every authenticated user may request
/// it. If the API server does not provide it, farrier continues without it. As the first request, this call also tests the
/// connection.
pub(super) async fn who_am_i(
    caller: &Caller,
    client: &Client,
    address: &str,
) -> Result<Option<String>, ClusterError> {
    let api: Api<SelfSubjectReview> = Api::all(client.clone());
    let right = MissingRight {
        user: None,
        verb: "create",
        group: "authentication.k8s.io".to_owned(),
        resource: "selfsubjectreviews".to_owned(),
        scope: Scope::Cluster,
        verbs: &["create"],
    };
    let (params, question) = (PostParams::default(), SelfSubjectReview::default());
    // No fence is needed yet, because the request changes nothing.
    match caller.call(&right, || api.create(&params, &question)).await {
        Ok(review) => Ok(review.status.and_then(|status| status.user_info).and_then(|user| user.username)),
        Err(error @ (ApiError::Unavailable(_) | ApiError::Unauthorized(_))) => {
            Err(ClusterError::Api { action: format!("connect to the cluster at {address}"), error })
        }
        Err(_) => Ok(None),
    }
}
