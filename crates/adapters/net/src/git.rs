//! Settings for the git program, which accesses the network itself.

use std::path::PathBuf;

use base64::{Engine as _, engine::general_purpose::STANDARD};
use farrier_core::site::HostPort;
use url::Url;
use zeroize::Zeroizing;

use super::{AccessPurpose, Net, NetError, Secret};

/// Network settings and credentials with which git accesses one repository.
#[derive(Default)]
pub struct GitAccess {
    /// Git settings. They may contain passwords, so they belong in git's environment, which other users cannot read.
    pub settings: Vec<(&'static str, Zeroizing<String>)>,
    /// Private key for SSH.
    pub ssh_key: Option<Secret>,
    /// Known-hosts file for SSH.
    pub known_hosts: Option<PathBuf>,
}

impl GitAccess {
    /// Returns the same access without credentials, for addresses that an untrusted repository names.
    #[must_use]
    pub fn anonymous(mut self) -> Self {
        let credentials = ["http.extraHeader", "http.sslCert", "http.sslKey"];
        self.settings.retain(|(name, _)| !credentials.contains(name));
        Self { ssh_key: None, ..self }
    }
}

/// Returns what git needs to access a repository (`https://`, `http://`, `ssh://` or `file://`). Fails if farrier may not
/// access the repository's host.
pub async fn git_access(net: &Net, repository: &Url) -> Result<GitAccess, NetError> {
    let Some(host) = host_of(repository) else { return Ok(GitAccess::default()) };
    let what = format!("git for {host}");
    net.check_allowed(&host, &AccessPurpose::of(&what))?;
    let entry = net.host_entry(&host).map(|(_, entry)| entry);
    if repository.scheme() == "ssh" {
        let ssh_key = match entry.and_then(|entry| entry.ssh_key.as_ref()) {
            Some(key) => {
                Some(net.secrets().read(key).await.map_err(|source| NetError::Secret(what, source))?)
            }
            None => None,
        };
        let known_hosts = entry.and_then(|entry| entry.known_hosts.as_ref());
        let known_hosts = known_hosts.map(|file| net.0.root.join(file));
        return Ok(GitAccess { settings: Vec::new(), ssh_key, known_hosts });
    }
    net.check_proxy_allowed(repository, &AccessPurpose::of(&what))?;
    // A redirect would send the password to another host.
    let mut settings = vec![("http.followRedirects", "false".to_owned().into())];
    let proxy = net.proxies().await?.for_url(repository).map(|proxy| proxy.as_url().to_string());
    settings.push(("http.proxy", proxy.unwrap_or_default().into()));
    if let Some(entry) = entry {
        // Like apt, git replaces the system's authorities with one file, and reads a key from a file.
        let files = net.files_for("git", entry, ["http.sslCAInfo", "http.sslCert", "http.sslKey"])?;
        settings.extend(files.into_iter().map(|(setting, path)| (setting, path.into())));
        if let Some(login) = &entry.login {
            net.check_login_allowed(repository, &host)?;
            let password = net.password(login, &host.to_string()).await?;
            let pair = Zeroizing::new(format!("{}:{}", login.user, password.as_str()));
            let header = format!("Authorization: Basic {}", STANDARD.encode(pair.as_bytes()));
            settings.push(("http.extraHeader", header.into()));
        }
    }
    Ok(GitAccess { settings, ssh_key: None, known_hosts: None })
}

fn host_of(repository: &Url) -> Option<HostPort> {
    let host = HostPort::of_url(repository)?;
    match (repository.scheme(), host.port()) {
        ("file", _) => None,
        ("ssh", None) => format!("{host}:22").parse().ok(),
        _ => Some(host),
    }
}
