use std::sync::Arc;

use axum::{
    body::{Body, to_bytes},
    http::Request,
};
use farrier_builder::testing::{Bench, Fleet as InMemory, K9, K10, module};
use farrier_cluster::Directory;
use farrier_controller::{
    live::{ReconcileView, StatusSink as _},
    observe_and_plan,
};
use farrier_core::plan::{Activity, Failure, Outcome, Plan, testing::Fleet};

use super::*;
use crate::{
    PageServer,
    fleet::{cell_link, tests::K47},
};

/// A page for a fleet whose only build has failed, on a loopback port or on a port that other machines reach.
struct TestPage {
    bench: Bench,
    page: Arc<PageServer>,
    /// Address of the failed cell's page.
    cell: String,
    _directory: tempfile::TempDir,
}

impl TestPage {
    async fn new(local: bool) -> Self {
        let (bench, directory) = (Bench::new(&serde_json::json!({})), tempfile::tempdir().unwrap());
        let cluster = Arc::new(Directory::open(directory.path()).unwrap());
        let actions = Actions::new(bench.services.clone(), cluster, None, local, Arc::default());
        let page = PageServer::new(bench.services.clone(), "cluster c1".to_owned(), Some(actions));
        let fleet = Fleet::new(&[K47]);
        let (snapshot, definitions) = fleet.made_from();
        let mut plan: Plan = fleet.plan();
        let (at, planned) = (jiff::Timestamp::UNIX_EPOCH, &mut plan.cells[0]);
        let (message, cell) = ("<b>no compiler".to_owned(), planned.outcome.cell().unwrap().clone());
        let failure = Failure {
            at,
            message: message.clone(),
            permanent: true,
            under: None,
            under_site: None,
            memory: None,
            deadline: None,
        };
        bench.services.cache.write_record("failures", &cell.input_hash.to_string(), &failure).unwrap();
        planned.outcome = Outcome::Failed { cell, at, message };
        let cell = cell_link(&planned.image, &planned.target);
        page.reconciled(&ReconcileView {
            plan: Arc::new(plan),
            snapshot: Arc::new(snapshot.clone()),
            definitions: Arc::new(definitions.clone()),
            activity: Activity::new(),
            live: Activity::new().into(),
            rollouts: Vec::new(),
            configuration_error: None,
            now: at,
        })
        .await;
        Self { bench, page, cell, _directory: directory }
    }

    fn has_failure(&self) -> bool {
        let mut cache = fs_err::read_dir(self.bench.services.cache.root().join("records/failures")).unwrap();
        cache.next().is_some()
    }

    /// Returns status, and headers with the body, of an answer.
    async fn ask(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> (u16, String) {
        let mut request = Request::builder().method(method).uri(path);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Body::from(body.to_owned())).unwrap();
        let response = tower::Service::call(&mut self.page.router(), request).await.unwrap();
        let (parts, body) = response.into_parts();
        let body = to_bytes(body, 1 << 20).await.unwrap();
        (parts.status.as_u16(), format!("{:?}\n{}", parts.headers, String::from_utf8_lossy(&body)))
    }
}

const HERE: (&str, &str) = ("host", "localhost:81");
const FORM: (&str, &str) = ("content-type", "application/x-www-form-urlencoded");
const OWN: (&str, &str) = ("sec-fetch-site", "same-origin");

/// Returns the digest of the effects that a page shows.
fn effects_digest(page: &str) -> &str {
    page.split("name=\"seen\" value=\"").nth(1).and_then(|rest| rest.split('"').next()).unwrap()
}

#[tokio::test]
async fn a_confirmed_action_is_carried_out() {
    let page_under_test = TestPage::new(true).await;
    let page = format!("/{}", page_under_test.cell);
    let (_, cell) = page_under_test.ask("GET", &page, &[HERE], "").await;
    assert!(cell.contains("href=\"../do?what&#x3D;retry&amp;of&#x3D;"), "{cell}");
    let address = format!("/do?what=retry&of={}", page_under_test.cell);
    let (status, shown) = page_under_test.ask("GET", &address, &[HERE], "").await;
    assert_eq!(status, 200, "{shown}");
    for wanted in [
        "The build failed at 1970-01-01T00:00:00Z: &lt;b&gt;no compiler",
        "form-action 'self'",
        "method=\"post\"",
    ] {
        assert!(shown.contains(wanted), "{wanted} is not in {shown}");
    }
    assert!(!shown.contains("<script") && !shown.to_lowercase().contains("set-cookie"), "{shown}");
    let form = format!("what=retry&of={}&seen={}", page_under_test.cell, effects_digest(&shown));
    assert!(page_under_test.has_failure(), "a preview changes nothing");
    let (status, done) = page_under_test.ask("POST", "/do", &[HERE, FORM, OWN], &form).await;
    assert_eq!(status, 303, "{done}");
    assert!(done.contains(&format!("\"location\": \"{}\"", page_under_test.cell)), "{done}");
    assert!(!page_under_test.has_failure());
}

#[tokio::test]
async fn requests_of_foreign_pages_are_rejected() {
    let page_under_test = TestPage::new(true).await;
    let address = format!("/do?what=retry&of={}", page_under_test.cell);
    let (_, shown) = page_under_test.ask("GET", &address, &[HERE], "").await;
    for (site, status) in
        [("same-origin", 200), ("none", 200), ("same-site", 403), ("cross-site", 403), ("", 403)]
    {
        let headers = [HERE, ("sec-fetch-site", site)];
        let (found, response) = page_under_test.ask("GET", &address, &headers, "").await;
        assert_eq!(found, status, "{site}: {response}");
    }
    let form = format!("what=retry&of={}&seen={}", page_under_test.cell, effects_digest(&shown));
    let attacker = ("host", "attacker.test:81");
    let foreign: &[(&[(&str, &str)], u16)] = &[
        (&[HERE, FORM], 403),
        (&[HERE, FORM, ("sec-fetch-site", "cross-site")], 403),
        (&[HERE, FORM, ("sec-fetch-site", "same-site"), ("origin", "http://localhost:81")], 403),
        (&[HERE, FORM, ("origin", "http://attacker.test")], 403),
        (&[HERE, FORM, ("origin", "null")], 403),
        // An attacker's name that resolves to this machine: the browser considers the request same-origin.
        (&[attacker, FORM, OWN], 403),
        (&[HERE, FORM, OWN, ("x-forwarded-for", "203.0.113.1")], 403),
        (&[HERE, FORM, OWN, ("x-real-ip", "203.0.113.1")], 403),
        (&[HERE, FORM, OWN, ("x-forwarded-host", "farrier.example")], 403),
        (&[HERE, FORM, OWN, ("true-client-ip", "203.0.113.1")], 403),
        (&[HERE, OWN, ("content-type", "text/plain")], 415),
        (&[HERE, OWN], 415),
    ];
    for (headers, status) in foreign {
        let (found, response) = page_under_test.ask("POST", "/do", headers, &form).await;
        assert_eq!(found, *status, "{headers:?}: {response}");
    }
    let forms: [(&str, u16); 9] = [
        ("", 400),
        ("what=reboot&of=x", 400),
        ("what=retry&of=c%2F0123456789abcdef.html", 409),
        ("what=pause&of=kube-system%2Fmft", 409),
        ("what=restore&of=..%2F..", 409),
        (&format!("what=retry&of={}&seen=0000000000000000", page_under_test.cell), 409),
        (&format!("what=retry&of={}", page_under_test.cell), 409),
        (&format!("what=prebuild&of={}&seen=", page_under_test.cell), 409),
        (&format!("what=retry&of={}&seen={}", page_under_test.cell, "0".repeat(5000)), 413),
    ];
    for (form, status) in forms {
        let (found, response) = page_under_test.ask("POST", "/do", &[HERE, FORM, OWN], form).await;
        assert_eq!(found, status, "{form}: {response}");
    }
    for method in ["PUT", "DELETE", "PATCH"] {
        assert_eq!(page_under_test.ask(method, "/do", &[HERE, FORM, OWN], &form).await.0, 405, "{method}");
    }
    assert!(page_under_test.has_failure());
}

#[tokio::test]
async fn unauthorized_users_see_no_actions_and_are_rejected() {
    let page_under_test = TestPage::new(false).await;
    let page = format!("/{}", page_under_test.cell);
    let others: [&[(&str, &str)]; 3] =
        [&[HERE], &[HERE, ("authorization", "Bearer abc")], &[("host", "farrier:8080")]];
    for headers in others {
        let (status, cell) = page_under_test.ask("GET", &page, headers, "").await;
        assert!(status == 200 && !cell.contains("do?what"), "{cell}");
        let address = format!("/do?what=retry&of={}", page_under_test.cell);
        let (status, response) = page_under_test.ask("GET", &address, headers, "").await;
        assert!(
            status == 403 && response.contains("actions require a direct request to a loopback port"),
            "{response}"
        );
    }
    // Without the option there are no routes for actions.
    let page = PageServer::new(page_under_test.bench.services.clone(), "cluster c1".to_owned(), None);
    for method in ["GET", "POST"] {
        let request = Request::builder().method(method).uri("/do").body(Body::empty()).unwrap();
        let response = tower::Service::call(&mut page.router(), request).await.unwrap();
        assert_eq!(response.status().as_u16(), 404);
    }
}

#[tokio::test]
async fn a_prebuild_publishes_the_image() {
    let bench = Bench::new(&serde_json::json!({"reuse": "compatible"}));
    // The image published for one kernel loads on the other, so this build needs no engine.
    bench.publish(K9, &[&module()]).await.unwrap();
    let cluster = InMemory::new(|state| state.node("n0", K10));
    let reconcile_request = Arc::<Notify>::default();
    let services = bench.services.clone();
    let acts: Arc<dyn Cluster> = Arc::<InMemory>::clone(&cluster);
    let actions = Actions::new(services.clone(), acts, None, true, Arc::clone(&reconcile_request));
    let page = PageServer::new(services.clone(), "cluster c1".to_owned(), Some(Arc::clone(&actions)));
    let planned = observe_and_plan(&services, cluster.as_ref()).await.unwrap();
    let found = planned.plan.cells.iter().find(|cell| cell.target.release.as_str() == K10).unwrap();
    let cell = cell_link(&found.image, &found.target);
    page.reconciled(&ReconcileView {
        plan: Arc::new(planned.plan),
        snapshot: Arc::new(planned.snapshot),
        definitions: Arc::new(services.definitions.clone()),
        activity: Activity::new(),
        live: Activity::new().into(),
        rollouts: Vec::new(),
        configuration_error: None,
        now: jiff::Timestamp::UNIX_EPOCH,
    })
    .await;
    let page_under_test = TestPage { bench, page, cell, _directory: tempfile::tempdir().unwrap() };
    let address = format!("/do?what=prebuild&of={}", page_under_test.cell);
    let (status, shown) = page_under_test.ask("GET", &address, &[HERE], "").await;
    assert!(
        status == 200 && shown.contains("farrier builds and checks the image now, and publishes it as "),
        "{shown}"
    );
    let form = format!("what=prebuild&of={}&seen={}", page_under_test.cell, effects_digest(&shown));
    let (status, done) = page_under_test.ask("POST", "/do", &[HERE, FORM, OWN], &form).await;
    assert_eq!(status, 303, "{done}");
    // The second request arrives while the first build runs, or after its end.
    let (again, response) = page_under_test.ask("POST", "/do", &[HERE, FORM, OWN], &form).await;
    assert!(again == 303 || response.contains("another image is being built"), "{response}");
    actions.finish().await;
    let annotations = page_under_test.bench.annotations(K10).await;
    assert_eq!(annotations["farrier.dev/kernel-release"], K10);
    reconcile_request.notified().await;
    let planned = observe_and_plan(&services, cluster.as_ref()).await.unwrap().plan;
    assert!(planned.cells.iter().all(|cell| matches!(cell.outcome, Outcome::UpToDate { .. })), "{planned:?}");
}
