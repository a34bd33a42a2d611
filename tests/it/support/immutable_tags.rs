//! A scripted stand-in for registries with immutable tags: a proxy that refuses every write to an existing tag.

use axum::{
    Router,
    body::{Body, to_bytes},
    extract::Request,
    http::{Method, Response, StatusCode, header::TRANSFER_ENCODING},
};

/// Starts the proxy in front of a registry and returns its host. Tags with one of the beginnings are exempt.
pub async fn immutable_tags(upstream: &str, exempt: &'static [&'static str]) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let host = listener.local_addr().unwrap().to_string();
    let _ = rustls::crypto::ring::default_provider().install_default();
    let (client, upstream) = (reqwest::Client::new(), format!("http://{upstream}"));
    let answer = move |request: Request| forward(client.clone(), upstream.clone(), exempt, request);
    tokio::spawn(async move { axum::serve(listener, Router::new().fallback(answer)).await });
    host
}

async fn forward(
    client: reqwest::Client,
    upstream: String,
    exempt: &[&str],
    request: Request,
) -> Response<Body> {
    let (head, body) = request.into_parts();
    if let Some((repository, tag)) = head.uri.path().split_once("/manifests/")
        && head.method == Method::PUT
        && !tag.starts_with("sha256:")
        && !exempt.iter().any(|start| tag.starts_with(start))
    {
        let tags = client.get(format!("{upstream}{repository}/tags/list")).send().await.unwrap();
        if tags.text().await.unwrap().contains(&format!("\"{tag}\"")) {
            let refusal = r#"{"errors": [{"code": "PRECONDITION", "message": "the tag is immutable"}]}"#;
            let mut response = Response::new(Body::from(refusal));
            *response.status_mut() = StatusCode::PRECONDITION_FAILED;
            return response;
        }
    }
    pass_on(&client, &upstream, Request::from_parts(head, body)).await
}

/// Sends a request to the upstream registry, and returns its answer.
pub async fn pass_on(client: &reqwest::Client, upstream: &str, request: Request) -> Response<Body> {
    let (mut head, body) = request.into_parts();
    head.headers.remove(TRANSFER_ENCODING);
    let url = format!("{upstream}{}", head.uri);
    let body = to_bytes(body, usize::MAX).await.unwrap();
    let answer = client.request(head.method, url).headers(head.headers).body(body).send().await.unwrap();
    let (status, mut headers) = (answer.status(), answer.headers().clone());
    headers.remove(TRANSFER_ENCODING);
    let mut response = Response::new(Body::from(answer.bytes().await.unwrap()));
    (*response.status_mut(), *response.headers_mut()) = (status, headers);
    response
}
