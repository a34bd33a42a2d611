//! Credentials for registries, from site.yaml and from Docker's configuration file.

use std::{
    io::{self, ErrorKind},
    path::PathBuf,
    process::{Output, Stdio},
    sync::Arc,
    time::Duration,
};

use ::oci::{
    client::{Credential, excerpt},
    error_chain, is_docker_hub,
};
use docker_credential::{CredentialRetrievalError, DockerCredential};
use farrier_core::{
    image::Repository,
    site::{Credentials, Prefix},
};
use farrier_net::SecretReader;
use serde_json::Value;
use tokio::{io::AsyncWriteExt as _, process::Command, time::timeout};

/// Key of a Secret of type `kubernetes.io/dockerconfigjson`.
const PULL_SECRET_KEY: &str = ".dockerconfigjson";

/// Time limit of a credential helper, as for the kubelet's credential providers.
const HELPER_TIMEOUT: Duration = Duration::from_mins(1);

/// Credentials from all sources. The most specific entry wins; of equally specific entries, the first one. Docker's file
/// comes last. Each use reads the sources again, so that a changed Secret takes effect.
#[derive(Clone, Debug, Default)]
pub struct Keyring {
    site: Arc<[Credentials]>,
    secrets: SecretReader,
    docker: CredentialFile,
}

/// A credential, and the specificity of its entry.
type Match = Option<(usize, Credential)>;

impl From<CredentialFile> for Keyring {
    fn from(docker: CredentialFile) -> Self {
        Self { docker, ..Self::default() }
    }
}

impl Keyring {
    /// Combines the site's credentials with Docker's file.
    pub fn new(site: Vec<Credentials>, secrets: SecretReader, docker: CredentialFile) -> Self {
        Self { site: site.into(), secrets, docker }
    }

    /// User name and password for a repository, for an engine that pulls images itself. `None` if there is no
    /// credential, or only a token, which engines do not accept.
    pub async fn password(&self, repository: &Repository) -> Option<(String, String)> {
        let (host, path) = repository.normalized();
        match self.find(&host, &path).await {
            Ok(Some(Credential::Password { user, password })) => Some((user, password)),
            Ok(Some(Credential::IdentityToken(_)) | None) => None,
            Err(reason) => {
                tracing::warn!(host, reason, "cannot use the credentials; pulling without credentials");
                None
            }
        }
    }

    /// Description for messages.
    pub(super) fn describe(&self) -> String {
        if self.site.is_empty() {
            self.docker.describe()
        } else {
            format!("site.yaml or {}", self.docker.describe())
        }
    }

    /// Credential for a repository, if there is one. The error explains why an existing credential is unusable.
    pub(super) async fn find(&self, host: &str, path: &str) -> Result<Option<Credential>, String> {
        let mut best: Match = None;
        for credentials in self.site.iter() {
            best = more_specific(best, self.look_up(credentials, host, path).await?);
        }
        let from_docker = self.docker.find(host, path).await?;
        Ok(more_specific(best, from_docker).map(|(_, credential)| credential))
    }

    async fn look_up(&self, credentials: &Credentials, host: &str, path: &str) -> Result<Match, String> {
        let (what, text) = match credentials {
            Credentials::Basic { registry, user, password } => {
                let Prefix::Image(images) = registry else { return Ok(None) };
                let Some(rank) = images.covers(host, path) else { return Ok(None) };
                let what = format!("the password of {user} for {registry}");
                let secret = self.secrets.read(password).await.map_err(|error| error_chain(&error))?;
                let password = secret.text(&what).map_err(|error| error_chain(&error))?.to_owned();
                return Ok(Some((rank, Credential::Password { user: user.clone(), password })));
            }
            Credentials::DockerConfig(file) => {
                (file.display().to_string(), self.secrets.read_file(file).await)
            }
            Credentials::PullSecret(name) => {
                let what = format!("Secret {name}");
                let data = self.secrets.read_all(name).await.map_err(|error| error_chain(&error))?;
                let Some(text) = data.get(PULL_SECRET_KEY) else {
                    return Err(format!("{what} has no key {PULL_SECRET_KEY}: it is not a pull secret"));
                };
                (what, Ok(text.clone()))
            }
        };
        let text = text.map_err(|error| error_chain(&error))?;
        find_in(text.as_bytes(), &what, host, path).await
    }
}

fn more_specific(earlier: Match, later: Match) -> Match {
    match (earlier, later) {
        (Some(earlier), Some(later)) if later.0 > earlier.0 => Some(later),
        (earlier, later) => earlier.or(later),
    }
}

/// Docker Hub's key in Docker's `auths` and for credential helpers.
const HUB_KEY: &str = "https://index.docker.io/v1/";

/// A credentials file such as `~/.docker/config.json` or `${XDG_RUNTIME_DIR}/containers/auth.json`.
#[derive(Clone, Debug, Default)]
pub struct CredentialFile(Option<PathBuf>);

impl CredentialFile {
    /// Uses the file at `path`, which need not exist. Without a path, all requests are anonymous.
    pub fn new(path: Option<PathBuf>) -> Self {
        Self(path)
    }

    /// Description for messages.
    pub(super) fn describe(&self) -> String {
        self.0.as_ref().map_or_else(|| "any credentials file".to_owned(), |path| path.display().to_string())
    }

    /// Credential for a repository and the specificity of its entry, if there is one. The error explains why an
    /// existing credential is unusable. May run a credential helper.
    pub(super) async fn find(&self, host: &str, path: &str) -> Result<Match, String> {
        let Some(file) = &self.0 else { return Ok(None) };
        match tokio::fs::read(file).await {
            Ok(text) => find_in(&text, &file.display().to_string(), host, path).await,
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(format!("{} cannot be read: {error}", file.display())),
        }
    }
}

/// Looks up a credential like [`CredentialFile::find`] in a file's text. `file` is its name for messages.
async fn find_in(text: &[u8], file: &str, host: &str, path: &str) -> Result<Match, String> {
    let mut config: Value =
        serde_json::from_slice(text).map_err(|error| format!("{file} is not valid: {error}"))?;
    // A helper is a program in PATH. A path would run any file, such as one that came with definitions.
    let for_hosts = config["credHelpers"].as_object().into_iter().flat_map(serde_json::Map::values);
    let is_path = |helper: &&str| helper.contains('/');
    if let Some(helper) = for_hosts.chain([&config["credsStore"]]).filter_map(Value::as_str).find(is_path) {
        return Err(format!("{file}: the credential helper {helper:?} is not the name of a program"));
    }
    let host = if is_docker_hub(host) { "docker.io" } else { host };
    let key = key_for(&config, host, path);
    let has_path = key.contains('/') && key != HUB_KEY;
    let rank = if has_path { key.len() } else { host.len() };
    let name = |helper: &Value| helper.as_str().filter(|name| !name.is_empty()).map(str::to_owned);
    let (helper, store) = (name(&config["credHelpers"][key.as_str()]), name(&config["credsStore"]));
    // Without these fields, `docker_credential` runs no helper. It sets no time limit.
    if let Some(fields) = config.as_object_mut() {
        fields.retain(|field, _| field != "credHelpers" && field != "credsStore");
    }
    // A helper for the registry precedes the file's entry, and the file's entry precedes the helper for all registries.
    let in_file = if helper.is_some() {
        Err(CredentialRetrievalError::NoCredentialConfigured)
    } else {
        docker_credential::get_credential_from_reader(config.to_string().as_bytes(), &key)
    };
    let found = match in_file {
        Ok(DockerCredential::UsernamePassword(user, password)) => {
            Some(Credential::Password { user, password })
        }
        Ok(DockerCredential::IdentityToken(token)) => Some(Credential::IdentityToken(token)),
        Err(CredentialRetrievalError::NoCredentialConfigured) => match helper.or(store) {
            Some(helper) => ask_helper(&format!("docker-credential-{helper}"), &key).await?,
            None => None,
        },
        Err(error) => return Err(format!("the entry {key:?} of {file}: {error}")),
    };
    Ok(found.map(|credential| (rank, credential)))
}

/// Asks a credential helper (<https://github.com/docker/docker-credential-helpers>). `None` if it has no credential for the server.
async fn ask_helper(program: &str, server: &str) -> Result<Option<Credential>, String> {
    let Output { status, stdout, stderr } = timeout(HELPER_TIMEOUT, run_helper(program, server))
        .await
        .map_err(|_| format!("{program} did not answer within {} s", HELPER_TIMEOUT.as_secs()))?
        .map_err(|error| format!("{program} cannot be run: {error}"))?;
    if !status.success() {
        let output = String::from_utf8_lossy(&[stderr, b" ".to_vec(), stdout].concat()).into_owned();
        // Message of docker-credential-helpers; docker also compares this text.
        if output.contains("credentials not found") {
            return Ok(None);
        }
        return Err(format!("{program} failed: {}", excerpt(output.as_bytes())));
    }
    // The output is not quoted, because it may contain a password.
    let answer: Value = serde_json::from_slice(&stdout).unwrap_or_default();
    match (answer["Username"].as_str(), answer["Secret"].as_str()) {
        (Some("<token>"), Some(token)) => Ok(Some(Credential::IdentityToken(token.to_owned()))),
        (Some(user), Some(password)) => {
            Ok(Some(Credential::Password { user: user.to_owned(), password: password.to_owned() }))
        }
        _ => Err(format!("{program} printed no credential")),
    }
}

async fn run_helper(program: &str, server: &str) -> io::Result<Output> {
    let mut child = Command::new(program)
        .arg("get")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    if let Some(mut stdin) = child.stdin.take() {
        // A helper for one server need not read its input.
        let _ = stdin.write_all(server.as_bytes()).await;
    }
    child.wait_with_output().await
}

/// Most specific key in the file: keys of Podman's file may include a part of the repository's path.
fn key_for(config: &Value, host: &str, path: &str) -> String {
    let has = |key: &str| ["auths", "credHelpers"].iter().any(|map| config[map].get(key).is_some());
    let mut candidate = format!("{host}/{path}");
    while candidate.len() > host.len() {
        if has(&candidate) {
            return candidate;
        }
        candidate.truncate(candidate.rfind('/').unwrap_or(0));
    }
    if !is_docker_hub(host) {
        return host.to_owned();
    }
    // Docker and its helpers name Docker Hub by the URL, Podman and many pull secrets by a host.
    let keys = [HUB_KEY, host, "index.docker.io", "registry-1.docker.io"];
    keys.into_iter().find(|key| has(key)).unwrap_or(HUB_KEY).to_owned()
}

#[cfg(test)]
mod tests {
    use std::{os::unix::fs::PermissionsExt as _, path::Path};

    use super::*;

    // base64 of "docker:d".
    const CONFIG: &str =
        r#"{"auths": {"r.example": {"auth": "ZG9ja2VyOmQ="}, "r.example/a/b": {"auth": "ZG9ja2VyOmQ="}}}"#;

    async fn user(site: &str, dir: &Path, host: &str, path: &str) -> Result<Option<String>, String> {
        let site: Vec<Credentials> = serde_json::from_str(site).unwrap();
        let secrets = SecretReader::new(dir.to_owned(), None);
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
        // Credentials that do not apply are not read.
        assert_eq!(user(absent, dir.path(), "other.example", "x").await.unwrap(), None);
    }

    async fn entry(config: &str, host: &str, path: &str) -> Result<Option<(String, String)>, String> {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("config.json");
        std::fs::write(&file, config).unwrap();
        let found = CredentialFile::new(Some(file)).find(host, path).await?;
        Ok(found.map(|(_, credential)| match credential {
            Credential::Password { user, password } => (user, password),
            Credential::IdentityToken(token) => ("<token>".to_owned(), token),
        }))
    }

    fn pair(user: &str, password: &str) -> (String, String) {
        (user.to_owned(), password.to_owned())
    }

    // base64 of "u:p:w" and "n:q".
    const ENTRIES: &str = r#"{"auths": {
        "r.example:5000": {"auth": "dTpwOnc="},
        "r.example:5000/drivers": {"auth": "bjpx"},
        "https://index.docker.io/v1/": {"username": "hub", "password": "x"},
        "t.example": {"auth": "", "identitytoken": "refresh"}
    }}"#;

    #[tokio::test]
    async fn the_most_specific_entry_counts() {
        assert_eq!(entry(ENTRIES, "r.example:5000", "other/x").await.unwrap(), Some(pair("u", "p:w")));
        assert_eq!(entry(ENTRIES, "r.example:5000", "drivers/x").await.unwrap(), Some(pair("n", "q")));
        assert_eq!(entry(ENTRIES, "r.example:5000", "drivers2").await.unwrap(), Some(pair("u", "p:w")));
        assert_eq!(entry(ENTRIES, "docker.io", "library/debian").await.unwrap(), Some(pair("hub", "x")));
        assert_eq!(entry(ENTRIES, "t.example", "x").await.unwrap(), Some(pair("<token>", "refresh")));
        assert_eq!(entry(ENTRIES, "r.example", "x").await.unwrap(), None);
    }

    /// Podman names Docker Hub by its host.
    #[tokio::test]
    async fn each_name_of_docker_hub_is_found() {
        let found = async |config: &str, path: &str| entry(config, "docker.io", path).await.unwrap();
        for key in ["docker.io", "index.docker.io", "registry-1.docker.io", "docker.io/library"] {
            let config = format!(r#"{{"auths": {{"{key}": {{"auth": "bjpx"}}}}}}"#);
            assert_eq!(found(&config, "library/debian").await, Some(pair("n", "q")), "{key}");
        }
        let both = r#"{"auths": {"https://index.docker.io/v1/": {"auth": "dTpwOnc="}, "docker.io/acme": {"auth": "bjpx"}}}"#;
        assert_eq!(found(both, "library/debian").await, Some(pair("u", "p:w")));
        assert_eq!(found(both, "acme/base").await, Some(pair("n", "q")));
        // A path makes an entry more specific, whatever name of Docker Hub is asked for.
        let rank = async |path: &str| {
            find_in(both.as_bytes(), "x", "registry-1.docker.io", path).await.unwrap().unwrap().0
        };
        assert!(rank("acme/base").await > rank("library/debian").await);
        let helper = r#"{"credHelpers": {"docker.io": "farrier-no-such-helper"}}"#;
        let error = entry(helper, "docker.io", "library/debian").await.unwrap_err();
        assert!(error.starts_with("docker-credential-farrier-no-such-helper cannot be run: "), "{error}");
    }

    #[tokio::test]
    async fn absent_and_damaged_files() {
        assert!(CredentialFile::new(None).find("h", "x").await.unwrap().is_none());
        let absent = CredentialFile::new(Some(PathBuf::from("/nonexistent/config.json")));
        assert!(absent.find("h", "x").await.unwrap().is_none());
        assert!(entry("{", "h", "x").await.unwrap_err().contains("is not valid"));
        assert!(
            entry(r#"{"auths":{"h":{"auth":"%%"}}}"#, "h", "x").await.unwrap_err().contains(r#"entry "h""#)
        );
        assert!(entry(r#"{"credsStore":"farrier-no-such-helper"}"#, "h", "x").await.is_err());
    }

    async fn helper(directory: &Path, script: &str) -> Result<Option<Credential>, String> {
        let program = directory.join("helper");
        std::fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        let program = program.display().to_string();
        ask_helper(&program, "r.example").await.map_err(|error| error.replace(&program, "HELPER"))
    }

    #[tokio::test]
    async fn answers_of_helpers() {
        let directory = tempfile::tempdir().unwrap();
        let ask = async |script: &str| helper(directory.path(), script).await;
        let of_server = r#"read server; echo "{\"Username\": \"u\", \"Secret\": \"$server\"}""#;
        let password = Credential::Password { user: "u".to_owned(), password: "r.example".to_owned() };
        assert!(ask(of_server).await == Ok(Some(password)));
        let token = ask(r#"echo '{"Username": "<token>", "Secret": "t"}'"#).await;
        assert!(token == Ok(Some(Credential::IdentityToken("t".to_owned()))));
        assert!(ask("echo credentials not found in native keychain; exit 1").await == Ok(None));
        let error = async |script: &str| ask(script).await.err();
        assert_eq!(error("echo no network >&2; exit 1").await.as_deref(), Some("HELPER failed: no network"));
        assert_eq!(error("echo secret words").await.as_deref(), Some("HELPER printed no credential"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_helper_that_hangs_is_given_up() {
        let directory = tempfile::tempdir().unwrap();
        let error = helper(directory.path(), "exec sleep 600").await.err();
        assert_eq!(error.as_deref(), Some("HELPER did not answer within 60 s"));
    }

    /// Definitions from a bundle can bring the file and the program, and need no `--accept` for them.
    #[tokio::test]
    async fn a_helper_is_no_path() {
        for config in [r#"{"credsStore":"x/../evil"}"#, r#"{"credHelpers":{"h":"x/evil"}}"#] {
            let error = entry(config, "h", "x").await.unwrap_err();
            assert!(error.ends_with("is not the name of a program"), "{error}");
        }
    }
}
