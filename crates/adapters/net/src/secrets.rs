//! Reads secrets from files or from a Kubernetes cluster. They are held in memory only.

use std::{
    collections::BTreeMap,
    error::Error,
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use async_trait::async_trait;
use farrier_core::site::{SecretKey, SecretName, SecretSource};
use zeroize::Zeroizing;

/// Maximum size of a secret in bytes, which is Kubernetes' limit for Secrets.
const MAX_SECRET: u64 = 1 << 20;

/// The Secrets of a cluster.
#[async_trait]
pub trait ClusterSecrets: Send + Sync {
    /// Reads all keys of a Secret.
    async fn read(&self, name: &SecretName) -> Result<BTreeMap<String, Secret>, ClusterSecretError>;
}

/// Reads secrets. A clone shares the connection to the cluster.
#[derive(Clone, Default, derive_more::Debug)]
pub struct SecretReader {
    root: PathBuf,
    #[debug(skip)]
    cluster: Option<Arc<dyn ClusterSecrets>>,
}

/// Content of a secret. `{:?}` does not show it, and dropping it wipes it. Other buffers, such as the API server's
/// response, are not wiped.
#[derive(Clone, PartialEq, Eq, derive_more::Debug)]
#[debug("Secret(...)")]
pub struct Secret(Zeroizing<Vec<u8>>);

/// Reason that a secret cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum SecretError {
    /// A secret file is unreadable.
    #[error("cannot read secret file {0}")]
    File(PathBuf, #[source] io::Error),
    /// The cluster did not provide the Secret.
    #[error(transparent)]
    Cluster(ClusterSecretError),
    /// The Secret (`namespace/name`) lacks the key. `known` lists its keys.
    #[error("cannot read Secret {secret}: there is no key {key:?}; its keys: {known}")]
    NoKey { secret: String, key: String, known: String },
    /// A password or passphrase is not valid UTF-8.
    #[error("cannot read {0}: it is not text")]
    NotText(String),
}

/// Reason that a cluster does not provide a Secret.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct ClusterSecretError {
    /// The failed action, with the name of the Secret.
    pub message: String,
    /// Cause, if `message` does not contain it.
    pub source: Option<Box<dyn Error + Send + Sync>>,
    /// Suggested remedy, if one is known.
    pub hint: Option<String>,
    /// Whether a later attempt may succeed without any change.
    pub is_transient: bool,
}

impl SecretError {
    /// Whether a later attempt may succeed without any change.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Cluster(error) => error.is_transient,
            Self::File(..) | Self::NoKey { .. } | Self::NotText(_) => false,
        }
    }

    /// Suggested remedy, if one is known.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::File(path, source) if source.kind() == io::ErrorKind::NotFound => Some(format!(
                "create {}, or name another path in site.yaml; relative paths are resolved \
                 against the definitions directory",
                path.display()
            )),
            Self::Cluster(error) => error.hint.clone(),
            Self::File(..) | Self::NoKey { .. } | Self::NotText(_) => None,
        }
    }
}

impl SecretReader {
    /// Creates a reader. Relative paths are resolved against `root`, the definitions directory. Without a cluster, there
    /// are no Secrets.
    pub fn new(root: PathBuf, cluster: Option<Arc<dyn ClusterSecrets>>) -> Self {
        Self { root, cluster }
    }

    /// Reads one secret.
    pub async fn read(&self, source: &SecretSource) -> Result<Secret, SecretError> {
        match source {
            SecretSource::File(path) => self.read_file(path).await,
            SecretSource::Secret(key) => self.read_key(key).await,
        }
    }

    /// Reads a file. Relative paths are resolved against the definitions directory.
    pub async fn read_file(&self, path: &Path) -> Result<Secret, SecretError> {
        let path = self.root.join(path);
        let failed = |source| SecretError::File(path.clone(), source);
        let size = tokio::fs::metadata(&path).await.map_err(failed)?.len();
        if size > MAX_SECRET {
            return Err(failed(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("it has {size} bytes; the limit for secrets is {MAX_SECRET} bytes"),
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
        let Some(cluster) = &self.cluster else {
            return Err(SecretError::Cluster(ClusterSecretError {
                message: format!("cannot read Secret {name}: no cluster is configured"),
                source: None,
                hint: None,
                is_transient: false,
            }));
        };
        cluster.read(name).await.map_err(SecretError::Cluster)
    }
}

impl Secret {
    /// The unaltered content.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// The content as a password or passphrase, without the line end that editors add. `what` names the secret in errors.
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
        SecretReader::new(root.to_owned(), None)
    }

    #[tokio::test]
    async fn relative_paths_are_resolved_against_the_definitions_directory() {
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
    async fn read_errors_are_specific() {
        let dir = tempfile::tempdir().unwrap();
        let error = reader(dir.path()).read_file(Path::new("absent")).await.unwrap_err();
        assert!(error.hint().unwrap().contains(&dir.path().join("absent").display().to_string()));
        assert!(!error.is_transient());
        let file = std::fs::File::create(dir.path().join("large")).unwrap();
        file.set_len(MAX_SECRET + 1).unwrap();
        assert!(reader(dir.path()).read_file(Path::new("large")).await.is_err());
        let error = Secret::from(vec![0xff]).text("the passphrase").unwrap_err();
        assert_eq!(error.to_string(), "cannot read the passphrase: it is not text");
    }
}
