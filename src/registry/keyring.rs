//! Adapter: all credentials for registries: what site.yaml names, then Docker's own file.

use std::sync::Arc;

use super::credentials::{Credential, CredentialFile, find_in};
use crate::{
    fault::chain,
    image::Repository,
    net::SecretReader,
    site::{Credentials, Prefix, normalised},
};

/// The key of a Secret of type `kubernetes.io/dockerconfigjson`.
const PULL_SECRET_KEY: &str = ".dockerconfigjson";

/// Credentials, from wherever they come. The most specific one counts; of two that are equally specific the one that is
/// written first, Docker's own file last. They are read anew each time, so that a changed Secret is seen.
#[derive(Clone, Debug, Default)]
pub struct Keyring {
    site: Arc<[Credentials]>,
    secrets: SecretReader,
    docker: CredentialFile,
}

/// A credential, and how specific the entry was that it comes from.
type Found = Option<(usize, Credential)>;

impl From<CredentialFile> for Keyring {
    fn from(docker: CredentialFile) -> Self {
        Self { docker, ..Self::default() }
    }
}

impl Keyring {
    /// What the site names, and Docker's own file.
    pub fn new(site: Vec<Credentials>, secrets: SecretReader, docker: CredentialFile) -> Self {
        Self { site: site.into(), secrets, docker }
    }

    /// User name and password for a repository, for an engine that pulls by itself; `None` where there
    /// are none, or only a token that engines cannot be given.
    pub async fn password(&self, repository: &Repository) -> Option<(String, String)> {
        let (host, path) = normalised(repository);
        match self.find(&host, &path).await {
            Ok(Some(Credential::Password { user, password })) => Some((user, password)),
            Ok(Some(Credential::IdentityToken(_)) | None) => None,
            Err(reason) => {
                tracing::warn!(host, reason, "credentials cannot be used; pulling without");
                None
            }
        }
    }

    /// In words, for messages.
    pub(super) fn describe(&self) -> String {
        if self.site.is_empty() {
            self.docker.describe()
        } else {
            format!("site.yaml or {}", self.docker.describe())
        }
    }

    /// The credential for a repository, if there is one; else why what there is cannot be used.
    pub(super) async fn find(&self, host: &str, path: &str) -> Result<Option<Credential>, String> {
        let mut best: Found = None;
        for credentials in self.site.iter() {
            best = more_specific(best, self.look_in(credentials, host, path).await?);
        }
        let (docker, for_host, for_path) = (self.docker.clone(), host.to_owned(), path.to_owned());
        let last = blocking(move || docker.find(&for_host, &for_path)).await?;
        Ok(more_specific(best, last).map(|(_, credential)| credential))
    }

    async fn look_in(&self, credentials: &Credentials, host: &str, path: &str) -> Result<Found, String> {
        let (what, text) = match credentials {
            Credentials::Basic { registry, user, password } => {
                let Prefix::Image(images) = registry else { return Ok(None) };
                let Some(specific) = images.covers(host, path) else { return Ok(None) };
                let what = format!("the password of {user} for {registry}");
                let secret = self.secrets.read(password).await.map_err(|error| chain(&error))?;
                let password = secret.text(&what).map_err(|error| chain(&error))?.to_owned();
                return Ok(Some((specific, Credential::Password { user: user.clone(), password })));
            }
            Credentials::DockerConfig(file) => {
                (file.display().to_string(), self.secrets.read_file(file).await)
            }
            Credentials::PullSecret(name) => {
                let what = format!("Secret {name}");
                let found = self.secrets.read_all(name).await.map_err(|error| chain(&error))?;
                let Some(text) = found.get(PULL_SECRET_KEY) else {
                    return Err(format!("{what} has no key {PULL_SECRET_KEY}: it is no pull secret"));
                };
                (what, Ok(text.clone()))
            }
        };
        let text = text.map_err(|error| chain(&error))?;
        let (host, path) = (host.to_owned(), path.to_owned());
        blocking(move || find_in(text.as_bytes(), &what, &host, &path)).await
    }
}

fn more_specific(earlier: Found, later: Found) -> Found {
    match (earlier, later) {
        (Some(earlier), Some(later)) if later.0 > earlier.0 => Some(later),
        (earlier, later) => earlier.or(later),
    }
}

/// A credential helper may be run.
async fn blocking(work: impl FnOnce() -> Result<Found, String> + Send + 'static) -> Result<Found, String> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|panic| Err(panic.to_string()))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    // base64 of "docker:d".
    const CONFIG: &str =
        r#"{"auths": {"r.example": {"auth": "ZG9ja2VyOmQ="}, "r.example/a/b": {"auth": "ZG9ja2VyOmQ="}}}"#;

    async fn user(site: &str, dir: &Path, host: &str, path: &str) -> Result<Option<String>, String> {
        let site: Vec<Credentials> = serde_json::from_str(site).unwrap();
        let secrets = SecretReader::new(dir.to_owned(), crate::cluster::KubeOptions::default());
        let docker = CredentialFile::new(Some(dir.join("config.json")));
        Ok(Keyring::new(site, secrets, docker).find(host, path).await?.map(|found| match found {
            Credential::Password { user, password } => format!("{user}:{password}"),
            Credential::IdentityToken(token) => token,
        }))
    }

    #[tokio::test]
    async fn the_most_specific_one_counts_and_of_equals_the_first() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.json"), CONFIG).unwrap();
        std::fs::write(dir.path().join("password"), "p\n").unwrap();
        // base64 of "site:s".
        std::fs::write(dir.path().join("auth.json"), r#"{"auths": {"r.example": {"auth": "c2l0ZTpz"}}}"#)
            .unwrap();
        let site = r#"[
            {"dockerConfig": "auth.json"},
            {"basic": {"registry": "r.example", "user": "late", "password": {"file": "password"}}},
            {"basic": {"registry": "r.example/a", "user": "basic", "password": {"file": "password"}}},
            {"basic": {"registry": "docker.io", "user": "hub", "password": {"file": "password"}}}
        ]"#;
        for (host, path, wanted) in [
            ("r.example", "x", Some("site:s")),
            ("r.example", "a/x", Some("basic:p")),
            ("r.example", "a/b/x", Some("docker:d")),
            ("index.docker.io", "library/x", Some("hub:p")),
            ("other.example", "x", None),
        ] {
            let found = user(site, dir.path(), host, path).await.unwrap();
            assert_eq!(found.as_deref(), wanted, "{host}/{path}");
        }
        let absent = r#"[{"basic": {"registry": "r.example", "user": "u", "password": {"file": "absent"}}}]"#;
        let error = user(absent, dir.path(), "r.example", "x").await.unwrap_err();
        assert!(error.contains("absent: No such file"), "{error}");
        // What is not asked for is not read.
        assert_eq!(user(absent, dir.path(), "other.example", "x").await.unwrap(), None);
    }
}
