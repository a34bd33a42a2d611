//! Connects to a cluster, and looks up farrier's user name there.

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
    super::error::{ApiError, ClusterError, MissingPermission, PermissionScope},
    call::Caller,
    errors::causes,
    stats::{KubeStats, StatsLayer},
};

/// Selects the cluster and the identity in it.
#[derive(Clone, Debug, Default)]
pub struct KubeOptions {
    /// The kubeconfig. Default: the file in `KUBECONFIG`, else `~/.kube/config`, else the pod's service account.
    pub kubeconfig: Option<PathBuf>,
    /// The kubeconfig's context. Default: the current one.
    pub context: Option<String>,
    /// farrier's own namespace. Default: the pod's, the context's, or `farrier`.
    pub namespace: Option<String>,
    /// Name of the pod in which farrier runs, in farrier's own namespace.
    pub pod: Option<String>,
    /// Interval at which farrier checks whether the API now serves the kind of an operator that was not installed. Default:
    /// 30 seconds.
    pub discovery_interval: Option<Duration>,
    /// The instance of farrier, which is the field manager in `managedFields`.
    pub instance: Instance,
    /// The namespaces that farrier may write to.
    pub writable: WriteNamespaces,
}

/// Connects to the API server, for reads that need no watches, such as Secrets.
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

const DEFAULT_NAMESPACE: &str = "farrier";
pub(super) const DEFAULT_DISCOVERY_INTERVAL: Duration = Duration::from_secs(30);

pub(super) async fn connect(options: &KubeOptions) -> Result<Connection, ClusterError> {
    let mut config = config(options).await?;
    // kube's own retries would repeat a write even after the fence has closed.
    config.default_retry = false;
    let address = config.cluster_url.to_string().trim_end_matches('/').to_owned();
    // kube reports `default` for a context without a namespace, and farrier is never installed in `default`.
    let namespace = Some(config.default_namespace.clone()).filter(|name| name != "default");
    let namespace = options.namespace.clone().or(namespace).unwrap_or_else(|| DEFAULT_NAMESPACE.to_owned());
    let stats = Arc::new(KubeStats::default());
    let plugin = config.auth_info.exec.as_ref().map(|plugin| {
        let advice = plugin.install_hint.as_ref().map(|advice| format!(" ({advice})"));
        let command = plugin.command.as_deref().unwrap_or_default();
        format!("credential plugin {command} of the kubeconfig{}: ", advice.unwrap_or_default())
    });
    let builder = ClientBuilder::try_from(config).map_err(|error| {
        let plugin = plugin.filter(|_| matches!(error, kube::Error::Auth(_))).unwrap_or_default();
        ClusterError::Configuration(format!("{plugin}{}", causes(&error)))
    })?;
    let client = builder.with_layer(&StatsLayer(stats.clone())).build();
    Ok(Connection { client, stats, address, namespace })
}

/// Reads the kubeconfig if one exists, else the pod's service account, like kubectl.
async fn config(options: &KubeOptions) -> Result<Config, ClusterError> {
    let KubeOptions { kubeconfig, context, .. } = options;
    let error = match read_kubeconfig(options).await {
        Ok(config) => return Ok(config),
        Err(error) => error,
    };
    let may_be_in_pod = kubeconfig.is_none() && context.is_none() && is_missing_kubeconfig(&error);
    if may_be_in_pod && let Ok(config) = Config::incluster() {
        return Ok(config);
    }
    let source = match context {
        Some(context) => format!("context {context:?} of the kubeconfig"),
        None => "kubeconfig".to_owned(),
    };
    let not_in_pod =
        if may_be_in_pod { "; and farrier does not run in a pod with a service account" } else { "" };
    Err(ClusterError::Configuration(format!("{source}: {}{not_in_pod}", causes(&error))))
}

async fn read_kubeconfig(options: &KubeOptions) -> Result<Config, KubeconfigError> {
    let selection = KubeConfigOptions { context: options.context.clone(), ..KubeConfigOptions::default() };
    match &options.kubeconfig {
        Some(path) => Config::from_custom_kubeconfig(Kubeconfig::read_from(path)?, &selection).await,
        None => Config::from_kubeconfig(&selection).await,
    }
}

fn is_missing_kubeconfig(error: &KubeconfigError) -> bool {
    match error {
        // `CurrentContextNotSet` also results from a `KUBECONFIG` that is empty or names an empty file.
        KubeconfigError::FindPath | KubeconfigError::CurrentContextNotSet => true,
        KubeconfigError::ReadConfig(error, _) => error.kind() == std::io::ErrorKind::NotFound,
        _ => false,
    }
}

/// Returns farrier's user name at the API server, for messages about missing permissions. Returns `None` if the API server does
/// not provide the name.
///
/// Every authenticated user may make this request. It is farrier's first one, and therefore also tests the connection.
pub(super) async fn own_user_name(
    caller: &Caller,
    client: &Client,
    address: &str,
) -> Result<Option<String>, ClusterError> {
    let api: Api<SelfSubjectReview> = Api::all(client.clone());
    let permission = MissingPermission {
        user: None,
        verb: "create",
        group: "authentication.k8s.io".to_owned(),
        resource: "selfsubjectreviews".to_owned(),
        scope: PermissionScope::Cluster,
        verbs: &["create"],
    };
    let (params, request) = (PostParams::default(), SelfSubjectReview::default());
    // The fence is not set yet, but the request changes nothing.
    match caller.call(&permission, || api.create(&params, &request)).await {
        Ok(review) => Ok(review.status.and_then(|status| status.user_info).and_then(|user| user.username)),
        Err(error @ (ApiError::Unavailable(_) | ApiError::Unauthorized(_))) => {
            Err(ClusterError::Api { action: format!("connect to the cluster at {address}"), error })
        }
        Err(_) => Ok(None),
    }
}
