//! Adapter: reads secrets, from files or from a Kubernetes cluster. They are kept in memory only.

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use k8s_openapi::api::core::v1::Secret as KubeSecret;
use kube::{Api, Client};
use zeroize::Zeroizing;

use crate::{
    cluster::{ClusterError, KubeOptions, kube::client},
    site::{SecretKey, SecretName, SecretSource},
};

/// Larger files are no keys and no passwords: Kubernetes itself takes Secrets up to this size.
const MAX_SECRET: u64 = 1 << 20;

/// Reads secrets. A clone shares the connection, which is made when a Secret is read first.
#[derive(Clone, Default, derive_more::Debug)]
pub struct SecretReader {
    root: PathBuf,
    #[debug(skip)]
    options: KubeOptions,
    #[debug(skip)]
    client: Arc<tokio::sync::OnceCell<Client>>,
}

/// What was read. It is not shown by `{:?}`, and wiped when it is dropped; what carried it here, such as the API server's
/// answer, is not.
#[derive(Clone, PartialEq, Eq, derive_more::Debug)]
#[debug("Secret(...)")]
pub struct Secret(Zeroizing<Vec<u8>>);

/// Why a secret cannot be had.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what the fields are")]
pub enum SecretError {
    /// A file.
    #[error("read secret file {0}")]
    File(PathBuf, #[source] io::Error),
    /// No cluster to read it (`namespace/name`) from.
    #[error("reach the cluster that holds Secret {0}")]
    Cluster(String, #[source] Box<ClusterError>),
    /// The cluster's answer when a Secret (`namespace/name`) was asked for.
    #[error("read Secret {0}: {words}", words = words(.1))]
    Api(String, Box<kube::Error>),
    /// A Secret (`namespace/name`) without the key, and the keys that it has.
    #[error("read Secret {secret}: it has no key {key:?}; it has {known}")]
    NoKey { secret: String, key: String, known: String },
    /// A password or passphrase that is no text.
    #[error("read {0}: it is no text")]
    NotText(String),
}

impl SecretError {
    /// May it be there later, without any change?
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Cluster(_, source) => source.is_unreachable(),
            Self::Api(_, error) => match error.as_ref() {
                kube::Error::Api(status) => status.code >= 500 || status.code == 429,
                _ => true,
            },
            Self::File(..) | Self::NoKey { .. } | Self::NotText(_) => false,
        }
    }

    /// What to do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::File(path, source) if source.kind() == io::ErrorKind::NotFound => Some(format!(
                "put it at {}, or name another place in site.yaml; a relative path starts in the definitions directory",
                path.display()
            )),
            Self::Api(secret, error) => match error.as_ref() {
                kube::Error::Api(status) if status.code == 404 => {
                    Some(format!("create Secret {secret}, or correct its name in site.yaml"))
                }
                kube::Error::Api(status) if status.code == 403 => Some(format!(
                    "allow farrier to `get` Secret {secret}: with the chart, list it under `rbac.secrets`"
                )),
                _ => None,
            },
            Self::Cluster(_, source) => source.hint(),
            Self::File(..) | Self::NoKey { .. } | Self::NotText(_) => None,
        }
    }
}

/// The API server's own words; kube's text has the whole status object beside them.
fn words(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) => status.message.clone(),
        other => other.to_string(),
    }
}

impl SecretReader {
    /// A reader. Relative files start at `root`, the definitions directory; Secrets are read from the cluster that
    /// `options` name, which for the default ones is the kubeconfig's, else the pod's.
    pub fn new(root: PathBuf, options: KubeOptions) -> Self {
        Self { root, options, client: Arc::default() }
    }

    /// Reads one secret.
    pub async fn read(&self, source: &SecretSource) -> Result<Secret, SecretError> {
        match source {
            SecretSource::File(path) => self.read_file(path).await,
            SecretSource::Secret(key) => self.read_key(key).await,
        }
    }

    /// Reads a file; a relative path starts in the definitions directory.
    pub async fn read_file(&self, path: &Path) -> Result<Secret, SecretError> {
        let path = self.root.join(path);
        let failed = |source| SecretError::File(path.clone(), source);
        let size = tokio::fs::metadata(&path).await.map_err(failed)?.len();
        if size > MAX_SECRET {
            return Err(failed(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("it has {size} bytes, and no secret has more than {MAX_SECRET}"),
            )));
        }
        tokio::fs::read(&path).await.map(Secret::from).map_err(failed)
    }

    /// Reads one key of a Kubernetes Secret.
    pub async fn read_key(&self, key: &SecretKey) -> Result<Secret, SecretError> {
        let SecretKey { namespace, name, key } = key;
        let name = SecretName { namespace: namespace.clone(), name: name.clone() };
        let mut data = self.read_all(&name).await?;
        data.remove(key).ok_or_else(|| SecretError::NoKey {
            secret: name.to_string(),
            key: key.clone(),
            known: match data.keys().map(String::as_str).collect::<Vec<_>>() {
                keys if keys.is_empty() => "none".to_owned(),
                keys => keys.join(", "),
            },
        })
    }

    /// Reads all keys of a Kubernetes Secret.
    pub async fn read_all(&self, name: &SecretName) -> Result<BTreeMap<String, Secret>, SecretError> {
        let connect = || async {
            client(&self.options)
                .await
                .map_err(|source| SecretError::Cluster(name.to_string(), Box::new(source)))
        };
        let client = self.client.get_or_try_init(connect).await?;
        let api: Api<KubeSecret> = Api::namespaced(client.clone(), &name.namespace);
        let found =
            api.get(&name.name).await.map_err(|error| SecretError::Api(name.to_string(), Box::new(error)))?;
        Ok(found
            .data
            .unwrap_or_default()
            .into_iter()
            .map(|(key, value)| (key, Secret::from(value.0)))
            .collect())
    }
}

impl Secret {
    /// What was read, as it is.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// A password or passphrase: without the end of the line that editors leave. `what` names it in the error.
    pub fn text(&self, what: &str) -> Result<&str, SecretError> {
        let text = std::str::from_utf8(&self.0).map_err(|_| SecretError::NotText(what.to_owned()))?;
        Ok(text.strip_suffix('\n').map_or(text, |line| line.strip_suffix('\r').unwrap_or(line)))
    }
}

impl From<Vec<u8>> for Secret {
    fn from(bytes: Vec<u8>) -> Self {
        Self(Zeroizing::new(bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reader(root: &Path) -> SecretReader {
        SecretReader::new(root.to_owned(), KubeOptions::default())
    }

    #[tokio::test]
    async fn files_start_in_the_definitions_directory() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("password"), "anvil\r\n").unwrap();
        let secret = reader(dir.path()).read(&SecretSource::File("password".parse().unwrap())).await.unwrap();
        assert_eq!(secret.as_bytes(), b"anvil\r\n");
        assert_eq!(secret.text("the password").unwrap(), "anvil");
        assert_eq!(format!("{secret:?}"), "Secret(...)");
        let absolute = SecretSource::File(dir.path().join("password").to_str().unwrap().parse().unwrap());
        assert_eq!(reader(Path::new("/nonexistent")).read(&absolute).await.unwrap(), secret);
    }

    #[tokio::test]
    async fn what_cannot_be_read_says_where_it_was_looked_for() {
        let dir = tempfile::tempdir().unwrap();
        let error = reader(dir.path()).read_file(Path::new("absent")).await.unwrap_err();
        assert!(error.hint().unwrap().contains(&dir.path().join("absent").display().to_string()));
        assert!(!error.is_transient());
        let file = std::fs::File::create(dir.path().join("large")).unwrap();
        file.set_len(MAX_SECRET + 1).unwrap();
        assert!(reader(dir.path()).read_file(Path::new("large")).await.is_err());
        let error = Secret::from(vec![0xff]).text("the passphrase").unwrap_err();
        assert_eq!(error.to_string(), "read the passphrase: it is no text");
    }

    #[tokio::test]
    async fn a_kubeconfig_that_names_no_cluster_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let kubeconfig = Some(dir.path().join("kubeconfig"));
        let options = KubeOptions { kubeconfig, ..KubeOptions::default() };
        let key = SecretKey {
            namespace: "farrier".parse().unwrap(),
            name: "key".parse().unwrap(),
            key: "tls.key".into(),
        };
        let error = SecretReader::new(PathBuf::new(), options).read_key(&key).await.unwrap_err();
        assert_eq!(error.to_string(), "reach the cluster that holds Secret farrier/key");
    }
}
