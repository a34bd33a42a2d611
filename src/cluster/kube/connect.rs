//! Adapter: finds a cluster, and farrier's name there.

use std::sync::Arc;

use http::Method;
use kube::{
    Client, Config,
    client::ClientBuilder,
    config::{KubeConfigOptions, Kubeconfig, KubeconfigError},
};
use serde_json::json;

use super::{
    super::ClusterError,
    KubeOptions,
    call::{Call, Caller},
    errors::causes,
    stats::{KubeStats, Observe},
    words::{MissingRight, Scope},
};

/// A client, and what it was made from.
pub(super) struct Connection {
    pub(super) client: Client,
    pub(super) stats: Arc<KubeStats>,
    pub(super) address: String,
    pub(super) namespace: String,
}

/// Where no other is known.
const NAMESPACE: &str = "farrier";

pub(super) async fn client(options: &KubeOptions) -> Result<Connection, ClusterError> {
    let mut config = config(options).await?;
    // farrier tries again itself, and never a write that the fence forbids by then.
    config.default_retry = false;
    let address = config.cluster_url.to_string().trim_end_matches('/').to_owned();
    // A context without a namespace reads as `default`, which is nobody's home.
    let found = Some(config.default_namespace.clone()).filter(|name| name != "default");
    let namespace = options.namespace.clone().or(found).unwrap_or_else(|| NAMESPACE.to_owned());
    let stats = Arc::new(KubeStats::default());
    let builder = ClientBuilder::try_from(config)
        .map_err(|error| ClusterError::Configuration { reason: causes(&error) })?;
    let client = builder.with_layer(&Observe(stats.clone())).build();
    Ok(Connection { client, stats, address, namespace })
}

/// A kubeconfig where there is one, else the pod's service account, as kubectl does.
async fn config(options: &KubeOptions) -> Result<Config, ClusterError> {
    let KubeOptions { kubeconfig, context, namespace: _, discovery_interval: _ } = options;
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
        // KUBECONFIG with nothing in it, or an empty file.
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
    let also = if may_be_a_pod { "; and this is no pod with a service account" } else { "" };
    Err(ClusterError::Configuration { reason: format!("{what}: {}{also}", causes(&error)) })
}

/// farrier's name at the API server, for messages about missing rights. Every authenticated user may ask; where the
/// API server does not tell, farrier does without. So the first request of all shows whether there is an answer.
pub(super) async fn who_am_i(caller: &Caller, address: &str) -> Result<Option<String>, ClusterError> {
    let call = Call {
        action: format!("connect to the cluster at {address}"),
        method: Method::POST,
        path: "/apis/authentication.k8s.io/v1/selfsubjectreviews".to_owned(),
        content_type: "application/json",
        body: json!({"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}),
        right: MissingRight {
            user: None,
            verb: "create",
            group: "authentication.k8s.io".to_owned(),
            resource: "selfsubjectreviews".to_owned(),
            scope: Scope::Cluster,
            verbs: &["create"],
        },
    };
    match caller.call(&call).await {
        Ok(review) => {
            Ok(review.pointer("/status/userInfo/username").and_then(|name| name.as_str()).map(str::to_owned))
        }
        Err(error @ (ClusterError::Unavailable { .. } | ClusterError::Unauthorized { .. })) => Err(error),
        Err(_) => Ok(None),
    }
}
