//! A scripted stand-in for registries that do not run in the tests: a proxy that adds the documented behavior of zot and Harbor to
//! docker-registry.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, OnceLock},
};

use axum::{
    Router,
    body::{Body, to_bytes},
    extract::Request,
    http::{HeaderMap, Method, Response, StatusCode, header::TRANSFER_ENCODING},
};
use farrier_core::{facts::media_type, image::Digest};
use serde_json::{Value, json};
use tokio::sync::Notify;

/// Behavior of a registry beyond docker-registry's.
#[derive(Clone, Copy)]
pub struct Script {
    /// Beginnings of the tags that may move.
    pub movable: &'static [&'static str],
    /// Whether the registry lists referrers (distribution-spec 1.1).
    pub lists_referrers: bool,
}

/// zot 2: referrers API; tags may move.
pub const ZOT: Script = Script { movable: &[""], lists_referrers: true };
/// Harbor 2.8 and later with an immutability rule for all tags, and the referrers API.
pub const HARBOR: Script = Script { movable: &[], lists_referrers: true };

/// The proxy in front of a registry.
pub struct ScriptedRegistry {
    pub host: String,
    state: Arc<State>,
}

struct State {
    client: reqwest::Client,
    upstream: String,
    script: Script,
    /// Pushed manifests by the repository's path and the digest.
    manifests: Mutex<BTreeMap<(String, String), Pushed>>,
    held_tag: OnceLock<&'static str>,
    reached: Notify,
    released: Notify,
}

#[derive(Clone)]
struct Pushed {
    size: usize,
    content: Value,
}

impl Pushed {
    fn subject(&self) -> Option<&str> {
        self.content["subject"]["digest"].as_str()
    }

    fn has_member(&self, digest: &str) -> bool {
        self.content["manifests"].as_array().is_some_and(|all| all.iter().any(|one| one["digest"] == digest))
    }
}

impl ScriptedRegistry {
    pub async fn start(upstream: &str, script: Script) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let host = listener.local_addr().unwrap().to_string();
        let _ = rustls::crypto::ring::default_provider().install_default();
        let (client, upstream) = (reqwest::Client::new(), format!("http://{upstream}"));
        let state = Arc::new(State {
            client,
            upstream,
            script,
            manifests: Mutex::default(),
            held_tag: OnceLock::new(),
            reached: Notify::new(),
            released: Notify::new(),
        });
        let of_server = Arc::clone(&state);
        let answer = move |request: Request| {
            let state = Arc::clone(&of_server);
            async move { state.answer(request).await }
        };
        tokio::spawn(async move { axum::serve(listener, Router::new().fallback(answer)).await });
        Self { host, state }
    }

    /// Holds the push of a tag until [`Self::release`].
    pub fn hold(&self, tag: &'static str) {
        self.state.held_tag.set(tag).unwrap();
    }

    /// Waits for the push that is held.
    pub async fn reached(&self) {
        self.state.reached.notified().await;
    }

    pub fn release(&self) {
        self.state.released.notify_one();
    }

    /// Deletes the manifests without a tag that neither an index nor a subject protects, and returns their digests. zot does so
    /// with `gc`, Harbor with "allow garbage collection on untagged artifacts".
    pub async fn collect_garbage(&self) -> Vec<String> {
        let State { client, upstream, manifests, .. } = &*self.state;
        let all = manifests.lock().unwrap().clone();
        let repositories: BTreeSet<&String> = all.keys().map(|(repository, _)| repository).collect();
        let mut deleted = Vec::new();
        for repository in repositories {
            let mut live: BTreeSet<String> = BTreeSet::new();
            for tag in self.state.tags(repository).await {
                let url = format!("{upstream}{repository}/manifests/{tag}");
                let kinds = [media_type::OCI_MANIFEST, media_type::OCI_INDEX].join(",");
                let head = client.head(url).header("Accept", kinds).send().await.unwrap();
                live.insert(head.headers()["docker-content-digest"].to_str().unwrap().to_owned());
            }
            let here =
                || all.iter().filter(move |((name, _), _)| name == repository).map(|((_, at), it)| (at, it));
            loop {
                let is_protected = |digest: &str, pushed: &Pushed| {
                    pushed.subject().is_some_and(|subject| live.contains(subject))
                        || here().any(|(index, other)| live.contains(index) && other.has_member(digest))
                };
                let unmarked = here().filter(|(digest, _)| !live.contains(*digest));
                let found = unmarked.filter(|(digest, pushed)| is_protected(digest, pushed));
                let found: Vec<String> = found.map(|(digest, _)| digest.clone()).collect();
                if found.is_empty() {
                    break;
                }
                live.extend(found);
            }
            for (digest, _) in here().filter(|(digest, _)| !live.contains(*digest)) {
                let url = format!("{upstream}{repository}/manifests/{digest}");
                let answer = client.delete(url).send().await.unwrap();
                assert_eq!(answer.status(), 202, "start docker-registry with deletion");
                manifests.lock().unwrap().remove(&(repository.clone(), digest.clone()));
                deleted.push(digest.clone());
            }
        }
        deleted
    }
}

impl State {
    async fn answer(&self, request: Request) -> Response<Body> {
        let (mut head, body) = request.into_parts();
        let path = head.uri.path().to_owned();
        let body = to_bytes(body, usize::MAX).await.unwrap();
        let manifest = path.split_once("/manifests/").filter(|_| head.method == Method::PUT);
        if let Some((_, tag)) = manifest
            && self.held_tag.get() == Some(&tag)
        {
            self.reached.notify_one();
            self.released.notified().await;
        }
        if let Some((repository, tag)) = manifest
            && !tag.starts_with("sha256:")
            && !self.script.movable.iter().any(|start| tag.starts_with(start))
            && self.tags(repository).await.iter().any(|known| known == tag)
        {
            let refusal = json!({"errors": [{"code": "PRECONDITION", "message": "the tag is immutable"}]});
            return answer_with(StatusCode::PRECONDITION_FAILED, HeaderMap::new(), refusal.to_string());
        }
        if let Some((repository, subject)) = path.split_once("/referrers/")
            && self.script.lists_referrers
        {
            let mut headers = HeaderMap::new();
            headers.insert("content-type", media_type::OCI_INDEX.parse().unwrap());
            return answer_with(StatusCode::OK, headers, self.referrers(repository, subject).to_string());
        }
        head.headers.remove(TRANSFER_ENCODING);
        let url = format!("{}{}", self.upstream, head.uri);
        let request = self.client.request(head.method, url).headers(head.headers).body(body.clone());
        let answer = request.send().await.unwrap();
        let (status, mut headers) = (answer.status(), answer.headers().clone());
        headers.remove(TRANSFER_ENCODING);
        if let Some((repository, _)) = manifest
            && status == StatusCode::CREATED
        {
            let pushed = Pushed { size: body.len(), content: serde_json::from_slice(&body).unwrap() };
            if let Some(subject) = pushed.subject().filter(|_| self.script.lists_referrers) {
                headers.insert("oci-subject", subject.parse().unwrap());
            }
            let key = (repository.to_owned(), Digest::of(&body).to_string());
            self.manifests.lock().unwrap().insert(key, pushed);
        }
        answer_with(status, headers, answer.bytes().await.unwrap())
    }

    async fn tags(&self, repository: &str) -> Vec<String> {
        let list = self.client.get(format!("{}{repository}/tags/list", self.upstream)).send().await.unwrap();
        let list: Value = serde_json::from_str(&list.text().await.unwrap()).unwrap_or_default();
        let tags = list["tags"].as_array().into_iter().flatten();
        tags.map(|tag| tag.as_str().unwrap().to_owned()).collect()
    }

    fn referrers(&self, repository: &str, subject: &str) -> Value {
        let manifests = self.manifests.lock().unwrap();
        let is_listed = |name: &str, pushed: &Pushed| name == repository && pushed.subject() == Some(subject);
        let of_subject = manifests.iter().filter(|((name, _), pushed)| is_listed(name, pushed));
        let descriptor = |((_, digest), Pushed { size, content }): (&(String, String), &Pushed)| {
            let own = &content["artifactType"];
            let kind = if own.is_null() { &content["config"]["mediaType"] } else { own };
            json!({
                "mediaType": media_type::OCI_MANIFEST,
                "digest": digest,
                "size": size,
                "artifactType": kind,
                "annotations": content["annotations"],
            })
        };
        let listed: Value = of_subject.map(descriptor).collect();
        json!({"schemaVersion": 2, "mediaType": media_type::OCI_INDEX, "manifests": listed})
    }
}

fn answer_with(status: StatusCode, headers: HeaderMap, body: impl Into<Body>) -> Response<Body> {
    let mut response = Response::new(body.into());
    (*response.status_mut(), *response.headers_mut()) = (status, headers);
    response
}
