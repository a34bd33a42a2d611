//! Secrets of the cluster, for the site's passwords and keys.

use std::collections::BTreeMap;

use async_trait::async_trait;
use farrier_core::site::SecretName;
use farrier_net::{ClusterSecretError, ClusterSecrets, Secret};
use k8s_openapi::api::core::v1::Secret as KubeSecret;
use kube::{Api, Client};
use tokio::sync::OnceCell;

use super::{super::error::ClusterError, KubeOptions, client};

/// Reads Secrets of the cluster that `options` select. Connects when the first Secret is read.
pub struct KubeSecrets {
    options: KubeOptions,
    client: OnceCell<Client>,
}

impl KubeSecrets {
    /// Stores the options without connecting. By default the kubeconfig names the cluster; without a kubeconfig it is the
    /// cluster in which this process runs as a pod.
    pub fn new(options: KubeOptions) -> Self {
        Self { options, client: OnceCell::new() }
    }
}

#[async_trait]
impl ClusterSecrets for KubeSecrets {
    async fn read(&self, name: &SecretName) -> Result<BTreeMap<String, Secret>, ClusterSecretError> {
        let client = self.client.get_or_try_init(|| client(&self.options)).await;
        let client = client.map_err(|error| unavailable(name, error))?;
        let api: Api<KubeSecret> = Api::namespaced(client.clone(), &name.namespace);
        let secret = api.get(&name.name).await.map_err(|error| rejected(name, &error))?;
        let data = secret.data.unwrap_or_default().into_iter();
        Ok(data.map(|(key, value)| (key, Secret::from(value.0))).collect())
    }
}

fn unavailable(name: &SecretName, error: ClusterError) -> ClusterSecretError {
    ClusterSecretError {
        message: format!("cannot reach the cluster that holds Secret {name}"),
        hint: error.hint(),
        is_transient: error.is_unreachable(),
        source: Some(Box::new(error)),
    }
}

/// Returns the error for a request that the API server rejected. Uses only the server's message, because kube's text adds the
/// whole status object.
fn rejected(name: &SecretName, error: &kube::Error) -> ClusterSecretError {
    let (code, message) = match error {
        kube::Error::Api(status) => (Some(status.code), status.message.clone()),
        other => (None, other.to_string()),
    };
    let hint = match code {
        Some(404) => Some(format!("create Secret {name}, or correct its name in site.yaml")),
        Some(403) => Some(format!(
            "allow farrier to `get` Secret {name}: with the chart, list it under `rbac.secrets`"
        )),
        _ => None,
    };
    ClusterSecretError {
        message: format!("cannot read Secret {name}: {message}"),
        source: None,
        hint,
        is_transient: code.is_none_or(|code| code >= 500 || code == 429),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_missing_kubeconfig_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let kubeconfig = Some(dir.path().join("kubeconfig"));
        let secrets = KubeSecrets::new(KubeOptions { kubeconfig, ..KubeOptions::default() });
        let name = SecretName { namespace: "farrier".parse().unwrap(), name: "key".parse().unwrap() };
        let error = secrets.read(&name).await.err().unwrap();
        assert_eq!(error.to_string(), "cannot reach the cluster that holds Secret farrier/key");
        assert!(error.hint.is_some());
    }
}
