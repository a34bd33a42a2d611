//! Checks for `farrier doctor` whether the remote hosts named in definitions answer. Stores nothing.

use std::{collections::BTreeSet, io, time::Duration};

use farrier_core::{
    image::{
        ImageReference, Repository,
        checked::{Mirror, Suite},
    },
    site::{HostPort, MirrorRule, Prefix},
};
use farrier_local::machine::clock_ahead;
use farrier_net::{AccessPurpose, Net};
use jiff::{SignedDuration, Timestamp};
use oci::is_docker_hub;
use reqwest::{
    Method,
    header::{CACHE_CONTROL, HeaderValue},
};
use serde::Serialize;
use serde_json::{Map, Value};
use tokio::time::timeout;
use url::Url;

use super::{FetchError, Fetcher, Result, apt, download::is_placeholder};

/// Timeout for one upstream.
const TIMEOUT: Duration = Duration::from_secs(20);
/// Names of the definitions' fields with addresses that farrier contacts.
const ADDRESS_FIELDS: [&str; 4] = ["url", "mirrorList", "checksums", "repository"];

/// A remote source of inputs.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Upstream {
    /// Suites of a Debian-like archive, contacted through apt.
    Archive {
        suites: Vec<Suite>,
        /// Address of the archive; if absent, the host's own entry for the suites.
        mirror: Option<Mirror>,
    },
    /// Addresses, tried in order until one answers.
    Address {
        /// Addresses; the site's mirrors come first.
        urls: Vec<Url>,
        /// Whether 404 is a failure. Of addresses with placeholders, registries and Git servers, only the host is checked.
        must_exist: bool,
    },
}

/// A host that answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// `host` or `host:port`.
    pub host: String,
    /// Difference between the host's clock and this machine's, if the host states the time; positive if the host is ahead.
    pub clock_ahead: Option<SignedDuration>,
}

/// Returns the upstreams that a definition names, with the site's mirrors. Searches the definition as JSON, so that the search also
/// covers fields with addresses that are added later.
pub fn upstreams(net: &Net, definition: &impl Serialize) -> BTreeSet<Upstream> {
    let mut upstreams = BTreeSet::new();
    if let Ok(definition) = serde_json::to_value(definition) {
        collect(net, ["", ""], &definition, &mut upstreams);
    }
    upstreams
}

/// Returns the mirrors of a rule, as separate upstreams.
pub fn mirrors(net: &Net, rule: &MirrorRule) -> BTreeSet<Upstream> {
    let upstream_of = |to: &Prefix| match to {
        Prefix::Address(url) => Upstream::Address { urls: vec![url.clone()], must_exist: false },
        Prefix::Image(images) => registry(net, [images.host()]),
    };
    rule.to.iter().map(upstream_of).collect()
}

/// Returns an upstream for the first of these registries (`host[:port]`) that answers.
pub fn registry<'a>(net: &Net, hosts: impl IntoIterator<Item = &'a str>) -> Upstream {
    let urls = hosts.into_iter().flat_map(|host| {
        let plain = HostPort::of_registry(host)
            .is_some_and(|host| net.allows_plain(&host) && !net.requires_tls(&host));
        let host = if is_docker_hub(host) { "registry-1.docker.io" } else { host };
        let address = |scheme| Url::parse(&format!("{scheme}://{host}/v2/")).ok();
        [address("https"), address("http").filter(|_| plain)]
    });
    Upstream::Address { urls: urls.flatten().collect(), must_exist: false }
}

/// Adds the upstreams in a value. `names` are the names of the enclosing field and of the value's own field.
fn collect(
    net: &Net,
    names @ [enclosing, field]: [&str; 2],
    value: &Value,
    upstreams: &mut BTreeSet<Upstream>,
) {
    match value {
        Value::Array(items) => items.iter().for_each(|item| collect(net, names, item, upstreams)),
        Value::Object(fields) => {
            // Tracked suites are in the archive of the headers.
            if enclosing != "track" {
                upstreams.extend(archive(fields));
            }
            fields.iter().for_each(|(name, value)| collect(net, [field, name.as_str()], value, upstreams));
        }
        Value::String(text) if field == "image" || (enclosing, field) == ("image", "reference") => {
            let candidates = repository(text).map(|repository| net.image_candidates(&repository));
            let hosts: Vec<String> =
                candidates.iter().flatten().map(|candidate| candidate.normalized().0).collect();
            upstreams.extend((!hosts.is_empty()).then(|| registry(net, hosts.iter().map(String::as_str))));
        }
        Value::String(text) if ADDRESS_FIELDS.contains(&field) => upstreams.extend(address(net, names, text)),
        _ => {}
    }
}

fn archive(fields: &Map<String, Value>) -> Option<Upstream> {
    let values = ["suite", "suites", "extraSuites"].iter().filter_map(|name| fields.get(*name));
    let texts = values.flat_map(|value| value.as_array().cloned().unwrap_or_else(|| vec![value.clone()]));
    let suites: Vec<Suite> = texts.filter_map(|text| text.as_str()?.parse().ok()).collect();
    let mirror = fields.get("mirror").and_then(Value::as_str).and_then(|mirror| mirror.parse().ok());
    (!suites.is_empty()).then_some(Upstream::Archive { suites, mirror })
}

/// Returns the repository of a reference that may contain placeholders after the host.
fn repository(text: &str) -> Option<Repository> {
    let Some((start, _)) = text.split_once("{{") else {
        return text.parse::<ImageReference>().map(|image| image.repository).ok();
    };
    let (path, _) = start.rsplit_once(['/', '@'])?;
    // Only the host matters, so any name completes the repository.
    format!("{path}/any").parse().ok()
}

fn address(net: &Net, [enclosing, field]: [&str; 2], text: &str) -> Option<Upstream> {
    let (start, must_exist) = match text.split_once("{{") {
        Some((start, _)) => (start.get(..=start.rfind('/')?)?, false),
        // A Git server only answers Git's own requests.
        None => (text, field != "repository" && enclosing != "git"),
    };
    let mut url = Url::parse(start).ok().filter(|url| matches!(url.scheme(), "http" | "https"))?;
    if must_exist && (enclosing, field) == ("repositories", "url") {
        url = Url::parse(&format!("{}/repodata/repomd.xml", start.trim_end_matches('/'))).ok()?;
    }
    let mut urls = net.url_candidates(&url);
    urls.retain(|url| !is_placeholder(url));
    (!urls.is_empty()).then_some(Upstream::Address { urls, must_exist })
}

/// Checks that an upstream answers, contacting it in the same way as for fetching.
pub async fn ask(fetcher: &Fetcher, upstream: &Upstream) -> Result<Answer> {
    let answer = async {
        match upstream {
            Upstream::Archive { suites, mirror } => {
                let host = apt::probe(fetcher, suites, mirror.as_ref()).await?;
                Ok(Answer { host, clock_ahead: None })
            }
            Upstream::Address { urls, must_exist } => first_answer(&fetcher.net, urls, *must_exist).await,
        }
    };
    let timed_out = |_| {
        let what = match upstream {
            Upstream::Archive { suites, mirror: _ } => format!("suite {}", suites.join(", ")),
            Upstream::Address { urls, must_exist: _ } => urls.first().map(Url::to_string).unwrap_or_default(),
        };
        let reason = format!("no answer within {} seconds", TIMEOUT.as_secs());
        FetchError::Transfer(what, Box::new(io::Error::new(io::ErrorKind::TimedOut, reason)))
    };
    timeout(TIMEOUT, answer).await.map_err(timed_out)?
}

async fn first_answer(net: &Net, urls: &[Url], must_exist: bool) -> Result<Answer> {
    let Some((last, others)) = urls.split_last() else {
        return Err(FetchError::Layout("a valid address of the registry".to_owned()));
    };
    for url in others {
        if let Ok(answer) = answer(net, url, must_exist).await {
            return Ok(answer);
        }
    }
    answer(net, last, must_exist).await
}

async fn answer(net: &Net, url: &Url, must_exist: bool) -> Result<Answer> {
    let mut request = Net::request(Method::HEAD, url.clone());
    // An intermediate cache would return the time of its copy.
    request.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    let response = net.execute(request, &AccessPurpose::of("look whether it answers")).await?;
    let status = response.status().as_u16();
    let answers = match status {
        // 407 comes from a proxy, so the host was not reached.
        407 => false,
        // A server may hide a directory, and a registry may require a login.
        401 | 403 | 404 | 410 => !must_exist,
        // Not every server supports HEAD.
        501 => true,
        status => status < 500,
    };
    if !answers {
        return Err(FetchError::Status(url.to_string(), status));
    }
    let host = HostPort::of_url(url).map(|host| host.to_string()).unwrap_or_default();
    let is_not_redirected = response.url().origin() == url.origin();
    let clock_ahead = clock_ahead(response.headers(), Timestamp::now()).filter(|_| is_not_redirected);
    Ok(Answer { host, clock_ahead })
}

#[cfg(test)]
mod tests {
    use farrier_net::NetOptions;
    use serde_json::json;

    use super::*;

    /// Returns the addresses found in a definition; those that need not exist are in parentheses.
    fn named(definition: &Value) -> Vec<String> {
        let site = json!({"mirrors": [
            {"from": "https://files.test/", "to": ["https://mirror.test/files"]},
            {"from": "https://rhel.invalid/", "to": ["https://mirror.test/rhel"]},
            {"from": "docker.io/library", "to": ["127.0.0.1:5000/hub"]},
        ]});
        let options = NetOptions { site: serde_json::from_value(site).unwrap(), ..NetOptions::default() };
        let text = |upstream| match upstream {
            Upstream::Archive { suites, mirror } => {
                format!(
                    "{} of {}",
                    suites.join(" "),
                    mirror.map_or("the host".to_owned(), |mirror| mirror.to_string())
                )
            }
            Upstream::Address { urls, must_exist } => {
                let urls: Vec<&str> = urls.iter().map(Url::as_str).collect();
                if must_exist { urls.join(" ") } else { format!("({})", urls.join(" ")) }
            }
        };
        upstreams(&Net::new(options).unwrap(), definition).into_iter().map(text).collect()
    }

    #[test]
    fn a_family_names_archives_repositories_and_registries() {
        let family = json!({
            "headers": {"apt": {"packages": ["linux-headers-{{release}}"], "suites": ["sid"], "mirror": "http://deb.test/debian"}},
            "track": {"apt": {"suites": ["sid"], "flavors": ["amd64"]}},
            "toolchain": {"bootstrap": {"suite": "bookworm", "extraSuites": ["bookworm-updates"], "include": []}},
        });
        assert_eq!(
            named(&family),
            ["bookworm bookworm-updates of the host", "sid of http://deb.test/debian"]
        );
        let family = json!({
            "headers": {"rpm": {"packages": ["kernel-devel"], "from": {"signedBy": "k.asc", "repositories": [
                {"url": "https://rhel.invalid/{{releasever}}/os"}, {"url": "https://other.invalid/"},
                {"url": "https://rpm.test/os/"}, {"mirrorList": "https://rpm.test/list?arch={{basearch}}"},
            ]}}},
            "toolchain": {"image": "debian:12"},
            "kernelImage": {"oci": {"image": "r.test/{{os_id}}:{{release}}"}},
        });
        assert_eq!(
            named(&family),
            [
                "(https://127.0.0.1:5000/v2/ http://127.0.0.1:5000/v2/ https://registry-1.docker.io/v2/)",
                "(https://mirror.test/rhel/)",
                "(https://r.test/v2/)",
                "(https://rpm.test/)",
                "https://rpm.test/os/repodata/repomd.xml",
            ]
        );
    }

    #[test]
    fn an_image_names_its_sources_and_no_value_that_only_looks_like_one() {
        let image = json!({
            "sources": [{"name": "s", "from": {"url": {"url": "https://files.test/s.tgz", "sha256": "00"}}}],
            "runtime": {"env": {"PROXY": "http://proxy.test:3128"}},
            "rollout": [{"strategy": "git", "repository": "https://git.test/x.git"}, {"repository": "ssh://git@git.test/x"}],
        });
        let found = ["(https://git.test/x.git)", "https://mirror.test/files/s.tgz https://files.test/s.tgz"];
        assert_eq!(named(&image), found);
    }
}
