//! Authorization at a registry and its token server, and farrier's handling of refusals.

use super::*;

fn options(credentials: CredentialFile) -> RegistryOptions {
    RegistryOptions { credentials: credentials.into(), ..RegistryOptions::default() }
}

/// Returns a 401 that names the host's own token server.
fn refusal(host: &str) -> Answer {
    answer(401, "").header("WWW-Authenticate", format!(r#"Bearer realm="http://{host}/token""#))
}

fn basic(password: &str) -> String {
    use base64::Engine as _;
    format!("Basic {}", base64::engine::general_purpose::STANDARD.encode(format!("{USER}:{password}")))
}

#[tokio::test]
async fn an_expired_token_is_not_sent_again() {
    let fake = FakeHttp::start_with(|host| {
        let token = |token: &str| answer(200, format!(r#"{{"token":"{token}","expires_in":11}}"#));
        let tags = || answer(200, TAGS);
        vec![refusal(host), token("1"), tags(), refusal(host), token("2"), tags()]
    })
    .await;
    let (registry, repository) = (plain(), repository(&fake.host, "x"));
    registry.tags(&repository).await.unwrap();
    // farrier renews tokens ten seconds before they expire.
    tokio::time::sleep(Duration::from_millis(1100)).await;
    registry.tags(&repository).await.unwrap();
    let requests = fake.requests();
    let authorizations: Vec<_> = requests.iter().map(|request| request.header("authorization")).collect();
    assert_eq!(authorizations, [None, None, Some("Bearer 1"), None, None, Some("Bearer 2")]);
}

#[tokio::test]
async fn a_token_with_a_short_life_is_used_at_first() {
    let fake = FakeHttp::start_with(|host| {
        let token = answer(200, r#"{"token":"1","expires_in":5}"#);
        vec![refusal(host), token, answer(200, TAGS), answer(200, TAGS)]
    })
    .await;
    let (registry, repository) = (plain(), repository(&fake.host, "x"));
    registry.tags(&repository).await.unwrap();
    registry.tags(&repository).await.unwrap();
    assert_eq!(fake.requests()[3].header("authorization"), Some("Bearer 1"));
}

#[tokio::test]
async fn a_mount_asks_for_a_token_of_both_repositories() {
    let blob = Digest::of(b"blob");
    let pull = "repository%3Adrivers%2Fbase%3Apull";
    let push = "repository%3Adrivers%2Fx%3Apull%2Cpush";
    for identity_token in [false, true] {
        let fake = FakeHttp::start_with(|host| {
            let token = |token: &str| answer(200, format!(r#"{{"token":"{token}","expires_in":300}}"#));
            let pushed = [refusal(host), token("push"), answer(201, "")];
            let mounted = [refusal(host), token("both"), answer(201, ""), answer(201, "")];
            pushed.into_iter().chain(mounted).collect()
        })
        .await;
        let directory = tempfile::tempdir().unwrap();
        let credentials = if identity_token {
            let file = directory.path().join("config.json");
            let entry = serde_json::json!({"auth": "", "identitytoken": "refresh"});
            fs::write(&file, serde_json::json!({"auths": {&fake.host: entry}}).to_string()).unwrap();
            CredentialFile::new(Some(file))
        } else {
            login(directory.path(), &fake.host, PASSWORD)
        };
        let registry = remote(&options(credentials));
        let [from, to] = ["drivers/base", "drivers/x"].map(|path| repository(&fake.host, path));
        let image = assembled(None, &[]);
        let kind = media_type::OCI_MANIFEST;
        registry.push_manifest(&to, &tag("1"), kind, &image.manifest).await.unwrap();
        assert!(registry.mount_blob(&to, &blob, &from).await.unwrap());
        assert!(registry.mount_blob(&to, &blob, &from).await.unwrap());
        let requests = fake.requests();
        let asked = &requests[4];
        if identity_token {
            let form = String::from_utf8_lossy(&asked.body);
            assert!(form.contains(&format!("scope={push}+{pull}")), "{form}");
        } else {
            assert_eq!(asked.target, format!("/token?scope={push}&scope={pull}"));
        }
        let mounts = [3, 5, 6].map(|at: usize| requests[at].header("authorization"));
        assert_eq!(mounts, [None, Some("Bearer both"), Some("Bearer both")]);
    }
}

#[tokio::test]
async fn a_blob_that_may_not_be_read_where_it_is_is_not_mounted() {
    let blob = Digest::of(b"blob");
    let refusals: [fn(&str) -> Vec<Answer>; 5] = [
        |host| vec![refusal(host), answer(200, r#"{"token":"1"}"#), refusal(host)],
        |host| vec![refusal(host), answer(403, "not both of them")],
        |_| vec![answer(403, "")],
        // Harbor does not accept each name (Harbor issue 22078).
        |_| vec![answer(400, "invalid repository name")],
        |_| vec![answer(404, "")],
    ];
    for script in refusals {
        for (path, is_error) in [("drivers/base", false), ("drivers/x", true)] {
            let fake = FakeHttp::start_with(script).await;
            let (from, to) = (repository(&fake.host, path), repository(&fake.host, "drivers/x"));
            let outcome = plain().mount_blob(&to, &blob, &from).await;
            match outcome {
                Ok(mounted) => assert!(!mounted && !is_error),
                Err(error) => assert!(is_error && !error.is_transient(), "{error:?}"),
            }
        }
    }
}

/// ECR's passwords expire after twelve hours, and ECR then answers 403.
#[tokio::test]
async fn a_password_that_is_refused_is_read_again() {
    let expired = r#"{"errors":[{"code":"DENIED","message":"Your authorization token has expired"}]}"#;
    let manifest = String::from_utf8(assembled(None, &[]).manifest).unwrap();
    let fake = FakeHttp::start_with(|_| {
        let challenge = || answer(401, "").header("WWW-Authenticate", r#"Basic realm="registry""#);
        vec![
            challenge(),
            answer(201, ""),
            answer(200, TAGS),
            answer(403, expired),
            answer(403, expired),
            answer(200, TAGS),
            answer(200, TAGS),
            answer(201, ""),
        ]
    })
    .await;
    let directory = tempfile::tempdir().unwrap();
    let file = login(directory.path(), &fake.host, "one");
    let registry = remote(&options(file));
    let repository = repository(&fake.host, "x");
    let version = tag("1");
    let put = || registry.push_manifest(&repository, &version, media_type::OCI_MANIFEST, manifest.as_bytes());
    put().await.unwrap();
    registry.tags(&repository).await.unwrap();
    // The password is unchanged, so the call fails at once with the registry's message.
    let error = registry.tags(&repository).await.unwrap_err();
    assert!(matches!(error, RegistryError::Denied { .. }), "{error:?}");
    assert!(error.to_string().ends_with("Your authorization token has expired"), "{error}");
    assert_eq!(fake.requests().len(), 4);
    // `login` writes a password of the same length to the same file.
    login(directory.path(), &fake.host, "two");
    registry.tags(&repository).await.unwrap();
    registry.tags(&repository).await.unwrap();
    put().await.unwrap();
    let requests = fake.requests();
    let sent: Vec<_> = requests.iter().map(|request| request.header("authorization")).collect();
    let [one, two] = ["one", "two"].map(basic);
    let (one, two) = (Some(one.as_str()), Some(two.as_str()));
    assert_eq!(sent, [None, one, one, one, one, two, two, two]);
}
