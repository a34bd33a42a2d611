//! Options for apt, which accesses the network itself.

use farrier_core::site::{Host, HostPort, SecretSource};
use url::Url;

use super::{AccessPurpose, Net, NetError, ProxyOrigin};

/// apt options for a set of archives.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AptOptions {
    /// Configuration lines, `Name "value";`.
    pub options: Vec<String>,
    /// Whether the options define all proxies, so that apt must not get the proxies of the environment.
    pub ignores_environment: bool,
}

impl Net {
    /// Checks that these archives may be accessed. `suites` describes the purpose.
    pub fn check_archives_allowed<'a>(
        &self,
        archives: impl IntoIterator<Item = &'a str>,
        suites: &str,
    ) -> Result<(), NetError> {
        if !self.is_offline() {
            return Ok(());
        }
        let what = format!("apt for {suites}");
        for archive in archives {
            let url = Url::parse(archive).ok();
            let scheme = url.as_ref().map_or("", Url::scheme);
            match (scheme, url.as_ref().and_then(HostPort::of_url)) {
                ("http" | "https", Some(host)) => self.check_allowed(&host, &AccessPurpose::of(&what))?,
                // Local files need no host.
                ("file" | "copy" | "cdrom", _) => {}
                // Other apt methods (tor, lists of mirrors) access hosts that are unknown here.
                _ => return Err(NetError::Offline { purpose: what, host: archive.to_owned() }),
            }
        }
        Ok(())
    }

    /// Options that apt needs for these archives. They may contain a proxy's password.
    pub async fn apt_options<'a>(
        &self,
        archives: impl IntoIterator<Item = &'a str>,
    ) -> Result<AptOptions, NetError> {
        let proxies = self.proxies().await?;
        let offline = self.is_offline();
        let proxy_origin = self.0.proxy_origin;
        let ignores_environment = offline || proxy_origin == ProxyOrigin::Site;
        let mut apt = AptOptions { options: Vec::new(), ignores_environment };
        if offline {
            apt.options.extend(
                [
                    // Neither the archive nor DNS may direct apt to other hosts.
                    "Acquire::http::AllowRedirect \"false\";",
                    "Acquire::https::AllowRedirect \"false\";",
                    "Acquire::EnableSrvRecords \"false\";",
                    "Acquire::http::Proxy-Auto-Detect \"\";",
                    "Acquire::https::Proxy-Auto-Detect \"\";",
                ]
                .map(str::to_owned),
            );
        }
        for archive in archives {
            let Ok(url) = Url::parse(archive) else { continue };
            if !matches!(url.scheme(), "http" | "https") {
                continue;
            }
            let Some(host) = HostPort::of_url(&url) else { continue };
            if apt.ignores_environment {
                let (scheme, name) = (url.scheme(), host.name());
                let proxy = match proxies.for_url(&url) {
                    // A proxy from the environment is not a named host for `--offline`.
                    Some(proxy)
                        if proxy_origin != ProxyOrigin::Environment
                            || proxy.host().is_some_and(|host| self.is_allowed(&host)) =>
                    {
                        proxy.as_url().as_str()
                    }
                    _ => "DIRECT",
                };
                apt.options.push(quoted_line(&format!("Acquire::{scheme}::Proxy::{name}"), proxy)?);
            }
            if url.scheme() == "https"
                && let Some((_, entry)) = self.host_entry(&host)
            {
                // apt replaces the system's certificates with one CA file for a host. Its manual calls these options
                // `CAInfo::<host>`, but apt reads `<host>::CAInfo`.
                for (option, path) in self.files_for("apt", entry, ["CAInfo", "SslCert", "SslKey"])? {
                    apt.options
                        .push(quoted_line(&format!("Acquire::https::{}::{option}", host.name()), &path)?);
                }
            }
        }
        apt.options.dedup();
        Ok(apt)
    }

    /// Files for a host that `program` reads itself, each with the name of its option: authorities, certificate, key.
    pub(super) fn files_for(
        &self,
        program: &str,
        entry: &Host,
        [authorities, certificate, key]: [&'static str; 3],
    ) -> Result<Vec<(&'static str, String)>, NetError> {
        let key_file = match &entry.client_key {
            Some(SecretSource::Secret(_)) => {
                return Err(NetError::Options(
                    format!("site.yaml, host {}: clientKey", entry.host),
                    format!("{program} reads keys only from files: mount the Secret, and name the file"),
                ));
            }
            Some(SecretSource::File(file)) => Some(file),
            None => None,
        };
        let files = [
            (authorities, entry.ca_file.as_ref()),
            (certificate, entry.client_certificate.as_ref()),
            (key, key_file),
        ];
        let existing = files.into_iter().filter_map(|(option, file)| Some((option, self.0.root.join(file?))));
        Ok(existing.map(|(option, path)| (option, path.display().to_string())).collect())
    }
}

fn quoted_line(name: &str, value: &str) -> Result<String, NetError> {
    if value.contains(['"', '\\', ';']) || value.contains(char::is_control) {
        return Err(NetError::Options(
            format!("apt's option {name}"),
            "its value contains a character that cannot be quoted in apt's configuration".to_owned(),
        ));
    }
    Ok(format!("{name} \"{value}\";"))
}
