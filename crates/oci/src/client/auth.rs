//! Authorization: computes the `Authorization` header for a request from credentials, challenges and token servers.

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
    error::{RegistryError, Result, excerpt},
    registry::Credential,
    retry_after::retry_after,
    transport::{RemoteName, Transport, body_start, next_chunk},
};

/// Maximum number of bytes read from a token server's response.
const MAX_TOKEN: usize = 1 << 20;

/// Default lifetime of a token in seconds, if the token server states none (distribution's token specification).
const DEFAULT_LIFETIME: u64 = 60;
/// Margin by which tokens are renewed early, for clock skew and slow requests.
const MARGIN: Duration = Duration::from_secs(10);

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

/// The access that a request needs authorization for.
#[derive(Clone, Copy)]
pub(super) struct Purpose<'a> {
    pub name: &'a RemoteName,
    pub scope: Scope,
    /// Path of another repository of the same registry that the request reads, to mount a blob from it.
    pub source: Option<&'a str>,
}

impl Purpose<'_> {
    /// Scopes in the syntax of the token specification.
    fn scopes(&self) -> Vec<String> {
        let Self { name, scope, source } = self;
        let further = source.map(|source| format!("repository:{source}:{}", Scope::Pull));
        std::iter::once(format!("repository:{}:{scope}", name.path)).chain(further).collect()
    }
}

/// An `Authorization` header and its expiry.
#[derive(Clone)]
struct Grant {
    header: HeaderValue,
    until: Option<Instant>,
}

impl Grant {
    fn is_valid(&self) -> bool {
        self.until.is_none_or(|until| Instant::now() < until)
    }
}

/// One lock for each (authority, repository, scope, source). Concurrent requests share one token instead of fetching
/// one each, and requests to other repositories do not wait.
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
    #[serde(default)]
    token: String,
    #[serde(default)]
    access_token: String,
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

    /// Slots that may hold a usable header for this purpose; the slot of the exact purpose comes last.
    fn candidates(&self, purpose: Purpose<'_>) -> Vec<Slot> {
        // A push token also allows pulls.
        let push = (purpose.scope == Scope::Pull).then_some(Purpose { scope: Scope::Push, ..purpose });
        push.into_iter().chain([purpose]).map(|purpose| self.slot(purpose)).collect()
    }

    /// Cached header for a request, if one is valid.
    pub(super) async fn cached(&self, purpose: Purpose<'_>) -> Option<HeaderValue> {
        for slot in self.candidates(purpose) {
            let grant = slot.lock().await;
            if let Some(grant) = grant.as_ref().filter(|grant| grant.is_valid()) {
                return Some(grant.header.clone());
            }
        }
        None
    }

    /// Reads the credentials again after a 403 to a request that carried `used`. Returns a header with the new
    /// password, or `None` if `used` is no password or the credentials have no other one.
    ///
    /// Some registries (ECR) answer an expired password with 403 instead of 401. The credentials are read before
    /// anything is sent again, so that a request body is sent twice only where a new password may help.
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
        // If the credentials cannot be read, the 403 is the more useful error.
        let credential = credential(transport, purpose.name, action).await.ok().flatten();
        let Some(Credential::Password { user, password }) = credential else { return None };
        let header = basic(&user, &password);
        if header == *used {
            return None;
        }
        for slot in self.candidates(purpose) {
            let mut grant = slot.lock().await;
            if grant.as_ref().is_some_and(|grant| grant.header == *used) {
                *grant = Some(Grant { header: header.clone(), until: None });
            }
        }
        Some(header)
    }

    /// Answers the 401 in `response` to a request that carried `used`. Returns `None` when there is no better header.
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
            // Another request stored a new header in the meantime. An expired one does not help: this request was sent
            // without it.
            Some(newer) if newer.is_valid() && Some(&newer.header) != used => {
                return Ok(Some(newer.header.clone()));
            }
            _ => *grant = None,
        }
        let challenges: Vec<_> = response
            .headers()
            .get_all(WWW_AUTHENTICATE)
            .iter()
            .filter_map(|value| value.to_str().ok())
            .flat_map(challenge::parse)
            .collect();
        let bearer = challenges.iter().find(|c| matches!(c, Challenge::Bearer { .. }));
        let Some(challenge) = bearer.or(challenges.first()) else { return Ok(None) };

        let credential = credential(transport, purpose.name, action).await?;
        let new = match challenge {
            Challenge::Basic => match credential {
                Some(Credential::Password { user, password }) => {
                    Some(Grant { header: basic(&user, &password), until: None })
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
        // The registry would refuse the same header again.
        *grant = new.filter(|new| Some(&new.header) != used);
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

/// Explains, for an error message, why the registry still answers 401.
pub(super) fn explain(transport: &Transport, name: &RemoteName, used: Option<&HeaderValue>) -> String {
    let place = transport.access.credentials_from();
    match used {
        Some(value) if is_basic(value) => {
            format!("the user name or password in {place} is wrong")
        }
        Some(_) => "the registry rejects the token that its token server issued".to_owned(),
        None => {
            format!("the registry requires credentials, and there is no entry for {} in {place}", name.host)
        }
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

/// Token servers of public registries, on the default TLS port, whose host differs from the registry's: (registry,
/// token server).
const TOKEN_SERVERS: [(&str, &str); 3] = [
    ("registry-1.docker.io", "auth.docker.io"),
    ("registry.gitlab.com", "gitlab.com"),
    ("registry.digitalocean.com", "api.digitalocean.com"),
];

/// Whether a token server may receive the credentials for a registry. The registry's own claim is not enough: the
/// registry may have been taken over.
fn is_trusted(transport: &Transport, name: &RemoteName, realm: &Url) -> bool {
    is_own(name, realm) || transport.access.trusts_token_server(&name.authority, realm)
}

/// Whether a token server is the registry itself, an HTTPS server with the registry's host name, or an entry of
/// [`TOKEN_SERVERS`].
fn is_own(name: &RemoteName, realm: &Url) -> bool {
    let host = realm.host_str().unwrap_or_default();
    let registry = Url::parse(&format!("https://{}/", name.authority));
    let same_name = registry.is_ok_and(|registry| registry.host_str() == Some(host));
    let known = TOKEN_SERVERS.contains(&(name.authority.as_str(), host)) && realm.port().is_none();
    name.serves(realm) || (realm.scheme() == "https" && (same_name || known))
}

/// Parses the address of a token server that a registry names. The connection to the token server must be at least as
/// secure as the one to the registry, because its tokens give access to the registry.
fn realm_of(text: &str, over_tls: bool, allows_plain: impl Fn(&Url) -> bool) -> Result<Url, &'static str> {
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
            let (host, action) = (name.host.clone(), self.action.to_owned());
            return Err(RegistryError::TokenServer {
                host,
                action,
                realm: url.origin().ascii_serialization(),
            });
        }
        let scopes = self.purpose.scopes();
        let mut request;
        match credential {
            // OAuth2 form of the token specification: the other form cannot carry identity tokens.
            Some(Credential::IdentityToken(token)) => {
                let mut form = form_urlencoded::Serializer::new(String::new());
                form.append_pair("grant_type", "refresh_token")
                    .append_pair("client_id", "farrier")
                    .append_pair("refresh_token", &token)
                    .append_pair("scope", &scopes.join(" "));
                form.extend_pairs(self.service.map(|service| ("service", service)));
                request = Request::new(Method::POST, url);
                let kind = HeaderValue::from_static("application/x-www-form-urlencoded");
                request.headers_mut().insert(CONTENT_TYPE, kind);
                *request.body_mut() = Some(form.finish().into());
            }
            password => {
                let mut url = url;
                url.query_pairs_mut()
                    .extend_pairs(scopes.iter().map(|scope| ("scope", scope)))
                    .extend_pairs(self.service.map(|service| ("service", service)));
                request = Request::new(Method::GET, url);
                if let Some(Credential::Password { user, password }) = password {
                    request.headers_mut().insert(AUTHORIZATION, basic(&user, &password));
                }
            }
        }
        let start = Instant::now();
        let action = format!("{} (token)", self.action);
        let host = &name.host;
        let mut response =
            transport.execute(request, &AtomicU64::default(), &action, host, Some(host)).await?;
        let status = response.status();
        let mut body = Vec::new();
        if status.is_success() {
            while body.len() < MAX_TOKEN
                && let Some(chunk) = next_chunk(&mut response, host, &action).await?
            {
                body.extend_from_slice(&chunk);
            }
        } else {
            body = body_start(&mut response, MAX_TOKEN).await;
        }
        let action = self.action.to_owned();
        let describe = |status| match name.quote(&response, &body) {
            Ok(text) => format!("its token server answered {status}: {text}"),
            Err(other) => format!("its token server {other} answered {status}"),
        };
        match status.as_u16() {
            200..=299 => {}
            status @ (400 | 401 | 403) => {
                return Err(RegistryError::Denied { host: host.clone(), action, reason: describe(status) });
            }
            status @ (429 | 500..=599) => {
                let after = retry_after(response.headers());
                return Err(RegistryError::Server { host: host.clone(), status, action, after });
            }
            status => return Err(RegistryError::protocol(host, action, describe(status))),
        }
        let no_token = || {
            RegistryError::protocol(host, self.action, "the response of the token server contains no token")
        };
        let answer: TokenResponse = serde_json::from_slice(&body).map_err(|_| no_token())?;
        let token = if answer.token.is_empty() { answer.access_token } else { answer.token };
        let header =
            sensitive(&format!("Bearer {token}")).filter(|_| !token.is_empty()).ok_or_else(no_token)?;
        let lifetime = Duration::from_secs(answer.expires_in.unwrap_or(DEFAULT_LIFETIME).clamp(1, 86_400));
        Ok(Grant { header, until: Some(start + lifetime.saturating_sub(MARGIN)) })
    }

    fn realm(&self, transport: &Transport) -> Result<Url> {
        let url = realm_of(self.realm, self.over_tls, |url| transport.access.allows_plain(url));
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
    fn a_registrys_own_token_servers() {
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
            assert_eq!(is_own(&name, &realm.parse().unwrap()), own, "{repository} {realm}");
        }
    }

    #[test]
    fn a_token_server_is_reached_as_safely_as_the_registry() {
        let (all, none) = (|_: &Url| true, |_: &Url| false);
        assert!(realm_of("https://r.example/token", true, none).is_ok());
        assert!(realm_of("http://127.0.0.1:5000/token", false, all).is_ok());
        let unsafe_way = Err("does not use https");
        assert_eq!(realm_of("http://127.0.0.1:5000/token", true, all), unsafe_way, "downgrade from TLS");
        assert_eq!(realm_of("http://r.example/token", false, none), unsafe_way);
        assert_eq!(realm_of("ftp://r.example/token", false, all), unsafe_way);
        assert_eq!(realm_of("/token", false, all), Err("is not a URL"));
    }
}
