//! Host names in `site.yaml`, allowed hosts, and hosts reached without a proxy.

// `core::net` provides address types, but no sockets.
use core::net::IpAddr;
use std::{fmt, str::FromStr};

use ipnet::IpNet;
use oci::is_docker_hub;
use schemars::{Schema, json_schema};
use serde::{Serialize, Serializer};
use serde_with::{DeserializeFromStr, SerializeDisplay};
use url::Url;

use crate::definition::{ParseError, text_schema};

/// `host` or `host:port`, with the name in lower case.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, DeserializeFromStr, SerializeDisplay)]
pub struct HostPort {
    name: String,
    port: Option<u16>,
}

const HOST_SYNTAX: &str = "a host: `name` or `name:port`, without a scheme or a path";

impl HostPort {
    /// Returns the host of a URL. Without a port in the URL, the scheme's default port applies.
    pub fn of_url(url: &Url) -> Option<Self> {
        let name = url.host_str()?.trim_matches(['[', ']']).to_ascii_lowercase();
        Some(Self { name, port: url.port_or_known_default() })
    }

    /// Parses the host of a registry. Default port: 443.
    pub fn of_registry(text: &str) -> Option<Self> {
        let host: Self = text.parse().ok()?;
        Some(Self { port: host.port.or(Some(443)), ..host })
    }

    /// Returns the name or address, without brackets.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the port, if one is set.
    pub fn port(&self) -> Option<u16> {
        self.port
    }

    /// Whether `other` is this host. Without a port, `self` covers all ports of the host. Docker Hub's names are equivalent.
    pub fn covers(&self, other: &Self) -> bool {
        let same_name = self.name == other.name || (is_docker_hub(&self.name) && is_docker_hub(&other.name));
        same_name && (self.port.is_none() || self.port == other.port)
    }

    /// Whether the host is this machine.
    pub fn is_loopback(&self) -> bool {
        self.name == "localhost" || self.name.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
    }
}

impl FromStr for HostPort {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let invalid = || ParseError::new(text, HOST_SYNTAX);
        let (name, port) = match text.strip_prefix('[').and_then(|text| text.split_once(']')) {
            Some((address, "")) => (address, None),
            Some((address, suffix)) => (address, Some(suffix.strip_prefix(':').ok_or_else(invalid)?)),
            None => text.split_once(':').map_or((text, None), |(name, port)| (name, Some(port))),
        };
        let bracketed = text.starts_with('[');
        let is_name = !name.is_empty()
            && name.len() <= 253
            && name.starts_with(|c: char| c.is_ascii_alphanumeric())
            && name.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c));
        let is_address = bracketed && name.parse::<IpAddr>().is_ok_and(|address| address.is_ipv6());
        let port = match port {
            None => None,
            Some(port) if port.chars().all(|c| c.is_ascii_digit()) => {
                Some(port.parse().ok().filter(|port| *port > 0).ok_or_else(invalid)?)
            }
            Some(_) => return Err(invalid()),
        };
        if (is_name && !bracketed) || is_address {
            Ok(Self { name: name.to_ascii_lowercase(), port })
        } else {
            Err(invalid())
        }
    }
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.name.contains(':') {
            write!(f, "[{}]", self.name)?;
        } else {
            f.write_str(&self.name)?;
        }
        self.port.map_or(Ok(()), |port| write!(f, ":{port}"))
    }
}

/// The hosts that farrier may access.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostPolicy {
    /// Allowed hosts; `None` allows all hosts.
    allowed: Option<Vec<HostPort>>,
}

impl HostPolicy {
    /// Allows only hosts added with [`HostPolicy::allow`].
    pub fn offline() -> Self {
        Self { allowed: Some(Vec::new()) }
    }

    /// Whether all hosts except the added ones are forbidden.
    pub fn is_offline(&self) -> bool {
        self.allowed.is_some()
    }

    /// Allows this host, too.
    pub fn allow(&mut self, host: HostPort) {
        if let Some(allowed) = &mut self.allowed
            && !allowed.contains(&host)
        {
            allowed.push(host);
        }
    }

    /// Whether farrier may access this host.
    pub fn allows(&self, host: &HostPort) -> bool {
        self.allowed.as_ref().is_none_or(|hosts| hosts.iter().any(|allowed| allowed.covers(host)))
    }
}

/// One entry of `noProxy`.
#[derive(Clone, Debug, PartialEq, Eq, DeserializeFromStr, SerializeDisplay)]
pub enum NoProxy {
    /// `*`: everything.
    All,
    /// `example.org`, `.example.org`, `*.example.org`: the domain (without the dot) and its subdomains; optionally only at this
    /// port.
    Domain { name: String, port: Option<u16> },
    /// `10.0.0.0/8`, `10.1.2.3`, `[fd00::]/8`: a network or a single address; optionally only at this port.
    Network { network: IpNet, port: Option<u16> },
}

impl NoProxy {
    /// Whether the entry matches the host, which is then reached directly.
    pub fn matches(&self, host: &HostPort) -> bool {
        let covers_port = |port: &Option<u16>| port.is_none() || *port == host.port;
        match self {
            Self::All => true,
            Self::Domain { name, port } => {
                let subdomain = host.name.strip_suffix(name.as_str());
                covers_port(port) && subdomain.is_some_and(|name| name.is_empty() || name.ends_with('.'))
            }
            Self::Network { network, port } => {
                covers_port(port)
                    && host.name.parse().is_ok_and(|other: IpAddr| network.contains(&other.to_canonical()))
            }
        }
    }
}

const DIRECT_HOST_SYNTAX: &str = "a host that is reached directly: a name, a domain (`.example.org`), an address, a network \
                             (`10.0.0.0/8`) or `*`, perhaps with a port";

impl FromStr for NoProxy {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let invalid = || ParseError::new(text, DIRECT_HOST_SYNTAX);
        if text == "*" {
            return Ok(Self::All);
        }
        if let Some((address, bits)) = text.split_once('/') {
            let network = format!("{}/{bits}", address.trim_matches(['[', ']']));
            return Ok(Self::Network { network: network.parse().map_err(|_| invalid())?, port: None });
        }
        if let Ok(address) = text.parse::<IpAddr>() {
            return Ok(Self::Network { network: address.into(), port: None });
        }
        let inner = text.strip_prefix("*.").or_else(|| text.strip_prefix('.')).unwrap_or(text);
        let HostPort { name, port } = inner.parse().map_err(|_| invalid())?;
        Ok(match name.parse::<IpAddr>() {
            Ok(address) => Self::Network { network: address.into(), port },
            Err(_) => Self::Domain { name, port },
        })
    }
}

impl fmt::Display for NoProxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let port = match self {
            Self::All => return f.write_str("*"),
            Self::Domain { name, port } => {
                f.write_str(name)?;
                port
            }
            Self::Network { network, port } => {
                let address = network.addr();
                match (network.prefix_len() == network.max_prefix_len(), address.is_ipv6() && port.is_some())
                {
                    (true, true) => write!(f, "[{address}]")?,
                    (true, false) => write!(f, "{address}")?,
                    (false, _) => write!(f, "{network}")?,
                }
                port
            }
        };
        port.map_or(Ok(()), |port| write!(f, ":{port}"))
    }
}

/// URL of a proxy. Only a URL from the environment may contain a name and a password, because definitions are shared.
#[derive(Clone, PartialEq, Eq, derive_more::Debug, DeserializeFromStr)]
#[debug("ProxyUrl({self})")]
pub struct ProxyUrl(Url);

const PROXY_SYNTAX: &str = "a proxy's address: `http://host[:port]` or the same with `https://`, without a \
     password (reference it in `login` beside it)";

impl ProxyUrl {
    /// Returns the URL, including its password.
    pub fn as_url(&self) -> &Url {
        &self.0
    }

    /// Returns the proxy's host.
    pub fn host(&self) -> Option<HostPort> {
        HostPort::of_url(&self.0)
    }

    /// Puts a name and a password into the URL.
    pub fn log_in(&mut self, user: &str, password: &str) {
        // Both calls succeed for a URL with a host.
        let _ = self.0.set_username(user);
        let _ = self.0.set_password(Some(password));
    }

    /// Parses `http://[user:password@]host[:port]`, the form of environment variables.
    pub fn of_environment(text: &str) -> Result<Self, ParseError> {
        // An invalid value may contain a password, so the error omits everything before the `@`.
        let invalid = || ParseError::new(text.rsplit('@').next().unwrap_or_default(), PROXY_SYNTAX);
        let url = Url::parse(text).map_err(|_| invalid())?;
        let has_only_host = url.path() == "/" && url.query().is_none() && url.fragment().is_none();
        if matches!(url.scheme(), "http" | "https") && url.has_host() && has_only_host {
            Ok(Self(url))
        } else {
            Err(invalid())
        }
    }
}

impl FromStr for ProxyUrl {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let proxy = Self::of_environment(text)?;
        if proxy.0.username().is_empty() && proxy.0.password().is_none() {
            Ok(proxy)
        } else {
            Err(ParseError::new(text, PROXY_SYNTAX))
        }
    }
}

/// Formats the URL without its password.
impl fmt::Display for ProxyUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let host = self.host().map(|host| host.to_string()).unwrap_or_default();
        write!(f, "{}://{host}", self.0.scheme())
    }
}

/// Serializes the URL without its password.
impl Serialize for ProxyUrl {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut url = self.0.clone();
        let _ = url.set_username("");
        let _ = url.set_password(None);
        serializer.collect_str(&url)
    }
}

/// Schema of a text with this description.
pub(super) fn text_with_description(description: &str) -> Schema {
    json_schema!({"type": "string", "description": format!("{description}.")})
}

text_schema!(HostPort, true, text_with_description(HOST_SYNTAX));
text_schema!(NoProxy, true, text_with_description(DIRECT_HOST_SYNTAX));
text_schema!(ProxyUrl, true, text_with_description(PROXY_SYNTAX));

#[cfg(test)]
mod tests {
    use super::*;

    fn host(text: &str) -> HostPort {
        text.parse().unwrap()
    }

    #[test]
    fn hosts() {
        for (text, name, port) in [
            ("R.Example:5000", "r.example", Some(5000)),
            ("localhost", "localhost", None),
            ("[::1]:443", "::1", Some(443)),
            ("[fd00::1]", "fd00::1", None),
            ("10.1.2.3", "10.1.2.3", None),
        ] {
            let parsed = host(text);
            assert_eq!((parsed.name(), parsed.port()), (name, port), "{text}");
            assert_eq!(host(&parsed.to_string()), parsed);
        }
        for text in [
            "",
            "https://r.example",
            "r.example/x",
            "r.example:",
            "r.example:0",
            "r.example:65536",
            "r:+1",
            "a b",
            "-x",
            "::1",
            "[::1",
            "[r.example]",
            "[::1]x",
        ] {
            assert!(text.parse::<HostPort>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn only_named_hosts_are_allowed_offline() {
        let mut policy = HostPolicy::offline();
        assert!(!policy.allows(&host("127.0.0.1:5000")));
        for named in ["r.example", "s.example:5000", "docker.io"] {
            policy.allow(host(named));
        }
        for allowed in ["r.example:443", "r.example", "s.example:5000", "registry-1.docker.io:443"] {
            assert!(policy.allows(&host(allowed)), "{allowed}");
        }
        for forbidden in ["x.r.example", "s.example:443", "s.example", "auth.docker.io:443"] {
            assert!(!policy.allows(&host(forbidden)), "{forbidden}");
        }
        assert!(HostPolicy::default().allows(&host("any.example")));
    }

    #[test]
    fn who_is_reached_directly() {
        for (entry, other, wanted) in [
            ("*", "x.example:443", true),
            ("example.org", "example.org:443", true),
            ("example.org", "a.example.org:443", true),
            (".example.org", "a.b.example.org:443", true),
            ("*.Example.org", "a.example.org:443", true),
            ("example.org", "badexample.org:443", false),
            ("example.org:8443", "example.org:443", false),
            ("example.org:443", "example.org:443", true),
            ("10.0.0.0/8", "10.255.1.1:80", true),
            ("10.0.0.0/8", "11.0.0.1:80", false),
            ("0.0.0.0/0", "11.0.0.1:80", true),
            ("10.1.2.3", "10.1.2.3:80", true),
            ("10.1.2.3:81", "10.1.2.3:80", false),
            ("fd00::/8", "[fd12::1]:443", true),
            ("fd00::/8", "[fe80::1]:443", false),
            ("10.0.0.0/8", "10.example.org:80", false),
            ("::1", "[::1]:5000", true),
        ] {
            let entry: NoProxy = entry.parse().unwrap();
            assert_eq!(entry.matches(&host(other)), wanted, "{entry} {other}");
            assert_eq!(entry.to_string().parse::<NoProxy>().unwrap(), entry);
        }
        for text in ["", "10.0.0.0/33", "example.org/8", "http://x", "a b"] {
            assert!(text.parse::<NoProxy>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn proxies_and_their_passwords() {
        let proxy = ProxyUrl::of_environment("http://me:secret@proxy.example:3128").unwrap();
        assert_eq!(proxy.to_string(), "http://proxy.example:3128");
        assert_eq!(serde_json::to_string(&proxy).unwrap(), r#""http://proxy.example:3128/""#);
        assert_eq!(format!("{proxy:?}"), "ProxyUrl(http://proxy.example:3128)");
        assert_eq!(proxy.as_url().password(), Some("secret"));
        for text in ["proxy.example:3128", "socks5://me:secret@x:1", "http://x/path", "me:secret@x:1", ""] {
            let error = ProxyUrl::of_environment(text).unwrap_err().to_string();
            assert!(!error.contains("secret"), "{error}");
        }
        // A definition may not contain credentials.
        for text in ["http://me:secret@proxy.example:3128", "http://secret@proxy.example"] {
            let error = serde_json::from_value::<ProxyUrl>(text.into()).unwrap_err().to_string();
            assert!(!error.contains("secret") && error.contains("`login`"), "{error}");
        }
        let mut proxy: ProxyUrl = "http://proxy.example:3128".parse().unwrap();
        proxy.log_in("me", "p@/;\"w");
        assert_eq!(proxy.as_url().as_str(), "http://me:p%40%2F%3B%22w@proxy.example:3128/");
    }
}
