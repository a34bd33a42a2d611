//! `farrier doctor` with external services: a real registry, apt's own archive, and servers with a wrong clock.

use jiff::{SignedDuration, Timestamp, fmt::rfc2822::DateTimePrinter};
use serde_json::Value;

use crate::support::{
    certificates::{Authority, LATER, PAST},
    fake_http::{Answer, FakeHttp, answer},
    kube_api::objects::node,
    live::Live,
    rpm_repository::SigningKey,
    site::{Run, Site},
};

const KERNEL: &str = "6.1.0-901-amd64";

/// Returns an answer from a server whose clock is `ahead` seconds ahead.
fn at(status: u16, ahead: i64) -> Answer {
    let then = Timestamp::now() + SignedDuration::from_secs(ahead);
    answer(status, "").header("Date", DateTimePrinter::new().timestamp_to_rfc9110_string(&then).unwrap())
}

/// Creates a site with this `spec` in its `site.yaml` and without a cluster.
fn site(spec: &str) -> Site {
    let site = Site::new();
    site.define(
        "site.yaml",
        &format!("apiVersion: farrier.dev/v1alpha1\nkind: Site\nmetadata: {{name: here}}\nspec:\n{spec}"),
    );
    site
}

fn mirror(from: &str, to: &str) -> String {
    format!("  mirrors: [{{from: 'https://{from}.test/', to: ['http://{to}']}}]\n")
}

/// Runs doctor without a cluster and returns each check's name, its result and its text.
async fn doctor(
    site: Site,
    args: &[&str],
    variables: &[(&str, &str)],
    code: i32,
) -> Vec<(String, bool, String)> {
    let mut command = site.command(&[&["doctor", "-o", "json"], args].concat());
    command.env_remove("FARRIER_CLUSTER").envs(variables.iter().copied());
    let run = tokio::task::spawn_blocking(move || (Run::of(command.spawn().unwrap()), site)).await.unwrap().0;
    let found = run.exits(code).json();
    let text = |found: &Value, name: &str| found[name].as_str().unwrap_or_default().to_owned();
    let all = found.as_array().unwrap().iter();
    let all = all.map(|found| {
        let says = format!("{} -> {}", text(found, "says"), text(found, "hint"));
        (text(found, "check"), found["ok"].as_bool().unwrap(), says)
    });
    all.collect()
}

#[track_caller]
fn only<'a>(found: &'a [(String, bool, String)], check: &str, ok: bool) -> Vec<&'a str> {
    let of_check = found.iter().filter(|(name, is_ok, _)| name == check && *is_ok == ok);
    let says: Vec<&str> = of_check.map(|(_, _, says)| says.as_str()).collect();
    assert!(!says.is_empty(), "no {check} with result {ok} in {found:#?}");
    says
}

/// A site's kernel family for which the archive is the only host.
const FAMILY: &str = "apiVersion: farrier.dev/v1alpha1\nkind: KernelFamily\nmetadata: {name: own}\nspec:\n  match: {os: own}\n  \
                      headers: {tarball: {path: h}}\n  toolchain: {bootstrap: {suite: SUITE, include: [make]}}\n";

#[tokio::test(flavor = "multi_thread")]
async fn a_mirror_whose_clock_is_wrong_is_named() {
    let late = FakeHttp::start(vec![at(404, -7325)]).await;
    let host = late.host.clone();
    let found = doctor(site(&mirror("files", &host)), &[], &[], 1).await;
    let clock = only(&found, "clock", false);
    assert!(clock.len() == 1 && clock[0].starts_with(&format!("the clock of {host} is 2h 2m ")), "{clock:?}");
    assert!(
        clock[0].contains(" behind this machine's -> set the clock there, or this machine's"),
        "{clock:?}"
    );
    assert_eq!(only(&found, "network", true), [format!("answered: {host} -> ")]);
    let asked = &late.requests()[0];
    assert_eq!((asked.method.as_str(), asked.header("cache-control")), ("HEAD", Some("no-cache")));
}

#[tokio::test(flavor = "multi_thread")]
async fn where_all_clocks_differ_it_is_this_machine_s() {
    // A response from a cache carries the time of the original response, here an hour ago.
    let (one, two) = (
        FakeHttp::start(vec![at(200, 300)]).await,
        FakeHttp::start(vec![at(200, -3300).header("Age", 3600)]).await,
    );
    let mirrors = format!(
        "  mirrors: [{{from: 'https://files.test/', to: ['http://{}', 'http://{}']}}]\n",
        one.host, two.host
    );
    let site = site(&mirrors);
    let layout = format!("oci:{}", site.path("layout").display());
    let found = doctor(site, &["--registry", &layout], &[], 1).await;
    let clock = only(&found, "clock", false);
    assert_eq!(clock.len(), 2, "{clock:?}");
    for says in clock {
        assert!(says.contains(" is 4m 5") || says.contains(" is 5m"), "{says}");
        assert!(says.ends_with("ahead of this machine's -> all other clocks agree: set this machine's clock (timedatectl set-ntp true)"), "{says}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_does_not_answer_is_named_with_what_to_do() {
    let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let found = doctor(site(&mirror("files", &nobody.to_string())), &[], &[], 3).await;
    let network = only(&found, "network", false);
    assert!(network[0].starts_with(&format!("cannot reach {nobody}: ")), "{network:?}");
    assert!(network[0].contains("(`proxy` in site.yaml)"), "{network:?}");
    // Only the registry reports a time.
    assert_eq!(only(&found, "clock", true).len(), 1);

    // The source must exist, and may require a login.
    for (status, hint) in [
        (404, "check the address"),
        (401, "`login` of the host in site.yaml"),
        (503, "(`proxy` in site.yaml)"),
    ] {
        let server = FakeHttp::start(vec![answer(status, "")]).await;
        let site = Site::new();
        let image = std::fs::read_to_string(site.definitions().join("images/hello.yaml")).unwrap();
        let from = format!("url: {{url: 'http://{}/hello.tar', sha256: '{:064}'}}", server.host, 0);
        let image = image.replace("path: {path: sources/hello}", &from);
        site.define("images/hello.yaml", &image);
        let found = doctor(site, &[], &[], if status == 503 { 3 } else { 1 }).await;
        let network = only(&found, "network", false);
        assert!(network[0].contains(&format!("/hello.tar: the server answers {status} -> ")), "{network:?}");
        assert!(network[0].contains(hint), "{network:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn it_goes_through_the_proxy_and_asks_nobody_who_is_forbidden() {
    let proxy = FakeHttp::start(vec![at(200, 0)]).await;
    let address = format!("http://{}", proxy.host);
    let found = doctor(site(&mirror("files", "mirror.test")), &[], &[("http_proxy", &address)], 0).await;
    assert_eq!(only(&found, "network", true), ["answered: mirror.test:80 -> "]);
    assert_eq!(proxy.requests()[0].target, "http://mirror.test/");

    let site = Site::new();
    site.define("kernels/own.yaml", &FAMILY.replace("SUITE", "bookworm"));
    let found = doctor(site, &["--offline"], &[], 0).await;
    let network = only(&found, "network", true);
    assert!(network[0].starts_with("skipped because of --offline: "), "{network:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn apt_says_whether_its_archive_has_the_suites() {
    let with = |suite: &str| {
        let site = Site::new();
        site.define("kernels/own.yaml", &FAMILY.replace("SUITE", suite));
        site
    };
    let found = doctor(with("bookworm"), &[], &[], 0).await;
    assert!(only(&found, "network", true)[0].starts_with("answered: "), "{found:?}");
    let found = doctor(with("no-such-suite"), &[], &[], 1).await;
    let network = only(&found, "network", false);
    assert!(
        network[0].contains("look for suite no-such-suite at ") && network[0].contains("404"),
        "{network:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_near_its_end_is_named() {
    // The authority's own certificate is valid for two days.
    let authority = Authority::new();
    authority.issue("client", "DNS:farrier.test", LATER);
    authority.issue("old", "DNS:farrier.test", PAST);
    let client = |name: &str| {
        let (certificate, key) =
            (authority.path(&format!("{name}.pem")), authority.path(&format!("{name}.key")));
        format!("clientCertificate: {}, clientKey: {{file: {}}}", certificate.display(), key.display())
    };
    let hosts = |words: &str| site(&format!("  hosts: [{{host: r.test, {words}}}]\n"));
    let found = doctor(hosts(&client("client")), &[], &[], 0).await;
    assert_eq!(only(&found, "certificates", true), ["1, the first expires at 2049-12-31T00:00:00Z -> "]);
    for (words, wanted) in [
        (client("old"), "clientCertificate of r.test: it expired at 2020-01-02T00:00:00Z"),
        (format!("caFile: {}", authority.ca_file().display()), "caFile of r.test: it expires at 20"),
    ] {
        let found = doctor(hosts(&words), &[], &[], 1).await;
        let says = only(&found, "certificates", false);
        assert!(says[0].starts_with(wanted) && says[0].contains("restart farrier"), "{says:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_of_a_repository_near_its_end_is_named() {
    let site = site("  {}\n");
    site.define(
        "kernels/own.yaml",
        "apiVersion: farrier.dev/v1alpha1\nkind: KernelFamily\nmetadata: {name: own}\nspec:\n  match: {os: own}\n  headers:\n    rpm:\n      \
         packages: [kernel-devel]\n      from: {signedBy: keys/own.asc, repositories: [{url: 'https://own.invalid/'}]}\n  \
         toolchain: {rpm: {packages: [gcc]}}\n",
    );
    site.define("keys/own.asc", &SigningKey::lasting("own", "2d").armored());
    let found = doctor(site, &[], &[], 1).await;
    let says = only(&found, "certificates", false);
    assert!(says.len() == 1 && says[0].starts_with("signedBy keys/own.asc: it expires at 20"), "{says:?}");
}

#[test]
fn a_dynamic_runner_is_reported_before_a_pod_cannot_start_it() {
    let live = Live::new([node("n0", KERNEL)], "image");
    let mut command = live.command(&["doctor", "--engine", "kubernetes"]);
    let run = Run::of(command.env("FARRIER_RUNNER", "/bin/sh").spawn().unwrap());
    let found = run.line("cannot use /bin/sh as a static program: it is linked dynamically");
    assert!(found.starts_with("engine ") && found.contains(" wrong "), "{run}");
}

#[test]
fn the_api_server_tells_the_time_too() {
    let live = Live::new([node("n0", KERNEL)], "image");
    let doctor = || Run::of(live.command(&["doctor"]).spawn().unwrap());
    let right = doctor();
    assert!(right.line("less than a minute from the clock of").contains("the API server"), "{right}");
    live.api.set_clock(-90 * 60);
    let wrong = doctor().exits(1);
    let says = wrong.line("the clock of the API server is 1h 30m");
    assert!(says.starts_with("clock") && says.contains("behind this machine's"), "{wrong}");
}
