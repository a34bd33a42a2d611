//! Adapter: serves the page on farrier's HTTP port, from the newest reconcile of the loop. The page is
//! read-only except for [`Actions`], and the loop never waits for it.

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
use farrier_core::{image::Definitions, plan::StatusEntry};
use futures::StreamExt as _;
use jiff::Timestamp;
use oci::client::chain as error_chain;
use parking_lot::Mutex;
use tokio::{
    io::AsyncReadExt as _,
    sync::{OwnedSemaphorePermit, Semaphore, watch},
};
use tokio_util::io::ReaderStream;

use super::{
    action::PATH,
    actions::Actions,
    facts::Facts,
    fleet::{Fleet, cell_at, cell_link, log_link, node_link},
    history::History,
    html::{self, HtmlError, ICON, SCRIPT, STYLE},
    image::{Found, Images},
    log::{Excerpts, built},
    matrix::Filter,
    request::fields,
};
use crate::{
    build::LogReader,
    controller::live::{ReconcileView, SharedActivity, StatusSink},
    parts::Parts,
};

const HTML: &str = "text/html; charset=utf-8";
/// Content security policy of pages. It allows our style sheet, our script, which contacts this host only,
/// and forms that are sent back here. Inline scripts, frames and other hosts are forbidden.
const POLICY: &str = "default-src 'none'; style-src 'self'; img-src 'self'; script-src 'self'; connect-src 'self'; form-action 'self'; \
                      base-uri 'none'; frame-ancestors 'none'";
/// Maximum number of viewers that receive updates. Further viewers reload by hand.
const VIEWERS: usize = 200;
/// Size limit of a form in bytes, and timeout for receiving it.
const FORM: usize = 4096;
const FORM_TIME: Duration = Duration::from_secs(10);
/// Maximum age of a cached first view while a build runs, and while nothing but ages changes.
const FRESH: Duration = Duration::from_secs(5);
const AGES: Duration = Duration::from_mins(1);
/// Interval at which a growing log is read.
const FOLLOWS: Duration = Duration::from_millis(500);
/// End of a growing log for a viewer above [`VIEWERS`].
const NOT_FOLLOWED: &[u8] =
    b"\n[farrier: the build continues. Too many viewers follow it already: reload for the rest.]\n";
/// Timeout for reading an image from the registry.
const PATIENCE: Duration = Duration::from_secs(10);

/// Serves the pages of the newest reconcile.
pub struct PageServer {
    parts: Parts,
    actions: Option<Arc<Actions>>,
    shown: watch::Sender<Option<Arc<Shown>>>,
    images: Images,
    excerpts: Excerpts,
    /// Lets one page be rendered at a time, so that viewers take at most one CPU from builds.
    turn: Semaphore,
    viewers: Arc<Semaphore>,
}

/// State that is shown between two reconciles.
struct Shown {
    facts: Facts,
    /// Current activity of builds.
    live: SharedActivity,
    definitions: Arc<Definitions>,
    history: History,
    /// Cached first view, which is requested most often, and when it was rendered.
    index: Mutex<Option<(Instant, String)>>,
}

/// Content at an address.
enum Answer {
    Page(&'static str, String),
    Log(PathBuf),
    Nothing,
}

#[async_trait::async_trait]
impl StatusSink for PageServer {
    async fn reconciled(&self, view: &ReconcileView) {
        let ReconcileView { plan, snapshot, definitions, activity, live, rollouts, configuration_error, now } =
            view;
        let failed =
            rollouts.iter().filter_map(|report| Some((report.planned.target.clone(), report.error.clone()?)));
        let facts = Facts {
            activity: activity.clone(),
            failed_rewrites: failed.collect(),
            configuration_error: configuration_error.clone(),
            served: true,
            built: built(&self.parts.cache, plan),
            ..Facts::of(Arc::clone(plan), snapshot, definitions, *now)
        };
        let mut history = self.shown().map(|shown| shown.history.clone()).unwrap_or_default();
        history.note(&Fleet::new(&facts, &BTreeMap::new()));
        history.note_rewrites(rollouts, *now);
        let (live, definitions) = (live.clone(), Arc::clone(definitions));
        let shown = Arc::new(Shown { facts, live, definitions, history, index: Mutex::default() });
        self.shown.send_replace(Some(shown));
    }
}

impl PageServer {
    /// Creates a server that shows nothing until the first reconcile.
    pub fn new(parts: Parts, actions: Option<Arc<Actions>>) -> Arc<Self> {
        let (shown, images) = (watch::Sender::default(), Images::of(parts.clone()));
        let viewers = Arc::new(Semaphore::new(VIEWERS));
        let (excerpts, turn) = (Excerpts::default(), Semaphore::new(1));
        Arc::new(Self { parts, actions, shown, images, excerpts, turn, viewers })
    }

    /// Returns the routes.
    pub fn router(self: &Arc<Self>) -> Router {
        let mut router = Router::new().route("/events", get(events));
        let (files, pages) =
            (["/style.css", "/icon.svg", "/page.js"], ["/index.html", "/nodes.html", "/rollouts.html"]);
        for path in files.into_iter().chain(pages).chain(["/", "/c/{page}", "/n/{page}"]) {
            router = router.route(path, get(answer));
        }
        if self.actions.is_some() {
            router = router.route(&format!("/{PATH}"), get(confirm).post(act));
        }
        router.with_state(Arc::clone(self))
    }

    fn shown(&self) -> Option<Arc<Shown>> {
        self.shown.borrow().clone()
    }

    async fn find(
        self: Arc<Self>,
        shown: Arc<Shown>,
        headers: HeaderMap,
        uri: Uri,
    ) -> Result<Answer, HtmlError> {
        let path = uri.path().trim_start_matches('/').to_owned();
        let mut found = match cell_at(&shown.facts, &path) {
            None => Found::default(),
            Some(cell) => {
                let asked = tokio::time::timeout(PATIENCE, self.images.of_cell(&shown.facts.plan, cell));
                let late = || Some(Err("the registry did not answer in time".to_owned()));
                asked.await.unwrap_or_else(|_| Found { image: late(), ..Found::default() })
            }
        };
        if let Some(actions) = &self.actions {
            found.offers = actions.offers(&headers, &shown.facts, &path).await;
        }
        let _turn = self.turn.acquire().await;
        let page = Arc::clone(&self);
        let make = move || shown.answer(&path, uri.query().unwrap_or_default(), found, &page);
        // The task is never canceled, and a panic in it was already reported.
        tokio::task::spawn_blocking(make).await.unwrap_or(Ok(Answer::Nothing))
    }
}

impl Shown {
    fn answer(&self, path: &str, query: &str, found: Found, page: &PageServer) -> Result<Answer, HtmlError> {
        let Self { facts, live, definitions: _, history, index } = self;
        let activity = live.snapshot();
        let fleet = || Fleet::at(facts, &history.since, &activity, Timestamp::now());
        let page = match path {
            "style.css" => return Ok(Answer::Page("text/css; charset=utf-8", STYLE.to_owned())),
            "icon.svg" => return Ok(Answer::Page("image/svg+xml", ICON.to_owned())),
            "page.js" => return Ok(Answer::Page("text/javascript; charset=utf-8", SCRIPT.to_owned())),
            "nodes.html" => html::nodes_page(facts)?,
            "rollouts.html" => html::rollouts_page(facts, &found.offers, &history.rewrites)?,
            "" | "index.html" => {
                let filter = filter(query);
                let view = |filter| html::fleet_page(&fleet(), filter, &history.changes);
                if filter != Filter::default() {
                    return Ok(Answer::Page(HTML, view(filter)?));
                }
                let mut index = index.lock();
                // Between two reconciles only builds make progress.
                let is_calm = activity.values().all(|build| build.stage.is_none());
                if let Some((at, made)) = &*index
                    && at.elapsed() < if is_calm { AGES } else { FRESH }
                {
                    made.clone()
                } else {
                    let made = view(filter)?;
                    *index = Some((Instant::now(), made.clone()));
                    made
                }
            }
            node if node.starts_with("n/") => {
                let name = facts.nodes.keys().find(|name| node_link(name).link == node);
                let Some(page) = name.and_then(|name| html::node_page(&fleet(), name)) else {
                    return Ok(Answer::Nothing);
                };
                page?
            }
            cell => {
                let fleet = fleet();
                let is_it = |entry: &&StatusEntry<'_>| {
                    cell_link(entry.image, entry.target) == cell || log_link(entry) == cell
                };
                let Some(entry) = fleet.entries.iter().find(is_it) else { return Ok(Answer::Nothing) };
                let log = page.excerpts.find(&page.parts.cache, entry);
                if log_link(entry) == cell {
                    return Ok(log.map_or(Answer::Nothing, |log| Answer::Log(log.path)));
                }
                html::cell_page(&fleet, entry, Found { log, ..found })?
            }
        };
        Ok(Answer::Page(HTML, page))
    }
}

/// Parses the filter in an address.
fn filter(query: &str) -> Filter {
    let mut take = fields(query.as_bytes());
    Filter { image: take("image"), kernel: take("kernel"), os: take("os"), state: take("state") }
}

async fn answer(State(page): State<Arc<PageServer>>, headers: HeaderMap, uri: Uri) -> Response {
    guarded(match page.shown() {
        None => (StatusCode::SERVICE_UNAVAILABLE, "no reconcile has finished yet\n").into_response(),
        Some(shown) => match Arc::clone(&page).find(shown, headers, uri).await {
            Ok(Answer::Page(kind, text)) => ([(header::CONTENT_TYPE, kind)], text).into_response(),
            Ok(Answer::Log(path)) => log(path, Arc::clone(&page.viewers).try_acquire_owned().ok()).await,
            Ok(Answer::Nothing) => (StatusCode::NOT_FOUND, "there is no such page\n").into_response(),
            Err(error) => no_page(&error),
        },
    })
}

fn no_page(error: &HtmlError) -> Response {
    tracing::error!(error = error_chain(error), "page not rendered");
    (StatusCode::INTERNAL_SERVER_ERROR, "the page could not be rendered\n").into_response()
}

/// Shows the effects of an action for confirmation.
async fn confirm(State(page): State<Arc<PageServer>>, headers: HeaderMap, uri: Uri) -> Response {
    let (Some(shown), Some(actions)) = (page.shown(), &page.actions) else {
        return StatusCode::SERVICE_UNAVAILABLE.into_response();
    };
    let query = uri.query().unwrap_or_default();
    guarded(match actions.preview(&headers, &shown.facts, query.as_bytes()).await {
        Ok((preview, ..)) => match html::confirm_page(&shown.facts, &preview) {
            Ok(text) => ([(header::CONTENT_TYPE, HTML)], text).into_response(),
            Err(error) => no_page(&error),
        },
        Err(refusal) => refusal.into_response(),
    })
}

/// Carries out a confirmed action.
async fn act(State(page): State<Arc<PageServer>>, headers: HeaderMap, body: Body) -> Response {
    let (Some(shown), Some(actions)) = (page.shown(), &page.actions) else {
        return StatusCode::SERVICE_UNAVAILABLE.into_response();
    };
    let form = match form(body).await {
        Ok(form) => form,
        Err(refusal) => return guarded(refusal.into_response()),
    };
    guarded(match actions.act(&headers, &shown.facts, &shown.definitions, &form).await {
        Ok(back) => (StatusCode::SEE_OTHER, [(header::LOCATION, back)]).into_response(),
        Err(refusal) => refusal.into_response(),
    })
}

/// Reads a form, with limits on its size and time.
async fn form(body: Body) -> Result<Bytes, (StatusCode, &'static str)> {
    match tokio::time::timeout(FORM_TIME, to_bytes(body, FORM)).await {
        Ok(Ok(form)) => Ok(form),
        Ok(Err(_)) => Err((StatusCode::PAYLOAD_TOO_LARGE, "the form is too long or incomplete\n")),
        Err(_) => Err((StatusCode::REQUEST_TIMEOUT, "the form did not arrive in time\n")),
    }
}

fn guarded(mut response: Response) -> Response {
    let headers = response.headers_mut();
    for (name, value) in [
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        // With this policy, browsers send the origin of a page's forms.
        (header::REFERRER_POLICY, "same-origin"),
        (header::CACHE_CONTROL, "no-cache"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    response
}

/// Sends an event for each reconcile from now on.
async fn events(State(page): State<Arc<PageServer>>) -> Response {
    let Ok(viewer) = Arc::clone(&page.viewers).try_acquire_owned() else {
        return (StatusCode::SERVICE_UNAVAILABLE, "too many viewers\n").into_response();
    };
    let passes = futures::stream::unfold((page.shown.subscribe(), viewer), |(mut shown, viewer)| async {
        shown.changed().await.ok()?;
        Some((Ok::<_, Infallible>(Event::default().data("pass")), (shown, viewer)))
    });
    Sse::new(passes).keep_alive(KeepAlive::default()).into_response()
}

/// Sends a log. A viewer with a permit also receives what is written to the log from now on.
async fn log(path: PathBuf, viewer: Option<OwnedSemaphorePermit>) -> Response {
    let open = async {
        let file = tokio::fs::File::open(&path).await?;
        let there = file.metadata().await?.len();
        Ok::<_, io::Error>((file.take(there), LogReader::open(&path, there)?))
    };
    let Ok((there, reader)) = open.await else {
        return (StatusCode::NOT_FOUND, "the log is no longer in the cache\n").into_response();
    };
    let rest = futures::stream::unfold(Some((reader, viewer)), |following| async {
        let (mut reader, viewer) = following?;
        let (mut text, is_written) = reader.more().ok()?;
        if is_written && viewer.is_none() {
            text.extend_from_slice(NOT_FOLLOWED);
            return Some((Ok(Bytes::from(text)), None));
        }
        if is_written && text.is_empty() {
            tokio::time::sleep(FOLLOWS).await;
        }
        Some((Ok(Bytes::from(text)), is_written.then_some((reader, viewer))))
    });
    let body = Body::from_stream(ReaderStream::new(there).chain(rest));
    ([(header::CONTENT_TYPE, "text/plain; charset=utf-8")], body).into_response()
}

#[cfg(test)]
#[path = "server_tests.rs"]
mod tests;
