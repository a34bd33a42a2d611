//! Tests of the cleanup after a daemon or a farrier died or hung during a build. The fake daemon speaks the protocol and runs
//! nothing.

use std::sync::{Arc, Mutex};

use axum::{
    Router,
    body::{Bytes, to_bytes},
    extract::{Request, State},
    http::{Method, StatusCode},
    response::{IntoResponse as _, Response},
};
use serde_json::{Value, json};

use super::*;
use crate::{BuildLog, ContextEntry};

/// Images and state of the fake daemon.
#[derive(Default)]
struct Daemon {
    /// ID, run and name of each image.
    images: Vec<(String, String, Option<String>)>,
    runs: Vec<String>,
    /// Whether the daemon dies during the next build.
    dies: bool,
    is_dead: bool,
    /// Whether the daemon stops before it reads the context of the next build.
    hangs: bool,
    /// Response to builds that succeed. Their payload is never sent.
    built: Option<&'static str>,
    /// Number of requests for a payload.
    transfers: usize,
}

type Shared = Arc<Mutex<Daemon>>;

impl Daemon {
    /// Extracts the label of a run from the Dockerfile at the start of a context.
    fn run_of(context: &[u8]) -> String {
        let text = String::from_utf8_lossy(context);
        let (_, value) = text.split_once(&format!("{RUN_LABEL}=\"")).unwrap();
        value.split_once('"').unwrap().0.to_owned()
    }

    fn build(&mut self, context: &[u8]) -> Response {
        let run = Self::run_of(context);
        let number = self.runs.len();
        for (step, name) in [(1, None), (2, None), (3, Some(format!("localhost/kept:{number}")))] {
            self.images.push((format!("image{number}{step}"), run.clone(), name));
        }
        self.runs.push(run);
        if let Some(built) = self.built {
            return built.into_response();
        }
        if self.dies {
            self.is_dead = true;
            return (StatusCode::INTERNAL_SERVER_ERROR, r#"{"message":"EOF"}"#).into_response();
        }
        r#"{"errorDetail":{"message":"no"},"error":"no"}"#.into_response()
    }

    fn list(&self, query: &str) -> String {
        let wanted = |image: &&(String, String, Option<String>)| {
            let filters = url::form_urlencoded::parse(query.as_bytes()).find(|(key, _)| key == "filters");
            let filters: Value = serde_json::from_str(&filters.unwrap().1).unwrap();
            filters["label"][0] == format!("{RUN_LABEL}={}", image.1)
        };
        let summary = |(id, _, name): &(String, String, Option<String>)| {
            json!({"Id": id, "ParentId": "", "RepoTags": name.as_slice(), "RepoDigests": [], "Created": 0, "Size": 0,
                   "SharedSize": -1, "Labels": {}, "Containers": -1})
        };
        self.images.iter().filter(wanted).map(summary).collect::<Value>().to_string()
    }
}

async fn answer(State(daemon): State<Shared>, request: Request) -> Response {
    let (head, body) = request.into_parts();
    let hangs = daemon.lock().unwrap().hangs;
    if hangs && head.uri.path().ends_with("/build") {
        std::future::pending::<()>().await;
    }
    if head.uri.path().ends_with("/archive") {
        daemon.lock().unwrap().transfers += 1;
        std::future::pending::<()>().await;
    }
    let body: Bytes = to_bytes(body, usize::MAX).await.unwrap();
    let (path, query) = (head.uri.path(), head.uri.query().unwrap_or_default());
    let mut daemon = daemon.lock().unwrap();
    if daemon.is_dead {
        return (StatusCode::BAD_GATEWAY, r#"{"message":"it is dead"}"#).into_response();
    }
    match path.rsplit('/').next().unwrap() {
        "version" => r#"{"ApiVersion":"1.44","Version":"0"}"#.into_response(),
        "build" => daemon.build(&body),
        "create" => (StatusCode::CREATED, r#"{"Id":"c","Warnings":[]}"#).into_response(),
        "json" if path.ends_with("/images/json") => daemon.list(query).into_response(),
        "json" => "[]".into_response(),
        id if head.method == Method::DELETE => {
            daemon.images.retain(|image| image.0 != id);
            "[]".into_response()
        }
        _ => panic!("{} {path}", head.method),
    }
}

/// Starts a fake daemon and returns its address.
async fn daemon() -> (Shared, String) {
    let daemon = Shared::default();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("tcp://{}", listener.local_addr().unwrap());
    let router = Router::new().fallback(answer).with_state(Arc::clone(&daemon));
    tokio::spawn(async move { axum::serve(listener, router).await });
    (daemon, address)
}

struct Silent;

impl BuildLog for Silent {
    fn line(&self, _: &str) {}
}

async fn build(engine: &DockerEngine) -> EngineError {
    build_of(engine, Vec::new(), CancellationToken::new()).await
}

async fn build_of(
    engine: &DockerEngine,
    context: Vec<ContextEntry>,
    cancel: CancellationToken,
) -> EngineError {
    let dest = tempfile::tempdir().unwrap();
    engine.build_payload(&request(context, cancel), dest.path()).await.unwrap_err()
}

fn request(context: Vec<ContextEntry>, cancel: CancellationToken) -> BuildRequest {
    BuildRequest {
        id: "job".to_owned(),
        dockerfile: "FROM base AS modules\nRUN make\n".to_owned(),
        context,
        log: Arc::new(Silent),
        cancel,
    }
}

/// IDs of the untagged images that are left.
fn left(daemon: &Shared) -> Vec<String> {
    let daemon = daemon.lock().unwrap();
    let nameless = daemon.images.iter().filter(|image| image.2.is_none());
    nameless.map(|image| image.0.clone()).collect()
}

#[tokio::test]
async fn what_is_left_in_an_engine_that_died_goes_when_it_is_back() {
    let (daemon, address) = daemon().await;
    let notes = tempfile::tempdir().unwrap();
    let engine = DockerEngine::connect(&address, Some(notes.path())).await.unwrap();
    daemon.lock().unwrap().dies = true;
    assert!(build(&engine).await.is_transient());
    assert_eq!(left(&daemon), ["image01", "image02"]);
    {
        let mut back = daemon.lock().unwrap();
        (back.dies, back.is_dead) = (false, false);
    }

    assert!(matches!(build(&engine).await, EngineError::Step(_)));
    assert_eq!(left(&daemon), [""; 0]);
    assert_eq!(daemon.lock().unwrap().images.len(), 2, "what has got a name is for others");
}

/// The context is larger than all buffers on the way to the daemon.
#[tokio::test]
async fn a_daemon_that_does_not_read_the_context_holds_no_canceled_build() {
    let (daemon, address) = daemon().await;
    let engine = DockerEngine::connect(&address, None).await.unwrap();
    daemon.lock().unwrap().hangs = true;
    let large = tempfile::NamedTempFile::new().unwrap();
    large.as_file().set_len(32 << 20).unwrap();
    let context = vec![ContextEntry { dest: "large".to_owned(), from: large.path().to_owned() }];
    let cancel = CancellationToken::new();
    cancel.cancel();
    let build = tokio::time::timeout(Duration::from_mins(1), build_of(&engine, context, cancel));
    let error = build.await.expect("a canceled build ends");
    assert!(matches!(error, EngineError::Canceled), "{error}");
}

#[tokio::test]
async fn a_daemon_that_does_not_send_the_payload_is_no_fault_of_the_steps() {
    let (daemon, address) = daemon().await;
    let engine = DockerEngine::connect(&address, None).await.unwrap();
    daemon.lock().unwrap().built = Some(r#"{"aux":{"ID":"sha256:00"}}"#);
    let cancel = CancellationToken::new();
    let deadline = async {
        while daemon.lock().unwrap().transfers == 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        cancel.cancel();
    };
    let (error, ()) = tokio::join!(build_of(&engine, Vec::new(), cancel.clone()), deadline);
    assert!(error.is_transient(), "{error}");
}

/// No deadline of a build includes its base. The clock is paused, so that the hour passes at once.
#[tokio::test]
async fn a_daemon_that_makes_no_base_does_not_hold_a_build_for_ever() {
    let (daemon, address) = daemon().await;
    let engine = DockerEngine::connect(&address, None).await.unwrap();
    daemon.lock().unwrap().hangs = true;
    tokio::time::pause();
    let base = request(Vec::new(), CancellationToken::new());
    let error = engine.build_image(&base, "localhost/farrier/base:1").await.unwrap_err();
    assert!(error.is_transient(), "{error}");
    assert_eq!(error_chain(&error), "docker failed to build: it is not done after 60 minutes");
}

/// The next process cleans up after a farrier that was killed during its build, but not after one that is alive.
#[tokio::test]
async fn what_a_dead_farrier_left_goes_with_the_next_ones_first_build() {
    let (daemon, address) = daemon().await;
    let notes = tempfile::tempdir().unwrap();
    let engine = async || DockerEngine::connect(&address, Some(notes.path())).await.unwrap();
    let (killed, alive) =
        (engine().await.begin("killed").await.unwrap(), engine().await.begin("alive").await.unwrap());
    for run in [&killed, &alive] {
        daemon.lock().unwrap().images.push((run.id.clone(), run.nonce.clone(), None));
    }
    drop(killed);
    build(&engine().await).await;
    assert_eq!(left(&daemon), ["alive"]);
    engine().await.clean(alive).await;
    assert_eq!(left(&daemon), [""; 0]);
}
