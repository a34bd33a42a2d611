//! Serves the status pages on farrier's HTTP port, from the result of the newest reconcile. The pages are read-only except for
//! [`Actions`]. Reconciles never wait for the server.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    io,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use axum::{
    Router,
    body::{Body, Bytes, to_bytes},
    extract::State,
    http::{HeaderMap, HeaderValue, StatusCode, Uri, header},
    response::{
        IntoResponse, Response,
        sse::{Event, KeepAlive, Sse},
    },
    routing::get,
};
use farrier_builder::{LogReader, services::BuildServices};
use farrier_controller::live::{ReconcileView, SharedActivity, StatusSink};
use farrier_core::{
    image::Definitions,
    plan::{Activity, StatusEntry},
};
use futures::StreamExt as _;
use jiff::Timestamp;
use oci::error_chain;
use parking_lot::Mutex;
use tokio::{
    io::AsyncReadExt as _,
    sync::{OwnedSemaphorePermit, Semaphore, watch},
};
use tokio_util::io::ReaderStream;

use super::{
    action::ACTION_PATH,
    actions::Actions,
    facts::Facts,
    fleet::{Fleet, cell_at, cell_link, log_link, node_link},
    history::History,
    html::{self, HtmlError, ICON, SCRIPT, STYLE},
    image::{CellData, Images},
    log::{Excerpts, LoggedBuilds},
    matrix::Filter,
    request::take_fields,
};

const HTML: &str = "text/html; charset=utf-8";
/// Content security policy of all pages. It allows our style sheet, images and script from this host, and connections and
/// forms to this host. Inline scripts, frames and other hosts are forbidden.
const CSP: &str = "default-src 'none'; style-src 'self'; img-src 'self'; script-src 'self'; connect-src 'self'; form-action 'self'; \
                      base-uri 'none'; frame-ancestors 'none'";
/// Maximum number of viewers that receive updates. Other viewers must reload the page.
const MAX_VIEWERS: usize = 200;
/// Maximum length of an unknown path, in bytes, for which a page is rendered. The page leads back from each directory of the path.
const MAX_UNKNOWN_PATH: usize = 256;
/// Maximum size of a form in bytes.
const MAX_FORM_BYTES: usize = 4096;
/// Timeout for receiving a form.
const FORM_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum age of the cached index page while a build runs.
const INDEX_MAX_AGE_BUILDING: Duration = Duration::from_secs(5);
/// Maximum age of the cached index page while no build runs, when only the displayed ages change.
const INDEX_MAX_AGE_IDLE: Duration = Duration::from_mins(1);
/// Interval at which a growing log is polled.
const LOG_POLL_INTERVAL: Duration = Duration::from_millis(500);
/// Text at the end of a growing log for viewers above the limit [`MAX_VIEWERS`].
const LOG_CUT_OFF: &[u8] =
    b"\n[farrier: the build continues. Too many viewers follow it already: reload for the rest.]\n";
/// Timeout for reading an image from the registry.
const REGISTRY_TIMEOUT: Duration = Duration::from_secs(10);

/// Serves the status page from the result of the newest reconcile.
pub struct PageServer {
    services: BuildServices,
    /// Description of the cluster.
    cluster: String,
    actions: Option<Arc<Actions>>,
    state: watch::Sender<Option<Arc<PageState>>>,
    images: Images,
    excerpts: Excerpts,
    /// Limits rendering to one page at a time, so that viewers take at most one CPU, and the memory of one page, from builds.
    rendering: Arc<Semaphore>,
    viewers: Arc<Semaphore>,
}

/// State that pages show until the next reconcile.
struct PageState {
    facts: Facts,
    /// Current progress of builds, which also changes between reconciles.
    live: SharedActivity,
    definitions: Arc<Definitions>,
    history: History,
    /// Cached index page with the time of its rendering. It is the most requested page.
    index: Mutex<Option<(Instant, String)>>,
}

/// Content to send for a path.
enum Content {
    /// MIME type and text.
    Page(&'static str, String),
    /// File of a build log.
    Log(PathBuf),
    /// Page for an address without content.
    NotFound(String),
}

#[async_trait::async_trait]
impl StatusSink for PageServer {
    async fn reconciled(&self, view: &ReconcileView) {
        let ReconcileView { plan, snapshot, definitions, activity, live, rollouts, configuration_error, now } =
            view;
        let rewrite_errors =
            rollouts.iter().filter_map(|report| Some((report.planned.target.clone(), report.error.clone()?)));
        let facts = Facts {
            activity: activity.clone(),
            failed_rewrites: rewrite_errors.collect(),
            configuration_error: configuration_error.clone(),
            served: true,
            standby: self.services.process.fence.as_ref().and_then(|fence| fence.closed_reason()),
            builds: LoggedBuilds::of(&self.services.cache, plan, *now),
            cluster: self.cluster.clone(),
            registry: self.services.images.location.to_string(),
            ..Facts::of(Arc::clone(plan), snapshot, definitions, *now)
        };
        let mut history = self.state().map(|state| state.history.clone()).unwrap_or_default();
        history.record_phases(&Fleet::new(&facts, &BTreeMap::new()));
        history.record_rewrites(rollouts, *now);
        let (live, definitions) = (live.clone(), Arc::clone(definitions));
        let state = Arc::new(PageState { facts, live, definitions, history, index: Mutex::default() });
        self.state.send_replace(Some(state));
    }

    fn failed(&self, error: &str) {
        let outdated = Some(format!("The last reconcile failed: {error}"));
        self.state.send_if_modified(|state| {
            let Some(last) = state.as_ref().filter(|last| last.facts.outdated != outdated) else {
                return false;
            };
            let PageState { facts, live, definitions, history, index: _ } = &**last;
            let (live, definitions, history) = (live.clone(), Arc::clone(definitions), history.clone());
            let facts = Facts { outdated, ..facts.clone() };
            *state = Some(Arc::new(PageState { facts, live, definitions, history, index: Mutex::default() }));
            true
        });
    }
}

impl PageServer {
    /// Creates a server. It responds with an error until the first reconcile has finished.
    pub fn new(services: BuildServices, cluster: String, actions: Option<Arc<Actions>>) -> Arc<Self> {
        let (state, images) = (watch::Sender::default(), Images::of(services.clone()));
        let viewers = Arc::new(Semaphore::new(MAX_VIEWERS));
        let (excerpts, rendering) = (Excerpts::default(), Arc::new(Semaphore::new(1)));
        Arc::new(Self { services, cluster, actions, state, images, excerpts, rendering, viewers })
    }

    /// Returns the routes.
    pub fn router(self: &Arc<Self>) -> Router {
        let mut router = Router::new().route("/events", get(events));
        let (files, pages) =
            (["/style.css", "/icon.svg", "/page.js"], ["/index.html", "/nodes.html", "/rollouts.html"]);
        for path in files.into_iter().chain(pages).chain(["/", "/c/{page}", "/n/{page}"]) {
            router = router.route(path, get(serve_page));
        }
        router = router.fallback(missing);
        if self.actions.is_some() {
            router = router.route(&format!("/{ACTION_PATH}"), get(confirm).post(act));
        }
        router.with_state(Arc::clone(self))
    }

    fn state(&self) -> Option<Arc<PageState>> {
        self.state.borrow().clone()
    }

    async fn content_for(
        self: Arc<Self>,
        state: Arc<PageState>,
        headers: HeaderMap,
        uri: Uri,
    ) -> Result<Content, HtmlError> {
        let path = uri.path().trim_start_matches('/').to_owned();
        let mut data = match cell_at(&state.facts, &path) {
            None => CellData::default(),
            Some(cell) => {
                let lookup = self.images.cell_data(&state.facts.plan, cell);
                tokio::time::timeout(REGISTRY_TIMEOUT, lookup).await.unwrap_or_else(|_| {
                    let error = "the registry did not answer in time".to_owned();
                    CellData { image: Some(Err(error)), ..CellData::default() }
                })
            }
        };
        if let Some(actions) = &self.actions {
            data.actions = actions.allowed_actions(&headers, &state.facts, &path).await;
        }
        let permit = Arc::clone(&self.rendering).acquire_owned().await;
        let server = Arc::clone(&self);
        let render = move || {
            // The task also continues if the viewer hangs up, so the task holds the permit.
            let _permit = permit;
            match state.render(&path, uri.query().unwrap_or_default(), data, &server)? {
                Some(content) => Ok(content),
                None => Ok(Content::NotFound(html::missing_page(&state.facts, &path)?)),
            }
        };
        // An error means that the task panicked. The panic hook has reported the panic.
        tokio::task::spawn_blocking(render).await.unwrap_or_else(|_| Err(HtmlError::panicked()))
    }
}

impl PageState {
    /// Returns the content of a path, or `None` if there is none.
    fn render(
        &self,
        path: &str,
        query: &str,
        data: CellData,
        server: &PageServer,
    ) -> Result<Option<Content>, HtmlError> {
        let Self { facts, live, definitions: _, history, index: _ } = self;
        let activity = live.snapshot();
        let fleet = || Fleet::at(facts, &history.since, &activity, Timestamp::now());
        let page = match path {
            "style.css" => return Ok(Some(Content::Page("text/css; charset=utf-8", STYLE.to_owned()))),
            "icon.svg" => return Ok(Some(Content::Page("image/svg+xml", ICON.to_owned()))),
            "page.js" => return Ok(Some(Content::Page("text/javascript; charset=utf-8", SCRIPT.to_owned()))),
            "nodes.html" => html::nodes_page(&fleet(), take_fields(query.as_bytes())("name"))?,
            "rollouts.html" => html::rollouts_page(facts, &data.actions, &history.rewrites)?,
            "" | "index.html" => match parse_filter(query) {
                filter if filter == Filter::default() => self.index_page(&fleet(), &activity)?,
                filter => html::fleet_page(&fleet(), filter, &history.changes)?,
            },
            node if node.starts_with("n/") => {
                let name = facts.nodes.keys().find(|name| node_link(name).link == node);
                match name.and_then(|name| html::node_page(&fleet(), name)) {
                    Some(page) => page?,
                    None => return Ok(None),
                }
            }
            _ => return cell_content(&fleet(), path, data, server),
        };
        Ok(Some(Content::Page(HTML, page)))
    }

    /// Returns the index page without a filter, from the cache unless the cached page is too old.
    fn index_page(&self, fleet: &Fleet<'_>, activity: &Activity) -> Result<String, HtmlError> {
        let mut index = self.index.lock();
        // Between two reconciles only builds make progress.
        let is_idle = activity.values().all(|build| build.stage.is_none());
        let max_age = if is_idle { INDEX_MAX_AGE_IDLE } else { INDEX_MAX_AGE_BUILDING };
        if let Some((rendered_at, page)) = &*index
            && rendered_at.elapsed() < max_age
        {
            return Ok(page.clone());
        }
        let page = html::fleet_page(fleet, Filter::default(), &self.history.changes)?;
        *index = Some((Instant::now(), page.clone()));
        Ok(page)
    }
}

/// Returns the page or the build log of a cell, if there is such a cell.
fn cell_content(
    fleet: &Fleet<'_>,
    path: &str,
    data: CellData,
    server: &PageServer,
) -> Result<Option<Content>, HtmlError> {
    let has_path =
        |entry: &&StatusEntry<'_>| cell_link(entry.image, entry.target) == path || log_link(entry) == path;
    let Some(entry) = fleet.entries.iter().find(has_path) else { return Ok(None) };
    let log = server.excerpts.find(&server.services.cache, entry);
    if log_link(entry) == path {
        return Ok(log.map(|log| Content::Log(log.path)));
    }
    Ok(Some(Content::Page(HTML, html::cell_page(fleet, entry, CellData { log, ..data })?)))
}

/// Parses the filter in a query string.
fn parse_filter(query: &str) -> Filter {
    let mut field = take_fields(query.as_bytes());
    Filter { image: field("image"), kernel: field("kernel"), os: field("os"), state: field("state") }
}

async fn serve_page(State(server): State<Arc<PageServer>>, headers: HeaderMap, uri: Uri) -> Response {
    with_security_headers(match server.state() {
        None => {
            let text = "no reconcile has finished yet: see farrier's log for the reason if this lasts\n";
            (StatusCode::SERVICE_UNAVAILABLE, text).into_response()
        }
        Some(state) => match Arc::clone(&server).content_for(state, headers, uri).await {
            Ok(Content::Page(content_type, text)) => {
                ([(header::CONTENT_TYPE, content_type)], text).into_response()
            }
            Ok(Content::Log(path)) => {
                serve_log(path, Arc::clone(&server.viewers).try_acquire_owned().ok()).await
            }
            Ok(Content::NotFound(page)) => {
                (StatusCode::NOT_FOUND, [(header::CONTENT_TYPE, HTML)], page).into_response()
            }
            Err(error) => internal_error(&error),
        },
    })
}

/// Answers a request for an unknown path.
async fn missing(State(server): State<Arc<PageServer>>, uri: Uri) -> Response {
    let path = uri.path().trim_start_matches('/');
    let state = server.state().filter(|_| path.len() <= MAX_UNKNOWN_PATH);
    let page = state.map(|state| html::missing_page(&state.facts, path));
    with_security_headers(match page {
        Some(Ok(page)) => (StatusCode::NOT_FOUND, [(header::CONTENT_TYPE, HTML)], page).into_response(),
        Some(Err(error)) => internal_error(&error),
        None => (StatusCode::NOT_FOUND, "there is no such page\n").into_response(),
    })
}

fn internal_error(error: &HtmlError) -> Response {
    tracing::error!(error = error_chain(error), "page not rendered");
    (StatusCode::INTERNAL_SERVER_ERROR, "the page could not be rendered\n").into_response()
}

/// Shows the effects of an action for confirmation.
async fn confirm(State(server): State<Arc<PageServer>>, headers: HeaderMap, uri: Uri) -> Response {
    let (Some(state), Some(actions)) = (server.state(), &server.actions) else {
        return StatusCode::SERVICE_UNAVAILABLE.into_response();
    };
    let query = uri.query().unwrap_or_default();
    with_security_headers(match actions.preview(&headers, &state.facts, query.as_bytes()).await {
        Ok((preview, ..)) => match html::confirm_page(&state.facts, &preview) {
            Ok(text) => ([(header::CONTENT_TYPE, HTML)], text).into_response(),
            Err(error) => internal_error(&error),
        },
        Err(rejection) => rejection.into_response(),
    })
}

/// Carries out a confirmed action.
async fn act(State(server): State<Arc<PageServer>>, headers: HeaderMap, body: Body) -> Response {
    let (Some(state), Some(actions)) = (server.state(), &server.actions) else {
        return StatusCode::SERVICE_UNAVAILABLE.into_response();
    };
    let form = match form(body).await {
        Ok(form) => form,
        Err(rejection) => return with_security_headers(rejection.into_response()),
    };
    with_security_headers(match actions.act(&headers, &state.facts, &state.definitions, &form).await {
        Ok(location) => (StatusCode::SEE_OTHER, [(header::LOCATION, location)]).into_response(),
        Err(rejection) => rejection.into_response(),
    })
}

/// Reads a form of at most [`MAX_FORM_BYTES`], within [`FORM_TIMEOUT`].
async fn form(body: Body) -> Result<Bytes, (StatusCode, &'static str)> {
    match tokio::time::timeout(FORM_TIMEOUT, to_bytes(body, MAX_FORM_BYTES)).await {
        Ok(Ok(form)) => Ok(form),
        Ok(Err(_)) => Err((StatusCode::PAYLOAD_TOO_LARGE, "the form is too long or incomplete\n")),
        Err(_) => Err((StatusCode::REQUEST_TIMEOUT, "the form did not arrive in time\n")),
    }
}

fn with_security_headers(mut response: Response) -> Response {
    let headers = response.headers_mut();
    for (name, value) in [
        (header::CONTENT_SECURITY_POLICY, CSP),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        // With `no-referrer`, browsers would send forms with `Origin: null`, which hides the origin that `request` checks.
        (header::REFERRER_POLICY, "same-origin"),
        (header::CACHE_CONTROL, "no-cache"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    response
}

/// Sends a server-sent event after each future reconcile.
async fn events(State(server): State<Arc<PageServer>>) -> Response {
    let Ok(viewer) = Arc::clone(&server.viewers).try_acquire_owned() else {
        return (StatusCode::SERVICE_UNAVAILABLE, "too many viewers\n").into_response();
    };
    let reconciles =
        futures::stream::unfold((server.state.subscribe(), viewer), |(mut updates, viewer)| async {
            updates.changed().await.ok()?;
            Some((Ok::<_, Infallible>(Event::default().data("pass")), (updates, viewer)))
        });
    Sse::new(reconciles).keep_alive(KeepAlive::default()).into_response()
}

/// Sends a log. For a viewer with a permit, the response also follows a growing log.
async fn serve_log(path: PathBuf, viewer: Option<OwnedSemaphorePermit>) -> Response {
    let open = async {
        let file = tokio::fs::File::open(&path).await?;
        let length = file.metadata().await?.len();
        Ok::<_, io::Error>((file.take(length), length))
    };
    let (existing, length) = match open.await {
        Ok(opened) => opened,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return (StatusCode::NOT_FOUND, "the log is no longer in the cache\n").into_response();
        }
        Err(error) => {
            tracing::warn!(path = %path.display(), %error, "build log not sent");
            return (StatusCode::SERVICE_UNAVAILABLE, "the log cannot be read at the moment\n")
                .into_response();
        }
    };
    let appended = futures::stream::unfold(Some((path, None, viewer)), move |following| async move {
        let (path, reader, viewer) = following?;
        // Opened when the existing text has been sent, so that a viewer takes one file descriptor at a time.
        let mut reader = reader.map_or_else(|| LogReader::open(&path, length), Ok).ok()?;
        let (mut text, is_growing) = reader.read_new().ok()?;
        if is_growing && viewer.is_none() {
            text.extend_from_slice(LOG_CUT_OFF);
            return Some((Ok(Bytes::from(text)), None));
        }
        if is_growing && text.is_empty() {
            tokio::time::sleep(LOG_POLL_INTERVAL).await;
        }
        Some((Ok(Bytes::from(text)), is_growing.then_some((path, Some(reader), viewer))))
    });
    let body = Body::from_stream(ReaderStream::new(existing).chain(appended));
    ([(header::CONTENT_TYPE, "text/plain; charset=utf-8")], body).into_response()
}

#[cfg(test)]
#[path = "server_tests.rs"]
mod tests;
