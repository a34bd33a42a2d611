use std::net::SocketAddr;

use farrier_builder::testing::Bench;
use farrier_controller::runtime::{Health, HttpServer, Metrics};
use farrier_core::plan::{Activity, testing::Fleet as PlannerFleet};
use futures::FutureExt as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio_util::sync::CancellationToken;

use super::*;
use crate::fleet::tests::K47;

async fn ask(address: SocketAddr, method: &str, path: &str) -> (u16, String) {
    let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let request = format!("{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    (answer.split(' ').nth(1).unwrap().parse().unwrap(), answer)
}

fn view(fleet: &PlannerFleet) -> ReconcileView {
    let (snapshot, definitions) = fleet.made_from();
    ReconcileView {
        plan: Arc::new(fleet.plan()),
        snapshot: Arc::new(snapshot.clone()),
        definitions: Arc::new(definitions.clone()),
        activity: Activity::new(),
        live: Activity::new().into(),
        rollouts: Vec::new(),
        configuration_error: None,
        now: jiff::Timestamp::UNIX_EPOCH,
    }
}

#[tokio::test]
async fn pages_of_the_newest_reconcile_are_served_read_only() {
    let bench = Bench::new(&serde_json::json!({}));
    let page = PageServer::new(bench.services.clone(), "cluster c1".to_owned(), None);
    let (health, metrics) = (Arc::new(Health::default()), Arc::new(Metrics::default()));
    let server = HttpServer::bind(([127, 0, 0, 1], 0).into(), health, metrics, page.router()).await.unwrap();
    let (address, cancel) = (server.address().unwrap(), CancellationToken::new());
    let task = tokio::spawn(server.serve(cancel.clone()));
    assert_eq!(ask(address, "GET", "/").await.0, 503);

    let fleet = PlannerFleet::new(&[K47]);
    page.reconciled(&view(&fleet)).await;
    let (status, first) = ask(address, "GET", "/").await;
    assert_eq!(status, 200, "{first}");
    for wanted in [
        "content-security-policy: default-src 'none'; style-src 'self';",
        "x-content-type-options: nosniff",
        "mft",
    ] {
        assert!(first.contains(wanted), "{first}");
    }
    assert!(!first.to_lowercase().contains("set-cookie"), "{first}");
    assert_eq!(
        ask(address, "GET", "/index.html").await.1.split("\r\n\r\n").nth(1),
        first.split("\r\n\r\n").nth(1)
    );
    let head = ask(address, "HEAD", "/").await;
    assert_eq!((head.0, head.1.split("\r\n\r\n").nth(1)), (200, Some("")));
    for method in ["POST", "PUT", "DELETE"] {
        assert_eq!(ask(address, method, "/").await.0, 405, "{method}");
    }
    assert!(ask(address, "GET", "/?state=published&image=%3Cscript%3E").await.1.contains("&lt;script&gt;"));
    assert!(ask(address, "GET", "/style.css").await.1.contains("content-type: text/css"));

    let cell = {
        let plan = fleet.plan();
        cell_link(&plan.cells[0].image, &plan.cells[0].target)
    };
    assert!(ask(address, "GET", &format!("/{cell}")).await.1.contains("Nodes that wait for this image"));
    let log = format!("/{}", cell.replace(".html", ".txt"));
    assert_eq!(ask(address, "GET", &log).await.0, 404);
    let logs = bench.services.cache.root().join("logs");
    fs_err::create_dir_all(&logs).unwrap();
    let hash = fleet.plan().cells[0].outcome.cell().unwrap().input_hash.short();
    // Logs of another architecture and of other inputs do not belong to this cell.
    for (hash, arch) in [(hash.as_str(), "arm64"), ("0123456789ab", "amd64")] {
        fs_err::write(logs.join(format!("mft-{K47}-{hash}-debian-12-{arch}.log")), "other\n").unwrap();
    }
    assert_eq!(ask(address, "GET", &log).await.0, 404);
    let own = logs.join(format!("mft-{K47}-{hash}-debian-12-amd64.log"));
    fs_err::write(own, "a.c:1:2: error: <script>bad\n").unwrap();
    let (status, text) = ask(address, "GET", &log).await;
    assert!(
        status == 200 && text.contains("content-type: text/plain") && text.contains("<script>bad"),
        "{text}"
    );
    assert!(text.contains("nosniff"), "{text}");
    let shown = ask(address, "GET", &format!("/{cell}")).await.1;
    assert!(shown.contains("&lt;script&gt;bad") && shown.contains(&format!("href=\"..{log}\"")), "{shown}");

    let node = node_link("n0").link;
    assert!(ask(address, "GET", &format!("/{node}")).await.1.contains("Node n0"));
    for nothing in ["/n/n0", "/c/../../etc/passwd", "/c/%2e%2e%2fpasswd", "/n/0123456789abcdef.html"] {
        let (status, page) = ask(address, "GET", nothing).await;
        assert!(status == 404 && page.contains("<h1>No such page</h1>"), "{nothing}: {page}");
    }
    let (status, answer) = ask(address, "GET", &format!("/a{}", "/".repeat(60_000))).await;
    assert!(status == 404 && answer.len() < 10_000, "{}", answer.len());
    assert!(
        ask(address, "GET", "/nodes.html?name=%3Cscript%3E").await.1.contains("No node has \"&lt;script")
    );
    assert!(first.contains("· cluster c1 · farrier</title>"), "{first}");
    assert_eq!(
        [ask(address, "GET", "/nodes.html").await.0, ask(address, "GET", "/rollouts.html").await.0],
        [200; 2]
    );
    assert!(first.contains("<script src=\"page.js\" data-events=\"events\" defer></script>"), "{first}");
    assert!(ask(address, "GET", "/page.js").await.1.contains("content-type: text/javascript"));

    // A viewer receives one event for each reconcile.
    let mut viewer = tokio::net::TcpStream::connect(address).await.unwrap();
    viewer.write_all(b"GET /events HTTP/1.1\r\nhost: localhost\r\n\r\n").await.unwrap();
    let mut received = Vec::new();
    for reconciles in 0..3 {
        while String::from_utf8_lossy(&received).matches("data: pass").count() < reconciles
            || received.is_empty()
        {
            assert!(viewer.read_buf(&mut received).await.unwrap() > 0, "the server hung up");
        }
        page.reconciled(&view(&fleet)).await;
    }
    cancel.cancel();
    task.await.unwrap();
}

#[tokio::test]
async fn a_viewer_who_hangs_up_makes_no_room_for_a_second_rendering() {
    let page =
        PageServer::new(Bench::new(&serde_json::json!({})).services.clone(), "cluster c1".to_owned(), None);
    page.reconciled(&view(&PlannerFleet::new(&[K47]))).await;
    let state = page.state().unwrap();
    {
        // The rendering of the index page waits for this lock.
        let _index = state.index.lock();
        let request = Arc::clone(&page).content_for(
            Arc::clone(&state),
            HeaderMap::new(),
            Uri::from_static("/index.html"),
        );
        assert!(request.now_or_never().is_none());
        assert_eq!(page.rendering.available_permits(), 0);
    }
    let rendered = tokio::time::timeout(Duration::from_mins(1), page.rendering.acquire()).await;
    assert!(rendered.unwrap().is_ok());
}

#[tokio::test]
async fn a_log_that_cannot_be_opened_is_not_called_gone() {
    let directory = tempfile::tempdir().unwrap();
    let gone = serve_log(directory.path().join("build.log"), None).await;
    assert_eq!(gone.status(), StatusCode::NOT_FOUND);
    // No file can be opened below another file.
    fs_err::write(directory.path().join("file"), "").unwrap();
    let unreadable = serve_log(directory.path().join("file/build.log"), None).await;
    assert_eq!(unreadable.status(), StatusCode::SERVICE_UNAVAILABLE);
}

struct HeldByAnother;

impl farrier_cluster::Fence for HeldByAnother {
    fn closed_reason(&self) -> Option<String> {
        Some("lease farrier/farrier is held by another farrier".to_owned())
    }
}

#[tokio::test]
async fn the_page_of_a_standby_says_so() {
    let mut services = Bench::new(&serde_json::json!({})).services.clone();
    for fence in [None, Some(Arc::new(HeldByAnother) as Arc<dyn farrier_cluster::Fence>)] {
        let is_standby = fence.is_some();
        services.process.fence = fence;
        let page = PageServer::new(services.clone(), "cluster c1".to_owned(), None);
        page.reconciled(&view(&PlannerFleet::new(&[K47]))).await;
        let request = axum::http::Request::builder().uri("/rollouts.html").body(Body::empty()).unwrap();
        let answer = tower::Service::call(&mut page.router(), request).await.unwrap();
        let bytes = axum::body::to_bytes(answer.into_body(), 1 << 20).await.unwrap();
        let shown = String::from_utf8(bytes.to_vec()).unwrap();
        assert_eq!(shown.contains("lease farrier/farrier is held by another farrier"), is_standby, "{shown}");
    }
}

#[tokio::test]
async fn pages_say_that_the_cluster_cannot_be_read() {
    let page =
        PageServer::new(Bench::new(&serde_json::json!({})).services.clone(), "cluster c1".to_owned(), None);
    let text = async || {
        let request = axum::http::Request::builder().uri("/nodes.html").body(Body::empty()).unwrap();
        let answer = tower::Service::call(&mut page.router(), request).await.unwrap();
        let bytes = axum::body::to_bytes(answer.into_body(), 1 << 20).await.unwrap();
        String::from_utf8(bytes.to_vec()).unwrap()
    };
    page.failed("no cluster");
    assert!(text().await.contains("no reconcile has finished yet"));
    let fleet = PlannerFleet::new(&[K47]);
    page.reconciled(&view(&fleet)).await;
    assert!(!text().await.contains("role=\"alert\""));
    let updates = page.state.subscribe();
    page.failed("<b>no route");
    assert!(updates.has_changed().unwrap(), "open pages are not updated");
    assert!(text().await.contains("The last reconcile failed: &lt;b&gt;no route"));
    let mut stale = view(&fleet);
    Arc::make_mut(&mut stale.snapshot).stale_since = Some(Timestamp::UNIX_EPOCH);
    page.reconciled(&stale).await;
    let shown = text().await;
    assert!(shown.contains("The API server has not answered since <time datetime=\"1970-01-01"), "{shown}");
    page.reconciled(&view(&fleet)).await;
    assert!(!text().await.contains("role=\"alert\""));
}

#[tokio::test]
async fn the_number_of_viewers_is_limited() {
    let page =
        PageServer::new(Bench::new(&serde_json::json!({})).services.clone(), "cluster c1".to_owned(), None);
    let open = async || events(State(Arc::clone(&page))).await;
    let mut viewers = Vec::new();
    for _ in 0..MAX_VIEWERS {
        viewers.push(open().await);
    }
    assert_eq!(open().await.status(), StatusCode::SERVICE_UNAVAILABLE);
    viewers.pop();
    assert_eq!(open().await.status(), StatusCode::OK);
}

#[tokio::test]
async fn files_replace_the_pages_of_an_earlier_run() {
    let bench = Bench::new(&serde_json::json!({}));
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    fs_err::create_dir_all(at("c")).unwrap();
    for name in ["c/0123456789abcdef.html", "c/mine.html", "state-failed.html"] {
        fs_err::write(at(name), "").unwrap();
    }
    let facts = crate::fleet::tests::facts_of(&PlannerFleet::new(&[K47]));
    crate::write_files(directory.path(), &facts, &bench.services).await.unwrap();
    assert!(!at("c/0123456789abcdef.html").exists() && at("c/mine.html").exists());
    let read = |name: &str| fs_err::read_to_string(at(name)).unwrap();
    assert!(read("state-failed.html").contains("Nothing matches state"));
    let index = read("index.html");
    let cell = cell_link(&facts.plan.cells[0].image, &facts.plan.cells[0].target);
    for link in
        [cell.as_str(), "state-missing.html", "state-open.html", "nodes.html", "rollouts.html", "style.css"]
    {
        assert!(index.contains(&format!("href=\"{link}\"")), "{link}: {index}");
        assert!(at(link).exists(), "{link}");
    }
    assert!(
        !index.contains("<form") && !index.contains("<script"),
        "files have neither a filter nor updates"
    );
    assert!(read(&cell).contains(&format!("href=\"../{}\"", node_link("n0").link)));
    assert!(at(&node_link("n0").link).exists());
}

#[tokio::test]
async fn a_growing_log_is_followed() {
    let bench = Bench::new(&serde_json::json!({}));
    let page = PageServer::new(bench.services.clone(), "cluster c1".to_owned(), None);
    let (fleet, mut view) = (PlannerFleet::new(&[K47]), view(&PlannerFleet::new(&[K47])));
    let plan = fleet.plan();
    let (image, target) = (plan.cells[0].image.clone(), plan.cells[0].target.clone());
    let (began, usual) = (Some(Timestamp::now()), Some(Duration::from_mins(4)));
    let stage = Some(farrier_core::plan::Stage::Compile);
    let build = farrier_core::plan::BuildActivity { stage, began, usual, ..Default::default() };
    // The build began after the reconcile.
    view.live = Activity::from([((image.clone(), target.clone()), build)]).into();
    page.reconciled(&view).await;
    let hash = plan.cells[0].outcome.cell().unwrap().input_hash.short();
    let path = bench.services.cache.root().join(format!("logs/mft-{K47}-{hash}-debian-12-amd64.log"));
    let log = farrier_builder::FileLog::create(&path, |_| {}).unwrap();
    farrier_engines::BuildLog::line(&log, "  CC [M]  a.o");
    let get = async |path: String| {
        let request = axum::http::Request::builder().uri(path).body(Body::empty()).unwrap();
        tower::Service::call(&mut page.router(), request).await.unwrap()
    };
    let text = async |path: String| {
        let bytes = axum::body::to_bytes(get(path).await.into_body(), 1 << 20).await.unwrap();
        String::from_utf8(bytes.to_vec()).unwrap()
    };
    for path in ["/".to_owned(), format!("/{}", cell_link(&image, &target))] {
        let shown = text(path).await;
        assert!(shown.contains(" s of usually 4 min") && shown.contains(" data-live>"), "{shown}");
    }
    // A viewer above the limit is told that the log continues.
    let taken = Arc::clone(&page.viewers).try_acquire_many_owned(MAX_VIEWERS.try_into().unwrap()).unwrap();
    let ended = text(format!("/{}", cell_link(&image, &target).replace(".html", ".txt"))).await;
    assert!(ended.starts_with("  CC [M]  a.o\n") && ended.contains("the build continues"), "{ended}");
    drop(taken);
    let followed = get(format!("/{}", cell_link(&image, &target).replace(".html", ".txt"))).await;
    let mut lines = followed.into_body().into_data_stream();
    assert_eq!(lines.next().await.unwrap().unwrap(), "  CC [M]  a.o\n");
    farrier_engines::BuildLog::line(&log, "  LD [M]  a.ko");
    drop(log);
    let rest: Vec<u8> = lines.map(|part| part.unwrap().to_vec()).concat().await;
    assert_eq!(String::from_utf8(rest).unwrap(), "  LD [M]  a.ko\n");
}

#[tokio::test(start_paused = true)]
async fn a_form_has_a_size_limit_and_a_timeout() {
    assert_eq!(form(Body::from("a=b")).await.unwrap(), "a=b");
    let long = form(Body::from(vec![b'a'; MAX_FORM_BYTES + 1])).await.unwrap_err();
    assert_eq!(long.0, StatusCode::PAYLOAD_TOO_LARGE);
    let silent = Body::from_stream(futures::stream::pending::<Result<Bytes, io::Error>>());
    assert_eq!(form(silent).await.unwrap_err().0, StatusCode::REQUEST_TIMEOUT);
}
