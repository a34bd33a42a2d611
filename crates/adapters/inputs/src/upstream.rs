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
use farrier_net::{Asker, Net};
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

use super::{FetchError, Fetcher, Result, apt};

/// Timeout for one upstream.
const LIMIT: Duration = Duration::from_secs(20);
/// Names of the definitions' fields with addresses that farrier contacts.
const ADDRESSES: [&str; 4] = ["url", "mirrorList", "checksums", "repository"];

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
        /// The site's mirrors come first.
        places: Vec<Url>,
        /// Whether the address is complete, so that it must exist. An incomplete one depends on the kernel, or belongs to a
        /// registry.
        is_whole: bool,
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

/// Returns the upstreams that a definition names, with the site's mirrors. The definition is searched as data, so that future
/// fields with addresses are covered too.
pub fn upstreams(net: &Net, definition: &impl Serialize) -> BTreeSet<Upstream> {
    let mut found = BTreeSet::new();
    if let Ok(definition) = serde_json::to_value(definition) {
        look_through(net, ["", ""], &definition, &mut found);
    }
    found
}

/// Returns the mirrors of a rule, as separate upstreams.
pub fn mirrors(net: &Net, rule: &MirrorRule) -> BTreeSet<Upstream> {
    let of = |to: &Prefix| match to {
        Prefix::Address(url) => Upstream::Address { places: vec![url.clone()], is_whole: false },
        Prefix::Image(images) => registry(net, [images.host()]),
    };
    rule.to.iter().map(of).collect()
}

/// Returns an upstream for the first of these registries (`host[:port]`) that answers.
pub fn registry<'a>(net: &Net, hosts: impl IntoIterator<Item = &'a str>) -> Upstream {
    let places = hosts.into_iter().flat_map(|host| {
        let plain =
            HostPort::of_registry(host).is_some_and(|host| net.allows_plain(&host) && !net.wants_tls(&host));
        let host = if is_docker_hub(host) { "registry-1.docker.io" } else { host };
        let address = |scheme| Url::parse(&format!("{scheme}://{host}/v2/")).ok();
        [address("https"), address("http").filter(|_| plain)]
    });
    Upstream::Address { places: places.flatten().collect(), is_whole: false }
}

/// Searches a value. `under` has the name of the field that holds it, and of the enclosing field.
fn look_through(
    net: &Net,
    under @ [around, field]: [&str; 2],
    value: &Value,
    found: &mut BTreeSet<Upstream>,
) {
    match value {
        Value::Array(items) => items.iter().for_each(|item| look_through(net, under, item, found)),
        Value::Object(fields) => {
            // Tracked suites are in the archive of the headers.
            if around != "track" {
                found.extend(archive(fields));
            }
            fields.iter().for_each(|(name, value)| look_through(net, [field, name.as_str()], value, found));
        }
        Value::String(text) if field == "image" || (around, field) == ("image", "reference") => {
            let candidates = repository(text).map(|repository| net.image_candidates(&repository));
            let hosts: Vec<String> =
                candidates.iter().flatten().map(|candidate| candidate.normalized().0).collect();
            found.extend((!hosts.is_empty()).then(|| registry(net, hosts.iter().map(String::as_str))));
        }
        Value::String(text) if ADDRESSES.contains(&field) => found.extend(address(net, under, text)),
        _ => {}
    }
}

fn archive(fields: &Map<String, Value>) -> Option<Upstream> {
    let named = ["suite", "suites", "extraSuites"].iter().filter_map(|name| fields.get(*name));
    let texts = named.flat_map(|value| value.as_array().cloned().unwrap_or_else(|| vec![value.clone()]));
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
    format!("{path}/any").parse().ok()
}

fn address(net: &Net, [around, field]: [&str; 2], text: &str) -> Option<Upstream> {
    let (start, is_whole) = match text.split_once("{{") {
        Some((start, _)) => (start.get(..=start.rfind('/')?)?, false),
        // A Git server only answers Git's own requests.
        None => (text, field != "repository" && around != "git"),
    };
    let mut url = Url::parse(start).ok().filter(|url| matches!(url.scheme(), "http" | "https"))?;
    if is_whole && (around, field) == ("repositories", "url") {
        url = Url::parse(&format!("{}/repodata/repomd.xml", start.trim_end_matches('/'))).ok()?;
    }
    let mut places = net.url_candidates(&url);
    // An `.invalid` name is a placeholder; the site's mirrors have the real address (RFC 6761).
    places.retain(|place| !place.host_str().is_some_and(|host| host.ends_with(".invalid")));
    (!places.is_empty()).then_some(Upstream::Address { places, is_whole })
}

/// Checks that an upstream answers, contacting it in the same way as for fetching.
pub async fn ask(fetcher: &Fetcher, upstream: &Upstream) -> Result<Answer> {
    let asked = async {
        match upstream {
            Upstream::Archive { suites, mirror } => {
                let host = apt::ask(fetcher, suites, mirror.as_ref()).await?;
                Ok(Answer { host, clock_ahead: None })
            }
            Upstream::Address { places, is_whole } => first_answer(&fetcher.net, places, *is_whole).await,
        }
    };
    let late = |_| {
        let what = match upstream {
            Upstream::Archive { suites, mirror: _ } => format!("suite {}", suites.join(", ")),
            Upstream::Address { places, is_whole: _ } => {
                places.first().map(Url::to_string).unwrap_or_default()
            }
        };
        let reason = format!("no answer within {} seconds", LIMIT.as_secs());
        FetchError::Transfer(what, Box::new(io::Error::new(io::ErrorKind::TimedOut, reason)))
    };
    timeout(LIMIT, asked).await.map_err(late)?
}

async fn first_answer(net: &Net, places: &[Url], is_whole: bool) -> Result<Answer> {
    let mut outcome = Err(FetchError::Layout("an address".to_owned()));
    for place in places {
        outcome = answer(net, place, is_whole).await;
        if outcome.is_ok() {
            break;
        }
    }
    outcome
}

async fn answer(net: &Net, place: &Url, is_whole: bool) -> Result<Answer> {
    let mut request = Net::request(Method::HEAD, place.clone());
    // An intermediate cache would return the time of its copy.
    request.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    let response = net.execute(request, &Asker::of("look whether it answers")).await?;
    let status = response.status().as_u16();
    let is_there = match status {
        407 => false,
        // A server may hide a directory, and a registry may require a login.
        401 | 403 | 404 | 410 => !is_whole,
        // Not every server supports HEAD.
        501 => true,
        status => status < 500,
    };
    if !is_there {
        return Err(FetchError::Status(place.to_string(), status));
    }
    let host = HostPort::of_url(place).map(|host| host.to_string()).unwrap_or_default();
    let is_its_own = response.url().origin() == place.origin();
    let clock_ahead = clock_ahead(response.headers(), Timestamp::now()).filter(|_| is_its_own);
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
            Upstream::Address { places, is_whole } => {
                let places: Vec<&str> = places.iter().map(Url::as_str).collect();
                if is_whole { places.join(" ") } else { format!("({})", places.join(" ")) }
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
