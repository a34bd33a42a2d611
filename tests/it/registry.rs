//! Registries and layouts with real components: Debian's docker-registry, skopeo and the Docker engine. A scripted server gives
//! answers that no real registry gives on request.

mod at_once;
mod authorization;
mod doctor;
mod quirks;
mod slow;
mod token_servers;

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::Arc,
    time::{Duration, Instant},
};

use farrier_core::{
    facts::media_type,
    image::{Digest, Repository, Version},
};
use farrier_net::{Net, NetOptions};
use farrier_store::registry::{
    CredentialFile, LayoutRegistry, Registry, RegistryError, RegistryOptions, RemoteRegistry, Retrying,
    Upload, hint,
};

use crate::support::{
    cutting_proxy::{Cut, CuttingProxy},
    fake_http::{Answer, FakeHttp, answer},
    registry_process::{PASSWORD, RegistryProcess, USER, Wants},
};
use oci::{Assembled, Assembly, Base, EntryKind, Layer, LayerWriter, assemble};
use tokio_util::sync::CancellationToken;

fn remote(options: &RegistryOptions) -> Arc<dyn Registry> {
    Arc::new(RemoteRegistry::new("test".to_owned(), options))
}

fn plain() -> Arc<dyn Registry> {
    remote(&RegistryOptions::default())
}

fn repository(host: &str, path: &str) -> Repository {
    format!("{host}/{path}").parse().unwrap()
}

fn tag(text: &str) -> Version {
    Version::Tag(text.parse().unwrap())
}

/// Writes a layer with one file of one mebibyte to `directory`.
fn layer(directory: &Path, name: &str) -> (PathBuf, Layer) {
    let path = directory.join(name);
    let mut content = vec![0; 1 << 20];
    for (at, byte) in content.iter_mut().enumerate() {
        *byte = (at.wrapping_mul(at) >> 9).to_le_bytes()[0] ^ name.as_bytes()[0];
    }
    let mut writer = LayerWriter::new(fs::File::create(&path).unwrap(), 0);
    let kind = EntryKind::File { size: content.len() as u64, content: &mut &content[..] };
    writer.entry(Path::new(name), 0o644, kind).unwrap();
    (path, writer.finish().unwrap().0)
}

fn assembled(base: Option<&Base>, layers: &[Layer]) -> Assembled {
    labelled(base, layers, &BTreeMap::from([("farrier.test".to_owned(), "yes".to_owned())]))
}

fn labelled(base: Option<&Base>, layers: &[Layer], labels: &BTreeMap<String, String>) -> Assembled {
    let notes = BTreeMap::from([("farrier.dev/os".to_owned(), "debian-12".to_owned())]);
    let env = BTreeMap::from([("A".to_owned(), "b".to_owned())]);
    assemble(&Assembly {
        base,
        entrypoint_layer: None,
        layers,
        entrypoint: &["driver-entrypoint".to_owned()],
        env: &env,
        labels,
        annotations: &notes,
        architecture: "amd64",
    })
    .unwrap()
}

/// Pushes a base of one layer and an image with one more layer. Returns the image and the uploads.
async fn push_two(
    registry: &dyn Registry,
    repository: &Repository,
    directory: &Path,
) -> Result<(Assembled, Vec<Upload>), RegistryError> {
    let lower = layer(directory, "lower");
    let upper = layer(directory, "upper");
    let base = assembled(None, std::slice::from_ref(&lower.1));
    let base = Base::parse(&base.manifest, &base.config, "amd64").unwrap();
    let image = assembled(Some(&base), std::slice::from_ref(&upper.1));
    let mut uploads = Vec::new();
    for (path, layer) in [&lower, &upper] {
        uploads.push(registry.push_blob(repository, &layer.digest, path).await?);
    }
    uploads.push(registry.push_bytes(repository, &image.config).await?);
    let pushed =
        registry.push_manifest(repository, &tag("1"), media_type::OCI_MANIFEST, &image.manifest).await?;
    assert_eq!(pushed, image.digest);
    Ok((image, uploads))
}

fn run(program: &str, arguments: &[&str]) -> String {
    let output =
        Command::new(program).args(arguments).output().unwrap_or_else(|e| panic!("run {program}: {e}"));
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn inspect(arguments: &[&str]) -> serde_json::Value {
    serde_json::from_str(&run("skopeo", &[&["inspect"], arguments].concat())).unwrap()
}

#[tokio::test]
async fn pushed_images_are_what_skopeo_sees_and_are_sent_once() {
    let server = RegistryProcess::start(Wants::default());
    let directory = tempfile::tempdir().unwrap();
    let repository = repository(&server.host, "drivers/mstflint");
    let registry = plain();
    assert!(registry.tags(&repository).await.unwrap().is_empty());
    assert!(registry.manifest(&repository, &tag("1")).await.unwrap().is_none());

    let (image, uploads) = push_two(registry.as_ref(), &repository, directory.path()).await.unwrap();
    assert!(uploads.iter().all(|upload| matches!(upload, Upload::Sent(1..))), "{uploads:?}");
    let seen = inspect(&["--tls-verify=false", &format!("docker://{repository}:1")]);
    assert_eq!(seen["Digest"], image.digest.as_str());
    assert_eq!(seen["Layers"].as_array().unwrap().len(), 2);
    assert_eq!(seen["Labels"]["farrier.test"], "yes");

    let posts = server.requests("POST");
    let (_, again) = push_two(registry.as_ref(), &repository, directory.path()).await.unwrap();
    assert_eq!(again, [Upload::Present; 3]);
    assert_eq!(server.requests("POST"), posts, "the second push started an upload");

    let stored =
        registry.manifest(&repository, &Version::Digest(image.digest.clone())).await.unwrap().unwrap();
    assert_eq!((stored.bytes, stored.media_type.as_str()), (image.manifest, media_type::OCI_MANIFEST));
    assert_eq!(registry.tags(&repository).await.unwrap(), ["1".parse().unwrap()]);
    assert!(!registry.has_blob(&repository, &Digest::of(b"absent")).await.unwrap());

    let out = directory.path().join("fetched");
    registry.fetch_blob(&repository, &image.config_digest, u64::MAX, &out).await.unwrap();
    assert_eq!(fs::read(&out).unwrap(), image.config);
}

#[tokio::test]
async fn docker_pulls_what_was_pushed() {
    let server = RegistryProcess::start(Wants::default());
    let directory = tempfile::tempdir().unwrap();
    let repository = repository(&server.host, "farrier-test/pull");
    let (image, _) = push_two(plain().as_ref(), &repository, directory.path()).await.unwrap();
    let reference = format!("{repository}@{}", image.digest);
    run("docker", &["pull", "--quiet", &reference]);
    let config = run("docker", &["image", "inspect", "--format", "{{json .Config}}", &reference]);
    run("docker", &["image", "rm", &reference]);
    let config: serde_json::Value = serde_json::from_str(&config).unwrap();
    assert_eq!(config["Entrypoint"][0], "driver-entrypoint");
    assert_eq!(config["Env"][0], "A=b");
}

#[tokio::test]
async fn layouts_are_what_skopeo_reads() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().join("images");
    let layout = LayoutRegistry::new(root.clone());
    let repository: Repository = "drivers/mstflint".parse().unwrap();
    let (image, _) = push_two(&layout, &repository, directory.path()).await.unwrap();
    let (_, again) = push_two(&layout, &repository, directory.path()).await.unwrap();
    assert_eq!(again, [Upload::Present; 3]);
    let kernel = tag("25.10-1.2.8.0-0-6.1.0-47-amd64-debian12-amd64");
    layout.push_manifest(&repository, &kernel, media_type::OCI_MANIFEST, &image.manifest).await.unwrap();
    for version in [&tag("1"), &kernel] {
        let seen = inspect(&[&format!("oci:{}:{repository}{version}", root.display())]);
        assert_eq!(seen["Digest"], image.digest.as_str());
    }
    // The copy reads and hashes every blob.
    let (from, to) = (format!("oci:{}:{repository}:1", root.display()), directory.path().join("copy"));
    run("skopeo", &["copy", "--quiet", &from, &format!("dir:{}", to.display())]);
}

fn login(directory: &Path, host: &str, password: &str) -> CredentialFile {
    use base64::Engine as _;
    let auth = base64::engine::general_purpose::STANDARD.encode(format!("{USER}:{password}"));
    let path = directory.join(format!("config-{}.json", password.len()));
    fs::write(&path, serde_json::json!({"auths": {host: {"auth": auth}}}).to_string()).unwrap();
    CredentialFile::new(Some(path))
}

#[tokio::test]
async fn certificates_and_passwords() {
    let server = RegistryProcess::start(Wants { tls: true, password: true, ..Wants::default() });
    let directory = tempfile::tempdir().unwrap();
    let repository = repository(&server.host, "drivers/x");
    let ask = |credentials: CredentialFile, ca_file: Option<PathBuf>| {
        let net = Net::new(NetOptions { ca_file, ..NetOptions::default() }).unwrap();
        let registry = remote(&RegistryOptions { credentials: credentials.into(), net });
        let repository = repository.clone();
        async move { registry.tags(&repository).await }
    };
    let right = login(directory.path(), &server.host, PASSWORD);

    let error = ask(right.clone(), None).await.unwrap_err();
    assert!(matches!(error, RegistryError::Unreachable { .. }), "{error:?}");
    assert!(!error.is_transient(), "{error:?}");
    assert!(hint(&error).unwrap().contains("--ca-file"), "{:?}", hint(&error));

    let error = ask(CredentialFile::default(), Some(server.ca_file())).await.unwrap_err();
    assert!(matches!(error, RegistryError::Denied { .. }), "{error:?}");
    assert!(hint(&error).unwrap().starts_with(&format!("run `docker login {}`", server.host)));
    let wrong = login(directory.path(), &server.host, "hammer");
    let error = ask(wrong, Some(server.ca_file())).await.unwrap_err();
    assert!(matches!(error, RegistryError::Denied { .. }) && !error.is_transient(), "{error:?}");
    assert!(!error.to_string().contains("hammer"), "{error}");

    assert!(ask(right.clone(), Some(server.ca_file())).await.unwrap().is_empty());
    let net = Net::new(NetOptions { ca_file: Some(server.ca_file()), ..NetOptions::default() }).unwrap();
    let options = RegistryOptions { credentials: right.into(), net };
    push_two(remote(&options).as_ref(), &repository, directory.path()).await.unwrap();
}

#[tokio::test]
async fn a_registry_that_is_not_running() {
    let mut server = RegistryProcess::start(Wants::default());
    let repository = repository(&server.host, "x");
    let registry = plain();
    registry.tags(&repository).await.unwrap();
    server.stop();
    // One that has answered before is being restarted; a new client cannot tell.
    let error = registry.tags(&repository).await.unwrap_err();
    assert!(matches!(error, RegistryError::Unreachable { .. }) && error.is_transient(), "{error:?}");
    let error = plain().tags(&repository).await.unwrap_err();
    assert!(matches!(error, RegistryError::Refused { .. }) && error.is_unreachable(), "{error:?}");
}

/// A connection that breaks during the handshake, as while a registry restarts, does not mean that the registry has no TLS.
#[tokio::test]
async fn a_registry_whose_first_connection_breaks_is_asked_over_tls_again() {
    let server = RegistryProcess::start(Wants { tls: true, ..Wants::default() });
    let proxy = CuttingProxy::before(&server.host, &[Cut::After(10)]).await;
    let net = Net::new(NetOptions { ca_file: Some(server.ca_file()), ..NetOptions::default() }).unwrap();
    let registry = remote(&RegistryOptions { net, ..RegistryOptions::default() });
    let repository = repository(&proxy.host, "x");
    assert!(registry.tags(&repository).await.is_err());
    assert!(registry.tags(&repository).await.unwrap().is_empty());
}

async fn tags_of(script: Vec<Answer>) -> (Vec<Result<usize, RegistryError>>, FakeHttp) {
    let calls = script.len();
    let fake = FakeHttp::start(script).await;
    let registry = plain();
    let mut results = Vec::new();
    for _ in 0..calls {
        results.push(registry.tags(&repository(&fake.host, "drivers/x")).await.map(|tags| tags.len()));
    }
    (results, fake)
}

const TAGS: &str = r#"{"name":"drivers/x","tags":["1","2","not/a tag"]}"#;

#[tokio::test]
async fn server_faults_are_transient_and_refusals_are_not() {
    let denied = r#"{"errors":[{"code":"DENIED","message":"not for you"}]}"#;
    let script =
        vec![answer(500, "oops"), answer(429, ""), answer(408, ""), answer(403, denied), answer(200, TAGS)];
    let (results, _) = tags_of(script).await;
    for (result, wanted) in results.iter().zip([500, 429, 408]) {
        let error = result.as_ref().unwrap_err();
        assert!(matches!(error, RegistryError::Server { status, .. } if *status == wanted), "{error:?}");
        assert!(error.is_transient());
    }
    let error = results[3].as_ref().unwrap_err();
    assert!(!error.is_transient() && error.to_string().ends_with("DENIED: not for you"), "{error}");
    assert_eq!(*results[4].as_ref().unwrap(), 2);
}

#[tokio::test]
async fn garbage_is_quoted_in_printable_form() {
    let page = "<html>\x1b[2J\r\n<h1>Welcome to the hotel</h1>".to_owned() + &"x".repeat(10_000);
    let fake = FakeHttp::start(vec![answer(200, &page), answer(200, &page), answer(302, "")]).await;
    let repository = repository(&fake.host, "drivers/x");
    let registry = plain();
    let errors = [
        registry.tags(&repository).await.unwrap_err(),
        registry.manifest(&repository, &tag("1")).await.unwrap_err(),
        registry.manifest(&repository, &tag("1")).await.unwrap_err(),
    ];
    for error in errors {
        assert!(matches!(error, RegistryError::Protocol { .. }) && !error.is_transient(), "{error:?}");
        let text = error.to_string();
        assert!(text.len() < 400 && !text.chars().any(char::is_control), "{text:?}");
    }
}

#[tokio::test]
async fn content_that_belies_its_digest() {
    let wanted = Digest::of(b"wanted");
    let fake = FakeHttp::start_with(|_| {
        vec![
            answer(200, "something else"),
            answer(200, r#"{"schemaVersion":2}"#),
            answer(200, r#"{"schemaVersion":2}"#).header("Docker-Content-Digest", Digest::of(b"wanted")),
        ]
    })
    .await;
    let repository = repository(&fake.host, "drivers/x");
    let directory = tempfile::tempdir().unwrap();
    let registry = plain();
    let blob = registry
        .fetch_blob(&repository, &wanted, u64::MAX, &directory.path().join("blob"))
        .await
        .unwrap_err();
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0, "a partial blob was left");
    let manifest = registry.manifest(&repository, &Version::Digest(wanted.clone())).await.unwrap_err();
    let tagged = registry.manifest(&repository, &tag("1")).await.unwrap_err();
    for error in [blob, manifest, tagged] {
        assert!(matches!(error, RegistryError::Digest { expected: ref e, .. } if *e == wanted), "{error:?}");
    }
}

/// The digest in the header is that of the manifest without its signatures.
#[tokio::test]
async fn an_image_of_dockers_first_schema_is_named() {
    let manifest = r#"{"schemaVersion":1,"name":"x","tag":"1","fsLayers":[],"history":[],"signatures":[]}"#;
    let signed = answer(200, manifest)
        .header("Content-Type", "application/vnd.docker.distribution.manifest.v1+prettyjws")
        .header("Docker-Content-Digest", Digest::of(b"without signatures"));
    let fake = FakeHttp::start(vec![signed]).await;
    let error = plain().manifest(&repository(&fake.host, "x"), &tag("1")).await.unwrap_err();
    assert!(!error.is_transient() && error.to_string().contains("Docker's schema 1"), "{error}");
}

#[tokio::test]
async fn a_blob_that_breaks_off() {
    let whole = Digest::of(b"whole");
    let fake = FakeHttp::start(vec![answer(200, "who").header("Content-Length", 5)]).await;
    let directory = tempfile::tempdir().unwrap();
    let to = directory.path().join("blob");
    let error = plain().fetch_blob(&repository(&fake.host, "x"), &whole, u64::MAX, &to).await.unwrap_err();
    assert!(error.is_transient(), "{error:?}");
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0, "a partial blob was left");
}

/// Starts a redirect target that answers with a challenge and its own token server.
async fn challenging(scheme: &str) -> FakeHttp {
    FakeHttp::start_with(|host| {
        let challenge = format!(r#"{scheme} realm="http://{host}/token""#);
        vec![
            answer(401, "words of an inner host").header("WWW-Authenticate", challenge),
            answer(200, r#"{"token":"theirs"}"#),
            answer(200, "content"),
        ]
    })
    .await
}

#[tokio::test]
async fn tokens_are_fetched_once_and_only_sent_to_the_registry() {
    let elsewhere = challenging("Bearer").await;
    let redirect = format!("http://{}/blob?signature=x", elsewhere.host);
    let fake = FakeHttp::start_with(|host| {
        let challenge = format!(r#"Bearer realm="http://{host}/token",service="registry""#);
        vec![
            answer(401, "").header("WWW-Authenticate", challenge),
            answer(200, r#"{"token":"abc","expires_in":300}"#),
            answer(200, TAGS),
            answer(200, TAGS),
            answer(307, "").header("Location", redirect),
        ]
    })
    .await;
    let directory = tempfile::tempdir().unwrap();
    let credentials = login(directory.path(), &fake.host, PASSWORD);
    let registry = remote(&RegistryOptions { credentials: credentials.into(), ..RegistryOptions::default() });
    let repository = repository(&fake.host, "drivers/x");
    registry.tags(&repository).await.unwrap();
    registry.tags(&repository).await.unwrap();
    let blob = directory.path().join("blob");
    let error = registry.fetch_blob(&repository, &Digest::of(b"content"), u64::MAX, &blob).await.unwrap_err();
    assert!(matches!(error, RegistryError::Denied { .. }), "{error:?}");
    assert!(error.to_string().ends_with("401 from 127.0.0.1, to which the registry refers"), "{error}");

    let requests = fake.requests();
    let authorizations: Vec<_> = requests.iter().map(|r| r.header("authorization")).collect();
    assert_eq!(authorizations[0], None);
    assert!(authorizations[1].unwrap().starts_with("Basic "));
    assert_eq!(authorizations[2..], [Some("Bearer abc"); 3]);
    assert_eq!(requests[1].target, "/token?scope=repository%3Adrivers%2Fx%3Apull&service=registry");
    let asked = elsewhere.requests();
    assert_eq!(asked.len(), 1, "the challenge of the redirect target was answered: {asked:?}");
    assert_eq!(asked[0].header("authorization"), None);
}

#[tokio::test]
async fn another_hosts_challenge_is_not_answered_with_the_registrys_password() {
    for scheme in ["Basic", "Bearer"] {
        let elsewhere = challenging(scheme).await;
        let redirect = format!("http://{}/manifest", elsewhere.host);
        let fake = FakeHttp::start(vec![answer(307, "").header("Location", &redirect)]).await;
        let directory = tempfile::tempdir().unwrap();
        let credentials = login(directory.path(), &fake.host, PASSWORD);
        let options = RegistryOptions { credentials: credentials.into(), ..RegistryOptions::default() };
        let error = remote(&options).manifest(&repository(&fake.host, "x"), &tag("1")).await.unwrap_err();
        assert!(matches!(error, RegistryError::Denied { .. }), "{error:?}");
        let asked = elsewhere.requests();
        assert!(asked.len() == 1 && asked[0].header("authorization").is_none(), "{asked:?}");
    }
}

/// A token server that redirects gets the refresh token; the redirect's target does not.
#[tokio::test]
async fn a_refresh_token_is_not_sent_on() {
    let elsewhere = FakeHttp::start(vec![answer(200, r#"{"access_token":"theirs"}"#)]).await;
    let redirect = format!("http://{}/token", elsewhere.host);
    for status in [307, 308] {
        let fake = FakeHttp::start_with(|host| {
            let challenge = format!(r#"Bearer realm="http://{host}/token""#);
            vec![
                answer(401, "").header("WWW-Authenticate", challenge),
                answer(status, "").header("Location", &redirect),
            ]
        })
        .await;
        let directory = tempfile::tempdir().unwrap();
        let config = directory.path().join("config.json");
        let entry = serde_json::json!({"auth": "", "identitytoken": "refresh"});
        fs::write(&config, serde_json::json!({"auths": {&fake.host: entry}}).to_string()).unwrap();
        let credentials = CredentialFile::new(Some(config)).into();
        let registry = remote(&RegistryOptions { credentials, ..RegistryOptions::default() });
        let error = registry.tags(&repository(&fake.host, "x")).await.unwrap_err();
        assert!(error.to_string().contains("must not receive the request body"), "{error}");
        assert!(String::from_utf8_lossy(&fake.requests()[1].body).contains("refresh_token=refresh"));
    }
    assert_eq!(elsewhere.requests().len(), 0);
}

/// Text from another host must not reach readers of a build's status, because farrier may reach hosts that they cannot.
#[tokio::test]
async fn another_hosts_words_are_not_quoted() {
    let page = "words of an inner host";
    for status in [200, 400, 403, 404, 500] {
        let elsewhere = FakeHttp::start(vec![answer(status, page), answer(status, page)]).await;
        let sent_on = || answer(307, "").header("Location", format!("http://{}/inner", elsewhere.host));
        let fake = FakeHttp::start(vec![sent_on(), sent_on()]).await;
        let (registry, repository) = (plain(), repository(&fake.host, "x"));
        let tags = registry.tags(&repository).await.map(|_| ());
        let manifest = registry.manifest(&repository, &tag("1")).await.map(|_| ());
        for error in [tags, manifest].into_iter().filter_map(Result::err) {
            assert!(!oci::error_chain(&error).contains("inner"), "{error}");
        }
        assert_eq!(elsewhere.requests().len(), 2, "{status}");
    }
    // Text from a token server that is not the registry's own is not quoted either.
    let tokens = FakeHttp::start(vec![answer(403, page)]).await;
    let challenge = format!(r#"Bearer realm="http://{}/token""#, tokens.host);
    let fake = FakeHttp::start(vec![answer(401, "").header("WWW-Authenticate", challenge)]).await;
    let error = plain().tags(&repository(&fake.host, "x")).await.unwrap_err();
    assert!(error.to_string().ends_with("its token server 127.0.0.1 answered 403"), "{error}");
}

#[tokio::test]
async fn a_registry_is_left_alone_for_as_long_as_it_asks() {
    let busy = |wait: &str| answer(429, "").header("Retry-After", wait);
    let fake = FakeHttp::start(vec![busy("1"), answer(200, TAGS)]).await;
    let registry = Retrying::new(plain(), CancellationToken::new());
    let since = Instant::now();
    assert_eq!(registry.tags(&repository(&fake.host, "x")).await.unwrap().len(), 2);
    assert!(since.elapsed() >= Duration::from_secs(1), "{:?}", since.elapsed());
    assert_eq!(fake.requests().len(), 2);

    // `Retry-After` exceeds the call's timeout: the call fails at once, and other calls send no request until then.
    let fake = FakeHttp::start(vec![busy("600"), answer(200, TAGS)]).await;
    for path in ["x", "y"] {
        let error = registry.tags(&repository(&fake.host, path)).await.unwrap_err();
        assert!(matches!(error, RegistryError::Server { status: 429, .. }), "{error:?}");
        assert!(error.to_string().contains("; retry after "), "{error}");
    }
    assert_eq!(fake.requests().len(), 1);
}

#[tokio::test]
async fn a_refused_token_is_renewed_once_and_asked_for_with_the_wider_scope_once() {
    let fake = FakeHttp::start_with(|host| {
        let challenge = format!(r#"Bearer realm="http://{host}/token""#);
        let refusal = || answer(401, "").header("WWW-Authenticate", &challenge);
        let token = |token| answer(200, format!(r#"{{"token":"{token}"}}"#));
        vec![refusal(), token(1), refusal(), refusal(), token(2), refusal(), refusal()]
    })
    .await;
    let error = plain().tags(&repository(&fake.host, "x")).await.unwrap_err();
    assert!(matches!(error, RegistryError::Denied { .. }), "{error:?}");
    let targets: Vec<_> = fake.requests().into_iter().map(|request| request.target).collect();
    let tokens = ["pull", "pull%2Cpush"].map(|scope| format!("/token?scope=repository%3Ax%3A{scope}"));
    assert_eq!([&targets[1], &targets[4]], [&tokens[0], &tokens[1]], "one token for each scope");
    assert_eq!(targets.len(), 6);
}

#[tokio::test]
async fn tags_come_in_pages_from_one_host() {
    let fake = FakeHttp::start(vec![
        answer(200, r#"{"tags":["1"]}"#).header("Link", r#"</v2/x/tags/list?n=1&last=1>; rel="next""#),
        // A registry behind a proxy names its inner address.
        answer(200, r#"{"tags":["2"]}"#)
            .header("Link", "<http://other.example/v2/x/tags/list?last=2>; rel=Next"),
        answer(200, r#"{"tags":["3"]}"#),
    ])
    .await;
    let tags = plain().tags(&repository(&fake.host, "x")).await.unwrap();
    assert_eq!(tags.len(), 3);
    let targets: Vec<_> = fake.requests().into_iter().map(|request| request.target).collect();
    assert_eq!(targets[1..], ["/v2/x/tags/list?n=1&last=1", "/v2/x/tags/list?last=2"]);
}

#[tokio::test]
async fn a_list_without_its_next_page_is_no_list() {
    let fake = FakeHttp::start(vec![
        answer(200, r#"{"tags":["1"]}"#).header("Link", r#"</v2/x/tags/list?last=1>; rel="next""#),
        answer(404, ""),
    ])
    .await;
    let error = plain().tags(&repository(&fake.host, "x")).await.unwrap_err();
    assert!(matches!(error, RegistryError::Protocol { .. }), "{error:?}");
}
