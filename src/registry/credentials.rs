//! Adapter: credentials from docker's configuration file, or Podman's of the same form.

use std::{io::ErrorKind, path::PathBuf};

use docker_credential::{CredentialRetrievalError, DockerCredential};
use serde_json::Value;

use crate::site::is_docker_hub;

/// Docker Hub's key in `auths` and for credential helpers.
const HUB_KEY: &str = "https://index.docker.io/v1/";

/// A file such as `~/.docker/config.json` or `${XDG_RUNTIME_DIR}/containers/auth.json`.
#[derive(Clone, Debug, Default)]
pub struct CredentialFile(Option<PathBuf>);

/// What proves who one is.
#[derive(Clone, PartialEq, Eq)]
pub(super) enum Credential {
    /// For basic authentication, or the token server.
    Password { user: String, password: String },
    /// A refresh token for the token server.
    IdentityToken(String),
}

impl CredentialFile {
    /// The file; it need not exist. Without one, only anonymous requests are made.
    pub fn new(path: Option<PathBuf>) -> Self {
        Self(path)
    }

    /// In words, for messages.
    pub(super) fn describe(&self) -> String {
        self.0.as_ref().map_or_else(|| "no credentials file".to_owned(), |path| path.display().to_string())
    }

    /// The credential for a repository, if there is one, and how specific its entry is; else why what there is cannot
    /// be used. Blocks: it may run a credential helper.
    pub(super) fn find(&self, host: &str, path: &str) -> Result<Option<(usize, Credential)>, String> {
        let Some(file) = &self.0 else { return Ok(None) };
        match std::fs::read(file) {
            Ok(text) => find_in(&text, &file.display().to_string(), host, path),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(format!("{} cannot be read: {error}", file.display())),
        }
    }
}

/// The same in a file's text; `file` names it in messages.
pub(super) fn find_in(
    text: &[u8],
    file: &str,
    host: &str,
    path: &str,
) -> Result<Option<(usize, Credential)>, String> {
    let config: Value =
        serde_json::from_slice(text).map_err(|error| format!("{file} is not valid: {error}"))?;
    let key = key_for(&config, host, path);
    // Docker Hub's key is an address.
    let specific = if key == HUB_KEY { host.len() } else { key.len() };
    match docker_credential::get_credential_from_reader(text, &key) {
        Ok(DockerCredential::UsernamePassword(user, password)) => {
            Ok(Some((specific, Credential::Password { user, password })))
        }
        Ok(DockerCredential::IdentityToken(token)) => Ok(Some((specific, Credential::IdentityToken(token)))),
        Err(CredentialRetrievalError::NoCredentialConfigured) => Ok(None),
        // The words of docker-credential-helpers; docker itself compares them.
        Err(CredentialRetrievalError::HelperFailure { stdout, .. })
            if stdout.contains("credentials not found") =>
        {
            Ok(None)
        }
        Err(CredentialRetrievalError::HelperFailure { helper, stderr, stdout }) => {
            let words = super::error::excerpt(format!("{stderr} {stdout}").as_bytes());
            Err(format!("{helper} failed: {words}"))
        }
        Err(error) => Err(format!("the entry {key:?} of {file}: {error}")),
    }
}

/// The most specific key that the file has: Podman's may hold a part of the repository's path.
fn key_for(config: &Value, host: &str, path: &str) -> String {
    if is_docker_hub(host) {
        return HUB_KEY.to_owned();
    }
    let has = |key: &str| ["auths", "credHelpers"].iter().any(|map| config[map].get(key).is_some());
    let mut candidate = format!("{host}/{path}");
    while candidate.len() > host.len() {
        if has(&candidate) {
            return candidate;
        }
        candidate.truncate(candidate.rfind('/').unwrap_or(0));
    }
    host.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(config: &str, host: &str, path: &str) -> Result<Option<(String, String)>, String> {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("config.json");
        std::fs::write(&file, config).unwrap();
        let found = CredentialFile::new(Some(file)).find(host, path)?;
        Ok(found.map(|(_, credential)| match credential {
            Credential::Password { user, password } => (user, password),
            Credential::IdentityToken(token) => ("<token>".to_owned(), token),
        }))
    }

    fn pair(user: &str, password: &str) -> (String, String) {
        (user.to_owned(), password.to_owned())
    }

    // base64 of "u:p:w" and "n:q".
    const CONFIG: &str = r#"{"auths": {
        "r.example:5000": {"auth": "dTpwOnc="},
        "r.example:5000/drivers": {"auth": "bjpx"},
        "https://index.docker.io/v1/": {"username": "hub", "password": "x"},
        "t.example": {"auth": "", "identitytoken": "refresh"}
    }}"#;

    #[test]
    fn the_most_specific_entry_counts() {
        assert_eq!(find(CONFIG, "r.example:5000", "other/x").unwrap(), Some(pair("u", "p:w")));
        assert_eq!(find(CONFIG, "r.example:5000", "drivers/x").unwrap(), Some(pair("n", "q")));
        assert_eq!(find(CONFIG, "r.example:5000", "drivers2").unwrap(), Some(pair("u", "p:w")));
        assert_eq!(find(CONFIG, "docker.io", "library/debian").unwrap(), Some(pair("hub", "x")));
        assert_eq!(find(CONFIG, "t.example", "x").unwrap(), Some(pair("<token>", "refresh")));
        assert_eq!(find(CONFIG, "r.example", "x").unwrap(), None);
    }

    #[test]
    fn absent_and_damaged_files() {
        assert!(CredentialFile::new(None).find("h", "x").unwrap().is_none());
        let absent = CredentialFile::new(Some(PathBuf::from("/nonexistent/config.json")));
        assert!(absent.find("h", "x").unwrap().is_none());
        assert!(find("{", "h", "x").unwrap_err().contains("is not valid"));
        assert!(find(r#"{"auths":{"h":{"auth":"%%"}}}"#, "h", "x").unwrap_err().contains(r#"entry "h""#));
        assert!(find(r#"{"credsStore":"farrier-no-such-helper"}"#, "h", "x").is_err());
    }
}
