//! Computes the `Authorization` header of requests, from credentials, challenges and token servers.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, atomic::AtomicU64},
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use reqwest::{
    Method, Request,
    header::{AUTHORIZATION, CONTENT_TYPE, HeaderValue, WWW_AUTHENTICATE},
};
use serde::Deserialize;
use url::{Url, form_urlencoded};

use super::{
    challenge::{self, Challenge},
    error::{RegistryError, Result, excerpt, is_transient_status},
    registry::Credential,
    retry_after::retry_after,
    transport::{RemoteName, Transport, body_start, next_chunk},
};

/// Maximum number of bytes read from a token server's response.
const MAX_TOKEN: usize = 1 << 20;

/// Default lifetime of a token in seconds, if the token server states none (distribution's token specification).
const DEFAULT_LIFETIME: u64 = 60;
/// How long before their expiry tokens are renewed, because of clock skew and slow requests.
const EXPIRY_MARGIN: Duration = Duration::from_secs(10);

/// Access that a request needs, displayed as the actions of the token specification.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, derive_more::Display)]
pub(super) enum Scope {
    #[display("pull")]
    Pull,
    #[display("pull,push")]
    Push,
    #[display("delete,pull")]
    Delete,
}

/// The access for which a request needs authorization.
#[derive(Clone, Copy)]
pub(super) struct Purpose<'a> {
    pub name: &'a RemoteName,
    pub scope: Scope,
    /// Path of another repository of the same registry from which the request mounts a blob.
    pub source: Option<&'a str>,
}

impl Purpose<'_> {
    /// Returns the scopes in the syntax of the token specification.
    fn scopes(&self) -> Vec<String> {
        let Self { name, scope, source } = self;
        let source_scope = source.map(|source| format!("repository:{source}:{}", Scope::Pull));
        std::iter::once(format!("repository:{}:{scope}", name.path)).chain(source_scope).collect()
    }
}

/// An `Authorization` header and its expiry.
#[derive(Clone)]
struct Grant {
    header: HeaderValue,
    expires_at: Option<Instant>,
}

impl Grant {
    fn is_valid(&self) -> bool {
        self.expires_at.is_none_or(|expires_at| Instant::now() < expires_at)
    }
}

/// Header for one (authority, repository, scope, source), behind its own lock: concurrent requests share one token instead of
/// fetching one each, and requests to other repositories do not wait.
type Slot = Arc<tokio::sync::Mutex<Option<Grant>>>;
type Key = (String, String, Scope, Option<String>);

#[derive(Default)]
pub(super) struct Authorizer {
    slots: Mutex<HashMap<Key, Slot>>,
    /// Authorities that asked for a token.
    token_users: Mutex<HashSet<String>>,
}

#[derive(Deserialize)]
struct TokenResponse {
    token: Option<String>,
    access_token: Option<String>,
    expires_in: Option<u64>,
}

impl Authorizer {
    /// Whether a registry has asked for tokens, which are issued for a scope.
    pub(super) fn uses_tokens(&self, name: &RemoteName) -> bool {
        self.token_users.lock().contains(&name.authority)
    }

    fn slot(&self, Purpose { name, scope, source }: Purpose<'_>) -> Slot {
        let key = (name.authority.clone(), name.path.clone(), scope, source.map(str::to_owned));
        self.slots.lock().entry(key).or_default().clone()
    }

    /// Returns the slots whose header is usable for this purpose. The slot of the purpose itself comes last.
    fn reusable_slots(&self, purpose: Purpose<'_>) -> Vec<Slot> {
        // A push token also allows pulls.
        let push = (purpose.scope == Scope::Pull).then_some(Purpose { scope: Scope::Push, ..purpose });
        push.into_iter().chain([purpose]).map(|purpose| self.slot(purpose)).collect()
    }

    /// Returns a cached header for a request, if one is valid.
    pub(super) async fn cached(&self, purpose: Purpose<'_>) -> Option<HeaderValue> {
        for slot in self.reusable_slots(purpose) {
            let grant = slot.lock().await;
            if let Some(grant) = grant.as_ref().filter(|grant| grant.is_valid()) {
                return Some(grant.header.clone());
            }
        }
        None
    }

    /// Reads the credentials again after a 403 to a request with the header `used`. Returns a header with the new password, or
    /// `None` if `used` contains no password or the password has not changed.
    ///
    /// Some registries (ECR) respond to an expired password with 403 instead of 401. The check for a new password comes first, so
    /// that a request body is not sent twice in vain.
    pub(super) async fn after_403(
        &self,
        transport: &Transport,
        purpose: Purpose<'_>,
        action: &str,
        used: &HeaderValue,
    ) -> Option<HeaderValue> {
        if !is_basic(used) {
            return None;
        }
        // If the credentials cannot be read, report the 403, which is the more useful error.
        let credential = credential(transport, purpose.name, action).await.ok().flatten();
        let Some(Credential::Password { user, password }) = credential else { return None };
        let header = basic(&user, &password);
        if header == *used {
            return None;
        }
        for slot in self.reusable_slots(purpose) {
            let mut grant = slot.lock().await;
            if grant.as_ref().is_some_and(|grant| grant.header == *used) {
                *grant = Some(Grant { header: header.clone(), expires_at: None });
            }
        }
        Some(header)
    }

    /// Responds to the challenges in a 401 to a request with the header `used`. Returns `None` if there is no better header.
    pub(super) async fn after_401(
        &self,
        transport: &Transport,
        purpose: Purpose<'_>,
        action: &str,
        response: &reqwest::Response,
        used: Option<&HeaderValue>,
    ) -> Result<Option<HeaderValue>> {
        let slot = self.slot(purpose);
        let mut grant = slot.lock().await;
        match grant.as_ref() {
            // Another request has stored a valid header in the meantime.
            Some(newer) if newer.is_valid() && Some(&newer.header) != used => {
                return Ok(Some(newer.header.clone()));
            }
            _ => *grant = None,
        }
        let values = response.headers().get_all(WWW_AUTHENTICATE).iter();
        let challenges: Vec<_> =
            values.filter_map(|value| value.to_str().ok()).flat_map(challenge::parse).collect();
        let bearer = challenges.iter().find(|c| matches!(c, Challenge::Bearer { .. }));
        let Some(challenge) = bearer.or(challenges.first()) else { return Ok(None) };

        let credential = credential(transport, purpose.name, action).await?;
        let renewed = match challenge {
            Challenge::Basic => match credential {
                Some(Credential::Password { user, password }) => {
                    Some(Grant { header: basic(&user, &password), expires_at: None })
                }
                _ => None,
            },
            Challenge::Bearer { realm, service } => {
                self.token_users.lock().insert(purpose.name.authority.clone());
                let over_tls = response.url().scheme() == "https";
                let query = TokenQuery { purpose, action, realm, over_tls, service: service.as_deref() };
                Some(query.send(transport, credential).await?)
            }
        };
        // The registry would reject the same header again.
        *grant = renewed.filter(|renewed| Some(&renewed.header) != used);
        Ok(grant.as_ref().map(|grant| grant.header.clone()))
    }
}

async fn credential(transport: &Transport, name: &RemoteName, action: &str) -> Result<Option<Credential>> {
    let credential = transport.access.credential(&name.host, &name.path).await;
    credential.map_err(|reason| RegistryError::Denied {
        host: name.host.clone(),
        action: action.to_owned(),
        reason: format!("its credentials cannot be used: {reason}"),
    })
}

/// Returns the reason, for an error message, why the registry responds with 401.
pub(super) fn explain(transport: &Transport, name: &RemoteName, used: Option<&HeaderValue>) -> String {
    let credentials_source = transport.access.credentials_from();
    match used {
        Some(value) if is_basic(value) => {
            format!("the user name or password in {credentials_source} is wrong")
        }
        Some(_) => "the registry rejects the token that its token server issued".to_owned(),
        None => format!(
            "the registry requires credentials, and there is no entry for {} in {credentials_source}",
            name.host
        ),
    }
}

fn basic(user: &str, password: &str) -> HeaderValue {
    use base64::Engine as _;
    let encoded = base64::engine::general_purpose::STANDARD.encode(format!("{user}:{password}"));
    sensitive(&format!("Basic {encoded}")).unwrap_or_else(|| HeaderValue::from_static("Basic"))
}

fn is_basic(header: &HeaderValue) -> bool {
    header.as_bytes().starts_with(b"Basic ")
}

fn sensitive(text: &str) -> Option<HeaderValue> {
    let mut value = HeaderValue::from_str(text).ok()?;
    value.set_sensitive(true);
    Some(value)
}

/// One request to a token server.
struct TokenQuery<'a> {
    purpose: Purpose<'a>,
    action: &'a str,
    realm: &'a str,
    /// Whether the registry named the token server over TLS.
    over_tls: bool,
    service: Option<&'a str>,
}

/// Token servers of public registries, on the default TLS port, whose host differs from the registry's: (registry, token server).
const TOKEN_SERVERS: [(&str, &str); 3] = [
    ("registry-1.docker.io", "auth.docker.io"),
    ("registry.gitlab.com", "gitlab.com"),
    ("registry.digitalocean.com", "api.digitalocean.com"),
];

/// Whether a token server may receive the credentials for a registry. It is not enough that the registry names the token server,
/// because an attacker may control the registry.
fn is_trusted(transport: &Transport, name: &RemoteName, realm: &Url) -> bool {
    belongs_to_registry(name, realm) || transport.access.trusts_token_server(&name.authority, realm)
}

/// Whether a token server belongs to the registry: it is the registry itself, an HTTPS server with the registry's host name, or an
/// entry of [`TOKEN_SERVERS`].
fn belongs_to_registry(name: &RemoteName, realm: &Url) -> bool {
    let host = realm.host_str().unwrap_or_default();
    let registry = Url::parse(&format!("https://{}/", name.authority));
    let same_name = registry.is_ok_and(|registry| registry.host_str() == Some(host));
    let is_listed = TOKEN_SERVERS.contains(&(name.authority.as_str(), host)) && realm.port().is_none();
    name.serves(realm) || (realm.scheme() == "https" && (same_name || is_listed))
}

/// Parses the address of a token server. The connection to the token server must be at least as secure as the connection to the
/// registry, because tokens give access to the registry.
fn parse_realm(text: &str, over_tls: bool, allows_plain: impl Fn(&Url) -> bool) -> Result<Url, &'static str> {
    let url = Url::parse(text).map_err(|_| "is not a URL")?;
    match url.scheme() {
        "https" => Ok(url),
        "http" if !over_tls && allows_plain(&url) => Ok(url),
        _ => Err("does not use https"),
    }
}

impl TokenQuery<'_> {
    async fn send(&self, transport: &Transport, credential: Option<Credential>) -> Result<Grant> {
        let url = self.realm(transport)?;
        let name = self.purpose.name;
        if credential.is_some() && !is_trusted(transport, name, &url) {
            return Err(RegistryError::TokenServer {
                host: name.host.clone(),
                action: self.action.to_owned(),
                realm: url.origin().ascii_serialization(),
            });
        }
        let request = self.request(url, credential);
        let start = Instant::now();
        let action = format!("{} (token)", self.action);
        let host = &name.host;
        let mut response =
            transport.execute(request, &AtomicU64::default(), &action, host, Some(host)).await?;
        let mut body = Vec::new();
        if response.status().is_success() {
            while body.len() < MAX_TOKEN
                && let Some(chunk) = next_chunk(&mut response, host, &action).await?
            {
                body.extend_from_slice(&chunk);
            }
        } else {
            body = body_start(&mut response, MAX_TOKEN).await;
        }
        self.check_status(&response, &body)?;
        let no_token = || {
            RegistryError::protocol(host, self.action, "the response of the token server contains no token")
        };
        let body: TokenResponse = serde_json::from_slice(&body).map_err(|_| no_token())?;
        let mut tokens = [body.token, body.access_token].into_iter().flatten();
        let token = tokens.find(|token| !token.is_empty()).ok_or_else(no_token)?;
        let header = sensitive(&format!("Bearer {token}")).ok_or_else(no_token)?;
        let lifetime = Duration::from_secs(body.expires_in.unwrap_or(DEFAULT_LIFETIME).clamp(1, 86_400));
        // A token that counted as expired at once would send each request twice, and a large body in vain.
        let valid_for = lifetime.saturating_sub(EXPIRY_MARGIN).max(Duration::from_secs(1));
        Ok(Grant { header, expires_at: Some(start + valid_for) })
    }

    fn request(&self, mut url: Url, credential: Option<Credential>) -> Request {
        let scopes = self.purpose.scopes();
        let service = self.service.map(|service| ("service", service));
        // Only the OAuth2 form of the token specification can carry identity tokens.
        if let Some(Credential::IdentityToken(token)) = &credential {
            let mut form = form_urlencoded::Serializer::new(String::new());
            form.append_pair("grant_type", "refresh_token")
                .append_pair("client_id", "farrier")
                .append_pair("refresh_token", token)
                .append_pair("scope", &scopes.join(" "));
            form.extend_pairs(service);
            let mut request = Request::new(Method::POST, url);
            let kind = HeaderValue::from_static("application/x-www-form-urlencoded");
            request.headers_mut().insert(CONTENT_TYPE, kind);
            *request.body_mut() = Some(form.finish().into());
            return request;
        }
        url.query_pairs_mut().extend_pairs(scopes.iter().map(|scope| ("scope", scope))).extend_pairs(service);
        let mut request = Request::new(Method::GET, url);
        if let Some(Credential::Password { user, password }) = credential {
            request.headers_mut().insert(AUTHORIZATION, basic(&user, &password));
        }
        request
    }

    /// Turns a response without success into an error.
    fn check_status(&self, response: &reqwest::Response, body: &[u8]) -> Result<()> {
        let name = self.purpose.name;
        let (host, action) = (name.host.clone(), self.action.to_owned());
        let describe = |status| match name.quote(response, body) {
            Ok(text) => format!("its token server answered {status}: {text}"),
            Err(other) => format!("its token server {other} answered {status}"),
        };
        match response.status().as_u16() {
            200..=299 => Ok(()),
            status @ (400 | 401 | 403) => {
                Err(RegistryError::Denied { host, action, reason: describe(status) })
            }
            status if is_transient_status(status) => {
                let after = retry_after(response.headers());
                Err(RegistryError::Server { host, status, action, after })
            }
            status => Err(RegistryError::protocol(host, action, describe(status))),
        }
    }

    fn realm(&self, transport: &Transport) -> Result<Url> {
        let url = parse_realm(self.realm, self.over_tls, |url| transport.access.allows_plain(url));
        url.map_err(|reason| {
            let reason = format!("its token server {} {reason}", excerpt(self.realm.as_bytes()));
            RegistryError::protocol(&self.purpose.name.host, self.action, reason)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_servers_of_a_registry_are_recognized() {
        for (repository, realm, own) in [
            ("r.example/x", "https://r.example/token", true),
            ("r.example:5050/x", "https://r.example/jwt/auth", true),
            ("r.example:5050/x", "https://r.example:8443/jwt/auth", true),
            ("127.0.0.1:5000/x", "http://127.0.0.1:5000/token", true),
            ("127.0.0.1:5000/x", "http://127.0.0.1:5001/token", false),
            ("docker.io/x", "https://auth.docker.io/token", true),
            ("docker.io/x", "https://auth.docker.io:8443/token", false),
            ("docker.io/x", "http://auth.docker.io/token", false),
            ("docker.io/x", "https://gitlab.com/jwt/auth", false),
            ("registry.gitlab.com/x", "https://gitlab.com/jwt/auth", true),
            ("registry.gitlab.com:5000/x", "https://gitlab.com/jwt/auth", false),
            ("r.example/x", "https://auth.docker.io/token", false),
            ("r.example/x", "https://auth.r.example/token", false),
            ("registry.r.example/x", "https://r.example/token", false),
            ("r.example/x", "https://r.example@evil.test/token", false),
            ("r.example/x", "https://evil.test/r.example", false),
        ] {
            let name = RemoteName::of(&repository.parse().unwrap());
            assert_eq!(belongs_to_registry(&name, &realm.parse().unwrap()), own, "{repository} {realm}");
        }
    }

    #[test]
    fn a_token_server_needs_tls_if_the_registry_uses_it() {
        let (all, none) = (|_: &Url| true, |_: &Url| false);
        assert!(parse_realm("https://r.example/token", true, none).is_ok());
        assert!(parse_realm("http://127.0.0.1:5000/token", false, all).is_ok());
        let unsafe_way = Err("does not use https");
        assert_eq!(parse_realm("http://127.0.0.1:5000/token", true, all), unsafe_way, "downgrade from TLS");
        assert_eq!(parse_realm("http://r.example/token", false, none), unsafe_way);
        assert_eq!(parse_realm("ftp://r.example/token", false, all), unsafe_way);
        assert_eq!(parse_realm("/token", false, all), Err("is not a URL"));
    }
}
