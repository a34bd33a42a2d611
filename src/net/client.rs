//! Adapter: HTTP clients, one for each way to reach a host, and redirects: each hop goes to the client of its own host.

use std::{sync::Arc, time::Duration};

use ::oci::client::{ConnectionProblem, connection_problem};
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

use super::{Asker, Net, NetError};
use crate::site::{Host, HostPort, Login, Proxy};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const MAX_REDIRECTS: usize = 5;
static TLS12_ONLY: [&SupportedProtocolVersion; 1] = [&rustls::version::TLS12];

impl Net {
    /// Sends a request, and follows where the answer leads. It goes to no host that may not be asked; credentials, and what
    /// is sent, stay with the host that they were for. A request whose body cannot be sent again is not sent on: then the
    /// answer is the redirect. Sets no time limit.
    pub async fn execute(&self, mut request: Request, asker: &Asker<'_>) -> Result<Response, NetError> {
        let mut sender = asker.sent_by.map(str::to_owned);
        for _ in 0..=MAX_REDIRECTS {
            let url = request.url().clone();
            let client = self.client(&url, &Asker { what: asker.what, sent_by: sender.as_deref() }).await?;
            // What another host names gets no password.
            if sender.is_none() {
                self.log_in(&mut request).await?;
            }
            bare(client, &mut request)?;
            let again = request.try_clone();
            let host = HostPort::of_url(&url).map(|host| host.to_string());
            let response = match client.execute(request).await {
                Ok(response) => response,
                Err(error) => {
                    let source = self.refusal(&url, &error).await.unwrap_or(error).without_url();
                    return Err(NetError::Http(host.unwrap_or_default(), source));
                }
            };
            let (Some(to), Some(again)) = (target(&response)?, again) else { return Ok(response) };
            if url.scheme() == "https" && to.scheme() != "https" {
                return Err(refused("redirect from https to plain http"));
            }
            request = sent_on(again, response.status().as_u16(), to)?;
            sender = host;
        }
        Err(refused("too many redirects"))
    }

    /// A request to be sent with [`Net::execute`].
    pub fn request(method: Method, url: Url) -> Request {
        Request::new(method, url)
    }

    async fn client(&self, url: &Url, asker: &Asker<'_>) -> Result<&Client, NetError> {
        let host = HostPort::of_url(url).ok_or_else(|| refused("an address without a host"))?;
        self.permit(&host, asker)?;
        self.permit_proxy(url, asker)?;
        let inner = &self.0;
        let special = self.special(&host);
        let make = || self.make(special, rustls::DEFAULT_VERSIONS);
        let cell = special.and_then(|(at, _)| inner.clients.hosts.get(at)).unwrap_or(&inner.clients.general);
        cell.get_or_try_init(make).await
    }

    /// May the environment's proxy be asked, if it is the way to this address?
    pub(super) fn permit_proxy(&self, url: &Url, asker: &Asker<'_>) -> Result<(), NetError> {
        let Some(proxy) = self.proxy(url).filter(|(_, environment)| *environment) else { return Ok(()) };
        let what = format!("{asker}, through the environment's proxy,");
        proxy.0.host().map_or(Ok(()), |host| self.permit(&host, &Asker::of(&what)))
    }

    /// The site's word on a host's certificates, if there is one.
    fn special(&self, host: &HostPort) -> Option<(usize, &Host)> {
        self.host_entry(host)
            .filter(|(_, entry)| entry.ca_file.is_some() || entry.client_certificate.is_some())
    }

    async fn make(
        &self,
        special: Option<(usize, &Host)>,
        versions: &'static [&'static SupportedProtocolVersion],
    ) -> Result<Client, NetError> {
        let entry = special.map(|(_, entry)| entry);
        let key = match entry.and_then(|entry| Some((&entry.host, entry.client_key.as_ref()?))) {
            Some((host, key)) => {
                let read = self.0.secrets.read(key).await;
                let what = format!("show the client certificate for {host}");
                Some(read.map_err(|source| NetError::Secret(what, source))?)
            }
            None => None,
        };
        let proxy = self.proxies().await?;
        let host = special.map(|(at, _)| at);
        // Reads the system's certificates.
        let shared = Arc::clone(&self.0);
        let config = tokio::task::spawn_blocking(move || shared.trusted.config(host, key.as_ref(), versions));
        let config = config.await.map_err(|panic| panic.to_string()).flatten();
        let made = config.and_then(|config| {
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
        made.map_err(|reason| {
            NetError::Options(
                entry.map_or_else(|| "TLS".to_owned(), |entry| format!("site.yaml, host {}", entry.host)),
                reason,
            )
        })
    }

    /// The proxies, with the name and the password that the site has for them.
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

    /// Puts the name and the password that the site has for the host into the address.
    async fn log_in(&self, request: &mut Request) -> Result<(), NetError> {
        let url = request.url();
        let entry = HostPort::of_url(url).and_then(|host| Some((self.host_entry(&host)?.1, host)));
        let Some((Host { login: Some(login), .. }, host)) = entry else { return Ok(()) };
        if request.headers().contains_key(AUTHORIZATION) {
            return Ok(());
        }
        self.may_log_in(url, &host)?;
        let password = self.password(login, &host.to_string()).await?;
        let url = request.url_mut();
        // They cannot fail for an address that has a host.
        let _ = url.set_username(&login.user);
        let _ = url.set_password(Some(&password));
        Ok(())
    }

    /// May a password go to this address?
    pub(super) fn may_log_in(&self, url: &Url, host: &HostPort) -> Result<(), NetError> {
        if url.scheme() == "https" || self.allows_plain(host) {
            return Ok(());
        }
        Err(NetError::Options(
            format!("site.yaml, host {host}: login"),
            "the password would go over plain http; ask for it by https, or allow plainHttp".to_owned(),
        ))
    }

    pub(super) async fn password(&self, login: &Login, to: &str) -> Result<Zeroizing<String>, NetError> {
        let what = format!("log in to {to} as {}", login.user);
        let secret = Box::pin(self.0.secrets.read(&login.password)).await;
        let text = secret.and_then(|secret| Ok(Zeroizing::new(secret.text("the password")?.to_owned())));
        text.map_err(|source| NetError::Secret(what, source))
    }

    /// Does the server refuse our certificate, or the lack of one? With TLS 1.3 it says so after the handshake only, and
    /// then the HTTP client tells no more than that the connection closed; with TLS 1.2 it says so in the handshake.
    async fn refusal(&self, url: &Url, error: &reqwest::Error) -> Option<reqwest::Error> {
        if url.scheme() != "https"
            || error.is_connect()
            || error.is_timeout()
            || connection_problem(error) != ConnectionProblem::Broken
        {
            return None;
        }
        let client = self.make(self.special(&HostPort::of_url(url)?), &TLS12_ONLY).await.ok()?;
        let again = client.head(url.join("/").ok()?).timeout(CONNECT_TIMEOUT).send().await.err()?;
        (connection_problem(&again) == ConnectionProblem::ClientCertificate).then_some(again)
    }
}

/// Takes a user's name and password out of the address, into a header.
fn bare(client: &Client, request: &mut Request) -> Result<(), NetError> {
    let url = request.url();
    if url.username().is_empty() && url.password().is_none() {
        return Ok(());
    }
    let built = client.get(url.clone()).build().map_err(|error| refused(&error.without_url().to_string()))?;
    *request.url_mut() = built.url().clone();
    if let Some(value) = built.headers().get(AUTHORIZATION) {
        request.headers_mut().entry(AUTHORIZATION).or_insert(value.clone());
    }
    Ok(())
}

fn refused(reason: &str) -> NetError {
    NetError::Redirect(reason.to_owned())
}

/// Where an answer leads.
fn target(response: &Response) -> Result<Option<Url>, NetError> {
    if !matches!(response.status().as_u16(), 301 | 302 | 303 | 307 | 308) {
        return Ok(None);
    }
    let Some(text) = response.headers().get(LOCATION).and_then(|value| value.to_str().ok()) else {
        return Ok(None);
    };
    let to = response.url().join(text).map_err(|_| refused("its target is no address"))?;
    if matches!(to.scheme(), "http" | "https") {
        Ok(Some(to))
    } else {
        Err(refused("its target is not http"))
    }
}

/// The request as it goes on (Fetch standard, HTTP-redirect fetch).
fn sent_on(mut request: Request, status: u16, to: Url) -> Result<Request, NetError> {
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
    if request.url().origin() != to.origin() {
        // A refresh token, for one, which a token server could have sent to anyone.
        if request.body().is_some() {
            return Err(refused("it leads to another host, which must not get what is sent"));
        }
        for name in [AUTHORIZATION, COOKIE, PROXY_AUTHORIZATION] {
            request.headers_mut().remove(name);
        }
    }
    *request.url_mut() = to;
    Ok(request)
}
