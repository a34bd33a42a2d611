//! Scripted stand-ins for registries that cannot be run here: a proxy in front of docker-registry answers some requests as
//! such a registry is reported to.

use std::sync::Arc;

use axum::{
    Router,
    body::{Body, to_bytes},
    extract::Request,
    http::{
        Method, Response, StatusCode,
        header::{AUTHORIZATION, TRANSFER_ENCODING},
    },
};

/// Deviation of a registry from the distribution specification.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Quirk {
    /// The referrers API answers with this status.
    ReferrersStatus(u16),
    /// The tag `sha256-<hex>` resolves to the manifest `sha256:<hex>`.
    FallbackTagIsSubject,
    /// A token for `pull` is refused where the repository does not exist.
    PullNeedsRepository,
    /// A push does not create a repository.
    PushNeedsRepository,
    /// Requests with larger bodies are answered with 413 and nginx's page.
    BodyLimit(usize),
}

struct Proxy {
    host: String,
    upstream: String,
    client: reqwest::Client,
    quirks: Vec<Quirk>,
}

/// Starts the proxy in front of a registry and returns its host.
pub async fn registry_with(upstream: &str, quirks: &[Quirk]) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let host = listener.local_addr().unwrap().to_string();
    let _ = rustls::crypto::ring::default_provider().install_default();
    let proxy = Arc::new(Proxy {
        host: host.clone(),
        upstream: format!("http://{upstream}"),
        client: reqwest::Client::new(),
        quirks: quirks.to_vec(),
    });
    let answer = move |request: Request| {
        let proxy = Arc::clone(&proxy);
        async move { proxy.answer(request).await }
    };
    tokio::spawn(async move { axum::serve(listener, Router::new().fallback(answer)).await });
    host
}

fn answer(status: u16, body: impl Into<Body>) -> Response<Body> {
    let mut response = Response::new(body.into());
    *response.status_mut() = StatusCode::from_u16(status).unwrap();
    response
}

impl Proxy {
    async fn answer(&self, mut request: Request) -> Response<Body> {
        for quirk in &self.quirks {
            if let Some(response) = self.apply(*quirk, &mut request).await {
                return response;
            }
        }
        request.headers_mut().remove(AUTHORIZATION);
        self.pass_on(request).await
    }

    /// Sends a request to the upstream registry, and returns its answer.
    async fn pass_on(&self, request: Request) -> Response<Body> {
        let (mut head, body) = request.into_parts();
        head.headers.remove(TRANSFER_ENCODING);
        let url = format!("{}{}", self.upstream, head.uri);
        let body = to_bytes(body, usize::MAX).await.unwrap();
        let request = self.client.request(head.method, url).headers(head.headers).body(body);
        let answer = request.send().await.unwrap();
        let (status, mut headers) = (answer.status(), answer.headers().clone());
        headers.remove(TRANSFER_ENCODING);
        let mut response = Response::new(Body::from(answer.bytes().await.unwrap()));
        (*response.status_mut(), *response.headers_mut()) = (status, headers);
        response
    }

    /// Answers the request, or changes what the registry is asked.
    async fn apply(&self, quirk: Quirk, request: &mut Request) -> Option<Response<Body>> {
        let path = request.uri().path().to_owned();
        match quirk {
            Quirk::ReferrersStatus(status) => path.contains("/referrers/").then(|| answer(status, "")),
            Quirk::FallbackTagIsSubject => {
                let (repository, tag) = path.split_once("/manifests/sha256-")?;
                if tag.len() == 64 {
                    *request.uri_mut() = format!("{repository}/manifests/sha256:{tag}").parse().unwrap();
                }
                None
            }
            Quirk::PullNeedsRepository => {
                let query = request.uri().query().unwrap_or_default().to_owned();
                let token = request.headers().get(AUTHORIZATION);
                let token = token.map(|value| value.to_str().unwrap().to_owned());
                self.token(&path, &query, token.as_deref()).await
            }
            Quirk::PushNeedsRepository => {
                let (repository, _) = path.split_once("/blobs/uploads")?;
                let unknown =
                    r#"{"errors": [{"code": "NAME_UNKNOWN", "message": "The repository does not exist"}]}"#;
                (!self.exists(repository).await).then(|| answer(404, unknown))
            }
            Quirk::BodyLimit(limit) => {
                let length = request.headers().get("content-length")?.to_str().unwrap().parse::<usize>();
                let page =
                    "<html>\r\n<head><title>413 Request Entity Too Large</title></head>\r\n<body></body>";
                (request.method() != Method::GET && length.unwrap() > limit).then(|| answer(413, page))
            }
        }
    }

    /// Issues tokens that name their scope, and refuses those that do not suffice.
    async fn token(&self, path: &str, query: &str, token: Option<&str>) -> Option<Response<Body>> {
        if path == "/token" {
            let token = if query.contains("push") { "push" } else { "pull" };
            return Some(answer(200, format!(r#"{{"token": "{token}", "expires_in": 300}}"#)));
        }
        let (repository, _) = ["/manifests/", "/blobs/", "/tags/", "/referrers/"]
            .iter()
            .find_map(|part| path.split_once(part))?;
        let suffices = match token {
            Some("Bearer push") => true,
            Some("Bearer pull") => self.exists(repository).await,
            _ => false,
        };
        if suffices {
            return None;
        }
        let mut refusal = answer(401, r#"{"errors": [{"code": "UNAUTHORIZED"}]}"#);
        let challenge = format!(r#"Bearer realm="http://{}/token""#, self.host);
        refusal.headers_mut().insert("www-authenticate", challenge.parse().unwrap());
        Some(refusal)
    }

    async fn exists(&self, repository: &str) -> bool {
        let tags = self.client.get(format!("{}{repository}/tags/list", self.upstream)).send().await;
        tags.unwrap().status().is_success()
    }
}
