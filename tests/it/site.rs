//! A site's network with real components: Debian's docker-registry with mutual TLS, mirrors, a counting proxy, and `--offline`.

use std::{fs, net::TcpListener as StdListener, path::Path, process::Command};

use farrier_core::{
    facts::media_type,
    image::{Digest, Repository, SourceSpec, Version},
    site::SiteSpec,
};
use farrier_inputs::{FetchError, FetchOptions, Fetcher, PackageRoot};
use farrier_local::cache::Cache;
use farrier_net::{Net, NetError, NetOptions};
use farrier_store::registry::{self, Registry, RegistryError, RegistryOptions, RemoteRegistry};

use crate::support::{
    certificates::{Authority, LATER, PAST, tls},
    fake_http::{FakeHttp, answer},
    registry_process::{RegistryProcess, Wants},
    tls_archive::{Deb, TlsArchive},
    tunnels::Tunnels,
};
use oci::error_chain;
use serde_json::json;

const ALL_NAMES: &str = "IP:127.0.0.1, IP:0.0.0.0, DNS:registry.test";

fn net(site: serde_json::Value, root: &Path, offline: bool) -> Net {
    let site: SiteSpec = serde_json::from_value(site).unwrap();
    Net::new(NetOptions { site, root: root.to_owned(), offline, ..NetOptions::default() }).unwrap()
}

fn registry(net: &Net) -> RemoteRegistry {
    let options = RegistryOptions { net: net.clone(), ..RegistryOptions::default() };
    RemoteRegistry::new("test".to_owned(), &options)
}

/// Returns a registry client without any configuration.
fn plain() -> RemoteRegistry {
    registry(&Net::default())
}

fn repository(text: impl AsRef<str>) -> Repository {
    text.as_ref().parse().unwrap()
}

fn tag(text: &str) -> Version {
    Version::Tag(text.parse().unwrap())
}

/// Pushes an artifact of one blob, and returns the digests of the manifest and the blob.
async fn publish(registry: &RemoteRegistry, repository: &Repository, content: &[u8]) -> (Digest, Digest) {
    registry.push_bytes(repository, content).await.unwrap();
    registry.push_bytes(repository, b"{}").await.unwrap();
    let blob = Digest::of(content);
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": media_type::OCI_MANIFEST,
        "config": {"mediaType": "application/vnd.oci.empty.v1+json", "digest": Digest::of(b"{}").as_str(), "size": 2},
        "layers": [{"mediaType": "application/octet-stream", "digest": blob.as_str(), "size": content.len()}],
    });
    let bytes = manifest.to_string().into_bytes();
    let pushed =
        registry.push_manifest(repository, &tag("1"), media_type::OCI_MANIFEST, &bytes).await.unwrap();
    (pushed, blob)
}

#[tokio::test]
async fn mutual_tls() {
    let (ours, other) = (Authority::new(), Authority::new());
    ours.issue("server", ALL_NAMES, LATER);
    ours.issue("client", "DNS:farrier.test", LATER);
    ours.issue("old-client", "DNS:farrier.test", PAST);
    other.issue("client", "DNS:farrier.test", LATER);
    let server = RegistryProcess::start_with_tls(&tls(&ours, "server", Some(&ours.ca_file())));
    let drivers = repository(format!("{}/drivers/x", server.host));
    let list_tags = async |client: Option<(&Authority, &str)>| {
        let mut host = json!({"host": server.host, "caFile": "ca.pem"});
        if let Some((authority, name)) = client {
            host["clientCertificate"] = json!(authority.path(&format!("{name}.pem")));
            host["clientKey"] = json!({"file": authority.path(&format!("{name}.key"))});
        }
        let net = net(json!({"hosts": [host]}), ours.directory.path(), false);
        registry(&net).tags(&drivers).await
    };
    assert_eq!(list_tags(Some((&ours, "client"))).await.unwrap(), []);
    for client in [None, Some((&ours, "old-client")), Some((&other, "client"))] {
        let error = list_tags(client).await.unwrap_err();
        assert!(!error.is_transient(), "{}", error_chain(&error));
        let hint = registry::hint(&error).unwrap();
        let wanted = format!("set `clientCertificate` and `clientKey` of {} in site.yaml", server.host);
        assert!(hint.starts_with(&wanted), "{hint}: {}", error_chain(&error));
    }
    // An invalid key and a key of another certificate are reported before farrier sends a request.
    let broken = ours.path("broken.pem");
    fs::write(&broken, "no key").unwrap();
    for key in [broken, ours.path("server.key")] {
        let host = json!({"host": server.host, "caFile": "ca.pem", "clientCertificate": ours.path("client.pem"),
                          "clientKey": {"file": key}});
        let net = net(json!({"hosts": [host]}), ours.directory.path(), false);
        let error = registry(&net).tags(&drivers).await.unwrap_err();
        assert!(matches!(error, RegistryError::Options(..)) && !error.is_transient(), "{error:?}");
        assert!(
            error.to_string().starts_with(&format!("site.yaml, host {}: client", server.host)),
            "{error}"
        );
    }
}

#[tokio::test]
async fn hints_explain_a_bad_server_certificate() {
    let ours = Authority::new();
    ours.issue("expired", ALL_NAMES, PAST);
    ours.issue("elsewhere", "DNS:elsewhere.test", LATER);
    ours.issue("good", ALL_NAMES, LATER);
    for (certificate, trusted, wanted) in [
        ("expired", true, "renew the certificate of "),
        ("elsewhere", true, "use a host name that the certificate contains"),
        ("good", false, "if your own authority issued the certificate of "),
    ] {
        let server = RegistryProcess::start_with_tls(&tls(&ours, certificate, None));
        let hosts = if trusted { json!([{"host": "127.0.0.1", "caFile": "ca.pem"}]) } else { json!([]) };
        let net = net(json!({"hosts": hosts}), ours.directory.path(), false);
        let error = registry(&net).tags(&repository(format!("{}/x", server.host))).await.unwrap_err();
        assert!(!error.is_transient(), "{}", error_chain(&error));
        let hint = registry::hint(&error).unwrap();
        assert!(hint.contains(wanted), "{certificate}: {hint}: {}", error_chain(&error));
    }
}

#[tokio::test]
async fn the_very_certificate_in_the_ca_file_is_accepted_for_its_names_and_in_its_time() {
    let ours = Authority::new();
    ours.self_signed("own", ALL_NAMES, LATER);
    ours.self_signed("other", ALL_NAMES, LATER);
    ours.self_signed("expired", ALL_NAMES, PAST);
    ours.self_signed("elsewhere", "DNS:elsewhere.test", LATER);
    for (certificate, trusted, wanted) in [
        ("own", "own", None),
        ("own", "other", Some("if your own authority issued the certificate of ")),
        ("own", "ca", Some("if your own authority issued the certificate of ")),
        ("expired", "expired", Some("renew the certificate of ")),
        ("elsewhere", "elsewhere", Some("use a host name that the certificate contains")),
    ] {
        let server = RegistryProcess::start_with_tls(&tls(&ours, certificate, None));
        let ca_file = ours.path(&format!("{trusted}.pem"));
        let of_host = json!({"hosts": [{"host": "127.0.0.1", "caFile": ca_file}]});
        let everywhere = NetOptions { ca_file: Some(ca_file.clone()), ..NetOptions::default() };
        for net in [net(of_host, ours.directory.path(), false), Net::new(everywhere).unwrap()] {
            let found = registry(&net).tags(&repository(format!("{}/x", server.host))).await;
            let hint = found.err().map(|error| registry::hint(&error).unwrap());
            match wanted {
                None => assert_eq!(hint, None),
                Some(wanted) => assert!(hint.as_ref().unwrap().contains(wanted), "{trusted}: {hint:?}"),
            }
        }
    }
}

#[tokio::test]
async fn mirrors_stand_in_for_a_host_that_does_not_exist() {
    let (empty, full) = (RegistryProcess::start(Wants::default()), RegistryProcess::start(Wants::default()));
    let mut gone = RegistryProcess::start(Wants::default());
    gone.stop();
    let content = b"a base image's layer";
    let (digest, blob) =
        publish(&plain(), &repository(format!("{}/hub/library/debian", full.host)), content).await;
    let site = json!({"mirrors": [
        {"from": "docker.io", "to": [gone.host]},
        {"from": "docker.io/library", "to": [
            format!("{}/hub/library", gone.host),
            format!("{}/hub/library", empty.host),
            format!("{}/hub/library", full.host)
        ]}
    ]});
    let directory = tempfile::tempdir().unwrap();
    // Offline: farrier must not even resolve Docker Hub itself.
    let reader = registry(&net(site, directory.path(), true));
    let short = repository("debian");
    let found = reader.manifest(&short, &tag("1")).await.unwrap().unwrap();
    assert_eq!(found.digest, digest);
    let out = directory.path().join("layer");
    reader.fetch_blob(&short, &blob, u64::MAX, &out).await.unwrap();
    assert_eq!(fs::read(&out).unwrap(), content);
    assert!(reader.has_blob(&short, &blob).await.unwrap());
    assert_eq!(reader.tags(&short).await.unwrap().len(), 1);
    assert!(empty.requests("GET") > 0, "farrier did not contact the empty mirror");
    // An unreachable mirror may contain what the others lack.
    let error = reader.manifest(&short, &tag("2")).await.unwrap_err();
    assert!(error.is_unreachable(), "{error:?}");
    // farrier reads its own images from the registry that it publishes to, not from a mirror.
    let rule = json!({"mirrors": [{"from": full.host, "to": [gone.host]}]});
    let publisher =
        registry(&net(rule, directory.path(), false)).publishing_below(format!("{}/hub", full.host));
    let own = repository(format!("{}/hub/library/debian", full.host));
    assert_eq!(publisher.manifest(&own, &tag("1")).await.unwrap().unwrap().digest, digest);
}

#[tokio::test]
async fn a_mirror_that_returns_a_wrong_digest_is_skipped() {
    let liar = FakeHttp::start(vec![answer(200, "something else"), answer(200, "something else")]).await;
    let honest = FakeHttp::start(vec![answer(200, "what was asked for")]).await;
    let (wanted, directory) = (Digest::of(b"what was asked for"), tempfile::tempdir().unwrap());
    let out = directory.path().join("blob");
    let error = plain()
        .fetch_blob(&repository(format!("{}/x", liar.host)), &wanted, u64::MAX, &out)
        .await
        .unwrap_err();
    assert!(
        matches!(&error, RegistryError::Digest { actual, .. } if *actual == Digest::of(b"something else"))
    );
    assert!(!out.exists(), "content with a wrong digest was kept");
    let site = json!({"mirrors": [{"from": "r.test", "to": [liar.host, honest.host]}]});
    let reader = registry(&net(site, directory.path(), true));
    reader.fetch_blob(&repository("r.test/x"), &wanted, u64::MAX, &out).await.unwrap();
    assert_eq!(fs::read(&out).unwrap(), b"what was asked for");
}

#[tokio::test]
async fn proxy_and_the_hosts_that_bypass_it() {
    let ours = Authority::new();
    ours.issue("server", ALL_NAMES, LATER);
    let server = RegistryProcess::start_with_tls(&tls(&ours, "server", None));
    let port = server.host.rsplit(':').next().unwrap();
    let proxy = Tunnels::start(server.host.clone()).await;
    let list_tags = async |host: &str, no_proxy: serde_json::Value, password: &str| {
        fs::write(ours.directory.path().join("password"), format!("{password}\n")).unwrap();
        let login = json!({"user": "me", "password": {"file": "password"}});
        let site = json!({
            "proxy": {"https": format!("http://{}", proxy.host), "noProxy": no_proxy, "login": login},
            "hosts": [{"host": host, "caFile": "ca.pem"}],
        });
        let net = net(site, ours.directory.path(), true);
        registry(&net).tags(&repository(format!("{host}:{port}/x"))).await
    };
    // A name that only the proxy resolves, and an address of this machine outside of loopback.
    for (at, host) in ["registry.test", "0.0.0.0"].into_iter().enumerate() {
        assert_eq!(list_tags(host, json!([]), "secret").await.unwrap(), []);
        assert_eq!(proxy.opened(), at + 1);
    }
    assert_eq!(list_tags("0.0.0.0", json!(["0.0.0.0/8"]), "secret").await.unwrap(), []);
    assert_eq!(list_tags("127.0.0.1", json!([]), "secret").await.unwrap(), []);
    assert_eq!(proxy.opened(), 2, "farrier used the proxy for loopback or a host in noProxy");
    let error = list_tags("registry.test", json!([]), "wrong").await.unwrap_err();
    assert!(!error_chain(&error).contains("wrong"), "{}", error_chain(&error));
    let says = registry::hint(&error).unwrap();
    assert!(error.is_transient() && says.starts_with("check that the proxy is running"), "{says}");

    // With --offline, the environment's proxy needs permission like any other host.
    let environment = serde_json::from_value(json!({"https": format!("http://{}", proxy.host)})).unwrap();
    let site = serde_json::from_value(json!({"hosts": [{"host": "registry.test"}]})).unwrap();
    let options = NetOptions { site, environment, offline: true, ..NetOptions::default() };
    let error = registry(&Net::new(options).unwrap()).tags(&repository("registry.test/x")).await.unwrap_err();
    let wanted =
        format!("list tags of x, through the environment's proxy, needs {}, which --offline", proxy.host);
    assert!(error.to_string().starts_with(&wanted), "{error}");
}

/// A local host that must not receive a request.
struct Forbidden {
    host: String,
    listener: StdListener,
}

impl Forbidden {
    fn new() -> Self {
        let listener = StdListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        Self { host: listener.local_addr().unwrap().to_string(), listener }
    }

    /// Asserts that no client has connected.
    fn assert_not_contacted(&self) {
        let error = self.listener.accept().unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
    }
}

#[track_caller]
fn assert_forbidden_offline(error: &RegistryError, host: &str, request: &str) {
    assert!(registry::is_forbidden(error), "{error:?}");
    let wanted = format!("{request} needs {host}, which --offline forbids: no configuration names it");
    assert_eq!(error.to_string(), wanted);
    assert!(
        registry::hint(error).unwrap().contains(&format!("add `- host: {host}` to `hosts` in site.yaml"))
    );
    assert!(!error.is_transient());
}

#[tokio::test]
async fn offline_a_registry_cannot_redirect_to_an_unnamed_host() {
    let (forbidden, directory) = (Forbidden::new(), tempfile::tempdir().unwrap());
    let elsewhere = format!("http://{}/blob", forbidden.host);
    let realm = format!("Bearer realm=\"http://{}/token\",service=\"x\"", forbidden.host);
    let fake = FakeHttp::start(vec![
        answer(307, "").header("location", &elsewhere),
        answer(401, "").header("www-authenticate", &realm),
        answer(404, ""),
        answer(202, "").header("location", &elsewhere),
    ])
    .await;
    let named = net(json!({"hosts": [{"host": fake.host}]}), directory.path(), true);
    let (registry, drivers) = (registry(&named), repository(format!("{}/drivers/x", fake.host)));
    let (digest, out) = (Digest::of(b"x"), directory.path().join("x"));

    let error = registry.fetch_blob(&drivers, &digest, u64::MAX, &out).await.unwrap_err();
    let redirect_note = format!("(redirected by {})", fake.host);
    assert_forbidden_offline(
        &error,
        &forbidden.host,
        &format!("fetch blob {digest} of drivers/x {redirect_note}"),
    );
    let error = registry.tags(&drivers).await.unwrap_err();
    assert_forbidden_offline(
        &error,
        &forbidden.host,
        &format!("list tags of drivers/x (token) {redirect_note}"),
    );
    let error = registry.push_bytes(&drivers, b"x").await.unwrap_err();
    assert_forbidden_offline(
        &error,
        &forbidden.host,
        &format!("push blob {digest} to drivers/x {redirect_note}"),
    );
    let unnamed = repository(format!("{}/drivers/x", forbidden.host));
    let error = registry.manifest(&unnamed, &tag("1")).await.unwrap_err();
    assert_forbidden_offline(&error, &forbidden.host, "fetch manifest of drivers/x:1");
    forbidden.assert_not_contacted();
    assert_eq!(fake.requests().len(), 4);
}

fn source(url: &str, content: &[u8]) -> SourceSpec {
    let digest = Digest::of(content);
    serde_json::from_value(json!({"name": "ofed", "from": {"url": {"url": url, "sha256": digest.hex()}}}))
        .unwrap()
}

#[tokio::test]
async fn sources_come_from_mirrors_and_offline_from_nowhere_else() {
    let directory = tempfile::tempdir().unwrap();
    let cache = Cache::open(directory.path().join("cache")).unwrap();
    let fetcher = |net: &Net| Fetcher::new(cache.clone(), FetchOptions::default()).with_net(net.clone());
    let forbidden = Forbidden::new();
    let address = format!("http://{}/pub/x.txt?raw=1", forbidden.host);
    let error =
        fetcher(&net(json!({}), directory.path(), true)).sources().fetch(&source(&address, b"text")).await;
    let error = error.unwrap_err();
    assert!(matches!(error, FetchError::Net(NetError::Offline { .. })), "{error:?}");
    let wanted =
        format!("source ofed needs {}, which --offline forbids: no configuration names it", forbidden.host);
    assert_eq!(error.to_string(), wanted);

    let first = FakeHttp::start(vec![answer(404, "")]).await;
    let second = FakeHttp::start(vec![answer(200, "text")]).await;
    let rules = json!({"mirrors": [{
        "from": format!("http://{}/pub/", forbidden.host),
        "to": [format!("http://{}/files", first.host), format!("http://{}", second.host)],
    }]});
    let mirrored = fetcher(&net(rules, directory.path(), true));
    let found = mirrored.sources().fetch(&source(&address, b"text")).await.unwrap();
    assert_eq!(fs::read(found.root.join("x.txt")).unwrap(), b"text");
    assert_eq!(first.requests()[0].target, "/files/x.txt?raw=1");
    assert_eq!(second.requests()[0].target, "/x.txt?raw=1");
    // The mirror is not part of the content's identity.
    assert!(!found.origin.contains(&second.host), "{}", found.origin);

    // A redirect to another host needs permission like the first host.
    let redirecting = FakeHttp::start(vec![answer(302, "").header("location", &address)]).await;
    let named = fetcher(&net(json!({"hosts": [{"host": redirecting.host}]}), directory.path(), true));
    let address = format!("http://{}/y", redirecting.host);
    let error = named.sources().fetch(&source(&address, b"other")).await.unwrap_err();
    let wanted = format!("source ofed (redirected by {}) needs {}, which", redirecting.host, forbidden.host);
    assert!(error.to_string().starts_with(&wanted), "{error}");
    forbidden.assert_not_contacted();
}

/// farrier sends a download's password only to the host that the source names: not to another host after a redirect, and not to
/// the password's own host when another host redirects there.
#[tokio::test]
async fn a_download_password_does_not_follow_redirects() {
    let directory = tempfile::tempdir().unwrap();
    let cache = Cache::open(directory.path().join("cache")).unwrap();
    fs::write(directory.path().join("password"), "secret\n").unwrap();
    let elsewhere = FakeHttp::start(vec![answer(200, "two")]).await;
    let target = format!("http://{}/two.txt", elsewhere.host);
    let private = FakeHttp::start(vec![
        answer(200, "one"),
        answer(302, "").header("location", "/moved.txt"),
        answer(302, "").header("location", &target),
        answer(200, "three"),
    ])
    .await;
    let target = format!("http://{}/three.txt", private.host);
    let redirecting = FakeHttp::start(vec![answer(302, "").header("location", &target)]).await;
    let host = json!({"host": private.host, "login": {"user": "me", "password": {"file": "password"}}});
    let net = net(json!({"hosts": [host]}), directory.path(), false);
    let fetcher = Fetcher::new(cache, FetchOptions::default()).with_net(net);
    for (host, name, content) in [
        (&private.host, "one", "one"),
        (&private.host, "sent-on", "two"),
        (&redirecting.host, "three", "three"),
    ] {
        let source = source(&format!("http://{host}/{name}.txt"), content.as_bytes());
        fetcher.sources().fetch(&source).await.unwrap();
    }
    let authorizations: Vec<_> =
        private.requests().iter().map(|r| r.header("authorization").map(str::to_owned)).collect();
    // base64 of "me:secret".
    let login = Some("Basic bWU6c2VjcmV0".to_owned());
    assert_eq!(authorizations, [login.clone(), login.clone(), login, None]);
    assert_eq!(elsewhere.requests()[0].header("authorization"), None);
    assert_eq!(redirecting.requests()[0].header("authorization"), None);
}

#[tokio::test]
async fn offline_apt_and_mmdebstrap_are_not_started_for_hosts_that_nothing_names() {
    let directory = tempfile::tempdir().unwrap();
    let cache = Cache::open(directory.path().join("cache")).unwrap();
    let forbidden = Forbidden::new();
    let net = net(json!({}), directory.path(), true);
    let fetcher = Fetcher::new(cache, FetchOptions::default()).with_net(net);
    let mirror = format!("http://{}/debian", forbidden.host);
    let apt = json!({"name": "x", "from": {"apt": {"package": "x-dkms", "suites": ["bookworm"], "mirror": mirror}}});
    let apt: SourceSpec = serde_json::from_value(apt).unwrap();
    let error = fetcher.sources().identity(&apt).await.unwrap_err();
    let wanted = |who: &str| {
        format!("apt for {who} needs {}, which --offline forbids: no configuration names it", forbidden.host)
    };
    assert_eq!(error.to_string(), wanted("suite bookworm"));
    let spec: farrier_core::kernel::BootstrapSpec =
        serde_json::from_value(json!({"suite": "bookworm", "include": ["make"], "mirror": mirror})).unwrap();
    for (root, who) in [
        (PackageRoot::Toolchain(spec.clone()), "suite bookworm"),
        (PackageRoot::RuntimeBase(spec), "a root file system of bookworm"),
    ] {
        let made = fetcher.root_fs().bootstrap(&root, farrier_core::kernel::Architecture::Amd64).await;
        assert_eq!(made.unwrap_err().to_string(), wanted(who));
    }
    forbidden.assert_not_contacted();
}

/// Checks the requests that the proxy received from apt.
#[tokio::test]
async fn apt_goes_through_the_sites_proxy() {
    let directory = tempfile::tempdir().unwrap();
    let cache = Cache::open(directory.path().join("cache")).unwrap();
    let proxy = FakeHttp::start(vec![answer(404, ""); 20]).await;
    let site = json!({"proxy": {"http": format!("http://{}", proxy.host)}});
    let fetcher = Fetcher::new(cache, FetchOptions::default()).with_net(net(site, directory.path(), false));
    let apt = json!({"name": "x", "from": {"apt":
        {"package": "x-dkms", "suites": ["bookworm"], "mirror": "http://archive.test/debian"}}});
    let apt: SourceSpec = serde_json::from_value(apt).unwrap();
    assert!(fetcher.sources().identity(&apt).await.is_err());
    let requests = proxy.requests();
    assert!(
        requests
            .iter()
            .any(|request| request.target == "http://archive.test/debian/dists/bookworm/InRelease"),
        "{requests:?}"
    );
}

/// The archive has a certificate from the site's own authority and requires a client certificate.
#[tokio::test]
async fn apt_presents_and_verifies_certificates_of_the_site() {
    let ours = Authority::new();
    ours.issue("server", "IP:127.0.0.1, DNS:archive.test", LATER);
    ours.issue("client", "DNS:farrier.test", LATER);
    // apt uses the second host's name, which only the proxy can resolve.
    for name in ["127.0.0.1", "archive.test"] {
        let archive = TlsArchive::start(&ours);
        let proxy = Tunnels::start(archive.host().to_owned()).await;
        let read = async |client: bool| {
            let mut host = json!({"host": name, "caFile": "ca.pem"});
            if client {
                host["clientCertificate"] = json!("client.pem");
                host["clientKey"] = json!({"file": "client.key"});
            }
            fs::write(ours.directory.path().join("password"), "secret").unwrap();
            let login = json!({"user": "me", "password": {"file": "password"}});
            let proxy = json!({"https": format!("http://{}", proxy.host), "login": login});
            let site = json!({"hosts": [host], "proxy": proxy});
            let directory = tempfile::tempdir().unwrap();
            let cache = Cache::open(directory.path().join("cache")).unwrap();
            let fetcher =
                Fetcher::new(cache, FetchOptions::default()).with_net(net(site, ours.directory.path(), true));
            let source = json!({"name": "x", "from": {"apt": {
                "package": "x-dkms", "suites": ["stable"], "components": ["main"],
                "mirror": format!("https://{name}:{}/", archive.port()), "signedBy": archive.keyring(),
            }}});
            let source: SourceSpec = serde_json::from_value(source).unwrap();
            let found = fetcher.sources().fetch(&source).await?;
            Ok::<_, FetchError>(fs::read_to_string(found.root.join("usr/src/x-1.0/x.c")).unwrap())
        };
        assert_eq!(
            read(true).await.map_err(|error| error_chain(&error)),
            Ok("int x;\n".to_owned()),
            "{name}"
        );
        assert_eq!(proxy.opened() > 0, name == "archive.test", "{name}");
        assert!(matches!(read(false).await, Err(FetchError::Program { .. })), "{name}");
    }
}

/// Such a package is not built under the identity of its predecessor.
#[tokio::test]
async fn a_package_that_is_published_again_under_its_version_is_planned_again() {
    let ours = Authority::new();
    ours.issue("server", "IP:127.0.0.1", LATER);
    ours.issue("client", "DNS:farrier.test", LATER);
    let archive = TlsArchive::start(&ours);
    let host = json!({"host": "127.0.0.1", "caFile": "ca.pem", "clientCertificate": "client.pem",
        "clientKey": {"file": "client.key"}});
    let directory = tempfile::tempdir().unwrap();
    let fetcher = Fetcher::new(Cache::open(directory.path().to_owned()).unwrap(), FetchOptions::default())
        .with_net(net(json!({"hosts": [host]}), ours.directory.path(), false));
    let source = json!({"name": "x", "from": {"apt": {
        "package": "x-dkms", "suites": ["stable"], "components": ["main"],
        "mirror": format!("https://{}/", archive.host()), "signedBy": archive.keyring(),
    }}});
    let source: SourceSpec = serde_json::from_value(source).unwrap();
    let planned = fetcher.sources().identity(&source).await.unwrap();

    archive.publish(&[("stable", vec![Deb::x_dkms("int y;\n")])]);
    // Without its lists farrier fetches the new ones; the record of the search is still fresh.
    fs::remove_dir_all(directory.path().join("apt")).unwrap();
    let error = fetcher.sources().fetch(&source).await.unwrap_err();
    assert!(matches!(error, FetchError::Checksum { .. }), "{}", error_chain(&error));
    let found = fetcher.sources().fetch(&source).await.unwrap();
    assert_ne!(found.origin, planned.identity);
    assert_eq!(fs::read_to_string(found.root.join("usr/src/x-1.0/x.c")).unwrap(), "int y;\n");
}

fn farrier(arguments: &[&str]) -> (Option<i32>, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_farrier")).args(arguments).output().unwrap();
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

#[test]
fn cli_errors_name_the_request_and_the_forbidden_host() {
    let directory = tempfile::tempdir().unwrap();
    let (definitions, cache) = (directory.path().join("definitions"), directory.path().join("cache"));
    fs::create_dir(&definitions).unwrap();
    let site = "apiVersion: farrier.dev/v1alpha1\nkind: Site\nmetadata: {name: here}\nspec:\n  hosts: [{host: here.test}]\n";
    fs::write(definitions.join("site.yaml"), site).unwrap();
    let arguments =
        ["--offline", "--definitions", definitions.to_str().unwrap(), "--cache-dir", cache.to_str().unwrap()];
    let fetch = ["headers", "fetch", "--kernel", "6.1.0-1-amd64", "--os", "debian", "--os-version", "12"];
    let (code, stderr) = farrier(&[&arguments[..], &fetch].concat());
    assert_eq!(code, Some(2), "{stderr}");
    assert!(
        stderr.contains("error: apt for suite bookworm") && stderr.contains("which --offline forbids"),
        "{stderr}"
    );
    assert!(stderr.contains("hint: if farrier may use it, add `- host: "), "{stderr}");

    fs::write(definitions.join("site.yaml"), site.replace("here.test", "https://here.test/")).unwrap();
    let (code, stderr) = farrier(&[&arguments[..], &fetch].concat());
    assert_eq!(code, Some(2), "{stderr}");
    assert!(stderr.contains("site.yaml:5:18: \"https://here.test/\" is not a host"), "{stderr}");
}
