//! HTTP clients, one for each TLS configuration, and redirects. Each redirect is sent with the client for its own host.

use std::{sync::Arc, time::Duration};

use ::oci::client::{ConnectionProblem, connection_problem};
use farrier_core::site::{Host, HostPort, Login, Proxy};
use reqwest::{
    Client, Method, Request, Response,
    header::{
        AUTHORIZATION, CONTENT_LENGTH, CONTENT_TYPE, COOKIE, LOCATION, PROXY_AUTHORIZATION, TRANSFER_ENCODING,
    },
    redirect,
};
use rustls::SupportedProtocolVersion;
use url::Url;
use zeroize::Zeroizing;

use super::{AccessPurpose, Net, NetError};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const MAX_REDIRECTS: usize = 5;
static TLS12_ONLY: [&SupportedProtocolVersion; 1] = [&rustls::version::TLS12];

impl Net {
    /// Sends a request and follows redirects, without a time limit. Every host in the chain of redirects must be permitted.
    /// Credentials and the request body never go to another host. If the body cannot be sent again, the redirect itself is
    /// returned as the response.
    pub async fn execute(
        &self,
        mut request: Request,
        purpose: &AccessPurpose<'_>,
    ) -> Result<Response, NetError> {
        let mut redirected_by = purpose.redirected_by.map(str::to_owned);
        for _ in 0..=MAX_REDIRECTS {
            let url = request.url().clone();
            let purpose = AccessPurpose { action: purpose.action, redirected_by: redirected_by.as_deref() };
            let client = self.client(&url, &purpose).await?;
            // Addresses that another host named (redirects, token servers) get none of the site's passwords.
            if redirected_by.is_none() {
                self.add_login(&mut request).await?;
            }
            move_credentials_to_header(client, &mut request)?;
            let copy = request.try_clone();
            let host = HostPort::of_url(&url).map(|host| host.to_string());
            let response = match client.execute(request).await {
                Ok(response) => response,
                Err(error) => {
                    let source =
                        self.client_certificate_error(&url, &error).await.unwrap_or(error).without_url();
                    return Err(NetError::Http(host.unwrap_or_default(), source));
                }
            };
            let (Some(target), Some(copy)) = (redirect_target(&response)?, copy) else { return Ok(response) };
            if url.scheme() == "https" && target.scheme() != "https" {
                return Err(redirect_error("redirect from https to plain http"));
            }
            request = redirect_request(copy, response.status().as_u16(), target)?;
            redirected_by = host;
        }
        Err(redirect_error("too many redirects"))
    }

    /// Creates a request for [`Net::execute`].
    pub fn request(method: Method, url: Url) -> Request {
        Request::new(method, url)
    }

    async fn client(&self, url: &Url, purpose: &AccessPurpose<'_>) -> Result<&Client, NetError> {
        let host = HostPort::of_url(url).ok_or_else(|| redirect_error("an address without a host"))?;
        self.check_allowed(&host, purpose)?;
        self.check_proxy_allowed(url, purpose)?;
        let inner = &self.0;
        let tls_entry = self.tls_entry(&host);
        let build = || self.build_client(tls_entry, rustls::DEFAULT_VERSIONS);
        let client_cell =
            tls_entry.and_then(|(index, _)| inner.clients.hosts.get(index)).unwrap_or(&inner.clients.general);
        client_cell.get_or_try_init(build).await
    }

    /// Checks that the environment's proxy may be used, if it applies to this address.
    pub(super) fn check_proxy_allowed(&self, url: &Url, purpose: &AccessPurpose<'_>) -> Result<(), NetError> {
        let Some(proxy) = self.environment_proxy(url) else { return Ok(()) };
        let what = format!("{purpose}, through the environment's proxy,");
        proxy.host().map_or(Ok(()), |host| self.check_allowed(&host, &AccessPurpose::of(&what)))
    }

    /// The site's entry for a host and its index, if the entry configures certificates.
    fn tls_entry(&self, host: &HostPort) -> Option<(usize, &Host)> {
        self.host_entry(host)
            .filter(|(_, entry)| entry.ca_file.is_some() || entry.client_certificate.is_some())
    }

    async fn build_client(
        &self,
        tls_entry: Option<(usize, &Host)>,
        versions: &'static [&'static SupportedProtocolVersion],
    ) -> Result<Client, NetError> {
        let entry = tls_entry.map(|(_, entry)| entry);
        let key = match entry.and_then(|entry| Some((&entry.host, entry.client_key.as_ref()?))) {
            Some((host, key)) => {
                let secret = self.0.secrets.read(key).await;
                let what = format!("present the client certificate for {host}");
                Some(secret.map_err(|source| NetError::Secret(what, source))?)
            }
            None => None,
        };
        let proxy = self.proxies().await?;
        let host = tls_entry.map(|(index, _)| index);
        // `config` reads the system's certificates, which blocks.
        let shared = Arc::clone(&self.0);
        let config = tokio::task::spawn_blocking(move || shared.trusted.config(host, key.as_ref(), versions));
        let config = config.await.map_err(|panic| panic.to_string()).flatten();
        let client = config.and_then(|config| {
            Client::builder()
                .tls_backend_preconfigured(config)
                .user_agent(concat!("farrier/", env!("CARGO_PKG_VERSION")))
                .connect_timeout(CONNECT_TIMEOUT)
                .referer(false)
                .redirect(redirect::Policy::none())
                .no_proxy()
                .proxy(reqwest::Proxy::custom(move |url| {
                    proxy.for_url(url).map(|proxy| proxy.as_url().clone())
                }))
                .build()
                .map_err(|error| error.to_string())
        });
        client.map_err(|reason| {
            NetError::Options(
                entry.map_or_else(|| "TLS".to_owned(), |entry| format!("site.yaml, host {}", entry.host)),
                reason,
            )
        })
    }

    /// The configured proxies, with their user name and password from the site.
    pub(super) async fn proxies(&self) -> Result<Proxy, NetError> {
        let mut proxy = self.0.proxy.clone();
        if let Some(login) = proxy.login.take() {
            let password = self.password(&login, "the proxy").await?;
            for address in [&mut proxy.http, &mut proxy.https].into_iter().flatten() {
                address.log_in(&login.user, &password);
            }
        }
        Ok(proxy)
    }

    /// Adds the site's user name and password for the request's host to its URL.
    async fn add_login(&self, request: &mut Request) -> Result<(), NetError> {
        let url = request.url();
        let entry = HostPort::of_url(url).and_then(|host| Some((self.host_entry(&host)?.1, host)));
        let Some((Host { login: Some(login), .. }, host)) = entry else { return Ok(()) };
        if request.headers().contains_key(AUTHORIZATION) {
            return Ok(());
        }
        self.check_login_allowed(url, &host)?;
        let password = self.password(login, &host.to_string()).await?;
        let url = request.url_mut();
        // These calls cannot fail for a URL with a host.
        let _ = url.set_username(&login.user);
        let _ = url.set_password(Some(&password));
        Ok(())
    }

    /// Checks that the site's password for a host may be sent to this URL.
    pub(super) fn check_login_allowed(&self, url: &Url, host: &HostPort) -> Result<(), NetError> {
        if url.scheme() == "https" || self.allows_plain(host) {
            return Ok(());
        }
        Err(NetError::Options(
            format!("site.yaml, host {host}: login"),
            "plain http would expose the password: use https, or allow plainHttp".to_owned(),
        ))
    }

    pub(super) async fn password(&self, login: &Login, to: &str) -> Result<Zeroizing<String>, NetError> {
        let what = format!("log in to {to} as {}", login.user);
        let secret = Box::pin(self.0.secrets.read(&login.password)).await;
        let text = secret.and_then(|secret| Ok(Zeroizing::new(secret.text("the password")?.to_owned())));
        text.map_err(|source| NetError::Secret(what, source))
    }

    /// Finds out whether the server closed the connection because it rejects the client certificate or requires one, and returns
    /// an error that states the reason.
    ///
    /// With TLS 1.3 the server reports the reason after the handshake, and the HTTP client sees only a closed connection.
    /// With TLS 1.2 the handshake itself fails with the reason, so this function sends a second request with TLS 1.2.
    async fn client_certificate_error(&self, url: &Url, error: &reqwest::Error) -> Option<reqwest::Error> {
        if url.scheme() != "https"
            || error.is_connect()
            || error.is_timeout()
            || connection_problem(error) != ConnectionProblem::Broken
        {
            return None;
        }
        let client = self.build_client(self.tls_entry(&HostPort::of_url(url)?), &TLS12_ONLY).await.ok()?;
        let retry_error = client.head(url.join("/").ok()?).timeout(CONNECT_TIMEOUT).send().await.err()?;
        (connection_problem(&retry_error) == ConnectionProblem::ClientCertificate).then_some(retry_error)
    }
}

/// Moves the user name and password from the URL into the `Authorization` header, as `client` does for requests that it builds.
fn move_credentials_to_header(client: &Client, request: &mut Request) -> Result<(), NetError> {
    let url = request.url();
    if url.username().is_empty() && url.password().is_none() {
        return Ok(());
    }
    let built =
        client.get(url.clone()).build().map_err(|error| redirect_error(&error.without_url().to_string()))?;
    *request.url_mut() = built.url().clone();
    if let Some(value) = built.headers().get(AUTHORIZATION) {
        request.headers_mut().entry(AUTHORIZATION).or_insert(value.clone());
    }
    Ok(())
}

fn redirect_error(reason: &str) -> NetError {
    NetError::Redirect(reason.to_owned())
}

/// Target of a redirect. `None` for other responses.
fn redirect_target(response: &Response) -> Result<Option<Url>, NetError> {
    if !matches!(response.status().as_u16(), 301 | 302 | 303 | 307 | 308) {
        return Ok(None);
    }
    let Some(text) = response.headers().get(LOCATION).and_then(|value| value.to_str().ok()) else {
        return Ok(None);
    };
    let target = response.url().join(text).map_err(|_| redirect_error("its target is not a URL"))?;
    if matches!(target.scheme(), "http" | "https") {
        Ok(Some(target))
    } else {
        Err(redirect_error("its target is not http"))
    }
}

/// Turns a request into the one for a redirect's target (Fetch standard, HTTP-redirect fetch).
fn redirect_request(mut request: Request, status: u16, target: Url) -> Result<Request, NetError> {
    let becomes_get = match status {
        303 => !matches!(*request.method(), Method::GET | Method::HEAD),
        301 | 302 => *request.method() == Method::POST,
        _ => false,
    };
    if becomes_get {
        *request.method_mut() = Method::GET;
        *request.body_mut() = None;
        for name in [CONTENT_LENGTH, CONTENT_TYPE, TRANSFER_ENCODING] {
            request.headers_mut().remove(name);
        }
    }
    if request.url().origin() != target.origin() {
        // The body may be secret: a token server could redirect a refresh token to any host.
        if request.body().is_some() {
            return Err(redirect_error(
                "its target is another host, which must not receive the request body",
            ));
        }
        for name in [AUTHORIZATION, COOKIE, PROXY_AUTHORIZATION] {
            request.headers_mut().remove(name);
        }
    }
    *request.url_mut() = target;
    Ok(request)
}
